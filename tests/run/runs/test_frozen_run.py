"""A run of `longspan train` over weights in 4 bits: its lines, its resumption, its evaluation, and what is exported."""

import json
import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from longspan.cli.eval import main as eval_main
from longspan.cli.export import main as export_main
from longspan.config.sections import RunConfig
from longspan.errors import ModelError
from longspan.model import load_model
from longspan.testing import run_ranks
from tests.model.frozen.test_reading import dequantised
from tests.run.runs.homes import ALONE, gone_on_from_the_first_checkpoint, lines_of, losses_of_run, refusals
from tests.train.small import small_config, write_model

LORA = {"lora__rank": 4, "train__steps": 3, "checkpoint__every": 2, "evaluation__every": 3, "optimizer__lr": 0.05}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, list[float]]:
    folder = tmp_path_factory.mktemp("frozen")
    write_model(folder)
    config = small_config(folder, model__path=str(folder / "model"), model__frozen="nf4", **LORA)
    return config, losses_of_run(config, 2)


def test_losses_and_adapter_are_those_of_dequantised_weights(
    trained: tuple[RunConfig, list[float]], tmp_path: Path
) -> None:
    config, losses = trained
    write_model(tmp_path)
    model = load_model(config.model.path)
    model.load_state_dict(dequantised(Path(config.model.path), torch.float32))
    model.save_pretrained(tmp_path / "model")
    whole = small_config(tmp_path, model__path=str(tmp_path / "model"), **LORA)
    assert losses_of_run(whole, 2) == losses
    of_whole, of_packed = (load_file(Path(c.run.dir) / "model" / "adapter_model.safetensors") for c in (whole, config))
    assert all(torch.equal(of_packed[name], x) for name, x in of_whole.items())
    assert losses[-1] < losses[0]


def test_a_resumed_run_keeps_its_frozen_weights(trained: tuple[RunConfig, list[float]], tmp_path: Path) -> None:
    config, losses = trained
    first = gone_on_from_the_first_checkpoint(config, tmp_path / "run")
    for word in ("whole", "auto"):
        (error,) = refusals([replace(first, model=replace(first.model, frozen=word))])
        assert re.search(f"model.frozen was 'nf4' when .* and is '{word}' now; set it back", str(error))
    lines = run_ranks(lines_of, 2, first, 2)[0]
    frozen = next(line for line in lines.splitlines() if line.startswith("frozen "))
    numbers = "93.3 % of the model's numbers, 445.5 KiB in place of 3.094 MiB in float32"
    assert frozen.split(maxsplit=1)[1] == f"nf4: 14 weights of decoder layers, {numbers}"
    on_host = replace(first, train=replace(first.train, offload_weights=True))
    assert losses_of_run(on_host, 0) == losses


def test_rows_that_blocks_do_not_divide_are_refused_before_data_are_read(tmp_path: Path) -> None:
    sizes = {"hidden_size": 1056, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 600, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **sizes, **heads}))
    keys = {"model__config": str(tmp_path), "model__preset": "", "model__frozen": "nf4", **LORA, **ALONE}
    config = small_config(tmp_path, **keys)
    data = patch("longspan.run.set_up.open_data", side_effect=AssertionError("data were read"))
    with data, pytest.raises(ModelError, match="rows have 1056 numbers, which blocks of 64 do not divide"):
        lines_of(0, config, 1)


@pytest.mark.whole
def test_evaluation_is_over_these_values(
    trained: tuple[RunConfig, list[float]], capsys: pytest.CaptureFixture[str]
) -> None:
    config, losses = trained
    flags = ["--evaluation.context_parallel_size", "1", "--json", "--world", "1", "--device", "cpu"]
    assert eval_main([config.run.dir, *flags]) == 0
    assert json.loads(capsys.readouterr().out)["eval_loss"] == pytest.approx(losses[-1], rel=1e-6)


def test_an_adapter_is_saved_and_merged_over_the_weights_of_the_folder(
    trained: tuple[RunConfig, list[float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, _ = trained
    assert export_main([config.run.dir, str(tmp_path / "merged"), "--merge", "--dtype", "float32"]) == 0
    said = (
        f"trained over 4-bit values (model.frozen = nf4) of the weights of {config.model.path}, and is added to these"
    )
    assert said in capsys.readouterr().out
    base = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    stock = peft.PeftModel.from_pretrained(base, config.run.dir + "/model", torch_device="cpu").merge_and_unload()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).state_dict()
    assert all(torch.allclose(merged[name], x, rtol=1e-6, atol=1e-7) for name, x in stock.state_dict().items())
