"""Milliseconds of one decoder layer and of its products, in bfloat16 and in float8 by rows, on one GPU.

    python bench/training/float8_layer.py --out bench/records/float8-layer-H200.json   # about a minute

The layer is Qwen3-8B's, as it runs or as two compiled halves (`train.compile`), over two documents of --rows in all:
the time of --layers layers above that of one, over their difference, so that embedding and loss drop out. Of each
linear there are forward, both gradients and what float8 adds. With torchao installed its recipe `rowwise_with_gw_hp`,
compiled, does the same linears. Products count 6 FLOPs a weight and row; tensor cores add as `FAST_SUMS` of
`longspan.model.float8.products` says, or the other way.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench.begun import missing_row, open_record, write_page
from torch import Tensor, nn
from torch.nn import functional as F

from longspan.bench.benches import change_layer_count
from longspan.comm import World, bind
from longspan.layout import Layout
from longspan.model import load_model, prepare, preset_config
from longspan.model.float8 import products
from longspan.model.float8.products import Float8Weight, linear_in_float8, quantise_columns, quantise_rows
from longspan.plain_text import markdown_table
from longspan.plan import plan_fixed

LINEARS = {"q, o": (4096, 4096), "k, v": (4096, 1024), "gate, up": (4096, 12288), "down": (12288, 4096)}
TIMES_IN_LAYER = {"q, o": 2, "k, v": 2, "gate, up": 2, "down": 1}
DEVICE = torch.device("cuda")
KINDS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float8 by rows": {"float8": "rowwise"},
    "bfloat16, compiled": {"compiled": "layers"},
    "float8 by rows, compiled": {"float8": "rowwise", "compiled": "layers"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--layers", type=int, default=5, help="of the deeper model, above 1")
    parser.add_argument("--preset", default="qwen3-8b")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS), help="of layers")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path)
    flags = parser.parse_args()
    record = open_record("float8 layer", None, "nccl", Path(__file__).parent)
    record["layers"] = []
    for rows, kind in itertools.product(flags.rows, flags.kinds):
        one, deep = (time_model(count, KINDS[kind], rows, flags) for count in (1, flags.layers))
        record["layers"].append({"rows": rows, "kind": kind, "ms": (deep - one) / (flags.layers - 1)})
    record["products"] = [row for rows in flags.rows for name in LINEARS for row in time_linear(name, rows, flags)]
    plain = {row["rows"]: row["ms"] for row in record["layers"] if row["kind"] == "bfloat16"}
    cells = [
        [f"{r['rows']:,}", r["kind"], f"{r['ms']:.2f}", f"{plain[r['rows']] / r['ms']:.2f}"] for r in record["layers"]
    ]
    layers = markdown_table(["rows", "a layer, forward and backward", "ms", "bfloat16's over this"], cells)
    text = f"{layers}\n\n{products_table(record['products'])}"
    write_page(record, flags.out, "A layer in float8 by rows", text)


def time_model(layers: int, how: dict[str, Any], rows: int, flags: argparse.Namespace) -> float:
    config = change_layer_count(preset_config(flags.preset, vocab_size=2048), layers)
    lengths = (rows // 2, rows - rows // 2)
    with World(Layout(1)) as world:
        model = load_model(config=config, dtype="bfloat16", seed=0, sharded=True)
        model = prepare(model, world, shard_parameters=False, **({"compiled": "none"} | how))
        shard = bind(plan_fixed(lengths, world.home, cp=1, max_tokens_per_slot=rows).micro_batches[0], world)
        ids = torch.randint(2048, (1, rows), device=world.device)

        def run() -> None:
            model.zero_grad(set_to_none=True)
            loss = model(
                input_ids=ids,
                position_ids=shard.position_ids[None],
                shard=shard,
                row_loss=lambda hidden, _: hidden.float().square().mean(),
            )
            loss.backward()

        return time_calls(run, flags.repeats)


def time_linear(name: str, rows: int, flags: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A linear of the layer in bfloat16, in float8 by rows with its parts, and as torchao does it."""
    width_in, width_out = LINEARS[name]
    x, dy = (torch.randn(rows, width, device=DEVICE, dtype=torch.bfloat16) for width in (width_in, width_out))
    x.requires_grad_()
    linear = nn.Linear(width_in, width_out, bias=False, device=DEVICE, dtype=torch.bfloat16)
    about = {"linear": name, "rows": rows, "flops": 6 * rows * width_in * width_out, "times": TIMES_IN_LAYER[name]}
    weight = linear.weight

    def timed(compute: Callable[[Tensor], Tensor]) -> float:
        return time_calls(lambda: torch.autograd.grad(compute(x), (x, weight), dy), flags.repeats)

    yield about | {"kind": "bfloat16", "ms": timed(lambda x: F.linear(x, weight))}
    for fast in (True, False):
        before = products.FAST_SUMS
        products.FAST_SUMS = fast
        kind = "float8 by rows" + ("" if fast == before else f", {'fast' if fast else 'float32'} sums")
        yield about | {"kind": kind, "ms": timed(lambda x: linear_in_float8(x, weight, None, Float8Weight()))}
        products.FAST_SUMS = before
    parts: dict[str, Callable[[], object]] = {
        "rows of x": lambda: quantise_rows(x.detach()),
        "rows of dy": lambda: quantise_rows(dy),
        "rows of W": lambda: quantise_rows(weight.detach()),
        "columns of W": lambda: quantise_columns(weight.detach()),
    }
    for part, run in parts.items():
        yield about | {"kind": part, "ms": time_calls(run, flags.repeats), "flops": 0}
    yield about | {"kind": "torchao, compiled"} | time_torchao(linear, timed)


