"""A folder that a model is saved to: its files are made beside it, and change places with those of an older model.

What else lies there stays: a README, a tokenizer where none is saved, other folders.
"""

import re
import shutil
from pathlib import Path
from tempfile import mkdtemp

from longspan.errors import ModelError
from longspan.model.hf_folder import TOKENIZER_FILES

# Names of files that a saved adapter or model takes the place of. Over a model's weights transformers would load an
# adapter that lies beside them, and in its place the model that the adapter belongs to.
OF_ADAPTER = r"adapter_config\.json|adapter_model.*\.(safetensors|bin|json)"
OF_MODEL = rf"config\.json|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|{OF_ADAPTER}"
_OF_TOKENIZER = "|".join(map(re.escape, TOKENIZER_FILES))
_CONFIGURATIONS = ("config.json", "adapter_config.json")  # without which a folder is none of a model


def partial_folder(folder: Path) -> Path:
    """A new folder in which the files of `folder` are made, on the same disk.

    Raises ModelError where `folder` is a file.
    """
    place = folder.resolve()
    if place.exists() and not place.is_dir():
        raise ModelError(f"{folder} is a file; name a folder to write the model to")
    partial = place / ".partial" if place.is_mount() else place.with_name(f"{place.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def put_in_place(partial: Path, folder: Path, replaced: str) -> None:
    """Give finished files their places in `folder`, which may be there: files of names like `replaced` go, others stay.

    Its configuration is the first to go and the last to come. So where that is interrupted, it is no folder of a model,
    and nothing is lost: the files that were there are in `FOLDER.replaced-…`, the new ones in `partial`.
    """
    if not folder.exists():
        partial.rename(folder.resolve())
        return
    made = sorted((path.name for path in partial.iterdir()), key=_CONFIGURATIONS.__contains__)
    pattern = f"{replaced}|{_OF_TOKENIZER}" if {*made} & {*TOKENIZER_FILES} else replaced
    names = [path.name for path in folder.iterdir()]
    going = [name for name in names if name in made or re.fullmatch(pattern, name)]
    old = Path(mkdtemp(prefix=f"{folder.resolve().name}.replaced-", dir=partial.parent))
    for name in sorted(going, key=_CONFIGURATIONS.__contains__, reverse=True):
        (folder / name).rename(old / name)
    for name in made:
        (partial / name).rename(folder / name)
    partial.rmdir()
    shutil.rmtree(old)
