"""A model's parameters over the slots: sharded by FSDP2, layer by layer, or a copy on every rank.

Either way a gradient is the plain sum over slots: the loss is divided by the plan's targets before backward, so nothing
here divides. Behind it stands what FSDP2 gathers, frees and sums in the passes of a step.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._utils import _take_tensors
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from transformers import PreTrainedModel

from longspan.comm import World
from longspan.comm.channel import widen_half_precision
from longspan.errors import ModelError
from longspan.model.feature import Call, Feature
from longspan.model.layers import decoder_layers, mtp_depths, towers_beside_text_model
from longspan.model.options import Sharding
from longspan.model.weights.empty_model import has_meta_parameters
from longspan.model.weights.gradients import set_earlier_gradients_aside
from longspan.model.weights.local_tensors import local_tensor
from longspan.plan.messages import SUMMED_NUMBERS

# whether a module frees its gathered parameters after forward
_RESHARDS: WeakKeyDictionary[FSDPModule, bool] = WeakKeyDictionary()
# A module was sharded here with these settings; one that was sharded elsewhere has the defaults.
_SHARDINGS: "WeakKeyDictionary[FSDPModule, Sharding]" = WeakKeyDictionary()
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
        # FSDP2 itself treats a root so.
        _RESHARDS[module] = frees and module is not root
        _SHARDINGS[module] = sharding
        if world.device.type != "cuda":  # only there memory belongs to streams
            continue
        if _sums_become_gradients(module, policy):
            module.set_custom_reduce_scatter(SumsInComputeMemory())
        elif world.meshes.fsdp.size() == 1:
            _sum_on_computing_stream(root)


def _sum_on_computing_stream(root: nn.Module) -> None:
    """With one rank no message hides behind FSDP2's cast of sums. All gradients would be in memory of FSDP2's own
    stream for sums, which the next forward pass could not use. FSDP2 has no setting for it: its context, shared
    by all modules of the root, makes streams in `lazy_init`."""
    state: Any = root._get_fsdp_state  # pyright: ignore[reportAttributeAccessIssue]
    context: Any = state()._comm_ctx
    if "lazy_init" in vars(context):  # replaced already
        return
    make_streams = context.lazy_init

    def make_streams_but_for_sums(device: torch.device) -> None:
        """Make FSDP2's streams, and put the computing one in place of that of its sums."""
        make_streams(device)
        context.reduce_scatter_stream = torch.cuda.current_stream(device)

    context.lazy_init = make_streams_but_for_sums


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


def _sums_become_gradients(module: FSDPModule, policy: MixedPrecisionPolicy) -> bool:
    """Sums are neither cast, nor summed over replicas after it."""
    for group in fsdp_param_groups([module]):
        trained = [
            parameter.sharded_param for parameter in group.fsdp_params if parameter.sharded_param.requires_grad
        ]
        casts = any(policy.reduce_dtype not in (None, parameter.dtype) for parameter in trained)
        if casts or group.mesh_info.mesh.ndim != 1:
            return False
    return True


