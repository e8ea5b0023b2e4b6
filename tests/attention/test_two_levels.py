"""`a2a+p2p` in slices of heads: exact as dense attention, and messages ahead of use, in one order on all ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longspan import Layout, World, attend, bind
from longspan.attention import all_to_all, ring
from longspan.comm import Channel
from longspan.testing import backend, run_ranks
from tests.attention.cases import Case, Question, Way, cases_of, micro_batch, worst_errors
from tests.attention.test_attend import check, needs
from tests.reference import dense_attention, relative_error

QUESTIONS = (
    Question("ragged", "gqa", sinks=True),
    Question("even", "mha", dropout=0.3, sinks=True),
    Question("ragged", "mqa", causal=False),  # one key/value head: all slices share it
    Question("long", "64/8 of 64", window=30),
    Question("shares without rows", "mla", window=5, sinks=True, spans=4),
    Question("padded", "gqa", "float32", chunk=24),
)


ORDER = {  # of a rank with two slices and a ring of two: what it sends, and what it computes
    "forward": "heads heads block compute block compute compute out compute out",
    "backward": "dout dout block compute block compute gradient rows compute gradient compute rows rows rows",
}
LABELS = {
    "attention all-to-all forward": "heads",
    "attention ring forward": "block",
    "attention all-to-all forward, back": "out",
    "attention all-to-all backward": "dout",
    "attention ring backward": "block",
    "attention ring backward, gradients": "gradient",
    "attention all-to-all backward, gradients": "rows",
}


def sliced(rank: int, slots: int, cases: list[Case], slices: int) -> list[float]:
    """Errors of cases with tensors taken for large, from member to member."""
    all_to_all.SLICE_BYTES, all_to_all.SLICES = 0, slices  # in this process only
    with World(Layout(ranks=slots), backend=backend(), timeout=60) as world:
        return worst_errors(cases, slots, world)


IN_CI = ((4, (2, 2), 2), (8, (4, 2), 4))  # the others run with make test-all
SHAPES = [(slots, sizes, slices) for slots, sizes in ((4, (2, 2)), (8, (4, 2)), (8, (2, 4))) for slices in (2, 4)]


@pytest.mark.parametrize(
    ("slots", "sizes", "slices"),
    [pytest.param(*shape, marks=[pytest.mark.whole] * (shape not in IN_CI)) for shape in SHAPES],
    ids=str,
)
def test_parity_in_slices(slots: int, sizes: tuple[int, int], slices: int) -> None:
    needs(slots)
    check(slots, cases_of(QUESTIONS, [Way("a2a+p2p", sizes)]), partial(sliced, slices=slices))


def events(rank: int, slots: int) -> tuple[dict[str, str], float]:
    """What a rank sends and computes, in order, and the worst error of out and gradients under recomputation."""
    all_to_all.SLICE_BYTES = 0  # in this process only
    done = list[str]()

    def spy(owner: Any, name: str, event: Callable[..., str]) -> None:
        function = getattr(owner, name)

        def noted(*args: Any) -> Any:
            done.append(event(*args))
            return function(*args)

        setattr(owner, name, noted)

    for name in ("shift", "all_to_all_rows"):
        spy(Channel, name, lambda *args: LABELS[args[-1]])
    spy(all_to_all, "add_block", lambda *_: "compute")
    spy(ring, "block_gradients", lambda *_: "compute")
    with World(Layout(ranks=slots), backend=backend(), timeout=60) as world:
        lengths = (24, 9)
        shard = bind(micro_batch((tuple(range(slots)), lengths)), world)
        generator = torch.Generator().manual_seed(0)
        shapes = ((8, 16), (4, 16), (4, 16), (8, 16))
        *qkv, dout = (torch.randn((shard.tokens, *s), generator=generator, dtype=torch.float64) for s in shapes)
        full = [x.clone().requires_grad_() for x in qkv]
        leaves = [shard.scatter(x.to(shard.device)).requires_grad_() for x in qkv]
        expected = dense_attention(full[0], full[1], full[2], lengths)
        expected.backward(dout)

        def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, shard, cp_comm_type="a2a+p2p")

        q, k, v = leaves
        out: Tensor = checkpoint(layer, q, k, v, use_reentrant=False)  # pyright: ignore[reportAssignmentType]
        forward = " ".join(done)
        done.clear()
        out.backward(shard.scatter(dout.to(shard.device)))
        again = " ".join(done)
        assert again.startswith(f"{forward} "), again  # recomputed
        worst = relative_error(shard.gather(out.detach()).cpu(), expected)
        for mine, exact in zip(leaves, full, strict=True):
            assert mine.grad is not None and exact.grad is not None
            worst = max(worst, relative_error(shard.gather(mine.grad).cpu(), exact.grad))
    return {"forward": forward, "backward": again.removeprefix(f"{forward} ")}, worst


def test_messages_travel_ahead_in_one_order_on_every_rank() -> None:
    needs(4)
    for order, worst in run_ranks(events, 4, 4):
        assert order == ORDER
        assert worst <= 1e-12
