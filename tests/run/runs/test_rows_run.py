"""Runs on data of every kind: chats, whose targets are counted by hand, epochs, and sources by their weights."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import decoders
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig

from longspan.cli.eval import main as eval_main
from longspan.cli.main import main
from longspan.cli.plans.documents import open_planned_documents
from longspan.cli.plans.gpu_run import GpuRun
from longspan.cli.plans.gpus import choose_gpus
from longspan.config.file import load_config
from longspan.config.keys import NOT_GIVEN
from longspan.config.preference_losses import LOSSES
from longspan.config.sections import ModelConfig, RunConfig, SourceConfig
from longspan.data.corpus_documents import Corpus
from longspan.data.run_epochs import documents_line, source_lines, with_epoch_steps
from longspan.data.run_order import count_held_out, make_step_order, order_lengths
from longspan.data.step_order import StepOrder
from longspan.data.stream import Mixture
from longspan.errors import ConfigError
from longspan.model import load_model
from longspan.run.metrics import read_metrics
from longspan.run.set_up import write_model_files
from longspan.testing import run_ranks
from tests.corpus.test_formats import rows_as
from tests.model.stock import SIZES
from tests.run.runs.homes import ALONE, gone_on_from_the_first_checkpoint, lines_of, train_rows
from tests.run.runs.test_lora_run import write_base
from tests.train.small import WORDS, small_config, without_times, write_texts

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token if m.role == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
Answers = tuple[str, ...]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_base(tmp_path_factory.mktemp("chat") / "base")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def chat_config(folder: Path, base: Path, path: Path, **changes: Any) -> RunConfig:
    keys = {"train__steps": 2, "evaluation__every": 2, "checkpoint__every": 0, "optimizer__warmup_steps": 1}
    keys |= {"evaluation__context_parallel_size": 1, **changes, "model__path": str(base), "model__dtype": "float64"}
    return small_config(folder, data__path=str(path), **keys)


def chats() -> list[tuple[dict[str, Any], Answers]]:
    draw, rows = np.random.default_rng(0), list[tuple[dict[str, Any], Answers]]()
    for i in range(12):
        answers = tuple(str(draw.choice(WORDS)) for _ in range(1 + i % 2))
        turns = [({"role": "user", "content": "q"}, {"role": "assistant", "content": a}) for a in answers]
        rows.append(({"messages": [message for turn in turns for message in turn]}, answers))
    return rows


def test_a_file_is_evaluated_as_a_run_reads_it(tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(shutil.copytree(base, tmp_path / "base"))
    thoughts = "{% if loop.last and m.reasoning_content %}<{{ m.reasoning_content }}>{% endif %}"
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("{{ m.content }}", thoughts + "{{ m.content }}"))
    rows = [row for row, _ in chats()]
    for row in rows:
        for message in row["messages"][1::2]:
            message["reasoning_content"] = "because"
    long = {"messages": [{"role": "user", "content": "q" * 3000}, *rows[1]["messages"][1:]]}
    path = rows_as("jsonl", tmp_path / "rows", [*rows[:4], {"messages": [{"role": "nobody"}]}, long])
    train = rows_as("jsonl", tmp_path / "train", rows[4:])
    keys: dict[str, Any] = {"data__split_turns": True, "data__on_bad_row": "skip", "data__max_text_bytes": 2000}
    keys |= ALONE | {"evaluation.sets": [{"name": "test", "path": str(path)}], "evaluation__documents": 0}
    config = chat_config(tmp_path, folder, train, **keys, checkpoint__every=1)
    lines_of(0, config, 1)
    (of_run,) = [row for row in read_metrics(Path(config.run.dir) / "metrics.jsonl") if row.get("eval_name") == "test"]
    words = ["--data", f"test={path}", "--world", "1", "--device", "cpu", "--json"]
    capsys.readouterr()
    assert eval_main([config.run.dir, *words]) == 0
    evaluated = json.loads(capsys.readouterr().out)
    names = ("eval_documents", "eval_tokens", "eval_targets", "eval_loss")
    assert [evaluated[name] for name in names] == [of_run[name] for name in names]
    assert of_run["eval_documents"] == 6 and of_run["eval_targets"] == 6 * len("<because>") + sum(
        len(answer) + 1 for _, answers in chats()[:4] for answer in answers
    )


def test_a_run_on_chats_counts_what_the_assistant_says(tmp_path: Path, base: Path) -> None:
    rows, answers = zip(*chats(), strict=True)
    by_hand = [sum(len(answer) + 1 for answer in one) for one in answers]
    path = rows_as("jsonl", tmp_path / "rows", list(rows))
    config = chat_config(tmp_path / "cached", base, path)
    train_rows(config, 2)
    corpus = Corpus(Path(config.run.dir) / "corpus")
    order = make_step_order(config, corpus)
    assert isinstance(order, StepOrder)
    metrics = read_metrics(Path(config.run.dir) / "metrics.jsonl")
    steps, evaluations = ([row for row in metrics if key in row] for key in ("loss", "eval_loss"))
    wanted = [sum(by_hand[i] for i in order.documents_of_step(step)) for step in range(2)]
    assert [row["targets"] for row in steps] == wanted and all(row["tokens"] > row["targets"] for row in steps)
    held_out = sum(by_hand[i] for i in order.evaluation)
    assert evaluations[0]["cp"] == 1 and {row["eval_targets"] for row in evaluations} == {held_out}

    with path.open("a") as file:
        file.write(json.dumps({"messages": [{"role": "user", "content": "no answer"}]}))
    skipping = chat_config(tmp_path / "skipping", base, path, data__on_bad_row="skip", train__steps=1, **ALONE)
    (row,) = train_rows(skipping, 1)
    assert row["loss"] == pytest.approx(steps[0]["loss"], rel=1e-9)
    left_out = Corpus(Path(skipping.run.dir) / "corpus").manifest
    assert left_out.left_out.bad_rows == 1 and left_out.bad[0].startswith("rows.jsonl, line 13: no message is of an")


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_chatml_base(folder: Path) -> Path:
    """A base model whose files stop at <|endoftext|> (256), and whose template ends turns with <|im_end|> (257)."""
    write_base(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(["<|im_end|>", "<|im_start|>"], special_tokens=True)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(**SIZES | {"vocab_size": 260, "tie_word_embeddings": False, "eos_token_id": 256})
    load_model(config=config, dtype="float64").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "adapter"])
def test_a_saved_model_stops_at_the_end_that_its_chats_teach(tmp_path: Path, lora: bool) -> None:
    base = write_chatml_base(tmp_path / "base")
    (base / "generation_config.json").write_text('{"eos_token_id": 256, "temperature": 0.6, "do_sample": true}')
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yo"}]
    path = rows_as("jsonl", tmp_path / "rows", [{"messages": turns}] * 12)
    keys = ALONE | {"optimizer__lr": 2e-2, "evaluation__every": 0, "lora__rank": 8 if lora else 0}
    config = chat_config(tmp_path, base, path, train__steps=25, **keys)
    printed, run = lines_of(0, config, 1), Path(config.run.dir)
    assert printed.count(f"answers end with <|im_end|>, at which {base} does not stop: ") == 1
    kind, alone = ("merged", "; with the adapter alone give it to generate()") if lora else ("saved", "")
    assert f": {kind} models get eos_token_id [256, 257] in generation_config.json{alone}\n" in printed + "\n"
    saved = [] if lora else [run / "model"]
    assert main(["export", str(run), str(tmp_path / "out"), *(["--merge"] if lora else [])]) == 0
    for folder in (*saved, tmp_path / "out"):
        assert json.loads((folder / "generation_config.json").read_text()) == {
            "eos_token_id": [256, 257], "temperature": 0.6, "do_sample": True
        }  # fmt: skip
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        prompt = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, return_tensors="pt")["input_ids"]
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        text = tokenizer.decode(model.generate(prompt, do_sample=False, max_new_tokens=16)[0, prompt.shape[1] :])
        assert text == "yo<|im_end|>"


@pytest.mark.whole
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "adapter"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_model_that_learns_preferences_stops_as_chats_do(tmp_path: Path, loss: str, lora: bool) -> None:
    base = write_chatml_base(tmp_path / "base")
    asked, good, bad = (
        {"role": role, "content": text} for role, text in (("user", "q"), *[("assistant", x) for x in "yn"])
    )
    row = {"prompt": [asked], "chosen": [good], "rejected": [bad]}
    if LOSSES[loss].has_labels:
        row = {"prompt": [asked], "completion": [good], "label": True}
    path = rows_as("jsonl", tmp_path / "rows", [row] * 12)
    keys = ALONE | {"train__loss": loss, "evaluation__every": 0, "lora__rank": 8 if lora else 0}
    config = chat_config(tmp_path, base, path, train__steps=1, **keys)
    assert lines_of(0, config, 1).count(f"answers end with <|im_end|>, at which {base} does not stop: ") == 1
    assert main(["export", config.run.dir, str(tmp_path / "out"), *(["--merge"] if lora else [])]) == 0
    for folder in (*([] if lora else [Path(config.run.dir) / "model"]), tmp_path / "out"):
        assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [256, 257]


@pytest.mark.parametrize(("stops", "eos", "saved"), [
    (None, 0, [0, 7]), (None, [0, 7], None), (0, 0, [0, 7]), ([3, 0], 0, [3, 0, 7]), ([7], 0, [7]), ({}, 0, [7]),
])  # fmt: skip
def test_ends_are_added_to_what_a_folder_says(tmp_path: Path, stops: Any, eos: Any, saved: list[int] | None) -> None:
    """Without generation_config.json, the model's configuration says at what it stops."""
    source, run, lines = tmp_path / "base", tmp_path / "run", list[str]()
    source.mkdir()
    run.mkdir()
    if stops is not None:
        (source / "generation_config.json").write_text(json.dumps({"eos_token_id": stops} if stops != {} else {}))
    write_model_files(
        run, ModelConfig(path=str(source), dtype="float32"), LlamaConfig(eos_token_id=eos), "LlamaForCausalLM",
        lines.append, {"<|im_end|>": 7}
    )  # fmt: skip
    file = run / "generation_config.json"
    assert (json.loads(file.read_text())["eos_token_id"] if file.is_file() else None) == saved
    assert len(lines) == (saved is not None and stops != [7])
    assert GenerationConfig.from_pretrained(run).eos_token_id == saved if saved else True


