"""What a step adds to its loss over documents that share prefixes equals the separate documents in one process: losses
of routers, depths of multi-token prediction, rotary frequencies by a document's length."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor

from longspan import Document, Layout, World, plan_fixed, run_step
from longspan.model.kinds import router_modules
from longspan.model.seams.call_rules import call_rules
from longspan.mtp import MtpLoss
from longspan.testing import backend, run_ranks
from longspan.train import RouterCoefficients, share_prefixes
from tests.model.deep import deep
from tests.model.experts.moe_models import router_losses
from tests.model.mtp.dense import WEIGHT, dense as dense_depths, with_depths
from tests.model.stock import REFERENCE, SIZES, error, gradients_of, prepare_untried, random_model
from tests.mutation import mutated
from tests.train.own_loss.dense import answer, rows_of, weighted
from tests.train.own_loss.test_families import TARGETS, casts_in_float64, documents_of

ROUTER = RouterCoefficients(balance=0.3, z=0.2)
LIMIT = 25  # documents have 11 to 33 tokens
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


class Wanted(NamedTuple):
    """Losses, and gradients of their sum with coefficients."""

    losses: tuple[float, ...]
    gradients: dict[str, Tensor]


def routed(family: str) -> Callable[[], Any]:
    return lambda: deep(family, torch.float64, 2)


def by_length(kind: Any, rope: dict[str, Any], **keys: Any) -> Callable[[], Any]:
    def make() -> Any:
        config = kind(**SIZES, **keys, rope_parameters={"rope_theta": 1e4, "factor": 4.0, **rope})
        return random_model(config, torch.float64)

    return make


MODELS: dict[str, Callable[[], Any]] = {
    "routers": routed("qwen3-moe"),
    "routers of gpt-oss": routed("gpt-oss"),
    "depths": lambda: with_depths("qwen3", 2),
    "depths of experts": lambda: with_depths("qwen3-moe", 1, layers=3),
    "longrope": by_length(
        transformers.Phi3Config, LONGROPE, original_max_position_embeddings=LIMIT, max_position_embeddings=4 * LIMIT
    ),
    "dynamic": by_length(transformers.LlamaConfig, {"rope_type": "dynamic"}, max_position_embeddings=LIMIT),
}
PREFIXES = {"dynamic": 2}  # of documents that have the same frequencies; of others 3


def documents(name: str) -> list[Document]:
    """Those of the table of losses; of depths a document's tokens have one weight."""
    if not name.startswith("depths"):
        return documents_of()
    return [Document(d.ids, labels=d.labels(), weights=1.0 + i) for i, d in enumerate(documents_of())]


@cache
def wanted(name: str) -> Wanted:
    whole = documents(name)
    model = MODELS[name]().to(REFERENCE)  # which imports its module
    with casts_in_float64():
        if name.startswith("depths"):
            masks = [document.labels() != -100 for document in whole]
            exact = dense_depths(model, [d.ids for d in whole], masks, [1.0 + i for i in range(len(whole))])
            return Wanted((exact.loss, *exact.mtp_losses), exact.gradients)
        if not name.startswith("routers"):
            exact = answer(model, rows_of(model, whole), weighted, TARGETS)
            return Wanted((exact.loss,), exact.gradients)
        logits: dict[str, list[Tensor]] = {name: [] for name in router_modules(model)}
        for path, router in router_modules(model).items():
            router.register_forward_hook(lambda _, __, out, path=path: logits[path].append(out[0]))
        loss = weighted(rows_of(model, whole)) / TARGETS
        layers = [torch.cat(layer) for layer in logits.values()]
        balance, z = router_losses(layers, model.config.num_experts_per_tok)
        (loss + ROUTER.balance * balance + ROUTER.z * z).backward()
        return Wanted((loss.item(), balance.item(), z.item()), gradients_of(model))


