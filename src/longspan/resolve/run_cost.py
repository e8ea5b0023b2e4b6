"""What a run's plans are priced by, its machine and the cost of its model there under its keys; and the settings of its
plan of memory.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from longspan.config.defaults import encoder_default
from longspan.config.dtypes import DTYPE_BYTES, compute_dtype_name
from longspan.config.keys import AUTO
from longspan.config.memory_keys import form_of_config
from longspan.config.sections import RunConfig
from longspan.errors import ConfigError, PlanError, plural
from longspan.plan import Cost, MemoryPlan, MemorySettings
from longspan.plan.cost.cost import DEFAULT_COST
from longspan.plan.cost.machine import CostSettings, Machine, read_machine
from longspan.plan.form import Form
from longspan.plan.memory.model_numbers import adapted_widths
from longspan.plan.memory.settings import known_state_numbers
from longspan.plan.memory.teacher_bytes import PlannedTeacher
from longspan.plan.shape.model_shape import QWEN3_8B, ModelShape
from longspan.plan.shape.packed import find_packed_form, packed_weights_of_model

KEY = "run.machine"
_read_machine_once = cache(read_machine)


def cost_without_model(config: RunConfig) -> Cost:
    """Return the cost that stands in where no model is known: that of a Qwen3-8B, on the machine of `run.machine` if
    the key names one.
    """
    machine = read_run_machine(config)
    return machine.cost(QWEN3_8B) if machine else DEFAULT_COST


def read_run_machine(config: RunConfig) -> Machine | None:
    """Return the machine that `run.machine` names; None if it is empty.

    A file is read once: a run keeps its prices, whatever becomes of the file before the next evaluation. Raises
    ConfigError for a file that holds no machine.
    """
    return _read_machine_once(config.run.machine, KEY) if config.run.machine else None


def run_machine(config: RunConfig, *, gpu: bool) -> Machine:
    """Return the machine that prices a run: `run.machine`, else H200s or CPUs."""
    return read_run_machine(config) or (Machine.known("H200") if gpu else Machine.cpus())


def set_node_size(config: RunConfig, slots: int) -> RunConfig:
    """Return the configuration with the `slots` that a host of this world has in place of a node_size "auto". Raises
    ConfigError if the key has another number.
    """
    number = config.context.node_size
    if number not in (AUTO, slots):
        raise ConfigError(
            f"context.node_size is {number}, and this world has {plural(slots, 'slot')} a host "
            f'(LOCAL_WORLD_SIZE / tp); use {slots}, or "{AUTO}", its default'
        )
    return config.with_keys("context", node_size=slots)


def find_run_cost(
    config: RunConfig,
    model_config: Any,
    log: Callable[[str], None],
    *,
    gpu: bool,
    machine: Machine | None = None,
    slots: int = 0,
    target_share: float = 1.0,
    memory: MemoryPlan | None = None,
    teacher: PlannedTeacher | None = None,
) -> Cost:
    """Return what plans are priced by: the model on a machine (None: that of `run.machine`, else H200s or CPUs).

    The cost includes recomputation, the forward pass of a `teacher`, and what FSDP2 gathers and sums over so many
    `slots` (0: nothing), as a plan of `memory` chose if given. `target_share` of rows predict. On CPUs `Cost.source` is
    "": no time is shown. A model whose configuration gives no price is planned for as a Qwen3-8B, with a line in the
    log. Without `run.machine` a number counts two bytes, those of bfloat16, whatever the run computes in.
    """
    parallel = config.parallel
    compute_dtype = compute_dtype_name(config.model, "cuda" if gpu else "cpu")
    settings = CostSettings(
        trains_all=not config.lora.rank,
        bytes_per_number=DTYPE_BYTES[compute_dtype] if config.run.machine else 2,
        shards=slots // parallel.dp_replicate,
        free=config.context.mode == "free",
        ep=parallel.ep,
        weight_ranks=parallel.tp,  # ranks that share a slot's weights; plans divide a slot's cost by them later
        dp_replicate=parallel.dp_replicate,
        target_share=target_share,
    )
    settings = memory.cost_settings(settings) if memory else settings.with_form(form_of_config(config))
    if not gpu:
        settings = replace(settings, compiled="none")
    try:
        adapters = memory_settings_of_run(config, gpu=gpu, state_numbers=0.0)
        settings = replace(settings, adapted_widths=adapted_widths(model_config, adapters))
        priced_on = machine or run_machine(config, gpu=gpu)
        if teacher is None:
            return priced_on.cost(model_config, settings)
        streamed = _streamed_bytes(teacher, settings)
        # The plan of memory has the bytes of both on the host.
        own = replace(
            settings, streamed_bytes=max(0.0, settings.streamed_bytes - streamed) * settings.offload_weights
        )
        other = _teacher_cost(teacher, priced_on, settings, streamed)
        return priced_on.cost(model_config, own).with_pass_before(other)
    except PlanError as error:
        log(f"plans are priced as for a Qwen3-8B: {error}")
        return Cost() if gpu else replace(Cost(), source="")


def _streamed_bytes(teacher: PlannedTeacher, settings: CostSettings) -> float:
    """The bytes of a rank that come from the host for a pass."""
    if not teacher.offload_weights:
        return 0.0
    packed = packed_weights_of_model(teacher.config, teacher.frozen)
    whole = ModelShape.of(teacher.config).stored_weights - packed.numbers - packed.experts
    size = whole * teacher.number_bytes + packed.bytes + packed.experts_bytes
    return size / max(1, settings.shards) / max(1, settings.weight_ranks)


def _teacher_cost(teacher: PlannedTeacher, machine: Machine, settings: CostSettings, streamed: float) -> Cost:
    """Of forward passes over the rows of the model's step."""
    form = Form(frozen=teacher.frozen, compiled=settings.compiled, mlp_tile_tokens=settings.mlp_tile_tokens)
    changes: dict[str, Any] = {"trains_all": False, "forward": True, "streamed_bytes": streamed, "paged_bytes": 0.0}
    return machine.cost(teacher.config, replace(settings.with_form(form), **changes))


