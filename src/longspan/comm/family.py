"""Which groups of slots gain a communicator of their own: a bounded family, the same on every rank."""

from collections import Counter

from longspan.plan import Plan


class Family:
    """Chooses, plan after plan, the slots that get a communicator, at most `most` for each slot.

    A group gains one where it recurs: where all groups of its plan have one degree (the fixed degrees of training and
    evaluation), or where it has been in two micro-batches so far. Order of slots does not matter: torch sorts ranks.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._seen: Counter[tuple[int, ...]] = Counter()  # micro-batches in which these slots were a group
        self._chosen: set[tuple[int, ...]] = set()
        self._load: Counter[int] = Counter()  # communicators per slot

    def wanted(self, plan: Plan) -> list[tuple[int, ...]]:
        """The slots to make communicators for now, ascending in each, in plan order."""
        groups = [group for micro_batch in plan.micro_batches for group in micro_batch.groups if group.degree > 1]
        one_degree = len({group.degree for group in groups}) == 1
        found = [tuple(sorted(group.slots)) for group in groups]
        self._seen.update(found)
        wanted: list[tuple[int, ...]] = []
        for slots in dict.fromkeys(found):
            room = all(self._load[slot] < self.most for slot in slots)
            if room and slots not in self._chosen and (one_degree or self._seen[slots] > 1):
                wanted.append(slots)
                self._chosen.add(slots)
                self._load.update(slots)
        return wanted
