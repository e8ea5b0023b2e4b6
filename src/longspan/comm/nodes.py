"""Which ranks run on which node, for messages. Plans need no more than the number of slots of a node."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed import PrefixStore, Store

from longspan.layout.layout import excerpt

NAMED = 8  # nodes named one by one in a message


@dataclass(frozen=True)
class Nodes:
    """The names of all nodes, and the ranks of each, from rank 0's node on."""

    names: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]

    def describe_ranks(self, ranks: Sequence[int]) -> str:
        """Name ranks by their nodes.

        >>> Nodes(("node 0", "node 1"), ((0, 1), (2, 3))).describe_ranks([1, 2, 3])
        'rank(s) (1) of node 0 and all ranks (2, 3) of node 1'
        """
        parts, rank_set = list[str](), set(ranks)
        for name, node_ranks in zip(self.names, self.ranks, strict=True):
            present = [rank for rank in node_ranks if rank in rank_set]
            if present:
                parts.append(
                    f"{'all ranks' if len(present) == len(node_ranks) else 'rank(s)'} {excerpt(present)} of {name}"
                )
        overflow_note = [f"{len(parts) - NAMED} more nodes"] if len(parts) > NAMED else []
        return " and ".join([*parts[:NAMED], *overflow_note])


def read_nodes(store: Store, prefix: str, size: int) -> Nodes | None:
    """Return the nodes by the names that each rank wrote into the world's store as it came; None for a single node."""
    keys = [f"rank/{rank}" for rank in range(size)]
    names: list[bytes] = PrefixStore(prefix, store).multi_get(keys)  # pyright: ignore[reportAttributeAccessIssue]
    ranks = dict[str, list[int]]()
    for rank, name in enumerate(names):
        ranks.setdefault(name.decode(), []).append(rank)
    return Nodes(tuple(ranks), tuple(map(tuple, ranks.values()))) if len(ranks) > 1 else None
