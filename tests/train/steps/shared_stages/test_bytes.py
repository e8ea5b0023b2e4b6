"""What stages of Zamba 2 send and hold is what plans and checks of memory count."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from longspan.comm import World
from longspan.comm.groups.channel import Channel
from longspan.config.sections import ParallelConfig, RunConfig
from longspan.doctor.stock import whole_float64
from longspan.layout import Layout
from longspan.model.layers import stage_layers
from longspan.model.parts import find_parts
from longspan.model.pipeline.copies import shared_parameters
from longspan.model.pipeline.settings import PipelineSettings
from longspan.model.pipeline.stages import stage_models
from longspan.model.weights.local_tensors import local_tensor
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer, run_step
from longspan.train.memory.model_fits import NeededBytes, needed_bytes
from tests.model.stock import texts
from tests.train.steps.shared_stages.cases import LENGTHS, Case, zamba2

NAME = "sum of gradients that stages share"
CASES = [Case("1f1b", 2, kind="copies", ranks=2), Case("1f1b", 4, kind="copies"), Case("zbv", 4, 2, kind="copies")]


def needed(case: Case, home: Layout | None = None) -> NeededBytes:
    parallel = ParallelConfig(pp=case.pp, vpp=case.vpp, pipeline_schedule=case.schedule)  # pyright: ignore
    return needed_bytes(RunConfig(parallel=parallel), zamba2(), home or case.home, torch.float32, training=True)


def _measured(rank: int, cases: Sequence[Case]) -> list[Counter[str]]:
    """Bytes that this rank sends and holds in a step, by what they are."""
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
            optimizer = build_optimizer(model, "adamw", 1e-3)
            run_step(model, case.plan(), texts(LENGTHS), world, optimizer)
            held = [p for stage in model.stages for p in stage.parameters()]
            count["weights"] = sum(local_tensor(p).nbytes for p in held)
            moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
            count["states"] = sum(local_tensor(x).nbytes for x in moments)
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
def test_what_is_counted_is_what_is_sent_and_held(ranks: int) -> None:
    cases = [case for case in CASES if case.ranks == ranks]
    of_ranks = run_ranks(_measured, ranks, cases, timeout=280)
    for case, counts in zip(cases, zip(*of_ranks, strict=True), strict=True):
        with whole_float64():
            counted = needed(case)
        most = max(counts, key=lambda count: count["weights"] + count["states"])
        assert (counted.weights, counted.states) == (most["weights"], most["states"]), case
        assert sum(count["shared"] for count in counts) == _of_sums(case) > 0, case


def test_copies_are_counted_on_every_stage_and_their_states_on_every_rank() -> None:
    """Eight layers whose last seven call two blocks; four stages of two layers, of which the first calls one."""
    one, two, folded = (needed(case) for case in (Case("1f1b", 1), Case("1f1b", 4), Case("zbv", 2, 2)))
    assert one.weights == one.gradients == one.states / 2
    assert two.weights * 4 > one.weights  # blocks on every stage
    assert folded.weights == folded.gradients > folded.states / 2  # two copies, one of them trained
    assert needed(Case("1f1b", 4), Layout(ranks=16, pp=4)).weights == two.weights // 4
