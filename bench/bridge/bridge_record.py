"""Records of `bench/bridge/bridge.py` as Markdown."""

from collections.abc import Iterator
from typing import Any

from longspan.bench.record import origin_text
from longspan.plain_text import markdown_table

AIMS = {"gathering": 0.5, "own bytes": 1.3, "uneven": 1.3}  # of the bridge's time to theirs, both ways together
DIRECTIONS = ("forward", "backward")


def as_markdown(record: dict[str, Any]) -> str:
    """The record for people who read bench/records."""
    title, body = {"bridge": _times, "bridge bytes": _bytes, "bridge plans": _plans}[record["bench"]](record)
    return f"# {title}\n\n{origin_text(record)}\n\n{body}\n"


def _times(record: dict[str, Any]) -> tuple[str, str]:
    nodes = f" as {record['nodes']} emulated nodes" if record["nodes"] > 1 else ""
    title = f"The bridge between two layouts over {record['ranks']} ranks{nodes} ({record['backend']})"
    names = ("layout", "TP·DP → TP·CP·DP", "rows", "direction", "bridge, ms", "gathering, ms", "ratio")
    names += (
        "own bytes, ms",
        "ratio",
        "uneven, ms",
        "ratio",
        "MiB received",
        "gathering, MiB",
        "own bytes, GB/s",
        "host, µs",
    )
    lines = [cells for row in record["rows"] for cells in _cells(row)]
    kinds = sorted({row["dtype"].removeprefix("torch.") for row in record["rows"]})
    note = (
        f"Rows of {record['hidden']:,} {' and '.join(kinds)}; `rows` are those of images in each replica of the "
        "language model, whose sequence has as many positions of text between them, dealt zigzag. Both designs gave "
        "every rank the same rows and gradients, bit for bit. Milliseconds: median of "
        f"{record['repeats']} turns, of the slowest rank. *Gathering*: all rows of a replica to every rank and a sum "
        "of gradients over cp. *Own bytes*: an all-to-all in which every rank sends and receives as much as the "
        "busiest of the bridge, *uneven* one with its counts; neither copies rows. MiB are the mean over ranks. "
        "Host: until everything is launched."
    )
    return title, f"{note}\n\n{markdown_table(names, lines)}\n\n{_aims(record)}{_kernels(record)}"


