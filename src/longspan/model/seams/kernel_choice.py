"""Which attention kernel a model runs: checked when it is prepared, given to its layers with every call.

`CallRules` adds the name to the keyword arguments of a call, as `attention_kernel`, so that it reaches `attend` beside
the shard.
"""

from collections.abc import Sequence

import torch
from torch import nn

from longspan.attention import AttentionCall, Mask, choose
from longspan.attention.kernels import named
from longspan.errors import AttentionError
from longspan.model.seams.probe import RecordedCall


def check_kernel(
    model: nn.Module,
    name: str | None,
    calls: Sequence[RecordedCall],
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Raise AttentionError where this kernel is unknown, or cannot do what a layer asks; None: where no kernel can.

    `calls` are those of the model's probe, of tensors of `dtype` on `device`.
    """
    if name is not None:
        named(name)
    for recorded in calls:
        sizes, mask = (recorded.head_size, recorded.value_size), Mask(window=recorded.window)
        call = AttentionCall(1, 1, *sizes, dtype, device, mask, softcap=recorded.softcap)
        try:
            choose(call, name)
        except AttentionError as error:
            what = "heads of {} with values of {}".format(*sizes) + "".join(f", {f}" for f in sorted(call.features))
            raise AttentionError(f"{type(model).__name__} attends with {what}: {error}") from error