class SumsInComputeMemory(DefaultReduceScatter):
    """Sums gradients of one group of parameters in memory of the stream that computes.

    FSDP2's own stream could not take the memory of activations that backward freed: a nearly full rank would wait for
    its device and give memory back in every step. FSDP2 (torch 2.11 to 2.15) asks for memory of a message while the
    computing stream is current, then for memory of its sum while its own stream is.
    """

    def __init__(self) -> None:
        super().__init__()
        # The stream is set between a message and its sum.
        self._computing: torch.cuda.Stream | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an empty tensor in memory of the computing stream: first for a message, then for its sum."""
        current = torch.cuda.current_stream(device)
        computing = self._computing
        # a message; the same stream again says that an error came between the last message and its sum
        if computing is None or current == computing:
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
    # `prepare` leaves the rules on the model at last.
    if "call_rules" in vars(model):
        vars(model)[_FSDP_MODULES] = modules
    return modules


def fsdp_param_groups(modules: Sequence[FSDPModule]) -> Iterator[Any]:
    """Yield FSDP2's groups of parameters, each gathered and summed by one message.

    A block, of one module or several, has one state with its groups; each group comes once. They are FSDPParamGroups,
    and typed Any for the callers, which read private attributes of theirs.
    """
    for state in dict.fromkeys(module._get_fsdp_state() for module in modules):
        # FSDP2 gives groups out by no public name: a state has a list of them, in torch 2.11 one group or None.
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
            blocks = (
                *shared_blocks(layers),
                *layers.values(),
                *towers_beside_text_model(model),
                *mtp_depths(model),
            )
            shard_over_slots(blocks, self.world, self._sharding, root=root)
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


def drop_unsummed_gradients(model: nn.Module) -> None:
    """Drop gradients that backward passes left unsummed, which zero_grad() does not, and free what FSDP2 gathered."""
    for group in fsdp_param_groups(fsdp_modules(model)):
        for parameter in group.fsdp_params:
            vars(parameter)["unsharded_accumulated_grad"] = None  # a property of `_unsharded_param` in torch 2.15
            if (whole := getattr(parameter, "_unsharded_param", None)) is not None:
                whole.grad = None
    reshard(model)


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
        assert all(group._partial_reduce_output is None for group in fsdp_param_groups(modules)), (
            "the last backward pass was not announced"
        )
    finally:
        set_last()
        for group in fsdp_param_groups(modules):
            group._partial_reduce_output = None


def keeps_parameters_gathered(model: nn.Module) -> bool:
    """Return whether all passes of a step in lockstep find its parameters whole."""
    return not any(_SHARDINGS.get(x, Sharding()).reshard_after_forward for x in fsdp_modules(model))


def accumulate_gathered_gradients(groups: Iterable[Any]) -> None:
    """Add gathered gradients to earlier ones in float32, as FSDP2 does, after passes that it does not see."""
    for group in groups:
        if hasattr(group, "_set_unsharded_grad_dtypes"):  # torch 2.15
            group._set_unsharded_grad_dtypes(defer_upcast=False)
            continue
        for parameter in group.fsdp_params:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


@contextmanager
def leave_out_idle_hooks(model: nn.Module, *, trains: bool = False) -> Iterator[None]:
    """Leave FSDP2's hooks of a block out of forward passes that find its parameters whole and keep them whole.

    With `trains`, the backward passes of these add gradients to earlier ones without hooks; they sum nothing. What a
    pass will sum or free must be set before it runs forward. Hooks of what FSDP2 takes for a root always run, as FSDP2
    begins and ends a pass by them. Results are the same but for one case: where several blocks take one tensor, three
    or more gradients of it may be added in another order.
    """
    states = dict.fromkeys(x._get_fsdp_state() for x in fsdp_modules(model))
    blocks = list[_BlockHooks]()
    later = None
    try:
        # the last that is called first
        for state in reversed([state for state in states if len(state._modules) == 1]):
            later = _BlockHooks(state, later, trains=trains)
            blocks.append(later)
        yield
    finally:
        for block in blocks:
            block.restore()


class _BlockHooks:
    """Replaces FSDP2's two hooks of one block, which run only where they do something, until `restore` puts them back.

    `state` is FSDP2's of the block, `later` the block that is called next; `trains` is as in `leave_out_idle_hooks`.
    """

    def __init__(self, state: Any, later: "_BlockHooks | None", *, trains: bool) -> None:
        """Put the two hooks of this object in the places of FSDP2's."""
        policy = state._mp_policy
        (module,) = state._modules
        self._state = state
        self._later = later
        self._trains = trains
        # The pass that runs now has FSDP2's hooks.
        self._runs_fsdp_hooks = True
        self._groups: list[Any] = [*fsdp_param_groups([module])]
        self._gradient_hook: Any = None
        self._input_dtype: torch.dtype | None = policy.param_dtype if policy.cast_forward_inputs else None
        self._casts_outputs: bool = policy.output_dtype is not None
        before = state._pre_forward_hook_handle.id
        after = state._post_forward_hook_handle.id
        self._places: Any = (module._forward_pre_hooks, before), (module._forward_hooks, after)
        self._fsdp_hooks = [hooks[key] for hooks, key in self._places]
        for (hooks, key), mine in zip(self._places, (self._begin_forward, self._end_forward), strict=True):
            hooks[key] = mine

    def restore(self) -> None:
        """Put FSDP2's hooks back."""
        for (hooks, key), hook in zip(self._places, self._fsdp_hooks, strict=True):
            hooks[key] = hook
        if self._gradient_hook is not None:
            self._gradient_hook.remove()

    def _begin_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """FSDP2's hook runs where it gathers, will sum or casts. Else a hook on one gradient of the block adds those
        of the later block (`_add_later_gradients`). None leaves the inputs."""
        # FSDP2 gathers before this pass, or will sum or free after it. Before the first pass it does not know (None)
        # whether a state is a root.
        busy = self._state._is_root is not False or any(
            not group.is_unsharded or (self._trains and (group.reduce_grads or group.reshard_after_backward))
            for group in self._groups
        )
        dtype = self._input_dtype
        inputs = (*args, *kwargs.values())
        casts = self._casts_outputs or not (dtype is None or all(_stays_uncast(x, dtype) for x in inputs))
        self._runs_fsdp_hooks = busy or casts
        if self._trains and not busy and self._gradient_hook is None:
            whole = (parameter._unsharded_param for group in self._groups for parameter in group.fsdp_params)
            if (trained := next((x for x in whole if x.requires_grad), None)) is not None:
                self._gradient_hook = trained.register_post_accumulate_grad_hook(self._add_later_gradients)
        return self._fsdp_hooks[0](module, args, kwargs) if self._runs_fsdp_hooks else None

    def _end_forward(self, module: nn.Module, args: Any, out: Any) -> Any:
        return self._fsdp_hooks[1](module, args, out) if self._runs_fsdp_hooks else None

    def _add_later_gradients(self, _: Tensor) -> None:
        """This block's gradient is there, so that backward mostly is through the later block; FSDP2 adds gradients
        that come after this by the end of the pass. In a pipeline `_runs_fsdp_hooks` may be of another
        micro-batch, and gradients that are not there yet are added later. Sums are in float32."""
        if self._later is not None and not self._later._runs_fsdp_hooks:
            accumulate_gathered_gradients(self._later._groups)


