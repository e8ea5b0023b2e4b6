"""A model's weights, a few at a time, to a Hugging Face folder: safetensors files of a bounded size and their index.

Names become those of stock folders by transformers' conversions, a decoder layer at a time. Files are made beside the
target, and then replace an older model's there; other files stay.
"""

import errno
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from longspan.errors import ModelError
from longspan.model.weights.tied_names import tied_names
from longspan.model.weights.tokenizer_files import TOKENIZER_FILES

# Names of files that a saved adapter or model replaces. A saved model replaces an adapter's files too: transformers
# would load the adapter, with the model that it belongs to, instead of the weights beside it.
ADAPTER_PATTERN = r"adapter_config\.json|adapter_model.*\.(safetensors|bin|json)"
MODEL_PATTERN = rf"config\.json|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|{ADAPTER_PATTERN}"
_TOKENIZER_PATTERN = "|".join(map(re.escape, TOKENIZER_FILES))
# A folder without one of these holds no model.
_CONFIGURATIONS = ("config.json", "adapter_config.json")


# Other tools download into NAME.partial; what has this name is of an interrupted save, and is removed.
_PARTIAL = ".longspan-partial"


def make_partial_folder(folder: Path) -> Path:
    """Make an empty folder beside (at a mount point in) `folder`, for a rename; ModelError where that is a file."""
    place = folder.resolve()
    if place.exists() and not place.is_dir():
        raise ModelError(f"{folder} is a file; name a folder to write the model to")
    partial = place / _PARTIAL if place.is_mount() else place.with_name(f"{place.name}{_PARTIAL}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def replace_files(partial: Path, folder: Path, replaced: str) -> None:
    """Move finished files from `partial` to `folder`, and remove what was there under their names or like `replaced`.

    `replaced` is a pattern of whole names. An old tokenizer goes if there is a new one. The old configuration goes
    first and the new one comes last: an interrupted move leaves no model, and loses nothing (old files are in
    `FOLDER.replaced-…`, new ones in `partial`).
    """
    if not folder.exists():
        partial.rename(folder.resolve())
        return
    new_names = sorted((path.name for path in partial.iterdir()), key=_CONFIGURATIONS.__contains__)
    pattern = f"{replaced}|{_TOKENIZER_PATTERN}" if {*new_names} & {*TOKENIZER_FILES} else replaced
    names = [path.name for path in folder.iterdir()]
    replaced_names = [name for name in names if name in new_names or re.fullmatch(pattern, name)]
    old_files = Path(mkdtemp(prefix=f"{folder.resolve().name}.replaced-", dir=partial.parent))
    for name in sorted(replaced_names, key=_CONFIGURATIONS.__contains__, reverse=True):
        (folder / name).rename(old_files / name)
    for name in new_names:
        (partial / name).rename(folder / name)
    partial.rmdir()
    shutil.rmtree(old_files)


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a file of safetensors. Raises OSError for what the disk refuses, of which safetensors gives the text."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error), str(path)) from error


# One file has at most so many bytes, as on the Hugging Face hub.
FILE_BYTES = 5 * 10**9


class WeightTotals(NamedTuple):
    """The number of tensors, of parameters, of bytes and of files in a folder's weights."""

    tensors: int
    parameters: int
    bytes: int
    files: int


class WeightWriter:
    """Writes the weights of a model like `empty`, whose parameters have shapes and dtypes and no memory.

    >>> writer = WeightWriter(folder, empty)
    >>> for unit in units:              # by the model's own names, each decoder layer whole in one unit
    ...     writer.write_unit(unit)
    >>> written = writer.finish()

    They are in the dtypes of `empty`, or their own without `cast`, under stock names, which `rename` changes. Raises
    ModelError for a name or a shape that the model does not have, and, when finished, for names that never came.
    """

    def __init__(
        self,
        folder: Path,
        empty: PreTrainedModel,
        *,
        cast: bool = True,
        rename: Callable[[str], str] = lambda name: name,
    ) -> None:
        """Write into `folder`, which must be there; `cast` to the dtypes of `empty`, and `rename` stock names for the
        files.
        """
        self.folder = folder
        self.empty = empty
        self._cast = cast
        self._rename = rename
        self._expected = dict(empty.state_dict())
        # names that `write_unit` skips: second ones of tied parameters and others that files do not hold, and from then
        # on those that are written
        self._left_out = tied_names(empty).keys() | set(empty._keys_to_ignore_on_save or ())
        self._to_come = self._expected.keys() - self._left_out
        self._file: dict[str, Tensor] = {}
        # Each written file has the number of elements of its tensors.
        self._files: list[dict[str, int]] = []
        self._bytes = 0

    def write_unit(self, unit: Mapping[str, Tensor]) -> None:
        """Write the tensors of a layer, whole, or one outside the layers; names that came before are skipped.

        Raises ModelError for a name or a shape that the configuration does not have.
        """
        tensors = dict[str, Tensor]()
        for name, tensor in unit.items():
            if name in self._left_out:
                continue
            if (expected := self._expected.get(name)) is None:
                raise ModelError(f"{name} is no weight of {type(self.empty).__name__} by its configuration")
            if expected.shape != tensor.shape:
                raise ModelError(
                    f"{name} is {tuple(tensor.shape)}, and {tuple(expected.shape)} by the configuration"
                )
            tensors[name] = tensor.detach().to("cpu", expected.dtype if self._cast else tensor.dtype)
        self._left_out |= tensors.keys()
        self._to_come -= tensors.keys()
        for name, tensor in revert_weight_conversion(self.empty, tensors).items():
            if self._file and sum(x.nbytes for x in self._file.values()) + tensor.nbytes > FILE_BYTES:
                self._write_file()
            self._file[self._rename(name)] = tensor.contiguous()

    def finish(self) -> WeightTotals:
        """Write the last file, and the index if there are several; only now, being counted, files get their names.

        Raises ModelError for weights that never came.
        """
        if self._to_come:
            raise ModelError(f"{len(self._to_come)} weights never came: {', '.join(sorted(self._to_come)[:4])}")
        self._write_file()
        names = [f"model-{i:05}-of-{len(self._files):05}.safetensors" for i in range(1, len(self._files) + 1)]
        names = names if len(names) > 1 else ["model.safetensors"]
        for i, name in enumerate(names):
            self._partial_path(i).rename(self.folder / name)
        parameters = sum(sum(file.values()) for file in self._files)
        if len(names) > 1:
            file_of_tensor = {
                tensor: name for name, file in zip(names, self._files, strict=True) for tensor in file
            }
            metadata = {"total_parameters": parameters, "total_size": self._bytes}
            index = (
                json.dumps({"metadata": metadata, "weight_map": file_of_tensor}, indent=2, sort_keys=True) + "\n"
            )
            (self.folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")
        return WeightTotals(sum(map(len, self._files)), parameters, self._bytes, len(names))

    def _write_file(self) -> None:
        if not self._file:
            return
        save_tensors(self._file, self._partial_path(len(self._files)))
        self._bytes += sum(tensor.nbytes for tensor in self._file.values())
        self._files.append({name: tensor.numel() for name, tensor in self._file.items()})
        self._file = {}

    def _partial_path(self, file: int) -> Path:
        return self.folder / f"part-{file:05}.safetensors"


def weight_unit(name: str) -> str:
    """Return the name of the unit with which a weight is written: its decoder layer, or itself outside the layers.

    >>> weight_unit("model.layers.3.mlp.up_proj.weight"), weight_unit("model.norm.weight")
    ('model.layers.3', 'model.norm.weight')
    """
    layer = re.match(r".*?\.\d+(?=\.)", name)
    return layer.group() if layer else name
