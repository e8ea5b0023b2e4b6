"""What the seconds of a step are compared with: flops, predictions, images; and how fast a slot works over others."""

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longspan.data.document import NO_TARGET
from longspan.layout import Layout
from longspan.plan import Cost, plan_fixed
from longspan.plan.items.encoder_shape import EncoderShape
from longspan.plan.shape.model_shape import ModelShape, model_flops
from longspan.train.passes import Passes
from longspan.train.step_figures import StepFigures
from longspan.train.terms import slot_pace
from longspan.train.terms.encoding import EncoderTimes
from longspan.train.terms.slot_pace import SlotPaceTerm

TEXT = ModelShape(layers=2, weights=10**6, query_width=64, key_width=32)
SIZES = {"width": 16, "head_dim": 8, "full_layers": 3, "merge": 2}
TOWER = EncoderShape(**SIZES, block_weights=10**6, embed_weights=10**4, projector_weights=10**5)
COST = Cost(linear_seconds=0.01, attention_seconds=0.0, micro_batch_seconds=0.0)


def test_images_count() -> None:
    plan = plan_fixed([40, 24], Layout(2), cp=1, cost=COST)
    times = EncoderTimes(seconds=0.5, predicted_seconds=0.1)
    figures = StepFigures(shape=TEXT, images=TOWER, devices=2, peak=1e-3, priced_here=True)
    found = figures.step_figures(plan, 2.0, [4, 6], times)
    flops = model_flops(TEXT, [40, 24]) + TOWER.flops([4, 6])
    assert found["tflops"] == float(f"{flops / 2.0 / 2 / 1e12:.6g}") and found["mfu"] == round(flops / 4e12 / 1e-3, 6)
    assert found["encoder_share"] == 0.25 and found["predicted_encoder_share"] == round(0.1 / 0.5, 4)
    assert found["predicted_seconds"] == 0.5 and found["bound_share"] == round((plan.lower_bound_seconds + 0.1) / 2, 6)
    # without a price they leave no share of the peak
    assert "tflops" not in StepFigures(shape=TEXT, devices=2).step_figures(plan, 2.0, [4])
    assert [*StepFigures(shape=TEXT, devices=2).step_figures(plan, 2.0)] == ["tflops"]
    assert StepFigures(shape=None, devices=2).step_figures(plan, 2.0) == {}


def pace(tp: int = 0, vocabulary: int = slot_pace.LEAST_LOGITS // 4) -> SlotPaceTerm:
    """A term after the loss of a micro-batch of four targets, which took 20 ms."""

    def measure(batch: Any, hidden: Tensor, head: Any, *deeper: Tensor) -> Tensor:
        time.sleep(0.02)
        return hidden.sum() + len(deeper)

    world: Any = SimpleNamespace(coordinates=SimpleNamespace(tp=tp), device=torch.device("cpu"))
    model: Any = None
    term = SlotPaceTerm(world)
    passes = term.extend_passes(Passes(model=model, plan=model, world=world, backward=True, loss_fn=measure))
    batch: Any = SimpleNamespace(labels=np.array([1, 2, NO_TARGET, 3, 4]))
    assert passes.loss_fn(batch, torch.ones(3), SimpleNamespace(vocabulary=vocabulary), torch.ones(1)).item() == 4.0
    return term


def test_the_pace_of_a_slot_is_that_of_as_many_rows() -> None:
    term = pace()
    seconds, rows = term.sums()
    assert rows == 4.0 and 0.02 <= seconds < 2.0
    ratio = term.results([seconds + 2 * seconds, rows + 10])["slot_ratio"]
    assert ratio == pytest.approx(seconds / 4 / (2 * seconds / 10))
    small, single, second = pace(vocabulary=slot_pace.LEAST_LOGITS // 4 - 1), pace(), pace(tp=1)  # what has no ratio
    assert small.sums() == [0.0, 0.0] and small.results([1.0, 8.0]) == {"slot_ratio": None}
    assert single.results(single.sums()) == {"slot_ratio": None}, "there is no other slot"
    second.sums()
    assert second.results([1.0, 8.0]) == {"slot_ratio": None}
