"""What an update handles at a time where moments wait on the host: parts of parameters, in buckets of bounded bytes.

Optimizers of torch that update each number by itself get a large parameter in parts, with the same bits; others get
whole parameters, a few at a time. What their states take is found by updates of small tensors, before the first step.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from longspan.errors import ConfigError
from longspan.model.weights.local_tensors import local_tensor
from longspan.train.optim.one_pass_adamw import OnePassAdamW
from longspan.train.optim.stochastic_rounding import StochasticRounding

# Classes that update each number by itself: any part of a parameter may be updated alone.
BY_NUMBER: set[type[optim.Optimizer]] = {
    *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax),
    *(optim.Adadelta, optim.Adagrad, optim.RMSprop, optim.Rprop, optim.ASGD, OnePassAdamW),
}
CUT = 1024  # numbers: a part begins at a multiple, so that kernels treat its numbers as they do in the whole
ALIGNMENT = 256  # bytes of each state's place on the host


@dataclass(frozen=True, eq=False)
class Part:
    """Numbers `start` to `stop` of a parameter's local tensor; `whole`: the parameter itself, of any memory layout.

    `last`: no part of this parameter follows. The optimizer gets a part of a DTensor as a plain tensor if `plain`, for
    then its group says which kernels it uses (fused, foreach); else as a DTensor, for which it chooses the same kernels
    as for the whole.
    """

    parameter: nn.Parameter
    start: int
    stop: int
    whole: bool
    last: bool
    plain: bool

    def local_view(self, local: Tensor) -> Tensor:
        """Return this part of the parameter's local tensor, its gradient's, or that of a state; a view."""
        return local if self.whole else local.view(-1)[self.start : self.stop]

    def make_stand_in(self) -> nn.Parameter:
        """Return a parameter with the same memory, and gradient, which an optimizer updates in place of the part."""
        if self.whole:
            return self.parameter
        assert self.parameter.grad is not None
        stand_in = nn.Parameter(self._view_like(self.parameter, self.local_view(local_tensor(self.parameter.detach()))))
        stand_in.grad = self._view_like(self.parameter, self.local_view(local_tensor(self.parameter.grad)))
        return stand_in

    def device_state(self, value: Tensor, local: Tensor) -> Tensor:
        """Return the state of the stand-in, from the parameter's on the host and this part of it on the device."""
        return make_sharded_tensor(value, local) if self.whole else self._view_like(value, local)

    def _view_like(self, like: Tensor, local: Tensor) -> Tensor:
        return local_dtensor(local, like) if isinstance(like, DTensor) and not self.plain else local


def local_dtensor(local: Tensor, like: DTensor) -> DTensor:
    """Make a DTensor on the mesh of `like` that claims to be replicated, so that operations on numbers stay local."""
    mesh = like.device_mesh
    return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)


def make_sharded_tensor(value: Tensor, local: Tensor) -> Tensor:
    """Make a tensor sharded as `value` is, with this local tensor, which may be on another device than the mesh."""
    if not isinstance(value, DTensor):
        return local
    spec = value._spec
    assert spec.tensor_meta is not None
    spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
    # `from_local` would copy a tensor of the host to the mesh's device; FSDP2 places parameters on the host like this
    return DTensor(local, spec, requires_grad=False)


def can_split(optimizer: Optimizer, parameter: nn.Parameter) -> bool:
    """Return whether the optimizer may update any part of the parameter by itself: a range of its flat local tensor."""
    local = local_tensor(parameter.detach())
    gradient = local if parameter.grad is None else local_tensor(parameter.grad)
    is_flat = local.ndim > 0 and local.is_contiguous() and gradient.is_contiguous() and local.shape == gradient.shape
    return type(optimizer) in BY_NUMBER and is_flat


@dataclass(frozen=True)
class Bucket:
    """Parts of parameters of one group that are updated together."""

    group: dict[str, Any]
    parts: tuple[Part, ...]
    bytes: float


