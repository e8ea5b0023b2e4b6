"""An optimizer whose moments wait in the host's memory, and are on the device a bucket at a time during an update.

Each bucket's moments are copied to the device, updated there by the optimizer's own kernels, and copied back, so that
parameters get the same bits as with moments on the device. On a GPU, two CUDA streams copy while it updates: the next
bucket comes while the one before goes. No more than two buckets of STATE_BUCKET_BYTES are on the device, or the moments
of two parameters whose memory cannot be cut. On a CPU the same code copies at once.

Optimizers that update each number by itself can do so, for a large parameter is updated in parts; others are refused.
Counts of steps and other single numbers stay on the device. Gradients and parameters are not moved.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from longspan.comm import World
from longspan.comm.all_ranks import run_on_every_rank
from longspan.errors import ConfigError
from longspan.model.activations.host_offload import HostArena, HostRange, check_free_host_memory
from longspan.model.kinds import waits_on_host
from longspan.model.weights.local_tensors import local_tensor
from longspan.plan.memory.settings import STATE_BUCKET_BYTES
from longspan.train.optim.one_pass_adamw import OnePassAdamW

CUT = 1024  # numbers: a part begins at a multiple, so that kernels treat its numbers as they do in the whole
ALIGNMENT = 256  # bytes of each state's place on the host, as by `HostArena.take_range`
_Settings = Mapping[str, Any]
# Classes that update each number by itself, and the numbers that they keep of it under a group's settings.
STATES: dict[type[optim.Optimizer], Callable[[_Settings], int]] = {
    **dict.fromkeys((OnePassAdamW, optim.Adam, optim.AdamW), lambda group: 2 + bool(group["amsgrad"])),
    **dict.fromkeys((optim.NAdam, optim.RAdam, optim.Adamax, optim.Adadelta, optim.Rprop), lambda _: 2),
    **dict.fromkeys((optim.Adagrad, optim.ASGD), lambda _: 1),
    optim.SGD: lambda group: int(group["momentum"] != 0),
    optim.RMSprop: lambda group: 1 + (group["momentum"] > 0) + bool(group["centered"]),
}


def offload_optimizer_states(
    optimizer: Optimizer, world: World, *, bucket_bytes: int = STATE_BUCKET_BYTES
) -> "OffloadedStates":
    """Move the moments of an optimizer to the host's memory; call it once, after `prepare`, on all ranks together.

    >>> optimizer = offload_optimizer_states(torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True), world)
    >>> result = run_step(model, plan, documents, world, optimizer=optimizer)

    Use what it returns in place of `optimizer`, in schedulers and checkpoints too. Parameters get the same bits, and
    checkpoints are the same files. The host's memory is taken now: on GPUs it is registered with CUDA, of exact size.
    On the device a step takes at most two buckets of `bucket_bytes` for moments (`device_bytes`).

    Raises ConfigError on every rank for an optimizer without states and for a class that is none of `STATES`, which may
    update parameters together; ModelError where a host lacks the bytes.
    """
    if isinstance(optimizer, OffloadedStates):
        raise ConfigError(
            "the states of this optimizer wait on the host already; call offload_optimizer_states once"
        )

    def measure_bytes() -> int:
        """Return the bytes of this rank's states. Raises ConfigError for another class of optimizer."""
        if type(optimizer) not in STATES:
            raise ConfigError(
                f"{type(optimizer).__name__} is not known to update each number by itself, as states on the host need; "
                f"use adamw, sgd or another of {', '.join(kind.__name__ for kind in STATES)}, or keep its states on "
                "the device (train.offload_optimizer_states = false)"
            )
        return total_state_bytes(optimizer)

    size = run_on_every_rank(world, measure_bytes, ConfigError)
    pages = any(waits_on_host(parameter) for group in optimizer.param_groups for parameter in group["params"])
    if not world.control.reduce_object(size, max, "bytes of the optimizer's states") and not pages:
        raise ConfigError(
            f"{type(optimizer).__name__} keeps no states with these arguments, so that none can wait on the host; "
            "leave out offload_optimizer_states (train.offload_optimizer_states = false)"
        )
    check_free_host_memory(
        size, world, "moments of the optimizer on the host (train.offload_optimizer_states) take"
    )
    return OffloadedStates(optimizer, world.device, bucket_bytes=bucket_bytes)


