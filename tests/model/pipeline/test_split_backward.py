"""A backward pass in two parts gives the gradients of one in a single part, whatever the graph."""

import gc
import weakref
from typing import Any

import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from longspan.model.pipeline.schedules import compute_input_gradient, compute_weight_gradients

SIZE = 3


class TwoOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, w)
        return x @ w, x.square().sum(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradients[0] @ w.T + 2 * gradients[1][:, None] * x, x.T @ gradients[0]


def _graph(ops: list[tuple[int, int, int]], values: list[Tensor], weights: list[nn.Parameter]) -> list[Tensor]:
    """Every operation adds a value made of two earlier ones and a weight, which others may use too."""
    for kind, a, w in ops:
        x, weight = values[a % len(values)], weights[w % len(weights)]
        if kind == 0:
            values.append(x @ weight)
        elif kind == 1:
            values.append(torch.tanh(x) + values[(a + w) % len(values)])
        elif kind == 2:
            product, squares = TwoOutputs.apply(x, weight)  # pyright: ignore[reportGeneralTypeIssues]
            values.append(product * squares[:, None])
        elif kind == 3:
            left, right = (x @ weight).split([1, SIZE - 1], 1)
            values.append(torch.cat([right, left.sin()], 1))
        else:
            values.append(weight.cos() + 0 * x.detach())  # of a weight alone
    return values


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=12),
    st.booleans(),
    st.booleans(),
)
def test_equals_a_backward_pass_in_one_part(ops: list[tuple[int, int, int]], loss: bool, frozen: bool) -> None:
    answers = []
    for split in (False, True):
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(SIZE, SIZE, dtype=torch.float64) / 2) for _ in range(4)]
        weights[3].requires_grad_(not frozen)
        x, constant = (torch.randn(SIZE, SIZE, dtype=torch.float64, requires_grad=i == 0) for i in range(2))
        first = x.sin()
        last = _graph(ops, [first, constant.sin()], weights)[-1] + first  # every stage's output depends on its input
        output = last.square().sum() if loss else last
        gradient = None if loss else torch.full_like(last, 0.5)
        if split:
            of_input, pending = compute_input_gradient(output, gradient, x, weights)
            assert all(weight.grad is None for weight in weights)
            compute_weight_gradients(pending)
            assert not pending.groups and not pending.gradients
        else:
            torch.autograd.backward([output], [gradient])
            of_input = x.grad
        answers.append([of_input, *(weight.grad for weight in weights)])
    for one, two in zip(*answers, strict=True):
        # A weight that is used nowhere, or where its gradient vanishes by structure, may have none.
        assert two is None or one is not None
        difference = torch.zeros(()) if one is None else one - (torch.zeros_like(one) if two is None else two)
        assert difference.abs().max() <= 1e-12 * (1 + (0 if one is None else one.abs().max()))


def test_gradients_are_added_and_the_graph_is_freed() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x = torch.randn(2, 4, requires_grad=True)
    expected = [2 * g for g in torch.autograd.grad(layers(x).sum(), [*layers.parameters(), x])]
    of_inputs = torch.zeros_like(x)
    for _ in range(2):
        hidden = layers[0](x)
        alive = weakref.ref(hidden)
        out = layers[2](hidden.tanh()).sum()
        del hidden
        of_input, pending = compute_input_gradient(out, None, x, layers.parameters())
        of_inputs += of_input
        compute_weight_gradients(pending)
        del pending, out
        gc.collect()
        assert alive() is None
    assert all(
        torch.allclose(p, w) for p, w in zip([*(p.grad for p in layers.parameters()), of_inputs], expected, strict=True)
    )


def test_the_second_part_does_not_walk_the_way_of_the_inputs() -> None:
    passed: list[str] = []

    class Mark(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            passed.append("between")
            return gradients[0]

    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    x = torch.randn(2, 3, requires_grad=True)
    out = second(Mark.apply(first(x))).sum()  # pyright: ignore[reportAttributeAccessIssue]
    _, pending = compute_input_gradient(out, None, x, [*first.parameters(), *second.parameters()])
    assert passed == ["between"] and first.weight.grad is None
    compute_weight_gradients(pending)
    assert passed == ["between"] and first.weight.grad is not None and second.bias.grad is not None
