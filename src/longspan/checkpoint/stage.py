"""Copies on the host of what a checkpoint holds, taken while training goes on.

Tensors of a GPU are copied on a stream of their own into registered memory; those of the host, such as moments of
`offload_states` and everything on a CPU, by the thread that writes. Both may still be read from while the next forward
and backward passes run, for only an optimizer's update writes parameters and moments. What else may change meanwhile
(buffers, counts of steps) is copied before `begin_copies` returns. The memory is kept from save to save, in pieces of
at most `PIECE` bytes: CUDA registers one at a time, and kernels start in between.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from longspan.model.activations.host_arena import ALIGNMENT, HostArena, HostRange
from longspan.model.weights.local_tensors import local_tensor
from longspan.train.optim.state_parts import make_sharded_tensor

PIECE = 1 << 28  # bytes of the host's memory that are taken at a time
SMALL = 1 << 16  # bytes up to which a tensor of the host is copied at once
Tensors = Mapping[str, Mapping[str, Any]]


class StagedTensors:
    """Copies that are being taken: `tensors` is complete once `finish` has returned, in any one thread.

    `to_copy` are pairs (target, source) of tensors on the host, which `finish` copies. `copied` is the event after the
    copies from the GPU (None without any), whose `sources` are kept until then.
    """

    def __init__(
        self,
        tensors: dict[str, dict[str, Any]],
        to_copy: list[tuple[Tensor, Tensor]],
        copied: torch.cuda.Event | None,
        sources: list[Tensor],
    ) -> None:
        self.tensors, self._to_copy, self._copied, self._sources = tensors, to_copy, copied, sources

    def finish(self) -> None:
        """Copy the pairs of the host, and wait for the copies from the GPU."""
        with torch.no_grad():
            for target, source in self._to_copy:
                target.copy_(source)
        if self._copied is not None:
            self._copied.synchronize()
        self._to_copy.clear()
        self._sources.clear()


class Stage:
    """The memory for copies of a model's and an optimizer's local tensors.

    >>> stage = Stage(world.device)
    >>> staged = stage.begin_copies(tensors_to_save(model, optimizer), model)
    >>> staged.finish()

    One copy at a time: what `begin_copies` returned must have been written before the next `begin_copies`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._arena = device, HostArena(device)
        self._places = dict[str, tuple[Any, Tensor]]()  # by name a tensor's signature and the memory of its copy
        self._ranges = list[HostRange]()  # which the places lie in

    @property
    def bytes(self) -> int:
        """The bytes of memory taken so far."""
        return self._arena.bytes

    def bytes_to_take(self, tensors: Tensors) -> int:
        """Return how many bytes `take_memory` would add for these tensors."""
        return sum(_bytes_with_alignment(local) for _, local in self._tensors_to_place(tensors))

    def take_memory(self, tensors: Tensors) -> None:
        """Take memory for the tensors that have none here yet. Raises ModelError where the host lacks it."""
        for piece in _group_by_bytes(self._tensors_to_place(tensors)):
            host_range = self._arena.take(sum(_bytes_with_alignment(local) for _, local in piece))
            self._ranges.append(host_range)
            range_bytes, first = host_range.memory.numpy(), 0
            for name, local in piece:
                strides = torch.empty_like(local, device="meta").stride()
                # By numpy, so that the tensor's storage is no larger than the tensor.
                memory = torch.from_numpy(range_bytes[first : first + _bytes(local)])
                self._places[name] = _signature(local), memory.view(local.dtype).as_strided(local.shape, strides)
                first += _bytes_with_alignment(local)

    @torch.no_grad()
    def begin_copies(self, tensors: Tensors, model: nn.Module) -> StagedTensors:
        """Begin to copy; the optimizer must not update before `finish` of what is returned has ended.

        Tensors on a GPU are copied by a stream of their own, and from a clone where they change before the next update,
        as buffers may. On a CPU, such tensors and small ones are copied now, others by `finish`.
        """
        self.take_memory(tensors)
        # Addresses of what only an update writes. Buffers, which forward may write, are not among them.
        steady = {local_tensor(p.detach()).data_ptr() for p in model.parameters()}
        staged: dict[str, dict[str, Any]] = {}
        to_copy, sources = list[tuple[Tensor, Tensor]](), list[tuple[Tensor, Tensor]]()
        for group, values in tensors.items():
            staged[group] = {}
            for name, value in values.items():
                if not isinstance(value, Tensor):
                    staged[group][name] = value
                    continue
                source = local_tensor(value.detach())
                changes = group == "model" and source.data_ptr() not in steady
                target = self._memory_of_copy(f"{group}.{name}", source)
                if source.device.type == "cuda":
                    sources.append((target, source.clone() if changes else source))
                elif changes or source.nbytes <= SMALL:
                    target.copy_(source)
                else:
                    to_copy.append((target, source))
                staged[group][name] = make_sharded_tensor(value, target)
        return StagedTensors(staged, to_copy, self._copy_from_gpu(sources), [source for _, source in sources])

    def close(self) -> None:
        """Give the memory back, once nothing of it is in use."""
        self._places.clear()
        self._ranges.clear()
        self._arena.close()

    def _memory_of_copy(self, name: str, source: Tensor) -> Tensor:
        if not source.nbytes:
            return torch.empty_like(source, device="cpu")
        return self._places[name][1]

    def _tensors_to_place(self, tensors: Tensors) -> list[tuple[str, Tensor]]:
        items = ((f"{group}.{name}", value) for group, values in tensors.items() for name, value in values.items())
        local = ((name, local_tensor(value.detach())) for name, value in items if isinstance(value, Tensor))
        signatures = {name: signature for name, (signature, _) in self._places.items()}
        return [(name, x) for name, x in local if x.nbytes and signatures.get(name) != _signature(x)]

    def _copy_from_gpu(self, pairs: list[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
        """Begin to copy pairs (target, source) from the GPU, after what it computes now; return the event at the end.

        None where there is nothing to copy, or no GPU.
        """
        stream = self._arena.copies
        if stream is None or not pairs:
            return None
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        end_of_copies = torch.cuda.Event()
        end_of_copies.record(stream)
        return end_of_copies


def _group_by_bytes(items: list[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield lists of neighbouring items of at most PIECE bytes together; a larger item has a list of its own."""
    piece, size = list[tuple[str, Tensor]](), 0
    for name, local in items:
        if piece and size + _bytes_with_alignment(local) > PIECE:
            yield piece
            piece, size = [], 0
        piece.append((name, local))
        size += _bytes_with_alignment(local)
    if piece:
        yield piece


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _bytes_with_alignment(x: Tensor) -> int:
    return -(-_bytes(x) // ALIGNMENT) * ALIGNMENT


def _signature(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.dtype, x.stride()
