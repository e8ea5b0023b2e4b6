"""`longspan bench step` with rows of its peers: stock Hugging Face with FSDP2, over the same documents in the same run.

    python bench/training/step_peers.py --model.preset qwen3-8b --planners fixed --sequences 16384 --out peers.json

Flags are those of `longspan bench step`; `--planners none` times the peers alone.

A single sequence runs under torch's `context_parallel`, whose module is private and differs between 2.11 and 2.13:
scaled-dot-product attention on cuDNN, every layer recomputed, cross entropy of all logits. Whole documents, as many as
ranks or more, run as torchtitan's recipe has them: packed, each whole on one rank, decoder layers and loss compiled,
FlashAttention-4 (or torch's own kernels, as the row says), and as few layers recomputed as fit.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
from bench.begun import missing_row, peak_bytes, start_peak
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoModelForCausalLM

from longspan.attention.kernels import fa4
from longspan.bench.step import Cases, StepSettings, main, measure_steps, rows_note
from longspan.comm import World
from longspan.data.synthetic_documents import SyntheticDocument, synthetic_documents
from longspan.layout.partition import NO_TARGET
from longspan.model.layers import decoder_layers
from longspan.train import build_optimizer

PEER = "Hugging Face + FSDP2 + torch context_parallel (cuDNN), full recomputation"
PACKED_PEER = "Hugging Face + FSDP2 + compiled layers, whole packed documents"
_ATTENTION = "longspan_bench_packed"  # the name by which transformers knows the attention of packed documents
_MEMORY_SHARE = 0.9  # of a device's memory, for what torch allocates; the rest are context, communicators, fragments

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor]


def peer_cases(settings: StepSettings, world: World) -> Cases:
    for batch in settings.batches():
        note = rows_note(batch, settings)
        if len(batch.lengths) == 1:
            yield f"{PEER}{note}", partial(_measure, open_peer_step, batch, world)
        if len(batch.lengths) >= settings.ranks:
            yield f"{PACKED_PEER}{note}", partial(_measure, open_packed_step, batch, world)


def _measure(open_step: Any, settings: StepSettings, world: World) -> dict[str, Any]:
    try:
        with open_step(settings, world) as (step, losses, facts):
            return measure_steps(settings, step, world) | {"loss": losses[0]} | facts
    except Exception as error:  # whatever it cannot do is recorded
        return missing_row(error)


# ---- one sequence under context_parallel


@contextmanager
def open_peer_step(
    settings: StepSettings, world: World
) -> Iterator[tuple[Callable[[], None], list[float], dict[str, Any]]]:
    """Hold a model inside the context; yields its step, the list of its steps' losses, and facts about it (none)."""
    _check_stack(settings, world)
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method("allgather")  # keys and values of all ranks at once, instead of a ring
    mesh = init_device_mesh("cuda", (settings.ranks,))
    model = draw_model(settings, world)
    model.set_attn_implementation("sdpa")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    shard_model(settings, model, mesh)
    optimizer = make_peer_optimizer(settings, model)
    losses: list[float] = []

    def step() -> None:
        ids, labels, positions = _make_inputs(settings, world)
        buffers = [ids, labels, positions]
        with (
            context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)),
            sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
        ):
            # A mask by layer type is taken as it is: none, so that attention is causal and nothing is built.
            mask = {"full_attention": None}
            logits = model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False).logits
            loss = F.cross_entropy(logits[0].float(), labels[0], ignore_index=-100, reduction="sum")
            (loss / (settings.lengths[0] - 1)).backward()
            del logits
        optimizer.step()
        model.zero_grad(set_to_none=True)
        losses.append(world.control.sum_over_slots([loss.item()])[0] / (settings.lengths[0] - 1))

    yield step, losses, {}


def _check_stack(settings: StepSettings, world: World) -> None:
    """Raise ValueError for CPUs, for several documents, and for rows that torch cannot divide into equal shards."""
    if world.device.type != "cuda":
        raise ValueError("its attention kernels run on CUDA only")
    if len(settings.lengths) != 1:
        raise ValueError(f"it has no packed documents; give one length, not {len(settings.lengths)}")
    if settings.lengths[0] % (2 * settings.ranks):
        raise ValueError(f"{settings.lengths[0]} rows do not divide by 2 x {settings.ranks} ranks")


def _make_inputs(settings: StepSettings, world: World) -> tuple[Tensor, Tensor, Tensor]:
    """Make ids, labels and positions (1, S) of the whole sequence, on every rank.

    Ids are a hash of positions, so that they look random and are the same on all ranks. Each tensor is a copy, as
    `context_parallel` leaves a rank's shard in its place.
    """
    length = settings.lengths[0]
    positions = torch.arange(length, device=world.device)
    mixed = (positions + 1) * 2654435761 + 40503
    ids = (mixed ^ (mixed >> 13)) % settings.configuration.vocab_size
    labels = torch.cat([ids[1:], ids.new_full((1,), -100)])
    return ids[None].clone(), labels[None].clone(), positions[None].clone()


def draw_model(settings: StepSettings, world: World) -> Any:
    """Make the model with random weights, whole on the device; a run draws the same weights for a tiny preset."""
    torch.manual_seed(settings.config.train.seed)
    with torch.device(world.device):
        dtype = getattr(torch, settings.config.model.dtype)
        model: Any = AutoModelForCausalLM.from_config(settings.configuration, dtype=dtype, trust_remote_code=False)
    return model.train()


def shard_model(settings: StepSettings, model: Any, mesh: Any) -> None:
    """Shard the model by FSDP2, layer by layer; gradients are sums over ranks."""
    compute = getattr(torch, settings.compute) if settings.compute else None
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for layer in decoder_layers(model).values():
        fully_shard(
            layer, mesh=mesh, mp_policy=policy, reshard_after_forward=settings.config.parallel.reshard_after_forward
        )
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)  # a sum over ranks, as the loss is divided already


def make_peer_optimizer(settings: StepSettings, model: Any) -> Any:
    """Make the optimizer of the run with learning rate 0; AdamW is torch's fused one, as peers have it."""
    name = settings.config.optimizer.class_
    fused: dict[str, Any] = {"fused": True} if name == "adamw" else {}
    return build_optimizer(model, name, lr=0.0, **fused)


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
        layers = decoder_layers(model).values()
        self.count = len(layers)
        self.recomputed = 0
        for index, layer in enumerate(layers):
            layer.forward = partial(self._run_layer, index, compile_forward(layer.forward))

    def _run_layer(self, index: int, forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
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
        start_peak()
        step()
        peaks.append(peak_bytes())
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


if __name__ == "__main__":
    from bench.training import step_peers  # ranks import the function by this name

    sys.exit(main(sys.argv[1:], step_peers.peer_cases))
