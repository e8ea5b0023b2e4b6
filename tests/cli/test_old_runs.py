"""The folder of a run of version 0.3: train goes on with it to the same losses, eval and export read it as it is."""

import json
import shutil
import tomllib
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from safetensors.torch import load_file

from longspan.checkpoint.files import read_state
from longspan.cli.main import main
from longspan.config.renamed import OLD_SETS, RENAMED, SETS, VALUES
from longspan.launch import launch
from longspan.run.metrics import read_metrics
from longspan.testing import run_ranks
from tests.train.small import small_config, train_rank, without_times, write_texts

GONE = {  # of 0.3, beside those that stood beside optimizer.arguments
    "model": {"rope_factor": 0.0},
    "data": {"cache": ""},
    "context": {"eval_min_dynamic_context_parallel_size": 1},
    "train": {"center_rewards_coefficient": 0.0, "decay_steps": 0},
    "encoder": {"recompute": False},
}
OLD_NAMES = {new: old for old, new in RENAMED.items()}


def old_tables(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a configuration with the keys and values of 0.3."""
    result = dict[str, Any]()
    for section, values in tables.items():
        for key, value in values.items():
            name = f"{section}.{key}"
            if name == SETS:
                result[OLD_SETS] = value
                continue
            if name == "optimizer.arguments":
                gone = {"betas": [0.8, 0.9], "fused_norms": "auto", "offload_activations": False}
                result.setdefault("train", {}).update(gone, optimizer_arguments=[])
                continue
            if name in ("optimizer.moments", "optimizer.groups"):  # 0.3 had none
                continue
            words = {new: old for old, new in VALUES.get(name, {}).items()}
            old_section, _, old_key = OLD_NAMES.get(name, name).partition(".")
            old_value = words[value] if isinstance(value, bool | str) and value in words else value
            result.setdefault(old_section, {})[old_key] = old_value
    for section in GONE.keys() & tables.keys():
        result[section] |= GONE[section]
    return result


def write_old_names(run: Path) -> None:
    """Make the folder of a run one that 0.3 wrote: its configuration, checkpoints and records of corpora."""
    file = run / "config.toml"
    file.write_text(tomlkit.dumps(old_tables(tomllib.loads(file.read_text()))))
    for file in run.glob("checkpoints/*/state.json"):
        state = json.loads(file.read_text())
        text = json.dumps(state | {"config": old_tables(state["config"])}, indent=1)
        file.write_text(text)
        manifest = file.with_name("manifest.json")
        contents = json.loads(manifest.read_text())
        contents["files"]["state.json"] = [len(text), sha256(text.encode()).hexdigest()]
        manifest.write_text(json.dumps(contents))
    for file in run.rglob("corpus.json"):
        record = json.loads(file.read_text())
        record["asked"] = old_tables({"data": record["asked"]})["data"]
        file.write_text(json.dumps(record))


def test_a_run_of_0_3_goes_on_and_is_evaluated_and_exported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "usable_cores", lambda: 2)  # a thread for each rank, as in ranks of `run_ranks`
    sets = [{"name": "others", "path": str(write_texts(tmp_path / "others", 4)), "context_parallel_size": 1}]
    keys: dict[str, Any] = {
        "data__split_turns": True,
        "train__plan_memory": False,
        "optimizer__arguments": ("betas=[0.8, 0.9]",),
    }
    config = small_config(tmp_path, train__steps=3, checkpoint__every=2, evaluation__sets=sets, **keys)
    run_ranks(train_rank, 2, config, 2)
    run = Path(config.run.dir)
    unbroken = Path(shutil.copytree(run, tmp_path / "unbroken"))
    shutil.rmtree(run / "checkpoints" / "step-000003")
    shutil.rmtree(run / "model")
    (run / "summary.json").unlink()
    write_old_names(run)
    old = tomllib.loads((run / "config.toml").read_text())
    assert old["train"]["lr"] == 6e-3 and old["train"]["memory"] == "none" and old["data"]["turns"] == "split"
    assert old["train"]["save_every"] == 2 and old["eval"][0]["name"] == "others" and "optimizer" not in old
    assert json.loads((run / "corpus" / "corpus.json").read_text())["asked"]["on_bad"] == "error"
    state = read_state(run / "checkpoints" / "step-000002")  # by which a key that has changed is refused
    assert state["config"]["optimizer"]["class"] == "adamw" and "eval" not in state["config"]

    # before it goes on: its checkpoint of step 2, with names of 0.3 alone
    assert main(["eval", str(run), "--world", "1", "--json"]) == 0
    (found,) = [x for x in json.loads(capfd.readouterr().out)["evaluations"] if not x.get("eval_name")]
    rows = read_metrics(unbroken / "metrics.jsonl")
    at_two = next(row for row in rows if row["step"] == 2 and "eval_loss" in row and "eval_name" not in row)
    assert found["eval_loss"] == pytest.approx(at_two["eval_loss"], rel=1e-6)
    assert main(["export", str(run), str(tmp_path / "exported")]) == 0
    assert main(["train", str(run / "config.toml"), "--world", "2"]) == 0
    ended = read_metrics(run / "metrics.jsonl")
    assert [without_times(row) for row in ended] == [without_times(row) for row in rows]
    last, straight = (load_file(folder / "model" / "model.safetensors") for folder in (run, unbroken))
    assert last.keys() == straight.keys() and all(last[name].equal(straight[name]) for name in last)
    assert load_file(tmp_path / "exported" / "model.safetensors").keys() == straight.keys()
