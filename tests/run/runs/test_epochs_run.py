"""Runs of epochs: every document trained on exactly so often, as all lines and predictions say, resumed too."""

import io
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longspan import World
from longspan.cli.plans.answer import open_documents
from longspan.config.sections import RunConfig
from longspan.data.documents import Corpus
from longspan.errors import ConfigError
from longspan.run.checks import check_config
from longspan.run.loggers import read_metrics
from longspan.run.loop import train
from longspan.run.progress import ProgressDisplay
from longspan.testing import backend, run_ranks
from longspan.train.plans.order import make_step_order
from tests.train.small import small_config, without_times

LARGER = 10**6  # than an epoch


def lines_of(rank: int, config: RunConfig, ranks: int) -> str:
    """What a run prints on this rank."""
    out = io.StringIO()
    home = check_config(config, ranks)
    with World(home, backend=backend()) as world, ProgressDisplay(config.train.steps, out) as display:
        train(config, world, display)
    return out.getvalue()


def config_of(folder: Path, tokens: int, epochs: float, **keys: Any) -> RunConfig:
    """A run of a few texts, most of them cut into several documents."""
    keys = {"train__save_every": 0, "train__eval_every": 0, "train__warmup_steps": 0, **keys}
    keys = {"data__max_document_tokens": 32, **keys}
    return small_config(folder, train__tokens_per_step=tokens, train__epochs=epochs, **keys)


def trained(config: RunConfig) -> list[dict[str, Any]]:
    return [row for row in read_metrics(Path(config.run.dir) / "metrics.jsonl") if "loss" in row]


ALONE = {"context__context_parallel_size": 1, "context__eval_context_parallel_size": 1}
PIPELINE = ALONE | {"parallel__pp": 2}
FREE = ALONE | {"context__mode": "free", "context__max_tokens_per_slot": 64}
CASES: dict[str, tuple[int, int, float, dict[str, Any]]] = {  # ranks, tokens a step, epochs, further keys
    "a step is more than an epoch": (1, LARGER, 2, ALONE),
    "a short last step": (1, 150, 1, ALONE),
    "a pipeline": (2, 400, 2, PIPELINE),
    "free slots, and part of an epoch": (2, 200, 1.5, FREE),
    "packs": (
        2,
        200,
        1,
        {"data__max_document_tokens": 0, "data__pack_to": 40, "context__eval_max_tokens_per_slot": 99},
    ),
}


@pytest.mark.parametrize(("ranks", "tokens", "epochs", "keys"), CASES.values(), ids=CASES)
def test_the_tokens_of_a_run_are_those_of_its_corpus(
    tmp_path: Path, ranks: int, tokens: int, epochs: float, keys: dict[str, Any]
) -> None:
    config = config_of(tmp_path, tokens, epochs, **keys)
    out, rows = run_ranks(lines_of, ranks, config, ranks, timeout=120)[0], trained(config)
    corpus = Corpus(Path(config.run.dir) / "corpus")
    order = make_step_order(config, corpus)
    training = np.setdiff1d(np.arange(len(corpus)), order.evaluation)
    epoch = int(corpus.lengths[training].sum())
    total = sum(row["tokens"] for row in rows)
    assert total == epochs * epoch if epochs != 1.5 else epoch < total < 2 * epoch
    assert epoch in np.cumsum([row["tokens"] for row in rows]) and max(row["tokens"] for row in rows) <= tokens
    assert len(rows) == order.count_steps() and rows[-1]["lr"] == pytest.approx(6e-4)  # the last of the schedule
    texts = "" if order.texts == len(training) else f" of {order.texts} texts"
    read = (
        f"{len(training)} documents{texts} to train on, of {epoch:,} tokens, which {len(rows)} steps? read {epochs:g}"
    )
    assert re.search(rf"{read} times; 3 texts (of \d+ documents )?held out \(data.eval_documents\)", out)
    assert f"train.epochs {epochs:g}: {len(rows)} step" in out and "repeatedly" not in out
    assert re.search(rf"\nsteps +{len(rows)}, each of up to {min(tokens, epoch):,} tokens\n", out)
    with open_documents(config, lambda line: None, estimate=False) as planned:
        assert planned.steps == len(rows)
        assert [sum(planned.order.lengths_of_step(step)) for step in range(len(rows))] == [r["tokens"] for r in rows]
        assert re.match(read, planned.line)


def test_a_run_of_epochs_goes_on_in_the_middle_of_one_and_with_one_more(tmp_path: Path) -> None:
    config = config_of(tmp_path, 250, 2, train__save_every=2, train__schedule="constant", **ALONE)
    run_ranks(lines_of, 1, config, 1, timeout=120)
    rows, folder = trained(config), Path(config.run.dir)
    begun = tmp_path / "begun"
    shutil.copytree(folder, begun)
    for path in sorted((begun / "checkpoints").iterdir())[1:]:
        shutil.rmtree(path)
    (begun / "summary.json").unlink()
    resumed = replace(config, run=replace(config.run, dir=str(begun)))
    run_ranks(lines_of, 1, resumed, 1, timeout=120)
    assert [*map(without_times, trained(resumed))] == [*map(without_times, rows)]

    longer = replace(config, train=replace(config.train, epochs=3.0))
    run_ranks(lines_of, 1, longer, 1, timeout=120)
    tokens = [row["tokens"] for row in trained(longer)]
    assert tokens[: len(rows)] == [row["tokens"] for row in rows] and sum(tokens) * 2 == 3 * sum(tokens[: len(rows)])
    steps = replace(longer, train=replace(longer.train, epochs=0.0, steps=99))
    with pytest.raises(ConfigError, match=r"under train.epochs 0 step \d+ does not begin where .*; it was 3 then"):
        run_ranks(lines_of, 1, steps, 1, timeout=120)
