"""Mixture-of-experts layers of Hugging Face models, through transformers' ExpertsInterface under the name "longspan".

With `home.ep` > 1 rows travel to expert e on member e // (experts / ep) and back: one gather of counts and two all-to-
alls forward, two backward, in every layer and micro-batch, behind attention's communication: one order on every rank,
against circles of waiting. Padding rows get zeros. Capacities, and experts outside the interface, are not covered.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from longspan.comm import SequenceShard
from longspan.comm.autograd import break_graphs_around
from longspan.comm.channel import Channel
from longspan.comm.routed_rows import exchange_counts, send_routed_rows
from longspan.comm.world import world_of
from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.model.activations.tiles import TILE_ROWS, count_tiles, run_in_tiles
from longspan.model.adapted_modules import is_expert_adapter, peft_modules
from longspan.model.experts.expert_products import (
    EXPERT_ADAPTERS,
    LOCAL_EXPERTS,
    ExpertLoads,
    find_gate_formulas,
    run_experts,
)
from longspan.model.experts.visits import Visits, spread_rows, sum_visits
from longspan.model.feature import Feature
from longspan.model.kinds import choosing_routers, expert_modules
from longspan.model.seams.running_layer import running_layer
from longspan.model.seams.trial_shards import Probe
from longspan.model.sharding import shard_module
from longspan.model.weights.empty_model import copy_to_device
from longspan.plan.shape.model_shape import experts_missing_text, read_experts

IMPLEMENTATION = "longspan"


def connect_experts(model: PreTrainedModel) -> None:
    """Send the model's experts and routers through this module."""
    model.set_experts_implementation(IMPLEMENTATION)
    for module in peft_modules(model).values():
        if is_expert_adapter(module):
            wrapper: Any = module
            vars(wrapper.get_base_layer()).setdefault(EXPERT_ADAPTERS, {})[wrapper.parameter_name] = wrapper
            wrapper._activate_lora = nullcontext  # peft would add to the sharded parameter; `run_experts` does
    find_gate_formulas(expert_modules(model).values())
    for router in choosing_routers(model).values():
        router.register_forward_hook(_record_routing)
    if hasattr(model.config, "output_router_logits"):
        model.register_forward_pre_hook(_turn_off_router_losses, with_kwargs=True)


def _turn_off_router_losses(model: nn.Module, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """transformers' loss of routers would count only local rows, padding included."""
    if kwargs.get("output_router_logits"):
        raise ModelError(
            f"{type(model).__name__} got output_router_logits=: a loss of the local rows would depend on the plan; "
            "longspan.run_step reports those of the step"
        )
    return args, {**kwargs, "output_router_logits": False}


@break_graphs_around
def _record_routing(
    router: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, ...]
) -> tuple[Tensor, ...] | None:
    """A forward hook: it returns the output in the router's order, or None outside a step with statistics."""
    layer = running_layer()
    if layer.router is None or isinstance(layer.shard, Probe):
        return None
    experts_first = not output[0].is_floating_point()  # Granite's in transformers 5.17 name the experts first
    logits, weights, chosen_experts = reversed(output) if experts_first else output
    rows, counts = layer.shard.find_real_rows(), layer.shard.row_counts
    weights = layer.router.record_routing(router, logits, weights, chosen_experts, rows, counts)
    if experts_first:
        return (chosen_experts, weights, logits)
    return (logits, weights, chosen_experts)


