"""How an answer about GPUs is written: lines, a table of bytes, a command with the keys."""

import json
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from longspan.cli.gpu_plans.answer import Answer, Column
from longspan.errors import plural
from longspan.plain_text import seconds_text, text_table
from longspan.plan.memory.bytes import Bytes, gib_text

WIDTH = 110  # characters of a command's line
MEASURE_WORDS = "none: all; selective: their input and attention's output; full: their input; auto: as chosen above"


def answer_lines(answer: Answer, command: Sequence[str]) -> list[str]:
    """Write the answer for people: what fits, the table, and the keys behind `command`, a run's words."""
    run, fit = answer.run, answer.fit
    lines = [answer.title, f"on {run.gpus.title}", ""]
    lines += [answer.memory.summary_line(run.budget)]
    if answer.step_seconds is not None:
        lines += _time_lines(answer)
    lines += ["", bytes_table(answer.columns), *_table_notes(answer), ""]
    lines += [*answer.notes, "the keys to write:", *command_lines(command, answer.keys if fit else {})]
    return lines


def _time_lines(answer: Answer) -> Iterator[str]:
    """Yield seconds of a step, hours of a run, and degrees that occur."""
    assert answer.step_seconds is not None
    if answer.steps is None:
        yield f"a step is predicted to take {seconds_text(answer.step_seconds)}"
    else:
        hours, gpus = answer.hours or 0.0, answer.run.gpus.count
        total_text = f"{hours:,.2f} hours" if hours >= 1 else seconds_text(hours * 3600)
        sample_text = f", the mean of {answer.sampled} of them" if answer.sampled < answer.steps else ""
        yield (
            f"{plural(answer.steps, 'step')} of {seconds_text(answer.step_seconds)}{sample_text}: {total_text}, "
            f"{hours * gpus:,.2f} GPU-hours, without evaluations and checkpoints"
        )
    if len(answer.degrees) == 1:
        yield f"degree {answer.degrees[0].degree} for all documents"
    elif answer.degrees:
        yield f"tokens by degree: {', '.join(f'{d.degree}: {d.share:.1%}' for d in answer.degrees)}"


def bytes_table(columns: Sequence[Column]) -> str:
    """Write the bytes of device and host under each column's measures, in GiB; rows named as in the JSON.

    The first row is the longest document where columns differ in it, otherwise whether each fits. Rows of the host that
    are 0 everywhere are left out.
    """
    names = ["GiB of one GPU", *(column.name for column in columns)]
    rows = [["fits", *("yes" if column.fits else "no" for column in columns)]]
    if len({column.tokens for column in columns}) > 1:
        rows = [["longest", *(f"{column.tokens:,}" for column in columns)]]
    for memory in ("device", "host"):
        for name in Bytes().to_json():
            sizes = [None if c.memory is None else getattr(c.memory, memory).to_json()[name] for c in columns]
            if memory == "device" or name == "total" or any(sizes):
                rows.append([f"{memory} {name}", *("-" if size is None else f"{size / 2**30:,.2f}" for size in sizes)])
    return text_table(names, rows)


def _table_notes(answer: Answer) -> Iterator[str]:
    """Yield what stands below the table: what its words mean, the budget, and the longest document that fits."""
    run = answer.run
    yield f"what layers keep: {MEASURE_WORDS}"
    yield (
        f"a GPU may be filled up to {gib_text(run.budget.device)} (train.memory_fraction), the host up to "
        f"{gib_text(run.budget.host)} for each GPU"
    )
    if answer.columns[-1].tokens != answer.longest:
        yield f"the longest document that fits: {answer.longest:,} tokens"


def refusal_line(answer: Answer) -> str:
    """Write why nothing fits, and what would fit, in one line.

    Where the bytes would fit, the planner's own words say why; otherwise the bytes that are missing.
    """
    run, memory = answer.run, answer.memory
    why = (
        f"at least {gib_text(memory.device.total)} ({memory.device.total:,} bytes) are needed of a GPU that may be "
        f"filled up to {gib_text(run.budget.device)}, and {gib_text(memory.host.total)} of the host's "
        f"{gib_text(run.budget.host)}"
    )
    line = f"{answer.title} does not fit {run.gpus.words}: "
    line += answer.refusal if memory.fits(run.budget) and answer.refusal else why
    if answer.longest:
        line += f"; the longest document that fits has {answer.longest:,} tokens"
    if answer.fit is None:
        return f"{line}; no number of such GPUs up to 1,024 would do with these keys"
    keys = " ".join(_key_words(answer.keys))
    released = " if train.memory may choose" if answer.needs_free_measures else ""
    measures = answer.fit.memory.summary_line().removeprefix("memory: ")
    return f"{line}; {plural(answer.fit.run.gpus.count, 'GPU')} would do{released} ({measures}), with {keys}"


def repeat_words(words: Sequence[str], file: str, keys: Collection[str]) -> list[str]:
    """Repeat a command from the `words` behind `longspan train`: verb and file, then each flag with its values.

    Flags of `keys`, which the answer gives anew, --dry-run and --json are left out with their values.
    """
    repeated, is_left_out = [f"longspan train {shlex.quote(file)}" if file else "longspan train"], False
    for word in words:
        name = word[2:].partition("=")[0].replace("-", "_") if word.startswith("--") else ""
        if name:
            is_left_out = name in keys or name in ("dry_run", "json")
        if not is_left_out and name:
            repeated.append(shlex.quote(word))
        elif not is_left_out and word != file:  # which stands behind the verb already
            repeated[-1] += f" {shlex.quote(word)}"
    return repeated


def command_lines(command: Sequence[str], keys: Mapping[str, Any]) -> list[str]:
    """Write a command, a verb and its flags, and these keys over lines for a shell, with a backslash between lines."""
    lines, line = list[str](), command[0]
    for word in [*command[1:], *_key_words(keys)]:
        if len(line) + len(word) + 3 > WIDTH:
            lines.append(f"{line} \\")
            line = "   "
        line += f" {word}"
    return [*lines, line]


def _key_words(keys: Mapping[str, Any]) -> Iterator[str]:
    """Yield each key and its values as words of a command line."""
    for key, value in keys.items():
        values = value if isinstance(value, list) else [value]
        words = (str(x).lower() if isinstance(x, bool) else shlex.quote(str(x)) for x in values)
        yield f"--{key} {' '.join(words)}"


def answer_json(answer: Answer) -> str:
    """Write the answer as JSON."""
    return json.dumps(answer.to_json(), ensure_ascii=False)
