"""Named evaluation sets in a run: what is evaluated when, against the stock model, and what is written of it."""

import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from longspan import World
from longspan.config.file import load_config
from longspan.config.sections import ModelConfig, RunConfig
from longspan.data.corpus_documents import Corpus
from longspan.data.run_order import make_step_order
from longspan.errors import ConfigError, DataError, LongspanError
from longspan.model.presets import preset_config
from longspan.run.checks import check_config
from longspan.run.evaluations import Evaluations
from longspan.run.facts import TrainResult
from longspan.run.loop import train
from longspan.run.metrics import read_metrics
from longspan.run.progress import ProgressDisplay
from longspan.run.run_data import open_data
from longspan.testing import backend, run_ranks
from longspan.train.run_model.rope_scaling import check_set_length
from tests.corpus.rows.families import write_folder
from tests.model.stock import without_trials
from tests.run.runs.homes import ALONE, refusals
from tests.train.small import small_config, write_texts

HERE = "tests.run.eval_metrics"
Straight = tuple[RunConfig, str, TrainResult]


def said(rank: int, config: RunConfig, ranks: int) -> tuple[str, TrainResult]:
    stream = io.StringIO() if rank == 0 else None
    home = check_config(config, ranks)
    with without_trials(), World(home, backend=backend()) as world, ProgressDisplay(4, stream) as display:
        result = train(config, world, display)
    return "" if stream is None else stream.getvalue(), result


def said_of_each(rank: int, configs: Sequence[RunConfig]) -> list[tuple[str, TrainResult]]:
    return [said(rank, config, 2) for config in configs]


def run(*configs: RunConfig) -> list[tuple[str, TrainResult]]:
    return run_ranks(said_of_each, 2, configs, timeout=90)[0]


def with_sets(folder: Path, *tables: dict[str, Any], **changes: object) -> RunConfig:
    books = write_texts(folder / "books", count=7)
    return small_config(folder, evaluation__sets=[{"path": str(books)} | table for table in tables], **changes)


def rows_of(config: RunConfig, name: str | None = None) -> list[dict[str, Any]]:
    rows = read_metrics(Path(config.run.dir) / "metrics.jsonl")
    return [row for row in rows if "eval_loss" in row and row.get("eval_name") == name]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    config = with_sets(
        tmp_path_factory.mktemp("sets"),
        {"name": "books", "every": 3, "max_document_tokens": 0},
        {"name": "some", "documents": 3, "context_parallel_size": 1},
        train__steps=4,
        evaluation__metrics=[f"{HERE}.top_five"],
        evaluation__max_tokens_per_slot=128,
    )
    return config, *run(config)[0]


def test_the_row_of_a_set_is_of_its_documents(straight: Straight) -> None:
    """Whose losses and hits are those of the stock model in tests/evaluation/test_evaluate.py."""
    config, _, result = straight
    books, some = result.named
    assert (books.name, some.name, len(some.document_losses)) == ("books", "some", 3)
    assert [line.split()[-1] for line in result.text().splitlines()[-2:]] == ["books", "some"]
    corpus = Corpus(Path(config.run.dir) / "evaluation" / "books")
    assert [loss.count + 1 for loss in books.document_losses] == corpus.lengths.tolist()
    row, targets = rows_of(config, "books")[-1], int(corpus.lengths.sum()) - 7
    assert (row["eval_documents"], row["eval_tokens"], row["eval_targets"]) == (7, targets + 7, targets)
    assert row["eval_loss"] == pytest.approx(sum(loss.sum for loss in books.document_losses) / targets, rel=1e-12)
    assert row["eval_perplexity"] == pytest.approx(math.exp(row["eval_loss"]), rel=1e-12)
    bits = row["eval_loss"] * targets / math.log(2)
    characters = sum(len(path.read_text()) for path in Path(config.evaluation.sets[0].path).iterdir())
    assert 0.9 * bits / characters < row["eval_bits_per_byte"] < 1.2 * bits / characters
    assert 0 < row["eval_token_accuracy"] < row["eval_top_five"] < 1


def test_each_set_is_evaluated_when_it_is_due_and_as_it_says(straight: Straight) -> None:
    config, text, _ = straight
    assert [(row["step"], row["cp"]) for row in rows_of(config)] == [(2, 2), (4, 1), (4, 2)]
    books = [(row["step"], row["cp"], row["planner"]) for row in rows_of(config, "books")]
    assert books == [(3, 2, "fixed"), (4, 2, "fixed")]
    assert [(row["step"], row["cp"]) for row in rows_of(config, "some")] == [(2, 1), (4, 1)]
    assert "evaluation set books: 7 documents of 655 tokens, longest 147; evaluated every 3 steps and after the" in text
    assert "evaluation set some: 3 documents of 180 tokens" in text
    assert "step 3/4  evaluation of books: loss " in text and "step 2/4  evaluation loss " in text


