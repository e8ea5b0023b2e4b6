"""How fast attention over several ranks is, each communication type next to torch's own `context_parallel`.

    python bench/attention/attention_types.py --lengths 16384,65536 --out bench/records/attention.json  # a rank a GPU
    python bench/attention/attention_types.py --world 4                                                 # on CPUs

Before anything is timed, output and gradients are compared with dense attention in float32. The exit code is 1 if one
of longspan's is wrong. `--help` shows the flags.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench.begun import missing_row
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from longspan.attention import AttendCall, Mask, attend, choose_kernel
from longspan.bench.benches import BenchFlags, origin_text, show_record, write_record
from longspan.cli.flags import parse_flags
from longspan.cli.machine import machine_facts
from longspan.cli.processes import run_on_ranks
from longspan.comm import World, bind
from longspan.errors import ConfigError, plural
from longspan.layout import Layout
from longspan.plain_text import bytes_text, markdown_table, text_table
from longspan.plan import Plan, plan_fixed
from longspan.versions import versions

PEERS = ("cuDNN", "flash")
_BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


Gradients = tuple[Tensor, ...]
Result = TypeVar("Result")


TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")
CPU_RANKS = 4
PROGRAM = "bench/attention/attention_types.py"
GPU_DEFAULTS = {"lengths": "16384,65536", "heads": 32, "key_value_heads": 8, "head_size": 128, "dtype": "bfloat16"}
CPU_DEFAULTS = {"lengths": "1024,2048", "heads": 8, "key_value_heads": 2, "head_size": 64, "dtype": "float32"}


@dataclass(frozen=True, kw_only=True)
class AttentionFlags(BenchFlags):
    """Time forward and backward of causal attention: one sequence (or equal packed documents) split over all ranks.

    Runs one process for each GPU of this machine, or torchrun's, or --world local processes. Before anything
    is timed, output and gradients at a short length are compared with dense attention in float32 on one device.
    torch's context_parallel runs in the same processes, where it can.
    """

    types: str = ",".join(TYPES)
    """Communication types, with commas between."""
    lengths: str = ""
    """Sequence lengths, with commas between; empty: 16384,65536 on GPUs, 1024,2048 on CPUs."""
    documents: int = 1
    """Equal packed documents that share the sequence."""
    partition: Literal["zigzag", "contiguous"] = "zigzag"
    """Which rows a rank holds: zigzag: equal causal work; contiguous: one run of rows, fewer copies under a2a."""
    window: int = 0
    """How many positions a query sees, its own included; 0: all earlier ones."""
    hierarchical: str = ""
    """Sizes of a2a+p2p, as in 2,4; empty: 2 and half of the ranks, or 1 and all where they are odd."""
    heads: int = 0
    """Query heads; 0: 32 on GPUs, 8 on CPUs."""
    key_value_heads: int = 0
    """Key and value heads; 0: 8 on GPUs, 2 on CPUs."""
    head_size: int = 0
    """Size of a head; 0: 128 on GPUs, 64 on CPUs."""
    dtype: Literal["", "bfloat16", "float16", "float32"] = ""
    """Dtype of queries, keys and values; empty: bfloat16 on GPUs, float32 on CPUs."""
    cuda_graph: bool = False
    """Time every type a second time, captured in a CUDA graph and replayed, without the host's work. Needs GPUs."""
    no_peers: bool = False
    """Do not time torch's context_parallel."""
    warmup: int = 3
    """Runs before the timed ones."""
    warm_seconds: float = 1.0
    """On GPUs, seconds of further runs before the timed ones: a GPU that has rested is faster than one in training."""
    repeats: int = 10
    """Timed runs; their median counts."""


@dataclass(frozen=True, kw_only=True)
class AttentionSettings(AttentionFlags):
    """What to measure: the flags, with sizes of this backend, and what follows from them."""

    all_types: tuple[str, ...]
    all_lengths: tuple[int, ...]
    levels: tuple[int, int]  # of a2a+p2p
    ranks: int
    backend: str
    command: str


