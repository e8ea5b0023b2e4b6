"""An encoder's attention and MLPs split over the tensor-parallel ranks of its slots.

All ranks of a slot encode the same items and hold the same rows. Each attends with its own heads: column-wise and
row-wise linears are sharded as DTensors, and a fused linear of queries, keys and values stays whole on every rank.
Parameters that are whole on each rank (norms, embeddings, a projector) get the same gradient on each.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from longspan.comm import World
from longspan.errors import ModelError
from longspan.model.adapters import is_adapted
from longspan.model.multimodal.tp_plan import SplitModule
from longspan.model.tensor_parallel.family_plans import QKV, ROWWISE
from longspan.model.tensor_parallel.split_adapters import split_adapted_linear
from longspan.model.tensor_parallel.split_trial import SplitTrial
from longspan.model.tensor_parallel.styles import (
    split_columns,
    split_rows,
    split_three_columns,
    sum_input_gradients,
    sum_partial_gradients,
    wrap_forward,
)


def split_encoder(
    module: nn.Module, blocks: Mapping[str, nn.Module], parts: Sequence[SplitModule], world: World
) -> list[SplitTrial]:
    """Split these parts over the tensor-parallel ranks of this rank's slot; all ranks call it together, before FSDP2.

    Returns trials that compare the first call of each kind of block, and of parts outside blocks, with the unsplit
    module; the caller hooks them in once it has wrapped the blocks' forwards.
    """
    _ = world.meshes.tp  # made by all ranks together
    trials = [SplitTrial(name, unit, world) for name, unit in _trial_units(module, blocks, parts)]
    linears = [part.module.get_submodule(name) for part in parts for name in part.styles]
    split_module_ids = {id(module) for linear in linears for module in linear.modules()}  # an adapter's too
    for part in parts:
        _split_linears(part, world)
        if not part.several:  # else each linear sums by itself, in `_split_linears`
            _sum_other_gradients(part.module, split_module_ids, world.key)
            sum_input_gradients(part.module, world)
        wrap_forward(part.module, views=_local_counts(part, world.home.tp))
    module.register_forward_pre_hook(_DropoutRefusal(module), prepend=True)
    return trials


def _split_linears(part: SplitModule, world: World) -> None:
    """Split the linears of one part by their styles.

    Where one module holds several attentions or MLPs, each column-wise linear sums over tp the gradient of its own
    input; otherwise `split_encoder` has the module sum that of its input.
    """
    for name, style in part.styles.items():
        linear: Any = part.module.get_submodule(name)
        if is_adapted(linear):
            split_adapted_linear(linear, style, world, sequence_parallel=False)
        elif style == ROWWISE:
            split_rows(linear, world, sequence_parallel=False)
        elif style == QKV:
            split_three_columns(linear, world, part.widths)
        else:
            split_columns(linear, world)
        if part.several and style != ROWWISE:
            sum_input_gradients(linear, world)


def _sum_other_gradients(module: nn.Module, split_module_ids: set[int], world_key: int) -> None:
    """Sum over tp the gradients of a split module's other parameters, such as a norm of heads.

    They are whole on each rank, and have their gradients from this rank's heads only.
    """
    for child in module.modules():
        if id(child) not in split_module_ids:
            for name, _ in child.named_parameters(recurse=False):
                sum_partial_gradients(child, world_key, name)


def _local_counts(part: SplitModule, tp: int) -> dict[str, Any]:
    return dict.fromkeys(part.local_attributes, lambda count: count // tp)


def _trial_units(
    module: nn.Module, blocks: Mapping[str, nn.Module], parts: Sequence[SplitModule]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) for trials: one block, or part outside blocks, of each class and parameter shapes."""
    kinds = set[Any]()
    for part in parts:
        name = next((block for block in blocks if f"{part.name}.".startswith(f"{block}.")), part.name)
        unit = module.get_submodule(name)
        shapes = tuple((n, p.shape) for n, p in unit.named_parameters())
        if (type(unit), shapes) not in kinds:
            kinds.add((type(unit), shapes))
            yield name, unit


class _DropoutRefusal:
    """A hook that refuses training which draws at random: the ranks of a slot would go on with different rows."""

    def __init__(self, module: nn.Module) -> None:
        self._rates = [
            f"{name} ({type(child).__name__}, {attribute} {rate:g})"
            for name, child in module.named_modules()
            for attribute, rate in vars(child).items()
            if ("drop" in attribute or (attribute == "p" and isinstance(child, nn.modules.dropout._DropoutNd)))
            and isinstance(rate, float)
            and rate > 0
        ]

    def __call__(self, module: nn.Module, args: Any) -> None:
        if module.training and self._rates:
            raise ModelError(
                f"{', '.join(self._rates[:4])} draw at random in training, and the tensor-parallel ranks of a slot "
                "would draw differently; build the encoder with dropout 0.0, or use tp 1"
            )
