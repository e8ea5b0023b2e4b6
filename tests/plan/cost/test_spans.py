"""Pairs of rows that see each other inside spans: FLOPs that torch counts, and what they add to a plan's seconds."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from longspan.layout import Layout
from longspan.layout.spans import Spans
from longspan.plan import Cost, plan_dynamic
from longspan.plan.cost.cost_changes import with_spans
from longspan.plan.cost.model_cost import cost_on_h200
from longspan.plan.cost.model_flops import later_pairs, model_flops
from longspan.plan.shape.model_shape import ModelShape
from tests.model.vision.models import config_of

RATES = {"tflops": 400.0, "attention_tflops": 500.0, "micro_batch_seconds": 0.0}


def test_a_document_that_is_one_span_takes_what_torch_counts_without_a_mask() -> None:
    config = config_of("gemma3")
    config.text_config.sliding_window, rows = 64, 11
    model = AutoModelForCausalLM.from_config(config.text_config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(rows)[None], use_cache=False).logits.sum().backward()
    shape = ModelShape.of(config)
    assert shape.span_layers == shape.layers == 4
    angles = sum(flops for name, of in counter.get_flop_counts().items() if "rotary" in name for flops in of.values())
    counted = counter.get_total_flops() - angles  # a product in transformers 5.17, which no plan counts
    assert model_flops(shape, [rows], spans=[rows]) == counted
    assert model_flops(shape, [rows, rows], spans=[rows]) < 2 * counted


def test_pairs_are_those_of_the_layout() -> None:
    runs = [(2, 6), (6, 7), (9, 20)]
    assert later_pairs(stop - start for start, stop in runs) == Spans.of({0: runs}, (0,), (30,)).pairs


def test_seconds_of_a_plan_grow_by_their_pairs() -> None:
    config, spans, lengths = config_of("gemma3"), [256] * 12, [4096] * 4
    plain = Cost.for_model(config, **RATES)
    cost = with_spans(plain, config, spans, sum(lengths))
    one, more = (plan_dynamic(lengths, Layout(1), cost=price).predicted_seconds for price in (plain, cost))
    pair = 14 * ModelShape.of(config).query_width / 500e12
    assert more - one == pytest.approx(4 * pair * later_pairs(spans), rel=1e-6)


def test_evaluations_and_other_models() -> None:
    gemma, qwen = config_of("gemma3"), config_of("qwen2.5-vl")
    cost = cost_on_h200(gemma)
    priced = with_spans(cost, gemma, [256], 4096)
    forward, plain = priced.forward_only().linear_seconds, cost.forward_only().linear_seconds
    assert forward - plain == pytest.approx((priced.linear_seconds - cost.linear_seconds) * 2 / 7)
    assert with_spans(cost_on_h200(qwen), qwen, [256], 4096) == cost_on_h200(qwen)
    assert with_spans(cost, {"model_type": "gemma3"}, [256], 4096) == cost  # says no sizes
    assert replace(priced, linear_seconds=cost.linear_seconds, forward=cost.forward) == cost