@dataclass(frozen=True)
class Run:
    """Attention that is ready to run: local inputs, the gradient of the output, and the call."""

    inputs: tuple[Tensor, Tensor, Tensor]
    gradient: Tensor
    forward: Callable[[], Tensor]
    whole: Callable[[Tensor], Tensor]  # local rows to the whole sequence (S, heads, H), entered by all ranks
    replayed: Callable[[], Gradients] | None = None  # backward of what `forward` gave last, where it is not autograd's

    def backward(self, out: Tensor) -> Gradients:
        return torch.autograd.grad(out, self.inputs, self.gradient) if self.replayed is None else self.replayed()


@dataclass(frozen=True)
class AttentionCase:
    """What is measured: longspan with one communication type, or a peer, which may fail without ending the bench."""

    name: str
    peer: bool
    prepare: Callable[[AttentionSettings, tuple[Tensor, ...], World], AbstractContextManager[Run]]


@contextmanager
def _own_run(settings: AttentionSettings, qkv: tuple[Tensor, ...], world: World, *, kind: str) -> Iterator[Run]:
    plan = _plan(settings, qkv[0].shape[0], world, kind)
    world.prepare(plan)
    shard = bind(plan.micro_batches[0], world)
    q, k, v, gradient = (shard.scatter(x).contiguous() for x in qkv)
    inputs = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
    call = partial(attend, *inputs, shard, window=settings.window or None)
    yield Run(inputs, gradient, call, shard.gather)


@contextmanager
def _graph_run(settings: AttentionSettings, qkv: tuple[Tensor, ...], world: World, *, kind: str) -> Iterator[Run]:
    with _own_run(settings, qkv, world, kind=kind) as run:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # index tensors, compiled kernels and communicators are made outside a capture
                run.backward(run.forward())
        torch.cuda.current_stream().wait_stream(side)
        graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[0], capture_error_mode="thread_local"):
            out = run.forward()
        with torch.cuda.graph(graphs[1], pool=graphs[0].pool(), capture_error_mode="thread_local"):
            gradients = run.backward(out)
        yield replace(run, forward=partial(_replay, graphs[0], out), replayed=partial(_replay, graphs[1], gradients))
        torch.cuda.synchronize()
        for graph in graphs:
            graph.reset()


def _replay(graph: Any, result: Result) -> Result:
    graph.replay()
    return result


def _plan(settings: AttentionSettings, length: int, world: World, kind: str) -> Plan:
    sizes = settings.levels if kind == "a2a+p2p" else None
    return plan_fixed(
        lengths_of(settings, length),
        world.home,
        settings.ranks,
        cp_comm_type=kind,
        hierarchical_context_parallel_sizes=sizes,
        partition=settings.partition,
    )


def lengths_of(settings: AttentionSettings, length: int) -> list[int]:
    base, remainder = divmod(length, settings.documents)
    return [base + (d < remainder) for d in range(settings.documents)]


@contextmanager
def _peer_run(settings: AttentionSettings, qkv: tuple[Tensor, ...], world: World, *, peer: str) -> Iterator[Run]:
    """torch's `context_parallel`; raises whatever torch raises, and ValueError for what it does not offer."""
    if settings.window:
        raise ValueError("it has no window")
    if world.device.type != "cuda":
        raise ValueError("its attention kernels run on CUDA only")
    if settings.documents > 1:
        raise ValueError("it has no packed documents")
    if qkv[0].shape[0] % (2 * len(world.plane)):
        raise ValueError(f"{qkv[0].shape[0]} rows do not divide by 2 x {len(world.plane)} ranks")
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard, set_rotate_method

    set_rotate_method("allgather")
    mesh = init_device_mesh("cuda", (len(world.plane),))
    buffers = [x.transpose(0, 1).unsqueeze(0).contiguous() for x in qkv]  # (1, heads, S, H), cut in place
    dims = [2] * len(buffers)
    with (
        context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=set(buffers)),
        sdpa_kernel(_BACKENDS[peer]),
    ):
        q, k, v, gradient = buffers
        inputs = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())

        def forward() -> Tensor:
            return F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)

        def whole(x: Tensor) -> Tensor:
            return context_parallel_unshard(mesh, [x], [2])[0].squeeze(0).transpose(0, 1)

        yield Run(inputs, gradient, forward, whole)


