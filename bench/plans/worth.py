"""What dynamic plans are worth: their predicted time under that of the best plan of one degree, by network. No GPU.

    python bench/plans/worth.py --out bench/records/dynamic-worth.json --plot docs/dynamic-worth.svg   # some 7 minutes
    python bench/plans/worth.py --draw bench/records/dynamic-worth.json --plot docs/dynamic-worth.svg  # only draw
    python bench/plans/worth.py --quick                                            # a few small rows, for a test

All seconds are predictions of `Machine.known("H200").with_link("across", ...)`. The best plan of one degree is the
fastest over all degrees that hold the longest document; each of its groups has the type that is fastest for it, as have
those of dynamic plans. A run that is stopped goes on with the rows that `--out` lacks.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sensitivity import plan_sensitivity, rows_by_way, slower_link
from worth_cases import LONGEST, MODELS, PUBLISHED, WEIGHTS_OF_EXPERTS, Case, cases, cost_of
from worth_page import markdown, picture, tables_of_pages

from longspan import Layout, plan_dynamic, plan_fixed
from longspan.plan import AttentionCall, Cost, Group, Machine, Plan, PlanOptions
from longspan.plan.cost.links import LEVELS
from longspan.plan.distributions import sample_lengths

Row = dict[str, Any]
PUBLISHED_SEEDS = range(3)
PUBLISHED_SLOTS = 32
PUBLISHED_CAP = 3072
SENSITIVE_SLOTS = (64, 256, 1024, 8192)
EMULATED_ROWS = (16384, 32768, 65536, 131072, 262144, 524288)
COMMAND = "python bench/plans/worth.py --out bench/records/dynamic-worth.json --plot docs/dynamic-worth.svg"
EMULATED_GBPS = 2.65
REAL_GBPS = (12.5, 25.0, 50.0)


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
    return max(group.degree for batch in plan.micro_batches for group in batch.groups)


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
        price = machine.attention_seconds(Group(tuple(range(8)), (0,), (rows,)), call, node_size=4)["a2a"]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few rows of few slots")
    parser.add_argument("--out", type=Path, help="a .json file; the table goes beside it")
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
    if flags.out:
        flags.out.with_suffix(".md").write_text(markdown(record))
    if flags.tables:
        print("\n\n".join(tables_of_pages(record)))
    if flags.plot:
        flags.plot.write_text(picture(record))


if __name__ == "__main__":
    main()
