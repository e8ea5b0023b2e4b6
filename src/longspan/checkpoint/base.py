"""The base model of a run that trains an adapter: a sum of its weights, kept in the run's base.json and compared."""

import hashlib
import json
from pathlib import Path

from longspan.config.sections import RunConfig
from longspan.errors import ModelError
from longspan.files import read_json, write_atomically
from longspan.model.weights.hf_folder import weight_files

BASE = "base.json"
BLOCKS = 8192  # that a sum reads, spread evenly over the files
BLOCK_BYTES = 1 << 14


def record_base_weights(run_dir: Path, config: RunConfig) -> None:
    """Write base.json: the sum of the weights of model.path, if the run's adapter or reference model needs them.

    A base.json that is there is removed first.
    """
    (run_dir / BASE).unlink(missing_ok=True)
    if (config.lora.rank or config.train.needs_reference) and (folder := config.model.path):
        record = {"folder": str(Path(folder).absolute()), "sum": weights_fingerprint(Path(folder))}
        write_atomically(run_dir / BASE, json.dumps(record, indent=1))


def check_base_weights_unchanged(run_dir: Path, config: RunConfig, *, goes_on: bool = False) -> None:
    """Raise ModelError where the folder of a run's model is gone, or has other weights than the run began with.

    It matters for a run of an adapter, whose base model it is, and where the run `goes_on` also for one whose loss
    needs a reference model, which is read from it again. A run without base.json, which an earlier version began, may
    have any weights.
    """
    needs_reference = goes_on and config.train.needs_reference
    if not ((config.lora.rank or needs_reference) and config.model.path):
        return
    user = "adapter" if config.lora.rank else "reference model"
    folder = Path(config.model.path).absolute()
    advice = f"put them back, or set model.path in {run_dir / 'config.toml'} to a folder that has them"
    if not folder.is_dir():
        raise ModelError(
            f"the {user} of {run_dir} needs the weights of {folder} (model.path), which is gone; {advice}"
        )
    if not (run_dir / BASE).is_file():
        return
    record = read_json(run_dir / BASE)
    old_sum = record["sum"]
    new_sum = weights_fingerprint(folder)
    if new_sum != old_sum:
        raise ModelError(
            f"the {user} of {run_dir} began over the weights of {record['folder']} (model.path) with the sum "
            f"{old_sum[:12]}, and {folder} has others now, with the sum {new_sum[:12]}; {advice}"
        )


def weights_fingerprint(folder: Path) -> str:
    """Return the SHA-256, in hex, of the sizes of a folder's files of weights and of about BLOCKS blocks spread over
    them; of a small model the blocks cover every byte.
    """
    digest = hashlib.sha256()
    files = weight_files(folder, quantized=True)
    sizes = [file.stat().st_size for file in files]
    step = max(BLOCK_BYTES, sum(sizes) // BLOCKS)
    for file, size in zip(files, sizes, strict=True):
        digest.update(f"{size} ".encode())
        with file.open("rb", buffering=0) as opened:
            for place in (*range(0, size, step), max(0, size - BLOCK_BYTES)):
                opened.seek(place)
                digest.update(opened.read(BLOCK_BYTES))
    return digest.hexdigest()
