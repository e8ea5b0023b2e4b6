"""The loss of multi-token prediction in a step: `mtp=` of `run_step`, for a model to which `add_mtp` gave depths.

    gradient of   loss + weight / D · Σ_d  (sum of the losses of depth d) / (targets of depth d)        d = 1 … D

At depth d, row t of a document predicts token t + d + 1, so a document of n tokens has max(n − 1 − d, 0) targets there,
of one with labels those that have one. Targets are counted over all slots before the passes, so that a gradient is a
plain sum over slots, as the main loss's. A document's weights multiply its tokens' losses at every depth.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from longspan.comm import World
from longspan.config.sections import RunConfig
from longspan.data.document import NO_TARGET
from longspan.errors import LossError, ModelError, shortened
from longspan.model.mtp.depths import depths_of
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.seams.call_rules import call_rules
from longspan.train.loss import CrossEntropy, Head
from longspan.train.passes import Measure
from longspan.train.reading.read_rows import LocalBatch


@dataclass(frozen=True)
class MtpLoss:
    """What the losses of multi-token prediction weigh beside the loss of the next token.

    >>> run_step(model, plan, documents, world, optimizer, mtp=MtpLoss(weight=0.3)).mtp_losses

    `weight` times the mean of the depths' losses is added: 0.3, and 0.1 towards the end, in DeepSeek-V3. Raises
    LossError for a weight that is no number from 0.
    """

    weight: float = 0.3

    def __post_init__(self) -> None:
        weight: Any = self.weight
        if isinstance(weight, bool) or not isinstance(weight, Real) or not math.isfinite(weight) or weight < 0:
            raise LossError(f"the weight of an MtpLoss is {shortened(weight)}; give a number from 0: 0.3, say")


def mtp_loss(config: RunConfig) -> MtpLoss | None:
    """What the steps of a run are given as `mtp=`: by its [mtp]; None without depths."""
    return MtpLoss(config.mtp.loss_weight) if config.mtp.depths else None


def check_mtp(mtp: MtpLoss | None, model: nn.Module, world: World) -> int:
    """How many depths a step of a model runs; entered by all ranks.

    Raises ModelError for a model that has none or in which rows see later ones, LossError for what is no MtpLoss,
    CommError for ranks that were given different ones.
    """
    if mtp is None:
        return 0
    if not isinstance(mtp, MtpLoss):
        raise LossError(f"mtp is {shortened(mtp)}; give MtpLoss(weight=0.3), or None")
    name = type(model).__name__.removeprefix("FSDP")
    depths = model.depths if isinstance(model, PipelineModel) else len(depths_of(model))
    if not depths:
        raise ModelError(
            f"mtp= was given and {name} has 0 depths of multi-token prediction; call longspan.add_mtp(model, depths=1) "
            "before prepare"
        )
    rules = call_rules(model)
    if seeing := ["a prefix"] if rules.prefix else [f"an {modality}" for modality in rules.in_spans]:
        raise ModelError(
            f"mtp= was given, and rows of {' and '.join(seeing)} see each other in {name}: at a depth a row would see "
            "later ones that hold the tokens it is to predict; leave mtp= out"
        )
    digest = hashlib.sha256(f"{mtp} {depths}".encode()).hexdigest()
    hint = "Give every rank the same mtp=, or none, and a model with as many depths"
    world.control.agree(digest, what="losses of multi-token prediction", hint=hint)
    return depths


def count_targets(batches: Sequence[LocalBatch], depths: int, model: nn.Module, world: World) -> tuple[int, ...]:
    """How many targets each depth has on all slots; entered by all ranks."""
    last = not isinstance(model, PipelineModel) or any(stage.last for stage in model.stages)
    counted = batches if last else ()
    local = [sum(int((batch.deeper[d].labels != NO_TARGET).sum()) for batch in counted) for d in range(depths)]
    return tuple(map(int, world.control.sum_over_stages(local, "targets of multi-token prediction")))


class WithDepths:
    """A step's measure beside which the losses of depths enter the gradient; they are kept in `sums`."""

    def __init__(
        self, measure: Measure, mtp: MtpLoss, targets: Sequence[int], *, divisor: float, chunk_rows: int, world: World
    ) -> None:
        # What is returned is divided by the step's divisor afterwards.
        self._shares = [mtp.weight / len(targets) * divisor / max(count, 1) for count in targets]
        self._measure, self._cross_entropy = measure, CrossEntropy(chunk_rows)
        self._targets = tuple(targets)
        self._sums = torch.zeros(len(targets), dtype=torch.float64, device=world.device)

    def __call__(self, batch: LocalBatch, hidden: Tensor, head: Head, *deeper: Tensor) -> Tensor:
        """The sum of the main losses of a micro-batch's rows, with the gradient of the depths' beside its own."""
        total = self._measure(batch, hidden, head)
        depths = zip(self._shares, batch.deeper, deeper, strict=True)
        for depth, (share, rows, states) in enumerate(depths):
            loss = self._cross_entropy(rows, states, head)
            self._sums[depth] += loss.detach()
            total = total + share * (loss - loss.detach())  # 0, but for the gradient
        return total

    def sums(self) -> list[float]:
        """The sum of this rank's losses of each depth."""
        return self._sums.tolist()

    def means(self, sums: Sequence[float]) -> tuple[float, ...]:
        """Each depth's loss, of sums over all ranks; 0 where it has no targets."""
        return tuple(total / max(count, 1) for total, count in zip(sums, self._targets, strict=True))
