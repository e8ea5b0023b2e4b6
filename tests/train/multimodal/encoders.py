"""Two small encoders with projectors: vision transformers of our own with fused projections."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longspan.attention import attend
from longspan.comm import SequenceShard

WIDTH, HEADS, PATCH, LONGEST = 16, 8, 12, 64  # 8 heads: so many ranks may share a block


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, lengths: Sequence[int], shard: SequenceShard | None) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, self.num_heads, WIDTH // HEADS).unbind(1)  # (T, N, H) each
        if shard is not None:
            return self.proj(attend(q, k, v, shard, causal=False).flatten(1))
        items = zip(*(part.transpose(0, 1).split(list(lengths), 1) for part in (q, k, v)), strict=True)
        out = torch.cat([F.scaled_dot_product_attention(*(y[None] for y in item))[0] for item in items], 1)
        return self.proj(out.transpose(0, 1).flatten(1))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = Attention(), MLP()

    def forward(self, x: Tensor, lengths: Sequence[int], shard: SequenceShard | None) -> Tensor:
        x = x + self.attn(self.norm1(x), lengths, shard)
        return x + self.mlp(self.norm2(x))


class TinyViT(nn.Module):
    """Items of any number of patches (rows, PATCH), each a row of the language model; blocks see all items end to end.

    With a shard, whose documents are items, other slots may hold the other rows of an item.
    """

    def __init__(self, out: int, blocks: int) -> None:
        super().__init__()
        self.patches, self.positions = nn.Linear(PATCH, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.projector = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, out))

    def forward(self, inputs: list[Tensor], shard: SequenceShard | None = None) -> Tensor:
        lengths = [len(item) for item in inputs]
        patches, places = torch.cat(inputs), torch.cat([torch.arange(n) for n in lengths])
        if shard is not None:
            patches, places = patches[local := _local_rows(lengths, shard)], places[local]
        x = self.patches(patches.to(self.positions.weight)) + self.positions(places.to(self.positions.weight.device))
        for block in self.blocks:
            x = block(x, lengths, shard)
        return self.projector(self.norm(x))


def _local_rows(lengths: Sequence[int], shard: SequenceShard) -> Tensor:
    starts, rows, first = np.cumsum([0, *lengths]), list[np.ndarray](), 0
    for part in shard.parts:
        segments = part.segments()
        rows += [starts[first + d] + np.arange(start, stop) for d, start, stop, _ in segments]
        first += len(part.group.documents)
    return torch.from_numpy(np.concatenate(rows))


def encoder_of(modality: str, out: int, dtype: torch.dtype) -> nn.Module:
    """The encoder of "image", or of "video" with a block less; weights depend on the modality and sizes alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        module = TinyViT(out, blocks=2 if modality == "image" else 1)
        for parameter in module.parameters():  # biases start at zero, norms at one: that would hide mistakes
            parameter.data += 0.1 * torch.randn_like(parameter)
    return module.to(dtype)
