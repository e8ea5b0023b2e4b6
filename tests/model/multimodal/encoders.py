"""Small encoders with random weights, items for them, and what one process makes of all items, without any split."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map
from transformers import CLIPVisionConfig, CLIPVisionModel
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from tests.model.stock import REFERENCE

HIDDEN, HEADS, WIDTH, OUT = 32, 4, 48, 12
SIZES = ((4, 4), (8, 4), (4, 8), (8, 8), (4, 4), (6, 4), (4, 6))  # patches of each item, in rows and columns


class Tower(nn.Module):
    """One of transformers' vision towers and a projector: `forward(items)` gives the rows of these items end to end."""

    def __init__(self, tower: nn.Module, rows: Callable[[Any, Sequence[Any]], Tensor], width: int) -> None:
        super().__init__()
        self.tower, self.rows = tower, rows
        self.projector = nn.Linear(width, OUT)

    def forward(self, items: Sequence[Any]) -> Tensor:
        return self.projector(self.rows(self.tower, items))


def _images(tower: Any, items: Sequence[Tensor]) -> Tensor:
    """CLIP's patches, without the class token."""
    return tower(torch.stack([*items])).last_hidden_state[:, 1:].flatten(0, 1)


def _patches(tower: Any, items: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Qwen's merged patches."""
    return tower(torch.cat([x for x, _ in items]), grid_thw=torch.stack([grid for _, grid in items])).pooler_output


class Attention(nn.Module):
    """Attention inside one item, with queries, keys and values from one linear, and a norm of each head's features."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, HIDDEN // HEADS
        self.qkv, self.proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.q_norm, self.k_norm = nn.LayerNorm(self.head_dim), nn.LayerNorm(self.head_dim)

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, self.num_heads, self.head_dim).permute(1, 2, 0, 3)  # (N, T, H)
        qkv = zip(*(part.split([*lengths], 1) for part in (self.q_norm(q), self.k_norm(k), v)), strict=True)
        out = torch.cat([F.scaled_dot_product_attention(*part) for part in qkv], 1)
        return self.proj(out.transpose(0, 1).reshape(len(x), -1))


class Mlp(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names or ("fc1", "fc2")
        for name, sizes in zip(self.names, ((HIDDEN, WIDTH), (WIDTH, HIDDEN)), strict=True):
            self.add_module(name, nn.Linear(*sizes))

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.get_submodule(name) for name in self.names)
        return second(F.gelu(first(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attn, self.mlp = Attention(), Mlp()
        self.scale = nn.Parameter(torch.full((HIDDEN,), 0.5))

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        x = x + self.scale * self.attn(self.norm1(x), lengths)
        return x + self.mlp(self.norm2(x))


class OwnViT(nn.Module):
    """A ViT as a user writes one: items are (T, 6) patches, with as many rows as they have patches."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.embed = nn.Linear(6, HIDDEN)
        self.places = nn.Embedding(64, HIDDEN)
        self.blocks = nn.ModuleList([block() for _ in range(3)])
        self.norm = nn.LayerNorm(HIDDEN)
        self.projector = nn.Linear(HIDDEN, OUT)

    def forward(self, items: Sequence[Tensor]) -> Tensor:
        lengths = [len(item) for item in items]
        places = torch.cat([torch.arange(length, device=items[0].device) for length in lengths])
        x = self.embed(torch.cat([*items])) + self.places(places)
        for block in self.blocks:
            x = block(x, lengths)
        return self.projector(self.norm(x))


SIZES_OF_TOWER: dict[str, Any] = {"hidden_size": HIDDEN, "intermediate_size": WIDTH}
IMAGES = SIZES_OF_TOWER | {"num_attention_heads": HEADS, "num_hidden_layers": 2, "image_size": 16, "patch_size": 4}
QWEN = SIZES_OF_TOWER | {"num_heads": HEADS, "depth": 3, "in_channels": 3, "out_hidden_size": 24}
QWEN |= {"patch_size": 2, "temporal_patch_size": 1, "spatial_merge_size": 2}
WINDOWS = QWEN | {"window_size": 8, "fullatt_block_indexes": [1]}  # of 4 x 4 patches, in all blocks but one
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "clip": lambda: Tower(CLIPVisionModel(CLIPVisionConfig(**IMAGES)), _images, HIDDEN),
    "qwen2.5-vl": lambda: Tower(
        Qwen2_5_VisionTransformerPretrainedModel._from_config(Qwen2_5_VLVisionConfig(**WINDOWS)), _patches, 24
    ),
    "own": OwnViT,
}


def encoder(family: str, dtype: torch.dtype) -> nn.Module:
    """A small encoder with weights that depend on the family alone, large enough that no gradient is lost."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        module = FAMILIES[family]()
        for name, parameter in module.named_parameters():
            nn.init.normal_(parameter, mean=float(parameter.ndim == 1 and "weight" in name), std=0.2)
    return module.to(dtype)


def items_of(family: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> list[Any]:
    """One item for each of SIZES; for CLIP images of one size."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    if family == "clip":
        return [draw(3, 16, 16) for _ in SIZES]
    if family.startswith("qwen"):
        return [(draw(a * b, 12), torch.tensor([1, a, b], device=device)) for a, b in SIZES]
    return [draw(a * b, 6) for a, b in SIZES]


@dataclass(frozen=True)
class Answer:
    rows: list[Tensor]
    cotangents: list[Tensor]
    gradients: dict[str, Tensor]


def dense_answer(family: str, dtype: torch.dtype, device: torch.device | str = REFERENCE) -> Answer:
    """Every item by itself, in one process and float64, for weights and items that `dtype` holds.

    A parameter that is not used has no gradient.
    """
    module, generator = encoder(family, dtype).double().to(device), torch.Generator().manual_seed(5)
    items = [tree_map(lambda x: x.double() if x.is_floating_point() else x, i) for i in items_of(family, dtype, device)]
    rows = [module([item]) for item in items]
    cotangents = [torch.randn(x.shape, generator=generator).to(device, torch.float64) for x in rows]
    torch.stack([(x * c).sum() for x, c in zip(rows, cotangents, strict=True)]).sum().backward()
    gradients = {name: p.grad.cpu() for name, p in module.named_parameters() if p.grad is not None}
    return Answer([x.detach().cpu() for x in rows], [x.cpu() for x in cotangents], gradients)
