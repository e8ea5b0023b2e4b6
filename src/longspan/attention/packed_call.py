"""The arguments of `attend` packed into one AttentionCall, once for all layers of a micro-batch."""

from dataclasses import replace

from torch import Tensor

from longspan.attention.arguments import (
    Arguments,
    check_budget,
    check_features,
    check_sinks,
    check_spans,
    check_tensors,
)
from longspan.attention.call import AttentionCall, CallPart, cache_of
from longspan.attention.comm_choice import CommChoice, comm_choices
from longspan.attention.dropout import Dropout
from longspan.attention.geometry.mask import Mask
from longspan.attention.geometry.members import Members
from longspan.attention.kernels import choose
from longspan.comm import SequenceShard, ShardPart


def packed_call(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, shard: SequenceShard, arguments: Arguments
) -> AttentionCall:
    """The call of `attend` with these tensors and arguments. Raises AttentionError where it cannot be exact."""
    check_tensors(q, k, v, shard)
    check_features(arguments)
    check_sinks(sinks, q)
    groups, scale = shard.micro_batch.groups, q.shape[2] ** -0.5 if arguments.scale is None else float(arguments.scale)
    window, chunk = (None if x is None else int(x) for x in (arguments.window, arguments.chunk))
    mask = Mask(arguments.causal, window, chunk).within(shard.micro_batch.lengths)
    check_spans(shard, arguments)
    call = AttentionCall(
        *(q.shape[1], k.shape[1], q.shape[2], v.shape[2], q.dtype, q.device),
        mask=mask,
        scale=abs(scale) or 1.0,
        sign=(scale > 0) - (scale < 0),
        softcap=None if arguments.softcap is None else float(arguments.softcap),
        dropout=Dropout(arguments.dropout, seed=0) if arguments.dropout > 0 else None,
        max_gather_bytes=arguments.max_gather_bytes,
        one_document=mask.chunk is None and all(len(group.documents) == 1 for group in groups),
        spans=mask.causal and shard.has_spans,
    )
    choices = comm_choices(shard, arguments, call)
    gathering = [group for group, choice in zip(groups, choices, strict=True) if choice.cp_comm_type == "all_gather"]
    check_budget(arguments.max_gather_bytes, k, v, gathering)
    kernel = choose(call, arguments.kernel)
    parts = (
        _part(part, choices[part.index] if part.index >= 0 else CommChoice("p2p"), call, shard) for part in shard.parts
    )
    return replace(call, kernel=kernel, parts=tuple(parts))


def _part(part: ShardPart, choice: CommChoice, call: AttentionCall, shard: SequenceShard) -> CallPart:
    mask, cache = call.mask.within(part.group.lengths), cache_of(shard)
    key = (part.index, choice.inner, mask)
    if key not in cache.members:
        cache.members[key] = Members(part, mask, shard.device, choice.inner, shard.spans_of(part))
    return CallPart(slice(part.start, part.stop), choice.cp_comm_type, cache.members[key])
