"""Checkpoints of format 1 are rewritten bit for bit, and nothing in them is run; a run of version 0.2 goes on.

`format_1/step-000001` is of a Linear(5, 3) in float64 on two ranks of FSDP2, after a step of AdamW.
"""

import io
import json
import os
import re
import shutil
import tarfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from longspan import Layout, World
from longspan.checkpoint.checkpoint import load_checkpoint
from longspan.checkpoint.export import export_checkpoint
from longspan.checkpoint.format_1 import main
from longspan.config.file import load_config
from longspan.config.keys import AUTO
from longspan.config.sections import RunConfig
from longspan.errors import CheckpointError
from longspan.run.loggers import read_metrics
from longspan.testing import run_ranks
from tests.security.test_hostile_checkpoints import Hostile
from tests.train.small import train_rank

STORED = Path(__file__).with_name("format_1")
SETTING, STEP = "optimizer.param_groups.bias.lr", "optimizer.state.bias.step"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return Path(shutil.copytree(STORED / "step-000001", tmp_path / "checkpoints" / "step-000001"))


def load(path: Path) -> dict[str, torch.Tensor]:
    with World(Layout(1), backend="gloo", timeout=60) as world:
        model = nn.Linear(5, 3).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        assert load_checkpoint(path, model, optimizer, world)["step"] == 1
        moments = {f"{n}|{key}": x for n, p in model.named_parameters() for key, x in optimizer.state[p].items()}
        return {name: p.detach() for name, p in model.named_parameters()} | moments


def test_an_old_checkpoint_is_refused_and_rewritten_bit_for_bit(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CheckpointError, match=rf"has format 1, .* -m longspan.checkpoint.format_1 {old.parent}$"):
        load(old)
    before = {file.name: file.read_bytes() for file in old.iterdir()}
    assert main([str(old.parent)]) == 0 and "1 of 1 checkpoints" in capsys.readouterr().out
    kept = old.with_name("step-000001.format-1")
    assert {file.name: file.read_bytes() for file in kept.iterdir()} == before
    expected, loaded = load_file(STORED / "expected.safetensors"), load(old)
    assert loaded.keys() == expected.keys() and len(expected) == 8
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    assert json.loads((old / "optimizer.json").read_text()) == {"numbers": {}, "settings": {}}
    assert main([str(old)]) == 0 and "0 of 1 checkpoints" in capsys.readouterr().out
    assert main([]) == 2


def put(path: Path, name: str, value: Any) -> None:
    """Put a pickled value in place of what a checkpoint has under a name; hashes fit."""
    table, buffer = json.loads((path / "metadata.json").read_text()), io.BytesIO()
    torch.save(value, buffer)
    file = path / "__0_0.distcp"
    place = [0, file.stat().st_size, len(buffer.getvalue())]
    file.write_bytes(file.read_bytes() + buffer.getvalue())
    tensor = table["tensors"].get(name)
    if tensor is not None and isinstance(value, Hostile):
        tensor["chunks"][0][2:] = place
    else:
        table["tensors"].pop(name, None)
        table["values"][name] = place
    (path / "metadata.json").write_text(json.dumps(table))
    manifest = json.loads((path / "manifest.json").read_text())
    for stored in ("__0_0.distcp", "metadata.json"):
        data = (path / stored).read_bytes()
        manifest["files"][stored] = [len(data), sha256(data).hexdigest()]
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("name", ["model.weight", "optimizer.state.bias.count"])
def test_hostile_ones_run_nothing(old: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    put(old, name, Hostile(tmp_path / "trap"))
    assert main([str(old)]) == 2
    assert re.search("names _?io.open, which is neither a tensor", capsys.readouterr().err)  # _io since Python 3.13
    flipped = bytearray((old / "__1_0.distcp").read_bytes())
    flipped[99] ^= 1
    (old / "__1_0.distcp").write_bytes(flipped)
    assert main([str(old)]) == 2 and "__1_0.distcp has other contents" in capsys.readouterr().err
    assert not (tmp_path / "trap").exists() and [path.name for path in old.parent.iterdir()] == [old.name]


def test_settings_are_kept_by_name_and_numbers_by_value(old: Path, tmp_path: Path) -> None:
    for name, value in ((SETTING, Hostile(tmp_path / "trap")), ("optimizer.state.bias.count", 7)):
        put(old, name, value)  # settings are not read
    put(old, "optimizer.param_groups.other.lr", 0.5)
    assert main([str(old)]) == 0 and not (tmp_path / "trap").exists()
    values = json.loads((old / "optimizer.json").read_text())
    assert values == {"numbers": {"state.bias.count": 7}, "settings": {"other": ["lr"]}}


# ---- a run of version 0.2: six steps on two CPU ranks at commit 0706c4a4, without checkpoint 6 and the cache; run.toml
# in it says how. Losses of its steps 4 to 6 are those of the run that was never stopped.


STORED_RUN = Path(__file__).with_name("run_of_0_2.tar.xz")


def resume(rank: int, folder: Path, config: RunConfig) -> int:
    """Resume the run on this rank, in its folder, by the configuration that it left; the last step."""
    os.chdir(folder)
    return train_rank(rank, config, 2).steps


def test_a_run_of_0_2_is_exported_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its folder, unpacked somewhere else; the cache of its tokens is gone."""
    monkeypatch.chdir(tmp_path)
    with tarfile.open(STORED_RUN) as archive:
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # 3.11.4
    assert main(["run/checkpoints"]) == 0
    done = export_checkpoint(tmp_path / "run", None, tmp_path / "out", print)
    weights = load_file("out/model.safetensors")
    assert done.step == 3 and done.tensors == len(weights) == 13
    assert sum(tensor.numel() for tensor in weights.values()) == done.parameters
    config = load_config(Path("run/config.toml"))  # here, as the first rank writes the file again
    assert config.train.steps == 6 and config.context.planner == "dynamic" and config.evaluation.documents != AUTO
    log = tmp_path / "run" / "metrics.jsonl"
    before = [row for row in read_metrics(log) if "loss" in row]
    assert [row["step"] for row in before] == [1, 2, 3, 4, 5, 6]
    assert run_ranks(resume, 2, tmp_path, config, timeout=120) == [6, 6]
    after = [row for row in read_metrics(log) if "loss" in row]
    assert [row["step"] for row in after] == [1, 2, 3, 4, 5, 6] and after[:3] == before[:3]
    assert after[3]["seconds"] != before[3]["seconds"]  # step 4 was run again
    for name in ("loss", "grad_norm", "lr", "tokens"):
        assert [row[name] for row in after] == pytest.approx([row[name] for row in before], rel=1e-10)
