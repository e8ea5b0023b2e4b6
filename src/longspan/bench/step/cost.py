"""The cost by which `bench step` plans, and predicts what a step takes: a file's, or the model's on a plain machine."""

from longspan.bench.step.flags import StepFlags
from longspan.bench.step.shapes import Shape
from longspan.layout import Layout
from longspan.plan import Cost
from longspan.plan.cost.cost_file import read_cost
from longspan.plan.cost.model_cost import (
    H200_ATTENTION_TFLOPS,
    H200_RING_STEP_SECONDS,
    H200_TFLOPS,
    cost_on_h200,
    with_recomputation,
)
from longspan.plan.simulate.simulate import shared_by

CPU_TFLOPS = 0.05


def cost_and_source(flags: StepFlags, shape: Shape, longest: int, home: Layout, *, gpu: bool) -> tuple[Cost, str]:
    """The cost, shared by the tp ranks of a slot and, in free mode, with a step's closing; and what it is, in words."""
    cost, source = (read_cost(flags.cost, "--cost"), flags.cost) if flags.cost else _plain(flags, shape, longest, gpu)
    cost = shared_by(cost, flags.tp)
    if flags.mode == "lockstep":
        return cost, source
    experts = 3 * shape.hidden * shape.expert_ffn * shape.experts
    attention = shape.hidden * shape.head_size * 2 * (shape.heads + shape.key_value_heads)
    layer = attention + (experts or 3 * shape.hidden * shape.ffn)
    weights = shape.layers * layer + 2 * shape.hidden * shape.vocabulary
    computed = flags.compute or ("bfloat16" if gpu else flags.parameters)
    gather_bytes = 2 if computed == "bfloat16" else 4
    return cost.with_closing(weights / flags.tp, home, node_size=flags.node_size, gather_bytes=gather_bytes), source


def _plain(flags: StepFlags, shape: Shape, longest: int, gpu: bool) -> tuple[Cost, str]:
    """The model's cost on a machine of so many FLOP/s, with what is recomputed."""
    config = shape.config(longest)
    if gpu:
        cost = cost_on_h200(config)
        machine = (
            f"{H200_TFLOPS:g} TFLOP/s, {H200_ATTENTION_TFLOPS:g} in attention, "
            f"{1e6 * H200_RING_STEP_SECONDS:.0f} µs a ring step"
        )
    else:
        cost, machine = Cost.for_model(config, tflops=CPU_TFLOPS), f"{CPU_TFLOPS} TFLOP/s"
    return with_recomputation(cost, config, flags.recompute, flags.recompute_layers), f"the model at {machine}"
