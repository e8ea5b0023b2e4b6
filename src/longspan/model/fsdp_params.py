"""FSDP2's private objects (torch 2.11 to 2.15): what longspan reads of them, and all that it changes of them.

No other file names them. A feature fills three hooks of a parameter: what FSDP2 gathers, what gathered bytes become,
and where the sum of its gradients goes. A group of parameters tells it when FSDP2 gathers and frees.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, alloc_storage, free_storage
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from longspan.errors import ModelError

_FSDP_MODULES = "listed_fsdp_modules"  # an attribute of the model: a table by model would keep models alive

# ---- FSDP2's modules, groups and parameters


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
    """Yield FSDP2's groups of parameters (FSDPParamGroup), each gathered and summed by one message.

    A block, of one module or several, has one state with its groups; each group comes once.
    """
    for state in dict.fromkeys(module._get_fsdp_state() for module in modules):
        # FSDP2 gives groups out by no public name: a state has a list of them, in torch 2.11 one group or None.
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        yield from (group for group in groups if group is not None)


def sharded_parameters(group: Any) -> list[nn.Parameter]:
    """List the model's parameters in one of FSDP2's groups, as DTensors."""
    return [parameter.sharded_param for parameter in group.fsdp_params]


def owner_of(parameter: Any) -> tuple[nn.Module, str]:
    """Return the module that has one of FSDP2's parameters, and the parameter's name there."""
    return parameter._module_info.module, parameter._module_info.param_name


class GatheredParameter(NamedTuple):
    """A parameter as passes find it: its module, its name there, how many elements, padding too, and their type."""

    module: nn.Module
    name: str
    numel: int
    dtype: torch.dtype


def gathered_parameters(modules: Sequence[FSDPModule]) -> Iterator[GatheredParameter]:
    """Yield what FSDP2 gathers for these modules; a parameter of packed weights has uint8 elements."""
    for group in fsdp_param_groups(modules):
        for parameter in group.fsdp_params:
            shard: Tensor = parameter._sharded_param_data
            policy = getattr(parameter, "mp_policy", None) or group.mp_policy  # torch 2.15 has one per parameter
            numel = shard.numel() * group.mesh_info.shard_mesh_size
            yield GatheredParameter(*owner_of(parameter), numel, policy.param_dtype or shard.dtype)


# ---- what is changed: three hooks of a parameter, and when a group is gathered


class ShardSource(Protocol):
    """The first hook: where FSDP2 gets what it gathers, in place of a shard that is on the device."""

    def take_shard(self, parameter: "HookedParam") -> Tensor:
        """Return the shard, padded and of one dim, on the device in `parameter.gathered_dtype`.

        The current stream is the one that gathers.
        """
        ...


class Unpacking(Protocol):
    """The second hook: what the gathered bytes of a frozen parameter become, in place of the parameter itself."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weight that layers find."""
        ...

    def whole_shape(self, packed: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the weight of gathered bytes of shape `packed`."""
        ...

    def unpack(self, packed: Tensor, weight: Tensor) -> None:
        """Write gathered bytes as the weight."""
        ...


class GradientSums(Protocol):
    """The third hook: where the sum of a parameter's gradients over the slots goes, in place of the device."""

    def store_sum(self, parameter: "HookedParam", total: Tensor, earlier: Any) -> Any:
        """Return the new `.grad`, a DTensor: this pass's sum, `total`, and `earlier`, that of passes before (or None).

        The current stream is that of FSDP2's sums, which has the memory of `total`.
        """
        ...


class GatherListener(Protocol):
    """What a feature does around the gathers of one group."""

    def begin_gather(self, group: "HookedParamGroup") -> None:
        """FSDP2 asks for a gather; the group may be gathered already."""
        ...

    def end_gather(self, group: "HookedParamGroup") -> None:
        """A gather has ended, and the current stream waits for it."""
        ...

    def end_reshard(self, group: "HookedParamGroup") -> None:
        """FSDP2 has freed the gathered parameters, or would have if the group were not needed in backward."""
        ...


class HookedParam(FSDPParam):
    """FSDP2's parameter with three hooks; without one it does what FSDP2 does. `hook_parameter` makes it."""

    source: ShardSource | None = None
    unpacking: Unpacking | None = None
    sums: GradientSums | None = None
    # A source casts to the dtype of FSDP2's policy; None: the shard's.
    gathered_dtype: torch.dtype | None = None
    # The gathered parameter has this type; None: the shard's.
    _whole_dtype: torch.dtype | None = None
    # Nothing is copied, as passes or `unpacking` read the shard.
    _reads_shard: bool = False
    _earlier_gradient: Any = None  # the gradient of earlier passes while FSDP2 sums that of this one

    @property
    def shard(self) -> Tensor:
        """The memory of the shard, padded to those of other ranks, of one dim."""
        return self._sharded_param_data

    def move_shard(self, padded: Tensor) -> nn.Parameter:
        """Let the shard be in other memory, of the same size; returns the new parameter of the model."""
        dim = self.fsdp_placement.dim
        local = padded.view(self.padded_sharded_param_size).narrow(dim, 0, self.sharded_size[dim])
        trained = self.sharded_param.requires_grad
        self._sharded_param_data: Tensor = padded
        self.sharded_param: nn.Parameter = nn.Parameter(self.as_dtensor(local), requires_grad=trained)
        self._setattr_on_modules(self.sharded_param)
        return self.sharded_param

    def as_dtensor(self, local: Tensor) -> Any:
        """Return a tensor of the shard's shape as a DTensor like the parameter."""
        return super().to_sharded_dtensor(local)

    def init_dtype_attrs(self, mp_policy: Any) -> None:
        """Set FSDP2's types; where a hook gives what is gathered, FSDP2 does not cast it: bytes are never cast."""
        super().init_dtype_attrs(mp_policy)
        self._whole_dtype: torch.dtype | None = self.param_dtype
        if self.source is not None or self.unpacking is not None:
            self.gathered_dtype = None if self.unpacking is not None or self._is_alone else self.param_dtype
            self.param_dtype: torch.dtype | None = None

    @property
    def _is_alone(self) -> bool:
        """Whether one rank has the whole parameter, which FSDP2 does not gather but copies."""
        extended = hasattr(self._sharded_local_tensor, "fsdp_pre_all_gather")
        mesh: Any = self.mesh_info
        return mesh.shard_mesh_size == 1 and not self.offload_to_cpu and not extended

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        """What FSDP2 is to gather; it asks on the stream that gathers. For one rank its copy casts."""
        if self.source is not None:
            return [self.source.take_shard(self)]
        return [self.shard] if self._is_alone else super().all_gather_inputs

    @property
    def _whole_shard(self) -> Tensor | None:
        """What is read in place of a copy: by passes the shard of one rank, by `unpacking` that or what came of it.

        FSDP2 sets the size of its memory, which must be its own. Gathered weights stay in one place, for what autograd
        saves of them: a source, which gives another each time, is copied there.
        """
        if not self._is_alone or self.param_dtype is not None or (self.source and self.unpacking is None):
            return None
        (tensor,) = self.all_gather_inputs
        return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else None

    def init_all_gather_outputs(
        self, numels: list[int], dtypes: list[torch.dtype], *others: Any, **options: Any
    ) -> None:
        """Make memory for the gathered parameter, or take `_whole_shard`, onto which FSDP2 copies nothing."""
        tensor = self._whole_shard
        if tensor is not None or self._reads_shard:
            self._reads_shard = tensor is not None
            if not any(output is tensor for output in self.all_gather_outputs):
                self.all_gather_outputs: list[Tensor] = [] if tensor is None else [tensor]
                if self.unpacking is None:
                    # It was a view of an earlier shard.
                    vars(self).pop("_unsharded_param", None)
        if tensor is None:
            whole_dtypes = [self._whole_dtype or dtypes[0]] if self._is_alone else dtypes
            super().init_all_gather_outputs(numels, whole_dtypes, *others, **options)

    def free_unsharded_param(self) -> None:
        """Free the memory of the gathered parameter, where it is not the shard's."""
        if not self._reads_shard or self.unpacking is not None:
            super().free_unsharded_param()

    def init_unsharded_param(self) -> None:
        """Make FSDP2's gathered parameter; of bytes write the weight, which FSDP2 frees as any other, and free them."""
        if self.unpacking is None:
            super().init_unsharded_param()
            return
        (gathered,) = self.all_gather_outputs
        if not hasattr(self, "_unsharded_param"):
            shape = self.unpacking.whole_shape(self._orig_size)
            weight = torch.empty(shape, dtype=self.unpacking.dtype, device=self.device)
            self._unsharded_inner_tensors: list[Tensor] = [weight]
            # of tensor or expert parallelism; torch 2.11 has it under the second name
            spec = getattr(self, "_unsharded_dtensor_spec", None) or getattr(self, "_tp_spec", None)
            whole = weight
            if spec is not None:
                whole = DTensor.from_local(weight, spec.mesh, spec.placements, run_check=False)
            self._unsharded_param: nn.Parameter = nn.Parameter(whole, requires_grad=False)
        (weight,) = self._unsharded_inner_tensors
        alloc_storage(weight)
        # Shards of rows are padded to one size.
        packed = gathered[: self._orig_size.numel()].view(self._orig_size)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):
            self.unpacking.unpack(packed, weight)
        if self._reads_shard:
            self.all_gather_outputs = []
        else:
            free_storage(gathered)

    def _get_grad_inner_tensor(self, grad: Tensor) -> Tensor:
        """The earlier gradient leaves FSDP2's sight, which would add the sum to it."""
        if self.sums is not None:
            self._earlier_gradient = self.sharded_param.grad
            self.sharded_param.grad = None
        return super()._get_grad_inner_tensor(grad)

    def to_sharded_dtensor(self, tensor: Tensor) -> Any:
        """Return the gradient of a sum that FSDP2 has made."""
        if self.sums is None:
            return super().to_sharded_dtensor(tensor)
        earlier = self._earlier_gradient
        self._earlier_gradient = None
        return self.sums.store_sum(self, tensor, earlier)


