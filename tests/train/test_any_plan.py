"""A step's loss and gradients do not depend on planner, degree, order of documents, number of slots, or who reads."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from longspan.comm import World
from longspan.errors import DataError, PlanError
from longspan.layout import Layout, Partition
from longspan.model import prepare
from longspan.plan import Group, MicroBatch, Plan, plan_dynamic, plan_fixed, plan_padded
from longspan.testing import backend, run_ranks
from longspan.train import run_step
from longspan.train.readers import exchange_of, whole_documents
from tests.model.stock import gradients_of, stock_answer, texts, tiny, worst

LENGTHS = (13, 1, 30, 7, 2, 18, 5, 9)
SLOTS = (1, 2, 3, 4, 6, 8)
Readers = Callable[[Sequence[int], int], Partition]


def every_row_somewhere(lengths: Sequence[int], slots: int) -> Partition:
    """Rows dealt round robin, in no order, some of them read twice."""
    rows = np.random.default_rng(0).permutation(sum(lengths))
    dealt = [rows[slot::slots].tolist() for slot in range(slots)]
    return Partition.from_rows([mine + dealt[(slot + 1) % slots][:2] for slot, mine in enumerate(dealt)])


def first_slot(lengths: Sequence[int], slots: int) -> Partition:
    return Partition.from_rows([range(sum(lengths)), *[[]] * (slots - 1)])


def _plans(lengths: Sequence[int], home: Layout) -> dict[str, tuple[Plan, Readers | None]]:
    slots, narrow = home.slots, 1 if home.slots < 4 else 2
    some_idle = MicroBatch(tuple(Group((slots - 1,), (d,), (n,)) for d, n in enumerate(lengths)))
    targets = sum(lengths) - len(lengths)
    return {
        "fixed": (plan_fixed(lengths, home, cp=slots, max_tokens_per_slot=16 if slots > 1 else 32), None),
        "padded": (plan_padded(lengths, home, cp=narrow, max_tokens_per_slot=32), whole_documents),
        "dynamic": (plan_dynamic(lengths, home, max_tokens_per_slot=32 if slots < 4 else 8), first_slot),
        "free": (plan_dynamic(lengths, home, max_tokens_per_slot=32, mode="free"), every_row_somewhere),
        "idle": (Plan(slots, tuple(lengths), (MicroBatch(), some_idle, MicroBatch()), targets), None),
    }


def _errors(rank: int, slots: int) -> dict[tuple[torch.dtype, str, bool], tuple[float, float]]:
    """Of loss and gradients, by type, plan, and whether documents come in another order."""
    found = {}
    with World(Layout(ranks=slots), backend=backend(), timeout=60) as world:
        for dtype in (torch.float32, torch.float64):
            wanted = stock_answer("qwen3", dtype, texts(LENGTHS), world.device)
            model = prepare(tiny("qwen3", dtype), world)
            for turned in (False, True) if dtype == torch.float64 else (False,):
                order = [3, 0, 7, 2, 1, 6, 5, 4] if turned else range(len(LENGTHS))
                documents = [texts(LENGTHS)[d] for d in order]
                lengths = [len(document) for document in documents]
                for name, (plan, readers) in _plans(lengths, world.home).items():
                    if name not in ("fixed", "dynamic") and (turned or dtype == torch.float32):
                        continue
                    moved = None if readers is None else readers(lengths, slots)
                    result = run_step(model, plan, documents, world, readers=moved)
                    found[dtype, name, turned] = (
                        abs(result.loss / wanted.loss - 1),
                        worst(gradients_of(model), wanted.gradients),
                    )
                    model.zero_grad()
    return found


@pytest.mark.parametrize("slots", SLOTS)
def test_loss_and_gradients(slots: int) -> None:
    for found in run_ranks(_errors, slots, slots):
        for (dtype, name, turned), (loss, gradients) in found.items():
            bounds = (1e-12, 1e-12) if dtype == torch.float64 else (1e-6, 1e-5)
            assert loss < bounds[0] and gradients < bounds[1], (dtype, name, turned, loss, gradients)


class Counted:
    """A document that notes the rows that it is asked for."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens, self.asked = tokens, 0

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        self.asked += len(positions)
        return self.tokens[positions]


def _asked(rank: int) -> list[int]:
    documents = [Counted(text) for text in texts(LENGTHS)]
    with World(Layout(ranks=2), backend=backend(), timeout=60) as world:
        model = prepare(tiny("qwen3"), world)
        plan = plan_fixed(LENGTHS, world.home, cp=2)
        run_step(model, plan, documents, world, backward=False, readers=whole_documents(LENGTHS, 2))
    return [document.asked for document in documents]


def test_a_reader_reads_its_documents_whole_and_no_other() -> None:
    first, second = run_ranks(_asked, 2)
    assert [a + b for a, b in zip(first, second, strict=True)] == list(LENGTHS)
    assert all(not a or not b for a, b in zip(first, second, strict=True)) and all(map(sum, (first, second)))


def test_whole_documents_are_cut_between_documents_and_about_even() -> None:
    for lengths in (LENGTHS, (1,), (), (100, 1, 1), (1, 1, 100)):
        for slots in (1, 2, 3, 8):
            readers = whole_documents(lengths, slots)
            assert sum(readers.counts) == sum(lengths) and readers.degree == slots
            ends = {0, *np.cumsum(lengths).tolist()}
            assert all(int(np.cumsum(readers.counts)[slot]) in ends for slot in range(slots))
    assert max(whole_documents((10,) * 40, 4).counts) == 100


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([range(85)], "rows of 1 slots, the plan has 2"),
        ([range(84), []], r"name 84 different rows, the plan has 85 \(0 to 84"),
        ([range(85), [85]], "name 86 different rows"),
    ],
)
def test_readers_that_do_not_fit(rows: list[Sequence[int]], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        exchange_of(plan_fixed(LENGTHS, Layout(ranks=2), cp=1), Partition.from_rows(rows))


class Unreadable:
    def __len__(self) -> int:
        return 30

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        raise OSError("the disk is gone")


def _unreadable(rank: int) -> str:
    documents = [*texts(LENGTHS)[:2], Unreadable(), *texts(LENGTHS)[3:]]
    with World(Layout(ranks=2), backend=backend(), timeout=60) as world:
        model = prepare(tiny("qwen3"), world)
        plan = plan_fixed(LENGTHS, world.home, cp=2)
        with pytest.raises(DataError) as caught:
            run_step(model, plan, documents, world, readers=whole_documents(LENGTHS, 2))
        return str(caught.value)


def test_what_one_reader_cannot_read_every_rank_says() -> None:
    assert set(run_ranks(_unreadable, 2)) == {"rank 0 could not read its rows: OSError: the disk is gone"}
