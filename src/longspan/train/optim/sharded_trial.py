"""A trial of an optimizer's class on small sharded parameters, before step 1: updates are to be those of whole ones."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from longspan.comm import World
from longspan.errors import ConfigError
from longspan.model.weights.local_tensors import local_block, local_tensor
from longspan.train.optim.optimizer import OptimizerChoice

# updates that are tried, and their largest error as a share of the largest update
STEPS = 2
BOUND = 1e-4


def check_sharded_update(choice: OptimizerChoice, model: nn.Module, world: World) -> None:
    """Raise ConfigError, on every rank, where the optimizer updates sharded parameters otherwise than whole ones.

    It is tried on small parameters, sharded as the model's; the model is not changed. Entered by all ranks.
    """
    pairs = list(_make_whole_and_sharded(model, world.device))
    refusal = ""  # the error of an optimizer that cannot be made
    reason = ""  # how its updates of sharded parameters are wrong, or the error that they raise
    try:
        reason = _update_and_compare(choice, pairs) if pairs else ""
    except ConfigError as error:
        refusal = str(error)
    except Exception as error:  # an optimizer of any package may raise anything
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else error!r}"
    reports = world.control.gather_objects((refusal, reason), "optimizer on sharded parameters")
    for rank, (rank_refusal, rank_reason) in zip(world.home.ranks, reports, strict=True):
        if rank_refusal:
            raise ConfigError(rank_refusal)
        if rank_reason:
            raise ConfigError(
                f"optimizer.class {choice.name!r} does not work on sharded parameters (DTensor), as a trial on small "
                f"ones showed on rank {rank}: {rank_reason}; use adamw, sgd, or another class, or try "
                'optimizer.arguments = ["foreach=false"] where it has that'
            )


def _make_whole_and_sharded(model: nn.Module, device: torch.device) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Sharded dims have 4 numbers on each rank, others 4 in all. All ranks draw the same numbers."""
    kinds = dict[Any, nn.Parameter]()  # the first parameter of each way
    for parameter in model.parameters():
        if parameter.requires_grad and isinstance(parameter, DTensor):
            kinds.setdefault((parameter.device_mesh, parameter.placements, parameter.ndim), parameter)
    for parameter in kinds.values():
        assert isinstance(parameter, DTensor)
        mesh = parameter.device_mesh
        placements = parameter.placements
        shape = [4] * parameter.ndim
        for axis, placement in enumerate(placements):
            if (dim := getattr(placement, "dim", None)) is not None:
                shape[dim] *= mesh.size(axis)
        whole = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device)
        yield nn.Parameter(_shard_like(whole, parameter)), nn.Parameter(whole)


def _shard_like(whole: Tensor, like: DTensor) -> DTensor:
    mesh = like.device_mesh
    placements = like.placements
    local = whole[local_block(whole.shape, mesh, placements)].clone()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def _update_and_compare(choice: OptimizerChoice, pairs: Sequence[tuple[nn.Parameter, nn.Parameter]]) -> str:
    """Both of a pair take STEPS steps along the same gradients; states must be shards too, or plain numbers."""
    initial_values = [whole.detach().clone() for _, whole in pairs]
    optimizers = [choice.build([{"params": [pair[i] for pair in pairs]}]) for i in (0, 1)]
    for step in range(1, STEPS + 1):
        for sharded, whole in pairs:
            whole.grad = torch.randn(whole.shape, generator=torch.Generator().manual_seed(step)).to(whole)
            assert isinstance(sharded, DTensor)
            sharded.grad = _shard_like(whole.grad, sharded)
        for optimizer in optimizers:
            optimizer.step()
    for (sharded, whole), initial in zip(pairs, initial_values, strict=True):
        assert isinstance(sharded, DTensor)
        update = (whole.detach() - initial).abs().max().item()
        expected = whole.detach()[local_block(whole.shape, sharded.device_mesh, sharded.placements)]
        error = (local_tensor(sharded.detach()) - expected).abs().max().item() if expected.numel() else 0.0
        if not error <= BOUND * update:
            return f"updates of {update:.3g} differ by {error:.3g} from those of whole parameters"
        for state in tree_leaves(optimizers[0].state[sharded]):
            if isinstance(state, Tensor) and state.ndim and not isinstance(state, DTensor):
                return (
                    f"a state {tuple(state.shape)} is this rank's alone (no DTensor), which no checkpoint can hold"
                )
            if not isinstance(state, Tensor | int | float):
                return f"a state is {state!r}, which no checkpoint can hold"
    return ""
