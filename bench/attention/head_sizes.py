"""Kernels at the head sizes of real models on a GPU, and small copies of popular families that keep theirs.

    python bench/attention/head_sizes.py --out bench/records/head-sizes.json

Layers: each kernel of the support table that can, forward and backward in bfloat16, over one document of `--rows` rows
and over eight that are packed; errors of smaller ones beside dense attention in float64, and beside dense attention in
bfloat16. Families: `longspan doctor --model FOLDER --head-size true --backend nccl` of each, with a config.json, on as
many ranks as there are GPUs (4 at most). The record is written after each part; a second run goes on with what is
missing.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench.begun import open_record
from torch import Tensor
from transformers import CONFIG_MAPPING

from longspan.attention import KERNELS, AttendCall, Mask
from longspan.attention.call import Saved
from longspan.attention.kernels.table import Kernel
from longspan.attention.tiles import Launch, Tile, Tiling
from longspan.bench.record import origin_text, write_record

SMALL = (700, 1, 323)
SHARES = (96, 64, 32, 24, 19, 13, 6, 2)  # of 256, documents of a packed case
FAMILIES: dict[str, dict[str, Any]] = {  # what published models have, where the defaults of the class differ
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"head_dim": 128},
    "mistral": {},
    "mixtral": {},
    "gemma2": {},
    "gemma3_text": {},
    "gemma4_text": {},
    "gpt_oss": {},
    "deepseek_v3": {},
    "glm4_moe": {"head_dim": 128},
    "phi3": {},
    "olmo3": {},
}
AT_ONCE = 4
GPU = torch.device("cuda")


@dataclass(frozen=True)
class Layer:
    """Attention of a kind of layer: query and key/value heads, their sizes, window and soft cap."""

    heads: int
    kv_heads: int
    size: int
    value_size: int
    window: int | None = None
    softcap: float | None = None

    def call(self, scale: float = 1.0) -> AttendCall:
        """The call of causal attention in bfloat16 on a GPU."""
        sizes = (self.heads, self.kv_heads, self.size, self.value_size)
        mask = Mask(window=self.window)
        return AttendCall(*sizes, torch.bfloat16, GPU, mask, scale=scale * self.size**-0.5, softcap=self.softcap)


LAYERS = {
    "Llama 3, Qwen3": Layer(32, 8, 128, 128),
    "DeepSeek-V3": Layer(16, 16, 192, 128),
    "Gemma 3, global; Qwen3-Next": Layer(16, 8, 256, 256),
    "Gemma 3, window": Layer(16, 8, 256, 256, window=1024),
    "Gemma 2, global": Layer(16, 8, 256, 256, softcap=50.0),
    "Gemma 2, window": Layer(16, 8, 256, 256, window=4096, softcap=50.0),
    "Gemma 4, global": Layer(16, 4, 512, 512),
}


def main() -> int:
    """Measure what the record lacks."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--rows", type=int, default=16384)
    flags.add_argument("--families", default=",".join(FAMILIES), help="model types; empty: none")
    flags.add_argument("--layers", action=argparse.BooleanOptionalAction, default=True, help="measure kernels")
    flags.add_argument("--cases", default="whole", choices=("whole", "basic"), help="of the doctor")
    flags.add_argument("--at-once", type=int, default=AT_ONCE, help="families proven beside each other")
    flags.add_argument("--out", type=Path)
    options = flags.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this bench measures kernels of GPUs, and torch sees none here")
    record = open_record("head sizes", options.out, "nccl", Path(__file__).parent)
    record.setdefault("rows", options.rows)
    rows = record.setdefault("layers", [])
    for name in LAYERS if options.layers else ():
        if name not in {row["layer"] for row in rows}:
            rows += measured(name, LAYERS[name], options.rows)
            _keep(record, options.out)
    done = {row["family"] for row in record.setdefault("families", [])}
    wanted = [name for name in options.families.split(",") if name and name not in done]
    with ThreadPoolExecutor(options.at_once) as pool:
        for row in pool.map(partial(proven, cases=options.cases), wanted):
            record["families"].append(row)
            _keep(record, options.out)
    print(text_of(record))
    return 0 if all(row["good"] for row in record["families"]) else 1


