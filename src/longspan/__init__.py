"""Train Hugging Face models on long documents: exact context parallelism, planned for each step.

Names are imported on first use (PEP 562), so that planning never imports torch:

>>> from longspan import Layout, plan_fixed
>>> plan = plan_fixed([900, 300, 20], Layout(ranks=8), cp=4, max_tokens_per_slot=512)
"""

from typing import TYPE_CHECKING

from longspan.lazy import lazy_exports

if TYPE_CHECKING:
    from longspan.attention import attend as attend
    from longspan.bridge import Bridge as Bridge
    from longspan.comm import SequenceShard as SequenceShard, World as World, bind as bind
    from longspan.errors import LongspanError as LongspanError
    from longspan.evaluation import evaluate as evaluate
    from longspan.layout import Exchange as Exchange, Layout as Layout, Packing as Packing, Partition as Partition
    from longspan.model import (
        MultimodalModel as MultimodalModel,
        add_mtp as add_mtp,
        load_model as load_model,
        prepare as prepare,
        save_model as save_model,
        weights_by_name as weights_by_name,
    )
    from longspan.plan import (
        AsyncPlanner as AsyncPlanner,
        Cost as Cost,
        Group as Group,
        MicroBatch as MicroBatch,
        Plan as Plan,
        PlanOptions as PlanOptions,
        plan_dynamic as plan_dynamic,
        plan_fixed as plan_fixed,
        plan_padded as plan_padded,
    )
    from longspan.train import (
        Document as Document,
        DocumentLoss as DocumentLoss,
        PlannerConfig as PlannerConfig,
        gather_documents as gather_documents,
        run_step as run_step,
        share_prefixes as share_prefixes,
        token_log_probs as token_log_probs,
    )

__version__ = "0.4.0"
__getattr__, __dir__, __all__ = lazy_exports(__name__)
__all__ += ["__version__"]