def tensors_of(settings: AttentionSettings, length: int, world: World) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of the output (S, heads, H), the same on every rank."""
    generator = torch.Generator(device=world.device).manual_seed(length)
    heads = (settings.heads, settings.key_value_heads, settings.key_value_heads, settings.heads)
    shapes = [(length, n, settings.head_size) for n in heads]
    dtype = getattr(torch, settings.dtype)
    return tuple(torch.randn(s, generator=generator, device=world.device).to(dtype) for s in shapes)


CHECK_ROWS = 256  # of each rank, in the comparison with dense attention
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}  # relative, of the 2-norm


def attention_ranks(rank: int, settings: AttentionSettings) -> dict[str, Any]:
    backend = None if settings.backend == "nccl" else "gloo"
    with World(Layout(settings.ranks), backend=backend, timeout=settings.timeout_seconds) as world:
        if world.device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = False
        record = _empty_record(settings, world)
        cases = list[AttentionCase]()
        for kind in settings.all_types:
            cases.append(AttentionCase(f"longspan {kind}", False, partial(_own_run, kind=kind)))
            if settings.cuda_graph:
                cases.append(AttentionCase(f"longspan {kind}, CUDA graph", False, partial(_graph_run, kind=kind)))
        for peer in () if settings.no_peers else PEERS:
            cases.append(AttentionCase(f"torch context_parallel, {peer}", True, partial(_peer_run, peer=peer)))
        for case in cases:
            record["checks"].append({"name": case.name} | _or_missing(case, _check, settings, case, world))
        for case in cases:
            for length in settings.all_lengths:
                row = _or_missing(case, _measure, settings, case, length, world)
                record["rows"].append({"name": case.name, "length": length} | row)
                if rank == 0:
                    write_record(record, settings.out)
                if rank == 0 and sys.stderr.isatty():
                    print(f"{case.name}, {length} rows: {row.get('missing') or row['seconds']}", file=sys.stderr)
    return record


def _empty_record(settings: AttentionSettings, world: World) -> dict[str, Any]:
    sizes = ("documents", "partition", "window", "heads", "key_value_heads", "head_size", "dtype")
    widths = (settings.heads, settings.key_value_heads, settings.head_size, settings.head_size)
    mask = Mask(window=settings.window or None)
    call = AttendCall(*widths, getattr(torch, settings.dtype), world.device, mask)
    return {
        "bench": "attention",
        **{name: getattr(settings, name) for name in (*sizes, "warmup", "warm_seconds", "repeats", "ranks", "command")},
        "kernel": choose_kernel(call).name,
        "backend": world.backend,
        "check_length": CHECK_ROWS * settings.ranks,
        "machine": machine_facts(),
        "versions": versions(),
        "checks": [],
        "rows": [],
    }


def _or_missing(case: AttentionCase, measure: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    try:
        return measure(*args)
    except Exception as error:
        if not case.peer:
            raise
        return missing_row(error)


def _check(settings: AttentionSettings, case: AttentionCase, world: World) -> dict[str, Any]:
    """Errors of output and gradients against dense attention in float32 (2-norms, relative)."""
    qkv = tensors_of(settings, CHECK_ROWS * settings.ranks, world)
    with case.prepare(settings, qkv, world) as run:
        out = run.forward()
        gradients = run.backward(out)
        with torch.no_grad():
            results = [run.whole(x.detach()) for x in (out, *gradients)]
    exact = _dense(settings, qkv)
    pairs = zip(("output", "dq", "dk", "dv"), results, exact, strict=True)
    errors = {name: ((a.double() - b.double()).norm() / b.double().norm()).item() for name, a, b in pairs}
    tolerance = TOLERANCE[getattr(torch, settings.dtype)]
    return {"errors": errors, "tolerance": tolerance, "good": all(e <= tolerance for e in errors.values())}


def _dense(settings: AttentionSettings, qkv: tuple[Tensor, ...]) -> list[Tensor]:
    """Output and gradients of causal attention on whole documents, in float32."""
    q, k, v, gradient = (x.float() for x in qkv)
    q, k, v = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    repeat = settings.heads // settings.key_value_heads
    sizes = lengths_of(settings, len(q))
    outs = []
    for a, b, c in zip(q.split(sizes), k.split(sizes), v.split(sizes), strict=True):
        b, c = b.repeat_interleave(repeat, 1), c.repeat_interleave(repeat, 1)
        scores = torch.einsum("snh,tnh->nst", a, b) * settings.head_size**-0.5
        seen = torch.ones(len(a), len(a), dtype=torch.bool, device=a.device).tril()
        if settings.window:
            seen = seen.triu(1 - settings.window)
        scores = scores.masked_fill(~seen, float("-inf"))
        outs.append(torch.einsum("nst,tnh->snh", scores.softmax(-1), c))
    out = torch.cat(outs)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), gradient)]


def _measure(settings: AttentionSettings, case: AttentionCase, length: int, world: World) -> dict[str, Any]:
    """Medians of forward, and of forward and backward, on the slowest rank."""
    cuda = world.device.type == "cuda"
    qkv = tensors_of(settings, length, world)
    if cuda:
        torch.cuda.empty_cache()
    with case.prepare(settings, qkv, world) as run:
        del qkv
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        times = _times(run, settings, world)
        peak = torch.cuda.max_memory_allocated() if cuda else 0
    of_ranks = world.control.gather_objects(
        (statistics.median(t[0] for t in times), statistics.median(t[1] for t in times), peak)
    )
    forward, both, peak = (max(x[i] for x in of_ranks) for i in range(3))
    return {
        "forward_seconds": forward,
        "seconds": both,
        "tflops_per_device": 3.5 * forward_flops(settings, length) / both / settings.ranks / 1e12,
        "peak_bytes": peak,
    }


def forward_flops(settings: AttentionSettings, length: int) -> float:
    """FLOPs of two matrix products over the lower half of each document's square, or over the window's band in it."""
    pairs = 0.0
    for n in lengths_of(settings, length):
        window = min(settings.window or n, n)
        pairs += n * window - window * window / 2
    return 4 * pairs * settings.heads * settings.head_size


def _times(run: Run, settings: AttentionSettings, world: World) -> Sequence[tuple[float, float]]:
    """Seconds of forward, and of both passes, of each timed run.

    A GPU that has rested has higher clocks than one in training, for some tenths of a second: warm-up runs go on until
    `warm_seconds` are over, as many on every rank.
    """
    cuda = world.device.type == "cuda"
    warm = _passes(run, settings.warmup, cuda)
    slowest = max(world.control.gather_objects(warm[-1][1] if warm else 0.0))
    more = math.ceil(settings.warm_seconds / slowest) if cuda and slowest else 0
    return _passes(run, more + settings.repeats, cuda)[more:]


def _passes(run: Run, count: int, cuda: bool) -> list[tuple[float, float]]:
    marks: list[tuple[Any, Any, Any]] = []
    for _ in range(count):
        start = _mark(cuda)
        out = run.forward()
        middle = _mark(cuda)
        run.backward(out)
        marks.append((start, middle, _mark(cuda)))
    if cuda:
        torch.cuda.synchronize()
    return [(_between(a, b), _between(a, c)) for a, b, c in marks]


def _mark(cuda: bool) -> Any:
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(start: Any, stop: Any) -> float:
    return stop - start if isinstance(start, float) else start.elapsed_time(stop) * 1e-3


def main(argv: Sequence[str]) -> int:
    flags = parse_flags(AttentionFlags, argv, PROGRAM)
    ranks, backend = flags.choose_processes(CPU_RANKS)
    settings = make_settings(flags, ranks, backend, ["python", PROGRAM, *argv])
    record = run_on_ranks(attention_ranks, (settings,), ranks)
    show_record(record, flags, text=record_text(record), markdown=record_markdown(record))
    return 0 if all(row.get("good", True) for row in record["checks"]) else 1


def make_settings(flags: AttentionFlags, ranks: int, backend: str, command: Sequence[str]) -> AttentionSettings:
    defaults: dict[str, Any] = GPU_DEFAULTS if backend == "nccl" else CPU_DEFAULTS
    types = tuple(name for name in flags.types.split(",") if name)
    unknown = [name for name in types if name not in TYPES]
    if unknown or not types:
        raise ConfigError(f"--types {flags.types!r}: this release has {' and '.join(TYPES)}")
    try:
        lengths = tuple(int(length) for length in (flags.lengths or defaults["lengths"]).split(","))
    except ValueError:
        raise ConfigError(f"--lengths {flags.lengths!r} is not a list of integers such as 16384,65536") from None
    if min(lengths) < flags.documents or flags.documents < 1:
        raise ConfigError(f"{flags.documents} documents do not share {min(lengths)} rows; use at least a row each")
    if flags.window < 0:
        raise ConfigError(f"--window {flags.window}: at least 1, or 0 for none")
    if flags.cuda_graph and backend != "nccl":
        raise ConfigError(f"--cuda-graph needs a GPU for each rank; these {ranks} talk through {backend}")
    flags.check_flags()
    sizes = {
        name: getattr(flags, name) or defaults[name] for name in ("heads", "key_value_heads", "head_size", "dtype")
    }
    out = str(Path(flags.out).resolve()) if flags.out else ""
    return AttentionSettings(
        **vars(flags) | sizes | {"out": out},
        all_types=types,
        all_lengths=lengths,
        levels=_sizes(flags.hierarchical, ranks),
        ranks=ranks,
        backend=backend,
        command=" ".join(command),
    )


def _sizes(text: str, ranks: int) -> tuple[int, int]:
    if not text:
        return (1, ranks) if ranks % 2 else (2, ranks // 2)
    sizes = tuple(int(size) for size in text.split(",") if size.isdecimal())
    if len(sizes) != 2 or sizes[0] * sizes[1] != ranks:
        raise ConfigError(f"--hierarchical {text!r}: give two sizes whose product is the {ranks} ranks, as in 2,2")
    return sizes


def record_text(record: dict[str, Any]) -> str:
    return f"{_title(record)}\n\n{text_table(_NAMES, _table_lines(record))}\n\n{_checks(record)}{_missing(record)}"


def record_markdown(record: dict[str, Any]) -> str:
    warm = f" and {seconds:g} s on GPUs" if (seconds := record.get("warm_seconds")) else ""
    return (
        f"# {_title(record)}\n\n"
        f"{origin_text(record)}\n\n"
        f"{markdown_table(_NAMES, _table_lines(record))}\n\n"
        "TFLOP/s per device count 3.5 × the forward FLOPs (4 · heads · head size · the pairs of positions that see "
        "each other, which are S² / 2 a document without a window) for forward and backward together. "
        f"Median of {record['repeats']} runs after {record['warmup']}{warm}, the slowest rank.\n\n"
        f"{_checks(record)}{_missing(record)}\n"
    )


_NAMES = ("attention", "length", "forward ms", "both ms", "TFLOP/s per device", "peak memory")


def _title(record: dict[str, Any]) -> str:
    packed = f", {record['documents']} packed documents" if record["documents"] > 1 else ""
    packed += f", window {record['window']}" if record["window"] else ""
    packed += f", longspan's rows {record['partition']}" if record.get("partition", "zigzag") != "zigzag" else ""
    return (
        f"Causal attention over {plural(record['ranks'], 'rank')} ({record['backend']}): {record['heads']} query and "
        f"{record['key_value_heads']} key/value heads of {record['head_size']}, {record['dtype']}{packed}, "
        f"kernel {record['kernel']}"
    )


def _table_lines(record: dict[str, Any]) -> list[tuple[str, ...]]:
    lines = []
    for case in record["rows"]:
        if "missing" in case:
            continue
        times = (f"{1e3 * case['forward_seconds']:.2f}", f"{1e3 * case['seconds']:.2f}")
        speed = (
            f"{case['tflops_per_device']:.0f}"
            if case["tflops_per_device"] >= 10
            else f"{case['tflops_per_device']:.3g}"
        )
        memory = bytes_text(case["peak_bytes"]) if case["peak_bytes"] else ""
        lines.append((case["name"], f"{case['length']:,}", *times, speed, memory))
    return lines


def _checks(record: dict[str, Any]) -> str:
    lines = []
    for row in record["checks"]:
        if "missing" in row:
            continue
        errors = ", ".join(f"{name} {value:.1e}" for name, value in row["errors"].items())
        verdict = "good" if row["good"] else "WRONG"
        lines.append(f"- {row['name']}: {verdict}: {errors} (allowed {row['tolerance']:.1e})")
    return f"Relative to dense attention in float32 at {record['check_length']:,} rows:\n\n" + "\n".join(lines)


def _missing(record: dict[str, Any]) -> str:
    reasons = dict.fromkeys(
        (row["name"], row["missing"]) for row in (*record["checks"], *record["rows"]) if "missing" in row
    )
    return "".join(f"\n- {name}: not available: {reason}" for name, reason in reasons)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
