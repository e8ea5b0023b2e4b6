"""Tensors that wait in the host's memory between a forward pass and its backward pass.

On a GPU they are copied to pinned memory and back on a CUDA stream of their own. A backward pass goes through the
layers in reverse, so fetching one tensor also fetches those that were offloaded shortly before it. On a CPU they are
copied, so that the same code runs.
"""

import weakref

import torch
from torch import Tensor

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
        offloaded = OffloadedTensor(x, self._stream(x.device), self._last)
        self._last = weakref.ref(offloaded)
        return offloaded

    def _stream(self, device: torch.device) -> torch.cuda.Stream | None:
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
        self._device, self._stream, self._before = x.device, stream, before
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
        if self._stream is None:
            return self._host.clone()
        self._taken = True
        self.fetch()
        before = self._offloaded_before()
        for _ in range(AHEAD):
            if before is not None and not before._taken:
                before.fetch()
            before = None if before is None else before._offloaded_before()
        assert self._here is not None
        (x, arrived), self._here = self._here, None
        current = torch.cuda.current_stream(self._device)
        current.wait_event(arrived)
        x.record_stream(current)
        return x

    def _offloaded_before(self) -> "OffloadedTensor | None":
        return None if self._before is None else self._before()

    def fetch(self) -> None:
        """Start to copy the tensor back, unless that has been started."""
        if self._stream is None or self._here is not None:
            return
        with torch.cuda.stream(self._stream):
            x = torch.empty_like(self._host, device=self._device)
            x.copy_(self._host, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(self._stream)
        self._here = (x, arrived)


def saved_on_host(offload: HostOffload) -> torch.autograd.graph.saved_tensors_hooks:
    """A context in which the tensors that autograd saves wait in the host's memory."""
    return torch.autograd.graph.saved_tensors_hooks(offload, lambda offloaded: offloaded())
