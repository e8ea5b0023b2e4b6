"""A stock copy of a prepared model on the first rank, for what transformers does with whole models, such as `generate`.

Its weights come from all ranks, a decoder layer at a time, under any layout; they stay as far as there is room.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.comm import World
from longspan.comm.all_ranks import is_first_rank
from longspan.comm.device import unused_bytes
from longspan.comm.first_rank import FirstRank
from longspan.errors import ModelError, plural
from longspan.model.adapted_modules import unwrap_peft_model
from longspan.model.execution import model_execution
from longspan.model.layers import decoder_layers
from longspan.model.marks import find_language_model
from longspan.model.saving.stock_folders import stock_class, stock_configuration
from longspan.model.saving.whole_weights import WholeWeights
from longspan.model.weights.empty_model import empty_model
from longspan.model.weights.tied_names import tied_names
from longspan.plain_text import gib_text

# Weights may take this share of the free bytes; the rest is for what a pass and its cache take.
_ROOM = 0.7
Result = TypeVar("Result")


class StockCopy:
    """The stock model of a prepared one, in the dtype in which it computes, with an adapter merged; made by all ranks.

    >>> tokens = StockCopy(model, world).run(lambda stock: stock.generate(ids), "tokens")

    Layers beyond `room` bytes (None: of what is free) are gathered again whenever they run. Raises ModelError, on every
    rank, for an adapter that cannot be merged, and `run` where there is no room for two layers.
    """

    def __init__(self, model: Any, world: World, *, room: int | None = None) -> None:
        """Make the stock model without weights on the first rank; the first `run` gathers them."""
        prepared_model: Any = unwrap_peft_model(find_language_model(model))
        self._world = world
        self._weights = WholeWeights(prepared_model, world)
        self._weights.check_mergeable()
        self._names = self._weights.merged_names()
        self._first = FirstRank(world, {"weights": self._gather_weights})
        self._room = room
        # The first rank counts these from the first run on.
        self.gathered_bytes: int = 0
        self.layers: int = 0
        self.staying: int = 0  # layers whose weights stay
        if is_first_rank(world):
            config = stock_configuration(prepared_model.config)
            dtype = model_execution(prepared_model).compute_dtype
            config._attn_implementation = None  # transformers chooses
            # transformers chooses here too, but for float64, which has no grouped products
            config._experts_implementation = "eager" if dtype == torch.float64 else None
            self._stock = empty_model(config, dtype, stock_class(prepared_model)).eval()
            self._tied = tied_names(self._stock)
            self._targets = {name: x for name, x in self._stock.state_dict().items() if name in self._names}

    @torch.no_grad()
    def run(self, work: Callable[[PreTrainedModel], Result], what: str) -> Result:
        """Return on every rank what `work` makes of the stock model on the first; `what` names it in errors."""

        def run_with_weights() -> Result:
            if not self.layers:
                self._place_weights()
            return work(self._stock)

        return self._first.run_on_first(run_with_weights, what)

    @torch.no_grad()
    def _gather_weights(self, names: Sequence[str]) -> list[Tensor]:
        """Entered by all ranks; the result counts on the first rank alone."""
        return [self._weights.gather_merged(self._names[name], first_only=True) for name in names]

    def _place_weights(self) -> None:
        """Runs on the first rank, while the others answer its calls. Layers stay within the bytes of `_room`, which
        are not compared with the device's, or if it is None within what is free; all stay where what is free is
        unknown (0)."""
        device = self._world.device
        layers = decoder_layers(self._stock)
        shared = {*self._tied.values()}
        names = {
            path: [n for n in self._targets if n.startswith(f"{path}.") and n not in shared] for path in layers
        }
        layer_weights = {name for layer_names in names.values() for name in layer_names}
        other_weights = [name for name in self._targets if name not in layer_weights]
        sizes = {path: self._count_bytes(layer_names) for path, layer_names in names.items()}
        least = self._count_bytes(other_weights) + 2 * max(sizes.values())
        free = int(_ROOM * unused_bytes(device, self._world.ranks_of_host))
        room = self._room
        if room is None:
            room = free - least if free else sum(sizes.values())
        if room < 0:
            raise ModelError(
                f"a stock copy of the model needs {gib_text(least)} on the first rank, for "
                f"{plural(len(other_weights), 'weight')} around its layers and two layers, and may take "
                f"{gib_text(free)} there; leave evaluation.prompts out of a run, and complete prompts by longspan "
                "generate on a device with more room"
            )
        for module in self._stock.modules():
            # These are the parameters of a tower too, which no text runs.
            for name, parameter in module._parameters.items():
                module._parameters[name] = None if parameter is None else _placeholder(parameter.dtype, device)
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        self._fetch_weights(other_weights)
        for path, layer in layers.items():
            room -= sizes[path]
            if room >= 0:
                self._fetch_weights(names[path])
                self.staying += 1
                continue
            layer.register_forward_pre_hook(partial(self._fetch_weights, names[path]))
            layer.register_forward_hook(partial(self._drop_weights, names[path]))
        self.layers = len(layers)

    def _count_bytes(self, names: Sequence[str]) -> int:
        return sum(self._targets[name].nbytes for name in names)

    def _fetch_weights(self, names: Sequence[str], *_: Any) -> None:
        """The other ranks are called to gather these weights; also a layer's hook."""
        with self._first.call_on_others("weights", names):
            weights = self._gather_weights(names)
        for name, weight in zip(names, weights, strict=True):
            all_names = [name, *(other for other, first in self._tied.items() if first == name)]
            self._set_tensors(all_names, weight.to(self._world.device, self._targets[name].dtype))
            self.gathered_bytes += self._targets[name].nbytes

    def _drop_weights(self, names: Sequence[str], *_: Any) -> None:
        for name in names:
            self._set_tensors([name], _placeholder(self._targets[name].dtype, self._world.device))

    def _set_tensors(self, names: Sequence[str], value: Tensor) -> None:
        parameter = nn.Parameter(value, requires_grad=False)
        for name in names:
            path, _, last = name.rpartition(".")
            module = self._stock.get_submodule(path)
            if last in module._parameters:
                module._parameters[last] = parameter
            else:
                module._buffers[last] = value


def _placeholder(dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(0, dtype=dtype, device=device), requires_grad=False)
