"""The configuration that a run began with: an unedited one never differs, and of another each value is named."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from longspan import Layout, World
from longspan.checkpoint.base import check_base_unchanged, record_base_weights
from longspan.config.file import load_config
from longspan.config.sections import RunConfig
from longspan.errors import ModelError
from longspan.evaluation.reference import reference_digest
from longspan.model.presets import preset_config
from longspan.model.seams.rope import scale_rope
from longspan.model.weights.hf_folder import read_configuration
from tests.model.stock import SIZES

Values = dict[str, Any]
ROPE: Values = {"rope_type": "default", "rope_theta": 10000.0}
YARN: Values = {**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
OLD_NAMES: Values = {"rope_theta": 10000, "rope_parameters": None, "rope_scaling": None, "torch_dtype": "bfloat16"}
# An edit of the folder's config.json; what is named; whether it decides numbers.
EDITS: dict[str, tuple[Values, str, bool]] = {
    "nothing": ({}, "", False),
    "names of transformers 4": (OLD_NAMES, "", False),
    "another version, class and dtype": (
        {"transformers_version": "5.17.0", "architectures": ["LlamaModel"], "dtype": "float16", "_name_or_path": "x"},
        "",
        False,
    ),
    "theta": ({"rope_parameters": ROPE | {"rope_theta": 50.0}}, "rope_theta was 10000 and is 50 now", True),
    "its old name": (OLD_NAMES | {"rope_theta": 50}, "rope_parameters.rope_theta was 10000 and is 50 now", True),
    "epsilon": ({"rms_norm_eps": 0.5}, "rms_norm_eps was 1e-06 and is 0.5 now", True),
    "yarn": ({"rope_parameters": YARN}, "rope_parameters.factor was null and is 4 now", True),
    "a name of nobody": ({"note": "mine"}, 'note was null and is "mine" now', True),
    "the end": ({"eos_token_id": [2, 5], "rms_norm_eps": 1e-6}, "eos_token_id was 2 and is [2, 5] now", False),
    "a cache": ({"use_cache": False}, "use_cache was true and is false now", False),
}


def edit(file: Path, values: Values) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def run_of(folder: Path, **keys: Any) -> RunConfig:
    """A run whose config.json is there, over a configuration that `edit` may change."""
    LlamaConfig(**SIZES | {"max_position_embeddings": 64, "eos_token_id": 2}).save_pretrained(folder / "model")
    saved = read_configuration(folder / "model")
    saved.save_pretrained(folder / "run")
    return load_config(None, {"model.config": str(folder / "model"), **keys})


@pytest.mark.parametrize("name", EDITS)
def test_what_differs_is_named(name: str, tmp_path: Path) -> None:
    values, named, decides = EDITS[name]
    config = run_of(tmp_path)
    with World(Layout(1), backend="gloo", device="cpu") as world:
        before = reference_digest(config, read_configuration(tmp_path / "model"), world)
        edit(tmp_path / "model" / "config.json", values)
        moved = (tmp_path / "model").rename(tmp_path / "moved")
        config = load_config(None, {"model.config": str(moved)})
        assert (reference_digest(config, read_configuration(moved), world) != before) == decides
    if not decides:
        line = check_base_unchanged(tmp_path / "run", config, "cpu", goes_on=True)
        assert named in line if named else line == ""
        return
    with pytest.raises(
        ModelError, match=r"run began with .* has another now: .*; set that back, or set run.dir"
    ) as error:
        check_base_unchanged(tmp_path / "run", config, "cpu", goes_on=True)
    assert named in str(error.value)
    assert check_base_unchanged(tmp_path / "run", config, "cpu") == ""  # what evaluates the run reads its own


def test_a_name_of_another_version_is_told(tmp_path: Path) -> None:
    config = run_of(tmp_path)
    rope = ROPE | {"partial_rotary_factor": 1.0}
    edit(tmp_path / "run" / "config.json", {"transformers_version": "5.16.0", "rope_parameters": rope})
    line = check_base_unchanged(tmp_path / "run", config, "cpu", goes_on=True)
    assert "rope_parameters.partial_rotary_factor was 1 and is null now" in line
    edit(tmp_path / "run" / "config.json", {"rms_norm_eps": 0.5})
    with pytest.raises(ModelError, match=r"now: rms_norm_eps was 0.5 and is 1e-06 now; set"):
        check_base_unchanged(tmp_path / "run", config, "cpu", goes_on=True)


@pytest.mark.parametrize("scaling", ["yarn", "yarn:4", "linear:4"])
def test_positions_that_a_run_scales_are_its_own(scaling: str, tmp_path: Path) -> None:
    config = run_of(tmp_path, **{"model.rope_scaling": scaling})
    stock = read_configuration(tmp_path / "model")
    scale_rope(stock, scaling.partition(":")[0], 4).save_pretrained(tmp_path / "run")
    assert check_base_unchanged(tmp_path / "run", config, "cpu", goes_on=True) == ""
    stock.save_pretrained(tmp_path / "run")  # no document was long enough
    assert check_base_unchanged(tmp_path / "run", config, "cpu", goes_on=True) == ""
    edit(tmp_path / "model" / "config.json", {"rope_parameters": YARN})
    with pytest.raises(ModelError, match=r'rope_parameters.rope_type was "default" and is "yarn" now'):
        check_base_unchanged(tmp_path / "run", config, "cpu", goes_on=True)


def test_presets_and_what_is_no_configuration(tmp_path: Path) -> None:
    config = load_config(None, {"model.preset": "qwen3-tiny"})
    assert check_base_unchanged(tmp_path, config, "cpu", goes_on=True) == ""  # there is no config.json
    preset_config("qwen3-tiny", vocab_size=300).save_pretrained(tmp_path)
    assert check_base_unchanged(tmp_path, config, "cpu", goes_on=True) == ""
    for content in ("", "{", "[]", "null"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ModelError, match=f"{tmp_path}/config.json is damaged: "):
            check_base_unchanged(tmp_path, config, "cpu", goes_on=True)


def test_depths_that_stay_as_they_are_belong_to_the_base(tmp_path: Path) -> None:
    for name in ("model", "depths"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(bytes(100))
    keys = {"lora.rank": 4, "model.path": str(tmp_path / "model"), "mtp.num_layers": 1}
    config = load_config(None, keys | {"mtp.weights": str(tmp_path / "depths")})
    record_base_weights(tmp_path, config)
    assert check_base_unchanged(tmp_path, config, "cpu") == ""
    (tmp_path / "depths" / "model.safetensors").write_bytes(bytes(99) + b"x")
    others = r"depths \(mtp.weights\) with the sum .* has others now, .*, in model.safetensors; .* set mtp.weights"
    with pytest.raises(ModelError, match=others):
        check_base_unchanged(tmp_path, config, "cpu")
    trained = load_config(None, keys | {"mtp.weights": str(tmp_path / "depths"), "mtp.train_whole": True})
    assert check_base_unchanged(tmp_path, trained, "cpu") == ""  # a checkpoint has them


def test_random_weights_are_drawn_again_on_the_same_kind_of_device(tmp_path: Path) -> None:
    for keys, device, reason in (
        ({"model.preset": "qwen3-0.6b", "lora.rank": 4}, "NVIDIA H200", "adapter of .* were drawn on NVIDIA H200, and"),
        (
            {"model.preset": "qwen3-0.6b", "train.loss": "dpo"},
            "NVIDIA H200",
            "reference model of .*cpu draws others",
        ),
        ({"model.preset": "qwen3-0.6b"}, "NVIDIA H200", ""),
        ({"model.preset": "qwen3-0.6b", "lora.rank": 4}, "CPU", ""),
        ({"model.preset": "qwen3-tiny", "lora.rank": 4}, "NVIDIA H200", ""),
    ):
        (tmp_path / "run.json").write_text(json.dumps({"device": device}))
        config = load_config(None, keys)
        if not reason:
            assert check_base_unchanged(tmp_path, config, "cpu", goes_on=True) == ""
            continue
        with pytest.raises(ModelError, match=reason):
            check_base_unchanged(tmp_path, config, "cpu", goes_on=True)
