"""What forward passes on the meta device show of a model: its calls of attention, and what it draws at random.

The model's own modules run over two rows, with meta tensors in place of parameters: that costs no memory and changes
nothing (`seams/meta_pass.py`). One pass in evaluation and one in training mode record everything. Random draws are
recognised by torch's own mark of operators that read a generator's seed; numbers that numpy or a kernel outside of
torch draws are not seen.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from longspan.attention import AttendCall, Mask, choose_kernel
from longspan.attention.call import Dropout
from longspan.attention.kernels import find_kernel
from longspan.errors import AttentionError, ModelError, plural
from longspan.model.parts import preserve_modes
from longspan.model.seams.attention_record import Probe, RecordedCall, check_calls
from longspan.model.seams.meta_pass import VALUES_READ, run_on_meta
from longspan.model.seams.refusals import doctor_hint

_RATES, _MODES = ("p", "dropout_p", "dropout"), ("train", "training")  # if one is 0 or False, an operator draws nothing


@dataclass(frozen=True)
class MetaRecord:
    """What passes over a model showed: calls of attention in order, and in words what is drawn outside attention.

    `calls` are those in evaluation mode, none of a model that was not probed; `draws` those in training.
    """

    calls: tuple[RecordedCall, ...]
    draws: tuple[str, ...]
    draws_in_evaluation: tuple[str, ...]


def record_model(model: PreTrainedModel, class_draws: tuple[str, ...] = (), *, probe: bool = True) -> MetaRecord:
    """Record a model's calls of attention and its random draws, by a pass on the meta device in each mode.

    The model's attention must go to longspan already. A model that draws nothing in training is taken to draw nothing
    in evaluation: without `probe`, its pass in evaluation is then left out.

    With `probe`, raises ModelError, naming the modules, if a decoder layer does not reach attention, or calls it for
    something that cannot be done exactly, or if the model does not run on the meta device. A model that leaves out
    layers at random raises nothing here; its training is refused.

    `class_draws` are those that a small copy showed, used if the passes show none. An adapter's own dropout is not
    counted: each rank drops inputs of its own rows.
    """
    evaluation = _run_mode(model, training=False, judged=True) if probe else None
    rates = _layerdrop_rates(model)
    training = _run_mode(model, training=True, judged=probe and not rates)
    left_out = tuple(f"{key} {rate:g}" for key, rate in rates.items())
    draws = (*_training_draws(model, training), *left_out) or class_draws
    calls = () if evaluation is None else evaluation.calls
    if not draws:
        return MetaRecord(calls, (), ())
    evaluation = evaluation or _run_mode(model, training=False, judged=False)
    return MetaRecord(calls, draws, _draw_words(evaluation.draws))


class _Pass(NamedTuple):
    """One pass: its calls of attention, its draws by the functions that drew, and whether it came to its end."""

    calls: tuple[RecordedCall, ...]
    draws: Counter[str]
    complete: bool


def _run_mode(model: PreTrainedModel, *, training: bool, judged: bool) -> _Pass:
    """Run one pass in a mode.

    If it is `judged`, raises ModelError for an error of the pass, and for its attention.
    """
    probe, names, draws = Probe(), _CallNames(), Counter[str]()
    try:
        with preserve_modes(model), names, _Draws(names, draws):
            model.train(training)
            for name, module in model.named_modules():
                if _is_adapter_dropout(name):  # not counted: each rank drops inputs of its own rows
                    module.eval()
            run_on_meta(model, probe)
    except Exception as error:  # whatever its forward raises there
        if not judged:
            return _Pass(tuple(probe.calls), draws, complete=False)
        raise ModelError(
            f"{type(model).__name__} cannot be probed: model(input_ids, position_ids=, use_cache=, shard=) on the meta "
            f"device raised {type(error).__name__}: {error}; {_cause_text(error)}{doctor_hint(model)}"
        ) from error
    if judged:
        check_calls(model, tuple(probe.calls))
    return _Pass(tuple(probe.calls), draws, complete=True)


def _cause_text(error: Exception) -> str:
    """Return the meaning of an error of a forward pass on the meta device, and a remedy."""
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


def _layerdrop_rates(model: PreTrainedModel) -> dict[str, float]:
    """Return the rates by which layers are left out at random in training, by the keys of a configuration.

    Ranks that leave out different layers would wait for each other for ever.
    """
    keys = model.config.get_text_config().to_dict()
    return {k: v for k, v in keys.items() if "layerdrop" in k and isinstance(v, int | float) and v > 0}


def _training_draws(model: PreTrainedModel, training: _Pass) -> tuple[str, ...]:
    """Return the draws of a pass; with those of dropout modules, if it did not come to its end."""
    return _draw_words(training.draws if training.complete else training.draws | Counter(_dropout_reasons(model)))


def _draw_words(calls: Mapping[str, int]) -> tuple[str, ...]:
    """Write each function that drew, with its number of calls."""
    return tuple(f"{name} ({plural(number, 'call')})" for name, number in sorted(calls.items()))


class _CallNames(TorchFunctionMode):
    """Records which function of torch is running, under the name by which the model called it."""

    def __init__(self) -> None:
        super().__init__()
        self.running = ""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note the name of a function of torch while it runs; of dropout also its rate, torch's default being 0.5."""
        arguments, name = kwargs or {}, getattr(func, "__name__", "")
        if "dropout" in name and "attention" not in name:
            rate = arguments.get("p", args[1] if len(args) > 1 else 0.5)
            name += f" of {rate:g}" if isinstance(rate, int | float) else ""
        self.running = name
        try:
            return func(*args, **arguments)
        finally:
            self.running = ""


