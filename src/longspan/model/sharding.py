"""A model's parameters over the slots: sharded by FSDP2, layer by layer, or a copy on every rank.

Either way a gradient is the plain sum over slots: the loss is divided by the plan's targets before backward, so nothing
here divides. Behind it stands what the passes of a step gather, free and sum, by FSDP2's public methods.
"""

import dis
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._utils import _take_tensors
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from longspan.comm import World
from longspan.comm.channel import widen_half_precision
from longspan.errors import ModelError
from longspan.model.feature import Call, Feature
from longspan.model.fsdp_params import (
    SumsInComputeMemory,
    drop_partial_sums,
    fsdp_modules,
    gather_while_used,
    has_partial_sums,
    leave_out_copies_of_one_rank,
    leave_out_idle_hooks,
    sum_on_computing_stream,
    sums_become_gradients,
)
from longspan.model.layers import decoder_layers, is_tied, mtp_depths, towers_beside_text_model
from longspan.model.options import Sharding
from longspan.model.weights.empty_model import has_meta_parameters
from longspan.model.weights.gradients import set_earlier_gradients_aside
from longspan.model.weights.local_tensors import local_tensor
from longspan.plan.messages import SUMMED_NUMBERS

# Whether a module frees its gathered parameters after forward.
_RESHARDS: WeakKeyDictionary[FSDPModule, bool] = WeakKeyDictionary()
# A module was sharded here with these settings; one that was sharded elsewhere has the defaults.
_SHARDINGS: "WeakKeyDictionary[FSDPModule, Sharding]" = WeakKeyDictionary()


def shard_module(
    module: nn.Module | list[nn.Module],
    mesh: DeviceMesh,
    sharding: Sharding,
    policy: MixedPrecisionPolicy,
    **arguments: Any,
) -> None:
    """Shard a module's parameters over a mesh by FSDP2, which frees gathered ones as `sharding` says; `arguments` are
    others of `fully_shard`. All ranks of the mesh call it together.
    """
    fully_shard(
        module, mesh=mesh, reshard_after_forward=sharding.reshard_after_forward, mp_policy=policy, **arguments
    )


def shard_over_slots(
    blocks: Iterable[nn.Module | list[nn.Module]],
    world: World,
    sharding: Sharding,
    *,
    root: nn.Module,
    cast_block_inputs: bool = True,
) -> None:
    """Shard each block, then what remains of the root, over all slots; all ranks call it together.

    Several modules in a block are gathered as one: they may share parameters. `root` is what will be called; every
    tensor that it gets is cast to the compute dtype, and with `cast_block_inputs` those of blocks.
    """
    blocks = [*blocks]
    _refuse_mixed_dtypes(blocks, root)
    policy = sharding.mixed_precision_policy(root)
    frees = sharding.reshard_after_forward
    block_policy = replace(policy, cast_forward_inputs=cast_block_inputs)
    for block in blocks:
        shard_module(block, world.meshes.fsdp, sharding, block_policy)
    fully_shard(root, mesh=world.meshes.fsdp, mp_policy=policy)
    for module in fsdp_modules(root):
        # gloo has no premultiplied sum, which a divide factor would need
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
        # FSDP2 itself treats a root so.
        _RESHARDS[module] = frees and module is not root
        _SHARDINGS[module] = sharding
        # Memory of GPUs belongs to streams.
        if world.device.type == "cuda" and sums_become_gradients(module, policy):
            module.set_custom_reduce_scatter(SumsInComputeMemory())
    leave_out_copies_of_one_rank(root)
    if world.meshes.fsdp.size() == 1 and world.device.type == "cuda":
        sum_on_computing_stream(root)


def _refuse_mixed_dtypes(blocks: Sequence[nn.Module | list[nn.Module]], root: nn.Module) -> None:
    """FSDP2 would fail in a step. A function, so that nothing holds whole parameters while they are sharded."""
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    sharded_ids = {
        id(x) for module in root.modules() if isinstance(module, FSDPModule) for x in module.parameters()
    }
    for block in (*blocks, root):
        block_parameters = [
            x for module in (block if isinstance(block, list) else [block]) for x in module.parameters()
        ]
        trained = [x for x in block_parameters if x.requires_grad and id(x) not in sharded_ids]
        sharded_ids |= {*map(id, block_parameters)}
        for other in trained[1:]:
            if other.dtype != trained[0].dtype:
                raise ModelError(
                    f"{names[id(trained[0])]} is {trained[0].dtype}, {names[id(other)]} {other.dtype}, and "
                    "FSDP2 gathers parameters of one type as one; load the model in float32, with "
                    "compute_dtype=torch.bfloat16 for its arithmetic"
                )


