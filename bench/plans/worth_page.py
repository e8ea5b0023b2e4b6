"""The record of `worth.py` as a page and as a picture, and the tables that docs/planning.md repeats."""

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

from worth_cases import NAMES, NETWORKS, PUBLISHED, SLOTS, WEIGHTS, WEIGHTS_OF_EXPERTS

from longspan.report.page import svg_element, svg_text

Row = dict[str, Any]
AS_GOOD = 1.03  # gains below this: one degree is as good
NOTE = """\
Predicted: `Machine.known("H200").with_link("across", bytes_per_second=...)`; no step was run. Batches of 32K tokens a
slot, none longer than 128K, seed 7, lockstep, hosts of 8 slots. The best plan of one degree is the fastest over all
degrees that hold the longest document, and each of its groups has its fastest type, as in dynamic plans. Key/value
heads are repeated where a degree exceeds them. *Gain* is the time of that plan over the time of the dynamic one;
*allowed* is its time over the lower bound, which no plan can beat. A network below 10 GB/s goes through sockets. Gains
are of one draw of lengths; another seed changes them. Weights are sharded by FSDP2 over all slots, gathered twice and
summed once in every micro-batch, unless a row says otherwise."""
WEIGHTS_NOTE = """\
*FSDP2*: over all slots, the default. *Gathered once*: with `reshard_after_forward = false`. *HSDP*: sharded inside
hosts, copied between them. *Free*: `context.mode = "free"`, gathered and summed once a step. *Not counted*: as if
weights were whole everywhere and needed no sum."""
PUBLISHED_NOTE = """\
Megatron-LM pull request 2000: Qwen3-30B-A3B on 32 GPUs, 3,072 tokens a rank, longest 49,152, degrees to 16; 1.48 × is
claimed there. Lengths here are lognormal, 8 × 32 × 3,072 tokens a step. *Messages* and *waits* are shares of the
dynamic step: messages that kernels do not hide, inside hosts too, and waits for slower slots and for weights. Of
messages the bound has only those of documents that are longer than a slot's cap, as far as kernels cannot hide them.
The last two columns are the times of plans of degree 16, the only one up to 16 that holds the longest document, over
that of the dynamic one: as a ring, and under the best type of each group."""
EMULATED_NOTE = """\
Attention's FLOPs for each byte that crosses hosts grow with the rows of a document. So a document on a slow network
waits as long for messages, relative to its kernels, as a shorter one on a fast network: rows × bytes/s is the same.
The table has one document over two hosts of 4 H200, 32 query and 8 key/value heads of 128; FLOPs a byte are those
under `a2a`."""
SENSITIVITY_NOTE = """\
Lognormal lengths, 8K tokens a slot, 25 GB/s a GPU between hosts, weights not counted. Each constant is 20 % lower (−)
and higher (+). *Moved* is the share of rows in groups of another degree or type. *Regret* is how much longer the plan
that was made with the wrong constant takes, at the right price; below 0 it is faster by chance. *One degree* is the
degree that is best at the wrong price, and its regret."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in markdown."""
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join(['---'] * len(head))} |"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def select(record: Row, **values: Any) -> list[Row]:
    """The rows of gains that have these values, in hosts of 8 unless told."""
    values = {"node_size": 8, "weights": "FSDP2"} | values
    return [row for row in record["gains"].values() if all(row[name] == value for name, value in values.items())]


def fixed_text(row: Row) -> str:
    """The best plan of one degree in words."""
    kinds = "/".join(kind for kind in row["fixed_types"] if kind != "one slot")
    return f"cp {row['fixed_cp']}{f' {kinds}' if kinds else ''}"


def gain_cell(row: Row) -> str:
    """The gain, what is allowed, and the plan of one degree."""
    return f"{row['gain']:.2f} of {row['fixed'] / row['bound']:.2f} ({fixed_text(row)})"


def by_network(record: Row, names: Sequence[str], rows: Sequence[tuple[Sequence[str], Row]]) -> list[str]:
    """A table with a column for each network; `rows` are the first cells and the values that select the gains."""
    lines: list[Sequence[str]] = []
    for cells, values in rows:
        gains = {row["gbps"]: gain_cell(row) for row in select(record, **values)}
        if gains:
            lines.append([*cells, *(gains.get(gbps, "") for gbps in NETWORKS)])
    return table([*names, *(f"{gbps:g} GB/s" for gbps in NETWORKS)], lines)


