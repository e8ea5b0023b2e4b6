"""Plans of a step: which slots work together on which documents (Plan), what that costs (Cost), and the planners that
make one from document lengths only. Integers and numpy; no torch.

>>> from longspan.layout import Layout
>>> plan = plan_fixed([900, 300, 20], Layout(ranks=8), cp=4, max_tokens_per_slot=512)
>>> len(plan.micro_batches), plan.tokens, plan.targets
(1, 1220, 1217)
"""

from typing import TYPE_CHECKING

from longspan.lazy import lazy_exports
from longspan.plan.cost.bound import Bound, lower_bound_seconds
from longspan.plan.cost.cost import Cost
from longspan.plan.cost.cost_changes import CostSettings
from longspan.plan.cost.links import Link
from longspan.plan.cost.machine import Machine
from longspan.plan.cost.model_flops import model_flops, peak_tflops
from longspan.plan.cost.type_price import AttentionCall, TypePrice
from longspan.plan.dynamic import plan_dynamic
from longspan.plan.items.encoder_shape import EncoderLoad, EncoderShape
from longspan.plan.micro_batch import CommType, Group, MicroBatch, Mode, PartitionKind
from longspan.plan.plan import Plan
from longspan.plan.plan_ahead import PlanAhead
from longspan.plan.plan_rows import group_counts, plan_row, read_plans
from longspan.plan.planners.fixed import plan_fixed, plan_padded
from longspan.plan.planners.options import PlanOptions
from longspan.plan.shape.model_shape import ModelShape
from longspan.plan.timeline import Timeline, predicted_seconds, slot_rows, timeline

if TYPE_CHECKING:  # of memory: imported on first use
    from longspan.plan.memory.bytes import Bytes as Bytes
    from longspan.plan.memory.choose import choose_memory as choose_memory
    from longspan.plan.memory.choose import longest_document as longest_document
    from longspan.plan.memory.memory_plan import MemoryNeeds as MemoryNeeds
    from longspan.plan.memory.memory_plan import MemoryPlan as MemoryPlan
    from longspan.plan.memory.parameters import reason_uncounted as reason_uncounted
    from longspan.plan.memory.seconds import added_seconds as added_seconds
    from longspan.plan.memory.settings import MEASURES as MEASURES
    from longspan.plan.memory.settings import FixedMemory as FixedMemory
    from longspan.plan.memory.settings import MemoryBudget as MemoryBudget
    from longspan.plan.memory.settings import MemorySettings as MemorySettings

__getattr__, __dir__, _ = lazy_exports(__name__)
__all__ = [
    "MEASURES",
    "AttentionCall",
    "Bound",
    "Bytes",
    "CommType",
    "Cost",
    "CostSettings",
    "EncoderLoad",
    "EncoderShape",
    "FixedMemory",
    "Group",
    "Link",
    "Machine",
    "MemoryBudget",
    "MemoryNeeds",
    "MemoryPlan",
    "MemorySettings",
    "MicroBatch",
    "Mode",
    "ModelShape",
    "PartitionKind",
    "Plan",
    "PlanAhead",
    "PlanOptions",
    "Timeline",
    "TypePrice",
    "added_seconds",
    "choose_memory",
    "group_counts",
    "longest_document",
    "lower_bound_seconds",
    "model_flops",
    "peak_tflops",
    "plan_dynamic",
    "plan_fixed",
    "plan_padded",
    "plan_row",
    "predicted_seconds",
    "read_plans",
    "reason_uncounted",
    "slot_rows",
    "timeline",
]
