"""The examples of Trainers run on ranks that share documents, and in one process as the stock scripts they differ from.

The blocks of docs/trainer.md run here, too.
"""

import importlib.util
import json
import os
import re
import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from datasets import disable_progress_bars

import longspan.hf
from longspan.errors import ConfigError
from longspan.hf import LongspanArguments, with_longspan
from longspan.hf.refusals import _LAUNCHER_SETTINGS, _SETTINGS
from longspan.testing import run_ranks
from tests.hf.tiny import conversations, model_of, tokenizer
from tests.train.small import write_texts

ROOT = Path(__file__).parents[2]
EXAMPLES = ("grpo_trl.py", "sft_trl.py", "trainer.py")
LINE = re.compile(r"^    trainer = with_longspan\((\w+)\)\((.*), longspan=\w+\)$", re.MULTILINE)


def words_of(name: str, steps: int, folder: Path, cp: int) -> list[str]:
    if name != "trainer.py":
        return ["--cp", str(cp), "--steps", str(steps), "--output", str(folder / "out")]
    texts = write_texts(folder / "texts")
    for path in texts.iterdir():
        path.rename(path.with_suffix(".txt"))
    flags = {"output_dir": folder / "out", "text_folder": texts, "vocab_size": 300, "context_parallel_size": cp}
    flags |= {"max_steps": steps, "logging_steps": 1, "report_to": "none", "learning_rate": 1e-2, "use_cpu": True}
    return [word for key, value in flags.items() for word in (f"--{key}", str(value))]


def run_program(rank: int, path: str, words: list[str]) -> None:
    os.environ["CI"] = "1"
    disable_progress_bars()
    os.chdir(Path(path).parent)
    sys.argv = [path, *words]
    runpy.run_path(path, run_name="__main__")


@pytest.mark.parametrize("name", EXAMPLES)
def test_one_line_differs_from_the_stock_script(name: str) -> None:
    lines = (ROOT / "examples" / name).read_text().splitlines()
    stock = LINE.sub(r"    trainer = \1(\2)", "\n".join(lines))
    (changed,) = [one for one, other in zip(lines, stock.splitlines(), strict=True) if one != other]
    assert changed.startswith("    trainer = with_longspan(") and "with_longspan(" not in stock and len(lines) <= 105


@pytest.mark.whole  # daily: `run_page` trains by the same calls
@pytest.mark.parametrize(("name", "steps"), [*zip(EXAMPLES, (12, 30, 10), strict=True)])
def test_an_example_trains_on_two_ranks(name: str, steps: int, tmp_path: Path, capfd: Any) -> None:
    script = tmp_path / name
    script.write_text((ROOT / "examples" / name).read_text())
    run_ranks(run_program, 2, str(script), words_of(name, steps, tmp_path, 2))
    if name == "grpo_trl.py":
        first, *_, last = map(float, re.findall(r"'reward': '?([\d.e-]+)", capfd.readouterr().out))
        assert last > first + 0.2
        return
    state = json.loads((tmp_path / f"out/checkpoint-{steps}/trainer_state.json").read_text())
    losses = [row["loss"] for row in state["log_history"] if "loss" in row]
    assert losses[-1] < losses[0] - 0.5
    assert (tmp_path / "out/model.safetensors").is_file()


def run_page(rank: int, page: str, folder: str) -> dict[str, float]:
    from transformers import TrainingArguments
    from trl import GRPOTrainer, SFTConfig, SFTTrainer

    os.environ["CI"] = "1"
    disable_progress_bars()
    os.chdir(folder)
    small = partial(model_of, num_hidden_layers=1)
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names = {"model": small(), "chats": conversations(12), "tokenizer": tokenizer(), "SFTTrainer": SFTTrainer}
    names |= {"GRPOTrainer": GRPOTrainer, "TrainingArguments": TrainingArguments, "__name__": "page"}
    short = {"max_steps": 1, "per_device_train_batch_size": 2}
    names["args"] = SFTConfig("out", **short, bf16=False, use_cpu=True, report_to=[], disable_tqdm=True)
    exec(compile("\n\n".join(blocks), "docs/trainer.md", "exec"), names)
    parts = {"args": names["args"], "train_dataset": names["chats"], "processing_class": tokenizer()}
    focused = names["Focused"](model=small(), **parts)
    by_function = with_longspan(SFTTrainer)(model=small(), **parts, compute_loss_func=names["focused_loss"])
    for trainer in (focused, by_function):
        trainer.train()
        trainer.end()
    losses = [trainer.state.log_history[-1]["train_loss"] for trainer in (focused, by_function)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert 0 < focused.state.log_history[-1]["train_loss"] < names["trainer"].state.log_history[-2]["train_loss"]
    return names["metrics"]


def test_the_page_on_trainers_is_one_program(tmp_path: Path) -> None:
    first, second = run_ranks(run_page, 2, (ROOT / "docs/trainer.md").read_text(), str(tmp_path))
    assert first["eval_loss"] == second["eval_loss"] > 0 and first["eval_token_loss"] > 0
    assert (tmp_path / "out/model.safetensors").is_file()


def test_the_page_of_refusals_lists_every_setting() -> None:
    page = (ROOT / "docs/limits.md").read_text()
    assert not [name for name in (*_SETTINGS, *_LAUNCHER_SETTINGS) if f"`{name}`" not in page]


def one_process_of_two(rank: int) -> str:
    from transformers import Trainer, TrainingArguments

    try:
        with_longspan(Trainer)(model=model_of(), args=TrainingArguments("out"), longspan=LongspanArguments())
    except ConfigError as error:
        return str(error)
    return "nothing was refused"


def test_processes_that_accelerate_does_not_know_are_refused() -> None:
    for message in run_ranks(one_process_of_two, 2):
        assert "the launcher started 2 processes (WORLD_SIZE), and accelerate knows 1" in message
        assert "use_cpu=True" in message


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"longspan.hf needs accelerate, .*: pip install 'longspan\[hf\]'"):
        importlib.reload(longspan.hf)
