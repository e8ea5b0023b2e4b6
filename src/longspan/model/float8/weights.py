"""Weights in float8: made from the gathered weight in each pass, or kept for passes between which none changes."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from longspan.model.float8.quantise import Scaled, quantise_columns, quantise_rows
from longspan.model.weights.local_tensors import local_tensor

_ATTRIBUTE = "float8_weights"


class Float8Weight:
    """A weight in float8: its rows for forward, its columns for backward, each quantised when it is needed.

    >>> float8_weight = Float8Weight()
    >>> float8_weight.keep(True)  # what `rows` and `columns` make from now on stays, until keep(False)
    """

    def __init__(self) -> None:
        self._keeps = False
        self._rows: Scaled | None = None
        self._columns: Scaled | None = None

    @property
    def keeps(self) -> bool:
        """Whether the float8 weight stays for the next pass."""
        return self._keeps

    def keep(self, keeps: bool) -> None:
        """Begin (True) or end (False) keeping the float8 weight; what was kept before is dropped."""
        self._keeps, self._rows, self._columns = keeps, None, None

    def rows(self, weight: Tensor) -> Scaled:
        """Return the weight's rows in float8: those that are kept, or new ones."""
        rows = self._rows or quantise_rows(weight.detach())
        self._rows = rows if self._keeps else None
        return rows

    def columns(self, weight: Tensor) -> Scaled:
        """Return the weight's columns in float8, as rows: those that are kept, or new ones."""
        columns = self._columns or quantise_columns(weight.detach())
        self._columns = columns if self._keeps else None
        return columns


def add_float8_weights(module: nn.Module, names: Iterable[str]) -> None:
    """Mark a module's parameters of these names: the module computes with them in float8."""
    setattr(module, _ATTRIBUTE, {name: Float8Weight() for name in names})


def find_float8_weight(module: nn.Module, name: str) -> Float8Weight | None:
    """Return the record of a module's weight in float8; None if the module does not compute with it in float8."""
    weights: Mapping[str, Float8Weight] = vars(module).get(_ATTRIBUTE, {})
    return weights.get(name)


_kept_at: dict[int, Float8Weight] = {}  # records that keep, by the memory address of the weight that they belong to


def find_kept_weight(weight: Tensor) -> Float8Weight:
    """Return the record of a weight in float8 by the weight's address: graphs of torch.compile know no modules.

    A weight that was not gathered when `quantise_once` began gets a new record, which keeps nothing.
    """
    return _kept_at.get(weight.data_ptr()) or Float8Weight()


@contextmanager
def quantise_once(model: nn.Module) -> Iterator[None]:
    """Keep weights in float8 from their first product on, for passes between which no weight changes.

    A rank then holds one byte for each number of these weights (rows), and after backward passes two (columns too).
    Without float8 nothing changes. Graphs of torch.compile find only weights that are gathered when this begins.
    """
    weights = list[Float8Weight]()  # which keep from here on
    weight_at = dict[int, Tensor]()  # the gathered weights, referred to so that no other tensor gets their addresses
    for module in model.modules():
        for name, float8_weight in vars(module).get(_ATTRIBUTE, {}).items():
            if not float8_weight.keeps:  # one that keeps already does so for an outer scope, which ends later
                weights.append(float8_weight)
                float8_weight.keep(True)
            local_weight = local_tensor(getattr(module, name).detach())
            # A weight without memory is not gathered by FSDP2; an inner scope may find it gathered.
            if local_weight.untyped_storage().nbytes() and local_weight.data_ptr() not in _kept_at:
                _kept_at[local_weight.data_ptr()], weight_at[local_weight.data_ptr()] = float8_weight, local_weight
    try:
        yield
    finally:
        for address in weight_at:
            del _kept_at[address]
        for float8_weight in weights:
            float8_weight.keep(False)
