"""MLPs and experts of decoder layers that run over tiles of rows (`tiles.py`): which do, and which models cannot.

Not covered: experts outside transformers' interface, and modules that take other tensors next to their rows.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.errors import ModelError
from longspan.model.activations.tiles import ROWS, count_tiles, draws_at_random, run_in_tiles
from longspan.model.experts.moe import TILE_ROWS, expert_modules
from longspan.model.float8.weights import quantise_once
from longspan.model.layers import decoder_layers
from longspan.model.mtp.depths import mtp_blocks


class TiledForward:
    """The forward of an MLP over tiles of at most `tile_rows` rows; `run` is the forward of one tile.

    >>> mlp.forward = TiledForward(mlp, 16384)  # doctest: +SKIP
    """

    def __init__(self, module: nn.Module, tile_rows: int) -> None:
        self.tile_rows = tile_rows
        self.run: Callable[..., Tensor] = module.forward
        self._module = module

    def __call__(self, x: Tensor, *others: Any, **named: Any) -> Tensor:
        """Compute the module's output of rows (…, R, D); the other arguments, which have no rows, go to every tile."""
        count = count_tiles(x.shape[ROWS], self.tile_rows)
        if count == 1:
            return self.run(x, *others, **named)
        module, run = self._module, lambda rows: self.run(rows, *others, **named)
        around = partial(quantise_once, module)  # weights in float8 are made once for all tiles
        draws = draws_at_random(module)
        return run_in_tiles(run, (x,), tuple(module.parameters()), count, draws=draws, around=around)

    def compile_run(self, backend: str) -> None:
        """Compile the forward of one tile, for any number of rows."""
        self.run = torch.compile(self.run, dynamic=True, backend=backend)


def find_mlps(layer: nn.Module) -> dict[str, nn.Module]:
    """Find the outermost MLPs of a decoder layer by name: of dense layers, and of experts that every row visits."""
    mlps: dict[str, nn.Module] = {}
    for name, module in layer.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in mlps)
        if not inside and type(module).__name__.lower().endswith("mlp") and not _has_experts(module):
            mlps[name] = module
    return mlps


def _has_experts(module: nn.Module) -> bool:
    """Return whether a module contains experts, which are tiled by themselves, or refused."""
    return any(type(inner).__name__.endswith("Experts") for inner in module.modules())


def check_tiles(model: PreTrainedModel, tile_rows: int) -> None:
    """Raise ModelError, naming modules, where the MLPs or experts of a model cannot run in tiles of so many rows."""
    if tile_rows < 0:
        raise ModelError(f"mlp_tile_rows is {tile_rows}; use 0 (no tiles), or the rows of a tile, such as 16384")
    if not tile_rows:
        return
    has_any = False
    for name, layer in _layers(model).items():
        experts = expert_modules(layer)
        for inner, module in layer.named_modules():
            if type(module).__name__.endswith("Experts") and inner not in experts:
                raise ModelError(
                    f"mlp_tile_rows is {tile_rows}, and {name}.{inner} ({type(module).__name__}) does not use "
                    "transformers' interface of experts, through which they run in tiles; use 0"
                )
        for inner, mlp in find_mlps(layer).items():
            if len(tensors := _list_required_arguments(mlp)) > 1:
                raise ModelError(
                    f"mlp_tile_rows is {tile_rows}, and {name}.{inner} ({type(mlp).__name__}) takes "
                    f"{', '.join(tensors)}: only an MLP of one tensor of rows runs in tiles; use 0"
                )
            has_any = True
        has_any = has_any or bool(experts)
    if not has_any:
        raise ModelError(
            f"mlp_tile_rows is {tile_rows}, and no decoder layer of {type(model).__name__} has an MLP (a module whose "
            "class ends in MLP) or experts of transformers' interface to run in tiles; use 0"
        )


def _list_required_arguments(module: nn.Module) -> list[str]:
    """List the names of the positional arguments that a module's forward requires, rows among them."""
    parameters = inspect.signature(module.forward).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in positional and p.default is inspect.Parameter.empty]


def tile_layers(model: PreTrainedModel, tile_rows: int) -> None:
    """Let the MLPs and experts of the decoder layers that are here run over tiles of at most so many rows; 0: whole.

    Call this after layers are split over tensor-parallel ranks, since each tile makes the exchanges of a split layer.
    """
    if not tile_rows:
        return
    for layer in _layers(model).values():
        for mlp in find_mlps(layer).values():
            mlp.forward = TiledForward(mlp, tile_rows)
        for experts in expert_modules(layer).values():
            setattr(experts, TILE_ROWS, tile_rows)  # their forward, which is longspan's, reads it


def _layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the decoder layers that are here, and those in depths of multi-token prediction, by name."""
    return decoder_layers(model) | mtp_blocks(model)
