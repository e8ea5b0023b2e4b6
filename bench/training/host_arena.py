"""The host's arena next to torch's pinned memory: bytes, seconds to make, copies, and steps of a stack of layers.

    python bench/training/host_arena.py --out bench/records/host-arena-H200.json              # one H200, four minutes
    python bench/training/host_arena.py --preset qwen3-tiny --layers 2 --rows 64 --tensor 5000 --steps 1    # on a CPU

First a tensor of `--tensor` bytes and memory for as many as `--gib` hold, by torch (`pin_memory=True`) and in an arena:
what is gone of the host's free memory, the seconds, and GB/s of copies there, back, and both at once. Then steps
(forward and backward, without an optimizer) of `--layers` layers of a preset on one document of `--rows` tokens, for
each measure; those that wait on the host do so in an arena, and in torch's pinned memory by the same code. A step's
seconds are the median of `--steps`, and memory is the most that torch's allocator had in use.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from longspan.cli.machine import machine_facts
from longspan.comm import World
from longspan.host_memory import free_host_bytes
from longspan.layout import Layout
from longspan.model import prepare
from longspan.model.activations.host_arena import HostArena
from longspan.model.activations.host_offload import HOST_OFFLOAD, HostOffload
from longspan.model.presets import preset_config
from longspan.plain_text import markdown_table
from longspan.plan import plan_fixed
from longspan.train import run_step
from longspan.versions import versions

WAYS = ("none", "selective", "full", "selective+host", "full+host", "selective+host, torch", "full+host, torch")


class PinnedByTorch:
    """Stands for an arena; each tensor is one of torch's own in pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.bytes = device, 0
        self.copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def take(self, bytes: int) -> Any:
        """Something that makes a tensor like another one, as a range of an arena does."""
        self.bytes += bytes
        return SimpleNamespace(like=lambda x: torch.empty_like(x, device="cpu", pin_memory=self.copies is not None))


def main() -> None:
    """Measure, print tables, and write the record."""
    flags = _flags()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    memory = [_memory(device, flags, way) for way in ("torch", "arena")]
    print(markdown_table(list(memory[0]), [list(map(str, row.values())) for row in memory]), flush=True)
    steps = list[dict[str, Any]]()
    for way in WAYS:
        steps.append(_steps(flags, way))
        print(json.dumps(steps[-1]), flush=True)
    print(markdown_table(list(steps[0]), [list(map(str, row.values())) for row in steps]))
    if flags.out is not None:
        settings = {name: getattr(flags, name) for name in ("tensor", "gib", "preset", "layers", "rows", "steps")}
        about = {"machine": machine_facts(), "versions": versions(), "command": " ".join(["python", *sys.argv])}
        record = {"bench": "host arena", **settings, **about, "memory": memory, "rows": steps}
        flags.out.write_text(json.dumps(record, indent=1) + "\n")


