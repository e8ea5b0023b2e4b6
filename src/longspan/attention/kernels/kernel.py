"""What a call asks of a kernel (`Need`), and what a kernel can do (`Kernel`): a row of the support table.

The table itself is `KERNELS` in the package; errors, docs/attention.md and `longspan doctor --kernels` read it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

FEATURES = ("window", "softcap", "dropout")  # that some kernels lack; masks, sinks and scale are everybody's


@dataclass(frozen=True)
class HeadSizes:
    """Head sizes of queries and values that a kernel takes; smaller ones are padded with zeros to `multiple`.

    `largest` bounds both (None: no bound); `pairs` of (query, value) are taken beyond it.
    """

    multiple: int = 1
    largest: int | None = None
    pairs: tuple[tuple[int, int], ...] = ()

    def take(self, query: int, value: int) -> bool:
        """Whether these sizes are among them."""
        return self.largest is None or max(query, value) <= self.largest or (query, value) in self.pairs

    def __str__(self) -> str:
        if self.largest is None:
            return "any"
        beyond = "".join(f", or {query} with values of {value}" for query, value in self.pairs)
        return f"at most {self.largest}{beyond}"


@dataclass(frozen=True)
class Need:
    """What a call asks of a kernel.

    `head_size` is the query's, `value_size` the value's (None: the same); `features` are of "window", "softcap" and
    "dropout". `dense`: every group has one document, so that a launch has few tiles. `deterministic`: the same bits
    again; torch's own switch by default.

    >>> choose(Need(torch.device("cpu"), torch.float32, 192, value_size=128)).name
    'cpu_flash'
    """

    device: torch.device
    dtype: torch.dtype
    head_size: int
    features: frozenset[str] = frozenset()
    value_size: int | None = None
    dense: bool = False
    deterministic: bool = field(default_factory=torch.are_deterministic_algorithms_enabled)


@dataclass(frozen=True)
class Kernel:
    """A row of the support table: what a kernel can do, and its two functions.

    `packed` says how it runs several documents, `needs` what it takes to have it; `missing` says what this
    installation or device lacks of that ("" where nothing). `dense_only`: by name it runs every launch, but of itself
    it is chosen for dense calls alone.
    """

    name: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    forward: Callable[..., tuple[Tensor, Tensor]] = field(repr=False)
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = field(repr=False)
    features: frozenset[str] = frozenset()
    head_sizes: HeadSizes = HeadSizes()
    deterministic: bool = True
    dense_only: bool = False
    packed: str = ""
    needs: str = ""
    missing: Callable[[torch.device], str] = field(default=lambda device: "", repr=False)

    def lacks(self, need: Need) -> str:
        """Why this kernel cannot do it, as "needs …, got …"; "" where it can."""
        value = need.head_size if need.value_size is None else need.value_size
        if need.device.type not in self.devices:
            return f"needs {' or '.join(self.devices)} tensors, got {need.device.type}"
        if need.dtype not in self.dtypes:
            return f"needs {' or '.join(short(d) for d in self.dtypes)}, got {short(need.dtype)}"
        if not self.head_sizes.take(need.head_size, value):
            got = str(value) if value == need.head_size else f"{need.head_size} with values of {value}"
            return f"needs a head size of {self.head_sizes}, got {got}"
        if need.features - self.features:
            extra = " and ".join(sorted(need.features - self.features))
            return f"needs a call without {extra}, got {extra}"
        if need.deterministic and not self.deterministic:
            return "needs torch.use_deterministic_algorithms(False), got deterministic mode"
        return self.missing(need.device)

    def suits(self, need: Need) -> bool:
        """Whether it can do it and may be chosen without being named."""
        return (need.dense or not self.dense_only) and not self.lacks(need)


def short(value: Any) -> str:
    """A dtype without its module."""
    return str(value).removeprefix("torch.")
