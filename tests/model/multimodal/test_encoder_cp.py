"""One item over several slots of an encoder: attention of its own that calls `attend` is exact at any degree."""

from typing import Any

import torch
from torch import Tensor, nn

from longspan import attend
from longspan.comm import SequenceShard, World, bind
from longspan.layout import Layout
from longspan.model.multimodal.prepare_encoder import prepare_encoder
from longspan.model.sharding import sum_gradients_over_slots
from longspan.plan import plan_dynamic, plan_fixed
from longspan.testing import backend, run_ranks
from tests.model.multimodal import encoders
from tests.model.multimodal.test_prepare_encoder import gradient_errors
from tests.reference import dense_attention

LENGTHS = (61,)  # one huge item
SEVERAL = (61, 5, 1, 18, 7)


class Attention(encoders.Attention):
    """Attention of local rows to all rows of their item."""

    def forward(self, x: Tensor, shard: Any) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, self.num_heads, self.head_dim).unbind(1)  # (T, N, H)
        attention: Any = attend if isinstance(shard, SequenceShard) else dense_attention
        out = attention(self.q_norm(q), self.k_norm(k), v, shard, causal=False)
        return self.proj(out.reshape(len(x), -1))


class ShardedViT(encoders.OwnViT):
    """`forward(patches, positions, shard)`: local patches (T, 6), where they are in their item, and the shard."""

    def forward(self, patches: Tensor, positions: Tensor, shard: Any) -> Tensor:  # pyright: ignore
        x = self.embed(patches) + self.places(positions)
        for block in self.blocks:
            x = block(x, shard)
        return self.projector(self.norm(x))


def _encoder() -> nn.Module:
    torch.manual_seed(4)
    module: Any = ShardedViT()
    module.blocks = module.blocks[:2]
    for block in module.blocks:
        block.attn = Attention()
    return module.double()


def _dense(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """(patches, cotangents, rows, gradients) of one process, on the CPU."""
    module, generator = _encoder(), torch.Generator().manual_seed(6)
    patches, cotangents = (torch.randn(sum(lengths), n, generator=generator).double() for n in (6, encoders.OUT))
    rows = module(patches, torch.cat([torch.arange(n) for n in lengths]), lengths)
    rows.backward(cotangents)
    return patches, cotangents, rows.detach(), {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


CASES = [
    (Layout(4), LENGTHS, False, True, True),
    (Layout(4), SEVERAL, True, False, "selective"),
    (Layout(4, tp=2), LENGTHS, False, True, "selective"),
]


def _errors(rank: int, dense: dict[tuple[int, ...], Any]) -> list[dict[str, float]]:
    errors = list[dict[str, float]]()
    for home, lengths, dynamic, sharded, recomputed in CASES:
        with World(home, backend=backend()) as world:
            *sent, gradients = dense[lengths]
            patches, cotangents, rows = (x.to(world.device) for x in sent)
            module = prepare_encoder(_encoder(), world, shard_parameters=sharded, activation_checkpointing=recomputed)
            room = {"max_tokens_per_slot": 96 // home.slots}
            plan = plan_dynamic(lengths, home, **room) if dynamic else plan_fixed(lengths, home, cp=home.slots)
            world.prepare(plan)
            of_rows = 0.0
            with sum_gradients_over_slots(module, world):
                for micro_batch in plan.micro_batches:
                    shard = bind(micro_batch, world).with_padding()
                    local = _packed_rows(shard, lengths).to(world.device)
                    real = (local >= 0)[:, None]
                    out = module(patches[local.clamp(min=0)], shard.position_ids, shard)
                    of_rows = max(of_rows, ((out.detach() - rows[local.clamp(min=0)]) * real).abs().max().item())
                    out.backward(cotangents[local.clamp(min=0)] * real)
            errors.append({"rows": of_rows} | gradient_errors(module, gradients))
    return errors


def _packed_rows(shard: SequenceShard, lengths: tuple[int, ...]) -> Tensor:
    """Which of the items' rows each local row is, −1 for padding."""
    starts = [sum(lengths[:item]) for item in range(len(lengths))]
    items = [item for group in shard.micro_batch.groups for item in group.documents]
    order = torch.cat([torch.arange(starts[item], starts[item] + lengths[item]) for item in items])
    return torch.where(shard.rows.cpu() >= 0, order[shard.rows.cpu().clamp(min=0)], -1)


def test_an_item_over_several_slots_equals_one_dense_process() -> None:
    for errors in run_ranks(_errors, 4, {lengths: _dense(lengths) for lengths in (LENGTHS, SEVERAL)}):
        for case, by_name in zip(CASES, errors, strict=True):
            wrong = {name: error for name, error in by_name.items() if not error <= 1e-12}
            assert not wrong, (case, wrong)