def usual(**values: Any) -> Row:
    """What selects rows of the usual case, with changes."""
    return {"cap": 8192, "heads": "32/8"} | values


def summary(record: Row) -> str:
    """How many rows gain how much, in a sentence."""
    gains = [row["gain"] for row in record["gains"].values()]
    as_good = sum(gain < AS_GOOD for gain in gains)
    much = sum(gain >= 1.1 for gain in gains)
    return (
        f"Of {len(gains)} rows, one degree is as good (less than 3 % slower) in {as_good}, and dynamic plans are at "
        f"least 1.1 times as fast in {much}. The least gain is {min(gains):.3f}, the greatest {max(gains):.2f}. "
        f"Where one host holds the longest document of the step, gains are {_range(record, True)}; where it does not, "
        f"{_range(record, False)}."
    )


def _range(record: Row, fits: bool) -> str:
    """The least, median and greatest gain of rows whose longest document fits a host, or does not."""
    rows = record["gains"].values()
    gains = sorted(row["gain"] for row in rows if (row["longest"] <= row["node_size"] * row["cap"]) == fits)
    return f"{gains[0]:.2f} to {gains[-1]:.2f} (median {gains[len(gains) // 2]:.2f}, {len(gains)} rows)"


def markdown(record: Row) -> str:
    """The record as a page."""
    lines = [
        "# What dynamic plans are worth over the best plan of one degree",
        "",
        f"Command: `{record['command']}`.",
        "",
    ]
    lines += [NOTE, "", f"**{summary(record)}** Cells: gain of allowed (the best plan of one degree).", ""]
    lines += ["## Networks and slots, 8K tokens a slot, 32 query and 8 key/value heads (Qwen3-8B)", ""]
    rows = [((name, f"{n}"), usual(lengths=name, slots=n)) for name in NAMES for n in SLOTS]
    lines += by_network(record, ("lengths", "slots"), rows)
    lines += ["## Published figures of long fine-tuning sets, 64 slots", ""]
    lines += [f"- `{name}`: {words}" for name, words in record["published_lengths"].items()]
    lines += ["", "The shape between these figures is assumed: of no set a whole histogram was found.", ""]
    lines += by_network(record, ("lengths",), [((name,), usual(lengths=name, slots=64)) for name in PUBLISHED])
    lines += ["## How weights are held, lognormal lengths, 64 slots, 8K tokens a slot", "", WEIGHTS_NOTE, ""]
    rows = [((weights,), usual(lengths="lognorm", slots=64, weights=weights)) for weights in WEIGHTS]
    lines += by_network(record, ("weights",), rows)
    lines += ["## One host of 8", ""]
    one_host = [row for row in select(record, slots=8) if row["gbps"] == 50]
    lines += table(
        ("lengths", "tokens a slot", "gain"), [(r["lengths"], f"{r['cap'] // 1024}K", gain_cell(r)) for r in one_host]
    )
    lines += ["## Two emulated hosts of 4 at 2.65 GB/s", ""]
    emulated = select(record, node_size=4)
    lines += table(
        ("lengths", "tokens a slot", "gain"), [(r["lengths"], f"{r['cap'] // 1024}K", gain_cell(r)) for r in emulated]
    )
    lines += [*published_lines(record), *emulated_lines(record), *sensitivity_lines(record)]
    return "\n".join(lines).rstrip() + "\n"


def published_lines(record: Row) -> Iterator[str]:
    """The published setting of dynamic context parallelism."""
    yield from ["## The published setting of dynamic context parallelism", ""]
    yield PUBLISHED_NOTE
    head = (
        "GB/s",
        "weights",
        "seed",
        "longest",
        "dynamic s",
        "over the bound",
        "messages",
        "waits",
        "ring, 16",
        "best type, 16",
    )
    yield ""
    yield from table(head, [_published_cells(row) for row in record["published"].values()])


