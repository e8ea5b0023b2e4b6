"""`attend` on real ranks against dense float64 attention: out and every gradient, for a table of layouts and calls."""

import os

import pytest
import torch

from longspan import Layout, World, plan_fixed
from longspan.attention import all_gather, all_to_all, ring
from longspan.plan import head_split
from longspan.testing import backend, run_ranks
from tests.attention.cases import (
    LIMIT,
    WAYS,
    Question,
    cases_of,
    head_shapes,
    random_cases,
    run_cases,
    table,
    wide_table,
    worst_errors,
)
from tests.launch.rank_pool import most_ranks

SEED = int(os.environ.get("LONGSPAN_TEST_SEED", "0"))


def needs(ranks):
    """Skip where the backend has fewer devices than ranks."""
    if backend() == "nccl" and most_ranks() < ranks:
        pytest.skip(f"{ranks} ranks need {ranks} GPUs, this machine has {torch.cuda.device_count()}")


def check(slots, cases, run=run_cases):
    errors = run_ranks(run, slots, slots, cases)
    assert errors == [errors[0]] * slots
    wrong = [(case, e) for case, e in zip(cases, errors[0], strict=True) if not e <= LIMIT[case[0].dtype]]
    assert not wrong, f"{len(wrong)} of {len(cases)} cases:\n" + "\n".join(f"{e:.1e} {q}\n  {w}" for (q, w), e in wrong)


@pytest.mark.parametrize("slots", [1, 2, *(pytest.param(n, marks=pytest.mark.whole) for n in (3, 4))])
def test_parity(slots):
    needs(slots)
    check(slots, table(slots) + (head_shapes() if slots == 4 else []))


@pytest.mark.parametrize("slots", [pytest.param(6, marks=pytest.mark.whole), 8])
def test_parity_of_wide_groups(slots):
    needs(slots)
    check(slots, wide_table(slots))


def sliced_cases(rank, slots, cases):
    """Cases with tensors taken for large, over communicators of the members' own."""
    all_gather.SLICE_BYTES = all_to_all.SLICE_BYTES = ring.HALVES_BYTES = 0  # in this process only
    all_to_all.SLICES = 4  # some of one key/value head, some of several
    with World(home := Layout(ranks=slots), backend=backend(), max_groups=4) as world:
        for cp in (slots, 2):
            world.prepare(plan_fixed([9] * slots, home, cp=cp))
        assert world.process_groups.communicator(world.plane) is not None
        return worst_errors(cases, slots, world)


def test_parity_in_slices_and_over_own_communicators():
    needs(4)
    questions = (Question("ragged", "gqa", sinks=True), Question("ragged", "mha", dropout=0.2, softcap=2.0))
    questions += (
        Question("ragged", "64/8 of 64"),
        Question("halves", "mla", window=5),
        Question("shares without rows", "mqa", "float32"),
    )
    check(4, cases_of(questions, WAYS) + random_cases(4, 8, SEED + 1), sliced_cases)


def grouped_cases(rank, slots, cases):
    """Cases whose queries are taken for large: backward computes one key/value head after another."""
    head_split.QUERY_GRADIENT_BYTES = 1  # in this process only
    all_gather.SLICE_BYTES = all_to_all.SLICE_BYTES = ring.HALVES_BYTES = 0
    with World(Layout(ranks=slots), backend=backend()) as world:
        return worst_errors(cases, slots, world)


@pytest.mark.parametrize("slots", [1, 4, *(pytest.param(n, marks=pytest.mark.whole) for n in (2, 3))])
def test_parity_in_groups_of_heads(slots):
    needs(slots)
    questions = (Question("ragged", "gqa", sinks=True), Question("ragged", "mha", dropout=0.2))
    questions += (Question("ragged", "gqa", window=5), Question("padded", "mqa"))
    check(slots, cases_of(questions, WAYS), grouped_cases)


def test_parity_of_random_calls():
    needs(4)
    check(4, random_cases(4, 32, SEED))
