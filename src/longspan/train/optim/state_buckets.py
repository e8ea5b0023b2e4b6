"""Parts of parameters, in buckets whose moments are on the device together (`offload_states.py`)."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from longspan.model.host_arena import range_bytes
from longspan.model.marks import waits_on_host
from longspan.model.weights.local_tensors import local_tensor
from longspan.train.optim.one_pass_adamw import OnePassAdamW

CUT = 1024  # numbers: a part begins at a multiple, so that kernels treat its numbers as they do in the whole
# Classes that update each number by itself, and how many numbers they keep for it under a group's settings.
STATES: dict[type[optim.Optimizer], Callable[[Mapping[str, Any]], int]] = {
    **dict.fromkeys((OnePassAdamW, optim.Adam, optim.AdamW), lambda group: 2 + bool(group["amsgrad"])),
    **dict.fromkeys((optim.NAdam, optim.RAdam, optim.Adamax, optim.Adadelta, optim.Rprop), lambda _: 2),
    **dict.fromkeys((optim.Adagrad, optim.ASGD), lambda _: 1),
    optim.SGD: lambda group: int(group["momentum"] != 0),
    optim.RMSprop: lambda group: 1 + (group["momentum"] > 0) + bool(group["centered"]),
}


def total_state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of this rank's states in the host's memory, each a range of its own."""
    sizes = (
        (STATES[type(optimizer)](group), local_tensor(parameter.detach()))
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    )
    return sum(states * range_bytes(local.nbytes) for states, local in sizes)


@dataclass(frozen=True, eq=False)
class StatePart:
    """Numbers `start` to `stop` of a parameter's local tensor, or all of one that is not `flat`, in its own strides.

    `last`: no part of this parameter follows. The gradient is kept here, for `.grad` may be dropped before its update.
    """

    parameter: nn.Parameter
    gradient: Tensor | None
    start: int
    stop: int
    flat: bool
    last: bool

    def local_view(self, local: Tensor) -> Tensor:
        """Return this part of the parameter's local tensor, its gradient's, or that of a state; a view."""
        return local.view(-1)[self.start : self.stop] if self.flat else local

    @property
    def numbers(self) -> Tensor:
        """This part of the parameter's own numbers; a view."""
        return self.local_view(local_tensor(self.parameter.detach()))

    def make_stand_in(self, place: Callable[[Tensor], Tensor]) -> nn.Parameter:
        """Return a plain parameter that is updated in place of the part, with its gradient.

        It has the part's own memory. Where the parameter waits on the host, `place` gives memory on the device for
        numbers and gradient.
        """
        assert self.gradient is not None
        numbers = self.numbers
        gradient = self.local_view(self.gradient)
        if waits_on_host(self.parameter):
            numbers = place(numbers)
            gradient = place(gradient)
        stand_in = nn.Parameter(numbers)
        stand_in.grad = gradient
        return stand_in


@dataclass(frozen=True)
class StateBucket:
    """Parts of parameters of one group that are updated together, under its settings of now."""

    group: dict[str, Any]
    parts: tuple[StatePart, ...]
    bytes: int


def cut_buckets(
    optimizer: Optimizer, bucket_bytes: int, places: Mapping[nn.Parameter, int], *, every: bool = False
) -> Iterator[StateBucket]:
    """Cut parameters with gradients, or `every` one, into buckets of at most `bucket_bytes`.

    Only a parameter whose memory cannot be cut makes a larger bucket, alone. Within a group parameters are in the order
    of their `places`, where they have some. Bytes are those of states, and of parameters and gradients that wait on the
    host: of all that a bucket brings to the device.
    """
    for group in optimizer.param_groups:
        # the settings as they are now: those of the optimizer may change before the bucket is updated
        group = {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
        parts = list[StatePart]()
        filled = 0
        parameters: Any = group["params"]
        for parameter in sorted(parameters, key=lambda p: places.get(p, 0)):
            if parameter.grad is None and not every:
                continue
            tensors = STATES[type(optimizer)](group)
            if waits_on_host(parameter):
                tensors += 2  # itself and its gradient
            number_bytes = tensors * parameter.dtype.itemsize
            most_cuts = max(bucket_bytes // max(number_bytes, 1) // CUT, 1)
            for part in _split_parameter(parameter, most_cuts * CUT):
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
    """A parameter whose memory cannot be cut is one part. A rank that holds none of its numbers gets one empty part,
    whose update counts the step."""
    local = local_tensor(parameter.detach())
    gradient = None if parameter.grad is None else local_tensor(parameter.grad)
    flat = local.is_contiguous() and (gradient is None or gradient.is_contiguous())
    for start in range(0, max(local.numel(), 1), most if flat else max(local.numel(), 1)):
        stop = min(local.numel(), start + most) if flat else local.numel()
        yield StatePart(parameter, gradient, start, stop, flat, last=stop == local.numel())


def sharded_state(like: Tensor, local: Tensor) -> Tensor:
    """Return a rank's local numbers as a DTensor sharded as `like`, on whatever device; as they are if that is none."""
    if not isinstance(like, DTensor):
        return local
    spec = like._spec
    assert spec.tensor_meta is not None
    spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
    # `from_local` would copy a tensor of the host to the mesh's device; FSDP2 places parameters on the host like this
    return DTensor(local, spec, requires_grad=False)
