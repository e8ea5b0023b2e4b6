"""What scripts do with a Trainer that no other test does: it equals stock in one process."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from longspan.errors import NonFiniteError
from tests.hf.stock import Run, compare_each, model_of, ours, tokenizer
from tests.hf.test_trainer import EXACT, Texts, pad


def make(run: Run, kind: type[Any] = Trainer, *, steps: int = 4, more: Any = None, **changes: Any) -> Any:
    """A trainer that ran: four rows a batch of 22, four steps unless told otherwise."""
    args = TrainingArguments(**run.arguments(steps=steps) | changes)
    given = {"model": model_of(), "train_dataset": Texts(22), "eval_dataset": Texts(7, seed=1), "data_collator": pad}
    trainer = run.trainer(kind, args=args, **given | (more or {}))
    trainer.train()
    return trainer


def rows() -> Dataset:
    """The texts as a dataset with columns."""
    return Dataset.from_list([Texts(22)[row] for row in range(22)])


class Stream(IterableDataset[Any]):
    """The texts, of a source without a length."""

    def __iter__(self) -> Iterator[Any]:
        return (Texts(22)[row] for row in range(22))


class OwnLoader(Trainer):
    """Makes its loader, which accelerate does not see."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Rows in order."""
        data: Any = self.train_dataset
        return DataLoader(data, batch_size=self.args.train_batch_size, collate_fn=self.data_collator)


class Unlabelled(Texts):
    """The first two batches have no label."""

    def __getitem__(self, row: int) -> dict[str, list[int]]:
        text = super().__getitem__(row)
        return text if row >= 8 else text | {"labels": [-100] * len(text["labels"])}


class Short(Texts):
    """A third of the rows has one token, a third has two."""

    def __getitem__(self, row: int) -> dict[str, list[int]]:
        ids = super().__getitem__(row)["input_ids"][: (1, 2, 40)[row % 3]]
        return {"input_ids": ids, "labels": [-100, *ids[1:]]}


def stream(run: Run) -> Any:
    """A source without a length ends in the middle of a step, and again; the last step in that of an epoch."""
    trainer = make(run, more={"train_dataset": Stream()}, gradient_accumulation_steps=4, steps=5)
    assert run.longspan is None or trainer._runs_ahead, "one pass a step"
    return trainer


def shuffled_stream(run: Run) -> Any:
    """A stream of datasets, with columns, shuffled, that two processes read for each rank."""
    data = rows().to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=4)
    return make(run, more={"train_dataset": data}, steps=7, dataloader_num_workers=2)


class Cutter(TrainerCallback):
    """Ends an epoch in the middle of a step, later the training, and nothing more."""

    def __init__(self) -> None:
        self.calls = 0

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called twice in a step of three batches."""
        self.calls += 1
        control.should_epoch_stop = self.calls == 3
        control.should_training_stop = self.calls == 6


def cut_steps(run: Run) -> Any:
    """What is left of a cut epoch's last step counts in the next; that of a cut training does not in another one."""
    trainer = make(run, more={"callbacks": [Cutter()]}, gradient_accumulation_steps=3, steps=3)
    assert run.longspan is None or trainer._runs_ahead, "one pass a step"
    logs = trainer.state.log_history
    trainer.train()
    trainer.state.log_history = logs + trainer.state.log_history
    return trainer


def language_modelling(run: Run) -> Any:
    """transformers' collator makes the labels."""
    data = rows().remove_columns("labels")
    collator = DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    return make(run, more={"train_dataset": data, "data_collator": collator})


def flattening(run: Run) -> Any:
    """Rows are packed by transformers, with the bounds of documents that FlashAttention takes."""
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    return make(run, more={"train_dataset": rows(), "data_collator": collator})


def own_loader(run: Run) -> Any:
    """A loader of the user's, two batches of which have no label."""
    return make(run, OwnLoader, more={"train_dataset": Unlabelled(22)})


def few_rows(run: Run) -> Any:
    """A dataset shorter than an accumulation, and than a batch."""
    return make(run, more={"train_dataset": Texts(3)}, gradient_accumulation_steps=4, steps=3)


def short_rows(run: Run) -> Any:
    """Rows with nothing to predict; the loss of evaluations sets the rate."""
    made = {"train_dataset": Short(22), "optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9})}
    settings = {"eval_strategy": "steps", "eval_steps": 1, "lr_scheduler_type": "reduce_lr_on_plateau"}
    return make(run, more=made, **settings, metric_for_best_model="eval_loss", train_sampling_strategy="sequential")


def own_adapter(run: Run) -> Any:
    """A PeftModel of the user's over tied embeddings."""
    torch.manual_seed(3)
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.0, init_lora_weights=False)
    return make(run, more={"model": get_peft_model(model_of(tie_word_embeddings=True), lora)})


CASES = (stream, own_loader, cut_steps)
MORE = (shuffled_stream, language_modelling, flattening, few_rows, short_rows, own_adapter)


def test_equals_stock() -> None:
    compare_each(CASES, {"context_parallel_size": 2}, **EXACT)


@pytest.mark.whole
def test_more_that_equals_stock() -> None:
    compare_each(MORE, {"context_parallel_size": 2}, **EXACT)


@pytest.mark.whole
def test_equals_stock_under_dynamic_plans() -> None:
    dynamic = {"planner": "dynamic", "max_tokens_per_slot": "64", "cp_comm_type": "p2p"}
    compare_each((*CASES, *MORE), dynamic, ranks=4, **EXACT)


class NotANumber(Trainer):
    """Its loss is NaN in the second step."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **keywords: Any) -> Any:
        """The model's, or NaN."""
        loss = model(**inputs).loss
        return loss * float("nan") if self.state.global_step == 1 else loss


def not_a_number(run: Run) -> Any:
    """Ends in the second step."""
    return make(run, NotANumber, gradient_accumulation_steps=2, steps=3)


def test_a_loss_that_is_not_a_number_ends_the_run_by_name() -> None:
    with pytest.raises(NonFiniteError, match="step 1: the loss of LongspanNotANumber has derivatives that are not"):
        ours(not_a_number, {"context_parallel_size": 2}, 2)
