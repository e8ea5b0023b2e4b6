"""What a question about GPUs is answered: the longest document, a step of documents, or a run and its hours.

Prices and bytes are those of `RunOnGpus`; degree, rows and measures that are not given are chosen (`fit.py`). No torch.
"""

from collections.abc import Sequence
from dataclasses import replace

from longspan.cli.gpu_plans.answer import BY_HAND, Answer, Column, count_degrees
from longspan.cli.gpu_plans.fit import (
    UNIT,
    Choices,
    Documents,
    Fit,
    find_fewest_gpus,
    find_fit,
    find_leanest_run,
    find_longest,
    fit_run,
    fix_measure,
)
from longspan.cli.gpu_plans.positions import position_notes, scale_positions
from longspan.cli.gpu_plans.run_documents import RunDocuments, sample_steps
from longspan.cli.gpu_plans.run_on_gpus import RunOnGpus
from longspan.config.defaults import encoder_default
from longspan.config.sections import TrainConfig
from longspan.errors import PlanError, plural
from longspan.plan import EncoderLoad, EncoderShape, Plan

COLUMNS = ("none", "selective", "full")  # measures of all layers, shown next to those of "auto"
PRICED = {True: 64, False: 8}  # steps of a run whose seconds count, of plans of one degree and of dynamic ones


def answer_longest(run: RunOnGpus, given_keys: frozenset[str], choices: Choices) -> Answer:
    """Answer how long a document may be on the GPUs, under each measure and under "auto"."""
    degree = _longest_degree(run, choices)
    tokens, longest_run = find_longest(run, run.fixed, degree=degree)
    if not tokens:
        least_tokens = UNIT * run.home.slots
        return _make_refusal(
            f"a document of {least_tokens:,} tokens", run, [Documents((least_tokens,))], given_keys, choices
        )
    fit = _scale_fit_positions(fit_run(longest_run, [Documents((tokens,))]), tokens)
    columns = [
        *(_make_longest_column(run, measure, degree) for measure in COLUMNS),
        Column("auto", fit.memory, tokens, True),
    ]
    title = f"the longest document has {tokens:,} tokens"
    return replace(_make_answer(title, run, fit, given_keys, columns), longest=tokens)


def _make_longest_column(run: RunOnGpus, measure: str, degree: int) -> Column:
    """Make the column of the longest document if all layers have one measure; its memory is None if none fits."""
    tokens, longest_run = find_longest(run, fix_measure(run, measure), degree=degree)
    if not tokens:
        return Column(measure, None, tokens, fits=False)
    plan = longest_run.plan((tokens,))
    memory = next(longest_run.leanest_plans([plan], fix_measure(longest_run, measure)))
    return Column(measure, memory, tokens, fits=True)


def _longest_degree(run: RunOnGpus, choices: Choices) -> int:
    """Return the degree at which the longest document is sought: the one that is given, or 0 for all slots."""
    return int(run.config.context.context_parallel_size) if run.choice.has_one_degree and not choices.degree else 0


def _scale_fit_positions(fit: Fit, longest: int) -> Fit:
    """Set model.rope_scaling in the run of a fit if its longest document, in tokens, needs that."""
    return replace(fit, run=scale_positions(fit.run, longest))


def answer_step(
    run: RunOnGpus, lengths: Sequence[int], source: str, given_keys: frozenset[str], choices: Choices
) -> Answer:
    """Answer whether one step of these documents fits, and with which keys; `source` names them in the title."""
    steps = [Documents(tuple(lengths))]
    title = f"a step of {plural(len(lengths), 'document')} ({plural(sum(lengths), 'token')}) from {source}"
    try:
        fit = find_fit(run, steps, choices)
    except PlanError as error:
        return _make_refusal(title, run, steps, given_keys, choices, error)
    return _add_longest(
        _make_answer(title, run, _scale_fit_positions(fit, max(lengths)), given_keys, _make_columns(fit)), choices
    )


def answer_run(run: RunOnGpus, documents: RunDocuments, given_keys: frozenset[str], choices: Choices) -> Answer:
    """Answer whether a run of these documents fits, with which keys, and how long it takes.

    The way is searched on two steps: of a sample the one with most attention, and a step of only the longest document.
    Then the sampled steps are planned that way for the seconds. The keys that set the number of steps are always shown.
    """
    sampled_steps = _sample_run_documents(documents, PRICED[False])  # the smaller sample is enough for a search
    longest_document = Documents((documents.longest,))
    searched_steps = [max(sampled_steps, key=lambda step: sum(n * n for n in step.lengths)), longest_document]
    title = f"a run of {plural(documents.steps, 'step')}: {documents.line}"
    shown_keys = given_keys | {"train.tokens_per_step", "train.epochs" if run.config.train.epochs else "train.steps"}
    try:
        fitting_run = find_fit(run, searched_steps, choices).run
        sampled_steps = _sample_run_documents(documents, PRICED[fitting_run.choice.has_one_degree])
        plans = [fitting_run.plan(step.lengths, step.targets) for step in sampled_steps]
        memory = fitting_run.plan_memory([*plans, fitting_run.plan(longest_document.lengths)])
    except PlanError as error:
        return replace(_make_refusal(title, run, searched_steps, shown_keys, choices, error), steps=documents.steps)
    encoding, note = _encoding_seconds(fitting_run, documents, plans)
    seconds = fitting_run.seconds(plans, memory) + encoding
    fit = _scale_fit_positions(Fit(fitting_run, tuple(plans), memory, seconds), documents.longest)
    answer = _add_longest(_make_answer(title, run, fit, shown_keys, _make_columns(fit)), choices)
    return replace(answer, steps=documents.steps, sampled=len(sampled_steps), notes=(*note, *answer.notes))


