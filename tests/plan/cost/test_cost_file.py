"""A file of a machine: what is said of one that is none, the same in training and on the command line."""

import doctest
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from longspan.cli.main import main
from longspan.config.sections import RunConfig, RunSection
from longspan.errors import ConfigError
from longspan.plan import Machine
from longspan.plan.cost import machine as cost_file
from longspan.plan.cost.links import Link
from longspan.train.plans import read_cost

BAD = [  # what is in the place of the file, what is said of it
    (None, "holds no machine: No such file or directory"),
    ("folder", "is a folder"),
    ("{", "holds no machine: Expecting property name"),
    (b"\xff", "holds no machine: 'utf-8' codec"),
    ('{"ring_bytes": 7}', "holds no machine: a machine is an object with across, assumed"),  # the cost of one model
    ("[]", "holds no machine: a machine is an object"),
]


@pytest.mark.parametrize(("text", "complaint"), BAD, ids=[complaint[:40] for _, complaint in BAD])
def test_a_file_without_a_machine_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | bytes | None, complaint: str
) -> None:
    path = tmp_path / "cost.json"
    if text == "folder":
        path.mkdir()
    elif text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    advice = "; give the file that `longspan bench calibrate --out FILE.json` writes for this machine"
    with pytest.raises(ConfigError, match=rf"run\.machine {path} {re.escape(complaint)}.*{advice}$"):
        read_cost(RunConfig(run=RunSection(machine=str(path))))
    for verb in (["plan"], ["plan", "--compare"], ["bench", "step", "--world", "2"]):
        slots, key = ([], "run.machine") if verb[0] == "bench" else (["--slots", "2"], "--machine")
        assert main([*verb, *slots, "--same", "2x8", f"--{key.removeprefix('--')}", str(path)]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: {key} {path} {complaint}") and said.endswith(f"{advice}\n")


def test_a_machine_is_read_back_by_file_and_by_name(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    machine = Machine(inside=Link.of(2e-5, 1e11), assumed_parts=("across",), world=4, date="2026-01-01")
    path.write_text(json.dumps(machine.to_json()))
    assert cost_file.read_machine(str(path), "--machine") == replace(machine, source=str(path))
    assert cost_file.read_machine("A100-80", "--machine") == Machine.known("a100-80")
    values = machine.to_json()
    del values["inside"]["gather"]
    path.write_text(json.dumps(values))
    with pytest.raises(
        ConfigError, match=r"--machine \S+ holds no machine: a link is an object with seconds of a message and"
    ):
        cost_file.read_machine(str(path), "--machine")
    path.write_text(json.dumps(machine.to_json() | {"machine": 1}))
    with pytest.raises(ConfigError, match=r"the machine's file has version 1, and this longspan reads 2; measure"):
        cost_file.read_machine(str(path), "--machine")


@pytest.mark.parametrize(
    ("device", "ranks", "hosts", "answer"),
    [
        ("NVIDIA H200", 4, 1, ""),
        ("NVIDIA H200", 4, 3, "m.json was measured on 1 host, and this run has 3: the links between hosts are assumed"),
        ("NVIDIA A100", 4, 1, "m.json was measured on NVIDIA H200, and this run is on NVIDIA A100; measure again"),
        ("NVIDIA H200", 8, 1, "m.json was measured with 4 ranks on a host, and this run has 8; measure again"),
    ],
)
def test_a_machine_is_of_its_device_and_hosts(device: str, ranks: int, hosts: int, answer: str) -> None:
    machine = Machine(device="NVIDIA H200", world=4, node_size=4, assumed_parts=("across",), source="m.json")
    check = partial(
        cost_file.check_measured_machine, key="run.machine", device=device, ranks_of_host=ranks, hosts=hosts
    )
    if "measure again" in answer:
        with pytest.raises(ConfigError, match=f"^run.machine {answer} with longspan bench calibrate$"):
            check(machine)
        assert check(replace(machine, world=0)) == ""  # a known one, by name
    else:
        assert check(machine).removeprefix("run.machine ").startswith(answer)
        assert check(replace(machine, world=8, assumed_parts=())) == ""  # two hosts were measured, which is enough
    assert check(replace(machine, world=0)) == ""


def test_docstrings_show_what_happens() -> None:
    outcome = doctest.testmod(cost_file)
    assert outcome.attempted and not outcome.failed
