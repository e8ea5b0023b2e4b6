"""The first pass of a model that was prepared without a probe shows what the probe would have: which layers attend.

Attention calls of one forward pass are noted with its shard, and judged when the pass is over, on every rank,
before an optimizer moves anything. Recomputation comes later and is not noted. What is judged is in `probe.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from longspan.comm import SequenceShard
from longspan.model.seams.probe import Probe, RecordedCall, check_calls

_recorded = WeakKeyDictionary[SequenceShard, list[RecordedCall]]()  # calls of the passes that run now


def recorded_calls(shard: object) -> list[RecordedCall] | None:
    """Where attention calls of the running pass are noted; None where nobody asks."""
    if isinstance(shard, Probe):
        return shard.calls
    return _recorded.get(shard) if isinstance(shard, SequenceShard) else None


def record_calls(shard: SequenceShard) -> list[RecordedCall]:
    """From here on, the calls of attention with this shard, until `check_recorded_calls`."""
    return _recorded.setdefault(shard, [])


def check_recorded_calls(models: Sequence[PreTrainedModel], shard: SequenceShard) -> None:
    """Judge what was noted of a pass through a model, or through some stages of one. Raises ModelError."""
    calls = _recorded.pop(shard)
    for model in models:
        modules = {id(module) for module in model.modules()}
        check_calls(model, tuple(call for call in calls if id(call.module) in modules))


class FirstPass:
    """Forward hooks of a model that was not probed; they go when a pass has shown that its layers attend."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self, with_kwargs=True),
            model.register_forward_hook(self._check_pass, with_kwargs=True),
        ]

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> None:
        """Before the pass: note its calls of attention.

        torch leaves keywords out where the trial of rows, inside the same call, was the first pass and took this away.
        """
        if isinstance(shard := (kwargs or {}).get("shard"), SequenceShard):
            record_calls(shard)

    def _check_pass(
        self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: object
    ) -> None:
        if isinstance(shard := kwargs.get("shard"), SequenceShard):
            check_recorded_calls([model], shard)
            for handle in self._handles:
                handle.remove()
