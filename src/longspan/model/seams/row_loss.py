"""From hidden states to the loss without the logits of all rows at once, inside the model's own forward.

`model(…, row_loss=fn)` returns `fn(hidden, head)`: `hidden` (T, D), and `head` makes the logits (t, V) of any rows. The
call goes through the root module, so that FSDP2's hooks run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.errors import ModelError, plural
from longspan.model.fsdp_params import LossGather
from longspan.model.kinds import find_mixers, score_columns
from longspan.model.layers import architecture_name, base_model, mtp_depths
from longspan.model.seams.doctor_hint import doctor_hint
from longspan.model.seams.meta_pass import run_on_meta
from longspan.model.seams.trial_shards import Probe

RowLoss = Callable[..., Tensor]  # (hidden, head, *deeper)
Forward = Callable[..., Any]  # a class's: of the model, and the arguments of its call
ModelCall = tuple[Any, Sequence[Any], Mapping[str, Any]]  # a model, and what it was called with
# What a forward may give its base model of its own accord: there is no cache, and attention is causal by itself.
_HARMLESS = ("return_dict", "use_cache", "is_causal")
_IMAGE_ARGUMENTS = "vision_"  # arguments that begin so are about reading images, and there are none here
# A base model may make these itself; for the rows of one document they are the same.
_MADE_AGAIN = ("position_ids",)
# So many hidden states show what a forward does.
_ROWS = 2


class OutputHead:
    """What a model does to its last hidden states: (t, D) to logits (t, V), biases, soft caps and scales included.

    It runs the model's own forward with the hidden states in place of its base model's.
    """

    def __init__(self, model: PreTrainedModel, forward: Forward) -> None:
        """Take a causal model and its class's own forward, a function of the model and the arguments of its call.

        Some forwards count the rows of `inputs_embeds`, and get the hidden states as these.
        """
        self._model = model
        self._embedding: Any = model.get_output_embeddings()
        self._forward = forward
        self._gather = LossGather(self._embedding)
        # Some forwards count the rows of what they are given: Gemma 4 does.
        self._takes_rows = "inputs_embeds" in signature(forward).parameters

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """Return what logits depend on besides hidden states; under FSDP2 the gathered ones, until `release`."""
        self._gather.begin()
        return tuple(p for p in self._embedding.parameters() if p.requires_grad)

    @property
    def vocabulary(self) -> int:
        """Return how many columns the logits have that are formed here."""
        return self._embedding.weight.shape[0]

    @property
    def makes_scores(self) -> bool:
        """Return whether the head scores documents, and has no vocabulary."""
        return score_columns(self._model) > 0

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return logits (t, V) of hidden states (t, D); differentiable until `release`. The first call may gather."""
        self._gather.begin()
        x = hidden.unsqueeze(0)
        rows = {"inputs_embeds": x} if self._takes_rows else {}
        return self._forward(_ModelAfterBase(self._model, x), use_cache=False, **rows).logits.squeeze(0)

    def release(self) -> None:
        """Free what FSDP2 has gathered for this head: its loss is made, and with it the gradients."""
        self._gather.end()


def add_row_loss(model: PreTrainedModel, *, tried: bool = False) -> None:
    """Let the model's forward take `row_loss=`; a call without it runs as before.

    With `future_ids=` (depths, T) depths of multi-token prediction run too, and the function gets the states (T, D) of
    each. ModelError for parameters beside base model, output embedding and depths. A trial on the meta device raises
    ModelError too, where logits depend on more than hidden states and output embedding, or the forward does more around
    its base model; stages of a model that was `tried` have none.
    """
    modules = base_model(model), find_output_embedding(model), *mtp_depths(model)
    placed = {id(p) for module in modules for p in module.parameters()}
    if others := [n for n, p in model.named_parameters() if id(p) not in placed]:
        raise ModelError(
            f"{type(model).__name__} has parameters beside its base model and its output embedding "
            f"({', '.join(others[:4])}); its loss cannot be taken from the last hidden states{doctor_hint(model)}"
        )
    forward = type(model).forward

    @wraps(forward)
    def forward_with_loss(
        *args: Any, row_loss: RowLoss | None = None, future_ids: Tensor | None = None, **kwargs: Any
    ) -> Any:
        """Run the class's forward, or, for a `row_loss`, its base model, whose states the loss gets."""
        if row_loss is None:
            return forward(model, *args, **kwargs)
        # Depths of multi-token prediction are called with what the last layer, which they copy, was called with.
        inputs_of_layer = nullcontext()
        if future_ids is not None:
            from longspan.model.mtp.depths import record_layer_inputs

            inputs_of_layer = record_layer_inputs(model)
        with inputs_of_layer as inputs:
            hidden = base_model(model)(*args, **kwargs).last_hidden_state  # (1, T, D)
        # The states are on the meta device in the trial below.
        if hidden.is_meta:
            _refuse_other_forward(model, forward, hidden, args, kwargs)
        deeper: tuple[Tensor, ...] = ()
        if future_ids is not None and inputs is not None:  # the second test is for the type checker
            deeper = inputs.compute_mtp_states(hidden, future_ids, kwargs.get("shard"))
        head = OutputHead(model, forward)
        try:
            return row_loss(hidden.squeeze(0), head, *deeper)
        finally:
            head.release()

    model.forward = forward_with_loss
    if not tried:
        _try_row_loss(model)


