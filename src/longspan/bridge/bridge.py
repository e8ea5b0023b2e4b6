"""Every row of an encoder straight to the rank that needs it, and its whole gradient straight back.

Row ids identify these rows, never their order.
"""

from functools import lru_cache

from longspan.bridge.row_exchange import RowExchange, RowGradient
from longspan.comm.world import World
from longspan.layout import Exchange, Partition

_planned_exchange = lru_cache(maxsize=32)(Exchange)  # planned once for a layout that comes again


class Bridge(RowExchange):
    """Moves rows from the ranks that have them to the ranks that need them, differentiably.

    >>> have = Partition.from_rows([[0, 1], [2], []])          # per rank of the home, row ids in order
    >>> need = Partition.from_rows([[2], [2, 0], [1]])
    >>> bridge = Bridge(have, need, world, gradient="partial")
    >>> y_local = bridge(x_local)                              # (rows here of have, …) -> (rows here of need, …)

    Layouts may differ in any way: rows may be split, replicated or reordered on either side, and ranks may have or need
    none. `gradient` is what the copies of a row on the need side carry: *partial*, each rank the gradient of its own
    use, to be summed; *identical*, all the same one, of which one is taken (replicas of one computation);
    *partial_over_slots*, the same one on the tensor-parallel ranks of a slot of the world's home, of which one is
    taken, and those of different slots are summed; *none*, no gradient flows back (a frozen encoder). In backward
    every rank that has a row gets its whole gradient, and zeros for rows that nobody needs. A rank receives no row
    twice and none that it has.

    Entered by all ranks, forward and backward, with zero rows where a rank has or needs none; a rank that neither sends
    nor receives sends no message. Autograd enters backward only where `y_local` takes part in the loss: splice it by
    `index_copy`, with which zero rows take part too. Making a bridge plans on the host, once for a layout that
    comes again, and in a home of several planes makes the group of all ranks once. Raises LayoutError for rows that
    nobody has, for partitions that do not have one list for each rank of the home, and where tensor-parallel ranks of a
    slot that carry the same gradient need a row differently often.
    """

    def __init__(self, have: Partition, need: Partition, world: World, gradient: RowGradient = "partial") -> None:
        """Plan the exchange among all ranks of the world; see the class."""
        everyone = world.channels.everyone
        slots = [[everyone.ranks.index(rank) for rank in ranks] for ranks in world.home.tp_groups()]
        super().__init__(_planned_exchange(have, need), everyone, gradient=gradient, slots=slots)
