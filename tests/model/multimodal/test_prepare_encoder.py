"""Encoders over their own homes, sharded and copied, split over tp and recomputed, equal one dense process."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.comm import World
from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.model.multimodal.prepare_encoder import check_encoder_prepared, encoder_blocks, prepare_encoder
from longspan.model.sharding import sum_gradients_over_slots
from longspan.testing import backend, run_ranks
from longspan.train.gradient_norm import grad_norm
from tests.model.multimodal.encoders import Answer, Mlp, OwnViT, dense_answer, encoder, items_of

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
# A softmax does not change where every key has the same number added: what adds one has a true gradient of zero, of
# which rounding leaves 1e-14 in float64. Its error is measured against the largest gradient of the encoder.
ZERO = ("k_proj.bias", "k_norm.bias")
# Items of each slot in two waves, by number of slots; a slot without items runs item 0, whose rows go nowhere.
DEALT = {
    1: ([[0, 1, 2, 3]], [[4, 5, 6]]),
    2: ([[0, 1, 2, 3], [4]], [[], [5, 6]]),
    4: ([[0, 1, 2], [3], [], [4]], [[5], [], [], [6]]),
}
Case = tuple[str, torch.dtype, str]


Answers = dict[tuple[str, torch.dtype], Answer]


def _encode(module: nn.Module, family: str, dtype: torch.dtype, world: World, answer: Answer) -> dict[int, Tensor]:
    """Run both waves forward, then both backward; the rows of this slot's items."""
    items = items_of(family, dtype, world.device)
    waves = [wave[world.slot] for wave in DEALT[world.home.slots]]
    encoded = [module([items[i] for i in mine or [0]]) for mine in waves]
    rows = dict[int, Tensor]()
    with sum_gradients_over_slots(module, world):
        for mine, out in zip(waves, encoded, strict=True):
            cotangents = [answer.cotangents[i].to(world.device, dtype) for i in mine]
            rows |= dict(zip(mine, out.detach().split([len(c) for c in cotangents]) if mine else (), strict=True))
            cotangent = torch.cat(cotangents) if mine else torch.zeros_like(out)
            out.backward(cotangent)
    return rows


def whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).double().cpu()


def gradient_errors(module: nn.Module, truth: dict[str, Tensor]) -> dict[str, float]:
    """The relative error of each gradient, which must be there where a true one is, and only there."""
    largest = max(gradient.norm().item() for gradient in truth.values())
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert gradients.keys() == truth.keys(), gradients.keys() ^ truth.keys()
    return {
        name: (whole(gradients[name]) - true).norm().item() / (largest if name.endswith(ZERO) else true.norm().item())
        for name, true in truth.items()
    }


def _compare(rank: int, home: Layout, cases: Sequence[Case], answers: Answers) -> dict[Case, dict[str, float]]:
    errors = dict[Case, dict[str, float]]()
    torch.backends.cudnn.allow_tf32 = False  # patches are embedded by convolutions
    with World(home, backend=backend()) as world:
        for case in cases:
            family, dtype, kind = case
            how: dict[str, Any] = {"activation_checkpointing": "recomputed" in kind}
            module = prepare_encoder(encoder(family, dtype), world, shard_parameters="sharded" in kind, **how)
            answer = answers[family, dtype]
            rows = _encode(module, family, dtype, world, answer)
            norm = torch.stack([g.norm() for g in answer.gradients.values()]).norm().item()
            errors[case] = gradient_errors(module, answer.gradients)
            for i, x in rows.items():
                errors[case][f"rows {i}"] = ((x.cpu() - answer.rows[i]).norm() / answer.rows[i].norm()).item()
            errors[case]["norm"] = abs(grad_norm(module, world) - norm) / norm
    return errors


FEW = [
    ("clip", torch.float64, "copies"),
    ("qwen2.5-vl", torch.float64, "sharded, recomputed"),
    ("own", torch.float64, "copies, recomputed"),
]
LAYOUTS = {"1 x 4": Layout(4), "2 x 2": Layout(4, tp=2), "4 x 1": Layout(4, tp=4)}


