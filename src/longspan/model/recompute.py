"""Which activations of decoder layers are kept for backward, which are recomputed, and which wait on the host.

On a GPU those that wait are copied to pinned memory and back on a CUDA stream of their own. A backward pass goes
through the layers in reverse, so fetching one tensor also fetches those that were offloaded shortly before it. On a CPU
they are copied, so that the same code runs.

"full" keeps a layer's input and recomputes the layer, its communication included. "selective" keeps attention's output
and log-sum-exp as well, so that attention and its communication run once. Built on `torch.utils.checkpoint`, for each
layer, without re-entrance; whatever a layer was called with, its shard included, is bound into the recomputation.
"""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, noop_context_fn
from transformers import PreTrainedModel

from longspan.attention.saved_outputs import Recording
from longspan.errors import ModelError
from longspan.model.layers import decoder_layers, layers_of_stages
from longspan.model.mtp.depths import mtp_blocks
from longspan.model.seams.layer_arguments import within_layer

AHEAD = 4  # tensors: a layer's input and what its attention keeps


class HostOffload:
    """Copies the activations of one model to the host: `offloaded = offload(x)`, and later `x = offloaded()`.

    >>> offload = HostOffload()
    >>> offloaded = offload(torch.ones(3))
    >>> offloaded().tolist()
    [1.0, 1.0, 1.0]

    `begin` starts a new chain, and nothing is fetched ahead across its start. Fetching a tensor also starts to fetch
    the few that were offloaded before it in its chain, unless they have been fetched already.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._last: weakref.ref[OffloadedTensor] | None = None

    def begin(self) -> None:
        """Called by the first layer of a forward pass: what follows is not fetched together with what was before."""
        self._last = None

    def __call__(self, x: Tensor) -> "OffloadedTensor":
        """Copy a tensor to the host; its memory is free once nothing else holds it."""
        offloaded = OffloadedTensor(x, self._copy_stream(x.device), self._last)
        self._last = weakref.ref(offloaded)
        return offloaded

    def _copy_stream(self, device: torch.device) -> torch.cuda.Stream | None:
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


class OffloadedTensor:
    """A tensor in the host's memory; call it to get the tensor back on its device."""

    def __init__(
        self, x: Tensor, stream: torch.cuda.Stream | None, before: "weakref.ref[OffloadedTensor] | None"
    ) -> None:
        self._device, self._copy_stream, self._before = x.device, stream, before
        self._here: tuple[Tensor, torch.cuda.Event] | None = None
        self._taken = False
        x = x.detach()
        self._host = torch.empty_like(x, device="cpu", pin_memory=stream is not None)
        if stream is None:
            self._host.copy_(x)
            return
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._host.copy_(x, non_blocking=True)
        x.record_stream(stream)

    def __call__(self) -> Tensor:
        """The tensor as it was; the tensors that were offloaded before it begin to be fetched too."""
        if self._copy_stream is None:
            return self._host.clone()
        self._taken = True
        self.fetch()
        previous = self._previous()
        for _ in range(AHEAD):
            if previous is not None and not previous._taken:
                previous.fetch()
            previous = None if previous is None else previous._previous()
        assert self._here is not None
        (x, arrived), self._here = self._here, None
        current = torch.cuda.current_stream(self._device)
        current.wait_event(arrived)
        x.record_stream(current)
        return x

    def _previous(self) -> "OffloadedTensor | None":
        return None if self._before is None else self._before()

    def fetch(self) -> None:
        """Start to copy the tensor back, unless that has been started."""
        if self._copy_stream is None or self._here is not None:
            return
        with torch.cuda.stream(self._copy_stream):
            x = torch.empty_like(self._host, device=self._device)
            x.copy_(self._host, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(self._copy_stream)
        self._here = (x, arrived)


def save_on_host(offload: HostOffload) -> torch.autograd.graph.saved_tensors_hooks:
    """Inside, the tensors that autograd saves wait in the host's memory."""
    return torch.autograd.graph.saved_tensors_hooks(offload, lambda offloaded: offloaded())


Recompute = Literal["none", "full", "selective"]


@dataclass(frozen=True, kw_only=True)
class Recomputation:
    """Which decoder layers are recomputed in backward, and where what they start from waits meanwhile.

    `layers` is how many of a stage's layers, the first ones (0: each); with `offload`, what is kept waits on the host.
    """

    kind: Recompute = "none"
    layers: int = 0
    offload: bool = False

    @classmethod
    def of(cls, checkpointing: bool | str, *, layers: int = 0, offload: bool = False) -> "Recomputation":
        """From `activation_checkpointing`: True is "full", False "none". Raises ModelError for another word."""
        kind = ("full" if checkpointing else "none") if isinstance(checkpointing, bool) else checkpointing
        if kind not in get_args(Recompute):
            raise ModelError(f"activation_checkpointing is {kind!r}; use one of {', '.join(get_args(Recompute))}")
        if kind == "none" and layers:
            raise ModelError(f"recompute_layers is {layers}; it needs activation_checkpointing 'full' or 'selective'")
        if kind == "none" and offload:
            raise ModelError(
                "offload_activations moves what checkpointed layers keep; it needs activation_checkpointing "
                "'full' or 'selective'"
            )
        return cls(kind=cast(Recompute, kind), layers=layers, offload=offload)

    def check(self, model: PreTrainedModel, stages: int) -> None:
        """Raise ModelError where a whole model that goes into so many stages cannot be recomputed so.

        The same on every rank, before anything is changed: more layers than the largest stage has, or layers that
        cannot be recomputed.
        """
        layers = decoder_layers(model)
        limit = max(len(part) for part in layers_of_stages(len(layers), stages))
        if not 0 <= self.layers <= limit:
            place = "are here" if stages == 1 else f"are in the largest of {stages} pipeline stages"
            raise ModelError(
                f"recompute_layers is {self.layers}, {limit} decoder layers {place}; use 0 (each) to {limit}"
            )
        for name, layer in layers.items() if self.kind != "none" else ():
            if not (model.supports_gradient_checkpointing and hasattr(layer, "gradient_checkpointing")):
                raise ModelError(
                    f"{type(model).__name__}: {name} ({type(layer).__name__}) does not support activation "
                    "checkpointing; switch it off"
                )

    def apply(self, model: PreTrainedModel) -> None:
        """Recompute the layers that are here, a whole model's or a stage's, which may be fewer than `layers`.

        Those of multi-token prediction come after the others.
        """
        if self.kind == "none":
            return
        offload = HostOffload() if self.offload else None
        layers = [*decoder_layers(model).values(), *mtp_blocks(model).values()]
        for index, layer in enumerate(layers[: self.layers or None]):
            module: Any = layer  # the attributes that transformers' gradient_checkpointing_enable sets, in 5.17 to 5.23
            module._gradient_checkpointing_func = partial(
                run_checkpointed, selective=self.kind == "selective", offload=offload, first=index == 0
            )
            module.gradient_checkpointing = True


def run_checkpointed(
    run: Callable[..., Any], *args: Any, selective: bool, offload: HostOffload | None, first: bool
) -> Any:
    """Call a layer under a checkpoint of its own."""
    if offload is not None and first:
        offload.begin()
    contexts = Recording(offload).contexts if selective else noop_context_fn
    # Inside, the checkpoint's own hooks are innermost: those of the offload see the layer's inputs and nothing else.
    with save_on_host(offload) if offload is not None else nullcontext():
        return checkpoint(within_layer(run), *args, use_reentrant=False, context_fn=contexts)
