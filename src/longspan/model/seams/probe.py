"""A forward pass over two rows on the meta device: which layers reach our attention function, and what they ask.

Some models compute attention in their own code and never ask transformers' AttentionInterface (Falcon, Bloom, MPT …);
under a sharded sequence they would attend to the local rows only, without an error. The probe runs the model's own
modules with meta tensors in place of its parameters, so it costs no memory and changes nothing. It does not judge
configurations (`refusals.py`). Which attention kernel a model runs is checked by the calls that the probe saw
(`check_kernel`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.attention import AttentionCall, Mask, choose
from longspan.attention.call import Dropout
from longspan.attention.kernels import find_kernel
from longspan.errors import AttentionError, ModelError
from longspan.model.layers import decoder_layers
from longspan.model.parts import modes_restored
from longspan.model.seams.hint import doctor_hint
from longspan.model.seams.meta_pass import VALUES_READ, run_on_meta
from longspan.model.seams.mixers import ROWWISE_LAYER_TYPES, find_mixers


@dataclass(frozen=True)
class RecordedCall:
    """What one layer asks of attention: features that need support, and tensors that we would not know how to use."""

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
    """Given as `shard=`, makes the attention function record its caller instead of attending."""

    calls: list[RecordedCall] = field(default_factory=list[RecordedCall])


def probe_model(model: PreTrainedModel) -> tuple[RecordedCall, ...]:
    """Every attention call of one forward pass, in order.

    The model's attention implementation must be set already. Raises ModelError, naming the modules, where a decoder
    layer does not reach the attention function, in evaluation or in training, or asks for what it cannot do exactly. A
    model that leaves layers out at random, by its configuration, is not tried in training, which is refused.
    """
    evaluated = _calls(model, training=False)
    if not layerdrop(model):
        _calls(model, training=True)
    return evaluated


def layerdrop(model: PreTrainedModel) -> dict[str, float]:
    """The keys of a configuration, and rates, by which layers are left out at random in training.

    Ranks that leave out different ones would wait for each other for ever.
    """
    keys = model.config.get_text_config().to_dict()
    return {k: v for k, v in keys.items() if "layerdrop" in k and isinstance(v, int | float) and v > 0}


def _calls(model: PreTrainedModel, *, training: bool) -> tuple[RecordedCall, ...]:
    probe = Probe()
    try:
        with modes_restored(model):
            run_on_meta(model.train(training), probe)
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} cannot be probed: model(input_ids, position_ids=, use_cache=, shard=) on the meta "
            f"device raised {type(error).__name__}: {error}; {_cause(error)}{doctor_hint(model)}"
        ) from error
    check_calls(model, tuple(probe.calls))
    return tuple(probe.calls)


def _cause(error: Exception) -> str:
    """What an error of a forward pass on the meta device means, and what to do."""
    if isinstance(error, ModelError):  # our attention was reached, and had no shard
        return "its forward must hand keyword arguments down to its decoder layers"
    if "is not on the expected device meta" in str(error):
        return (
            "its forward makes a tensor on a device of its own, as torch.randn(shape) does; make it where its input is "
            "(device=x.device)"
        )
    values_read = VALUES_READ in getattr(error, "__notes__", ())
    if values_read or (isinstance(error, RuntimeError) and "meta" in str(error)):  # NotImplementedError among them
        return (
            "its forward reads values of tensors, and there are none on the meta device; with probe=False its first "
            "pass shows whether its layers attend"
        )
    return "the error is its forward's own; with probe=False its first pass shows whether its layers attend"


def check_calls(model: PreTrainedModel, calls: tuple[RecordedCall, ...]) -> None:
    """Raise ModelError, naming the modules, where by the attention calls of a pass the model would not be exact."""
    mixers = {id(mixer) for mixer in find_mixers(model).values()}  # which find the shard, or fail
    _refuse_bypass(model, mixers | {id(call.module) for call in calls})
    _refuse_features(model, calls)


def _refuse_bypass(model: PreTrainedModel, reached: set[int]) -> None:
    bypassing: list[str] = []
    types = getattr(model.config.get_text_config(), "layer_types", None) or []
    for index, (name, layer) in enumerate(decoder_layers(model).items()):
        if index < len(types) and types[index] in ROWWISE_LAYER_TYPES:
            continue
        if not any(id(module) in reached for module in layer.modules()):
            bypassing.append(next((f"{name}.{child}" for child, _ in _attention_modules(layer)), name))
        else:
            bypassing += [f"{name}.{f}" for f, m in _attention_modules(layer) if not _reaches(m, reached)]
    if bypassing:
        shown = ", ".join(bypassing[:4]) + (f", … ({len(bypassing)} in all)" if len(bypassing) > 4 else "")
        kinds = sorted({type(model.get_submodule(name)).__name__ for name in bypassing})
        raise ModelError(
            f"{_name(model)}: {shown} ({', '.join(kinds)}) bypasses transformers' AttentionInterface and would "
            "attend to the local rows alone; use a model whose attention goes through the interface (Qwen3, Llama, …)"
            f"{doctor_hint(model)}"
        )


def _name(model: nn.Module) -> str:
    """The architecture's name, which FSDP2 puts a word before."""
    return type(model).__name__.removeprefix("FSDP")


