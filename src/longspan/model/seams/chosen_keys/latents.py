"""Latents in place of expanded keys and values, for layers of multi-head latent attention whose rows choose their keys.

`expand_kv` of transformers' classes multiplies the latents of a row by `kv_b_proj`: keys and values of every head. Here
the layer gets the latents themselves, one key/value head for all, and the weight is folded into queries and outputs:
the same scores and outputs, which a kernel gathers by a few hundred bytes a key. Long documents alone gain by it.
"""

import inspect
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from longspan.attention import AttendCall, choose_kernel
from longspan.attention.kernels import find_kernel
from longspan.comm import SequenceShard

# The cost of a product, beside a masked kernel's, is from bench/records/indexed-attention-2xH200.md.
GATHERED_COST = 1.0
# The known `expand_kv` uses these names (`co_names`); code with others may expand latents in another way.
_EXPANDING = {
    *("kv_b_proj", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("torch", "shape", "split", "view", "transpose", "expand", "new_empty", "copy_"),
}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def reason_to_expand(module: Any, kernel: str | None, dtype: torch.dtype, device: torch.device) -> str:
    """Return why a layer's keys must be expanded; "" where a kernel of this name (None: any) can gather its latents.

    The weight of `kv_b_proj` must be all that expands them, so that it can be folded.
    """
    if kernel is not None and "latents" not in find_kernel(kernel).features:
        return f"attention_kernel {kernel} takes no latents"
    sizes = module.kv_lora_rank + module.qk_rope_head_dim, module.kv_lora_rank
    # A kernel takes any number of heads as it takes one.
    call = AttendCall(1, 1, *sizes, dtype, device, indexed=True, latents=True)
    if device.type == "cuda" and choose_kernel(call, kernel).name == "reference":
        return (
            "no kernel gathers them here (other types than bfloat16 and float16, deterministic mode, wide latents)"
        )
    expand = inspect.unwrap(type(module).expand_kv)
    linear = module.kv_b_proj
    if {*getattr(getattr(expand, "__code__", None), "co_names", ())} != _EXPANDING:
        return f"{type(module).__name__}.expand_kv is not known"
    if type(linear) is not nn.Linear or linear.bias is not None:
        return "kv_b_proj is no plain linear, as under an adapter"
    if "forward" in vars(linear):
        return "kv_b_proj has a forward of its own, as in float8"
    return "kv_b_proj has hooks" if any(vars(linear)[name] for name in _HOOKS) else ""


def min_length_to_gather_latents(module: Any, kernel: str | None) -> int:
    """Return from what length of a micro-batch's longest document on (tokens) latents are gathered.

    It is where gathering those of `index_topk` keys costs less than a masked kernel over all expanded keys. Up to
    `index_topk` tokens nothing is chosen; a named kernel that only gathers gathers from there on.
    """
    shortest = module.config.index_topk + 1
    if kernel is not None and find_kernel(kernel).required:
        return shortest
    # A masked kernel multiplies half of all keys, in heads of `qk_head_dim` and `v_head_dim`.
    gathered = module.config.index_topk * (2 * module.kv_lora_rank + module.qk_rope_head_dim)
    return max(int(GATHERED_COST * 2 * gathered / (module.qk_head_dim + module.v_head_dim)), shortest)


def takes_latents(module: Any, shard: object, kernel: str | None, latents: Tensor) -> bool:
    """Return whether a layer's call gets latents: the same on all ranks, as lengths and settings decide it.

    Warns where a document is long enough, and no kernel can gather them.
    """
    if type(shard) is not SequenceShard:  # trials, whose rows see themselves alone
        return False
    if max(shard.micro_batch.lengths, default=0) < min_length_to_gather_latents(module, kernel):
        return False
    reason = reason_to_expand(module, kernel, latents.dtype, latents.device)
    # A named kernel of another kind was chosen to expand them: then there is nothing to warn of.
    if reason and (kernel is None or find_kernel(kernel).required):
        warnings.warn(f"latents of long documents are expanded for a masked kernel: {reason}", stacklevel=2)
    return not reason


def latents_text(modules: list[Any], kernel: str | None, dtype: torch.dtype, device: torch.device) -> str:
    """Say in words from what length on layers gather latents, and how many always expand them, for which reason."""
    reasons = [reason_to_expand(module, kernel, dtype, device) for module in modules]
    lengths = {
        min_length_to_gather_latents(x, kernel) for x, reason in zip(modules, reasons, strict=True) if not reason
    }
    words = [f"gathered where a document has {min(lengths):,} tokens or more"] if lengths else []
    counts = {reason: reasons.count(reason) for reason in reasons if reason}
    return "; ".join(
        words + [f"expanded in {count} of {len(reasons)} layers: {reason}" for reason, count in counts.items()]
    )


def fold_queries(module: Any, query: Tensor) -> Tensor:
    """Return queries for latents: (1, N, T, nope + rope) becomes (1, N, T, latent + rope)."""
    pass_part, rotated = query.split([module.qk_nope_head_dim, module.qk_rope_head_dim], -1)
    return torch.cat((pass_part @ _head_weights(module, query)[0], rotated), -1)


def unfold_values(module: Any, out: Tensor) -> Tensor:
    """Return the values that outputs of latents stand for: (T, N, latent) becomes (T, N, value)."""
    return (out.transpose(0, 1) @ _head_weights(module, out)[1].transpose(1, 2)).transpose(0, 1)


def _head_weights(module: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Latents expand by these to keys (N, nope, latent) and to values (N, value, latent)."""
    sizes = [module.qk_nope_head_dim, module.v_head_dim]
    keys, values = module.kv_b_proj.weight.to(like.dtype).view(-1, sum(sizes), module.kv_lora_rank).split(sizes, 1)
    return keys, values
