"""The arguments of a trainer's constructor by name, also where a subclass passes them on as `*args, **kwargs`."""

import inspect
from contextlib import suppress
from typing import Any

from transformers import TrainingArguments

from longspan.errors import ConfigError

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class GivenArguments:
    """What a trainer of the class `kind` is made with; `init` is the constructor to call, without `self`.

    `values` are the arguments by name. Those that `init` takes as *args or **kwargs have the names that the stock
    constructor gives them: that of the first base which has a parameter `args`, the TrainingArguments.
    `parameter_names` are those of both constructors. Raises TypeError for arguments that `init` does not take.
    """

    def __init__(self, kind: type[Any], init: Any, args: Any, keywords: Any) -> None:
        """Bind the arguments to the names of `init`, and its *args and **kwargs to those of the stock constructor."""
        self._bound = inspect.signature(init).bind_partial(*args, **keywords)
        self._names, self._var_positional, self._var_keyword = _parameter_names(self._bound.signature)
        self._stock = next(base for base in kind.__mro__[1:] if "args" in _parameter_names(_signature(base))[0])
        stock = _signature(self._stock)
        self.parameter_names: set[str] = {*self._names, *stock.parameters}
        self.values = {name: value for name, value in self._bound.arguments.items() if name in self._names}
        with suppress(TypeError):  # *args of a class between `kind` and `_stock`: they stand for other parameters
            passed_values = self._argument_value(self._var_positional, ())
            passed_keywords = self._argument_value(self._var_keyword, {})
            stock_call = stock.bind_partial(None, *passed_values, **passed_keywords)  # None: for self
            self.values |= {name: value for name, value in stock_call.arguments.items() if name != "self"}

    @property
    def args(self) -> TrainingArguments:
        """The TrainingArguments, or those that the stock class makes for itself."""
        # Positional arguments have no name in `values` where they stand for other parameters (see the constructor).
        values = (self.values.get("args"), *self._argument_value(self._var_positional, ()))
        return next((v for v in values if isinstance(v, TrainingArguments)), None) or self._default_arguments()

    def call_with(self, arguments: TrainingArguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments of the call, with the caller's TrainingArguments replaced.

        The new ones go to the parameter `args`, else to the caller's place among *args, else to **kwargs. Raises
        ConfigError for a constructor without any of these.
        """
        positional, bound = self._argument_value(self._var_positional, ()), self._bound.arguments
        if "args" in self._names:
            bound["args"] = arguments
        elif any(isinstance(value, TrainingArguments) for value in positional):
            bound[self._var_positional] = tuple(
                arguments if isinstance(value, TrainingArguments) else value for value in positional
            )
        elif self._var_keyword:
            bound[self._var_keyword] = self._argument_value(self._var_keyword, {}) | {"args": arguments}
        else:
            raise ConfigError(
                f"the constructor takes {', '.join(self._names) or 'nothing'}, and longspan must give it args: the "
                "batch of all ranks is in them; let it take args or **kwargs, and pass them on"
            )
        return self._bound.args, self._bound.kwargs

    def _argument_value(self, name: str, default: Any) -> Any:
        """Return what is bound to a parameter of the constructor, or `default` if there is none of this name."""
        return self._bound.arguments.get(name, default)

    def _default_arguments(self) -> TrainingArguments:
        """Return the arguments that the stock trainer makes for itself where none are given.

        TRL's trainers have a class of their own for them (SFTConfig), and name the folder by model and class.
        """
        hints = _signature(self._stock).parameters["args"].annotation
        classes = _argument_classes(hints, self._stock)
        config = next((kind for kind in classes if kind is not TrainingArguments), TrainingArguments)
        if config is TrainingArguments:
            return TrainingArguments(output_dir="tmp_trainer")  # transformers' own default
        model = self.values.get("model")
        name = model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", "")
        return config(f"{str(name).rstrip('/').split('/')[-1]}-{config.__name__.removesuffix('Config')}")


def _signature(kind: type[Any]) -> inspect.Signature:
    return inspect.signature(kind.__init__)


def _parameter_names(signature: inspect.Signature) -> tuple[list[str], str, str]:
    """Return the named parameters, and the names of *args and **kwargs, "" for one that is not there."""
    parameters = signature.parameters.values()
    variadic_names = {parameter.kind: parameter.name for parameter in parameters if parameter.kind in _VARIADIC}
    names = [parameter.name for parameter in parameters if parameter.kind not in _VARIADIC]
    return names, variadic_names.get(_VARIADIC[0], ""), variadic_names.get(_VARIADIC[1], "")


def _argument_classes(annotation: Any, owner: type[Any]) -> list[type[Any]]:
    """Return the argument classes that an annotation names; a string is evaluated in the module of its `owner`."""
    if isinstance(annotation, str):
        annotation = eval(annotation, vars(inspect.getmodule(owner)))
    return [
        argument_class
        for argument_class in getattr(annotation, "__args__", (annotation,))
        if isinstance(argument_class, type) and issubclass(argument_class, TrainingArguments)
    ]
