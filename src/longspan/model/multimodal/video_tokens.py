"""What a model takes for videos, once a small copy of it has been tried with them."""

from transformers import PreTrainedConfig

from longspan.errors import ModelError
from longspan.model.exactness.image_trial import reasons_against_images
from longspan.model.vision.videos import VideoTokens


def video_tokens(config: PreTrainedConfig) -> VideoTokens:
    """Return what a model of this configuration takes for videos, whose groups of frames are items as images are.

    Once for each configuration a small copy of the model is given videos, whole and as items. Raises ModelError where
    the two differ, and for a model without videos.

    >>> video_tokens(AutoConfig.from_pretrained("Qwen3-VL-8B")).rows((3, 4, 6))  # doctest: +SKIP
    [6, 6, 6]
    """
    tokens = VideoTokens.from_configuration(config)
    if reasons := reasons_against_images(config, videos=True):
        raise ModelError(
            f"{type(config).__name__} ({config.model_type}) cannot be given videos: {'; '.join(reasons)}; give frames "
            "as images"
        )
    return tokens
