"""The base model of a run that trains an adapter: sums of its weights, kept in base.json and compared later."""

import hashlib
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from longspan.config.keys import AUTO
from longspan.config.sections import RANDOM, RunConfig
from longspan.errors import ModelError
from longspan.files import parse_json, read_json, write_atomically
from longspan.model.weights.folder import open_tensors
from longspan.model.weights.hf_folder import weight_files

BASE = "base.json"
BLOCKS, BLOCK_BYTES = 8192, 1 << 14  # that a sum reads, spread evenly: a folder of 140 GB takes seconds


def keep_base(run_dir: Path, config: RunConfig) -> None:
    """Write the sums of the folders whose weights the run's adapter is trained over; without any, remove old ones."""
    folders = _base_folders(config) if config.lora.rank else {}
    sums = {key: [str(folder), weights_sum(folder)] for key, folder in folders.items()}
    if sums:
        write_atomically(run_dir / BASE, json.dumps(sums, indent=1))
    else:
        (run_dir / BASE).unlink(missing_ok=True)


def check_base(run_dir: Path, config: RunConfig) -> None:
    """Raise ModelError where these folders are gone, or hold other weights than the run began with.

    A run without base.json, which an earlier version began, may have any.
    """
    sums: dict[str, Any] = read_json(run_dir / BASE) if has_kept_base(run_dir) else {}
    for key, folder in _base_folders(config).items():
        advice = "put them back" + ", or name a folder that has them with --model.path" * (key == "model.path")
        if not folder.is_dir():
            raise ModelError(f"the adapter of {run_dir} needs the weights of {folder} ({key}), which is gone; {advice}")
        old_folder, old_sum = sums.get(key, ("", ""))
        if old_sum and (new_sum := weights_sum(folder)) != old_sum:
            raise ModelError(
                f"the adapter of {run_dir} began over the weights of {old_folder} ({key}) with the sum {old_sum[:12]}, "
                f"and {folder} has others now, with the sum {new_sum[:12]}; {advice}"
            )


def has_kept_base(run_dir: Path) -> bool:
    return (run_dir / BASE).is_file()


def _base_folders(config: RunConfig) -> dict[str, Path]:
    paths = {"model.path": config.model.path, "mtp.weights": config.mtp.weights}
    return {key: Path(path).absolute() for key, path in paths.items() if path not in ("", AUTO, RANDOM)}


def weights_sum(folder: Path) -> str:
    """Sum names, types, shapes and blocks of a folder's tensors: all of a small model's, of each tensor two or more.

    SHA-256, as hexadecimal digits. In which files of safetensors the tensors stand does not matter.
    """
    digest, places = hashlib.sha256(), dict[str, tuple[Path, int, int]]()
    files = weight_files(folder)
    with ExitStack() as stack:
        open_tensors(files, stack)  # raises ModelError for damaged files
    for file in files:
        places |= _tensor_places(file)
    most = max(2, BLOCKS // max(1, len(places)))
    for tensor, (file, start, end) in sorted(places.items()):
        digest.update(tensor.encode())
        count = min(most, -(-(end - start) // BLOCK_BYTES))
        with file.open("rb", buffering=0) as opened:
            for place in np.linspace(start, max(start, end - BLOCK_BYTES), count).astype(int):
                opened.seek(place)
                digest.update(opened.read(min(BLOCK_BYTES, end - start)))
    return digest.hexdigest()


def _tensor_places(file: Path) -> dict[str, tuple[Path, int, int]]:
    if file.suffix != ".safetensors":  # of torch.save: the file as a whole
        return {file.name: (file, 0, file.stat().st_size)}
    with file.open("rb") as opened:
        first = 8 + (length := int.from_bytes(opened.read(8), "little"))
        header = parse_json(opened.read(length))
    return {
        f"{name} {entry['dtype']} {entry['shape']}": (file, *(first + offset for offset in entry["data_offsets"]))
        for name, entry in header.items()
        if name != "__metadata__"
    }
