"""One training step, and what a loop of your own needs with it: optimizers, gradient norms, losses, documents.

Names are imported on first use (PEP 562), so that reading a configuration needs no torch.
"""

from typing import TYPE_CHECKING

from longspan.lazy import lazy_exports

if TYPE_CHECKING:
    from longspan.data.batch_documents import BatchDocuments as BatchDocuments, documents_of as documents_of
    from longspan.data.document import Document as Document
    from longspan.data.scored_document import ScoredDocument as ScoredDocument
    from longspan.data.shared_prefixes import SharedDocuments as SharedDocuments, share_prefixes as share_prefixes
    from longspan.model import disable_adapter as disable_adapter
    from longspan.model.experts.router import RouterCoefficients as RouterCoefficients
    from longspan.resolve.planner_config import PlannerConfig as PlannerConfig
    from longspan.train.document_log_probs import token_log_probs as token_log_probs
    from longspan.train.gradient_norm import clip_grad_norm as clip_grad_norm, grad_norm as grad_norm
    from longspan.train.loss import summed_cross_entropy as summed_cross_entropy
    from longspan.train.optim.offload_states import offload_optimizer_states as offload_optimizer_states
    from longspan.train.optim.optimizer import build_optimizer as build_optimizer
    from longspan.train.optim.schedule import Schedule as Schedule
    from longspan.train.rows.gather_documents import gather_documents as gather_documents
    from longspan.train.rows.read_rows import read_inputs_and_labels as read_inputs_and_labels
    from longspan.train.step import StepResult as StepResult, run_step as run_step
    from longspan.train.terms.collected_log_probs import TokenLogProbs as TokenLogProbs
    from longspan.train.terms.distillation import Distillation as Distillation
    from longspan.train.terms.document_loss import DocumentLoss as DocumentLoss
    from longspan.train.terms.loss_tokens import LossTokens as LossTokens
    from longspan.train.terms.micro_batch_loss import (
        MicroBatchLoss as MicroBatchLoss,
        MicroBatchTokens as MicroBatchTokens,
    )
    from longspan.train.terms.mtp import MtpLoss as MtpLoss
    from longspan.train.terms.scores import (
        TokenScores as TokenScores,
        reward_loss as reward_loss,
        score_loss as score_loss,
        token_scores as token_scores,
    )
    from longspan.train.terms.teacher_tables import (
        TeacherTables as TeacherTables,
        TokenTables as TokenTables,
        likeliest_tokens as likeliest_tokens,
    )

__getattr__, __dir__, __all__ = lazy_exports(__name__)
