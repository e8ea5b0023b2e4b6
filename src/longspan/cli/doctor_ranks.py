"""What each rank does for `doctor`: compares a small Qwen3 at several degrees with the stock model."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from longspan.attention import AttentionCall, choose_type
from longspan.comm import World
from longspan.layout import Layout
from longspan.model import load_model, prepare
from longspan.plan import Plan, plan_fixed
from longspan.plan.hierarchy import Levels, hierarchical_groups, levels_of
from longspan.train import run_step

LENGTHS = (13, 1, 30, 7, 2, 18, 96, 41)  # ragged, some shorter than twice the degree, one without a target
VOCABULARY = 97
DEGREES = (1, 2, 4)
EXACT = {torch.float64: 1e-12, torch.float32: 1e-5}


@dataclass(frozen=True)
class Parity:
    """The relative errors of one way to run the model, compared with the stock model, and their tolerance.

    `levels` has the ranks of the levels of hierarchical groups, `why` the choice of `auto` and its reasons.
    """

    dtype: str
    cp: int
    cp_comm_type: str
    loss_error: float
    gradient_error: float
    tolerance: float
    sizes: tuple[int, int] | None = None
    levels: tuple[str, ...] = ()
    why: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        """Whether both errors are small enough; NaN is not."""
        return self.loss_error <= self.tolerance and self.gradient_error <= self.tolerance


@dataclass(frozen=True)
class _Answer:
    loss: float
    gradients: dict[str, Tensor]


def check_ranks(rank: int, ranks: int, backend: str, timeout: float) -> dict[str, Any]:
    """Open a world, run the parity check, and return it with the log of groups, as a JSON object."""
    with World(Layout(ranks), backend=backend, timeout=timeout) as world:
        dtypes = (torch.float32, torch.bfloat16) if world.device.type == "cuda" else (torch.float64, torch.float32)
        parity = [row for dtype in dtypes for row in _parity(dtype, world)]
        return {
            "device": str(world.device),
            "backend": world.backend,
            "ranks": ranks,
            "groups": [asdict(record) for record in world.process_groups.made],
            "parity": [asdict(row) | {"good": row.good} for row in parity],
        }


def _parity(dtype: torch.dtype, world: World) -> Iterator[Parity]:
    documents = _documents()
    stock = _stock(dtype, torch.float32 if dtype == torch.bfloat16 else dtype, documents)
    tolerance = EXACT.get(dtype) or _rounding(dtype, documents, stock)
    model = prepare(_model(dtype), world)
    for cp in (d for d in DEGREES if world.home.slots % d == 0):
        for way in ways(cp):
            plan = plan_fixed(
                LENGTHS,
                world.home,
                cp,
                cp_comm_type=way.cp_comm_type,
                hierarchical_context_parallel_sizes=way.sizes,
                node_size=world.node_size,
            )
            world.prepare(plan)
            answer = _Answer(run_step(model, plan, documents, world).loss, _gradients(model))
            model.zero_grad()
            loss, gradient = _errors(answer, stock)
            levels = tuple(str(_as_ranks(levels_of(group), world)) for group in hierarchical_groups(plan))
            why = _why(model, plan, dtype, world) if way.cp_comm_type == "auto" else ()
            name = str(dtype).removeprefix("torch.")
            yield Parity(name, cp, way.cp_comm_type, loss, gradient, tolerance, way.sizes, levels, why)


class Way(NamedTuple):
    """A communication type, and the levels of a hierarchical one."""

    cp_comm_type: str
    sizes: tuple[int, int] | None = None


def ways(cp: int) -> list[Way]:
    """All types for a degree, a2a+p2p with each pair of sizes above 1; one type for one member, which sends nothing."""
    if cp == 1:
        return [Way("p2p")]
    sizes = [(a, cp // a) for a in range(2, cp) if cp % a == 0]
    return [Way("p2p"), Way("all_gather"), Way("a2a"), *(Way("a2a+p2p", levels) for levels in sizes), Way("auto")]


def _as_ranks(levels: Levels, world: World) -> Levels:
    """The ranks that have these slots in this rank's stage and tensor-parallel position."""
    a2a, p2p = (tuple(tuple(world.plane[s] for s in slots) for slots in level) for level in (levels.a2a, levels.p2p))
    return Levels(a2a, p2p)


def _why(model: Any, plan: Plan, dtype: torch.dtype, world: World) -> tuple[str, ...]:
    """Why `auto` chose its type for the first group of the plan."""
    config = model.config
    size = config.head_dim
    call = AttentionCall(config.num_attention_heads, config.num_key_value_heads, size, size, dtype)
    return choose_type(plan.micro_batches[0].groups[0], call, node_size=world.node_size).reasons


def _rounding(dtype: torch.dtype, documents: Sequence[np.ndarray], stock: _Answer) -> float:
    """Twice the stock model's own rounding error in this dtype; a larger error would come from longspan."""
    return 2 * max(_errors(_stock(dtype, dtype, documents), stock))


def _documents() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, VOCABULARY, length) for length in LENGTHS]


def _model(dtype: torch.dtype) -> Any:
    return load_model(preset="qwen3-tiny", vocab_size=VOCABULARY, dtype=dtype)


def _stock(weights: torch.dtype, compute: torch.dtype, documents: Sequence[np.ndarray]) -> _Answer:
    """Loss and gradients of the unchanged model on the CPU, document by document; weights as rounded to `weights`."""
    model = _model(weights).to(compute).train()
    model.set_attn_implementation("sdpa")
    targets, total = sum(LENGTHS) - len(LENGTHS), 0.0
    for document in documents:
        ids = torch.from_numpy(document)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        logits = logits.float() if compute == torch.bfloat16 else logits
        loss = F.cross_entropy(logits, ids[1:], reduction="sum") / targets
        loss.backward()
        total += loss.item()
    return _Answer(total, _gradients(model))


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    """Every gradient, unsharded, in float64 on the CPU. All ranks call this together."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    unsharded = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}
    return {name: g.to("cpu", torch.float64) for name, g in unsharded.items()}


def _errors(answer: _Answer, stock: _Answer) -> tuple[float, float]:
    """Relative errors of the loss and of the worst gradient; infinite where a gradient is missing."""
    loss = abs(answer.loss - stock.loss) / abs(stock.loss)
    if answer.gradients.keys() != stock.gradients.keys():
        return loss, float("inf")
    worst = (_distance(answer.gradients[name], stock.gradients[name]) for name in stock.gradients)
    return loss, max(worst)


def _distance(gradient: Tensor, exact: Tensor) -> float:
    return ((gradient - exact).norm() / exact.norm().clamp(min=1e-30)).item()
