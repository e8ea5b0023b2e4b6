"""Stages of a pipeline: which layers go where, the model's own forward over them, names, tied copies, refusals."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, patch

import pytest
import torch
from torch.distributed.pipelining import PipelineStage
from transformers import AutoModelForCausalLM, GraniteConfig, LlamaConfig, LlamaModel, PreTrainedModel

from longspan import Layout, LongspanError, World, plan_fixed, prepare, run_step, save_model
from longspan.comm.watch import Watch
from longspan.errors import CommError, ModelError, PlanError
from longspan.model.parts import find_parts
from longspan.model.pipeline.pipeline import PipelineModel, _run_watched_schedule
from longspan.model.pipeline.schedules import PipelineSettings, ScheduledStage
from longspan.model.pipeline.stages import StageCopies, StageInput, cut_stages_of_position, refuse_inexact_stages
from longspan.plan.memory.model_numbers import stage_layers
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer
from tests import parity
from tests.model.deep import answer, deep
from tests.model.stock import SIZES, Answer, gradients_of, prepare_untried, texts, weights_of, worst

LENGTHS = (13, 1, 30, 7, 2, 18)

BALANCED = [(2, 2, (1, 1)), (4, 4, (1, 1, 1, 1)), (7, 3, (2, 3, 2)), (36, 4, (8, 9, 10, 9))]


@pytest.mark.parametrize(("layers", "stages", "counts"), BALANCED)
def test_layers_are_balanced_with_embedding_and_head(layers: int, stages: int, counts: tuple[int, ...]) -> None:
    parts = stage_layers(layers, stages)
    assert tuple(len(part) for part in parts) == counts
    assert [layer for part in parts for layer in part] == list(range(layers))


NO_PLAN: list[tuple[Callable[[], Any], str]] = [
    (lambda: stage_layers(4, 6), r"6 pipeline stages .* for 4 layers.*use at most 4 stages"),
    (lambda: PipelineSettings("zbv", 2, 2), "'zbv'; use 1f1b, zero_bubble"),
    (lambda: PipelineSettings("1f1b", 2, 0), "virtual_stages is 0"),
    (lambda: PipelineSettings("1f1b", 1, 2), "virtual_stages is 2 with pp 1"),
]


@pytest.mark.parametrize(("make", "says"), NO_PLAN)
def test_stages_and_schedules_that_are_refused(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        make()


ENOUGH = [
    ("1f1b", 1, 4, {1: 1, 5: 5}),
    ("1f1b", 2, 2, {1: 1, 3: 3, 4: 4, 5: 6, 7: 8}),
    ("zero_bubble", 1, 4, {1: 1, 7: 7, 8: 8, 9: 10, 13: 15}),
]


@pytest.mark.parametrize(("name", "vpp", "pp", "counts"), ENOUGH)
def test_interleaved_schedules_go_in_equal_rounds(name: str, vpp: int, pp: int, counts: dict[int, int]) -> None:
    assert {count: PipelineSettings(name, pp, vpp).round_up_micro_batches(count) for count in counts} == counts


def _granite() -> PreTrainedModel:
    """Its base model multiplies its embeddings before its layers: the first stage alone may."""
    config = GraniteConfig(**SIZES | {"num_hidden_layers": 4}, embedding_multiplier=12.0, logits_scaling=2.0)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).double()


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": lambda: deep("qwen3", torch.float64),
    "llama": lambda: deep("llama", torch.float64),
    "granite": _granite,
}


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_stages_one_after_another_are_the_model(family: str, count: int) -> None:
    full_model, ids = MODELS[family](), torch.arange(9)[None]
    shard: Any = SimpleNamespace(position_ids=ids[0])  # what the stock attention needs of one
    expected = full_model(input_ids=ids, position_ids=ids, use_cache=False).logits

    def make_logits(model: Any, arguments: Any) -> torch.Tensor:
        return model(**{name: value for name, value in arguments.items() if name != "shard"}).logits

    x, stage_names = ids, list[str]()
    for index in range(count):
        model = MODELS[family]()
        parts = find_parts(model)
        refuse_inexact_stages(model, parts)
        (stage,) = cut_stages_of_position(model, parts, stage_layers(4, count), count, index)
        freed = sum(p.numel() for p in model.parameters()) <= sum(p.numel() for p in stage.parameters())
        assert freed, "other parameters"
        x = stage(x, stage_input=StageInput(shard, ids, make_logits))
        stage_names += [name.removeprefix("model.") for name, _ in stage.named_parameters()]
    assert torch.equal(x, expected)
    names, tied = {name for name, _ in full_model.named_parameters()}, full_model.config.tie_word_embeddings
    assert set(stage_names) == names and len(stage_names) == len(names) + tied  # a tied embedding is held twice


class _Base(LlamaModel):
    """Llama's base model, and calls of its parts as other architectures have them."""

    first: Any = None

    def run(self, x: torch.Tensor, *layers: int, **more: Any) -> torch.Tensor:
        for i in layers:
            x = self.layers[i](x, **more)
        return x

    def forward(self, inputs_embeds: torch.Tensor, **_: Any) -> tuple[torch.Tensor]:  # pyright: ignore
        return (type(self).first(self, inputs_embeds),)


