"""The warm-up of a run: on GPUs, before its first step, for the plans of its coming steps and of its evaluations."""

from longspan.comm import World
from longspan.comm.all_ranks import LogLine
from longspan.plan import Plan
from longspan.run.training_run import TrainingRun
from longspan.run.warm_up.warm_up import warm_up
from longspan.train.plans import planner_of_steps

COMING, COMING_DYNAMIC = 32, 4  # steps whose plans are looked at; dynamic plans take a while each


def warm_up_run(run: TrainingRun, log: LogLine) -> None:
    """Warm up where something is compiled or connected in first steps, and steps are left; entered by all ranks."""
    if warms_up(run.world) and run.done < run.config.train.steps:
        warm_up(run, _coming_plans(run), _evaluation_plan(run), log)


def warms_up(world: World) -> bool:
    """Whether the devices of this world gain from it: on CPUs nothing is compiled."""
    return world.device.type == "cuda"


def _coming_plans(run: TrainingRun) -> list[Plan]:
    count = COMING_DYNAMIC if run.config.context.planner == "dynamic" else COMING
    planner = planner_of_steps(run.choice, run.order, run.world.home)
    return [planner(step) for step in range(run.done, min(run.done + count, run.config.train.steps))]


def _evaluation_plan(run: TrainingRun) -> Plan | None:
    return run.evaluation_choice.plan(run.held_out.lengths, run.world.home) if run.held_out else None
