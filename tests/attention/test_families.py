"""Attention over documents that share prefixes, against the separate documents: tiles, and `attend` on ranks."""

import itertools
import sys
from collections import Counter
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from longspan import Group, Layout, MicroBatch, World, attend, bind
from longspan.attention.attend import check_shared_prefixes
from longspan.attention.blocks import _sum_copies
from longspan.attention.masks import Mask, branch_tilings
from longspan.attention.members import Members
from longspan.attention.tiles import find_copies
from longspan.comm.shard import ShardPart
from longspan.errors import AttentionError
from longspan.ssm import causal_conv, linear_scan
from longspan.ssm.state_pass import BackwardFold
from longspan.testing import run_ranks
from tests.attention.families import FORESTS, forests, paths_of, separate_attention, visible_rows
from tests.attention.test_attend import TYPES, needs
from tests.attention.test_tiles import seen
from tests.mutation import mutated
from tests.reference import relative_error

CPU = torch.device("cpu")


def group_of(forest, slots=1, kind="p2p", partition="zigzag"):
    lengths, parents = forest
    sizes = (2, slots // 2) if slots % 2 == 0 else (slots, 1)
    return Group(tuple(range(slots)), tuple(range(len(lengths))), lengths, kind, sizes, partition, None, parents)


def packed_rows(segments, starts):
    first = starts[segments.document]
    runs = zip(first + segments.start, first + segments.stop, strict=True)
    return np.concatenate([np.arange(0), *(np.arange(a, b) for a, b in runs)])


def check_tiles(forest, degree, inner, window, partition):
    """Each member's tiles, against each block, all rows and what it sees, cover what is visible once."""
    lengths, _ = forest
    group = group_of(forest, degree, partition=partition)
    starts = np.cumsum(lengths) - lengths
    visible = visible_rows(*forest, window)
    mask = Mask(True, window).for_lengths(group.path_lengths)
    for slot in range(0, degree, inner):
        members = Members(ShardPart(group, 0, slot, 0, 0), mask, CPU, inner)
        rows = packed_rows(members.segments(members.member), starts)
        blocks = [(members.launches(m), packed_rows(members.segments(m), starts)) for m in range(members.degree)]
        if inner == 1:
            blocks.append((members.launches(None), np.arange(sum(lengths))))
        if mask.window is not None:
            keys = members.visible_rows(members.member)
            blocks.append((members.window_rows.launches, packed_rows(keys, starts)))
            assert np.array_equal(np.sort(packed_rows(keys, starts)), np.flatnonzero(visible[rows].any(0)))
        for launches, keys in blocks:
            count = seen([launch.tiling for launch in launches], len(rows), len(keys))
            assert (count == visible[np.ix_(rows, keys)]).all()


@given(
    forest=forests(),
    degree=st.integers(1, 5),
    inner=st.sampled_from((1, 2)),
    window=st.none() | st.integers(1, 40),
    partition=st.sampled_from(("zigzag", "contiguous")),
)
@example(FORESTS["tree"], 4, 1, 12, "zigzag")
@example(FORESTS["answers"], 4, 2, None, "contiguous")
@settings(max_examples=40, deadline=None)
def test_tiles_cover_what_branches_see_once(forest, degree, inner, window, partition):
    check_tiles(forest, degree, inner if degree % inner == 0 else 1, window, partition)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30))
@settings(max_examples=30, deadline=None)
def test_copies_of_key_rows_are_found(rows):
    distinct, copies = find_copies(np.array(rows))
    listed = [(int(row), int(place)) for index in copies for row, place in zip(distinct, index, strict=True)]
    assert sorted((row, place) for row, place in listed if place >= 0) == sorted((row, i) for i, row in enumerate(rows))


@pytest.mark.parametrize("window, most", [(None, 1), (12, 2), (70, 2)])
def test_launches_do_not_grow_with_the_branches(window, most):
    for answers in (2, 8, 64):
        lengths = (127, *(20 + 3 * i for i in range(answers)))
        group = group_of((lengths, (-1,) + (0,) * answers))
        mask = Mask(True, window)
        alone = Group(group.slots, group.documents, lengths)
        families, separate = (len(Members(ShardPart(g, 0, 0, 0, 0), mask, CPU).launches(0)) for g in (group, alone))
        assert families - separate <= most


