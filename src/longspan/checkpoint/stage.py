"""Copies on the host of what a checkpoint holds, taken while training goes on.

Tensors of a GPU are copied on a stream of their own into registered memory; those of the host, such as moments of
`offload_states` and everything on a CPU, by the thread that writes. Both may still be read from while the next forward
and backward passes run, for only an optimizer's update writes parameters and moments. What else may change meanwhile
(buffers, counts of steps) is copied before `begin_copies` returns.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from longspan.model.activations.host_arena import ALIGNMENT, HostArena
from longspan.model.weights.local_tensors import local_tensor
from longspan.train.optim.offload_states import make_sharded_tensor

PIECE = 1 << 28  # bytes of the host's memory that are taken at a time
SMALL = 1 << 16  # bytes up to which a tensor of the host is copied at once
Tensors = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class StagedTensors:
    """Copies that are being taken: `tensors` is complete once `finish` has returned, in any one thread.

    `to_copy` are pairs (target, source) of tensors on the host, which `finish` copies. `copied` is the event after the
    copies from the GPU (None without any), whose `sources` are kept until then.
    """

    tensors: dict[str, dict[str, Tensor]]
    to_copy: list[tuple[Tensor, Tensor]]
    copied: torch.cuda.Event | None
    sources: list[Tensor]

    def finish(self) -> None:
        """Copy the pairs of the host, and wait for the copies from the GPU."""
        with torch.no_grad():
            for target, source in self.to_copy:
                target.copy_(source)
        if self.copied is not None:
            self.copied.synchronize()
        self.to_copy.clear()
        self.sources.clear()


class Stage:
    """The memory for copies of a model's and an optimizer's local tensors, kept from save to save.

    >>> stage = Stage(world.device)
    >>> staged = stage.begin_copies(tensors, model)   # of contents_to_save
    >>> staged.finish()

    One copy at a time: what `begin_copies` returned must have been written before the next `begin_copies`. Memory is
    taken in pieces of at most `PIECE` bytes: CUDA registers one at a time, and kernels start in between.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._arena = device, HostArena(device)
        self._places = dict[str, tuple[Any, Tensor, Any]]()  # by name: its signature, memory and range

    @property
    def bytes(self) -> int:
        """The bytes of memory taken so far."""
        return self._arena.bytes

    def bytes_to_take(self, tensors: Tensors) -> int:
        """Return how many bytes `take_memory` would add for these tensors."""
        return sum(_aligned_bytes(local) for _, local in self._tensors_to_place(tensors))

    def take_memory(self, tensors: Tensors) -> None:
        """Take memory for the tensors that have none here yet. Raises ModelError where the host lacks it."""
        items = self._tensors_to_place(tensors)
        while items:
            count, size = 1, _aligned_bytes(items[0][1])  # a tensor larger than PIECE has a range of its own
            while count < len(items) and size + _aligned_bytes(items[count][1]) <= PIECE:
                size += _aligned_bytes(items[count][1])
                count += 1
            host_range, first = self._arena.take(size), 0
            for name, local in items[:count]:
                memory = host_range.memory[first : first + local.nbytes].view(local.dtype)
                memory = memory.as_strided(local.shape, torch.empty_like(local, device="meta").stride())
                self._places[name] = _signature(local), memory, host_range
                first += _aligned_bytes(local)
            items = items[count:]

    @torch.no_grad()
    def begin_copies(self, tensors: Tensors, model: nn.Module) -> StagedTensors:
        """Begin to copy; the optimizer must not update before `finish` of what is returned has ended.

        Tensors on a GPU are copied by a stream of their own, and from a clone where they change before the next update,
        as buffers may. On a CPU, such tensors and small ones are copied now, others by `finish`.
        """
        self.take_memory(tensors)
        # Addresses of what only an update writes. Buffers, which forward may write, are not among them.
        steady = {local_tensor(p.detach()).data_ptr() for p in model.parameters()}
        staged: dict[str, dict[str, Tensor]] = {group: {} for group in tensors}
        on_host, on_gpu = list[tuple[Tensor, Tensor]](), list[tuple[Tensor, Tensor]]()
        for group, name, value in ((group, *entry) for group, named in tensors.items() for entry in named.items()):
            source = local_tensor(value.detach())
            changes = group == "model" and source.data_ptr() not in steady
            target = self._places[f"{group}.{name}"][1] if source.nbytes else torch.empty_like(source, device="cpu")
            if source.device.type == "cuda":
                on_gpu.append((target, source.clone() if changes else source))
            elif changes or source.nbytes <= SMALL:
                target.copy_(source)
            else:
                on_host.append((target, source))
            staged[group][name] = make_sharded_tensor(value, target)
        copied, stream = None, self._arena.copies
        if stream is not None and on_gpu:  # after what the GPU computes now
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                for target, source in on_gpu:
                    target.copy_(source, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(stream)
        return StagedTensors(staged, on_host, copied, [source for _, source in on_gpu])

    def close(self) -> None:
        """Give the memory back, once nothing of it is in use."""
        self._places.clear()
        self._arena.close()

    def _tensors_to_place(self, tensors: Tensors) -> list[tuple[str, Tensor]]:
        items = ((f"{group}.{name}", value) for group, named in tensors.items() for name, value in named.items())
        local = ((name, local_tensor(value.detach())) for name, value in items)
        placed = {name: signature for name, (signature, *_) in self._places.items()}
        return [(name, x) for name, x in local if x.nbytes and placed.get(name) != _signature(x)]


def _aligned_bytes(x: Tensor) -> int:
    return -(-x.nbytes // ALIGNMENT) * ALIGNMENT


def _signature(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.dtype, x.stride()
