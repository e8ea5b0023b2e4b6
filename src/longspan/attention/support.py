"""The support table in words: which communication types and kernels there are, and what each can do.

`KERNELS` says what kernels can; `COMMUNICATIONS` says what the types send and hold. Errors, `longspan doctor --kernels`
and the tables of docs/attention.md come from these two; `python -m longspan.attention.support docs/attention.md` puts
the tables into the page, and a test compares.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from longspan.attention.kernels import KERNELS
from longspan.attention.kernels.table import FEATURES, Kernel, short

_MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Communication:
    """A communication type: what its members send in forward and in backward, hold of others, and keep for backward.

    For a group of D members with T rows each, q of N heads, k and v of K heads; H is a head's size. "Blocks" are the
    keys and values of one member's rows.
    """

    name: str
    does: str
    sends: str
    backward: str
    holds: str
    keeps: str
    heads: str
    overlap: str


COMMUNICATIONS: tuple[Communication, ...] = (
    Communication(
        name="p2p",
        does="a ring: blocks travel, queries stay",
        sends="D − 1 blocks; under a narrow window only the rows that are seen",
        backward="D − 1 blocks again, and D gradients of blocks in float32",
        holds="three blocks at most, whatever D",
        keeps="q, k, v, out and log-sum-exp of the own rows",
        heads="any",
        overlap="the next block travels while one is computed",
    ),
    Communication(
        name="all_gather",
        does="every member receives all blocks, in document order",
        sends="the own block to D − 1 members",
        backward="the same, and gradients of all rows to their owners in float32",
        holds="D blocks, or as many key/value heads of them as `max_gather_bytes` holds",
        keeps="q, k, v, out and log-sum-exp of the own rows",
        heads="any",
        overlap="in slices of heads: the next slice travels while one is computed",
    ),
    Communication(
        name="a2a",
        does="heads for rows (Ulysses): each member has all rows for N / D heads",
        sends="(D − 1) / D of q, k, v and out",
        backward="(D − 1) / D of dout and of the gradients of q, k, v",
        holds="D · T rows of 1 / D of the heads: as many numbers as its own",
        keeps="q, k, v, out and log-sum-exp as exchanged, as many numbers as the own",
        heads="D divides N; with fewer key/value heads than members, heads go to several",
        overlap="large tensors in slices of heads: the next slice travels while one is computed",
    ),
    Communication(
        name="a2a+p2p",
        does="`a2a` among the first level's A neighbouring members, a ring of P such neighbourhoods",
        sends="(A − 1) / A of q, k, v and out inside, P − 1 blocks of A · T rows and 1 / A of the heads between",
        backward="as the two parts",
        holds="three blocks, each of A · T rows and 1 / A of the heads",
        keeps="as `a2a`",
        heads="A divides N",
        overlap="as the two parts",
    ),
)

# What every type does with every kernel that the kernel table allows.
EVERYWHERE: tuple[tuple[str, str], ...] = (
    ("causal and full attention", "`causal=`; of one document"),
    ("packed documents", "any lengths, any degree; an empty share takes part in communication"),
    ("sliding window", "`window=`, causal; what no query sees is not computed, under a narrow window not sent"),
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

NOT_OFFERED: tuple[tuple[str, str], ...] = (
    ("a bias added to scores (`1hss`, `bhss`, ALiBi)", "no argument for it"),
    ("a window that looks ahead, or one without the causal mask", "`window=` with `causal=False` is refused"),
    ("masks of any other shape", "documents, causality and windows are what a shard knows; a mask tensor is refused"),
    ("cross attention", "queries and keys are rows of the same documents"),
    ("attention weights, or the largest logit, as a result", "they are never formed"),
    ("float8", "a kernel for it is not in the table"),
)


def kernel_rows() -> list[tuple[str, ...]]:
    """The kernel table: a header, then a row each."""
    rows = [("kernel", "tensors", "head sizes", *FEATURES, "deterministic", "several documents", "needs")]
    return rows + [_kernel_row(kernel) for kernel in KERNELS]


def _kernel_row(kernel: Kernel) -> tuple[str, ...]:
    dtypes = ", ".join(short(dtype) for dtype in kernel.dtypes)
    features = ("yes" if feature in kernel.features else "no" for feature in FEATURES)
    deterministic = "in deterministic mode" if kernel.deterministic else "no"
    where = f"{' and '.join(kernel.devices)}: {dtypes}"
    return (f"`{kernel.name}`", where, str(kernel.head_sizes), *features, deterministic, kernel.packed, kernel.needs)


def type_rows() -> list[tuple[str, ...]]:
    """The table of communication types: a header, then a row each."""
    rows = [("type", "what it does", "sends forward", "sends backward", "holds of others", "keeps", "heads", "overlap")]
    return rows + [
        (f"`{c.name}`", c.does, c.sends, c.backward, c.holds, c.keeps, c.heads, c.overlap) for c in COMMUNICATIONS
    ]


def feature_rows() -> list[tuple[str, ...]]:
    """The table of features: which types have each, and which kernels."""
    rows = [("feature", "how", *(f"`{c.name}`" for c in COMMUNICATIONS), "kernels")]
    of_kernels = {"sliding window": "window", "softcap": "softcap", "dropout": "dropout"}
    for feature, how in EVERYWHERE:
        able = [k.name for k in KERNELS if feature not in of_kernels or of_kernels[feature] in k.features]
        if feature == "deterministic mode":
            able = [k.name for k in KERNELS if k.deterministic]
        names = "all" if len(able) == len(KERNELS) else ", ".join(f"`{name}`" for name in able)
        rows.append((feature, how, *("yes" for _ in COMMUNICATIONS), names))
    return rows


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table of a header and rows."""
    header, *body = rows
    lines = [header, ["---"] * len(header), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def tables() -> dict[str, str]:
    """The tables of docs/attention.md by the name in their markers."""
    return {
        "features": markdown(feature_rows()),
        "types": markdown(type_rows()),
        "kernels": markdown(kernel_rows()),
        "refused": markdown([("not offered", "what there is"), *NOT_OFFERED]),
    }


def filled(page: str) -> str:
    """A page whose marked tables are those of this version."""
    made = tables()
    return _MARKED.sub(lambda found: found[1] + made[found[2]] + found[3], page)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
