"""What forward passes on the meta device show of a model: how it attends, and what it draws at random.

Draws outside of torch are not seen.
"""

import copy
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental import _config
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from longspan.attention import AttendCall, Mask, choose_kernel
from longspan.attention.dropout import Dropout
from longspan.attention.kernels import find_kernel
from longspan.errors import AttentionError, ModelError, plural
from longspan.model.kinds import ROWWISE_LAYER_TYPES, attends_to_chosen_keys, find_mixers
from longspan.model.layers import architecture_name, decoder_layers, preserve_modes
from longspan.model.seams.doctor_hint import doctor_hint
from longspan.model.seams.trial_shards import Probe, RecordedCall
from longspan.plain_text import items_text


def run_on_meta(model: nn.Module, shard: object, *, gradients: bool = False, **more: Any) -> Any:
    """Run the model's forward on two rows, on the meta device; an argument of `more` that is None is left out.

    With `gradients` parameters require them, else nothing does. Where a forward reads values it gets zeros, and
    `torch.nonzero` counts every element: the pass takes one of the paths through the model. Attributes of modules and
    random states are restored.
    """
    ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
    inputs = {"input_ids": ids, "position_ids": ids, "use_cache": False, "shard": shard, **more}
    inputs = {name: value for name, value in inputs.items() if value is not None}
    settings: Any = _config  # torch.nonzero has no shape there unless all elements are taken to be nonzero
    # A module under two names, as a layer that others share, is named once: torch would put the first stand-in back in
    # place of the parameter.
    tensors = {
        f"{prefix}.{name}" if prefix else name: torch.empty_like(tensor, device="meta")
        for prefix, module in model.named_modules()
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    }
    if gradients:
        for name in tensors.keys() & dict(model.named_parameters(remove_duplicate=False)).keys():
            tensors[name].requires_grad_(tensors[name].is_floating_point())
    with (
        restore_attributes_after(model),
        torch.random.fork_rng(devices=[]),
        torch.set_grad_enabled(gradients),
        settings.patch(meta_nonzero_assume_all_nonzero=True),
        _MadeUpValues(),
    ):
        # Tied parameters have a stand-in under each of their names, which torch refuses if it is to tie them.
        return functional_call(model, tensors, (), inputs, tie_weights=False)


# Every module has these: hooks, children, parameters.
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) - {"_buffers"}


@contextmanager
def restore_attributes_after(model: nn.Module) -> Iterator[None]:
    """Restore attributes of modules, buffers among them, and the contents of their lists and dicts."""
    saved = list[tuple[Any, Any]]()
    for module in model.modules():
        values = [value for name, value in vars(module).items() if name not in _MODULE_ATTRIBUTES]
        containers = [value for value in values if type(value) in (list, dict, set, deque)]
        saved += [(container, copy.copy(container)) for container in (vars(module), *containers)]
    try:
        yield
    finally:
        for container, content in saved:  # the containers themselves, as other objects may refer to them
            container.clear()
            if isinstance(container, list | deque):
                container.extend(content)
            else:
                container.update(content)


_READS: dict[Any, Callable[..., Any]] = {
    Tensor.item: lambda x: 0.0 if x.is_floating_point() else 0,
    Tensor.tolist: lambda x: torch.zeros(x.shape, dtype=x.dtype).tolist(),
    Tensor.__int__: lambda x: 0,
    Tensor.__index__: lambda x: 0,
    Tensor.__float__: lambda x: 0.0,
    **dict.fromkeys((Tensor.__bool__, Tensor.__contains__, Tensor.is_nonzero, torch.is_nonzero), lambda *_: False),
    **dict.fromkeys((Tensor.equal, torch.equal, Tensor.allclose, torch.allclose), lambda *_, **__: False),
}


class _MadeUpValues(TorchFunctionMode):
    """Answers reads of values on the meta device with zeros."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer functions that read values of a meta tensor, and take scalar indices for 0; others run as they are."""
        if func in _READS and args[0].is_meta:
            return _READS[func](*args, **(kwargs or {}))
        if func is Tensor.__getitem__:
            # A scalar tensor as an index counts as 0, as torch would read its value; a boolean is a mask and stays.
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            scalars = [isinstance(i, Tensor) and i.is_meta and i.ndim == 0 and i.dtype != torch.bool for i in index]
            args = (args[0], tuple(0 if scalar else i for i, scalar in zip(index, scalars, strict=True)))
        return func(*args, **(kwargs or {}))


# ---- random draws

_RATES = ("p", "dropout_p", "dropout")
_MODES = ("train", "training")  # if one is 0 or False, an operator draws nothing


@dataclass(frozen=True)
class MetaRecord:
    """Calls of attention in order, and in words what is drawn outside attention."""

    calls: tuple[RecordedCall, ...]
    draws: tuple[str, ...]
    draws_in_evaluation: tuple[str, ...]


