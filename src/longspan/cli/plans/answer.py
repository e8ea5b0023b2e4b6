"""What a question about GPUs is answered: a plan of memory, the longest document, the keys to write, steps and hours.

`answer_longest`, `answer_step` and `answer_run` make an `Answer`; `answer_text.py` writes it. No torch.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from longspan.cli.plans.fit import (
    UNIT,
    Choices,
    Documents,
    Fit,
    by_hand,
    fewest_gpus,
    find_fit,
    fit_of,
    leanest_way,
    longest_under,
)
from longspan.cli.plans.positions import position_notes, with_positions
from longspan.cli.plans.run_documents import RunDocuments, sampled_steps
from longspan.cli.plans.run_on_gpus import RunOnGpus, leanest, notes_of
from longspan.config.keys import value_at
from longspan.config.sections import RunConfig, section_kinds
from longspan.errors import PlanError, plural
from longspan.plan import MemoryPlan, Plan, group_counts

COLUMNS = ("none", "selective", "full")  # measures of all layers, shown next to those of "auto"
SEARCHED, PRICED = 3, 16  # steps of a run: by which keys are chosen, and whose seconds count


@dataclass(frozen=True)
class Column:
    """A column of the table: measures, what they hold, tokens of the longest document, and whether they fit."""

    name: str
    memory: MemoryPlan | None
    tokens: int
    fits: bool


@dataclass(frozen=True)
class Degree:
    """How much of some steps runs at one degree: groups, and their share of the tokens."""

    degree: int
    groups: int
    share: float


@dataclass(frozen=True)
class Answer:
    """The answer: the way that was found (on other GPUs where `fits` is not true), or why there is none.

    `memory` is that of "auto" on the GPUs in question, of the way that needs least where nothing fits.
    """

    title: str
    run: RunOnGpus
    fits: bool
    memory: MemoryPlan
    columns: tuple[Column, ...]
    longest: int
    fit: Fit | None
    refusal: str = ""
    given: frozenset[str] = frozenset()
    steps: int | None = None
    sampled: int = 0
    notes: tuple[str, ...] = ()
    degrees: tuple[Degree, ...] = field(default=())

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds of a step on the GPUs in question."""
        return self.fit.seconds if self.fit and self.fits else None

    @property
    def hours(self) -> float | None:
        """Hours of all steps of a run."""
        seconds = self.step_seconds
        return None if seconds is None or self.steps is None else seconds * self.steps / 3600

    @property
    def keys(self) -> Mapping[str, Any]:
        """The keys of [section.key] with which it was found; where nothing was, those that the question gave."""
        return keys_of_run(self.fit.run if self.fit else self.run, self.given)

    def to_json(self) -> dict[str, Any]:
        """As `longspan plan --json` prints it: bytes as integers, those of `device` and `host` for one GPU."""
        values: dict[str, Any] = {
            "device": self.memory.device.to_json(),
            "host": self.memory.host.to_json(),
            "measures": list(self.memory.measures),
            "longest": self.longest,
            "fits": self.fits,
            "keys": dict(self.keys) if self.fits else dict(keys_of_run(self.run, self.given)),
            "steps": self.steps,
            "step_seconds": self.step_seconds,
            "hours": self.hours,
        }
        gpus = self.run.gpus
        values |= {"gpus": gpus.count, "gpu": gpus.name, "gpu_bytes": gpus.bytes, "host_bytes": gpus.host_bytes}
        values |= {"assumed": list(gpus.assumed), "gathered_once": self.memory.gathered_once}
        values |= {"degrees": [vars(degree) for degree in self.degrees], "notes": list(self.notes)}
        values["columns"] = {
            column.name: None if column.memory is None else column.memory.to_json() | {"tokens": column.tokens}
            for column in self.columns
        }
        if not self.fits:
            values["reason"], values["would_fit"] = self.refusal, would_fit(self.fit)
        return values