def find_output_embedding(model: PreTrainedModel) -> Any:
    """Find the output embedding over a base model; ModelError without one."""
    head = model.get_output_embeddings()
    if head is None or base_model(model) is model:
        raise ModelError(
            f"{type(model).__name__} has no output embedding over a base model; use a causal language model"
        )
    return head


def _try_row_loss(model: PreTrainedModel) -> None:
    """In a pass on the meta device two rows must come out as two rows of logits, which depend on the hidden states;
    depths of multi-token prediction must call longspan's attention. `_refuse_other_forward` is part of that pass."""

    def compute_logits(hidden: Tensor, head: OutputHead, *deeper: Tensor) -> Tensor:
        """Return logits of the deepest states, which are cut off from the layers: their gradient comes from these
        alone.
        """
        with torch.enable_grad():
            return head((deeper or (hidden,))[-1].detach().requires_grad_())

    depths = mtp_depths(model)
    probe = Probe()
    ids = torch.zeros(len(depths), 2, dtype=torch.long, device="meta")
    mtp_inputs: dict[str, Any] = {"future_ids": ids} if depths else {}
    try:
        output = run_on_meta(model, probe, gradients=True, row_loss=compute_logits, **mtp_inputs)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__}: its forward cannot be cut after its base model ({type(error).__name__}: {error})"
            f"{doctor_hint(model)}"
        ) from error
    if depths:
        from longspan.model.mtp.depths import refuse_bypassing_mtp

        refuse_bypassing_mtp(model, [*(call.module for call in probe.calls), *find_mixers(model).values()])
    shape = (2, find_output_embedding(model).weight.shape[0])
    if tuple(output.shape) != shape or not output.requires_grad:
        raise ModelError(
            f"{type(model).__name__}: two rows of hidden states gave logits of shape {tuple(output.shape)}, not {shape}"
        )


# ---- a causal model's own forward behind its base model


@dataclass(eq=False)
class _ModelAfterBase:
    """A model as a forward sees it, whose base model answers with hidden states (1, t, D); `_calls` notes its calls."""

    _model: PreTrainedModel
    _hidden: Tensor
    _calls: list[ModelCall] = field(default_factory=list[ModelCall])

    @property
    def __class__(self) -> Any:  # pyright: ignore  # so that a forward may call its parent's: super()
        return type(self._model)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name)
        if isinstance(value, PreTrainedModel):
            return _BaseStandIn(value, self._hidden, self._calls)
        return value


class _BaseStandIn(_ModelAfterBase):
    """A base model, or one inside it that a forward calls, as OPT's its base model's decoder."""

    def __call__(self, *args: Any, **kwargs: Any) -> "_BaseOutput":
        """Note a call of the base model, and answer with the given hidden states."""
        self._calls.append((self._model, args, kwargs))
        return _BaseOutput(self._hidden)


@dataclass(eq=False)
class _BaseOutput:
    """What a stand-in of a base model returns: any field but `last_hidden_state` is None.

    Special methods are missing, not None, for Python would call them.
    """

    last_hidden_state: Tensor

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


