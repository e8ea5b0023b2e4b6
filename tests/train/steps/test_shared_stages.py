"""Zamba 2 through a pipeline equals one process: blocks that stages share, and the embedding that all layers read.

Stages train, save and resume like one process; copies of a block and their moments stay equal bit by bit.
"""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from longspan.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from longspan.comm import World
from longspan.comm.channel import Channel
from longspan.doctor.stock import compute_in_float64
from longspan.layout import Layout
from longspan.model import load_model, prepare, save_model
from longspan.model.exactness.small_copies import shrink_configuration
from longspan.model.parts import find_parts
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.pipeline.stages import make_stage_models, shared_parameters
from longspan.model.weights.local_tensors import local_tensor
from longspan.plan import Plan, plan_dynamic, plan_fixed
from longspan.plan.memory.model_numbers import stage_layers
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer, run_step
from tests import parity
from tests.model.deep import Answer, answer
from tests.model.stock import at_random, error, texts, weights_of, worst
from tests.mutation import Change, mutated

LENGTHS = (13, 1, 9, 2, 6)


def zamba2(layers: int) -> PreTrainedModel:
    """A layer of Mamba 2, and the others call two blocks in turn, each with adapters of its own.

    Of four stages the first has neither block.
    """
    config = shrink_configuration(CONFIG_MAPPING["zamba2"](use_shared_attention_adapter=True, use_mem_rope=True))
    config.num_hidden_layers, config.num_mem_blocks, hybrid = layers, 2, [*range(1, layers)]
    config.layers_block_type, config.hybrid_layer_ids = ["linear_attention"] + ["hybrid"] * len(hybrid), hybrid
    return at_random(config)


@cache
def wanted(layers: int) -> Answer:
    with compute_in_float64():
        return answer(zamba2(layers), texts(LENGTHS))


