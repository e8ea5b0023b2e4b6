"""Collects the facts of a run after its set-up, on all ranks together; the first rank logs them before step 1."""

import shlex
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import torch

from longspan.errors import plural
from longspan.files import read_json
from longspan.launch.launch import usable_cores
from longspan.model.execution import Execution, model_execution
from longspan.model.multimodal.multimodal_model import MultimodalModel
from longspan.model.weights.local_tensors import local_tensor
from longspan.plan.shape.model_shape import read_experts
from longspan.run.facts import RunFacts
from longspan.run.run_data import TrainingRun
from longspan.ssm.kernels import describe_kernels
from longspan.train.gradients import counted_parameters
from longspan.train.plans.order import largest_step
from longspan.train.step_figures import device_name


def facts_of(run: TrainingRun) -> RunFacts:
    """Return the facts of a run; entered by all ranks.

    >>> display.log(facts_text(facts_of(run)))
    """
    config, world, home, order = run.config, run.world, run.world.home, run.order
    execution, lengths, mtp = model_execution(run.model), run.corpus.lengths, config.mtp
    parameters, parameters_of_rank, trained = _count_parameters(run)
    experts, ranks = read_experts(run.model.config), len(home.ranks)
    parameter_dtype, compute_dtype, reduce_dtype = (
        str(dtype).removeprefix("torch.")
        for dtype in (execution.parameter_dtype, execution.compute_dtype, execution.reduce_dtype)
    )
    # parallel.vpp is no degree of a home, and is told beside them
    degrees = {"tp": home.tp, "pp": home.pp, "vpp": config.parallel.vpp, "ep": home.ep}
    free = ", free" if config.context.mode == "free" else ""
    cap = run.choice.options.max_tokens_per_slot
    rows = f"at most {plural(cap, 'row')} a slot" if cap else "any number of rows a slot"
    evaluated = f"; evaluation {run.evaluation_choice.text}" if run.held_out else ""
    depths = f"{plural(mtp.depths, 'depth')} of multi-token prediction, loss weight {mtp.loss_weight:g}"
    return RunFacts(
        model=config.model.source or config.model.preset,
        parameters=parameters,
        parameters_of_rank=parameters_of_rank,
        trained=trained if config.lora.rank else 0,
        experts=experts.of_layer,
        experts_of_token=experts.of_token,
        parameter_dtype=parameter_dtype,
        compute_dtype=compute_dtype,
        reduce_dtype=reduce_dtype,
        device=device_name(world),
        ranks=ranks,
        node_size=world.node_size,
        hosts=-(-ranks // (world.node_size * home.tp)),
        cores=usable_cores(),
        backend="nccl" if world.device.type == "cuda" else "gloo",
        home={"slots": home.slots, **degrees, "dp_replicate": home.dp_replicate},
        sequence_parallel=config.parallel.sequence_parallel,
        comm_types="/".join(dict.fromkeys(run.choice.comm_types)),
        kernels=execution.kernels,
        plans=f"{run.choice.text}{free}, {rows}{evaluated}",
        priced_for=run.cost.source or "",
        peak_tflops=run.figures.peak,
        uncounted=run.figures.uncounted,
        documents=len(lengths),
        held_out=len(run.held_out),
        tokens=int(lengths.sum()),
        longest=int(lengths.max()),
        steps=config.train.steps,
        done=run.done,
        tokens_per_step=largest_step(config, order),
        optimizer=config.train.optimizer,
        lr=config.train.lr,
        report=str(run.dir / "report.html"),
        date=datetime.now().astimezone().isoformat(" ", "minutes"),
        command=shlex.join([Path(sys.argv[0]).name.replace("__main__.py", "longspan"), *sys.argv[1:]]),
        evaluated="\n".join(run.why_degrees),
        float8=execution.float8,
        mixers=mixers_text(execution, world.device, config.context.partition),
        compiled=execution.compiled,
        mtp=depths if mtp.depths else "",
        encoder=_encoder_text(run),
        rows=run.why_partition,
        caution=execution.slow_reason(),
        sessions=_session_list(run),
        memory=run.memory.to_json() if run.memory is not None else {},
    )


def _session_list(run: TrainingRun) -> tuple[tuple[int, int], ...]:
    """Return the steps that were done as each session of the run began, and its ranks; this session is the last.

    An earlier session that began at this session's step, or later, is left out: all its steps are repeated.
    """
    earlier = tuple[tuple[int, int], ...]()
    with suppress(OSError, ValueError):
        facts = RunFacts.from_json(read_json(run.dir / "run.json"))
        earlier = facts.sessions if facts is not None else ()
    return (*(session for session in earlier if session[0] < run.done), (run.done, len(run.world.home.ranks)))


def _count_parameters(run: TrainingRun) -> tuple[int, int, int]:
    """Count parameters: of the whole model, each once; on the rank that holds most; those that are trained.

    All ranks of one pipeline rank count the same parameters, sharded ones in whole, so one of these ranks is summed.
    """
    parameters = counted_parameters(run.model)  # of this rank's stages
    here, trained_here = sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)
    stored_here = sum(local_tensor(parameter).numel() for parameter in run.model.parameters())
    rank_counts = run.world.control.gather_objects((run.world.coordinates.pp, here, trained_here, stored_here))
    stage_counts = {pp: (count, trained) for pp, count, trained, _ in rank_counts}  # by pipeline rank
    total = sum(count for count, _ in stage_counts.values())
    trained_total = sum(trained for _, trained in stage_counts.values())
    return total, max(stored for *_, stored in rank_counts), trained_total


def mixers_text(execution: Execution, device: torch.device, partition: str) -> str:
    """Return in words how state-space layers run and how many states are sent; "" if there are no such layers."""
    if not execution.mixers:
        return ""
    kernels = describe_kernels(execution.compute_dtype, device)
    layers = f"{plural(execution.mixers, 'state-space layer')} in {kernels}"
    if partition == "contiguous":
        return f"{layers}; at most one state a slot and group is sent"
    return f"{layers}; two states a document and slot are sent, at most one in all with context.partition contiguous"


def _encoder_text(run: TrainingRun) -> str:
    if not isinstance(run.model, MultimodalModel):
        return ""
    settings, count = run.config.encoder, run.corpus.manifest.images
    (encoder,) = run.model.encoder_settings.values()
    parameters = sum(parameter.numel() for parameter in encoder.module.parameters())
    trained = {"all": "all trained", "projector": "its projector trained", "none": "not trained"}[settings.train]
    slots = plural(encoder.world.home.slots, "slot") + (f" of tp {settings.tp}" if settings.tp > 1 else "")
    waves = f", at most {settings.max_rows:,} rows of a slot at once" if settings.max_rows else ""
    return f"{parameters:,} parameters on {slots}, {trained}; {plural(count, 'image')}{waves}"
