"""transformers' Trainer over plans equals stock in one process: losses, norms, rates, evaluations, metrics, weights.

Also what scripts do with a Trainer: losses and loaders of their own, streams, callbacks, adapters.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import DataCollatorWithFlattening, EvalPrediction, Trainer, TrainerCallback, TrainingArguments

from longspan.errors import CommError, NonFiniteError
from longspan.hf import steps
from longspan.train.optim.eight_bit_adamw import EightBitAdamW
from longspan.train.optim.offload_states import OffloadedStates
from tests.hf.stock import (
    AUTO,
    CP2,
    RECOMPUTES,
    Ran,
    Run,
    check,
    check_each,
    log_errors,
    ours_each,
    stock_each,
)
from tests.hf.tiny import VOCABULARY, model_of, pad
from tests.mutation import Change, mutated

EXACT: dict[str, Any] = {"loss": 1e-10, "metric": 1e-10, "weights": 1e-10}
ROWS, STEPS = 4, 3  # a micro-batch of all ranks; the data has 4 micro-batches, the last of them short

ONE_BATCH = {"max_steps": 2, "gradient_accumulation_steps": 1}


@dataclass(frozen=True)
class Texts:
    count: int
    seed: int = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> dict[str, list[int]]:
        random = np.random.default_rng([self.seed, row])
        ids = random.integers(3, VOCABULARY, random.integers(4, 50))
        labels = np.where(np.arange(len(ids)) < len(ids) // 3, -100, ids)
        return {"input_ids": ids.tolist(), "labels": labels.tolist()}


def make(run: Run, kind: type[Any] = Trainer, *, rows: int = ROWS, more: Any = None, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "num_train_epochs": 10,
        "gradient_accumulation_steps": 2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "eval_strategy": "steps",
        "eval_steps": 8,
        "include_num_input_tokens_seen": "all",
        "dataloader_drop_last": False,
    }
    args = TrainingArguments(**run.arguments(rows=rows, steps=STEPS) | settings | changes)
    parts = {"train_dataset": Texts(14), "eval_dataset": Texts(7, seed=1), "data_collator": pad}
    return run.trainer(kind, args=args, **{"model": model_of(num_hidden_layers=1)} | parts | (more or {}))


def train(run: Run) -> Any:
    trainer = make(run, eval_steps=3)
    run.kept["evaluated"] = trainer.evaluate()
    run.kept["dense"] = _dense_loss(trainer.model) if run.longspan is None else None
    with_losses(trainer, run)
    trainer.train()
    return trainer


def with_losses(trainer: Any, run: Run) -> None:
    step = trainer.training_step
    run.kept["losses"] = []

    def kept(*args: Any, **keywords: Any) -> Tensor:
        loss = step(*args, **keywords)
        assert loss.dtype == torch.float64, "the loss has the model's own precision"
        run.kept["losses"].append(loss.item())
        return loss

    trainer.training_step = kept


def _dense_loss(model: Any) -> float:
    total, count = 0.0, 0
    with torch.no_grad():
        for number in range(7):
            row = Texts(7, seed=1)[number]
            ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])
            scores = model.eval()(ids).logits[0].log_softmax(-1)
            here = labels[1:] != -100
            total -= scores[:-1].gather(1, labels[1:].clamp(min=0)[:, None])[:, 0][here].sum().item()
            count += int(here.sum())
    return total / count


class Weighted(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        out = model(**inputs, fused_lm_head=True)
        weights = 1 + 0.01 * torch.arange(out.log_probs.shape[1], device=out.log_probs.device)
        loss = -(weights * out.log_probs).sum() / num_items_in_batch
        return (loss, out) if return_outputs else loss


class Halved(Trainer):
    def compute_loss(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any
    ) -> Any:
        out = model(**inputs)
        return (out["loss"] / 2, out) if return_outputs else out.loss / 2


def own_loss(run: Run) -> Any:
    model_kind: Any = Weighted
    trainer = make(run, model_kind, max_steps=2, eval_strategy="no")
    if run.longspan is None:
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(trainer.model)
    trainer.train()
    return trainer


def halved_loss(run: Run) -> Any:
    return with_measures(run, make(run, Halved, **ONE_BATCH, eval_strategy="no", **{RECOMPUTES: True}))


def with_measures(run: Run, trainer: Any) -> Any:
    trainer.train()
    plan = getattr(trainer, "memory_plan", None)
    run.kept["checkpoint_policies"] = None if plan is None else plan.checkpoint_policies
    return trainer


def weighted(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    log_probs = outputs.get("log_probs")
    if log_probs is None:
        scores = outputs["logits"][:, :-1].log_softmax(-1)
        log_probs = scores.gather(-1, labels[:, 1:, None].clamp(min=0))[..., 0] * (labels[:, 1:] != -100)
    weights = 1 + 0.01 * torch.arange(log_probs.shape[1], device=log_probs.device)
    return -(weights * log_probs).sum() / (1 if num_items_in_batch is None else num_items_in_batch)


def loss_function(run: Run) -> Any:
    """A function that gets the labels apart; evaluations with a metric of reduced logits."""
    more = {"compute_loss_func": weighted, "compute_metrics": reduced, "preprocess_logits_for_metrics": likeliest}
    trainer = make(run, rows=2, more=more, **ONE_BATCH, eval_steps=1)
    trainer.train()
    return trainer


class Stopper(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= 2


def stopped(run: Run) -> Any:
    calls = run.kept["calls"] = {"backward": 0, "forward": 0}
    step, values = steps.run_step, steps.token_log_probs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            steps, "run_step", lambda *a, **k: (calls.update(backward=calls["backward"] + 1), step(*a, **k))[1]
        )
        patch.setattr(
            steps, "token_log_probs", lambda *a, **k: (calls.update(forward=calls["forward"] + 1), values(*a, **k))[1]
        )
        more = {"callbacks": [Stopper()], "model": model_of(), "train_dataset": Texts(28)}
        return with_measures(run, make(run, rows=8, more=more, eval_strategy="no", gradient_accumulation_steps=3))


# ---- evaluations


def metrics(predicted: EvalPrediction) -> dict[str, float]:
    logits, labels = predicted.predictions, predicted.label_ids
    here = labels[:, 1:] != -100
    chosen = logits[:, :-1].argmax(-1) == labels[:, 1:]
    return {"accuracy": float(chosen[here].mean()), "norm": float((logits[:, :-1][here] ** 2).sum())}


def reduced(predicted: EvalPrediction) -> dict[str, float]:
    here = predicted.label_ids[:, 1:] != -100
    return {"accuracy": float((predicted.predictions[:, :-1] == predicted.label_ids[:, 1:])[here].mean())}


def likeliest(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.argmax(-1)


def with_metrics(run: Run) -> Any:
    sets = {"short": Texts(5, seed=1), "long": Texts(7, seed=2)}
    trainer = make(run, rows=4, more={"compute_metrics": metrics}, max_steps=2, eval_steps=2, eval_on_start=True)
    trainer.eval_dataset = sets
    trainer.train()
    unlabelled = Texts(6, seed=3)
    told = trainer.predict(unlabelled)
    run.kept["metrics"] = {k: v for k, v in told.metrics.items() if "per_second" not in k and "time" not in k}
    run.kept["predictions"] = _at_labels(told)
    trainer.data_collator = lambda rows: {k: v for k, v in pad(rows).items() if k != "labels"}
    trainer.compute_metrics = None
    bare = trainer.predict(unlabelled)
    run.kept["without labels"] = _at_labels(bare, told.label_ids)
    assert bare.label_ids is None
    return trainer


def _at_labels(told: Any, labels: Any = None) -> np.ndarray:
    labels = told.label_ids if labels is None else labels
    return told.predictions[:, :-1][labels[:, 1:] != -100]


# ---- what scripts do


def walk(
    run: Run, kind: type[Any] = Trainer, *, steps: int = 3, more: Any = None, before: Any = None, **changes: Any
) -> Any:
    """A trainer that ran: four rows a batch of 22, three steps unless told otherwise; `before` gets it untrained."""
    args = TrainingArguments(**run.arguments(steps=steps) | changes)
    parts = {"train_dataset": Texts(22), "eval_dataset": Texts(7, seed=1), "data_collator": pad}
    trainer = run.trainer(kind, args=args, **{"model": model_of(num_hidden_layers=1)} | parts | (more or {}))
    if before is not None:
        before(trainer)
    return with_measures(run, trainer)


def _squares(model: Any) -> Any:
    return sum((p.full_tensor() if isinstance(p, DTensor) else p).pow(2).sum() for p in model.parameters())


class Regularized(Trainer):
    """Gradients beside those of the cross entropy: in the loss, of a second backward pass, and by hand."""

    factor = 2.0  # of the cross entropy

    def compute_loss(self, model: Any, inputs: Any, *args: Any, num_items_in_batch: Any = None, **_: Any) -> Any:
        loss: Any = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        return self.factor * loss + 0.005 * _squares(model)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.accelerator.backward(0.002 * _squares(model))
        if self.accelerator.sync_gradients:  # what is in .grad here is the whole gradient of the step
            for parameter in model.parameters():
                parameter.grad = parameter.grad * 0.75 + 0.01 * parameter.detach()
        return loss


class OfWeightsAlone(Regularized):
    factor = 0.0


class OfCrossEntropy(Regularized):
    factor = 1.0


class TwoPasses(Trainer):
    """A step of its own, which goes backward twice through one answer of the model."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        model.train()
        loss: Any = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(0.25 * loss, retain_graph=True)
        (0.5 * loss**2).backward()
        return loss.detach()


