"""The model that a run began with: a sum of its weights in the run's base.json, and its configuration, config.json."""

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import transformers

from longspan.config.keys import AUTO
from longspan.config.sections import RANDOM, ModelConfig, RunConfig
from longspan.errors import ModelError
from longspan.files import read_json, write_atomically
from longspan.model.presets import PRESETS
from longspan.model.weights.configuration_values import (
    changed_values,
    configuration_values,
    decides_numbers,
    flat_values,
)
from longspan.model.weights.hf_folder import quantization_settings, read_configuration, weight_files
from longspan.plain_text import items_text
from longspan.train.run_model.load import read_model_configuration
from longspan.train.run_model.rope_scaling import scale_as_saved

BASE = "base.json"
TEACHER = "teacher.path"
# A sum reads this many blocks, spread evenly over the files.
BLOCKS = 8192
BLOCK_BYTES = 1 << 14


def record_base_weights(run_dir: Path, config: RunConfig) -> None:
    """Write base.json: sums of the weights of model.path, if the run's adapter or reference model needs them, of
    those of mtp.weights, if they stay as they are, and of a teacher's.

    A base.json that is there is removed first.
    """
    (run_dir / BASE).unlink(missing_ok=True)
    folders = _base_folders(config) if needs_base_weights(config) else {}
    if config.teacher.path:
        folders[TEACHER] = Path(config.teacher.path).absolute()
    if folders:
        records = {key: {"folder": str(folder), **weight_sums(folder)} for key, folder in folders.items()}
        record = records.pop("model.path", {}) | records
        write_atomically(run_dir / BASE, json.dumps(record, indent=1))


def needs_base_weights(config: RunConfig) -> bool:
    """Return whether a run needs the weights of model.path as long as it goes on."""
    return bool((config.lora.rank or config.train.needs_reference) and config.model.path)


def check_base_unchanged(run_dir: Path, config: RunConfig, device: str, *, goes_on: bool = False) -> str:
    """Raise ModelError where the model that a run began with is gone, has another configuration or other weights, or
    would be drawn otherwise on this kind of `device`; return a line about what else has changed in its configuration,
    or "".

    Weights matter for a run of an adapter, whose base model they are, and where the run `goes_on` also for one whose
    loss needs a reference model, which is read from them again, and those of its teacher. Where the run goes on, the
    configuration of every model matters. A run without base.json, which an earlier version began, may have any weights.
    """
    user = "adapter" if config.lora.rank else "reference model"
    if goes_on and config.teacher.path:
        _check_weights_unchanged(run_dir, TEACHER, Path(config.teacher.path).absolute(), "teacher")
    if config.lora.rank or (goes_on and config.train.needs_reference):
        if config.model.path:
            for key, folder in _base_folders(config).items():
                _check_weights_unchanged(run_dir, key, folder, user)
        elif reason := _why_drawn_otherwise(run_dir, config.model, device):
            raise ModelError(f"the {user} of {run_dir} stands on random weights: {reason}")
    if not goes_on and not (config.lora.rank and config.model.path):
        return ""
    advice = "set run.dir to a new folder" if goes_on else _other_folder_advice(run_dir, "model.path")
    return check_configuration_unchanged(run_dir, config, advice)


def check_configuration_unchanged(run_dir: Path, config: RunConfig, advice: str) -> str:
    """Raise ModelError where [model] now names another configuration than RUN/config.json has, as far as it decides
    numbers; return a line about other values that differ, or "".

    The error names each value that differs, and ends with this `advice` on what else can be done. A run without
    config.json has nothing to compare.
    """
    file = run_dir / "config.json"
    if not file.is_file():
        return ""
    try:
        saved = read_configuration(file)
    except ModelError as error:
        raise ModelError(f"{file} is damaged: {error}; put it back, or remove it and it is made anew") from error
    configuration = read_model_configuration(config, saved.get_text_config().vocab_size)
    configuration = scale_as_saved(configuration, config.model, saved)
    if config.model.num_labels:  # the token by which a run's rows are padded
        configuration.pad_token_id = saved.pad_token_id
    before = configuration_values(saved)
    now = configuration_values(configuration)
    changes = changed_values(before, now)
    deciding = [name for name in changes if decides_numbers(name)]
    # Another version of transformers may write, or lack, other names.
    if saved.transformers_version != transformers.__version__:
        deciding = [name for name in deciding if name in before and name in now]
    source = config.model.source or config.model.preset_name
    if deciding:
        raise ModelError(
            f"{run_dir} began with the configuration that its config.json has, and {source} has another now: "
            f"{items_text([changes[name] for name in deciding])}; set that back, or {advice}"
        )
    if not changes:
        return ""
    return (
        f"{source} has another configuration than {run_dir} began with, in what decides no number or one version of "
        f"transformers alone writes: {items_text([*changes.values()])}; {file} stays as it is"
    )


