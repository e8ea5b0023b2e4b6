"""What a model draws at random outside of attention, found by passes on the meta device.

Attention's dropout is exact: its masks are hashed from global positions. Anything else would be drawn by each rank for
the rows that it happens to hold, so that loss and gradients would depend on the layout. Such a model is evaluated as it
is, where it draws nothing then, and refused when it trains. Draws are known by torch's own mark of operators that read
a generator's seed; numbers that numpy or a kernel outside of torch draws are not seen.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from longspan.errors import ModelError, counted
from longspan.model.lora.adapters import adapter_of
from longspan.model.parts import modes_restored
from longspan.model.seams.call_rules import call_rules
from longspan.model.seams.meta_pass import run_on_meta
from longspan.model.seams.probe import Probe, layerdrop

_SAMPLE = ("exponential_", "multinomial", "gumbel_softmax")  # one of several, as a router may choose experts
_NOT_HERE = ("att", "summary", "classifier", "layerdrop")  # keys of dropout in attention, or in heads of other tasks
_RATES, _MODES = ("p", "dropout_p", "dropout"), ("train", "training")  # arguments by which an operator draws nothing


def random_draws(model: PreTrainedModel) -> tuple[str, ...]:
    """What a forward pass in training draws at random outside attention, in words; nothing for most models.

    The model's attention implementation must be set already. Where it does not run on the meta device, its dropout
    modules are counted too.
    """
    calls, complete = _calls(model, training=True)
    if not complete:
        calls |= Counter(_module_draws(model))
    return _in_words(calls) + tuple(f"{key} {rate:g}" for key, rate in layerdrop(model).items())


def draws_in_evaluation(model: PreTrainedModel) -> tuple[str, ...]:
    """What a forward pass in evaluation mode draws at random outside attention, in words."""
    return _in_words(_calls(model, training=False)[0])


def _calls(model: PreTrainedModel, *, training: bool) -> tuple[Counter[str], bool]:
    """Draws of a pass on the meta device by what drew, and whether the pass came to its end."""
    names, draws = _CallNames(), Counter[str]()
    try:
        with modes_restored(model), names, _Draws(names, draws):
            model.train(training)
            run_on_meta(model, Probe())
    except Exception:  # whatever its forward raises there: `probe_model` says it where it must run
        return draws, False
    return draws, True


def _in_words(calls: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(f"{name} ({counted(number, 'call')})" for name, number in sorted(calls.items()))


def refuse_randomness(model: nn.Module, *, training: bool = True) -> None:
    """Raise ModelError where training this prepared model, or evaluating it, would draw numbers by the layout."""
    rules = call_rules(model)
    always = rules.draws_in_evaluation
    if draws := ", ".join(rules.random_draws if training else always):
        config = getattr(model, "config", None)
        when, rest = (" and in evaluation", "") if always else ("", ", and evaluation draws nothing")
        remedy = _remedy(config, draws, always=bool(always))
        raise ModelError(
            f"{rules.architecture} draws at random outside attention in training{when}: {draws}. Each rank would draw "
            f"for its own rows, so that the loss would depend on the layout; {remedy}. Attention "
            f"dropout may stay{rest}"
        )


def refuse_dropout_in_two_passes(model: nn.Module, what: str) -> None:
    """Raise ModelError where training this prepared model drops attention weights, or inputs of its adapter.

    `what` takes two forward passes that are equal.
    """
    config, adapter = getattr(model, "config", None), adapter_of(model)
    values = {} if config is None else config.get_text_config().to_dict()
    if adapter is not None:
        values["lora_dropout"] = adapter.dropout
    if keys := [f"{key} ({value:g})" for key, value in values.items() if _drops(key) and _positive(value)]:
        raise ModelError(
            f"{what}: their loss takes two forward passes, which dropout would make differ; set {', '.join(keys)} to "
            "0.0 in the configuration before the model is built, or plan so that one micro-batch in lockstep holds "
            "all documents of a set"
        )


class _CallNames(TorchFunctionMode):
    """Knows the function of torch that is running, by the name under which the model called it."""

    def __init__(self) -> None:
        super().__init__()
        self.running = ""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        arguments, name = kwargs or {}, getattr(func, "__name__", "")
        if "dropout" in name and "attention" not in name:
            name = f"{name} of {arguments.get('p', args[1] if len(args) > 1 else 0.5):g}"
        self.running = name
        try:
            return func(*args, **arguments)
        finally:
            self.running = ""


class _Draws(TorchDispatchMode):
    """Counts operators that read a generator's seed and give more than a bare number, while it is active.

    A number without dimensions decides whether a layer is left out: `layerdrop` judges that, as models draw it whatever
    the rate is.
    """

    def __init__(self, names: _CallNames, calls: Counter[str]) -> None:
        super().__init__()
        self._names, self._calls = names, calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs or {}):
            tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            if any(tensor.ndim for tensor in tensors):
                self._calls[self._names.running or func.overloadpacket.__name__] += 1
        return out


def _draws(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator that may draw does so: not at a rate of dropout of 0, nor where it is not training."""
    parameters = operator._schema.arguments
    values = {parameter.name: parameter.default_value for parameter in parameters}
    values |= dict(zip(values, args, strict=False)) | dict(kwargs)
    off = [*(values.get(name, 1.0) for name in _RATES), *(values.get(name, True) for name in _MODES)]
    return not any(isinstance(value, int | float) and value == 0 for value in off)


def _module_draws(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        drops = isinstance(module, nn.modules.dropout._DropoutNd) and module.p and ".lora_dropout." not in name
        if drops and "att" not in name.rpartition(".")[2]:
            yield f"dropout of {module.p:g}"


def _remedy(config: Any, draws: str, *, always: bool) -> str:
    samples = any(f"{function} " in draws for function in _SAMPLE)
    if samples or not (keys := _keys(config)):
        alone = "" if always else ": it can be evaluated alone"
        return f"it does so by its code, and no key of its configuration is known to end that{alone}"
    return f"before the model is built, set {keys} to 0.0 in its configuration (config.json)"


def _keys(config: Any) -> str:
    """The keys of a configuration that say how much is dropped, or made noisy, outside attention, with their values."""
    values = {} if config is None else config.get_text_config().to_dict()
    words = ("drop", "jitter", "noise")
    keys = [key for key in values if any(w in key for w in words) and not any(w in key for w in _NOT_HERE)]
    keys += [key for key in values if "layerdrop" in key and key not in keys]
    return ", ".join(f"{key} ({values[key]:g})" for key in keys if _positive(values[key]))


def _drops(key: str) -> bool:
    return key == "lora_dropout" or ("att" in key and "drop" in key)


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
