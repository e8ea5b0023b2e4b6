"""Copies and sums of rows, on a GPU by Triton's kernels: pytest --backend nccl. Compared with torch's on the host.

And launches of those kernels: what is asked of Triton, and what of a compiled kernel at hand.
"""

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from longspan.attention import rows as rows_module
from longspan.attention.rows import add_addends, cast_rows, copy_rows, join_columns, merge_rows_
from longspan.comm import Addend, split_columns
from longspan.testing import backend

DEVICE = torch.device("cuda" if backend() == "nccl" else "cpu")
Rows = slice | Tensor


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def some_rows(count: int, picked: bool) -> Rows:
    if not picked:
        return slice(count // 3, count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    return order[: (count + 1) // 2].to(DEVICE)


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
    expected = [x.cpu().clone() for x in total]
    merge_rows_(*expected, on_host, *(x.cpu() for x in part))
    merge_rows_(*total, rows, *part)
    for x, y in zip(total, expected, strict=True):
        torch.testing.assert_close(x.cpu(), y, rtol=1e-5, atol=1e-5)


def test_one_tensor_as_it_is_becomes_a_matrix_without_a_copy():
    x = torch.randn(5, 3, 4)
    assert join_columns((x,)).data_ptr() == x.data_ptr() and join_columns((x,)).equal(x.flatten(1))
    assert join_columns((x[:0],)).shape == (0, 12)
    order = torch.tensor([4, 0])
    others = [
        (join_columns((x,), order), x[order].flatten(1)),
        (join_columns((x, x)), torch.cat([x, x], 1).flatten(1)),
        (join_columns((x,), dtype=torch.float64), x.double().flatten(1)),
        (join_columns((x[:, 1:],)), x[:, 1:].flatten(1)),
    ]
    for matrix, expected in others:
        assert matrix.equal(expected) and matrix.data_ptr() != x.data_ptr() and matrix.is_contiguous()


# ---- launches


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    kernels = MagicMock()
    monkeypatch.setattr(rows_module, "import_triton_kernels", lambda name: kernels)
    monkeypatch.setattr(rows_module, "_compiled", {})
    return kernels.copy_rows_kernel


def launches(kernel: MagicMock) -> list[tuple[Any, list[Any]]]:
    calls = zip(kernel.__getitem__.call_args_list, kernel.__getitem__.return_value.call_args_list, strict=True)
    arguments = ((grid.args[0], (*call.args, *call.kwargs.values())) for grid, call in calls)
    return [(grid, [x for x in values if not isinstance(x, Tensor)]) for grid, values in arguments]


def copy(rows: int, columns: int = 64, dtype: torch.dtype = torch.float32, shift: int = 0) -> None:
    storage = torch.zeros(rows * columns + 64 + shift, dtype=dtype)
    at = -storage.data_ptr() % 64 // dtype.itemsize + shift
    source = storage.as_strided((rows, 1, columns), (columns, columns, 1), at)
    rows_module.launch_row_copies([(source, source)], None)


REMEMBERED: list[tuple[list[dict[str, Any]], tuple[int, int]]] = [  # copies; launches of Triton, and of what is at hand
    ([{}, {}, {}], (1, 2)),
    *(([{}, other], (2, 0)) for other in ({"rows": 9}, {"columns": 128}, {"dtype": torch.bfloat16}, {"shift": 3})),
    ([{"shift": shift} for shift in (1, 1, 0, 0, 1)], (4, 1)),  # addresses that sixteen does not divide
]


@pytest.mark.parametrize("copies, calls", REMEMBERED, ids=str)
def test_a_launch_like_one_before_goes_to_the_compiled_kernel_with_the_same_arguments(
    kernel: MagicMock, copies: list[dict[str, Any]], calls: tuple[int, int]
) -> None:
    for options in copies:
        copy(**{"rows": 8} | options)
    of_triton, at_hand = launches(kernel), launches(kernel.__getitem__.return_value.return_value)
    assert (len(of_triton), len(at_hand)) == calls and all(again in of_triton for again in at_hand)
    assert of_triton[0][0] == (8, 1, 1) and len(of_triton[0][1]) > 3


def test_what_is_remembered_is_bounded(kernel: MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "_MOST_COMPILED", 3)
    for rows in range(1, 20):
        copy(rows)
        assert len(rows_module._compiled) <= 3


def test_a_launch_takes_no_tensors_of_other_numbers_of_rows(kernel: MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the gradients of rows and of entries: it would write past the end of the shorter ones."""
    monkeypatch.setattr(rows_module, "can_run_row_kernels", lambda x: True)
    tensors = [torch.zeros(rows, 2, 4) for rows in (9, 3, 9)]
    cast = cast_rows(tensors, torch.bfloat16)
    assert [x.shape for x in cast] == [x.shape for x in tensors]
    assert [grid for grid, _ in launches(kernel)] == [(9, 1, 1), (3, 1, 1)]
    with pytest.raises(AssertionError):
        copy_rows([(x, x) for x in tensors])
