"""When a run saves, by a clock that is moved by hand, and what it does before an error."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from longspan.comm import on_all_ranks
from longspan.config.file import load_config
from longspan.errors import CheckpointError, CommError, LongspanError, NonFiniteError, RankLostError, RunFolderError
from longspan.run import saves as module
from longspan.run.saves import Saves


class FakeSaver:
    """Notes what is saved, and what would be waited for; `refusal` is raised where a save ends."""

    written: list[tuple[int, int]]
    refusal: CheckpointError | None = None

    def __init__(self, *_: Any, keep: int, **__: Any) -> None:
        self.keep, self.left = keep, ""

    def save(self, *_: Any, step: int, state: Any) -> None:
        if self.refusal is None:
            self.written.append((step, self.keep))

    def wait(self) -> None:
        self.left = "waited"
        if self.refusal is not None:
            raise self.refusal

    def give_up(self, seconds: float = 0.0) -> None:
        self.left = f"waited at most {seconds:g} s" if seconds else "given up"


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(step, keep) of every checkpoint that would be written."""
    FakeSaver.written = []
    monkeypatch.setattr(module, "CheckpointSaver", FakeSaver)
    return FakeSaver.written


def saves_of(rank: int = 0, done: int = 0, **keys: Any) -> Saves:
    config = load_config()
    config = replace(config, train=replace(config.train, **keys))
    world = SimpleNamespace(rank=rank, home=SimpleNamespace(ranks=(0, 1)), timeout=60.0)
    order = SimpleNamespace(version=2, begin_of_step=lambda step: step)
    run: Any = SimpleNamespace(
        config=config, world=world, done=done, checkpoints="c", model=None, optimizer=None, order=order
    )
    return Saves(run, lambda _: None)


def test_the_first_ranks_clock_counts_from_the_last_checkpoint(
    saved: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    first, second, never = saves_of(save_minutes=2.0), saves_of(rank=1, save_minutes=2.0), saves_of(save_minutes=0.0)
    answers = []
    for seconds in (100.0, 130.0, 200.0, 260.0):
        now[0] = seconds
        answers.append(first.minutes_are_over())
        assert not second.minutes_are_over() and not never.minutes_are_over()
        if first.is_save_due(minutes_over=first.minutes_are_over()):
            first.save()
    assert answers == [False, True, False, True] and saved == [(0, 2), (0, 2)]


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize(("done", "due"), [(0, False), (3, True), (4, False), (6, True), (7, True)])
def test_steps_between_checkpoints_and_the_last(done: int, due: bool) -> None:
    saves = saves_of(save_every=3, steps=7)
    saves.done = done
    assert saves.is_save_due(minutes_over=False) == due and saves.is_save_due(minutes_over=True)


def broken_weights() -> NonFiniteError:
    error = NonFiniteError("nan")
    error.weights_are_finite = False
    return error


ERRORS = [
    (on_all_ranks(RunFolderError("full")), True, "waited"),
    (on_all_ranks(NonFiniteError("nan")), True, "waited"),
    (on_all_ranks(broken_weights()), False, "waited"),
    (on_all_ranks(CheckpointError("full")), False, "waited"),
    (RankLostError("rank 1 is lost"), False, "given up"),
    (CommError("ranks disagree"), False, "waited at most 15 s"),
    (RunFolderError("of this rank alone"), False, "waited at most 15 s"),
]


@pytest.mark.parametrize(("error", "saves", "left"), ERRORS, ids=str)
def test_errors_of_all_ranks_are_raised_after_a_checkpoint(
    saved: list[tuple[int, int]], error: LongspanError, saves: bool, left: str
) -> None:
    error = type(error)(str(error)) if not error.on_all_ranks else error
    run = saves_of(done=4)
    with pytest.raises(type(error)) as raised, run.save_before_errors():
        run.done += 1
        raise error
    notes = getattr(raised.value, "__notes__", [])
    assert (saved, notes) == ([(5, 0)], ["The weights after 5 steps are saved in c"]) if saves else ([], [])
    assert vars(run.saver)["left"] == left  # a checkpoint that was being written before


def test_nothing_new_is_not_saved_and_a_disk_that_is_full_is_said(
    saved: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = saves_of(done=4)
    with pytest.raises(RunFolderError), run.save_before_errors():
        raise on_all_ranks(RunFolderError("full"))
    assert not saved

    monkeypatch.setattr(FakeSaver, "refusal", CheckpointError("no space"))
    with pytest.raises(RunFolderError) as raised, run.save_before_errors():
        run.done += 2
        raise on_all_ranks(RunFolderError("full"))
    assert raised.value.__notes__ == ["What was trained since step 4 is lost: no space"]