def epoch_config(folder: Path, tokens: int, epochs: float, **keys: Any) -> RunConfig:
    keys = {"checkpoint__every": 0, "evaluation__every": 0, "optimizer__warmup_steps": 0, **keys}
    keys = {"data__max_document_tokens": 32, **keys}
    return small_config(folder, train__tokens_per_step=tokens, train__epochs=epochs, **keys)


FREE = ALONE | {"context__mode": "free", "context__max_tokens_per_slot": 64}
CASES: dict[str, tuple[int, int, float, dict[str, Any]]] = {  # ranks, tokens a step, epochs, further keys
    "a step is more than an epoch": (1, 10**6, 2, ALONE | {"context__max_tokens_per_slot": 512}),
    "a short last step": (1, 200, 1, ALONE),
    "free slots, and part of an epoch": (2, 300, 1.5, FREE),
}


@pytest.mark.parametrize("case", CASES)
def test_the_tokens_of_a_run_are_those_of_its_corpus(tmp_path: Path, case: str) -> None:
    ranks, tokens, epochs, keys = CASES[case]
    config = epoch_config(tmp_path, tokens, epochs, **keys)
    out = lines_of(0, config, 1) if ranks == 1 else run_ranks(lines_of, ranks, config, ranks, timeout=120)[0]
    rows = train_rows(config)
    corpus = Corpus(Path(config.run.dir) / "corpus")
    order = make_step_order(config, corpus)
    training = np.setdiff1d(np.arange(len(corpus)), order.evaluation)
    epoch = int(corpus.lengths[training].sum())
    total = sum(row["tokens"] for row in rows)
    assert total == epochs * epoch if epochs != 1.5 else epoch < total < 2 * epoch
    assert epoch in np.cumsum([row["tokens"] for row in rows]) and max(row["tokens"] for row in rows) <= tokens
    assert len(rows) == order.count_steps() and rows[-1]["lr"] == pytest.approx(6e-4)  # the last of the schedule
    texts = "" if order.training_texts == len(training) else f" of {order.training_texts} texts"
    read = (
        f"{len(training)} documents{texts} to train on, of {epoch:,} tokens, which {len(rows)} steps? read {epochs:g}"
    )
    assert re.search(rf"{read} times; 3 texts (of \d+ documents )?held out \(evaluation.documents\)", out)
    assert f"train.epochs {epochs:g}: {len(rows)} step" in out and "repeatedly" not in out
    assert re.search(rf"\nsteps +{len(rows)}, each of up to {min(tokens, epoch):,} tokens\n", out)
    run = GpuRun.with_model(config, choose_gpus(config, ranks, on_gpus=False))
    with open_planned_documents(run, lambda line: None, estimate=False) as (_, facts, line):
        assert facts.steps == len(rows)
        assert [sum(facts.lengths_of_step(step)) for step in range(len(rows))] == [r["tokens"] for r in rows]
        assert re.match(read, line)


