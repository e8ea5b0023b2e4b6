"""Weights that every rank reads or draws for itself are those that it would cut from the whole model."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedConfig

from longspan import Layout, World, load_model, plan_fixed, prepare, run_step
from longspan.errors import ModelError
from longspan.model.weights.drawn_weights import RandomWeights
from longspan.model.weights.empty_model import empty_model, has_meta_parameters
from longspan.model.weights.fill import defer_to_checkpoint
from longspan.model.weights.folder_weights import FolderWeights
from longspan.model.weights.gradients import set_earlier_gradients_aside
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
    ({"pp": 2}, {"virtual_stages": 2, "pipeline_schedule": "zero_bubble"}),
    ({"ep": 2}, {}),
    ({"tp": 2, "ep": 2}, {}),
    ({}, {"shard_parameters": False}),
]
Row = tuple[dict[str, int], dict[str, Any], tuple[str, ...]]
TABLES: dict[str, list[Row]] = {str(home): [(*home, tuple(FAMILIES))] for home in HOMES}
# In CI each family in a home or two: shards that ranks do not divide, tied weights on two stages, experts of both axes.
TABLES["few"] = [(*HOMES[0], ("6 experts",)), (*HOMES[4], ("tied",)), (*HOMES[6], ("fused",))]


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
    lengths = (30, 9)
    plan = plan_fixed(lengths, world.home, cp=2 if world.home.slots > 1 else 1, max_tokens_per_slot=40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = run_step(model, plan, texts(lengths), world, optimizer, max_grad_norm=1.0)
    return result.loss, result.grad_norm


def _compare(rank: int, folders: str, rows: list[Row]) -> dict[str, Any]:
    compared = {}
    for axes, options, families in rows:
        with World(Layout(ranks=4, **axes)) as world:
            for name in families:
                if "ep" in axes and name in ("tied", "untied"):
                    continue
                wanted = prepare_untried(load_model(f"{folders}/{name}", dtype="float64"), world, **options)
                model = load_model(f"{folders}/{name}", dtype="float64", sharded=True)
                assert has_meta_parameters(model)
                model = prepare_untried(model, world, **options)
                differences = _differences(model, wanted)
                trained = bool(axes or options) or _losses(model, world) == _losses(wanted, world)
                compared[f"{name}, {axes}, {options}"] = differences, trained
    return compared


@pytest.mark.parametrize("table", [pytest.param(t, marks=[pytest.mark.whole] * (t != "few")) for t in TABLES])
def test_every_home_holds_the_folders_weights(folders: Path, table: str) -> None:
    for compared in run_ranks(_compare, 4, str(folders), TABLES[table], timeout=240):
        assert len(compared) == (3 if table == "few" else 3 if "'ep'" in table else len(FAMILIES))
        assert compared == dict.fromkeys(compared, ([], True))


@pytest.mark.parametrize("family", ["deepseek-v3", "gpt-oss"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_what_an_architecture_keeps_in_float32_is_float32(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The same parameters and buffers as transformers reads, whether drawn or read, whole or in parts; where a layer
    then has weights of two types, training all of them is refused by their names."""
    model = moe_model(family, torch.float32)
    model.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    empty = empty_model(model.config, dtype)
    expected = {name: x.dtype for name, x in model.state_dict().items()}
    for other in (empty, load_model(tmp_path, dtype=dtype), load_model(config=model.config, dtype=dtype)):
        assert {name: x.dtype for name, x in other.state_dict().items()} == expected
    if family == "deepseek-v3":
        if dtype != torch.float32:
            words = r"mlp\.gate\.weight torch\.float32, and FSDP2 gathers parameters of one type"
            with World(Layout(ranks=1)) as world, pytest.raises(ModelError, match=words):
                prepare_untried(load_model(tmp_path, dtype=dtype, sharded=True), world)
        assert empty.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias").dtype == torch.float32


def _draw(rank: int, homes: list[dict[str, int]], name: str) -> list[dict[str, torch.Tensor]]:
    drawn = list[dict[str, torch.Tensor]]()
    for home in homes:
        with World(Layout(**home)) as world:
            model: Any = prepare_untried(load_model(config=_config(name), seed=3, sharded=True), world)
            drawn.append({n: getattr(x, "full_tensor", lambda x=x: x)().detach() for n, x in model.named_parameters()})
    return drawn


def test_random_weights_are_the_same_under_every_home() -> None:
    name = "6 experts"
    (alone,) = _draw(0, [{"ranks": 1}], name)
    projection = "model.layers.{}.self_attn.q_proj.weight"
    assert 0.15 < alone[projection.format(1)].std() < 0.25  # initializer_range is 0.2
    assert not torch.equal(alone[projection.format(0)], alone[projection.format(1)])
    for of_rank in run_ranks(_draw, 2, [{"ranks": 2, "tp": 2}, {"ranks": 2, "dp_replicate": 2}], name):
        for drawn in of_rank:
            assert drawn.keys() == alone.keys()
            assert not [n for n, x in drawn.items() if not torch.equal(x, alone[n])]


def test_every_seed_draws_other_weights() -> None:
    model = empty_model(_config("tied"), torch.float32)
    wanted = {
        "model.layers.1.self_attn.q_proj.weight": LocalPart.from_parameter(
            model.model.layers[1].self_attn.q_proj.weight
        )
    }
    (zero,), (one,), (again,), (high,) = (
        [x for _, x in RandomWeights(model, seed).read(wanted, torch.device("cpu"))] for seed in (0, 1, 1, 2**20)
    )
    assert one.equal(again) and not zero.equal(one) and not one.equal(high)
    assert float(zero[0, 0]) == pytest.approx(-0.0809216127, rel=1e-6)  # as before seeds were mixed in


