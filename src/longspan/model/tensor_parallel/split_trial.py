"""Trials of blocks that tensor parallelism splits: with numbers on the host before, or at an encoder's first call.

Names of linears do not prove a split right: a block may use a mean or threshold over all features, reshape to its whole
width, or norm over all heads.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from longspan.comm import World, world_of
from longspan.comm.tp_collectives import tp_sum
from longspan.errors import LongspanError, ModelError
from longspan.model.layers import preserve_modes
from longspan.model.tensor_parallel.module_styles import COLWISE, ROWWISE, StyledModule, split_block_names
from longspan.model.weights.local_tensors import local_tensor

# How far a right split may be from the unsplit block, relative to the norm of what is compared: rounding, with room.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
_LOW_PRECISION = 0.1
# Below this share of the largest gradient a gradient may be rounding alone, as that of a key's bias is.
_FLOOR = 0.03


class SplitTrial:
    """Compares the first call of a block, or of a part outside blocks, with its unsplit twin: outputs and gradients.

    Made before the split; the twin, a copy without values, runs with gathered parameters in evaluation mode.
    """

    def __init__(self, name: str, unit: nn.Module, world: World) -> None:
        """Keep a twin of `unit`, named `name` in messages, before it is split."""
        self.unit: nn.Module = unit
        self._key = world.key
        self._name = f"{name} ({type(unit).__name__})"
        self._twin = _copy_without_values(unit)

    def hook_next_call(self) -> None:
        """Wrap the block's forward so that its next call is compared, and raises ModelError if the split is wrong."""
        unit: Any = self.unit
        inner = unit.forward

        @wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            """Compare this call with the twin's, once, and then run the block as before."""
            # Inference mode allows no gradients: the call after is compared.
            if not torch.is_inference_mode_enabled():
                unit.forward = inner
                self._check_call(inner, args, kwargs)
            return inner(*args, **kwargs)

        unit.forward = forward

    def _check_call(self, split: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """All tensor-parallel ranks enter it, and raise if any sees a difference. Gradients of sharded parameters
        are compared by slice."""
        parameters = {name: p for name, p in self.unit.named_parameters() if p.requires_grad}
        buffers = dict(self.unit.named_buffers())
        detached = {name: p.detach() for name, p in self.unit.named_parameters()}
        values = {n: x.full_tensor() if isinstance(x, DTensor) else x.clone() for n, x in detached.items()}
        whole_parameters = {name: values[name].requires_grad_() for name in parameters}

        with preserve_modes(self.unit), torch.enable_grad():
            self._twin.eval()
            self.unit.eval()
            unsplit = partial(functional_call, self._twin, values | buffers)
            expected = _call_results(lambda *a, **k: unsplit(a, k), args, kwargs, whole_parameters)
            try:
                results = _call_results(split, args, kwargs, parameters)
            except LongspanError:
                raise
            except Exception as error:  # whatever a block raises that was given some of its heads and features
                raise self._split_error(
                    f"it raises {type(error).__name__}: {' '.join(str(error).split())[:200]}"
                ) from error
        slices = {name: _part_of_this_rank(x, results.get(name), self._key) for name, x in expected.items()}
        # Errors are relative to the norm of a result, or to a share of the largest gradient's where that is more.
        norms = {name: x.double().norm().item() for name, x in slices.items() if x is not None}
        largest_gradient = max((n for name, n in norms.items() if not name.startswith("output")), default=0.0)
        wrong = list[str]()
        for name, norm in norms.items():
            x = slices[name]
            result = results[name]
            assert x is not None
            distance = (local_tensor(result).double() - x.double()).norm().item() if result is not None else norm
            error = distance / max(norm, _FLOOR * largest_gradient, 1e-30)
            if not error <= _TOLERANCE.get(x.dtype, _LOW_PRECISION):  # true also of an error that is NaN
                wrong.append(f"{name} differs by {error:.1g} of its norm")
        ranks_that_differ = tp_sum(torch.tensor([float(bool(wrong))], device=world_of(self._key).device), self._key)
        if ranks_that_differ.item():
            raise self._split_error(", ".join(wrong[:4]) or "it differs on another tensor-parallel rank")

    def _split_error(self, reason: str) -> ModelError:
        tp = world_of(self._key).home.tp
        return ModelError(
            f"{self._name} split over tp {tp} is not the unsplit block: {reason}. Where its "
            "attention reshapes rows, write reshape(rows, -1) instead of a whole width and use self.num_heads; say in "
            'tp_plan what its linears are ("replicated" leaves one whole); or use tp 1'
        )


def _copy_without_values(unit: nn.Module) -> nn.Module:
    """Buffers and configurations are shared with the copy."""
    memo: dict[int, Any] = {}
    for parameter in unit.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    for child in unit.modules():
        shared = (*child.buffers(recurse=False), getattr(child, "config", None))
        memo.update({id(value): value for value in shared})
    return copy.deepcopy(unit, memo)


def _call_results(
    call: Callable[..., Any], args: Any, kwargs: Any, parameters: Mapping[str, Tensor]
) -> dict[str, Tensor | None]:
    """Backward begins with cosines, all different, as gradients of the outputs. Inputs that need gradients, and the
    first, are replaced by copies, so that it does not enter the caller's graph."""
    inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_floating_point()]
    differentiable = {id(x) for i, x in enumerate(inputs) if i == 0 or x.requires_grad}
    copies = {id(x): x.detach().clone().requires_grad_() for x in inputs if id(x) in differentiable}
    args, kwargs = tree_map(lambda x: copies.get(id(x), x), (args, kwargs))
    outputs = [x for x in tree_leaves(call(*args, **kwargs)) if isinstance(x, Tensor) and x.requires_grad]
    leaves = {f"the gradient of input {i}": x for i, x in enumerate(copies.values())}
    leaves |= {f"the gradient of {name}": p for name, p in parameters.items()}
    numbers = [torch.arange(x.numel(), device=x.device, dtype=torch.float32) for x in outputs]
    output_gradients = [n.cos().view_as(x).to(x.dtype) for n, x in zip(numbers, outputs, strict=True)]
    gradients = torch.autograd.grad(outputs, [*leaves.values()], output_gradients, allow_unused=True)
    results: dict[str, Tensor | None] = {f"output {i}": x.detach() for i, x in enumerate(outputs)}
    return results | dict(zip(leaves, gradients, strict=True))


