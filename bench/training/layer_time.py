"""Milliseconds of one decoder layer, forward and backward: as it runs, with compiled norms and MLPs, and compiled.

    python bench/training/layer_time.py --out bench/records/layer-time-H200.json  # one GPU
    python bench/training/layer_time.py --cases dense mixture --rows 4096
    python bench/training/layer_time.py --cases tiny --rows 64 --repeats 2  # tries the script on a CPU

A layer gets the rows of two documents in bfloat16 (float32 on a CPU), as a prepared model calls it. Times are the
median of events on the device; "host" is what the call and its backward pass take the processor before they return.
"First" is the first pass, in which graphs are made; "graphs" how many. "Apart" is how far gradients of the layer's
input are from those of the layer as it runs, relative to their norm.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench.begun import open_record
from torch import Tensor
from transformers import Gemma3TextConfig, PreTrainedConfig

from longspan import Layout, World, bind, load_model, plan_fixed, prepare
from longspan.bench.layers import change_layer_count
from longspan.bench.record import origin_text, write_record
from longspan.model.layers import decoder_layers, decoder_model
from longspan.model.presets import preset_config
from longspan.model.weights.hf_folder import read_configuration
from longspan.plain_text import markdown_table

VOCABULARY = 1024
WAYS = ("none", "modules", "layers")
HYBRID = Path(__file__).parents[2] / "examples" / "gpu" / "qwen3-next-8-layers"
TITLES = ("case", "rows", "compiled", "ms", "host ms", "first s", "graphs", "apart")


def _gemma() -> PreTrainedConfig:
    """Gemma 3's shape of 12 B: norms before and after attention and MLP, a window in the first layers."""
    sizes: dict[str, Any] = {
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    }
    return Gemma3TextConfig(**sizes, head_dim=256, sliding_window=1024, vocab_size=VOCABULARY, num_hidden_layers=1)


CASES: dict[str, Callable[[], PreTrainedConfig]] = {
    "dense": lambda: preset_config("qwen3-8b", vocab_size=VOCABULARY),
    "gemma": _gemma,
    "mixture": lambda: preset_config("qwen3-30b-a3b", vocab_size=VOCABULARY),
    "hybrid": lambda: read_configuration(HYBRID),
    "tiny": lambda: preset_config("qwen3-tiny", vocab_size=VOCABULARY),
}


def main() -> None:
    """Measure each case, number of rows and way in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[name for name in CASES if name != "tiny"])
    parser.add_argument("--rows", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    record = open_record("layer time", None, device.type, Path(__file__).parent)
    record["rows"] = rows = list[dict[str, Any]]()
    with World(Layout(ranks=1), backend="nccl" if device.type == "cuda" else "gloo") as world:
        for case in options.cases:
            gradients = dict[int, Tensor]()
            for way in options.ways:
                rows += _measure_way(case, way, options, world, gradients)
    text = f"{markdown_table(TITLES, [_cells(row) for row in rows])}\n\n{origin_text(record)}\n"
    if options.out:
        write_record(record, options.out, f"# One decoder layer, compiled and not\n\n{text}")


def _measure_way(
    case: str, way: str, options: argparse.Namespace, world: World, gradients: dict[int, Tensor]
) -> list[dict[str, Any]]:
    """Measure one layer of a case, compiled in one way, over each number of rows."""
    torch.compiler.reset()
    configuration = change_layer_count(CASES[case](), 1)
    configuration.get_text_config().vocab_size = VOCABULARY
    dtype = "bfloat16" if world.device.type == "cuda" else "float32"
    loaded = load_model(config=configuration, dtype=dtype, seed=0, sharded=True)
    model = prepare(loaded, world, compiled=way, shard_parameters=False, probe=case != "hybrid")
    measured = list[dict[str, Any]]()
    for count in options.rows:
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        row = {"case": case, "rows": count, "compiled": way} | _time_layer(model, world, count, options.repeats)
        gradient = row.pop("gradient")
        exact = gradients.setdefault(count, gradient)
        row["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
        row["apart"] = ((gradient - exact).norm() / exact.norm()).item()
        print(" | ".join(_cells(row)), flush=True)
        measured.append(row)
    return measured


def _time_layer(model: Any, world: World, count: int, repeats: int) -> dict[str, Any]:
    """Time the first decoder layer over so many rows, called with what its model gives it."""
    plan = plan_fixed([count // 2, count - count // 2], world.home, cp=1, max_tokens_per_slot=count)
    world.prepare(plan)
    shard = bind(plan.micro_batches[0], world)
    ids = (torch.arange(count, device=world.device) * 7 % VOCABULARY)[None]
    layer, call = next(iter(decoder_layers(model).values())), dict[str, Any]()
    noted = layer.register_forward_pre_hook(
        lambda _, args, kwargs: call.update(args=args, kwargs=kwargs), with_kwargs=True
    )
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        decoder_model(model)(input_ids=ids, position_ids=shard.position_ids[None], shard=shard, use_cache=False)
    noted.remove()
    draw = torch.Generator(world.device).manual_seed(0)
    hidden = call["args"][0].detach()
    x = torch.randn(hidden.shape, generator=draw, device=world.device, dtype=hidden.dtype).requires_grad_()
    dout = torch.randn(hidden.shape, generator=draw, device=world.device, dtype=hidden.dtype)

    def run() -> None:
        out = layer(x, *call["args"][1:], **call["kwargs"])
        (out if isinstance(out, Tensor) else out[0]).backward(dout)

    started = time.perf_counter()
    run()
    _wait(world)
    assert x.grad is not None
    first, gradient = time.perf_counter() - started, x.grad.float()
    milliseconds, host = list[float](), list[float]()
    for _ in range(repeats + 3):
        model.zero_grad(set_to_none=True)
        x.grad = None
        of_device, of_host = _time_call(run, world)
        milliseconds.append(of_device)
        host.append(of_host)
    times = {"milliseconds": statistics.median(milliseconds[3:]), "host": statistics.median(host[3:])}
    return times | {"first": first, "gradient": gradient}


def _time_call(run: Callable[[], None], world: World) -> tuple[float, float]:
    """Return the milliseconds of a call on the device, and those until it returns."""
    _wait(world)
    started = time.perf_counter()
    if world.device.type != "cuda":
        run()
        milliseconds = 1e3 * (time.perf_counter() - started)
        return milliseconds, milliseconds
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    host = 1e3 * (time.perf_counter() - started)
    _wait(world)
    return begin.elapsed_time(end), host


def _wait(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def _cells(row: dict[str, Any]) -> list[str]:
    figures = [f"{row['milliseconds']:.2f}", f"{row['host']:.2f}", f"{row['first']:.1f}", str(row["graphs"])]
    return [row["case"], f"{row['rows']:,}", row["compiled"], *figures, f"{row['apart']:.1e}"]


if __name__ == "__main__":
    main()
