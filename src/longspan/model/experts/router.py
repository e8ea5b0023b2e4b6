"""Losses of routers over all tokens of a step, so that they do not depend on its plan; N: (token, layer) pairs.

    balance = E · Σ_e F_e · P_e      F_e: pairs with e of their k most probable / N;  P_e: mean of softmax(logits)_e
    z       = mean of logsumexp(logits)²

Balance is transformers' `load_balancing_loss_func` (https://arxiv.org/abs/2101.03961) over the whole step, z that of
ST-MoE (https://arxiv.org/abs/2202.08906); Megatron-LM sums over layers. F is known before the first backward pass: all
micro-batches but the first run forward once more. The gradient enters at a router's weights, inside the layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longspan.comm import World
from longspan.errors import ModelError
from longspan.model.kinds import router_sizes
from longspan.model.layers import architecture_name


@dataclass(frozen=True)
class RouterCoefficients:
    """The weights of the routers' losses beside the cross entropy (a mean over targets); 0 leaves one out.

    A balance of None is transformers': `router_aux_loss_coef` if `output_router_logits` is set, else 0.
    """

    balance: float | None = None
    z: float = 0.0

    @property
    def any(self) -> bool:
        """Return whether a loss is added at all."""
        return bool(self.balance or self.z)


class RouterLosses(NamedTuple):
    """The losses of a step, without their coefficients."""

    balance: float
    z: float


class RouterSums:
    """What the routers of one rank do in one micro-batch, as sums over its rows, for each router by its `id`.

    A plain class, because FSDP2 rebuilds dataclasses in arguments; recomputed layers record the same again.
    """

    __slots__ = ("by_router", "statistics")

    def __init__(self, statistics: "RouterStatistics") -> None:
        self.statistics: RouterStatistics = statistics
        self.by_router: dict[int, Tensor] = {}  # (2 E + 1,): loads, sums of probabilities, sum of z

    def record_routing(
        self,
        router: nn.Module,
        logits: Tensor,
        weights: Tensor,
        chosen: Tensor,
        rows: Tensor,
        counts: Tensor | None,
    ) -> Tensor:
        """Record a layer's routing of its real `rows` (R,); returns the weights (T, k), with the losses' gradient.

        `counts` (R,) are how often each row counts, in so many documents; None for once.
        """
        with torch.no_grad():
            wide = _widen_logits(logits[rows])  # (R, E)
            softmax = wide.softmax(-1)
            squares = wide.logsumexp(-1).square()
            chosen_experts = softmax.topk(chosen.shape[1], dim=-1).indices
            visits = torch.ones_like(chosen_experts, dtype=torch.float64)
            if counts is not None:  # everything of a row counts so often
                visits *= counts[:, None]
                softmax = softmax * counts[:, None]
                squares = squares * counts
            loads = torch.zeros(wide.shape[1], dtype=torch.float64, device=wide.device)
            loads.scatter_add_(0, chosen_experts.flatten(), visits.flatten())
            probabilities = softmax.sum(0, dtype=torch.float64)
            self.by_router[id(router)] = torch.cat([loads, probabilities, squares.sum(dtype=torch.float64)[None]])
        if not torch.is_grad_enabled() or not self.statistics.coefficients.any:
            return weights
        return _WithRouterLosses.apply(weights, logits, rows, counts, self.statistics)  # pyright: ignore[reportReturnType]


class RouterStatistics:
    """The routers of all micro-batches of one step: `tokens` of all documents, through `layers` with `experts` each."""

    def __init__(
        self, coefficients: RouterCoefficients, world: World, *, tokens: int, layers: int, experts: int
    ) -> None:
        """Begin a step of `tokens` in all documents, through `layers` routers of `experts` each, of all stages."""
        self.coefficients = coefficients
        self.world = world
        self.experts = experts
        # The number is at least 1, to divide by.
        self.token_layers: int = max(tokens * layers, 1)
        self.micro_batches: list[RouterSums] = []
        # These micro-batches run again, with a graph.
        self.counted_ahead: list[RouterSums] = []
        self.fractions: Tensor | None = None  # F (E,)

    def add_micro_batch(self, *, counting: bool = False) -> RouterSums:
        """Make the sums of one more micro-batch; `counting`: it only counts loads, and will run again with a graph."""
        micro_batches = self.counted_ahead if counting else self.micro_batches
        micro_batches.append(RouterSums(self))
        return micro_batches[-1]

    def compute_load_fractions(self) -> None:
        """Compute F from all micro-batches of the step, before any backward pass; all ranks call it together.

        Without a coefficient of balance nothing is sent. What was counted ahead is dropped.
        """
        if self.coefficients.balance:
            local = _sum_over_micro_batches([*self.counted_ahead, *self.micro_batches], self.experts)[
                : self.experts
            ]
            local = local.tolist() if isinstance(local, Tensor) else local  # zeros, without routers on this stage
            loads = self.world.control.sum_over_stages(local, "loads of experts")
            self.fractions = torch.tensor(loads, dtype=torch.float64, device=self.world.device) / self.token_layers
        self.counted_ahead.clear()

    def sums(self) -> list[float] | Tensor:
        """Return this rank's loads, sums of probabilities (E each) and sum of z, (2 E + 1,), to be summed over slots.

        A list of zeros where this stage has no routers.
        """
        return _sum_over_micro_batches(self.micro_batches, self.experts)

    def losses(self, sums: Sequence[float]) -> RouterLosses:
        """Return the step's balance and z from `sums()` added over all slots: loads (E), probabilities (E), z."""
        loads, probabilities = torch.tensor(sums[:-1], dtype=torch.float64).view(2, -1) / self.token_layers
        return RouterLosses(float(self.experts * (loads * probabilities).sum()), sums[-1] / self.token_layers)


