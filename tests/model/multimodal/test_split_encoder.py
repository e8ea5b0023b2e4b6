"""What encoders are split into over tp: linears by name or plan; a first call shows a wrong split."""

import copy
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longspan.comm import World
from longspan.errors import CommError, ModelError
from longspan.layout import Layout
from longspan.model.multimodal.prepare_encoder import encoder_blocks, prepare_encoder
from longspan.model.multimodal.split_encoder import SplitModule, find_split_parts
from longspan.model.weights.local_tensors import local_tensor
from longspan.testing import backend, run_ranks
from tests.model.multimodal.encoders import HEADS, HIDDEN, WIDTH, Attention, Mlp, OwnViT, encoder, items_of
from tests.model.multimodal.test_prepare_encoder import gradient_errors, whole


class Flat(nn.Module):
    """Attention's and the MLP's linears in the block itself, under names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.norm1, self.norm2 = HEADS, nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.wqkv, self.wo = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.mlp = Mlp("into", "out_of")

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        q, k, v = self.wqkv(self.norm1(x)).view(len(x), 3, self.num_heads, -1).permute(1, 2, 0, 3)
        qkv = zip(*(part.split([*lengths], 1) for part in (q, k, v)), strict=True)
        out = torch.cat([F.scaled_dot_product_attention(*part) for part in qkv], 1)
        x = x + self.wo(out.transpose(0, 1).reshape(len(x), -1))
        return x + self.mlp(self.norm2(x))


class WholeWidth(Attention):
    """Reshapes to a width that it does not ask of its linears."""

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, self.num_heads, self.head_dim).permute(1, 2, 0, 3)
        return self.proj((q * k * v).transpose(0, 1).reshape(x.shape))


class MixedHeads(Attention):
    """Mixes heads before the output: each rank would mix its own."""

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, self.num_heads, self.head_dim).permute(1, 0, 2, 3)
        return self.proj((q * k * v).softmax(1).reshape(len(x), -1))


class ScaledAfter(Attention):
    """Applies a parameter to whole rows, after the heads came together: its gradient is whole on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.after = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        return self.after * super().forward(x, lengths)


def _with_attention(attention: type[Attention]) -> nn.Module:
    torch.manual_seed(2)
    module = OwnViT()
    for block in module.blocks:
        block.attn = attention()
    return module.double()


WRONG = {
    WholeWidth: r"blocks.0 \(Block\) split over tp 2 .* raises RuntimeError: shape",
    MixedHeads: r"blocks.0 \(Block\) split over tp 2 is not the unsplit block: output 0 differs by",
    ScaledAfter: r"the gradient of attn.after differs by 1 of its norm\.",
}


def _wrong_splits(rank: int) -> list[str]:
    """What the first calls of splits say that are not the unsplit block; then the weights of one that is."""
    said = list[str]()
    with World(Layout(2, tp=2), backend=backend()) as world:
        items = items_of("own", torch.float64, world.device)
        for attention in WRONG:
            module = prepare_encoder(_with_attention(attention), world)
            try:
                module(items[:2])
            except ModelError as error:
                said.append(str(error))
        torch.manual_seed(world.rank)
        with pytest.raises(CommError, match=r"hold 2 different weights of OwnViT .* Seed every rank alike"):
            prepare_encoder(OwnViT(), world)
        _check_flat(world, items)
        _check_dropout(world, items)
    return said


