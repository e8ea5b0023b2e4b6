"""A run that version 0.2 left is resumed and exported, once its checkpoints are rewritten: its folder is stored here.

run_of_0_2.tar.xz is the folder of six steps on two CPU ranks at commit 0706c4a4, without checkpoint 6 and the cache;
`run.toml` in it says how. Losses of its steps 4 to 6 are those of the run that was never stopped.
"""

import os
import re
import tarfile
from pathlib import Path

import pytest
from safetensors.torch import load_file

from longspan.checkpoint.export import export_checkpoint
from longspan.checkpoint.format_1 import main
from longspan.config.file import load_config
from longspan.config.keys import AUTO, GONE_VALUES
from longspan.config.sections import RunConfig
from longspan.run.loggers import read_metrics
from longspan.testing import run_ranks
from tests.train.small import train_rank

STORED = Path(__file__).with_name("run_of_0_2.tar.xz")


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """The folder that the run was started in, unpacked somewhere else; the cache of its tokens is gone."""
    with tarfile.open(STORED) as archive:
        archive.extractall(tmp_path, filter="data")
    assert main([str(tmp_path / "run" / "checkpoints")]) == 0
    return tmp_path


def resume(rank: int, folder: Path, ranks: int, config: RunConfig) -> int:
    """Resume the run on this rank, in its folder, by the configuration that it left; the last step."""
    os.chdir(folder)
    return train_rank(rank, config, ranks).steps


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.whole)])
def test_a_run_of_0_2_is_resumed(stored: Path, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(stored)
    written = Path("run/config.toml").read_text()
    gone = [key.split(".") for key in GONE_VALUES if not key.startswith("eval.")]  # the run has no [[eval]]
    assert {f"{name} = " for _, name in gone} <= set(re.findall(r"\w+ = ", written))
    config = load_config(Path("run/config.toml"))  # here, as the first rank writes the file again
    assert config.train.steps == 6 and config.context.planner == "dynamic" and config.data.eval_documents != AUTO
    log = stored / "run" / "metrics.jsonl"
    before = [row for row in read_metrics(log) if "loss" in row]
    assert [row["step"] for row in before] == [1, 2, 3, 4, 5, 6]
    assert run_ranks(resume, ranks, stored, ranks, config, timeout=120) == [6] * ranks
    after = [row for row in read_metrics(log) if "loss" in row]
    assert [row["step"] for row in after] == [1, 2, 3, 4, 5, 6] and after[:3] == before[:3]
    assert after[3]["seconds"] != before[3]["seconds"]  # step 4 was run again
    for name in ("loss", "grad_norm", "lr", "tokens"):
        assert [row[name] for row in after] == pytest.approx([row[name] for row in before], rel=1e-10)


def test_a_checkpoint_of_0_2_is_exported(stored: Path) -> None:
    done = export_checkpoint(stored / "run", None, stored / "out", print)
    weights = load_file(stored / "out" / "model.safetensors")
    assert done.step == 3 and done.tensors == len(weights) == 13
    assert sum(tensor.numel() for tensor in weights.values()) == done.parameters
