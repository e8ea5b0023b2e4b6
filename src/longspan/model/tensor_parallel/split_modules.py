"""What a tensor-parallel style does to one module: its parameters become slices, its forward sees local tensors.

A slice is a DTensor, for FSDP2, optimizers and checkpoints. Modules keep names and classes; an instance's `forward` is
wrapped, with a world's key and no group. Of an adapted linear, W x + s B (A x), column-wise styles cut W and B, row-
wise ones W and A; what stays whole gets partial gradients, which are summed.
"""

from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map

from longspan.comm import World
from longspan.comm.tp_collectives import (
    tp_copy,
    tp_copy_parameter,
    tp_gather,
    tp_gather_parameter,
    tp_index_and_degree,
    tp_reduce_scatter,
    tp_split,
    tp_sum,
)
from longspan.model.adapted_modules import (
    unadapted_module,
)
from longspan.model.tensor_parallel.mixer_parts import EvenRows, FusedRows
from longspan.model.tensor_parallel.module_styles import GATHERED, QKV, SPLIT_INPUT
from longspan.model.weights.empty_model import copy_to_device
from longspan.model.weights.local_tensors import local_tensor
from longspan.plan.shape.families import COLWISE, PACKED, PARTIAL_GRADIENT, ROWWISE

ROWS = 1  # the dim of rows in a packed (1, T, …)
View = Callable[[Tensor], Tensor | None]  # a parameter to what its module's forward sees in its place
Transform = Callable[[Tensor], Tensor]


def slice_parameter(module: nn.Module, name: str, dim: int, world: World) -> nn.Parameter:
    """Replace a parameter that every rank holds whole by this rank's slice, on the world's device; returns it."""
    parameter = getattr(module, name)
    local_slice = copy_to_device(parameter.detach().chunk(world.home.tp, dim)[world.coordinates.tp], world.device)
    sharded = DTensor.from_local(local_slice, world.meshes.tp, [Shard(dim)], run_check=False)
    sliced = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
    module.register_parameter(name, sliced)
    return sliced


def return_none(x: Tensor) -> None:
    """Hide a parameter from a module's forward: its view is None."""


class ReplacedAttributes:
    """A context in which a module's attributes have these values, put back at its end.

    They hide parameters of the same names. It is a class, as a context from a generator takes the host longer.
    """

    __slots__ = ("_attributes", "_old_values", "_values")

    def __init__(self, module: nn.Module, values: Mapping[str, object]) -> None:
        self._attributes = vars(module)
        self._values = values

    def __enter__(self) -> None:
        attributes = self._attributes
        self._old_values = {name: attributes[name] for name in self._values if name in attributes}
        attributes.update(self._values)

    def __exit__(self, *_: object) -> None:
        for name in self._values:
            del self._attributes[name]
        self._attributes.update(self._old_values)


def wrap_forward(
    module: nn.Module,
    *,
    enter: Transform | None = None,
    leave: Transform | None = None,
    views: Mapping[str, View] | None = None,
    owner: nn.Module | None = None,
) -> None:
    """Replace a module's forward: `enter` is applied to its first argument, or `hidden_states`, `leave` to its first
    output; while it runs, parameters are replaced by what their `views` make of them.

    `views` are by the names of parameters in `owner`, a module inside (None: the module itself). A second wrapper goes
    around the first.
    """
    inner = module.forward
    call = partial(_call_with_views, owner or module, views, inner) if views else inner

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if enter is not None and args:
            args = enter(args[0]), *args[1:]
        elif enter is not None:
            kwargs = kwargs | {"hidden_states": enter(kwargs["hidden_states"])}
        out = call(*args, **kwargs)
        if leave is None:
            return out
        return (leave(out[0]), *out[1:]) if isinstance(out, tuple) else leave(out)

    module.forward = forward


