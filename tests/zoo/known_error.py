"""A silent error that happened in another system, and a check that it does not happen here.

Silent: no exception, no warning, and a loss that looks plausible. The checks are in the files next to this one; this
module only says what each of them has, and how it is counted.
"""

from collections.abc import Callable
from dataclasses import dataclass

from longspan.comm import World
from longspan.layout import Layout

LIMIT = 1e-10  # of every check's relative error: all of them compute in float64, or compare integers
RANKS = 2
HOME = Layout(ranks=RANKS)

# Entered by every rank of the world; returns this rank's relative error, infinity if a result is missing.
Check = Callable[[World], float]


@dataclass(frozen=True)
class KnownError:
    """One silent error: its thread, what happened there, how it is seen, and why it cannot happen here.

    `thread` is a repository and a number, of a pull request with `pull`, else of an issue.

    `check` runs in a world of `home` over two local processes, in a second or less, and returns a relative error: at
    most LIMIT where all is well.

    >>> error = KnownError("loss scaled by the degree", "NVIDIA/Megatron-LM#673", check=check, happened=…, seen=…, …)
    >>> error.link
    'https://github.com/NVIDIA/Megatron-LM/issues/673'
    """

    name: str
    thread: str
    happened: str
    seen: str
    prevented: str
    check: Check
    pull: bool = False
    home: Layout = HOME

    @property
    def link(self) -> str:
        """The address of the thread."""
        repository, _, number = self.thread.partition("#")
        return f"https://github.com/{repository}/{'pull' if self.pull else 'issues'}/{number}"
