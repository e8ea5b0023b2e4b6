"""Multi-token prediction in training: the loss of depths as a term (`mtp=` of `run_step`).

    gradient of   loss + weight / D · Σ_d  (sum of the losses of depth d) / (targets of depth d)        d = 1 … D

At depth d, row t of a document predicts token t + d + 1, so a document of n tokens has max(n − 1 − d, 0) targets there;
one with labels has those with a label. Targets are counted over all slots before the passes, so that a gradient is a
plain sum over slots, as the main loss's. A document's weights multiply its tokens' losses at every depth.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from longspan.data.document import NO_TARGET
from longspan.errors import LossError, ModelError, plural
from longspan.model.layers import mtp_depths
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.seams.call_rules import call_rules
from longspan.plain_text import short_text
from longspan.train.loss import CrossEntropy, Head
from longspan.train.passes import LossFn, Passes, Term
from longspan.train.rows.agreed_reading import text_digest
from longspan.train.rows.read_rows import LocalBatch
from longspan.train.step_inputs import StepInputs


@dataclass(frozen=True)
class MtpLoss:
    """The weight of the losses of multi-token prediction next to the loss of the next token.

    >>> run_step(model, plan, documents, world, optimizer, mtp=MtpLoss(weight=0.3)).mtp_losses

    `weight` times the mean of the depths' losses is added: 0.3, and 0.1 towards the end, in DeepSeek-V3. Raises
    LossError for a weight that is no number of at least 0.
    """

    weight: float = 0.3

    def __post_init__(self) -> None:
        weight: Any = self.weight
        if isinstance(weight, bool) or not isinstance(weight, Real) or not math.isfinite(weight) or weight < 0:
            raise LossError(f"the weight of an MtpLoss is {short_text(weight)}; give a number from 0: 0.3, say")


class DepthsTerm(Term):
    """The depths of multi-token prediction in one step; their losses enter the gradient, not the step's loss.

    Made by all ranks together. Raises ModelError for a model that has no depths or in which rows see later ones,
    LossError for an `mtp` that is no MtpLoss, CommError for ranks that were given different ones.
    """

    def __init__(self, mtp: Any, inputs: StepInputs, chunk_rows: int) -> None:
        """Check the depths and compare them with the other ranks."""
        model = inputs.language_model
        depths = model.depths if isinstance(model, PipelineModel) else len(mtp_depths(model))
        for prefix in set(inputs.plan.parents or ()) - {-1}:
            if getattr(inputs.documents[prefix], "ahead", 0) < depths:
                raise LossError(
                    f"the step has {plural(depths, 'depth')} of multi-token prediction (mtp=), which read tokens "
                    f"behind document {prefix}, a prefix that others share; call share_prefixes(documents, "
                    f"depths={depths}), or plan the documents before it"
                )
        if not isinstance(mtp, MtpLoss):
            raise LossError(f"mtp is {short_text(mtp)}; give MtpLoss(weight=0.3), or None")
        # FSDP2 puts this before the class's name.
        name = type(model).__name__.removeprefix("FSDP")
        if not depths:
            raise ModelError(
                f"mtp= was given and {name} has 0 depths of multi-token prediction; call longspan.add_mtp(model, "
                "depths=1) before prepare"
            )
        rules = call_rules(model)
        spans = ["a prefix"] if rules.prefix else [f"an {modality}" for modality in rules.in_spans]
        if spans:
            raise ModelError(
                f"mtp= was given, and rows of {' and '.join(spans)} see each other in {name}: at a depth a row would "
                "see later ones that hold the tokens it is to predict; leave mtp= out"
            )
        digest = text_digest(f"{mtp} {depths}")
        hint = "Give every rank the same mtp=, or none, and a model with as many depths"
        inputs.world.control.compare_digests(digest, what="losses of multi-token prediction", hint=hint)
        self.depths: int = depths
        self._mtp = mtp
        self._model = model
        self._world = inputs.world
        self._cross_entropy = CrossEntropy(chunk_rows)
        self._targets: tuple[int, ...] = ()
        self._sums = torch.zeros(self.depths, dtype=torch.float64, device=self._world.device)

    def read(self, batches: Sequence[LocalBatch]) -> None:
        """Count the targets of each depth over all slots, by labels that last stages alone read; entered
        by all ranks.
        """
        reads_labels = not isinstance(self._model, PipelineModel) or any(stage.last for stage in self._model.stages)
        counted_batches = batches if reads_labels else ()
        local = [
            sum(int((batch.deeper[d].labels != NO_TARGET).sum()) for batch in counted_batches)
            for d in range(self.depths)
        ]
        world = self._world
        self._targets = tuple(map(int, world.control.sum_over_stages(local, "targets of multi-token prediction")))

    def extend_passes(self, passes: Passes) -> Passes:
        """Return passes whose loss has the depths' losses in its gradient; to be called after `read`, which counts
        targets.
        """
        mtp = self._mtp
        targets = self._targets
        divisor = passes.divisor
        # What the loss returns is divided by the step's divisor afterwards.
        shares = [mtp.weight / len(targets) * divisor / max(count, 1) for count in targets]
        return replace(passes, loss_fn=partial(self._add_depth_losses, passes.loss_fn, shares), depths=self.depths)

    def _add_depth_losses(
        self, main: LossFn, shares: Sequence[float], batch: LocalBatch, hidden: Tensor, head: Head, *deeper: Tensor
    ) -> Tensor:
        """The value is that of `main` alone; the gradient also has that of each depth's loss times its share.
        `deeper` are the hidden states (T, D) of each depth."""
        total = main(batch, hidden, head)
        for depth, (share, rows, states) in enumerate(zip(shares, batch.deeper, deeper, strict=True)):
            loss = self._cross_entropy(rows, states, head)
            self._sums[depth] += loss.detach()
            total = total + share * (loss - loss.detach())  # adds 0 to the value, and the gradient of share · loss
        return total

    def sums(self) -> Tensor:
        return self._sums

    def results(self, sums: Sequence[float]) -> dict[str, Any]:
        return {"mtp_losses": tuple(total / max(n, 1) for total, n in zip(sums, self._targets, strict=True))}
