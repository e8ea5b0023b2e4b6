"""`attend` on real ranks against dense float64 attention: out and every gradient, for tables of layouts and calls."""

import itertools
import os
from functools import cache, partial
from typing import Any

import pytest
import torch

from longspan import Group, Layout, MicroBatch, World, bind, plan_dynamic, plan_fixed, plan_padded
from longspan.attention import all_gather, all_to_all, ring
from longspan.plan import head_split
from longspan.testing import backend, run_ranks
from tests.attention import parity
from tests.attention.cases import (
    LEVELS,
    LIMIT,
    RAGGED,
    WAYS,
    Case,
    Question,
    Way,
    cases_of,
    cut,
    errors_over_ranks,
    head_shapes,
    random_cases,
    run_cases,
    table,
    wide_table,
    worst_errors,
)
from tests.launch.rank_pool import most_ranks

SEED = int(os.environ.get("LONGSPAN_TEST_SEED", "0"))
TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")


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
    check(slots, cut(table(slots)) if slots < 3 else table(slots) + (head_shapes() if slots == 4 else []))


@pytest.mark.parametrize("slots", [pytest.param(6, marks=pytest.mark.whole), 8])
def test_parity_of_wide_groups(slots):
    needs(slots)
    check(slots, wide_table(slots) if slots == 6 else cut(wide_table(slots), 3))


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
    questions = (
        Question("ragged", "gqa", sinks=True),
        Question("ragged", "mha", dropout=0.2, softcap=2.0),
        Question("ragged", "GQA, 64/8 of 64"),
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
    questions = (
        Question("ragged", "gqa", sinks=True),
        Question("ragged", "mha", dropout=0.2),
        Question("ragged", "gqa", window=5),
        Question("padded", "mqa"),
    )
    check(slots, cases_of(questions, WAYS), grouped_cases)


def test_parity_of_random_calls():
    needs(4)
    check(4, random_cases(4, 25, SEED))


# ---- heads in slices, and layers that are recomputed

OF_LEVELS = (
    Question("ragged", "gqa", sinks=True),
    Question("even", "mha", dropout=0.3, sinks=True),
    Question("ragged", "mqa", causal=False),  # one key/value head: all slices share it
    Question("long", "GQA, 64/8 of 64", window=30),
    Question("shares without rows", "mla", window=5, sinks=True, spans=4),
    Question("padded", "gqa", "float32", chunk=24),
)


def sliced(rank: int, slots: int, cases: list[Case], slices: int, one_by_one: bool = False) -> list[float]:
    """Errors of cases with tensors taken for large, from member to member; some slices share keys and values.

    `one_by_one`: sums of all slices are taken for too large, so a slice is sent when the one before arrived.
    """
    all_to_all.SLICE_BYTES, all_to_all.SLICES = 0, slices  # in this process only
    head_split.QUERY_GRADIENT_BYTES = 1 if one_by_one else head_split.QUERY_GRADIENT_BYTES
    with World(Layout(ranks=slots), backend=backend(), timeout=60) as world:
        return worst_errors(cases, slots, world)


IN_CI = ((4, (2, 2), 2), (8, (4, 2), 4))  # each with half of the questions; the others run with make test-all
SHAPES = [(slots, sizes, slices) for slots, sizes in ((4, (2, 2)), (8, (4, 2)), (8, (2, 4))) for slices in (2, 4)]


@pytest.mark.parametrize(
    "shape", [pytest.param(s, marks=[pytest.mark.whole] * (s not in IN_CI)) for s in SHAPES], ids=str
)
def test_parity_of_two_levels_in_slices(shape: tuple[int, tuple[int, int], int]) -> None:
    slots, sizes, slices = shape
    needs(slots)
    cases = cases_of(OF_LEVELS, [Way("a2a+p2p", sizes)])
    check(slots, cases[IN_CI.index(shape) :: 2] if shape in IN_CI else cases, partial(sliced, slices=slices))


RECOMPUTED = (
    Question("ragged", "gqa", sinks=True),
    Question("padded", "mqa", causal=False),  # one key/value head, sent to several members
    Question("shares without rows", "mla", window=5, sinks=True, spans=4),
    Question("even", "mha", dropout=0.3, softcap=1.5, sinks=True),
    Question("many documents", "gqa", window=19),
    Question("ragged", "gqa", chunk=11),
    Question("ragged", "mla", "float32", scale=-0.4),
)
DYNAMIC = (Question("slots without rows", "gqa", sinks=True), Question("several groups a slot", "mha", sinks=True))


def recomputed_cases(slots: int) -> list[Case]:
    """cpu_flash takes the output in backward, the reference dout · out of each row, which dropout takes anyway."""
    kernels = (None, "reference")
    ways = [Way(kind, kernel=kernel, recomputed=True) for kind in ("a2a", "a2a+p2p") for kernel in kernels]
    ways += [Way("p2p", recomputed=True), Way("all_gather", recomputed=True)]
    asked = cases_of([*RECOMPUTED, *(DYNAMIC[: slots // 2] if slots < 4 else DYNAMIC)], ways)
    return [case for case in asked if not (case[1].kernel and case[0].dropout)]


@pytest.mark.parametrize("slots", [1, 4, *(pytest.param(n, marks=pytest.mark.whole) for n in (2, 3))])
def test_parity_of_recomputed_layers(slots: int) -> None:
    needs(slots)
    check(slots, recomputed_cases(slots) if slots in (2, 3) else cut(recomputed_cases(slots), 2))


IN_SLICES = [
    (4, False, 2),
    (2, True, 2),
    *(pytest.param(*x, 4, marks=pytest.mark.whole) for x in ((2, False), (4, True))),
]


@pytest.mark.parametrize(("slots", "one_by_one", "ways"), IN_SLICES)
def test_parity_of_recomputed_layers_in_slices(slots: int, one_by_one: bool, ways: int) -> None:
    needs(slots)
    exchanging = [case for case in recomputed_cases(slots) if "a2a" in (case[1].kind or "")]
    check(slots, cut(exchanging, ways), partial(sliced, slices=4, one_by_one=one_by_one))


# ---- plans of contiguous rows, and slots in several groups of one micro-batch: each group has a type of its own

DOCUMENTS = ((1,), (1, 2), RAGGED, (2, 1, 60, 3, 1))  # shorter than the degree, beginning and ending inside a share
OF_PLANS = (Question("", "gqa"), Question("", "mqa", causal=False), Question("", "mla", window=5, sinks=True))


def errors_of_plans(rank: int, slots: int) -> list[float]:
    home, worst = Layout(ranks=slots), list[float]()
    with World(home, backend=backend()) as world:
        for index, kind in enumerate(TYPES):
            options: dict[str, Any] = {"cp_comm_type": kind, "hierarchical_context_parallel_sizes": LEVELS[slots]}
            options["partition"] = "contiguous"
            plans = [f(x, home, slots, **options) for f in (plan_fixed, plan_padded) for x in DOCUMENTS]
            plans.append(plan_dynamic((40, 9, 2), home, max_tokens_per_slot=-(-40 // slots), **options))
            batches = [batch for plan in plans for batch in plan.micro_batches]
            asked = [(question, batch) for batch in batches for question in OF_PLANS]
            if slots == 4:  # each type others, and all of a narrow window
                asked = [x for number, x in enumerate(asked) if x[0].window or number % len(TYPES) == index]
            cases = [((question, Way(None)), bind(batch, world)) for question, batch in asked]
            worst.append(max(map(max, errors_over_ranks(cases, slots, world))))
    return worst


@pytest.mark.parametrize("slots", [4, *(pytest.param(n, marks=pytest.mark.whole) for n in (2, 3))])
def test_contiguous_plans_are_exact(slots):
    needs(slots)
    for worst in run_ranks(errors_of_plans, slots, slots):
        assert len(worst) == 4 and max(worst) <= LIMIT["float64"], worst


Members = tuple[tuple[int, ...], tuple[int, ...], str | tuple[str, ...], tuple[int, int] | None]

# Two nodes of two slots: the own documents, those of the node, and one across nodes, in several orders.
FOUR: dict[str, list[Members]] = {
    "local, node, cross-node": [
        *(((slot,), (5 + slot, 2), "p2p", None) for slot in range(4)),
        ((0, 1), (14, 3), "a2a", None),
        ((2, 3), (11,), "all_gather", None),
        ((0, 1, 2, 3), (40,), "a2a+p2p", (2, 2)),
    ],
    "cross-node first": [
        ((0, 1, 2, 3), (33, 1), "a2a+p2p", (2, 2)),
        ((1, 2), (9,), "p2p", None),
        ((3, 0), (7, 7), "a2a", None),
        ((2,), (6,), "auto", None),
    ],
    "chains that overlap": [
        ((0, 1), (10,), "a2a", None),
        ((1, 2), (12,), "p2p", None),
        ((2, 3), (8,), "all_gather", None),
        ((3, 0), (9,), "a2a+p2p", (1, 2)),
        ((0, 2), (5,), "p2p", None),
        ((1, 3), (1,), "a2a", None),
    ],
    "one type a layer": [
        ((0, 1, 2), (21,), ("p2p", "all_gather"), None),
        ((3, 1), (8, 4), ("a2a", "p2p"), None),
        ((0, 1, 2, 3), (17,), ("a2a+p2p", "a2a"), (2, 2)),
        ((0,), (6,), ("p2p", "p2p"), None),
    ],
}
EIGHT: dict[str, list[Members]] = {
    "three levels of eight": [
        *(((slot,), (3 + slot % 3,), "p2p", None) for slot in range(8)),
        *((tuple(range(first, first + 4)), (20, 9), kind, None) for first, kind in ((0, "a2a"), (4, "p2p"))),
        (tuple(range(8)), (60, 5), "a2a+p2p", (4, 2)),
        (tuple(range(0, 8, 2)), (15,), "all_gather", None),
    ]
}
OF_GROUPS = (Question("", "gqa"), Question("", "gqa", window=6), Question("", "gqa", causal=False, softcap=2.0))


def batch_of(members: list[Members]) -> MicroBatch:
    ids = itertools.count()
    return MicroBatch(
        tuple(
            Group(slots, tuple(next(ids) for _ in lengths), lengths, kind, sizes)
            for slots, lengths, kind, sizes in members
        )
    )


def errors_of_groups(rank: int, slots: int, named: dict[str, list[Members]]) -> dict[tuple[str, Question], float]:
    with World(Layout(ranks=slots), backend=backend(), timeout=60) as world:
        shards = [bind(batch_of(members), world) for members in named.values()]
        assert all(shard.local_rows for shard in shards), "every slot has rows here"
        asked = [(i, question) for i in range(len(shards)) for j, question in enumerate(OF_GROUPS) if (i + j) % 3 < 2]
        cases = [((question, Way(None, layer=1)), shards[i]) for i, question in asked]
        errors = map(max, errors_over_ranks(cases, slots, world))
        return {([*named][i], question): error for (i, question), error in zip(asked, errors, strict=True)}


@pytest.mark.parametrize(("slots", "named"), [(4, FOUR), (8, EIGHT)], ids=["4 slots", "8 slots"])
def test_a_slot_in_several_groups_of_several_types(slots: int, named: dict[str, list[Members]]) -> None:
    needs(slots)
    for worst in run_ranks(errors_of_groups, slots, slots, named):
        assert len(worst) == 2 * len(named) and max(worst.values()) <= 1e-12, worst


# ---- the parity table: every pair of its entries always, every combination in `make test-all`


@cache
def pairs() -> dict[int, list[parity.Combination]]:
    return parity.by_degree(parity.pairwise(seed=0))


def check_combinations(degree: int, combinations: list[parity.Combination], *, timeout: float = 280) -> list[float]:
    needs(degree)
    of_ranks = run_ranks(parity.run, degree, degree, combinations, timeout=timeout)
    assert of_ranks == [of_ranks[0]] * degree
    wrong = [(c, e) for c, e in zip(combinations, of_ranks[0], strict=True) if not e <= 1]
    assert not wrong, f"{len(wrong)} of {len(combinations)}, error over its limit:\n" + "\n".join(
        f"{error:.2g} {combination}" for combination, error in wrong
    )
    return of_ranks[0]


def test_pairs_are_all_there() -> None:
    every = [c for cases in pairs().values() for c in cases]
    assert {c.is_refused for c in every} == {False, True}
    values = [(c.way, c.degree, c.feature, c.lengths, c.heads, c.dtype) for c in every]
    for i, j in itertools.combinations(range(len(parity.AXES)), 2):
        assert {(v[i], v[j]) for v in values} == set(itertools.product(parity.AXES[i], parity.AXES[j])), (i, j)


@pytest.mark.parametrize("degree", parity.DEGREES)
def test_every_pair_of_the_table(degree: int) -> None:
    check_combinations(degree, pairs()[degree])


@pytest.mark.whole
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("degree", parity.DEGREES)
def test_the_whole_table(degree: int) -> None:
    wrong = check_combinations(degree, parity.whole(degree), timeout=7000)
    refused = wrong.count(parity.REFUSED)
    print(
        f"degree {degree}: {len(wrong) - refused} combinations, {refused} refused, worst {max(wrong):.2g} of its limit"
    )
