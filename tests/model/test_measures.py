"""A step whose layers keep what their measures say gives the loss and every gradient of the plain step, in float64."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longspan import Group, Layout, MicroBatch, Plan, World, plan_fixed, prepare, run_step
from longspan.attention.kernels import find_kernel
from longspan.doctor.stock import compute_in_float64
from longspan.errors import ModelError
from longspan.model import execution
from longspan.testing import backend, run_ranks
from longspan.train import MtpLoss
from tests.model.activations.test_host_arena import find_host_arena
from tests.model.deep import answer, deep
from tests.model.lora.adapted import adapted
from tests.model.mtp.dense import with_depths
from tests.model.stock import gradients_of, prepare_untried, texts, tiny, worst

LENGTHS = (13, 1, 24, 7, 2, 9)
EXACT = 1e-12
Words = str | tuple[str, ...]

# For models of four layers and of two: lists in which neighbours have other measures, which hold each measure once.
OF_FOUR: tuple[Words, ...] = (
    ("none", "selective+host", "exchanged", "full+host"),
    ("full+host", "selective", "full", "selective+host"),
)
OF_TWO: tuple[Words, ...] = (("full+host", "none"), ("selective", "selective+host"))


def _deep(family: str) -> Callable[[], nn.Module]:
    return lambda: deep(family, torch.float64)


def _depths(words: Words) -> Words:
    return words if isinstance(words, str) else (*words, "selective+host")


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Words, ...]]] = {
    "tied embeddings": (_deep("qwen3"), ("selective+host", *OF_FOUR)),
    "norms after the MLP": (lambda: tiny("gemma2", torch.float64, attention="eager"), OF_TWO),
    "experts": (_deep("qwen3-moe"), OF_FOUR),
    "an adapter": (lambda: adapted("deep", "the first layer"), OF_FOUR),
    "a hybrid with a depth": (lambda: with_depths("qwen3-next", 1), tuple(map(_depths, OF_TWO))),
}


def _plan(home: Layout) -> Plan:
    if home.pp > 1:
        return plan_fixed(LENGTHS, home, cp=1, max_tokens_per_slot=32)
    batches = (
        MicroBatch((Group((0, 1), (2, 1), (24, 1)), Group((1,), (0,), (13,)))),
        MicroBatch(
            (Group((0,), (4,), (2,)), Group((1, 0), (3,), (7,), "all_gather"), Group((1, 0), (5,), (9,), "a2a"))
        ),
    )
    return Plan(2, LENGTHS, batches, targets=sum(LENGTHS) - len(LENGTHS)).check()


def _step(model: nn.Module, plan: Plan, world: World) -> tuple[float, dict[str, Tensor]]:
    mtp: Any = {"mtp": MtpLoss(weight=0.7)} if hasattr(model, "mtp") and world.home.pp == 1 else {}
    result: Any = run_step(model, plan, texts(LENGTHS), world, **mtp)
    gradients = gradients_of(model)
    model.zero_grad()
    return result.loss + sum(result.mtp_losses or ()), gradients


def _errors(rank: int, home: Layout, names: Sequence[str], most: int, options: dict[str, Any]) -> dict[str, float]:
    errors, plan = dict[str, float](), _plan(home)
    with World(home, backend=backend()) as world, compute_in_float64():
        for name in names:
            make, lists = CASES[name]
            lists = lists[-most:]
            if name == "tied embeddings" and home.pp == 1:
                dense: Any = answer(make(), texts(LENGTHS), world.device)  # pyright: ignore[reportArgumentType]
                loss, gradients = dense.loss, dense.gradients
            else:
                loss, gradients = _step(prepare_untried(make(), world, **options), plan, world)
            for words in lists:
                model = prepare_untried(make(), world, checkpoint_policies=words, **options)
                arena = find_host_arena(model)
                here, of_rank = _step(model, plan, world)
                errors[f"{name}, {words}"] = max(abs(here / loss - 1), worst(of_rank, gradients))
                assert ("+host" in str(words)) == (arena is not None), (name, words)
                assert arena is None or (not arena.bytes_in_use and (arena.bytes or home.pp > 1)), (name, words)
    return errors


@pytest.mark.parametrize(
    ("home", "names", "most", "options"),
    [
        (Layout(ranks=2), ["tied embeddings"], 2, {}),
        pytest.param(Layout(ranks=2), [*CASES][1:], 3, {}, marks=pytest.mark.whole),
        (Layout(ranks=2, pp=2), ["experts"], 1, {"pipeline_schedule": "zero_bubble", "virtual_stages": 2}),
    ],
    ids=["2 slots", "2 slots, others", "2 stages a rank, split backward"],
)
def test_every_measure_is_the_plain_step(home: Layout, names: list[str], most: int, options: dict[str, Any]) -> None:
    for errors in run_ranks(_errors, len(home.ranks), home, names, most, options):
        assert errors and max(errors.values()) < EXACT, {case: e for case, e in errors.items() if e >= EXACT}


def test_other_words_and_numbers_of_words_are_refused() -> None:
    with World(Layout(ranks=1), backend="gloo") as world:
        with pytest.raises(
            ModelError, match="checkpoint_policies has 'some'; use none, exchanged, selective, full, selective"
        ):
            prepare(tiny("qwen3"), world, checkpoint_policies="some")
        with pytest.raises(
            ModelError, match="checkpoint_policies has 3 words; Qwen3ForCausalLM has 2 decoder layers: give one"
        ):
            prepare(tiny("qwen3"), world, checkpoint_policies=("none", "full", "full"))
        with pytest.raises(ModelError, match="has 2 decoder layers and 2 depths of multi-token prediction"):
            prepare(with_depths("qwen3", 2), world, checkpoint_policies=("none", "full"))
        with pytest.raises(ModelError, match="what each layer keeps, and offload_activations is True; use one"):
            prepare(tiny("qwen3"), world, checkpoint_policies="full", offload_activations=True)
        with pytest.raises(
            ModelError, match=r"activations on the host take .* bytes .* for 1 rank of host .* are free"
        ):
            prepare(tiny("qwen3"), world, checkpoint_policies="full+host", offload_bytes=1 << 60)


def _prepare_with_kernels(rank: int, measures: Sequence[str]) -> list[str]:
    errors = list[str]()
    with World(Layout(ranks=2), backend=backend()) as world, pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            patched.setattr(execution, "choose_kernel", lambda call, name: find_kernel("reference"))
        for words in measures:
            try:
                prepare(tiny("qwen3", torch.float64), world, checkpoint_policies=words)
                errors.append("")
            except ModelError as error:
                errors.append(str(error))
    return errors


def test_ranks_compute_with_the_same_kernel() -> None:
    first, second = run_ranks(_prepare_with_kernels, 2, ("selective", "selective+host", "exchanged", "full"))
    assert first == second and first[2:] == ["", ""]
    for error in first[:2]:
        assert re.search(r"found \w+ on rank 0, reference on rank 1; name one", error), error
