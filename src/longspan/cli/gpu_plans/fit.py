"""Which degree, rows of a slot and measures run some steps fastest on GPUs, and how few GPUs would do.

Each way is a configuration: its plans are made as training makes them, their memory is chosen by a plan of memory, and
the fastest way that fits is taken. No torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from longspan.cli.gpu_plans.run_on_gpus import RunOnGpus
from longspan.config.keys import AUTO
from longspan.config.sections import ParallelConfig
from longspan.errors import LayoutError, PlanError
from longspan.plan import FixedMemory, MemoryPlan, MicroBatch, Plan
from longspan.plan.memory.choose import any_choice_fits, largest_fitting
from longspan.train.plans import degrees_to_compare, home_of

UNIT = 1024  # rows of a slot: longest documents are whole multiples
MOST_ROWS = 1 << 26  # of a slot, which no GPU holds
MOST_GPUS = 1024
HOST_GPUS = 8  # more GPUs than these are counted in whole hosts
WAYS = {True: 5, False: 3}  # limits of rows that are compared, of plans of one degree and of dynamic ones


@dataclass(frozen=True)
class Documents:
    """The documents of one step: their lengths, and how many tokens they predict (None: all but the first of each)."""

    lengths: tuple[int, ...]
    targets: int | None = None


@dataclass(frozen=True)
class Fit:
    """One way to run some steps: its configuration, their plans, what they hold, and their mean seconds."""

    run: RunOnGpus
    plans: tuple[Plan, ...]
    memory: MemoryPlan
    seconds: float


@dataclass(frozen=True)
class Choices:
    """What of [context] is not given and may be chosen: planner, degree, limit of rows."""

    planner: bool = True
    degree: bool = True
    rows: bool = True


def find_fit(run: RunOnGpus, steps: Sequence[Documents], choices: Choices) -> Fit:
    """Find the fastest way that fits. Raises PlanError where none does, with the bytes of the leanest that was tried.

    >>> find_fit(run, [Documents((262144,))], Choices()).memory.measures[0]  # doctest: +SKIP
    'selective'
    """
    fastest_fit: Fit | None = None
    refusals = list[tuple[tuple[int, int], PlanError]]()
    for candidate in _candidate_runs(run, steps, choices):
        try:
            fit = fit_run(candidate, steps)
        except PlanError as error:
            leanness = _row_limit(candidate), -candidate.choice.widest_degree(candidate.home)
            refusals.append((leanness, error))
            continue
        if fastest_fit is None or fit.seconds < fastest_fit.seconds:
            fastest_fit = fit
    if fastest_fit is None:  # the leanest run has the fewest rows a slot and, of those, the widest degree
        raise min(refusals, key=lambda refusal: refusal[0])[1]
    return fastest_fit


def fit_run(run: RunOnGpus, steps: Sequence[Documents]) -> Fit:
    """Plan a run by its own keys.

    Raises PlanError where the documents do not fit them, or nothing fits the GPUs.
    """
    plans = tuple(run.plan(step.lengths, step.targets) for step in steps)
    memory = run.plan_memory(plans)
    return Fit(run, plans, memory, run.seconds(plans, memory))


def _row_limit(run: RunOnGpus) -> int:
    """Return the most rows of a slot in a micro-batch; MOST_ROWS where the key is 0 (no limit) or "auto"."""
    rows = run.config.context.max_tokens_per_slot
    return rows if isinstance(rows, int) and rows else MOST_ROWS


def _candidate_runs(run: RunOnGpus, steps: Sequence[Documents], choices: Choices) -> Iterator[RunOnGpus]:
    """Yield the run with each planner, degree and limit of rows to compare; a limit that is given stays."""
    lengths = [n for step in steps for n in step.lengths]
    for degree_run in _list_degree_runs(run, choices, same=len(set(lengths)) == 1):
        if not choices.rows and degree_run.config.context.max_tokens_per_slot != AUTO:
            yield degree_run
            continue
        for rows in row_limits(degree_run, steps):
            yield degree_run.set_context(max_tokens_per_slot=rows)


def _list_degree_runs(run: RunOnGpus, choices: Choices, *, same: bool) -> Iterator[RunOnGpus]:
    """Yield the run once for each planner and degree to compare.

    Documents of different lengths are planned dynamically; those of the `same` length, which gain nothing by it, at
    each degree in turn. Where the keys say which, the run is yielded as it is.
    """
    if choices.planner and choices.degree and not same and run.home.slots > 1:
        yield run.set_context(planner="dynamic")
    elif choices.degree and run.choice.has_one_degree:
        for degree in degrees_to_compare(run.home, run.choice):
            yield run.set_context(context_parallel_size=degree)
    else:
        yield run


def row_limits(run: RunOnGpus, steps: Sequence[Documents]) -> list[int]:
    """List limits of rows worth comparing: from what the longest document needs to all documents in one micro-batch.

    They grow by one ratio, of at least 2, and are multiples of what plans need: a slot has two parts of a document,
    each of a whole `row_multiple`. The longest document is divided by the widest degree that divides the slots and that
    the communication type allows.
    """
    choice, unit = run.choice, 2 * run.choice.options.row_multiple
    widest = choice.widest_even_degree(run.home)
    least_rows = _round_to_unit(-(-max(n for step in steps for n in step.lengths) // widest), unit)
    most_rows = max(_estimate_most_rows(run, step) for step in steps)
    count = WAYS[choice.has_one_degree]
    ratio = max(2.0, (max(most_rows, least_rows) / least_rows) ** (1 / (count - 1)))
    limits = [_round_to_unit(min(int(least_rows * ratio**i), most_rows), unit) for i in range(count)]
    return sorted({least_rows, *(limit for limit in limits if limit > least_rows)})


def _estimate_most_rows(run: RunOnGpus, step: Documents) -> int:
    """Estimate the rows of the fullest slot if a step is one micro-batch.

    They are a slot's rows of the longest document, or the mean over all slots if that is more, plus UNIT for uneven
    groups. Documents of dynamic plans and of degree "auto" (0) are counted at degree 1, at which a slot has most rows.
    """
    degree = max(run.choice.degree, 1) if run.choice.has_one_degree else 1
    groups = run.home.slots // degree
    mean_rows = -(-sum(step.lengths) // degree // groups)  # rounded up
    return max(max(step.lengths) // degree, mean_rows) + UNIT


def _round_to_unit(rows: int, unit: int) -> int:
    """Round rows up to a multiple of `unit`."""
    return -(-rows // unit) * unit


def find_longest(run: RunOnGpus, fixed: FixedMemory, *, degree: int = 0) -> tuple[int, RunOnGpus]:
    """Find the most tokens of one document over `degree` slots (0: all) that fit, and return them with their run.

    `fixed` are the keys of memory that are not chosen. A slot has whole multiples of UNIT rows (rounded up to what
    plans need), and at most MOST_ROWS. Returns 0 tokens where not even one UNIT fits. Only memory is computed for each
    length that is tried, on the plan of a short document changed to that length, for planning each would be slow; the
    longest that fits is planned anew, and shortened by 1/256 at a time until its own plan fits too.
    """
    degree = degree or run.home.slots
    run = run.set_context(planner="fixed", context_parallel_size=degree)
    unit = _round_to_unit(UNIT, 2 * run.choice.options.row_multiple)

    run = run.set_context(max_tokens_per_slot=0)
    short = _restore_auto_type(run.plan((unit * degree,)), run)

    def fits(rows: int, plan: Plan | None = None) -> bool:
        """Return whether a document of `rows` rows a slot fits, by its own plan or by the changed short one."""
        plan = plan or _change_length(short, rows * degree)
        return any_choice_fits(run.memory_needs([plan]), run.budget, fixed)

    low = largest_fitting(lambda count: fits(count * unit), MOST_ROWS // unit)
    while low and not fits(low * unit, run.plan((low * unit * degree,))):  # its planner shares attention in another way
        low -= 1 + low // 256
    low = max(low, 0)  # of the limit of rows below, 0 would mean none
    return low * unit * degree, run.set_context(max_tokens_per_slot=max(1, low) * unit)


def _restore_auto_type(plan: Plan, run: RunOnGpus) -> Plan:
    """Put "auto" back into the plan of one document where the keys have it.

    The plan names the type that was chosen for its length, and another length may get another.
    """
    if run.choice.options.cp_comm_type != AUTO:
        return plan
    (group,) = plan.micro_batches[0].groups
    group = replace(group, cp_comm_type=AUTO, hierarchical_context_parallel_sizes=None)
    return replace(plan, micro_batches=(MicroBatch((group,)), *plan.micro_batches[1:]))


def _change_length(plan: Plan, tokens: int) -> Plan:
    """Change the plan of one document as if it had another length."""
    (group,) = plan.micro_batches[0].groups
    group = replace(group, lengths=(tokens,), pad_to=None)
    return replace(plan, lengths=(tokens,), micro_batches=(MicroBatch((group,)), *plan.micro_batches[1:]))


def find_leanest_run(run: RunOnGpus, steps: Sequence[Documents], choices: Choices) -> RunOnGpus:
    """Find the run whose slots hold fewest rows: the widest possible degree, and no more rows than it needs.

    Only keys that are open are changed; an open planner becomes "fixed", which has one degree for all documents.
    """
    leanest_run = run
    if choices.planner or run.choice.has_one_degree:
        leanest_run = run.set_context(planner=run.config.context.planner if run.choice.has_one_degree else "fixed")
        if choices.degree:
            leanest_run = leanest_run.set_context(
                context_parallel_size=max(degrees_to_compare(run.home, leanest_run.choice))
            )
    if not choices.rows and run.config.context.max_tokens_per_slot != AUTO:
        return leanest_run
    return leanest_run.set_context(max_tokens_per_slot=row_limits(leanest_run, steps)[0])


def find_fewest_gpus(run: RunOnGpus, steps: Sequence[Documents], choices: Choices) -> Fit | None:
    """Find the fewest GPUs that hold these steps, more than the run has; None where no number up to 1,024 does.

    Above one host, whole hosts of HOST_GPUS are tried. Only numbers that the run's degrees divide are tried: another
    would look like too few. On each of them the fastest degree and rows that fit are taken.
    """
    counts = [*range(run.gpus.count + 1, HOST_GPUS + 1), *range(2 * HOST_GPUS, MOST_GPUS + 1, HOST_GPUS)]
    counts = [count for count in counts if count > run.gpus.count and _has_home(run.config.parallel, count)]
    low, high = 0, len(counts)  # within a host one by one, then by halves: more hosts hold more
    for index, count in enumerate(counts):
        if count > HOST_GPUS:
            low = index
            break
        if fit := _try_count(run, count, steps, choices):
            return fit
    else:
        return None
    fewest_fit: Fit | None = None
    while low < high:
        middle = (low + high) // 2
        if fit := _try_count(run, counts[middle], steps, choices):
            fewest_fit, high = fit, middle
        else:
            low = middle + 1
    return fewest_fit


def _has_home(parallel: ParallelConfig, count: int) -> bool:
    """Return whether the degrees of a run divide this number of GPUs."""
    try:
        return bool(home_of(parallel, count).slots)
    except LayoutError:
        return False


def _try_count(run: RunOnGpus, count: int, steps: Sequence[Documents], choices: Choices) -> Fit | None:
    """Return the fastest way that fits `count` GPUs; None where none does."""
    try:
        return find_fit(run.change_count(count), steps, choices)
    except (PlanError, LayoutError):
        return None


def fix_measure(run: RunOnGpus, measure: str) -> FixedMemory:
    """Return the run's keys of memory with one measure for all layers, whose saved tensors stay on the device.

    Keys that are left to the choice (None) become off, so that a column of the table shows only this measure. "none"
    leaves `offload` open, for there is no "none" on the host.
    """
    fixed = run.fixed
    changes: dict[str, Any] = {"measure": measure, "layers": None, "offload": False if measure != "none" else None}
    changes["gathered_once"] = fixed.gathered_once or False
    changes["offload_states"] = fixed.offload_states or False
    changes["mlp_tile_rows"], changes["segment_layers"] = fixed.mlp_tile_rows or 0, fixed.segment_layers or 0
    return replace(fixed, **changes)