class HookedParamGroup(FSDPParamGroup):
    """FSDP2's group of parameters, which says when it is gathered and freed. `hook_group` makes it."""

    listener: GatherListener | None = None
    # Each is called once, before the next gather, with the group's parameters; returns an event that all streams of the
    # gather wait for (None: none).
    before_next_gather: list[Callable[[list[nn.Parameter]], Any]]
    _hooks_of_loss: list[Any]

    @property
    def is_gathering(self) -> bool:
        """Whether a gather has begun, and nothing has waited for it."""
        return self._all_gather_result is not None

    @property
    def is_in_forward(self) -> bool:
        """Whether the group's module runs forward now."""
        return self._training_state == TrainingState.FORWARD

    @property
    def is_before_backward(self) -> bool:
        """Whether FSDP2 gathers for a backward pass now."""
        return self._training_state == TrainingState.PRE_BACKWARD

    @property
    def is_idle(self) -> bool:
        """Whether no pass of the group's module is under way."""
        return self._training_state == TrainingState.IDLE

    def post_backward(self, *unused: Any) -> None:
        """Send gradients: with one rank in their own type, unless passes before were added in float32."""
        trained = [parameter for parameter in self.fsdp_params if parameter.sharded_param.requires_grad]
        if trained and isinstance(self._reduce_scatter_comm, SumIsMessage):
            self._reduce_scatter_comm.forget_message()
            own = trained[0].orig_dtype
            is_wide = any(getattr(_unsummed_gradient(parameter), "dtype", own) != own for parameter in trained)
            self._reduce_dtype: torch.dtype | None = trained[0].reduce_dtype if is_wide else own
        super().post_backward(*unused)

    def gather_for_loss(self) -> None:
        """Gather in a forward pass of the root, outside of the group's module; nothing else of the gather stays."""
        self._training_state: TrainingState = TrainingState.FORWARD
        self.unshard(self.unshard_async_op)
        self.wait_for_unshard()
        # FSDP2 would keep what came from other ranks until the next gather.
        if (last := self.comm_ctx.all_gather_state) is not None:
            self._let_gather_streams_wait(last.event)
            self.comm_ctx.all_gather_state = None
        self._sum_when_complete()

    def _sum_when_complete(self) -> None:
        """Several losses may use the group: its gradients are complete when autograd has accumulated each of them."""
        while self._hooks_of_loss:  # of a pass without a backward pass
            self._hooks_of_loss.pop().remove()
        whole = [parameter._unsharded_param for parameter in self.fsdp_params]
        trained = [parameter for parameter in whole if parameter.requires_grad]
        complete = set[int]()
        count = len(trained)
        # Tensors keep their hooks out of the collector's sight: a hook that held the group would keep the model.
        group = weakref.ref(self)

        def count_gradient(parameter: Tensor) -> None:
            complete.add(id(parameter))
            if len(complete) == count and (owner := group()) is not None:
                owner.post_backward()

        if torch.is_grad_enabled():
            self._hooks_of_loss += [x.register_post_accumulate_grad_hook(count_gradient) for x in trained]

    def free_after_loss(self) -> None:
        """Free what `gather_for_loss` gathered, if passes free parameters after forward."""
        self.reshard()
        self._training_state = TrainingState.IDLE

    def sum_in_own_memory(self) -> None:
        """Take the memory of sums from FSDP2's own stream again, which keeps no more than those of one group."""
        self._reduce_scatter_comm = DefaultReduceScatter()

    def unshard(self, async_op: bool = False) -> None:
        """Begin to gather. In a backward pass FSDP2 asks for it one group before the group is used, if it is."""
        if self.is_before_backward and not self.unshard_in_backward:
            return
        while self.before_next_gather:
            event = self.before_next_gather.pop(0)(sharded_parameters(self))
            if event is not None:  # FSDP2's own streams, which copy shards, do not wait for the current one
                self._let_gather_streams_wait(event)
        if self.listener is not None:
            self.listener.begin_gather(self)
        super().unshard(async_op)

    def _let_gather_streams_wait(self, event: Any) -> None:
        if hasattr(self, "_wait_all_gather_streams_on_event"):  # not in torch 2.15
            self._wait_all_gather_streams_on_event(event)
        else:
            self.comm_ctx.wait_all_gather_streams_on_event(event)  # pyright: ignore[reportAttributeAccessIssue]

    def wait_for_unshard(self) -> None:
        """Wait for the gather, if one has begun."""
        was_gathering = self.is_gathering
        super().wait_for_unshard()
        if was_gathering and self.listener is not None:
            self.listener.end_gather(self)

    def reshard(self) -> None:
        """Free the gathered parameters, where FSDP2 frees them."""
        super().reshard()
        if self.listener is not None:
            self.listener.end_reshard(self)


