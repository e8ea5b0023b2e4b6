"""Which groups of slots gain a communicator of their own: a bounded number, the same on every rank."""

from collections import Counter

from longspan.plan import Plan


class CommunicatorChoice:
    """Chooses, plan after plan, the slots that get a communicator, at most `most` for each slot.

    A group gains one where it recurs: where all groups of its plan have one degree (the fixed degrees of training and
    evaluation), or where it has been in two micro-batches so far. Order of slots does not matter: torch sorts ranks.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._seen: Counter[tuple[int, ...]] = Counter()  # micro-batches in which slots that may gain were a group
        self._chosen: set[tuple[int, ...]] = set()
        self._load: Counter[int] = Counter()  # communicators per slot

    def choose(self, plan: Plan) -> list[tuple[int, ...]]:
        """The slots to make communicators for now, ascending in each, in plan order."""
        groups = [group for micro_batch in plan.micro_batches for group in micro_batch.groups if group.degree > 1]
        one_degree = len({group.degree for group in groups}) == 1
        may_gain = [slots for group in groups if self._may_gain(slots := tuple(sorted(group.slots)))]
        self._seen.update(may_gain)
        chosen: list[tuple[int, ...]] = []
        for slots in dict.fromkeys(may_gain):
            if self._may_gain(slots) and (one_degree or self._seen[slots] > 1):
                chosen.append(slots)
                self._chosen.add(slots)
                self._load.update(slots)
                del self._seen[slots]
        return chosen

    def _may_gain(self, slots: tuple[int, ...]) -> bool:
        """Whether they lack a communicator and have room for one, which slots never gain again."""
        return slots not in self._chosen and all(self._load[slot] < self.most for slot in slots)
