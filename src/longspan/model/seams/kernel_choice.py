"""Which attention kernel a model runs: checked when it is prepared, given to its layers with every call.

The name is kept on the top module, as `attention_kernel`, and reaches `attend` as a keyword argument of that name,
beside the shard; a caller's own argument wins over it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

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


def keep_kernel(model: nn.Module, name: str | None) -> None:
    """Have the layers of this model use a kernel that was checked; None: each call takes the first that can."""
    model.attention_kernel = name  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]


def with_kernel(model: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a call of the model, and with them the kernel of its layers where one was named."""
    name = getattr(model, "attention_kernel", None)
    return dict(given) if name is None else {"attention_kernel": name, **given}
