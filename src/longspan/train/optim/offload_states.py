"""An optimizer whose moments wait in the host's memory, and are on the device a bucket at a time during an update.

Each bucket's moments are copied to the device, updated there by the optimizer's own kernels, and copied back, so that
parameters get the same bits as with moments on the device. On a GPU, two CUDA streams copy while it updates: the next
bucket comes while the one before goes. No more than two buckets of STATE_BUCKET_BYTES are on the device, or the moments
of two parameters whose memory cannot be cut. On a CPU the same code copies at once.

Optimizers that update each number by itself can do so, for a large parameter is updated in parts; others are refused.
Counts of steps and other single numbers stay on the device. Parameters that wait on the host, and their gradients, come
with their moments; others are not moved.

An update takes as long as the bus needs for the moments both ways. With `hidden_in` it runs behind the next forward
pass, whose products leave the bus and the memory's bandwidth free: buckets come in the order in which FSDP2 gathers
their parameters, and a gather waits for its own alone. A bucket's gradients are freed as it is updated: at layer i of
that pass the layers behind it have old gradients still, as the layers behind i have new ones when backward is there,
and the layers before it keep what they keep then. So the peak of a step grows by the two buckets at most.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from longspan.comm import World
from longspan.comm.all_ranks import run_on_every_rank
from longspan.errors import ConfigError, ModelError
from longspan.model.fsdp_params import (
    HookedParamGroup,
    check_fsdp_names,
    fsdp_modules,
    fsdp_param_groups,
    hook_group,
    sharded_parameters,
)
from longspan.model.host_arena import HostArena, HostRange, check_free_host_memory
from longspan.model.marks import HOST_STORE, waits_on_host
from longspan.model.weights.local_tensors import local_tensor
from longspan.plan.memory.settings import STATE_BUCKET_BYTES
from longspan.train.optim.one_pass_adamw import OnePassAdamW, ParameterPart
from longspan.train.optim.state_buckets import STATES, StateBucket, cut_buckets, sharded_state, total_state_bytes

AHEAD = 16  # buckets that are launched before a gather asks for them: the bus works while the host plans a step


def offload_optimizer_states(
    optimizer: Optimizer,
    world: World,
    *,
    bucket_bytes: int = STATE_BUCKET_BYTES,
    hidden_in: nn.Module | None = None,
) -> "OffloadedStates":
    """Move the moments of an optimizer to the host's memory; call it once, after `prepare`, on all ranks together.

    >>> optimizer = offload_optimizer_states(torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True), world)
    >>> result = run_step(model, plan, documents, world, optimizer=optimizer)

    Use what it returns in place of `optimizer`, in schedulers and checkpoints too. Parameters get the same bits, and
    checkpoints are the same files. The host's memory is taken now: on GPUs it is registered with CUDA, of exact size.
    On the device a step takes at most two buckets of `bucket_bytes` for moments (`device_bytes`).

    With `hidden_in`, the prepared model, `step` only begins the update, which goes on while `run_step` runs the model
    forward again, under any plan. Call `finish_step()` before anything else reads or changes parameters or `.grad`; the
    optimizer's own methods and `state` do so. `step` updates all if FSDP2 does not gather some of the parameters.

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
                "the device (train.offload_optimizer_states = false, and train.offload_weights = false)"
            )
        return total_state_bytes(optimizer)

    size = run_on_every_rank(world, measure_bytes, ConfigError)
    # Parameters that wait on the host are brought to the device for their updates, also where they have no states.
    any_waits = any(waits_on_host(parameter) for group in optimizer.param_groups for parameter in group["params"])
    if not world.control.reduce_object(size > 0 or any_waits, max, "bytes of the optimizer's states"):
        raise ConfigError(
            f"{type(optimizer).__name__} keeps no states with these arguments, so that none can wait on the host; "
            "leave out offload_optimizer_states (train.offload_optimizer_states = false)"
        )
    check_free_host_memory(
        size, world, "moments of the optimizer on the host (train.offload_optimizer_states) take"
    )
    return OffloadedStates(optimizer, world.device, bucket_bytes=bucket_bytes, hidden_in=hidden_in)


