"""Models with encoders: images and videos as items of documents, encoders under homes of their own, joined models.

>>> from longspan.multimodal import Encoder, MediaItem, MediaDocuments, MultimodalModel, prepare_encoder

`docs/bridge.md` and `docs/vision-models.md` show them in use. Names are imported on first use (PEP 562).
"""

from typing import TYPE_CHECKING

from longspan.lazy import lazy_exports

if TYPE_CHECKING:
    from longspan.data.item_documents import (
        MediaDocuments as MediaDocuments,
        items_at_placeholders as items_at_placeholders,
    )
    from longspan.model import (
        Encoder as Encoder,
        EncoderHome as EncoderHome,
        ImageInput as ImageInput,
        MultimodalModel as MultimodalModel,
        Video as Video,
        image_tokens as image_tokens,
        prepare_encoder as prepare_encoder,
        video_tokens as video_tokens,
    )
    from longspan.plan.items.item_table import MediaItem as MediaItem

__getattr__, __dir__, __all__ = lazy_exports(__name__)
