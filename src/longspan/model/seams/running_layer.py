"""What the running decoder layer was called with, for attention, experts and rotary modules that do not get it.

Hooks note it before a layer runs; checkpointing functions are wrapped, so that a recomputation sees it too.
"""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from longspan.model.layers import (
    decoder_model,
    layers_and_mtp_blocks,
)


class RunningLayer(NamedTuple):
    """The running layer and what it was called with; `outer` is the same of the layer or model around it.

    `layer` is None in recomputation, where a forward runs without its module's hooks.
    """

    layer: nn.Module | None = None
    shard: Any = None
    attention_kernel: str | None = None
    router: Any = None
    outer: "RunningLayer | None" = None


_OUTSIDE = RunningLayer()
_running: ContextVar[RunningLayer] = ContextVar("longspan_running_layer", default=_OUTSIDE)


def running_layer() -> RunningLayer:
    """Return what the decoder layer that is running was called with; empty fields outside of one."""
    return _running.get()


def hook_layer_arguments(model: PreTrainedModel) -> None:
    """Let attention in decoder layers look up what its layer, or a model around it, was called with, from here on."""
    # The decoder model too: a pipeline stage calls it without the model around it.
    for layer in dict.fromkeys((model, decoder_model(model), *layers_and_mtp_blocks(model).values())):
        layer.register_forward_pre_hook(_enter_layer, with_kwargs=True)
        layer.register_forward_hook(_leave_layer, always_call=True)
    for module in model.modules():
        if isinstance(module, PreTrainedModel) or hasattr(module, "gradient_checkpointing"):
            module.register_forward_pre_hook(_wrap_checkpointing_functions)


def _wrap_checkpointing_functions(module: nn.Module, _: Any) -> None:
    """A recomputation may run without the layer's hooks; its function sets the running layer again. It may be set at
    any time before a call. In transformers 5.17 a layer's own hooks run inside its checkpoint, too late for this."""
    for part in module.modules() if isinstance(module, PreTrainedModel) else (module,):
        checkpoint_layer: Any = vars(part).get("_gradient_checkpointing_func")
        function = getattr(checkpoint_layer, "func", checkpoint_layer)  # inside a `partial` of its options
        # a re-entrant one gives no gradients to tensors among keyword arguments (Gemma 3n)
        if function is checkpoint:
            checkpoint_layer = partial(checkpoint_layer, use_reentrant=False)
        if checkpoint_layer is not None and function is not _checkpoint_inside_layer:
            vars(part)["_gradient_checkpointing_func"] = partial(_checkpoint_inside_layer, checkpoint_layer)


def _checkpoint_inside_layer(
    checkpoint_layer: Callable[..., Any], run: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    return checkpoint_layer(forward_with_running_layer(run), *args, **options)


def forward_with_running_layer(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a layer's forward that sets the running layer at every call, as a recomputation needs it.

    `run` is a `partial` with the layer's keyword arguments. Where these have no shard, what runs now is set; where
    nothing with a shard runs, `run` is returned as it is.
    """
    arguments = _layer_from_keywords(getattr(run, "keywords", {}))
    if arguments.shard is None:
        return run

    def run_inside_layer(*args: Any) -> Any:
        """Run the forward inside its layer, also where torch ends a recomputation by an exception."""
        token = _running.set(arguments)
        try:
            return run(*args)
        finally:  # torch ends a recomputation by an exception once it has the tensors that it needs
            _running.reset(token)

    return run_inside_layer


def _layer_from_keywords(keywords: Mapping[str, Any]) -> RunningLayer:
    """Without a shard among the keywords, the layer that runs now."""
    if keywords.get("shard") is None:  # the model does not hand keyword arguments on to its layers
        return _running.get()._replace(layer=None, outer=None)
    return RunningLayer(None, keywords["shard"], keywords.get("attention_kernel"), keywords.get("router"))


def _enter_layer(layer: nn.Module, args: Any, kwargs: Any) -> None:
    _running.set(_layer_from_keywords(kwargs)._replace(layer=layer, outer=_running.get()))


def _leave_layer(layer: nn.Module, *_: Any) -> None:
    """Called after an error too, which may have come before this layer was set: then nothing changes."""
    running = _running.get()
    if running.layer is layer and running.outer is not None:
        _running.set(running.outer)
