"""MLPs and experts that run over tiles of rows (tokens), so that only one tile's intermediate tensors exist at a time.

`_KeepRows` alone saves the rows, so that recomputation of a layer that ends here stops before `_RunTiles` runs.
`_RunTiles` runs each tile again in backward; gradients of parameters are summed over tiles in float32 or wider, and
returned once.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from longspan.comm.autograd import break_graphs_around
from longspan.errors import ModelError
from longspan.model.activations.recompute import (
    MakeContext,
    current_autocast_factory,
    has_active_dropout,
    random_states,
    use_random_states,
)
from longspan.model.feature import Feature
from longspan.model.kinds import expert_modules
from longspan.model.layers import layers_and_mtp_blocks
from longspan.model.marks import keep_float8_weights

ROWS = -2  # the dim of rows (…, R, W)
TILE_ROWS = "tile_rows"  # an attribute of experts that run over tiles: the most rows of one


def count_tiles(rows: int, tile_rows: int) -> int:
    """Return how many tiles of nearly equal size hold so many rows, each at most `tile_rows` (0: one tile).

    >>> count_tiles(10, 4), count_tiles(10, 0)
    (3, 1)
    """
    return max(1, -(-rows // tile_rows)) if tile_rows else 1


@break_graphs_around
def run_in_tiles(
    run: Callable[..., Tensor],
    rows: Sequence[Tensor],
    module: nn.Module,
    count: int,
    *,
    draws: bool = False,
) -> Tensor:
    """Run a function of rows (…, R, W), of one tensor or several, in `count` tiles: (…, R, V), as `run(*rows)`.

    The function maps each row by itself; besides rows only parameters of `module` get gradients from it; its weights in
    float8 are made once for all tiles of a pass. With `draws` it draws at random, and gets the same numbers again in
    backward.

    >>> out = run_in_tiles(mlp, (x,), mlp, count=4)  # doctest: +SKIP
    """
    parameters = tuple(module.parameters())
    quantise_once = partial(keep_float8_weights, module)
    inputs = [x for x in (*rows, *parameters) if x.requires_grad]
    if not (torch.is_grad_enabled() and inputs):
        with quantise_once():
            return _run_tile_by_tile(run, rows, count)
    nodes: list[Any] = []
    # if only parameters need gradients, an empty tensor that needs one makes `_KeepRows` a node of the graph
    anchor = None if any(x.requires_grad for x in rows) else rows[0].new_empty(0, dtype=torch.float32)
    same_rows = _KeepRows.apply(nodes, draws, None if anchor is None else anchor.requires_grad_(), *rows)
    contexts = current_autocast_factory(rows[0]), quantise_once
    return _RunTiles.apply(run, nodes, count, len(rows), contexts, *same_rows, *parameters)  # pyright: ignore


def _run_tile_by_tile(run: Callable[..., Tensor], rows: Sequence[Tensor], count: int) -> Tensor:
    out: Tensor | None = None
    start = 0
    for tile in _split_rows(rows, count):
        tile_out = run(*tile)
        if tile_out.shape[ROWS] != tile[0].shape[ROWS]:
            raise ModelError(
                f"a tile of {tile[0].shape[ROWS]} rows became {tile_out.shape[ROWS]}; use mlp_tile_tokens 0"
            )
        if out is None:
            out = tile_out.new_empty((*tile_out.shape[:ROWS], rows[0].shape[ROWS], tile_out.shape[-1]))
        out.narrow(ROWS, start, tile_out.shape[ROWS]).copy_(tile_out)
        start += tile_out.shape[ROWS]
    assert out is not None
    return out


def _split_rows(tensors: Sequence[Any], count: int) -> Iterator[tuple[Any, ...]]:
    return zip(*([None] * count if x is None else x.tensor_split(count, ROWS) for x in tensors), strict=True)


class _KeepRows(torch.autograd.Function):
    """The identity on rows; it saves them for `_RunTiles`, the node behind, which saves nothing itself."""

    @staticmethod
    def forward(
        ctx: Any, nodes: list[Any], draws: bool, anchor: Tensor | None, *rows: Tensor
    ) -> tuple[Tensor, ...]:
        """Append this context to `nodes`, for `_RunTiles`; `anchor`, empty, needs a gradient where no row does."""
        ctx.save_for_backward(*rows)
        ctx.random_states = random_states(rows[0].device) if draws else None
        ctx.set_materialize_grads(False)
        nodes.append(ctx)
        return tuple(x.view_as(x) for x in rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, None, *gradients


class _RunTiles(torch.autograd.Function):
    """A function of rows over tiles; backward runs each tile again, from the rows that `_KeepRows` saved."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[..., Tensor],
        nodes: list[Any],
        count: int,
        row_tensors: int,
        contexts: tuple[MakeContext, MakeContext],
        *tensors: Tensor,
    ) -> Tensor:
        """`tensors` are `row_tensors` tensors of rows, then parameters; `nodes` holds the context of `_KeepRows`.

        `contexts` make the autocast context of backward, and the one around each pass.
        """
        ctx.run = run
        ctx.node = nodes[0]
        ctx.count = count
        ctx.autocast, ctx.around = contexts
        ctx.parameters = tensors[row_tensors:]
        with ctx.around():
            return _run_tile_by_tile(run, tensors[:row_tensors], count)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Run each tile again; gradients of rows are views of whole tensors, those of parameters sums over tiles."""
        rows = ctx.node.saved_tensors
        # Three other arguments of `_KeepRows` stand before the rows.
        needs = ctx.node.needs_input_grad[3:]
        trained = [p for p in ctx.parameters if p.requires_grad]
        row_gradients = [torch.zeros_like(x) if need else None for x, need in zip(rows, needs, strict=True)]
        sums: list[Tensor | None] = [None] * len(trained)
        with use_random_states(ctx.node.random_states, rows[0].device), ctx.autocast(), ctx.around():
            douts = gradients[0].tensor_split(ctx.count, ROWS)
            tiles = _split_rows(rows, ctx.count)
            tile_gradients = _split_rows(row_gradients, ctx.count)
            for dout, tile, into in zip(douts, tiles, tile_gradients, strict=True):
                _add_tile_gradients(ctx, tile, dout, trained, into, sums)
        sums.reverse()
        parameter_gradients: list[Tensor | None] = []
        for p in ctx.parameters:
            # Each sum is freed once it is narrowed.
            total = sums.pop() if p.requires_grad else None
            parameter_gradients.append(None if total is None else total.to(p.dtype))
        return None, None, None, None, None, *row_gradients, *parameter_gradients


def _add_tile_gradients(
    ctx: Any,
    tile: Sequence[Tensor],
    dout: Tensor,
    trained: Sequence[Tensor],
    into: Sequence[Tensor | None],
    sums: list[Tensor | None],
) -> None:
    """A function, so that a tile's tensors are freed before the next one runs. None in `into`: not needed."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_(part is not None) for x, part in zip(tile, into, strict=True)]
        inputs = [*(x for x in leaves if x.requires_grad), *trained]
        gradients = torch.autograd.grad(ctx.run(*leaves), inputs, dout, allow_unused=True)
    row_gradients = [part for part in into if part is not None]
    # Gradients of parameters come after those of rows.
    for row_gradient, gradient in zip(row_gradients, gradients, strict=False):
        if gradient is not None:
            row_gradient.copy_(gradient)
    for i, gradient in enumerate(gradients[len(row_gradients) :]):
        if gradient is not None:
            total = sums[i]
            wide = torch.promote_types(gradient.dtype, torch.float32)
            # a copy, as it may share memory with the gradient of the output
            sums[i] = gradient.to(wide, copy=True) if total is None else total.add_(gradient)