def reshards_after_forward(module: FSDPModule) -> bool | None:
    """Return whether a module frees its gathered parameters after forward; None if it was not sharded here."""
    return _RESHARDS.get(module)


@contextmanager
def sum_gradients_over_slots(model: nn.Module, world: World) -> Iterator[None]:
    """Sum over the slots, at the end, what backward passes inside add to `.grad`; FSDP2 sums by itself."""
    if fsdp_modules(model) or world.home.slots == 1:
        yield
        return
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with set_earlier_gradients_aside(parameters):
        yield
        counts = world.control.sum_over_slots([float(p.grad is not None) for p in parameters], "count of gradients")
        for parameter, count in zip(parameters, counts, strict=True):
            # All slots sum the same gradients.
            if parameter.grad is None and count > 0:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None]
        number_bytes = max((gradient.element_size() for gradient in gradients), default=1)
        for bucket in _take_tensors(gradients, SUMMED_NUMBERS * number_bytes):
            _sum_as_one_buffer(bucket, world)


def _sum_as_one_buffer(gradients: Sequence[Tensor], world: World) -> None:
    """Half precision is summed in float32. A function, so that a buffer is freed before the next one is made."""
    channel = world.channels.find_channel(tuple(range(world.home.slots)))
    flat = widen_half_precision(torch.cat([gradient.flatten() for gradient in gradients]))
    counts = [len(part) for part in flat.tensor_split(channel.degree)]
    part = channel.reduce_scatter(flat, counts, "sum of gradients").wait()
    # the sums; what was summed is freed by this
    flat = torch.cat(channel.all_gather(part, counts, "sum of gradients").wait())
    for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))


# ---- the layers of a model


def shared_blocks(layers: Mapping[str, nn.Module]) -> list[list[nn.Module]]:
    """List the modules of different layers that hold the same parameters: one list for each shared block.

    A block is the outermost module all of whose parameters are used by the same layers. Each of these layers has a
    module object of its own for it.
    """
    users: dict[int, set[str]] = {}  # names of the layers that have a parameter, by its id
    for name, layer in layers.items():
        for parameter in layer.parameters():
            users.setdefault(id(parameter), set()).add(name)
    # The key of a block is its parameters.
    blocks: dict[tuple[int, ...], dict[nn.Module, None]] = {}
    for layer in layers.values():
        passed_over = {layer}
        for module in layer.modules():
            parameters = tuple(map(id, module.parameters()))
            sharers = {name for parameter in parameters for name in users[parameter]}
            shared_alike = len(sharers) > 1 and all(users[parameter] == sharers for parameter in parameters)
            # lists and dictionaries of modules are never called themselves
            runs = not isinstance(module, nn.ModuleList | nn.ModuleDict)
            if shared_alike and runs and module not in passed_over:
                blocks.setdefault(parameters, {})[module] = None
                passed_over.update(module.modules())
    # Fewer objects than layers: layers share the object itself, which is no block.
    return [[*modules] for parameters, modules in blocks.items() if len(modules) == len(users[parameters[0]])]


def embedding_and_head(model: PreTrainedModel) -> list[list[nn.Module]]:
    """List embedding and head where each is whole only while it runs: as one block if they are tied.

    What is left out stays whole with the root: an embedding that is trained, with a head that is tied to it, and a
    module whose parameters are used outside of its calls.
    """
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    if any(parameter.requires_grad for parameter in embedding.parameters()):
        ends = [] if is_tied(model) else [[head]]
    else:
        ends = [[embedding, head]] if is_tied(model) else [[embedding], [head]]
    names = {module: name.rpartition(".")[2] for name, module in model.named_modules()}
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))

    def used_by_calls_alone(modules: Sequence[nn.Module]) -> bool:
        inside = Counter(id(p) for module in modules for _, p in module.named_parameters(remove_duplicate=False))
        shared = any(uses[parameter] > count for parameter, count in inside.items())
        return not shared and not any(_weight_is_read(model, names[module]) for module in modules)

    return [modules for modules in ends if used_by_calls_alone(modules)]


def _weight_is_read(model: nn.Module, name: str) -> bool:
    """Return whether a model in here reads values of `<name>.weight` in code of its class, as Gemma 4 does."""
    classes = {
        kind for module in model.modules() if isinstance(module, PreTrainedModel) for kind in type(module).__mro__
    }
    members = [inspect.unwrap(member) for kind in classes for member in vars(kind).values() if callable(member)]
    functions = [x for x in members if isinstance(x, FunctionType) and {name, "weight"} <= {*x.__code__.co_names}]
    for function in functions:
        # The type and the device of a shard are those of the whole weight.
        attributes = [x.argval for x in dis.get_instructions(function) if x.opname == "LOAD_ATTR"]
        for *pair, following in zip(attributes, attributes[1:], [*attributes[2:], None], strict=False):
            if pair == [name, "weight"] and following not in ("dtype", "device"):
                return True
    return False


