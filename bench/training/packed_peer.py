"""The step that `step_peers.py` compares packed documents with: what torchtitan's recipe gives a user.

Stock Hugging Face under FSDP2, each decoder layer and the loss compiled, FlashAttention-4 on whole packed documents,
and as few layers recomputed as fit. There is no context parallelism: a document is whole on one rank. Where
FlashAttention-4 is not installed, torch's own kernels attend, and the name of the row says so.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from bench.training.hf_peer import draw_model, make_peer_optimizer, shard_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from longspan.attention.kernels import fa4
from longspan.bench.step.settings import StepSettings
from longspan.comm import World
from longspan.data.document import SyntheticDocument, synthetic_documents
from longspan.layout.partition import NO_TARGET
from longspan.model.layers import decoder_layers

PACKED_PEER = "Hugging Face + FSDP2 + compiled layers, whole packed documents"
_ATTENTION = "longspan_bench_packed"  # the name by which transformers knows the attention of packed documents
_MEMORY_SHARE = 0.9  # of a device's memory, for what torch allocates; the rest are context, communicators, fragments

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor]


# ---- documents of a rank


@dataclass(frozen=True)
class PackedBatch:
    """Documents of one micro-batch, one after another: ids, labels and positions (1, T), and where documents begin."""

    ids: Tensor
    labels: Tensor
    positions: Tensor
    cu_seqlens: Tensor  # (documents + 1,) int32
    longest: int

    @classmethod
    def of(cls, documents: Sequence[SyntheticDocument], device: torch.device) -> "PackedBatch":
        """Pack documents, or one token without a target for a rank that has none and still enters all collectives."""
        documents = documents or synthetic_documents([1], 2)
        lengths = [len(document) for document in documents]
        ids = torch.cat([torch.from_numpy(document[np.arange(len(document))]) for document in documents])
        ends = torch.tensor(lengths).cumsum(0)
        labels = ids.roll(-1).index_fill(0, ends - 1, NO_TARGET)
        positions = torch.cat([torch.arange(n) for n in lengths])
        cu_seqlens = F.pad(ends, (1, 0)).to(device, torch.int32)
        ids, labels, positions = (x.to(device)[None] for x in (ids, labels, positions))
        return cls(ids, labels, positions, cu_seqlens, max(lengths))

    def model_arguments(self) -> dict[str, Any]:
        """Return the arguments of the model, by transformers' names for packed documents."""
        return {
            "input_ids": self.ids,
            "position_ids": self.positions,
            "use_cache": False,
            **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), self.cu_seqlens),
            **dict.fromkeys(("max_length_q", "max_length_k"), self.longest),
        }


