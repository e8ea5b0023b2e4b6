"""A log of the groups in which the ranks of a run talk, in training and in evaluation.

`groups.jsonl` in the run's folder has an object for each communicator (kind, axis, ranks, seconds, plans so far), for
each group of a plan that shares documents (kind "cp": its use, degree, ranks, whether over a communicator of its own;
of a hierarchical one each level, a2a and p2p), and for each set of slots with two levels. One rank writes, of the
communicators and groups that it is in.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from longspan.comm import World
from longspan.files import naming_file
from longspan.plan import Group, Plan
from longspan.plan.hierarchy import Levels, hierarchical_groups, levels_of

PRINTED = 8  # hierarchical groups that are printed; all are in the file
# Along which axis of the home, or for what, a kind of communicator is.
AXES = {
    "control": "control",
    "parent": "plane",
    "everyone": "all",
    "slots": "slots",
    "replicate": "replicate",
    "tp": "tp",
    "pipeline": "pp",
    "ep": "ep",
    "outer": "experts",
    "communicator": "cp",
}
Use = Literal["training", "evaluation"]
Row = dict[str, Any]


class GroupLog:
    """Records what is new after each plan; writes nothing where `path` is None.

    >>> log = GroupLog(world, Path("runs/first/groups.jsonl"), display.log)
    >>> log.note(plan)
    """

    def __init__(self, world: World, path: Path | None, log: Callable[[str], None]) -> None:
        self._world, self._path, self._log = world, path, log
        self._plans = self._known = 0
        self._levels: set[Levels] = set()
        self._shared: set[tuple[object, ...]] = set()
        if path is not None:
            path.write_text("", encoding="utf-8")

    def note(self, plan: Plan, use: Use = "training") -> None:
        """Write and log which groups this plan added."""
        if self._path is None:
            return
        self._plans += 1
        made = self._world.process_groups.made[self._known :]
        self._known += len(made)
        fresh = dict.fromkeys(levels_of(group) for group in hierarchical_groups(plan))
        levels = [pair for pair in fresh if pair not in self._levels]
        self._levels.update(levels)
        rows: list[Row] = [
            {"kind": r.kind, "axis": AXES[r.kind], "ranks": r.ranks, "seconds": round(r.seconds, 6)} for r in made
        ]
        rows += self._shared_by(plan, use)
        rows += [{"kind": "levels", "use": use, "a2a": pair.a2a, "p2p": pair.p2p} for pair in levels]
        self._write(rows)
        if made:
            counts = Counter(f"{record.kind} of {len(record.ranks)}" for record in made)
            names = ", ".join(f"{n} x {name}" if n > 1 else name for name, n in counts.items())
            self._log(f"process groups of the first rank (kind and number of ranks): {names}")
        printed = len(self._levels) - len(levels)
        for pair in levels[: max(0, PRINTED - printed)]:
            self._log(f"hierarchical group of slots {sum(pair.a2a, ())}: {pair}")

    def _write(self, rows: list[Row]) -> None:
        if rows and self._path is not None:
            with naming_file(self._path), self._path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row | {"plan": self._plans}) + "\n" for row in rows)

    def _shared_by(self, plan: Plan, use: Use) -> Iterator[Row]:
        """The groups of several slots that this rank is in, each once for its use, with the levels it has."""
        for group in (group for batch in plan.micro_batches for group in batch.groups if group.degree > 1):
            key = use, group.slots, group.cp_comm_type, group.hierarchical_context_parallel_sizes
            if self._world.slot not in group.slots or key in self._shared:
                continue
            self._shared.add(key)
            for level, slots in self._levels_here(group):
                ranks = tuple(self._world.plane[slot] for slot in slots)
                alone = self._world.process_groups.communicator(ranks) is not None
                over = "communicator" if alone else "plane"
                yield {"kind": "cp", "use": use, "degree": group.degree, "level": level, "ranks": ranks, "over": over}

    def _levels_here(self, group: Group) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The type of a group with its slots; for a2a+p2p those of each level that this rank is in."""
        kinds = (group.cp_comm_type,) if isinstance(group.cp_comm_type, str) else group.cp_comm_type
        for kind in dict.fromkeys(kinds):
            if kind != "a2a+p2p":
                yield kind, group.slots
                continue
            levels = levels_of(group)
            for level, lines in (("a2a", levels.a2a), ("p2p", levels.p2p)):
                yield level, next(slots for slots in lines if self._world.slot in slots)
