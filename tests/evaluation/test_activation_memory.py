"""At degree n, what an evaluation adds to a rank's memory is about 1/n of what degree 1 adds."""

import itertools

import torch
from bench.training.live_bytes import LiveBytes

from longspan.comm import World
from longspan.evaluation.evaluate import evaluate
from longspan.evaluation.metrics import EvaluationOptions
from longspan.layout import Layout
from longspan.model import prepare
from longspan.testing import run_ranks
from longspan.train.plans import PlanChoice
from tests.model.deep import deep
from tests.model.stock import texts

LENGTH, DEGREES, WAYS = 2048, (1, 2, 4), ("p2p", "a2a", "all_gather")
ABOVE = 1 / 8  # of 1/n: what does not depend on the degree, and rows of others that attention holds for a while


def most_bytes(rank: int) -> dict[tuple[str, int], int]:
    """The most bytes of tensors that an evaluation of one long document adds on this rank, by type and degree."""
    peaks = dict[tuple[str, int], int]()
    with World(Layout(ranks=4), backend="gloo", timeout=60) as world:
        model = deep("qwen3", torch.float32, 2, 62, intermediate_size=128)  # four times the hidden size, as is usual
        prepared = prepare(model, world, probe=False, shard_parameters=False)
        for way, degree in itertools.product(WAYS, DEGREES):
            documents = texts([LENGTH] * (4 // degree))  # one for every group
            choice, options = PlanChoice.fixed(degree, cp_comm_type=way), EvaluationOptions(loss_chunk_rows=64)
            evaluate(prepared, documents, choice, world)  # what a first pass alone makes is not counted
            with LiveBytes() as counted:
                evaluate(prepared, documents, choice, world, options)
            peaks[way, degree] = counted.peak
    return peaks


def test_activations_are_divided_by_the_degree() -> None:
    for peaks in run_ranks(most_bytes, 4):
        for (way, degree), peak in peaks.items():
            assert 1 <= peak / peaks[way, 1] * degree <= 1 + ABOVE, (way, degree, peaks)