@pytest.mark.parametrize(
    ("layout", "cases"),
    [
        pytest.param("2 x 2", FEW[1:2], id="few 2 x 2"),  # and copies, and in part frozen below
        *(pytest.param(name, FEW, id=f"few {name}", marks=pytest.mark.whole) for name in ("1 x 4", "4 x 1")),
    ],
)
def test_an_encoder_over_its_home_equals_one_dense_process(layout: str, cases: list[Case]) -> None:
    home = LAYOUTS[layout]
    answers = {case[:2]: dense_answer(*case[:2]) for case in cases}
    for rank, errors in enumerate(run_ranks(_compare, len(home.ranks), home, cases, answers)):
        for case, by_name in errors.items():
            wrong = {name: error for name, error in by_name.items() if not error <= TOLERANCE[case[1]]}
            assert not wrong, (rank, case, wrong)


# ---- what is refused


class EachByItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3)])

    def forward(self, items: Sequence[Tensor]) -> Tensor:
        return torch.cat([self.layers[0](x) for x in items])


def test_sharded_blocks_are_not_called_for_each_item(world: World) -> None:
    items = [torch.ones(2, 3, device=world.device)] * 2
    module = prepare_encoder(EachByItself(), world)
    for _ in range(2):
        assert module(items[:1]).shape == (2, 3)
    with pytest.raises(ModelError, match=r"layers.0 \(Linear\) was called twice in one forward .* blocks=\[\]\)"):
        module(items)
    alone: list[dict[str, Any]] = [{"blocks": []}, {"shard_parameters": False}]
    for settings in alone:
        assert prepare_encoder(EachByItself(), world, **settings)(items).shape == (4, 3)


def test_blocks_are_the_longest_lists_that_are_in_no_other() -> None:
    module = nn.Module()
    module.stem = nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2), nn.GELU())
    module.blocks = nn.Sequential(*(Mlp("into", "out_of") for _ in range(3)))
    module.layers = nn.ModuleList([nn.ModuleDict({"inside": nn.ModuleList([nn.Linear(2, 2)] * 9)}) for _ in range(3)])
    module.short = nn.ModuleList([nn.Linear(2, 2)] * 2)
    assert [*encoder_blocks(module)] == [f"{name}.{i}" for name in ("blocks", "layers") for i in range(3)]
    chosen = [module.get_submodule(name) for name in ("short.0", "blocks.1")]
    assert [*encoder_blocks(module, chosen)] == ["blocks.1", "short.0"]
    assert encoder_blocks(module, []) == encoder_blocks(nn.Linear(2, 2)) == {}


def test_settings_that_do_not_fit_are_refused_before_anything_is_changed(world: World) -> None:
    module: Any = OwnViT()
    other = nn.Linear(2, 2)
    with pytest.raises(ModelError, match="blocks Linear are not modules inside OwnViT"):
        prepare_encoder(module, world, blocks=[other])
    with pytest.raises(ModelError, match=r"blocks lie inside each other \(blocks.0.attn in blocks.0\)"):
        prepare_encoder(module, world, blocks=[module.blocks[0], module.blocks[0].attn])
    with pytest.raises(ModelError, match=r"names 'blocks.\*.mlp.w3', which is no nn.Linear of OwnViT"):
        prepare_encoder(module, world, tp_plan={"blocks.*.mlp.w3": "colwise"})
    with pytest.raises(ModelError, match="Linear has no list of blocks"):
        prepare_encoder(other, world, activation_checkpointing=True)
    with pytest.raises(ModelError, match=r"compute_dtype is torch\.float64"):
        prepare_encoder(module, world, compute_dtype=torch.float64)
    with pytest.raises(ModelError, match=r"2 parameters of Linear have no values \(weight, bias are on the meta"):
        prepare_encoder(nn.Linear(2, 2, device="meta"), world)
    prepare_encoder(module, world)
    check_encoder_prepared(module, world)
    with pytest.raises(ModelError, match="was prepared already"):
        prepare_encoder(module, world)
    with pytest.raises(ModelError, match="was not prepared over this world"):
        check_encoder_prepared(other, world)


# ---- frozen parts, half precision, parameters that some slots do not use


