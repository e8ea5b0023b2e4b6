"""What trials of small models on the host have in common: they leave the process as it was, and say why they cannot."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def on_the_host() -> Iterator[None]:
    """One thread, and random numbers of its own.

    Operations on tens of numbers take longer in several threads, above all where processes share the cores.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(threads)


def in_one_line(error: Exception) -> str:
    """Whatever a configuration, a constructor or a forward pass raised, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
