"""Files of a Trainer: folders that transformers and peft load, checkpoints that resume bit for bit, nothing half."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

from longspan.bench.benches import change_layer_count
from longspan.checkpoint.storage import read_metadata
from longspan.errors import CheckpointError, CommError, ConfigError
from longspan.hf import LongspanArguments, with_longspan
from longspan.hf.files import other_configuration_line
from longspan.model import load_model, preset_config
from longspan.testing import run_ranks
from tests.hf.stock import CP2, Run
from tests.hf.tiny import pad, tokenizer
from tests.model.stock import without_trials
from tests.mutation import Change, mutated

Weights = dict[str, Tensor]
TIMES = ("runtime", "per_second", "total_flos", "train_loss")


def rows(count: int = 26) -> list[dict[str, list[int]]]:
    generator, made = np.random.default_rng(0), list[dict[str, list[int]]]()
    for length in generator.integers(5, 40, count):
        ids = generator.integers(3, 64, length).tolist()
        made.append({"input_ids": ids, "labels": [-100, *(i if i % 7 > 1 else -100 for i in ids[1:])]})
    return made


class StepCounter(TrainerCallback, ExportableState):
    """Counts the steps of all runs of a training, which a checkpoint keeps, and draws at random after each."""

    def __init__(self, steps: int = 0) -> None:
        self.steps = steps
        self.drawn: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps += 1
        self.drawn += [random.random(), float(np.random.rand()), float(torch.rand(()))]

    def state(self) -> dict[str, Any]:
        return {"args": {"steps": self.steps}, "attributes": {}}


def make_model(dtype: str = "float64", lora: bool = False, seed: int = 0, dropout: float = 0.0) -> Any:
    config = change_layer_count(preset_config("qwen3-tiny", vocab_size=64), 1)
    model = load_model(config=config, dtype=dtype, seed=0 if lora else seed)
    model.config.attention_dropout = dropout
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = dropout
    if not lora:
        return model
    torch.manual_seed(seed)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "up_proj"], r=4, init_lora_weights=False))
    return adapted.to(getattr(torch, dtype))


def make(folder: Path, model: Any, cp: int = 2, kind: Any = Trainer, ours: bool = True, **changes: Any) -> Any:
    plain = {"gradient_accumulation_steps": 3, "warmup_steps": 2, "lr_scheduler_type": "cosine", "weight_decay": 0.1}
    plain |= {"restore_callback_states_from_checkpoint": True}
    keywords = {
        "model": model,
        "data_collator": pad,
        "train_dataset": rows(),
        "callbacks": [StepCounter()],
        "eval_dataset": rows()[:4],
        "processing_class": None,
    }
    keywords |= {name: changes.pop(name) for name in list(changes) if name in keywords}
    keywords["args"] = TrainingArguments(**Run(str(folder)).arguments(rows=2, steps=4, **plain | changes))
    if not ours:
        return kind(**keywords)
    return with_longspan(kind)(**keywords, longspan=LongspanArguments(**CP2 | {"context_parallel_size": cp}))


def whole(trainer: Any) -> Weights:
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    values = {}
    for name, parameter in trainer.model.named_parameters():
        values[name] = parameter.detach()
        state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
        values |= {f"{name}/{key}": value for key, value in state.items() if isinstance(value, Tensor)}
    return {n: (x.full_tensor() if isinstance(x, DTensor) else x).clone() for n, x in values.items()}


def history(trainer: Any) -> list[dict[str, float]]:
    return [{k: v for k, v in log.items() if not any(t in k for t in TIMES)} for log in trainer.state.log_history]


def finished(trainer: Any, **resume: Any) -> tuple[list[dict[str, float]], Weights, int, list[float]]:
    trainer.train(**resume)
    counter = next(c for c in trainer.callback_handler.callbacks if isinstance(c, StepCounter))
    result = history(trainer), whole(trainer), counter.steps, counter.drawn
    trainer.end()
    return result


def assert_same_bits(one: Weights, other: Weights) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one), "other bits"


DROPOUT = 0.1  # its masks are of the run's seed and the step


def straight_and_resumed(rank: int, folder: Path, made: dict[str, Any], settings: dict[str, Any]) -> Any:
    straight = finished(make(folder, make_model(**made), save_strategy="steps", save_steps=3, **settings))
    torch.manual_seed(77 + rank)  # nothing may depend on what was drawn before
    random.seed(rank)
    changed: dict[str, Any] = settings | {"learning_rate": 5.0, "weight_decay": 0.3}  # the checkpoint's are taken
    other: dict[str, Any] = made | {"seed": 5}
    trainer = make(folder, make_model(**other), **changed)
    again = finished(trainer, resume_from_checkpoint=str(folder / "checkpoint-3"))
    assert straight[0] == again[0] and len(straight[0]) == 5
    assert (straight[2], again[2]) == (4, 4) and straight[3][-3:] == again[3]
    assert_same_bits(straight[1], again[1])
    return straight


def resumed_elsewhere(rank: int, folder: Path, cp: int, dropout: float, settings: dict[str, Any], path: Any) -> Any:
    trainer = make(folder, make_model(seed=5, dropout=dropout), cp, **settings)
    return finished(trainer, resume_from_checkpoint=path)


def best(folder: Path, settings: dict[str, Any], ours: bool) -> Any:
    size = 2 if ours else 4
    sizes = {"per_device_train_batch_size": size, "per_device_eval_batch_size": size}
    # a rate at which the loss of evaluation falls at first, and then rises
    fixed = {"max_steps": 6, "learning_rate": 3e-2, "warmup_steps": 0, "lr_scheduler_type": "constant"}
    fixed["gradient_accumulation_steps"] = 1
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    trainer = make(folder, make_model("float32"), ours=ours, **sizes | fixed | evaluated | settings)
    trainer.train()
    trainer.save_model()
    names = sorted(path.name for path in folder.iterdir())
    path = trainer.state.best_model_checkpoint
    losses = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    weights = {n: x for n, x in whole(trainer).items() if "/" not in n}
    if ours:
        trainer.end()
    return names, Path(path).name, losses, weights


LIMITED = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}


class Interrupted(Trainer):
    """Ctrl-C on the second rank, in the middle of its second save."""

    def _save_scaler(self, output_dir: str) -> None:
        if self.args.process_index == 1 and self.state.global_step == 4:
            raise KeyboardInterrupt
        super()._save_scaler(output_dir)


class BrokenCollator(Trainer):
    def get_train_dataloader(self) -> Any:
        if self.args.process_index == 1:
            self.data_collator = fail_to_collate
        return super().get_train_dataloader()


def fail_to_collate(_: Any) -> Any:
    raise ValueError("row 7 cannot be read")


def caught(folder: Path, kind: type[Trainer], settings: dict[str, Any]) -> str:
    trainer = make(folder, make_model(), kind=kind, **settings)
    try:
        trainer.train()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


SAVES: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 1}
HALF: dict[str, Any] = {"bf16": True, "optim": "sgd", "gradient_accumulation_steps": 1}


def two_ranks(rank: int, root: Path) -> dict[str, Any]:
    ran = {"run": straight_and_resumed(rank, root / "run", {"dropout": DROPOUT}, {})}
    with without_trials():
        return ran | {
            "lora": straight_and_resumed(rank, root / "lora", {"lora": True, "dtype": "float32"}, HALF),
            "best": best(root / "ours", LIMITED, True),
            "interrupted": caught(root / "interrupted", Interrupted, SAVES),
        }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def ran(root: Path) -> list[dict[str, Any]]:
    return run_ranks(two_ranks, 2, root)


def test_a_resumed_run_has_the_same_bits_and_a_checkpoint_its_weights_once(root: Path, ran: Any) -> None:
    logs, weights, *_ = ran[0]["run"]
    assert logs == ran[1]["run"][0]
    checkpoint = root / "run" / "checkpoint-3"
    assert sorted(path.name for path in (root / "run").iterdir()) == ["checkpoint-3", "checkpoint-4"]
    assert {path.name for path in checkpoint.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", "optimizer", "order.pt", "rng"),
        *("scheduler.pt", "trainer_state.json", "training_args.bin"),
    }
    stored = read_metadata(checkpoint / "optimizer" / "step-000003").state_dict_metadata
    assert stored and all(name.startswith("optimizer.") for name in stored)
    args = torch.load(checkpoint / "training_args.bin", weights_only=False)
    assert args.per_device_train_batch_size == 2  # as it was given
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert loaded.dtype == torch.float64
    assert not torch.equal(loaded.lm_head.weight, weights["model.embed_tokens.weight"])  # of step 3, not of 4
    adapted = PeftModel.from_pretrained(make_model(), root / "lora" / "checkpoint-3")
    assert not (root / "lora" / "checkpoint-3" / "model.safetensors").exists()
    assert any("lora_A" in name for name in adapted.state_dict())


def generation_settings(folder: Path) -> dict[str, Any]:
    """Settings of a folder that transformers would not write, once the Trainer has changed a token id in them."""
    make_model().save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "eos_token_id": 9}))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    trainer = make(folder, model, cp=1, processing_class=tokenizer(), max_steps=1)
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    trainer.end()
    return json.loads((folder / "saved" / "generation_config.json").read_text())


def one_rank(rank: int, root: Path, other: Path) -> dict[str, Any]:
    """A run of two ranks goes on with one; what is not resumed from; the best of stock's models."""
    path = str(root / "run" / "checkpoint-3")
    with without_trials():
        found = {"resumed": resumed_elsewhere(rank, root / "run", 1, DROPOUT, {"per_device_train_batch_size": 4}, path)}
        found["refused"] = refusals(root / "run", other)
        found["generation"] = generation_settings(root / "generation")
        return found | {"best": best(root / "stock", LIMITED, False)}


