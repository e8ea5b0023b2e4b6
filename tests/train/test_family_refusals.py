"""What is not exact over documents that share prefixes is refused by name, before the first collective."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers

from longspan import (
    Document,
    Layout,
    World,
    attend,
    bind,
    evaluate,
    gather_documents,
    load_model,
    plan_fixed,
    run_step,
    token_log_probs,
)
from longspan.comm.control_group import ControlGroup
from longspan.errors import DataError, LossError, ModelError, PlanError
from longspan.model.seams.call_rules import CallRules
from longspan.mtp import MtpLoss
from longspan.plan.shape.sharing_rules import read_sharing_rules
from longspan.train import PlannerConfig, SharedDocuments, share_prefixes
from longspan.train.prefix_sharing import (
    _LOGGED_SHARED,
    _log_once,
    log_first_shared_prefixes,
    share_prefixes_where_faster,
)
from tests.model.deep import deep
from tests.model.lora.adapted import adapted
from tests.model.mtp.dense import with_depths
from tests.model.stock import SIZES, prepare_untried, random_model, texts


def shared_of(vocabulary: int = 61) -> SharedDocuments:
    prompt, *answers = texts((9, 4, 6))
    documents = [Document(np.append(prompt, a), loss_mask=[0] * 9 + [1] * len(a)) for a in answers]
    return share_prefixes(documents, least_rows=4)


def plan_of(shared: SharedDocuments, world: World) -> Any:
    return plan_fixed(shared.lengths, world.home, 1, targets=shared.targets, parents=shared.parents)


def gpt2() -> Any:
    drops = {"attn_pdrop": 0.1, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    config = transformers.GPT2Config(vocab_size=61, n_embd=16, n_layer=1, n_head=2, n_positions=64, **drops)
    return random_model(config, torch.float64)


MODELS: dict[str, tuple[Callable[[], Any], str, bool]] = {  # whether evaluation is refused too
    "indexer": (lambda: load_model(preset="deepseek-v32-tiny", vocab_size=61), "keys that an indexer chooses", True),
    "adapter": (lambda: adapted("qwen3", "every linear", lora_dropout=0.1), "dropout of an adapter's inputs", False),
    "dropout": (lambda: deep("qwen3", torch.float64, attention_dropout=0.1), "dropout of attention weights", False),
    "dropout by a module": (gpt2, "dropout of attention weights", False),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_are_refused_by_what_they_have(name: str) -> None:
    make, message, always = MODELS[name]
    with World(Layout(1)) as world:
        model = prepare_untried(make(), world)
        # of an adapter the configuration of its base knows nothing
        assert read_sharing_rules(model.config).against == (() if name == "adapter" else (message,))
        shared = shared_of()
        plan = plan_of(shared, world)
        with patch.object(ControlGroup, "compare_digests", side_effect=AssertionError("a collective")):
            with pytest.raises(ModelError, match=message):
                run_step(model, plan, shared, world)
            if always:
                with pytest.raises(ModelError, match=message):
                    token_log_probs(model, plan, shared, world)
        shard = bind(plan.micro_batches[0], world)
        ids = torch.zeros(1, shard.local_rows, dtype=torch.long)
        model.train(not always)
        with pytest.raises(ModelError, match=message):
            model(input_ids=ids, position_ids=shard.position_ids[None], shard=shard)
        if not always:
            token_log_probs(model, plan, shared, world)


def test_prefixes_that_end_too_late_for_depths_are_refused() -> None:
    with World(Layout(1)) as world:
        model = prepare_untried(with_depths("qwen3", 2), world)
        shared = shared_of()
        with (
            patch.object(ControlGroup, "compare_digests", side_effect=AssertionError("a collective")),
            pytest.raises(LossError, match=r"2 depths .* document 2, .* share_prefixes\(documents, depths=2\)"),
        ):
            run_step(model, plan_of(shared, world), shared, world, mtp=MtpLoss(0.1))
        assert run_step(model, plan_of(shared, world), shared, world).mtp_losses == ()


def test_families_of_two_rotary_frequencies_are_refused() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    limits = {"original_max_position_embeddings": 14, "max_position_embeddings": 64}
    config = transformers.Phi3Config(**SIZES, **limits, rope_parameters=rope | {"factor": 4.0})
    with World(Layout(1)) as world:
        model = prepare_untried(random_model(config, torch.float64), world)
        assert read_sharing_rules(config.to_dict()) == ((), model.call_rules.length_limits)
        shared = shared_of()
        with pytest.raises(ModelError, match=r"document 0 of 13 rows .* of up to 15 .* call share_prefixes\("):
            run_step(model, plan_of(shared, world), shared, world)


def test_where_nobody_asked_documents_are_separate_and_a_line_says_why(caplog: pytest.LogCaptureFixture) -> None:
    prompt, *answers = texts((300, 4, 6))
    documents = [Document(np.append(prompt, a), loss_mask=[0] * 300 + [1] * len(a)) for a in answers]
    lengths = tuple(map(len, documents))
    chunks = SimpleNamespace(call_rules=CallRules("Llama4", separate=("chunks of positions",)))
    plain = SimpleNamespace(call_rules=CallRules("Qwen3"))
    fixed = PlannerConfig.fixed(1)
    padded = replace(fixed, planner="padded")
    cases: list[tuple[Any, PlannerConfig, int]] = [
        (chunks, fixed, 1),
        (chunks, fixed, 1),  # the line stands once
        (plain, padded, 1),
        (plain, PlannerConfig.fixed(1, max_tokens_per_slot=310), 1),  # the family has 311 rows
        (plain, fixed, 2),  # a slot for each document
    ]
    _log_once.cache_clear()
    _LOGGED_SHARED.clear()
    for model, choice, ranks in cases:
        world: Any = SimpleNamespace(home=Layout(ranks), rank=0)
        same, plan = share_prefixes_where_faster(model, documents, lengths, choice, world, training=True, targets=10)
        assert same is documents and (plan.lengths, plan.parents, plan.targets) == (lengths, None, 10)
    world = SimpleNamespace(home=Layout(1), rank=0)
    for choice in (PlannerConfig.dynamic(), PlannerConfig.fixed(1, max_tokens_per_slot=311)):
        shared, plan = share_prefixes_where_faster(plain, documents, lengths, choice, world, training=True, targets=10)
        assert (len(shared), plan.parents, plan.targets) == (3, (2, 2, -1), 10)
        log_first_shared_prefixes(plan, world)
    share_prefixes_where_faster(chunks, documents[:1], lengths[:1], padded, world, training=True)
    begin = "documents that begin alike are computed whole, as "
    assert [record.getMessage().removeprefix(begin).split(" (")[0] for record in caplog.records] == [
        "Llama4 has chunks of positions",
        "planner 'padded' lays documents out alone",
        "max_tokens_per_slot lets a group hold 310 rows",
        "that is predicted to be faster",
        "2 documents in 1 prefix tree: 299 of 610 tokens are computed once for all that begin with them",  # once
    ]


def test_plans_and_documents_of_other_families_are_refused() -> None:
    with World(Layout(1)) as world:
        model = prepare_untried(deep("qwen3", torch.float64, 2), world)
        shared = shared_of()
        plan = plan_of(shared, world)
        alone = plan_fixed(shared.lengths, world.home, 1, targets=shared.targets)
        with pytest.raises(PlanError, match="document 0 continues document 2 and in the plan it continues none"):
            run_step(model, alone, shared, world)
        with pytest.raises(PlanError, match="document 0 continues none and in the plan it continues document 2"):
            run_step(model, plan, [Document(d.ids, labels=d.labels()) for d in shared], world)
        predicting = [*shared.documents[:2], Document(shared[2].ids)]
        counted = sum(document.targets for document in predicting)
        with pytest.raises(PlanError, match="document 2 predicts 7 tokens and other documents continue it"):
            more = plan_fixed(shared.lengths, world.home, 1, targets=counted, parents=shared.parents)
            run_step(model, more, predicting, world)
        with pytest.raises((DataError, PlanError), match=r"document 0 (has the parent|continues document) 2"):
            evaluate(model, shared, PlannerConfig.fixed(1), world)
        with pytest.raises(DataError, match="document 0 continues document 2"):
            gather_documents(shared, world)


def test_documents_beyond_a_table_of_positions_are_counted_with_their_prefix() -> None:
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, n_positions=14, vocab_size=61, bos_token_id=None,
        eos_token_id=None, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
    )  # fmt: skip
    with World(Layout(1)) as world:
        model = prepare_untried(random_model(config), world)
        shared = shared_of()
        with pytest.raises(ModelError, match=r"document 1 takes 15 rows, .* knows 14 positions"):
            run_step(model, plan_of(shared, world), shared, world)


def test_padding_rows_and_families_share_a_shard() -> None:
    with World(Layout(1)) as world:
        plan = plan_of(shared_of(), world)
        shard = bind(plan.micro_batches[0], world).with_padding(multiple=8)
        q = torch.randn(shard.local_rows, 2, 4, dtype=torch.float64)
        out = attend(q, q, q, shard)
        alone = attend(q[: plan.tokens], q[: plan.tokens], q[: plan.tokens], bind(plan.micro_batches[0], world))
        assert torch.equal(out[: plan.tokens], alone)
