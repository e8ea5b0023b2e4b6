"""Llama 4's text models: chunked layers, temperature by position; as the stock model that sees each document alone."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Llama4TextConfig, PreTrainedModel
from transformers.models.llama4 import modeling_llama4

from longspan import Layout, World, plan_dynamic, plan_fixed, prepare, run_step
from longspan.errors import ModelError
from longspan.model.exactness.check_model import refuse_unsupported
from longspan.model.execution import model_execution
from longspan.model.seams.attention_calls import RecordedCall
from longspan.model.seams.meta_pass import check_calls
from longspan.plan import Plan
from longspan.testing import run_ranks
from tests.model.stock import SIZES, dense_answer, gradients_of, texts, worst
from tests.mutation import each_mutated

LENGTHS = (61, 40, 17, 9)
CHUNK = 12  # cut by ranks, and cutting documents
LLAMA4 = {"intermediate_size_mlp": 48, "attention_chunk_size": CHUNK, "floor_scale": 4, "attn_scale": 0.5}
LLAMA4 |= {"no_rope_layers": [1, 0], "num_experts_per_tok": 1, "num_local_experts": 4}
KINDS: dict[str, dict[str, Any]] = {
    "dense": {"moe_layers": []},
    "experts": {"moe_layers": [1]},
    "no chunks": {"moe_layers": [], "layer_types": ["full_attention"] * 2, "no_rope_layers": [0, 0]},
}


def _model(kind: str) -> PreTrainedModel:
    config = Llama4TextConfig(**SIZES | LLAMA4 | KINDS[kind])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        for parameter in model.parameters():
            parameter.data.normal_(std=0.2)  # those of experts are not drawn by the class
    for layer in model.model.layers:
        if hasattr(layer.self_attn, "qk_norm"):
            layer.self_attn.qk_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps, elementwise_affine=False)
    modeling_llama4.apply_rotary_emb = _rotated
    return model.double()


def _rotated(*tensors: Tensor) -> tuple[Tensor, ...]:
    """In float64: transformers' rotation and norm are in float32, where other numbers of heads round otherwise."""
    *inputs, turns = tensors
    pairs = [torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous()) for x in inputs]
    turned = (x * turns.to(torch.complex128)[:, :, None] for x in pairs)
    return tuple(torch.view_as_real(x).flatten(3).to(inputs[0].dtype) for x in turned)


def _plans(home: Layout) -> dict[str, Plan]:
    types = ("p2p", "all_gather") if home.slots % 2 else ("p2p", "all_gather", "a2a")
    types = types[:1] if home.tp * home.pp > 1 else types
    plans = {kind: plan_fixed(LENGTHS, home, cp=home.slots, cp_comm_type=kind) for kind in types}
    return plans | {"dynamic": plan_dynamic(LENGTHS, home, max_tokens_per_slot=48)}


def _sharded(
    rank: int, kind: str, axes: dict[str, int], more: dict[str, Any]
) -> dict[str, tuple[float, dict[str, Tensor]]]:
    with World(Layout(**axes)) as world:
        model, steps = prepare(_model(kind), world, **more), {}
        for name, plan in _plans(world.home).items():
            model.zero_grad()
            steps[name] = run_step(model, plan, texts(LENGTHS), world).loss, gradients_of(model)
        return steps


HOMES = [
    ("dense", {"ranks": 2}, {"activation_checkpointing": True}),
    ("experts", {"ranks": 3}, {"activation_checkpointing": "selective"}),
    ("no chunks", {"ranks": 4}, {}),
    ("dense", {"ranks": 4, "tp": 2}, {}),
    ("dense", {"ranks": 4, "pp": 2}, {}),
]
WHOLE = [HOMES[2], HOMES[3]]


@pytest.mark.parametrize(
    ("kind", "axes", "more"),
    [pytest.param(*row, id=f"{row[0]} {row[1]}", marks=[pytest.mark.whole] * (row in WHOLE)) for row in HOMES],
)
def test_chunks_and_temperature_are_those_of_each_document(
    kind: str, axes: dict[str, int], more: dict[str, Any]
) -> None:
    loss, gradients = dense_answer(_model(kind), texts(LENGTHS))
    for steps in run_ranks(_sharded, axes["ranks"], kind, axes, more):
        for name, (found_loss, found) in steps.items():
            assert abs(found_loss - loss) <= 1e-12 * loss, name
            assert found and worst(found, {key: gradients[key] for key in found}) <= 1e-12, name


MUTATIONS = {
    "temperature by local row": (
        "attention_calls",
        "(position_ids.float() + 1.0)",
        "(torch.arange(len(position_ids)).float() + 1.0)",
    ),
    "no temperature": ("attention_calls", "return (query * scales[:, None]).to(query.dtype)", "return query"),
    "no floor": ("attention_calls", "torch.floor(", "("),
    "no chunks": (
        "attention_calls",
        '"window": sliding_window, "chunk": chunk_size(module), "sinks"',
        '"window": sliding_window, "sinks"',
    ),
    "a window for chunks": (
        "attention_calls",
        '"window": sliding_window, "chunk": chunk_size(module), "sinks"',
        '"window": chunk_size(module), "sinks"',
    ),
}


def _losses(rank: int) -> dict[str, float]:
    """Of a step by what is wrong."""
    losses = dict[str, float]()
    with World(Layout(ranks=2)) as world:
        model = prepare(_model("dense"), world)
        plan = plan_fixed(LENGTHS, world.home, cp=2)
        for name in each_mutated({name: (f"model.seams.{file}", *terms) for name, (file, *terms) in MUTATIONS.items()}):
            losses[name] = run_step(model, plan, texts(LENGTHS), world, backward=False).loss
    return losses


def test_chunks_and_temperature_by_other_numbers_are_noticed() -> None:
    (losses, _) = run_ranks(_losses, 2)
    exact = losses.pop("nothing")
    assert all(abs(wrong - exact) > 1e-6 * exact for wrong in losses.values()), losses


def test_a_prepared_model_says_its_chunks() -> None:
    with World(Layout(ranks=1)) as world:
        calls = model_execution(prepare(_model("dense"), world)).calls
    assert [call.mask.chunk for call in calls] == [CHUNK, None]


def test_chunked_layers_without_a_size_and_temperature_of_another_formula_are_refused() -> None:
    model = _model("dense")
    del model.model.layers[1].self_attn.floor_scale
    with pytest.raises(ModelError, match=r"model.layers.1.self_attn scales queries .* without floor_scale"):
        refuse_unsupported(model)
    calls = [RecordedCall(layer.self_attn, True, None, False, ()) for layer in model.model.layers]
    with pytest.raises(
        ModelError, match=r"layers.0.self_attn is a chunked_attention layer, and its config has no atten"
    ):
        check_calls(model, tuple(calls))
