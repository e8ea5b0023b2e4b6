"""Plans of a step: which slots work together on which documents (Plan), what that costs (Cost), and the planners that
make one from document lengths only. Integers and numpy; no torch. Names are imported on first use (PEP 562).

>>> from longspan.layout import Layout
>>> plan = plan_fixed([900, 300, 20], Layout(ranks=8), cp=4, max_tokens_per_slot=512)
>>> len(plan.micro_batches), plan.tokens, plan.targets
(1, 1220, 1217)
"""

from typing import TYPE_CHECKING

from longspan.lazy import lazy_exports

if TYPE_CHECKING:
    from longspan.plan.cost.cost import Cost as Cost
    from longspan.plan.cost.links import Link as Link
    from longspan.plan.cost.machine import AttentionCall as AttentionCall
    from longspan.plan.cost.machine import CostSettings as CostSettings
    from longspan.plan.cost.machine import Machine as Machine
    from longspan.plan.cost.machine import TypePrice as TypePrice
    from longspan.plan.dynamic.planner import plan_dynamic as plan_dynamic
    from longspan.plan.items.encoder_shape import EncoderShape as EncoderShape
    from longspan.plan.memory.memory_plan import MemoryNeeds as MemoryNeeds
    from longspan.plan.memory.memory_plan import MemoryPlan as MemoryPlan
    from longspan.plan.memory.memory_plan import choose_memory as choose_memory
    from longspan.plan.memory.settings import CHECKPOINT_POLICIES as CHECKPOINT_POLICIES
    from longspan.plan.memory.settings import Bytes as Bytes
    from longspan.plan.memory.settings import FixedMemory as FixedMemory
    from longspan.plan.memory.settings import MemoryBudget as MemoryBudget
    from longspan.plan.memory.settings import MemorySettings as MemorySettings
    from longspan.plan.micro_batch import CommType as CommType
    from longspan.plan.micro_batch import Group as Group
    from longspan.plan.micro_batch import MicroBatch as MicroBatch
    from longspan.plan.micro_batch import Mode as Mode
    from longspan.plan.micro_batch import PartitionKind as PartitionKind
    from longspan.plan.plan import Plan as Plan
    from longspan.plan.plan import group_counts as group_counts
    from longspan.plan.plan import plan_row as plan_row
    from longspan.plan.plan import read_plans as read_plans
    from longspan.plan.plan_ahead import AsyncPlanner as AsyncPlanner
    from longspan.plan.planners.fixed import plan_fixed as plan_fixed
    from longspan.plan.planners.fixed import plan_padded as plan_padded
    from longspan.plan.planners.options import PlanOptions as PlanOptions
    from longspan.plan.shape.model_shape import ModelShape as ModelShape
    from longspan.plan.shape.model_shape import model_flops as model_flops
    from longspan.plan.shape.model_shape import peak_tflops as peak_tflops
    from longspan.plan.step_times import Bound as Bound
    from longspan.plan.step_times import Timeline as Timeline
    from longspan.plan.step_times import lower_bound_seconds as lower_bound_seconds
    from longspan.plan.step_times import slot_rows as slot_rows
    from longspan.plan.step_times import timeline as timeline

__getattr__, __dir__, __all__ = lazy_exports(__name__)
