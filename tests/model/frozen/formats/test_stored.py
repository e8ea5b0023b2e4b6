"""Folders in 4 and 8 bits give the numbers of the package that wrote them, bit for bit; damaged ones are refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from longspan import load_model
from longspan.errors import ModelError
from longspan.model.frozen import packed_format
from longspan.model.frozen.formats.storage_methods import find_storage_method
from longspan.model.frozen.formats.stored_weight import StoredWeight
from longspan.model.weights.fill import find_deferred_weights
from longspan.model.weights.hf_folder import planned_configuration, quantization_settings, read_configuration
from longspan.model.weights.local_tensors import LocalPart
from longspan.plan.shape.packed import find_packed_form
from tests.model.frozen.formats.folders import CASES, GATE, write_config


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("folders")


def _folder(folders: Path, case: str) -> Path:
    folder = folders / case
    if not (folder / "config.json").is_file():  # a package that is not there skips each test
        folder.mkdir(exist_ok=True)
        CASES[case][0](folder)
    return folder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_folder_gives_the_weights_that_its_package_reads(folders: Path, case: str, dtype: torch.dtype) -> None:
    folder = _folder(folders, case)
    _, read, text = CASES[case]
    stored = find_storage_method(quantization_settings(folder))
    assert stored is not None and stored.description == text
    exact = read(folder, dtype)
    model = load_model(folder, dtype=dtype, quantized=True)
    weights = model.state_dict()
    assert weights.keys() == exact.keys() and not model.training
    different = {name for name, x in weights.items() if not torch.equal(x, exact[name].to(x.dtype))}
    assert not different, different


@pytest.mark.parametrize("case", CASES)
def test_packed_rows_of_a_part_are_those_of_the_whole(folders: Path, case: str) -> None:
    """By rows or experts, wherever a part begins and ends; unpacked they are the weights."""
    folder = _folder(folders, case)
    stored = find_storage_method(quantization_settings(folder))
    form = find_packed_form(folder, "stored")  # by which memory is planned, as `longspan plan` reads the folder
    assert stored is not None and form is not None
    of_run = planned_configuration(read_configuration(folder), str(folder))
    assert find_packed_form(of_run, "stored") == find_packed_form(of_run, "auto") == form
    tensors = load_file(folder / "model.safetensors")
    exact = load_model(folder, dtype="float32", quantized=True).state_dict()
    packed = {name: x for name, x in stored.join_weights(tensors).items() if isinstance(x, StoredWeight)}
    assert len(packed) == (4 if case == "mxfp4" else 32 if case.endswith("of experts") else 14)
    for name, weight in packed.items():
        *others, rows, columns = weight.shape
        whole = weight.read()
        assert whole.dtype == torch.uint8
        row_bytes = weight.format.rows.row_bytes(columns)
        assert whole.shape == (*others, rows, row_bytes) and row_bytes == form.groups[0].rows.row_bytes(columns)
        parts = [weight.read(slice(start, stop)) for start, stop in ((0, 1), (1, 3), (3, 10**6))]
        assert torch.equal(torch.cat(parts), whole)
        row = torch.empty((1, columns))
        weight.format.unpack(whole.flatten(0, -2)[1:2], row)
        matrices = torch.empty(weight.shape)
        for matrix, out in zip(whole.view(-1, *whole.shape[-2:]), matrices.view(-1, rows, columns), strict=True):
            weight.format.unpack(matrix, out)
        assert torch.equal(row, matrices.view(-1, columns)[1:2])
        if name in exact:
            assert torch.equal(matrices.mT if weight.format.transposed else matrices, exact[name])


@pytest.mark.parametrize("case", CASES)
def test_a_sharded_model_reads_packed_rows_by_its_own_names(folders: Path, case: str) -> None:
    """By rows, experts and columns of bytes, as ranks read them; unpacked they are the weights."""
    model: Any = load_model(_folder(folders, case), quantized=True, sharded=True)
    exact = load_model(_folder(folders, case), quantized=True).state_dict()
    source: Any = find_deferred_weights(model).source
    formats = source.packed_formats()
    assert len(formats) == (4 if case == "mxfp4" else 12 if case.endswith("of experts") else 14)
    parts, columns_of = dict[str, LocalPart](), dict[str, int]()
    for name, packed in formats.items():
        *others, _, columns = (exact[name].mT if packed.transposed else exact[name]).shape
        columns_of[name] = columns
        assert not packed.rows.reason_against(columns)
        inside = (slice(32, 96), slice(0, packed.rows.row_bytes(columns)))
        parts[name] = LocalPart((slice(1, 3), *inside) if others else (slice(1, 3), inside[1]), torch.uint8)
    read = dict(source.read(parts, torch.device("cpu")))
    assert read.keys() == formats.keys()
    for name, packed in formats.items():
        expected = (exact[name].mT if packed.transposed else exact[name])[parts[name].block[:-1]]
        out = torch.empty(expected.shape)
        packed.unpack(read[name].flatten(0, -2), out.view(-1, out.shape[-1]))
        assert torch.equal(out, expected), name
        with pytest.raises(ModelError, match=f"weights are not converted to {packed.name}"):
            packed.pack(torch.ones(1, columns_of[name]))


Damage = Callable[[dict[str, torch.Tensor]], object]
SCALE = f"{GATE}_scale_inv"
NAN = torch.tensor(float("nan"))
BLOCKS = "model.layers.0.mlp.experts.down_proj"
DOWN = "model.layers.0.mlp.down_proj.weight"


def _set(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return lambda tensors: tensors.update({name: change(tensors[name])})


def _second(name: str, other: str) -> Damage:
    return lambda tensors: tensors.update({other: tensors[name].clone()})


def _state(**changes: Any) -> Damage:
    def change(state: torch.Tensor) -> torch.Tensor:
        text = json.dumps(json.loads(bytes(state.tolist())) | changes)
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    return _set(f"{GATE}.quant_state.bitsandbytes__nf4", change)


DAMAGED: dict[str, tuple[str, Damage, str]] = {
    "scales missing": ("float8 in blocks", lambda t: t.pop(SCALE), f"{GATE} lacks {SCALE} or .*weight_scale"),
    "codes missing": ("float8 in blocks", lambda t: t.pop(GATE), rf"{GATE} lacks {GATE}, and has {SCALE}"),
    "scales twice": (
        "float8 in blocks",
        _second(SCALE, SCALE.removesuffix("_inv")),
        f"{GATE} has its scales twice, .*_inv and ",
    ),
    "scales of another shape": (
        "float8 in blocks",
        _set(SCALE, lambda x: x[:1]),
        rf"{SCALE} is \(1, 2\) in the files, and \(3, 2\) is expected of a weight of \(192, 128\) by "
        "quantization_config in config.json: scales of another form beside these are not read",
    ),
    "a scale that is no number": (
        "float8 in blocks",
        _set(SCALE, lambda x: x.index_fill(0, torch.tensor([1]), float("nan"))),
        rf"128 of 384 scales of {GATE} are not finite",
    ),
    "whole beside scales": (
        "float8 in blocks",
        _set(GATE, lambda x: x.bfloat16()),
        f"{GATE} is BF16 in the files, and F8_E4M3 is expected",
    ),
    "scales of integers": (
        "float8 in blocks",
        _set(SCALE, lambda x: x.int()),
        f"{SCALE} is I32 in the files, and F32 or ",
    ),
    "by channel, of another": (
        "compressed by channel",
        _set(f"{GATE}_scale", lambda x: x[:7]),
        r"weight_scale is \(7, 1\) in the files, and \(192, 1\) is expected",
    ),
    "no packed codes": ("int4 by group", lambda t: t.pop(f"{GATE}_packed"), f"{GATE} lacks {GATE}_packed, and has "),
    "no scales of int4": ("int4 by group", lambda t: t.pop(f"{GATE}_scale"), f"{GATE} lacks {GATE}_scale"),
    "no shape": ("int4 by group", lambda t: t.pop(f"{GATE}_shape"), f"{GATE} lacks {GATE}_shape"),
    "a shape of another weight": (
        "int4 by group",
        _set(f"{GATE}_shape", lambda x: x * 2),
        rf"{GATE}_packed is \(192, 16\) in the files, and \(384, 32\) is expected",
    ),
    "codes of another type": (
        "int4 by group",
        _set(f"{GATE}_packed", lambda x: x.view(torch.uint8)),
        f"{GATE}_packed is U8 in the files, and I32 is expected",
    ),
    "scales of other groups": (
        "int4 by group",
        _set(f"{GATE}_scale", lambda x: x[:, 1:]),
        rf"{GATE}_scale is \(192, 3\) in the files, and \(192, 4\) is expected of a weight of \(192, 128\)",
    ),
    "rows that groups do not divide": (
        "int4 by group",
        _set(f"{DOWN}_shape", lambda x: x - torch.tensor([0, 4])),
        f"{DOWN} of 128 × 188 in int4 is not read: its rows have 188 numbers, which blocks of 32 do not divide",
    ),
    "a group's scale that is no number": (
        "int4 by group",
        _set(f"{GATE}_scale", lambda x: x.index_fill(0, torch.tensor([1]), float("inf"))),
        rf"4 of 768 scales of {GATE} are not finite",
    ),
    "whole beside packed": (
        "int4 by group",
        _second(f"{GATE}_scale", GATE),
        f"the files hold {GATE} and {GATE}_packed",
    ),
    "zero points": (
        "int4 by group",
        _second(f"{GATE}_packed", f"{GATE}_zero_point"),
        rf"hold 1 tensor that a Qwen3ForCausalLM of its config.json does not take: {GATE}_zero_point",
    ),
    "an order of columns": (
        "int4 by group",
        _second(f"{GATE}_shape", f"{GATE}_g_idx"),
        rf"hold 1 tensor that a Qwen3ForCausalLM of its config.json does not take: {GATE}_g_idx",
    ),
    "no maxima": ("int8", lambda t: t.pop(GATE.replace("weight", "SCB")), f"{GATE} lacks .*SCB"),
    "maxima of other rows": (
        "int8",
        _set(GATE.replace("weight", "SCB"), lambda x: x[1:]),
        r"SCB is \(191,\) in the files, and \(192,\) is expected",
    ),
    "a layout of a GPU": (
        "int8",
        lambda t: t.update({GATE.replace("weight", "weight_format"): torch.tensor(2)}),
        f"{GATE} lies in layout 2 of a GPU's",
    ),
    "no absmax": ("nf4", lambda t: t.pop(f"{GATE}.absmax"), rf"{GATE} lacks {GATE}\.absmax"),
    "no state": (
        "nf4",
        lambda t: t.pop(f"{GATE}.quant_state.bitsandbytes__nf4"),
        f"{GATE} lacks .*bitsandbytes__nf4 or .*bitsandbytes__fp4",
    ),
    "a state cut short": (
        "nf4",
        _set(f"{GATE}.quant_state.bitsandbytes__nf4", lambda x: x[:9]),
        "bitsandbytes__nf4 is damaged: JSONDecodeError",
    ),
    "a state of another weight": (
        "nf4",
        _state(shape=[192, 256]),
        f"{GATE} has 12288 bytes in the files, and 192 × 256 numbers of 4 bits are expected",
    ),
    "rows that blocks do not divide": (
        "nf4",
        _state(shape=[96 * 256 // 100, 100]),
        f"{GATE} of 245 × 100 in nf4 is not read: its rows have 100 numbers, which blocks of 64 do not divide",
    ),
    "absmax of other blocks": (
        "nf4",
        _set(f"{GATE}.absmax", lambda x: x[1:]),
        r"absmax is \(383,\) in the files, and \(384,\) is expected",
    ),
    "an absmax that is no number": (
        "nf4",
        _set(f"{GATE}.absmax", lambda x: torch.where(torch.arange(len(x)) < 3, NAN, x)),
        f"3 of 384 scales of {GATE} are not finite",
    ),
    "a table of others": (
        "nf4",
        _set(f"{GATE}.quant_map", lambda x: x + 0.01),
        r"quant_map has other values than nf4: \[-0.99",
    ),
    "no nested absmax": (
        "nf4, scales quantised",
        lambda t: t.pop(f"{GATE}.nested_absmax"),
        rf"{GATE} lacks {GATE}\.nested_absmax, which its scales are made of",
    ),
    "no exponents": ("mxfp4", lambda t: t.pop(f"{BLOCKS}_scales"), f"{BLOCKS} lacks {BLOCKS}_scales"),
    "exponents of other blocks": (
        "mxfp4",
        _set(f"{BLOCKS}_scales", lambda x: x[:, 1:]),
        r"scales is \(4, 95, 2\) in the files, and \(4, 96, 2\) is expected",
    ),
    "an exponent that is no number": (
        "mxfp4",
        _set(f"{BLOCKS}_scales", lambda x: torch.full_like(x, 255)),
        f"768 of 768 scales of {BLOCKS} are not finite",
    ),
    "experts twice": ("mxfp4", _second(f"{BLOCKS}_blocks", BLOCKS), f"the files hold {BLOCKS} and {BLOCKS}_blocks"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_folders(folders: Path, tmp_path: Path, case: str) -> None:
    name, damage, says = DAMAGED[case]
    folder = Path(shutil.copytree(_folder(folders, name), tmp_path / "folder"))
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file({key: x.contiguous() for key, x in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=says):
        load_model(folder, quantized=True)


def _int_settings(**changes: Any) -> dict[str, Any]:
    """Settings of pack-quantized, with `format` of the folder and others of weights changed."""
    file_format = changes.pop("format", "pack-quantized")
    weights = {"type": "int", "num_bits": 4, "symmetric": True, "group_size": 32} | changes
    return {"quant_method": "compressed-tensors", "format": file_format, "config_groups": {"0": {"weights": weights}}}


METHODS: dict[str, tuple[dict[str, Any], str]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4}, "weights of gptq are not read; use a folder in float8"),
    "experts in 4 bits beside float8": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp4"},
        "experts in fp4 beside float8 linears .* are not read; .* or dequantize this one",
    ),
    "awq": ({"quant_method": "awq", "bits": 4}, "weights of awq are not read; .* or dequantize this one"),
    "a method without a name": ({"bits": 4}, "weights of None are not read"),
    **{
        case: (_int_settings(**changes), rf"compressed-tensors weights of {says} are not read; use a folder in float8")
        for case, changes, says in (
            ("int4, one scale", {"group_size": None}, r"4 bits \(int, symmetric, tensor, pack-quantized\)"),
            ("zero points", {"symmetric": False}, r"4 bits \(int, not symmetric, group, pack-quantized\)"),
            ("g_idx", {"actorder": "group"}, r"4 bits \(int, symmetric, group, pack-quantized, actorder group\)"),
            ("g_idx by a flag", {"actorder": True}, r"4 bits \(.*, pack-quantized, actorder True\)"),
            ("3 bits", {"num_bits": 3}, r"3 bits \(int, symmetric, group, pack-quantized\)"),
            ("8 bits", {"num_bits": 8}, r"8 bits \(int, symmetric, group, pack-quantized\)"),
            ("float4", {"type": "float"}, r"4 bits \(float, symmetric, group, pack-quantized\)"),
            ("int4 in bytes", {"format": "int-quantized"}, r"4 bits \(int, symmetric, group, int-quantized\)"),
        )
    },
    "odd groups": (_int_settings(group_size=31), "compressed-tensors weights in groups of 31 are not read"),
    "groups of nothing": (
        _int_settings(strategy="group", group_size=-1),
        "compressed-tensors weights in groups of -1 are not read",
    ),
    "float8 beside int4": (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {
                "0": {"weights": {"type": "float", "num_bits": 8}},
                "1": {"weights": {"type": "int", "num_bits": 4, "group_size": 32}, "format": "pack-quantized"},
            },
        },
        "compressed-tensors weights in float8 and int4 are not read together",
    ),
    "sparse": (
        {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-bitmask"}},
        "compressed-tensors weights of format sparse-bitmask are not read",
    ),
}


@pytest.mark.parametrize("case", METHODS)
def test_methods_that_are_refused(folders: Path, tmp_path: Path, case: str) -> None:
    settings, says = METHODS[case]
    folder = Path(shutil.copytree(_folder(folders, "float8 in blocks"), tmp_path / "folder"))
    write_config(folder, **settings)
    for sharded in (False, True):
        with pytest.raises(ModelError, match=f"{folder}: {says}"):
            load_model(folder, quantized=True, sharded=sharded)
    with pytest.raises(ModelError, match=r"is quantized .*, and whole weights are trained; train an adapter over it"):
        load_model(folder)


def test_a_configuration_says_how_weights_are_stored() -> None:
    config = Qwen3Config(quantization_config={"quant_method": "fp8"})
    stored = find_storage_method(config)
    assert stored is not None and stored.description == "float8 with a scale for each weight (fp8)"
    assert find_storage_method(Qwen3Config()) is None and find_storage_method({}) is None


def test_the_last_block_may_be_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the definition, as of DeepSeek's kv_a_proj (576 rows); transformers does not dequantise such a weight."""
    monkeypatch.setattr(packed_format, "_PIECE", 5 * 160)  # rows that are converted at once
    stored = find_storage_method({"quant_method": "fp8", "weight_block_size": [64, 64]})
    assert stored is not None
    codes, scales = torch.randn(100, 160).to(torch.float8_e4m3fn), torch.rand(2, 3)
    weight = stored.make_weight("a.weight", {"a.weight": codes, "a.weight_scale_inv": scales})
    wide = scales.repeat_interleave(64, 0)[:100].repeat_interleave(64, 1)[:, :160]
    exact = codes.float() * wide
    assert torch.equal(weight[...], exact) and torch.equal(weight[3:70, 5:], exact[3:70, 5:])
    # A single row of 66 codes ends where no float32 begins.
    narrow = stored.make_weight("a.weight", {"a.weight": codes[:3, :66], "a.weight_scale_inv": scales[:1, :2]})
    assert torch.equal(narrow[1:2], exact[1:2, :66])
    with pytest.raises(
        ModelError, match=r"scale_inv is \(3, 2\) in the files, and \(2, 3\) is expected of a weight of"
    ):
        stored.make_weight("a.weight", {"a.weight": codes, "a.weight_scale_inv": scales.mT})