def attend_to_forests(rank, slots, cases):
    """The worst error of each case, of out and of every gradient, on the first rank, which has all rows."""
    errors = []
    with World(Layout(slots)) as world:
        for number, (name, kind, partition, heads, options) in enumerate(cases):
            lengths, parents = FORESTS[name]
            n, k_heads, size, value_size = heads
            generator = torch.Generator().manual_seed(number)
            shapes = ((n, size), (k_heads, size), (k_heads, value_size), (n, value_size))
            q, k, v, dout = (
                torch.randn(sum(lengths), *shape, generator=generator, dtype=torch.float64) for shape in shapes
            )
            sinks = torch.randn(n, generator=generator, dtype=torch.float64)
            shard = bind(MicroBatch((group_of((lengths, parents), slots, kind, partition),)), world)
            local = [shard.scatter(x).requires_grad_() for x in (q, k, v)]
            own_sinks = sinks.clone().requires_grad_()
            out = attend(*local, shard, sinks=own_sinks, **options)
            out.backward(shard.scatter(dout))
            sink_sum = torch.tensor(world.control.sum_over_slots(own_sinks.grad.tolist(), "sinks"), dtype=torch.float64)
            got = [shard.gather(x.detach()) for x in (out, *(x.grad for x in local))] + [sink_sum]
            if rank == 0:
                want = separate_attention(q, k, v, sinks, dout, lengths, parents, **options)
                errors.append(max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True)))
    return errors


HEADS = ((4, 2, 8, 8), (4, 4, 12, 8), (12, 1, 8, 8))
OPTIONS = ({}, {"window": 5}, {"window": 30}, {"softcap": 1.5, "window": 12}, {"scale": 0.3})


