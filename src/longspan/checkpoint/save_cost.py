"""What a checkpoint takes: bytes, memory of the hosts and seconds, for a model and a number of ranks. A model of sums.

The seconds of plans and tables were measured (`bench/training/save_plans.py`); the rates of copies and of storage are
assumptions, to be replaced by one's own. The copies overlap the next forward and backward passes, and the rest the
steps after them, so that training stands for the call of the save and for what of the copies does not fit there.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class SaveRates:
    """Bytes and seconds that a save's parts take.

    `copy`: from a GPU to registered memory of the host, each GPU; `write`: hashing and writing of one rank; `store`:
    what all ranks together write; `plan`: one chunk of one tensor in the plan of the first save, on the first rank;
    `finish`: the same in the tables of every save (`metadata.json`, `.metadata`).
    """

    copy: float = 50e9
    write: float = 1.0e9
    store: float = 20e9
    plan: float = 15e-6
    finish: float = 30e-6


@dataclass(frozen=True)
class SaveCost:
    """What one save takes; `host_bytes` are the copies on one host, which stay for the next save."""

    bytes: float
    rank_bytes: float
    host_bytes: float
    chunks: int
    copy_seconds: float
    write_seconds: float
    plan_seconds: float
    finish_seconds: float

    @property
    def seconds(self) -> float:
        """From the call until the checkpoint is published, from the second save on."""
        return self.copy_seconds + self.write_seconds + self.finish_seconds

    @property
    def first_seconds(self) -> float:
        """The same of the first save, which is planned."""
        return self.seconds + self.plan_seconds


def save_cost(
    parameters: float,
    tensors: int,
    ranks: int,
    *,
    ranks_of_host: int = 8,
    bytes_of_parameter: float = 12.0,
    rates: SaveRates | None = None,
) -> SaveCost:
    """Return the cost of a checkpoint of so many parameters in so many tensors, split evenly over ranks.

    >>> round(save_cost(8.2e9, 399, 2, ranks_of_host=2).copy_seconds, 1)
    1.0

    `bytes_of_parameter` are those of a weight and its moments: 12 of float32 with AdamW, 6 where all are bfloat16.
    """
    rates = rates or SaveRates()
    total = parameters * bytes_of_parameter
    of_rank, chunks = total / ranks, 3 * tensors * ranks  # three for each tensor: the weight and two moments
    return SaveCost(
        bytes=total,
        rank_bytes=of_rank,
        host_bytes=of_rank * min(ranks, ranks_of_host),
        chunks=chunks,
        copy_seconds=of_rank / rates.copy,
        write_seconds=max(of_rank / rates.write, total / rates.store),
        plan_seconds=chunks * rates.plan,
        finish_seconds=chunks * rates.finish,
    )
