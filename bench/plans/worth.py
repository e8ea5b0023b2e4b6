"""What dynamic plans are worth: their predicted time under that of the best plan of one degree, by network. No GPU.

    python bench/plans/worth.py --out bench/records/dynamic-worth.json --plot docs/dynamic-worth.svg   # some 7 minutes
    python bench/plans/worth.py --draw bench/records/dynamic-worth.json --plot docs/dynamic-worth.svg  # only draw
    python bench/plans/worth.py --draw bench/records/dynamic-worth.json --tables   # those of docs/planning.md
    python bench/plans/worth.py --quick                                            # a few small rows, for a test

All seconds are predictions of `Machine.known("H200").with_link("across", ...)`, of batches of 32K tokens a slot, none
longer than 128K, in hosts of 8 slots. The best plan of one degree is the fastest over all degrees that hold the longest
document; each of its groups has the type that is fastest for it, as have those of dynamic plans. `gain` is its time
over that of the dynamic plan, `messages` and `waits` are shares of the dynamic step, `regret` is how much longer a plan
takes that was made with a wrong constant, and `moved` the share of rows in groups of another degree or type then. A run
that is stopped goes on with the rows that `--out` lacks.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from html import escape
from pathlib import Path
from typing import Any, Literal

import numpy as np
from sensitivity import plan_sensitivity, rows_by_way, slower_link

from longspan import Layout, plan_dynamic, plan_fixed
from longspan.model.presets import PRESETS
from longspan.plain_text import markdown_table
from longspan.plan import AttentionCall, Cost, CostSettings, Group, Machine, Plan, PlanOptions
from longspan.plan.cost.links import LEVELS
from longspan.plan.distributions import sample_lengths
from longspan.plan.shape.model_shape import QWEN3_8B
from longspan.report.gantt import svg_element, svg_text

Row = dict[str, Any]
PUBLISHED_SEEDS = range(3)
PUBLISHED_SLOTS = 32
PUBLISHED_CAP = 3072
SENSITIVE_SLOTS = (64, 256, 1024, 8192)
EMULATED_ROWS = (16384, 32768, 65536, 131072, 262144, 524288)
COMMAND = "python bench/plans/worth.py --out bench/records/dynamic-worth.json --plot docs/dynamic-worth.svg"
EMULATED_GBPS = 2.65
REAL_GBPS = (12.5, 25.0, 50.0)


# ---- cases

LONGEST = 131072
TOKENS_PER_SLOT = 32768
NETWORKS = (50.0, 25.0, 12.5, 2.65)  # GB/s a GPU between hosts
SLOTS = (16, 64, 256, 1024)
NAMES = ("lognorm", "bimodal", "files")
QWEN3_30B_A3B = {"model_type": PRESETS["qwen3-30b-a3b"].model_type, **PRESETS["qwen3-30b-a3b"].values}
MODELS = {"32/8": ("Qwen3-8B", QWEN3_8B), "32/4": ("Qwen3-30B-A3B", QWEN3_30B_A3B)}
# Published figures of long fine-tuning sets. Of no set a whole histogram was found, so the shape between the published
# figures is assumed: exponential around each mean, and log-uniform between two ends or quantiles.
MATH_QUANTILES = {0.0: 350, 0.5: 12432, 0.9: 43089, 0.95: 57582, 0.99: 84679, 1.0: 140459}
PUBLISHED = {
    "llama3-sft": "99.89 % of examples short, 1K tokens on average, and 0.11 % long, 37K on average (of Llama 3, as "
    "cited for arXiv 2505.19609 at en.papernotes.org); each part exponential",
    "longalign": "10,000 examples of 8K to 64K tokens (LongAlign, arXiv 2401.18058); log-uniform in between",
    "nemotron-math": "quantiles of nvidia/Nemotron-Cascade-2-SFT-Data, math (Megatron-Bridge pull request 3316): 350 "
    "tokens at least, median 12,432, 43,089 at 90 %, 57,582 and 84,679 (taken as 95 % and 99 %), 140,459 at most (cut "
    "to 128K); log-uniform in between",
}


# How weights are held: FSDP2 over all slots, the default; with reshard_after_forward = false, and with
# sync_each_batch = false too; sharded inside hosts and copied between them; in free mode; experts shared by 8 slots.
WEIGHTS = ("FSDP2", "gathered once", "summed once", "HSDP", "free", "not counted")
WEIGHTS_OF_EXPERTS = (*WEIGHTS[:3], "ep 8", "ep 8, gathered once", "ep 8, summed once", *WEIGHTS[3:])


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table: `gbps` across hosts, heads as query/key-value heads of a model of `MODELS`."""

    lengths: str = "lognorm"
    slots: int = 64
    cap: int = 8192
    gbps: float = 50.0
    heads: str = "32/8"
    node_size: int = 8
    seed: int = 7
    weights: str = "FSDP2"

    @property
    def key(self) -> str:
        values = self.lengths, self.slots, self.cap, f"{self.gbps:g}", self.heads, self.node_size, self.seed
        return " ".join(map(str, (*values, self.weights)))

    @property
    def query_heads(self) -> int:
        return int(self.heads.partition("/")[0])

    def documents(self) -> list[int]:
        """32K tokens a slot, none longer than 128K or than all slots hold."""
        longest = min(LONGEST, self.slots * self.cap)
        tokens = self.slots * TOKENS_PER_SLOT
        if self.lengths not in PUBLISHED:
            return sample_lengths(self.lengths, tokens, seed=self.seed, longest=longest).tolist()
        random = np.random.default_rng(self.seed)
        lengths = np.clip(_draw_published(self.lengths, random, tokens // 256), 16, longest).astype(np.int64)
        return lengths[: int(np.searchsorted(np.cumsum(lengths), tokens)) + 1].tolist()

    def cost(self) -> Cost:
        return cost_of(self.heads, self.gbps, self.weights, self.slots, self.node_size)


@cache
def cost_of(heads: str, gbps: float, weights: str, slots: int, node_size: int = 8) -> Cost:
    """The price of a model on H200s with so many GB/s a GPU across hosts, and weights of `WEIGHTS` over the slots."""
    machine = Machine.known("H200").with_link("across", bytes_per_second=gbps * 1e9)
    model = MODELS[heads][1]
    if weights == "not counted":
        return machine.cost(model)
    copies = max(1, slots // node_size) if weights == "HSDP" else 1
    settings = CostSettings(
        shards=slots // copies,
        dp_replicate=copies,
        ep=8 if "ep" in weights else 1,
        reshard_after_forward="once" not in weights,
        sync_each_batch="summed" not in weights,
        free=weights == "free",
    )
    return machine.cost(model, settings)


def _draw_published(name: str, random: np.random.Generator, count: int) -> np.ndarray:
    if name == "nemotron-math":
        shares = [*MATH_QUANTILES]
        lengths = [*MATH_QUANTILES.values()]
        return np.exp(np.interp(random.random(count), shares, np.log(lengths)))
    if name == "longalign":
        return np.exp(random.uniform(np.log(8192), np.log(65536), count))
    return random.exponential(np.where(random.random(count) < 0.0011, 37000.0, 1000.0))


def cases() -> Iterator[Case]:
    """The selection, by what it varies: networks and slots, published sets, weights, one host, emulated ones."""
    for gbps in NETWORKS:
        yield from (Case(lengths=name, slots=slots, gbps=gbps) for name in NAMES for slots in SLOTS)
        yield from (Case(lengths=name, gbps=gbps) for name in PUBLISHED)
        yield from (Case(gbps=gbps, weights=weights) for weights in WEIGHTS[1:])
    yield from (Case(lengths=name, slots=8, cap=cap) for name in NAMES for cap in (8192, 16384, 32768))
    yield from (Case(lengths=name, slots=8, cap=cap, gbps=2.65, node_size=4) for name in NAMES for cap in (8192, 16384))


# ---- plans


@dataclass(frozen=True)
class Problem:
    """Documents, slots and options that several plans are made with."""

    lengths: Sequence[int]
    home: Layout
    options: PlanOptions

    @classmethod
    def of(cls, case: Case) -> "Problem":
        options = PlanOptions(
            cp_comm_type="auto",
            heads=case.query_heads,
            max_tokens_per_slot=case.cap,
            cost=case.cost(),
            node_size=case.node_size,
            mode=mode_of(case.weights),
        )
        return cls(case.documents(), Layout(case.slots), options)

    def dynamic(self, cost: Cost | None = None, **keywords: Any) -> Plan:
        return plan_dynamic(self.lengths, self.home, options=self.options, cost=cost or self.options.cost, **keywords)

    def fixed(self, degree: int, cost: Cost | None = None) -> Plan:
        return plan_fixed(self.lengths, self.home, degree, options=self.options, cost=cost or self.options.cost)

    def best_fixed(self, cost: Cost | None = None) -> Plan:
        """The fastest plan of one degree, over all degrees that hold the longest document."""
        cap = self.options.max_tokens_per_slot or LONGEST
        slots = self.home.slots
        degrees = [cp for cp in range(1, min(slots, 128) + 1) if slots % cp == 0 and max(self.lengths) <= cp * cap]
        return min((self.fixed(cp, cost) for cp in degrees), key=lambda plan: plan.predicted_seconds)


def mode_of(weights: str) -> Literal["free", "lockstep"]:
    return "free" if weights == "free" else "lockstep"


def degree_of(plan: Plan) -> int:
    return max(group.degree for group in plan.groups)


def types_of(plan: Plan) -> dict[str, float]:
    """The share of rows in groups of each type, the largest first; of one slot: "one slot"."""
    rows = Counter[str]()
    for (_, kind), tokens in rows_by_way(plan).items():
        rows[kind or "one slot"] += tokens
    return {kind: round(tokens / plan.tokens, 3) for kind, tokens in rows.most_common()}


def gain_row(case: Case) -> Row:
    begun = time.process_time()
    problem = Problem.of(case)
    dynamic = problem.dynamic()
    fixed = problem.best_fixed()
    return asdict(case) | {
        "documents": len(problem.lengths),
        "longest": max(problem.lengths),
        "dynamic": dynamic.predicted_seconds,
        "dynamic_types": types_of(dynamic),
        "fixed": fixed.predicted_seconds,
        "fixed_cp": degree_of(fixed),
        "fixed_types": types_of(fixed),
        "bound": dynamic.lower_bound_seconds,
        "gain": fixed.predicted_seconds / dynamic.predicted_seconds,
        "cpu_seconds": round(time.process_time() - begun, 2),
    }


def without_messages(cost: Cost) -> Cost:
    assert cost.network is not None
    network = replace(cost.network, step_seconds=0.0)
    links = {level: slower_link(getattr(network, level), 1e-6) for level in LEVELS}
    return replace(cost, network=replace(network, **links))


def published_row(gbps: float, seed: int, weights: str) -> Row:
    """The setting of Megatron-LM's pull request 2000: Qwen3-30B-A3B, 32 GPUs, 3,072 tokens a rank, longest 49,152."""
    longest = 49152
    most = 16
    lengths = sample_lengths("lognorm", PUBLISHED_SLOTS * PUBLISHED_CAP * 8, seed=seed, longest=longest).tolist()
    options = PlanOptions(
        cp_comm_type="auto",
        heads=32,
        max_tokens_per_slot=PUBLISHED_CAP,
        cost=cost_of("32/4", gbps, weights, PUBLISHED_SLOTS),
        mode=mode_of(weights),
    )
    problem = Problem(lengths, Layout(PUBLISHED_SLOTS), options)
    # no lower degree holds the longest document
    dynamic = problem.dynamic(max_cp=most)
    sixteen = problem.fixed(most)
    ring = plan_fixed(lengths, problem.home, most, options=options, cp_comm_type="p2p").predicted_seconds
    seconds = dynamic.predicted_seconds
    busy = dynamic.timeline().busy.sum() / PUBLISHED_SLOTS
    computed = dynamic.timeline(without_messages(options.cost)).busy.sum() / PUBLISHED_SLOTS
    return {
        "gbps": gbps,
        "seed": seed,
        "weights": weights,
        "longest": max(lengths),
        "dynamic": seconds,
        "micro_batches": len(dynamic.micro_batches),
        "over_bound": seconds / dynamic.lower_bound_seconds,
        "messages": float(busy - computed) / seconds,
        "waits": float(seconds - busy - options.cost.update_seconds) / seconds,
        "over_ring_16": ring / seconds,
        "over_fixed_16": sixteen.predicted_seconds / seconds,
    }


def sensitivity_rows(slots: int, gbps: float = 25.0) -> Iterator[Row]:
    """Each constant 20 % lower and higher: the dynamic and the best plan of one degree, priced with the right one."""
    problem = Problem.of(Case(slots=slots, gbps=gbps, weights="not counted"))
    right = problem.options.cost
    of_dynamic = plan_sensitivity(problem.dynamic, right)
    of_fixed = plan_sensitivity(problem.best_fixed, right)
    best = degree_of(problem.best_fixed())
    for dynamic, fixed in zip(of_dynamic, of_fixed, strict=True):
        choice = "dynamic" if dynamic.plan.predicted_seconds <= fixed.plan.predicted_seconds else "one degree"
        yield {
            "slots": slots,
            "constant": dynamic.constant,
            "factor": dynamic.factor,
            "moved": dynamic.moved,
            "regret": dynamic.regret,
            "chosen": choice,
            "fixed_cp": degree_of(fixed.plan),
            "fixed_cp_of_right": best,
            "fixed_regret": fixed.regret,
            "fixed_over_dynamic": fixed.plan.timeline(right).step_seconds / dynamic.plan.timeline(right).step_seconds,
        }


def emulated_rows() -> Iterator[Row]:
    """Rows of one document over two hosts of 4 at 2.65 GB/s, and those that wait as much for a faster network."""
    machine = Machine.known("H200").with_link("across", bytes_per_second=EMULATED_GBPS * 1e9)
    call = AttentionCall(heads=32, kv_heads=8, head_dim=128)
    for rows in EMULATED_ROWS:
        price = machine.attention_prices(Group(tuple(range(8)), (0,), (rows,)), call, node_size=4)["a2a"]
        flops = 3.5 * 4 * 32 * 128 * rows**2 / 2  # forward and backward of a causal document
        yield {
            "rows": rows,
            "flops_per_byte": flops / (rows * 2 * 2 * (32 + 8) * 2 * 128 / 2),  # half of what is exchanged crosses
            "exposed": price.exposed / price.seconds,
            "stands_for": {f"{gbps:g}": rows * EMULATED_GBPS / gbps for gbps in REAL_GBPS},
        }


def run_part(
    record: dict[str, Any], part: str, todo: Sequence[tuple[str, Callable[[], Any]]], save: Callable[[], None]
) -> None:
    rows = record.setdefault(part, {})
    for key, compute in todo:
        if key not in rows:
            rows[key] = compute()
            save()
            print(f"{part} {key}", flush=True)


def parts_of(quick: bool) -> dict[str, list[tuple[str, Callable[[], Any]]]]:
    chosen = [Case(slots=16, gbps=12.5), Case(slots=8, gbps=2.65, node_size=4)] if quick else list(cases())
    networks, seeds = ((40.0,), range(1)) if quick else ((40.0,), PUBLISHED_SEEDS)
    ways = WEIGHTS_OF_EXPERTS[:1] if quick else WEIGHTS_OF_EXPERTS
    slots = (16,) if quick else SENSITIVE_SLOTS
    return {
        "gains": [(case.key, lambda case=case: gain_row(case)) for case in chosen],
        "published": [
            (f"{gbps:g} {seed} {way}", lambda gbps=gbps, seed=seed, way=way: published_row(gbps, seed, way))
            for gbps in networks
            for way in ways
            for seed in seeds
        ],
        "emulated": [("2 x 4", lambda: list(emulated_rows()))],
        "sensitivity": [(f"{n}", lambda n=n: list(sensitivity_rows(n))) for n in slots],
    }


# ---- the tables and the picture of docs/planning.md


def select(record: Row, **values: Any) -> list[Row]:
    """The rows of gains that have these values, in hosts of 8 and 8K tokens a slot unless told."""
    values = {"node_size": 8, "weights": "FSDP2", "cap": 8192, "heads": "32/8"} | values
    return [row for row in record["gains"].values() if all(row[name] == value for name, value in values.items())]


def tables_of_pages(record: Row) -> Iterator[str]:
    """The tables of docs/planning.md: gains, weights, published, emulated, gains by documents, regrets."""
    gains: list[Sequence[str]] = []
    for name in NAMES:
        for gbps in NETWORKS:
            of_slots = {row["slots"]: f"{row['gain']:.2f}" for row in select(record, lengths=name, gbps=gbps)}
            gains.append((SHORT[name], f"{gbps:g} GB/s", *(of_slots[slots] for slots in SLOTS)))
    yield markdown_table(("lengths", "between hosts", *(f"{slots:,} GPUs" for slots in SLOTS)), gains)
    weights_rows: list[Sequence[str]] = []
    for weights in WEIGHTS:
        of_gbps = {row["gbps"]: row for row in select(record, lengths="lognorm", slots=64, weights=weights)}
        cells = (f"{of_gbps[gbps]['gain']:.2f}, {of_gbps[gbps]['dynamic']:.3g} s" for gbps in NETWORKS)
        weights_rows.append((weights, *cells))
    yield markdown_table(("weights", *(f"{gbps:g} GB/s" for gbps in NETWORKS)), weights_rows)
    published: list[Sequence[str]] = []
    for weights in WEIGHTS_OF_EXPERTS:
        for gbps in sorted({row["gbps"] for row in record["published"].values()}, reverse=True):
            rows = [r for r in record["published"].values() if (r["gbps"], r["weights"]) == (gbps, weights)]
            names = ("dynamic", "over_ring_16", "over_fixed_16")
            published.append((weights, f"{gbps:g} GB/s", *(_span([row[name] for row in rows]) for name in names)))
    over = ("ring of 16 over dynamic", "degree 16 at its best types over dynamic")
    yield markdown_table(("weights", "between hosts", "dynamic s", *over), published)
    rows = [row for rows in record["emulated"].values() for row in rows]
    head = ("rows at 2.65 GB/s", *(f"rows at {n} GB/s" for n in rows[0]["stands_for"]))
    cells = [[f"{row['rows'] // 1024}K", *(f"{n / 1024:.3g}K" for n in row["stands_for"].values())] for row in rows]
    yield markdown_table(head, cells)
    regrets: list[Sequence[str]] = []
    for slots, rows in record["sensitivity"].items():
        worst = max(rows, key=lambda row: row["regret"])
        changed = sum(row["fixed_cp"] != row["fixed_cp_of_right"] for row in rows)
        sign = "20 % too low" if worst["factor"] < 1 else "20 % too high"
        most = f"{worst['regret']:.1%} ({worst['constant']}, {sign})"
        moved = f"{max(row['moved'] for row in rows):.0%}"
        regrets.append((f"{int(slots):,}", moved, most, f"{changed} of {len(rows)}"))
    yield markdown_table(("documents", "gain"), list(gains_by_documents(record)))
    yield markdown_table(("slots", "rows that move, at most", "longer by, at most", "another best degree"), regrets)


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
        yield name + f" ({len(gains)} rows)" * many, _span(gains) + f", median {statistics.median(gains):.2f}" * many


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
    most = max(row["gain"] for row in select(record) if row["lengths"] in NAMES and row["slots"] in SLOTS)
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
        rows = [row for row in select(record, lengths=name, gbps=gbps) if row["slots"] in SLOTS]
        points = [(across(row["slots"]), up(row["gain"])) for row in sorted(rows, key=lambda row: row["slots"])]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        yield svg_element("path", class_=f"curve c{COLORS[name]}", d=path)
        yield from (_mark(x, y, COLORS[name]) for x, y in points)


def _mark(x: float, y: float, color: int) -> str:
    return svg_element("circle", class_=f"mark c{color}", cx=f"{x:.1f}", cy=f"{y:.1f}", r=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few rows of few slots")
    parser.add_argument("--out", type=Path, help="the record, a .json file")
    parser.add_argument("--draw", type=Path, help="compute nothing: read this record")
    parser.add_argument("--tables", action="store_true", help="print the tables that docs repeat")
    parser.add_argument("--plot", type=Path, help="an .svg file for the picture")
    flags = parser.parse_args()
    source = flags.draw or flags.out
    record: dict[str, Any] = json.loads(source.read_text()) if source and source.exists() else {}

    def save() -> None:
        if flags.out:
            flags.out.write_text(json.dumps(record, indent=1) + "\n")

    if not flags.draw:
        plan_dynamic([5000, 300], Layout(8), max_tokens_per_slot=1024)
        record |= {"bench": "worth", "command": COMMAND, "models": {k: v[0] for k, v in MODELS.items()}}
        record |= {"published_lengths": PUBLISHED}
        for part, todo in parts_of(flags.quick).items():
            run_part(record, part, todo, save)
        save()
    if flags.tables:
        print("\n\n".join(tables_of_pages(record)))
    if flags.plot:
        flags.plot.write_text(picture(record))


if __name__ == "__main__":
    main()