def _memory(device: torch.device, flags: argparse.Namespace, way: str) -> dict[str, Any]:
    """What memory for tensors takes of the host, the seconds, and rates of copies."""
    count = max(1, int(flags.gib * 2**30) // flags.tensor)
    free, start, places = free_host_bytes() or 0, time.perf_counter(), list[Any]()
    if way == "torch":
        tensors = [torch.empty(flags.tensor, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(count)]
    else:
        arena = HostArena(device, count * -(-flags.tensor // 256) * 256)
        places = [arena.take(flags.tensor) for _ in range(count)]
        tensors = [place.memory for place in places]
    seconds = time.perf_counter() - start
    for tensor in tensors:
        tensor.fill_(1)  # a CPU's memory is taken when it is written
    asked, gone = count * flags.tensor, free - (free_host_bytes() or 0)
    of_torch = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) if device.type == "cuda" else 0
    rates = {f"GB/s {name}": round(rate / 1e9, 1) for name, rate in _rates(device, tensors).items()}
    figures = {"asked": asked, "gone of the host": gone, "torch counts": of_torch, "seconds": round(seconds, 3)}
    del tensors, places
    gc.collect()
    if device.type == "cuda":
        _free_pinned()
    return {"way": way, "tensors": count, **figures, **rates}


def _rates(device: torch.device, tensors: list[Tensor]) -> dict[str, float]:
    """Bytes a second to the host, from it, and both at once on two streams."""
    on_device = [torch.empty_like(x, device=device) for x in tensors[:2]]
    there, back = tensors[0], tensors[-1]
    if device.type != "cuda":
        return {"to the host": _rate(lambda: there.copy_(on_device[0]), there.numel(), lambda: None)}
    streams = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def to_host() -> None:
        with torch.cuda.stream(streams[0]):
            there.copy_(on_device[0], non_blocking=True)

    def from_host() -> None:
        with torch.cuda.stream(streams[1]):
            on_device[-1].copy_(back, non_blocking=True)

    def both() -> None:
        to_host()
        from_host()

    size, wait = there.numel(), torch.cuda.synchronize
    rates = {"to the host": _rate(to_host, size, wait), "from it": _rate(from_host, size, wait)}
    return rates | {"both": _rate(both, 2 * size, wait)}


def _rate(copy: Callable[[], Any], size: int, wait: Callable[[], None], times: int = 10) -> float:
    copy()
    wait()
    start = time.perf_counter()
    for _ in range(times):
        copy()
    wait()
    return times * size / (time.perf_counter() - start)


def _steps(flags: argparse.Namespace, way: str) -> dict[str, Any]:
    """The seconds and bytes of steps whose layers keep what `way` says."""
    measure, _, by_torch = way.partition(", ")
    document = np.random.default_rng(0).integers(0, 1000, flags.rows)
    with World(Layout(ranks=1)) as world, _peak(world.device) as peak:
        model: Any = prepare(_model(flags, world.device), world, measures=measure)
        offload = getattr(model, HOST_OFFLOAD)
        if by_torch:
            offload.arena = PinnedByTorch(world.device)
        plan = plan_fixed((flags.rows,), world.home, cp=1, max_tokens_per_slot=flags.rows)
        seconds = list[float]()
        for _ in range(flags.steps + 2):
            start = time.perf_counter()
            run_step(model, plan, [document], world, loss_chunk_rows=4096)
            model.zero_grad()
            seconds.append(time.perf_counter() - start)
        host = _host_bytes(offload, world.device)
        del model, offload
        gc.collect()
    numbers = {"first step": seconds[0], "second": seconds[1], "a step": statistics.median(seconds[2:])}
    return {"way": way, **{name: round(value, 4) for name, value in numbers.items()}, "GPU bytes": peak[0], **host}


def _host_bytes(offload: HostOffload | None, device: torch.device) -> dict[str, int]:
    """What activations take on the host: of an arena, or by torch's count of what it has ever taken."""
    if offload is None:
        return {"host bytes": 0, "registrations": 0}
    if isinstance(offload.arena, HostArena):
        return {"host bytes": offload.arena.bytes, "registrations": offload.arena.parts}
    figures = torch.cuda.host_memory_stats() if device.type == "cuda" else {}
    return {"host bytes": figures.get("allocated_bytes.current", 0), "registrations": 0}


def _model(flags: argparse.Namespace, device: torch.device) -> Any:
    config: Any = preset_config(flags.preset, vocab_size=1024)
    config.update({"num_hidden_layers": flags.layers, "max_window_layers": flags.layers})
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def _free_pinned() -> None:
    """Have torch give back pinned memory that it keeps for later."""
    getattr(torch._C, "_host_emptyCache", lambda: None)()


@contextmanager
def _peak(device: torch.device) -> Iterator[list[int]]:
    """Gives the most bytes in use on a GPU inside, once it is left."""
    peak = [0]
    if device.type == "cuda":
        torch.cuda.empty_cache()
        _free_pinned()
        torch.cuda.reset_peak_memory_stats(device)
    yield peak
    if device.type == "cuda":
        peak[0] = torch.cuda.max_memory_allocated(device)


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tensor", type=int, default=int(2.08 * 2**30), help="bytes of a tensor")
    parser.add_argument("--gib", type=float, default=8.0, help="memory to make, in tensors of that size")
    parser.add_argument("--preset", default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=65536)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
