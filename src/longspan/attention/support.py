"""The support tables: which communication types and kernels there are, and what each can do.

docs/attention.md shows them; `python -m longspan.attention.support docs/attention.md` puts the tables into the page,
and a test compares.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from longspan.attention.kernels import KERNELS
from longspan.attention.kernels.table import FEATURES, Kernel, dtype_name

_MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

# For a group of D members with T rows each, q of N heads, k and v of K heads; a block is one member's keys and values.
TYPE_ROWS: tuple[tuple[str, ...], ...] = (
    ("type", "what it does", "sends forward", "sends backward", "holds of others", "keeps", "heads", "overlap"),
    (
        "`p2p`",
        "a ring: blocks travel, queries stay",
        "D − 1 blocks; under a narrow window only the rows that are seen",
        "D − 1 blocks again, and D − 1 gradients of blocks in float32",
        "three blocks at most, whatever D",
        "q, k, v, out and log-sum-exp of its own rows",
        "any",
        "the next block travels while one is computed",
    ),
    (
        "`all_gather`",
        "every member receives all blocks, in document order",
        "its own block to D − 1 members",
        "the same, and gradients of all rows to their owners in float32",
        "D blocks, or as many key/value heads of them as `max_gather_bytes` holds",
        "q, k, v, out and log-sum-exp of its own rows",
        "any",
        "in slices of heads: the next slice travels while one is computed",
    ),
    (
        "`a2a`",
        "heads for rows (Ulysses): each member has all rows for N / D heads",
        "(D − 1) / D of q, k, v and out",
        "(D − 1) / D of dout and of the gradients of q, k, v; in a recomputed layer of q, k, v and dout · out as well",
        "D · T rows of 1 / D of the heads: as many numbers as its own rows have",
        "q, k, v, out and log-sum-exp as exchanged, as many numbers as its own rows have; a recomputed layer out of "
        "its own rows and log-sum-exp",
        "D divides N; with fewer key/value heads than members, a head goes to several members",
        "large tensors in slices of heads: the next slice travels while one is computed",
    ),
    (
        "`a2a+p2p`",
        "`a2a` among the first level's A neighbouring members, a ring of P such neighbourhoods",
        "(A − 1) / A of q, k, v and out inside, P − 1 blocks of A · T rows and 1 / A of the heads between",
        "as the two parts",
        "three blocks, each of A · T rows and 1 / A of the heads",
        "as `a2a`",
        "A divides N",
        "in one slice of heads the next block travels while one is computed; large tensors in two slices that take "
        "turns: exchanges, blocks and returning gradients of one travel while the other is computed",
    ),
)

# What every type does with every kernel that the kernel table allows.
_FEATURE_ROWS: tuple[tuple[str, str], ...] = (
    ("causal and full attention", "`causal=`; of one document"),
    ("packed documents", "any lengths, any degree; an empty share takes part in communication"),
    (
        "sliding window",
        "`window=`, causal; keys that no query sees are not computed and, under a narrow window, not sent",
    ),
    (
        "chunks",
        "`chunk=`, causal; rows attend only within their chunk of so many positions; otherwise as a window",
    ),
    (
        "spans",
        "`shard.with_spans`, causal; rows of a span, such as an image's tokens, also see its later rows; keys are sent "
        "as for the causal mask",
    ),
    ("sinks", "`sinks=`; joined once to the sum over all keys, with a gradient over the local rows"),
    ("softcap", "`softcap=`"),
    ("scale", "`scale=`, any finite number; H ** −0.5 by default"),
    ("value heads of another size", "v (T, K, Hv), as in multi-head latent attention"),
    ("grouped and multi-query heads", "K divides N"),
    (
        "dropout",
        "`dropout=`; the mask is a hash of seed, step, layer, head, document and positions: the same at every degree, "
        "in every home and in recomputation",
    ),
    ("rows that see no key", "output 0, gradients 0"),
    ("deterministic mode", "sums over blocks and ranks are taken in a fixed order; see the kernels"),
)


def kernel_rows() -> list[tuple[str, ...]]:
    """Return the kernel table: a header, then a row each."""
    rows = [("kernel", "tensors", "head sizes", *FEATURES, "deterministic", "several documents", "needs")]
    return rows + [_kernel_row(kernel) for kernel in KERNELS]


def _kernel_row(kernel: Kernel) -> tuple[str, ...]:
    dtypes = ", ".join(dtype_name(dtype) for dtype in kernel.dtypes)
    features = ("yes" if feature in kernel.features else "no" for feature in FEATURES)
    deterministic = "in deterministic mode" if kernel.deterministic else "no"
    where = f"{' and '.join(kernel.devices)}: {dtypes}"
    return (f"`{kernel.name}`", where, str(kernel.head_sizes), *features, deterministic, kernel.packed, kernel.needs)


def feature_rows() -> list[tuple[str, ...]]:
    """Return the table of features: which types have each (all do), and which kernels.

    Features that no kernel names are done outside of kernels, and so work with all of them. A kernel computes spans as
    windows.
    """
    types = [row[0] for row in TYPE_ROWS[1:]]
    rows = [("feature", "how", *types, "kernels")]
    kernel_features = {"sliding window": "window", "spans": "window", "softcap": "softcap", "dropout": "dropout"}
    for feature, how in _FEATURE_ROWS:
        kernels_with_it = [
            k.name for k in KERNELS if feature not in kernel_features or kernel_features[feature] in k.features
        ]
        if feature == "deterministic mode":
            kernels_with_it = [k.name for k in KERNELS if k.deterministic]
        names = "all" if len(kernels_with_it) == len(KERNELS) else ", ".join(f"`{name}`" for name in kernels_with_it)
        rows.append((feature, how, *("yes" for _ in types), names))
    return rows


def fill_tables(page: str) -> str:
    """Fill the marked tables of a page with those of this version."""
    tables = {"features": feature_rows(), "types": TYPE_ROWS, "kernels": kernel_rows()}
    return _MARKED.sub(lambda marked: marked[1] + _page_table(tables[marked[2]]) + marked[3], page)


def _page_table(rows: Sequence[Sequence[str]]) -> str:
    header, *body = rows
    lines = [header, ["---"] * len(header), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(fill_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
