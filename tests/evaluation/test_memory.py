"""What evaluations hold: activations are divided by the degree, and switches of degree use up nothing."""

import ctypes
import gc
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from bench.training.live_bytes import LiveBytes

from longspan.comm import World
from longspan.evaluation.live import evaluate
from longspan.evaluation.metrics import EvaluationOptions
from longspan.layout import Layout
from longspan.plan import plan_fixed
from longspan.resolve.planner_config import PlannerConfig
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer, run_step
from tests.model.deep import deep
from tests.model.stock import prepare_untried, texts

LENGTH, WAYS = 2048, ("p2p", "a2a", "all_gather")
ABOVE = 1 / 8  # of 1/n: what does not depend on the degree, and rows of others that attention holds for a while


def most_bytes(rank: int) -> dict[tuple[str, int], int]:
    peaks = dict[tuple[str, int], int]()
    with World(Layout(ranks=4), backend="gloo", timeout=60) as world:
        model = deep("qwen3", torch.float32, 2, 62, intermediate_size=128)  # four times the hidden size, as is usual
        prepared = prepare_untried(model, world, shard_parameters=False)
        for way, degree in (("p2p", 1), ("p2p", 2), *((way, 4) for way in WAYS)):
            short, documents = (texts([length] * (4 // degree)) for length in (64, LENGTH))  # one for every group
            choice, options = PlannerConfig.fixed(degree, cp_comm_type=way), EvaluationOptions(loss_chunk_rows=64)
            evaluate(prepared, short, choice, world)  # what a first pass alone makes is not counted
            with LiveBytes() as counted:
                evaluate(prepared, documents, choice, world, options)
            peaks[way, degree] = counted.peak
    return peaks


TRAINING, HELD_OUT = (9, 6), (12, 7)
CHOICES = [PlannerConfig.fixed(degree, max_tokens_per_slot=12) for degree in (1, 4)]
MEGABYTE = 1 << 20


class Used(NamedTuple):
    descriptors: int
    threads: int
    groups: int
    resident: int


def _count_threads() -> int:
    """A request to the store has a thread of its own for a moment."""
    time.sleep(0.02)
    return len(list(Path("/proc/self/task").iterdir()))


def used(world: World) -> Used:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return Used(
        descriptors=len(list(Path("/proc/self/fd").iterdir())),
        threads=min(_count_threads() for _ in range(5)),
        groups=len(world.process_groups.made),
        resident=1024 * int(status["VmRSS"].split()[0]),
    )


def switch(rank: int, looks: tuple[int, ...]) -> list[Used]:
    """Training at degree 2 and evaluation at 1 and 4 in turn; what is used after so many switches of degree."""
    answers = list[Used]()
    with World(Layout(ranks=4), backend=backend(), timeout=60, max_groups=4) as world:
        model = prepare_untried(deep("qwen3", torch.float32, 1, 62), world)
        optimizer = build_optimizer(model, "sgd", lr=1e-3)
        plan = plan_fixed(TRAINING, world.home, cp=2)
        for count in range(0, looks[-1], 2):  # to evaluation and back
            evaluate(model, texts(HELD_OUT), CHOICES[count // 2 % 2], world)
            run_step(model, plan, texts(TRAINING), world, optimizer)
            if count + 2 in looks:
                answers.append(used(world))
    return answers


def measure(rank: int, looks: tuple[int, ...]) -> tuple[list[Used], dict[tuple[str, int], int]]:
    return switch(rank, looks), most_bytes(rank)


LOOKS = [(16, 24, 32), pytest.param((100, 500, 1000), marks=pytest.mark.whole)]


@pytest.mark.parametrize("looks", LOOKS, ids=["32", "1000"])
def test_switches_of_degree_use_up_nothing_and_activations_are_divided_by_it(looks: tuple[int, ...]) -> None:
    """The allocator's own pages settle in some 500 steps, as in training without evaluations: by about 2 MiB of 330."""
    for (first, middle, last), peaks in run_ranks(measure, 4, looks, timeout=280):
        assert first[:3] == middle[:3] == last[:3]
        assert last.resident - first.resident < 4 * MEGABYTE, (first, last)
        assert last.resident - middle.resident < MEGABYTE, (middle, last)
        for (way, degree), peak in peaks.items():
            assert 1 <= peak / peaks["p2p", 1] * degree <= 1 + ABOVE, (way, degree, peaks)
