"""A causal model's own forward behind its base model: hidden states go in where the base model would give them.

That forward makes the logits of rows (`row_loss.py`), while the base model is called by itself. What a forward does
before its base model would be left out, and so would gradients of what it takes for its logits other than the output
embedding: it is run once with stand-ins that show either, and refused.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from longspan.errors import ModelError, plural
from longspan.model.layers import architecture_name, base_model
from longspan.model.seams.refusals import doctor_hint

Forward = Callable[..., Any]  # a class's: of the model, and the arguments of its call
ModelCall = tuple[Any, Sequence[Any], Mapping[str, Any]]  # a model, and what it was called with
# What a forward may give its base model of its own accord: there is no cache, and attention is causal by itself.
_HARMLESS = ("return_dict", "use_cache", "is_causal")
_IMAGE_ARGUMENTS = "vision_"  # arguments that begin so are about reading images, and there are none here
_MADE_AGAIN = ("position_ids",)  # what a base model may make itself, for the rows of one document the same
_ROWS = 2  # of hidden states that show what a forward does


class ModelAfterBase:
    """A model as its own forward sees it, whose base model answers with given hidden states (1, t, D).

    `calls` notes what the forward calls its base model with.
    """

    def __init__(self, model: PreTrainedModel, hidden: Tensor, calls: list[ModelCall] | None = None) -> None:
        self._model, self._hidden, self._calls = model, hidden, calls if calls is not None else []

    @property
    def __class__(self) -> Any:  # pyright: ignore  # so that a forward may call its parent's: super()
        return type(self._model)

    def __getattr__(self, name: str) -> Any:
        return _put_stand_in(getattr(self._model, name), self._hidden, self._calls)


class _BaseStandIn:
    """A base model, or a model inside it that another forward calls, which answers with given hidden states."""

    def __init__(self, base: PreTrainedModel, hidden: Tensor, calls: list[ModelCall]) -> None:
        self._base, self._hidden, self._calls = base, hidden, calls

    def __call__(self, *args: Any, **kwargs: Any) -> "_BaseOutput":
        self._calls.append((self._base, args, kwargs))
        return _BaseOutput(self._hidden)

    def __getattr__(self, name: str) -> Any:
        return _put_stand_in(getattr(self._base, name), self._hidden, self._calls)


def _put_stand_in(value: Any, hidden: Tensor, calls: list[ModelCall]) -> Any:
    """Return an attribute, or a stand-in for it if it is a model: OPT's forward calls its base model's decoder."""
    return _BaseStandIn(value, hidden, calls) if isinstance(value, PreTrainedModel) else value


class _BaseOutput:
    """A base model's output with only its hidden states, by name or as item 0; any other attribute is None.

    Special methods are missing, not None, for Python would call them.
    """

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


def refuse_other_forward(
    model: PreTrainedModel, forward: Forward, hidden: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raise ModelError for a forward that does more than call its base model and apply the output embedding to rows.

    `hidden` (1, T, D) is what the base model made of these arguments. The forward runs again on some of these rows,
    with a stand-in that notes calls of the base model: there must be one call, with the arguments of the forward.
    """
    calls, reads = list[ModelCall](), dict[str, str]()
    inputs = dict(zip([*signature(forward).parameters][1:], args, strict=False)) | dict(kwargs)  # without `self`
    inputs = {n: _Watched.of(x, n, reads) if isinstance(x, Tensor) else x for n, x in inputs.items()}
    rows = hidden[:, :_ROWS].detach().requires_grad_()
    try:
        with torch.enable_grad():
            logits = forward(ModelAfterBase(model, rows, calls), **inputs).logits
    except Exception as error:  # what the forward does by itself is the clearer reason, if there is any
        reasons = [*_read_texts(reads), *_call_reasons(calls, inputs)]
        reasons = reasons or [f"cannot be cut after its base model ({type(error).__name__}: {error})"]
    else:
        reasons = [*_read_texts(reads), *_call_reasons(calls, inputs), *_parameter_reasons(model, logits, rows)]
    if reasons:
        name, base = architecture_name(model), architecture_name(base_model(model))
        raise ModelError(
            f"{name}: its forward {'; it '.join(reasons)}. A step runs its base model ({base}) and its "
            f"output embedding by themselves and would leave that out; do it in the forward of a subclass of {base}, "
            f"or in a hook on one of its modules{doctor_hint(model)}"
        )