def record_calls_and_draws(model: PreTrainedModel, class_draws: tuple[str, ...] = ()) -> MetaRecord:
    """Record a model's calls of attention and its random draws, by a pass on the meta device in training mode.

    A model that draws is run in evaluation mode too, and the calls are those of that pass. `class_draws`, what a small
    copy of the model was seen to draw, count for a model that draws nothing here. Dropout of adapters is left out.
    ModelError names decoder layers that are not exact, or a model that does not run on the meta device.
    """
    keys = model.config.get_text_config().to_dict()
    rates = {k: v for k, v in keys.items() if "layerdrop" in k and isinstance(v, int | float) and v > 0}
    # With a rate of layerdrop, layers may be left out in training: the pass in evaluation is judged alone.
    calls, training_draws = _record_pass(model, training=True, judged=not rates)
    left_out = tuple(f"{key} {rate:g}" for key, rate in rates.items())
    draws = (*training_draws, *left_out) or class_draws
    if not draws:
        return MetaRecord(calls, (), ())
    calls, evaluation_draws = _record_pass(model, training=False, judged=True)
    return MetaRecord(calls, draws, evaluation_draws)


def _record_pass(
    model: PreTrainedModel, *, training: bool, judged: bool
) -> tuple[tuple[RecordedCall, ...], tuple[str, ...]]:
    """A pass that is not `judged`, as it leaves out layers at random, drops errors and checks nothing."""
    probe = Probe()
    names = _NoteCallNames()
    draws = Counter[str]()
    try:
        with preserve_modes(model), names, _CountDraws(names, draws):
            model.train(training)
            for name, module in model.named_modules():
                if ".lora_dropout." in f".{name}.":  # not counted: each rank drops inputs of its own rows
                    module.eval()
            run_on_meta(model, probe)
    except Exception as error:  # whatever its forward raises there
        if judged:
            raise ModelError(
                f"{type(model).__name__} cannot be probed: model(input_ids, position_ids=, use_cache=, shard=) on the "
                f"meta device raised {type(error).__name__}: {error}; a forward must hand keyword arguments down to "
                "its decoder layers, make tensors where its inputs are (device=x.device), and depend on no values of "
                f"tensors{doctor_hint(model)}"
            ) from error
    if judged:
        check_attention_calls(model, tuple(probe.calls))
    return tuple(probe.calls), tuple(f"{name} ({plural(number, 'call')})" for name, number in sorted(draws.items()))


class _NoteCallNames(TorchFunctionMode):
    """Records which function of torch is running, under the name by which the model called it."""

    running: str = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function with its name in `running`, to which dropout adds its rate."""
        arguments = kwargs or {}
        name = getattr(func, "__name__", "")
        if "dropout" in name and "attention" not in name:
            rate = arguments.get("p", args[1] if len(args) > 1 else 0.5)  # torch's default
            name += f" of {rate:g}" if isinstance(rate, int | float) else ""
        self.running = name
        try:
            return func(*args, **arguments)
        finally:
            self.running = ""


class _CountDraws(TorchDispatchMode):
    """Counts in `calls` operators that read a generator's seed, by torch's own mark, and return more than one number.

    A single number decides whether a layer is left out, and is drawn whatever the rate: it is not counted, since
    `record_calls_and_draws` reads these rates. `names`, entered outside of this, says under which name the model called
    the operator.
    """

    def __init__(self, names: _NoteCallNames, calls: Counter[str]) -> None:
        super().__init__()
        self._names = names
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and count it if it has drawn a tensor of numbers."""
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and _draws_numbers(func, args, kwargs or {}):
            tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            if any(tensor.ndim for tensor in tensors):
                self._calls[self._names.running or func.overloadpacket.__name__] += 1
        return out


def _draws_numbers(operator: Any, args: Any, kwargs: Any) -> bool:
    """A call draws where no rate of it is 0, and no switch of training is off."""
    parameters = operator._schema.arguments
    values = {parameter.name: parameter.default_value for parameter in parameters}
    values |= dict(zip(values, args, strict=False)) | dict(kwargs)
    switches = [*(values.get(name, 1.0) for name in _RATES), *(values.get(name, True) for name in _MODES)]
    return not any(isinstance(value, int | float) and value == 0 for value in switches)


