"""Weights that every rank reads or draws for itself are those that it would cut from the whole model."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedConfig, PreTrainedModel

from longspan import Layout, World, plan_fixed, prepare, run_step
from longspan.errors import ModelError
from longspan.model import load_model
from longspan.model.weights.fill import RandomWeights, defer_to_checkpoint, empty_model, is_empty
from longspan.model.weights.folder import FolderWeights
from longspan.model.weights.local_tensors import LocalPart, local_tensor
from longspan.testing import run_ranks
from tests.model.deep import deep_config
from tests.model.experts.moe_models import moe_model
from tests.model.stock import prepare_untried, texts

FAMILIES = {"tied": "qwen3", "untied": "llama", "4 experts": "qwen3-moe", "6 experts": "qwen3-moe", "fused": "gpt-oss"}
HOMES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({}, {}),
    ({"dp_replicate": 2}, {}),
    ({"tp": 2}, {}),
    ({"pp": 2}, {}),
    ({"pp": 2}, {"virtual_stages": 2, "pipeline_schedule": "zbv"}),
    ({"ep": 2}, {}),
    ({"tp": 2, "ep": 2}, {}),
    ({}, {"shard_parameters": False}),
]
# In CI each family in a home or two: shards that ranks do not divide, tied weights on two stages, experts of both axes.
FEW = {0: ("untied", "6 experts"), 4: ("tied",), 6: ("fused",)}
IN_CI = [pytest.param(*HOMES[index], families, id=str(HOMES[index])) for index, families in FEW.items()]
IN_CI += [pytest.param(*home, tuple(FAMILIES), id=f"{home} all", marks=pytest.mark.whole) for home in HOMES]


def _config(name: str) -> PreTrainedConfig:
    config = deep_config(FAMILIES[name], layers=4)
    if name == "6 experts":
        config.num_experts = 6  # which four ranks do not divide
    return config


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("folders")
    torch.manual_seed(0)
    for name in FAMILIES:
        model = AutoModelForCausalLM.from_config(_config(name), attn_implementation="eager")
        for parameter in model.parameters():  # biases start at zero, which would hide them
            torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(path / name, max_shard_size="20KB")
    return path


def _differences(model: torch.nn.Module, wanted: torch.nn.Module) -> list[str]:
    pairs = zip(model.named_parameters(), wanted.named_parameters(), strict=True)
    names = [n for (n, x), (m, y) in pairs if n != m or not torch.equal(local_tensor(x), local_tensor(y))]
    buffers = zip(model.named_buffers(), wanted.named_buffers(), strict=True)
    return names + [n for (n, x), (m, y) in buffers if n != m or not torch.equal(x, y)]


def _losses(model: torch.nn.Module, world: World) -> tuple[float, float | None]:
    lengths = (30, 17, 9, 8, 25, 12, 7, 6)
    plan = plan_fixed(lengths, world.home, cp=2, max_tokens_per_slot=40)
    result = run_step(
        model, plan, texts(lengths), world, torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=1.0
    )
    return result.loss, result.grad_norm


def _compare(
    rank: int, folders: str, axes: dict[str, int], options: dict[str, Any], families: tuple[str, ...]
) -> dict[str, Any]:
    compared = {}
    with World(Layout(ranks=4, **axes)) as world:
        for name in families:
            if "ep" in axes and name in ("tied", "untied"):
                continue
            folder = f"{folders}/{name}"
            wanted = prepare_untried(load_model(folder, dtype="float64"), world, **options)
            model = load_model(folder, dtype="float64", sharded=True)
            assert is_empty(model)
            model = prepare_untried(model, world, **options)
            compared[name] = _differences(model, wanted), _losses(model, world) == _losses(wanted, world)
    return compared


@pytest.mark.parametrize(("axes", "options", "families"), IN_CI)
def test_every_home_holds_the_folders_weights(
    folders: Path, axes: dict[str, int], options: dict[str, Any], families: tuple[str, ...]
) -> None:
    with_experts = [name for name in families if name not in ("tied", "untied")]
    for rank, compared in enumerate(run_ranks(_compare, 4, str(folders), axes, options, families)):
        assert list(compared) == (with_experts if "ep" in axes else [*families])
        for name, result in compared.items():
            assert result == ([], True), f"{name} on rank {rank} of {axes}, {options}: {result}"


def _compare_buffers(rank: int, folder: str, axes: dict[str, int]) -> tuple[list[str], float]:
    with World(Layout(ranks=2, **axes)) as world:
        wanted = prepare(load_model(folder), world)
        model = prepare(load_model(folder, sharded=True), world)
        bias = [x for name, x in model.named_buffers() if name.endswith("e_score_correction_bias")]
        return _differences(model, wanted), sum(float(x.abs().sum()) for x in bias)


@pytest.mark.parametrize("axes", [{"ep": 2}, {"pp": 2}], ids=str)
def test_buffers_that_a_folder_holds_are_read(tmp_path: Path, axes: dict[str, int]) -> None:
    model = moe_model("deepseek-v3", torch.float32)
    assert [name for name, x in model.named_buffers() if "correction_bias" in name and x[0] == -100]
    model.save_pretrained(tmp_path)
    results = run_ranks(_compare_buffers, 2, str(tmp_path), axes)
    assert all(not differences for differences, _ in results) and max(size for _, size in results) == 100


@pytest.mark.parametrize("family", ["deepseek-v3", "gpt-oss"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_what_an_architecture_keeps_in_float32_is_float32(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = moe_model(family, torch.float32)
    model.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    empty = empty_model(model.config, dtype)
    assert {name: x.dtype for name, x in empty.state_dict().items()} == {
        name: x.dtype for name, x in model.state_dict().items()
    }
    if family == "deepseek-v3":
        assert empty.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias").dtype == torch.float32


def _drawn(config: PreTrainedConfig, seed: int = 3) -> PreTrainedModel:
    return load_model(config=config, seed=seed, sharded=True)


def _draw(rank: int, axes: dict[str, int], name: str) -> dict[str, torch.Tensor]:
    with World(Layout(ranks=4 if axes else 1, **axes)) as world:
        model = prepare(_drawn(_config(name)), world)
        whole = {n: x.full_tensor() if hasattr(x, "full_tensor") else x for n, x in model.named_parameters()}
        return {n: x.detach().clone() for n, x in whole.items()}


@pytest.mark.parametrize("name", ["6 experts", pytest.param("tied", marks=pytest.mark.whole)])
def test_random_weights_are_the_same_under_every_home(name: str) -> None:
    (alone,) = run_ranks(_draw, 1, {}, name)
    projection = "model.layers.{}.self_attn.q_proj.weight"
    assert 0.15 < alone[projection.format(1)].std() < 0.25  # initializer_range is 0.2
    assert not torch.equal(alone[projection.format(0)], alone[projection.format(1)])
    for axes in ({"tp": 2}, {"dp_replicate": 2}):
        for drawn in run_ranks(_draw, 4, axes, name):
            assert drawn.keys() == alone.keys()
            assert not [n for n, x in drawn.items() if not torch.equal(x, alone[n])]


def test_every_seed_draws_other_weights() -> None:
    model = empty_model(_config("tied"), torch.float32)
    wanted = {"model.layers.1.self_attn.q_proj.weight": LocalPart.of(model.model.layers[1].self_attn.q_proj.weight)}
    (zero,), (one,), (again,), (high,) = (
        [x for _, x in RandomWeights(model, seed).read(wanted, torch.device("cpu"))] for seed in (0, 1, 1, 2**20)
    )
    assert one.equal(again) and not zero.equal(one) and not one.equal(high)
    assert float(zero[0, 0]) == pytest.approx(-0.0809216127, rel=1e-6)  # as before seeds were mixed in


def _spreads(rank: int) -> dict[str, float]:
    config = GPT2Config(n_embd=64, n_layer=8, n_head=4, n_positions=64, vocab_size=50)
    with World(Layout(ranks=1)) as world:
        model = prepare(load_model(config=config, seed=0, sharded=True), world)
        return {n: float(x.std()) for n, x in model.named_parameters() if "weight" in n and "ln" not in n}


def test_weights_that_an_architecture_scales_by_depth_are_scaled() -> None:
    (spreads,) = run_ranks(_spreads, 1)
    for name, spread in spreads.items():
        wanted = 0.02 / 4 if "c_proj" in name else 0.02  # GPT-2: by the root of twice the layers
        assert abs(spread / wanted - 1) < 0.1, (name, spread)


def _left(rank: int, axes: dict[str, int]) -> tuple[bool, bool]:
    with World(Layout(ranks=2, **axes)) as world:
        model = load_model(config=_config("4 experts"), sharded=True)
        defer_to_checkpoint(model)
        prepared = prepare(model, world)
        weights = [local_tensor(x.detach()) for x in prepared.parameters()]
        return all(bool(x.isnan().all()) for x in weights), any(bool(x.isnan().any()) for x in prepared.buffers())


@pytest.mark.parametrize("axes", [{}, {"pp": 2}], ids=str)
def test_weights_that_a_checkpoint_must_bring_are_no_numbers_before(axes: dict[str, int]) -> None:
    assert run_ranks(_left, 2, axes) == [(True, False)] * 2


class _LargestMade(TorchDispatchMode):
    """The bytes of the largest tensor that an operation makes or looks at."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.size = max(self.size, made.nbytes)
        return made


