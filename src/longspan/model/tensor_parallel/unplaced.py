"""Parameters inside a split block that a model's tensor-parallel plan does not name.

Between column-wise and row-wise linears a rank holds some of the features, so that what is applied there gets a partial
gradient on every rank: it is summed where the module works on each feature by itself, as a learnt activation does.
Everything else is refused. Modules that the plan names are `plan.py`'s.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from longspan.errors import ModelError
from longspan.model.tensor_parallel.plan import COLWISE, PARTIAL_GRADIENT, ROWWISE, Placed, blocks_of

_FEATURES = 8  # of the trial of a single module: any even number


def partial_parameters(model: nn.Module, placed: Sequence[Placed]) -> list[Placed]:
    """The parameters of split blocks that the plan does not name and whose gradients are to be summed over tp.

    Each once, however many blocks share it. Raises ModelError, naming them, for those of which that would not be right.
    """
    named = {id(p) for entry in placed for p in _parameters_of(entry)}
    summed: dict[int, Placed] = {}
    for block in sorted(blocks_of(placed)):
        for entry in _of_block(model, block, placed, named):
            summed.setdefault(id(next(_parameters_of(entry))), entry)
    return list(summed.values())


def _parameters_of(entry: Placed) -> Iterator[nn.Parameter]:
    if entry.parameter is None:
        yield from entry.module.parameters()
    else:
        yield getattr(entry.module, entry.parameter)


def _of_block(model: nn.Module, name: str, placed: Sequence[Placed], named: set[int]) -> Iterator[Placed]:
    block = model.get_submodule(name)
    beside = {n: p for n, p in block.named_parameters() if id(p) not in named}
    if not beside:
        return
    styles = {id(entry.module): entry.style for entry in placed}
    summed = _applied_to_features(block, beside, styles)
    for parameter in beside:
        owner, _, attribute = parameter.rpartition(".")
        module = block.get_submodule(owner)
        if parameter not in summed or module is block or not _is_elementwise(module):
            raise ModelError(
                f"{name}.{parameter} ({type(module).__name__}) is not in the tensor-parallel plan of "
                f"{type(model).__name__}, but in a block whose features are split; such a parameter is supported where "
                "its module works on each feature by itself between column-wise and row-wise linears, and this one "
                "does not: use tp 1"
            )
        yield Placed(f"{name}.{parameter}", module, PARTIAL_GRADIENT, attribute)


def _applied_to_features(block: nn.Module, names: Mapping[str, Tensor], styles: Mapping[int, str]) -> set[str]:
    """Those of the named parameters that act on the block's output through the inputs of row-wise linears alone.

    The block runs on the meta device; empty where it cannot be called with hidden states alone.
    """
    inputs: list[Tensor] = []

    def cut(linear: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        inputs.append(args[0])
        return out.detach()

    linears = [module for module in block.modules() if isinstance(module, nn.Linear)]
    first = next(linear for linear in linears if styles.get(id(linear)) == COLWISE)
    handles = [m.register_forward_hook(cut) for m in linears if styles.get(id(m)) == ROWWISE]
    tensors = {n: torch.empty_like(x, device="meta") for n, x in (*block.named_parameters(), *block.named_buffers())}
    parameters = [tensors[name].requires_grad_() for name in names]
    hidden = torch.empty(1, 2, first.in_features, dtype=first.weight.dtype, device="meta")
    try:
        with torch.enable_grad():
            out = functional_call(block, tensors, (hidden,))
    except Exception:  # whatever a block raises that needs more than hidden states
        return set()
    finally:
        for handle in handles:
            handle.remove()
    through, around = _reached(inputs, parameters), _reached([out[0] if isinstance(out, tuple) else out], parameters)
    return {name for name, inside, outside in zip(names, through, around, strict=True) if inside and not outside}


def _reached(outputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[bool]:
    outputs = [x for x in outputs if x.requires_grad]
    if not outputs:
        return [False for _ in parameters]
    sums = [x.sum() for x in outputs]
    gradients = torch.autograd.grad(sums, parameters, retain_graph=True, allow_unused=True)
    return [gradient is not None for gradient in gradients]


@torch.no_grad()
def _is_elementwise(module: nn.Module) -> bool:
    """Whether some of the features give the same as among all features, shown with numbers on the host."""
    ones = {n: torch.ones(x.shape) for n, x in (*module.named_parameters(), *module.named_buffers())}
    x = torch.linspace(-2, 2, 2 * _FEATURES).view(1, 2, _FEATURES)
    try:
        at_once, *parts = (functional_call(module, ones, (some,)) for some in (x, *x.chunk(2, -1)))
        return torch.allclose(at_once, torch.cat(parts, -1))
    except Exception:  # whatever a module raises that takes something else, or another number of features
        return False
