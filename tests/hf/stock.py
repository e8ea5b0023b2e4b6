"""Trainers of transformers and TRL in one process, and ours on several ranks: the same cases, and how far they differ.

A case is a function of a Run at the top of a module: it makes a trainer by `run.trainer`, and may train it. Models are
in float64; what stock sums in float32 is replaced in its process, unless `exact=False`.
"""

import gc
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from datasets import disable_progress_bars
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import TrainingArguments

from longspan.launch import fork_server
from longspan.testing import run_ranks
from tests.model.stock import without_trials
from tests.parity import shared_at_any_price
from tests.train.own_loss.test_families import casts_in_float64

TRAINERS = tuple(f"trl.trainer.{name}_trainer" for name in ("sft", "dpo", "kto", "grpo", "rloo", "reward"))
fork_server.PRELOAD = (*fork_server.PRELOAD, *(m for m in (*TRAINERS, "peft") if m not in fork_server.PRELOAD))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

TIMES = ("runtime", "per_second", "step_time", "preparation_time", "total_flos")
# The argument for recomputation: transformers 5.17 has only its older name.
RECOMPUTES = (
    "activation_checkpointing" if hasattr(TrainingArguments, "activation_checkpointing") else "gradient_checkpointing"
)
LOSS, METRIC = 1e-6, 1e-5
# Keys under which little is planned: what "auto" chooses has cases of its own.
CP2: dict[str, Any] = {"context_parallel_size": 2, "cp_comm_type": "p2p", "max_tokens_per_slot": "0"}
AUTO = {"cp_comm_type": "auto", "max_tokens_per_slot": "auto"}
SECONDS = 240  # in which a table of cases ends on a busy machine


@dataclass
class Run:
    folder: str
    ranks: int = 1
    longspan: dict[str, Any] | None = None
    rank: int = 0
    kept: dict[str, Any] = field(default_factory=dict)  # what a case wants compared too, by name

    def trainer(self, kind: type[Any], **keywords: Any) -> Any:
        if self.longspan is None:
            return kind(**keywords)
        from longspan.hf import LongspanArguments, with_longspan

        return with_longspan(kind)(**keywords, longspan=LongspanArguments(**self.longspan))

    def arguments(self, *, rows: int = 4, steps: int = 2, **changes: Any) -> dict[str, Any]:
        plain = {
            "output_dir": self.folder,
            "per_device_train_batch_size": rows // self.ranks,
            "per_device_eval_batch_size": rows // self.ranks,
            "max_steps": steps,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            RECOMPUTES: False,
            "disable_tqdm": True,
            "seed": 1,
        }
        return plain | changes


def train_with_shared_prompts(run: Run, train: Any) -> Any:
    """A trainer's run in which prompts of three tokens and more are shared, and how many prefixes a step had."""
    with shared_at_any_price() as found, casts_in_float64():
        trainer = train(run)
    run.kept["prefixes"] = max(found, default=0)
    return trainer


Case = Callable[[Run], Any]
Placed = Case | tuple[Case, dict[str, Any]]  # a case, and the keys of LongspanArguments that are its own


@dataclass(frozen=True)
class Ran:
    """What a case left: the Trainer's log, without times; weights by name; what the case kept."""

    logs: list[dict[str, float]]
    weights: dict[str, np.ndarray]
    kept: dict[str, Any]


def run_cases(
    rank: int, cases: Sequence[Placed], folder: str, ranks: int, longspan: dict[str, Any] | None, exact: bool
) -> list[Ran]:
    os.environ["CI"] = "1"  # TRL sends nothing about its use
    disable_progress_bars()
    gc.freeze()  # trainers collect garbage, and what the fork server imported is none
    torch.set_default_dtype(torch.float64 if exact else torch.float32)
    if exact and longspan is None:
        sum_in_float64()
    results = list[Ran]()
    for number, placed in enumerate(cases):
        case, own = placed if isinstance(placed, tuple) else (placed, {})
        keys = None if longspan is None else longspan | own
        with without_trials() if number else nullcontext():  # the first model is tried
            results.append(_run_case(case, Run(f"{folder}/{number}", ranks, keys, rank)))
    return results


def _run_case(case: Case, run: Run) -> Ran:
    trainer = case(run)
    if trainer is None:
        return Ran([], {}, run.kept)
    weights = dict[str, np.ndarray]()
    for name, p in trainer.model.named_parameters():
        if p.requires_grad:
            whole = (p.full_tensor() if isinstance(p, DTensor) else p).detach()
            plain = whole.float() if whole.dtype == torch.bfloat16 else whole  # NumPy has no bfloat16
            weights[name.replace("base_model.model.", "", 1)] = plain.numpy()
    logs = [{k: v for k, v in log.items() if not any(time in k for time in TIMES)} for log in trainer.state.log_history]
    if run.longspan is not None:
        trainer.end()
    return Ran(logs, weights if run.rank == 0 else {}, run.kept)