class ShardingFeature(Feature):
    """Parameters over the slots, or a copy on every rank: always on, behind whatever else places layers."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._sharding = self.options.sharding(self.world)

    def refuse(self, model: PreTrainedModel) -> None:
        """Raise ModelError for a wider compute dtype, and for a layer that shares parameters with what is around it."""
        self._sharding.check_compute_dtype(model.dtype)
        if not self._sharding.shard_parameters and not self.options.sequence_parallel:
            return
        # FSDP2 and sequence parallelism take each layer's parameters as its own; layers may share those of blocks.
        layers = decoder_layers(model)
        shared_in_blocks = {
            id(parameter) for modules in shared_blocks(layers) for parameter in modules[0].parameters()
        }
        # The key is a parameter's id, the value its first name, and its layer ("": around the layers).
        owner: dict[int, tuple[str, str]] = {}
        prefixes = [f"{layer}." for layer in layers]
        for name, parameter in model.named_parameters(remove_duplicate=False):
            layer = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
            first, owner_layer = owner.setdefault(id(parameter), (name, layer))
            # parameters of a block may be in two layers, but not in a layer and around the layers
            may_share = "" not in (layer, owner_layer) and id(parameter) in shared_in_blocks
            if owner_layer != layer and not may_share:
                raise ModelError(
                    f"{type(model).__name__}: {name} is {first}, and layers that share parameters are not sharded or "
                    "split over rows; use shard_parameters=False and sequence_parallel=False, or give each layer its "
                    "own"
                )

    def place(self, model: PreTrainedModel, root: nn.Module) -> None:
        """Shard shared blocks, layers, towers and depths, then what is left; or move a copy to the device."""
        if self._sharding.shard_parameters:
            layers = decoder_layers(model)
            ends = embedding_and_head(model) if self._sharding.reshard_after_forward else []
            blocks = (
                *shared_blocks(layers),
                *layers.values(),
                *towers_beside_text_model(model),
                *mtp_depths(model),
                *ends,
            )
            shard_over_slots(blocks, self.world, self._sharding, root=root)
            for modules in ends:
                gather_while_used(modules, model.get_input_embeddings())
        elif not has_meta_parameters(root):  # a model without memory is filled on its device later
            nn.Module.to(root, self.world.device)


# ---- passes of a step


@contextmanager
def keep_parameters_whole(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Keep parameters whole inside, and gradients whole and not summed: no slot waits for another; all ranks enter.

    The first backward pass after the context, which all slots must run, sums these gradients over the slots. The
    yielded function does nothing: it takes the place of that of `defer_until_last_pass`.
    """
    modules = fsdp_modules(model)
    for module in modules:
        _set_keep_gathered(module, True, reshard_after_forward=False)
        module.unshard()
    try:
        with leave_out_idle_hooks(model, trains=True):
            yield lambda: None
    finally:
        # Each module gets back what `shard_over_slots` had set.
        for module in modules:
            _set_keep_gathered(module, False, reshard_after_forward=bool(reshards_after_forward(module)))


def _set_keep_gathered(module: FSDPModule, keep: bool, *, reshard_after_forward: bool) -> None:
    module.set_requires_gradient_sync(not keep, recurse=False)
    module.set_reshard_after_backward(not keep, recurse=False)
    module.set_reshard_after_forward(reshard_after_forward, recurse=False)


@contextmanager
def defer_until_last_pass(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Run the passes of a step inside, and call the yielded function before the last one runs forward.

    Until then gathered parameters and unsummed gradients are kept as `Sharding` says, and sums are over the slots of
    each replica only. The last pass has FSDP2's hooks, frees parameters and sums everything. After an error, sums that
    lack other replicas are dropped.
    """
    modules = fsdp_modules(model)

    def set_last(last: bool = True) -> None:
        """Say whether the next pass is the step's last: then everything is summed and freed again."""
        for module in modules:
            sharding = _SHARDINGS.get(module, Sharding())
            module.set_requires_all_reduce(last, recurse=False)
            if not sharding.reshard_after_forward:
                module.set_reshard_after_backward(last, recurse=False)
            if not sharding.sync_each_batch:
                module.set_requires_gradient_sync(last, recurse=False)

    set_last(False)
    try:
        with leave_out_idle_hooks(model, trains=True):
            yield set_last
        assert not has_partial_sums(modules), "the last backward pass was not announced"
    finally:
        set_last()
        drop_partial_sums(modules)


def keeps_parameters_gathered(model: nn.Module) -> bool:
    """Return whether all passes of a step in lockstep find its parameters whole."""
    return not any(_SHARDINGS.get(x, Sharding()).reshard_after_forward for x in fsdp_modules(model))