def time_torchao(linear: nn.Linear, timed: Callable[[Callable[[Tensor], Tensor]], float]) -> dict[str, Any]:
    """The linear by torchao, whose weight is the same; a reason where it cannot."""
    try:
        from torchao.float8 import (  # pyright: ignore[reportMissingImports]
            Float8LinearConfig,
            convert_to_float8_training,
        )

        recipe = Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
        converted = convert_to_float8_training(nn.Sequential(linear), config=recipe)
        return {"ms": timed(torch.compile(converted))}
    except Exception as error:
        return missing_row(error)


def time_calls(run: Callable[[], object], repeats: int) -> float:
    """The median of calls one after another, in milliseconds of the device."""
    for _ in range(3):
        run()
    starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(repeats)] for _ in range(2))
    for start, end in zip(starts, ends, strict=True):
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in zip(starts, ends, strict=True))


def products_table(rows: list[dict[str, Any]]) -> str:
    cells = [
        [f"{r['rows']:,}", r["linear"], r["kind"], *(f"{r['ms']:.3f}", _tflops(r["flops"], r["ms"]))]
        if "ms" in r
        else [f"{r['rows']:,}", r["linear"], r["kind"], r["missing"], ""]
        for r in rows
    ]
    for count in dict.fromkeys(row["rows"] for row in rows):
        for kind in dict.fromkeys(row["kind"] for row in rows if row["flops"] and "ms" in row):
            of_kind = [row for row in rows if (row["rows"], row["kind"]) == (count, kind)]
            if all("ms" in row for row in of_kind):
                flops, total = (sum(row["times"] * row[name] for row in of_kind) for name in ("flops", "ms"))
                cells.append([f"{count:,}", "all of a layer", kind, f"{total:.2f}", _tflops(flops, total)])
    return markdown_table(["rows", "linear", "", "ms", "TFLOP/s"], cells)


def _tflops(flops: float, milliseconds: float) -> str:
    return f"{flops / milliseconds / 1e9:.0f}" if flops and milliseconds else ""


if __name__ == "__main__":
    main()
