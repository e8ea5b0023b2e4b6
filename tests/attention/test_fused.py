"""Launches of Triton's kernels: what is asked of Triton, and what of a compiled kernel at hand."""

from typing import Any

import pytest
import torch

from longspan.attention import rows as fused
from longspan.attention.rows import head_slice_by_member, member_views

Called = list[tuple[str, tuple[int, ...], tuple[Any, ...]]]


class Kernels:
    """Stands for the module of kernels: notes the calls that go through Triton, and those of compiled kernels."""

    def __init__(self) -> None:
        self.through_triton: Called = []
        self.compiled: Called = []

    def __getattr__(self, name: str) -> "Noted":
        return Noted(name, self.through_triton, Noted(name, self.compiled, None))


class Noted:
    """`kernel[grid](…)` is noted; gives what was compiled."""

    def __init__(self, name: str, calls: Called, gives: "Noted | None") -> None:
        self._name, self._calls, self._gives = name, calls, gives

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def call(*arguments: Any, **constants: Any) -> "Noted | None":
            self._calls.append((self._name, grid, (*arguments, *constants.values())))
            return self._gives

        return call


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    fakes = Kernels()
    monkeypatch.setattr(fused, "kernel_module", lambda: fakes)
    monkeypatch.setattr(fused, "_compiled", {})
    return fakes


def copy(rows: int, columns: int = 64, dtype: torch.dtype = torch.float32, shift: int = 0) -> None:
    """Copy (rows, 1, columns) that begin `shift` elements after an address that 64 divides."""
    storage = torch.zeros(rows * columns + 64 + shift, dtype=dtype)
    at = -storage.data_ptr() % 64 // dtype.itemsize + shift
    source = storage.as_strided((rows, 1, columns), (columns, columns, 1), at)
    fused.fused_copy_rows([(source, source)], None)


def test_a_launch_like_one_before_goes_to_the_compiled_kernel_with_the_same_arguments(kernels: Kernels) -> None:
    for _ in range(3):
        copy(8)
    assert len(kernels.through_triton) == 1 and len(kernels.compiled) == 2
    (name, grid, first), (again, same_grid, then) = kernels.through_triton[0], kernels.compiled[0]
    assert (name, grid) == (again, same_grid) == ("copy_rows", (8, 1, 1))
    assert [x for x in first if not isinstance(x, torch.Tensor)] == [x for x in then if not isinstance(x, torch.Tensor)]


@pytest.mark.parametrize(
    "other",
    [{"rows": 9}, {"columns": 128}, {"dtype": torch.bfloat16}, {"shift": 1}, {"shift": 3}],
    ids=["rows", "columns", "dtype", "address", "another address"],
)
def test_what_triton_compiles_otherwise_is_asked_of_triton(kernels: Kernels, other: dict[str, Any]) -> None:
    copy(8)
    copy(**({"rows": 8} | other))  # pyright: ignore[reportArgumentType]
    assert len(kernels.through_triton) == 2 and not kernels.compiled


def test_addresses_that_sixteen_does_not_divide_are_never_remembered(kernels: Kernels) -> None:
    for shift in (1, 1, 0, 0, 1):
        copy(8, shift=shift)
    assert len(kernels.through_triton) == 4 and len(kernels.compiled) == 1


def test_what_is_remembered_is_bounded(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_REMEMBERED", 3)
    for rows in range(1, 20):
        copy(rows)
        assert len(fused._compiled) <= 3


@pytest.mark.parametrize("members, slices, heads, size", [(1, 1, 1, 3), (2, 1, 4, 3), (2, 2, 8, 3), (4, 1, 4, 5)])
@pytest.mark.parametrize("apart", [False, True])
def test_heads_of_members_as_views(members: int, slices: int, heads: int, size: int, apart: bool) -> None:
    """The same numbers as torch's own views, of tensors whose heads follow each other and of others."""
    matrix = torch.arange(7 * 2 * heads * size).view(7, 2 * heads, size)
    x = matrix[2:, ::2] if apart else matrix[2:, heads:]
    for part in range(slices):
        expected = x.unflatten(1, (members, slices, -1))[:, :, part].flatten(2)
        assert torch.equal(head_slice_by_member(x, members, slices, part), expected)


def test_columns_by_member_are_views_of_the_matrix() -> None:
    matrix = torch.arange(3 * 4 * 9).view(12, 9)
    views = member_views(matrix, 3, [4, 5])
    expected = matrix.unflatten(0, (3, 4)).transpose(0, 1).split([4, 5], 2)
    assert [x.tolist() for x in views] == [x.tolist() for x in expected]
    assert all(x.untyped_storage().data_ptr() == matrix.data_ptr() for x in views)
