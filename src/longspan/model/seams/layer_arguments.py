"""What a decoder layer was called with, for attention inside it that does not get the layer's keyword arguments.

Nemotron's and StableLM's layers call attention with arguments of their own, and Mamba 2's language model its layers.
Hooks on the model and on every decoder layer note the shard, the kernel and what follows routers for as long as they
run. Where transformers' checkpoints recompute a forward, in backward and perhaps in another thread, hooks do not run
again: whatever function `prepare` or a script has set as a module's checkpoint notes the same there.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from longspan.comm import SequenceShard
from longspan.errors import ModelError
from longspan.model.layers import decoder_layers
from longspan.model.mtp.depths import find_copied_layer, mtp_blocks


def find_shard(name: str, shard: object, call: str = "model(..., shard=shard)") -> SequenceShard:
    """Find the shard that a model or layer of this name was called with. Raises ModelError for something else."""
    if isinstance(shard, SequenceShard):
        return shard
    got = "no shard" if shard is None else f"shard={type(shard).__name__}"
    hint = _trainer_hint() if shard is None else ""
    raise ModelError(f"{name} got {got}; call {call} with shard = bind(micro_batch, world){hint}")


def _trainer_hint() -> str:
    frame = sys._getframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module == "transformers.trainer" or module.partition(".")[0] == "trl":
            return (
                "; a Trainer cannot make one, so give the model before prepare to longspan.hf.with_longspan(Trainer), "
                "with Trainer or any trainer of TRL"
            )
        frame = frame.f_back
    return ""


def check_shard(name: str, shard: object, batch: int, rows: int) -> SequenceShard:
    """Return the shard that a layer of this name was called with, if it is one packed row of all the layer's rows."""
    shard = find_shard(name, shard)
    if batch != 1 or rows != shard.local_rows:
        raise ModelError(f"{name} got {batch} x {rows} rows; the shard is one packed row of {shard.local_rows}")
    return shard


def number_layers(model: PreTrainedModel) -> None:
    """Give every module whose `layer_idx` is -1 the index of its decoder layer, if it is in only one.

    transformers makes modules with -1 that several layers may share (Zamba 2); one that they do share keeps it. Calls
    of attention are told apart by the index. A module in a depth of multi-token prediction gets the index of the layer
    that the depth copies.
    """
    modules_with_layers: dict[int, tuple[Any, set[int]]] = {}
    depths = [(find_copied_layer(model).index, block) for block in mtp_blocks(model).values()]
    for index, layer in (*enumerate(decoder_layers(model).values()), *depths):
        for module in layer.modules():
            if getattr(module, "layer_idx", None) == -1:
                modules_with_layers.setdefault(id(module), (module, set()))[1].add(index)
    for module, indices in modules_with_layers.values():
        if len(indices) == 1:
            module.layer_idx = indices.pop()


class _Running(NamedTuple):
    """What the running layer was called with, and, in `outer`, what was noted around it.

    `layer` is None in recomputation, where a forward runs without its module.
    """

    layer: nn.Module | None
    shard: Any
    attention_kernel: str | None
    router: Any
    outer: "_Running | None"


_running: ContextVar[_Running | None] = ContextVar("longspan_running_layer", default=None)


def find_layer_shard() -> Any:
    """Find the shard of the decoder layer that is running; None outside of one."""
    layer = _running.get()
    return None if layer is None else layer.shard


def find_layer_kernel() -> str | None:
    """Find the name of the attention kernel that the decoder layer that is running was called with."""
    layer = _running.get()
    return None if layer is None else layer.attention_kernel


def find_layer_router() -> Any:
    """Find the router statistics of the pass that is running; None if there are none."""
    layer = _running.get()
    return None if layer is None else layer.router


def keep_layer_arguments(model: PreTrainedModel) -> None:
    """Let attention in decoder layers look up what its layer, or the model, was called with, from here on."""
    for layer in (model, *decoder_layers(model).values(), *mtp_blocks(model).values()):
        layer.register_forward_pre_hook(_note_arguments, with_kwargs=True)
        layer.register_forward_hook(_forget_arguments, always_call=True)
    for module in model.modules():
        if isinstance(module, PreTrainedModel) or hasattr(module, "gradient_checkpointing"):
            module.register_forward_pre_hook(_note_in_recomputation)


def _note_in_recomputation(module: nn.Module, _: Any) -> None:
    """Wrap checkpointing functions, whoever set them and when, so that recomputation notes arguments too.

    Those of a module, and of the layers of a model: in transformers 5.17 a layer's hooks ran inside its checkpoint.
    """
    for part in module.modules() if isinstance(module, PreTrainedModel) else (module,):
        run: Any = vars(part).get("_gradient_checkpointing_func")
        function = getattr(run, "func", run)
        if function is checkpoint:  # a re-entrant one gives no gradients to tensors among keyword arguments (Gemma 3n)
            run = partial(run, use_reentrant=False)
        if run is not None and function is not _checkpoint_with_note:
            vars(part)["_gradient_checkpointing_func"] = partial(_checkpoint_with_note, run)


def _checkpoint_with_note(function: Callable[..., Any], run: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return function(run_within_layer(run), *args, **options)


def run_within_layer(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a layer's forward, bound to its keyword arguments by `functools.partial`, to note them at every call.

    A callable that is not bound to a shard notes the arguments of the layer around it, and outside of every layer is
    returned unwrapped.
    """
    keywords: Mapping[str, Any] = getattr(run, "keywords", {})
    if "shard" not in keywords and (running := _running.get()) is not None:
        keywords = {"shard": running.shard, "attention_kernel": running.attention_kernel, "router": running.router}
    return _wrap_with_note(run, keywords) if keywords.get("shard") is not None else run


def _wrap_with_note(run: Callable[..., Any], keywords: Mapping[str, Any]) -> Callable[..., Any]:
    def run_and_note(*args: Any) -> Any:
        with _note_keywords(keywords):
            return run(*args)

    return run_and_note


@contextmanager
def _note_keywords(keywords: Mapping[str, Any]) -> Iterator[None]:
    kernel, router = keywords.get("attention_kernel"), keywords.get("router")
    token = _running.set(_Running(None, keywords["shard"], kernel, router, None))
    try:
        yield
    finally:  # torch ends a recomputation by an exception once it has the tensors that it needs
        _running.reset(token)


def _note_arguments(layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    outer = _running.get()
    shard, kernel, router = (kwargs.get(name) for name in ("shard", "attention_kernel", "router"))
    if shard is None and outer is not None:  # the model does not hand keyword arguments on to its layers
        shard, kernel, router = outer.shard, outer.attention_kernel, outer.router
    _running.set(_Running(layer, shard, kernel, router, outer))


def _forget_arguments(layer: nn.Module, *_: Any) -> None:
    """Forget what a layer was called with: a forward hook, which also runs after an error.

    If the error came before the layer's arguments were noted, there is nothing of it to forget.
    """
    running = _running.get()
    if running is not None and running.layer is layer:
        _running.set(running.outer)
