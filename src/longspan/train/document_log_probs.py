"""Log-probabilities of the tokens of a plan's documents, without gradients."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from longspan.comm import World
from longspan.errors import LossError
from longspan.model.kinds import score_columns
from longspan.plan import Plan
from longspan.train.passes import Passes, read_step_batches, run_passes
from longspan.train.rows.agreed_reading import text_digest
from longspan.train.step_inputs import check_step_arguments, check_temperature
from longspan.train.terms.step_terms import encoder_terms

if TYPE_CHECKING:
    from longspan.train.terms.collected_log_probs import TokenLogProbs


def token_log_probs(
    model: nn.Module,
    plan: Plan,
    documents: Any,
    world: World,
    loss_chunk_rows: int = 0,
    *,
    also: Sequence[str] = (),
    temperature: float = 1.0,
) -> "TokenLogProbs":
    """Compute the log-probability of each token of a plan's documents that has a label, on every rank; no gradient.

    >>> before = token_log_probs(model, plan_fixed(lengths, world.home, cp=4), documents, world)
    >>> before.of(3), before.sums[3]

    `also` names other numbers of the distribution that predicts each token: "entropy" (in nats), "top1" (1 where the
    token is the likeliest), "mean_logits" (over the vocabulary) and "log_sum_sq_probs" (log Σ p²).

    >>> token_log_probs(model, plan, documents, world, also=["entropy"]).value("entropy", 3)

    `temperature` divides logits before the softmax, so that all these numbers are of a sampler at that temperature.

    The model runs in evaluation mode, as by `run_step(…, backward=False)`, under any plan of these documents. All ranks
    call it together; it refuses what `run_step` refuses. Raises LossError for another name in `also`, CommError where
    ranks ask for different names.
    """
    from longspan.train.log_probs import check_value_names
    from longspan.train.terms.collected_log_probs import CollectedLogProbs

    also = check_value_names(also)
    check_temperature(temperature)
    inputs = check_step_arguments(model, plan, documents, world, backward=False)
    if score_columns(inputs.language_model):
        raise LossError(
            "the model makes scores, and no log-probabilities of tokens; use longspan.train.token_scores"
        )
    hint = "Give every rank the same names in the same order"
    world.control.compare_digests(text_digest(" ".join(also)), what="lists also=", hint=hint)
    terms = encoder_terms(inputs)
    batches = read_step_batches(inputs, terms, temperature)
    log_probs = CollectedLogProbs(plan.lengths, loss_chunk_rows, also, bases=plan.bases)
    run_passes(Passes.with_terms(inputs, terms, log_probs, temperature=temperature), batches)
    return log_probs.sum_over_ranks(world)
