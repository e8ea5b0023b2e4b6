"""A model's parameters over the slots: sharded by FSDP2, layer by layer, or a copy on every rank.

Either way a gradient is the plain sum over slots: the loss is divided by the plan's targets before backward, so nothing
here divides.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._utils import _take_tensors
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from transformers import PreTrainedModel

from longspan.comm import World
from longspan.comm.channel import widen_half_precision
from longspan.errors import ModelError
from longspan.model.features import Call, Feature
from longspan.model.layers import decoder_layers, mtp_depths, towers_beside_text_model
from longspan.model.options import Sharding
from longspan.model.weights.empty_model import has_meta_parameters
from longspan.model.weights.gradients import set_earlier_gradients_aside
from longspan.model.weights.local_tensors import local_tensor
from longspan.plan.messages import SUMMED_NUMBERS

_RESHARDS: WeakKeyDictionary[FSDPModule, bool] = WeakKeyDictionary()  # whether it frees parameters after forward
_SHARDINGS: "WeakKeyDictionary[FSDPModule, Sharding]" = WeakKeyDictionary()  # by which it was sharded here
_FSDP_MODULES = "listed_fsdp_modules"  # an attribute of the model: a table by model would keep models alive


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
        fully_shard(block, mesh=world.meshes.fsdp, reshard_after_forward=frees, mp_policy=block_policy)
    fully_shard(root, mesh=world.meshes.fsdp, mp_policy=policy)
    for module in fsdp_modules(root):
        # gloo has no premultiplied sum, which a divide factor would need
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
        _RESHARDS[module] = frees and module is not root  # as FSDP2 itself treats a root
        _SHARDINGS[module] = sharding
        if world.device.type != "cuda":
            continue
        if _sums_become_gradients(module, policy):
            module.set_custom_reduce_scatter(SumsInComputeMemory())
        elif world.meshes.fsdp.size() == 1:
            _sum_on_computing_stream(root)


def _sum_on_computing_stream(root: nn.Module) -> None:
    """Let FSDP2 cast sums into gradients on the stream that computes, where no message hides behind its work.

    In memory of a stream of its own all gradients would stay taken through the next forward pass.
    """
    state: Any = root._get_fsdp_state  # pyright: ignore[reportAttributeAccessIssue]
    context: Any = state()._comm_ctx
    if "lazy_init" in vars(context):
        return
    make_streams = context.lazy_init

    def make_streams_but_for_sums(device: torch.device) -> None:
        """Make FSDP2's streams, and put the computing one in place of that of its sums."""
        make_streams(device)
        context.reduce_scatter_stream = torch.cuda.current_stream(device)

    context.lazy_init = make_streams_but_for_sums


def _refuse_mixed_dtypes(blocks: Sequence[nn.Module | list[nn.Module]], root: nn.Module) -> None:
    """Raise ModelError where parameters that are trained and gathered as one differ in type: FSDP2 fails in a step."""
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


def _sums_become_gradients(module: FSDPModule, policy: MixedPrecisionPolicy) -> bool:
    """Return whether FSDP2's sums are the gradients themselves: neither cast, nor summed over replicas after it."""
    for group in reduction_groups([module]):
        trained = [
            parameter.sharded_param for parameter in group.fsdp_params if parameter.sharded_param.requires_grad
        ]
        casts = any(policy.reduce_dtype not in (None, parameter.dtype) for parameter in trained)
        if casts or group.mesh_info.mesh.ndim != 1:
            return False
    return True


class SumsInComputeMemory(DefaultReduceScatter):
    """Sums gradients of one group of parameters in memory of the stream that computes.

    In that of FSDP2's stream the activations that backward freed are not to be had: a nearly full rank would wait for
    its device and give memory back in every step. FSDP2 (torch 2.11 to 2.15) asks for a message on the computing
    stream, then for the sum on its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self._computing: torch.cuda.Stream | None = None  # between a message and its sum

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an empty tensor: for a message, on the computing stream, or then for its sum, on FSDP2's stream."""
        current = torch.cuda.current_stream(device)
        computing = self._computing
        if computing is None or current == computing:  # the same again: an error came between the two
            self._computing = current
            return super().allocate(size, dtype=dtype, device=device)
        self._computing = None
        with torch.cuda.stream(computing):
            total = super().allocate(size, dtype=dtype, device=device)
        # a sum that is added to an earlier gradient is freed before its stream is done
        total.record_stream(current)
        return total


def check_fsdp_names(what: str, instead: str, *, read: Sequence[str], called: Sequence[str]) -> None:
    """Raise ModelError where this torch lacks private names of FSDP2's parameters that a subclass of it uses."""
    missing_names = [name for name in read if name not in FSDPParam.__annotations__]
    if missing_names := [*missing_names, *(name for name in called if not hasattr(FSDPParam, name))]:
        raise ModelError(
            f"{what} the place of FSDP2's parameters, and torch {torch.__version__} has no {', '.join(missing_names)} "
            f"of them; use torch 2.11 to 2.14, or {instead}"
        )


def reshards_after_forward(module: FSDPModule) -> bool | None:
    """Return whether a module frees its gathered parameters after forward; None if it was not sharded here."""
    return _RESHARDS.get(module)