def would_fit(fit: Fit | None) -> dict[str, Any] | None:
    """What fits in place of what was asked, as JSON: GPUs, measures, keys."""
    if fit is None:
        return None
    memory = fit.memory
    return {
        "gpus": fit.run.gpus.count,
        "measures": list(memory.measures),
        "device": memory.device.to_json(),
        "host": memory.host.to_json(),
        "keys": dict(keys_of_run(fit.run, frozenset())),
    }


def keys_of_run(run: RunOnGpus, given: frozenset[str]) -> dict[str, Any]:
    """The keys that were given, and those that were chosen, as `longspan train` takes them; degree and rows always."""
    config, context = run.config, run.config.context
    names = [name for name in (*_given_in(config), *given) if name.partition(".")[0] in ("train", "lora", "parallel")]
    names += [name for name in given if name.partition(".")[0] in ("context", "mtp", "encoder")]
    names += ["model.dtype"] * ("model.dtype" in given) + ["model.rope_scaling"] * bool(config.model.rope_scaling)
    names += ["train.memory", "context.planner", "context.cp_comm_type"]
    dynamic = ["context.min_dynamic_context_parallel_size", "context.max_dynamic_context_parallel_size"]
    names += ["context.context_parallel_size"] if run.choice.has_one_degree else dynamic
    names.append("context.max_tokens_per_slot")
    values = {name: _value(config, name) for name in sorted(set(names))}
    if not run.choice.has_one_degree and not context.max_dynamic_context_parallel_size:
        values["context.max_dynamic_context_parallel_size"] = run.home.slots
    return values


def _value(config: RunConfig, name: str) -> Any:
    section, _, key = name.partition(".")
    value = value_at(getattr(config, section), key)
    return list(value) if isinstance(value, tuple) else value


def _given_in(config: RunConfig) -> list[str]:
    """The keys of [lora], [mtp] and [parallel] that differ from their defaults."""
    names = list[str]()
    for section, kind in section_kinds().items():
        if section in ("lora", "mtp", "parallel"):
            here, usual = getattr(config, section), kind()
            names += [f"{section}.{key}" for key in vars(here) if getattr(here, key) != getattr(usual, key)]
    return names


def answer_longest(run: RunOnGpus, given: frozenset[str], choices: Choices) -> Answer:
    """The longest document on the GPUs, under each measure and under "auto"."""
    degree = _degree(run, choices)
    tokens, way = longest_under(run, run.fixed, degree=degree)
    if not tokens:
        return _refused("the shortest document", run, [Documents((UNIT * run.home.slots,))], given, choices)
    fit = _with_positions(fit_of(way, [Documents((tokens,))]), tokens)
    columns = [*(_longest_column(run, name, degree) for name in COLUMNS), Column("auto", fit.memory, tokens, True)]
    title = f"the longest document has {tokens:,} tokens"
    return replace(_answer(title, run, fit, given, columns), longest=tokens)


def _longest_column(run: RunOnGpus, name: str, degree: int) -> Column:
    """The longest document if all layers have one measure."""
    tokens, way = longest_under(run, by_hand(run, name), degree=degree)
    plan = way.plan((tokens,)) if tokens else None
    return Column(name, plan and next(leanest(way, [plan], by_hand(way, name))), tokens, bool(tokens))


def _degree(run: RunOnGpus, choices: Choices) -> int:
    """The degree of the longest document; 0: all slots."""
    return int(run.config.context.context_parallel_size) if run.choice.has_one_degree and not choices.degree else 0


def _with_positions(fit: Fit, longest: int) -> Fit:
    return replace(fit, run=with_positions(fit.run, longest))


def answer_step(run: RunOnGpus, lengths: Sequence[int], source: str, given: frozenset[str], choices: Choices) -> Answer:
    """Whether one step of these documents fits, and with which keys."""
    steps = [Documents(tuple(lengths))]
    title = f"a step of {plural(len(lengths), 'document')} ({plural(sum(lengths), 'token')}) from {source}"
    try:
        fit = find_fit(run, steps, choices)
    except PlanError as error:
        return _refused(title, run, steps, given, choices, error)
    return _with_longest(_answer(title, run, _with_positions(fit, max(lengths)), given, _columns(fit)), choices)


