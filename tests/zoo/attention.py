"""What attention sees, and with which weights: rings, sinks, windows, odd lengths and positions."""

from collections.abc import Sequence

import torch

from longspan.attention import attend
from longspan.comm import World, bind
from longspan.plan.planners.fixed import plan_fixed
from tests.zoo.dense import (
    dense_attention,
    draw_documents,
    step_error,
    tensor_error,
    tiny_configuration,
)
from tests.zoo.known_error import KnownError


def _attention_error(world: World, lengths: Sequence[int], *, causal: bool = True) -> float:
    """Return the worst relative error of attention's output and of the gradients of queries, keys and values."""
    shard = bind(plan_fixed(lengths, world.home, 2).micro_batches[0], world)
    random = torch.Generator().manual_seed(0)
    dense_tensors = [torch.randn(sum(lengths), n, 8, generator=random, dtype=torch.float64) for n in (4, 2, 2, 4)]
    q, k, v, out_gradient = (x.requires_grad_() for x in dense_tensors)
    leaves = (q, k, v)
    out = dense_attention(q, k, v, lengths, causal=causal)
    exact = [out.detach(), *torch.autograd.grad(out, leaves, out_gradient.detach())]
    local = [shard.scatter(x.detach()).requires_grad_() for x in leaves]
    out = attend(local[0], local[1], local[2], shard, cp_comm_type="p2p", causal=causal)
    results = [out.detach(), *torch.autograd.grad(out, local, shard.scatter(out_gradient.detach()))]
    return max(tensor_error(result, shard.scatter(x)) for result, x in zip(results, exact, strict=True))


def _compare_ring_gradients(world: World) -> float:
    """Return the worst error for two documents over two ranks: keys of both pass through the ring, in backward too."""
    return _attention_error(world, (29, 12))


def _compare_odd_lengths(world: World) -> float:
    """Return the worst error for lengths that twice the degree does not divide, with and without a causal mask."""
    return max(_attention_error(world, (7, 3, 1), causal=causal) for causal in (True, False))


def _compare_sinks(world: World) -> float:
    """Return the error of a step of a small GPT-OSS, whose attention has sinks, against the dense one."""
    config = tiny_configuration(
        "GptOssConfig",
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=128,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    return step_error(world, config, draw_documents())


def _compare_windows(world: World) -> float:
    """Return the error of a step of a small Mistral whose window is shorter than its documents."""
    return step_error(world, tiny_configuration("MistralConfig", sliding_window=5), draw_documents())


def _compare_packed_positions(world: World) -> float:
    """Return the error of a step of a small Llama, whose rotary positions begin again in each document."""
    config = tiny_configuration("LlamaConfig")
    return step_error(world, config, draw_documents((8, 16, 4, 12)))


ERRORS = (
    KnownError(
        "gradients of ring attention",
        "NVIDIA/Megatron-LM#1464",
        happened="The thread measures relative errors of up to 1.2 in the gradients of queries, keys and values behind "
        "attention that passes keys around a ring, where the forward pass agrees with one device.",
        seen="The loss is right; only the gradients of a layer, compared with one device, are not.",
        prevented="Backward walks the ring with the log-sum-exp of all rows, and tests compare every gradient with a "
        "dense model in float64, for each type, degree and feature.",
        check=_compare_ring_gradients,
    ),
    KnownError(
        "sinks swallowed",
        "PrimeIntellect-ai/prime-rl#3397",
        happened="The attention function for context parallelism ended in **kwargs, which took gpt-oss's sinks (s_aux) "
        "and did nothing with them.",
        seen="gpt-oss trains with context parallelism, with other attention weights than it was made with.",
        prevented="Sinks are a named argument: they join the sum over all keys once, with their gradient. A tensor "
        "that the attention function does not know is refused.",
        check=_compare_sinks,
        pull=True,
    ),
    KnownError(
        "windows dropped",
        "huggingface/accelerate#4177",
        happened="A hook on every attention module threw the layer's mask away and set is_causal: layers with a "
        "sliding window or chunks were trained with full causal attention. Such models are refused since.",
        seen="A plausible loss; beyond the window the model answers worse than before.",
        prevented="The layer's own window reaches the kernel, and what a row sees follows from the shard and the "
        "layer. A mask that would be lost is refused.",
        check=_compare_windows,
        pull=True,
    ),
    KnownError(
        "the last token of an odd length",
        "NVIDIA/TransformerEngine#1930",
        happened="Of a packed sequence of 7 tokens at cp 2, 7 // 2 · 2 = 6 were computed with; the last one was "
        "ignored.",
        seen="Outputs differ from those without context parallelism wherever a length is no multiple of the degree.",
        prevented="Shares may be unequal: each row is in exactly one of them, and a document may have any length.",
        check=_compare_odd_lengths,
    ),
    KnownError(
        "rotary positions of packed documents",
        "NVIDIA/Megatron-LM#5243",
        happened="With packed sequences and context parallelism, a rank's slices of later sequences took the rotary "
        "angles of the first one: positions 0, 3, 0, 3 of a table where 0, 3, 4, 7 were meant.",
        seen="A loss that is a little higher, growing with the number of documents in a pack.",
        prevented="Each local row has its position inside its document, worked out with the rows themselves.",
        check=_compare_packed_positions,
        pull=True,
    ),
)
