"""The weights of a Hugging Face folder, compared with a model, read a part at a time and converted to its names.

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
from zipfile import is_zipfile

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

from longspan.errors import ModelError, plural
from longspan.model.weights.hf_folder import DEQUANTIZE, OWN_MODEL, refusal_reason, weight_files
from longspan.model.weights.local_tensors import LocalPart, tied_names

_Slices = Mapping[str, Any]  # by file tensor: what is read, a part of it, when it is indexed
_REAL_NUMBERS = frozenset(
    {"F64", "F32", "F16", "BF16", *map(str, (torch.float64, torch.float32, torch.float16, torch.bfloat16))}
)
_ROWS = 4096  # of two matrices that are compared at once


class _Recipe:
    """The file tensors that a parameter is made of, by the pattern that their names match, and their converter.

    Without a converter it is one tensor as it is.
    """

    def __init__(self) -> None:
        self.converter: Any = None
        self.sources: dict[str, list[str]] = defaultdict(list)

    def target_names(self, name: str) -> set[str]:
        targets = [] if self.converter is None else self.converter.target_patterns
        parts = next((name.partition(target) for target in targets if target in name), None)
        return {name} if parts is None else {f"{parts[0]}{target}{parts[2]}" for target in targets}

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
    if isinstance(operation, Concatenate):
        return operation.dim > 0
    return isinstance(operation, Transpose) and min(operation.dim0, operation.dim1) > 0


class FolderWeights:
    """A source of weights from the files of a folder, for a model of `model`'s names, shapes and types.

    `rename` maps the files' names to those of a folder that `save_model` writes; `view` wraps each tensor of a file,
    given its name there, for example to exchange columns as it is read.
    """

    def __init__(
        self,
        folder: Path,
        model: PreTrainedModel,
        *,
        rename: Callable[[str], str] = lambda key: key,
        view: Callable[[str, Any], Any] = lambda key, tensor: tensor,
    ) -> None:
        """Read the headers of the files; `unread` maps what the model does not take to its name for it.

        Raises ModelError for files that cannot be read, and for tensors of another shape or type than the model's.
        """
        self._folder, self._files, self._config = folder, weight_files(folder), model.config
        self._rename, self._view = rename, view
        state = model.state_dict()
        self._shapes = {name: tuple(x.shape) for name, x in state.items()}
        self._dtypes = {name: x.dtype for name, x in state.items()}
        self._tied = tied_names(model)
        self._conversions: list[Any] = get_model_conversion_mapping(model)
        self._prefix = model.base_model_prefix
        self.unread: dict[str, str] = {}
        with ExitStack() as stack:
            slices = self._open_slices(stack)
            self._recipes = self._find_recipes(slices)
            for name, recipe in self._recipes.items():
                if recipe.converter is None:
                    self._check_shape(name, _shape_of(slices[self._single_key(name)]))

    def __str__(self) -> str:
        return f"the model in {self._folder}"

    def read(self, parts: Mapping[str, LocalPart], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, values) of each part that the files have, on the CPU, whatever the device.

        Raises ModelError for tensors of other shapes than the model's, and for files that cannot be read.
        """
        with ExitStack() as stack:
            slices = self._open_slices(stack)
            for name, recipe in self._recipes.items():
                if recipe.converter is not None:
                    yield from self._convert_part(name, recipe, slices, parts)
                elif part := parts.get(name):
                    tensor = slices[self._single_key(name)]
                    yield name, tensor[part.block or ...].to(part.dtype)  # a scalar's block is empty

    def names(self) -> set[str]:
        """Return the model's parameters that the files have."""
        return {target for name, recipe in self._recipes.items() for target in recipe.target_names(name)}

    def check_complete(self) -> None:
        """Raise ModelError unless the files have every weight of the model.

        Values are read only of two matrices that the model ties, if the files hold both: they must be equal.
        """
        if missing := sorted(self._shapes.keys() - self._tied.keys() - self.names()):
            raise ModelError(
                f"{self} lacks {len(missing)} weights that its config.json asks for, which would be random: "
                f"{', '.join(missing[:4])}; complete the folder, or correct config.json"
            )
        with ExitStack() as stack:
            slices = self._open_slices(stack)
            for name in self._tied.keys() & self._recipes.keys():
                self._check_tie(name, (self._single_key(name), self._single_key(self._tied[name])), slices)

    def _check_tie(self, name: str, keys: tuple[str, str], slices: _Slices) -> None:
        for row in range(0, self._shapes[name][0], _ROWS):
            pair = (slices[key][row : row + _ROWS].to(self._dtypes[name]) for key in keys)
            if not torch.equal(*pair):
                raise ModelError(
                    f"the files of {self._folder} hold {keys[0]}, which differs from {keys[1]}, and config.json ties "
                    "the two; set tie_word_embeddings to false in it, which keeps both"
                )

    def _single_key(self, name: str) -> str:
        keys = [key for keys in self._recipes[name].sources.values() for key in keys]
        if len(keys) > 1:
            raise ModelError(f"{self._folder} holds {' and '.join(keys)}, which are both {name}; keep one of them")
        return keys[0]

    def _open_slices(self, stack: ExitStack) -> dict[str, Any]:
        tensors = open_tensors(self._files, stack)
        return {self._rename(name): self._view(name, tensor) for name, tensor in tensors.items()}

    def _find_recipes(self, slices: _Slices) -> dict[str, _Recipe]:
        """A recipe that makes several parameters is listed under the first of them. A tied parameter that the files
        hold under its second name only is found under its first.
        """
        renamings = [entry for entry in self._conversions if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self._conversions if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        recipes = defaultdict[str, _Recipe](_Recipe)
        for key in sorted(slices, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, self._prefix, self._shapes)
            if name not in self._shapes:  # a name that a renaming for older files matches by chance
                name, pattern = rename_source_key(key, [], [], self._prefix, self._shapes)
            if name not in self._shapes:
                self.unread[key] = name
                continue
            check_type(key, slices[key], self._dtypes[name], self._folder)
            recipes[name].converter = None if pattern is None else by_pattern[pattern]
            recipes[name].sources[pattern or key].append(key)
        for name, first in self._tied.items():
            if name in recipes and first not in recipes:
                recipes[first] = recipes.pop(name)
        return dict(recipes)

    def _convert_part(
        self, name: str, recipe: _Recipe, slices: _Slices, parts: Mapping[str, LocalPart]
    ) -> Iterator[tuple[str, Tensor]]:
        """A converter may make several parameters, and is then run even if `parts` lacks the first: in float32, as the
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
        """An expert is converted in the files' dtype, and cast as it is stacked. An empty part reads no expert."""
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
        if tuple(shape) != self._shapes[name]:
            raise ModelError(
                f"the weights in {self._folder} do not fit its config.json: {name} is {tuple(shape)} in the files, "
                f"{self._shapes[name]} by the configuration; use the config.json that belongs to the weights"
            )


def check_type(key: str, tensor: Any, dtype: torch.dtype, folder: Path) -> None:
    """Raise ModelError for codes (integers, float8), stored in a folder's files, in place of real numbers."""
    stored = str(tensor.get_dtype() if hasattr(tensor, "get_dtype") else tensor.dtype)
    if stored not in _REAL_NUMBERS and dtype.is_floating_point:
        raise ModelError(f"{key} in {folder} is quantized ({stored} for {dtype}); {DEQUANTIZE}")


def open_tensors(files: Sequence[Path], stack: ExitStack) -> dict[str, Any]:
    """Open files of weights until `stack` closes; return their tensors by name, each read when it is indexed.

    Raises ModelError for a file that cannot be read, with its size, and for a tensor that two files hold.
    """
    tensors = dict[str, Any]()
    for file in files:
        try:
            slices = _open_file(file, stack)
        except Exception as error:  # safetensors and torch raise errors of their own kinds
            size = file.stat().st_size if file.is_file() else 0
            reason = refusal_reason(error, OWN_MODEL)
            raise ModelError(f"{file} ({size} bytes) cannot be read, perhaps it was cut short: {reason}") from error
        if twice := sorted(slices.keys() & tensors.keys()):
            raise ModelError(
                f"{file.parent} holds {', '.join(twice[:4])} in {file.name} and in another file too "
                f"({plural(len(twice), 'tensor')}); keep one of each"
            )
        tensors |= slices
    return tensors


def _open_file(file: Path, stack: ExitStack) -> dict[str, Any]:
    if file.suffix == ".safetensors":
        opened = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
        return {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
    state = torch.load(file, map_location="cpu", mmap=is_zipfile(file), weights_only=True)
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}


def _shape_of(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.get_shape() if hasattr(tensor, "get_shape") else tensor.shape)  # of safetensors, or a Tensor


def _make_reader(tensor: Any, dtype: torch.dtype | None = None) -> Callable[[], Tensor]:
    return lambda: tensor[...].to(dtype=dtype)