def _published_cells(row: Row) -> tuple[str, ...]:
    shares = (f"{row['messages']:.0%}", f"{row['waits']:.0%}")
    over_bound, *ratios = (f"{row[name]:.2f}" for name in ("over_bound", "over_ring_16", "over_fixed_16"))
    return (
        f"{row['gbps']:g}",
        row["weights"],
        f"{row['seed']}",
        f"{row['longest']:,}",
        f"{row['dynamic']:.2f}",
        over_bound,
        *shares,
        *ratios,
    )


def emulated_lines(record: Row) -> Iterator[str]:
    """Which real network each emulated case stands for."""
    yield from ["## Which real network an emulated case stands for", ""]
    yield EMULATED_NOTE
    yield ""
    rows = [row for rows in record["emulated"].values() for row in rows]
    networks = list(rows[0]["stands_for"])
    head = (
        "rows at 2.65 GB/s",
        "FLOPs a crossing byte",
        "share of time that waits, `a2a`",
        *(f"rows at {n} GB/s" for n in networks),
    )
    yield from table(head, [_emulated_cells(row) for row in rows])


def _emulated_cells(row: Row) -> list[str]:
    real = [f"{rows / 1024:.3g}K" for rows in row["stands_for"].values()]
    return [f"{row['rows'] // 1024}K", f"{row['flops_per_byte']:,.0f}", f"{row['exposed']:.0%}", *real]


def sensitivity_lines(record: Row) -> Iterator[str]:
    """What a constant that is 20 % wrong changes."""
    yield from ["## Does a wrong constant change the plan?", ""]
    yield SENSITIVITY_NOTE
    yield ""
    rows = [row for part in record["sensitivity"].values() for row in part]
    kept = sum(row["chosen"] == "dynamic" for row in rows)
    yield (
        f"**In {kept} of {len(rows)} rows the dynamic plan is still predicted to be the faster choice. "
        f"The regret is at most {max(row['regret'] for row in rows):.1%}.**"
    )
    yield ""
    for slots, rows in record["sensitivity"].items():
        worst = max(rows, key=lambda row: row["regret"])
        yield from [f"### {int(slots):,} slots: regret at most {max(0.0, worst['regret']):.1%}", ""]
        yield from table(
            ("constant", "−/+", "moved", "regret", "chosen", "one degree", "its regret"), map(_sensitive_cells, rows)
        )


def _sensitive_cells(row: Row) -> tuple[str, ...]:
    sign = "−" if row["factor"] < 1 else "+"
    changed = row["fixed_cp"] != row["fixed_cp_of_right"]
    degree = f"{row['fixed_cp']}{' (of right: ' + str(row['fixed_cp_of_right']) + ')' if changed else ''}"
    return (
        row["constant"],
        sign,
        f"{row['moved']:.0%}",
        f"{row['regret']:+.1%}",
        row["chosen"],
        degree,
        f"{row['fixed_regret']:+.1%}",
    )


