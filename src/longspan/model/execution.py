"""What a prepared model computes with, as a run records it: types of tensors, and the kernels of attention.

It is decided in `sharding.py` and by the probe; nothing here changes it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from longspan.attention import AttendCall, choose_kernel


@dataclass(frozen=True)
class Execution:
    """Types of parameters, of arithmetic and of sums of gradients, and the different attention calls of the layers.

    Gradients are summed over slots in `reduce_dtype`, and those sums over micro-batches in `added_dtype` (None: in
    that too). `kernel` is the one requested by name (None: each call takes the first that can); `mixers` counts
    state-space layers. `words` are what features say that they did, by the label under which a run prints it.
    """

    parameter_dtype: torch.dtype
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    calls: tuple[AttendCall, ...]
    kernel: str | None = None
    mixers: int = 0
    added_dtype: torch.dtype | None = None
    words: Mapping[str, str] = field(default_factory=dict)

    @property
    def kernel_texts(self) -> tuple[str, ...]:
        """Return the kernels that run, in words: one text for all layers, or one for each kernel, with its layers."""
        calls_of_text: dict[str, list[AttendCall]] = {}
        for call in self.calls:
            packed_kernel = choose_kernel(replace(call, one_document=False), self.kernel).name
            is_undivided = call.mask.chunk is None  # chunks divide a document as several documents would
            single_kernel = choose_kernel(replace(call, one_document=is_undivided), self.kernel).name
            words = single_kernel
            if packed_kernel != single_kernel:
                words += f" where each group has one document, else {packed_kernel}"
            calls_of_text.setdefault(words, []).append(call)
        if len(calls_of_text) < 2:
            return tuple(calls_of_text)
        return tuple(
            f"{words} (layers with {' and '.join(dict.fromkeys(map(_mask_text, calls)))})"
            for words, calls in calls_of_text.items()
        )

    def slow_kernel_reason(self) -> str:
        """Return why no faster kernel than `reference` runs on a GPU; "" if a faster one runs, and on a CPU."""
        for call in self.calls:
            if call.device.type == "cuda" and choose_kernel(call, self.kernel).name == "reference":
                kind = [str(call.dtype).removeprefix("torch."), f"heads of {call.head_dim}", *sorted(call.features)]
                return f"the slow reference kernel is all that can do {', '.join(kind)} here"
        return ""


def model_execution(model: nn.Module) -> Execution:
    """Return what a prepared model computes with."""
    prepared: Any = model
    return prepared.execution


def _mask_text(call: AttendCall) -> str:
    if call.window_call is not None:
        return "chosen entries" if call.indexed else f"entries of {call.stride:,} rows"
    limits = [f"{name} {x:,}" for name, x in (("window of", call.mask.window), ("chunks of", call.mask.chunk)) if x]
    return ", ".join(limits) or "full attention"