def _unsummed_gradient(parameter: Any) -> Tensor | None:
    if parameter.unsharded_accumulated_grad is not None:
        return parameter.unsharded_accumulated_grad
    return getattr(getattr(parameter, "_unsharded_param", None), "grad", None)


def hook_parameter(parameter: Any) -> HookedParam:
    """Make one of FSDP2's parameters a HookedParam, in place; hooks that it has stay."""
    parameter.__class__ = HookedParam
    return parameter


def hook_group(group: Any) -> HookedParamGroup:
    """Make one of FSDP2's groups a HookedParamGroup, in place; hooks that it has stay."""
    if not isinstance(group, HookedParamGroup):
        group.__class__ = HookedParamGroup
        group.before_next_gather = []
        group._hooks_of_loss = []
    return group


# What the hooks use: attributes of parameters, and methods of both classes.
_READ = (
    *("_orig_size", "_sharded_param_data", "_unsharded_inner_tensors", "_unsharded_param", "all_gather_outputs"),
    *("padded_sharded_param_size", "param_dtype", "sharded_param", "sharded_size"),
)
_CALLED = {
    FSDPParam: (
        *("_get_grad_inner_tensor", "_setattr_on_modules", "all_gather_inputs", "free_unsharded_param"),
        *("init_all_gather_outputs", "init_dtype_attrs", "init_unsharded_param", "to_sharded_dtensor"),
    ),
    FSDPParamGroup: ("is_sharded", "post_backward", "reshard", "unshard", "wait_for_unshard"),
}


