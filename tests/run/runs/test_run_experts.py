"""Runs of mixture-of-experts presets: expert parallelism changes no loss, and a run goes on at another degree."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from longspan.run.loggers import read_metrics
from longspan.testing import run_ranks
from tests.train.small import small_config, train_rank

PRESETS = {
    "qwen3-moe-tiny": {"context__planner": "dynamic"},
    "gpt-oss-tiny": {"train__router_balance_loss": 0.01, "train__router_z_loss": 0.001},
}
COMPARED = ("loss", "router_balance_loss", "router_z_loss")


# qwen3-moe goes through other degrees in test_checkpoint_homes.py.
@pytest.mark.whole
@pytest.mark.parametrize("preset", ["qwen3-moe-tiny", "gpt-oss-tiny"])
def test_experts_dealt_out_train_as_experts_on_every_rank(preset: str, tmp_path: Path) -> None:
    curves: list[list[float]] = []
    for ep in (1, 2):
        settings = {"model__preset": preset, "parallel__ep": ep, "train__steps": 2, **PRESETS[preset]}
        config = small_config(tmp_path / f"ep{ep}", **settings)
        run_ranks(train_rank, 2, config, 2, timeout=110)
        facts = json.loads((Path(config.run.dir) / "run.json").read_text())
        weights = load_file(Path(config.run.dir) / "model" / "model.safetensors")
        assert facts["parameters"] == sum(tensor.numel() for tensor in weights.values())
        assert (facts["experts"], facts["experts_of_token"]) == (8, 2) and facts["home"]["ep"] == config.parallel.ep
        if ep == 2:  # the checkpoint is of whole tensors
            more = replace(config, parallel=replace(config.parallel, ep=1), train=replace(config.train, steps=3))
            assert run_ranks(train_rank, 2, more, 2, timeout=110)[0].done == 3
        rows = [row for row in read_metrics(Path(config.run.dir) / "metrics.jsonl") if "loss" in row][:2]
        curves.append([row[name] for row in rows for name in COMPARED])
    assert len(curves[0]) == 6 and curves[1] == pytest.approx(curves[0], rel=1e-5)
    assert curves[0][1] > 1 and curves[0][2] > 0