def test_weights_that_an_architecture_scales_by_depth_are_scaled(world: World) -> None:
    config = GPT2Config(n_embd=64, n_layer=8, n_head=4, n_positions=64, vocab_size=50)
    model = prepare_untried(load_model(config=config, seed=0, sharded=True), world)
    spreads = {n: float(x.detach().std()) for n, x in model.named_parameters() if "weight" in n and "ln" not in n}
    for name, spread in spreads.items():
        wanted = 0.02 / 4 if "c_proj" in name else 0.02  # GPT-2: by the root of twice the layers
        assert abs(spread / wanted - 1) < 0.1, (name, spread)


class _LargestMade(TorchDispatchMode):
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_of_fused_experts_no_more_than_one_is_whole(folders: Path, dtype: torch.dtype) -> None:
    folder = folders / "6 experts"
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict()
    names = [name for name, x in whole.items() if x.dim() == 3]
    weights = FolderWeights(folder, empty_model(_config("6 experts"), dtype))
    for block in FUSED:
        with _LargestMade() as largest:
            parts = dict(weights.read({name: LocalPart(block, dtype) for name in names}, torch.device("cpu")))
        assert len(names) == 6 and parts.keys() == set(names)
        for name in names:
            assert parts[name].dtype == dtype and torch.equal(parts[name], whole[name][block]), (name, block)
        expert = max(4 * whole[name][0].numel() for name in names)  # files are in float32
        assert largest.size <= max(expert, parts[names[0]].nbytes) < min(whole[name].nbytes for name in names)


def _edit(folder: Path, name: str, edit: Any) -> None:
    file = next(path for path in sorted(folder.glob("*.safetensors")) if name in load_file(path))
    weights = load_file(file)
    weights[name] = edit(weights[name])
    save_file({n: x for n, x in weights.items() if x is not None}, file, metadata={"format": "pt"})


GATE = "model.layers.1.mlp.gate_proj.weight"


def test_an_expert_of_another_shape_is_refused(folders: Path, tmp_path: Path, world: World) -> None:
    shutil.copytree(folders / "6 experts", tmp_path / "model")
    _edit(tmp_path / "model", "model.layers.2.mlp.experts.4.down_proj.weight", lambda x: x[:5].clone())
    with pytest.raises(ModelError, match=r"experts.down_proj is \(6, 5, "):
        prepare(load_model(tmp_path / "model", sharded=True), world)


def _stages_and_experts(rank: int, buffers: str, damaged: str) -> tuple[list[list[str]], float, list[Any], str]:
    """Differences of a model with buffers and their largest; what a checkpoint must bring; what one stage refuses."""
    differences, largest, left = list[list[str]](), 0.0, list[Any]()
    for axes in ({"ep": 2}, {"pp": 2}):
        with World(Layout(ranks=2, **axes)) as world:
            wanted = prepare_untried(load_model(buffers), world)
            model = prepare_untried(load_model(buffers, sharded=True), world)
            bias = [x for name, x in model.named_buffers() if name.endswith("e_score_correction_bias")]
            differences.append(_differences(model, wanted))
            largest = max(largest, sum(float(x.abs().sum()) for x in bias))
            model = load_model(config=_config("4 experts"), sharded=True)
            defer_to_checkpoint(model)
            prepared = prepare_untried(model, world)
            weights = [local_tensor(x.detach()) for x in prepared.parameters()]
            left.append(all(bool(x.isnan().all()) for x in weights))
            left.append(not any(bool(x.isnan().any()) for x in prepared.buffers()))
    with World(Layout(ranks=2, pp=2)) as world, pytest.raises(ModelError) as caught:
        prepare(load_model(damaged, sharded=True), world)
    return differences, largest, left, str(caught.value)


def test_buffers_are_read_a_checkpoint_brings_the_rest_and_every_rank_refuses(folders: Path, tmp_path: Path) -> None:
    model = moe_model("deepseek-v3", torch.float32)
    assert [name for name, x in model.named_buffers() if "correction_bias" in name and x[0] == -100]
    model.save_pretrained(tmp_path / "buffers")
    shutil.copytree(folders / "tied", tmp_path / "damaged")
    _edit(tmp_path / "damaged", GATE, lambda x: x[:5].clone())
    answers = run_ranks(_stages_and_experts, 2, str(tmp_path / "buffers"), str(tmp_path / "damaged"))
    assert max(largest for _, largest, _, _ in answers) == 100
    for differences, _, left, refusal in answers:
        assert differences == [[], []] and left == [True] * 4, "weights are no numbers before a checkpoint brings them"
        assert f"{GATE} is (5, 32) in the files, (48, 32) by the configuration" in refusal


def test_gradients_are_added_to_earlier_ones_or_left_as_they_were() -> None:
    parameter, absent = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    with set_earlier_gradients_aside([parameter, absent]):
        (parameter * 3).sum().backward()
        assert parameter.grad.tolist() == [3, 3]
    assert parameter.grad.tolist() == [4, 4]
    with pytest.raises(KeyError), set_earlier_gradients_aside([parameter, absent]):
        (parameter * absent).sum().backward()
        raise KeyError
    assert parameter.grad.tolist() == [4, 4] and absent.grad is None