def _attention_modules(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in layer.named_modules():
        if name and type(module).__name__.endswith("Attention"):
            yield name, module


def _reaches(module: nn.Module, reached: set[int]) -> bool:
    return any(id(inner) in reached for inner in module.modules())


def _refuse_features(model: PreTrainedModel, calls: tuple[RecordedCall, ...]) -> None:
    names = {id(module): name for name, module in model.named_modules()}
    config = model.config.get_text_config()
    types = getattr(config, "layer_types", None) or []
    for call in calls:
        where = f"{_name(model)}: {names[id(call.module)]}"
        layer = getattr(call.module, "layer_idx", None)
        if not call.causal:
            raise ModelError(f"{where} is not causal; only causal decoders are supported")
        if call.unknown:
            raise ModelError(f"{where} passes {', '.join(call.unknown)} to attention, which attend does not take")
        if layer is None or not 0 <= layer < config.num_hidden_layers:
            raise ModelError(f"{where} has layer_idx {layer!r}; attend needs the global layer index")
        if call.window is None and types and types[layer] == "sliding_attention":
            raise ModelError(f"{where} is a sliding_attention layer but passes no sliding_window to attention")
        if call.chunk is None and types and types[layer] == "chunked_attention":
            raise ModelError(f"{where} is a chunked_attention layer, and its config has no attention_chunk_size")
    softcap = getattr(config, "attn_logit_softcapping", None)
    if softcap and any(call.softcap is None for call in calls):
        raise ModelError(f"{_name(model)}: attn_logit_softcapping is {softcap} but does not reach attention")


def unknown_tensors(arguments: dict[str, object]) -> tuple[str, ...]:
    """Names of tensor arguments that would change attention and that `attend` has no place for."""
    known = {"position_ids", "cache_position"}
    return tuple(name for name, value in arguments.items() if isinstance(value, Tensor) and name not in known)


def check_kernel(
    model: nn.Module,
    name: str | None,
    recorded: Sequence[RecordedCall],
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[AttentionCall, ...]:
    """The different calls of a model's layers, which this kernel (None: one kernel or another) can do.

    `recorded` are those of the model's probe, of tensors of `dtype` on `device`; in training they have the dropout of
    their layer. Raises AttentionError where the kernel is unknown, or cannot do what a layer asks.
    """
    if name is not None:
        find_kernel(name)
    calls: dict[AttentionCall, None] = {}
    for of_layer in recorded:
        sizes, mask = (of_layer.head_size, of_layer.value_size), Mask(window=of_layer.window, chunk=of_layer.chunk)
        call = AttentionCall(1, 1, *sizes, dtype, device, mask, softcap=of_layer.softcap)
        try:
            choose(call, name)
        except AttentionError as error:
            what = "heads of {} with values of {}".format(*sizes) + "".join(f", {f}" for f in sorted(call.features))
            raise AttentionError(f"{type(model).__name__} attends with {what}: {error}") from error
        rate = getattr(of_layer.module, "attention_dropout", 0.0)
        dropout = Dropout(rate, seed=0) if isinstance(rate, float) and rate > 0 else None
        calls[replace(call, dropout=dropout)] = None
    return tuple(calls)
