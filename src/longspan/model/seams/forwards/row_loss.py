"""From hidden states to the loss without the logits of all rows at once, inside the model's own forward.

`model(input_ids=, position_ids=, shard=, row_loss=fn)` returns `fn(hidden, head)` in place of logits: `hidden` (T, D)
are the last hidden states, and `head`, an OutputHead, makes the logits (t, V) of any of their rows. The call still goes
through the root module, so that FSDP2's hooks run and the head's parameters are gathered inside. What is made of the
rows is in `train/loss.py`; how the vocabulary is split over tensor-parallel ranks is the head module's own.

With `future_ids=` (depths, T) a model with depths of multi-token prediction runs them too, and `fn(hidden, head,
*deeper)` gets the hidden states (T, D) of each.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.errors import ModelError
from longspan.model.exactness.meta_pass import run_on_meta
from longspan.model.layers import base_model
from longspan.model.mtp.depths import deeper_states, find_copied_layer, model_depths, refuse_bypass
from longspan.model.mtp.layer_inputs import layer_inputs
from longspan.model.seams.attention_calls import Probe
from longspan.model.seams.forwards.after_base import Forward, ModelAfterBase, refuse_other_forward
from longspan.model.seams.mixers import find_mixers
from longspan.model.seams.refusals import doctor_hint

RowLoss = Callable[..., Tensor]  # of (hidden, head, *deeper)


class OutputHead:
    """What a model does to its last hidden states: (t, D) to logits (t, V).

    It runs the model's own forward with the hidden states in place of its base model's, so that biases, soft caps and
    scales of any architecture are in it.
    """

    def __init__(self, model: PreTrainedModel, forward: Forward) -> None:
        self._model, self._forward = model, forward
        # Some forwards count the rows of what they are given: Gemma 4 does.
        self._takes_rows = _takes_embeddings(forward)

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """What logits depend on besides hidden states; under FSDP2 the gathered ones, inside the model's forward."""
        return tuple(p for p in _output_embedding(self._model).parameters() if p.requires_grad)

    @property
    def vocabulary(self) -> int:
        """Columns of the logits that are formed here."""
        return _output_embedding(self._model).weight.shape[0]

    def __call__(self, hidden: Tensor) -> Tensor:
        x = hidden.unsqueeze(0)
        rows = {"inputs_embeds": x} if self._takes_rows else {}
        return self._forward(ModelAfterBase(self._model, x), use_cache=False, **rows).logits.squeeze(0)


@cache
def _takes_embeddings(forward: Forward) -> bool:
    return "inputs_embeds" in signature(forward).parameters


def add_row_loss(model: PreTrainedModel, *, probe: bool = True, required: bool = True, tried: bool = False) -> bool:
    """Let the model's forward take `row_loss=`; a call without it runs as before.

    Raises ModelError if logits depend on more than the last hidden states and the output embedding, or the forward does
    more before its base model than hand on its arguments. `probe` tries that on the meta device, where a pass that
    fails is an error only if it is `required`. What was not tried then is tried by the first call with `row_loss=`,
    except for a pipeline stage of a model that was `tried` as a whole. Returns whether a trial has succeeded.
    """
    _check_head(model)
    forward, untried = type(model).forward, not tried

    @wraps(forward)
    def forward_with_loss(
        *args: Any, row_loss: RowLoss | None = None, future_ids: Tensor | None = None, **kwargs: Any
    ) -> Any:
        """Run the model's forward; with a `row_loss`, stop at the last hidden states and return the loss that it makes
        of them.

        The first such call proves that the model's own forward would make its logits of nothing else.
        """
        nonlocal untried
        if row_loss is None:
            return forward(model, *args, **kwargs)
        # Depths of multi-token prediction are called with what the layer that they copy was called with.
        with nullcontext() if future_ids is None else layer_inputs(model, find_copied_layer(model)) as inputs:
            hidden = base_model(model)(*args, **kwargs).last_hidden_state  # (1, T, D)
        if untried:
            refuse_other_forward(model, forward, hidden, args, kwargs)
            untried = False
        deeper: tuple[Tensor, ...] = ()
        if future_ids is not None and inputs is not None:  # the second test is for the type checker
            deeper = deeper_states(model, hidden, future_ids, inputs, kwargs.get("shard"))
        return row_loss(hidden.squeeze(0), OutputHead(model, forward), *deeper)

    model.forward = forward_with_loss
    if probe:  # a pass that succeeds sets `untried` to False
        _try_row_loss(model, required=required)
    return not untried


def _check_head(model: PreTrainedModel) -> None:
    """Raise ModelError if a model has no head over a base model, or parameters beyond these two."""
    name, head = type(model).__name__, model.get_output_embeddings()
    if head is None or base_model(model) is model:
        raise ModelError(f"{name} has no output embedding over a base model; use a causal language model")
    placed = {id(p) for module in (base_model(model), head, *model_depths(model)) for p in module.parameters()}
    if others := [n for n, p in model.named_parameters() if id(p) not in placed]:
        raise ModelError(
            f"{name} has parameters beside its base model and its output embedding ({', '.join(others[:4])}); its loss "
            f"cannot be taken from the last hidden states{doctor_hint(model)}"
        )


def _output_embedding(model: PreTrainedModel) -> Any:
    return model.get_output_embeddings()


def _try_row_loss(model: PreTrainedModel, *, required: bool) -> None:
    """Try on the meta device that two rows come out as two rows of logits, which depend on the hidden states.

    Raises ModelError if they do not, or if a depth of multi-token prediction does not call longspan's attention; a
    forward pass that fails is an error only if it is `required`.
    """

    def note_logits(hidden: Tensor, head: OutputHead, *deeper: Tensor) -> Tensor:
        """Return the logits of the deepest states, cut off from the layers: a gradient can then come from them only."""
        with torch.enable_grad():
            return head((deeper or (hidden,))[-1].detach().requires_grad_())

    depths, probe = model_depths(model), Probe()
    ids = torch.zeros(len(depths), 2, dtype=torch.long, device="meta")
    deeper: dict[str, Any] = {"future_ids": ids} if depths else {}
    try:
        output = run_on_meta(model, probe, gradients=True, row_loss=note_logits, **deeper)
    except ModelError:
        raise
    except Exception as error:
        if not required:
            return
        raise ModelError(
            f"{type(model).__name__}: its forward cannot be cut after its base model ({type(error).__name__}: {error})"
            f"{doctor_hint(model)}"
        ) from error
    refuse_bypass(model, [*(call.module for call in probe.calls), *find_mixers(model).values()])
    shape = (2, _output_embedding(model).weight.shape[0])
    if tuple(output.shape) != shape or not output.requires_grad:
        raise ModelError(
            f"{type(model).__name__}: two rows of hidden states gave logits of shape {tuple(output.shape)}, not {shape}"
        )
