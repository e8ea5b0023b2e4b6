"""The record of the census: rows by model, as text, and compared with an earlier one."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from longspan.bench.benches import origin_text

WAYS = ("tp 2", "pp 2", "ep 2", "router losses")
_RANK = {"exact": 0, "refused": 1, "not built": 1, "crashed": 2, "wrong": 3}


class Change(NamedTuple):
    """A model, or one of its ways to run, that two records say different things of."""

    what: str
    before: str
    after: str
    worse: bool

    def __str__(self) -> str:
        return f"{'WORSE ' if self.worse else ''}{self.what}: {self.before}, now {self.after}"


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """What differs in status between the models that both records have; refused is worse than exact, wrong is worst."""
    found: list[Change] = []
    for name, row in new["models"].items():
        if (before := old["models"].get(name)) is None:
            continue
        pairs = [(name, before["status"], row["status"])]
        ways = {way: before["ways"][way] for way in before["ways"] if way in row["ways"]}
        pairs += [(f"{name}, {way}", cell["status"], row["ways"][way]["status"]) for way, cell in ways.items()]
        found += [Change(what, a, b, _RANK[b] > _RANK[a]) for what, a, b in pairs if a != b]
    return found


def failed(record: Mapping[str, Any]) -> list[str]:
    rows = [(name, row) for name, row in record["models"].items()]
    rows += [(f"{name}, {way}", cell) for name, row in rows for way, cell in row["ways"].items()]
    return [f"{what}: {row['status']}, {how(row)}" for what, row in rows if row["status"] in ("wrong", "crashed")]


def counts(record: Mapping[str, Any], *, variants: bool) -> Counter[str]:
    return Counter(row["status"] for name, row in record["models"].items() if ("+" in name) == variants)


def earlier_text(record: Mapping[str, Any]) -> str:
    made_with = Counter(row["transformers"] for row in record["models"].values())
    del made_with[record["versions"]["transformers"]]
    rows = ", ".join(f"{count} were made with transformers {version}" for version, count in sorted(made_with.items()))
    return f" Of the rows of classes and variants, {rows}." if rows else ""


TITLE = "Census of transformers' causal language models"
ABOUT = (
    "Each is a small copy (`longspan.model.exactness.small_copies`) with random weights in float64, beside the "
    "stock model that sees the documents one by one in one process; FSDP2, p2p at cp 2 and 3, all_gather, several "
    "micro-batches and full recomputation. Errors are relative, of the loss and of the worst gradient. An exact "
    "one also ran with tp 2, pp 2 and, with experts, ep 2 and the losses of routers."
)


def as_text(
    record: Mapping[str, Any], title: str = TITLE, about: str = ABOUT, ways: Sequence[str] = WAYS, alone: str = ""
) -> str:
    """The record as Markdown; `alone` is a way of its own of models that are not exact."""
    models: dict[str, Any] = dict(record["models"])
    variants = "" if alone else f"; variants: {counted(counts(record, variants=True))}"
    lines = [
        f"# {title}",
        "",
        origin_text(dict(record)),
        "",
        f"Classes of the registry: {counted(counts(record, variants=False))}{variants}. "
        f"{sum(row['seconds'] for row in models.values()) / 60:.0f} minutes of one process with its ranks."
        f"{earlier_text(record)} Made at {', '.join(sorted({row['commit'] for row in models.values()}))}.",
        "",
        about,
        "",
        f"| exact | loss | gradients | {' | '.join(ways)} | seconds |",
        "| --- " * (4 + len(ways)) + "|",
    ]
    others = list[str]()
    inexact_ways = list[str]()
    for name, row in models.items():
        if row["status"] != "exact":
            of_text = [way_status(row, alone)] if alone else []
            others.append(f"| {' | '.join([name, row['status'], *of_text, cell(how(row))])} |")
            continue
        errors = [f"{row[kind]:.0e}" for kind in ("loss_error", "gradient_error")]
        cells = [name, *errors, *(way_status(row, way) for way in ways), format(row["seconds"], ".0f")]
        lines.append(f"| {' | '.join(cells)} |")
        other = {way: it for way, it in row["ways"].items() if it["status"] != "exact"}
        inexact_ways += [f"- {name}, {way}: {it['status']}, {cell(how(it))}" for way, it in other.items()]
    head = ["", f"| not exact | |{f' {alone} |' * bool(alone)} what was said |", "| --- " * (3 + bool(alone)) + "|"]
    return "\n".join([*lines, *head, *others, "", "Ways of exact models that are not exact:", "", *inexact_ways, ""])


def popular(classes: str) -> dict[str, str]:
    """The published models of classes that many know."""
    return json.loads(Path(__file__).with_name("popular.json").read_text(encoding="utf-8"))[classes]


def way_status(row: Mapping[str, Any], way: str) -> str:
    return row["ways"].get(way, {}).get("status", "")


def counted(of: Counter[str]) -> str:
    return ", ".join(f"{of[status]} {status}" for status in ("exact", "refused", "wrong", "crashed", "not built"))


def how(row: Mapping[str, Any]) -> str:
    if row["status"] == "wrong":
        errors = f"loss off by {row['loss_error']:.1e}, {row['parameter']} by {row['gradient_error']:.1e}"
        return f"{errors} ({row['case']})"
    return str(row["message"])


def cell(text: str, most: int = 400) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:most]