def _why_drawn_otherwise(run_dir: Path, model: ModelConfig, device: str) -> str:
    """The text is "" where they can be drawn again."""
    # A tiny preset is drawn on the CPU everywhere.
    if model.preset_name and not PRESETS[model.preset_name].embedding_rows:
        return ""
    facts: Any = None
    with suppress(OSError, ValueError):
        facts = read_json(run_dir / "run.json")
    drawn_on = facts.get("device") if isinstance(facts, dict) else None  # "CPU", or the name of a GPU
    if drawn_on is None or (drawn_on == "CPU") == (device == "cpu"):
        return ""
    return f"they were drawn on {drawn_on}, and a device of the kind {device} draws others"


def _base_folders(config: RunConfig) -> dict[str, Path]:
    mtp = config.mtp
    keys = {"model.path": config.model.path}
    if config.lora.rank and mtp.num_layers and not mtp.train_whole and mtp.weights not in (AUTO, RANDOM):
        keys["mtp.weights"] = mtp.weights
    return {key: Path(folder).absolute() for key, folder in keys.items()}


def _check_weights_unchanged(run_dir: Path, key: str, folder: Path, user: str) -> None:
    advice = _other_folder_advice(run_dir, key)
    if not folder.is_dir():
        raise ModelError(
            f"the {user} of {run_dir} needs the weights of {folder} ({key}), which is gone; put them back, or {advice}"
        )
    record = _read_record(run_dir / BASE, key) if (run_dir / BASE).is_file() else None
    # A run of an earlier version has no record.
    if record is None:
        return
    sums = weight_sums(folder)
    old_sum = record["sum"]
    new_sum = sums["sum"]
    files = _changed_files(record.get("files", sums["files"]), sums["files"])
    if (old_sum == new_sum) != (not files) and "files" in record:
        raise _damaged_record(run_dir / BASE, "its sums contradict each other")
    if old_sum != new_sum:
        raise ModelError(
            f"the {user} of {run_dir} began over the weights of {record['folder']} ({key}) with the sum "
            f"{old_sum[:12]}, and {folder} has others now, with the sum {new_sum[:12]}"
            f"{f', in {items_text(files)}' if files else ''}; put them back, or {advice}"
        )
    quantization = record.get("quantization", sums["quantization"])
    if changes := changed_values(flat_values(quantization), flat_values(sums["quantization"])):
        raise ModelError(
            f"the {user} of {run_dir} began over the weights of {record['folder']} ({key}), and config.json of "
            f"{folder} says now that they are quantized otherwise: {items_text([*changes.values()])}; set that back, "
            f"or {advice}"
        )


def _other_folder_advice(run_dir: Path, key: str) -> str:
    return f"set {key} in {run_dir / 'config.toml'} to a folder that has them"


def _read_record(file: Path, key: str) -> dict[str, Any] | None:
    """None if base.json has nothing of the folder."""
    try:
        whole: dict[str, Any] = read_json(file)
        record = whole if key == "model.path" else whole.get(key)
        if record is None:
            return None
        files: dict[str, list[Any]] = record.get("files", {})
        texts = [record["folder"], record["sum"], *(digest for _, digest in files.values())]
        flat_values(record.get("quantization", {}))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged_record(file, f"{type(error).__name__}: {error}") from error
    if not all(isinstance(text, str) for text in texts):
        raise _damaged_record(file, "its sums are no texts")
    return record


def _damaged_record(file: Path, reason: str) -> ModelError:
    return ModelError(
        f"{file} is damaged ({reason}): it has the sums of the weights that the run began with; put it back, or remove "
        "it if the folders still have these weights"
    )


def _changed_files(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Another size moves the blocks that are read of every file, so sums are compared only where all sizes are the
    same."""
    names = sorted(before.keys() | now.keys())
    resized = [name for name in names if before.get(name, [-1])[0] != now.get(name, [-1])[0]]
    return resized or [name for name in names if before[name] != now[name]]


def weight_sums(folder: Path) -> dict[str, Any]:
    """Return what tells a folder's weights from others: "sum", the SHA-256, in hex, of the sizes of its files of
    weights and of about BLOCKS blocks spread over them, "files", the size and the sum of each by name, and
    "quantization", how its config.json says to read them.

    Of a small model the blocks cover every byte.
    """
    digest = hashlib.sha256()
    files = dict[str, list[Any]]()
    paths = weight_files(folder, quantized=True)
    sizes = [path.stat().st_size for path in paths]
    step = max(BLOCK_BYTES, sum(sizes) // BLOCKS)
    for path, size in zip(paths, sizes, strict=True):
        file_digest = hashlib.sha256()
        digest.update(f"{size} ".encode())
        with path.open("rb", buffering=0) as opened:
            for place in (*range(0, size, step), max(0, size - BLOCK_BYTES)):
                opened.seek(place)
                block = opened.read(BLOCK_BYTES)
                digest.update(block)
                file_digest.update(block)
        files[str(path.relative_to(folder))] = [size, file_digest.hexdigest()]
    return {"sum": digest.hexdigest(), "files": files, "quantization": quantization_settings(folder)}
