"""Maps [B | M] of runs under a delta rule, and what outputs owe to entering states: no state of a chunk is stored.

`rows` are what the kernels read, by their names (1, T, ·, ·), as in `states.py`.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from longspan.ssm.kernels.runs import LocalRuns

Named = dict[str, Tensor]
_COLUMNS = 64  # of a program
_NARROW = 128  # key numbers up to which a program of four warps keeps a state in registers


def maps_of(rows: Named, runs: LocalRuns) -> tuple[Tensor, Tensor]:
    """B (R, H, K, V) and M (R, H, K, K) of S_out = M S_in + B of each run, float32."""
    heads, size, width, count = *rows["w"].shape[2:], rows["u"].shape[-1], len(runs.lengths)
    states, transitions = (_single(rows, count, heads, size, n) for n in (width, size))
    blocks = -(-width // _COLUMNS) + -(-size // _COLUMNS)
    given = [rows["k"], rows["w"], rows["u"], _decays(rows), states, transitions, runs.ends]
    if count:  # a rank alone compiles nothing
        _kernel("maps_kernel")[blocks, heads, count](*given, **_sizes(rows, width, runs.chunk))
    return states, transitions


def owed_of(rows: Named, runs: LocalRuns, scale: float) -> Tensor:
    """(R, H, K, V) float32: gradients of the outputs to the states that enter runs, final states having none."""
    heads, size, width, count = *rows["w"].shape[2:], rows["dv"].shape[-1], len(runs.lengths)
    owed = _single(rows, count, heads, size, width)
    given = [rows[name] for name in ("q", "k", "w")] + [_decays(rows), rows["do"], rows["dv"], owed, runs.ends, scale]
    shared = {"Q_SHARED": heads // rows["q"].shape[2], **_sizes(rows, width, runs.chunk)}
    _kernel("owed_kernel")[-(-width // _COLUMNS), heads, count](*given, **shared)
    return owed


def _sizes(rows: Named, width: int, chunk: int) -> dict[str, Any]:
    heads, size = rows["w"].shape[2:]
    keys = max(16, 1 << (size - 1).bit_length())
    sizes = {"HEADS": heads, "SHARED": heads // rows["k"].shape[2], "SIZE": size, "WIDTH": width, "CHUNK": chunk}
    blocks = {"KEYS": keys, "COLUMNS": _COLUMNS, "BY_CHANNEL": "gk" in rows}
    narrow = keys <= _NARROW
    return {**sizes, **blocks, "num_warps": 4 if narrow else 8, "num_stages": 3 if narrow else 1}


def _decays(rows: Named) -> Tensor:
    return rows["gk"] if "gk" in rows else rows["g"]


def _single(rows: Named, *shape: int) -> Tensor:
    return rows["w"].new_empty(shape, dtype=torch.float32)


@cache
def _kernel(name: str) -> Any:
    from longspan.ssm.kernels.delta import maps_kernels

    return getattr(maps_kernels, name)
