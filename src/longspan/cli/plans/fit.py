"""Which planner, degree, rows of a slot, experts' degree and measures run some steps fastest on GPUs.

Each way is a configuration (`RunOnGpus`): its plans are made as training makes them, their memory is chosen by a plan
of memory, and the fastest way that fits is taken. No torch, no weights, no world.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from longspan.cli.plans.question import Gpus
from longspan.config.keys import AUTO
from longspan.config.sections import RunConfig, check_memory_keys
from longspan.errors import LayoutError, LongspanError, PlanError
from longspan.layout import Layout
from longspan.model.presets import PRESETS, find_published_preset
from longspan.plan import (
    Cost,
    FixedMemory,
    MemoryBudget,
    MemoryNeeds,
    MemoryPlan,
    MemorySettings,
    MicroBatch,
    Plan,
    choose_memory,
)
from longspan.plan.memory.memory_plan import any_choice_fits, largest_number_that_fits, leanest_plans, mean_step_seconds
from longspan.plan.memory.settings import GPU_SHARE
from longspan.plan.shape.layers import ConfigReader
from longspan.plan.shape.model_shape import ModelShape, experts_missing_text, read_experts, read_query_heads
from longspan.plan.shape.positions import can_scale_positions, position_limit
from longspan.run.checks import (
    check_keys_needed_by_keys,
    check_lora,
    check_model_keys,
    check_mtp_section,
    check_parallel,
    check_plans,
    check_precision,
)
from longspan.train.plans import PlannerConfig, degrees_to_compare, home_of
from longspan.train.plans.run_cost import can_be_free, fixed_memory_keys, run_cost_settings, run_memory_settings


@dataclass(frozen=True)
class RunOnGpus:
    """A run of a resolved configuration on GPUs; `target_share` of its tokens are predicted. `model` names the model to
    planners, and `image_rows` are the mean rows of images in a step.
    """

    config: RunConfig
    gpus: Gpus
    home: Layout
    model: Any
    target_share: float = 1.0
    image_rows: float = 0.0

    @classmethod
    def with_model(cls, config: RunConfig, gpus: Gpus) -> "RunOnGpus":
        check_model_keys(config, training=False)  # optimizer.lr may be left out, as nothing is trained here
        home = home_of(config.parallel, gpus.count)
        for check in (check_precision, check_keys_needed_by_keys, check_lora, check_mtp_section):
            check(config)
        check_memory_keys(config.train, gpu=True)
        check_parallel(config, home)
        # An answer is about steps of training: their plans are checked, and those of the held-out documents (unless
        # evaluation.documents is 0), but not those of named evaluation sets.
        check_plans(config.with_sets(()), home, training=True)
        model: Any = config.model.source
        if name := find_published_preset(model) if model else config.model.preset_name:
            preset = PRESETS[name]  # with an embedding row for each id of the run's tokenizer if it gives no number
            model = {"model_type": preset.model_type, "vocab_size": config.data.vocab_size, **preset.values}
        run = cls(config, gpus, home, model)
        if home.ep > 1 and not run.expert_count:  # in the words of a run that has loaded the model
            read = ConfigReader.read_whole_model(run.model)
            classes = read.value("architectures") or [read.model_type or read.where]
            raise PlanError(experts_missing_text(home.ep, str(classes[0])))
        return run

    def with_context_keys(self, **keys: Any) -> "RunOnGpus":
        return replace(self, config=replace(self.config, context=replace(self.config.context, **keys)))

    @property
    def budget(self) -> MemoryBudget:
        """What a GPU and its share of the host may be filled with."""
        train = self.config.train
        device = train.device_memory_limit or int(GPU_SHARE * self.gpus.bytes)
        return MemoryBudget(device=device, host=self.gpus.host_bytes)

    @cached_property
    def expert_count(self) -> int:
        """Experts of a layer; 0 for a model without any."""
        return read_experts(self.model).of_layer

    @cached_property
    def memory_settings(self) -> MemorySettings:
        """What memory is planned for. A slot encodes its share of a step's image rows, encoder.max_tokens at once."""
        rows, most_rows = int(self.image_rows / self.home.slots), self.config.encoder.max_tokens
        rows = min(rows, most_rows) if most_rows else rows
        return run_memory_settings(self.config, encoder_rows=rows)

    @cached_property
    def shape(self) -> ModelShape:
        return ModelShape.of(self.model, depths=self.config.mtp.num_layers)

    def cost(self, memory: MemoryPlan | None = None) -> Cost:
        """The price of a step with what a plan of memory recomputes and gathers; None: what the keys say."""
        settings = run_cost_settings(self.config, slots=self.home.slots, target_share=self.target_share, memory=memory)
        return self.gpus.machine.cost(self.model, settings)

    @cached_property
    def choice(self) -> PlannerConfig:
        """How the run's steps are planned; where the keys leave the host's size open, it is the machine's."""
        config = self.config
        if config.context.node_size == AUTO:
            node_size = max(1, self.gpus.machine.node_size // self.home.tp)
            config = replace(config, context=replace(config.context, node_size=node_size))
        return PlannerConfig.training(config, cost=self.cost(), heads=read_query_heads(self.model))

    @property
    def fixed_memory(self) -> FixedMemory:
        return fixed_memory_keys(self.config)

    def plan(self, lengths: Sequence[int], targets: int | None = None) -> Plan:
        return self.choice.plan(lengths, self.home, targets=targets)

    def plan_memory(self, plans: Sequence[Plan]) -> MemoryPlan:
        """Plan the memory of these plans: the fastest way, or that of the keys where train.plan_memory chooses nothing.
        Raises PlanError, with the bytes, where it does not fit.
        """
        budget = self.budget
        if self.config.train.plan_memory:
            arguments: dict[str, Any] = {"machine": self.gpus.machine, "fixed": self.fixed_memory}
            return choose_memory(self.model, self.home, list(plans), self.memory_settings, budget, **arguments)
        memory = self.leanest_memory(plans)
        if not memory.fits(budget):
            device, host = memory.device.total, memory.host.total
            raise PlanError(
                f"the run does not fit with its keys of memory (train.plan_memory is false): a rank "
                f"needs {device:,} bytes of a GPU that may fill {budget.device:,}, and {host:,} of its host's "
                f"{budget.host:,}"
            )
        return memory

    def leanest_memory(self, plans: Sequence[Plan]) -> MemoryPlan:
        """The plan of memory in which layers keep as little as the keys allow, whether it fits or not."""
        return next(leanest_plans(self.memory_needs(plans), self.fixed_memory))

    def memory_needs(self, plans: Sequence[Plan]) -> MemoryNeeds:
        return MemoryNeeds.of(self.model, self.home, list(plans), self.memory_settings, machine=self.gpus.machine)

    def step_seconds(self, plans: Sequence[Plan], memory: MemoryPlan) -> float:
        cost = self.cost(memory).shared_by(self.home.tp)
        return mean_step_seconds(self.model, plans, memory, self.memory_needs(plans), self.gpus.machine, cost)

    def on_more_gpus(self, steps: Sequence["Documents"], choices: "Choices") -> "Fit | None":
        """Find the best way on the fewest GPUs that hold these steps, of 2, 4, 8 … 1,024 times as many; None where none
        does. On each number the leanest layout is tried first: all slots, fewest rows.
        """
        for count in (self.gpus.count << doublings for doublings in range(1, 11)):
            with suppress(LongspanError):  # degrees that do not suit this number
                gpus = replace(self.gpus, count=count)
                larger = replace(self, gpus=gpus, home=home_of(self.config.parallel, count))
                layouts = _runs_to_try(larger, steps, replace(choices, planner=False, compare=False))
                lean = min(layouts, key=lambda run: (run.config.context.max_tokens_per_slot, -run.choice.degree))
                if fit_run(lean, steps).seconds is not None:
                    return find_fits(larger, steps, choices)[0][0]
        return None

    def scale_positions(self, longest: int) -> "RunOnGpus":
        """Set model.rope_scaling where a document needs it, the key is not given, and the model can be scaled."""
        limit, model = position_limit(self.model), self.config.model
        if limit is None or longest <= limit or model.rope_scaling or not can_scale_positions(self.model):
            return self
        return replace(self, config=replace(self.config, model=replace(model, rope_scaling="yarn")))

    def position_notes(self, longest: int) -> Iterator[str]:
        limit, scaling = position_limit(self.model), self.config.model.rope_scaling
        if limit is None or longest <= limit:
            return
        text = f"the model knows {limit:,} positions (max_position_embeddings), fewer than {longest:,}"
        if scaling:
            times = f"{longest / limit:,.1f}".removesuffix(".0")
            yield f"{text}: model.rope_scaling = {scaling!r} stretches them {times} times"
        else:
            yield f"{text}, and model.rope_scaling cannot stretch them: longspan train refuses longer documents"


UNIT = 1024  # rows of a slot: longest documents are whole multiples
MOST_ROWS = 1 << 26  # of a slot, which no GPU holds
MOST_EP = 8
WAYS = {True: 5, False: 3}  # limits of rows that are compared, of plans of one degree and of dynamic ones


@dataclass(frozen=True)
class Documents:
    """The documents of one step: their lengths, and how many tokens they predict (None: all but the first of each). A
    step that is not `timed` must fit, and its seconds do not count.
    """

    lengths: tuple[int, ...]
    targets: int | None = None
    timed: bool = True


@dataclass(frozen=True)
class Fit:
    """One way to run some steps: its configuration, the plans of timed ones, what all hold, and the mean seconds. Of a
    way that does not fit, `memory` is the leanest, and `seconds` are None.
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
    """What is not given and may be chosen: planner, degree, limit of rows, and the degree of experts. To `compare` is
    to try every planner, also one that is given.
    """

    planner: bool = True
    degree: bool = True
    rows: bool = True
    ep: bool = False
    compare: bool = False


def find_fits(run: RunOnGpus, steps: Sequence[Documents], choices: Choices) -> tuple[list[Fit], list[str]]:
    """Return the best way of each layout (planner, degree, experts' degree), and a line for each that is not possible.
    The fastest way is first; those that do not fit are last. Raises PlanError where nothing can be planned at all.
    """
    best, refused = dict[tuple[str, int, int], Fit](), dict[str, str]()
    is_open = run.config.context.mode == AUTO
    run = run.with_context_keys(mode="lockstep") if is_open else run
    for candidate in _runs_to_try(run, steps, choices):
        try:
            fit = fit_run(candidate, steps)
        except (PlanError, LayoutError) as error:
            refused[candidate.choice.text] = str(error)
            continue
        known = best.get(fit.layout)
        if known is None or fit_rank(fit) < fit_rank(known):
            best[fit.layout] = fit
    for layout, fit in best.items():
        if is_open and fit.seconds is not None and can_be_free(fit.run.config, fit.run.home):
            free = fit_run(fit.run.with_context_keys(mode="free"), steps)
            best[layout] = min(fit, free, key=fit_rank)
    if not best:
        raise PlanError([*refused.values(), "there is no layout to plan with"][0])
    planned = {fit.run.choice.text for fit in best.values()}
    lines = [f"{text}: not possible: {reason}" for text, reason in refused.items() if text not in planned]
    return sorted(best.values(), key=fit_rank), lines


def fit_rank(fit: Fit) -> tuple[bool, float]:
    """Rank ways as training chooses them (`PlannerConfig.least_gain`): the fastest first, fixed plans before dynamic
    ones that are as fast; behind all that fit the others, by the bytes of the leanest.
    """
    if fit.seconds is None:
        return True, float(fit.memory.device.total)
    return False, fit.seconds * fit.run.choice.least_gain


def fit_run(run: RunOnGpus, steps: Sequence[Documents]) -> Fit:
    """Plan a run by its own keys. Raises PlanError where the documents exceed its limit of rows."""
    plans = tuple(run.plan(step.lengths, step.targets) for step in steps)
    timed = tuple(plan for plan, step in zip(plans, steps, strict=True) if step.timed)
    try:
        memory = run.plan_memory(plans)
    except PlanError:
        return Fit(run, timed, run.leanest_memory(plans), None)
    return Fit(run, timed, memory, run.step_seconds(timed, memory))


def _runs_to_try(run: RunOnGpus, steps: Sequence[Documents], choices: Choices) -> Iterator[RunOnGpus]:
    # Dynamic plans of documents of one length gain nothing, and are left out unless all are to be compared.
    several = len({n for step in steps for n in step.lengths}) > 1
    for home_run in _runs_with_expert_degrees(run, choices):
        planners = [home_run.choice.planner]
        if choices.compare:
            planners = [*dict.fromkeys(("dynamic", "fixed", "padded", *planners))]
        elif choices.planner and choices.degree:
            planners = ["dynamic"] * (several and home_run.home.slots > 1) + ["fixed"]
        layouts = list[RunOnGpus]()
        for planned in (home_run.with_context_keys(planner=planner) for planner in planners):
            if choices.degree and planned.choice.has_one_degree:
                degrees = degrees_to_compare(home_run.home, planned.choice)
                layouts += [planned.with_context_keys(context_parallel_size=degree) for degree in degrees]
            else:
                layouts.append(planned)
        for layout in layouts:
            rows = [layout.config.context.max_tokens_per_slot]
            if choices.rows or rows == [AUTO]:
                rows = row_limits_to_try(layout, steps)
            yield from (layout.with_context_keys(max_tokens_per_slot=limit) for limit in rows)


def _runs_with_expert_degrees(run: RunOnGpus, choices: Choices) -> Iterator[RunOnGpus]:
    yield run
    if not choices.ep or not run.expert_count:
        return
    ep = max(d for d in range(1, MOST_EP + 1) if run.home.slots % d == 0 and run.expert_count % d == 0)
    config = replace(run.config, parallel=replace(run.config.parallel, ep=ep))
    try:
        changed = RunOnGpus.with_model(config, run.gpus)  # checks the keys
    except LongspanError:
        return
    if ep > 1:
        yield replace(run, config=config, home=changed.home)


def row_limits_to_try(run: RunOnGpus, steps: Sequence[Documents]) -> list[int]:
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
    """Find the most tokens of one document that fit, and return them with their run; 0 where not even one UNIT fits.
    The degree is the one that is given, or all slots. A slot has whole multiples of UNIT rows (rounded up to what plans
    need), and at most MOST_ROWS. Only memory is computed for each length that is tried, on the plan of a short document
    changed to that length, for planning each would be slow; the longest that fits is planned anew, and shortened by
    1/256 at a time until its own plan fits too.
    """
    degree = run.choice.degree if run.choice.has_one_degree and not choices.degree else 0
    degree = degree or run.home.slots
    unit = _round_up(UNIT, 2 * run.choice.options.row_multiple)
    run = run.with_context_keys(planner="fixed", context_parallel_size=degree, max_tokens_per_slot=0)
    short = run.plan((unit * degree,))

    def plan_of(units: int) -> Plan:
        (group,) = short.micro_batches[0].groups
        if run.choice.options.cp_comm_type == AUTO:  # another length may get another type
            group = replace(group, cp_comm_type=AUTO, hierarchical_context_parallel_sizes=None)
        tokens = units * unit * degree
        group = replace(group, lengths=(tokens,), pad_to=None)
        return replace(short, lengths=(tokens,), micro_batches=(MicroBatch((group,)), *short.micro_batches[1:]))

    def fits(plan: Plan) -> bool:
        return any_choice_fits(run.memory_needs([plan]), run.budget, run.fixed_memory)

    most = largest_number_that_fits(lambda units: fits(plan_of(units)), MOST_ROWS // unit)
    while most and not fits(run.plan((most * unit * degree,))):  # its planner shares attention in another way
        most = max(0, most - 1 - most // 256)
    return most * unit * degree, run.with_context_keys(max_tokens_per_slot=max(1, most) * unit)
