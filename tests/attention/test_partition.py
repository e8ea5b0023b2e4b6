"""Contiguous rows, as planners deal them out: exact under every type, and under a2a never laid in another order."""

import pytest
import torch

from longspan import Layout, Plan, World, attend, bind, plan_dynamic, plan_fixed, plan_padded
from longspan.attention import all_to_all
from longspan.attention.rows import join_columns
from longspan.plan import PartitionKind
from longspan.testing import backend, run_ranks
from tests.attention.cases import LEVELS, LIMIT, RAGGED, Question, Way, squares_of
from tests.attention.test_attend import needs

DOCUMENTS = ((1,), (1, 2), RAGGED, (2, 1, 60, 3, 1))  # shorter than the degree, beginning and ending inside a share
QUESTIONS = (Question("", "gqa"), Question("", "mqa", causal=False), Question("", "mla", window=5, sinks=True))
TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")


def planned(slots: int, kind: str) -> list[Plan]:
    """Plans of all planners; those of a cap have groups of several degrees."""
    home, sizes = Layout(ranks=slots), LEVELS[slots]
    plans = [
        planner(
            lengths, home, slots, cp_comm_type=kind, hierarchical_context_parallel_sizes=sizes, partition="contiguous"
        )
        for planner in (plan_fixed, plan_padded)
        for lengths in DOCUMENTS
    ]
    dynamic = plan_dynamic(
        (40, 9, 2),
        home,
        max_tokens_per_slot=-(-40 // slots),
        cp_comm_type=kind,
        hierarchical_context_parallel_sizes=sizes,
        partition="contiguous",
    )
    return [*plans, dynamic]


def errors(rank: int, slots: int) -> list[tuple[str, float]]:
    """The worst error of each type: of out, dq, dk and dv over the rows of all ranks."""
    with World(Layout(ranks=slots), backend=backend()) as world:
        worst = []
        for kind in TYPES:
            squares = [
                squares_of((question, Way(None)), slots, bind(batch, world))[:8]
                for plan in planned(slots, kind)
                for batch in plan.micro_batches
                for question in QUESTIONS
            ]
            sums = world.control.sum_over_slots([x for of_batch in squares for x in of_batch])
            worst.append((kind, max((e / (w or 1.0)) ** 0.5 for e, w in zip(sums[::2], sums[1::2], strict=True))))
        return worst


@pytest.mark.parametrize("slots", [4, *(pytest.param(n, marks=pytest.mark.whole) for n in (2, 3))])
def test_contiguous_plans_are_exact(slots):
    needs(slots)
    for worst in run_ranks(errors, slots, slots):
        assert [kind for kind, _ in worst] == list(TYPES)
        assert max(error for _, error in worst) <= LIMIT["float64"], worst


def reorderings(rank: int, partition: PartitionKind) -> int:
    """How often one call of a2a, forward and backward, lays rows in another order."""
    counted = []
    join = all_to_all.join_columns

    def counting(tensors, index=None, dtype=None):
        counted.append(index is not None)
        return join(tensors, index, dtype)

    all_to_all.join_columns = counting  # in this process only
    with World(home := Layout(ranks=2), backend=backend()) as world:
        plan = plan_fixed((9, 30, 1), home, 2, cp_comm_type="a2a", partition=partition)
        shard = bind(plan.micro_batches[0], world)
        q, k, v = (torch.ones(shard.local_rows, 4, 8, device=world.device, requires_grad=True) for _ in range(3))
        attend(q, k, v, shard).sum().backward()
    return sum(counted)


@pytest.mark.parametrize(("partition", "times"), [("zigzag", 4), ("contiguous", 0)])
def test_what_a2a_lays_in_another_order(partition, times):
    """Of q, k, v and of out in forward, of dout and of the gradients in backward."""
    needs(2)
    assert run_ranks(reorderings, 2, partition) == [times] * 2


def test_one_tensor_as_it_is_becomes_a_matrix_without_a_copy():
    x = torch.randn(5, 3, 4)
    assert join_columns((x,)).data_ptr() == x.data_ptr() and join_columns((x,)).equal(x.flatten(1))
    assert join_columns((x[:0],)).shape == (0, 12)
    order = torch.tensor([4, 0])
    others = [
        (join_columns((x,), order), x[order].flatten(1)),
        (join_columns((x, x)), torch.cat([x, x], 1).flatten(1)),
        (join_columns((x,), dtype=torch.float64), x.double().flatten(1)),
        (join_columns((x[:, 1:],)), x[:, 1:].flatten(1)),
    ]
    for matrix, expected in others:
        assert matrix.equal(expected) and matrix.data_ptr() != x.data_ptr() and matrix.is_contiguous()