def sharding_of(module: FSDPModule) -> Sharding:
    """Return how a module was sharded here; the defaults for one that was sharded elsewhere."""
    return _SHARDINGS.get(module, Sharding())


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """List every module that FSDP2 manages, children after parents; of a prepared model they are listed once."""
    if (listed := vars(model).get(_FSDP_MODULES)) is not None:
        return listed
    inner_modules = (
        inner for module in model.modules() if isinstance(module, FSDPModule) for inner in module.modules()
    )
    modules: list[FSDPModule] = [
        *dict.fromkeys(module for module in inner_modules if isinstance(module, FSDPModule))
    ]
    if "call_rules" in vars(model):  # what `prepare` leaves on it at last
        vars(model)[_FSDP_MODULES] = modules
    return modules


def reduction_groups(modules: Sequence[FSDPModule]) -> Iterator[Any]:
    """Yield FSDP2's groups of parameters, each gathered and summed by one message; modules of one block have one."""
    # modules of one block share a state
    for state in dict.fromkeys(module._get_fsdp_state() for module in modules):
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        yield from (group for group in groups if group is not None)


@contextmanager
def sum_gradients_over_slots(model: nn.Module, world: World) -> Iterator[None]:
    """Sum over the slots, at the end, what backward passes inside add to `.grad`; FSDP2 sums by itself."""
    if fsdp_modules(model) or world.home.slots == 1:
        yield
        return
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with set_earlier_gradients_aside(parameters):
        yield
        slots = world.control.sum_over_slots([float(p.grad is not None) for p in parameters], "count of gradients")
        for parameter, count in zip(parameters, slots, strict=True):
            if parameter.grad is None and count > 0:  # all slots sum the same ones
                parameter.grad = torch.zeros_like(parameter)
        gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None]
        number_bytes = max((gradient.element_size() for gradient in gradients), default=1)
        for bucket in _take_tensors(gradients, SUMMED_NUMBERS * number_bytes):
            _sum_as_one_buffer(bucket, world)


def _sum_as_one_buffer(gradients: Sequence[Tensor], world: World) -> None:
    """Replace gradients by their sums over the slots, in place: a reduce-scatter and an all-gather of one buffer.

    Half precision is summed in float32.
    """
    channel = world.channels.find_channel(tuple(range(world.home.slots)))
    flat = widen_half_precision(torch.cat([gradient.flatten() for gradient in gradients]))
    counts = [len(part) for part in flat.tensor_split(channel.degree)]
    part = channel.reduce_scatter(flat, counts, "sum of gradients").wait()
    flat = torch.cat(channel.all_gather(part, counts, "sum of gradients").wait())
    for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))


# ---- the layers of a model


def shared_blocks(layers: Mapping[str, nn.Module]) -> list[list[nn.Module]]:
    """List the modules of different layers that hold the same parameters: one list for each shared block.

    A block is the outermost module all of whose parameters are used by the same layers, each with an object of its own
    for it.
    """
    users: dict[int, set[str]] = {}  # names of the layers that have a parameter, by its id
    for name, layer in layers.items():
        for parameter in layer.parameters():
            users.setdefault(id(parameter), set()).add(name)
    blocks: dict[tuple[int, ...], dict[nn.Module, None]] = {}  # by their parameters
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
    return [[*modules] for parameters, modules in blocks.items() if len(modules) == len(users[parameters[0]])]


class ShardingFeature(Feature):
    """Parameters over the slots, or a copy on every rank: always on, behind whatever else places layers."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._sharding = self.options.sharding(self.world)

    def refuse(self, model: PreTrainedModel) -> None:
        """Raise ModelError for a wider compute dtype, and for whole layers that share parameters."""
        self._sharding.check_compute_dtype(model.dtype)
        if self._sharding.shard_parameters or self.options.sequence_parallel:
            layers = decoder_layers(model)
            refuse_shared_layers(model, layers, shared_blocks(layers))

    def place(self, model: PreTrainedModel, root: nn.Module) -> None:
        """Shard shared blocks, layers, towers and depths, then what is left; or move a copy to the device."""
        if self._sharding.shard_parameters:
            layers = decoder_layers(model)
            blocks = (
                *shared_blocks(layers),
                *layers.values(),
                *towers_beside_text_model(model),
                *mtp_depths(model),
            )
            shard_over_slots(blocks, self.world, self._sharding, root=root)
        elif not has_meta_parameters(root):  # a model without memory is filled on its device later
            nn.Module.to(root, self.world.device)


def refuse_shared_layers(
    model: PreTrainedModel, layers: Iterable[str], blocks: Sequence[Sequence[nn.Module]] = ()
) -> None:
    """Raise ModelError if a decoder layer shares parameters with another, or with what is around it.

    FSDP2 and sequence parallelism take each layer's as its own; layers may share those of `blocks`.
    """
    shared_in_blocks = {id(parameter) for modules in blocks for parameter in modules[0].parameters()}
    owner: dict[int, tuple[str, str]] = {}  # of a parameter: its first name, and its layer, "" around the layers
    prefixes = [f"{layer}." for layer in layers]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        layer = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        first, owner_layer = owner.setdefault(id(parameter), (name, layer))
        # parameters of a block may be in two layers, but not in a layer and around the layers
        may_share = "" not in (layer, owner_layer) and id(parameter) in shared_in_blocks
        if owner_layer != layer and not may_share:
            raise ModelError(
                f"{type(model).__name__}: {name} is {first}, and layers that share parameters are not sharded or split "
                "over rows; use shard_parameters=False and sequence_parallel=False, or give each layer its own"
            )
