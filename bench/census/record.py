"""The record of the census: rows by model, as text, and compared with an earlier one."""

from collections import Counter
from collections.abc import Mapping
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


def as_text(record: Mapping[str, Any]) -> str:
    models: dict[str, Any] = dict(record["models"])
    lines = [
        "# Census of transformers' causal language models",
        "",
        origin_text(dict(record)),
        "",
        f"Classes of the registry: {counted(counts(record, variants=False))}; variants: "
        f"{counted(counts(record, variants=True))}. {sum(row['seconds'] for row in models.values()) / 60:.0f} minutes "
        f"of one process with its ranks.{earlier_text(record)} Made at "
        f"{', '.join(sorted({row['commit'] for row in models.values()}))}.",
        "",
        "Each is a small copy (`longspan.model.exactness.small_copies`) with random weights in float64, beside the "
        "stock model that sees the documents one by one in one process; FSDP2, p2p at cp 2 and 3, all_gather, several "
        "micro-batches and full recomputation. Errors are relative, of the loss and of the worst gradient. An exact "
        "one also ran with "
        "tp 2, pp 2 and, with experts, ep 2 and the losses of routers.",
        "",
        f"| exact | loss | gradients | {' | '.join(WAYS)} | seconds |",
        "| --- " * (4 + len(WAYS)) + "|",
    ]
    lines += [_exact_line(name, row) for name, row in models.items() if row["status"] == "exact"]
    lines += ["", "| not exact | | what was said |", "| --- | --- | --- |"]
    others = {name: row for name, row in models.items() if row["status"] != "exact"}
    lines += [f"| {name} | {row['status']} | {cell(how(row))} |" for name, row in others.items()]
    lines += ["", "Ways of exact models that are not exact:", ""]
    for name, row in models.items():
        other = {way: cell for way, cell in row["ways"].items() if cell["status"] != "exact"}
        lines += [f"- {name}, {way}: {cell['status']}, {how(cell)}" for way, cell in other.items()]
    return "\n".join(lines) + "\n"


def _exact_line(name: str, row: Mapping[str, Any]) -> str:
    ways = [row["ways"].get(way, {}).get("status", "") for way in WAYS]
    errors = [f"{row[kind]:.0e}" for kind in ("loss_error", "gradient_error")]
    return f"| {' | '.join([name, *errors, *ways, format(row['seconds'], '.0f')])} |"


def counted(of: Counter[str]) -> str:
    return ", ".join(f"{of[status]} {status}" for status in ("exact", "refused", "wrong", "crashed", "not built"))


def how(row: Mapping[str, Any]) -> str:
    if row["status"] == "wrong":
        errors = f"loss off by {row['loss_error']:.1e}, {row['parameter']} by {row['gradient_error']:.1e}"
        return f"{errors} ({row['case']})"
    return str(row["message"])


def cell(text: str, most: int = 400) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:most]
