"""Compiled and recomputed layers around `attend`: sinks that are learnt, dropout, shards of other rows, every type."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from longspan import Layout, World, attend, bind
from longspan.comm import SequenceShard
from longspan.testing import backend, run_ranks
from tests.attention.cases import micro_batch
from tests.attention.test_attend import needs
from tests.reference import relative_error

TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")
BATCHES = ((20, 1, 9), (14, 7))


class Layer(nn.Module):
    """Projections, attention with sinks and dropout, and an output, as a model has them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.q, self.k, self.v = (nn.Linear(16, n, bias=False) for n in (32, 16, 16))
        self.out = nn.Linear(32, 16, bias=False)
        self.sinks = nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self, x: Tensor, shard: SequenceShard) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 8)) for f in (self.q, self.k, self.v))
        options: dict[str, Any] = {"sinks": self.sinks, "dropout": 0.2, "dropout_seed": 5, "layer": 0, "window": 9}
        return x + self.out(attend(q, k, v, shard, cp_comm_type=self.kind, **options).flatten(1)).relu()


def recomputed(layer: nn.Module) -> Callable[..., Any]:
    return lambda x, shard: checkpoint(layer, x, shard, use_reentrant=False)


WRAPS: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "plain": lambda layer: layer,
    "recomputed": recomputed,
    "compiled, recomputed": lambda layer: recomputed(torch.compile(layer, backend="aot_eager", dynamic=True)),  # pyright: ignore
}


def results(world: World, kind: str, wrap: Callable[[nn.Module], Callable[..., Any]]) -> list[Tensor]:
    """Outputs and gradients of both micro-batches through one layer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        layer = Layer(kind).double().to(world.device)
        packed = [torch.randn(sum(lengths), 16, dtype=torch.float64) for lengths in BATCHES]
    call, tensors = wrap(layer), list[Tensor]()
    for lengths, rows in zip(BATCHES, packed, strict=True):
        shard = bind(micro_batch((tuple(range(world.home.slots)), lengths)), world)
        x = shard.scatter(rows.to(world.device)).requires_grad_()
        out = call(x, shard)
        out.square().sum().backward()
        tensors += [out.detach(), *(t for t in (x.grad,) if t is not None)]
    return [*tensors, *(p.grad for p in layer.parameters() if p.grad is not None)]


def differences(rank: int, slots: int) -> dict[tuple[str, str], float]:
    """By type and way: the largest relative difference to plain calls."""
    worst: dict[tuple[str, str], float] = {}
    with World(Layout(ranks=slots), backend=backend()) as world:
        for kind in TYPES:
            plain = results(world, kind, WRAPS["plain"])
            assert len(plain) == 4 + 5, "every parameter has a gradient"
            for name, wrap in WRAPS.items():
                other = results(world, kind, wrap)
                worst[kind, name] = max(relative_error(a, b) for a, b in zip(other, plain, strict=True))
        assert sum(counters["graph_break"].values()) and all("disable" in why for why in counters["graph_break"])
    return worst


def test_compiled_and_recomputed_layers_compute_the_same() -> None:
    needs(2)
    for worst in run_ranks(differences, 2, 2):
        assert len(worst) == len(TYPES) * len(WRAPS)
        assert all(difference < 1e-13 for difference in worst.values()), worst
