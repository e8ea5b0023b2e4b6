"""Which attention kernel a model runs: checked when it is prepared, given to its layers with every call.

`CallRules` adds the name to the keyword arguments of a call, as `attention_kernel`, so that it reaches `attend` beside
the shard.
"""

from collections.abc import Sequence

import torch
from torch import nn

from longspan.attention import Need, choose
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
    for call in dict.fromkeys((c.head_size, c.value_size, c.window is not None, c.softcap is not None) for c in calls):
        head_size, value_size, *flags = call
        features = frozenset(f for f, needed in zip(("window", "softcap"), flags, strict=True) if needed)
        need = Need(device, dtype, head_size, features, value_size)
        try:
            choose(need, name)
        except AttentionError as error:
            what = f"heads of {head_size} with values of {value_size}" + "".join(f", {f}" for f in sorted(features))
            raise AttentionError(f"{type(model).__name__} attends with {what}: {error}") from error
