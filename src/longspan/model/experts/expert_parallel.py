"""Experts' parameters where `ep` or `tp` is above 1: split over neighbouring slots, and sharded over ranks by FSDP2.

An experts' parameter (E, …) becomes a DTensor Shard(0) on the ep mesh, and FSDP2 shards each of its parts over the
ranks that hold the same experts, tensor-parallel ones too, so that checkpoints, norms and saved models see one whole
tensor. A rank's gradient comes from the rows (tokens) that its ep group sends it, and FSDP2 adds the gradients of the
other groups: the plain sum over all slots, as for other parameters. Which rows go where is in `moe.py`.
"""

from collections.abc import Sequence

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from longspan.comm import World
from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.model.experts.moe import expert_modules
from longspan.model.weights.fill import copy_to_device
from longspan.plan.shape.model_shape import no_experts_text


def check_experts(model: PreTrainedModel, home: Layout, *, shard_parameters: bool) -> None:
    """Raise ModelError, before the first collective, where the model does not allow the layout's `ep`.

    `ep` needs sharded parameters and a number of experts that it divides; some dim of each experts' parameter must
    then divide over the ranks that hold the same experts.
    """
    modules = expert_modules(model)
    if home.ep > 1 and not modules:
        raise ModelError(no_experts_text(home.ep, type(model).__name__))
    if home.ep > 1 and not shard_parameters:
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
        if shard_parameters and home.ep * home.tp > 1:
            for key, parameter in experts.named_parameters(recurse=False):
                _shard_dim(f"{name}.{key}", parameter.shape, home)  # raises if no dim divides


def shard_experts(model: PreTrainedModel, world: World, policy: MixedPrecisionPolicy, *, reshard: bool) -> None:
    """Split and shard the experts of every layer, before the layers are sharded; all ranks call it together.

    Ranks of pipeline stages without experts call it too, as all ranks make the meshes together. With ep and tp 1 there
    is nothing to do: experts are sharded with their layer.
    """
    home = world.home
    if home.ep == home.tp == 1:
        return
    mesh = world.meshes.expert
    # inputs are not cast, so that routing weights keep their dtype
    policy = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, cast_forward_inputs=False)
    for experts in expert_modules(model).values():
        if home.ep > 1:
            _keep_local_experts(experts, world)
        fully_shard(
            experts,
            mesh=mesh,
            reshard_after_forward=reshard,
            mp_policy=policy,
            # without a name for messages, as `check_experts` has raised them
            shard_placement_fn=lambda parameter: Shard(_shard_dim("", parameter.shape, home)),
        )


def _keep_local_experts(experts: nn.Module, world: World) -> None:
    """Keep this rank's part of each parameter (E, …), a DTensor of the whole; `ep` slots hold E / ep experts each."""
    rank, ep = world.slot % world.home.ep, world.home.ep
    for name, parameter in list(experts.named_parameters(recurse=False)):
        local = copy_to_device(parameter.detach().chunk(ep)[rank], world.device)
        split_parameter = DTensor.from_local(local, world.meshes.ep, [Shard(0)], run_check=False)
        experts.register_parameter(name, nn.Parameter(split_parameter, requires_grad=parameter.requires_grad))


def _shard_dim(name: str, shape: Sequence[int], home: Layout) -> int:
    """Return which dim of an experts' parameter (E, …), cut by `ep`, FSDP2 shards: the first that divides evenly.

    Raises ModelError if none does.
    """
    ranks = home.slots // home.dp_replicate // home.ep * home.tp  # that hold the same experts
    sizes = (shape[0] // home.ep, *shape[1:])
    for dim, size in enumerate(sizes):
        if size % ranks == 0:
            return dim
    raise ModelError(
        f"{name} {tuple(shape)} dealt over ep {home.ep} leaves {sizes}; the {ranks} ranks that hold the same experts "
        "divide none of these; use another ep or number of slots"
    )
