"""Rows of one module's layout to the owners of another's: an encoder that feeds a language model on the same ranks."""

from typing import TYPE_CHECKING

from longspan.lazy import lazy_exports

if TYPE_CHECKING:
    from longspan.bridge.bridge import Bridge as Bridge
    from longspan.plan.items.item_table import MediaItem as MediaItem

__getattr__, __dir__, __all__ = lazy_exports(__name__)
