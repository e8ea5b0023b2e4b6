"""A log of the process groups of a run: communicators, and the levels of hierarchical groups.

`groups.jsonl` in the run's folder has one object a communicator (kind, ranks, seconds, plans so far) and one for each
set of slots with two levels (a2a, p2p). One rank writes, of the communicators that it is in.
"""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from longspan.comm import World
from longspan.plan import Plan
from longspan.plan.hierarchy import Levels, hierarchical_groups, levels_of
from longspan.train.disk import naming_file

PRINTED = 8  # hierarchical groups that are printed; all are in the file


class GroupLog:
    """Records what is new after each plan; writes nothing where `path` is None.

    >>> log = GroupLog(world, Path("runs/first/groups.jsonl"), display.log)
    >>> log.note(plan)
    """

    def __init__(self, world: World, path: Path | None, log: Callable[[str], None]) -> None:
        self._world, self._path, self._log = world, path, log
        self._plans = self._known = 0
        self._levels: set[Levels] = set()
        if path is not None:
            path.write_text("", encoding="utf-8")

    def note(self, plan: Plan) -> None:
        """Write and log which groups this plan added."""
        self._plans += 1
        made = self._world.process_groups.made[self._known :]
        self._known += len(made)
        fresh = dict.fromkeys(levels_of(group) for group in hierarchical_groups(plan))
        levels = [pair for pair in fresh if pair not in self._levels]
        self._levels.update(levels)
        if self._path is None or not (made or levels):
            return
        rows = [{"kind": r.kind, "ranks": r.ranks, "seconds": round(r.seconds, 6), "plan": self._plans} for r in made]
        rows += [{"kind": "levels", "a2a": pair.a2a, "p2p": pair.p2p, "plan": self._plans} for pair in levels]
        with naming_file(self._path), self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        if made:
            counts = Counter(f"{record.kind} of {len(record.ranks)}" for record in made)
            names = ", ".join(f"{n} x {name}" if n > 1 else name for name, n in counts.items())
            self._log(f"process groups of the first rank (kind and number of ranks): {names}")
        printed = len(self._levels) - len(levels)
        for pair in levels[: max(0, PRINTED - printed)]:
            self._log(f"hierarchical group of slots {sum(pair.a2a, ())}: {pair}")
