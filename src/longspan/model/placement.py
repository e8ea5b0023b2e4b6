"""How a model's layers are brought under a home: split over tp, recomputed, sharded over slots, on this rank's device.

The same for a whole model and for the stages of a pipeline. Options are checked on the whole model, on every rank,
before the first layer is changed. Blocks that layers share (Zamba 2) are gathered by FSDP2 together.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from longspan.comm import World
from longspan.model.activations.host_offload import HostOffload
from longspan.model.activations.recompute import Recomputation
from longspan.model.experts.expert_parallel import check_experts, shard_experts
from longspan.model.layers import decoder_layers, other_towers
from longspan.model.mtp.depths import model_depths
from longspan.model.seams.refusals import refuse_shared_layers
from longspan.model.sharding import Sharding, shard_over_slots
from longspan.model.tensor_parallel.tensor_parallel import refuse_tensor_parallel, split_over_ranks
from longspan.model.tiled_layers import check_tiles, tile_layers
from longspan.model.weights.fill import is_empty


def shared_blocks(layers: Mapping[str, nn.Module]) -> list[list[nn.Module]]:
    """List the modules of different layers that hold the same parameters: one list for each shared block.

    A block is the outermost module all of whose parameters are used by the same layers. It is listed if each of these
    layers has a module object of its own for it; one object that several layers hold is left out.
    """
    users: dict[int, set[str]] = {}  # names of the layers that have a parameter, by its id
    for name, layer in layers.items():
        for parameter in layer.parameters():
            users.setdefault(id(parameter), set()).add(name)
    groups: dict[tuple[int, ...], dict[int, nn.Module]] = {}
    for layer in layers.values():
        for module in _shared_modules(layer, users):
            groups.setdefault(_parameter_ids(module), {})[id(module)] = module
    return [list(group.values()) for key, group in groups.items() if len(group) == len(users[key[0]])]


def _shared_modules(module: nn.Module, users: Mapping[int, set[str]]) -> list[nn.Module]:
    """Return the outermost modules inside this one all of whose parameters are used by the same layers, two or more.

    `users` are the names of the layers that have a parameter, by its id. Lists and dictionaries of modules are never
    called themselves, so their children are returned.
    """
    modules: list[nn.Module] = []
    for child in module.children():
        layers = {frozenset(users[parameter]) for parameter in _parameter_ids(child)}
        runs = not isinstance(child, (nn.ModuleList, nn.ModuleDict))
        if runs and len(layers) == 1 and len(next(iter(layers))) > 1:
            modules.append(child)
        else:
            modules += _shared_modules(child, users)
    return modules


def _parameter_ids(module: nn.Module) -> tuple[int, ...]:
    """Return the identities of a module's parameters, by which modules that share them all are grouped."""
    return tuple(id(parameter) for parameter in module.parameters())


@dataclass(frozen=True)
class Placement:
    """What becomes of every layer under the world's home; `mlp_tile_rows` 0: MLPs run on all rows at once."""

    world: World
    sharding: Sharding
    recomputation: Recomputation
    sequence_parallel: bool
    mlp_tile_rows: int = 0

    def check_placement(self, model: PreTrainedModel, stages: int) -> None:
        """Raise ModelError if a model, still whole, cannot be placed so after it is cut into this number of stages."""
        self.sharding.check_compute_dtype(model.dtype)
        if self.sharding.parameters or self.sequence_parallel:
            layers = decoder_layers(model)
            refuse_shared_layers(model, layers, shared_blocks(layers))
        refuse_tensor_parallel(model, self.world, sequence_parallel=self.sequence_parallel)
        check_experts(model, self.world.home, shard_parameters=self.sharding.parameters)
        self.recomputation.check_measures(model, stages)
        check_tiles(model, self.mlp_tile_rows)

    def dtype_of(self, model: PreTrainedModel) -> torch.dtype:
        """Return the dtype that the model computes in."""
        return self.sharding.compute_dtype or model.dtype

    def reduce_dtype_of(self, model: PreTrainedModel) -> torch.dtype:
        """Return the dtype in which gradients are summed over the slots."""
        return self.sharding.precision(model).reduce_dtype or self.dtype_of(model)

    def place_layers(
        self, model: PreTrainedModel, root: nn.Module, offload: HostOffload | None, *, has_experts: bool
    ) -> None:
        """Bring the layers that are here under the home; all ranks call it together.

        `root` is what will be called: the model, or a stage around it. `offload` is one for all stages of a rank.
        `has_experts` is of the whole model: a stage without experts still makes their mesh with the other ranks.
        Layers are split first, since tiles and recomputation then run on a rank's parts; FSDP2 comes last, blocks
        before the layers around them, as a layer is given what no block inside it has taken.
        """
        world, splits_rows, has_copies = self.world, self.sequence_parallel, not self.sharding.parameters
        if world.home.tp > 1:
            split_over_ranks(model, world, sequence_parallel=splits_rows, sum_expert_gradients=has_copies)
        tile_layers(model, self.mlp_tile_rows)
        self.recomputation.apply_measures(model, offload)
        if has_copies:
            if not is_empty(root):  # a model without memory is filled on its device later
                nn.Module.to(root, world.device)
        else:
            if has_experts:
                shard_experts(model, world, self.sharding.precision(model), reshard=self.sharding.reshard_after_forward)
            layers = decoder_layers(model)
            blocks = (*shared_blocks(layers), *layers.values(), *other_towers(model), *model_depths(model))
            shard_over_slots(blocks, world, self.sharding, root=root)

    @property
    def row_multiple(self) -> int:
        """What a slot's rows must be a multiple of."""
        return self.world.home.tp if self.sequence_parallel else 1