def cut_buckets(
    optimizer: Optimizer, sizes: "StateSizes", bucket_bytes: int, *, every: bool = False
) -> Iterator[Bucket]:
    """Cut the parameters with gradients, or `every` parameter, into buckets whose states take `bucket_bytes` at most.

    Only a bucket of a single parameter that must stay whole may take more.
    """
    for index, group in enumerate(optimizer.param_groups):
        plain = bool(group.get("fused") or group.get("foreach"))  # the group says which kernels it uses (`Part`)
        parts, filled = list[Part](), 0.0
        for parameter in group["params"]:
            if parameter.grad is None and not every:
                continue
            number_bytes = sizes.parameter_bytes(index, parameter) / max(local_tensor(parameter.detach()).numel(), 1)
            for part in _split_parameter(optimizer, parameter, number_bytes, bucket_bytes, plain=plain):
                part_bytes = number_bytes * (part.stop - part.start)
                if parts and filled + part_bytes > bucket_bytes:
                    yield Bucket(group, tuple(parts), filled)
                    parts, filled = [], 0.0
                parts.append(part)
                filled += part_bytes
        if parts:
            yield Bucket(group, tuple(parts), filled)


def _split_parameter(
    optimizer: Optimizer, parameter: nn.Parameter, number_bytes: float, bucket_bytes: int, *, plain: bool
) -> Iterator[Part]:
    """`number_bytes` are those of the states of one number. A rank that holds none of a parameter's numbers gets one
    empty part, whose update counts the step.
    """
    numel = local_tensor(parameter.detach()).numel()
    if not can_split(optimizer, parameter):
        yield Part(parameter, 0, numel, whole=True, last=True, plain=plain)
        return
    step = numel if numel * number_bytes <= bucket_bytes else max(int(bucket_bytes / number_bytes) // CUT, 1) * CUT
    for start in range(0, max(numel, 1), max(step, 1)):
        stop = min(numel, start + step)
        yield Part(parameter, start, stop, whole=False, last=stop == numel, plain=plain)


# ---- what states take, and whether parts may be updated one after another


class StateSizes:
    """The bytes that an optimizer's states take on the host, found by an update of a small tensor of each kind.

    >>> StateSizes(AdamW([nn.Parameter(torch.zeros(64))])).parameter_bytes(0, parameter)
    512

    For classes of BY_NUMBER one number is updated, and its states count for each number; for others a tensor of the
    parameter's local shape. Raises ConfigError for states that cannot wait on the host.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        """Measure nothing yet. Under rounding by chance, the class that updates says whether states count by number."""
        self._optimizer = optimizer
        kind = optimizer.kind if isinstance(optimizer, StochasticRounding) else type(optimizer)
        self._by_number = kind in BY_NUMBER
        self._bytes = dict[Any, tuple[int, ...]]()

    def parameter_bytes(self, group: int, parameter: nn.Parameter) -> int:
        """Return the bytes of a parameter's states under the settings of the group with this index.

        Each is rounded up to ALIGNMENT bytes as by `HostArena.take`, for which 0 bytes count as 1.
        """
        local = local_tensor(parameter.detach())
        shape = (1,) * min(local.ndim, 1) if self._by_number else tuple(local.shape)
        key = group, local.dtype, shape
        if key not in self._bytes:
            self._bytes[key] = self._state_bytes(group, local.new_zeros(shape))
        scale = local.numel() if self._by_number else 1
        return sum(-(-max(size * scale, 1) // ALIGNMENT) * ALIGNMENT for size in self._bytes[key])

    def total_bytes(self) -> int:
        """Return the bytes of all states of this rank: of its parameters that take a gradient."""
        groups = enumerate(self._optimizer.param_groups)
        return sum(
            self.parameter_bytes(index, p) for index, group in groups for p in group["params"] if p.requires_grad
        )

    def _state_bytes(self, group: int, values: Tensor) -> tuple[int, ...]:
        """Return the bytes of each state that would wait on the host, of a parameter of this group with these values.

        A copy of the optimizer takes one step of the parameter alone. That of a class of BY_NUMBER begins with the
        states of the group's first parameter, if it has any, cut to this size. Raises ConfigError if states are no
        plain tensors.
        """
        parameter = nn.Parameter(values)
        parameter.grad = torch.zeros_like(values)
        shadow = make_shadow(self._optimizer, self._optimizer.param_groups[group], [parameter])
        # Adagrad makes states in its constructor (torch 2.11), which a shadow does not run: it begins with those.
        if self._by_number and (first := self._first_state(group)):
            shadow.state[parameter] = {
                name: value.flatten()[:1].expand_as(values).clone() if waits_on_host(value, values) else deepcopy(value)
                for name, value in first.items()
            }
        shadow.step()
        state = shadow.state[parameter]
        for name, value in state.items():
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            if tensors and (tensors[0] is not value or type(value) not in (Tensor, nn.Parameter)):
                raise ConfigError(
                    f"{type(self._optimizer).__name__} keeps {name!r} as {type(value).__name__}; only plain tensors "
                    "wait on the host: use adamw, or keep its states on the device (train.offload_states = false)"
                )
        return tuple(value.nbytes for value in state.values() if waits_on_host(value, parameter))

    def _first_state(self, group: int) -> dict[str, Any]:
        states = (self._optimizer.state.get(p) for p in self._optimizer.param_groups[group]["params"])
        first: Mapping[str, Any] = next((state for state in states if state), {})
        return {name: local_tensor(value) if isinstance(value, Tensor) else value for name, value in first.items()}


def waits_on_host(value: Any, parameter: Tensor) -> bool:
    """Return whether a state waits on the host: a tensor on the parameter's device with dims, not a count of steps."""
    return isinstance(value, Tensor) and value.ndim > 0 and value.device == parameter.device


def make_shadow(optimizer: Optimizer, group: Mapping[str, Any], parameters: Sequence[nn.Parameter]) -> Optimizer:
    """Copy an optimizer, with other parameters in one group with these settings, no states and no hooks.

    The optimizer itself stays as it is.
    """
    shadow = object.__new__(type(optimizer))
    shadow.__dict__.update(optimizer.__dict__)
    shadow.__dict__.pop("step", None)  # a scheduler of torch puts there a step of the optimizer itself
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(shadow, hooks, OrderedDict())
    settings = deepcopy({key: value for key, value in group.items() if key != "params"})
    shadow.param_groups, shadow.state = [settings | {"params": [*parameters]}], defaultdict(dict)
    return shadow


def check_separate_updates(optimizer: Optimizer) -> None:
    """Raise ConfigError for an optimizer that updates parameters together in another way than one after another.

    Small tensors, two for each shape of a parameter cut to 4 numbers a dim, are updated both ways. Classes of BY_NUMBER
    and rounding by chance need no trial. The optimizer does not change.
    """
    if type(optimizer) in BY_NUMBER or isinstance(optimizer, StochasticRounding):
        return
    for group in optimizer.param_groups:
        shapes = {tuple(min(size, 4) for size in local_tensor(p.detach()).shape): p for p in group["params"]}
        like = [*shapes.values()]
        if difference := _update_difference(optimizer, group, [*shapes, *shapes], [*like, *like]):
            raise ConfigError(
                f"{type(optimizer).__name__} cannot update a few parameters at a time, as states on the host need: "
                f"{difference}; use adamw, sgd, or keep its states on the device (train.offload_states = false)"
            )


STEPS = 3  # updates of the trial


def _update_difference(
    optimizer: Optimizer, group: Mapping[str, Any], shapes: Any, like: Sequence[nn.Parameter]
) -> str:
    """Two equal sets of random parameters take STEPS steps along equal gradients, one set at once, the other parameter
    by parameter. Neither values nor the group's settings, in which some optimizers count steps, may differ in one
    bit. Parameters have these `shapes`, and the types and devices of the parameters in `like`.
    """
    draws = torch.Generator().manual_seed(0)
    values = [
        torch.randn(shape, generator=draws).to(local_tensor(p.detach())) for shape, p in zip(shapes, like, strict=True)
    ]
    together, single = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    at_once, one_by_one = make_shadow(optimizer, group, together), make_shadow(optimizer, group, ())
    for _ in range(STEPS):
        for a, b in zip(together, single, strict=True):
            a.grad = torch.randn(a.shape, generator=draws).to(a)
            b.grad = a.grad.clone()
        at_once.step()
        for parameter in single:
            one_by_one.param_groups[0]["params"] = [parameter]
            one_by_one.step()
    if not all(map(torch.equal, together, single)):
        return "together they become others than one after another"
    changed = [
        key
        for key, value in at_once.param_groups[0].items()
        if key != "params" and not _are_equal(value, one_by_one.param_groups[0][key])
    ]
    return f"it counts in the group's {changed[0]!r}" if changed else ""


def _are_equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b
