"""The step that `step_peers.py` compares with: stock Hugging Face under FSDP2 and torch's `context_parallel`.

One sequence over all GPUs, scaled-dot-product attention on cuDNN, full recomputation of every layer, cross entropy of
all logits. `packed_peer.py` is the peer of whole packed documents. torch's module is private and differs between 2.11
and 2.13; whatever goes wrong is the caller's to report.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM

from longspan.bench.step.settings import StepSettings
from longspan.comm import World
from longspan.model.layers import decoder_layers
from longspan.train import build_optimizer

PEER = "Hugging Face + FSDP2 + torch context_parallel (cuDNN), full recomputation"


@contextmanager
def open_peer_step(settings: StepSettings, world: World) -> Iterator[tuple[Callable[[], None], list[float]]]:
    """Hold a model inside the context; yields its step and the list of its steps' losses.

    The model is stock Hugging Face's under FSDP2 and `context_parallel`. Raises ValueError for what these do not offer.
    """
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
        """Run the sequence and the optimizer, and note the loss: a mean over the targets of all ranks."""
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

    yield step, losses


def _check_stack(settings: StepSettings, world: World) -> None:
    """Raise ValueError for CPUs, for several documents, and for rows that torch cannot divide into equal shards."""
    if world.device.type != "cuda":
        raise ValueError("its attention kernels run on CUDA only")
    if len(settings.lengths) != 1:
        raise ValueError(f"it has no packed documents; give one length, not {len(settings.lengths)}")
    if settings.lengths[0] % (2 * settings.ranks):
        raise ValueError(f"{settings.lengths[0]} rows do not divide by 2 x {settings.ranks} ranks")


def _make_inputs(settings: StepSettings, world: World) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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
