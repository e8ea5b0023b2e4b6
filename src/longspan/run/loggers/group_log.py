"""`groups.jsonl`: the communicators of a session, and the groups of slots that share documents.

It has an object for each communicator (kind, axis, ranks, seconds, plans so far), for each group of a plan that shares
documents (kind "cp": its use, degree, ranks, whether it has a communicator of its own; of a hierarchical one each
level, a2a and p2p), and for each set of slots with two levels: communicators and groups that contain the first rank.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from longspan.comm import World
from longspan.files import name_file_in_errors
from longspan.plan import Group, Plan
from longspan.plan.hierarchy import Levels, group_levels, hierarchical_groups

PRINTED = 8  # hierarchical groups that are printed; all are in the file
# By kind of communicator: the axis of the home along which its ranks lie, or what it is for.
AXES = {
    "control": "control",
    "saves": "control",
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
    """Records the groups that each plan adds; writes nothing if `path` is None.

    >>> log = GroupLog(world, Path("runs/first/groups.jsonl"), display.log)
    >>> log.note_groups(plan)
    """

    def __init__(self, world: World, path: Path | None, log: Callable[[str], None]) -> None:
        """Begin an empty file; a session notes its groups anew, for it makes them anew."""
        self._world, self._path, self._log = world, path, log
        self._plan_count = self._recorded_communicators = 0
        self._recorded_levels: set[Levels] = set()
        self._recorded_groups: set[tuple[object, ...]] = set()
        if path is not None:
            path.write_text("", encoding="utf-8")

    def note_groups(self, plan: Plan, use: Use = "training") -> None:
        """Write and log the groups that this plan adds.

        They are communicators that were made since the last call, context-parallel groups of this rank that no plan had
        before, and levels of hierarchical groups. The file gets a row for each; the log gets the communicators in one
        line, and the first PRINTED levels. Only the rank that keeps the records has a file.
        """
        if self._path is None:
            return
        self._plan_count += 1
        communicators = self._world.process_groups.made[self._recorded_communicators :]
        self._recorded_communicators += len(communicators)
        level_pairs = dict.fromkeys(group_levels(group) for group in hierarchical_groups(plan))
        levels = [pair for pair in level_pairs if pair not in self._recorded_levels]
        self._recorded_levels.update(levels)
        rows: list[Row] = [
            {"kind": r.kind, "axis": AXES[r.kind], "ranks": r.ranks, "seconds": round(r.seconds, 6)}
            for r in communicators
        ]
        groups = self._new_cp_groups(plan, use)
        self._recorded_groups.update(groups)
        for group in groups.values():
            rows += self._cp_rows(group, use)
        rows += [{"kind": "levels", "use": use, "a2a": pair.a2a, "p2p": pair.p2p} for pair in levels]
        self._write_rows(rows)
        if communicators:
            counts = Counter(f"{record.kind} of {len(record.ranks)}" for record in communicators)
            names = ", ".join(f"{n} x {name}" if n > 1 else name for name, n in counts.items())
            self._log(f"process groups of the first rank (kind and number of ranks): {names}")
        printed = len(self._recorded_levels) - len(levels)
        for pair in levels[: max(0, PRINTED - printed)]:
            self._log(f"hierarchical group of slots {sum(pair.a2a, ())}: {pair}")

    def _write_rows(self, rows: list[Row]) -> None:
        if rows and self._path is not None:
            with name_file_in_errors(self._path), self._path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row | {"plan": self._plan_count}) + "\n" for row in rows)

    def _new_cp_groups(self, plan: Plan, use: Use) -> dict[tuple[object, ...], Group]:
        """Return the plan's groups of several slots that contain this rank and are new for this use, by key."""
        groups = (group for batch in plan.micro_batches for group in batch.groups if group.degree > 1)
        keyed = {
            (use, group.slots, group.cp_comm_type, group.hierarchical_context_parallel_sizes): group
            for group in groups
            if self._world.slot in group.slots
        }
        return {key: group for key, group in keyed.items() if key not in self._recorded_groups}

    def _cp_rows(self, group: Group, use: Use) -> Iterator[Row]:
        """Yield a row for each level of a group.

        The row's `over` says what carries the level's messages: "communicator" for a communicator of the level alone,
        "plane" for the communicator of all slots.
        """
        for level, slots in self._levels_of_rank(group):
            ranks = tuple(self._world.plane[slot] for slot in slots)
            carrier = "plane" if self._world.process_groups.communicator(ranks) is None else "communicator"
            yield {"kind": "cp", "use": use, "degree": group.degree, "level": level, "ranks": ranks, "over": carrier}

    def _levels_of_rank(self, group: Group) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the communication type and slots of each level of a group that this rank is in.

        A level of a2a+p2p has several sets of slots; the one with the slot of this rank is yielded.
        """
        comm_types = (group.cp_comm_type,) if isinstance(group.cp_comm_type, str) else group.cp_comm_type
        for comm_type in dict.fromkeys(comm_types):
            if comm_type != "a2a+p2p":
                yield comm_type, group.slots
                continue
            levels = group_levels(group)
            for level, slot_sets in (("a2a", levels.a2a), ("p2p", levels.p2p)):
                yield level, next(slots for slots in slot_sets if self._world.slot in slots)
