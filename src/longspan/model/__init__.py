"""Hugging Face models under a home: `prepare`, presets, loading and saving.

Names are imported on first use (PEP 562): the presets' names need neither torch nor transformers.
"""

from typing import TYPE_CHECKING

from longspan.lazy import lazy_exports

if TYPE_CHECKING:
    from longspan.model.adapters.disable_adapter import disable_adapter as disable_adapter
    from longspan.model.add_depths import add_mtp as add_mtp
    from longspan.model.load import load_model as load_model
    from longspan.model.multimodal.image_modules import video_tokens as video_tokens
    from longspan.model.multimodal.multimodal_model import Encoder as Encoder, MultimodalModel as MultimodalModel
    from longspan.model.multimodal.prepare_encoder import prepare_encoder as prepare_encoder
    from longspan.model.multimodal.take_apart import EncoderHome as EncoderHome
    from longspan.model.options import PrepareOptions as PrepareOptions
    from longspan.model.prepared import prepare as prepare
    from longspan.model.presets import PRESETS as PRESETS, preset_config as preset_config
    from longspan.model.saving.stock_folders import save_model as save_model
    from longspan.model.saving.whole_weights import weights_by_name as weights_by_name
    from longspan.model.score_heads import add_score_head as add_score_head, score_class as score_class
    from longspan.model.seams.call_rules import is_prepared as is_prepared
    from longspan.model.vision.image_inputs import ImageInput as ImageInput
    from longspan.model.vision.image_tokens import image_tokens as image_tokens
    from longspan.model.vision.videos import Video as Video

__getattr__, __dir__, __all__ = lazy_exports(__name__)