PARTS: dict[str, tuple[Any, str]] = {
    "norm before and after": (
        lambda base, x: base.norm(base.run(base.norm(x), 0, 1, 2, 3)),
        "calls norm 2 times in a forward pass from hidden states; pipeline stages call every part once: use pp 1",
    ),
    "a layer twice": (lambda base, x: base.norm(base.run(x, 0, 1, 1, 2, 3)), "calls layers.1 2 times"),
    "layers in another order": (
        lambda base, x: base.norm(base.run(x, 0, 2, 1, 3)),
        "calls layers.0, layers.2, layers.1, layers.3, norm; pipeline stages call layers.0, layers.1",
    ),
    "the first hidden states": (
        lambda base, x: base.norm(base.run(x, 0, 1, 2, 3, first=(x,))),
        "gives layers.1 hidden states from before the part ahead of it",
    ),
    "a scale": (lambda base, x: base.norm(2 * base.run(x, 0, 1, 2, 3)), "changes hidden states between its layers"),
}


@pytest.mark.parametrize("case", PARTS)
def test_parts_that_stages_do_not_reproduce_are_refused(case: str) -> None:
    model, (forward, says) = deep("llama", torch.float32), PARTS[case]
    model.model.__class__ = type("Base", (_Base,), {"first": forward})
    with pytest.raises(ModelError, match=f"LlamaForCausalLM {says}"):
        refuse_inexact_stages(model, find_parts(model))
    model.model.__class__ = type("Base", (_Base,), {"first": lambda base, x: base.norm(base.run(x, 0, 1, 2, 3))})
    refuse_inexact_stages(model, find_parts(model))


# Parameters by their first names, and stages of one layer.
SHARED: dict[str, tuple[Any, dict[str, tuple[int, ...]]]] = {
    "the last norm and one before": (
        lambda layers, norm: setattr(layers[2], "input_layernorm", norm),
        {"layers.2.input_layernorm.weight": (2, 3)},
    ),
    "a weight of two modules": (
        lambda layers, _: setattr(layers[3].mlp.gate_proj, "weight", layers[0].mlp.up_proj.weight),
        {"layers.0.mlp.up_proj.weight": (0, 3)},
    ),
}


@pytest.mark.parametrize("case", SHARED)
def test_parameters_that_stages_share_are_found(case: str) -> None:
    (change, expected), model = SHARED[case], deep("llama", torch.float32)
    change(model.model.layers, model.model.norm)
    (stage,) = cut_stages_of_position(model, find_parts(model), stage_layers(4, 4), 4, 3)
    assert {entry.names[0]: entry.stages for entry in stage.shared} == {
        f"model.{name}": holders for name, holders in expected.items()
    }
    copies = StageCopies(stage.shared, {3: stage.model}, 4, 3)
    assert len(copies.parameters_counted_elsewhere) == len(expected)


