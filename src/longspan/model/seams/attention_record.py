"""Which layers call attention in a forward pass, and with what: recorded, and judged.

Some models compute attention in their own code and never ask transformers' AttentionInterface (Falcon, Bloom, MPT …);
over a sharded sequence they would attend to the local rows only, without an error. `prepare` sees that in passes on the
meta device, with a `Probe` in place of a shard (`exactness/meta_record.py`). A model that was prepared without them
shows it in its first pass: its calls are recorded with the shard and judged on every rank when the pass is over, before
an optimizer moves anything. Recomputation comes later and is not recorded.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from longspan.comm import SequenceShard
from longspan.errors import ModelError
from longspan.model.layers import decoder_layers
from longspan.model.seams.mixers import ROWWISE_LAYER_TYPES, find_mixers
from longspan.model.seams.refusals import doctor_hint, items_text, stock_class_name


@dataclass(frozen=True)
class RecordedCall:
    """One call of attention: its layer, the features it needs, and the tensors for which `attend` has no argument."""

    module: nn.Module
    causal: bool
    softcap: float | None
    sinks: bool
    unknown: tuple[str, ...]
    head_size: int = 0
    value_size: int = 0
    window: int | None = None
    chunk: int | None = None


@dataclass(frozen=True, eq=False)
class Probe:
    """In place of a shard: the attention function records its caller in `calls`, and does not attend."""

    calls: list[RecordedCall] = field(default_factory=list[RecordedCall])


_recorded = WeakKeyDictionary[SequenceShard, list[RecordedCall]]()  # the passes that are running


def call_record(shard: object) -> list[RecordedCall] | None:
    """Return the list in which attention calls of this pass are recorded; None if they are not recorded."""
    if isinstance(shard, Probe):
        return shard.calls
    return _recorded.get(shard) if isinstance(shard, SequenceShard) else None


def record_calls(shard: SequenceShard) -> list[RecordedCall]:
    """Record the calls of attention with this shard from here on, until `check_recorded_calls`."""
    return _recorded.setdefault(shard, [])


def unknown_tensors(arguments: dict[str, object]) -> tuple[str, ...]:
    """Return names of tensors that would change attention, and for which `attend` has no argument."""
    unused = {"position_ids", "cache_position"}
    return tuple(name for name, value in arguments.items() if isinstance(value, Tensor) and name not in unused)


def check_recorded_calls(models: Sequence[PreTrainedModel], shard: SequenceShard) -> None:
    """Judge the calls recorded in a pass through a model, or through some of its stages. Raises ModelError."""
    calls = _recorded.pop(shard)
    for model in models:
        modules = {id(module) for module in model.modules()}
        check_calls(model, tuple(call for call in calls if id(call.module) in modules))


def check_calls(model: PreTrainedModel, calls: tuple[RecordedCall, ...]) -> None:
    """Raise ModelError, naming the modules, if the attention calls of a pass show that the model is not exact."""
    mixers = {id(mixer) for mixer in find_mixers(model).values()}  # they read the shard, and raise without one
    _refuse_bypassing_layers(model, mixers | {id(call.module) for call in calls})
    _refuse_features(model, calls)


def _refuse_bypassing_layers(model: PreTrainedModel, reached: set[int]) -> None:
    """Raise ModelError, naming them, for layers in which an attention module does not reach our attention.

    `reached` are the ids of modules that called our attention, or are mixers. Layers of a type without attention are
    passed over. Named are the modules whose class is named as attention and that do not call ours; of a layer in which
    nothing does, only the first with "att" in its class's name, or the layer itself if it has none.
    """
    bypassing: list[str] = []
    types = getattr(model.config.get_text_config(), "layer_types", None) or []
    for index, (name, layer) in enumerate(decoder_layers(model).items()):
        if index < len(types) and types[index] in ROWWISE_LAYER_TYPES:
            continue
        if not any(id(module) in reached for module in layer.modules()):
            children = [
                f"{name}.{n}" for n, part in layer.named_modules() if n and "att" in type(part).__name__.lower()
            ]
            bypassing.append((children or [name])[0])
        else:
            bypassing += [
                f"{name}.{child_name}"
                for child_name, module_inside in _attention_modules(layer)
                if not _reaches_attention(module_inside, reached)
            ]
    if bypassing:
        class_names = sorted({type(model.get_submodule(name)).__name__ for name in bypassing})
        raise ModelError(
            f"{stock_class_name(model)}: {items_text(bypassing)} ({', '.join(class_names)}) bypasses transformers' "
            "AttentionInterface and would attend to the local rows alone; use a model whose attention goes through "
            "the interface (Qwen3, Llama, …)"
            f"{doctor_hint(model)}"
        )


def _attention_modules(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules inside a layer whose class is named as attention, with their names in the layer."""
    for name, module in layer.named_modules():
        if name and type(module).__name__.endswith("Attention"):
            yield name, module


def _reaches_attention(module: nn.Module, reached: set[int]) -> bool:
    """Return whether the module or one inside it is among those, by `id`, that called our attention."""
    return any(id(inner) in reached for inner in module.modules())


def _refuse_features(model: PreTrainedModel, calls: tuple[RecordedCall, ...]) -> None:
    """Raise ModelError, naming the layer, for a call of attention that `attend` cannot do exactly.

    A feature that the configuration names (a window, a chunk, a soft cap) must also reach the calls, for else the model
    applies it where it is not seen.
    """
    names = {id(module): name for name, module in model.named_modules()}
    config = model.config.get_text_config()
    types = getattr(config, "layer_types", None) or []
    for call in calls:
        layer_name = f"{stock_class_name(model)}: {names[id(call.module)]}"
        layer = getattr(call.module, "layer_idx", None)
        if not call.causal:
            raise ModelError(f"{layer_name} is not causal; only causal decoders are supported")
        if call.unknown:
            raise ModelError(f"{layer_name} passes {', '.join(call.unknown)} to attention, which attend does not take")
        if layer is None or not 0 <= layer < config.num_hidden_layers:
            raise ModelError(f"{layer_name} has layer_idx {layer!r}; attend needs the global layer index")
        if call.window is None and types and types[layer] == "sliding_attention":
            raise ModelError(f"{layer_name} is a sliding_attention layer but passes no sliding_window to attention")
        if call.chunk is None and types and types[layer] == "chunked_attention":
            raise ModelError(f"{layer_name} is a chunked_attention layer, and its config has no attention_chunk_size")
    softcap = getattr(config, "attn_logit_softcapping", None)
    if softcap and any(call.softcap is None for call in calls):
        raise ModelError(f"{stock_class_name(model)}: attn_logit_softcapping is {softcap} but does not reach attention")


class FirstPass:
    """Forward hooks of a model that was not probed; removed when a pass has shown that its layers attend."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Register the hooks: one records calls from the beginning of a pass, one judges them at its end."""
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self, with_kwargs=True),
            model.register_forward_hook(self._check_pass, with_kwargs=True),
        ]

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> None:
        """Record the calls of attention of the pass that begins.

        `kwargs` is missing if an earlier hook of the same call, the trial of rows, ran a pass that removed this hook:
        torch still calls it, without keywords.
        """
        if isinstance(shard := (kwargs or {}).get("shard"), SequenceShard):
            record_calls(shard)

    def _check_pass(
        self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: object
    ) -> None:
        """Judge the calls recorded in the pass, and remove the hooks: a forward hook."""
        if isinstance(shard := kwargs.get("shard"), SequenceShard):
            check_recorded_calls([model], shard)
            for handle in self._handles:
                handle.remove()
