"""Steps over documents that share prefixes equal the separate documents in one process, in float64: losses, gradients
and numbers of tokens."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from longspan import Document, DocumentLoss, Layout, World, load_model, plan_dynamic, plan_fixed, token_log_probs
from longspan.model.adapted_modules import unwrap_peft_model
from longspan.plan import Plan
from longspan.testing import backend, run_ranks
from longspan.train import MicroBatchLoss, SharedDocuments, share_prefixes
from tests.model.deep import deep
from tests.model.lora.adapted import adapted
from tests.model.seams.test_mixers import small_config
from tests.model.stock import REFERENCE, prepare_untried, random_model, tiny
from tests.mutation import mutated
from tests.train.own_loss.dense import (
    Answer,
    answer,
    by_document,
    loss_errors,
    micro_batch_loss,
    of_sets,
    own,
    pair_loss,
    policy_loss,
    rows_of,
    targets_of,
    token_error,
    values_of_tokens,
    weighted,
)


class _WideTorch:
    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float", "float32") else getattr(torch, name)


@contextmanager
def casts_in_float64() -> Iterator[None]:
    """Stock modules cast to float32, as norms do: then gradients of branches that are summed first round otherwise."""
    modules = [
        m for name, m in [*sys.modules.items()] if name.startswith("transformers.models.") and hasattr(m, "torch")
    ]
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(patch.object(module, "torch", _WideTorch()))
        stack.enter_context(patch.object(torch.Tensor, "float", torch.Tensor.double))
        yield


def documents_of(vocabulary: int = 61) -> list[Document]:
    """Two questions on one text with three and two answers, one of them twice and one of a single token, a text whose
    every token is a target, and one on its own."""
    draw = np.random.default_rng(0)
    text, first, second, whole, alone = (draw.integers(0, vocabulary, n) for n in (13, 5, 8, 11, 21))
    again = draw.integers(0, vocabulary, 6)
    parts = [(np.append(text, first), n) for n in (9, 1)] + [(np.append(text, second), n) for n in (4, 12)]
    pairs = [(prompt, draw.integers(0, vocabulary, n)) for prompt, n in parts]
    pairs.insert(1, (np.append(text, first), again))
    pairs += [(np.append(text, first), again), (alone, whole), (whole[:0], whole)]
    return _answers(draw, pairs)


def chain_of(vocabulary: int = 61) -> list[Document]:
    """Prompts that continue each other, so that prefixes are four generations, the first of one row; two equal answers,
    one of a token, and a prompt without one, of which one row is left."""
    draw = np.random.default_rng(1)
    text = draw.integers(0, vocabulary, 12)
    answers = [draw.integers(0, vocabulary, n) for n in (5, 3, 1, 4, 0)]
    prompts = [text[:n] for n in (2, 4, 7, 12, 12)]
    return _answers(draw, [*zip(prompts, answers, strict=True), (text, answers[3])])


def _answers(draw: np.random.Generator, pairs: list[tuple[np.ndarray, np.ndarray]]) -> list[Document]:
    return [
        Document(
            np.append(prompt, ids),
            loss_mask=np.append(np.zeros(len(prompt)), np.ones(len(ids))),
            weights=draw.random(len(prompt) + len(ids)),
            advantage=draw.normal(),
            old=-draw.random(len(prompt) + len(ids)) - 3.0,
        )
        for prompt, ids in pairs
    ]


DOCUMENTS = {"tree": documents_of, "chain": chain_of}
TARGETS = targets_of(documents_of())
SETS = ((0, 1), (2, 5, 6), (3, 4), (0, 7))
LOSSES: dict[str, Any] = {
    "weights": (weighted, None, TARGETS, None),
    "tokens": (own, policy_loss, 3.5, 3.5),
    "micro-batches": (by_document, MicroBatchLoss(micro_batch_loss, also=["entropy"]), 2.5, 2.5),
    "groups": (of_sets(SETS), DocumentLoss(pair_loss, SETS), len(SETS), None),
    "all documents": (of_sets([range(8)]), DocumentLoss(pair_loss), 8, 8),
}
ALSO = ("entropy", "top1")


def test_what_is_shared_here() -> None:
    shared = share_prefixes(documents_of(), least_rows=3)
    assert shared.parents == (9, 9, 9, 10, 10, 9, -1, -1, -1, 8, 8) and shared.targets == TARGETS
    assert shared.lengths[8:] == (13, 4, 7) and shared.prefix_lengths == (17, 17, 17, 20, 20, 17, 0, 0)
    chain = share_prefixes(chain_of(), least_rows=1)
    assert chain.lengths == (6, 4, 2, 5, 1, 5, 1, 2, 3, 5) and chain.parents == (6, 7, 8, 9, 9, 9, -1, 6, 7, 8)


def _plan(make: Any, degree: tuple[int, ...], rows: int, options: Any, home: Layout, shared: SharedDocuments) -> Plan:
    families = {"targets": shared.targets, "parents": shared.parents}
    return make(shared.lengths, home, *degree, max_tokens_per_slot=rows, **families, **options)


def fixed(cp: int, rows: int, **options: Any) -> Callable[[Layout, SharedDocuments], Plan]:
    return partial(_plan, plan_fixed, (cp,), rows, options)


def dynamic(rows: int, **options: Any) -> Callable[[Layout, SharedDocuments], Plan]:
    return partial(_plan, plan_dynamic, (), rows, options)


@dataclass(frozen=True)
class Case:
    home: Layout
    plan: Callable[[Layout, SharedDocuments], Plan] = field(compare=False)
    family: str = "qwen3"
    least: int = 3
    losses: tuple[str, ...] = ("weights",)
    options: tuple[tuple[str, Any], ...] = ()
    documents: str = "tree"

    def __str__(self) -> str:
        return f"{self.family}, {self.home}, {self.losses}, {self.options}, {self.documents}"


# Divisors of the others are numbers of the tree's.
OF_CHAIN: dict[str, Any] = {"documents": "chain", "least": 1, "losses": ("tokens", "micro-batches")}
NOT_FREE = ("weights", "tokens", "groups")
ONE = fixed(1, 200)
CASES = [
    Case(Layout(1), ONE, losses=tuple(LOSSES)),
    Case(Layout(1), fixed(1, 100), least=14),  # one generation, and several micro-batches
    *(Case(Layout(1), ONE, family) for family in ("deepseek-v3", "deep gpt-oss")),
    Case(Layout(2), fixed(2, 60), losses=("micro-batches", "groups")),
    Case(Layout(2, pp=2), fixed(1, 100), losses=("weights", "tokens")),
    Case(Layout(2), dynamic(55), "qwen3-next-tiny"),
    Case(Layout(4), fixed(4, 60, cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=2), "deep gpt-oss"),
    Case(Layout(4, ep=2), fixed(2, 60), "deep qwen3-moe"),
    Case(Layout(1), ONE, **OF_CHAIN),
]
FULL = (("activation_checkpointing", "full"),)
SELECTIVE = (("activation_checkpointing", "selective"),)
MORE = [
    *(Case(Layout(1), ONE, f"small {family}") for family in ("lfm2", "kimi_linear", "zamba2")),
    Case(Layout(2), fixed(2, 70, cp_comm_type="a2a"), options=SELECTIVE),
    Case(Layout(2), fixed(2, 70), "bamba-tiny", options=FULL),
    Case(Layout(2), dynamic(55), "deep gpt-oss", options=SELECTIVE),
    Case(Layout(2, tp=2), fixed(1, 200, row_multiple=2), options=(("sequence_parallel", True),)),
    *(Case(Layout(2, tp=2), ONE, family) for family in ("llama", "qwen3-next-tiny")),
    Case(Layout(2, pp=2), fixed(1, 100), "bamba-tiny", options=FULL),
    Case(Layout(2), fixed(2, 70, partition="contiguous"), "small lfm2"),
    Case(Layout(2), dynamic(40), **OF_CHAIN),
    Case(Layout(3), fixed(3, 40), **OF_CHAIN),
    Case(Layout(3), fixed(3, 60, cp_comm_type="all_gather"), "small lfm2"),
    Case(Layout(3), dynamic(32), "bamba-tiny"),
    Case(Layout(4), fixed(4, 40, partition="contiguous"), "qwen3-next-tiny", **OF_CHAIN),
    Case(Layout(4), fixed(4, 60, cp_comm_type="all_gather"), "deepseek-v3"),
    Case(Layout(4, pp=2), dynamic(60), "llama", losses=("weights", "tokens")),
    Case(Layout(4, tp=2), fixed(2, 60), "adapter", options=FULL),
    *(Case(Layout(1), ONE, family) for family in ("mistral", "deep qwen3-moe", "llama", "gpt-j", "apertus", "gemma2")),
    *(Case(Layout(1), ONE, family) for family in ("qwen3-next-tiny", "granite-hybrid-tiny", "bamba-tiny")),
    Case(Layout(1), ONE, options=(("activation_checkpointing", True),)),
    Case(Layout(2), fixed(2, 60), losses=tuple(LOSSES)),
    Case(Layout(2), fixed(2, 70, partition="contiguous", cp_comm_type="all_gather"), "gemma2"),
    Case(Layout(2), fixed(2, 70, cp_comm_type="a2a"), "deep gpt-oss"),
    Case(Layout(2), dynamic(55), losses=NOT_FREE),
    Case(Layout(2), dynamic(55, mode="free"), losses=NOT_FREE),
    Case(Layout(2), fixed(2, 60), "adapter"),
    Case(Layout(2), fixed(2, 60), "bamba-tiny"),
    Case(Layout(3), fixed(3, 60, cp_comm_type="all_gather"), "mistral"),
    Case(Layout(4), dynamic(32), "deep qwen3-moe", losses=("groups",)),
]


def model_of(family: str) -> Any:
    if family == "adapter":
        return adapted("llama", "every linear")
    if family.endswith("-tiny"):
        model = load_model(preset=family, vocab_size=61, seed=0).double()
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")
        return model
    if family.startswith("small "):
        model = random_model(small_config(family.removeprefix("small ")), torch.float64)
        model.set_experts_implementation("eager")  # grouped products of torch take no float64 on CPUs
        return model
    name = family.removeprefix("deep ")
    if family != name:
        return deep(name, torch.float64, 2)
    return tiny(name, torch.float64, attention="eager" if name == "gemma2" else "sdpa")


Dense = tuple[dict[str, Answer], list[np.ndarray]]


@cache
def dense(family: str, losses: tuple[str, ...], named: str = "tree") -> Dense:
    model = model_of(family).to(REFERENCE)
    whole = unwrap_peft_model(model)
    documents = DOCUMENTS[named]()
    with casts_in_float64():
        rows = rows_of(model, documents)
        answers = {name: answer(whole, rows, LOSSES[name][0], LOSSES[name][2]) for name in losses}
    return answers, values_of_tokens(rows, documents, ALSO)


def errors_of(case: Case, world: World, answers: dict[str, Answer], tokens: list[np.ndarray]) -> dict[str, float]:
    stock = model_of(case.family)  # which imports its module
    with casts_in_float64():
        model = prepare_untried(stock, world, **dict(case.options))
        whole = DOCUMENTS[case.documents]()
        shared = share_prefixes(whole, least_rows=case.least)
        plan = case.plan(case.home, shared)
        errors = loss_errors(model, plan, shared, world, answers, LOSSES)
        log_probs = token_log_probs(model, plan, shared, world, also=ALSO)
        return errors | {"log-probabilities": token_error(log_probs, tokens, whole, ALSO)}


def compare(rank: int, cases: list[Case], wanted: list[Dense]) -> list[dict[str, float]]:
    found = list[dict[str, float]]()
    for case, of_case in zip(cases, wanted, strict=True):
        with World(case.home, backend=backend(), timeout=60) as world:
            found.append(errors_of(case, world, *of_case))
    return found


def wrong_cases(ranks: int, cases: list[Case]) -> dict[str, dict[str, float]]:
    cases = [case for case in cases if len(case.home.ranks) == ranks]
    wanted = [dense(case.family, case.losses, case.documents) for case in cases]
    found = run_ranks(compare, ranks, cases, wanted, timeout=240)[0]
    return {str(case): e for case, e in zip(cases, found, strict=True) if not max(e.values()) < 1e-12}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_steps_equal_the_separate_documents(ranks: int) -> None:
    assert wrong_cases(ranks, CASES) == {}


@pytest.mark.whole
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_more_steps_equal_the_separate_documents(ranks: int) -> None:
    assert wrong_cases(ranks, MORE) == {}


MUTATIONS = {
    "positions are not continued": (
        "comm.shard",
        "position = place + np.asarray(group.bases",
        "position = place + 0 * np.asarray(group.bases",
    ),
    "a branch begins without its prefix's last token": (
        "data.shared_prefixes",
        "return int(is_target.argmax()) if",
        "return int(is_target.argmax()) + 1 if",
    ),
    "rows of a loss count from the branch": (
        "train.terms.loss_tokens",
        "positions + shared_rows",
        "positions + 0 * shared_rows",
    ),
    "tokens of a micro-batch count from the branch": (
        "train.terms.micro_batch_loss",
        "places = starts_of_rows + targets.path_positions",
        "places = starts_of_rows + targets.positions",
    ),
}


def errors_of_mutations(rank: int, wanted: Dense) -> dict[str, float]:
    errors = dict[str, float]()
    for name, change in {"nothing": None, **MUTATIONS}.items():
        with mutated(change), World(Layout(1), backend=backend()) as world:
            try:
                errors[name] = max(errors_of(Case(Layout(1), ONE), world, *wanted).values())
            except Exception:
                errors[name] = np.inf
    return errors


@pytest.mark.whole
def test_mutations_are_noticed() -> None:
    (errors,) = run_ranks(errors_of_mutations, 1, dense("qwen3", ("weights", "tokens", "micro-batches")))
    assert errors.pop("nothing") < 1e-12 and min(errors.values()) > 1e-6, errors