def test_modules_that_stages_share_in_part_and_two_copies_of_a_rank_are_refused() -> None:
    config = LlamaConfig(**SIZES | {"num_hidden_layers": 4}, tie_word_embeddings=False, mlp_bias=True)
    model = AutoModelForCausalLM.from_config(config)
    layers, parts = model.model.layers, find_parts(model)
    layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    assert len(cut_stages_of_position(model, parts, stage_layers(4, 2), 2, 0)) == 1
    layers[3].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    says = r"layers.3.mlp.up_proj.weight is model.layers.0.* of another .*, and model.layers.3.mlp.up_proj.bias is a"
    with pytest.raises(ModelError, match=says):
        cut_stages_of_position(model, parts, stage_layers(4, 2), 2, 1)
    layers[2].mlp.up_proj = layers[0].mlp.up_proj
    says = r"layers.0.mlp.up_proj.weight is on the pipeline stages 0, 1, 2, 3 of 4, .* pp 2 has several; use vi"
    with pytest.raises(ModelError, match=says):
        cut_stages_of_position(model, parts, stage_layers(4, 4), 2, 0)


# ---- with ranks

PIPELINES = [("1f1b", 1, "qwen3"), ("zero_bubble", 2, "llama")]


def _pipelines(rank: int, folder: Path, exact: dict[str, Answer]) -> dict[str, dict[str, Any]]:
    results, documents = {}, texts(LENGTHS)
    with World(Layout(ranks=4, pp=2), backend=backend()) as world:
        for schedule, vpp, family in PIPELINES:
            schedules: Any = {"virtual_stages": vpp, "pipeline_schedule": schedule}
            model = prepare_untried(deep(family, torch.float64, layers=2 * vpp), world, **schedules)
            assert isinstance(model, PipelineModel)
            optimizer = build_optimizer(model, "adamw", 1e-2, 0.1)
            plan = plan_fixed(LENGTHS, world.home, cp=2, max_tokens_per_slot=20)
            logits = parity.logit_error(model, plan, documents, world, exact[family].logits)
            run_step(model, plan, documents, world, optimizer, max_grad_norm=0.5)
            weights, named = weights_of(model), cast(Any, model.named_parameters(remove_duplicate=False))
            save_model(model, folder / family, world)
            results[family] = {
                "logits": logits,
                "weights": weights,
                "state": set(model.state_dict()),
                "tied": [x.detach().to_local().cpu() for name, x in named if name == "lm_head.weight"],
            }
    return results


def test_names_logits_and_saved_folders_are_those_of_the_whole_model(tmp_path: Path) -> None:
    stock = {family: deep(family, torch.float64, layers=2 * vpp) for _, vpp, family in PIPELINES}
    exact = {family: answer(model, texts(LENGTHS)) for family, model in stock.items()}
    answers = run_ranks(_pipelines, 4, tmp_path, exact)
    for family, model in stock.items():
        results = [result[family] for result in answers]
        loaded = weights_of(AutoModelForCausalLM.from_pretrained(tmp_path / family, dtype=torch.float64))
        weights = [result["weights"] for result in results]
        assert all(worst(some, {name: loaded[name] for name in some}) == 0 for some in weights), family
        assert all(result["logits"] < 1e-12 for result in results), family
        assert set[str]().union(*weights) == {*loaded}, family
        assert set[str]().union(*(result["state"] for result in results)) == {*model.state_dict()}, family
        # the shards of slot 0 and of slot 1, on the first and on the last stage, bit by bit after a step of AdamW
        copies = [result["tied"] for result in results]
        assert family == "llama" or all(torch.equal(copies[slot][0], copies[2 + slot][0]) for slot in (0, 1))


