"""Completions of prompts by a run: the tokens of transformers' `generate` of the model that it saves."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from longspan.cli.main import main as cli_main
from longspan.comm import World
from longspan.config.file import load_config
from longspan.config.sections import ParallelConfig, RunConfig
from longspan.corpus.prompts import encode_prompts, read_prompt_rows
from longspan.corpus.tokenizer import load_tokenizer
from longspan.errors import ConfigError, DataError, ModelError
from longspan.evaluation.completions import Completions, complete_prompts
from longspan.layout import Layout
from longspan.model import stock_copy
from longspan.model.stock_copy import StockCopy
from longspan.report import write_report
from longspan.run import evaluations as evaluations_module
from longspan.run.checks import check_config
from longspan.run.metrics import read_metrics
from longspan.testing import backend, run_ranks
from tests.model.deep import deep
from tests.model.stock import prepare_untried
from tests.run.runs.homes import ALONE, lines_of, train_rows
from tests.run.runs.test_lora_run import write_base
from tests.train.small import small_config

PROMPTS = "def rank\nimport value yield slot\n"
IDS = torch.arange(9)[None] * 5 % 60


def _generate(model: Any) -> list[int]:
    ids = IDS.to(model.device)
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)[0].tolist()


def _copied(rank: int, family: str, home: Layout, room: int | None) -> tuple[list[int], int, int]:
    with World(home, backend=backend(), timeout=60) as world:
        prepared = prepare_untried(deep(family, torch.float64), world)
        copy = StockCopy(prepared, world, room=room)
        tokens = copy.run(_generate, "tokens")
        assert copy.run(_generate, "tokens") == tokens
        return tokens, copy.staying, copy.layers


def _check_copies(family: str, home: Layout, room: int | None, staying: int) -> None:
    expected = _generate(deep(family, torch.float64))
    rows = run_ranks(_copied, len(home.ranks), family, home, room)
    assert [tokens for tokens, *_ in rows] == [expected] * len(rows)
    assert rows[0][1:] == (staying, 4)


def test_a_copy_whose_layers_come_one_at_a_time_has_the_tokens_of_the_stock_model() -> None:
    one_layer = sum(p.nbytes for p in deep("qwen3", torch.float64).model.layers[0].parameters())
    _check_copies("qwen3", Layout(2), 2 * one_layer, 2)


def test_a_device_without_room_for_two_layers_is_told_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock_copy, "unused_bytes", lambda *_: 1000)
    told = "a stock copy of the model needs .* and two layers, and may take .* there; leave evaluation.prompts out"
    with World(Layout(1), backend=backend()) as world:
        copy = StockCopy(prepare_untried(deep("qwen3", torch.float64), world), world)
        with pytest.raises(ModelError, match=told):
            copy.run(_generate, "tokens")


@pytest.mark.whole
@pytest.mark.parametrize("home", [Layout(1), Layout(2, tp=2), Layout(2, pp=2), Layout(2, ep=2)], ids=str)
@pytest.mark.parametrize(("room", "staying"), [(None, 4), (0, 0)])
def test_copies_of_every_home(home: Layout, room: int | None, staying: int) -> None:
    for family in ("gpt-oss", "qwen3-moe") if home.ep > 1 else ("gpt-oss", "qwen3"):
        _check_copies(family, home, room, staying)


def test_a_device_without_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock_copy, "unused_bytes", lambda *_: 1000)
    with pytest.raises(ModelError, match=r"a stock copy .* needs 0.0 GiB on the first rank, for 2 weights around"):
        _copied(0, "qwen3", Layout(1), None)


def _prompted(folder: Path, **changes: Any) -> RunConfig:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prompts.txt").write_text(PROMPTS)
    keys = {"evaluation__prompts": str(folder / "prompts.txt"), "evaluation__max_new_tokens": 7, "train__steps": 3}
    return small_config(folder, **keys | {"model__dtype": "float64"} | changes)


def _check_completions(config: RunConfig, model: PreTrainedModel, tokenizer: Any) -> list[dict[str, Any]]:
    """Those after the last step are of the saved model."""
    rows = read_metrics(Path(config.run.dir) / "completions.jsonl")
    assert [row["step"] for row in rows] == [2, 2, 3, 3]
    for row, prompt in zip(rows[-2:], PROMPTS.splitlines(), strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        mask = torch.ones_like(ids)
        output: Any = model.generate(ids, attention_mask=mask, max_new_tokens=7, do_sample=False)
        new = output[0, ids.shape[1] :]
        assert (row["prompt"], row["tokens"]) == (prompt, len(new))
        assert row["completion"] == tokenizer.decode(new, skip_special_tokens=True)
    return rows


def test_a_run_completes_prompts_as_its_saved_model_and_not_again_when_it_is_resumed(tmp_path: Path) -> None:
    config = _prompted(tmp_path, context__context_parallel_size=1, evaluation__context_parallel_size=1)
    lines = lines_of(0, config, 1)
    model = Path(config.run.dir) / "model"
    saved = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    rows = _check_completions(config, saved, AutoTokenizer.from_pretrained(model))
    assert "'def rank' -> '" in lines and "after step 3: 2 completions of 14 tokens in" in lines
    assert "of weights were gathered; 2 of 2 layers stayed on the first rank" in lines
    page = write_report(config.run.dir).read_text()
    assert "Completions" in page and json.dumps(rows[0]["completion"])[1:-1] in page
    assert "completions of" not in lines_of(0, config, 1)
    assert read_metrics(Path(config.run.dir) / "completions.jsonl") == rows


def test_a_kill_while_samples_are_written_loses_no_evaluation_and_no_best_step(tmp_path: Path) -> None:
    keys = {"evaluation__every": 1, "train__steps": 2, "checkpoint__keep_best": "eval_loss", **ALONE}
    config = _prompted(tmp_path, **keys)
    run, killed = Path(config.run.dir), tmp_path / "killed"

    def copy_and_complete(*args: Any) -> Completions:
        if not killed.exists():
            shutil.copytree(run, killed)  # as a kill would leave it
        return complete_prompts(*args)

    with patch.object(evaluations_module, "complete_prompts", copy_and_complete):
        lines_of(0, config, 1)
    assert [path.name for path in (killed / "checkpoints").iterdir()] == ["step-000001"]
    assert not (killed / "completions.jsonl").read_text()
    lines = lines_of(0, replace(config, run=replace(config.run, dir=str(killed))), 1)
    assert f"going on from {killed}/checkpoints/step-000001: 1 of 2 steps are done" in lines
    assert (killed / "best.json").read_text() == (run / "best.json").read_text()
    rows, resumed = (read_metrics(folder / "completions.jsonl") for folder in (run, killed))
    texts, resumed_texts = ([(row["step"], row["completion"]) for row in group] for group in (rows, resumed))
    assert texts == resumed_texts and [step for step, _ in texts] == [1, 1, 2, 2]
    metrics, resumed_metrics = (read_metrics(folder / "metrics.jsonl") for folder in (run, killed))
    losses = [(row["step"], row["eval_loss"]) for row in metrics if "eval_loss" in row]
    assert losses == [(row["step"], row["eval_loss"]) for row in resumed_metrics if "eval_loss" in row]
    assert [step for step, _ in losses] == [1, 2]


@pytest.mark.whole
def test_ranks_of_every_home_complete_as_the_saved_model(tmp_path: Path) -> None:
    for name, parallel in (("fsdp", ParallelConfig()), ("tp", ParallelConfig(tp=2)), ("pp", ParallelConfig(pp=2))):
        degree = 2 if name == "fsdp" else 1
        degrees = {"context__context_parallel_size": degree, "evaluation__context_parallel_size": degree}
        keys = {f"parallel__{key}": getattr(parallel, key) for key in ("tp", "pp")} if degree == 1 else {}
        config = _prompted(tmp_path / name, **degrees | keys)
        train_rows(config, 2)
        model = Path(config.run.dir) / "model"
        saved = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
        _check_completions(config, saved, AutoTokenizer.from_pretrained(model))


@pytest.mark.whole
def test_an_adapters_run_completes_as_stock_peft(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    config = _prompted(tmp_path, model__path=str(base), lora__rank=4, optimizer__lr=0.05)
    train_rows(config, 2)
    model = Path(config.run.dir) / "model"
    saved = AutoPeftModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    _check_completions(config, saved, AutoTokenizer.from_pretrained(model))


def test_the_verb_completes_as_the_run_from_folders_and_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _prompted(tmp_path, context__context_parallel_size=1, evaluation__context_parallel_size=1)
    lines_of(0, config, 1)
    first, second = (row["completion"] for row in read_metrics(Path(config.run.dir) / "completions.jsonl")[-2:])
    words = ["--max-new-tokens", "7", "--json", "--world", "1"]
    (tmp_path / "rows.jsonl").write_text('{"text": "def rank"}\n{"prompt": "def rank", "temperature": 1.5}\n')
    given = [word for prompt in PROMPTS.splitlines() for word in ("--prompt", prompt)]
    given += ["--prompts", str(tmp_path / "rows.jsonl"), "--dtype", "float64"]
    drawn = list[str]()
    for target, seed in ((config.run.dir, "1"), (f"{config.run.dir}/model", "1"), (config.run.dir, "2")):
        assert cli_main(["generate", target, *given, *words, "--seed", seed]) == 0
        *plain, sampled = (row["completion"] for row in json.loads(capsys.readouterr().out))
        assert plain == [first, second, first]
        drawn.append(sampled)
    assert drawn[0] == drawn[1] != drawn[2]
    for flags, message in (
        ([], "there is no prompt"),
        (["--prompts", "absent.txt"], "there is no file absent.txt"),
        (["--prompt", "a", "--temperature", "-1"], "--temperature is -1"),
    ):
        assert cli_main(["generate", config.run.dir, *flags]) == 2
        assert message in capsys.readouterr().err
    saved = Path(config.run.dir) / "model" / "config.json"
    saved.write_text(json.dumps(json.loads(saved.read_text()) | {"max_position_embeddings": 39}))
    assert cli_main(["generate", f"{config.run.dir}/model", *words, "--prompt", "a", "--prompt", "a " * 20]) == 2
    assert "--prompt 2: the prompt has 40 tokens, and the model knows 39 positions" in capsys.readouterr().err


def test_prompts_are_texts_or_chats_up_to_the_answer(tmp_path: Path) -> None:
    folder = write_base(tmp_path / "plain")
    tokenizer = load_tokenizer(folder)
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "ab"}\n\n{"text": "ab", "temperature": 0.5}\n')
    plain, text = encode_prompts(read_prompt_rows(file), tokenizer, None)
    for name, rows in (
        ("a.json", '[{"text": "ab"},\n {"text": "ab"}]'),
        ("a.csv", 'text\nab\n"ab"\n'),
        ("a.txt", "ab\nab"),
    ):
        (tmp_path / name).write_text(rows)
        same = encode_prompts(read_prompt_rows(tmp_path / name), tokenizer, None)
        assert [prompt.ids for prompt in same] == [plain.ids] * 2
    assert plain.ids == text.ids == tuple(tokenizer.engine.encode("ab", add_special_tokens=False).ids)
    assert (plain.temperature, text.temperature) == (None, 0.5)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(folder)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "ab"}]
    file.write_text(f'{{"prompt": "ab"}}\n{{"text": "ab"}}\n{json.dumps({"messages": messages})}\n')
    chat, text, several = encode_prompts(read_prompt_rows(file), tokenizer, None)
    stock = AutoTokenizer.from_pretrained(folder)
    for prompt, turns in ((chat, messages[1:]), (several, messages)):
        expected = stock.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        assert (prompt.text, [*prompt.ids]) == ("ab", expected)
    assert text.ids == plain.ids
    for line, message in (
        ("{}", r"line 1: it has ; give one of prompt, text, messages"),
        ('{"prompt": "a", "text": "b"}', "it has 'prompt', 'text'; give one"),
        ('{"prompt": "a", "temperature": -1}', "or a temperature of at least 0"),
        ('{"messages": [{"content": "a"}]}', r"line 1: messages\[0\] needs an object with a string role"),
        ('{"text": ""}', "line 1: the prompt has no tokens, and a model goes on from one at least"),
        ("[]", "needs an object"),
        ("", "there are no prompts"),
    ):
        file.write_text(line)
        with pytest.raises(DataError, match=message):
            encode_prompts(read_prompt_rows(file), tokenizer, None)
    file.write_text('{"text": "ab"}\n{"text": "ab ab ab"}')
    assert len(encode_prompts(read_prompt_rows(file), tokenizer, 8)) == 2
    with pytest.raises(DataError, match="line 2: the prompt has 8 tokens, and the model knows 7 positions"):
        encode_prompts(read_prompt_rows(file), tokenizer, 7)
    with pytest.raises(ConfigError, match=r"evaluation.prompts is 'p', which needs model.num_labels 0"):
        check_config(load_config(None, {"evaluation.prompts": "p", "model.num_labels": 1}), 1)
