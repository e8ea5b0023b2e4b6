"""What a model says of videos, once a small copy of it was tried with some."""

from transformers import PreTrainedConfig

from longspan.errors import ModelError
from longspan.model.vision.image_trial import video_reasons
from longspan.model.vision.video_tokens import VideoTokens


def video_tokens(config: PreTrainedConfig) -> VideoTokens:
    """What a model of this configuration takes for videos, whose groups of frames are items as images are.

    Once for each configuration a small copy of the model is given videos, whole and as items. Raises ModelError where
    the two differ, and for a model without videos.

    >>> video_tokens(AutoConfig.from_pretrained("Qwen3-VL-8B")).rows((3, 4, 6))  # doctest: +SKIP
    [6, 6, 6]
    """
    tokens = VideoTokens.of(config)
    if reasons := video_reasons(config):
        raise ModelError(
            f"{type(config).__name__} ({config.model_type}) cannot be given videos: {'; '.join(reasons)}; give frames "
            "as images"
        )
    return tokens
