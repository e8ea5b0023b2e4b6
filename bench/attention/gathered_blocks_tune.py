# ruff: noqa
"""Compile all variants in parallel, check each against float64, then time each at 32K rows; write the best."""

import json, os, subprocess, sys, time

out = sys.argv[1]
F = {
    "axk2": [(32, 64, 4, 3), (32, 64, 4, 2), (32, 128, 4, 2), (32, 128, 8, 2)],
    "v32": [(64, 64, 8, 2), (32, 64, 8, 2), (64, 32, 8, 2), (32, 64, 4, 2)],
}
G = {
    "axk2": [(32, 64, 4, 2, 128), (32, 64, 4, 2, 64), (32, 128, 8, 1, 128), (32, 64, 8, 2, 128), (16, 64, 4, 2, 128)],
    "v32": [
        (32, 32, 8, 2, 128),
        (32, 64, 8, 1, 128),
        (16, 64, 8, 2, 128),
        (16, 64, 8, 2, 64),
        (32, 64, 8, 1, 64),
        (64, 32, 8, 1, 64),
    ],
}
SZ = {"axk2": (32, 128, 32, 0.1), "v32": (128, 512, 64, 0.07)}


def make(model, T, k, dtype):
    import torch
    from longspan.attention.tiles import Tile, Tiling, Tokens, Launch
    from longspan.attention.call import AttendCall
    import numpy as np

    N, C, R, s = SZ[model]
    torch.manual_seed(0)
    d = "cuda"
    launch = Launch(
        Tiling.from_tiles([Tile(0, T, 0, T, None, 0)]),
        torch.device(d),
        lambda: Tokens(np.zeros(T, int), np.arange(T), np.arange(T)),
    )
    idx = torch.full((T, k), -1, dtype=torch.int32, device=d)
    for a in range(0, T, 2048):
        b = min(T, a + 2048)
        x = torch.rand(b - a, T, device=d)
        x.masked_fill_(torch.arange(T, device=d)[None] > torch.arange(a, b, device=d)[:, None], -1)
        v, i = x.topk(min(k, T), 1)
        idx[a:b, : i.shape[1]] = torch.where(v >= 0, i, -1).sort(1, descending=False).values.int()
    q, kk, v, do = (torch.randn(sh, device=d, dtype=dtype) for sh in ((T, N, C + R), (T, 1, R), (T, 1, C), (T, N, C)))
    return (
        launch,
        AttendCall(N, 1, C + R, C, dtype, torch.device(d), scale=s, indexed=True, latents=True, indices=idx),
        q,
        kk,
        v,
        do,
    )


def setcfg(kind, model, c):
    from longspan.attention.kernels import triton_gathered as g, triton_flash as t

    w = SZ[model][1]
    (g.FORWARD if kind == "F" else g.GRADIENTS)[w] = (t.Blocks(*c[:4]),)
    t._fitting.clear()
    if kind == "G":
        g._PIECE = c[4]


def once(kind, launch, call, q, k, v, do, o, l):
    from longspan.attention.kernels import triton_gathered as g
    from longspan.attention.call import Saved

    return g.forward(q, k, v, launch, call) if kind == "F" else g.backward(do, Saved(q, k, v, o, l), launch, call)


def ref(model):
    import torch
    from longspan.attention.kernels import reference
    from longspan.attention.call import Saved

    launch, call, q, k, v, do = make(model, 512, 96, torch.bfloat16)
    x = [a.double() for a in (q, k, v, do)]
    o, l = reference.forward(*x[:3], launch, call)
    gr = reference.backward(x[3], Saved(*x[:3], o, l), launch, call)
    return launch, call, q, k, v, do, o, l, gr


def one(kind, model, c):
    import torch

    launch, call, q, k, v, do, o, l, gr = ref(model)
    setcfg(kind, model, c)
    try:
        r = once(kind, launch, call, q, k, v, do, o.bfloat16(), l.float())
        e = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(r, (o, l) if kind == "F" else gr)]
        print(json.dumps([kind, model, c, e]))
    except Exception as x:
        print(json.dumps([kind, model, c, repr(x)[:150]]))


if len(sys.argv) > 2:
    one(sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
    sys.exit()
import torch

t0 = time.time()
jobs = [(k, m, c) for k, tab in (("F", F), ("G", G)) for m in tab if m == os.environ["M"] for c in tab[m]]
ps = [
    (
        j,
        subprocess.Popen(
            [sys.executable, __file__, out, j[0], j[1], json.dumps(j[2])],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ),
    )
    for j in jobs
]
good = []
for j, p in ps:
    try:
        so, se = p.communicate(timeout=max(2, 50 - (time.time() - t0)))
    except subprocess.TimeoutExpired:
        p.kill()
        print(j, "TIMEOUT")
        continue
    print(so.strip()[-300:] or se[-400:], flush=True)
    try:
        e = json.loads(so)[3]
        if isinstance(e, list) and max(e) < 1e-2:
            good.append(j)
    except Exception:
        pass
print("compiled", time.time() - t0, flush=True)
best = {}
for m in (os.environ["M"],):
    T = 32768
    launch, call, q, k, v, do = make(m, T, 2048, torch.bfloat16)
    from longspan.attention.kernels import triton_gathered as g

    o = l = None
    for kind, mm, c in good:
        if mm != m:
            continue
        setcfg(kind, m, c)
        if kind == "G" and o is None:
            bf = best.get(("F", m))
            setcfg("F", m, bf[1]) if bf else None
            o, l = g.forward(q, k, v, launch, call)
        try:
            ts = []
            for i in range(3):
                torch.cuda.synchronize()
                a = time.time()
                once(kind, launch, call, q, k, v, do, o, l)
                torch.cuda.synchronize()
                ts.append(time.time() - a)
            t = min(ts[1:])
            print("TIME", kind, m, c, f"{t * 1e3:.1f} ms", flush=True)
            if (kind, m) not in best or t < best[kind, m][0]:
                best[kind, m] = (t, c)
                json.dump({f"{k},{n}": b for (k, n), b in best.items()}, open(out, "w"))
        except Exception as x:
            print("TIME", kind, m, c, repr(x)[:150], flush=True)
    del launch, call, q, k, v, do, o, l
    torch.cuda.empty_cache()
json.dump({f"{k},{m}": b for (k, m), b in best.items()}, open(out, "w"))
print(best, "total", time.time() - t0, flush=True)