def check_fsdp_names(what: str, instead: str) -> None:
    """Raise ModelError where this torch lacks names of FSDP2 that the hooks use; `what` is a subject and "take"."""
    missing_names = [name for name in _READ if name not in FSDPParam.__annotations__]
    missing_names += [name for kind, names in _CALLED.items() for name in names if not hasattr(kind, name)]
    if missing_names:
        raise ModelError(
            f"{what} the place of FSDP2's parameters, and torch {torch.__version__} has no {', '.join(missing_names)} "
            f"of them; use torch 2.11 to 2.15, or {instead}"
        )


def accept_integer_shards() -> None:
    """Let FSDP2 shard parameters of integers.

    Before torch 2.13 it gives every shard a gradient first, which integers refuse, and takes it away in its next line.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        _fsdp_param.nn = SimpleNamespace(Parameter=_make_parameter, Module=nn.Module)  # pyright: ignore[reportAttributeAccessIssue]


def _make_parameter(data: Tensor, requires_grad: bool = True) -> nn.Parameter:
    return nn.Parameter(data, requires_grad and data.is_floating_point())


# ---- the memory of sums of gradients


class SumIsMessage(DefaultReduceScatter):
    """Sums of one rank: in the message itself, onto which FSDP2 (torch 2.11 to 2.15) copies it.

    FSDP2 asks for memory of a message, then for that of its sum; `forget_message` comes before each message.
    """

    def __init__(self) -> None:
        super().__init__()
        self._message: Tensor | None = None

    def forget_message(self) -> None:
        """What is asked for next is a message, whatever came before."""
        self._message = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an empty tensor for a message, then the same for its sum."""
        if self._message is not None:
            total, self._message = self._message, None
            if total.is_cuda:
                # A sum that is added to an earlier gradient is freed before its stream is done.
                total.record_stream(torch.cuda.current_stream(device))
            return total
        self._message = super().allocate(size, dtype=dtype, device=device)
        return self._message


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


