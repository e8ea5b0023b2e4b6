"""Attention of answers to one prompt: Prefix Grouper's two passes, longspan's families, and the separate documents.

    python bench/peers/prefix_grouper.py --prefix 32768 --answers 1024 --count 8 --out bench/records/grouper.json

Prefix Grouper (https://arxiv.org/abs/2506.05433, section 3.2) attends inside the prompt, and then from all answers to
keys of which each answer has its prompt's before its own. Both passes run here by FlashAttention-4, and on CPUs by
torch. All get the same rows; outputs and gradients are compared before anything is timed. Forward and backward of one
layer, medians of runs; one process.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from longspan import Group, Layout, MicroBatch, World, attend, bind
from longspan.cli.machine import machine_facts
from longspan.versions import versions

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def flash(q: Tensor, k: Tensor, v: Tensor, q_lengths: list[int], k_lengths: list[int]) -> Tensor:
    """Causal attention, aligned to the last key, of packed sequences with fewer queries than keys."""
    if q.device.type == "cuda":
        from flash_attn.cute.interface import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

        bounds = [torch.tensor([0, *n], device=q.device).cumsum(0, dtype=torch.int32) for n in (q_lengths, k_lengths)]
        out = flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=bounds[0],
            cu_seqlens_k=bounds[1],
            max_seqlen_q=max(q_lengths),
            max_seqlen_k=max(k_lengths),
            causal=True,
        )
        return out[0] if isinstance(out, tuple) else out
    outs = list[Tensor]()
    for a, b, c in zip(q.split(q_lengths), k.split(k_lengths), v.split(k_lengths), strict=True):
        heads_first = [x.transpose(0, 1)[None] for x in (a, b, c)]
        mask = causal_lower_right(len(a), len(b))
        outs.append(F.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(outs)


def prefix_grouper(prefix: int, answers: list[int]) -> Attention:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = flash(q[:prefix], k[:prefix], v[:prefix], [prefix], [prefix])
        joined = [torch.cat([row for own in x[prefix:].split(answers) for row in (x[:prefix], own)]) for x in (k, v)]
        keys = [prefix + n for n in answers]
        return torch.cat([first, flash(q[prefix:], *joined, answers, keys)])

    return run


def family(prefix: int, answers: list[int], world: World) -> Attention:
    lengths = (prefix, *answers)
    parents = (-1, *[0] * len(answers))
    shard = bind(MicroBatch((Group((0,), tuple(range(len(lengths))), lengths, parents=parents),)), world)
    return lambda q, k, v: attend(q, k, v, shard)


def separate(prefix: int, answers: list[int], world: World) -> Attention:
    """Of each answer a document with the prompt's rows before it; the first one's rows of the prompt are returned."""
    lengths = tuple(prefix + n for n in answers)
    shard = bind(MicroBatch((Group((0,), tuple(range(len(lengths))), lengths),)), world)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        wide = [torch.cat([row for own in x[prefix:].split(answers) for row in (x[:prefix], own)]) for x in (q, k, v)]
        outs = attend(*wide, shard).split(lengths)
        return torch.cat([outs[0][:prefix], *(out[prefix:] for out in outs)])

    return run


def run_once(attention: Attention, tensors: list[Tensor]) -> list[Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    out = attention(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"prefix": 32768, "answers": 1024, "count": 8, "repeats": 10, "warmup": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path)
    flags = parser.parse_args()
    answers = [flags.answers] * flags.count
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    generator = torch.Generator(device).manual_seed(0)
    rows = flags.prefix + sum(answers)
    shapes = [(rows, heads, 128) for heads in (32, 8, 8, 32)]  # Qwen3-8B's
    tensors = [torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes]
    record = {"rows": rows, **vars(flags), "machine": machine_facts(), "versions": versions(), "ways": {}}
    record["out"] = str(flags.out)
    with World(Layout(1), backend="nccl" if on_gpu else "gloo") as world:
        ways = {
            "Prefix Grouper": prefix_grouper(flags.prefix, answers),
            "longspan, a family": family(flags.prefix, answers, world),
            "longspan, separate": separate(flags.prefix, answers, world),
        }
        first: list[Tensor] = []
        for name, attention in ways.items():
            results = run_once(attention, tensors)
            first = first or results
            # gradients of the prompt's own rows count once for each separate document
            compared = (
                (slice(None),) * 4 if name != "longspan, separate" else (slice(None), *[slice(flags.prefix, None)] * 3)
            )
            pairs = zip(results, first, compared, strict=True)
            errors = [float((a[rows] - b[rows]).norm() / b[rows].norm()) for a, b, rows in pairs]
            assert max(errors) < (2e-2 if on_gpu else 1e-4), (name, errors)
            seconds = list[float]()
            for _ in range(flags.warmup + flags.repeats):
                begun = time.perf_counter()
                run_once(attention, tensors)
                if on_gpu:
                    torch.cuda.synchronize()
                seconds.append(time.perf_counter() - begun)
            peak = torch.cuda.max_memory_allocated() if on_gpu else 0
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            record["ways"][name] = {
                "seconds": statistics.median(seconds[flags.warmup :]), "peak_bytes": peak, "errors": errors
            }  # fmt: skip
            print(f"{name:<20} {1e3 * record['ways'][name]['seconds']:>9.2f} ms, {peak / 2**30:.1f} GiB at most")
    if flags.out:
        flags.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