def case(
    schedule: str,
    pp: int,
    kind: str = "sharded",
    planner: str = "fixed",
    tp: int = 1,
    rows: int = 1,
    ranks: int = 4,
    layers: int = 8,
) -> parity.Case:
    """A pipeline of two or four ranks, with an evaluation at another degree; `kind` is copies, sharded (FSDP2), or
    recomputed (both). With `rows` of tp norms and residuals hold parts of them.
    """
    home = Layout(ranks=ranks, pp=pp, tp=tp)
    few: dict[str, Any] = {"max_tokens_per_slot": 16 // home.slots, "row_multiple": rows}
    make = partial(plan_fixed, cp=home.slots) if planner == "fixed" else plan_dynamic
    return parity.Case(
        partial(zamba2, layers),
        home,
        {planner: make(LENGTHS, home, **few)},
        texts(LENGTHS),
        wanted(layers),
        options={
            "shard_parameters": kind != "copies",
            "activation_checkpointing": kind == "recomputed",
            "pipeline_schedule": schedule,
            "sequence_parallel": rows > 1,
        },
        evaluation=plan_fixed(LENGTHS, home, cp=1, row_multiple=rows, max_tokens_per_slot=20),
        in_float64=True,
    )


CASES: list[tuple[Any, ...]] = [
    ("1f1b", 2, "recomputed"),
    ("1f1b", 2, "copies", "dynamic"),
    ("1f1b", 2),
    ("zero_bubble", 2, "sharded", "dynamic"),
    ("zero_bubble", 2, "copies"),
    ("1f1b", 4),
    ("zero_bubble", 4, "copies", "dynamic"),
    ("1f1b", 2, "sharded", "fixed", 2),
    ("1f1b", 2, "copies", "fixed", 2, 2),
    ("zero_bubble", 2, "recomputed", "fixed", 2, 2),
]


def test_equals_one_process() -> None:
    parity.check({"daily": case("zero_bubble", 2, "recomputed", "dynamic", ranks=2, layers=4)})


@pytest.mark.whole
@pytest.mark.parametrize("tp", [1, 2])
def test_every_schedule(tp: int) -> None:
    parity.check({row: case(*row) for row in CASES if (len(row) > 4) == (tp == 2)}, timeout=280)


# ---- what is dropped is noticed

STAGES = "model.pipeline.stages"
MUTANTS: dict[str, tuple[Change, Callable[[parity.Errors], bool]]] = {
    "the sum over stages": (
        (STAGES, "local_slice.copy_(sum_parts([*parts.values()]))", "pass"),
        lambda errors: errors.gradients > 1e-3,
    ),
    "the embedding on later stages": (
        (STAGES, "arguments[argument] = embedding", "pass"),
        lambda errors: errors.losses > 1e-6,
    ),
    "the embedding's gradient from later stages": (
        (STAGES, "torch.cat([hidden, rows], dim=1)", "torch.cat([hidden, rows.detach()], dim=1)"),
        lambda errors: errors.gradients > 1e-3,
    ),
    "that a parameter is counted once": (
        ("train.gradient_norm", "if parameter not in skipped", "if True"),
        lambda errors: errors.norm > 1e-6,
    ),
}


def _mutants(rank: int, case: parity.Case) -> dict[str, parity.Errors]:
    found = dict[str, parity.Errors]()
    for name, (change, _) in MUTANTS.items():
        with mutated(change):
            found[name] = parity.run(rank, {name: case})[name, "dynamic"][0]
    return found


@pytest.mark.whole
def test_what_is_dropped_is_noticed() -> None:
    of_ranks = run_ranks(_mutants, 4, case(*CASES[1]), timeout=280)
    for name, (_, noticed) in MUTANTS.items():
        assert any(noticed(found[name]) for found in of_ranks), (name, [found[name] for found in of_ranks])


# ---- what stages send each other of the gradients that they share


def _bytes_sent(rank: int, case: parity.Case) -> int:
    exchange, sizes = Channel.exchange, list[int]()

    def counted(self: Channel, sent: Any, received: Any, what: str, *more: Any) -> Any:
        if what == "sum of gradients that stages share":
            sizes.extend(x.nbytes for _, x in sent)
        return exchange(self, sent, received, what, *more)

    with (
        patch.object(Channel, "exchange", counted),
        compute_in_float64(),
        World(case.home, backend=backend(), timeout=60) as world,
    ):
        model = case.prepared(world)
        run_step(model, plan_of(case), texts(LENGTHS), world, build_optimizer(model, "adamw", 1e-3))
    return sum(sizes)


@pytest.mark.whole
def test_sums_of_copies_are_sent_once_to_each_other_stage() -> None:
    """Of each of k copies all stages together send twice what the others add of it."""
    of_copies = case("1f1b", 4, "copies")
    with compute_in_float64():
        model = zamba2(8)
    stages = make_stage_models(model, find_parts(model), stage_layers(8, 4))
    sizes = {name: p.nbytes for name, p in model.named_parameters(remove_duplicate=False)}
    expected = 0
    for entry in shared_parameters(model, stages):
        expected += 2 * (len(entry.stages) - 1) * sizes[entry.names[0]]
    assert sum(run_ranks(_bytes_sent, 4, of_copies, timeout=280)) == expected > 0


# ---- training


def plan_of(case: parity.Case) -> Plan:
    (plan,) = case.plans.values()
    return plan


def _train(model: Any, plan: Plan, optimizer: torch.optim.Optimizer, world: World, steps: range) -> None:
    for step in steps:
        run_step(model, plan, texts(LENGTHS, step), world, optimizer, max_grad_norm=0.5, step=step)


def _compare_copies(model: PipelineModel, optimizer: torch.optim.Optimizer, world: World) -> None:
    """Copies of one parameter on several stages, and their moments, are equal bit by bit, slot by slot."""
    shared, mine = {entry.names[0] for entry in model.stages[0].shared}, dict[tuple[int, str], list[torch.Tensor]]()
    for name, parameter in model.named_parameters():
        if name in shared:
            state = optimizer.state[parameter]
            values = parameter.detach(), state["exp_avg"], state["exp_avg_sq"]
            mine[world.coordinates.slot, name] = [local_tensor(x).clone() for x in values]
    first, several = dict[tuple[int, str], list[torch.Tensor]](), False
    for copies in world.control.gather_objects(mine):
        several |= bool(first.keys() & copies)
        assert all(all(map(torch.equal, values, first.setdefault(key, values))) for key, values in copies.items())
    assert several


def _save_and_resume(rank: int, saved: parity.Case, resumed: parity.Case, folder: Path) -> None:
    """Two steps, a checkpoint and a folder, and two more; the same after the checkpoint in another home, and in one
    without stages."""
    with compute_in_float64():
        with World(saved.home, backend=backend(), timeout=60) as world:
            model = saved.prepared(world)
            optimizer = build_optimizer(model, "adamw", 1e-2, 0.1)
            _train(model, plan_of(saved), optimizer, world, range(2))
            checkpoint = save_checkpoint(folder / "checkpoints", model, optimizer, world, step=2)
            save_model(model, folder / "saved", world)
            weights = weights_of(model)
            _train(model, plan_of(saved), optimizer, world, range(2, 4))
            _compare_copies(model, optimizer, world)
            final = {name: x for part in world.control.gather_objects(weights_of(model)) for name, x in part.items()}
        for home, case in ((resumed.home, resumed), (Layout(ranks=4), None)):
            with World(home, backend=backend(), timeout=60) as world:
                model: Any = case.prepared(world) if case else prepare(zamba2(8), world)
                optimizer = build_optimizer(model, "adamw", 1e-2, 0.1)
                load_checkpoint(checkpoint, model, optimizer, world)
                plan = plan_of(case) if case else plan_fixed(LENGTHS, home, cp=2, max_tokens_per_slot=20)
                _train(model, plan, optimizer, world, range(2, 4))
                assert max(error(x, final[name]) for name, x in weights_of(model).items()) < 1e-11
        loaded = weights_of(load_model(folder / "saved", dtype="float64"))
    assert set(final) == set(loaded) and worst(weights, {name: loaded[name] for name in weights}) == 0


@pytest.mark.whole
@pytest.mark.parametrize(("saved", "resumed"), [(CASES[4], CASES[7]), (CASES[5], CASES[2])])
def test_what_is_saved_goes_on_in_another_home(
    saved: tuple[Any, ...], resumed: tuple[Any, ...], tmp_path: Path
) -> None:
    run_ranks(_save_and_resume, 4, case(*saved), case(*resumed), tmp_path, timeout=280)