def total_state_bytes(optimizer: Optimizer) -> int:
    sizes = (
        (STATES[type(optimizer)](group), local_tensor(parameter.detach()))
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    )
    return sum(states * -(-max(local.nbytes, 1) // ALIGNMENT) * ALIGNMENT for states, local in sizes)


# ---- parts of parameters


@dataclass(frozen=True, eq=False)
class StatePart:
    """Numbers `start` to `stop` of a parameter's local tensor, or all of one that is not `flat`, in its own strides.

    `last`: no part of this parameter follows.
    """

    parameter: nn.Parameter
    start: int
    stop: int
    flat: bool
    last: bool

    def local_view(self, local: Tensor) -> Tensor:
        """Return this part of the parameter's local tensor, its gradient's, or that of a state; a view."""
        return local.view(-1)[self.start : self.stop] if self.flat else local

    def make_stand_in(self) -> nn.Parameter:
        """Return a plain parameter with the same memory, and gradient, which is updated in place of the part."""
        assert self.parameter.grad is not None
        stand_in = nn.Parameter(self.local_view(local_tensor(self.parameter.detach())))
        stand_in.grad = self.local_view(local_tensor(self.parameter.grad))
        return stand_in


@dataclass(frozen=True)
class StateBucket:
    """Parts of parameters of one group that are updated together."""

    group: dict[str, Any]
    parts: tuple[StatePart, ...]
    bytes: int


def cut_buckets(optimizer: Optimizer, bucket_bytes: int, *, every: bool = False) -> Iterator[StateBucket]:
    """Cut parameters with gradients, or `every` one, into buckets; only one parameter that is not flat takes more."""
    for group in optimizer.param_groups:
        parts = list[StatePart]()
        filled = 0
        for parameter in group["params"]:
            if parameter.grad is None and not every:
                continue
            number_bytes = STATES[type(optimizer)](group) * parameter.dtype.itemsize
            for part in _split_parameter(parameter, max(bucket_bytes // max(number_bytes, 1) // CUT, 1) * CUT):
                part_bytes = number_bytes * (part.stop - part.start)
                if parts and filled + part_bytes > bucket_bytes:
                    yield StateBucket(group, tuple(parts), filled)
                    parts = []
                    filled = 0
                parts.append(part)
                filled += part_bytes
        if parts:
            yield StateBucket(group, tuple(parts), filled)


def _split_parameter(parameter: nn.Parameter, most: int) -> Iterator[StatePart]:
    # A rank that holds none of a parameter's numbers gets one empty part, whose update counts the step.
    local = local_tensor(parameter.detach())
    gradient = local if parameter.grad is None else local_tensor(parameter.grad)
    flat = local.is_contiguous() and gradient.is_contiguous()
    for start in range(0, max(local.numel(), 1), most if flat else max(local.numel(), 1)):
        stop = min(local.numel(), start + most) if flat else local.numel()
        yield StatePart(parameter, start, stop, flat, last=stop == local.numel())


def make_sharded_tensor(value: Tensor, local: Tensor) -> Tensor:
    if not isinstance(value, DTensor):
        return local
    spec = value._spec
    assert spec.tensor_meta is not None
    spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
    # `from_local` would copy a tensor of the host to the mesh's device; FSDP2 places parameters on the host like this
    return DTensor(local, spec, requires_grad=False)


# ---- the optimizer


class OffloadedStates(Optimizer):
    """An optimizer whose states are in the host's memory, made by `offload_optimizer_states`.

    `state` holds them as tensors of the host, DTensors for parameters that are DTensors; they are complete when `step`
    returns. Schedulers and hooks belong to this optimizer. `inner`, which updates, has no states of its own.
    """

    def __init__(
        self, optimizer: Optimizer, device: torch.device, *, bucket_bytes: int = STATE_BUCKET_BYTES
    ) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.inner: torch.optim.Optimizer = optimizer
        self._bucket_bytes = bucket_bytes
        optimizer.param_groups = self.param_groups
        self._copies, self._arena = _Copies(device), HostArena(device, total_state_bytes(optimizer))
        self._places = dict[tuple[nn.Parameter, str], tuple[HostRange, Tensor]]()
        states = optimizer.state
        optimizer.state = defaultdict(dict)
        for parameter in [p for group in self.param_groups for p in group["params"] if p in states]:
            # of steps before this
            self.state[parameter] = self._copy_state_to_host(parameter, states.pop(parameter))

    @property
    def host_bytes(self) -> int:
        return self._arena.bytes

    @property
    def device_bytes(self) -> int:
        """The most bytes that states take on the device: those of the two largest consecutive buckets."""
        sizes = [bucket.bytes for bucket in cut_buckets(self.inner, self._bucket_bytes, every=True)]
        return max(map(sum, zip(sizes, [*sizes[1:], 0], strict=True)), default=0)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient; returns what `closure` returns.

        `before` keeps the states as they are now: all parts of a parameter start from the same count of steps.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        buckets = [*cut_buckets(self.inner, self._bucket_bytes)]
        before = {part.parameter: {**self.state.get(part.parameter, {})} for b in buckets for part in b.parts}
        try:
            self._update_buckets(buckets, before)
        finally:
            self._copies.wait_for_all()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as torch does; moments go to the host, `small` numbers through the inner optimizer."""
        state_dict = {**state_dict}
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        states: dict[Any, dict[str, Any]] = state_dict["state"]
        small = {
            key: {name: value for name, value in state.items() if not _is_moment(value)}
            for key, state in states.items()
        }
        self.inner.load_state_dict(state_dict | {"state": small})
        loaded, self.inner.state = self.inner.state, defaultdict(dict)
        self.param_groups: list[dict[str, Any]] = self.inner.param_groups
        saved_keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = dict(zip(saved_keys, (p for group in self.param_groups for p in group["params"]), strict=True))
        self.state: defaultdict[Tensor, Any] = defaultdict(dict)
        for key, state in states.items():
            parameter = parameters[key]
            casts = parameter.is_floating_point()
            values = {
                name: (value.to(parameter.dtype) if casts and name != "step" else value)
                if _is_moment(value)
                else loaded[parameter][name]
                for name, value in state.items()
            }
            self.state[parameter] = self._copy_state_to_host(parameter, values)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _update_buckets(
        self, buckets: Sequence[StateBucket], before: Mapping[nn.Parameter, dict[str, Any]]
    ) -> None:
        next_fetched = self._fetch_bucket(buckets[0], before) if buckets else None
        device_states = list[Tensor]()  # of the bucket before, until they are on the host
        for bucket, next_bucket in zip(buckets, [*buckets[1:], None], strict=True):
            fetched = next_fetched
            next_fetched = None
            assert fetched is not None
            self._copies.wait_for_stores()
            device_states.clear()  # frees the memory that the next bucket takes
            if next_bucket is not None:
                next_fetched = self._fetch_bucket(next_bucket, before)
            self._copies.wait_for_fetch(fetched.arrived)
            device_states = self._store_bucket(bucket, self._update_bucket(bucket, fetched.states))

    def _fetch_bucket(self, bucket: StateBucket, before: Mapping[nn.Parameter, dict[str, Any]]) -> "_Fetched":
        # Each part but the last counts steps in a copy: the count of a parameter moves on once.
        states = list[dict[str, Any]]()
        pairs = list[tuple[Tensor, Tensor]]()
        for part in bucket.parts:
            state = dict[str, Any]()
            for name, value in before[part.parameter].items():
                if _is_moment(value):
                    host = part.local_view(local_tensor(value))
                    state[name] = torch.empty_like(host, device=self._copies.device)
                    pairs.append((state[name], host))
                else:  # a count, which the update of every part moves on
                    state[name] = value.clone() if isinstance(value, Tensor) and not part.last else value
            states.append(state)
        return _Fetched(states, self._copies.fetch(pairs))

    def _update_bucket(self, bucket: StateBucket, states: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Plain tensors stand in for parts of DTensors, for which torch would not choose its foreach kernels."""
        inner = self.inner
        stand_ins = [part.make_stand_in() for part in bucket.parts]
        group = {**bucket.group, "params": stand_ins}
        if "foreach" in group and any(isinstance(parameter, DTensor) for parameter in bucket.group["params"]):
            group["foreach"] = bool(group["foreach"])
        inner.param_groups = [group]
        inner.state = defaultdict(dict, {p: state for p, state in zip(stand_ins, states, strict=True) if state})
        places = {
            p: (part.parameter, part.start, part.last) for p, part in zip(stand_ins, bucket.parts, strict=True)
        }
        try:
            with inner.use_stand_ins(places) if isinstance(inner, OnePassAdamW) else nullcontext():
                inner.step()
            return [inner.state.get(p, {}) for p in stand_ins]
        finally:
            inner.param_groups = self.param_groups
            inner.state = defaultdict(dict)

    def _store_bucket(self, bucket: StateBucket, states: Sequence[dict[str, Any]]) -> list[Tensor]:
        """Returns the tensors to keep on the device until all are copied."""
        pairs = list[tuple[Tensor, Tensor]]()
        for part, new_state in zip(bucket.parts, states, strict=True):
            state = self.state[part.parameter]
            for name, value in new_state.items():
                if _is_moment(value):
                    state[name] = host = self._host_tensor(part.parameter, name, value.dtype)
                    pairs.append((part.local_view(local_tensor(host)), value))
                else:
                    state[name] = value
        self._copies.store(pairs)
        return [value for _, value in pairs]

    # ---- the host's memory

    def _copy_state_to_host(self, parameter: nn.Parameter, state: Mapping[str, Any]) -> dict[str, Any]:
        values = dict(state)
        for name, value in state.items():
            if _is_moment(value):
                values[name] = host = self._host_tensor(parameter, name, value.dtype)
                local_tensor(host).copy_(local_tensor(value))
        return values

    def _host_tensor(self, parameter: nn.Parameter, name: str, dtype: torch.dtype) -> Tensor:
        local = local_tensor(parameter.detach())
        _, tensor = self._places.get((parameter, name), (None, None))
        if tensor is None or tensor.dtype != dtype:
            place = self._arena.take_range(local.numel() * dtype.itemsize)
            tensor = place.view_like(torch.empty_like(local, dtype=dtype, device="meta"))
            self._places[parameter, name] = place, tensor
        return make_sharded_tensor(parameter.detach(), tensor)


@dataclass(frozen=True)
class _Fetched:
    """The states of a bucket's parts on the device, and the event after which they are there (None: now)."""

    states: list[dict[str, Any]]
    arrived: torch.cuda.Event | None


class _Copies:
    """Copies each way on a stream of its own; the GPU's memory is taken and freed on the stream that updates."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        on_gpu = device.type == "cuda"
        self._to_device = torch.cuda.Stream(device) if on_gpu else None
        self._to_host = torch.cuda.Stream(device) if on_gpu else None

    def fetch(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
        return self._copy_pairs(pairs, self._to_device)

    def store(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        self._copy_pairs(pairs, self._to_host)

    def _copy_pairs(
        self, pairs: Iterable[tuple[Tensor, Tensor]], stream: torch.cuda.Stream | None
    ) -> torch.cuda.Event | None:
        """The second tensor of each pair into the first; returns the event after which all are copied."""
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        if stream is None:
            return None
        arrived = torch.cuda.Event()
        arrived.record(stream)
        return arrived

    def wait_for_fetch(self, arrived: torch.cuda.Event | None) -> None:
        if arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(arrived)

    def wait_for_stores(self) -> None:
        self._wait_for_stream(self._to_host)

    def wait_for_all(self) -> None:
        self._wait_for_stream(self._to_device)
        self._wait_for_stream(self._to_host)
        if self._to_host is not None:
            self._to_host.synchronize()

    def _wait_for_stream(self, stream: torch.cuda.Stream | None) -> None:
        if stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(stream)


def _is_moment(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0
