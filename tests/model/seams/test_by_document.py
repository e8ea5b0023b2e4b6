"""What depends on a document's own length and positions: as a stock model that sees each document alone, anew.

Frequencies of rope types that go by length; chunks and temperature of Llama 4.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from longspan import Layout, Plan, World, plan_dynamic, plan_fixed, plan_padded, prepare, run_step
from longspan.doctor.stock import compute_in_float64
from longspan.errors import ModelError
from longspan.model.exactness.check_model import check_model_on_this_rank
from longspan.model.execution import model_execution
from longspan.model.seams.meta_pass import check_attention_calls
from longspan.model.seams.rope import replace_rotary_forwards
from longspan.model.seams.trial_shards import RecordedCall
from tests import parity
from tests.model.stock import SIZES, Answer, answer, at_random, texts
from tests.versions import transformers_before

LENGTHS = (61, 17, 16, 9)  # on both sides of the 16 positions of training, and on their edge
LIMIT = {"original_max_position_embeddings": 16}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, **LIMIT}
LONG |= {"short_factor": [1.0, 1.1, 1.3, 1.4], "long_factor": [2.0, 3.0, 5.0, 9.0]}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
CHUNK = 12  # cut by ranks, and cutting documents
LLAMA4 = {"intermediate_size_mlp": 48, "attention_chunk_size": CHUNK, "floor_scale": 4, "attn_scale": 0.5}
LLAMA4 |= {"no_rope_layers": [1, 0], "num_experts_per_tok": 1, "num_local_experts": 4, "moe_layers": []}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3 longrope": ("Phi3Config", {"rope_parameters": LONG, "max_position_embeddings": 64} | LIMIT),
    "llama longrope": ("LlamaConfig", {"rope_parameters": LONG, "max_position_embeddings": 64}),
    "llama dynamic": ("LlamaConfig", {"rope_parameters": DYNAMIC, "max_position_embeddings": 16}),
    "gemma3 longrope": (  # a kind of frequencies for each type of layer
        "Gemma3TextConfig",
        {"rope_parameters": {"full_attention": LONG, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}
        | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7, "query_pre_attn_scalar": 8},
    ),
    "moshi dynamic": (  # a rotary module inside each layer
        "MoshiConfig",
        {"rope_parameters": DYNAMIC, "max_position_embeddings": 16, "ffn_dim": 48, "audio_vocab_size": 32}
        | {"num_codebooks": 2, "audio_encoder_config": {"model_type": "mimi"}},
    ),
    "hunyuan alpha": (
        "HunYuanDenseV1Config",
        {"rope_parameters": DYNAMIC | {"factor": 1.0, "alpha": 1000.0}, "max_position_embeddings": 16},
    ),
    "llama4": ("Llama4TextConfig", LLAMA4),
    "llama4 experts": ("Llama4TextConfig", LLAMA4 | {"moe_layers": [1]}),
}


def _is_here(family: str) -> bool:
    """Moshi hands no keywords down to its layers before 5.21."""
    older = family == "moshi dynamic" and transformers_before("5.21")
    return hasattr(transformers, FAMILIES[family][0]) and not older


def _config(family: str) -> PreTrainedConfig:
    name, more = FAMILIES[family]
    values = {key: dict(value) if isinstance(value, dict) else value for key, value in (SIZES | more).items()}
    return getattr(transformers, name)(**values)


def _model(family: str) -> PreTrainedModel:
    model = at_random(_config(family))
    if family.startswith("llama4"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for parameter in model.parameters():
                parameter.data.normal_(std=0.2)  # those of experts are not drawn by the class
    return model


@cache
def _exact(family: str) -> Answer:
    """Of stock transformers: a model for each document, for its frequencies stay as they grew."""
    targets = sum(LENGTHS) - len(LENGTHS)
    with compute_in_float64():
        parts = [answer(_model(family), [document], targets=targets) for document in texts(LENGTHS)]
    gradients = {name: torch.stack([part.gradients[name] for part in parts]).sum(0) for name in parts[0].gradients}
    return Answer(sum(part.loss for part in parts), gradients, 0.0, [])


PLANS: dict[str, Callable[[Layout], Plan]] = {
    "p2p": lambda home: plan_fixed(LENGTHS, home, cp=home.slots),
    "all_gather": lambda home: plan_fixed(LENGTHS, home, cp=home.slots, cp_comm_type="all_gather"),
    "a2a": lambda home: plan_fixed(LENGTHS, home, cp=home.slots, cp_comm_type="a2a"),
    "padded": lambda home: plan_padded(LENGTHS, home, cp=home.slots),
    "dynamic": lambda home: plan_dynamic(LENGTHS, home, max_tokens_per_slot=48),
}
ANY = ("p2p", "all_gather", "a2a", "padded")
Row = tuple[str, dict[str, int], dict[str, Any], tuple[str, ...]]  # a family, its home, how it is prepared, its plans
TABLES: dict[str, list[Row]] = {
    "few": [  # each kind of type, a module in each layer, chunks, experts
        ("phi3 longrope", {}, {"activation_checkpointing": True}, ("padded",)),
        ("moshi dynamic", {}, {"activation_checkpointing": True}, ("a2a",)),
        ("llama4 experts", {}, {"activation_checkpointing": "selective"}, ("dynamic",)),
        ("llama longrope", {"tp": 2}, {}, ("p2p",)),
        ("llama dynamic", {"pp": 2}, {"activation_checkpointing": "selective"}, ("p2p",)),
    ],
    "others": [
        *((family, {}, {}, ANY) for family in ("gemma3 longrope", "hunyuan alpha")),
        *(("llama4", axes, {}, ("p2p",)) for axes in ({"tp": 2}, {"pp": 2})),
    ],
}


@pytest.mark.parametrize("table", ["few", pytest.param("others", marks=pytest.mark.whole)])
def test_every_document_has_the_frequencies_and_chunks_of_its_own_length(table: str) -> None:
    cases = dict[str, parity.Case]()
    for family, axes, options, names in filter(lambda row: _is_here(row[0]), TABLES[table]):
        home = Layout(2, **axes)
        plans = {name: PLANS[name](home) for name in names}
        how: dict[str, Any] = {"options": options, "tried": "moshi" in family, "in_float64": True}
        model = partial(_model, family)
        cases[f"{family}, {axes}"] = parity.Case(model, home, plans, texts(LENGTHS), _exact(family), **how)
    parity.check(cases)


# ---- modules as they are


def test_a_call_leaves_the_module_as_it_was_and_earlier_calls_do_not_matter(world: World) -> None:
    model = _model("llama dynamic")
    model(input_ids=torch.zeros(1, 61, dtype=torch.long))  # grown before: frequencies are those of 61 positions
    rotary: Any = model.model.rotary_emb
    model = prepare(model, world)
    before = {name: x.clone() for name, x in rotary.named_buffers()}
    plan = plan_fixed((40, 17), world.home, cp=1)
    loss = run_step(model, plan, texts((40, 17)), world, backward=False).loss
    again = prepare(_model("llama dynamic"), world)
    assert run_step(again, plan, texts((40, 17)), world, backward=False).loss == loss
    assert all(torch.equal(x, before[name]) for name, x in rotary.named_buffers())
    assert not hasattr(rotary, "_shard_of_call")


def test_a_rotary_module_that_gets_no_shard_is_an_error() -> None:
    model = _model("llama longrope")
    replace_rotary_forwards(model)
    with pytest.raises(ModelError, match=r"LlamaRotaryEmbedding chooses 'longrope' .* and got no shard: the module"):
        model(input_ids=torch.zeros(1, 8, dtype=torch.long))


def test_a_type_by_length_that_no_module_names_is_refused() -> None:
    model = _model("llama longrope")
    del model.model.rotary_emb.rope_type
    with pytest.raises(ModelError, match=r"rope type 'longrope' chooses .* no module of the model has a rope_type"):
        check_model_on_this_rank(model, ())


def test_a_prepared_model_says_its_chunks(world: World) -> None:
    calls = model_execution(prepare(_model("llama4"), world)).calls
    assert [call.mask.chunk for call in calls] == [CHUNK, None]


def test_chunked_layers_without_a_size_and_temperature_of_another_formula_are_refused() -> None:
    model = _model("llama4")
    del model.model.layers[1].self_attn.floor_scale
    with pytest.raises(ModelError, match=r"model.layers.1.self_attn scales queries .* without floor_scale"):
        check_model_on_this_rank(model, ())
    calls = [RecordedCall(layer.self_attn, True, None, ()) for layer in model.model.layers]
    with pytest.raises(
        ModelError, match=r"layers.0.self_attn is a chunked_attention layer, and its config has no atten"
    ):
        check_attention_calls(model, tuple(calls))
