"""Positions: tables that end, scaled rotary ones, and what depends on a document's own length, as in stock models.

Stock models see each document alone, anew. By length go frequencies of some rope types; chunks and temperature are
Llama 4's.
"""

import itertools
import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from longspan import (
    Group,
    Layout,
    LongspanError,
    MicroBatch,
    Plan,
    World,
    bind,
    plan_dynamic,
    plan_fixed,
    plan_padded,
    prepare,
    run_step,
)
from longspan.doctor.stock import compute_in_float64
from longspan.errors import ModelError
from longspan.model.exactness.check_model import check_model_on_this_rank
from longspan.model.exactness.small_copies import make_tiny_model
from longspan.model.execution import model_execution
from longspan.model.seams.call_rules import find_position_table
from longspan.model.seams.meta_pass import check_attention_calls
from longspan.model.seams.rope import replace_rotary_forwards, scale_rope
from longspan.model.seams.trial_shards import RecordedCall
from longspan.plan.shape.positions import has_no_positions, position_limit, smallest_scaling_factor
from longspan.testing import backend, run_ranks
from tests import parity
from tests.model.seams.test_mixers import here, small_config
from tests.model.stock import SIZES, Answer, answer, at_random, texts, tiny
from tests.versions import transformers_before

LENGTHS = (61, 40, 17, 9)  # beyond the 16 positions of the model
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}


def _config(**more: Any) -> PreTrainedConfig:
    return transformers.Qwen3Config(**SIZES | {"max_position_embeddings": 16, "tie_word_embeddings": True} | more)


def _scaled(kind: str) -> PreTrainedModel:
    return at_random(scale_rope(_config(), kind, 4.0))


def test_scaled_positions_are_exact_over_slots_and_over_stages() -> None:
    cases, documents = dict[str, parity.Case](), texts(LENGTHS)
    for kind, rope, home in (("yarn", YARN, Layout(2)), ("linear", LINEAR, Layout(2, pp=2))):
        stock = at_random(_config(rope_parameters=dict(rope), max_position_embeddings=64))
        plans = {"fixed": plan_fixed(LENGTHS, home, cp=home.slots)}
        cases[kind] = parity.Case(partial(_scaled, kind), home, plans, documents, answer(stock.train(), documents))
    parity.check(cases)


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_stock_transformers_reads_a_scaled_configuration_back(kind: str, tmp_path: Path) -> None:
    scaled = scale_rope(_config(), kind, 2.5)
    scaled.save_pretrained(tmp_path)
    again = transformers.AutoConfig.from_pretrained(tmp_path)
    assert again.rope_parameters == scaled.rope_parameters and position_limit(again) == 40
    assert json.loads((tmp_path / "config.json").read_text())["rope_parameters"]["rope_type"] == kind
    with pytest.raises(ModelError, match=rf"a rope scaling of its own \('{kind}', for documents of up to 40 tokens\)"):
        scale_rope(again, "yarn", 2.0)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 48,
    "long_factor": [2.0] * 48,
    "original_max_position_embeddings": 4096,
}
LIMITS: list[tuple[PreTrainedConfig, int | None]] = [
    (_config(), 16),
    (transformers.LlamaConfig(max_position_embeddings=131072, rope_parameters=dict(LLAMA3)), 131072),
    (transformers.LlamaConfig(max_position_embeddings=4096, rope_parameters=LINEAR | {"rope_type": "dynamic"}), 16384),
    (transformers.Phi3Config(max_position_embeddings=131072, rope_parameters=dict(LONGROPE)), 131072),
    (transformers.GPT2Config(n_positions=512), 512),
]


