"""What a model draws at random in training outside of attention, found by one pass on the meta device.

Attention's dropout is exact: its masks are hashed from global positions. Anything else would be drawn by each rank for
the rows that it happens to hold, so that loss and gradients would depend on the layout. Such a model is evaluated as it
is, and refused when it trains.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from longspan.errors import ModelError, counted
from longspan.model.adapters import adapter_of
from longspan.model.parts import modes_restored
from longspan.model.seams.call_rules import call_rules
from longspan.model.seams.meta_pass import run_on_meta
from longspan.model.seams.probe import Probe

# Functions of torch that draw for every element; a scalar, which decides whether a layer is left out, is layerdrop's.
_DRAWS = {"rand_like", "randn_like", "bernoulli", "bernoulli_", "multinomial", "normal", "normal_", "uniform_"}
_DRAWS |= {"exponential_", "gumbel_softmax", "rrelu"}
_SAMPLE = ("exponential_", "multinomial", "gumbel_softmax")  # one of several, as a router may choose experts
_NOT_HERE = ("att", "summary", "classifier", "layerdrop")  # keys of dropout in attention, or in heads of other tasks


def random_draws(model: PreTrainedModel) -> tuple[str, ...]:
    """What a forward pass in training draws at random outside attention, in words; nothing for most models.

    The model's attention implementation must be set already. Where it does not run on the meta device, its dropout
    modules are counted instead.
    """
    draws = _Draws()
    try:
        with modes_restored(model), draws:
            model.train()
            run_on_meta(model, Probe())
        calls = draws.calls
    except Exception:  # whatever its forward raises there: `probe_model` says it where it must run
        calls = Counter(_module_draws(model))
    return tuple(f"{what} ({counted(number, 'call')})" for what, number in sorted(calls.items())) + _layerdrop(model)


def refuse_randomness(model: nn.Module) -> None:
    """Raise ModelError where training this prepared model would draw numbers that depend on the layout."""
    rules = call_rules(model)
    if draws := ", ".join(rules.random_draws):
        config = getattr(model, "config", None)
        raise ModelError(
            f"{rules.architecture} draws at random outside attention in training: {draws}. Each rank would draw for "
            f"its own rows, so that the loss would depend on the layout; {_remedy(config, draws)}. Attention dropout "
            "may stay, and evaluation draws nothing"
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


class _Draws(TorchFunctionMode):
    """Counts calls of torch's functions that draw at random, while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        arguments, name = kwargs or {}, getattr(func, "__name__", "")
        if "dropout" in name:
            rate, training = (*args[1:3], *(True,) * 2)[:2] if len(args) > 1 else (arguments.get("p", 0.5), True)
            rate, training = arguments.get("p", rate), arguments.get("training", arguments.get("train", training))
            self.calls.update([f"{name} of {rate:g}"] if training and rate else [])
        elif name in _DRAWS:
            self.calls.update([name])
        return func(*args, **arguments)


def _module_draws(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        drops = isinstance(module, nn.modules.dropout._DropoutNd) and module.p and ".lora_dropout." not in name
        if drops and "att" not in name.rpartition(".")[2]:
            yield f"dropout of {module.p:g}"


def _layerdrop(model: PreTrainedModel) -> tuple[str, ...]:
    """Layers left out at random: ranks that leave out different ones would wait for each other for ever."""
    keys = model.config.get_text_config().to_dict()
    return tuple(f"{key} {value:g}" for key, value in keys.items() if "layerdrop" in key and _positive(value))


def _remedy(config: Any, draws: str) -> str:
    samples = any(f"{function} " in draws for function in _SAMPLE)
    if samples or not (keys := _keys(config)):
        return "it does so by its code, and no key of its configuration is known to end that: it can be evaluated alone"
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