def _call_with_views(
    owner: nn.Module, views: Mapping[str, View], inner: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """A plain linear's product is computed directly, which takes the host less time than replacing attributes."""
    replaced: dict[str, Tensor | None] = {}  # torch 2.11 cannot trace the call `dict[str, Tensor | None]()`
    for name, view in views.items():
        parameter = getattr(owner, name)
        if (local_value := view(parameter)) is not parameter:
            replaced[name] = local_value
    if not replaced:
        return inner(*args, **kwargs)
    if getattr(inner, "__func__", None) is nn.Linear.forward and len(args) == 1 and not kwargs:
        linear: Any = owner
        weight: Any = replaced.get("weight", linear.weight)
        return nn.functional.linear(args[0], weight, replaced.get("bias", linear.bias))
    with ReplacedAttributes(owner, replaced):
        return inner(*args, **kwargs)


def sum_input_gradients(module: nn.Module, world: World) -> None:
    """Wrap a module's forward, so that gradients of all its inputs, which are partial, are summed over tp."""
    inner = module.forward
    key = world.key

    def copy_input(x: Any) -> Any:
        return tp_copy(x, key) if isinstance(x, Tensor) and x.requires_grad else x

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return inner(*tree_map(copy_input, args), **tree_map(copy_input, kwargs))

    module.forward = forward


def make_output_sum(linear: nn.Linear, key: int, *, sequence_parallel: bool) -> Transform:
    """Make the function that sums a linear's outputs over tp, and then adds the bias that the linear has by then.

    With `sequence_parallel` each rank gets its rows of the sum only, and the bias's gradient is summed over tp. `key`
    is the world's.
    """
    total: Transform = (
        partial(tp_reduce_scatter, world_key=key, dim=ROWS) if sequence_parallel else partial(tp_sum, world_key=key)
    )
    if linear.bias is None:
        return total
    local_bias: Transform = partial(tp_copy_parameter, world_key=key) if sequence_parallel else local_tensor

    def sum_and_add_bias(out: Tensor) -> Tensor:
        bias = linear.bias
        assert bias is not None
        return total(out) + local_bias(bias)

    return sum_and_add_bias


def sum_partial_gradients(module: nn.Module, key: int, parameter: str | None = None) -> None:
    """Wrap forwards, so that gradients of all parameters in a module, or of the one `parameter`, are summed over tp.

    The parameters are whole on each rank, which applies them to some of the rows, heads or features. `key` is the
    world's.
    """
    view: View = partial(tp_copy_parameter, world_key=key)
    if parameter is not None:
        wrap_forward(module, views={parameter: view})
        return
    for inner in module.modules():
        if names := [name for name, _ in inner.named_parameters(recurse=False)]:
            wrap_forward(inner, views=dict.fromkeys(names, view))


def split_vocabulary(embedding: nn.Embedding, world: World, *, sequence_parallel: bool) -> None:
    """Replace an embedding's forward: a rank looks up the ids of its slice of the vocabulary; the sum over tp has all.

    The weight is sharded already. Other ids give zeros. With `sequence_parallel` each rank gets its rows of the sum
    only.
    """
    module: Any = embedding
    inner = embedding.forward
    key = world.key
    index, degree = tp_index_and_degree(key)
    width = embedding.num_embeddings // degree
    first = index * width
    padding = embedding.padding_idx
    local_padding = padding - first if padding is not None and first <= padding < first + width else None

    @wraps(inner)
    def forward(ids: Tensor) -> Tensor:
        elsewhere = (ids < first) | (ids >= first + width)  # (1, T)
        with ReplacedAttributes(
            embedding, {"weight": local_tensor(embedding.weight), "padding_idx": local_padding}
        ):
            vectors = inner((ids - first).masked_fill(elsewhere, 0))
        vectors = vectors.masked_fill(elsewhere.unsqueeze(-1), 0)
        if sequence_parallel:
            return tp_reduce_scatter(vectors, key, ROWS)
        return tp_sum(vectors, key)

    module.forward = forward


def split_expert_rows(experts: nn.Module, key: int, *, sum_gradients: bool) -> None:
    """Replace the forward of experts: each rank runs them on its part of the T tokens, and gets all rows back.

    Tensors (T, …) are padded with zeros to a multiple of tp, so that padding visits expert 0 with weight 0. Without
    `sum_gradients` the gradients of a rank's part stay partial: FSDP2 must sum them over tp. `key` is the world's.
    """
    if sum_gradients:
        sum_partial_gradients(experts, key)
    inner = experts.forward

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        rows = (args[0] if args else kwargs["hidden_states"]).shape[0]
        take_part = partial(_take_row_part, rows=rows, key=key)
        out = inner(*map(take_part, args), **{name: take_part(value) for name, value in kwargs.items()})
        out = tp_gather(out, key, 0, gradient="identical")
        return out if out.shape[0] == rows else out[:rows].clone()  # FSDP2 warns of modules that return views

    experts.forward = forward


def _take_row_part(value: Any, *, rows: int, key: int) -> Any:
    """The part is of a tensor (rows, …), padded to a multiple of tp. `key` is the world's."""
    if not isinstance(value, Tensor) or value.ndim == 0 or value.shape[0] != rows:
        return value
    index, degree = tp_index_and_degree(key)
    padding = -rows % degree
    if padding:
        value = torch.cat([value, value.new_zeros((padding, *value.shape[1:]))])
    # tp_split is for tensors with a gradient; integers, such as chosen experts, have none
    if value.is_floating_point():
        return tp_split(value, key, 0)
    return value.chunk(degree)[index]


def shard_and_view_rows(
    owner: nn.Module, name: str, rows: EvenRows | FusedRows, world: World, *, whole: bool = False
) -> View:
    """Shard the tensor `name` of `owner`, in place, where that works; returns the view of this rank's rows of it.

    One even slice needs no message. Other rows are sharded evenly, and gathered at each use. A parameter stays whole if
    tp does not divide its rows, or if `whole` says so: its gradient, zero outside of a rank's rows, is summed over tp
    then. Buffers stay whole.
    """
    tensor = getattr(owner, name)
    key = world.key
    dim = tuple(tensor.shape).index(rows.size)
    is_parameter = isinstance(tensor, nn.Parameter)
    shards = is_parameter and not whole and rows.size % world.home.tp == 0
    if shards:
        slice_parameter(owner, name, dim, world)
    if isinstance(rows, EvenRows):
        if shards:
            return local_tensor
        rows = FusedRows((rows,))
    assert dim == 0 or not is_parameter, (name, tensor.shape)  # only a buffer may have its rows in another dim
    sizes, order = rows.cut_pieces(world.home.tp, world.coordinates.tp)

    def take_rows(x: Tensor) -> Tensor:
        """Return this rank's rows of the tensor, or of its even slice, which is gathered first."""
        if shards:
            x = tp_gather_parameter(local_tensor(x), key)
        elif is_parameter:
            x = tp_copy_parameter(x, key)
        pieces = x.split(sizes, dim)
        return torch.cat([pieces[i] for i in order], dim)

    return take_rows


LINEAR_STYLES = (COLWISE, ROWWISE, PACKED, PARTIAL_GRADIENT, SPLIT_INPUT, *GATHERED)


def split_linear(
    module: nn.Module, style: str, world: World, *, sequence_parallel: bool = False, widths: tuple[int, ...] = ()
) -> None:
    """Split a linear, in place, by its style, and an adapter with it.

    ROWWISE: each rank takes its slice of the inputs; outputs are summed over tp, and the bias is added once, to the
    sum. With `sequence_parallel` each rank gets its rows of that. SPLIT_INPUT does the same with whole inputs, as after
    a norm over all heads, and returns all rows. The others split outputs, and leave the input's gradient partial, which
    the caller sums; GATHERED ones return all outputs, and sum it. QKV is one linear of queries, keys and values, with
    `widths` outputs each; its parameters stay whole, for checkpoints.

    Of an adapter `first` goes from the inputs to its rank, `second` to the outputs. Styles that split inputs cut the
    linear and `first`, others the linear and `second`; the one that stays whole has a partial gradient, which is
    summed. With PARTIAL_GRADIENT all three stay whole, and the gradients of all three are summed.
    """
    layer: Any = module
    key = world.key
    base: Any = unadapted_module(module)
    first = layer.lora_A.values() if base is not module else ()
    second = layer.lora_B.values() if base is not module else ()
    if style in (ROWWISE, SPLIT_INPUT):
        # The outputs of these linears are a part of a sum over tp.
        for linear in (base, *first):
            slice_parameter(linear, "weight", 1, world)
            without_bias: dict[str, View] = {} if linear.bias is None else {"bias": return_none}
            wrap_forward(linear, views={"weight": local_tensor, **without_bias})
        for linear in second:
            sum_partial_gradients(linear, key)
        # The linear is in a block that gets, and returns, all rows.
        whole_inputs = style == SPLIT_INPUT
        leave = make_output_sum(base, key, sequence_parallel=sequence_parallel and not whole_inputs)
        wrap_forward(layer, enter=partial(tp_split, world_key=key, dim=-1) if whole_inputs else None, leave=leave)
        return
    for linear in (base, *first, *second) if style == PARTIAL_GRADIENT else first:
        sum_partial_gradients(linear, key)
    if style == PARTIAL_GRADIENT:
        return
    for linear in (base, *second):
        rows = EvenRows(linear.out_features)
        # Each half is split, such as a gate and its values.
        if style == PACKED:
            rows = FusedRows((EvenRows(linear.out_features // 2),) * 2)
        elif style == QKV:
            rows = FusedRows(tuple(map(EvenRows, widths)))
        names = [name for name, _ in linear.named_parameters(recurse=False)]
        view_rows = partial(shard_and_view_rows, linear, rows=rows, world=world, whole=style == QKV)
        wrap_forward(linear, views={name: view_rows(name) for name in names})
    if style in GATHERED:
        wrap_forward(
            layer,
            enter=partial(tp_copy, world_key=key),
            leave=partial(tp_gather, world_key=key, dim=-1, gradient="identical"),
        )
