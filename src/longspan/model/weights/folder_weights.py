"""The weights of a Hugging Face folder, compared with a model, read a part at a time and converted to its names.

transformers' conversions run for one parameter at a time, and for one of stacked experts.
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
from longspan.model.weights.hf_folder import OWN_MODEL, folder_error_text, weight_files
from longspan.model.weights.local_tensors import LocalPart
from longspan.model.weights.tied_names import tied_names
from longspan.plan.shape.quantization import DEQUANTIZE

# A file tensor is read, or a part of it, when the value of its name is indexed.
_Slices = Mapping[str, Any]
# It joins tensors that make one weight in 4 or 8 bits to a StoredWeight.
_Join = Callable[[_Slices], dict[str, Any]]
_REAL_NUMBERS = frozenset(
    {"F64", "F32", "F16", "BF16", *map(str, (torch.float64, torch.float32, torch.float16, torch.bfloat16))}
)
# So many rows of two matrices are compared at once.
_ROWS = 4096


class _ParameterRecipe:
    """The file tensors that a parameter is made of, by the pattern of their names, and their converter, if any."""

    def __init__(self) -> None:
        self.converter: Any = None
        self.sources: dict[str, list[str]] = defaultdict(list)

    def target_names(self, name: str) -> set[str]:
        """Return the model's names of all parameters that the conversion of `name` makes."""
        targets = [] if self.converter is None else self.converter.target_patterns
        parts = next((name.partition(target) for target in targets if target in name), None)
        if parts is None:
            return {name}
        return {f"{parts[0]}{target}{parts[2]}" for target in targets}

    def stacks_experts(self, count: int) -> bool:
        """Return whether each of `count` experts can be converted by itself.

        They can if every pattern has one tensor for each, and operations stack these along dim 0 and leave it then.
        """
        operations = self.converter.operations
        stacks = isinstance(operations[0], MergeModulelist) and operations[0].dim == 0
        by_expert = all(
            operation.dim > 0
            if isinstance(operation, Concatenate)
            else isinstance(operation, Transpose) and min(operation.dim0, operation.dim1) > 0
            for operation in operations[1:]
        )
        has_one_target = len(self.converter.target_patterns) == 1
        return stacks and by_expert and has_one_target and all(len(keys) == count for keys in self.sources.values())

    def keeps_rows(self, count: int) -> bool:
        """Return whether every row of the parameter, which has `count` experts or rows, is a row of a file tensor."""
        if self.converter is None:
            return True
        joins_rows = all(isinstance(o, Concatenate) and o.dim == 1 for o in self.converter.operations[1:])
        return joins_rows and self.stacks_experts(count)