SGD = {"optim": "sgd", "learning_rate": 0.05}


def regularized(run: Run) -> Any:
    return walk(run, Regularized, gradient_accumulation_steps=2, **SGD)


def of_weights_alone(run: Run) -> Any:
    return walk(run, OfWeightsAlone, steps=2, **SGD)


def of_cross_entropy(run: Run) -> Any:
    trainer = walk(run, OfCrossEntropy, steps=2, **SGD)
    assert run.longspan is None or trainer._runs_ahead, "one pass a step"
    return trainer


def two_passes(run: Run) -> Any:
    return walk(run, TwoPasses, steps=2, **SGD)


def early_optimizer(run: Run) -> Any:
    def schedule(trainer: Any) -> None:
        trainer.create_optimizer()
        trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda step: 1 / (1 + step))

    return walk(run, before=schedule, steps=2)


def paged_adamw(run: Run) -> Any:
    """bitsandbytes' name: moments wait in the host's memory, and updates are those of AdamW."""
    trainer = walk(run, optim="adamw_torch" if run.longspan is None else "paged_adamw_32bit", weight_decay=0.1)
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    assert isinstance(optimizer, torch.optim.AdamW if run.longspan is None else OffloadedStates)
    return trainer


def early_scheduler(run: Run) -> Any:
    return walk(run, before=lambda trainer: trainer.create_optimizer_and_scheduler(3), steps=2)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (Texts(22)[row] for row in range(22))