def measured(name: str, layer: Layer, rows: int) -> Iterator[dict[str, Any]]:
    """A row for every kernel that can run it: errors, milliseconds and TFLOP/s."""
    packed = tuple(rows * share // 256 for share in SHARES)
    for kernel in KERNELS:
        if kernel.lack_for(layer.call()):
            continue
        row: dict[str, Any] = {"layer": name, "kernel": kernel.name, **asdict(layer)}
        row["errors"], row["dense"] = errors(kernel, layer)
        for case, lengths in (("one", (rows,)), ("packed", packed)):
            row[case] = _times(kernel, layer, lengths)
        print(json.dumps(row), flush=True)
        yield row


def errors(kernel: Kernel, layer: Layer) -> tuple[list[float], list[float]]:
    """Relative 2-norms of out, dq, dk, dv from dense attention in float64: the kernel's, and dense bfloat16's own."""
    *qkv, dout = _tensors(layer, sum(SMALL), seed=1)
    call, launch = layer.call(), _launch(layer, SMALL)
    out, lse = kernel.forward(*qkv, launch, call)
    results = [out, *kernel.backward(dout, Saved(*qkv, out, lse), launch, call)]
    exact, rounded = (_dense(qkv, dout, call, dtype) for dtype in (torch.float64, torch.bfloat16))
    return [_error(*pair) for pair in zip(results, exact, strict=True)], [
        _error(*pair) for pair in zip(rounded, exact, strict=True)
    ]


def _dense(qkv: list[Tensor], dout: Tensor, call: AttendCall, dtype: torch.dtype) -> list[Tensor]:
    """out, dq, dk and dv, document by document with all scores at once."""
    leaves = [x.to(dtype).requires_grad_() for x in qkv]
    outs = list[Tensor]()
    for q, k, v in zip(*(x.split(SMALL) for x in leaves), strict=True):
        k, v = (x.repeat_interleave(call.heads // call.kv_heads, 1) for x in (k, v))
        scores = torch.einsum("qnh,knh->nqk", q, k) * call.scale
        scores = scores if call.softcap is None else call.softcap * torch.tanh(scores / call.softcap)
        seen = torch.ones(scores.shape[1:], dtype=torch.bool, device=GPU).tril()
        seen = seen if call.mask.window is None else seen.triu(1 - call.mask.window)
        outs.append(torch.einsum("nqk,knh->qnh", scores.masked_fill(~seen, -torch.inf).softmax(-1), v))
    out = torch.cat(outs)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))]


def _error(result: Tensor, exact: Tensor) -> float:
    return ((result.double() - exact.double()).norm() / exact.double().norm()).item()


def _times(kernel: Kernel, layer: Layer, lengths: tuple[int, ...]) -> dict[str, Any]:
    *qkv, dout = _tensors(layer, sum(lengths), seed=2)
    call, launch = layer.call(), _launch(layer, lengths)
    torch.cuda.reset_peak_memory_stats()
    out, lse = kernel.forward(*qkv, launch, call)
    saved = Saved(*qkv, out, lse)
    passes = 1 if kernel.name == "reference" else 4
    forward = _milliseconds(lambda: kernel.forward(*qkv, launch, call), passes)
    backward = _milliseconds(lambda: kernel.backward(dout, saved, launch, call), passes)
    window = layer.window or max(lengths)
    pairs = sum(min(n, window) * (min(n, window) + 1) // 2 + max(0, n - window) * window for n in lengths)
    work = 2e-9 * pairs * layer.heads * (layer.size + layer.value_size)  # TFLOP for milliseconds
    speed = {"forward_tflops": work / forward, "backward_tflops": 2.5 * work / backward}
    return {"forward_ms": forward, "backward_ms": backward, **speed, "peak": torch.cuda.max_memory_allocated()}


def _milliseconds(function: Callable[[], object], passes: int) -> float:
    """The least of three means, after a pass that compiles."""
    function()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = float("inf")
    for _ in range(3):
        start.record()
        for _ in range(passes):
            function()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / passes)
    return best


def _tensors(layer: Layer, rows: int, seed: int) -> list[Tensor]:
    generator = torch.Generator(GPU).manual_seed(seed)
    heads = ((layer.heads, layer.size), (layer.kv_heads, layer.size))
    shapes = (*heads, (layer.kv_heads, layer.value_size), (layer.heads, layer.value_size))
    return [torch.randn(rows, *shape, generator=generator, device=GPU).bfloat16() for shape in shapes]


def _launch(layer: Layer, lengths: tuple[int, ...]) -> Launch:
    left = None if layer.window is None else layer.window - 1
    ends = zip(accumulate(lengths), lengths, strict=True)
    return Launch(Tiling.from_tiles(Tile(end - n, end, end - n, end, left, 0) for end, n in ends), GPU)