def _cells(row: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    head = (row["layout"], row["degrees"], f"{row['rows']:,}")
    for direction in (*DIRECTIONS, "both"):
        ours, theirs, own, uneven = (
            _seconds(row, n, direction) for n in ("bridge", "gathering", "own bytes", "uneven")
        )
        received, gathered, busiest = (_mib(row, name, direction) for name in ("bridge", "gathering", "busiest"))
        rate = f"{busiest * 2**20 / own / 1e9:.0f}" if busiest else "–"
        yield (
            *head,
            direction,
            *(f"{1e3 * ours:.3f}", f"{1e3 * theirs:.3f}", f"{ours / theirs:.2f}"),
            *(
                (f"{1e3 * own:.3f}", f"{ours / own:.2f}", f"{1e3 * uneven:.3f}", f"{ours / uneven:.2f}")
                if busiest
                else ("–",) * 4
            ),
            *(f"{received:,.4g}", f"{gathered:,.4g}", rate, f"{1e6 * _seconds(row, 'bridge', direction, 'host_'):.0f}"),
        )


def _seconds(row: dict[str, Any], name: str, direction: str, where: str = "") -> float:
    return sum(
        row[f"{where}seconds"][f"{name} {d}"] for d in DIRECTIONS if direction in (d, "both") and _moves(row, name, d)
    )


def _moves(row: dict[str, Any], name: str, direction: str) -> bool:
    """Whether a plain exchange has anything to move, so that it was timed."""
    return name not in ("own bytes", "uneven") or row["mib"]["busiest"][direction] > 0


def _mib(row: dict[str, Any], name: str, direction: str) -> float:
    return sum(row["mib"][name][d] for d in DIRECTIONS if direction in (d, "both"))


def _aims(record: dict[str, Any]) -> str:
    if record["backend"] != "nccl":
        return "Times on CPUs say nothing about GPUs: this is a check of the path."
    lines: list[str] = []
    for name, most in AIMS.items():
        ratios = {
            f"{row['layout']} {row['rows']:,}": _seconds(row, "bridge", "both") / _seconds(row, name, "both")
            for row in record["rows"]
        }
        over = [f"{case} ({ratio:.2f})" for case, ratio in ratios.items() if ratio > most]
        what = f"at most {most:g} of the time of {name}, forward and backward together"
        lines.append(
            f"- Aim, {what}: {len(ratios) - len(over)} of {len(ratios)} cases"
            f"{'; not ' if over else ''}{', '.join(over)}."
        )
    return "\n".join(lines)


def _kernels(record: dict[str, Any]) -> str:
    """What one call of the bridge runs on the first rank, where that was profiled, with the most rows."""
    most = max((row["rows"] for row in record["rows"] if "kernels" in row), default=0)
    lines = [
        f"- {row['layout']}, {name.removeprefix('bridge ')}: "
        + "; ".join(f"{k['calls']} x `{k['name'][:60]}` {1e6 * k['seconds']:,.0f} µs" for k in kernels[:6])
        for row in record["rows"]
        if row["rows"] == most and "kernels" in row
        for name, kernels in row["kernels"].items()
    ]
    return "\n".join([f"\n\nKernels of one call with {most:,} rows, first rank:\n", *lines]) if lines else ""


def _bytes(record: dict[str, Any]) -> tuple[str, str]:
    names = ("case", "TP·DP → TP·CP·DP", "sequences of a replica", "images", "hidden", "gathering", "bridge")
    names += ("times fewer", "bridge, split", "times fewer", "splice: whole / local")
    lines = []
    for row in record["rows"]:
        gathered, direct, split = (row[name] for name in ("gathered", "direct", "split"))
        sequences = f"{row['documents']} x {row['positions']:,}"
        lines.append(
            (
                *(row["case"], row["layouts"], sequences, f"{row['share']:.0%}", f"{row['hidden']:,}"),
                *(_pair(gathered), _pair(direct), f"{sum(gathered) / sum(direct):.1f}"),
                *(_pair(split), f"{sum(gathered) / sum(split):.1f}"),
                f"{row['whole splice']:,.0f} / {row['local splice']:,.0f}",
            )
        )
    note = (
        "MiB that a rank receives forward / backward, mean over the ranks, of rows in bfloat16; text and images in "
        "turn, positions dealt zigzag over cp. *Gathering* by its formulas with ring collectives; *bridge* by the "
        "planner, on every rank exactly the rows that it needs and has not. *Split*: the tensor-parallel ranks of the "
        "encoder keep a part of its rows each, and those of the language model need a part (sequence parallel). "
        "*Splice*: embeddings of a whole replica's sequences, and of a slot's positions."
    )
    return "Bytes of the bridge and of gathering, by arithmetic", f"{note}\n\n{markdown_table(names, lines)}"


def _pair(values: list[float]) -> str:
    return " / ".join(f"{value:,.0f}" for value in values)


def _plans(record: dict[str, Any]) -> tuple[str, str]:
    names = list(record["rows"][0])
    lines = [
        [f"{cell:,.4g}" if isinstance(cell, float) else str(cell) for cell in row.values()] for row in record["rows"]
    ]
    note = (
        "One process as one of the ranks, the others answer at once. Plans: milliseconds from lists of row ids to a "
        "bridge that can be called, the least of three. Calls: with 8 values a row, microseconds of the host, the "
        "least of many, and operators of torch, of which those that are computing start a kernel."
    )
    return "What the bridge costs the host", f"{note}\n\n{markdown_table(names, lines)}"
