"""Documents whose lengths lie around a pool of keys, drawn: a step equals the stock class on each."""

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import Phase, given, settings, strategies as st
from torch import Tensor

from longspan import Layout, World, plan_fixed
from longspan.doctor.stock import compute_in_float64
from longspan.model.seams.chosen_keys.indexers import order_equal_scores
from longspan.testing import backend, run_ranks
from tests import parity
from tests.model.seams.families import gradient_error
from tests.model.seams.test_kinds import HERE, model_of
from tests.model.stock import answer, prepare_untried, texts

STRIDES = {"qwen4_exp_text": 4, "glm5_next": 4}
FAMILIES = [family for family in STRIDES if family in HERE]
DEGREE = 3


class Drawn(NamedTuple):
    """Documents of one micro-batch, and how their rows are dealt out."""

    lengths: tuple[int, ...]
    partition: str
    degree: int


@st.composite
def _drawn(draw: st.DrawFn, stride: int) -> Drawn:
    around = st.sampled_from([n + more for n in (stride, 2 * stride, 4 * stride) for more in (-1, 0, 1)])
    lengths = draw(st.lists(st.one_of(around, st.just(1), st.integers(2, 40)), min_size=1, max_size=5))
    # One document has a target in any case.
    lengths.append(draw(around))
    return Drawn(
        tuple(lengths), draw(st.sampled_from(["zigzag", "contiguous"])), draw(st.sampled_from([1, DEGREE, DEGREE]))
    )


def _examples(stride: int, count: int) -> list[Drawn]:
    """The same on every rank and run, which a rank that fails alone must not change."""
    examples = list[Drawn]()

    @settings(derandomize=True, max_examples=count, deadline=None, database=None, phases=[Phase.generate])
    @given(_drawn(stride))
    def note(drawn: Drawn) -> None:
        examples.append(drawn)

    note()
    return examples


def _error(gradients: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """A gradient that the class does not have, of entries that no document has, is zero here."""
    assert exact.keys() <= gradients.keys()
    return gradient_error(gradients, {name: exact.get(name, torch.zeros_like(x)) for name, x in gradients.items()})


def _on_ranks(rank: int, family: str, examples: list[Drawn]) -> list[tuple[Drawn, parity.Errors]]:
    torch.set_num_threads(1)
    home, wrong = Layout(ranks=DEGREE), list[tuple[Drawn, parity.Errors]]()
    with World(home, backend=backend(), timeout=60) as world, compute_in_float64():
        model = prepare_untried(model_of(family), world)
        for example in examples:
            stock, documents = model_of(family).train(), texts(example.lengths)
            order_equal_scores(stock)
            partition: Any = example.partition
            plan = plan_fixed(example.lengths, home, cp=example.degree, partition=partition)
            case = parity.Case(
                partial(model_of, family),
                home,
                {},
                documents,
                answer(stock, documents),
                in_float64=True,
                compare=_error,
            )
            errors, _ = parity.step_errors(case, model, plan, world)
            wrong += [] if errors.within(parity.WIDE) else [(example, errors)]
    return wrong


@pytest.mark.whole
@pytest.mark.parametrize("family", FAMILIES)
def test_lengths_around_a_stride_are_exact(family: str) -> None:
    assert run_ranks(_on_ranks, DEGREE, family, _examples(STRIDES[family], 6), timeout=500) == [[]] * DEGREE
