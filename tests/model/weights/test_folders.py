"""Models from folders and presets: what a folder lacks, or holds that its model does not take, is named."""

import json
import re
import shutil
import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    FineGrainedFP8Config,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    T5Config,
)

from longspan import Layout, World, load_model, prepare, save_model
from longspan.cli.main import main
from longspan.errors import ModelError
from longspan.model.presets import PRESETS, find_published_preset, preset_config
from longspan.model.weights.empty_model import empty_model
from longspan.plan.shape.model_shape import ModelShape
from tests.model.stock import VOCABULARY, prepare_untried, tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "qwen3"
    tiny("qwen3").save_pretrained(path, max_shard_size="20KB")
    return path


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_a_folder_gives_its_weights(folder: Path, dtype: str) -> None:
    model = load_model(folder, dtype=dtype, vocab_size=VOCABULARY)
    wanted = tiny("qwen3").to(getattr(torch, dtype))
    for (name, found), (_, expected) in zip(model.named_parameters(), wanted.named_parameters(), strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected), name
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def _config(edit: Callable[[dict], object]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        edit(config)
        (folder / "config.json").write_text(json.dumps(config))

    return damage


def _cut(bytes_left: int) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        file = min(folder.glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:bytes_left])

    return damage


CUT, DEEP = "cannot be read, perhaps it was cut short", '{"weight_map": ' + "[" * 100_000
DAMAGED = {
    "no configuration": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "broken configuration": (lambda f: (f / "config.json").write_text("{"), "cannot be loaded: .*config"),
    "unknown architecture": (_config(lambda c: c.update(model_type="nope")), "cannot be loaded: .*nope"),
    "no weights": (lambda f: [path.unlink() for path in f.glob("model*")], "has no weights"),
    "a file missing": (lambda f: min(f.glob("*.safetensors")).unlink(), r"lacks 1 of \d+ weight files: model-00001"),
    "broken index": (lambda f: (f / "model.safetensors.index.json").write_text("[]"), "index.json is damaged"),
    "deep index": (lambda f: (f / "model.safetensors.index.json").write_text(DEEP), "index.json is damaged"),
    "a header cut short": (_cut(40), rf"model-00001.* \(40 bytes\) {CUT}"),
    "data cut short": (_cut(-1), rf"model-00001.* bytes\) {CUT}"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_folders(folder: Path, tmp_path: Path, case: str) -> None:
    damage, says = DAMAGED[case]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    damage(tmp_path)
    for sharded in (False, True):
        with World(Layout(ranks=1)) as world, pytest.raises(ModelError, match=says) as caught:
            prepare(load_model(tmp_path, sharded=sharded), world)
        assert str(tmp_path) in str(caught.value)


CODE = "from pathlib import Path\nPath(__file__ + '.ran').touch()\n"
AUTO_MAP = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": ["own.Tokenizer", None]}


class _Runs:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def _refusal_of(folder: Path, **keys: Any) -> str:
    with pytest.raises(ModelError) as whole:
        load_model(folder, **keys)
    with pytest.raises(ModelError) as parts:
        load_model(folder, sharded=True, **keys)
    assert str(whole.value) == str(parts.value) and not list(folder.parent.rglob("*.ran"))
    assert not re.search("trust_remote_code|weights_only|\n", str(whole.value))
    return str(whole.value)


@pytest.fixture
def copied(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question"))
    copy = Path(shutil.copytree(folder, tmp_path / "model"))
    (copy / "own.py").write_text(CODE)
    return copy


def test_no_code_of_a_folder_is_run(copied: Path) -> None:
    _config(lambda c: c.update(auto_map=AUTO_MAP))(copied)
    assert type(load_model(copied)).__name__ == "Qwen3ForCausalLM"  # the class that transformers has for its kind
    model = load_model(copied, sharded=True)
    assert not hasattr(model.config, "auto_map") and not list(copied.glob("*.ran"))
    for kind in ("own", "bert_of_nobody"):
        _config(lambda c, kind=kind: c.update(model_type=kind))(copied)
        assert "its auto_map names Python code of its own, and no code of a folder is run" in _refusal_of(copied)
        with pytest.raises(ModelError, match="no code of a folder is run; use a folder in transformers' own format"):
            load_model(config=copied)


def test_no_kernel_of_the_hub_is_loaded(copied: Path) -> None:
    _config(lambda c: c.update(attn_implementation="nobody/kernel", _experts_implementation="nobody/kernel"))(copied)
    for sharded in (False, True):
        assert load_model(copied, sharded=sharded).config._attn_implementation == "sdpa"
    assert load_model(config=copied).config._attn_implementation == "sdpa"


def test_a_pickle_is_not_run(copied: Path) -> None:
    for file in copied.glob("*safetensors*"):
        file.unlink()
    torch.save({"model.norm.weight": _Runs(copied / "pickle.ran")}, copied / "pytorch_model.bin")
    assert "its weights are a pickle with more than tensors in it" in _refusal_of(copied)


@pytest.mark.parametrize(
    "name", ["../outside/{}", "a/../../outside/{}", "{outside}/{}", "/{outside}/{}", "link/../outside/{}"]
)
def test_an_index_names_no_file_outside_its_folder(copied: Path, name: str) -> None:
    outside = copied.parent / "outside"
    outside.mkdir()
    (copied.parent / "beside").mkdir()
    (copied / "link").symlink_to(copied.parent / "beside")  # by letters link/.. is the folder itself
    index = copied / "model.safetensors.index.json"
    weights = json.loads(index.read_text())["weight_map"]
    for file in {*weights.values()}:
        (copied / file).rename(outside / file)
    named = {key: name.format(file, outside=outside) for key, file in weights.items()}
    index.write_text(json.dumps({"weight_map": named}))
    assert "files outside its folder" in _refusal_of(copied)


def test_links_of_a_cache_are_read(copied: Path) -> None:
    """As the hub's cache has them: snapshots/X/config.json -> ../../blobs/1."""
    blobs, snapshot = copied.parent / "blobs", copied.parent / "snapshots" / "x"
    copied.rename(blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    for sharded in (False, True):
        assert type(load_model(snapshot, sharded=sharded)).__name__ == "Qwen3ForCausalLM"


def test_an_adapter_beside_a_model_is_refused(copied: Path) -> None:
    """Transformers would load what the adapter names as its base, and no file of the folder's weights."""
    (copied / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(copied)}))
    assert "holds a model and an adapter of peft" in _refusal_of(copied)


ADAPTER_COMMANDS = {
    "dry run": ["train", "--world", "1", "--model.path", "FOLDER", "--data.path", "d.jsonl", "--dry-run"],
    "run": ["train", "--world", "1", "--model.path", "FOLDER", "--data.path", "d.jsonl", "--run.dir", "run"],
    "eval": ["eval", "FOLDER", "--data", "d.jsonl"],
    "generate": ["generate", "FOLDER", "--prompt", "Hello"],
    "doctor": ["doctor", "--model", "FOLDER"],
    "plan": ["plan", "--model", "FOLDER", "--gpu", "h100", "--longest"],
}


@pytest.mark.parametrize("command", ADAPTER_COMMANDS)
def test_a_folder_of_an_adapter_alone_names_its_base_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "adapter"
    folder.mkdir()
    settings = {"peft_type": "LORA", "base_model_name_or_path": "Qwen/Qwen3-8B"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    (tmp_path / "d.jsonl").write_text('{"text": "Hello"}\n')
    assert main([str(folder) if word == "FOLDER" else word for word in ADAPTER_COMMANDS[command]]) == 2
    error = capsys.readouterr().err
    assert str(folder) in error
    assert "an adapter of peft, for Qwen/Qwen3-8B (base_model_name_or_path of adapter_config.json)" in error
    assert 'Set model.path = "Qwen/Qwen3-8B", and lora.rank for a new adapter over it; to use this one, merge' in error


def test_a_configuration_of_no_causal_model_is_refused(tmp_path: Path) -> None:
    T5Config(d_model=8, num_layers=1).save_pretrained(tmp_path)
    for sharded in (False, True):
        with pytest.raises(ModelError, match=r"no model can be made of the T5Config of .*config.json: ValueError"):
            load_model(config=tmp_path, sharded=sharded)


@pytest.mark.parametrize(
    ("kind", "says"), [("qwen9", "a later one may have it"), ("dory", "it needs 5.24: pip install")]
)
def test_a_model_type_that_this_transformers_lacks(kind: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.MonkeyPatch.context() as patch:
        mapping: Any = CONFIG_MAPPING
        patch.setattr(mapping, "_mapping", {name: kept for name, kept in mapping._mapping.items() if name != kind})
        with pytest.raises(ModelError, match=rf"transformers [\d.]+\w* has no model type {kind}; {says}"):
            load_model(tmp_path)


def test_wrong_requests(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no model folder .*/none"):
        load_model(tmp_path / "none")
    with pytest.raises(ModelError, match=r"the tokenizer has 62 ids, the model in .* only 61"):
        load_model(folder, vocab_size=62)
    with pytest.raises(ModelError, match="give a folder, or a preset: llama-tiny, qwen3-tiny"):
        load_model()
    with pytest.raises(ModelError, match="unknown dtype 'float31'"):
        load_model(folder, dtype="float31")
    with pytest.raises(ModelError, match="needs vocab_size"):
        load_model(preset="qwen3-tiny")


def test_random_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(11)
    first = load_model(preset="qwen3-tiny", vocab_size=100, seed=3)
    state = torch.get_rng_state()
    torch.manual_seed(12)
    again = load_model(preset="qwen3-tiny", vocab_size=100, seed=3, dtype="float64")
    other = load_model(preset="qwen3-tiny", vocab_size=100, seed=4)
    torch.manual_seed(11)
    assert torch.equal(state, torch.get_rng_state()), "drawing weights moved the caller's random state"
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        assert b.dtype == torch.float64 and torch.equal(a.double(), b)
    assert not torch.equal(first.get_input_embeddings().weight, other.get_input_embeddings().weight)


# ---- presets

TINY = [name for name, preset in PRESETS.items() if not preset.embedding_rows]


@pytest.mark.parametrize("name", TINY)
def test_a_preset_has_the_promised_sizes(name: str) -> None:
    config = preset_config(name, vocab_size=2048)
    family = name.removesuffix("-tiny").removesuffix("-deep").replace("-", "_")
    assert config.model_type == family.replace("granite_hybrid", "granitemoehybrid")
    assert (config.hidden_size, config.vocab_size) == (192, 2048)
    hybrid = "linear_attention" in (getattr(config, "layer_types", None) or ())
    assert config.num_hidden_layers == (4 if "-deep-" in name or hybrid else 2)
    assert hybrid == (name in ("qwen3-next-tiny", "bamba-tiny", "granite-hybrid-tiny"))
    heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    assert heads == ((8, 8, 16) if name == "deepseek-v32-tiny" else (8, 4, 24))
    assert config.tie_word_embeddings


@pytest.mark.parametrize(
    ("name", "billions", "experts"),
    [
        *[("qwen3-0.6b", 0.596, 0), ("qwen3-30b-a3b", 30.532, 128), ("llama-3.3-70b-instruct", 70.554, 0)],
        *(
            pytest.param(f"qwen3-{size}", billions, 0, marks=pytest.mark.whole)
            for size, billions in (("4b", 4.022), ("8b", 8.191), ("32b", 32.762))
        ),
    ],
)
def test_a_published_model_has_its_published_size(name: str, billions: float, experts: int) -> None:
    config = preset_config(name)
    model = empty_model(config, torch.bfloat16)
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e9, 3) == billions
    is_llama = name.startswith("llama")
    sizes = (128256, 131072) if is_llama else (151936, 40960)
    assert (config.vocab_size, config.max_position_embeddings) == sizes
    rope = {"rope_type": "llama3", "rope_theta": 5e5} if is_llama else {"rope_type": "default", "rope_theta": 1e6}
    assert config.rope_parameters | rope == config.rope_parameters
    assert getattr(config, "num_experts", 0) == experts


TOWER = {"hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16, "intermediate_size": 4304}
TOWER |= {"image_size": 896, "patch_size": 14, "vision_use_head": False}  # of Gemma 3


@pytest.mark.parametrize(
    ("name", "parameters", "positions"),
    [
        ("llama-3.1-8b", 8_030_261_248, 131072),
        ("qwen2.5-7b", 7_615_616_512, 131072),
        ("qwen2.5-7b-instruct", 7_615_616_512, 32768),
        ("qwen2.5-32b", 32_763_876_352, 131072),
        ("qwen2.5-32b-instruct", 32_763_876_352, 32768),
        ("gemma-3-12b", 12_187_325_040, 131072),
        ("gemma-3-27b", 27_432_406_640, 131072),
        ("gpt-oss-20b", 20_914_757_184, 131072),
        ("gpt-oss-120b", 116_829_156_672, 131072),
        ("qwen3.5-9b", 8_953_803_264, 262144),  # of its language model
    ],
)
def test_a_preset_has_as_many_parameters_as_its_publisher_says(name: str, parameters: int, positions: int) -> None:
    config = preset_config(name)
    assert config.max_position_embeddings == positions and config.model_type == PRESETS[name].model_type
    # what a plan reads without transformers is the configuration that the class makes
    shape = ModelShape.of({"model_type": config.model_type, **PRESETS[name].values})
    assert shape == ModelShape.of(config)
    with torch.device("meta"):
        if name.startswith("gemma"):  # is published with its tower
            model: Any = Gemma3ForConditionalGeneration(Gemma3Config(text_config=config.to_dict(), vision_config=TOWER))
            others = sum(p.numel() for n, p in model.named_parameters() if "language_model" not in n)
        else:
            model = AutoModelForCausalLM.from_config(config)
            others = 0
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert shape.stored_weights == pytest.approx(parameters - others, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("Qwen/Qwen2.5-7B", "qwen2.5-7b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b-instruct"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("google/gemma-3-12b-pt", "gemma-3-12b"),
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
        ("Qwen/Qwen3.5-9B", "qwen3.5-9b"),
        ("Qwen/Qwen2.5-7B-Instruct-1M", ""),
        ("qwen3-tiny", ""),
        ("it", ""),
    ],
)
def test_names_of_the_hub_are_presets(name: str, preset: str) -> None:
    assert find_published_preset(name) == preset


def test_making_a_preset_changes_no_other() -> None:
    before = deepcopy({name: preset.values for name, preset in PRESETS.items()})
    for name in PRESETS:
        preset_config(name, vocab_size=61)
    assert {name: preset.values for name, preset in PRESETS.items()} == before


@pytest.mark.parametrize(
    ("name", "vocab_size", "says"),
    [
        ("qwen3-tyni", 64, "did you mean 'qwen3-tiny'"),
        ("zzz", 64, "presets: llama-tiny, qwen3-tiny"),
        ("qwen3-tiny", 0, "vocab_size is 0"),
        ("qwen3-tiny", 2.5, "vocab_size is 2.5"),
    ],
)
def test_presets_that_are_refused(name: str, vocab_size: int, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        preset_config(name, vocab_size=vocab_size)


Weights = dict[str, Tensor]
EMBEDDING, HEAD, GATE = "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.gate_proj.weight"
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def _float8(weights: Weights) -> Weights:
    """As DeepSeek-V3 and Qwen3-FP8 have them."""
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
    folder = tmp_path_factory.mktemp("whole")
    tiny("qwen3").save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def _two_files(folder: Path, weights: Weights, names: tuple[str, ...]) -> None:
    _write(folder, weights)
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    save_file({name: weights[name] for name in names}, folder / "model-2.safetensors")
    index = {name: "model-2.safetensors" if name in names else "model-1.safetensors" for name in weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _torch_file(folder: Path, weights: Weights) -> None:
    _write(folder, {})
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")


EXTRA = "model.layers.2.mlp.up_proj.weight"
REFUSED: dict[str, tuple[Callable[[Path, Weights], Any], str]] = {
    "fp8": (lambda f, w: _write(f, _float8(w), quantization_config=FP8), r"is quantized \(fp8, by its config.json\)"),
    "the text configuration's, without a name": (
        lambda f, w: _write(f, w, text_config={"quantization_config": {"bits": 4}}),
        r"is quantized \(by a method without a name",
    ),
    "float8 that no configuration names": (
        lambda f, w: _write(f, _float8(w)),
        r"proj.weight in .* is quantized \(F8_E4M3 for torch.float\d+\); load it in transformers, dequantize it",
    ),
    "int8 of torch.save": (lambda f, w: _torch_file(f, _int8(w)), rf"{GATE} in .* is quantized \(torch.int8 for"),
    "scales alone": (
        lambda f, w: _write(f, w | {GATE.replace("weight", "weight_scale"): torch.ones(1)}),
        r"hold 1 tensor that a Qwen3ForCausalLM of its config.json does not take: .*gate_proj.weight_scale; use the",
    ),
    "an own class": (
        lambda f, w: _write(f, w, architectures=["MineForCausalLM"]),
        r"are of MineForCausalLM, which transformers does not have, and would be read as those of a Qwen3ForCausalLM: ",
    ),
    "a layer more": (lambda f, w: _write(f, w | {EXTRA: torch.ones(2)}), rf"hold 1 tensor .* does not take: {EXTRA}"),
    "two unequal heads": (
        lambda f, w: _write(f, w | {HEAD: w[EMBEDDING] + 1e-4}),
        rf"hold {HEAD}, which differs from {EMBEDDING}, and config.json ties .*; set tie_word_embeddings to false",
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
    "several files": (lambda f, w: _two_files(f, w, ()), ""),
    "torch.save": (lambda f, w: _torch_file(f, w | {HEAD: w[EMBEDDING]}), ""),
    "torch.save of old": (lambda f, w: (_torch_file(f, w), _old_torch_file(f)), ""),
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
def test_accepted_folders_have_the_weights_of_transformers(tmp_path: Path, whole: Weights, case: str) -> None:
    make, says = ACCEPTED[case]
    make(tmp_path, dict(whole))
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).state_dict()
    for sharded in (False, True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = load_model(tmp_path, dtype="float64", sharded=sharded)
        lines = [str(warning.message) for warning in caught if str(tmp_path) in str(warning.message)]
        assert len(lines) == bool(says)
        assert not says or re.search(says, lines[0])
        if sharded:
            with World(Layout(ranks=1)) as world:
                model = prepare_untried(model, world, shard_parameters=False)
        found = model.state_dict()
        assert found.keys() == stock.keys() and all(x.equal(stock[name]) for name, x in found.items())


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
def test_a_saved_folder_is_whole_and_has_every_matrix(tmp_path: Path, whole: Weights, case: str, world: World) -> None:
    model = SAVED[case](_write(tmp_path, whole))
    expected = {name: x.clone() for name, x in model.state_dict().items()}
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


def test_a_quantized_model_is_not_prepared(world: World) -> None:
    by_transformers, by_types = tiny("llama"), tiny("llama")
    by_transformers.is_quantized, by_transformers.quantization_method = True, "gptq"
    gate = by_types.model.layers[0].mlp.gate_proj
    gate.weight = torch.nn.Parameter(gate.weight.data.to(torch.int8), requires_grad=False)
    for model, name in ((by_transformers, "gptq"), (by_types, "model.layers.0.mlp.gate")):
        with pytest.raises(ModelError, match=rf"is quantized \({name}"):
            prepare(model, world)