class TiledForward:
    """The forward of an MLP over tiles of at most `tile_rows` rows; `run` is the forward of one tile."""

    def __init__(self, module: nn.Module, tile_rows: int) -> None:
        self.tile_rows = tile_rows
        self.run: Callable[..., Tensor] = module.forward
        self._module = module

    def __call__(self, x: Tensor, *others: Any, **named: Any) -> Tensor:
        """Run the MLP on rows `x`, in tiles if they are more than fit in one; other arguments are the same for all
        tiles.
        """
        count = count_tiles(x.shape[ROWS], self.tile_rows)
        if count == 1:
            return self.run(x, *others, **named)
        draws = has_active_dropout(self._module)
        return run_in_tiles(lambda rows: self.run(rows, *others, **named), (x,), self._module, count, draws=draws)


def find_mlps(layer: nn.Module) -> dict[str, nn.Module]:
    """Find the outermost MLPs of a decoder layer by name: those of dense layers, and shared experts."""
    mlps: dict[str, nn.Module] = {}
    for name, module in layer.named_modules():
        is_nested = any(name.startswith(f"{outer}.") for outer in mlps)
        has_experts = any(type(part).__name__.endswith("Experts") for part in module.modules())  # tiled, or refused
        if not is_nested and type(module).__name__.lower().endswith("mlp") and not has_experts:
            mlps[name] = module
    return mlps


class TileFeature(Feature):
    """MLPs and experts of the layers here over tiles of at most so many rows, after layers are split."""

    def refuse(self, model: PreTrainedModel) -> None:
        """Raise ModelError for a negative size, for MLPs or experts that cannot run in tiles, and for none at all."""
        tile_rows = self.options.mlp_tile_tokens
        if tile_rows < 0:
            raise ModelError(
                f"mlp_tile_tokens is {tile_rows}; use 0 (no tiles), or the rows of a tile, such as 16384"
            )
        layers = layers_and_mtp_blocks(model)
        for name, layer in layers.items():
            experts = expert_modules(layer)
            for inner, module in layer.named_modules():
                if type(module).__name__.endswith("Experts") and inner not in experts:
                    raise ModelError(
                        f"mlp_tile_tokens is {tile_rows}, and {name}.{inner} ({type(module).__name__}) does not use "
                        "transformers' interface of experts, through which they run in tiles; use 0"
                    )
            for inner, mlp in find_mlps(layer).items():
                arguments = inspect.signature(mlp.forward).parameters.values()
                positional = [p for p in arguments if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
                if len(tensors := [p.name for p in positional if p.default is p.empty]) > 1:
                    raise ModelError(
                        f"mlp_tile_tokens is {tile_rows}, and {name}.{inner} ({type(mlp).__name__}) takes "
                        f"{', '.join(tensors)}: only an MLP of one tensor of rows runs in tiles; use 0"
                    )
        if not any(find_mlps(layer) or expert_modules(layer) for layer in layers.values()):
            raise ModelError(
                f"mlp_tile_tokens is {tile_rows}, and no decoder layer of {type(model).__name__} has an MLP (a module "
                "whose class ends in MLP) or experts of transformers' interface to run in tiles; use 0"
            )

    def place(self, model: PreTrainedModel, root: nn.Module) -> None:
        """Replace the forwards of MLPs; experts get the size as an attribute."""
        for layer in layers_and_mtp_blocks(model).values():
            for mlp in find_mlps(layer).values():
                mlp.forward = TiledForward(mlp, self.options.mlp_tile_tokens)
            for experts in expert_modules(layer).values():
                # their forward, which is longspan's, reads it
                setattr(experts, TILE_ROWS, self.options.mlp_tile_tokens)