def _sum_over_micro_batches(micro_batches: Sequence[RouterSums], experts: int) -> list[float] | Tensor:
    sums = [router for micro_batch in micro_batches for router in micro_batch.by_router.values()]
    return torch.stack(sums).sum(0) if sums else [0.0] * (2 * experts + 1)


def _widen_logits(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


class _WithRouterLosses(torch.autograd.Function):
    """A router's weights as they are; backward adds the gradient of its losses to its logits."""

    @staticmethod
    def forward(
        ctx: Any,
        weights: Tensor,
        logits: Tensor,
        rows: Tensor,
        counts: Tensor | None,
        statistics: RouterStatistics,
    ) -> Tensor:
        ctx.save_for_backward(logits, rows, counts)
        ctx.statistics = statistics
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        """Add the losses' gradient to the logits (T, E) of real rows, and hand on the weights'."""
        logits, rows, counts = ctx.saved_tensors
        row_gradients = _logit_gradient(_widen_logits(logits[rows]), ctx.statistics)
        if counts is not None:
            row_gradients *= counts[:, None]
        row_gradients = row_gradients.to(logits.dtype)
        return gradients[0], torch.zeros_like(logits).index_copy(0, rows, row_gradients), None, None, None


def _logit_gradient(logits: Tensor, statistics: RouterStatistics) -> Tensor:
    """With the module's symbols and p = softmax(logits): balance E Σ F P has the gradient g = E F / N at p, so p (g
    − Σ g p) at the logits; z, the mean of lse², has 2 lse p / N."""
    coefficients = statistics.coefficients
    token_layers = statistics.token_layers
    p = logits.softmax(-1)
    gradient = torch.zeros_like(p)
    if coefficients.balance:
        assert statistics.fractions is not None, "a backward pass before compute_load_fractions()"
        balance_gradient = statistics.fractions.to(p.dtype) * (
            coefficients.balance * statistics.experts / token_layers
        )
        gradient += p * (balance_gradient - (p * balance_gradient).sum(-1, keepdim=True))
    if coefficients.z:
        gradient += logits.logsumexp(-1, keepdim=True) * p * (2 * coefficients.z / token_layers)
    return gradient


def make_router_statistics(
    model: nn.Module, world: World, tokens: int, coefficients: RouterCoefficients | None
) -> RouterStatistics | None:
    """Make the statistics of a model's routers for a step of so many tokens; None without known losses of routers.

    ModelError for coefficients of losses that are not known.
    """
    # The sizes are those of the routers of all pipeline stages.
    routers: tuple[int, ...] = getattr(model, "routers", None) or router_sizes(model)
    config = getattr(model, "config", None)
    coefficients = coefficients or RouterCoefficients()
    if not routers or not hasattr(config, "router_aux_loss_coef"):
        if coefficients.any:
            raise ModelError(
                f"{architecture_name(model)} has no routers whose losses are known; set the balance "
                "and z losses (train.router_aux_loss_coef, train.router_z_loss_coef) to 0; transformers defines such "
                "losses "
                "where a configuration has router_aux_loss_coef"
            )
        return None
    # transformers takes the coefficient from the configuration in the same way.
    if coefficients.balance is None:
        balance = float(config.router_aux_loss_coef) if getattr(config, "output_router_logits", False) else 0.0  # pyright: ignore
        coefficients = RouterCoefficients(balance, coefficients.z)
    # Every other router has as many experts: their sums are added.
    experts = routers[0]
    return RouterStatistics(coefficients, world, tokens=tokens, layers=len(routers), experts=experts)
