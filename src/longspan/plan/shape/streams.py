"""Several streams of each row, which layers hand on (hyper-connections): what makes one row of them and back."""

from dataclasses import dataclass

from longspan.plan.shape.config_reader import ConfigReader


@dataclass(frozen=True, kw_only=True)
class Streams:
    """`count` streams of each row, each `hidden` wide. A connection before attention and one before the MLP make one
    row of them, and behind it hand its result to all; one behind the last layer makes the row that the head reads.

    A connection has `products` numbers of matrices, `vectors` of others, and multiplies streams by streams with `mixed`
    more. `end_products` and `end_vectors` are those behind the last layer. Connections of a low `rank` weigh each
    number of the streams, and are the layer's norms too; those without (rank 0) weigh whole streams, by `outputs`
    numbers of a row in float32, of which `divisions` in turn make a matrix whose rows and columns add up to one.
    """

    count: int
    hidden: int
    rank: int = 0
    products: int = 0
    vectors: int = 0
    mixed: int = 0
    outputs: int = 0
    divisions: int = 0
    end_products: int = 0
    end_vectors: int = 0

    @property
    def width(self) -> int:
        return self.count * self.hidden


def read_streams(read: ConfigReader) -> Streams | None:
    """Return the streams of a configuration; None where layers hand on single rows."""
    count = read.count("hc_mult", "hc_count")
    if count <= 1:
        return None
    hidden = read.count("hidden_size")
    width = count * hidden
    if rank := read.count("hc_lowrank"):
        products = 2 * width * rank
        return Streams(
            count=count,
            hidden=hidden,
            rank=rank,
            products=products + width * count,
            vectors=width,
            outputs=count,
            end_products=products,
            end_vectors=width,
        )
    # one weight for each stream before, one behind, and one of each stream for each
    outputs = (2 + count) * count
    weighs_end = not read.family.mean_of_streams
    return Streams(
        count=count,
        hidden=hidden,
        products=outputs * width,
        vectors=outputs + 3,
        mixed=count * width,
        outputs=outputs,
        divisions=2 * read.count("hc_sinkhorn_iters") - 1,
        end_products=count * width * weighs_end,
        end_vectors=(count + 1) * weighs_end,
    )