def _part_of_this_rank(expected: Tensor | None, result: Tensor | None, key: int) -> Tensor | None:
    if expected is None or not isinstance(result, DTensor):
        return expected
    (placement,) = result.placements
    world = world_of(key)
    return expected.chunk(world.home.tp, placement.dim)[world.coordinates.tp]  # pyright: ignore[reportAttributeAccessIssue]


# A trial has an even number of features, large enough for some to pass a threshold of the largest twentieth.
_FEATURES = 64


def refuse_mixed_features(model: nn.Module, styled_modules: Sequence[StyledModule]) -> None:
    """Raise ModelError for a block whose features depend on each other where they are split."""
    styles = {id(entry.module): entry.style for entry in styled_modules}
    for name in sorted(split_block_names(styled_modules)):
        block = model.get_submodule(name)
        if mixes_features(block, styles):
            raise ModelError(
                f"{name} ({type(block).__name__}) computes from all its features together what its row-wise linear "
                "gets, and a tensor-parallel rank holds some of them; use tp 1"
            )


@torch.no_grad()
def mixes_features(block: nn.Module, styles: Mapping[int, str]) -> bool:
    """Return whether features depend on each other between the block's column-wise and row-wise linears.

    The block runs with stand-ins for column-wise linears, which return random features: all of them, then each half. If
    features are independent, the row-wise linear gets the same both times. False for a block that cannot be tried so.
    """
    column_names, row_names = (
        [name for name, module in block.named_modules() if styles.get(id(module)) == style]
        for style in (COLWISE, ROWWISE)
    )
    numbers = torch.randn(1, 2, _FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    # Each linear returns other numbers.
    outputs = [numbers.roll(3 * shift, -1) for shift in range(len(column_names))]
    parts = [outputs, *zip(*(output.chunk(2, -1) for output in outputs), strict=True)]
    try:
        at_once, *halves = (
            _row_wise_input(block, dict(zip(column_names, part, strict=True)), row_names) for part in parts
        )
        return not torch.allclose(at_once, torch.cat(halves, -1))
    except Exception:  # whatever a block raises that needs more than hidden states, or its own number of features
        return False


def _row_wise_input(block: nn.Module, outputs: Mapping[str, Tensor], row_names: Sequence[str]) -> Tensor:
    """All other weights and buffers are 1. IndexError if no row-wise linear is reached."""
    twin = _copy_without_values(block)
    row_linear = _StandIn()
    for name in row_names:
        twin.set_submodule(name, row_linear)
    for name, out in outputs.items():
        twin.set_submodule(name, _StandIn(out))
    tensors = (*twin.named_parameters(), *twin.named_buffers())
    ones = {name: torch.ones(x.shape, dtype=torch.float64) for name, x in tensors}
    # What comes after the first row-wise linear does not count.
    with suppress(Exception):
        functional_call(twin, ones, (torch.zeros(1, 2, 1, dtype=torch.float64),))
    return row_linear.inputs[0]


class _StandIn(nn.Module):
    """Stands for a linear, and returns `out`, or its input."""

    def __init__(self, out: Tensor | None = None) -> None:
        super().__init__()
        self.out = out
        self.inputs = list[Tensor]()

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        self.inputs.append(x)
        return x if self.out is None else self.out