@pytest.fixture(scope="module")
def alone(root: Path, ran: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(one_rank, 1, root, tmp_path_factory.mktemp("other"))[0]


def test_another_number_of_processes_ends_with_the_same_weights(ran: Any, alone: dict[str, Any]) -> None:
    assert_same(*ran[0]["run"][:2], *alone["resumed"][:2])


def assert_same(logs: list[dict[str, float]], weights: Weights, found: list[dict[str, float]], other: Weights) -> None:
    """Logs are the same up to the rounding of floats, weights and moments up to that of their sums."""
    for one, two in zip(logs, found, strict=True):
        assert one.keys() == two.keys() and all(abs(one[k] - two[k]) <= 2e-7 * max(1, abs(one[k])) for k in one)
    assert all((other[n] - x).norm() <= 1e-10 * max(1.0, float(x.norm())) for n, x in weights.items())


def refusals(folder: Path, other: Path) -> list[str]:
    texts = []

    def note(error: type[Exception], work: Callable[[], Any]) -> None:
        with pytest.raises(error) as raised:
            work()
        texts.append(str(raised.value))

    stock = make(other, make_model(), ours=False, max_steps=1, save_strategy="steps", save_steps=1)
    stock.train()
    trainer = make(folder, make_model(), 1)
    note(ConfigError, lambda: trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3")))
    note(CheckpointError, lambda: trainer.train(resume_from_checkpoint=str(other / "checkpoint-1")))
    note(CheckpointError, lambda: trainer.train(resume_from_checkpoint=str(other / "checkpoint-9")))
    trainer.end()
    trainer = make(other, make_model(), 1, max_steps=2, save_strategy="steps", save_steps=2, save_only_model=True)
    trainer.train()
    assert not (other / "checkpoint-2" / "optimizer").exists()
    note(CheckpointError, lambda: trainer.train(resume_from_checkpoint=True))
    trainer.save_state()
    assert (other / "trainer_state.json").is_file()
    trainer.end()
    empty = make(other / "empty", make_model(), 1)
    note(ValueError, lambda: empty.train(resume_from_checkpoint=True))
    empty.end()
    return texts


def test_generation_settings_are_saved_as_they_are(alone: dict[str, Any]) -> None:
    assert {name: alone["generation"][name] for name in ("temperature", "eos_token_id")} == {
        "temperature": 0.7,
        "eos_token_id": [1, 9],  # the Trainer has put the tokenizer's there
    }


def test_other_rows_a_step_and_checkpoints_of_others_are_refused(alone: dict[str, Any]) -> None:
    texts = alone["refused"]
    rows = "checkpoint-3 was trained with 12 rows a step, and this run takes 6 (per_device_train_batch_size 2 × 1"
    assert rows in texts[0]
    assert re.search(
        r"checkpoint-1 cannot be resumed .* saved by a Trainer without longspan.*from_pretrained", texts[1]
    )
    assert "there is no checkpoint" in texts[2]
    assert re.search(r"checkpoint-2 cannot be resumed from .*save_only_model", texts[3])
    assert "No valid checkpoint" in texts[4]


def test_a_checkpoint_of_another_configuration_is_named(root: Path, ran: Any) -> None:
    model, saved = make_model(dropout=0.1), root / "run" / "checkpoint-3"
    assert other_configuration_line(saved, model) == ""
    model.config.rope_parameters["rope_theta"] = 50.0
    model.config.pad_token_id = 3
    assert re.search(
        r"goes on: rope_parameters.rope_theta was \d+ and is 50 now$", other_configuration_line(saved, model)
    )
    assert other_configuration_line(root, model) == ""  # an adapter's folder has no config.json


def check_best(root: Path, of_stock: Any, of_ours: Any) -> None:
    """The checkpoints that stay, and the best, are stock's; its model is in the trainer, and saved."""
    (names, path, losses, _), (ours, our_path, our_losses, weights) = of_stock, of_ours
    assert our_losses == pytest.approx(losses, rel=1e-2)  # in float32, at a rate that blows up
    assert losses.index(min(losses)) < len(losses) - 1, losses
    assert (ours, our_path) == (names, path), (ours, names)
    kept = load_file(root / "ours" / path / "model.safetensors")
    assert_same_bits({n: x for n, x in weights.items() if n in kept}, kept)
    assert_same_bits(kept, load_file(root / "ours" / "model.safetensors"))  # save_model() next to the checkpoints


def test_the_best_model_and_the_checkpoints_that_stay_are_stocks(root: Path, ran: Any, alone: dict[str, Any]) -> None:
    check_best(root, alone["best"], ran[0]["best"])


def after_an_interruption(rank: int, root: Path) -> tuple[Any, str]:
    with without_trials():
        logs, *_ = resumed_elsewhere(rank, root / "interrupted", 2, 0.0, SAVES, True)
        return logs, caught(root / "broken", BrokenCollator, {})


def test_an_interrupted_save_leaves_no_checkpoint_and_ranks_that_fail_end_all(root: Path, ran: Any) -> None:
    folder, texts = root / "interrupted", [seen["interrupted"] for seen in ran]
    assert texts[1].startswith("KeyboardInterrupt")
    assert texts[0].startswith("CommError") and "rank 1 left with KeyboardInterrupt" in texts[0]
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-2", "unfinished"]
    (logs, first), (_, second) = run_ranks(after_an_interruption, 2, root)
    assert [log["step"] for log in logs] == [1, 2, 3, 4, 4]
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-2", "checkpoint-4"]
    assert second == "ValueError: row 7 cannot be read"
    assert first.startswith("CommError") and "rank 1 left with ValueError: row 7 cannot be read" in first


MUTATIONS: dict[str, Change] = {
    "the learning rate is not restored": (
        "hf.files", '_restore_group_settings(root, optimizer, state_value(saved, state, "groups"))', "pass"
    ),
    "only the first rank saves": (
        "hf.one_process", "trainer._save(output_dir)", "trainer.args.should_save and trainer._save(output_dir)"
    ),
}  # fmt: skip


def broken(rank: int, folder: Path, name: str) -> Any:
    with mutated(MUTATIONS[name]):
        return straight_and_resumed(rank, folder, {}, {})


@pytest.mark.whole
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_seen(tmp_path: Path, name: str) -> None:
    with pytest.raises((AssertionError, CommError, CheckpointError)):
        run_ranks(broken, 2, tmp_path, name)
