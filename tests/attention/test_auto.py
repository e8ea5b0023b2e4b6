"""`auto`: what it takes, that it can say why, and that its estimate orders the types as they were measured."""

import os
from dataclasses import replace

import pytest
import torch

from longspan import Group, Layout, MicroBatch, World, attend, bind
from longspan.attention import AttentionCall, Machine, Mask, choose_type, estimates_of
from longspan.testing import backend, run_ranks
from tests.attention.test_attend import needs

QWEN3_8B = AttentionCall(heads=32, kv_heads=8, head_size=128, value_size=128)


def group(degree, *lengths, first=0):
    return Group(tuple(range(first, first + degree)), tuple(range(len(lengths))), lengths)


CHOICES = [
    # one node: heads for rows are exchanged over fast links, and whole documents make large pieces
    (group(4, 16384), QWEN3_8B, 8, "a2a"),
    (group(4, *[2048] * 8), QWEN3_8B, 8, "a2a"),
    (group(8, 131072), QWEN3_8B, 8, "a2a"),
    # heads that do not divide by the members
    (group(8, 131072), replace(QWEN3_8B, heads=12, kv_heads=4), 8, "a2a+p2p (4, 2)"),
    (group(7, 131072), QWEN3_8B, 8, "all_gather"),
    # across nodes: heads inside, blocks between, as long as they can be hidden
    (group(16, 1048576), QWEN3_8B, 8, "a2a+p2p (8, 2)"),
    (group(8, 1048576), QWEN3_8B, 1, "a2a"),
    (group(8, 1048576), replace(QWEN3_8B, heads=9, kv_heads=9), 1, "p2p"),
    (group(4, 16384, first=6), QWEN3_8B, 8, "a2a+p2p (2, 2)"),
    # a narrow window leaves little to send
    (group(8, 131072), replace(QWEN3_8B, mask=Mask(window=4096)), 1, "p2p"),
    (group(1, 4096), QWEN3_8B, 8, "p2p"),
]


def named(choice):
    sizes = choice.hierarchical_context_parallel_sizes
    return choice.cp_comm_type + (f" {sizes}" if sizes else "")


@pytest.mark.parametrize("members, call, node_size, expected", CHOICES)
def test_choices(members, call, node_size, expected):
    choice = choose_type(members, call, node_size=node_size)
    assert named(choice) == expected, str(choice)
    if members.degree > 1:
        assert f"{expected} is chosen: " in choice.reasons[-1]


SKEWS = [  # of a ring of 4: what its busiest member computes, in means of all
    (group(4, 8192), QWEN3_8B, 1.75),  # rows 6144 to 8192 of a triangle: 7 of 16 parts
    (group(4, 8192), replace(QWEN3_8B, mask=Mask(causal=False)), 1.0),
    (group(4, 8192), replace(QWEN3_8B, mask=Mask(window=1)), 1.0),
    (group(4, *[2048] * 4), QWEN3_8B, 1.0),  # a document each
    (group(4, 6144, 2048), replace(QWEN3_8B, mask=Mask(causal=False)), 1.2),  # 3, 3, 3 and 1 of a mean of 2.5
    (replace(group(4, 4096, 4096), pad_to=8192), QWEN3_8B, 2.0),  # two members hold padding alone
]


@pytest.mark.parametrize("members, call, skew", SKEWS)
def test_contiguous_rows_of_a_ring_are_as_slow_as_its_busiest_member(members, call, skew):
    machine = Machine(merge_passes=0)
    seconds = {}
    for partition in ("zigzag", "contiguous"):
        estimates = estimates_of(replace(members, partition=partition), call, node_size=8, machine=machine)
        seconds[partition] = {estimate.cp_comm_type: estimate.attention for estimate in estimates}
    ratios = {kind: seconds["contiguous"][kind] / seconds["zigzag"][kind] for kind in ("a2a", "p2p", "all_gather")}
    assert ratios == pytest.approx({"a2a": 1.0, "p2p": skew, "all_gather": skew}, rel=1e-3)


def test_it_says_why_in_words_and_numbers():
    choice = choose_type(group(6, 30000, 900, first=4), replace(QWEN3_8B, mask=Mask(window=512)), node_size=8)
    said = str(choice).splitlines()
    assert said[0] == (
        "6 members on 2 nodes of 8 slots; 2 documents of 30900 rows together, 30000 at most; 32 query and 8 key/value "
        "heads, window 512"
    )
    assert "a2a cannot: 32 query heads do not divide by 6" in said
    assert any(line.startswith("p2p takes ") and "ms of attention, and" in line for line in said)
    assert {line.split()[0] for line in said[1:-1]} == {"a2a", "p2p", "all_gather", "a2a+p2p"}


def test_a_faster_network_changes_the_choice():
    slow, fast = Machine(), Machine(across_bytes_per_second=400e9)
    across = group(16, 32768)
    assert choose_type(across, QWEN3_8B, node_size=8, machine=slow).cp_comm_type == "a2a+p2p"
    assert choose_type(across, QWEN3_8B, node_size=8, machine=fast).cp_comm_type == "a2a"


MEASURED = {  # TFLOP/s per GPU of 4 H200 for one document of 16K, 64K and 128K rows, forward and backward
    "a2a": (530, 570, 594),
    "all_gather": (440, 542, 577),
    "p2p": (412, 530, 568),
}


def test_the_estimate_fits_what_was_measured():
    for i, rows in enumerate((16384, 65536, 131072)):
        flops = 3.5 * 2 * rows**2 * 4096 / 4
        seconds = {kind: flops / figures[i] / 1e12 for kind, figures in MEASURED.items()}
        estimates = {e.cp_comm_type: e.seconds for e in estimates_of(group(4, rows), QWEN3_8B, node_size=8)}
        for kind, measured in seconds.items():
            assert estimates[kind] == pytest.approx(measured, rel=0.15), (rows, kind)


def node_sizes(rank, slots):
    """The node size where the first rank says 3, and whether auto runs by it."""
    os.environ["LOCAL_WORLD_SIZE"] = "3" if rank == 0 else "1"
    with World(Layout(ranks=slots), backend=backend()) as world:
        shard = bind(MicroBatch((Group((0, 1), (0,), (8,), "auto"),)), world)
        q, k, v = (torch.ones(shard.local_rows, 2, 4, device=shard.device) for _ in range(3))
        return world.node_size, torch.equal(attend(q, k, v, shard), v)


def test_every_rank_goes_by_one_node_size():
    needs(3)
    assert run_ranks(node_sizes, 3, 3) == [(3, True)] * 3
