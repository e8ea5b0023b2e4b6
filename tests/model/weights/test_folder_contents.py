"""What a folder's files hold is compared with what its model takes: accepted ones have transformers' own loss."""

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from longspan import Layout, World, plan_fixed, prepare, run_step, save_model
from longspan.errors import ModelError
from longspan.model import load_model
from tests.model.stock import dense_answer, prepare_untried, texts, tiny

Weights = dict[str, Tensor]
EMBEDDING, HEAD, GATE = "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.gate_proj.weight"
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
DOCUMENTS = texts((20, 9, 26))


def _float8(weights: Weights) -> Weights:
    """Linears as codes of float8 with a scale each, as DeepSeek-V3 and Qwen3-FP8 have them."""
    codes: Weights = {}
    for name, x in weights.items():
        scale = x.abs().max() / 448
        quantized = {name: (x / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale.reshape(1, 1)}
        codes |= quantized if "proj" in name else {name: x}
    return codes


def _int8(weights: Weights) -> Weights:
    scale = weights[GATE].abs().amax(1)
    return weights | {GATE: (weights[GATE] / scale[:, None] * 127).to(torch.int8), GATE.replace("weight", "SCB"): scale}


def _write(folder: Path, weights: Weights, **config: Any) -> Path:
    tiny("qwen3").config.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | config))
    save_file({name: x.contiguous() for name, x in weights.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """The weights of a model of two layers with a tied head, as transformers writes them."""
    folder = tmp_path_factory.mktemp("whole")
    tiny("qwen3").save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def _two_files(folder: Path, weights: Weights, names: tuple[str, ...]) -> None:
    """A second shard with these tensors, which the first one has too."""
    _write(folder, weights)
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    save_file({name: weights[name] for name in names}, folder / "model-2.safetensors")
    index = {name: "model-2.safetensors" if name in names else "model-1.safetensors" for name in weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def _torch_file(folder: Path, weights: Weights) -> None:
    _write(folder, {})
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")


EXTRA = "model.layers.2.mlp.up_proj.weight"
REFUSED: dict[str, tuple[Callable[[Path, Weights], Any], str]] = {
    "fp8": (lambda f, w: _write(f, _float8(w), quantization_config=FP8), r"is quantized \(fp8, by its config.json\)"),
    "fp8 by the text configuration": (
        lambda f, w: _write(f, w, text_config={"quantization_config": {"quant_method": "gptq"}}),
        r"is quantized \(gptq",
    ),
    "a quantization without a name": (
        lambda f, w: _write(f, w, quantization_config={"bits": 4}),
        r"is quantized \(by a method",
    ),
    "float8 that no configuration names": (
        lambda f, w: _write(f, _float8(w)),
        r"proj.weight in .* is quantized \(F8_E4M3 for torch.float\d+\); load it in transformers, dequantize it",
    ),
    "int8": (lambda f, w: _write(f, _int8(w)), rf"{GATE} in .* is quantized \(I8 for"),
    "int8 of torch.save": (lambda f, w: _torch_file(f, _int8(w)), rf"{GATE} in .* is quantized \(torch.int8 for"),
    "bool": (lambda f, w: _write(f, w | {GATE: w[GATE] > 0}), rf"{GATE} in .* is quantized \(BOOL for"),
    "scales alone": (
        lambda f, w: _write(f, w | {GATE.replace("weight", "weight_scale"): torch.ones(1)}),
        r"hold 1 tensor that a Qwen3ForCausalLM of its config.json does not take: .*gate_proj.weight_scale; use the",
    ),
    "an own class": (
        lambda f, w: _write(f, w, architectures=["MineForCausalLM"]),
        r"are of MineForCausalLM, which transformers does not have, and would be read as those of a Qwen3ForCausalLM: ",
    ),
    "a layer more": (lambda f, w: _write(f, w | {EXTRA: torch.ones(2)}), rf"hold 1 tensor .* does not take: {EXTRA}"),
    "another head": (lambda f, w: _write(f, w | {"score.weight": torch.ones(2, 32)}), "does not take: score.weight"),
    "two unequal heads": (
        lambda f, w: _write(f, w | {HEAD: w[EMBEDDING] + 1e-4}),
        rf"hold {HEAD}, which differs from {EMBEDDING}, and config.json ties .*; set tie_word_embeddings to false",
    ),
    "two unequal heads of torch.save": (
        lambda f, w: _torch_file(f, w | {HEAD: w[EMBEDDING].flip(0)}),
        rf"hold {HEAD}, which differs from {EMBEDDING}",
    ),
    "a tensor in two files": (
        lambda f, w: _two_files(f, w, (GATE, "model.norm.weight")),
        rf"holds {GATE}, model.norm.weight in model-2.safetensors and in another file too \(2 tensors\)",
    ),
    "a weight under two names": (
        lambda f, w: _write(f, w | {"norm.weight": torch.ones(32)}),
        "holds model.norm.weight and norm.weight, which are both model.norm.weight; keep one",
    ),
    "a shape": (
        lambda f, w: _write(f, w | {GATE: w[GATE][:5]}),
        rf"{GATE} is \(5, 32\) in the files, \(48, 32\) by the",
    ),
    "a weight less": (
        lambda f, w: _write(f, {n: x for n, x in w.items() if n != GATE}),
        rf"lacks 1 weights that its config.json asks for, .*: {GATE}",
    ),
}
DEPTH = {"model.layers.2.eh_proj.weight": torch.ones(32, 64), "model.layers.2.mlp.up_proj.weight": torch.ones(48, 32)}
TABLE = "model.layers.0.self_attn.rotary_emb.inv_freq"
ACCEPTED: dict[str, tuple[Callable[[Path, Weights], Any], str]] = {
    "an equal head": (lambda f, w: _write(f, w | {HEAD: w[EMBEDDING].clone()}), ""),
    "the head alone": (lambda f, w: _write(f, {HEAD if n == EMBEDDING else n: x for n, x in w.items()}), ""),
    "two heads": (lambda f, w: _write(f, w | {HEAD: w[EMBEDDING].flip(0)}, tie_word_embeddings=False), ""),
    "names of the base model": (lambda f, w: _write(f, {n.removeprefix("model."): x for n, x in w.items()}), ""),
    "mixed types": (lambda f, w: _write(f, {n: x.double() if "norm" in n else x.half() for n, x in w.items()}), ""),
    "torch.save": (lambda f, w: _torch_file(f, w | {HEAD: w[EMBEDDING]}), ""),
    "torch.save of old": (lambda f, w: (_torch_file(f, w), _old_torch_file(f)), ""),
    "no quantization": (lambda f, w: _write(f, w, quantization_config=None), ""),
    "a table": (lambda f, w: _write(f, w | {TABLE: torch.ones(4)}), f"1 tensor of its files .* without: {TABLE}$"),
    "a depth": (lambda f, w: _write(f, w | DEPTH), "2 tensors .* no part of the Qwen3ForCausalLM itself, .*eh_proj"),
    "a depth of Qwen": (lambda f, w: _write(f, w | {"mtp.fc.weight": torch.ones(1)}), "read without: mtp.fc.weight"),
}


def _old_torch_file(folder: Path) -> None:
    file = folder / "pytorch_model.bin"
    torch.save(torch.load(file), file, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_model_takes_is_refused_by_name(tmp_path: Path, whole: Weights, case: str) -> None:
    make, says = REFUSED[case]
    make(tmp_path, dict(whole))
    for sharded in (False, True):
        with pytest.raises(ModelError, match=says) as caught:
            load_model(tmp_path, sharded=sharded)
        assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("case", ACCEPTED)
def test_accepted_folders_have_the_loss_of_transformers(tmp_path: Path, whole: Weights, case: str) -> None:
    make, says = ACCEPTED[case]
    make(tmp_path, dict(whole))
    loss, _ = dense_answer(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64), DOCUMENTS)
    for sharded in (False, True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = load_model(tmp_path, dtype="float64", sharded=sharded)
        lines = [str(warning.message) for warning in caught if str(tmp_path) in str(warning.message)]
        assert len(lines) == bool(says)
        assert not says or re.search(says, lines[0])
        with World(Layout(ranks=1)) as world:
            prepared = prepare_untried(model, world, shard_parameters=False)
            plan = plan_fixed([len(d) for d in DOCUMENTS], world.home, cp=1, max_tokens_per_slot=64)
            result = run_step(prepared, plan, DOCUMENTS, world, backward=False)
        assert result.loss == pytest.approx(loss, rel=1e-12)


def _untied(folder: Path) -> Any:
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {HEAD: weights[EMBEDDING].flip(0)}, folder / "model.safetensors")
    return AutoModelForCausalLM.from_pretrained(folder)


def _dequantized(folder: Path) -> Any:
    _write(folder, _float8(load_file(folder / "model.safetensors")), quantization_config=FP8)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=FineGrainedFP8Config(dequantize=True))
    model.config.quantization_config = FP8  # as versions of transformers leave it in configurations of parts
    return model


SAVED: dict[str, Callable[[Path], Any]] = {"two matrices that are tied": _untied, "dequantized": _dequantized}


@pytest.mark.parametrize("case", SAVED)
def test_a_saved_folder_is_whole_and_has_every_matrix(tmp_path: Path, whole: Weights, case: str) -> None:
    model = SAVED[case](_write(tmp_path, whole))
    expected = {name: x.clone() for name, x in model.state_dict().items()}
    with World(Layout(ranks=1)) as world:
        save_model(prepare_untried(model, world, shard_parameters=False), tmp_path / "saved", world)
    saved: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert "quantization_config" not in (tmp_path / "saved" / "config.json").read_text()
    assert {name: x.equal(expected[name]) for name, x in saved.state_dict().items()} == dict.fromkeys(expected, True)
    assert saved.config.tie_word_embeddings == (case == "dequantized")
    assert load_model(tmp_path / "saved", sharded=True).config.tie_word_embeddings == (case == "dequantized")


def test_a_configuration_alone_says_nothing_of_quantized_weights(tmp_path: Path) -> None:
    folder = _write(tmp_path, {}, quantization_config=FP8)
    for sharded in (False, True):
        assert not hasattr(load_model(config=folder, sharded=sharded).config, "quantization_config")


@pytest.mark.parametrize("mark", ["by transformers", "by its types"])
def test_a_quantized_model_is_not_prepared(mark: str) -> None:
    model: Any = tiny("llama")
    if mark == "by transformers":
        model.is_quantized, model.quantization_method = True, "gptq"
    else:
        gate = model.model.layers[0].mlp.gate_proj
        gate.weight = torch.nn.Parameter(gate.weight.data.to(torch.int8), requires_grad=False)
    with (
        World(Layout(ranks=1)) as world,
        pytest.raises(ModelError, match=r"is quantized \((gptq|model.layers.0.mlp.gate)"),
    ):
        prepare(model, world)
