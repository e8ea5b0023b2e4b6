"""`train`: the loop of a run, from its configuration to its last evaluation, on every rank inside an open world.

A step is: documents of the step, a plan of their lengths, `run_step`. What a run leaves in its folder: config.toml,
corpus/, tokenizer.json, metrics.jsonl, groups.jsonl, plans/, checkpoints/, model/ (Hugging Face), summary.json; and
run.lock, which keeps a second run out.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from longspan.comm import World
from longspan.errors import DataError, LongspanError, RunFolderError
from longspan.model import save_model
from longspan.model.experts.router import RouterCoefficients
from longspan.plan import Plan, PlanAhead
from longspan.train.all_ranks import is_first_rank, on_every_rank, on_first_rank, raise_first_error, result_or_error
from longspan.train.checkpoint.checkpoint import save_checkpoint
from longspan.train.config.sections import RunConfig, TrainConfig
from longspan.train.data.tokenizer import load_tokenizer
from longspan.train.disk import write_atomically
from longspan.train.evaluation.evaluate import compare_degrees, evaluate, save_plan
from longspan.train.evaluation.result import Evaluation
from longspan.train.json_record import as_json
from longspan.train.optim import lr_at
from longspan.train.plans import plans_of_steps, query_heads, row_multiple_of
from longspan.train.run.config_check import check_config
from longspan.train.run.group_log import GroupLog
from longspan.train.run.lock import run_lock
from longspan.train.run.metrics_log import MetricsLog, memory_bytes, read_metrics
from longspan.train.run.progress import ProgressDisplay
from longspan.train.run.result import LAST_STEPS, TrainResult
from longspan.train.run.setup import TrainingRun, evaluation_choice, set_up
from longspan.train.run.stop_signal import StopSignal
from longspan.train.step import run_step


def train(config: RunConfig, world: World, display: ProgressDisplay) -> TrainResult:
    """Train to the last step, or until told to stop; all ranks call it together, with the same configuration.

    SIGTERM or Ctrl-C on any rank ends the run after the step at hand, with a checkpoint. Raises LongspanError for
    what does not fit, before the first step, for a loss or gradients that are not finite, before they are used, and for
    what the disk refuses; RunFolderError where another run is at work in the folder.
    """
    check_config(config, len(world.home.ranks))
    with StopSignal() as stop, run_lock(Path(config.run.dir), world, display.log):
        return _train(set_up(config, world, display.log), display, stop)


def _train(run: TrainingRun, display: ProgressDisplay, stop: StopSignal) -> TrainResult:
    world = run.world
    metrics_file, group_file = (
        run.dir / name if is_first_rank(world) else None for name in ("metrics.jsonl", "groups.jsonl")
    )
    with on_every_rank(
        world, lambda: MetricsLog(metrics_file, after_step=run.done), os_error_as=RunFolderError
    ) as metrics:
        groups = on_every_rank(world, lambda: GroupLog(world, group_file, display.log), os_error_as=RunFolderError)
        with _plans(run) as plans:
            done, stopped = _steps(run, plans, metrics, display, stop, groups)
        display.end_bar()
        final = () if stopped else _finish(run, metrics, display)
    result = TrainResult(
        dir=run.dir,
        done=done,
        steps=run.config.train.steps,
        stopped=stopped,
        last_loss=_last_loss(metrics_file, done) if metrics_file else math.nan,
        vocab_size=run.corpus.manifest.tokenizer_size,
        final=final,
        world=len(world.home.ranks),
    )
    summary = as_json(result.summary(), indent=1)
    on_first_rank(world, lambda: write_atomically(run.dir / "summary.json", summary), os_error_as=RunFolderError)
    return result


def _plans(run: TrainingRun) -> PlanAhead:
    """The plans of the run's steps, priced for its model."""
    parameters, home = list(run.model.parameters()), run.world.home
    return plans_of_steps(
        run.config.context,
        run.order,
        home,
        cost=run.cost,
        weights=sum(parameter.numel() for parameter in parameters) // home.tp,
        weight_bytes=parameters[0].element_size(),
        row_multiple=row_multiple_of(run.config.parallel),
        heads=query_heads(run.model.config),
    )


def _steps(
    run: TrainingRun,
    plans: PlanAhead,
    metrics: MetricsLog,
    display: ProgressDisplay,
    stop: StopSignal,
    groups: GroupLog,
) -> tuple[int, str]:
    """The steps that are left; returns the number that is done, and what stopped them."""
    done, steps, settings = run.done, run.config.train.steps, run.config.train
    if _due(done, settings.eval_every) and done < steps and not _recorded(run, metrics, done):
        _evaluate(run, metrics, display, done)
    while done < steps:
        row, plan = _step(run, plans, done)
        done += 1
        _, failure = result_or_error(partial(_note_step, row, plan, metrics, groups), RunFolderError)
        display.show_step(row)
        stopped = _agreed(run.world, stop, failure)
        if done in (run.done + 1, steps) or stopped:
            _save_plan(run, plan, f"step-{done:06d}")
        if _due(done, settings.eval_every) and done < steps and not stopped:
            found = _evaluate(run, metrics, display, done)
            if found is not None:
                on_every_rank(run.world, partial(groups.note, found.plan), os_error_as=RunFolderError)
        if _due(done, settings.save_every) or done == steps or stopped:
            _save(run, done)
        if stopped:
            return done, stopped
    return done, ""


