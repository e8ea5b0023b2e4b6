"""transformers' Trainer over plans equals stock in one process: losses, norms, rates, evaluations, weights."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from longspan.errors import CommError
from longspan.hf import steps
from tests.hf.stock import VOCABULARY, Ran, Run, compare, log_errors, model_of, ours, stock
from tests.mutation import Change, mutated

EXACT: dict[str, Any] = {"loss": 1e-10, "metric": 1e-10, "weights": 1e-10}
ROWS, STEPS = 8, 5  # a micro-batch of all ranks; the data has 6 micro-batches, the last of them short


@dataclass(frozen=True)
class Texts:
    """Rows of random ids, a third of each without a label; longer and shorter ones are padded together."""

    count: int
    seed: int = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> dict[str, list[int]]:
        random = np.random.default_rng([self.seed, row])
        ids = random.integers(3, VOCABULARY, random.integers(4, 50))
        labels = np.where(np.arange(len(ids)) < len(ids) // 3, -100, ids)
        return {"input_ids": ids.tolist(), "labels": labels.tolist()}


def pad(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Rows padded on the right."""
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(values: list[int], fill: int) -> list[int]:
        return values + [fill] * (longest - len(values))

    return {
        "input_ids": torch.tensor([padded(row["input_ids"], 0) for row in rows]),
        "labels": torch.tensor([padded(row["labels"], -100) for row in rows]),
        "attention_mask": torch.tensor([padded([1] * len(row["input_ids"]), 0) for row in rows]),
    }


def make(run: Run, kind: type[Any] = Trainer, *, rows: int = ROWS, more: Any = None, **changes: Any) -> Any:
    """A trainer of two epochs, with accumulation, warm-up, cosine, decay, clipping and evaluation."""
    settings: dict[str, Any] = {
        "num_train_epochs": 10,
        "gradient_accumulation_steps": 3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "eval_strategy": "steps",
        "eval_steps": 8,
        "include_num_input_tokens_seen": "all",
        "dataloader_drop_last": False,
    }
    args = TrainingArguments(**run.arguments(rows=rows, steps=STEPS) | settings | changes)
    parts = {"train_dataset": Texts(44), "eval_dataset": Texts(11, seed=1), "data_collator": pad}
    return run.trainer(kind, args=args, **{"model": model_of()} | parts | (more or {}))


def train(run: Run) -> Any:
    """Five steps: accumulation 3, six batches an epoch, the last short."""
    trainer = make(run, eval_steps=3)
    with_losses(trainer, run)
    trainer.train()
    return trainer


def with_losses(trainer: Any, run: Run) -> None:
    """Keep the loss of each batch as the step returns it, before it is rounded into the log."""
    step = trainer.training_step
    run.kept["losses"] = []

    def kept(*args: Any, **keywords: Any) -> Tensor:
        loss = step(*args, **keywords)
        assert loss.dtype == torch.float64, "the loss has the model's own precision"
        run.kept["losses"].append(loss.item())
        return loss

    trainer.training_step = kept


@cache
def one_process() -> Ran:
    return stock(train)


CP2 = {"context_parallel_size": 2, "eval_context_parallel_size": "1"}
DYNAMIC = {"planner": "dynamic", "max_tokens_per_slot": "64", "eval_max_tokens_per_slot": "0", "cp_comm_type": "p2p"}


@pytest.mark.parametrize(
    ("longspan", "ranks"),
    [
        pytest.param(CP2, 2, id="cp 2"),
        pytest.param(DYNAMIC, 4, id="dynamic"),
        pytest.param({"tp": 2}, 2, id="tp 2", marks=pytest.mark.whole),
        pytest.param({"tp": 2, **DYNAMIC}, 4, id="tp 2, dynamic", marks=pytest.mark.whole),
    ],
)
def test_equals_one_process(longspan: dict[str, Any], ranks: int) -> None:
    found = ours(train, longspan, ranks)
    np.testing.assert_allclose(found.kept["losses"], one_process().kept["losses"], rtol=1e-10)
    for name, error in log_errors(one_process().logs, found.logs).items():
        assert error < 1e-10, (name, error)
    for name, weight in one_process().weights.items():
        assert np.linalg.norm(found.weights[name] - weight) < 1e-10 * np.linalg.norm(weight), name


def count_passes(run: Run) -> Any:
    """Two steps, and how often a step ran with a backward pass, and how often only forward."""
    calls = run.kept["calls"] = {"backward": 0, "forward": 0}
    if run.longspan is not None:
        step, values = steps.run_step, steps.token_log_probs
        steps.run_step = lambda *a, **k: (calls.update(backward=calls["backward"] + 1), step(*a, **k))[1]
        steps.token_log_probs = lambda *a, **k: (calls.update(forward=calls["forward"] + 1), values(*a, **k))[1]
    trainer = make(run, eval_strategy="no", max_steps=2)
    trainer.train()
    return trainer


