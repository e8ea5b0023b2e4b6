"""The table of kernels in docs/attention.md: `python -m longspan.attention.support docs/attention.md` renews it."""

import re
import sys
from pathlib import Path

from longspan.attention.call import dtype_name
from longspan.attention.kernels import FEATURES, KERNELS

_MARKED = re.compile(r"(<!-- table: kernels -->\n).*?(<!-- end -->)", re.DOTALL)


def fill_table(page: str) -> str:
    """Fill the marked table of a page with the kernels of this version, a row each."""
    names = ("kernel", "tensors", "head sizes", *FEATURES, "deterministic", "several documents", "needs")
    rows: list[tuple[str, ...]] = [names, ("---",) * len(names)]
    for kernel in KERNELS:
        where = f"{' and '.join(kernel.devices)}: {', '.join(dtype_name(dtype) for dtype in kernel.dtypes)}"
        features = ("yes" if feature in kernel.features else "no" for feature in FEATURES)
        deterministic = "in deterministic mode" if kernel.deterministic else "no"
        sizes = str(kernel.head_sizes)
        rows.append((f"`{kernel.name}`", where, sizes, *features, deterministic, kernel.packed, kernel.needs))
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return _MARKED.sub(lambda marked: marked[1] + table + marked[2], page)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(fill_table(path.read_text(encoding="utf-8")), encoding="utf-8")
