"""Rows in float8, and the products of linears and experts: each beside the formula in float64."""

import math

import pytest
import torch
from torch import Tensor, nn

from longspan.model.float8 import products
from longspan.model.float8.products import (
    ExpertRows,
    Float8Weight,
    linear_in_float8,
    multiply_in_float8,
    quantise_columns,
    quantise_rows,
)
from longspan.model.marks import find_float8_weight
from tests.model.float8.dense import DenseLinear, rounded


def numbers(*shape: int, spread: float = 2.0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64) * torch.exp(
        spread * torch.randn(*shape[:-1], 1, dtype=torch.float64)
    )


def test_a_row_has_a_scale_of_its_own() -> None:
    x = torch.tensor([[1.0, -896.0, 0.0], [0.0, 0.0, 0.0], [2.0**-140, 0.0, 0.0], [3e38, -3e38, 1e38]])
    rows = quantise_rows(x)
    assert rows.values.dtype == torch.float8_e4m3fn and rows.scales[0] == 2
    exact = torch.tensor([1.0, -896.0, 0.0]).double()
    assert torch.allclose(rows.dequantise()[0], exact, rtol=1 / 16, atol=0)
    assert not rows.dequantise()[1:3].any()
    assert torch.allclose(rows.dequantise()[3], x[3].double(), rtol=1 / 16)
    columns = quantise_columns(x.t().contiguous())
    assert torch.equal(columns.values.float(), rows.values.float()) and torch.equal(columns.scales, rows.scales)
    bad = quantise_rows(torch.tensor([[1.0, math.inf], [math.nan, 1.0], [1.0, 2.0]])).dequantise()
    assert bad[:2].isnan().any(1).all() and bad[2].isfinite().all()


@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("trained", (True, False))
def test_a_linear_and_its_gradients_are_those_of_the_formula(bias: bool, trained: bool) -> None:
    torch.manual_seed(0)
    x, dy = numbers(2, 30, 128).requires_grad_(), numbers(2, 30, 96)
    weight = nn.Parameter(numbers(96, 128), requires_grad=trained)
    offset = nn.Parameter(torch.randn(96, dtype=torch.float64)) if bias else None
    leaves = [x, *[leaf for leaf in (weight, offset) if leaf is not None and leaf.requires_grad]]
    y = linear_in_float8(x, weight, offset, Float8Weight())
    exact = DenseLinear.apply(x, weight) + (0.0 if offset is None else offset)
    pairs = zip((y, *torch.autograd.grad(y, leaves, dy)), (exact, *torch.autograd.grad(exact, leaves, dy)), strict=True)
    for result, expected in pairs:
        assert torch.allclose(result, expected, rtol=1e-12, atol=1e-12 * expected.abs().max().item())
    assert 0.01 < (y - nn.functional.linear(x, weight, offset)).norm() / y.norm() < 0.06  # what float8 rounds


def test_a_row_is_the_same_alone_and_next_to_any_other() -> None:
    torch.manual_seed(0)
    x, dy, weight = numbers(50, 128).bfloat16(), numbers(50, 64).bfloat16(), numbers(64, 128).bfloat16()

    def passes(take: Tensor) -> tuple[Tensor, Tensor]:
        rows = x[take].requires_grad_()
        y = linear_in_float8(rows, weight, None, Float8Weight())
        return y.detach(), torch.autograd.grad(y, rows, dy[take])[0]

    y, dx = passes(torch.arange(50))
    for take in (torch.tensor([7]), torch.randperm(50), torch.arange(20, 50)):
        of_some = passes(take)
        assert torch.equal(of_some[0], y[take]) and torch.equal(of_some[1], dx[take])


@pytest.mark.parametrize("transposed", (False, True))
def test_experts_are_linears_of_their_rows(transposed: bool) -> None:
    torch.manual_seed(0)
    loads = torch.tensor([5, 0, 9, 1])
    x, dy = numbers(15, 64).requires_grad_(), numbers(15, 96)
    weight = nn.Parameter(numbers(4, 64, 96) if transposed else numbers(4, 96, 64))
    ends = loads.cumsum(0).to(torch.int32)
    y = multiply_in_float8(x, weight, None, Float8Weight(), ExpertRows(ends, loads.tolist(), transposed))
    matrices = (matrix.t() if transposed else matrix for matrix in weight)
    pieces = [DenseLinear.apply(rows, w) for rows, w in zip(x.split(loads.tolist()), matrices, strict=True)]
    exact = torch.cat(pieces)
    gradients = [torch.autograd.grad(out, (x, weight), dy) for out in (y, exact)]
    for result, expected in zip((y, *gradients[0]), (exact, *gradients[1]), strict=True):
        assert torch.allclose(result, expected, rtol=1e-12, atol=1e-12 * expected.abs().max().item())


def count_quantised(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls = list[str]()

    def counted(name: str):
        method = getattr(Float8Weight, name)

        def note(self: Float8Weight, weight: Tensor):
            kept, result = getattr(self, f"_{name}"), method(self, weight)
            calls.extend([f"quantise_{name}"] if result is not kept else [])
            return result

        return note

    for name in ("rows", "columns"):
        monkeypatch.setattr(Float8Weight, name, counted(name))
    return calls


def test_a_weight_is_quantised_once_while_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_quantised(monkeypatch)
    model, x = nn.Linear(64, 64), torch.randn(3, 64, requires_grad=True)
    products.add_float8_weights(model, ["weight"])
    here = find_float8_weight(model, "weight")
    assert here is not None and find_float8_weight(model, "bias") is None
    for keeps, count in ((False, 3), (True, 1), (False, 3)):
        calls.clear()
        with (
            products.keep_quantised_weights(model if keeps else nn.Module()),
            products.keep_quantised_weights(model if keeps else nn.Module()),
        ):
            results = [linear_in_float8(x, model.weight, None, here) for _ in range(3)]
            sum(results, torch.zeros(())).sum().backward()
            assert all(torch.equal(y, results[0]) for y in results)
        assert sorted(calls) == sorted(("quantise_rows", "quantise_columns") * count)
    with torch.no_grad():
        model.weight += 1
    assert not torch.equal(linear_in_float8(x, model.weight, None, here), results[0])


def test_a_weight_that_changes_before_backward_is_an_error() -> None:
    linear, x = nn.Linear(64, 64), torch.randn(3, 64, requires_grad=True)
    y = linear_in_float8(x, linear.weight, None, Float8Weight())
    with torch.no_grad():
        linear.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"a weight \(64, 64\) that backward needs was changed in place"):
        y.sum().backward()


def test_the_reference_rounds_as_float8_does() -> None:
    x = numbers(4, 64)
    assert torch.equal(quantise_rows(x).dequantise(), rounded(x))
