"""README.md of an exported model: how to load it, what it was trained on, and the figures of its run."""

from collections.abc import Iterator
from functools import partial
from math import fsum
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from longspan import __version__
from longspan.adapter_folder import ADAPTER_CONFIGURATION
from longspan.checkpoint.best import read_best_steps
from longspan.checkpoint.export import Exported
from longspan.checkpoint.files import read_state
from longspan.comm.all_ranks import LogLine
from longspan.config.file import load_config
from longspan.config.keys import AUTO
from longspan.config.loss_arguments import loss_text
from longspan.config.sections import RunConfig
from longspan.config.text_values import BestFigure
from longspan.errors import plural
from longspan.files import read_json, write_atomically
from longspan.hub import hub_name
from longspan.run.facts import LAST_STEPS
from longspan.run.metrics import read_metrics

_TAGS = ["longspan"]


def _teacher_text(config: RunConfig) -> str:
    keys = config.distillation
    name = hub_name(Path(config.teacher.path)) or Path(config.teacher.path).name
    frozen = "" if config.teacher.frozen == AUTO else f" ({config.teacher.frozen})"
    return f"{name}{frozen}, divergence at beta {keys.beta:g}, temperature {keys.temperature:g}"


def write_card(exported: Exported, run_dir: Path, title: str, log: LogLine) -> None:
    """Write the card of an export, with this title; a README.md that longspan did not write is kept, and logged."""
    file = Path(exported.folder, "README.md")
    config = load_config(run_dir / "config.toml")
    old_text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    if old_text and ModelCard(old_text, ignore_metadata_errors=True).data.get("tags") != _TAGS:
        log(f"{file} is kept, for longspan did not write it; it says nothing of this run")
        return
    model = config.model
    data_paths = [config.data.path] if config.data.path else [source.path for source in config.data.sources]
    base = hub_name(Path(model.path))
    adapter = Path(exported.folder, ADAPTER_CONFIGURATION).is_file()
    # a path may be the folder of a data set of the hub, or lie inside of one
    folders = (folder for path in data_paths for folder in Path(path, "file").parents)
    datasets = [name for folder in folders if (name := hub_name(folder))]
    metadata = ModelCardData(
        base_model=base or None,
        library_name="peft" if adapter else "transformers",
        datasets=datasets or None,
        tags=_TAGS,
    )
    origin = "An adapter of " if adapter else "Trained from "
    origin += f"{'' if model.path else 'random weights of '}{base or Path(model.source).name or model.preset_name}"
    auto_class = "AutoModelForCausalLM"
    if model.num_labels:
        auto_class = "AutoModelForSequenceClassification"
    elif "vision_config" in read_json(run_dir / "config.json"):
        auto_class = "AutoModelForImageTextToText"
    rows = [("data", ", ".join(dict.fromkeys([*datasets, *(Path(path).name for path in data_paths)])))]
    # not those of config.toml, which may give epochs: the run has counted their steps
    steps = read_state(Path(exported.checkpoint))["config"]["train"]["steps"]
    rows += [("trained by", loss_text(config.train))] if config.train.loss else []
    rows += [("teacher", _teacher_text(config))] if config.distils else []
    rows += _card_figures(run_dir, exported.step, steps, file, log)
    if config.checkpoint.keep_best:
        figure = BestFigure.from_text(config.checkpoint.keep_best)
        bests = read_best_steps(run_dir, figure, lambda _: None)
        rows += [("best step", f"{best.step:,}, by {figure.name} {best.value:.6g}") for best in bests[-1:]]
    table = "\n".join(f"| {name} | {value} |" for name, value in dict(rows).items())
    text = f"""---
{metadata.to_yaml()}
---

# {title.rpartition("/")[2]}

{origin}, by longspan {__version__}: the weights after step {exported.step:,} \
({exported.parameters / 1e6:,.1f} M, {exported.dtype}).

```python
from transformers import {auto_class}, AutoTokenizer

model = {auto_class}.from_pretrained("{title}"){"  # needs peft" if adapter else ""}
tokenizer = AutoTokenizer.from_pretrained("{title}")
```

| | |
|---|---|
{table}
"""
    write_atomically(file, str(ModelCard(text)))


def _card_figures(run_dir: Path, step: int, steps: int, card: Path, log: LogLine) -> Iterator[tuple[str, str]]:
    """A file that the `card` does without, as it cannot be read or lacks something, is logged."""
    readers = {
        "metrics.jsonl": partial(_measured_figures, step=step, steps=steps),
        "summary.json": _end_figures,
        "run.json": lambda file: [("documents", dict(read_json(file)["lines"])["data"])],
    }
    for name, read_figures in readers.items():
        try:
            yield from read_figures(run_dir / name)
        except (OSError, AttributeError, ValueError, KeyError, TypeError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            log(f"{run_dir / name} cannot be read ({reason}), so {card} has no figures from it")


def _measured_figures(file: Path, *, step: int, steps: int) -> Iterator[tuple[str, str]]:
    rows = [row for row in read_metrics(file) if row["step"] <= step]
    trained = [row for row in rows if "loss" in row]
    # A divergence is estimated over prompts with other rows' answers, which steps compute too (train.loss kto).
    mismatched = (
        " with the mismatched answers" if any("kl" in row and "teacher_mass" not in row for row in trained) else ""
    )
    tokens = sum(row["tokens"] + row.get("spared_tokens", 0) for row in trained)
    yield "trained", f"{step:,} of {plural(steps, 'step')}, {tokens:,} tokens{mismatched}"
    if last := [row["loss"] for row in trained[-LAST_STEPS:]]:
        yield f"mean loss of the last {plural(len(last), 'step')}", f"{fsum(last) / len(last):.4f}"
    for row in rows:
        if row["step"] == step and "eval_loss" in row:
            where = f"{row.get('eval_name', 'held-out documents')}, degree {row['cp']}"
            perplexity = f", perplexity {row['eval_perplexity']:.4g}" if "eval_perplexity" in row else ""
            yield f"loss of {where}", f"{row['eval_loss']:.4f}{perplexity}"


def _end_figures(file: Path) -> Iterator[tuple[str, str]]:
    summary = read_json(file)
    if reason := summary.get("end_reason"):
        yield "ended", f"after step {summary['step']:,} of {summary['steps']:,}: {reason}"
