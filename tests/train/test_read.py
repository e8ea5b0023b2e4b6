"""Documents read whole by one slot each, their rows moved to those who compute them: the same losses, fewer reads."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longspan.errors import ConfigError
from longspan.testing import backend, run_ranks
from longspan.train import run as run_module
from longspan.train.config import RunConfig
from longspan.train.config_file import load_config
from longspan.train.metrics import read_rows
from tests.train.homes import farthest
from tests.train.small import small_config, train_rank

SETTINGS = {"model__dtype": "float64", "train__steps": 2, "context__max_tokens_per_slot": 128}
BOUND = 1e-12 if backend() == "gloo" else 1e-5


def _read(rank: int, config: RunConfig, ranks: int) -> list[tuple[int, int]]:
    """Rows that this rank read in each step of training, beside the rows of the step."""
    counted: list[tuple[int, int]] = []
    step = run_module.run_step

    def noted(model: Any, plan: Any, documents: Any, *others: Any, **named: Any) -> Any:
        before = documents.corpus.rows_read
        result = step(model, plan, documents, *others, **named)
        counted.append((documents.corpus.rows_read - before, plan.tokens))
        return result

    run_module.run_step = noted
    try:
        train_rank(rank, config, ranks)
    finally:
        run_module.run_step = step
    return counted


def _trained(config: RunConfig, ranks: int) -> tuple[list[float], list[float], list[int]]:
    """Losses of training and of evaluation, and how many more rows than those of the step all ranks read."""
    steps = zip(*run_ranks(_read, ranks, config, ranks, timeout=110), strict=True)
    extra = [sum(read for read, _ in ranks_of_step) - ranks_of_step[0][1] for ranks_of_step in steps]
    rows = read_rows(Path(config.run.dir) / "metrics.jsonl")
    losses, evaluations = ([row[key] for row in rows if key in row] for key in ("loss", "eval_loss"))
    return losses, evaluations, extra


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], float]:
    """Losses of two steps and of the evaluation after them, each slot reading the rows that it computes."""
    config = small_config(tmp_path_factory.mktemp("straight"), **SETTINGS)
    losses, evaluations, extra = _trained(config, 2)
    assert all(rows > 0 for rows in extra)  # the row after a piece is read for its last label
    return losses, evaluations[0]


CASES: list[tuple[int, dict[str, object]]] = [
    (2, {}),
    (3, {"context__planner": "dynamic", "context__mode": "free", "context__eval_context_parallel_size": 3}),
    (2, {"context__planner": "padded", "context__context_parallel_size": 1, "parallel__reshard_after_forward": False}),
]


@pytest.mark.parametrize(("ranks", "changes"), CASES, ids=["fixed", "free", "padded"])
def test_losses_are_the_same_and_each_row_is_read_once(
    straight: tuple[list[float], float], tmp_path: Path, ranks: int, changes: dict[str, object]
) -> None:
    losses, evaluations, extra = _trained(small_config(tmp_path, data__read="documents", **SETTINGS, **changes), ranks)
    assert farthest(losses, straight[0]) < BOUND
    assert farthest(evaluations, [straight[1]] * len(evaluations)) < BOUND
    assert extra == [0, 0]


def test_ranks_of_a_pipeline_and_of_tensor_parallelism_read_too(
    straight: tuple[list[float], float], tmp_path: Path
) -> None:
    """Each tensor-parallel rank of the first and of the last stage reads; one slot, then, has nobody to share with."""
    for name, changes in {"pp": {"parallel__pp": 2}, "tp": {"parallel__tp": 2}}.items():
        config = small_config(tmp_path / name, data__read="documents", **SETTINGS, **changes)
        losses, evaluations, extra = _trained(config, 4)
        assert farthest(losses, straight[0]) < BOUND
        assert farthest(evaluations, [straight[1]] * len(evaluations)) < BOUND
        tokens = [row["tokens"] for row in read_rows(Path(config.run.dir) / "metrics.jsonl") if "tokens" in row]
        assert extra == tokens  # twice the rows of a step, by two ranks of each slot


def test_a_run_may_go_on_with_other_readers(tmp_path: Path) -> None:
    config = small_config(tmp_path, **{**SETTINGS, "train__steps": 1})
    run_ranks(train_rank, 2, config, 2)
    more = replace(config, data=replace(config.data, read="documents"), train=replace(config.train, steps=2))
    assert run_ranks(train_rank, 2, more, 2)[0].done == 2


def test_another_word_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"data.read is 'document' .* one of 'rows', 'documents' \(did you mean 'docu"
    ):
        load_config(None, {"data.read": "document"})
