"""A run over several sources, whole and packed: tokens by weight in every row, said at the start, and resumed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longspan.config.sections import RunConfig, SourceConfig
from longspan.data.documents import Corpus
from longspan.run.loggers import read_metrics
from longspan.testing import run_ranks
from longspan.train.plans.order import make_step_order, source_lines
from tests.train.small import small_config, train_rank, write_texts


def config_of(folder: Path, steps: int, **changes: Any) -> RunConfig:
    config = small_config(folder, train__steps=steps, train__eval_every=0, train__save_every=4, **changes)
    paths = [write_texts(folder / name, count) for name, count in (("first", 4), ("second", 9))]
    sources = tuple(SourceConfig(str(path), weight) for path, weight in zip(paths, (3.0, 1.0), strict=True))
    return replace(config, data=replace(config.data, path="", sources=sources))


@pytest.mark.parametrize(
    "changes",
    [pytest.param({}, id="whole", marks=pytest.mark.whole), pytest.param({"data__pack_to": 32}, id="packed")],
)
def test_tokens_of_sources_stand_by_their_weights(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = config_of(tmp_path, 8, data__eval_documents=2, **changes)
    run_ranks(train_rank, 2, config, 2, timeout=120)
    rows = read_metrics(Path(config.run.dir) / "metrics.jsonl")
    tokens = np.array([row["source_tokens"] for row in rows if "loss" in row])
    assert (tokens.sum(axis=1) == [row["tokens"] for row in rows if "loss" in row]).all()
    totals = tokens.sum(axis=0)
    corpus = Corpus(Path(config.run.dir) / "corpus")
    assert abs(totals[0] / 3 - totals[1]) <= corpus.lengths.max()
    order = make_step_order(config, corpus)
    assert tokens.tolist() == [order.source_tokens(step) for step in range(8)]
    first, second = source_lines(config, order)
    assert "weight 3, 0.75 of the tokens of steps; it has" in first and "weight 1, 0.25 of" in second