def sums_become_gradients(module: FSDPModule, policy: MixedPrecisionPolicy) -> bool:
    """Return whether FSDP2's sums are the gradients themselves: neither cast, nor summed over replicas after it."""
    for group in fsdp_param_groups([module]):
        trained = [
            parameter.sharded_param for parameter in group.fsdp_params if parameter.sharded_param.requires_grad
        ]
        casts = any(policy.reduce_dtype not in (None, parameter.dtype) for parameter in trained)
        if casts or group.mesh_info.mesh.ndim != 1:
            return False
    return True


def leave_out_copies_of_one_rank(root: nn.Module) -> None:
    """Let passes read shards themselves, and gradients be the messages of their sums, where one rank has all of both.

    Nothing is divided by one, nor cast to float32 and back: the bits are the same. With `ep` a rank may be the only one
    that has its experts; replicas of whole parameters have sums, and no gathers.
    """
    for group in fsdp_param_groups(fsdp_modules(root)):
        if group.mesh_info.shard_mesh_size == 1:
            for parameter in group.fsdp_params:
                hook_parameter(parameter)
        if group.mesh_info.mesh.size() == 1:
            hook_group(group)
            group.gradient_divide_factor = None
            group._reduce_scatter_comm = SumIsMessage()


def sum_on_computing_stream(root: nn.Module) -> None:
    """Let FSDP2 sum gradients on the stream that computes: with one rank no message hides behind its work.

    All gradients would otherwise be in memory of FSDP2's own stream for sums, which the next forward pass could not
    use. FSDP2 has no setting for it: its context, shared by all modules of the root, makes streams in `lazy_init`.
    """
    context = _comm_context(root)
    if "lazy_init" in vars(context):  # replaced already
        return
    make_streams = context.lazy_init

    def make_streams_but_for_sums(device: torch.device) -> None:
        """Make FSDP2's streams, and put the computing one in place of that of its sums."""
        make_streams(device)
        context.reduce_scatter_stream = torch.cuda.current_stream(device)

    context.lazy_init = make_streams_but_for_sums


def sum_on_own_stream(root: nn.Module) -> None:
    """Undo `sum_on_computing_stream` before the first pass of a root."""
    vars(_comm_context(root)).pop("lazy_init", None)


def _comm_context(root: nn.Module) -> Any:
    state: Any = root._get_fsdp_state  # pyright: ignore[reportAttributeAccessIssue]
    return state()._comm_ctx


# ---- between the passes of a step


