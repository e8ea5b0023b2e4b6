"""`longspan export`: a checkpoint as a Hugging Face folder that stock transformers loads, in one process on the CPU."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from longspan import __version__
from longspan.adapter_folder import ADAPTER_CONFIGURATION
from longspan.checkpoint.files import find_run_and_checkpoint
from longspan.cli.flags import Word, parse_flags
from longspan.config.file import load_config
from longspan.errors import ConfigError, plural
from longspan.files import as_json
from longspan.hub import check_push_access, push_folder
from longspan.plain_text import escape_controls


@dataclass(frozen=True)
class ExportFlags:
    """Write a checkpoint to a Hugging Face folder: safetensors, configuration, tokenizer, how it generates.

    Checkpoints of any number of ranks are read in this one process, a decoder layer at a time.
    """

    checkpoint: Annotated[str, Word("RUN_OR_CHECKPOINT", "a run's folder or a checkpoint", "runs/first")]
    """A run's folder (its newest good checkpoint, with evaluation.patience its best), or the folder of one
    checkpoint."""
    folder: Annotated[str, Word("FOLDER", "a folder to write the model to", "my-model")]
    """Where to write the model; a folder that is empty or not there yet."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Of the files: auto (that of the model or configuration that the run began with), or a name."""
    merge: bool = False
    """Of a run that trains an adapter ([lora]): its base model with the adapter added to the weights, for stock
    transformers. Without it the adapter is written, for stock peft."""
    overwrite: bool = False
    """Replace the model in a folder that holds one; other files in it stay."""
    push: str = ""
    """Upload the folder to this model of the Hugging Face hub, ORG/NAME, which is made if it is not there: private, so
    that only its owner sees it. Needs a login (hf auth login)."""
    public: bool = False
    """With --push: a model that is made is public. One that is there stays as visible as it is."""
    json: bool = False
    """Print what was written as one JSON object on standard output; progress goes to standard error."""


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    flags = parse_flags(ExportFlags, argv, "longspan export")
    run_dir, checkpoint = find_run_and_checkpoint(Path(flags.checkpoint))
    if flags.public and not flags.push:
        raise ConfigError("--public is given without --push; add --push ORG/NAME, or leave it out")
    if flags.push:
        check_push_access(flags.push)
    from longspan.checkpoint.export import export_checkpoint
    from longspan.cli.model_card import write_card

    stream = sys.stderr if flags.json else sys.stdout

    def log(line: str) -> None:
        print(escape_controls(line), file=stream, flush=True)

    written = export_checkpoint(
        run_dir,
        checkpoint,
        Path(flags.folder),
        log,
        dtype=flags.dtype,
        overwrite=flags.overwrite,
        merge=flags.merge,
    )
    write_card(written, run_dir, flags.push or Path(flags.folder).resolve().name, log)
    pushed = {}
    if flags.push:
        message = f"Step {written.step}, by longspan {__version__}"
        pushed = {"pushed": push_folder(Path(flags.folder), flags.push, message, private=not flags.public)}
    text = (
        f"step {written.step} of {written.checkpoint} is in {written.folder}: {plural(written.tensors, 'tensor')} "
        f"of {written.parameters / 1e6:,.1f} M weights in {written.dtype}, {written.bytes / 1e6:,.1f} MB in "
        f"{plural(written.files, 'file')}; next: {_next_command(flags, run_dir)}"
    )
    print(as_json(written._asdict() | pushed) if flags.json else "\n".join([text, *pushed.values()]))
    return 0


def _next_command(flags: ExportFlags, run_dir: Path) -> str:
    """An adapter alone, and a model that scores, are evaluated as weights of their run, which has the base model and
    the kind of rows."""
    is_adapter = Path(flags.folder, ADAPTER_CONFIGURATION).is_file()
    if is_adapter or load_config(run_dir / "config.toml").model.num_labels:
        return shlex.join(["longspan", "eval", flags.checkpoint, "--data", "ROWS"])
    return shlex.join(["longspan", "eval", flags.folder, "--data", "TEXTS"])