class OffloadedStates(Optimizer):
    """An optimizer whose states are in the host's memory, made by `offload_optimizer_states`.

    `state` holds them as tensors of the host, DTensors for parameters that are DTensors; reading it finishes an update.
    Schedulers and hooks belong to this optimizer. `inner`, which updates, has no states of its own.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        device: torch.device,
        *,
        bucket_bytes: int = STATE_BUCKET_BYTES,
        hidden_in: nn.Module | None = None,
    ) -> None:
        """Take over an optimizer's groups, and move states that it has to memory of the host, which is taken here.

        `bucket_bytes` and `hidden_in` as of `offload_optimizer_states`.
        """
        self._update: _OffloadedUpdate | None = None
        if hidden_in is not None:
            check_fsdp_names(
                "updates behind the next forward pass (hidden_in) take", "no hidden_in, which updates at once"
            )
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.inner: torch.optim.Optimizer = optimizer
        self._bucket_bytes = bucket_bytes
        self._model = hidden_in
        optimizer.param_groups = self.param_groups
        self._copies = _StateCopies(device)
        self._arena = HostArena(device, total_state_bytes(optimizer))
        self._places = dict[tuple[nn.Parameter, str], tuple[HostRange, Tensor]]()
        states = optimizer.state
        optimizer.state = defaultdict(dict)
        # States of steps that the optimizer took before; each leaves the device before the next one is copied.
        for parameter in [p for group in self.param_groups for p in group["params"] if p in states]:
            self.state[parameter] = self._copy_state_to_host(parameter, states.pop(parameter))

    def _read_state(self) -> defaultdict[Tensor, Any]:
        """An update that was begun has ended."""
        self.finish_step()
        return self.host_states

    def _set_state(self, states: defaultdict[Tensor, Any]) -> None:
        self.host_states = states

    state: Any = property(_read_state, _set_state)

    @property
    def hides_updates(self) -> bool:
        """Whether `step` may only begin an update, which cannot be taken back."""
        return self._model is not None

    @property
    def host_bytes(self) -> int:
        """The bytes of the host's memory that the states take."""
        return self._arena.bytes

    @property
    def device_bytes(self) -> int:
        """The most bytes that states take on the device: those of the two largest consecutive buckets."""
        sizes = [bucket.bytes for bucket in cut_buckets(self.inner, self._bucket_bytes, {}, every=True)]
        return max(map(sum, zip(sizes, [*sizes[1:], 0], strict=True)), default=0)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient; returns what `closure` returns.

        If updates are hidden and FSDP2 gathers all parameters of this one, the update only begins.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self.finish_step()
        groups = [] if self._model is None else [*fsdp_param_groups(fsdp_modules(self._model))]
        # Each parameter has the number of its group, in the order in which FSDP2 gathers them.
        places = {p: place for place, group in enumerate(groups) for p in sharded_parameters(group)}
        buckets = [*cut_buckets(self.inner, self._bucket_bytes, places)]
        hidden = self.hides_updates and all(part.parameter in places for b in buckets for part in b.parts)
        if hidden:
            with_states = [group for group in self.param_groups if STATES[type(self.inner)](group)]
            for parameter in [p for group in with_states for p in group["params"] if p.grad is not None]:
                # An empty state takes its place here: files of checkpoints have states in the order of the groups.
                self.host_states[parameter]
            buckets.sort(key=lambda bucket: places[bucket.parts[0].parameter])
        self._update = _OffloadedUpdate(self, self._copies, buckets)
        if hidden:
            self._update.begin(groups)
        else:
            self.finish_step()
        return loss

    def finish_step(self) -> None:
        """End the update that the last `step` began: whatever reads parameters, gradients or states now is behind it.

        Raises ModelError where that update failed between two buckets.
        """
        if self._update is not None:
            self._update.finish()
            self._update = None

    def drop_failed_update(self) -> None:
        """Forget an update that failed between two buckets, once parameters and states are to be loaded anew."""
        if self._update is not None and self._update.failure:
            self._update = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero the gradients, as torch does.

        An update that goes on keeps references to gradients that are dropped. Before any are zeroed in place, which it
        would see, it is finished.
        """
        if not set_to_none:
            self.finish_step()
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as torch does; moments go to the host, other values through the inner optimizer.

        A pending update is finished first, and one that failed is dropped.
        """
        self.drop_failed_update()
        self.finish_step()
        state_dict = {**state_dict}
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        states: dict[Any, dict[str, Any]] = state_dict["state"]
        small = {
            key: {name: value for name, value in state.items() if not _is_moment(value)}
            for key, state in states.items()
        }
        self.inner.load_state_dict(state_dict | {"state": small})
        loaded = self.inner.state  # the small values, where torch brought them
        self.inner.state = defaultdict(dict)
        self.param_groups: list[dict[str, Any]] = self.inner.param_groups
        saved_keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = dict(zip(saved_keys, (p for group in self.param_groups for p in group["params"]), strict=True))
        self.state = defaultdict(dict)  # pyright: ignore[reportIncompatibleVariableOverride]
        for key, state in states.items():
            parameter = parameters[key]
            values = {
                name: value if _is_moment(value) else loaded[parameter][name] for name, value in state.items()
            }
            self.state[parameter] = self._copy_state_to_host(parameter, values)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    # ---- the host's memory

    def _copy_state_to_host(self, parameter: nn.Parameter, state: Mapping[str, Any]) -> dict[str, Any]:
        values = dict(state)
        for name, value in state.items():
            if _is_moment(value):
                values[name] = host = self.host_tensor(parameter, name)
                local_tensor(host).copy_(local_tensor(value))
        return values

    def host_tensor(self, parameter: nn.Parameter, name: str) -> Tensor:
        """Return the host's memory of a parameter's moment, which is called `name` in the state; the first call takes
        it.

        It is a tensor in the parameter's dtype, and a DTensor of a parameter that is one.
        """
        local = local_tensor(parameter.detach())
        if (parameter, name) not in self._places:
            place = self._arena.take_range(local.nbytes)
            self._places[parameter, name] = place, place.view_like(local)
        _, tensor = self._places[parameter, name]
        return sharded_state(parameter.detach(), tensor)