def drop_unsummed_gradients(model: nn.Module) -> None:
    """Drop gradients that backward passes left unsummed, which zero_grad() does not, and free what FSDP2 gathered."""
    for group in fsdp_param_groups(fsdp_modules(model)):
        for parameter in group.fsdp_params:
            vars(parameter)["unsharded_accumulated_grad"] = None  # a property of `_unsharded_param` in torch 2.15
            if (whole := getattr(parameter, "_unsharded_param", None)) is not None:
                whole.grad = None
    reshard(model)


def accumulate_gathered_gradients(groups: Iterable[Any]) -> None:
    """Add gathered gradients to earlier ones in float32, as FSDP2 does, after passes that it does not see."""
    for group in groups:
        if hasattr(group, "_set_unsharded_grad_dtypes"):  # torch 2.15
            group._set_unsharded_grad_dtypes(defer_upcast=False)
            continue
        for parameter in group.fsdp_params:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


def has_partial_sums(modules: Sequence[FSDPModule]) -> bool:
    """Return whether sums are there that lack those of other replicas."""
    return any(group._partial_reduce_output is not None for group in fsdp_param_groups(modules))


def drop_partial_sums(modules: Sequence[FSDPModule]) -> None:
    """Drop sums that lack those of other replicas."""
    for group in fsdp_param_groups(modules):
        group._partial_reduce_output = None


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


@contextmanager
def gather_parameters(layer: nn.Module) -> Iterator[None]:
    """Gather a layer's parameters while it runs again inside, and free those that were sharded before.

    In transformers 5.17 FSDP2's own hooks run inside: in the state PRE_BACKWARD they do nothing.
    """
    modules = [module for module in layer.modules() if isinstance(module, FSDPModule)]
    states: list[Any] = [module._get_fsdp_state() for module in modules]
    training_states = [state._training_state for state in states]
    sharded_before = [
        module for module in modules if any(group.is_sharded for group in fsdp_param_groups([module]))
    ]
    for module, state in zip(modules, states, strict=True):
        module.unshard()
        state._training_state = TrainingState.PRE_BACKWARD
    try:
        yield
    finally:
        for state, training_state in zip(states, training_states, strict=True):
            state._training_state = training_state
        for module in sharded_before:
            module.reshard()


# ---- embedding and head, which are gathered only while they are used


def gather_while_used(modules: Sequence[nn.Module], embedding: nn.Module) -> None:
    """Let embedding and head, one of them or both with one group, gather it in each call alone, and free it behind it.

    Of several modules FSDP2 would keep it from the first one's call to the last one's end. No backward pass needs a
    frozen embedding, nor a head after a LossGather; after a call of the head by itself it is gathered again.
    """
    first: Any = modules[0]
    state = first._get_fsdp_state()
    if len(modules) > 1:
        state._pre_forward_hook_handle.remove()
        for module in modules:
            module.register_forward_pre_hook(state._pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(state._post_forward)
    groups = [hook_group(group) for group in fsdp_param_groups([first])]

    def gather_in_backward(*_: Any) -> None:
        for group in groups:
            group.unshard_in_backward = state._training_state != TrainingState.PRE_BACKWARD

    for group in groups:
        group.unshard_in_backward = False
    for module in modules:
        if module is not embedding:
            module.register_forward_pre_hook(gather_in_backward)


class LossGather:
    """Gathers the parameters of an output embedding when the loss of a forward pass first needs them.

    The loss makes their gradients in forward, so that its backward pass gathers none. FSDP2's hooks on the module do
    nothing meanwhile. Without parameters of its own, under FSDP2, nothing is done.
    """

    def __init__(self, head: nn.Module) -> None:
        modules = [module for module in head.modules() if isinstance(module, FSDPModule)]
        self._states: list[Any] = [*dict.fromkeys(module._get_fsdp_state() for module in modules)]
        self._groups: list[HookedParamGroup] = [*fsdp_param_groups(modules)]
        self._has_begun = False

    def begin(self) -> None:
        """Gather, if that was not done before; all ranks call it together."""
        if self._has_begun:
            return
        for group in self._groups:
            group.gather_for_loss()
        for state in self._states:
            state._training_state = TrainingState.PRE_BACKWARD
        self._has_begun = True

    def end(self) -> None:
        """Free what was gathered."""
        if self._has_begun:
            for state in self._states:
                state._training_state = TrainingState.IDLE
            for group in self._groups:
                group.free_after_loss()


# ---- hooks of blocks that are left out


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
