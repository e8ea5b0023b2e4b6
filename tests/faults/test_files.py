"""Files that others remove, cut or date while a run is at work: how it ends, and what the same command does then."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longspan.errors import LongspanError, RankLostError
from longspan.testing import run_ranks
from tests.faults.live_run import saved_steps
from tests.train.small import small_config, train_rank

Fault = Callable[[Path], object]  # of a folder with run/, texts/ and cache/


def remove_texts(folder: Path) -> None:
    shutil.rmtree(folder / "texts")


def remove_corpus_of_run(folder: Path) -> None:
    shutil.rmtree(folder / "run/corpus")


def remove_tokens(folder: Path) -> None:
    shutil.rmtree(folder / "cache")


def cut_tokens(folder: Path) -> None:
    (tokens,) = folder.glob("cache/**/tokens.bin")
    os.truncate(tokens, 0)


def remove_checkpoints(folder: Path) -> None:
    shutil.rmtree(folder / "run/checkpoints")


def remove_run(folder: Path) -> None:
    shutil.rmtree(folder / "run")


def date_everything_ahead(folder: Path) -> None:
    ahead = time.time() + 10 * 365 * 86400
    for path in folder.rglob("*"):
        os.utime(path, (ahead, ahead))


def train_with_fault(rank: int, config: Any, folder: Path, fault: Fault | None) -> int:
    from longspan.run.run_data import TrainingRun

    take = TrainingRun.take_step

    def take_after_fault(self: Any, plan: Any, documents: Any, step: int, *meanwhile: Any) -> Any:
        if rank == 0 and step == 3 and fault is not None:
            fault(folder)
        return take(self, plan, documents, step, *meanwhile)

    TrainingRun.take_step = take_after_fault
    return train_rank(rank, config, 2).done


whole = pytest.mark.whole
FAULTS = [
    # the fault, the error of the run ("": none), that of the next command, and the checkpoints after the first
    (cut_tokens, r"was killed by signal 7 \(SIGBUS\), as Linux does where a mapped file", "", [2]),
    pytest.param(remove_tokens, "", "", [2, 4, 6], marks=whole),
    pytest.param(remove_texts, "", r"data.path '.*texts' does not exist", [2, 4, 6], marks=whole),
    pytest.param(remove_corpus_of_run, "", "run has checkpoints but no corpus: restore", [2, 4, 6], marks=whole),
    pytest.param(remove_checkpoints, "", "", [4, 6], marks=whole),
    pytest.param(
        remove_run, "run was removed or renamed while the run was at work", "but no corpus: restore", [4], marks=whole
    ),
    pytest.param(date_everything_ahead, "", "", [2, 4, 6], marks=whole),
]


@pytest.mark.parametrize(("fault", "error", "next_error", "saved"), FAULTS)
def test_files_change_under_a_run(fault: Fault, error: str, next_error: str, saved: list[int], tmp_path: Path) -> None:
    keys = {"train__steps": 6, "train__save_every": 2, "train__eval_every": 0}
    config = small_config(tmp_path, data__cache=str(tmp_path / "cache"), train__save_async="off", **keys)

    def train(fault: Fault | None) -> list[int]:
        return run_ranks(train_with_fault, 2, config, tmp_path, fault)

    if error:
        with pytest.raises(RankLostError if fault is cut_tokens else LongspanError, match=error):
            train(fault)
    else:
        assert train(fault) == [6, 6]
    assert saved_steps(tmp_path) == saved
    if next_error:
        with pytest.raises(LongspanError, match=next_error):
            train(None)
    else:
        assert train(None) == [6, 6]
