"""The result of passkey retrieval: how many keys were retrieved at each length and depth. Needs no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class PasskeyGrid:
    """Of the `samples` documents of each length and depth, how many were `retrieved`: every token of the answer right.

    `retrieved[l][d]` and `losses[l][d]`, the mean loss of the answers' tokens, are those of `lengths[l]` and
    `depths[d]`.
    """

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    samples: int
    retrieved: tuple[tuple[int, ...], ...]
    losses: tuple[tuple[float, ...], ...]
    step: int = 0
    cp: int = 0

    @property
    def documents(self) -> int:
        """The number of documents."""
        return len(self.lengths) * len(self.depths) * self.samples

    @property
    def share(self) -> float:
        """The share of all keys that were retrieved."""
        return sum(map(sum, self.retrieved)) / self.documents

    def of_length(self, index: int) -> float:
        """The share of keys that were retrieved from documents of `lengths[index]`."""
        return sum(self.retrieved[index]) / (len(self.depths) * self.samples)

    def table(self) -> str:
        """The shares as text: a line for each depth, a column for each length.

        >>> print(PasskeyGrid((512, 1024), (0.0, 1.0), 4, ((4, 4), (1, 3)), ((0.1, 0.1), (2.0, 0.7))).table())
        keys retrieved: 12 of 16, 4 for each length and depth (1: the key stands at the end)
        depth   512  1,024
        0      100%    25%
        1      100%    75%
        """
        rows = [
            (f"{depth:g}", *(f"{100 * row[d] / self.samples:.0f}%" for row in self.retrieved))
            for d, depth in enumerate(self.depths)
        ]
        rows.insert(0, ("depth", *(f"{length:,}" for length in self.lengths)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])]).rstrip() for cells in rows
        ]
        keys = (
            f"keys retrieved: {sum(map(sum, self.retrieved))} of {self.documents}, {self.samples} for each length and"
        )
        return "\n".join([f"{keys} depth (1: the key stands at the end)", *lines])

    def to_json(self) -> dict[str, Any]:
        """The grid as a JSON object; `from_json` gives an equal one back."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "PasskeyGrid":
        """Read a grid; KeyError, TypeError or ValueError where it is not one."""
        rows: Sequence[Sequence[int]] = value["retrieved"]
        grid = cls(
            lengths=tuple(map(int, value["lengths"])),
            depths=tuple(map(float, value["depths"])),
            samples=int(value["samples"]),
            retrieved=tuple(tuple(map(int, row)) for row in rows),
            losses=tuple(tuple(float("nan") if x is None else float(x) for x in row) for row in value["losses"]),
            step=int(value["step"]),
            cp=int(value["cp"]),
        )
        if [len(row) for row in grid.retrieved] != [len(grid.depths)] * len(grid.lengths) or grid.samples < 1:
            raise ValueError(f"{len(grid.lengths)} x {len(grid.depths)} cells were expected")
        return grid