@break_graphs_around
def experts_forward(experts: nn.Module, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Compute transformers' experts function: rows (T, D), their experts and weights (T, k) to sums (T, D).

    All members of an ep group enter. Padding rows become zeros. ModelError outside a layer with a shard, and for
    another number of rows than the shard's, or a tensor-parallel rank's part of them.
    """
    shard = running_layer().shard
    if shard is None:
        raise ModelError(
            f"{type(experts).__name__} got no shard, so it cannot know its rows; call model(..., shard=shard)"
        )
    if isinstance(shard, Probe):
        return torch.empty_like(hidden_states)
    world = world_of(shard.world_key)
    local = shard.local_rows
    tp = world.home.tp
    count = len(hidden_states)
    # `rows` are the real ones among those of this call, without padding
    if tp > 1 and count == -(-local // tp):  # a tensor-parallel rank's part of the rows
        start = world.coordinates.tp * count
        rows = shard.find_real_rows(start, start + count)
    elif count == local:
        rows = shard.find_real_rows()
    else:
        raise ModelError(
            f"{type(experts).__name__} got {count} rows; the shard holds {local}, each of tp {tp} ranks works on "
            f"all of them or {-(-local // tp)}"
        )
    # The slot is the first of this slot's ep group.
    first_slot = world.slot // world.home.ep * world.home.ep
    channel = (
        world.channels.find_channel(range(first_slot, first_slot + world.home.ep)) if world.home.ep > 1 else None
    )
    if len(rows) == count:
        return _mix_experts_in_tiles(experts, hidden_states, chosen, weights, shard, channel)
    x, real_chosen, real_weights = (tensor.index_select(0, rows) for tensor in (hidden_states, chosen, weights))
    mixed = _mix_experts_in_tiles(experts, x, real_chosen, real_weights, shard, channel)
    return _PlaceRows.apply(mixed, rows, count)  # pyright: ignore[reportReturnType]


class _PlaceRows(torch.autograd.Function):
    """Puts rows back to their places among `count`, of which the others are zeros.

    It must save no tensor for backward: where layers are recomputed, slots with padding, and these alone, would run the
    experts' collectives once more to have it, and wait.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, count: int) -> Tensor:
        ctx.rows = rows
        return x.new_zeros((count, *x.shape[1:])).index_copy_(0, rows, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradients[0].index_select(0, ctx.rows), None, None


def _mix_experts_in_tiles(
    experts: nn.Module, x: Tensor, chosen: Tensor, weights: Tensor, shard: SequenceShard, channel: Channel | None
) -> Tensor:
    """With a channel, tiles are counted for the most rows of any slot, so that every member makes as many exchanges."""
    tile_rows = int(getattr(experts, TILE_ROWS, 0))
    rows = len(x) if channel is None else shard.micro_batch.most_rows
    count = count_tiles(rows, tile_rows)
    if count == 1:
        return mix_experts(experts, x, chosen, weights, channel)

    def run(x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        return mix_experts(experts, x, chosen, weights, channel)

    return run_in_tiles(run, (x, weights, chosen), experts, count)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)


def mix_experts(
    experts: nn.Module, x: Tensor, chosen: Tensor, weights: Tensor, channel: Channel | None = None
) -> Tensor:
    """Compute the weighted sums (R, D) of the experts' outputs for each row of x (R, D), by `chosen`, `weights` (R, k).

    With a channel experts are dealt out over its members, which all enter; without one they are all here.
    """
    count = int(experts.num_experts)  # pyright: ignore[reportArgumentType]
    top_k = chosen.shape[1]  # pyright: ignore[reportArgumentType]
    sorted_experts, order = chosen.flatten().sort(stable=True)  # (R k,)
    bounds = torch.searchsorted(sorted_experts, torch.arange(count + 1, device=x.device))
    loads = bounds.diff()  # (E,): rows for each expert, without waiting for the device
    visits = Visits.from_order(order, top_k)
    if channel is None:
        mixed = run_experts(experts, x, ExpertLoads(loads), visits, weights)
    else:
        outputs = _run_experts_on_members(experts, spread_rows(x, visits), loads, channel)  # (R k, D)
        mixed = sum_visits(outputs, weights, visits)
    return mixed.to(x.dtype)


def _run_experts_on_members(experts: nn.Module, x: Tensor, loads: Tensor, channel: Channel) -> Tensor:
    """Rows (S, D) are sorted by expert; `loads` (E,) counts this member's. All members of the channel enter it."""
    counts = np.asarray(exchange_counts(loads, channel)).reshape(channel.degree, channel.degree, -1)
    # The counts are (sender, receiver, receiver's experts).
    sends = counts[channel.index].sum(1).tolist()
    counts_here = counts[:, channel.index]  # (sender, local experts)
    receives = counts_here.sum(1).tolist()
    arrived = send_routed_rows(x, sends, receives, channel)
    # Rows arrive by sender, and by expert within one sender: the order that sorts them by expert.
    starts = (counts_here.cumsum() - counts_here.ravel()).reshape(counts_here.shape)
    runs = [np.arange(start, start + n) for start, n in zip(starts.T.ravel(), counts_here.T.ravel(), strict=True)]
    order = np.concatenate([np.zeros(0, dtype=np.int64), *runs])
    visits = Visits.from_order(torch.from_numpy(order).to(x.device), 1)
    rows_of_experts = counts_here.sum(0)
    local_loads = ExpertLoads(torch.from_numpy(rows_of_experts).to(x.device), rows_of_experts.tolist())
    return send_routed_rows(run_experts(experts, arrived, local_loads, visits), receives, sends, channel)


# ---- parameters where `ep` or `tp` is above 1

# An experts' parameter (E, …) becomes a DTensor Shard(0) on the ep mesh, and FSDP2 shards each of its parts over the
# ranks that hold the same experts, tensor-parallel ones too, so that checkpoints, norms and saved models see one whole
# tensor. A rank's gradient comes from the rows (tokens) that its ep group sends it, and FSDP2 adds the gradients of the
# other groups: the plain sum over all slots, as for other parameters.


def _choose_shard_dim(name: str, shape: Sequence[int], home: Layout) -> int:
    # So many ranks hold the same experts.
    ranks = home.slots // home.dp_replicate // home.ep * home.tp
    sizes = (shape[0] // home.ep, *shape[1:])
    for dim, size in enumerate(sizes):
        if size % ranks == 0:
            return dim
    raise ModelError(
        f"{name} {tuple(shape)} dealt over ep {home.ep} leaves {sizes}; the {ranks} ranks that hold the same experts "
        "divide none of these; use another ep or number of slots"
    )


class ExpertFeature(Feature):
    """Experts and routers through this module, and experts dealt out over `ep`."""

    def refuse(self, model: PreTrainedModel) -> None:
        """Raise ModelError where `ep` does not divide the experts, or FSDP2 cannot divide what `ep` leaves of a
        parameter.
        """
        home = self.world.home
        modules = expert_modules(model)
        if home.ep > 1 and not modules:
            raise ModelError(experts_missing_text(home.ep, type(model).__name__, read_experts(model.config)))
        if home.ep > 1 and not self.options.shard_parameters:
            raise ModelError(
                f"the home has ep {home.ep}, which needs sharded parameters; use shard_parameters=True or ep 1"
            )
        for name, experts in modules.items():
            count = int(experts.num_experts)  # pyright: ignore[reportArgumentType]
            if count % home.ep:
                fitting = [str(d) for d in range(1, count + 1) if count % d == 0 and home.slots % d == 0]
                raise ModelError(
                    f"ep {home.ep} does not divide the {count} experts of {name}; over {home.slots} slots use ep "
                    f"{' or '.join(fitting)}"
                )
            if self.options.shard_parameters and home.ep * home.tp > 1:
                for key, parameter in experts.named_parameters(recurse=False):
                    _choose_shard_dim(f"{name}.{key}", parameter.shape, home)  # raises if no dim divides

    def connect(self, model: PreTrainedModel) -> None:
        connect_experts(model)

    def place(self, model: PreTrainedModel, root: nn.Module) -> None:
        """Deal experts over `ep` and shard them, before the layers around them; all ranks enter, and make meshes.

        Nothing is done where parameters are not sharded, nor where ep and tp are 1: experts are sharded with their
        layers then.
        """
        world = self.world
        home = world.home
        sharding = self.options.sharding(world)
        if not sharding.shard_parameters or home.ep == home.tp == 1:
            return
        policy = sharding.mixed_precision_policy(model)
        mesh = world.meshes.expert
        # inputs are not cast, so that routing weights keep their dtype
        policy = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, cast_forward_inputs=False)
        for experts in expert_modules(model).values():
            count = int(experts.num_experts) // home.ep  # pyright: ignore[reportArgumentType]
            # The member is this rank's number in its ep group.
            member = world.slot % home.ep
            vars(experts)[LOCAL_EXPERTS] = slice(member * count, (member + 1) * count)
            if home.ep > 1:
                for name, parameter in list(experts.named_parameters(recurse=False)):
                    part = parameter.detach().chunk(home.ep)[member]
                    split = DTensor.from_local(
                        copy_to_device(part, world.device), world.meshes.ep, [Shard(0)], run_check=False
                    )
                    experts.register_parameter(name, nn.Parameter(split, requires_grad=parameter.requires_grad))
            shard_module(
                experts,
                mesh,
                sharding,
                policy,
                # No name for messages is needed, as `refuse` has raised them.
                shard_placement_fn=lambda parameter: Shard(_choose_shard_dim("", parameter.shape, home)),
            )