def proven(family: str, cases: str) -> dict[str, Any]:
    """What `longspan doctor --model` says of a family at its true head sizes on the GPUs here."""
    with tempfile.TemporaryDirectory() as folder:
        CONFIG_MAPPING[family](**FAMILIES[family]).save_pretrained(folder)
        words = ["--model", folder, "--head-size", "true", "--backend", "nccl", "--cases", cases, "--json"]
        command = [sys.executable, "-m", "longspan", "doctor", *words]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if not ran.stdout.startswith("{"):
        print(f"{family}: {ran.stderr[-2000:]}", flush=True)
        return {"family": family, "good": False, "message": ran.stderr.strip()[-300:]}
    found = json.loads(ran.stdout)
    rows = found["cases"]
    compared = [row for row in rows if row["loss_error"] is not None]
    of_allowed: dict[str, float] = {}
    for row in compared:
        error = max(row["loss_error"], row["gradient_error"] or 0.0) / row["tolerance"]
        of_allowed[row["dtype"]] = max(error, of_allowed.get(row["dtype"], 0.0))
    bad = [f"{row['name']}: {row['status']} {row['message'] or row['parameter']}" for row in rows if not row["good"]]
    row = {
        "family": family,
        "good": found["good"],
        "seconds": found["seconds"],
        "ranks": found["model"]["copies"][-1]["ranks"],
        "kernels": found["model"]["kernels"],
        "exact": sum(row["status"] == "exact" for row in rows),
        "refused": sum(row["status"] == "refused" for row in rows),
        "of_allowed": of_allowed,
        "bad": [text[:300] for text in bad],
    }
    print(json.dumps(row), flush=True)
    return row


def _keep(record: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        write_record(record, out, text_of(record))


def text_of(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    lines = ["# Kernels at the head sizes of real models", "", origin_text(record), ""]
    lines += [
        f"Milliseconds (TFLOP/s) of one layer in bfloat16 over one document of {record['rows']:,} rows, and over eight "
        "of as many together; backward counts 2.5 times forward's work. Error: the worst of out, dq, dk and dv beside "
        f"dense attention in float64, documents of {', '.join(map(str, SMALL))} rows; in brackets that of dense "
        "attention in bfloat16.",
        "",
        "| layer | heads | kernel | forward | backward | packed forward | packed backward | peak GiB | error |",
        "| --- " * 9 + "|",
        *(_layer_line(row) for row in record.get("layers", [])),
        "",
        "Small copies of families at their true head sizes beside the stock model (`longspan doctor --model FOLDER "
        "--head-size true --backend nccl`). Worst: the largest error of loss and gradients, as a share of what is "
        "allowed: twice the stock model's own error in bfloat16; in float32 that or 1e-5, what is more, 1e-4 at most.",
        "",
        "| family | ranks | kernels | exact | refused | worst in bfloat16 | in float32 | |",
        "| --- " * 8 + "|",
        *(_family_line(row) for row in record.get("families", [])),
    ]
    return "\n".join(lines) + "\n"


def _layer_line(row: dict[str, Any]) -> str:
    heads = f"{row['heads']}/{row['kv_heads']} of {row['size']}"
    heads += "" if row["size"] == row["value_size"] else f"/{row['value_size']}"
    heads += f", window {row['window']}" if row["window"] else ""
    heads += f", soft cap {row['softcap']:g}" if row["softcap"] else ""
    times = [
        f"{row[case][f'{way}_ms']:.2f} ({row[case][f'{way}_tflops']:.0f})"
        for case in ("one", "packed")
        for way in ("forward", "backward")
    ]
    error = f"{max(row['errors']):.1e} ({max(row['dense']):.1e})"
    peak = f"{row['one']['peak'] / 2**30:.1f}"
    return f"| {' | '.join([row['layer'], heads, row['kernel'], *times, peak, error])} |"


def _family_line(row: dict[str, Any]) -> str:
    if "message" in row:
        return f"| {row['family']} | | | | | | | {row['message']} |"
    kernels = "; ".join(f"{line['attention']}: {line['here'].partition(' ')[0]}" for line in row["kernels"])
    worst = [f"{row['of_allowed'].get(dtype, float('nan')):.2f}" for dtype in ("bfloat16", "float32")]
    cells = [
        row["family"],
        row["ranks"],
        kernels,
        row["exact"],
        row["refused"],
        *worst,
        "; ".join(row["bad"]) or "good",
    ]
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.exit(main())
