"""Entropy and other numbers of distributions: by definition, as TRL has them, and when a loss may read them."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GraniteConfig

from longspan import Document, Layout, World, plan_fixed, prepare, run_step, token_log_probs
from longspan.errors import CommError, LossError
from longspan.testing import run_ranks
from longspan.train.terms.token_loss import DISTRIBUTION_VALUES, distribution_values
from tests.model.deep import deep
from tests.model.stock import SIZES, texts

DOCUMENTS = [Document(ids, loss_mask=np.arange(len(ids)) % 3 > 0) for ids in texts((17, 5, 9))]
LENGTHS, TARGETS = [len(d) for d in DOCUMENTS], sum(d.targets for d in DOCUMENTS)


def test_by_definition_with_tokens_that_cannot_come_and_equal_logits() -> None:
    logits = torch.tensor([[1.0, 1.0, -torch.inf], [0.0, 2.0, 1.0]], dtype=torch.bfloat16)
    names = ("entropy", "top1", "log_sum_sq_probs")
    values = distribution_values(logits, torch.tensor([1, 1]), names)
    p = torch.tensor([[0.5, 0.5, 0.0], *logits[1:].double().softmax(-1).tolist()])
    assert values.dtype == torch.float32 and values.shape == (3, 2)
    assert torch.allclose(values[0], torch.special.entr(p).sum(-1))
    assert values[1].tolist() == [0, 1]  # of two equal tokens the first is the likeliest
    assert torch.allclose(values[2], (p**2).sum(-1).log())
    assert distribution_values(logits[:0], torch.zeros(0, dtype=torch.long), names).shape == (3, 0)


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(**SIZES, final_logit_softcapping=0.5, sliding_window=4, hidden_activation="gelu"),
        GraniteConfig(**SIZES, logits_scaling=16.0),
    ],
    ids=["a soft cap", "a scale"],
)
def test_as_trl_defines_them(config: Any) -> None:
    utils = pytest.importorskip("trl.trainer.utils")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.get_output_embeddings().weight.data *= 30  # else a cap changes nothing
    with World(Layout(1), backend="gloo") as world:
        prepared = prepare(deepcopy(model), world, probe=False)
        plan = plan_fixed(LENGTHS, world.home, cp=1, targets=TARGETS)
        values = token_log_probs(prepared, plan, DOCUMENTS, world, also=DISTRIBUTION_VALUES)
    names = ("log_probs", "entropy", "is_top1", "mean_logits", "log_sum_sq_probs")
    utils.add_fused_lm_head(model, outputs=names)
    for d, document in enumerate(DOCUMENTS):
        ids, labels = (torch.from_numpy(x)[None] for x in (document.ids, document.labels()))
        with torch.no_grad():
            stock = model(input_ids=ids, labels=labels, fused_lm_head=True)
        ours = [values.of(d), *(values.value(name, d) for name in DISTRIBUTION_VALUES)]
        for name, own in zip(names, ours, strict=True):
            assert np.allclose(own[1:], getattr(stock, name)[0].double().numpy(), rtol=1e-5, atol=1e-5), name
    assert values.of(0).std() > 0.1  # the rows differ


def refuse(rank: int) -> list[str]:
    """What ranks say of names that differ, and of numbers that are read too late."""
    said, kept = list[str](), list[Any]()

    def keep(log_probs: torch.Tensor, at: Any) -> torch.Tensor:
        assert not at.entropy.requires_grad and at.entropy is at.entropy
        kept.append(at)
        return -log_probs

    with World(Layout(2), backend="gloo") as world:
        model = prepare(deep("qwen3", torch.float64, 1), world, probe=False)
        plan = plan_fixed(LENGTHS, world.home, cp=2, targets=TARGETS)
        for names in (["entropy"] if rank else [], ["entropy", "kl"], "entropy"):
            with pytest.raises((CommError, LossError)) as error:
                token_log_probs(model, plan, DOCUMENTS, world, also=names)
            said.append(str(error.value))
        run_step(model, plan, DOCUMENTS, world, loss=keep)
        assert kept[0].entropy.shape == kept[0].position.shape
        for number in (lambda: kept[0].top1, lambda: token_log_probs(model, plan, DOCUMENTS, world).value("top1", 0)):
            with pytest.raises(LossError) as error:
                number()
            said.append(str(error.value))
    return said


def test_refusals() -> None:
    first, second = run_ranks(refuse, 2)
    assert first == second
    for said, words in zip(first, (
        "different lists also= for step", "also has 'kl'; give a list of some of entropy", "also has 'entropy'; give a",
        "at.top1 is read after the loss has returned", "'top1' of tokens was not asked for (these were: none)",
    ), strict=True):  # fmt: skip
        assert words in said
