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
    from longspan.comm import SequenceShard as SequenceShard
    from longspan.comm import World as World
    from longspan.comm import bind as bind
    from longspan.errors import LongspanError as LongspanError
    from longspan.evaluation import evaluate as evaluate
    from longspan.layout import Exchange as Exchange
    from longspan.layout import Layout as Layout
    from longspan.layout import Packing as Packing
    from longspan.layout import Partition as Partition
    from longspan.model import MultimodalModel as MultimodalModel
    from longspan.model import add_mtp as add_mtp
    from longspan.model import load_model as load_model
    from longspan.model import prepare as prepare
    from longspan.model import save_model as save_model
    from longspan.model import weights_by_name as weights_by_name
    from longspan.plan import AsyncPlanner as AsyncPlanner
    from longspan.plan import Cost as Cost
    from longspan.plan import Group as Group
    from longspan.plan import MicroBatch as MicroBatch
    from longspan.plan import Plan as Plan
    from longspan.plan import PlanOptions as PlanOptions
    from longspan.plan import plan_dynamic as plan_dynamic
    from longspan.plan import plan_fixed as plan_fixed
    from longspan.plan import plan_padded as plan_padded
    from longspan.train import Document as Document
    from longspan.train import DocumentLoss as DocumentLoss
    from longspan.train import PlannerConfig as PlannerConfig
    from longspan.train import gather_documents as gather_documents
    from longspan.train import run_step as run_step
    from longspan.train import token_log_probs as token_log_probs

__version__ = "0.4.0"
__getattr__, __dir__, __all__ = lazy_exports(__name__)
__all__ += ["__version__"]
