"""`longspan train` with [lora] or [mtp] over images: equal at any degree, gone on with, and read by stock packages."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from longspan.cli.export import main as export_main
from longspan.config.file import load_config
from longspan.config.sections import ParallelConfig, RunConfig
from longspan.data.stream import ORDER
from longspan.errors import ConfigError, ModelError
from longspan.model import add_mtp, load_model
from longspan.model.adapters.new_adapter import NewAdapter, add_lora
from longspan.run.checks import check_lora, refuse_encoder_without_images
from longspan.run.set_up import _check_same_run
from tests.model.vision.models import tiny
from tests.run.runs.homes import farthest, gone_on_from_the_first_checkpoint, losses_of_run, train_rows
from tests.run.runs.test_images_run import model_folder, rows_with_images, settings

peft = pytest.importorskip("peft")
ONE = {"context__max_tokens_per_slot": 256}
TWO = {"context__context_parallel_size": 2, "context__max_tokens_per_slot": 128, "encoder__tp": 2}
BESIDE = {"projector": 5}  # tensors of tower and projector that are trained whole


def config_of(folder: Path, name: str, trained: str, **degrees: Any) -> RunConfig:
    keys: dict[str, Any] = {"lora__rank": 4, "optimizer__lr": 0.02, "encoder__lr": 2e-3}
    keys["encoder__trainable"] = trained
    return settings(folder / name, folder / "rows" / "rows.jsonl", folder / "model", **keys, **degrees)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    model_folder(folder / "model")
    rows_with_images(folder / "rows")
    return folder


@pytest.mark.whole
@pytest.mark.parametrize("trained", BESIDE)
def test_adapters_beside_images(trained: str, folder: Path) -> None:
    config, alone = (config_of(folder, f"{n}-{trained}", trained, **degrees) for n, degrees in ((2, TWO), (1, ONE)))
    two = losses_of_run(config, 2)
    assert farthest(two[:5], losses_of_run(alone, 1)) < 1e-6 and two[3] < two[0]
    other = gone_on_from_the_first_checkpoint(config, folder / f"on-{trained}", ParallelConfig(tp=2))
    resumed = losses_of_run(replace(other, context=alone.context, evaluation=alone.evaluation), 2)
    assert farthest(resumed[:5], two[:5]) < 1e-6
    _check_stock(Path(config.run.dir), folder / "model", BESIDE[trained], folder / trained)


def _check_stock(run: Path, base: Path, beside: int, out: Path) -> None:
    """What is saved, and exported with and without --merge, gives the same logits in stock peft and transformers."""
    assert export_main([str(run), str(out / "adapter")]) == 0
    assert export_main([str(run), str(out / "merged"), "--merge", "--dtype", "float64"]) == 0
    saved, exported = (load_file(x / "adapter_model.safetensors") for x in (run / "model", out / "adapter"))
    assert saved.keys() == exported.keys() and all(torch.equal(x, exported[name]) for name, x in saved.items())
    assert sum("lora_" not in name for name in saved) == beside
    assert not any("lora_" in name and ".visual." in name for name in saved)
    adapted = peft.PeftModel.from_pretrained(_stock(base), run / "model", torch_device="cpu").eval()
    with torch.no_grad():
        wanted = adapted(**_image()).logits
        assert (_stock(out / "merged")(**_image()).logits - wanted).abs().max() < 1e-9 * wanted.abs().max()
        assert (_stock(base)(**_image()).logits - wanted).abs().max() > 1e-2


def _stock(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64).eval()


def _image() -> dict[str, torch.Tensor]:
    ids = torch.tensor([[65, 66, *[260] * 4, 70, 71]])
    pixels = torch.randn(16, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    grid, kinds = torch.tensor([[1, 4, 4]]), (ids == 260).int()
    return {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": kinds}


DEPTHS = {
    "mtp__num_layers": 1,
    "mtp__loss_scaling_factor": 0.5,
    "mtp__train_whole": True,
    "encoder__trainable": "projector",
}


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore:.*are no part of the.*itself")  # the depths, which are added then
def test_whole_depths_beside_images_and_an_adapter(folder: Path) -> None:
    def losses(config: RunConfig, ranks: int) -> list[float]:
        return [float(row[key]) for row in train_rows(config, ranks) for key in ("loss", "mtp_loss_1", "grad_norm")]

    keys: dict[str, Any] = {"lora__rank": 4, "optimizer__lr": 0.02, **DEPTHS}
    rows, model = folder / "rows" / "rows.jsonl", folder / "model"
    two, alone = (settings(folder / f"mtp-{n}", rows, model, **keys, **more) for n, more in ((2, TWO), (1, ONE)))
    wanted = losses(alone, 1)
    assert len(wanted) == 12 and farthest(losses(two, 2), wanted) < 1e-6  # norms and rotary angles are in float32
    for name, parallel in {"tp": ParallelConfig(tp=2), "pp": ParallelConfig(pp=2)}.items():
        other = gone_on_from_the_first_checkpoint(alone, folder / f"mtp-{name}", parallel)
        assert farthest(losses(other, 2), wanted) < 1e-6
    out = folder / "mtp-out"
    assert export_main([two.run.dir, str(out), "--merge"]) == 0
    weights = load_file(out / "model.safetensors")
    AutoModelForImageTextToText.from_pretrained(out)  # without depths
    read = add_mtp(load_model(out, images=True, sharded=False), 1, weights=out)
    saved = load_file(Path(two.run.dir) / "model" / "adapter_model.safetensors")
    depths = {name.removeprefix("base_model.model."): x for name, x in saved.items() if "mtp.layers.0." in name}
    assert depths and all(torch.equal(x.to(weights[name].dtype), weights[name]) for name, x in depths.items())
    assert all((read.get_parameter(name) - x).abs().max() < 1e-2 for name, x in depths.items())


MODEL = {"lora.rank": 8, "model.path": "x"}


def test_keys_that_do_not_fit() -> None:
    dropped = r"lora\.dropout is 0\.1 and parallel.tp is 2: tensor-parallel ranks would drop"
    with pytest.raises(ConfigError, match=dropped):
        check_lora(load_config(None, MODEL | {"lora.dropout": 0.1, "parallel.tp": 2}))
    with pytest.raises(ConfigError, match=r"\[encoder\] is given, and no row of the data has images"):
        refuse_encoder_without_images(load_config(None, MODEL | {"encoder.tp": 2}), 0)


def test_towers_are_frozen_beside_adapters_by_default_and_a_run_keeps_what_it_trains() -> None:
    config = load_config(None, MODEL)
    assert config.encoder.trainable == "none" and load_config(None, {"model.path": "x"}).encoder.trainable == "all"
    before = replace(config, encoder=replace(config.encoder, trainable="projector"))
    state = {"order": ORDER, "config": json.loads(json.dumps(before.tables()))}
    with pytest.raises(ConfigError, match=r"encoder\.trainable was 'projector' when .* and is 'none' now"):
        _check_same_run(config, state, Path("step-000004"))


def test_targets_in_the_tower_are_refused() -> None:
    message = "'qkv', which is no linear of Qwen2_5_VLForConditionalGeneration outside its towers"
    with pytest.raises(ModelError, match=message):
        add_lora(tiny("qwen2.5-vl"), NewAdapter(rank=4, targets=("q_proj", "qkv")))
    adapted = add_lora(tiny("qwen2.5-vl"), NewAdapter(rank=4)).get_base_model()
    names = [name for name, _ in adapted.named_parameters() if "lora_" in name]
    assert names and not any(".visual." in name for name in names)  # the tower has linears of these names too