def _refuse_other_forward(
    model: PreTrainedModel, forward: Forward, hidden: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """`hidden` (1, T, D) is what the base model made of these arguments. The forward runs again with some rows of it
    in place of the base model's output. It must call the base model once, with its own arguments, read no values
    of these itself, and make logits of the hidden states and the output embedding alone."""
    calls = list[ModelCall]()
    reads = dict[str, str]()
    # The parameters begin after `self`.
    inputs = dict(zip([*signature(forward).parameters][1:], args, strict=False)) | dict(kwargs)
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            inputs[name] = watched = value.detach().as_subclass(_WatchedInput)
            watched.input_name = name
            watched.reads = reads
    rows = hidden[:, :_ROWS].detach().requires_grad_()
    leaves = set[int]()
    failed = None
    try:
        with torch.enable_grad():
            logits = forward(_ModelAfterBase(model, rows, calls), **inputs).logits
        leaves = _leaves_of_graph(logits)
    except Exception as error:
        # What the forward does by itself is the clearer reason, if there is any.
        failed = error
    leaves -= {id(rows), *map(id, find_output_embedding(model).parameters())}
    names = [name for name, parameter in model.named_parameters() if id(parameter) in leaves]
    reasons = [f"reads {n} itself ({by}), which it may only hand on to its base model" for n, by in reads.items()]
    reasons += _reasons_against_base_call(calls, inputs)
    if names:
        reasons.append(f"makes its logits of {', '.join(names[:4])} too")
    if failed is not None and not reasons:
        reasons = [f"cannot be cut after its base model ({type(failed).__name__}: {failed})"]
    if reasons:
        name = architecture_name(model)
        base = architecture_name(base_model(model))
        raise ModelError(
            f"{name}: its forward {'; it '.join(reasons)}. A step runs its base model ({base}) and its "
            f"output embedding by themselves and would leave that out; do it in the forward of a subclass of {base}, "
            f"or in a hook on one of its modules{doctor_hint(model)}"
        )


def _leaves_of_graph(x: Tensor) -> set[int]:
    leaves = set[int]()
    nodes = [x.grad_fn]
    visited = set[Any]()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        nodes += [below for below, _ in node.next_functions]
    return leaves


def _reasons_against_base_call(calls: Sequence[ModelCall], inputs: Mapping[str, Any]) -> Iterator[str]:
    if len(calls) != 1:
        yield f"calls its base model {plural(len(calls), 'time')}, not once"
    # Of several calls the first is compared.
    for base, args, kwargs in calls[:1]:
        defaults = {name: parameter.default for name, parameter in signature(base.forward).parameters.items()}
        base_arguments = dict(zip(defaults, args, strict=False)) | dict(kwargs)
        expected = {name: inputs.get(name, defaults.get(name)) for name in base_arguments}
        other = list[str]()
        for name, value in base_arguments.items():
            if value is expected[name] or name in _HARMLESS or name.startswith(_IMAGE_ARGUMENTS):
                continue
            # Tensors must be the same object. Positions that are left out are no difference, as the base model makes
            # them; None, False and 0 count as equal.
            if isinstance(value, Tensor) or isinstance(expected[name], Tensor):
                differs = value is not None or name not in _MADE_AGAIN
            else:
                differs = bool(value or expected[name]) and bool(value != expected[name])
            if differs:
                other.append(name)
        if other:
            yield f"gives its base model {', '.join(other)} of its own making"
        row_inputs = [name for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None]
        if lost := [name for name in row_inputs if base_arguments.get(name) is None]:
            yield f"keeps {', '.join(lost)} from its base model"


class _WatchedInput(Tensor):
    """An input of a forward that notes in `reads`, which inputs share, by what function it is read.

    Its shape, type and device are no values.
    """

    input_name: str
    reads: dict[str, str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function on plain tensors, and note the first one that reads a watched input's values.

        The result is not watched, as what is made of the values was noted with the first reading.
        """
        if func not in _WITHOUT_VALUES:
            for value in (*args, *(kwargs or {}).values()):
                if isinstance(value, _WatchedInput):
                    value.reads.setdefault(value.input_name, getattr(func, "__name__", str(func)))
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        return out.as_subclass(Tensor) if isinstance(out, _WatchedInput) else out


_SHAPE_ATTRIBUTES: tuple[Any, ...] = (Tensor.shape, Tensor.device, Tensor.dtype, Tensor.ndim, Tensor.requires_grad)
_WITHOUT_VALUES = {*(attribute.__get__ for attribute in _SHAPE_ATTRIBUTES), Tensor.size, Tensor.dim, Tensor.numel}