class FolderWeights:
    """A source of weights from the files of a folder, for a model of `model`'s names, shapes and types.

    `rename` maps the files' names to those of `save_model`. With `join` weights may be in 4 or 8 bits: they are read
    as numbers, or as packed rows where a part is of uint8.
    """

    def __init__(
        self,
        folder: Path,
        model: PreTrainedModel,
        *,
        rename: Callable[[str], str] = lambda key: key,
        join: _Join | None = None,
    ) -> None:
        """Read the headers of the files; `unread` maps tensors that the model does not take to the names they would
        have.

        ModelError for bad files, tensors that are quantized or of another shape, and two tensors for one parameter.
        """
        self.folder = folder
        self._files = weight_files(folder, quantized=join is not None)
        self._join = join
        self._config = model.config
        self._rename = rename
        state = model.state_dict()
        self._shapes = {name: tuple(x.shape) for name, x in state.items()}
        self._dtypes = {name: x.dtype for name, x in state.items()}
        self._tied = tied_names(model)
        self._conversions: list[Any] = get_model_conversion_mapping(model)
        self._prefix = model.base_model_prefix
        self.unread: dict[str, str] = {}
        with ExitStack() as stack:
            slices = self._open_slices(stack)
            self._recipes = self._make_recipes(slices)
            for name, recipe in self._recipes.items():
                if recipe.converter is None:
                    # The tensor is a slice of safetensors, or a Tensor.
                    tensor = slices[self._single_key(name)]
                    self._check_shape(name, tensor.get_shape() if hasattr(tensor, "get_shape") else tensor.shape)
            formats = {name: self._find_format(name, slices) for name in self._recipes if join is not None}
            self._formats = {name: packed for name, packed in formats.items() if packed is not None}

    def __str__(self) -> str:
        return f"the model in {self.folder}"

    def read(self, parts: Mapping[str, LocalPart], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, values) of each part that the files have, on the CPU.

        While it is iterated, ModelError for bad files and for shapes that only a conversion shows to be others.
        """
        with ExitStack() as stack:
            slices = self._open_slices(stack)
            for name, recipe in self._recipes.items():
                if recipe.converter is not None:
                    yield from self._converted_parts(name, recipe, slices, parts)
                elif part := parts.get(name):
                    tensor = slices[self._single_key(name)]
                    if _is_packed(tensor, part):
                        rows, *others = part.block
                        yield name, tensor.read(rows)[(slice(None), *others)]
                    else:
                        yield name, tensor[part.block or ...].to(part.dtype)  # a scalar's block is empty

    def names(self) -> set[str]:
        """Return the model's parameters that the files have."""
        return {target for name, recipe in self._recipes.items() for target in recipe.target_names(name)}

    def packed_formats(self) -> dict[str, Any]:
        """Return the PackedFormats of the parameters that `read` gives as packed rows for parts of uint8, by name."""
        return self._formats

    def _find_format(self, name: str, slices: _Slices) -> Any:
        """None unless all tensors are packed alike, and keep their rows."""
        recipe = self._recipes[name]
        tensors = [slices[key] for keys in recipe.sources.values() for key in keys]
        formats = {getattr(x, "format", None) for x in tensors}
        if len(formats) == 1 and recipe.keeps_rows(self._shapes[name][0]):
            return formats.pop()
        return None

    def check_complete(self) -> None:
        """Raise ModelError unless the files have every weight, and two matrices that the model ties are equal."""
        if missing := sorted(self._shapes.keys() - self._tied.keys() - self.names()):
            raise ModelError(
                f"{self} lacks {len(missing)} weights that its config.json asks for, which would be random: "
                f"{', '.join(missing[:4])}; complete the folder, or correct config.json"
            )
        with ExitStack() as stack:
            slices = self._open_slices(stack)
            for name in self._tied.keys() & self._recipes.keys():
                keys = self._single_key(name), self._single_key(self._tied[name])
                for row in range(0, self._shapes[name][0], _ROWS):
                    pair = (slices[key][row : row + _ROWS].to(self._dtypes[name]) for key in keys)
                    if not torch.equal(*pair):
                        raise ModelError(
                            f"the files of {self.folder} hold {keys[0]}, which differs from {keys[1]}, and "
                            "config.json ties the two; set tie_word_embeddings to false in it, which keeps both"
                        )

    def _single_key(self, name: str) -> str:
        keys = [key for keys in self._recipes[name].sources.values() for key in keys]
        if len(keys) > 1:
            raise ModelError(f"{self.folder} holds {' and '.join(keys)}, which are both {name}; keep one of them")
        return keys[0]

    def _open_slices(self, stack: ExitStack) -> dict[str, Any]:
        tensors = open_tensors(self._files, stack)
        if self._join is not None:
            try:
                tensors = self._join(tensors)
            except ModelError as error:
                raise ModelError(f"{self.folder}: {error}") from error
        return {self._rename(name): tensor for name, tensor in tensors.items()}

    def _make_recipes(self, slices: _Slices) -> dict[str, _ParameterRecipe]:
        """`slices` are keyed by the file tensors' names after `rename`, and are taken in natural order, so that
        experts stay in order. A conversion that makes several parameters has one recipe, under the name of the
        first. A tied parameter that the files have under its second name is under its first. Fills `unread` with
        the tensors that the model lacks."""
        renamings = [entry for entry in self._conversions if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self._conversions if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        recipes = defaultdict[str, _ParameterRecipe](_ParameterRecipe)
        for key in sorted(slices, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, self._prefix, self._shapes)
            if name not in self._shapes:  # a name that a renaming for older files matches by chance
                name, pattern = rename_source_key(key, [], [], self._prefix, self._shapes)
            if name not in self._shapes:
                self.unread[key] = name
                continue
            refuse_quantized_tensor(key, slices[key], self._dtypes[name], self.folder)
            recipes[name].converter = None if pattern is None else by_pattern[pattern]
            recipes[name].sources[pattern or key].append(key)
        for name, first in self._tied.items():
            if name in recipes and first not in recipes:
                recipes[first] = recipes.pop(name)
        return dict(recipes)

    def _converted_parts(
        self, name: str, recipe: _ParameterRecipe, slices: _Slices, parts: Mapping[str, LocalPart]
    ) -> Iterator[tuple[str, Tensor]]:
        """A conversion that makes several parameters runs even if `parts` lacks the first of them (`name`): in
        float32, and each parameter is cast to the type of its part."""
        converter = deepcopy(recipe.converter)  # a copy, as it collects the tensors that it will convert
        part = parts.get(name)
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

    def _stack_experts(self, name: str, recipe: _ParameterRecipe, slices: _Slices, part: LocalPart) -> Tensor:
        """One expert is whole at a time. It is converted in the files' dtype, and cast as it is stacked."""
        converter = deepcopy(recipe.converter)
        experts, *block = part.block
        stacked = torch.empty([side.stop - side.start for side in part.block], dtype=part.dtype)
        for index in range(experts.start, experts.stop) if stacked.numel() else ():
            for pattern, keys in recipe.sources.items():
                tensor = slices[keys[index]]
                packed = _is_packed(tensor, part)
                converter.add_tensor(name, keys[index], pattern, tensor.read if packed else _make_reader(tensor))
            (expert,) = converter.convert(name, model=None, config=self._config).values()
            if part.dtype.is_floating_point:  # packed rows have shapes of their own
                self._check_shape(name, (self._shapes[name][0], *expert.shape[1:]))
            stacked[index - experts.start] = expert[(0, *block)]
            # The expert is freed before the next is read.
            del expert
        return stacked

    def _check_shape(self, name: str, shape: Sequence[int]) -> None:
        if tuple(shape) != self._shapes[name]:
            raise ModelError(
                f"the weights in {self.folder} do not fit its config.json: {name} is {tuple(shape)} in the files, "
                f"{self._shapes[name]} by the configuration; use the config.json that belongs to the weights"
            )


def refuse_quantized_tensor(key: str, tensor: Any, dtype: torch.dtype, folder: Path) -> None:
    """Raise ModelError for codes (integers, float8), stored in a folder's files, in place of real numbers."""
    stored = str(tensor.get_dtype() if hasattr(tensor, "get_dtype") else tensor.dtype)
    if stored not in _REAL_NUMBERS and dtype.is_floating_point:
        raise ModelError(f"{key} in {folder} is quantized ({stored} for {dtype}); {DEQUANTIZE}")


def open_tensors(files: Sequence[Path], stack: ExitStack) -> dict[str, Any]:
    """Open files of weights until `stack` closes; return their tensors by name, each read when it is indexed.

    ModelError for a file that cannot be read, with its size, and for a tensor that two files hold.
    """
    tensors = dict[str, Any]()
    for file in files:
        try:
            if file.suffix == ".safetensors":
                opened = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
                slices: dict[str, Any] = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            else:
                state = torch.load(file, map_location="cpu", mmap=is_zipfile(file), weights_only=True)
                slices = {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
        except Exception as error:  # safetensors and torch raise errors of their own kinds
            size = file.stat().st_size if file.is_file() else 0
            reason = folder_error_text(error, OWN_MODEL)
            raise ModelError(f"{file} ({size} bytes) cannot be read, perhaps it was cut short: {reason}") from error
        if twice := sorted(slices.keys() & tensors.keys()):
            raise ModelError(
                f"{file.parent} holds {', '.join(twice[:4])} in {file.name} and in another file too "
                f"({plural(len(twice), 'tensor')}); keep one of each"
            )
        tensors |= slices
    return tensors


def _is_packed(tensor: Any, part: LocalPart) -> bool:
    """Such a part is of the bytes of a weight that the files have in 4 or 8 bits."""
    return part.dtype == torch.uint8 and hasattr(tensor, "read")


def _make_reader(tensor: Any, dtype: torch.dtype | None = None) -> Callable[[], Tensor]:
    return lambda: tensor[...].to(dtype=dtype)