def test_the_cross_entropy_takes_one_pass() -> None:
    assert ours(count_passes, {"context_parallel_size": 2}, 2).kept["calls"] == {"backward": 2, "forward": 0}


class Weighted(Trainer):
    """A loss of the user's own: late tokens count more, by TRL's way to call a model."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean of (1 + 0.01 i) times the cross entropy of column i."""
        out = model(**inputs, fused_lm_head=True)
        weights = 1 + 0.01 * torch.arange(out.log_probs.shape[1], device=out.log_probs.device)
        loss = -(weights * out.log_probs).sum() / num_items_in_batch
        return (loss, out) if return_outputs else loss


class Halved(Trainer):
    """A loss of the user's own over the model's."""

    def compute_loss(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any
    ) -> Any:
        """Half of the model's loss."""
        out = model(**inputs)
        return (out["loss"] / 2, out) if return_outputs else out.loss / 2


def own_loss(run: Run) -> Any:
    """A loss by the values of tokens."""
    model_kind: Any = Weighted
    trainer = make(run, model_kind, max_steps=3, eval_strategy="no")
    if run.longspan is None:
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(trainer.model)
    trainer.train()
    return trainer


def halved_loss(run: Run) -> Any:
    """A loss over the model's."""
    trainer = make(run, Halved, max_steps=3, eval_strategy="no")
    trainer.train()
    return trainer


def weighted(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """The loss of Weighted, of logits where there are some, and of log-probabilities."""
    log_probs = outputs.get("log_probs")
    if log_probs is None:
        scores = outputs["logits"][:, :-1].log_softmax(-1)
        log_probs = scores.gather(-1, labels[:, 1:, None].clamp(min=0))[..., 0] * (labels[:, 1:] != -100)
    weights = 1 + 0.01 * torch.arange(log_probs.shape[1], device=log_probs.device)
    return -(weights * log_probs).sum() / (1 if num_items_in_batch is None else num_items_in_batch)


def loss_function(run: Run) -> Any:
    """A function of the user's own, which gets the labels apart; evaluations with and without metrics of logits."""
    more = {"compute_loss_func": weighted, "compute_metrics": count_rows}
    trainer = make(run, more=more, max_steps=3, eval_steps=2)
    trainer.train()
    return trainer


def count_rows(predicted: Any) -> dict[str, float]:
    """A metric that needs predictions."""
    return {"rows": len(predicted.predictions), "mean": float(np.abs(predicted.predictions).max())}


@pytest.mark.parametrize("case", [own_loss, halved_loss, loss_function])
def test_a_loss_of_the_users_own(case: Any) -> None:
    compare(case, {"context_parallel_size": 2}, **EXACT)


class Stopper(TrainerCallback):
    """Ends training after two steps."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop."""
        control.should_training_stop = state.global_step >= 2


def stopped(run: Run) -> Any:
    """A callback stops it."""
    trainer = make(run, more={"callbacks": [Stopper()]}, eval_strategy="no")
    trainer.train()
    return trainer


def stopped_early(run: Run) -> Any:
    """The evaluation's loss stops it, as it grows."""
    callbacks = [EarlyStoppingCallback(early_stopping_patience=1)]
    trainer = make(
        run,
        more={"callbacks": callbacks},
        learning_rate=3.0,
        eval_steps=1,
        max_steps=6,
        metric_for_best_model="eval_loss",
        load_best_model_at_end=True,
        save_strategy="steps",
        save_steps=1,
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("case", [stopped, pytest.param(stopped_early, marks=pytest.mark.whole)])
def test_callbacks(case: Any) -> None:
    compare(case, {"context_parallel_size": 2}, **EXACT)


# ---- mutations


MUTATIONS: dict[str, Change] = {
    "gradients are divided by the number of ranks": (
        "hf.steps", 'return at["coefficient"] * log_probs', 'return at["coefficient"] * log_probs / 2'
    ),
    "the batch is not multiplied": (
        "hf.one_process", "copied.per_device_train_batch_size *= self.ranks", "copied.per_device_train_batch_size *= 1"
    ),
    "coefficients are shifted by one": (
        "hf.facade", "torch.nn.functional.pad(gradient, (1, 0))", "torch.nn.functional.pad(gradient, (0, 1))"
    ),
    "rows are dealt by rank": ("hf.one_process", '{"num_processes": 1, ', "{"),
}  # fmt: skip


def short(run: Run) -> Any:
    """Three steps of a loss of the user's own, broken where `run` asks."""
    name = (run.longspan or {}).pop("mutation", None)
    if name is None:
        return own_loss(run)
    with mutated(MUTATIONS[name]):
        return own_loss(run)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.whole] * (i > 0)) for i, name in enumerate(MUTATIONS)]
)
def test_a_mutation_is_seen(name: str) -> None:
    with pytest.raises((AssertionError, CommError)):
        compare(short, {"context_parallel_size": 2, "mutation": name}, **EXACT, reference=_short())


@cache
def _short() -> Ran:
    return stock(own_loss)