FUSED = [  # blocks of fused parameters of 6 experts: gate_up_proj (6, 48, 32) and down_proj (6, 32, 24)
    (slice(0, 6), slice(12, 24), slice(0, 24)),
    (slice(0, 6), slice(0, 32), slice(20, 24)),
    (slice(3, 6), slice(8, 16), slice(4, 8)),
    (slice(4, 6), slice(0, 8), slice(0, 24)),
    (slice(6, 6), slice(0, 8), slice(0, 24)),
    (slice(0, 6), slice(8, 8), slice(0, 24)),
]


@pytest.mark.parametrize("block", FUSED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_of_fused_experts_no_more_than_one_is_whole(
    folders: Path, block: tuple[slice, ...], dtype: torch.dtype
) -> None:
    folder = folders / "6 experts"
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict()
    names = [name for name, x in whole.items() if x.dim() == 3]
    weights = FolderWeights(folder, empty_model(_config("6 experts"), dtype))
    with _LargestMade() as largest:
        parts = dict(weights.read({name: LocalPart(block, dtype) for name in names}, torch.device("cpu")))
    assert len(names) == 6 and parts.keys() == set(names)
    for name in names:
        assert parts[name].dtype == dtype and torch.equal(parts[name], whole[name][block]), name
    expert, local = max(4 * whole[name][0].numel() for name in names), parts[names[0]].nbytes  # files are in float32
    assert largest.size <= max(expert, local) < min(whole[name].nbytes for name in names)


def _edit(folder: Path, name: str, edit: Any) -> None:
    file = next(path for path in sorted(folder.glob("*.safetensors")) if name in load_file(path))
    weights = load_file(file)
    weights[name] = edit(weights[name])
    save_file({n: x for n, x in weights.items() if x is not None}, file, metadata={"format": "pt"})


def _cut_short(folder: Path, bytes_left: int) -> None:
    file = min(folder.glob("*.safetensors"))
    assert bytes_left < file.stat().st_size
    file.write_bytes(file.read_bytes()[:bytes_left])


def _cut_by_a_byte(folder: Path) -> None:
    _cut_short(folder, min(folder.glob("*.safetensors")).stat().st_size - 1)


NORM, GATE = "model.layers.0.input_layernorm.weight", "model.layers.1.mlp.gate_proj.weight"
DAMAGED = {
    "a weight missing": (lambda f: _edit(f, NORM, lambda x: None), rf"lacks 1 weights .*{NORM}"),
    "another shape": (lambda f: _edit(f, GATE, lambda x: x[:5].clone()), rf"{GATE} is \(5, 32\) in the .* \(48, 32\)"),
    "a header cut short": (
        lambda f: _cut_short(f, 40),
        r"model-00001.* \(40 bytes\) cannot be read, perhaps it was cut",
    ),
    "data cut short": (_cut_by_a_byte, r"model-00001.* bytes\) cannot be read, perhaps it was cut short"),
    "an empty file": (
        lambda f: _cut_short(f, 0),
        r"model-00001.* \(0 bytes\) cannot be read, perhaps it was cut short",
    ),
}


def test_an_expert_of_another_shape_is_refused(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "6 experts", tmp_path / "model")
    _edit(tmp_path / "model", "model.layers.2.mlp.experts.4.down_proj.weight", lambda x: x[:5].clone())
    with World(Layout(ranks=1)) as world, pytest.raises(ModelError, match=r"experts.down_proj is \(6, 5, "):
        prepare(load_model(tmp_path / "model", sharded=True), world)


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_folders_are_refused_when_they_are_read(folders: Path, tmp_path: Path, case: str) -> None:
    damage, says = DAMAGED[case]
    shutil.copytree(folders / "tied", tmp_path / "model")
    damage(tmp_path / "model")
    with World(Layout(ranks=1)) as world, pytest.raises(ModelError, match=says):
        prepare(load_model(tmp_path / "model", sharded=True), world)


def _refused(rank: int, folder: str) -> str:
    with World(Layout(ranks=2, pp=2)) as world, pytest.raises(ModelError) as caught:
        prepare(load_model(folder, sharded=True), world)
    return str(caught.value)


def test_what_one_stage_cannot_read_every_rank_refuses(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "tied", tmp_path / "model")
    _edit(tmp_path / "model", GATE, lambda x: x[:5].clone())
    for refusal in run_ranks(_refused, 2, str(tmp_path / "model")):
        assert f"{GATE} is (5, 32) in the files, (48, 32) by the configuration" in refusal