def planned_teacher(config: RunConfig, model_config: Any, *, gpu: bool) -> PlannedTeacher:
    """Return the teacher of a run as its plans count and price it, by its configuration or its folder."""
    keys = config.teacher.as_model(compute_dtype_name(config.model, "cuda" if gpu else "cpu"))
    frozen = keys.frozen
    if frozen == AUTO:
        frozen = "stored" if find_packed_form(model_config, AUTO) else "whole"
    return PlannedTeacher(model_config, frozen, DTYPE_BYTES[keys.dtype], config.teacher.offload_weights)


# ---- memory


def memory_settings_of_run(
    config: RunConfig,
    *,
    gpu: bool = True,
    encoder_rows: int = 0,
    state_numbers: float | None = None,
    teacher: PlannedTeacher | None = None,
) -> MemorySettings:
    """Read the settings of a run's plan of memory; those that the plan may choose have the values of their keys.

    The optimizer keeps `state_numbers` for each weight (None: those of its name).

    >>> memory_settings_of_run(RunConfig().with_keys("model", dtype="float32")).state_numbers
    2.0
    """
    computed = compute_dtype_name(config.model, "cuda" if gpu else "cpu")
    optimizer = config.optimizer
    parameter_bytes = DTYPE_BYTES[config.model.dtype]
    adapter_bytes = max(4, parameter_bytes)  # adapters are in float32 at least
    if state_numbers is None:
        weight_bytes = adapter_bytes if config.lora.rank else parameter_bytes
        state_numbers = known_state_numbers(optimizer.class_, optimizer.moments, weight_bytes)
    # `optimizer_state_numbers` counts the states of other optimizers.
    assert state_numbers is not None, optimizer.class_
    return MemorySettings(
        parameter_bytes=parameter_bytes,
        compute_bytes=DTYPE_BYTES[computed],
        state_numbers=state_numbers,
        muon=optimizer.class_ == "muon",
        frozen_names=config.train.freeze,
        lora_rank=config.lora.rank,
        lora_targets=config.lora.target_modules,
        adapter_bytes=adapter_bytes,
        vpp=config.parallel.vpp,
        free=config.context.mode == "free",
        gpu=gpu,
        scan_kernels=computed == "bfloat16",
        encoder_rows=encoder_rows,
        encoder_recomputed=config.encoder.max_tokens > 0,
        encoder_trained=config.encoder.trainable or encoder_default(config),
        teacher=teacher,
    ).with_form(form_of_config(config))
