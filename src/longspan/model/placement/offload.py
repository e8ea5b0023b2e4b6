"""Tensors that wait in the host's memory between a forward pass and its backward pass.

On a GPU they travel on a stream of their own, to pinned memory and back; what was parked before is fetched ahead, as
backward passes go through layers in reverse. On a CPU they are copied, so that the same code runs.
"""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

AHEAD = 4  # tensors: a layer's input and what its attention keeps


class HostOffload:
    """Where the activations of one model wait; `parked = parking(x)` and later `x = parked()`.

    >>> parking = HostOffload()
    >>> parked = parking(torch.ones(3))
    >>> parked().tolist()
    [1.0, 1.0, 1.0]

    `begin` starts a new chain: nothing is fetched ahead across it. Fetching a tensor starts the way back of the few
    that were parked before it in its chain, unless they have been here.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._last: weakref.ref[OffloadedTensor] | None = None

    def begin(self) -> None:
        """The first layer of a forward pass: what follows is not fetched together with what was before."""
        self._last = None

    def __call__(self, x: Tensor) -> "OffloadedTensor":
        """Copy a tensor to the host; its memory is free once nothing else holds it."""
        parked = OffloadedTensor(x, self._stream(x.device), self._last)
        self._last = weakref.ref(parked)
        return parked

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
        """The tensor, as it was; what was parked before it begins its way back too."""
        if self._stream is None:
            return self._host.clone()
        self._taken = True
        self.fetch()
        before = self._parked_before()
        for _ in range(AHEAD):
            if before is not None and not before._taken:
                before.fetch()
            before = None if before is None else before._parked_before()
        assert self._here is not None
        (x, arrived), self._here = self._here, None
        current = torch.cuda.current_stream(self._device)
        current.wait_event(arrived)
        x.record_stream(current)
        return x

    def _parked_before(self) -> "OffloadedTensor | None":
        return None if self._before is None else self._before()

    def fetch(self) -> None:
        """Start the way back, unless it has been started."""
        if self._stream is None or self._here is not None:
            return
        with torch.cuda.stream(self._stream):
            x = torch.empty_like(self._host, device=self._device)
            x.copy_(self._host, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(self._stream)
        self._here = (x, arrived)


def hooks(parking: HostOffload) -> torch.autograd.graph.saved_tensors_hooks:
    """A context in which what autograd saves waits on the host."""
    return torch.autograd.graph.saved_tensors_hooks(parking, _fetched)


def _fetched(parked: Callable[[], Tensor]) -> Tensor:
    return parked()