@dataclass(frozen=True)
class _Fetched:
    """Stand-ins of a bucket's parts, their states, and the event after which all are on the device (None: now)."""

    stand_ins: list[nn.Parameter]
    states: list[dict[str, Any]]
    arrived: torch.cuda.Event | None


class _OffloadedUpdate:
    """One step of an optimizer with states on the host: its buckets, those that are launched and those that wait.

    What a bucket's update needs is kept here as it was when the step was taken: gradients, settings, the scale, keys of
    random bits, and the states (`_before`), so that all parts of a parameter start from the same count of steps.
    `failure` says, after an error between two buckets, what is updated.
    """

    def __init__(
        self, optimizer: "OffloadedStates", copies: "_StateCopies", buckets: Sequence[StateBucket]
    ) -> None:
        """Note what an update needs, and draw the keys of its random bits; nothing is launched yet."""
        self._optimizer = optimizer
        self._copies = copies
        self._waiting = deque(buckets)
        self._total = len(buckets)
        self._launched = 0
        self._updated = deque[tuple[StateBucket, torch.cuda.Event | None]]()  # launched, and not waited for
        self._last_bucket = {part.parameter: index for index, bucket in enumerate(buckets) for part in bucket.parts}
        # The event follows the last bucket that was waited for.
        self._event: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None  # None: that of the caller
        # FSDP2's groups, and stores of parameters on the host, wait for the updates of what they read.
        self._groups = list[HookedParamGroup]()
        self._stores = list[Any]()
        self.failure = ""
        inner = optimizer.inner
        self._scale = inner.gradient_scale if isinstance(inner, OnePassAdamW) else None
        self._before = {p: {**optimizer.host_states.get(p, {})} for p in self._last_bucket}
        self._keys = {p: inner.draw_key(p) for p in self._last_bucket} if isinstance(inner, OnePassAdamW) else {}
        self._buckets = self._run_buckets()

    # ---- when a bucket is updated

    def begin(self, groups: Sequence[Any]) -> None:
        """Launch the first buckets on a stream of their own, and have every reader of parameters wait for its updates.

        Readers are FSDP2's `groups`, which gather, and stores of parameters on the host, which copy. A group waits
        once, a store until the update ends.
        """
        self._stream = self._copies.begin_updates()
        self._groups = [hook_group(group) for group in groups]
        for group in self._groups:
            group.before_next_gather.append(self._wait_for_updates_of)
        stores = {vars(parameter)[HOST_STORE] for parameter in self._last_bucket if waits_on_host(parameter)}
        self._stores = [*stores]
        for store in self._stores:
            store.before_fetch = self._wait_for_updates_of
        self._launch_buckets(self._ahead)

    def finish(self) -> None:
        """Update what still waits; no reader waits from then on.

        The current stream waits for updates, the host for what is copied to it.

        Raises ModelError for an update that failed before.
        """
        if self.failure:
            raise ModelError(self.failure)
        self._release_readers()
        try:
            self._launch_buckets(self._total)
            self._buckets.close()
        finally:
            self._copies.wait_for_all()

    @property
    def _ahead(self) -> int:
        return AHEAD if self._stream is not None else 0

    def _release_readers(self) -> None:
        for group in self._groups:
            if self._wait_for_updates_of in group.before_next_gather:
                group.before_next_gather.remove(self._wait_for_updates_of)
        for store in self._stores:
            store.before_fetch = None

    def _wait_for_updates_of(self, parameters: Sequence[nn.Parameter]) -> torch.cuda.Event | None:
        """Launches the updates first if need be. Gradients of updates that it waited for are free from then on. The
        current stream waits for the event that is returned."""
        last = max((self._last_bucket.get(parameter, -1) for parameter in parameters), default=-1)
        count = last + 1
        self._launch_buckets(count + self._ahead)
        while self._updated and self._launched - len(self._updated) < count:
            _, self._event = self._updated.popleft()
        self._copies.wait_for_event(self._event)
        return self._event

    def _launch_buckets(self, count: int) -> None:
        """An error that leaves some buckets updated, or readers that wait, is also noted in `failure`."""
        missing = max(0, min(count, self._total) - self._launched)
        on_stream = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        try:
            with torch.inference_mode(False), torch.no_grad(), on_stream:
                for _ in islice(self._buckets, missing):
                    self._launched += 1
        except BaseException as error:
            if self._launched or self._groups or self._stores:
                self.failure = (
                    f"an update failed after {self._launched} of {self._total} buckets: their parameters and moments "
                    "are updated, the others are not; start again from a checkpoint"
                )
                error.add_note(self.failure)
                self._release_readers()
                self._copies.wait_for_all()
            raise

    def _run_buckets(self) -> Generator[None]:
        """One bucket is updated at each `next`, while the next one comes and the one before goes."""
        fetched = self._fetch_bucket(self._waiting[0]) if self._waiting else None
        # The tensors of the bucket before stay until they are on the host.
        device_tensors = list[Tensor]()
        try:
            while self._waiting:
                bucket = self._waiting.popleft()
                self._copies.wait_for_stores()
                device_tensors.clear()  # frees the memory that the next bucket takes
                assert fetched is not None
                next_fetched = self._fetch_bucket(self._waiting[0]) if self._waiting else None
                self._copies.wait_for_event(fetched.arrived)
                new_states = self._update_bucket(bucket, fetched)
                device_tensors = self._store_bucket(bucket, fetched.stand_ins, new_states)
                if self._stream is not None:  # otherwise gradients are the caller's
                    stored = any(waits_on_host(part.parameter) for part in bucket.parts)
                    self._updated.append((bucket, self._copies.record_update(stored=stored)))
                fetched = next_fetched
                del bucket, next_fetched, new_states
                yield
        finally:
            self._copies.wait_for_stores()

    # ---- what an update of a bucket is

    def _fetch_bucket(self, bucket: StateBucket) -> _Fetched:
        """Each part but the last of a parameter counts its step in a copy: the parameter's own count moves on once."""
        states = list[dict[str, Any]]()
        pairs = list[tuple[Tensor, Tensor]]()  # (device, host)

        def place(host: Tensor) -> Tensor:
            """Return an empty tensor on the device, and note that `host` is to be copied into it."""
            pairs.append((torch.empty_like(host, device=self._copies.device), host))
            return pairs[-1][0]

        for part in bucket.parts:
            state = dict[str, Any]()
            for name, value in self._before[part.parameter].items():
                if _is_moment(value):
                    state[name] = place(part.local_view(local_tensor(value)))
                else:  # a count, which the update of every part moves on
                    state[name] = value.clone() if isinstance(value, Tensor) and not part.last else value
            states.append(state)
        stand_ins = [part.make_stand_in(place) for part in bucket.parts]
        return _Fetched(stand_ins, states, self._copies.fetch(pairs))

    def _update_bucket(self, bucket: StateBucket, fetched: _Fetched) -> list[dict[str, Any]]:
        """Where DTensors are in the group torch would not choose its foreach kernels, but for plain stand-ins it
        would: an open choice becomes False."""
        inner = self._optimizer.inner
        settings = inner.param_groups
        pairs = [*zip(fetched.stand_ins, bucket.parts, strict=True)]
        group = {**bucket.group, "params": fetched.stand_ins}
        if "foreach" in group and any(isinstance(parameter, DTensor) for parameter in bucket.group["params"]):
            group["foreach"] = bool(group["foreach"])
        inner.param_groups = [group]
        inner.state = defaultdict(
            dict, {p: state for p, state in zip(fetched.stand_ins, fetched.states, strict=True) if state}
        )
        try:
            if isinstance(inner, OnePassAdamW):
                parts = {
                    stand_in: ParameterPart(part.parameter, part.start, self._keys[part.parameter])
                    for stand_in, part in pairs
                }
                with inner.use_stand_ins(parts, self._scale):
                    inner.step()
            else:
                inner.step()
            return [inner.state.get(p, {}) for p in fetched.stand_ins]
        finally:
            inner.param_groups = settings
            inner.state = defaultdict(dict)

    def _store_bucket(
        self, bucket: StateBucket, stand_ins: Sequence[nn.Parameter], states: Sequence[dict[str, Any]]
    ) -> list[Tensor]:
        """Returns the tensors that stay on the device until all are copied."""
        pairs = [
            (part.numbers, stand_in.detach())
            for part, stand_in in zip(bucket.parts, stand_ins, strict=True)
            if waits_on_host(part.parameter)
        ]
        for part, new_state in zip(bucket.parts, states, strict=True):
            for name, value in new_state.items():
                state = self._optimizer.host_states[part.parameter]
                if _is_moment(value):
                    state[name] = host = self._optimizer.host_tensor(part.parameter, name)
                    pairs.append((part.local_view(local_tensor(host)), value))
                else:
                    state[name] = value
        self._copies.store(pairs)
        return [value for _, value in pairs]