def checked_attend_calls(
    model: nn.Module,
    name: str | None,
    recorded: Sequence[RecordedCall],
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[AttendCall, ...]:
    """Check that the kernel `name` (None: any) can do the recorded calls on this device.

    Returns each different call once, with its layer's dropout. AttentionError for an unknown kernel, and for a call
    that it cannot do, or with None no kernel can.
    """
    if name is not None:
        find_kernel(name)  # raises for an unknown name, also if no calls were recorded
    calls: dict[AttendCall, None] = {}
    for recorded_call in recorded:
        sizes = recorded_call.head_dim, recorded_call.value_dim
        mask = Mask(window=recorded_call.window, chunk=recorded_call.chunk)
        # One head of each: how many there are does not matter to a kernel.
        call = AttendCall(
            *(1, 1, *sizes, dtype, device, mask),
            softcap=recorded_call.softcap,
            indexed=recorded_call.indexed,
            block_size=recorded_call.block_size,
        )
        calls_of_layer = [call]
        try:
            call = replace(call, kernel=choose_kernel(call, name))
            if recorded_call.entries:
                from longspan.attention.entries import entry_call

                forms = (False, True) if recorded_call.entries_chosen else (False,)
                calls_of_layer += [
                    entry_call(call, recorded_call.entries, chosen=chosen, kernel=name) for chosen in forms
                ]
        except AttentionError as error:
            heads = "heads of {} with values of {}".format(*sizes)
            features = "".join(f", {feature}" for feature in sorted(call.features))
            raise AttentionError(f"{type(model).__name__} attends with {heads}{features}: {error}") from error
        rate = attention_dropout(recorded_call.module)
        dropout = Dropout(rate, seed=0) if rate > 0 else None
        for layer_call in calls_of_layer:
            calls[replace(layer_call, dropout=dropout, kernel=None)] = None
    return tuple(calls)


# ---- calls of attention


def attention_dropout(module: nn.Module) -> float:
    """Return the rate at which a module drops weights of attention, 0.0 if it does not.

    Under transformers' names it is a number or a dropout module; a module called `dropout` may drop something else.
    """
    named = [getattr(module, name, 0.0) for name in ("attention_dropout", "attn_dropout")]
    rates = [getattr(module, "dropout", 0.0), *(getattr(rate, "p", rate) for rate in named)]
    return max((rate for rate in rates if isinstance(rate, float)), default=0.0)


def _refuse_bypassing_layers(model: PreTrainedModel, reached: set[int]) -> None:
    """`reached` has the `id` of every module that called attention, or is a mixer. The error names attention modules
    in which no module is reached, and of a layer without any reached module the first with "att" in its class's
    name."""
    bypassing: list[str] = []
    types = getattr(model.config.get_text_config(), "layer_types", None) or []
    for index, (name, layer) in enumerate(decoder_layers(model).items()):
        if index < len(types) and types[index] in ROWWISE_LAYER_TYPES:
            continue
        if reached.isdisjoint(map(id, layer.modules())):
            children = [
                f"{name}.{n}" for n, part in layer.named_modules() if n and "att" in type(part).__name__.lower()
            ]
            bypassing.append((children or [name])[0])
        else:
            bypassing += [
                f"{name}.{n}"
                for n, part in layer.named_modules()
                if n and type(part).__name__.endswith("Attention") and reached.isdisjoint(map(id, part.modules()))
            ]
    if bypassing:
        class_names = sorted({type(model.get_submodule(name)).__name__ for name in bypassing})
        raise ModelError(
            f"{architecture_name(model)}: {items_text(bypassing)} ({', '.join(class_names)}) bypasses transformers' "
            "AttentionInterface and would attend to the local rows alone; use a model whose attention goes through "
            "the interface (Qwen3, Llama, …)"
            f"{doctor_hint(model)}"
        )


def check_attention_calls(model: PreTrainedModel, calls: tuple[RecordedCall, ...]) -> None:
    """Raise ModelError, naming the modules, if the attention calls of a pass show that the model is not exact.

    Refused are layers without a call, and calls that are not causal, not numbered, or for which `attend` has no
    argument. What the configuration names (window, chunk, soft cap) must reach them: else it is applied elsewhere.
    """
    # Mixers read the shard, and raise without one.
    mixers = {id(mixer) for mixer in find_mixers(model).values()}
    _refuse_bypassing_layers(model, mixers | {id(call.module) for call in calls})
    names = {id(module): name for name, module in model.named_modules()}
    config = model.config.get_text_config()
    types = getattr(config, "layer_types", None) or []
    for call in calls:
        layer_name = f"{architecture_name(model)}: {names[id(call.module)]}"
        layer = getattr(call.module, "layer_idx", None)
        if not call.causal:
            raise ModelError(f"{layer_name} is not causal; only causal decoders are supported")
        if call.unknown:
            raise ModelError(
                f"{layer_name} passes {', '.join(call.unknown)} to attention, which attend does not take"
            )
        if call.indexed and not attends_to_chosen_keys(call.module):
            raise ModelError(f"{layer_name} passes indices to attention that no known indexer chose, key by key")
        if layer is None or not 0 <= layer < config.num_hidden_layers:
            raise ModelError(f"{layer_name} has layer_idx {layer!r}; attend needs the global layer index")
        if call.window is None and types and types[layer] == "sliding_attention":
            raise ModelError(f"{layer_name} is a sliding_attention layer but passes no sliding_window to attention")
        if call.chunk is None and types and types[layer] == "chunked_attention":
            raise ModelError(
                f"{layer_name} is a chunked_attention layer, and its config has no attention_chunk_size"
            )
    softcap = getattr(config, "attn_logit_softcapping", None)
    if softcap and any(call.softcap is None for call in calls):
        raise ModelError(
            f"{architecture_name(model)}: attn_logit_softcapping is {softcap} but does not reach attention"
        )