def _check_flat(world: World, items: list[Tensor]) -> None:
    """Linears of a block's own, and some that only the caller's plan knows; keys and whole weights stay."""
    torch.manual_seed(3)
    module = OwnViT(Flat).double()
    dense = copy.deepcopy(module).to(world.device)
    plan = {"blocks.*.mlp.into": "colwise", "blocks.*.mlp.out_of": "rowwise"}
    prepare_encoder(module, world, tp_plan=plan, shard_parameters=False)
    out, true = module(items), dense(items)
    assert torch.allclose(out, true, rtol=0, atol=1e-12)
    out.square().sum().backward()
    true.square().sum().backward()
    gradients = {name: p.grad for name, p in dense.named_parameters() if p.grad is not None}
    assert max(gradient_errors(module, gradients).values()) < 1e-12
    state = module.state_dict()
    assert all(torch.equal(whole(state[name]), weight) for name, weight in dense.state_dict().items())
    assert local_tensor(module.get_parameter("blocks.0.mlp.into.weight")).shape == (WIDTH // 2, HIDDEN)
    assert module.get_parameter("blocks.0.wqkv.weight").shape == (3 * HIDDEN, HIDDEN)


def _check_dropout(world: World, items: list[Tensor]) -> None:
    torch.manual_seed(3)
    module: Any = OwnViT()
    module.blocks[0].mlp.drop = nn.Dropout(0.1)
    module = prepare_encoder(module.double(), world)
    with pytest.raises(ModelError, match=r"blocks.0.mlp.drop \(Dropout, p 0.1\) draw at random in training"):
        module(items[:1])
    assert len(module.eval()(items[:1])) == len(items[0])


def test_a_first_call_refuses_a_split_that_is_not_the_unsplit_block() -> None:
    for said in run_ranks(_wrong_splits, 2):
        assert len(said) == len(WRONG), said
        for (attention, pattern), message in zip(WRONG.items(), said, strict=True):
            assert re.search(pattern, message) and "tp_plan" in message, (attention, message)


def parts(module: nn.Module, tp: int, plan: dict[str, str] | None = None) -> list[SplitModule]:
    return find_split_parts(module, encoder_blocks(module), tp, plan or {})


def test_what_cannot_be_split_is_refused_by_name_and_number() -> None:
    with pytest.raises(ModelError, match=r"tp 3 does not divide 4 \(num_heads of tower.*use tp 1, 2 or 4"):
        parts(encoder("clip", torch.float32), 3)
    with pytest.raises(ModelError, match=r"not known by name: blocks.0.mlp.into \(32 to 48\)"):
        parts(OwnViT(Flat), 2)
    with pytest.raises(ModelError, match=r"names 'blocks.\*.nowhere', which is no nn.Linear of OwnViT"):
        parts(OwnViT(Flat), 2, {"blocks.*.nowhere": "colwise"})
    with pytest.raises(ModelError, match="the style 'columns'; use one of colwise, rowwise, qkv, replicated"):
        parts(OwnViT(Flat), 2, {"blocks.*.into": "columns"})
    module: Any = OwnViT()
    for block in module.blocks:
        del block.attn.num_heads, block.attn.head_dim
    with pytest.raises(ModelError, match=r"blocks.0.attn \(Attention\) holds no number of heads"):
        parts(module, 2)


class FewerKeys(nn.Module):
    """Attention of four heads of queries and two of keys and values, by these linears, keys first where they can be."""

    def __init__(self, *separate: str) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.q_dim, self.kv_dim = 4, 2, 16, 8
        for name in separate:
            self.add_module(name, nn.Linear(16, 8 if name in ("k_proj", "v_proj") else 16))
        if not separate:
            self.qkv, self.proj = nn.Linear(16, 32), nn.Linear(16, 16)
            around = {"in": nn.Linear(16, 16), "conv": nn.Conv2d(16, 16, 1), "out": nn.Linear(16, 16)}
            self.around = nn.ModuleDict(around)  # linears around a convolution stay whole


def test_heads_of_keys_may_be_fewer_by_one_linear_or_by_their_own() -> None:
    module: Any = nn.Module()
    module.blocks = nn.ModuleList([FewerKeys()])
    (part,) = parts(module, 2)
    assert part.name == "blocks.0" and part.query_and_key_widths == (16, 8) and {*part.styles} == {"qkv", "proj"}
    with pytest.raises(ModelError, match=r"tp 4 does not divide 2 \(num_key_value_heads of blocks.0"):
        parts(module, 4)
    del module.blocks[0].num_key_value_heads
    with pytest.raises(ModelError, match="has 32 outputs, which are not queries, keys and values of one size or of"):
        parts(module, 2)
    module.blocks = nn.ModuleList([nn.Module()])
    module.blocks[0].attn = FewerKeys("k_proj", "v_proj", "q_proj", "out_proj")
    (part,) = parts(module, 2)
    assert part.query_and_key_widths == (16, 8)
    assert {*part.local_attributes} == {"num_heads", "num_key_value_heads", "q_dim", "kv_dim"}