class OwnLoader(Trainer):
    def get_train_dataloader(self) -> DataLoader[Any]:
        data: Any = self.train_dataset
        return DataLoader(data, batch_size=self.args.train_batch_size, collate_fn=self.data_collator)


class Short(Texts):
    """Rows of 1, 2 and up to 40 tokens, the first four of them without a target."""

    def __getitem__(self, row: int) -> dict[str, list[int]]:
        ids = super().__getitem__(row)["input_ids"][: (1, 2, 40)[row % 3]]
        return {"input_ids": ids, "labels": [-100] * len(ids) if row < 4 else [-100, *ids[1:]]}


class Cutter(TrainerCallback):
    def __init__(self) -> None:
        self.calls = 0

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.calls += 1
        control.should_epoch_stop = self.calls == 3
        control.should_training_stop = self.calls == 6


def cut_steps(run: Run) -> Any:
    """A stream whose first steps a callback cuts short, and then whole, with an epoch's end inside a step."""
    more = {"train_dataset": Stream(), "callbacks": [Cutter()]}
    trainer = walk(run, more=more, gradient_accumulation_steps=4)
    assert run.longspan is None or trainer._runs_ahead, "one pass a step"
    logs = trainer.state.log_history
    trainer.train()
    trainer.state.log_history = logs + trainer.state.log_history
    return trainer