def tables_of_pages(record: Row) -> Iterator[str]:
    """The tables of docs/planning.md: gains, weights, published, emulated, gains by documents, regrets."""
    gains: list[Sequence[str]] = []
    for name in NAMES:
        for gbps in NETWORKS:
            of_slots = {row["slots"]: f"{row['gain']:.2f}" for row in select(record, **usual(lengths=name, gbps=gbps))}
            gains.append((SHORT[name], f"{gbps:g} GB/s", *(of_slots[slots] for slots in SLOTS)))
    yield _joined(("lengths", "between hosts", *(f"{slots:,} GPUs" for slots in SLOTS)), gains)
    weights_rows: list[Sequence[str]] = []
    for weights in WEIGHTS:
        of_gbps = {row["gbps"]: row for row in select(record, **usual(lengths="lognorm", slots=64, weights=weights))}
        cells = (f"{of_gbps[gbps]['gain']:.2f}, {of_gbps[gbps]['dynamic']:.3g} s" for gbps in NETWORKS)
        weights_rows.append((weights, *cells))
    yield _joined(("weights", *(f"{gbps:g} GB/s" for gbps in NETWORKS)), weights_rows)
    published: list[Sequence[str]] = []
    for weights in WEIGHTS_OF_EXPERTS:
        for gbps in sorted({row["gbps"] for row in record["published"].values()}, reverse=True):
            rows = [r for r in record["published"].values() if (r["gbps"], r["weights"]) == (gbps, weights)]
            names = ("dynamic", "over_ring_16", "over_fixed_16")
            published.append((weights, f"{gbps:g} GB/s", *(_span([row[name] for row in rows]) for name in names)))
    head = (
        "weights",
        "between hosts",
        "dynamic s",
        "ring of 16 over dynamic",
        "degree 16 at its best types over dynamic",
    )
    yield _joined(head, published)
    rows = [row for rows in record["emulated"].values() for row in rows]
    head = ("rows at 2.65 GB/s", *(f"rows at {n} GB/s" for n in rows[0]["stands_for"]))
    yield _joined(head, [(cells[0], *cells[3:]) for cells in map(_emulated_cells, rows)])
    regrets: list[Sequence[str]] = []
    for slots, rows in record["sensitivity"].items():
        worst = max(rows, key=lambda row: row["regret"])
        changed = sum(row["fixed_cp"] != row["fixed_cp_of_right"] for row in rows)
        sign = "20 % too low" if worst["factor"] < 1 else "20 % too high"
        most = f"{worst['regret']:.1%} ({worst['constant']}, {sign})"
        moved = f"{max(row['moved'] for row in rows):.0%}"
        regrets.append((f"{int(slots):,}", moved, most, f"{changed} of {len(rows)}"))
    yield _joined(("documents", "gain"), gains_by_documents(record))
    yield _joined(("slots", "rows that move, at most", "longer by, at most", "another best degree"), regrets)


GROUPS = {  # of rows in hosts of 8: their names on the page, and which they are
    "any, on one host": lambda row: row["slots"] == 8,
    "the longest fits one host, on 16 GPUs": lambda row: row["slots"] == 16,
    "about equally long, or nearly all short: published lengths of LongAlign (8K to 64K), and of Llama 3's fine-tuning "
    "set (0.11 % long), with an assumed shape between the published figures": lambda row: (
        row["lengths"] in ("longalign", "llama3-sft")
    ),
    "long reasoning: published quantiles of Nemotron-Cascade-2-SFT-Data, math (median 12K, a tenth above 43K), on 64 "
    "GPUs": lambda row: row["lengths"] == "nemotron-math",
    "of two lengths, the longer of which fills a host": lambda row: row["lengths"] == "bimodal" and row["slots"] >= 64,
    "lognormal lengths and source files on 64 GPUs or more": lambda row: (
        row["lengths"] in ("lognorm", "files") and row["slots"] >= 64
    ),
}


def gains_by_documents(record: Row) -> Iterator[Sequence[str]]:
    """The gains of each of GROUPS, from the least to the greatest, with their median where there are many."""
    rows = [row for row in record["gains"].values() if row["node_size"] == 8]
    for name, is_in in GROUPS.items():
        gains = sorted(row["gain"] for row in rows if is_in(row))
        many = len(gains) > 20
        yield name + f" ({len(gains)} rows)" * many, _span(gains) + f", median {gains[len(gains) // 2]:.2f}" * many


