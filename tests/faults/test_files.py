"""Files that others remove, cut or date while a run is at work: how it ends, and what the same command does then."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longspan.config.sections import RunConfig
from longspan.errors import LongspanError, RankLostError, RunFolderError
from longspan.testing import run_ranks
from tests.faults.live_run import saved_steps
from tests.train.small import small_config, train_rank, write_texts

Fault = Callable[[Path], object]  # of a folder with run/, texts/ and cache/


def cut_tokens(folder: Path) -> None:
    (tokens,) = folder.glob("cache/**/tokens.bin")
    os.truncate(tokens, 0)


def remove_run(folder: Path) -> None:
    shutil.rmtree(folder / "run")


def remove_all_but_the_run(folder: Path) -> None:
    """The texts, their tokens, the run's corpus and its checkpoints; what is left is dated ahead."""
    shutil.copytree(folder / "run/corpus", folder / "corpus")
    for name in ("texts", "cache", "run/corpus", "run/checkpoints"):
        shutil.rmtree(folder / name)
    ahead = time.time() + 10 * 365 * 86400
    for path in folder.rglob("*"):
        os.utime(path, (ahead, ahead))


def train_with_fault(rank: int, config: RunConfig, folder: Path, fault: Fault | None) -> int:
    from longspan.run.run_data import TrainingRun

    take = TrainingRun.take_step

    def take_after_fault(self: Any, plan: Any, documents: Any, step: int, *host_work: Any) -> Any:
        if rank == 0 and step == 2 and fault is not None:
            fault(folder)
        return take(self, plan, documents, step, *host_work)

    TrainingRun.take_step = take_after_fault
    return train_rank(rank, config, 2).done


@pytest.fixture
def train(tmp_path: Path, token_cache: Path) -> Callable[..., list[int]]:
    keys = {"train__steps": 3, "checkpoint__every": 2, "evaluation__every": 0, "evaluation__documents": 0}
    config = small_config(tmp_path, checkpoint__async_mode="off", **keys)
    return lambda fault=None: run_ranks(train_with_fault, 2, config, tmp_path, fault)


def test_a_cut_file_of_tokens_ends_the_run_and_is_made_again(train: Callable[..., list[int]], tmp_path: Path) -> None:
    with pytest.raises(RankLostError, match=r"was killed by signal 7 \(SIGBUS\), as Linux does where a mapped file"):
        train(cut_tokens)
    assert saved_steps(tmp_path) == [2] and train() == [3, 3]


def test_a_run_whose_folder_is_removed_saves_and_ends(train: Callable[..., list[int]], tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="run was removed or renamed while the run was at work"):
        train(remove_run)
    assert saved_steps(tmp_path) == [3]
    with pytest.raises(LongspanError, match="but no corpus: restore"):
        train()


@pytest.mark.whole
def test_a_run_ends_well_without_files_that_are_read_later(train: Callable[..., list[int]], tmp_path: Path) -> None:
    assert train(remove_all_but_the_run) == [3, 3] and saved_steps(tmp_path) == [3]
    with pytest.raises(LongspanError, match=r"data.path '.*texts' does not exist"):
        train()
    write_texts(tmp_path / "texts")
    with pytest.raises(LongspanError, match="run has checkpoints but no corpus: restore"):
        train()
    shutil.move(tmp_path / "corpus", tmp_path / "run/corpus")
    assert train() == [3, 3] and saved_steps(tmp_path) == [3]
