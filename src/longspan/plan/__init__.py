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
    from longspan.plan.cost.machine import CostSettings as CostSettings, Machine as Machine
    from longspan.plan.cost.type_prices import AttentionCall as AttentionCall, TypePrice as TypePrice
    from longspan.plan.dynamic.planner import plan_dynamic as plan_dynamic
    from longspan.plan.form import (
        CHECKPOINT_POLICIES as CHECKPOINT_POLICIES,
        FixedMemory as FixedMemory,
        Form as Form,
    )
    from longspan.plan.items.encoder_shape import EncoderShape as EncoderShape
    from longspan.plan.memory.memory_choice import choose_memory as choose_memory
    from longspan.plan.memory.memory_plan import MemoryNeeds as MemoryNeeds, MemoryPlan as MemoryPlan
    from longspan.plan.memory.settings import (
        Bytes as Bytes,
        MemoryBudget as MemoryBudget,
        MemorySettings as MemorySettings,
    )
    from longspan.plan.micro_batch import (
        CommType as CommType,
        Group as Group,
        MicroBatch as MicroBatch,
        Mode as Mode,
        PartitionKind as PartitionKind,
    )
    from longspan.plan.plan import Plan as Plan, group_counts as group_counts
    from longspan.plan.plan_ahead import AsyncPlanner as AsyncPlanner
    from longspan.plan.plan_rows import plan_row as plan_row, read_plans as read_plans
    from longspan.plan.planners.fixed import plan_fixed as plan_fixed, plan_padded as plan_padded
    from longspan.plan.planners.options import PlanOptions as PlanOptions
    from longspan.plan.shape.model_shape import (
        ModelShape as ModelShape,
        model_flops as model_flops,
        peak_tflops as peak_tflops,
    )
    from longspan.plan.step_times import (
        Bound as Bound,
        Timeline as Timeline,
        lower_bound_seconds as lower_bound_seconds,
        slot_rows as slot_rows,
        timeline as timeline,
    )

__getattr__, __dir__, __all__ = lazy_exports(__name__)
