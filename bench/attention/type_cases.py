"""The cases of `attention_types.py`: longspan's types, as they are and in CUDA graphs, and torch's own attention."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from longspan.attention import attend
from longspan.comm import World, bind
from longspan.plan import PartitionKind, Plan, plan_fixed

PEERS = ("cuDNN", "flash")
_BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
Prepared = tuple[tuple[Tensor, Tensor, Tensor], Tensor, Callable[[], Tensor], Callable[[Tensor], Tensor]]


@contextmanager
def torch_attention(peer: str, qkv: tuple[Tensor, ...], world: World, documents: int) -> Iterator[Prepared]:
    """Local inputs (1, heads, T, H), the gradient of the output, the call, and local rows to whole ones (S, heads, H).

    Raises whatever torch raises, and ValueError for what it does not offer.
    """
    if world.device.type != "cuda":
        raise ValueError("its attention kernels run on CUDA only")
    if documents > 1:
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

        yield inputs, gradient, forward, whole


Gradients = tuple[Tensor, ...]
Result = TypeVar("Result")


@dataclass(frozen=True)
class AttentionSettings:
    """What to measure."""

    types: tuple[str, ...]
    lengths: tuple[int, ...]
    documents: int
    window: int  # 0: none
    sinks: bool
    kernel: str  # "": the first that can
    hierarchical: tuple[int, int]
    heads: int
    key_value_heads: int
    head_size: int
    dtype: str
    warmup: int
    repeats: int
    peers: bool
    ranks: int
    backend: str
    timeout_seconds: float
    command: str
    out: str = ""  # the first rank keeps what it has so far in this file
    partition: PartitionKind = "zigzag"
    warm_seconds: float = 0.0  # on GPUs, of runs before the timed ones
    cuda_graph: bool = False  # every type a second time, captured and replayed


@dataclass(frozen=True)
class Run:
    """Attention that is ready to run: local inputs, the gradient of the output, and the call."""

    inputs: tuple[Tensor, Tensor, Tensor]
    gradient: Tensor
    forward: Callable[[], Tensor]
    whole: Callable[[Tensor], Tensor]  # local rows to the whole sequence (S, heads, H), entered by all ranks
    replayed: Callable[[], Gradients] | None = None  # backward of what `forward` gave last, where it is not autograd's

    def backward(self, out: Tensor) -> Gradients:
        """Gradients of the inputs."""
        return torch.autograd.grad(out, self.inputs, self.gradient) if self.replayed is None else self.replayed()


@dataclass(frozen=True)
class AttentionCase:
    """What is measured: longspan with one communication type, or a peer, which may fail without ending the bench."""

    name: str
    peer: bool
    prepare: Callable[[AttentionSettings, tuple[Tensor, ...], World], AbstractContextManager[Run]]


def own_cases(settings: AttentionSettings) -> Iterator[AttentionCase]:
    """longspan with each communication type, and again in a CUDA graph where that is asked for."""
    for kind in settings.types:
        yield AttentionCase(f"longspan {kind}", False, partial(_own_run, kind=kind))
        if settings.cuda_graph:
            yield AttentionCase(f"longspan {kind}, CUDA graph", False, partial(_graph_run, kind=kind))


def peer_cases() -> Iterator[AttentionCase]:
    """torch's `context_parallel` with each of its kernels."""
    for peer in PEERS:
        yield AttentionCase(f"torch context_parallel, {peer}", True, partial(_peer_run, peer=peer))


@contextmanager
def _own_run(settings: AttentionSettings, qkv: tuple[Tensor, ...], world: World, *, kind: str) -> Iterator[Run]:
    plan = _plan(settings, qkv[0].shape[0], world, kind)
    world.prepare(plan)
    shard = bind(plan.micro_batches[0], world)
    q, k, v, gradient = (shard.scatter(x).contiguous() for x in qkv)
    inputs = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
    options = {"window": settings.window or None, "sinks": sinks_of(settings, world.device, learnt=True)}
    call = partial(attend, *inputs, shard, kernel=settings.kernel or None, **options)
    yield Run(inputs, gradient, call, shard.gather)


@contextmanager
def _graph_run(settings: AttentionSettings, qkv: tuple[Tensor, ...], world: World, *, kind: str) -> Iterator[Run]:
    """The same, captured as two CUDA graphs, forward and backward, and replayed."""
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
    """The tensors that the graph fills, after it has been started."""
    graph.replay()
    return result


def sinks_of(settings: AttentionSettings, device: torch.device, *, learnt: bool = False) -> Tensor | None:
    """A sink logit for each query head, from next to no weight to that of some 200 keys; None without sinks."""
    logits = torch.linspace(-2.0, 6.0, settings.heads, device=device, requires_grad=learnt)
    return logits if settings.sinks else None


def _plan(settings: AttentionSettings, length: int, world: World, kind: str) -> Plan:
    sizes = settings.hierarchical if kind == "a2a+p2p" else None
    return plan_fixed(
        lengths_of(settings, length),
        world.home,
        settings.ranks,
        cp_comm_type=kind,
        hierarchical_context_parallel_sizes=sizes,
        partition=settings.partition,
    )


def lengths_of(settings: AttentionSettings, length: int) -> list[int]:
    """The documents that share so many rows."""
    base, remainder = divmod(length, settings.documents)
    return [base + (d < remainder) for d in range(settings.documents)]


@contextmanager
def _peer_run(settings: AttentionSettings, qkv: tuple[Tensor, ...], world: World, *, peer: str) -> Iterator[Run]:
    if settings.window or settings.sinks:
        raise ValueError(f"it has no {'window' if settings.window else 'sinks'}")
    with torch_attention(peer, qkv, world, settings.documents) as (inputs, gradient, forward, whole):
        yield Run(inputs, gradient, forward, whole)


def tensors_of(settings: AttentionSettings, length: int, world: World) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of the output (S, heads, H), the same on every rank."""
    generator = torch.Generator(device=world.device).manual_seed(length)
    heads = (settings.heads, settings.key_value_heads, settings.key_value_heads, settings.heads)
    shapes = [(length, n, settings.head_size) for n in heads]
    dtype = getattr(torch, settings.dtype)
    return tuple(torch.randn(s, generator=generator, device=world.device).to(dtype) for s in shapes)
