"""Microseconds of the maps of runs (`delta.compute_run_maps`) beside fla-core's (`fla.ops.cp`), bfloat16, on one GPU.

python bench/training/state_maps.py   # the table of bench/records/state-maps-H200.md, about a minute
"""

from functools import partial

import numpy as np
import torch
from fla.ops.cp.chunk_fwd import chunk_cp_fwd_h
from torch.nn.functional import logsigmoid, normalize
from triton.testing import do_bench_cudagraph

from longspan.ssm.kernels.delta import compute_run_maps
from longspan.ssm.kernels.local_runs import LocalRuns

GPU = torch.device("cuda")
SIZE = 128
print("| rows | heads | pieces | ours | fla-core's |\n| --- | --- | --- | --- | --- |")
for rows in (8192, 16384, 65536):
    for heads in (32, 8):
        k, w, u = (torch.randn(1, rows, n, SIZE, device=GPU) for n in (heads // 2, heads, heads))
        k = normalize(k, dim=-1).bfloat16()
        w = (normalize(w, dim=-1) / 10).bfloat16()
        u = u.bfloat16()
        g = torch.randn(1, rows // 64, 64, heads, device=GPU)
        g = (logsigmoid(g + 4).cumsum(2) * 1.4427).reshape(1, rows, heads).contiguous()  # base 2
        for pieces in (1, 64 // heads):
            runs = LocalRuns(np.full(pieces, rows // pieces), GPU)
            maps = torch.empty(pieces, heads, SIZE, 2 * SIZE, device=GPU)
            ours = partial(compute_run_maps, {"k": k, "w": w, "u": u, "g": g}, runs)
            theirs = partial(chunk_cp_fwd_h, k, w, u, maps, g=g, cu_seqlens=runs.ends, multi_seqs=True)
            times = [1e3 * do_bench_cudagraph(call, return_mode="median") for call in (ours, theirs)]
            print(f"| {rows:,} | {heads} | {pieces} | {times[0]:,.1f} | {times[1]:,.1f} |", flush=True)
