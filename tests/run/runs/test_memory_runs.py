"""Runs whose layers keep what a plan of memory chose: the losses and gradients of runs that recompute nothing.

Every model is trained in float64 with room for everything, and with the least that fits, under which its layers keep
different things. A step has several micro-batches.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from longspan.config.sections import RunConfig
from longspan.errors import ConfigError
from longspan.model import prepare
from longspan.testing import run_ranks
from longspan.train.run_model import prepare as preparing
from tests.run.runs.homes import gone_on_from_the_first_checkpoint
from tests.train.small import small_config, train_rank

SETTINGS: dict[str, object] = {"model__dtype": "float64", "train__steps": 2, "context__max_tokens_per_slot": 32}
SETTINGS |= {"evaluation__every": 0, "evaluation__documents": 0}
ADAPTERS = {"model__preset": "qwen3-deep-tiny", "lora__rank": 4, "optimizer__lr": 1e-3}
HYBRID = {"model__preset": "bamba-tiny", "context__partition": "zigzag", "context__planner": "dynamic"}
ROOM = 1 << 40


class Trained(NamedTuple):
    steps: list[tuple[float, float]]
    memory: dict[str, Any]


def _train(rank: int, config: RunConfig, size: int) -> Trained:
    train, run = replace(config.train, device_memory_limit=size), replace(config.run, dir=f"{config.run.dir}-{size}")
    with pytest.MonkeyPatch.context() as patch:
        asked = dict[str, Any]()

        def prepare_noting(*parts: Any, **options: Any) -> Any:
            asked.update(options)
            return prepare(*parts, **options)

        patch.setattr(preparing, "prepare", prepare_noting)
        train_rank(rank, replace(config, train=train, run=run), 2)
    trained = _read(Path(run.dir))
    assert list(asked["options"].checkpoint_policies) == trained.memory["checkpoint_policies"]
    assert asked["options"].reshard_after_forward is trained.memory["reshard_after_forward"]
    return trained


def _read(folder: Path) -> Trained:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    memory = json.loads((folder / "run.json").read_text())["memory"]
    return Trained([(row["loss"], row["grad_norm"]) for row in rows], memory)


def _train_with_less(rank: int, config: RunConfig, resumed: bool) -> tuple[str, Trained, Trained]:
    """The refusal of a kibibyte, and a run with room for all beside one with the least that the refusal names.

    A `resumed` one goes on from the first checkpoint of a run with room for all.
    """
    plain = _train(rank, config, ROOM)
    with pytest.raises(ConfigError) as refusal:
        _train(rank, config, 1 << 10)
    least = re.search(r"needs at least [^(]*\(([\d,]+) bytes\)", str(refusal.value))
    assert least is not None
    size = int(least[1].replace(",", ""))
    if resumed and rank == 0:
        of_plain = replace(config, run=replace(config.run, dir=f"{config.run.dir}-{ROOM}"))
        gone_on_from_the_first_checkpoint(of_plain, Path(f"{config.run.dir}-{size}"))
    return str(refusal.value), plain, _train(rank, config, size)


# The layers of other models are in tests/model/activations/test_recompute.py.
@pytest.mark.parametrize(
    ("changes", "resumed"),
    [(ADAPTERS | {"checkpoint__every": 1}, True), pytest.param(HYBRID, False, marks=pytest.mark.whole)],
    ids=["adapters", "hybrid"],
)
def test_what_layers_keep_changes_no_loss_or_gradient(
    changes: dict[str, object], resumed: bool, tmp_path: Path
) -> None:
    config = small_config(tmp_path, **SETTINGS | changes)
    (refusal, *plain_and_less), (of_other, *_) = run_ranks(_train_with_less, 2, config, resumed, timeout=280)
    assert refusal == of_other and "that may fill 0.0 GiB (1,024)" in refusal
    (plain, all_kept), (less, chosen) = plain_and_less
    assert set(all_kept["checkpoint_policies"]) == {"none"} and not all_kept["reshard_after_forward"]
    assert len(set(chosen["checkpoint_policies"])) > 1 and chosen["device"]["total"] < all_kept["device"]["total"]
    assert less == [pytest.approx(step, rel=1e-12) for step in plain]
