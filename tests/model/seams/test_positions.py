"""Tables of positions: which models have one, and documents beyond it refused on every rank, before the model runs."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from longspan.comm import World, bind
from longspan.errors import LongspanError
from longspan.layout import Layout
from longspan.model import prepare
from longspan.model.seams.call_rules import position_table
from longspan.plan import Group, MicroBatch, Plan, plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import run_step
from tests.model.stock import SIZES, VOCABULARY, tiny
from tests.versions import transformers_before

_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "vocab_size": VOCABULARY}
_NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
_BASE: dict[str, Any] = {
    name: value for name, value in SIZES.items() if name not in ("head_dim", "num_key_value_heads")
}
TABLES: dict[str, tuple[dict[str, Any], str | None]] = {
    "GPT2Config": (_GPT, "transformer.wpe"),
    "GPTBigCodeConfig": (_GPT, "transformer.wpe"),
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
    "GPTNeoXConfig": (_BASE | {"max_position_embeddings": 16}, None),
    "Gemma2Config": (SIZES | {"max_position_embeddings": 16}, None),
}


@pytest.mark.parametrize("config_class", TABLES)
def test_tables_of_positions(config_class: str) -> None:
    values, name = TABLES[config_class]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config_class)(**values))
    table = position_table(model)
    assert table == (None if name is None else (type(model).__name__, name, 16))


LENGTHS = (5, 17, 9)


def _plans(home: Layout) -> dict[str, tuple[tuple[int, ...], Plan]]:
    padded = MicroBatch((Group((0, 1), (0, 1), (15, 3), pad_to=18),))
    return {
        "too long": (LENGTHS, plan_fixed(LENGTHS, home, cp=1)),
        "padded": ((15, 3), Plan(home.slots, (15, 3), (padded,), targets=16)),
        "fits": ((16, 4), plan_fixed((16, 4), home, cp=2)),
    }


def _run(rank: int) -> dict[str, str]:
    refusals: dict[str, str] = {}
    with World(Layout(ranks=2), backend=backend(), timeout=60) as world:
        config = transformers.GPT2Config(**(_GPT | _NO_DROPOUT), bos_token_id=None, eos_token_id=None)
        models = {"GPT-2": prepare(transformers.GPT2LMHeadModel(config), world), "Llama": prepare(tiny("llama"), world)}
        for name, model in models.items():
            for kind, (lengths, plan) in _plans(world.home).items():
                documents = [np.arange(length) for length in lengths]
                try:
                    refusals[f"{name}, {kind}"] = f"{run_step(model, plan, documents, world).loss:.1f}"
                except LongspanError as refusal:
                    refusals[f"{name}, {kind}"] = f"{type(refusal).__name__}: {refusal}"
        shard = bind(plan_fixed(LENGTHS, world.home, cp=1).micro_batches[0], world).with_padding()
        ids = torch.zeros(1, shard.local_rows, dtype=torch.long, device=world.device)
        with pytest.raises(LongspanError) as caught:
            models["GPT-2"](input_ids=ids, position_ids=shard.position_ids[None], shard=shard)
        refusals["a call"] = f"{type(caught.value).__name__}: {caught.value}"
    return refusals


def test_documents_beyond_the_table_are_refused_on_every_rank() -> None:
    says = (
        "ModelError: document 1 takes 17 rows, GPT2LMHeadModel knows 16 positions (transformer.wpe); use documents of"
    )
    for refusals in run_ranks(_run, 2):
        assert says in refusals["GPT-2, too long"] and says in refusals["a call"]
        assert all(float(loss) > 0 for name, loss in refusals.items() if "Llama" in name or "fits" in name), refusals
        assert "ModelError: document 0 takes 18 rows (15 tokens, padded)" in refusals["GPT-2, padded"]
