"""The answer to "which GPU": the same question asked of every known GPU, and one table of the answers."""

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from longspan.cli.flags import flag_text
from longspan.cli.plans.answer import (
    Answer,
    answer_by_longest,
    answer_by_steps,
    answer_ways,
    flags_of_keys,
    make_run,
    open_documents,
    print_preset,
    read_step,
    run_keys,
    way_figures,
)
from longspan.cli.plans.gpu_run import GpuRun
from longspan.cli.plans.gpus import read_gpus
from longspan.cli.plans.question import GpuFlags, Question, find_document_source
from longspan.config.memory_keys import read_key
from longspan.config.sections import RunConfig
from longspan.errors import ConfigError
from longspan.plain_text import gib_text, seconds_text, text_table
from longspan.plan.cost.machine import KNOWN
from longspan.resolve.facts import Facts

# --gpu takes this word.
ALL_GPUS = "all"
ONE_GPU_FLAGS = (
    "gpu_bytes",
    "tflops",
    "compare",
    "write",
    "show",
    "plot",
)  # flags that a question about all does not take


@dataclass(frozen=True)
class GpuAnswer:
    """What is asked of the GPUs of `run`, and the answer: theirs, or that of the fewest more of them which fit (None:
    no number does).
    """

    run: GpuRun
    answer: Answer | None

    @property
    def count(self) -> int | None:
        """How many of these GPUs fit."""
        return self.answer.run.gpus.count if self.answer else None

    @property
    def keys(self) -> dict[str, Any]:
        """The keys of the answer that the question does not give, and that have other values than their defaults."""
        if not self.answer:
            return {}
        defaults = RunConfig()
        keys = run_keys(self.answer.config, frozenset())
        added = {key: value for key, value in keys.items() if key not in self.run.given_keys}
        return {key: value for key, value in added.items() if value != read_key(defaults, key)}

    def to_json(self) -> dict[str, Any]:
        gpus = self.run.gpus
        figures = way_figures(self.answer.ways[0]) if self.answer else {}
        names = ("planner", "degree", "tokens_per_second_per_gpu", "mfu", "device_bytes", "host_bytes_used")
        return {
            "gpu": gpus.name,
            "gpu_bytes": gpus.bytes,
            "by_data_sheet": gpus.machine.assumed,
            "fits": self.count == gpus.count,
            "gpus": self.count,
            "longest": self.answer.longest if self.answer else 0,
            "step_seconds": self.answer.seconds if self.answer else None,
            "hours": self.answer.hours if self.answer else None,
            **{name: figures.get(name) for name in names},
            "keys": self.keys,
        }


def answer_which_gpu(flags: GpuFlags, question: Question) -> int:
    """Ask every known GPU, and print one table; returns the exit code, 2 where no number of any GPU fits.

    Raises ConfigError for flags that are of one GPU.
    """
    given = [flag_text(f"--{name}") for name in ONE_GPU_FLAGS if getattr(flags, name)]
    given += ["run.machine"] if question.config.run.machine else []
    if given:
        raise ConfigError(
            f"--gpu all is about every known GPU, and does not take {' and '.join(given)}; leave it out"
        )
    source = find_document_source(flags, question)
    runs = [make_run(flags, question, read_gpus(replace(flags, gpu=name), ""), source) for name in KNOWN]
    print_preset(runs[0])
    if source == "data":
        with open_documents(runs[0], estimate=True) as (run_of_data, facts, title):
            runs = [replace(run_of_data, gpus=run.gpus) for run in runs]
            answers = _ask_all(runs, partial(_answer_by_data, title, facts))
    elif source == "longest":
        title = "the longest document that fits"
        answers = _ask_all(runs, answer_by_longest)
    else:
        lengths, title = read_step(flags, runs[0])
        answers = _ask_all(runs, lambda run: answer_ways(title, run, run.facts_of_step(lengths)))
    is_longest = source == "longest"
    answers.sort(key=lambda answer: _rank(answer, by_length=is_longest))
    if flags.json:
        print(json.dumps({"title": title, "gpus": [answer.to_json() for answer in answers]}, ensure_ascii=False))
    else:
        print("\n".join(_table_lines(title, answers, by_length=is_longest)))
    return 0 if any(answer.count for answer in answers) else 2


def _answer_by_data(title: str, facts: Facts, run: GpuRun) -> Answer:
    on_gpus = replace(facts, home=run.home, machine=run.gpus.machine, budget=run.budget)
    return answer_by_steps(title, run, on_gpus)


def _ask_all(runs: Sequence[GpuRun], ask: Callable[[GpuRun], Answer]) -> list[GpuAnswer]:
    answers = list[GpuAnswer]()
    for number, run in enumerate(runs, start=1):
        print(f"{number} of {len(runs)}: {run.gpus.count_and_name}", file=sys.stderr, flush=True)
        answer = ask(run)
        if answer.seconds is None:
            larger = answer.larger
            answer = ask(replace(run, gpus=larger.gpus)) if larger else None
        answers.append(GpuAnswer(run, answer))
    return answers


def _rank(answer: GpuAnswer, *, by_length: bool) -> tuple[float, float, float]:
    """The fewest GPUs come first, then those that hold the longest document, or the fastest."""
    if answer.answer is None or answer.answer.seconds is None:
        return math.inf, 0.0, 0.0
    length = answer.answer.longest if by_length else 0
    return answer.answer.run.gpus.count, -length, answer.answer.seconds


def _table_lines(title: str, answers: Sequence[GpuAnswer], *, by_length: bool) -> Iterator[str]:
    gpus = answers[0].run.gpus
    yield title
    yield (
        f"on {gpus.count} of each GPU, or on the fewest that fit, with {gib_text(gpus.host_bytes)} of host memory for "
        "each; speeds are by data sheet, but for the H200"
    )
    yield ""
    has_hours = any(answer.answer and answer.answer.hours for answer in answers)
    names = ["GPU", "GiB", f"fits {gpus.count}", "GPUs", *(["tokens"] if by_length else []), "a step"]
    names += [*(["GPU-hours"] if has_hours else []), "tokens/s", "of a GPU", "of the host", "degree"]
    yield text_table(names, [_row(answer, by_length=by_length, has_hours=has_hours) for answer in answers])
    flags = {each.answer.run.gpus.count_and_name: flags_of_keys(each.keys) for each in answers if each.answer}
    if flags:
        yield from ("", "keys to add, as flags of longspan train:")
    for text in dict.fromkeys(flags.values()):
        yield f"{', '.join(name for name in flags if flags[name] == text)}: {text or 'none'}"


def _row(answer: GpuAnswer, *, by_length: bool, has_hours: bool) -> list[str]:
    gpus = answer.run.gpus
    row = [gpus.name, f"{(gpus.bytes or 0) / 2**30:.0f}"]
    if answer.answer is None or answer.answer.seconds is None:
        return [*row, "no", "none", *[""] * (5 + by_length + has_hours)]
    figures = way_figures(answer.answer.ways[0])
    row += ["yes" if answer.count == gpus.count else "no", f"{answer.count}"]
    row += [f"{answer.answer.longest:,}"] if by_length else []
    row.append(seconds_text(answer.answer.seconds))
    if has_hours:
        row.append(f"{(answer.answer.hours or 0) * (answer.count or 0):,.2f}")
    row += [f"{figures['tokens_per_second_per_gpu']:,.0f}", gib_text(figures["device_bytes"])]
    return [*row, gib_text(figures["host_bytes_used"]), str(figures["degree"] or figures["planner"])]