def answer_run(run: RunOnGpus, documents: RunDocuments, given: frozenset[str], choices: Choices) -> Answer:
    """Whether a run of these documents fits, with which keys, and how long it takes."""
    sampled = [_documents_of(documents, step) for step in sampled_steps(documents.steps, PRICED)]
    longest = Documents((documents.longest,))
    searched = [*(sampled[i] for i in sampled_steps(len(sampled), SEARCHED)), longest]
    title = f"a run of {plural(documents.steps, 'step')}: {documents.line}"
    given |= {"train.tokens_per_step", "train.epochs" if run.config.train.epochs else "train.steps"}
    try:
        way = find_fit(run, searched, choices).run
        plans = [way.plan(step.lengths, step.targets) for step in sampled]
        memory = way.memory_of([*plans, way.plan(longest.lengths)])
    except PlanError as error:
        return replace(_refused(title, run, searched, given, choices, error), steps=documents.steps)
    fit = _with_positions(Fit(way, tuple(plans), memory, way.seconds(plans, memory)), documents.longest)
    answer = _with_longest(_answer(title, run, fit, given, _columns(fit)), choices)
    return replace(answer, steps=documents.steps, sampled=len(sampled))


def _documents_of(documents: RunDocuments, step: int) -> Documents:
    order = documents.order
    return Documents(tuple(order.lengths_of_step(step)), order.targets_of_step(step))


def degrees_of(plans: Sequence[Plan]) -> tuple[Degree, ...]:
    """The degrees of the groups of some plans."""
    groups, tokens = Counter[int](), Counter[int]()
    for row in (row for plan in plans for row in group_counts(plan)):
        groups[row["degree"]] += row["count"]
        tokens[row["degree"]] += row["tokens"]
    return tuple(Degree(d, groups[d], tokens[d] / (tokens.total() or 1)) for d in sorted(groups))


def _answer(title: str, run: RunOnGpus, fit: Fit, given: frozenset[str], columns: Sequence[Column]) -> Answer:
    """The answer of a way that fits."""
    return Answer(
        title=title,
        run=run,
        fits=True,
        memory=fit.memory,
        columns=tuple(columns),
        longest=0,
        fit=fit,
        given=given,
        notes=(*notes_of(fit.run), *position_notes(fit.run, _longest_of(fit))),
        degrees=degrees_of(fit.plans),
    )


def _with_longest(answer: Answer, choices: Choices) -> Answer:
    """The answer with the longest document that fits the GPUs in question."""
    run = answer.run
    return replace(answer, longest=longest_under(run, run.fixed, degree=_degree(run, choices))[0])


def _columns(fit: Fit) -> list[Column]:
    """The table's columns: the same plans under each measure, and what was chosen."""
    columns = list[Column]()
    for name in COLUMNS:
        memory = next(leanest(fit.run, fit.plans, by_hand(fit.run, name)))
        columns.append(Column(name, memory, _longest_of(fit), memory.fits(fit.run.budget)))
    return [*columns, Column("auto", fit.memory, _longest_of(fit), True)]


def _longest_of(fit: Fit) -> int:
    return max(max(plan.lengths) for plan in fit.plans)


def _refused(
    title: str,
    run: RunOnGpus,
    steps: Sequence[Documents],
    given: frozenset[str],
    choices: Choices,
    error: PlanError | None = None,
) -> Answer:
    """The answer where nothing fits: what the way that needs least holds, and the fewest GPUs that would do."""
    way = leanest_way(run, steps, choices)
    try:
        plans = [way.plan(step.lengths, step.targets) for step in steps]
    except PlanError:
        raise error or PlanError(title) from None  # documents fit no group, whatever memory there is
    memory = next(leanest(way, plans, run.fixed))
    longest = max(n for step in steps for n in step.lengths)
    other = fewest_gpus(run, steps, choices)
    answer = Answer(
        title=title,
        run=way,
        fits=False,
        memory=memory,
        columns=(Column("least", memory, longest, False),),
        longest=0,
        fit=other and _with_positions(other, longest),
        refusal=str(error or ""),
        given=given,
        notes=tuple(notes_of(run)),
    )
    return _with_longest(answer, choices)
