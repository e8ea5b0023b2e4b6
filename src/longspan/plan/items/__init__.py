"""Items of documents, such as images: which rows they take, who encodes these rows, and who needs them."""

from longspan.plan.items.encoding_plan import (
    EncoderPlanning,
    ItemRows,
    ItemTable,
    MediaItem,
    ModalityPlan,
    NeededBy,
    Wave,
    plan_items,
)

__all__ = [
    "EncoderPlanning",
    "ItemRows",
    "ItemTable",
    "MediaItem",
    "ModalityPlan",
    "NeededBy",
    "Wave",
    "plan_items",
]