def pack_on_ranks(lengths: Sequence[int], ranks: int, max_rows: int) -> list[list[list[int]]]:
    """Return the documents of every rank's micro-batches, by index; all ranks have the same number of micro-batches.

    >>> pack_on_ranks([8, 8, 8, 8], ranks=2, max_rows=16)
    [[[0, 2]], [[1, 3]]]

    The longest goes first, to the rank with the fewest tokens, into its first micro-batch with room. Raises ValueError
    for a document that no slot holds, and where there are fewer documents than ranks.
    """
    if len(lengths) < ranks:
        raise ValueError(f"it cuts no document, and {len(lengths)} do not reach {ranks} ranks")
    if max_rows and max(lengths) > max_rows:
        raise ValueError(f"it cuts no document, and one of {max(lengths):,} rows is more than {max_rows:,} a slot")
    batches = [list[list[int]]() for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        rank = loads.index(min(loads))
        loads[rank] += lengths[index]
        for batch in batches[rank]:
            if not max_rows or sum(lengths[i] for i in batch) + lengths[index] <= max_rows:
                batch.append(index)
                break
        else:
            batches[rank].append([index])
    count = max(map(len, batches))
    return [rank_batches + [[]] * (count - len(rank_batches)) for rank_batches in batches]


# ---- attention


def choose_attention(device: torch.device) -> tuple[str, Attend]:
    """Return the attention of packed documents that this installation has, with its name."""
    if device.type != "cuda":
        return "SDPA", _attend_by_sdpa
    if not fa4.unsupported_reason(device):
        return "FlashAttention-4", _attend_by_fa4
    try:
        from torch.nn.attention.varlen import varlen_attn as _  # noqa: F401
    except ImportError:
        return "SDPA", _attend_by_sdpa
    return "torch varlen_attn", _attend_by_torch


def _attend_by_fa4(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float) -> Tensor:
    """Attend causally in each document, q (T, N, H), k and v (T, K, H), on FlashAttention-4: (T, N, H).

    Versions differ in whether the log-sum-exp is returned too.
    """
    from flash_attn.cute.interface import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    limits = {"max_seqlen_q": longest, "max_seqlen_k": longest}
    out = flash_attn_varlen_func(q, k, v, **lengths, **limits, softmax_scale=scale, causal=True)
    return out[0] if isinstance(out, tuple) else out


def _attend_by_torch(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float) -> Tensor:
    """Attend as `_attend_by_fa4` does, by torch's `varlen_attn`; a window of any rows before and none after is causal.

    Keys and values are repeated for each query head, as torch 2.11 has no grouped heads here.
    """
    from torch.nn.attention.varlen import varlen_attn

    repeats = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    arguments: Any = (q, k, v, cu_seqlens, cu_seqlens, longest, longest)
    return varlen_attn(*arguments, scale=scale, window_size=(-1, 0))  # pyright: ignore[reportReturnType]


def _attend_by_sdpa(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float) -> Tensor:
    """Attend as `_attend_by_fa4` does, one document after another by scaled-dot-product attention."""
    lengths = cu_seqlens.diff().tolist()
    documents = zip(*(x.transpose(0, 1).split(lengths, dim=1) for x in (q, k, v)), strict=True)
    outputs = [
        F.scaled_dot_product_attention(*(x[None] for x in tensors), is_causal=True, scale=scale, enable_gqa=True)[0]
        for tensors in documents
    ]
    return torch.cat(outputs, dim=1).transpose(0, 1)


def _register_attention(attend: Attend) -> None:
    """Let transformers attend by this function. It builds no mask, as it knows how to for its own functions only."""

    @torch.compiler.disable
    def forward(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
        """Attend from q (1, N, T, H) to k and v (1, K, T, H): (1, T, N, H)."""
        if mask is not None or options.get("dropout") or options.get("sliding_window") or options.get("softcap"):
            raise ValueError(f"it attends causally within documents; {type(module).__name__} asks for more")
        scale = options.get("scaling") or q.shape[-1] ** -0.5
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        return attend(q, k, v, options["cu_seq_lens_q"], options["max_length_q"], scale)[None], None

    AttentionInterface.register(_ATTENTION, forward)


# ---- layers


class CompiledLayers:
    """Decoder layers that run compiled, of which the last `recomputed` run a second time in the backward pass."""

    def __init__(self, model: Any, compile_forward: Callable[[Any], Any]) -> None:
        """Give each layer the forward that is made of its own; no layer is recomputed yet."""
        layers = decoder_layers(model).values()
        self.count = len(layers)
        self.recomputed = 0
        for index, layer in enumerate(layers):
            layer.forward = partial(self._run_layer, index, compile_forward(layer.forward))

    def _run_layer(self, index: int, forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Run the compiled forward of a layer, under a checkpoint if it is among the last ones."""
        if index < self.count - self.recomputed:
            return forward(*arguments, **options)
        return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=False, **options)


def fit_recomputation(layers: CompiledLayers, step: Callable[[], None], world: World) -> None:
    """Recompute as few layers as fit in the device's memory.

    How many fit follows from the peaks of two steps, with all layers recomputed and with all but two: these differ by
    what two layers keep for the backward pass. All ranks recompute as many as the one with the least room. On a CPU
    nothing is recomputed.
    """
    if world.device.type != "cuda":
        return
    peaks = list[int]()
    # The first step's peak is not used: the optimizer's states do not exist yet.
    for recomputed in (layers.count, layers.count, layers.count - 2):
        layers.recomputed = recomputed
        torch.cuda.reset_peak_memory_stats()
        step()
        peaks.append(torch.cuda.max_memory_allocated())
    room = _MEMORY_SHARE * torch.cuda.get_device_properties(world.device).total_memory - peaks[1]
    layer_bytes = max(peaks[2] - peaks[1], 0) / 2  # 0: layers keep nothing that shows, and all fit
    layers_that_fit = int(max(room, 0) / layer_bytes) if layer_bytes else layers.count
    layers.recomputed = layers.count - min(layers.count, *world.control.gather_objects(layers_that_fit))
    torch.cuda.empty_cache()


# ---- the step


@contextmanager
def open_packed_step(
    settings: StepSettings, world: World
) -> Iterator[tuple[Callable[[], None], list[float], dict[str, Any]]]:
    """Hold a model inside the context; yields its step of whole packed documents, the list of its steps' losses, facts.

    The facts about the step are for a record. The model is stock Hugging Face's under FSDP2, with compiled layers.
    Raises ValueError for what these do not offer.
    """
    max_rows = settings.config.context.max_tokens_per_slot
    assert isinstance(max_rows, int)
    packed = pack_on_ranks(settings.lengths, settings.ranks, max_rows)[world.rank]
    text = settings.configuration.get_text_config()
    if set(getattr(text, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        raise ValueError(f"its layers attend to whole documents; {text.model_type} has others")
    documents = synthetic_documents(settings.lengths, text.vocab_size)
    targets = sum(settings.lengths) - len(documents)
    batches = [PackedBatch.of([documents[i] for i in indices], world.device) for indices in packed]

    attention, attend = choose_attention(world.device)
    _register_attention(attend)
    # On a CPU nothing is compiled: tracing would take longer than all steps of a test.
    compile_forward = torch.compile if world.device.type == "cuda" else lambda forward: forward
    model = draw_model(settings, world)
    model.set_attn_implementation(_ATTENTION)
    layers = CompiledLayers(model, compile_forward)
    shard_model(settings, model, init_device_mesh(world.device.type, (settings.ranks,)))
    optimizer = make_peer_optimizer(settings, model)
    sum_losses: Any = compile_forward(_sum_losses)
    losses: list[float] = []

    def step() -> None:
        """Run the micro-batches and the optimizer, and note the loss: a mean over the targets of all ranks."""
        total = torch.zeros((), device=world.device, dtype=torch.float64)
        for batch in batches:
            logits = model(**batch.model_arguments()).logits
            loss = sum_losses(logits[0], batch.labels[0])
            (loss / targets).backward()
            total += loss.detach()
            del logits, loss
        optimizer.step()
        model.zero_grad(set_to_none=True)
        losses.append(world.control.sum_over_slots([total.item()])[0] / targets)

    fit_recomputation(layers, step, world)
    recomputed = f"{layers.recomputed} of {layers.count} layers recomputed"
    yield (
        step,
        losses,
        {
            "name": f"{PACKED_PEER}, {attention}, {recomputed}",
            "micro_batches": len(batches),
            "recomputed_layers": layers.recomputed,
            "attention": attention,
        },
    )


def _sum_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the cross entropy of logits (T, vocabulary) at labels (T,), in float32."""
    return F.cross_entropy(logits.float(), labels, ignore_index=NO_TARGET, reduction="sum")
