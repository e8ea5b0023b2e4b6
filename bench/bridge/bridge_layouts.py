"""Two layouts over the same ranks, the rows that each rank has and needs, and the bytes of two designs."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longspan import Exchange, Layout, Partition
from longspan.comm.moves.row_exchange import RowGradient
from longspan.layout.segments import Integers

PERIOD = 2048  # positions of a text and the image after it, where documents are long enough


@dataclass(frozen=True)
class BridgeCase:
    """An encoder over `encoder_tp x encoder_dp` ranks, and a language model over `tp x cp x dp` of the same ranks.

    Ranks count through tp first and dp last, on both sides. Every replica of the language model has `documents`
    documents of `positions` positions: text and images in turn, of which images take `share`. Its positions are dealt
    zigzag to cp slots. An encoder replica has the images of as many positions as every other one, in order.
    """

    name: str
    encoder_tp: int
    encoder_dp: int
    tp: int
    cp: int
    dp: int
    positions: int = 65536
    documents: int = 1
    share: float = 0.5
    hidden: int = 4096

    @property
    def ranks(self) -> int:
        """How many ranks both modules run on."""
        return self.tp * self.cp * self.dp

    @property
    def home(self) -> Layout:
        """The home of the language model, whose slots are the members of all replicas."""
        return Layout(self.ranks, tp=self.tp)

    @property
    def gradient(self) -> RowGradient:
        """What the ranks that need a row carry: each slot a part of its gradient, tensor-parallel ranks the same."""
        return "partial" if self.tp == 1 else "partial_over_slots"

    @property
    def label(self) -> str:
        """The degrees: TP·DP → TP·CP·DP."""
        return f"{self.encoder_tp}·{self.encoder_dp} → {self.tp}·{self.cp}·{self.dp}"

    @property
    def replicas(self) -> tuple[int, int]:
        """How many encoder replicas feed one of the language model, and how many of it one encoder replica feeds."""
        fan_in, fan_out = max(1, self.encoder_dp // self.dp), max(1, self.dp // self.encoder_dp)
        assert self.encoder_dp * fan_out == self.dp * fan_in, f"{self.label}: one dp has to divide the other"
        assert self.encoder_tp * self.encoder_dp == self.ranks, f"{self.label}: both modules are on all ranks"
        return fan_in, fan_out

    @property
    def is_image(self) -> NDArray[np.bool_]:
        """Which positions of one replica's documents, end to end, are an image's."""
        period = min(PERIOD, max(2, self.positions // 8))
        place = np.arange(self.positions) % period
        return np.tile(place >= round(period * (1 - self.share)), self.documents)

    @property
    def rows(self) -> int:
        """Rows of images of one replica of the language model."""
        return int(self.is_image.sum())

    def have(self, split: bool = False) -> Partition:
        """The rows that each rank's encoder makes; with `split` each of its tensor-parallel ranks keeps a part."""
        rows = self.rows * self.dp // self.encoder_dp
        lines: list[Integers] = []
        for replica in range(self.encoder_dp):
            line = np.arange(replica * rows, (replica + 1) * rows)
            lines += np.array_split(line, self.encoder_tp) if split else [line] * self.encoder_tp
        return Partition.from_rows(lines)

    def need(self, split: bool = False) -> Partition:
        """The rows at each rank's positions; with `split` (sequence parallel) each rank of a slot needs a part."""
        is_image = self.is_image
        ids, zigzag = np.cumsum(is_image) - 1, Partition.zigzag([self.positions] * self.documents, self.cp)
        lines: list[Integers] = []
        for replica in range(self.dp):
            for member in range(self.cp):
                places = zigzag.rows(member)
                parts = np.array_split(places, self.tp) if split else [places] * self.tp
                lines += [ids[part[is_image[part]]] + replica * self.rows for part in parts]
        return Partition.from_rows(lines)

    def gathered_rows(self) -> tuple[float, float]:
        """Rows that each rank receives in the design that gathers, forward and backward, with ring collectives."""
        fan_in, fan_out = self.replicas
        return (1 - 1 / fan_in) * self.rows, (2 * (1 - 1 / self.cp) + fan_out - 1) * self.rows


# Over 4 ranks, each is one of the two replicas' worth of the same layout over 8.
CASES = {
    4: (
        BridgeCase("fan-in", 2, 2, 2, 2, 1),
        BridgeCase("equal", 4, 1, 2, 2, 1),
        BridgeCase("fan-out", 4, 1, 1, 2, 2),
        BridgeCase("long", 1, 4, 1, 4, 1),
    ),
    8: (
        BridgeCase("fan-in", 2, 4, 2, 2, 2),
        BridgeCase("equal", 4, 2, 2, 2, 2),
        BridgeCase("fan-out", 4, 2, 1, 2, 4),
        BridgeCase("long", 1, 8, 1, 8, 1),
    ),
}
# The cases of a study of other designs: rows of bfloat16.
STUDY = (
    BridgeCase("A", 2, 4, 2, 2, 2, 32768, documents=2),
    BridgeCase("B", 4, 2, 1, 2, 4, 32768),
    BridgeCase("C", 1, 8, 2, 4, 1, 131072, share=0.75, hidden=5120),
    BridgeCase("D", 1, 32, 4, 8, 1, 262144, share=0.8, hidden=8192),
    BridgeCase("E", 8, 8, 2, 4, 8, 65536, hidden=5120),
    BridgeCase("F", 2, 32, 4, 8, 2, 131072, share=0.6, hidden=8192),
)


def with_rows(case: BridgeCase, rows: int, hidden: int) -> BridgeCase:
    """The same layouts with so many rows of images in each replica of the language model, and this hidden size."""
    return replace(case, positions=round(rows / case.share), hidden=hidden)


def bytes_table() -> Iterator[dict[str, Any]]:
    """MiB that a rank receives, mean over the ranks, in the cases of the study; by arithmetic alone."""
    for case in STUDY:
        mib = 2 * case.hidden / 2**20
        row: dict[str, Any] = {"case": case.name, "layouts": case.label, "ranks": case.ranks, "rows": case.rows}
        row |= {name: getattr(case, name) for name in ("positions", "documents", "share", "hidden")}
        row["gathered"] = [rows * mib for rows in case.gathered_rows()]
        row["direct"] = [rows * mib for rows in received_rows(case)]
        row["split"] = [rows * mib for rows in received_rows(case, split=True)]
        splice = case.positions * case.documents * mib
        yield row | {"whole splice": splice, "local splice": splice / case.cp}


def received_rows(case: BridgeCase, *, split: bool = False) -> tuple[float, float]:
    """Mean rows received by the planner's exchanges there and back, which are the least that there can be."""
    there = Exchange(case.have(split), case.need(split))
    means = []
    for exchange in (there, there.reverse()):
        received = [exchange.received_rows(rank) for rank in range(case.ranks)]
        assert received == [exchange.lower_bound_rows(rank) for rank in range(case.ranks)]
        means.append(float(np.mean(received)))
    return means[0], means[1]
