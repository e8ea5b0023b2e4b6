"""What stages of Zamba 2 send each other of the gradients that they share."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from longspan.comm import World
from longspan.comm.channel import Channel
from longspan.doctor.stock import whole_float64
from longspan.model.parts import find_parts
from longspan.model.pipeline.schedules import PipelineSettings
from longspan.model.pipeline.stages import shared_parameters, stage_models
from longspan.plan.memory.stage_bytes import stage_layers
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer, run_step
from tests.model.stock import texts
from tests.train.steps.shared_stages.cases import LENGTHS, Case, zamba2

NAME = "sum of gradients that stages share"
CASES = [Case("1f1b", 2, kind="copies", ranks=2), Case("1f1b", 4, kind="copies"), Case("zbv", 4, 2, kind="copies")]


def _measured(rank: int, cases: Sequence[Case]) -> list[Counter[str]]:
    """Bytes of shared gradients that this rank sends in a step."""
    found, exchange = list[Counter[str]](), Channel.exchange
    for case in cases:
        count = Counter[str]()

        def counted(self: Channel, sent: Any, received: Any, what: str, *more: Any, count: Any = count) -> Any:
            if what == NAME:
                count["shared"] += sum(x.nbytes for _, x in sent)
            return exchange(self, sent, received, what, *more)

        Channel.exchange = counted
        with whole_float64(), World(case.home, backend=backend(), timeout=60) as world:
            model = case.prepared(world)
            run_step(model, case.plan(), texts(LENGTHS), world, build_optimizer(model, "adamw", 1e-3))
        found.append(count)
        Channel.exchange = exchange
    return found


def _of_sums(case: Case) -> int:
    """Bytes of gradients that all stages give each other: of each of k copies twice what the others add of it."""
    with whole_float64():
        model = zamba2()
    layers = stage_layers(8, case.pp * case.vpp)
    settings = PipelineSettings(case.schedule, case.pp, case.vpp)
    shared = shared_parameters(model, stage_models(model, find_parts(model), layers))
    sizes = {name: p.nbytes for name, p in model.named_parameters(remove_duplicate=False)}
    ranks = [len({settings.positions[stage] for stage in entry.stages}) for entry in shared]
    return sum(2 * (k - 1) * sizes[entry.names[0]] for k, entry in zip(ranks, shared, strict=True))


@pytest.mark.whole
@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_of_copies_are_sent_once_to_each_other_stage(ranks: int) -> None:
    cases = [case for case in CASES if case.ranks == ranks]
    of_ranks = run_ranks(_measured, ranks, cases, timeout=280)
    for case, counts in zip(cases, zip(*of_ranks, strict=True), strict=True):
        assert sum(count["shared"] for count in counts) == _of_sums(case) > 0, case