def _read_texts(reads: Mapping[str, str]) -> Iterator[str]:
    """Yield in words which inputs a forward read the values of, and by which function."""
    for name, function in reads.items():
        yield f"reads {name} itself ({function}), which it may only hand on to its base model"


def _call_reasons(calls: Sequence[ModelCall], inputs: Mapping[str, Any]) -> Iterator[str]:
    """Yield how a forward calls its base model otherwise than once, with the inputs that it got.

    Of several calls the arguments of the first are looked at.
    """
    if len(calls) != 1:
        yield f"calls its base model {plural(len(calls), 'time')}, not once"
    for base, args, kwargs in calls[:1]:
        defaults = {name: parameter.default for name, parameter in signature(base.forward).parameters.items()}
        base_arguments = dict(zip(defaults, args, strict=False)) | dict(kwargs)
        expected = {name: inputs.get(name, defaults.get(name)) for name in base_arguments}
        if other := [name for name, value in base_arguments.items() if _differs_from_step(name, value, expected[name])]:
            yield f"gives its base model {', '.join(other)} of its own making"
        row_inputs = [name for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None]
        if lost := [name for name in row_inputs if base_arguments.get(name) is None]:
            yield f"keeps {', '.join(lost)} from its base model"


def _differs_from_step(name: str, value: Any, expected: Any) -> bool:
    """Return whether a forward gives its base model another argument than a step would, which calls it directly.

    Tensors must be the same object. Positions that are left out are no difference, as the base model makes them; None,
    False and 0 count as equal. Arguments in `_HARMLESS` change nothing in a step, and those of images are not used.
    """
    if value is expected or name in _HARMLESS or name.startswith(_IMAGE_ARGUMENTS):
        return False
    if isinstance(value, Tensor) or isinstance(expected, Tensor):
        return value is not None or name not in _MADE_AGAIN
    return bool(value or expected) and bool(value != expected)


def _parameter_reasons(model: PreTrainedModel, logits: Tensor, rows: Tensor) -> Iterator[str]:
    """Yield a reason if logits are made of more parameters than hidden states and the output embedding."""
    embedding: Any = model.get_output_embeddings()
    others = {id(leaf) for leaf in _find_leaves(logits)} - {id(rows), *map(id, embedding.parameters())}
    names = [name for name, parameter in model.named_parameters() if id(parameter) in others]
    if names:
        yield f"makes its logits of {', '.join(names[:4])} too"


def _find_leaves(result: Tensor) -> list[Tensor]:
    """Find the tensors that a result was made of and that get its gradients."""
    leaves, nodes, seen = list[Tensor](), [result.grad_fn], set[Any]()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaves += [node.variable] if hasattr(node, "variable") else []
        nodes += [below for below, _ in node.next_functions]
    return leaves


class _Watched(Tensor):
    """An input of a forward that notes by what function it is read; its shape, type and device are no values."""

    _name: str
    _reads: dict[str, str]

    @classmethod
    def of(cls, value: Tensor, name: str, reads: dict[str, str]) -> "_Watched":
        """Watch a tensor, which from now on notes how it is read."""
        watched = value.detach().as_subclass(cls)
        watched._name, watched._reads = name, reads
        return watched

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch, and note which watched tensor it reads the values of.

        Its result is not watched, as what is made of the values was noted with the first reading.
        """
        if func not in _WITHOUT_VALUES:
            for value in (*args, *(kwargs or {}).values()):
                if isinstance(value, _Watched):
                    value._reads.setdefault(value._name, getattr(func, "__name__", str(func)))
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        return out.as_subclass(Tensor) if isinstance(out, _Watched) else out


_OF_SHAPE: tuple[Any, ...] = (Tensor.shape, Tensor.device, Tensor.dtype, Tensor.ndim, Tensor.requires_grad)
_WITHOUT_VALUES = {*(attribute.__get__ for attribute in _OF_SHAPE), Tensor.size, Tensor.dim, Tensor.numel}