@cache
def cases_of(slots, every_way):
    """Forests by types and partitions: every one, or of each type every third forest, on two ranks others than four."""
    # one rank has all rows under every type and partition
    ways = list(itertools.product(TYPES, ("zigzag", "contiguous")))[: None if slots > 1 else 1]
    every = [
        (name, *way, HEADS[(i + j) % 3] if slots in (1, 2, 4) else (12, 4, 8, 8), OPTIONS[(i + j) % len(OPTIONS)])
        for (i, name), (j, way) in itertools.product(enumerate(FORESTS), enumerate(ways))
        if every_way or slots == 1 or (i + j + slots // 2) % 3 == 0
    ]
    return every if slots > 1 else [(*case[:4], options) for case in every for options in OPTIONS]


@pytest.mark.parametrize(
    "slots, every_way",
    [(1, True), (2, False), (4, False), *(pytest.param(n, True, marks=pytest.mark.whole) for n in (2, 3, 4))],
)
def test_attend_equals_the_separate_documents(slots, every_way):
    needs(slots)
    cases = cases_of(slots, every_way)
    errors = run_ranks(attend_to_forests, slots, slots, cases)[0]
    wrong = [(error, case) for error, case in zip(errors, cases, strict=True) if not error < 1e-12]
    assert len(errors) == len(cases) and not wrong, f"{len(wrong)} of {len(cases)}: {wrong[:4]}"


MUTATIONS = {
    "a branch sees its sibling": (
        "attention.masks",
        "return make_tilings(tiles._replace(document=prefix[tiles.document]))",
        "return make_tilings(tiles._replace(k_stop=tiles.k_stop + 1, document=prefix[tiles.document]))",
    ),
    "a generation is left out": (
        "attention.members",
        "for ancestors in group.ancestors():\n                prefix",
        "for ancestors in [*group.ancestors()][:1]:\n                prefix",
    ),
    "a window counts from the branch": ("attention.masks", "base = bases[branch_rows.document]", "base = 0"),
    "of repeated keys one copy counts": ("attention.blocks", "for index in copies])", "for index in copies[:1]])"),
}
SENT = (
    "attention.members",
    "np.append(np.minimum(stop, first_seen[runs.document]), lengths[prefixes])",
    "np.append(np.minimum(stop, first_seen[runs.document]), lengths[prefixes] - 1)",
)


def errors_of_mutations(rank, slots, cases):
    errors = {}
    for name, change in {"nothing": None, **MUTATIONS}.items():
        with mutated(change):
            try:
                errors[name] = max(attend_to_forests(rank, slots, cases))
            except Exception as error:
                errors[name] = repr(error)
    return errors


def test_mutations_are_noticed():
    cases = [
        (name, "p2p", "zigzag", HEADS[0], options) for name in ("tree", "answers") for options in ({}, {"window": 12})
    ]
    errors = run_ranks(errors_of_mutations, 1, 1, cases)[0]
    assert errors.pop("nothing") < 1e-12
    assert all(isinstance(error, str) or not error < 1e-3 for error in errors.values()), errors
    with mutated(SENT), pytest.raises(AssertionError):
        check_tiles(FORESTS["tree"], 4, 1, 12, "zigzag")


# ---- latents, and what is refused


def test_latents_equal_keys_with_both_parts():
    lengths, parents = FORESTS["tree"]
    q, k, v, dout = (
        torch.randn(sum(lengths), *shape, dtype=torch.float64) for shape in ((4, 12), (1, 4), (1, 8), (4, 8))
    )
    want = separate_attention(
        q, torch.cat([v, k], -1), v, torch.full((4,), -torch.inf).double(), dout, lengths, parents
    )
    with World(Layout(1)) as world:
        shard = bind(MicroBatch((group_of((lengths, parents)),)), world)
        out = attend(q, k, v, shard, latents=True)
    assert float((out - want[0]).abs().max()) < 1e-12


@pytest.mark.parametrize(
    "options", [{"causal": False}, {"chunk": 4}, {"dropout": 0.1}, {"indices": torch.zeros(1, 1, dtype=torch.int32)}]
)
def test_what_is_not_exact_is_refused_by_name(options):
    lengths, parents = FORESTS["chain"]
    q = torch.zeros(sum(lengths), 2, 4, dtype=torch.float64)
    if "indices" in options:
        options = {"indices": options["indices"].expand(len(q), 1)}
    with World(Layout(1)) as world:
        shard = bind(MicroBatch((group_of((lengths, parents)),)), world)
        with pytest.raises(AttentionError, match=rf"share prefixes.*{next(iter(options))}"):
            attend(q, q, q, shard, **options)
        with pytest.raises(AttentionError, match=r"share prefixes.*spans"):
            attend(q, q, q, shard.with_spans({0: [(2, 6)]}))


def test_positions_continue_those_of_the_prefix():
    lengths, parents = FORESTS["tree"]
    with World(Layout(1)) as world:
        shard = bind(MicroBatch((group_of((lengths, parents)),)), world)
    wanted = [len(path) - n + i for path, n in zip(paths_of(lengths, parents), lengths, strict=True) for i in range(n)]
    assert shard.position_ids.tolist() == wanted


OF_FAMILIES = (
    *(Group.bases.func, Group.longest_paths.func, Group.leaf_counts.func, Group.ancestors),
    *(check_shared_prefixes, branch_tilings, find_copies, _sum_copies),
    *(Members._join_prefix_ends, BackwardFold._sum_over_branches),
)


def functions_of_ordinary_documents(rank):
    entered = Counter()
    with World(Layout(2)) as world:
        shard = bind(MicroBatch((Group((0, 1), (0, 1), (17, 9)),)), world)
        x = torch.ones(shard.local_rows, 2, 4, requires_grad=True)
        sys.setprofile(lambda frame, event, _: entered.update([frame.f_code.co_qualname] if event == "call" else ()))
        outs = [attend(x, x, x, shard, window=window) for window in (None, 3, None)]
        outs += [causal_conv(x[:, 0], torch.ones(4, 3), None, shard), linear_scan(x, x, x, x[..., :1], None, shard)]
        sum(out.sum() for out in outs).backward()
        sys.setprofile(None)
    return entered


def test_ordinary_documents_enter_no_more_than_a_check():
    entered = run_ranks(functions_of_ordinary_documents, 2)[0]
    assert entered["_Attend.forward"] == 3 and entered["BackwardFold.leaving_gradients"] == 1
    assert not [function for function in OF_FAMILIES if function.__qualname__ in entered]
    assert entered["Group.path_lengths"] == 1, "once for a group, whatever the calls"


GROUPED, LATENT, WIDE = (32, 8, 128, 128), (16, 16, 192, 128), (8, 4, 256, 256)
ON_GPUS = [(GROUPED, {}), (GROUPED, {"softcap": 30.0, "window": 1000}), (LATENT, {}), (WIDE, {"window": 300})]


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "options"), ON_GPUS, ids=str)  # of each a minute, in which kernels are compiled
def test_kernels_of_gpus_over_a_family(shape, options):
    """No further from float64 than twice what bfloat16 alone is; in deterministic mode the same bits again."""
    lengths, parents = (1500, *(100 + 37 * i for i in range(8)), 700), (-1, *[0] * 8, -1)
    n, k_heads, size, value_size = shape
    shapes = ((n, size), (k_heads, size), (k_heads, value_size), (n, value_size))
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (torch.randn(sum(lengths), *x, generator=generator, device="cuda").bfloat16() for x in shapes)
    sinks = torch.randn(n, generator=generator, device="cuda")
    wide = [x.double() for x in (q, k, v, sinks, dout)]
    want = separate_attention(*wide, lengths, parents, **options)
    rounded = separate_attention(q, k, v, sinks, dout, lengths, parents, dtype=torch.bfloat16, **options)
    with World(Layout(1), backend="nccl") as world:
        shard = bind(MicroBatch((group_of((lengths, parents)),)), world)
        runs = []
        for deterministic in (False, True, True):
            torch.use_deterministic_algorithms(deterministic)
            leaves = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
            out = attend(*leaves[:3], shard, sinks=leaves[3], **options)
            out.backward(dout)
            runs.append([out.detach(), *(x.grad for x in leaves)])
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*runs[1:], strict=True))
    for run in runs[:2]:
        for got, alone, exact in zip(run, rounded, want, strict=True):
            assert relative_error(got, exact) <= 2 * relative_error(alone, exact) + 1e-3
