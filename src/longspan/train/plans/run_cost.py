"""What a run's plans are priced by, what decides its plan of memory, and a planner of the user's own. No torch.

`context.planner` may be a dotted name: the planner is called as `plan_dynamic` is (docs/planning.md). Whether a machine
suits the hosts of a world is checked in `resolve.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from longspan.config.defaults import DTYPE_BYTES, compute_dtype_name, encoder_default
from longspan.config.file import nearest_hint
from longspan.config.keys import AUTO
from longspan.config.plan_section import ONE_DEGREE, PLANNERS
from longspan.config.sections import OptimizerSection, RunConfig, chooses_measures, given_checkpointing
from longspan.errors import ConfigError, LongspanError, PlanError, import_object, plural
from longspan.layout import Layout
from longspan.plan import Cost, FixedMemory, MemorySettings, Plan, PlanOptions
from longspan.plan.cost.machine import CostSettings, Machine, read_machine
from longspan.plan.memory.settings import MOMENTS
from longspan.plan.planners.options import Request
from longspan.plan.shape.model_shape import QWEN3_8B

if TYPE_CHECKING:
    from longspan.plan import MemoryPlan


def check_planner_exists(name: str, key: str) -> None:
    """Raise ConfigError, with the key that names it, for a planner that does not exist."""
    if name in PLANNERS:
        return
    if "." not in name:
        raise ConfigError(
            f"{key} is {name!r}; {nearest_hint(name, (AUTO, *PLANNERS))}, or a function of your own with its module, "
            "as in 'my_module.my_planner' (docs/planning.md)"
        )
    _import_planner(name, key)


def _import_planner(name: str, key: str) -> Callable[..., Any]:
    planner = import_object(name, f"{key} is {name!r}")
    if not callable(planner):
        raise ConfigError(f"{key} {name!r} is no function; name one of lengths, home and options that returns a Plan")
    return planner


def plan_by_custom_planner(name: str, key: str, lengths: Sequence[int], home: Layout, *, options: PlanOptions) -> Plan:
    """Plan by a planner of one's own: its plan is checked, and completed by the options.

    Raises PlanError, with the key that names the planner, if it fails or returns anything but a plan of these documents
    and slots, and for a plan that is not sound or exceeds the limit of rows.
    """
    request, planner = Request.from_arguments(lengths, home, options), _import_planner(name, key)
    if not request.lengths:  # a planner need not know what to do with a step without documents
        return request.make_plan((), name)
    documents, slots = plural(len(request.lengths), "document"), plural(home.slots, "slot")
    try:
        plan = planner(request.lengths, home, options=options)
    except LongspanError:
        raise
    except Exception as error:  # whatever somebody's function raises
        raise PlanError(f"{key} {name!r} failed for {documents} on {slots}: {type(error).__name__}: {error}") from error
    if not isinstance(plan, Plan) or (plan.slots, plan.lengths) != (home.slots, request.lengths):
        raise PlanError(
            f"{key} {name!r} returned {plan if isinstance(plan, Plan) else type(plan).__name__}; it must return a "
            f"longspan.Plan of {slots} (home.slots) and of the {documents} that it received, in their order"
        )
    try:
        return request.make_plan(plan.micro_batches, name)
    except PlanError as error:
        raise PlanError(f"{key} {name!r} returned a plan that cannot run: {error}") from error


KEY = "run.machine"


def cost_without_model(config: RunConfig) -> Cost:
    """Return the cost of a Qwen3-8B, as no model is known here, on the machine of `run.machine`, or the default."""
    machine = read_run_machine(config)
    return machine.cost(QWEN3_8B) if machine else Cost()


def read_run_machine(config: RunConfig) -> Machine | None:
    """Return the machine that `run.machine` names; None if it is empty.

    A file is read once: a run keeps its prices, whatever becomes of the file before the next evaluation. Raises
    ConfigError for a file that holds no machine.
    """
    return _read_machine_once(config.run.machine) if config.run.machine else None


def find_run_cost(
    config: RunConfig,
    model_config: Any,
    log: Callable[[str], None],
    *,
    gpu: bool,
    slots: int = 0,
    target_share: float = 1.0,
    memory: "MemoryPlan | None" = None,
) -> Cost:
    """Return what plans are priced by: the model on `run.machine`, else on H200s or on CPUs.

    The cost includes recomputation, and what FSDP2 gathers and sums over so many `slots` (0: nothing), as a
    plan of `memory` chose if given. `target_share` of rows predict. On CPUs `Cost.source` is "": no time is shown. A
    model whose configuration gives no price is planned for as a Qwen3-8B, with a line in the log.
    """
    machine = read_run_machine(config) or (Machine.known("H200") if gpu else Machine.cpus())
    try:
        settings = run_cost_settings(config, slots=slots, gpu=gpu, target_share=target_share, memory=memory)
        return machine.cost(model_config, settings)
    except PlanError as error:
        log(f"plans are priced as for a Qwen3-8B: {error}")
        return Cost() if gpu else replace(Cost(), source="")


def run_cost_settings(
    config: RunConfig, *, slots: int, gpu: bool = True, target_share: float = 1.0, memory: "MemoryPlan | None" = None
) -> CostSettings:
    """Return the settings of a run over `slots` slots that change its model's time; arguments as of `find_run_cost`.

    Without `run.machine` a number counts two bytes, those of bfloat16, whatever the run computes in.
    """
    train, parallel = config.train, config.parallel
    compute_dtype = compute_dtype_name(config.model, "cuda" if gpu else "cpu")
    settings = CostSettings(
        recomputation=given_checkpointing(train) or "none",
        frozen=config.lora.rank > 0,
        depths=config.mtp.num_layers,
        bytes_per_number=DTYPE_BYTES[compute_dtype] if config.run.machine else 2,
        shards=slots // parallel.dp_replicate,
        free=config.context.mode == "free",
        ep=parallel.ep,
        weight_ranks=parallel.tp,  # ranks that share a slot's weights; plans divide a slot's cost by them later
        dp_replicate=parallel.dp_replicate,
        gathered_once=not parallel.reshard_after_forward,
        summed_once=not parallel.sync_each_batch,
        target_share=target_share,
        float8=bool(train.float8),
        compiled=train.compile if gpu else "none",
    )
    return settings if memory is None else memory.cost_settings(settings)


@cache
def _read_machine_once(file: str) -> Machine:
    return read_machine(file, KEY)


def run_memory_settings(config: RunConfig, *, gpu: bool = True, encoder_rows: int = 0) -> MemorySettings:
    """Read the settings of a run's plan of memory; those that the plan may choose have the values of their keys.

    >>> run_memory_settings(RunConfig()).state_numbers
    2.0
    """
    train, parallel = config.train, config.parallel
    computed = compute_dtype_name(config.model, "cuda" if gpu else "cpu")
    return MemorySettings(
        parameter_bytes=DTYPE_BYTES[config.model.dtype],
        compute_bytes=DTYPE_BYTES[computed],
        state_numbers=optimizer_state_numbers(config.optimizer, lora=config.lora.rank > 0, dtype=config.model.dtype),
        lora_rank=config.lora.rank,
        lora_targets=config.lora.target_modules,
        adapter_bytes=max(4, DTYPE_BYTES[config.model.dtype]),  # adapters are in float32 at least
        depths=config.mtp.num_layers,
        gathered_once=not parallel.reshard_after_forward,
        summed_once=not parallel.sync_each_batch,
        offload_optimizer_states=train.offload_optimizer_states,
        mlp_tile_tokens=train.mlp_tile_tokens,
        fused_norms=train.fused_norms == "on" or (train.fused_norms == "auto" and gpu),
        float8=bool(train.float8),
        compiled=train.compile,
        vpp=parallel.vpp,
        free=config.context.mode == "free",
        sequence_parallel=parallel.sequence_parallel,
        gpu=gpu,
        scan_kernels=computed == "bfloat16",
        encoder_rows=encoder_rows,
        encoder_recomputed=config.encoder.activation_checkpointing,
        encoder_trained=config.encoder.trainable or encoder_default(config),
    )


def optimizer_state_numbers(section: OptimizerSection, *, lora: bool = False, dtype: str = "float32") -> float:
    """Return how many numbers of state the optimizer keeps for each weight, counted on a small matrix if need be."""
    if section.class_ == "sgd" and any(argument.startswith("momentum") for argument in section.arguments):
        return 1.0
    if section.class_ in MOMENTS:
        return MOMENTS[section.class_]
    import torch

    from longspan.model.load import torch_dtype
    from longspan.train.optim.optimizer import OptimizerChoice

    matrix = torch.nn.Parameter(torch.zeros(128, 128, dtype=torch_dtype("float32" if lora else dtype)))
    matrix.grad = torch.zeros_like(matrix)
    optimizer = OptimizerChoice.from_section(section).build([matrix])
    optimizer.step()
    size = sum(x.nbytes for x in optimizer.state[matrix].values() if isinstance(x, torch.Tensor))
    return round(size / matrix.nbytes, 3)  # rounded: the count of steps does not show


def leaves_plans_open(config: RunConfig) -> bool:
    """Return whether the keys leave the planner of training, or its one degree, to be chosen."""
    context = config.context
    return context.planner == AUTO or (context.planner in ONE_DEGREE and not context.context_parallel_size)


def can_be_free(config: RunConfig, home: Layout) -> bool:
    return home.slots > 1 and config.parallel.pp == config.parallel.ep == 1


def fixed_memory_keys(config: RunConfig, *, gpu: bool = True) -> FixedMemory:
    """Read the keys of memory that are given by hand; None is what the plan of memory may choose."""
    train, by_hand = config.train, not chooses_measures(config.train, gpu=gpu)
    off = False if by_hand else None  # of a key that is not set
    return FixedMemory(
        measure=given_checkpointing(train) or ("none" if by_hand else None),
        offload=train.offload_activations or off,
        gathered_once=not config.parallel.reshard_after_forward or off,
        summed_once=not config.parallel.sync_each_batch or off,
        offload_optimizer_states=train.offload_optimizer_states
        or (off if config.optimizer.class_ in MOMENTS else False),
        segment_layers=0 if by_hand else None,
        mlp_tile_tokens=train.mlp_tile_tokens or (0 if by_hand else None),
    )