def _frozen(world: World, answer: Answer) -> float:
    """The worst error where the tower but its last block's MLP is frozen; what is frozen has no gradient."""
    module = encoder("own", torch.float64)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("blocks.2.mlp" in name or "blocks.1.norm1.bias" in name or "projector" in name)
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    prepare_encoder(module, world, activation_checkpointing=True)
    assert trained == {name for name, p in module.named_parameters() if p.requires_grad}
    _encode(module, "own", torch.float64, world, answer)
    return max(gradient_errors(module, {n: g for n, g in answer.gradients.items() if n in trained}).values())


def _half(world: World, answer: Answer) -> tuple[float, float]:
    """The error of bfloat16 over float32 parameters, and that of the stock encoder in bfloat16 in one process.

    The largest of any gradient, relative to all gradients together, and of any item's rows.
    """
    family = "qwen2.5-vl"
    module = prepare_encoder(encoder(family, torch.float32), world, compute_dtype=torch.bfloat16)
    seen = set[torch.dtype]()

    def note(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert args[0].dtype == torch.bfloat16
        seen.update(x.dtype for x in kwargs["position_embeddings"])

    in_float32 = module.get_submodule("tower.patch_embed")  # as of a tower that adds places in float32
    in_float32.register_forward_hook(lambda *of_call: of_call[-1].float())
    for block in ("tower.blocks.0", "tower.blocks.1"):
        module.get_submodule(block).register_forward_pre_hook(note, with_kwargs=True)
    rows = _encode(module, family, torch.float32, world, answer)
    assert seen == {torch.float32}, "rotary tables are not rounded"
    assert all(p.grad is None or p.grad.dtype == p.dtype == torch.float32 for p in module.parameters())
    stock = encoder(family, torch.bfloat16).to(world.device)
    alone = [stock([item]) for item in items_of(family, torch.bfloat16, world.device)]
    for x, cotangent in zip(alone, answer.cotangents, strict=True):
        x.backward(cotangent.to(x))
    return _largest_error(module, rows, answer), _largest_error(stock, dict(enumerate(alone)), answer)


def _largest_error(module: nn.Module, rows: dict[int, Tensor], answer: Answer) -> float:
    total = torch.stack([g.norm() for g in answer.gradients.values()]).norm().item()
    gradients = {name: whole(p.grad) for name, p in module.named_parameters() if p.grad is not None}
    of_gradients = [(gradients[n] - g).norm().item() / total for n, g in answer.gradients.items()]
    of_rows = [(x.cpu() - answer.rows[i]).norm().item() / answer.rows[i].norm().item() for i, x in rows.items()]
    return max(of_gradients + of_rows)


class TwoKinds(nn.Module):
    """Embeds items of three features with one linear, those of four with another; `never` is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.three, self.four, self.never = nn.Linear(3, 2), nn.Linear(4, 2), nn.Linear(2, 2)

    def forward(self, items: Sequence[Tensor]) -> Tensor:
        return torch.cat([(self.three if x.shape[-1] == 3 else self.four)(x) for x in items])


def _kinds_of_items(world: World) -> None:
    """Copies: each slot embeds another kind of item, and all hold the sums over all slots."""
    torch.manual_seed(3)
    module: Any = prepare_encoder(TwoKinds().double(), world, shard_parameters=False, tp_plan={"*": "replicated"})
    kinds = [3 + slot % 2 for slot in range(world.home.slots)]
    with sum_gradients_over_slots(module, world):
        items = [torch.ones(5, kinds[world.slot], dtype=torch.float64, device=world.device)]
        module(items).sum().backward()
    for linear, features in ((module.three, 3), (module.four, 4)):
        assert (linear.weight.grad == 5 * kinds.count(features)).all()
    assert module.never.weight.grad is None


def _others(rank: int, tp: int, own: Answer, half: Answer) -> tuple[float, tuple[float, float]]:
    with World(Layout(4, tp=tp), backend=backend()) as world:
        _kinds_of_items(world)
        return _frozen(world, own), _half(world, half)


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.whole), 2])
def test_frozen_parts_half_precision_and_parameters_that_some_slots_do_not_use(tp: int) -> None:
    answers = dense_answer("own", torch.float64), dense_answer("qwen2.5-vl", torch.float32)
    for frozen, (half, stock) in run_ranks(_others, 4, tp, *answers):
        assert frozen <= 1e-12
        assert half <= 1.25 * stock <= 0.05, (half, stock)