def test_a_model_of_ones_own_reads_each_chat_once_unless_steps_are_given(tmp_path: Path, base: Path) -> None:
    path = rows_as("jsonl", tmp_path / "rows", [row for row, _ in chats()])
    keys = {"optimizer__warmup_steps": NOT_GIVEN, "train__tokens_per_step": 40, "checkpoint__every": 2, **ALONE}
    config = chat_config(tmp_path, base, path, train__steps=NOT_GIVEN, **keys)
    rows, corpus = train_rows(config, 1), Corpus(Path(config.run.dir) / "corpus")
    training = np.setdiff1d(np.arange(len(corpus)), make_step_order(config, corpus).evaluation)
    assert sum(row["tokens"] for row in rows) == corpus.lengths[training].sum() and len(rows) > 3
    assert rows[-1]["lr"] == pytest.approx(0.1 * config.optimizer.lr)  # the schedule has as many steps
    written = load_config(Path(config.run.dir) / "config.toml")
    train = written.train
    assert (train.epochs, train.steps, written.optimizer.warmup_steps) == (1, len(rows), len(rows) // 20)
    resumed = train_rows(gone_on_from_the_first_checkpoint(written, tmp_path / "begun"), 1)
    assert [*map(without_times, resumed)] == [*map(without_times, rows)]


def test_a_run_of_epochs_goes_on_in_the_middle_of_one_and_with_one_more(tmp_path: Path) -> None:
    config = epoch_config(tmp_path, 250, 2, checkpoint__every=2, optimizer__lr_schedule="constant", **ALONE)
    rows = train_rows(config, 1)
    resumed = train_rows(gone_on_from_the_first_checkpoint(config, tmp_path / "begun"), 1)
    assert [*map(without_times, resumed)] == [*map(without_times, rows)]

    longer = replace(config, train=replace(config.train, epochs=3.0))
    tokens = [row["tokens"] for row in train_rows(longer, 1)]
    assert tokens[: len(rows)] == [row["tokens"] for row in rows] and sum(tokens) * 2 == 3 * sum(tokens[: len(rows)])
    steps = replace(longer, train=replace(longer.train, epochs=0.0, steps=99))
    with pytest.raises(ConfigError, match=r"under train.epochs 0 step \d+ does not begin where .*; it was 3 then"):
        train_rows(steps, 1)


def test_tokens_of_sources_stand_by_their_weights(tmp_path: Path) -> None:
    keys = {"train__steps": 8, "evaluation__every": 0, "evaluation__documents": 2, **ALONE}
    config = small_config(tmp_path, **keys)
    paths = [write_texts(tmp_path / name, count) for name, count in (("first", 4), ("second", 9))]
    sources = tuple(SourceConfig(str(path), weight) for path, weight in zip(paths, (3.0, 1.0), strict=True))
    config = replace(config, data=replace(config.data, path="", sources=sources))
    rows = train_rows(config, 1)
    tokens = np.array([row["source_tokens"] for row in rows])
    assert (tokens.sum(axis=1) == [row["tokens"] for row in rows]).all()
    totals = tokens.sum(axis=0)
    corpus = Corpus(Path(config.run.dir) / "corpus")
    assert abs(totals[0] / 3 - totals[1]) <= corpus.lengths.max()
    order = make_step_order(config, corpus)
    assert tokens.tolist() == [order.tokens_of_step_by_source(step) for step in range(8)]
    first, second = source_lines(config, order)
    assert "weight 3, 0.75 of the tokens of steps; it has" in first and "weight 1, 0.25 of" in second


FEW = [  # tokens a step -> what is logged, where two epochs have 3,800 tokens in documents of 50
    (4096, "only 2 optimizer updates, of up to 1,900 tokens .*; with --train.tokens_per_step 76 there are at least 50"),
    (64, ""),
]


@pytest.mark.parametrize(("tokens_per_step", "words"), FEW)
def test_epochs_of_few_steps_are_told_how_to_have_more(tmp_path: Path, tokens_per_step: int, words: str) -> None:
    keys: dict[str, Any] = {"train__epochs": 2.0, "optimizer__warmup_steps": 0, "evaluation__documents": 2}
    config, lines = small_config(tmp_path, train__tokens_per_step=tokens_per_step, **keys), list[str]()
    with_epoch_steps(config, order_lengths(config, np.full(40, 50)), lines.append)
    assert len(lines) == 1 + bool(words) and re.match(words, lines[-1] if words else ""), lines


def test_a_line_counts_the_tokens_that_steps_read(tmp_path: Path) -> None:
    """Not those that they have room for: a step of 1,000 takes one group of 600, and four of 100 once they come."""
    lengths = np.array([200] * 12 + [100] * 4)
    groups = [np.arange(3 * i, 3 * i + 3) for i in range(4)] + [np.array([i]) for i in range(12, 16)]
    for steps in (2, 3):
        config = small_config(tmp_path, train__steps=steps, train__tokens_per_step=1000, evaluation__documents=0)
        order = order_lengths(config, lengths, group=lambda _: groups)
        read = sum(sum(order.lengths_of_step(step)) for step in range(steps))
        assert read < 1000 * steps, "steps are not full"
        line = documents_line(config, order)
        assert f"2,800 tokens, which {steps} steps read about {read / 2800:.3g} times" in line


@pytest.mark.parametrize(("answers_of_row", "line"), [
    (1, "54 answers to train on, of 1,620 tokens (3,780 with the mismatched answers of steps), which 2 steps read"),
    (2, "108 answers of 54 texts to train on, of 3,240 tokens (7,560 with the mismatched answers of steps), which"),
])  # fmt: skip
def test_one_in_ten_answers_of_kto_is_held_out(tmp_path: Path, answers_of_row: int, line: str) -> None:
    """Documents have 30 tokens, mismatched ones 40; of a row of a pair both answers stay together."""
    config = small_config(
        tmp_path, train__steps=2, train__loss="kto", evaluation__documents="auto", model__preset="llama-3.1-8b"
    )
    texts = None if answers_of_row == 1 else np.repeat(np.arange(60), 4)
    order = order_lengths(config, np.array([30, 40] * (60 * answers_of_row)), unit=2, texts=texts)
    assert line in (text := documents_line(config, order))
    assert f"; 6 texts{' of 12 answers' if answers_of_row > 1 else ''} held out" in text


OFTEN = [  # steps, weights of two sources with 450 and 900 tokens (none: one source of 1,500) -> cautions
    ({"train__steps": 5}, (), []),
    ({"train__steps": 300}, (), [r"these 300 steps read every document about 154 times; --train.epochs 1 reads each"]),
    ({"train__epochs": 20.0}, (), []),  # were asked for
    ({"train__steps": 6}, (1.0, 2.0), []),
    ({"train__steps": 60}, (9.0, 1.0), [r"of chats about 120 times; --train.epochs 1 --train.epochs_of chats reads"]),
    (
        {"train__epochs": 2.0, "train__epochs_of": "pdfs"},
        (9.0, 1.0),
        [r"these \d+ steps read every document of chats about \d\d times"],
    ),
]


@pytest.mark.parametrize(("keys", "weights", "cautions"), OFTEN)
def test_a_run_that_reads_documents_often_is_cautioned(
    tmp_path: Path, keys: dict[str, Any], weights: tuple[float, ...], cautions: list[str]
) -> None:
    keys = {"train__tokens_per_step": 1000, "optimizer__warmup_steps": 0, "evaluation__documents": 0, **keys}
    config = small_config(tmp_path, **keys)
    mixture, lengths = None, np.full(30, 50)
    if weights:
        sources = tuple(SourceConfig(path, weight) for path, weight in zip(("chats", "pdfs"), weights, strict=True))
        config = replace(config, data=replace(config.data, path="", sources=sources))
        lengths, mixture = np.full(27, 50), Mixture(np.repeat([0, 1], [9, 18]), weights, 1)
    lines, order = list[str](), order_lengths(config, lengths, mixture=mixture)
    config = with_epoch_steps(config, order, lines.append)
    found = [line for line in lines if line.startswith("caution: ")]
    assert len(found) == len(cautions) and all(re.search(*pair) for pair in zip(cautions, found, strict=True)), lines
    of_sources = source_lines(config, order) if weights else ()
    assert "e+0" not in "\n".join([documents_line(config, order), *of_sources, *lines])
    assert 0 < config.train.steps < 10**4


def test_epochs_without_a_document_are_an_error(tmp_path: Path) -> None:
    config = small_config(tmp_path, train__epochs=1e-9, evaluation__documents=0)
    with pytest.raises(
        ConfigError, match=r"train.epochs is 1e-09, by which not one of 40 documents .* at least 0.03, or"
    ):
        with_epoch_steps(config, order_lengths(config, np.full(40, 50)), lambda _: None)
    train = replace(config.train, epochs=0.03)
    few = replace(config, train=train, optimizer=replace(config.optimizer, warmup_steps=0))
    assert with_epoch_steps(few, order_lengths(few, np.full(40, 50)), lambda _: None).train.steps == 1


def test_a_tenth_of_few_documents_is_held_out_unless_a_number_is_given() -> None:
    counts = {documents: count_held_out("auto", documents) for documents in (1, 2, 7, 153, 319, 320, 9000)}
    assert counts == {1: 0, 2: 1, 7: 1, 153: 15, 319: 31, 320: 32, 9000: 32}
    assert [count_held_out(count, 40) for count in (0, 32, 60)] == [0, 32, 60]
    demo, other = load_config(), load_config(None, {"model.preset": "qwen3-0.6b"})
    assert [order_lengths(config, np.full(500, 50)).held_out_texts for config in (demo, other)] == [8, 32]