def flattening(run: Run) -> Any:
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    rows = Dataset.from_list([Texts(22)[row] for row in range(22)])
    return walk(run, more={"train_dataset": rows, "data_collator": collator}, steps=2)


def own_loader(run: Run) -> Any:
    made = {
        "train_dataset": Short(22),
        "eval_dataset": Texts(4),
        "optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    }
    settings = {"eval_strategy": "steps", "eval_steps": 1, "lr_scheduler_type": "reduce_lr_on_plateau"}
    return walk(run, OwnLoader, more=made, **settings, metric_for_best_model="eval_loss")


class NotANumber(Trainer):
    """Its loss is NaN in the second step."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **keywords: Any) -> Any:
        loss = model(**inputs).loss
        return loss * float("nan") if self.state.global_step == 1 else loss


def not_a_number(run: Run) -> None:
    trainer = make(run, NotANumber, **ONE_BATCH, eval_strategy="no")
    with pytest.raises(NonFiniteError) as error:
        trainer.train()
    run.kept["error"] = str(error.value)
    trainer.end()


# ---- the tables


DYNAMIC = {"planner": "dynamic", "max_tokens_per_slot": "64", "cp_comm_type": "p2p"}
MEMORY = {"device_memory_limit": 3_000_000}
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


def broken(run: Run) -> Any:
    name = (run.longspan or {}).pop("mutation", next(iter(MUTATIONS)))
    with mutated(MUTATIONS[name]):
        return own_loss(run)


CASES = (
    *(own_loss, halved_loss),
    (regularized, CP2 | {"offload_weights": True}),
    two_passes,
    (train, AUTO | {"eval_context_parallel_size": "1", "offload_weights": True}),
    (stopped, MEMORY | {"cp_comm_type": "auto"}),
    (own_loader, DYNAMIC | {"device_memory_limit": 1 << 30}),
    (with_metrics, {"context_parallel_size": 1, "eval_context_parallel_size": "2"}),
)


@cache
def expected() -> dict[str, Ran]:
    return stock_each(CASES)


def check_train(found: Ran) -> None:
    of_stock = expected()["train"]
    np.testing.assert_allclose(found.kept["losses"], of_stock.kept["losses"], rtol=1e-10)
    check(of_stock, found, **EXACT)
    for name, weight in of_stock.weights.items():
        assert np.linalg.norm(found.weights[name] - weight) < 1e-10 * np.linalg.norm(weight), name


def check_metrics(found: Ran) -> None:
    of_stock = expected()["with_metrics"]
    assert max(log_errors(of_stock.logs, found.logs).values()) < 1e-10
    for name in ("predictions", "without labels"):
        assert found.kept[name].shape == of_stock.kept[name].shape
        np.testing.assert_allclose(found.kept[name], of_stock.kept[name], rtol=0, atol=1e-10)
    for name, value in of_stock.kept["metrics"].items():
        assert abs(found.kept["metrics"][name] - value) <= 1e-10 * max(1, abs(value)), name


def test_equals_one_process() -> None:
    found = ours_each((*CASES, broken, not_a_number), CP2, 2)
    wrong, error = (found.pop(name) for name in ("broken", "not_a_number"))
    check_each(expected(), found, **EXACT)
    check_train(found["train"])
    check_metrics(found["with_metrics"])
    measures = {name: found[name].kept["checkpoint_policies"] for name in ("halved_loss", "stopped", "own_loader")}
    assert measures == {"halved_loss": None, "stopped": ("selective", "selective"), "own_loader": ("none",)}
    assert found["stopped"].kept["calls"] == {"backward": 2, "forward": 0}, "the cross entropy takes one pass"
    of_stock, logged = expected()["train"].kept, found["train"].kept["evaluated"]
    assert abs(logged["eval_loss"] - of_stock["evaluated"]["eval_loss"]) < 1e-10
    assert abs(logged["eval_token_loss"] - of_stock["dense"]) < 1e-10
    assert abs(of_stock["dense"] - logged["eval_loss"]) > 1e-6, "batches have unequal counts of tokens"
    assert "step 1: the loss of LongspanNotANumber has derivatives that are not" in error.kept["error"]
    with pytest.raises(AssertionError):
        check(expected()["own_loss"], wrong, **EXACT)


@pytest.mark.whole
def test_more_of_them_equal_one_process() -> None:
    more = (loss_function, cut_steps, paged_adamw, of_cross_entropy, of_weights_alone, flattening)
    more += (early_optimizer, early_scheduler)
    check_each(stock_each(more), ours_each(more, CP2, 2), **EXACT)


EVALUATED_DYNAMICALLY = {"context_parallel_size": 2, "eval_planner": "dynamic", "eval_max_tokens_per_slot": "40"}


@pytest.mark.whole
@pytest.mark.parametrize(
    ("ranks", "trained", "evaluated"),
    [
        (2, {"tp": 2}, {"tp": 2, "context_parallel_size": 1, "eval_context_parallel_size": "1"}),
        (4, {"tp": 2, **DYNAMIC, "eval_max_tokens_per_slot": "0"}, EVALUATED_DYNAMICALLY),
    ],
)
def test_other_homes_equal_one_process(ranks: int, trained: dict[str, Any], evaluated: dict[str, Any]) -> None:
    found = ours_each([(train, trained), (with_metrics, evaluated)], {}, ranks)
    check_train(found["train"])
    check_metrics(found["with_metrics"])


@pytest.mark.whole
@pytest.mark.parametrize("name", [*MUTATIONS][1:])
def test_a_mutation_is_seen(name: str) -> None:
    with pytest.raises((AssertionError, CommError)):
        check(expected()["own_loss"], ours_each([broken], CP2 | {"mutation": name}, 2)["broken"], **EXACT)


# ---- bfloat16


def in_float32(run: Run) -> Any:
    trainer = make(run, more={"model": model_of(dtype=torch.float32)}, max_steps=2, learning_rate=1e-3, eval_steps=2)
    trainer.train()
    return trainer


def in_bfloat16(run: Run) -> Any:
    """The same in bfloat16: by its argument in stock, and by the launcher's configuration in ours."""
    if run.longspan is not None:
        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    more = {"model": model_of(dtype=torch.float32)}
    trainer = make(run, more=more, max_steps=2, learning_rate=1e-3, eval_steps=2, bf16=run.longspan is None)
    assert run.longspan is None or trainer.args.mixed_precision == "bf16"
    trainer.train()
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
    return trainer


def in_eight_bits(run: Run) -> Any:
    more = {"model": model_of(dtype=torch.float32)}
    trainer = make(run, more=more, max_steps=2, learning_rate=1e-3, eval_steps=2, optim="adamw_8bit")
    trainer.train()
    assert type(getattr(trainer.optimizer, "optimizer", trainer.optimizer)) is EightBitAdamW
    return trainer


def test_bfloat16_is_as_near_to_float32_as_autocast_is() -> None:
    of_stock = stock_each([in_float32, in_bfloat16], exact=False)
    ours = ours_each([in_eight_bits, in_bfloat16], CP2, 2, exact=False)
    found = ours["in_bfloat16"]
    errors = log_errors(of_stock["in_float32"].logs, ours["in_eight_bits"].logs)
    assert 0 < errors["eval_loss"] < 1e-4 and errors["loss"] < 1e-4, errors
    for name, least in (("in_float32", 1e-6), ("in_bfloat16", 0.0)):
        errors = log_errors(of_stock[name].logs, found.logs)
        assert least < errors["loss"] < 1e-3 and errors["eval_loss"] < 1e-3 and errors["grad_norm"] < 1e-2, errors