def test_documents_of_a_set_that_are_trained_on_are_said(straight: Straight) -> None:
    """The books are seven of the twelve texts, of which the run holds out three."""
    config, text, _ = straight
    corpus = Corpus(Path(config.run.dir) / "corpus")
    held_out = {corpus.origin(d) for d in make_step_order(config, corpus).evaluation}
    (names,) = [{path.name for path in Path(config.evaluation.sets[0].path).iterdir()}]
    caution = f"{len(names - held_out)} of 7 documents of evaluation set books are also trained on, token for token: "
    assert 0 < len(names - held_out) < 7 and text.count(caution) == 1 and "held-out documents are also" not in text
    lines = json.loads((Path(config.run.dir) / "run.json").read_text())["lines"]
    assert [name for name, line in lines if line.startswith(caution)] == ["caution"]


TEXTS = [f"{name} text of so many words " * 3 for name in "abcdefghijklmnopqrst"]


def write_rows(path: Path, texts: Sequence[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def test_rows_that_are_held_out_or_in_a_set_are_looked_for_in_training(tmp_path: Path, token_cache: Path) -> None:
    datasets: Any = pytest.importorskip("datasets")
    rows = write_rows(tmp_path / "rows.jsonl", TEXTS)
    datasets.Dataset.from_dict({"text": [*TEXTS[:3], "of no other text"]}).to_parquet(tmp_path / "some.parquet")
    sets = [
        {"name": "all", "path": rows, "max_document_tokens": 8},
        {"name": "some", "path": str(tmp_path / "some.parquet")},
        {"name": "part", "path": rows, "split": "train[:2]"},
        {"name": "new", "path": write_rows(tmp_path / "new.txt.jsonl", ["of no text", "of no text"])},
    ]

    def counts(folder: str, path: str, held_out: int = 0, resumed: bool = False) -> tuple[list[Any], list[str]]:
        keys = {"data__path": path, "evaluation__documents": held_out, **ALONE}
        config = small_config(tmp_path / folder, evaluation__sets=sets, data__max_document_tokens=20, **keys)
        model, said = preset_config("qwen3-tiny", vocab_size=300), list[str]()
        with World(check_config(config, 1), backend="gloo") as world:
            checkpoint = Path("of an earlier session") if resumed else None
            found = open_data(config, model, checkpoint, world, said.append).sets
        assert [s.documents.corpus.lengths.max() for s in found if s.name == "all"] == [8]  # type: ignore[attr-defined]
        return [(s.name, s.trained_on, len(s.documents)) for s in found], [s.caution for s in found if s.caution]

    whole, said = counts("a", rows)
    (name, trained, documents), *others = whole
    assert (name, others) == ("all", [("some", 3, 4), ("part", 2, 2), ("new", 0, 2)]) and trained == documents > 20
    assert said[1] == (
        "3 of 4 documents of evaluation set some are also trained on, token for token: their loss is not that "
        "of unseen text"
    )
    assert counts("a", rows, resumed=True) == (whole, said) == counts("b", rows)  # from the cache
    twice = write_rows(tmp_path / "twice.jsonl", [*TEXTS, *TEXTS])  # as two configurations of one data set
    ((name, trained, documents), *_), said = counts("c", twice, held_out=7)
    assert (name, trained) == ("", documents) and said[0].startswith(f"{trained} of {documents} held-out doc")
    held, _ = counts("d", rows, held_out=7)
    assert held[0][:2] == ("", 0) and held[1][1] < held[1][2], "what is held out is not trained on"
    for file in token_cache.glob("*/hashes.npy"):  # as an earlier version made it
        file.unlink()
    assert {trained for _, trained, _ in counts("a", rows)[0]} == {None}
    assert all("is not known: an earlier version made their tokens" in line for line in counts("a", rows)[1])


def test_a_signal_inside_an_evaluation_ends_the_run_with_a_checkpoint(straight: Straight, tmp_path: Path) -> None:
    config, *_ = straight
    books = replace(config.evaluation.sets[0], planner="padded", context_parallel_size=1)
    many = replace(books, path=str(write_texts(tmp_path / "many", count=16)), max_tokens_per_slot=256)
    stopped = replace(config.with_sets([many]), run=replace(config.run, dir=str(tmp_path / "run")))
    stopped = replace(stopped, evaluation=replace(stopped.evaluation, metrics=(f"{HERE}.told_to_stop",), every=0))
    others = stopped.with_sets(config.evaluation.sets[:1])  # which are no other run
    (text, result), (resumed, end) = run(stopped, others)
    assert re.search(r"of books after step 3 was stopped after 1 of \d+ micro-batches .*: SIGTERM was received", text)
    assert (result.stopped, result.done) == ("SIGTERM", 3)
    assert (tmp_path / "run" / "checkpoints" / "step-000003").is_dir()
    assert (end.stopped, end.done) == ("", 4) and "books: the corpus changed (evaluation.sets.books.path was" in resumed
    assert [(row["step"], row["cp"]) for row in rows_of(stopped, "books")] == [(3, 2), (4, 2)]
    losses, same = ([row["eval_loss"] for row in rows_of(c, "books")] for c in (config, stopped))
    assert losses == same


LONG = r"evaluation.sets.books.context_parallel_size 1 and \S*slot 64 do not suit the longest document of set 'books' "
LONG += r"\(147 tokens, of file06.py\) on 2 ranks: .* evaluation.sets.books.max_document_tokens cuts longer texts"
REFUSED: list[tuple[dict[str, Any], dict[str, Any], type[LongspanError], str]] = [
    ({"path": "/nowhere"}, {}, DataError, r"evaluation.sets.books.path '/nowhere' does not exist"),
    (
        {},
        {"evaluation__metrics": [f"{HERE}.top_four"]},
        ConfigError,
        r"evaluation.metrics has '\S*top_four', .* has no function",
    ),
    (
        {},
        {"evaluation__metrics": ["nowhere.f"]},
        ConfigError,
        r"evaluation.metrics has 'nowhere.f', and nowhere cannot be imp",
    ),
    ({}, {"evaluation__metrics": [f"{HERE}.loss"]}, ConfigError, r"^evaluation.metrics: a metric is called 'loss'"),
    ({"max_document_tokens": 0, "context_parallel_size": 1}, {}, ConfigError, LONG),
]


def test_what_does_not_fit_is_refused_before_the_first_step(tmp_path: Path) -> None:
    tables = [({"name": "books"} | table, changes) for table, changes, *_ in REFUSED]
    configs = [with_sets(tmp_path / str(i), table, **changes) for i, (table, changes) in enumerate(tables)]
    for error, config, (*_, kind, message) in zip(refusals(configs), configs, REFUSED, strict=True):
        assert type(error) is kind and re.search(message, str(error)), (message, error)
        assert not list(Path(config.run.dir).glob("metrics.jsonl"))


def test_documents_of_a_set_are_no_longer_than_the_model_knows(tmp_path: Path) -> None:
    check = partial(check_set_length, preset_config("qwen3-tiny", vocab_size=300), ModelConfig(), 60)
    with pytest.raises(
        ConfigError, match=r"has 1000000 tokens \(of set 'books'\), .* with evaluation.sets.books.max_document_tok"
    ):
        check("books", 10**6)
    check("books", 60)


def test_rows_of_a_set_are_encoded_as_the_training_data_are(tmp_path: Path) -> None:
    """The tokens that end a turn are in generation_config.json, which the run's folder has later, if at all."""
    tokenizer, rows = write_folder(tmp_path / "tokenizer", "phi3"), tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": [{"role": r, "content": "so"} for r in ("user", "assistant")]}))
    keys = {"data__path": str(rows), "data__tokenizer": str(tokenizer), "evaluation__documents": 0, **ALONE}
    config = small_config(tmp_path, evaluation__sets=[{"name": "a", "path": str(rows)}], **keys)
    model = preset_config("qwen3-tiny", vocab_size=400)
    with World(check_config(config, 1), backend="gloo") as world:
        data = open_data(config, model, None, world, lambda _: None)
    assert data.corpus.documents_folder == data.sets[0].documents.corpus.documents_folder


def test_a_best_step_is_saved_before_other_sets_are_evaluated_and_samples_written() -> None:
    """Of three steps, evaluated at each and the last: what happens, without and with patience."""
    happened = list[str]()

    class Watched(Evaluations):
        def _evaluate_set(self, entry: Any, choice: Any, done: int) -> Any:
            happened.append(f"evaluate {entry.name}")
            return SimpleNamespace(row=lambda: {"eval_name": entry.name})

        def _record_evaluations(self, entry: Any, evaluations: Any) -> None:
            happened.append(f"record {entry.name}")

        def _record_completions(self, done: int) -> None:
            happened.append("samples")

    class FakeSaves:
        done = 1

        def save_if_best(self, row: dict[str, str]) -> None:
            happened.append(f"save {row['eval_name']}")

        def wait_for_best(self) -> None:
            happened.append("wait")

    saves: Any = FakeSaves()
    of_sets = [f"{action} {name}" for name in "ab" for action in ("evaluate", "record", "save")]
    for patience in (0, 1):
        keys = {"train.steps": 3, "evaluation.every": 1, "evaluation.patience": patience}
        sets = [SimpleNamespace(name=name, config=SimpleNamespace(every=every)) for name, every in (("a", 1), ("b", 2))]
        run: Any = SimpleNamespace(config=load_config(None, keys), sets=sets, evaluation_choice=lambda _: None)
        evaluations = Watched(run, *[cast(Any, None)] * 3)
        for saves.done, expected in ((1, [*of_sets[:3], "wait", "samples"]), (2, [*of_sets, "wait", "samples"])):
            assert evaluations.evaluate_due(saves) == "" and happened == expected
            happened.clear()
        saves.done = 3
        assert evaluations.are_due(3) == bool(patience)
        assert evaluations.evaluate_due(saves) == "" and happened == of_sets * patience, "samples are of the best step"
        happened.clear()