class _StateCopies:
    """Copies between host and device, each way on a stream of its own; on a CPU they are made at once.

    The GPU's memory is taken and freed on the stream that updates.
    """

    def __init__(self, device: torch.device) -> None:
        """Make the streams, on a GPU; that of hidden updates is made when it is first used."""
        self.device = device
        on_gpu = device.type == "cuda"
        self._to_device = torch.cuda.Stream(device) if on_gpu else None
        self._to_host = torch.cuda.Stream(device) if on_gpu else None
        self._updates: torch.cuda.Stream | None = None

    def begin_updates(self) -> torch.cuda.Stream | None:
        """Return the stream of updates that are hidden, behind what the current one was given; None on a CPU."""
        if self._to_host is not None:
            # Updates have priority over the products of layers, which fill the device.
            if self._updates is None:
                self._updates = torch.cuda.Stream(self.device, priority=-1)
            self._updates.wait_stream(torch.cuda.current_stream(self.device))
        return self._updates

    def record_update(self, *, stored: bool) -> torch.cuda.Event | None:
        """Return the event after an update on the current stream, or after what it `stored` on the host (None: now)."""
        if self._to_host is None:
            return None
        event = torch.cuda.Event()
        event.record(self._to_host if stored else torch.cuda.current_stream(self.device))
        return event

    def fetch(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
        """Copy pairs (on the device, on the host) to the device; return the event after which all are there (None:
        now).
        """
        return self._copy_pairs(pairs, self._to_device)

    def store(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy pairs (on the host, on the device) to the host; `wait_for_stores` waits for them."""
        self._copy_pairs(pairs, self._to_host)

    def _copy_pairs(
        self, pairs: Iterable[tuple[Tensor, Tensor]], stream: torch.cuda.Stream | None
    ) -> torch.cuda.Event | None:
        """Copies the second tensor of each pair into the first. All are copied after the event (None: now)."""
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

    def wait_for_event(self, event: torch.cuda.Event | None) -> None:
        """Let the current stream wait for an event; None has passed."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def wait_for_stores(self) -> None:
        """Let the current stream wait for all copies to the host."""
        self._wait_for_stream(self._to_host)

    def wait_for_all(self) -> None:
        """Let the current stream wait for all copies and hidden updates, and the host for what is copied to it."""
        for stream in (self._to_device, self._updates, self._to_host):
            self._wait_for_stream(stream)
        if self._to_host is not None:
            self._to_host.synchronize()

    def _wait_for_stream(self, stream: torch.cuda.Stream | None) -> None:
        if stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(stream)


def _is_moment(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0