def name_of(placed: Placed) -> str:
    case = placed[0] if isinstance(placed, tuple) else placed
    return case.__name__ if hasattr(case, "__name__") else str(case)  # pyright: ignore[reportAttributeAccessIssue]


def stock_each(cases: Sequence[Placed], exact: bool = True) -> dict[str, Ran]:
    with tempfile.TemporaryDirectory() as folder:
        (ran,) = run_ranks(run_cases, 1, cases, folder, 1, None, exact, timeout=SECONDS)
    return dict(zip(map(name_of, cases), ran, strict=True))


def ours_each(cases: Sequence[Placed], longspan: dict[str, Any], ranks: int, exact: bool = True) -> dict[str, Ran]:
    """Cases by ours, which share processes: the first rank's, after all ranks were seen to log the same.

    What the other ranks kept stands in `kept["others"]`.
    """
    with tempfile.TemporaryDirectory() as folder:
        ran = run_ranks(run_cases, ranks, cases, folder, ranks, longspan, exact, timeout=SECONDS)
    assert all(mine.logs == first.logs for other in ran for mine, first in zip(other, ran[0], strict=True))
    for first, *others in zip(*ran, strict=True):
        first.kept["others"] = [other.kept for other in others]
    return dict(zip(map(name_of, cases), ran[0], strict=True))


def ours(case: Case, longspan: dict[str, Any], ranks: int, exact: bool = True) -> Ran:
    return ours_each([case], longspan, ranks, exact)[name_of(case)]


def compare_each(
    cases: Sequence[Placed], longspan: dict[str, Any], *, ranks: int = 2, exact: bool = True, **bounds: Any
) -> None:
    check_each(stock_each(cases, exact), ours_each(cases, longspan, ranks, exact), **bounds)


def check_each(expected: dict[str, Ran], found: dict[str, Ran], **bounds: Any) -> None:
    failed, own = dict[str, str](), {name: bounds.pop(name, {}) for name in found}
    for name, ran in found.items():
        try:
            check(expected[name], ran, **bounds | own[name])
        except AssertionError as error:
            failed[name] = str(error)
    assert not failed, failed


def check(
    expected: Ran, found: Ran, *, loss: float = LOSS, metric: float = METRIC, weights: float | None = 1e-8
) -> None:
    """Losses and metrics differ by at most these bounds, relative to a figure or, of one under 1, absolutely; `weights`
    relative to the norm of a weight.
    """
    errors = log_errors(expected.logs, found.logs)
    if weights is not None:
        assert expected.weights.keys() == found.weights.keys(), expected.weights.keys() ^ found.weights.keys()
        errors["weights"] = max(
            float(np.linalg.norm(found.weights[n] - w) / max(np.linalg.norm(w), 1e-3))
            for n, w in expected.weights.items()
        )
    for name, error in errors.items():
        bound = weights if name == "weights" else loss if name.endswith("loss") else metric
        assert bound is not None and error <= bound, (name, error, bound, errors)


def log_errors(expected: list[dict[str, float]], found: list[dict[str, float]]) -> dict[str, float]:
    found = [{k: v for k, v in log.items() if not k.endswith("_token_loss")} for log in found]
    assert [log.keys() for log in expected] == [log.keys() for log in found], (expected, found)
    errors: dict[str, float] = {}
    for one, other in zip(expected, found, strict=True):
        for name, value in one.items():
            error = abs(other[name] - value) / max(1.0, abs(value))
            errors[name] = max(errors.get(name, 0.0), error if math.isfinite(error) else math.inf)
    return errors


def sum_in_float64() -> None:
    import trl.trainer.utils as head
    from transformers import trainer
    from transformers.loss import loss_utils

    def causal_loss(
        logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **_: Any
    ) -> Tensor:
        scores, ids = logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1)
        if num_items_in_batch is None:
            return F.cross_entropy(scores, ids)
        return F.cross_entropy(scores, ids, reduction="sum") / num_items_in_batch

    loss_utils.LOSS_MAPPING["ForCausalLM"] = trainer.ForCausalLMLoss = causal_loss  # compared by identity
    head._ChunkedLogProbFunction = DenseHead


class DenseHead:
    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        _chunk: int,
        softcap: float | None,
        scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[Tensor | None, ...]:
        logits = F.linear(hidden, weight, bias) * scale
        logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
        log_probs = logits.log_softmax(-1)
        more = {
            "entropy": -(log_probs.exp() * log_probs).sum(-1),
            "log_sum_sq_probs": (2 * log_probs.detach()).logsumexp(-1),
            "mean_logits": logits.detach().mean(-1),
            "is_top1": logits.argmax(-1) == targets,
        }
        chosen = log_probs.gather(-1, targets[:, None])[:, 0]
        return chosen, *(value if name in outputs else None for name, value in more.items())