def _stays_uncast(x: object, dtype: torch.dtype) -> bool:
    """FSDP2 also casts in mappings, sets and dataclasses."""
    if isinstance(x, Tensor):
        return x.dtype == dtype or not x.is_floating_point()
    if isinstance(x, tuple | list):
        return all(_stays_uncast(value, dtype) for value in x)
    return not isinstance(x, Mapping | set) and not hasattr(x, "__dataclass_fields__")


def unshard(model: nn.Module) -> None:
    """Gather the parameters that FSDP2 has freed, for passes that it does not see; all ranks call it together."""
    for module in fsdp_modules(model):
        module.unshard()


def reshard(model: nn.Module) -> None:
    """Free parameters that FSDP2 kept gathered after a forward pass without backward, or an error in one.

    A later pass would take them for current ones. FSDP2's groups are idle then.
    """
    for module in fsdp_modules(model):
        state: Any = module._get_fsdp_state()
        state._training_state = TrainingState.IDLE
        state._state_ctx.iter_forward_root = None
        # The callback belongs to a pass that failed, which autograd drops.
        state._state_ctx.post_backward_final_callback_queued = False
        for group in fsdp_param_groups([module]):
            group._training_state = TrainingState.IDLE
            group.wait_for_unshard()  # does something where the error came between a gather and its end
        module.reshard()