def errors_of(name: str, world: World, exact: Wanted, cp: int) -> float:
    stock = MODELS[name]()
    with casts_in_float64():
        model = prepare_untried(stock, world)
        whole = documents(name)
        depths = {"depths": 2, "depths of experts": 1}.get(name, 0)
        limits = call_rules(model).length_limits
        shared = share_prefixes(whole, least_rows=3, depths=depths, length_limits=limits)
        assert len(shared) - len(whole) == PREFIXES.get(name, 3), shared
        families = {"targets": shared.targets, "parents": shared.parents}
        plan = plan_fixed(shared.lengths, world.home, cp, max_tokens_per_slot=200 // cp, **families)
        mtp = MtpLoss(WEIGHT) if depths else None
        router = ROUTER if name.startswith("routers") else None
        result = run_step(model, plan, shared, world, mtp=mtp, router=router)
        losses = (result.loss, *(result.mtp_losses or ()), *((result.router or ()) if router else ()))
        gradients = gradients_of(model)
    worst = [error(gradients[n], gradient) for n, gradient in exact.gradients.items()]
    return max(*worst, *(abs(a / b - 1) for a, b in zip(losses, exact.losses, strict=True)))


Case = tuple[str, Layout, int]
OVER_RANKS = ("routers", "depths", "longrope")  # whose rows of one rank run with make test-all
CASES: list[Case] = [
    *((name, Layout(1), 1) for name in MODELS if name not in OVER_RANKS),
    *((name, Layout(2), 2) for name in OVER_RANKS),
]
MORE: list[Case] = [
    *((name, Layout(1), 1) for name in OVER_RANKS),
    *((name, Layout(2), 2) for name in ("routers of gpt-oss", "depths of experts", "dynamic")),
    ("routers", Layout(4, ep=2), 2),
    ("depths of experts", Layout(4, ep=2), 2),
    *((name, Layout(2, tp=2), 1) for name in OVER_RANKS),
    *((name, Layout(3), 3) for name in OVER_RANKS),
]


def compare(rank: int, cases: list[Case], exact: list[Wanted]) -> list[float]:
    found = list[float]()
    for (name, home, cp), values in zip(cases, exact, strict=True):
        with World(home, backend=backend(), timeout=60) as world:
            found.append(errors_of(name, world, values, cp))
    return found


def wrong_cases(ranks: int, cases: list[Case]) -> dict[str, float]:
    cases = [case for case in cases if len(case[1].ranks) == ranks]
    found = run_ranks(compare, ranks, cases, [wanted(name) for name, _, _ in cases], timeout=240)[0]
    return {str(case): worst for case, worst in zip(cases, found, strict=True) if not worst < 1e-12}


@pytest.mark.parametrize("ranks", [1, 2])
def test_terms_equal_those_of_separate_documents(ranks: int) -> None:
    assert wrong_cases(ranks, CASES) == {}


@pytest.mark.whole
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_more_terms_equal_those_of_separate_documents(ranks: int) -> None:
    assert wrong_cases(ranks, MORE) == {}


MUTATIONS = {
    "routers": ("model.experts.router", "row_gradients *= counts[:, None]", "pass"),
    "routers of gpt-oss": ("train.terms.step_terms", "inputs.plan.separate_tokens", "inputs.plan.tokens"),
    "depths": ("train.rows.read_rows", 'length + getattr(source, "ahead", 0)', "length"),
    "longrope": ("model.seams.rope", "group.longest_paths", "group.lengths"),
}


def errors_of_mutations(rank: int, exact: dict[str, Wanted]) -> dict[str, float]:
    errors = dict[str, float]()
    for name, change in MUTATIONS.items():
        with mutated(change), World(Layout(1), backend=backend()) as world:
            errors[name] = errors_of(name, world, exact[name], 1)
    return errors


def test_mutations_of_terms_are_noticed() -> None:
    (errors,) = run_ranks(errors_of_mutations, 1, {name: wanted(name) for name in MUTATIONS})
    assert min(errors.values()) > 1e-6, errors
