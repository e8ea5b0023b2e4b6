"""The weights of a Hugging Face folder, read a part at a time and converted to a model's own names and shapes.

transformers says which file tensors become which parameter, and how (its weight conversions: renamed keys, fused
experts). Its conversions run here for one parameter at a time, so that at most one is whole in memory; of stacked
experts at most one expert.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from longspan.errors import ModelError
from longspan.model.weights.local_tensors import LocalPart

_Slices = Mapping[str, Any]  # by file tensor: what safetensors reads a part of when it is indexed


class _Recipe:
    """The file tensors that a parameter is made of, by the pattern that their names match, and their converter.

    Without a converter it is one tensor as it is.
    """

    def __init__(self) -> None:
        """Begin without tensors; `sources` maps a pattern to the names of its file tensors."""
        self.converter: Any = None
        self.sources: dict[str, list[str]] = defaultdict(list)

    def stacks_experts(self, count: int) -> bool:
        """Return whether the converter stacks `count` experts in dim 0, so that each can be converted by itself.

        Every pattern then has one file tensor for each expert, and what follows the stacking leaves dim 0 alone.
        """
        operations = self.converter.operations
        stacks = isinstance(operations[0], MergeModulelist) and operations[0].dim == 0
        by_expert = all(_leaves_first_dim(operation) for operation in operations[1:])
        has_one_target = len(self.converter.target_patterns) == 1
        return stacks and by_expert and has_one_target and all(len(keys) == count for keys in self.sources.values())


def _leaves_first_dim(operation: Any) -> bool:
    """Return whether a conversion joins or transposes only dims behind the first, that of experts."""
    if isinstance(operation, Concatenate):
        return operation.dim > 0
    return isinstance(operation, Transpose) and min(operation.dim0, operation.dim1) > 0


class FolderWeights:
    """A source of weights from the safetensors files of a folder, for a model of `model`'s names and shapes.

    `rename` maps the files' names to those of a folder that `save_model` writes; `view` wraps each tensor of a file,
    given its name there, for example to exchange columns as it is read.
    """

    def __init__(
        self,
        folder: Path,
        files: Sequence[Path],
        model: PreTrainedModel,
        *,
        rename: Callable[[str], str] = lambda key: key,
        view: Callable[[str, Any], Any] = lambda key, tensor: tensor,
    ) -> None:
        self._folder, self._files, self._config = folder, files, model.config
        self._rename, self._view = rename, view
        self._shapes = {name: tuple(x.shape) for name, x in model.state_dict().items()}
        self._conversions: list[Any] = get_model_conversion_mapping(model)
        self._prefix = model.base_model_prefix

    def __str__(self) -> str:
        return f"the model in {self._folder}"

    def read(self, parts: Mapping[str, LocalPart], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, values) of each part that the files have, on the CPU, whatever the device.

        Raises ModelError for tensors of other shapes than the model's, and for files that cannot be read.
        """
        with ExitStack() as stack:
            slices = self._open_slices(stack)
            for name, recipe in self._find_recipes(slices).items():
                if recipe.converter is not None:
                    yield from self._convert_part(name, recipe, slices, parts)
                elif part := parts.get(name):
                    ((key,),) = recipe.sources.values()
                    self._check_shape(name, slices[key].get_shape())
                    yield name, slices[key][part.block or ...].to(part.dtype)  # a scalar's block is empty

    def names(self) -> set[str]:
        """Return the model's parameters that the files have."""
        with ExitStack() as stack:
            return set(self._find_recipes(self._open_slices(stack)))

    def _open_slices(self, stack: ExitStack) -> dict[str, Any]:
        """Open the files until `stack` closes; return their tensors, which are read when indexed, by renamed names."""
        slices = dict[str, Any]()
        for file in self._files:
            tensors = stack.enter_context(_open_file(file))
            for name in tensors.keys():  # noqa: SIM118
                slices[self._rename(name)] = self._view(name, tensors.get_slice(name))
        return slices

    def _find_recipes(self, slices: _Slices) -> dict[str, _Recipe]:
        """Find the recipe of each parameter that the files have, by name, in the order of layers.

        A recipe that makes several parameters is listed under the first of them.
        """
        renamings = [entry for entry in self._conversions if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self._conversions if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        recipes = defaultdict[str, _Recipe](_Recipe)
        for key in sorted(slices, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, self._prefix, self._shapes)
            if name not in self._shapes:  # a name that a renaming for older files matches by chance
                name, pattern = rename_source_key(key, [], [], self._prefix, self._shapes)
            if name in self._shapes:
                recipes[name].converter = None if pattern is None else by_pattern[pattern]
                recipes[name].sources[pattern or key].append(key)
        return dict(recipes)

    def _convert_part(
        self, name: str, recipe: _Recipe, slices: _Slices, parts: Mapping[str, LocalPart]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's part of the parameters that a recipe's converter makes; experts one by one where it can.

        A converter may make several parameters, and is then run even if `parts` lacks the first: in float32, as the
        others' dtypes are known only once they are made.
        """
        converter, part = deepcopy(recipe.converter), parts.get(name)  # a copy: it collects the tensors to convert
        if part is None and len(converter.target_patterns) == 1:
            return
        if part is not None and recipe.stacks_experts(self._shapes[name][0]):
            yield name, self._stack_experts(name, recipe, slices, part)
            return
        dtype = torch.float32 if part is None else part.dtype
        for pattern, keys in recipe.sources.items():
            for key in keys:
                converter.add_tensor(name, key, pattern, _make_reader(slices[key], dtype))
        for parameter_name, tensor in converter.convert(name, model=None, config=self._config).items():
            tensor = tensor[0] if isinstance(tensor, list) else tensor
            if local_part := parts.get(parameter_name):
                self._check_shape(parameter_name, tensor.shape)
                yield parameter_name, tensor[local_part.block].to(local_part.dtype)

    def _stack_experts(self, name: str, recipe: _Recipe, slices: _Slices, part: LocalPart) -> Tensor:
        """Return this rank's part of stacked experts, which are read and converted one at a time.

        An expert is converted in the dtype of the files, and cast as it is stacked. An empty part reads no expert.
        """
        converter, (experts, *block) = deepcopy(recipe.converter), part.block
        stacked = torch.empty([side.stop - side.start for side in part.block], dtype=part.dtype)
        for index in range(experts.start, experts.stop) if stacked.numel() else ():
            for pattern, keys in recipe.sources.items():
                converter.add_tensor(name, keys[index], pattern, _make_reader(slices[keys[index]]))
            (expert,) = converter.convert(name, model=None, config=self._config).values()
            self._check_shape(name, (self._shapes[name][0], *expert.shape[1:]))
            stacked[index - experts.start] = expert[(0, *block)]
            del expert  # before the next is read
        return stacked

    def _check_shape(self, name: str, shape: Sequence[int]) -> None:
        """Raise ModelError if a tensor in the files has another shape than the configuration gives it."""
        if tuple(shape) != self._shapes[name]:
            raise ModelError(
                f"the weights in {self._folder} do not fit its config.json: {name} is {tuple(shape)} in the files, "
                f"{self._shapes[name]} by the configuration; use the config.json that belongs to the weights"
            )


def _open_file(file: Path) -> Any:
    """Open a file of safetensors. Raises ModelError, with its size, if it cannot be read."""
    try:
        return safe_open(file, framework="pt", device="cpu")
    except Exception as error:  # safetensors raises errors of its own kind
        size = file.stat().st_size if file.is_file() else 0
        raise ModelError(f"{file} ({size} bytes) cannot be read, perhaps it was cut short: {error}") from error


def _make_reader(tensor: Any, dtype: torch.dtype | None = None) -> Callable[[], Tensor]:
    """Make the function by which a converter reads a file's tensor when it needs it."""
    return lambda: tensor[...].to(dtype=dtype)