def _refused(rank: int) -> None:
    def llama() -> PreTrainedModel:
        return deep("llama", torch.float32)

    plan, documents, shared = plan_fixed((9,), Layout(ranks=2, pp=2), cp=1), texts((9,)), llama()
    shared.model.layers[2].mlp = shared.model.layers[1].mlp
    with World(Layout(ranks=2, pp=2), backend=backend(), timeout=60) as world:
        with pytest.raises(PlanError, match=r"6 pipeline stages .* for 4 layers"):
            prepare(llama(), world, virtual_stages=3)
        with pytest.raises(ModelError, match="layers that share parameters are not sharded"):
            prepare(shared, world)
        with pytest.raises(LongspanError, match="pp 2, but Linear is not cut into stages"):
            run_step(torch.nn.Linear(2, 2), plan, documents, world)
        zero_bubble = prepare_untried(llama(), world, pipeline_schedule="zero_bubble")
        before = run_step(zero_bubble, plan, documents, world).grad_norm
        zero_bubble.zero_grad()
        boom = Mock(side_effect=CommError("boom"))
        # torch 2.15 reduces in two parts
        reduces = (
            "start_gradient_reduction" if hasattr(ScheduledStage, "start_gradient_reduction") else "perform_reduce_grad"
        )
        with patch.object(ScheduledStage, reduces, boom), pytest.raises(CommError, match="boom"):
            run_step(zero_bubble, plan, documents, world)
        zero_bubble.zero_grad()
        assert run_step(zero_bubble, plan, documents, world).grad_norm == before
        assert not gradients_of(prepare(llama(), world))
    descending, says = Layout(ranks=(1, 0), pp=2), r"\(1, 0\) descend along its pipeline stages"
    with World(descending, backend=backend(), timeout=60) as world, pytest.raises(LongspanError, match=says):
        prepare(llama(), world)


def test_what_is_refused_on_every_rank() -> None:
    run_ranks(_refused, 2)  # on some ranks alone, the others would wait


def test_hidden_states_of_another_type_are_refused_before_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    stage: Any = object.__new__(ScheduledStage)
    stage.stage_index, stage.num_stages, stage.inputs = 0, 2, [SimpleNamespace(ids=None)]
    stage._row, made = torch.zeros(1, 1, 8), [torch.zeros(1, 3, 8), torch.zeros(1, 3, 8, dtype=torch.float64)]
    monkeypatch.setattr(ScheduledStage, "_count_rows", lambda *_: 3)
    monkeypatch.setattr(PipelineStage, "forward_one_chunk", lambda *_, **__: made.pop(0))
    assert stage.forward_one_chunk(0, ()).dtype == torch.float32
    with pytest.raises(
        ModelError, match=r"stage 0 made hidden states \(1, 3, 8\) of torch.float64, the next .*float32"
    ):
        stage.forward_one_chunk(0, ())


def _chained(*errors: Exception) -> Exception:
    for outer, inner in pairwise(errors):
        outer.__cause__ = inner
    return errors[0]


CLOSED, RUN = "gloo: connection closed", "[Stage 1] failed to run forward"
WRAPPED = [  # what torch's schedule raises, and what comes out: what the model itself chains stays
    (_chained(RuntimeError(RUN), RuntimeError("in stage 1: 3"), ValueError("rows do not fit")), ValueError),
    (_chained(RuntimeError(RUN), ValueError("rows do not fit"), KeyError("rows")), ValueError),
    (_chained(RuntimeError(RUN), RuntimeError(CLOSED)), CommError),
    (RuntimeError(CLOSED), CommError),
]


@pytest.mark.parametrize(("error", "expected"), WRAPPED)
def test_no_error_of_a_schedule_is_lost(error: Exception, expected: type) -> None:
    channels = SimpleNamespace(pipeline=SimpleNamespace(ranks=(0,)))
    world: Any = SimpleNamespace(watch=Watch(0, (0,), 60.0, None), channels=channels)

    def step() -> None:
        raise error from error.__cause__

    with pytest.raises(expected, match="rows do not fit" if expected is ValueError else CLOSED):
        _run_watched_schedule(step, world)