@pytest.mark.parametrize(("config", "limit"), LIMITS, ids=[f"{c.model_type} {n}" for c, n in LIMITS])
def test_the_limit_of_a_configuration_is_that_of_its_own_scaling(config: PreTrainedConfig, limit: int) -> None:
    assert position_limit(config) == limit == position_limit(config.to_dict())


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            transformers.LlamaConfig(max_position_embeddings=131072, rope_parameters=dict(LLAMA3)),
            "own .'llama3', for .* 131072 tokens",
        ),
        (transformers.GPT2Config(), "gpt2 cannot be scaled"),
        (transformers.Gemma3TextConfig(), "gemma3_text cannot be scaled"),
    ],
    ids=["llama3", "learnt", "one for each type of layer"],
)
def test_models_that_cannot_be_scaled_are_refused(config: PreTrainedConfig, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        scale_rope(config, "yarn", 2.0)


@pytest.mark.parametrize(("longest", "factor"), [(3, 1.0), (16, 1.0), (17, 1.25), (20, 1.25), (21, 1.5), (64, 4.0)])
def test_the_smallest_factor_is_in_quarters(longest: int, factor: float) -> None:
    assert smallest_scaling_factor(_config(), longest) == factor
    assert factor == 1.0 or (position_limit(scale_rope(_config(), "yarn", factor)) or 0) >= longest


# ---- hybrids whose attention has no positions

WITHOUT = {"nemotron_h": {}, "kimi_linear": {}, "granitemoehybrid": {}, "zamba2": {"use_mem_rope": False}}
WITH = {"bamba": {}, "granitemoehybrid": {"position_embedding_type": "rope"}, "zamba2": {}, "qwen3_next": {}}


@pytest.mark.parametrize(
    ("family", "changes", "left"),
    [(f, kinds[f], kinds is WITHOUT) for kinds in (WITHOUT, WITH) for f in here(tuple(kinds))],
)
def test_hybrids_without_positions_have_no_limit(family: str, changes: dict[str, Any], left: bool) -> None:
    config = small_config(family)
    config.update(changes)
    assert has_no_positions(config) == left == (position_limit(config) is None)
    model, ids = make_tiny_model(config, torch.float64).eval(), torch.arange(9)[None]
    seen = {"attention_mask": torch.ones_like(ids), "use_cache": False}  # or positions would mean packed documents
    with torch.no_grad():
        near, far = (model(input_ids=ids, position_ids=step * ids, **seen).logits for step in (1, 3))
    assert torch.equal(near, far) == left
    if left:
        with pytest.raises(ModelError, match=r"no rotary positions that 'yarn' could scale.*leave model.rope_scaling"):
            scale_rope(config, "yarn", 2.0)


_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "vocab_size": SIZES["vocab_size"]}
_NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
_BASE: dict[str, Any] = {
    name: value for name, value in SIZES.items() if name not in ("head_dim", "num_key_value_heads")
}
TABLES: dict[str, tuple[dict[str, Any], str | None]] = {
    "GPT2Config": (_GPT, "transformer.wpe"),
    "CTRLConfig": (_GPT | {"dff": 48}, "transformer.pos_encoding"),
    "BioGptConfig": (_BASE | {"max_position_embeddings": 16, "pad_token_id": 1}, "biogpt.embed_positions"),
    "BertGenerationConfig": (
        _BASE | {"max_position_embeddings": 16, "is_decoder": True},
        "bert.embeddings.position_embeddings",
    ),
    **(
        {}
        if transformers_before("5.24")  # whose GPT-J and CodeGen bypass transformers' interface of attention
        else {
            "GPTJConfig": (_GPT | {"rotary_dim": 4}, "transformer.rotary_emb.embed_positions"),
            "CodeGenConfig": (_GPT | {"rotary_dim": 4}, "transformer.rotary_emb.embed_positions"),
        }
    ),
    "LlamaConfig": (SIZES | {"max_position_embeddings": 16}, None),
}


@pytest.mark.parametrize("config_class", TABLES)
def test_tables_of_positions(config_class: str) -> None:
    values, name = TABLES[config_class]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config_class)(**values))
    table = find_position_table(model)
    assert table == (None if name is None else (type(model).__name__, name, 16))


TOO_LONG = (5, 17, 9)


