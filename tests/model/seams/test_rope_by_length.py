"""Rope types whose frequencies depend on a document's length: as a stock model that sees each document alone, anew."""

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel

from longspan import Layout, World, plan_fixed, plan_padded, prepare, run_step
from longspan.errors import ModelError
from longspan.model.exactness.check_model import refuse_unsupported
from longspan.model.seams.rope import choose_frequencies_by_document
from longspan.plan import Plan
from longspan.testing import run_ranks
from tests.model.stock import SIZES, at_random, error, gradients_of, texts
from tests.mutation import each_mutated
from tests.versions import transformers_before

LENGTHS = (61, 17, 40, 16, 9)  # on both sides of the 16 positions of training, and on their edge
LIMIT = {"original_max_position_embeddings": 16}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, **LIMIT}
LONG |= {"short_factor": [1.0, 1.1, 1.3, 1.4], "long_factor": [2.0, 3.0, 5.0, 9.0]}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
MLA = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 6}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3 longrope": ("Phi3Config", {"rope_parameters": LONG, "max_position_embeddings": 64} | LIMIT),
    "minicpm3 longrope": (
        "MiniCPM3Config",
        {"rope_parameters": LONG, "max_position_embeddings": 64, "head_dim": None, "num_key_value_heads": 4} | MLA,
    ),
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
}


def _config(family: str) -> PreTrainedConfig:
    name, more = FAMILIES[family]
    config_class = getattr(transformers, name, None)
    if config_class is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    if family.startswith("moshi") and transformers_before("5.21"):
        pytest.skip("Moshi hands no keywords down to its layers before transformers 5.21")
    if family.startswith("minicpm3") and transformers_before("5.23"):
        pytest.skip("MiniCPM3 knows the scales of YaRN alone in transformers 5.17")
    sizes = {key: value for key, value in (SIZES | more).items() if value is not None or key.endswith("_id")}
    return config_class(**{key: dict(value) if isinstance(value, dict) else value for key, value in sizes.items()})


def _model(family: str) -> PreTrainedModel:
    return at_random(_config(family))


def _dense(family: str) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of stock transformers: a model for each document, for its frequencies stay as they grew."""
    total, gradients = 0.0, dict[str, Tensor]()
    for document in texts(LENGTHS):
        model, ids = _model(family), torch.from_numpy(document)
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        loss = F.cross_entropy(logits[:-1], ids[1:], reduction="sum") / (sum(LENGTHS) - len(LENGTHS))
        loss.backward()
        total += loss.item()
        gradients = {name: gradients.get(name, 0) + x for name, x in gradients_of(model).items()}
    return total, gradients


def _plans(home: Layout) -> dict[str, Plan]:
    """By name; those of two degrees are of the same ranks and weights."""
    fixed = partial(plan_fixed, LENGTHS, home)
    if home.tp * home.pp > 1:
        return {"p2p": fixed(cp=home.slots), "padded": plan_padded(LENGTHS, home, cp=2)}
    plans = {"p2p": fixed(cp=home.slots), "all_gather": fixed(cp=home.slots, cp_comm_type="all_gather")}
    if home.slots % 2 == 0:
        plans |= {"a2a": fixed(cp=2, cp_comm_type="a2a"), "padded": plan_padded(LENGTHS, home, cp=2)}
    return plans


def _sharded(
    rank: int, family: str, axes: dict[str, int], more: dict[str, Any]
) -> dict[str, tuple[float, dict[str, Tensor]]]:
    with World(Layout(**axes)) as world:
        model, steps = prepare(_model(family), world, **more), {}
        for name, plan in _plans(world.home).items():
            model.zero_grad()
            steps[name] = run_step(model, plan, texts(LENGTHS), world).loss, gradients_of(model)
        return steps


HOMES = [
    ("phi3 longrope", {"ranks": 2}, {"activation_checkpointing": True}),
    ("minicpm3 longrope", {"ranks": 3}, {}),
    ("llama longrope", {"ranks": 4, "tp": 2}, {}),
    ("llama dynamic", {"ranks": 4, "pp": 2}, {"activation_checkpointing": "selective"}),
    ("llama dynamic", {"ranks": 4}, {}),
    ("gemma3 longrope", {"ranks": 2}, {}),
    ("moshi dynamic", {"ranks": 2}, {"activation_checkpointing": True}),
    ("hunyuan alpha", {"ranks": 2}, {}),
]
IN_CI = (0, 2, 3, 6)  # each kind of type, tp, stages and a module in each layer


@pytest.mark.parametrize(
    ("family", "axes", "more"),
    [
        pytest.param(family, axes, more, id=f"{family} {axes}", marks=[] if index in IN_CI else pytest.mark.whole)
        for index, (family, axes, more) in enumerate(HOMES)
    ],
)
def test_every_document_has_the_frequencies_of_its_own_length(
    family: str, axes: dict[str, int], more: dict[str, Any]
) -> None:
    loss, gradients = _dense(family)
    for steps in run_ranks(_sharded, axes["ranks"], family, axes, more):
        for name, (found_loss, found) in steps.items():
            assert abs(found_loss - loss) <= 1e-12 * loss, name
            assert found, name
            for key, gradient in found.items():
                in_float32 = "norm" in key and family.startswith(("gemma3", "moshi"))  # as these norms sum it
                assert error(gradient, gradients[key]) <= (1e-6 if in_float32 else 1e-12), (name, key)


# ---- what would be noticed

MUTATIONS = {
    "by the longest of its group": (
        "np.asarray(shard_part.group.lengths, dtype=np.int64)[segments.document]",
        "np.full(len(segments), max(shard_part.group.lengths))",
    ),
    "by the shortest": ("return np.where(lengths > limit, limit + 1, limit)", "return np.full_like(lengths, limit)"),
    "long at the limit": ("lengths > limit", "lengths >= limit"),
    "rows of one length as they come": (".index_select(1, place)", ""),
}


def _losses(rank: int) -> dict[str, float]:
    """Of a step by what is wrong."""
    losses = dict[str, float]()
    with World(Layout(ranks=2)) as world:
        model = prepare(_model("phi3 longrope"), world)
        plan = plan_fixed(LENGTHS, world.home, cp=2)
        for name in each_mutated({name: ("model.seams.rope", *terms) for name, terms in MUTATIONS.items()}):
            losses[name] = run_step(model, plan, texts(LENGTHS), world, backward=False).loss
    return losses


def test_a_length_that_is_not_the_documents_own_is_noticed() -> None:
    (losses, _) = run_ranks(_losses, 2)
    exact = losses.pop("nothing")
    assert all(abs(wrong - exact) > 1e-6 * exact for wrong in losses.values()), losses


# ---- modules as they are


def test_a_call_leaves_the_module_as_it_was_and_earlier_calls_do_not_matter() -> None:
    with World(Layout(ranks=1)) as world:
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
    choose_frequencies_by_document(model)
    with pytest.raises(ModelError, match=r"LlamaRotaryEmbedding chooses 'longrope' .* and got no shard: the module"):
        model(input_ids=torch.zeros(1, 8, dtype=torch.long))


def test_a_type_by_length_that_no_module_names_is_refused() -> None:
    model = _model("llama longrope")
    del model.model.rotary_emb.rope_type
    with pytest.raises(ModelError, match=r"rope type 'longrope' chooses .* no module of the model has a rope_type"):
        refuse_unsupported(model)
