"""Copies of a model's and an optimizer's tensors on the host, from which a save is written while training goes on."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from longspan.model.activations.host_offload import HostArena
from longspan.model.host_arena import range_bytes
from longspan.model.weights.local_tensors import local_tensor
from longspan.train.optim.offload_states import sharded_state

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
        """Take the copies that are left, and wait for those of the GPU; the sources are let go."""
        with torch.no_grad():
            for target, source in self.to_copy:
                target.copy_(source)
        if self.copied is not None:
            self.copied.synchronize()
        self.to_copy.clear()
        self.sources.clear()


class HostCopies:
    """The memory for copies of a model's and an optimizer's local tensors on the host, kept from save to save.

    >>> stage = HostCopies(world.device)
    >>> staged = stage.begin_copies(tensors, model)   # of contents_to_save
    >>> staged.finish()

    What `begin_copies` returned must have been written before the next `begin_copies`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arena = HostArena(device)
        # A copy has its signature, memory and range by name.
        self._places = dict[str, tuple[Any, Tensor, Any]]()

    @property
    def bytes(self) -> int:
        """The bytes of memory on the host that are held."""
        return self._arena.bytes

    def bytes_to_take(self, tensors: Tensors) -> int:
        """Return the bytes that `take_memory` would take."""
        return sum(range_bytes(local.nbytes) for _, local in self._tensors_to_place(tensors))

    def take_memory(self, tensors: Tensors) -> None:
        """Take memory for the tensors that have none here yet. Raises ModelError where the host lacks it.

        It is taken in pieces of at most `PIECE` bytes: CUDA registers one at a time, and kernels start in between.
        """
        items = self._tensors_to_place(tensors)
        while items:
            # the first `count` items get one range of the arena; a tensor larger than PIECE has one of its own
            count = 1
            size = range_bytes(items[0][1].nbytes)
            while count < len(items) and size + range_bytes(items[count][1].nbytes) <= PIECE:
                size += range_bytes(items[count][1].nbytes)
                count += 1
            host_range = self._arena.take_range(size)
            first = 0
            for name, local in items[:count]:
                numbers = host_range.memory[first : first + local.nbytes].view(local.dtype)
                # The order of dims is that of a copy made by torch.
                memory = numbers.as_strided(local.shape, torch.empty_like(local, device="meta").stride())
                self._places[name] = _signature(local), memory, host_range
                first += range_bytes(local.nbytes)
            items = items[count:]

    @torch.no_grad()
    def begin_copies(self, tensors: Tensors, model: nn.Module) -> StagedTensors:
        """Begin to copy; the optimizer must not update before `finish` of what is returned has ended.

        Tensors on a GPU are copied by a stream of their own, and from a clone where they may change before the next
        update, as buffers do in forward. On a CPU, tensors that may change and small ones are copied now, others by
        `finish`.
        """
        self.take_memory(tensors)
        # Addresses of what only an update writes. Buffers, which forward may write, are not among them.
        steady = {local_tensor(p.detach()).data_ptr() for p in model.parameters()}
        staged: dict[str, dict[str, Tensor]] = {group: {} for group in tensors}
        on_host = list[tuple[Tensor, Tensor]]()
        on_gpu = list[tuple[Tensor, Tensor]]()
        for group, name, value in ((group, *entry) for group, named in tensors.items() for entry in named.items()):
            source = local_tensor(value.detach())
            may_change = group == "model" and source.data_ptr() not in steady
            target = self._places[f"{group}.{name}"][1] if source.nbytes else torch.empty_like(source, device="cpu")
            if source.device.type == "cuda":
                on_gpu.append((target, source.clone() if may_change else source))
            elif may_change or source.nbytes <= SMALL:
                target.copy_(source)
            else:
                on_host.append((target, source))
            staged[group][name] = sharded_state(value, target)
        copied = None
        stream = self._arena.copies
        # The copies wait for what the GPU computes now.
        if stream is not None and on_gpu:
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                for target, source in on_gpu:
                    target.copy_(source, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(stream)
        return StagedTensors(staged, on_host, copied, [source for _, source in on_gpu])

    def close(self) -> None:
        """Give the memory back."""
        self._places.clear()
        self._arena.close()

    def _tensors_to_place(self, tensors: Tensors) -> list[tuple[str, Tensor]]:
        """As ("GROUP.NAME", tensor); empty tensors need no memory."""
        items = ((f"{group}.{name}", value) for group, named in tensors.items() for name, value in named.items())
        local = ((name, local_tensor(value.detach())) for name, value in items)
        placed = {name: signature for name, (signature, *_) in self._places.items()}
        return [(name, x) for name, x in local if x.nbytes and placed.get(name) != _signature(x)]


def _signature(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.dtype, x.stride()
