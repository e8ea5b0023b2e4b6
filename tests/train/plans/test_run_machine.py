"""`run.machine` in a world: a measured file prices the run and resolves "auto"; another device's is refused."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from longspan.comm import World, run_local
from longspan.config.sections import LoraSection, ModelConfig, MtpSection, RunConfig, RunSection, TrainConfig
from longspan.errors import ConfigError
from longspan.layout import Layout
from longspan.plan import CostSettings, Machine
from longspan.plan.cost.links import Link
from longspan.train.plans import find_run_cost
from longspan.train.plans.resolve import use_machine

MODEL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
MODEL["vocab_size"] = 1000
MEASURED = replace(Machine.cpus(), world=2, node_size=2, assumed=False, inside=Link.of(1e-3, 1e8))


def _write(path: Path, machine: Machine) -> str:
    path.write_text(json.dumps(machine.to_json()))
    return str(path)


def _use(rank: int, file: str) -> tuple[str, Machine, Sequence[str]]:
    lines: list[str] = []
    config = RunConfig(run=RunSection(machine=file))
    with World(Layout(2), backend="gloo", timeout=60) as world:
        try:
            use_machine(config, world, lines.append)
        except ConfigError as error:
            return str(error), world.machine, lines
        return "", world.machine, lines


def test_a_world_has_the_machine_of_the_run(tmp_path: Path) -> None:
    file = _write(tmp_path / "machine.json", MEASURED)
    for answer in run_local(_use, 2, (file,), timeout=120):
        assert answer == ("", replace(MEASURED, source=file), [])


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (replace(MEASURED, device="NVIDIA H200"), "was measured on NVIDIA H200, and this run is on cpu"),
        (replace(MEASURED, world=8, node_size=4), "was measured with 4 ranks on a host, and this run has 2"),
    ],
)
def test_all_ranks_refuse_a_machine_of_others(tmp_path: Path, machine: Machine, message: str) -> None:
    file = _write(tmp_path / "machine.json", machine)
    for error, of_world, _ in run_local(_use, 2, (file,), timeout=120):
        assert error.startswith(f"run.machine {file} {message}") and of_world == Machine.cpus()


def test_what_a_run_does_changes_the_cost_of_its_model_on_a_machine(tmp_path: Path) -> None:
    file = _write(tmp_path / "machine.json", MEASURED)
    plain = RunConfig(run=RunSection(machine=file), model=ModelConfig(dtype="float32"))
    again = replace(plain, train=TrainConfig(activation_checkpointing="full"))
    float8 = replace(plain, train=TrainConfig(float8="rows"))
    for config, settings in (
        (plain, CostSettings(bytes_per_number=4)),
        (float8, CostSettings(bytes_per_number=4, float8=True)),
        (again, CostSettings(bytes_per_number=4, recomputation="full")),
        (replace(again, lora=LoraSection(rank=4)), CostSettings(bytes_per_number=4, recomputation="full", frozen=True)),
        (replace(plain, mtp=MtpSection(depths=1)), CostSettings(bytes_per_number=4, depths=1)),
    ):
        cost = find_run_cost(config, MODEL, print, gpu=False)
        assert cost == replace(MEASURED, source=file).cost(MODEL, settings)
        assert (cost.source, cost.inside_bytes_per_second) == (file, pytest.approx(1e8))
    on_gpus = find_run_cost(plain, MODEL, print, gpu=True)  # computed in bfloat16
    assert on_gpus.ring_bytes < find_run_cost(plain, MODEL, print, gpu=False).ring_bytes