def _note_step(row: Mapping[str, Any], plan: Plan, metrics: MetricsLog, groups: GroupLog) -> None:
    groups.note(plan)
    metrics.write(row)


def _step(run: TrainingRun, plans: PlanAhead, step: int) -> tuple[dict[str, Any], Plan]:
    """One optimizer step (counted from 0); returns its row of metrics (counted from 1) and its plan."""
    started = time.perf_counter()
    config, world = run.config.train, run.world
    documents = run.corpus.select(run.order.documents_of_step(step))
    plan = plans.plan(step)
    world.prepare(plan)
    lr = lr_at(step, config.steps, config.warmup_steps, config.lr, config.min_lr_ratio)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    norm = config.max_grad_norm or None
    result = run_step(
        run.model,
        plan,
        documents,
        world,
        optimizer=run.optimizer,
        max_grad_norm=norm,
        step=step + 1,
        loss_chunk_rows=config.loss_chunk_rows,
        router=router_coefficients(config),
    )
    seconds = time.perf_counter() - started
    row = {
        "step": step + 1,
        "loss": result.loss,
        "tokens": result.tokens,
        "targets": result.targets,
        "grad_norm": result.grad_norm,
        "lr": lr,
        "seconds": round(seconds, 6),
        "tokens_per_second": round(result.tokens / seconds, 3),
        "memory_bytes": memory_bytes(world.device),
        "micro_batches": result.micro_batches,
        "efficiency": round(plan.efficiency, 6),
    }
    if result.router is not None:
        row |= {"router_balance_loss": result.router.balance, "router_z_loss": result.router.z}
    return row, plan


def router_coefficients(config: TrainConfig) -> RouterCoefficients:
    """What the losses of routers weigh; a balance of -1 is what the model's configuration says."""
    balance = config.router_balance_loss
    return RouterCoefficients(balance=None if balance < 0 else balance, z=config.router_z_loss)


def _evaluate(run: TrainingRun, metrics: MetricsLog, display: ProgressDisplay, done: int) -> Evaluation | None:
    if not run.order.evaluation:
        return None
    choice = evaluation_choice(run.config, run.cost, query_heads(run.model.config))
    found = evaluate(run.model, run.corpus, run.order.evaluation, choice, run.world, step=done, config=run.config)
    _record(run, metrics, display, [found])
    return found


def _finish(run: TrainingRun, metrics: MetricsLog, display: ProgressDisplay) -> tuple[Evaluation, ...]:
    """After the last step: the weights as a Hugging Face folder, and their loss at every degree, recorded once."""
    world, done = run.world, run.config.train.steps
    tokenizer = on_every_rank(
        world, lambda: load_tokenizer(run.dir) if is_first_rank(world) else None, os_error_as=DataError
    )
    save_model(run.model, run.dir / "model", world, tokenizer)
    if not run.order.evaluation:
        return ()
    choice = evaluation_choice(run.config, run.cost, query_heads(run.model.config))
    final = compare_degrees(run.model, run.corpus, run.order.evaluation, choice, world, step=done, config=run.config)
    if _recorded(run, metrics, done):
        return final
    if choice.planner != "fixed" or choice.degree not in [evaluation.cp for evaluation in final]:
        _evaluate(run, metrics, display, done)
    _record(run, metrics, display, final)
    return final


def _recorded(run: TrainingRun, metrics: MetricsLog, done: int) -> bool:
    """Whether the run has an evaluation after so many steps: what the first rank's file says, on every rank."""
    return run.world.control.broadcast_object(done in metrics.evaluated)


def _record(run: TrainingRun, metrics: MetricsLog, display: ProgressDisplay, evaluations: Sequence[Evaluation]) -> None:
    for evaluation in evaluations:
        on_every_rank(run.world, partial(metrics.write, evaluation.row()), os_error_as=RunFolderError)
        display.show_evaluation(evaluation.row())
        _save_plan(run, evaluation.plan, f"evaluation-cp{evaluation.cp}")


def _save_plan(run: TrainingRun, plan: Plan, name: str) -> None:
    """Keep a plan for the report."""
    on_first_rank(run.world, lambda: save_plan(plan, run.dir / "plans", name), os_error_as=RunFolderError)


def _save(run: TrainingRun, done: int) -> None:
    state = {"config": asdict(run.config), "ranks": len(run.world.home.ranks)}
    keep = run.config.run.keep_checkpoints
    save_checkpoint(run.checkpoints, run.model, run.optimizer, run.world, step=done, state=state, keep=keep)


def _agreed(world: World, stop: StopSignal, failure: LongspanError | None) -> str:
    """What any rank was told to stop by; the same on every rank. Raises what any rank failed with."""
    if not world.control.any_rank(bool(stop.asked) or failure is not None):
        return ""
    raise_first_error(world, failure)
    return next(name for name in world.control.gather_objects(stop.asked) if name)


def _due(done: int, every: int) -> bool:
    return every > 0 and done > 0 and done % every == 0


def _last_loss(file: Path, done: int) -> float:
    rows = (row for row in read_metrics(file) if done - LAST_STEPS < row["step"] <= done)
    losses = [row["loss"] for row in rows if isinstance(row.get("loss"), float)]
    return math.fsum(losses) / len(losses) if losses else math.nan