class _Draws(TorchDispatchMode):
    """Counts operators that read a generator's seed and return more than one number.

    A tensor without dimensions decides whether a layer is left out. Models draw it whatever the rate is, so that
    `_layerdrop_rates` reads the rate instead.
    """

    def __init__(self, names: _CallNames, calls: Counter[str]) -> None:
        super().__init__()
        self._names, self._calls = names, calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count the calls of operators that draw random numbers, by the function that is running."""
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and _draws_numbers(func, args, kwargs or {}):
            tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            if any(tensor.ndim for tensor in tensors):
                self._calls[self._names.running or func.overloadpacket.__name__] += 1
        return out


def _draws_numbers(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator that may draw does so: not with a dropout rate of 0, nor in evaluation.

    An operator without such arguments draws.
    """
    parameters = operator._schema.arguments
    values = {parameter.name: parameter.default_value for parameter in parameters}
    values |= dict(zip(values, args, strict=False)) | dict(kwargs)
    switches = [*(values.get(name, 1.0) for name in _RATES), *(values.get(name, True) for name in _MODES)]
    return not any(isinstance(value, int | float) and value == 0 for value in switches)


def _dropout_reasons(model: nn.Module) -> Iterator[str]:
    """Yield in words each dropout module outside attention and adapters that has a rate."""
    for name, module in model.named_modules():
        drops = isinstance(module, nn.modules.dropout._DropoutNd) and module.p and not _is_adapter_dropout(name)
        if drops and "att" not in name.rpartition(".")[2]:
            yield f"dropout of {module.p:g}"


def _is_adapter_dropout(name: str) -> bool:
    """Return whether a module, by its name, is the dropout of an adapter."""
    return ".lora_dropout." in f".{name}."


def check_kernel(
    model: nn.Module,
    name: str | None,
    recorded: Sequence[RecordedCall],
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[AttendCall, ...]:
    """Check that the kernel `name` (None: any kernel) can do the recorded calls; return these calls, each once.

    Tensors will be of `dtype` on `device`; calls are returned with the dropout of their layer. Raises AttentionError
    for an unknown kernel, and for one that cannot do a layer's call.
    """
    if name is not None:
        find_kernel(name)  # raises for an unknown name, also if no calls were recorded
    calls: dict[AttendCall, None] = {}
    for recorded_call in recorded:
        sizes = recorded_call.head_size, recorded_call.value_size
        mask = Mask(window=recorded_call.window, chunk=recorded_call.chunk)
        # One head of each: how many there are does not matter to a kernel.
        call = AttendCall(1, 1, *sizes, dtype, device, mask, softcap=recorded_call.softcap)
        try:
            choose_kernel(call, name)
        except AttentionError as error:
            heads = "heads of {} with values of {}".format(*sizes) + "".join(
                f", {feature}" for feature in sorted(call.features)
            )
            raise AttentionError(f"{type(model).__name__} attends with {heads}: {error}") from error
        rate = getattr(recorded_call.module, "attention_dropout", 0.0)
        dropout = Dropout(rate, seed=0) if isinstance(rate, float) and rate > 0 else None
        calls[replace(call, dropout=dropout)] = None
    return tuple(calls)
