"""Rows of one module's layout to the owners of another's: an encoder that feeds a language model on the same ranks."""

from longspan.bridge.bridge import Bridge
from longspan.bridge.item_documents import ItemDocuments, items_at_placeholders
from longspan.plan.items import Item

__all__ = ["Bridge", "Item", "ItemDocuments", "items_at_placeholders"]
