"""Copies and sums of rows, on a GPU by Triton's kernels: pytest --backend nccl. Compared with torch's on the host."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from longspan.attention.rows import RowSum, add_addends, add_rows, cast_rows, copy_rows, join_columns, merge_rows_
from longspan.comm import Addend, split_columns
from longspan.testing import backend

DEVICE = torch.device("cuda" if backend() == "nccl" else "cpu")
SHAPES = ((1, 1, 8), (7, 3, 5), (33, 8, 128), (5, 40, 128))
Rows = slice | Tensor


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def some_rows(count: int, picked: bool) -> Rows:
    """A slice of the rows, or distinct rows out of order."""
    if not picked:
        return slice(count // 3, count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    return order[: (count + 1) // 2].to(DEVICE)


def of_host(fn: Callable[..., None], *tensors: Tensor) -> list[Tensor]:
    """What `fn` makes of copies on the host."""
    copies = [x.cpu().clone() for x in tensors]
    fn(*copies)
    return copies


@pytest.mark.parametrize("picked", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_are_added_where_they_belong_and_nowhere_else(
    shape: tuple[int, ...], dtype: torch.dtype, picked: bool
) -> None:
    rows = some_rows(shape[0], picked)
    matrix = drawn(shape[0], 3 * shape[1] * shape[2])
    first, second, left = split_columns(matrix, (shape[1:], shape[1:], shape[1:]))
    before, count = matrix.clone(), len(first[rows])
    sources = [drawn(count, *shape[1:], seed=i, dtype=dtype) for i in (2, 3)]
    add_rows([(sources[0], first), (sources[1], second)], rows)
    expected = split_columns(before, (shape[1:], shape[1:], shape[1:]))
    for into, source in zip(expected, sources, strict=False):
        into[rows] += source.float()
    assert torch.equal(first, expected[0]) and torch.equal(second, expected[1]) and torch.equal(left, expected[2])


@pytest.mark.parametrize("fresh", (False, True))
@pytest.mark.parametrize("parts", ("all", "half", "two", "picked"))
def test_addends_of_a_block(parts: str, fresh: bool) -> None:
    """A fresh sum holds what is in no memory before: NaN here."""
    shapes, count = ((3, 16), (3, 8)), 12
    row_sets = {
        "all": [slice(0, count)],
        "half": [slice(6, count)],
        "two": [slice(0, 6), slice(4, count)],
        "picked": [some_rows(count, True), slice(0, count)],
    }[parts]
    total = torch.full((count, 72), torch.nan, device=DEVICE) if fresh else drawn(count, 72)
    expected = (torch.zeros_like(total) if fresh else total.clone()).double()
    addends = []
    for i, rows in enumerate(row_sets):
        size = len(total[rows])
        tensors = [drawn(size, *shape, seed=10 * i + j, dtype=torch.bfloat16) for j, shape in enumerate(shapes)]
        addends.append(Addend(rows, tensors))
        for into, x in zip(split_columns(expected, shapes), tensors, strict=True):
            into[rows] += x.double()
    add_addends(split_columns(total, shapes), addends, fresh=fresh)
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_tensors_in_another_dtype_and_contiguous(dtype: torch.dtype) -> None:
    matrix = drawn(9, 40)
    tensors = (*split_columns(matrix, ((2, 8), (3, 8))), drawn(9, 4, 8, dtype=dtype), drawn(9, 4, 8).transpose(1, 2))
    converted = cast_rows(tensors, dtype)
    assert converted[2] is tensors[2]
    for x, original in zip(converted, tensors, strict=True):
        assert x.dtype == dtype and x.is_contiguous() and torch.equal(x, original.to(dtype))


@pytest.mark.parametrize("heads", (slice(0, 4), slice(0, 2), slice(2, 4)))
def test_a_sum_of_heads_and_rows(heads: slice) -> None:
    total, expected = RowSum((10, 4, 8), drawn(1, dtype=torch.bfloat16)), torch.zeros(10, 4, 8, dtype=torch.float64)
    for i, rows in enumerate((slice(0, 10), slice(5, 10), some_rows(10, True))):
        x = drawn(10, 4, 8, seed=i, dtype=torch.bfloat16)
        if i == 1:
            total.add_heads(heads, x[:, heads])
            expected[:, heads] += x[:, heads].cpu().double()
        else:
            total.add(rows, x[: len(x[rows])])
            expected[rows.cpu() if isinstance(rows, Tensor) else rows] += x[: len(x[rows])].cpu().double()
    torch.testing.assert_close(total.result().cpu().double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("picked", (False, True))
def test_copies_and_merges_are_those_of_the_host(picked: bool) -> None:
    index = some_rows(20, True) if picked else None
    sources = [drawn(20, 2, w, seed=w).transpose(0, 1).contiguous().transpose(0, 1) for w in (3, 8, 1, 16)]
    into = [drawn(10 if picked else 20, 2, x.shape[2], seed=99) for x in sources]
    copy_rows(list(zip(sources, into, strict=True)), index)
    for x, source in zip(into, sources, strict=True):
        assert torch.equal(x, source if index is None else source[index])
    assert torch.equal(join_columns(sources[:2], index), torch.cat([x.flatten(1) for x in into[:2]], 1))
    rows = some_rows(20, picked)
    count = len(sources[0][rows])
    total, part = (drawn(20, 4, 16), drawn(20, 4)), (drawn(count, 4, 16, seed=1), drawn(count, 4, seed=2))
    on_host = rows.cpu() if isinstance(rows, Tensor) else rows
    expected = of_host(lambda a, b, c, d: merge_rows_(a, b, on_host, c, d), *total, *part)
    merge_rows_(*total, rows, *part)
    for x, y in zip(total, expected, strict=False):
        torch.testing.assert_close(x.cpu(), y, rtol=1e-5, atol=1e-5)