def _encoding_seconds(run: RunOnGpus, documents: RunDocuments, plans: Sequence[Plan]) -> tuple[float, Sequence[str]]:
    """Return the mean seconds that encoding a step's images takes, and a note of at most one line about it.

    `plans` are those of the sampled steps. It is 0.0 without images, where the encoder cannot be priced, and for packs,
    whose images are not listed by step.
    """
    if not documents.image_rows:
        return 0.0, ()
    config, rows = run.config, f"images: {documents.image_rows:,.0f} rows in a step"
    try:
        cost = EncoderShape.of(run.model).cost(trained=config.encoder.train or encoder_default(config))
    except PlanError as error:
        return 0.0, (f"{rows}, whose encoding is not in the seconds: {error}",)
    steps = sample_steps(documents.steps, len(plans))
    images = [documents.list_images(step) for step in steps]
    if not any(images):
        return 0.0, (f"{rows}, whose encoding is not in the seconds of packs (data.pack_to)",)
    most_rows = config.encoder.max_rows or None
    loads = [
        EncoderLoad.of(plan, step_images, cost, max_rows=most_rows).seconds if any(step_images) else 0.0
        for plan, step_images in zip(plans, images, strict=True)
    ]
    seconds = sum(loads) / len(loads)
    return seconds, (f"{rows}, encoded in {seconds:.3g} s of these on H200s",)


def _sample_run_documents(documents: RunDocuments, most: int) -> list[Documents]:
    """Return the documents of at most `most` steps of a run, evenly apart."""
    return [_step_documents(documents, step) for step in sample_steps(documents.steps, most)]


def _step_documents(documents: RunDocuments, step: int) -> Documents:
    """Return the lengths of a step's documents, and how many of their tokens are predicted."""
    order = documents.order
    return Documents(tuple(order.lengths_of_step(step)), order.targets_of_step(step))


def _make_answer(title: str, run: RunOnGpus, fit: Fit, given_keys: frozenset[str], columns: Sequence[Column]) -> Answer:
    """Make the answer of a way that fits."""
    return Answer(
        title=title,
        run=run,
        fits=True,
        memory=fit.memory,
        columns=tuple(columns),
        fit=fit,
        given_keys=given_keys,
        notes=tuple(position_notes(fit.run, _longest_tokens(fit))),
        degrees=count_degrees(fit.plans),
    )


def _add_longest(answer: Answer, choices: Choices) -> Answer:
    """Add the longest document that fits the GPUs in question to the answer."""
    run = answer.run
    return replace(answer, longest=find_longest(run, run.fixed, degree=_longest_degree(run, choices))[0])


def _make_columns(fit: Fit) -> list[Column]:
    """Make the table's columns: the same plans under each measure, and what was chosen."""
    columns = list[Column]()
    for measure in COLUMNS:
        memory = next(fit.run.leanest_plans(fit.plans, fix_measure(fit.run, measure)))
        columns.append(Column(measure, memory, _longest_tokens(fit), memory.fits(fit.run.budget)))
    return [*columns, Column("auto", fit.memory, _longest_tokens(fit), True)]


def _longest_tokens(fit: Fit) -> int:
    """Return the tokens of the longest document of all plans."""
    return max(max(plan.lengths) for plan in fit.plans)


def _make_refusal(
    title: str,
    run: RunOnGpus,
    steps: Sequence[Documents],
    given_keys: frozenset[str],
    choices: Choices,
    error: PlanError | None = None,
) -> Answer:
    """Make the answer where nothing fits: what the run that needs least memory holds, and what would do.

    What would do is the same GPUs without measures given by hand or, if these are not to blame, the fewest that do.
    """
    leanest_run = find_leanest_run(run, steps, choices)
    try:
        plans = [leanest_run.plan(step.lengths, step.targets) for step in steps]
    except PlanError:  # the limit of rows that is given is below what the longest document needs
        without_limit = leanest_run.set_context(max_tokens_per_slot=0)
        plans = [without_limit.plan(step.lengths, step.targets) for step in steps]
    memory = next(leanest_run.leanest_plans(plans, run.fixed))
    longest_length = max(n for step in steps for n in step.lengths)
    other_fit = _fit_free_measures(run, steps, choices) or find_fewest_gpus(run, steps, choices)
    answer = Answer(
        title=title,
        run=leanest_run,
        fits=False,
        memory=memory,
        columns=(Column("least", memory, longest_length, False),),
        fit=other_fit and _scale_fit_positions(other_fit, longest_length),
        refusal=str(error or ""),
        given_keys=given_keys,
    )
    return _add_longest(answer, choices)


def _fit_free_measures(run: RunOnGpus, steps: Sequence[Documents], choices: Choices) -> Fit | None:
    """Fit the same GPUs with no measure given by hand; None where none is, or it does not fit either.

    reshard_after_forward also gets its default back, for keeping gathered parameters costs memory.
    """
    defaults, parallel = TrainConfig(), replace(run.config.parallel, reshard_after_forward=True)
    train = replace(run.config.train, **{key: getattr(defaults, key) for key in BY_HAND})
    config = replace(run.config, train=train, parallel=parallel)
    if config == run.config:
        return None
    try:
        return find_fit(replace(run, config=config), steps, choices)
    except PlanError:
        return None
