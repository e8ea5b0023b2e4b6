"""A LoRA run over a folder in 8 bits merges into the dequantised weights; training of all weights is refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from longspan.cli.main import main as cli_main
from tests.model.frozen.formats.folders import quantise_float8, read_float8
from tests.run.runs.test_lora_run import _run_over, adapter, write_base


def test_a_base_in_8_bits_merges_into_dequantised_weights(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    base = write_base(tmp_path / "base")
    quantise_float8(base, weight_block_size=None, activation_scheme="static")
    config = _run_over(str(base), tmp_path)
    assert cli_main(["export", config.run.dir, str(tmp_path / "out"), "--merge", "--dtype", "float64"]) == 0
    exact = {name: x.double() for name, x in read_float8(base, torch.float64).items()}
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert merged.keys() == exact.keys()
    saved = {name.removeprefix("base_model.model."): x.double() for name, x in adapter(config).items()}
    adapted = {name.replace("lora_A.", "") for name in saved if "lora_A" in name}
    assert len(adapted) == 14
    for name, weight in exact.items():
        if name in adapted:
            a, b = (saved[name.replace("weight", f"lora_{matrix}.weight")] for matrix in "AB")
            assert b.abs().max() > 0
            weight = weight + 2 * b @ a
        assert (merged[name] - weight).abs().max() <= 1e-12 * weight.abs().max(), name
    capfd.readouterr()
    whole = [f"{config.run.dir}/config.toml", "--lora.rank", "0", "--run.dir", str(tmp_path / "whole")]
    assert cli_main(["train", *whole, "--world", "1", "--device", "cpu"]) == 2
    assert "is quantized (fp8, by its config.json), and whole weights are trained" in capfd.readouterr().err