def _joined(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(table(head, rows)).strip()


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


SHORT = {"lognorm": "lognormal", "bimodal": "bimodal", "files": "source files"}


# The colours of page.css, for light and for dark pages.
STYLE = """
svg{--card:#fff;--ink:#1d2126;--soft:#5d6670;--grid:#ecece8;--axis:#9aa4af;
--c0:#2f6fb3;--c1:#d1495b;--c2:#228833;--c3:#aa3377}
@media (prefers-color-scheme: dark){svg{--card:#1b1f25;--ink:#e8eaed;--soft:#9aa4af;--grid:#2c323a;--axis:#77808a;
--c0:#6aaeff;--c1:#ff8090;--c2:#5fcf73;--c3:#e083bd}}
text{font:12px system-ui,sans-serif;fill:var(--soft)}.title,.strong{font-weight:600;fill:var(--ink)}
.tick{font-size:11px}.paper{fill:var(--card)}
.grid{stroke:var(--grid);fill:none}.grid.short,.axis{stroke:var(--axis);fill:none}
.reference{stroke:var(--soft);stroke-dasharray:4 3;fill:none}
.halo{paint-order:stroke;stroke:var(--card);stroke-width:4px}.mark{stroke:var(--card);stroke-width:1.2}
.curve{fill:none;stroke-width:1.8;stroke-linejoin:round}.curve.faint{opacity:.38}
.curve.c0{stroke:var(--c0)}.curve.c1{stroke:var(--c1)}.curve.c2{stroke:var(--c2)}.curve.c3{stroke:var(--c3)}
.mark.c0{fill:var(--c0)}.mark.c1{fill:var(--c1)}.mark.c2{fill:var(--c2)}.mark.c3{fill:var(--c3)}
"""
PANEL = 225
HEIGHT = 300
LEFT = 44
TOP = 78
PLOT = 170
COLORS = dict(zip(NAMES, range(len(NAMES)), strict=True))
WORDS = {"lognorm": "lognormal", "bimodal": "bimodal: 90 % of 2K, 10 % of 64K", "files": "source files"}


def picture(record: Row) -> str:
    """Gains by slots, a panel for each network, as the text of an .svg file."""
    most = max(row["gain"] for row in select(record, **usual()) if row["lengths"] in NAMES and row["slots"] in SLOTS)
    width = PANEL * len(NETWORKS) + 20
    heading = "Predicted gain of dynamic plans over the best plan of one degree and type (1.0: one degree is as good)"
    legend = [
        part
        for i, name in enumerate(NAMES)
        for part in (_mark(60 + 240 * i, 46, COLORS[name]), svg_text(WORDS[name], 70 + 240 * i, 50, "start"))
    ]
    panels = [part for i, gbps in enumerate(NETWORKS) for part in _panel(record, gbps, 10.0 + PANEL * i, most)]
    footer = "GPUs (H200, hosts of 8; 32 query and 8 key/value heads, 8K tokens a slot, 32K tokens a GPU and step)"
    return (
        svg_element(
            "svg",
            svg_element("title", escape(heading)),
            svg_element("style", STYLE),
            svg_element("rect", class_="paper", width=width, height=HEIGHT),
            svg_text(heading, 12, 22, "start", "title"),
            *legend,
            *panels,
            svg_text(footer, LEFT, HEIGHT - 10.0, "start"),
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {width} {HEIGHT}",
            role="img",
        )
        + "\n"
    )


def _panel(record: Row, gbps: float, left: float, most: float) -> Iterator[str]:
    start = left + LEFT
    end = left + PANEL - 14
    bottom = TOP + PLOT
    top_value = most * 1.06

    def up(gain: float) -> float:
        return bottom - math.log(max(gain, 0.97) / 0.97) / math.log(top_value / 0.97) * PLOT

    def across(slots: int) -> float:
        return start + 10 + SLOTS.index(slots) / (len(SLOTS) - 1) * (end - start - 20)

    yield svg_text(f"{gbps:g} GB/s between hosts", start, TOP - 10.0, "start", "strong")
    for gain in (value for value in (1.0, 1.1, 1.25, 1.5, 2.0, 2.5, 3.0) if value <= top_value):
        kind = "reference" if gain == 1.0 else "grid"
        yield svg_element("path", class_=kind, d=f"M{start:.1f} {up(gain):.1f}H{end:.1f}")
        yield svg_text(f"{gain:g}", start - 6, up(gain) + 4, "end", "tick")
    for slots in SLOTS:
        yield svg_text(f"{slots:,}", across(slots), bottom + 18.0, "middle", "tick")
    for name in NAMES:
        rows = [row for row in select(record, **usual(lengths=name, gbps=gbps)) if row["slots"] in SLOTS]
        points = [(across(row["slots"]), up(row["gain"])) for row in sorted(rows, key=lambda row: row["slots"])]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        yield svg_element("path", class_=f"curve c{COLORS[name]}", d=path)
        yield from (_mark(x, y, COLORS[name]) for x, y in points)


def _mark(x: float, y: float, color: int) -> str:
    return svg_element("circle", class_=f"mark c{color}", cx=f"{x:.1f}", cy=f"{y:.1f}", r=4)