def _run(rank: int) -> dict[str, str]:
    outcomes: dict[str, str] = {}
    with World(Layout(ranks=2), backend=backend(), timeout=60) as world:
        config = transformers.GPT2Config(**(_GPT | _NO_DROPOUT), bos_token_id=None, eos_token_id=None)
        padded = MicroBatch((Group((0, 1), (0, 1), (15, 3), pad_to=18),))
        plans = {
            "too long": plan_fixed(TOO_LONG, world.home, cp=1),
            "padded": Plan(2, (15, 3), (padded,), targets=16),
            "fits": plan_fixed((16, 4), world.home, cp=2),
        }
        models = {"GPT-2": prepare(transformers.GPT2LMHeadModel(config), world), "Llama": prepare(tiny("llama"), world)}
        for (name, model), (kind, plan) in itertools.product(models.items(), plans.items()):
            documents = [np.arange(length) for length in plan.lengths]
            try:
                outcomes[f"{name}, {kind}"] = f"{run_step(model, plan, documents, world).loss:.1f}"
            except LongspanError as refusal:
                outcomes[f"{name}, {kind}"] = f"{type(refusal).__name__}: {refusal}"
        shard = bind(plans["too long"].micro_batches[0], world).with_padding()
        ids = torch.zeros(1, shard.local_rows, dtype=torch.long, device=world.device)
        with pytest.raises(LongspanError) as caught:
            models["GPT-2"](input_ids=ids, position_ids=shard.position_ids[None], shard=shard)
        outcomes["a call"] = f"{type(caught.value).__name__}: {caught.value}"
    return outcomes


def test_documents_beyond_the_table_are_refused_on_every_rank() -> None:
    says = "ModelError: document 1 takes 17 rows, GPT2LMHeadModel knows 16 positions (transformer.wpe); use documents"
    for outcomes in run_ranks(_run, 2):
        assert says in outcomes["GPT-2, too long"] and says in outcomes["a call"]
        assert all(float(loss) > 0 for name, loss in outcomes.items() if "Llama" in name or "fits" in name), outcomes
        assert "ModelError: document 0 takes 18 rows (15 tokens, padded)" in outcomes["GPT-2, padded"]


# ---- frequencies, chunks and temperature by a document's own length and positions


BOTH_SIDES = (61, 17, 16, 9)  # on both sides of the 16 positions of training, and on their edge
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


def _config_by_length(family: str) -> PreTrainedConfig:
    name, more = FAMILIES[family]
    values = {key: dict(value) if isinstance(value, dict) else value for key, value in (SIZES | more).items()}
    return getattr(transformers, name)(**values)


def _model(family: str) -> PreTrainedModel:
    model = at_random(_config_by_length(family))
    if family.startswith("llama4"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for parameter in model.parameters():
                parameter.data.normal_(std=0.2)  # those of experts are not drawn by the class
    return model


@cache
def _exact(family: str) -> Answer:
    """Of stock transformers: a model for each document, for its frequencies stay as they grew."""
    targets = sum(BOTH_SIDES) - len(BOTH_SIDES)
    with compute_in_float64():
        parts = [answer(_model(family), [document], targets=targets) for document in texts(BOTH_SIDES)]
    gradients = {name: torch.stack([part.gradients[name] for part in parts]).sum(0) for name in parts[0].gradients}
    return Answer(sum(part.loss for part in parts), gradients, 0.0, [])


PLANS: dict[str, Callable[[Layout], Plan]] = {
    "p2p": lambda home: plan_fixed(BOTH_SIDES, home, cp=home.slots),
    "all_gather": lambda home: plan_fixed(BOTH_SIDES, home, cp=home.slots, cp_comm_type="all_gather"),
    "a2a": lambda home: plan_fixed(BOTH_SIDES, home, cp=home.slots, cp_comm_type="a2a"),
    "padded": lambda home: plan_padded(BOTH_SIDES, home, cp=home.slots),
    "dynamic": lambda home: plan_dynamic(BOTH_SIDES, home, max_tokens_per_slot=48),
}
ANY = ("p2p", "all_gather", "a2a", "padded")
Row = tuple[str, dict[str, int], dict[str, Any], tuple[str, ...]]  # a family, its home, how it is prepared, its plans
HOMES: dict[str, list[Row]] = {
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
    for family, axes, options, names in filter(lambda row: _is_here(row[0]), HOMES[table]):
        home = Layout(2, **axes)
        plans = {name: PLANS[name](home) for name in names}
        how: dict[str, Any] = {"options": options, "tried": "moshi" in family, "in_float64": True}
        model = partial(_model, family)
        cases[f"{family}, {axes}"] = parity.Case(model, home, plans, texts(BOTH_SIDES), _exact(family), **how)
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
