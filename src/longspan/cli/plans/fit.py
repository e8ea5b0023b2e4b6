"""Which planner, degree, rows of a slot, experts' degree and measures run some steps fastest on GPUs.

Each way is a configuration: its plans are made as training makes them, their memory is chosen by a plan of memory, and
the fastest way that fits is taken. No torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from longspan.cli.plans.gpu_run import RunOnGpus
from longspan.config.keys import AUTO
from longspan.config.sections import TrainConfig
from longspan.errors import ConfigError, LayoutError, LongspanError, PlanError
from longspan.plan import MemoryPlan, MicroBatch, Plan
from longspan.plan.memory.choose import any_choice_fits, largest_fitting
from longspan.train.plans import degrees_to_compare

UNIT = 1024  # rows of a slot: longest documents are whole multiples
MOST_ROWS = 1 << 26  # of a slot, which no GPU holds
HOST_GPUS = 8  # each number up to which a refusal tries, then twice as many up to DOUBLINGS times; ep at most
DOUBLINGS = 6
WAYS = {True: 5, False: 3}  # limits of rows that are compared, of plans of one degree and of dynamic ones
# Keys by which measures are given by hand.
BY_HAND = (
    "memory",
    "activation_checkpointing",
    "offload_activations",
    "offload_states",
    "mlp_tile_rows",
)


@dataclass(frozen=True)
class Documents:
    """The documents of one step: their lengths, and how many tokens they predict (None: all but the first of each).

    A step that is not `timed` must fit, and its seconds do not count.
    """

    lengths: tuple[int, ...]
    targets: int | None = None
    timed: bool = True


@dataclass(frozen=True)
class Fit:
    """One way to run some steps: its configuration, the plans of timed ones, what all hold, and the mean seconds.

    Of a way that does not fit, `memory` is the leanest, and `seconds` are None.
    """

    run: RunOnGpus
    plans: tuple[Plan, ...]
    memory: MemoryPlan
    seconds: float | None

    @property
    def layout(self) -> tuple[str, int, int]:
        """The planner, its degree (0: of dynamic plans), and how many slots share experts."""
        choice = self.run.choice
        return choice.planner, choice.degree if choice.has_one_degree else 0, self.run.home.ep


@dataclass(frozen=True)
class Choices:
    """What is not given and may be chosen: planner, degree, limit of rows, and the degree of experts.

    To `compare` is to try every planner, also one that is given.
    """

    planner: bool = True
    degree: bool = True
    rows: bool = True
    ep: bool = False
    compare: bool = False


def find_fits(run: RunOnGpus, steps: Sequence[Documents], choices: Choices) -> tuple[list[Fit], list[str]]:
    """Return the best way of each layout (planner, degree, experts' degree), and a line for each that is not possible.

    >>> find_fits(run, [Documents((262144,))], Choices())[0][0].memory.measures[0]  # doctest: +SKIP
    'selective'

    The fastest way is first; those that do not fit are last. Raises PlanError where nothing can be planned at all.
    """
    best, refused = dict[tuple[str, int, int], Fit](), dict[str, str]()
    for candidate in _candidate_runs(run, steps, choices):
        try:
            fit = fit_run(candidate, steps)
        except (PlanError, LayoutError) as error:
            refused[candidate.choice.text] = str(error)
            continue
        known = best.get(fit.layout)
        if known is None or rank_fit(fit) < rank_fit(known):
            best[fit.layout] = fit
    if not best:
        raise PlanError([*refused.values(), "there is no layout to plan with"][0])
    planned = {fit.run.choice.text for fit in best.values()}
    lines = [f"{text}: not possible: {reason}" for text, reason in refused.items() if text not in planned]
    return sorted(best.values(), key=rank_fit), lines


def rank_fit(fit: Fit) -> tuple[bool, float]:
    """Rank ways: the fastest first; behind all that fit the others, by the bytes of the leanest."""
    if fit.seconds is None:
        return True, float(fit.memory.device.total)
    return False, fit.seconds


def fit_run(run: RunOnGpus, steps: Sequence[Documents]) -> Fit:
    """Plan a run by its own keys. Raises PlanError where the documents exceed its limit of rows."""
    plans = tuple(run.plan(step.lengths, step.targets) for step in steps)
    timed = tuple(plan for plan, step in zip(plans, steps, strict=True) if step.timed)
    try:
        memory = run.plan_memory(plans)
    except PlanError:
        return Fit(run, timed, run.leanest_memory(plans), None)
    return Fit(run, timed, memory, run.seconds(timed, memory))


def _candidate_runs(run: RunOnGpus, steps: Sequence[Documents], choices: Choices) -> Iterator[RunOnGpus]:
    # Dynamic plans of documents of one length gain nothing, and are left out unless all are to be compared.
    several = len({n for step in steps for n in step.lengths}) > 1
    for home_run in _expert_runs(run, choices):
        planners = [home_run.choice.planner]
        if choices.compare:
            planners = [*dict.fromkeys(("dynamic", "fixed", "padded", *planners))]
        elif choices.planner and choices.degree:
            planners = ["dynamic"] * (several and home_run.home.slots > 1) + ["fixed"]
        layouts = list[RunOnGpus]()
        for planned in (home_run.set_context(planner=planner) for planner in planners):
            if choices.degree and planned.choice.has_one_degree:
                degrees = degrees_to_compare(home_run.home, planned.choice)
                layouts += [planned.set_context(context_parallel_size=degree) for degree in degrees]
            else:
                layouts.append(planned)
        for layout in layouts:
            if not choices.rows and layout.config.context.max_tokens_per_slot != AUTO:
                yield layout
                continue
            for rows in row_limits(layout, steps):
                yield layout.set_context(max_tokens_per_slot=rows)


def _expert_runs(run: RunOnGpus, choices: Choices) -> Iterator[RunOnGpus]:
    yield run
    if not choices.ep or not run.experts:
        return
    ep = max(d for d in range(1, HOST_GPUS + 1) if run.home.slots % d == 0 and run.experts % d == 0)
    try:
        changed = run.change_home(ep=ep)
        RunOnGpus.of(changed.config, changed.gpus)  # checks the keys
    except LongspanError:
        return
    if ep > 1:
        yield changed


def row_limits(run: RunOnGpus, steps: Sequence[Documents]) -> list[int]:
    """List limits of rows worth comparing: from what the longest document needs to all documents in one micro-batch.

    They grow by one ratio, of at least 2, and are multiples of what plans need: a slot has two parts of a document,
    each of a whole `row_multiple`. The most rows are those of the fullest slot if a step is one micro-batch: its rows
    of the longest document or the mean, plus UNIT for uneven groups; of dynamic plans at degree 1, which has most.
    """
    choice, unit = run.choice, 2 * run.choice.options.row_multiple
    longest = max(n for step in steps for n in step.lengths)
    least = _round_up(-(-longest // choice.widest_even_degree(run.home)), unit)
    degree = max(choice.degree, 1) if choice.has_one_degree else 1
    mean = max(-(-sum(step.lengths) // run.home.slots) for step in steps)
    most = max(longest // degree, mean) + UNIT
    count = WAYS[choice.has_one_degree]
    ratio = max(2.0, (max(most, least) / least) ** (1 / (count - 1)))
    limits = [_round_up(min(int(least * ratio**i), most), unit) for i in range(count)]
    return sorted({least, *(limit for limit in limits if limit > least)})


def _round_up(rows: int, unit: int) -> int:
    return -(-rows // unit) * unit


def find_longest(run: RunOnGpus, choices: Choices) -> tuple[int, RunOnGpus]:
    """Find the most tokens of one document that fit, and return them with their run.

    The degree is the one that is given, or all slots. A slot has whole multiples of UNIT rows (rounded up to what plans
    need), and at most MOST_ROWS. Returns 0 tokens where not even one UNIT fits. Only memory is computed for each length
    that is tried, on the plan of a short document changed to that length, for planning each would be slow; the longest
    that fits is planned anew, and shortened by 1/256 at a time until its own plan fits too.
    """
    degree = run.choice.degree if run.choice.has_one_degree and not choices.degree else 0
    degree = degree or run.home.slots
    unit = _round_up(UNIT, 2 * run.choice.options.row_multiple)
    run = run.set_context(planner="fixed", context_parallel_size=degree, max_tokens_per_slot=0)
    short = run.plan((unit * degree,))

    def plan_of(units: int) -> Plan:
        (group,) = short.micro_batches[0].groups
        if run.choice.options.cp_comm_type == AUTO:  # another length may get another type
            group = replace(group, cp_comm_type=AUTO, hierarchical_context_parallel_sizes=None)
        tokens = units * unit * degree
        group = replace(group, lengths=(tokens,), pad_to=None)
        return replace(short, lengths=(tokens,), micro_batches=(MicroBatch((group,)), *short.micro_batches[1:]))

    def fits(plan: Plan) -> bool:
        return any_choice_fits(run.memory_needs([plan]), run.budget, run.fixed)

    most = largest_fitting(lambda units: fits(plan_of(units)), MOST_ROWS // unit)
    while most and not fits(run.plan((most * unit * degree,))):  # its planner shares attention in another way
        most = max(0, most - 1 - most // 256)
    return most * unit * degree, run.set_context(max_tokens_per_slot=max(1, most) * unit)


def find_way_out(run: RunOnGpus, steps: Sequence[Documents], choices: Choices) -> Fit | None:
    """Find what would fit where nothing does: the same GPUs without measures by hand, or more GPUs.

    reshard_after_forward also gets its default back, for keeping gathered parameters costs memory. Only numbers of GPUs
    that the run's degrees divide are tried.
    """
    defaults, parallel = TrainConfig(), replace(run.config.parallel, reshard_after_forward=True)
    train = replace(run.config.train, **{key: getattr(defaults, key) for key in BY_HAND})
    free = replace(run, config=replace(run.config, train=train, parallel=parallel))
    others = [free] if free.config != run.config else []
    counts = {*range(run.gpus.count + 1, HOST_GPUS + 1), *(run.gpus.count << i for i in range(1, DOUBLINGS + 1))}
    for count in sorted(counts):
        try:
            others.append(run.change_home(gpus=count))
        except (LayoutError, ConfigError):
            continue
    for other in others:
        try:
            fit = find_fits(other, steps, replace(choices, compare=False))[0][0]
        except (PlanError, LayoutError):
            continue
        if fit.seconds is not None:
            return fit
    return None
