"""Attention outputs that outlive the forward pass of a layer whose other activations are recomputed in backward.

Inside `Recording.record_outputs()` the results of `attend` are kept. Inside `replay_outputs()` the same calls, in the
same order, return them, and the kernels of attention do not run a second time. Kept are the output and the log-sum-exp
of the local rows: queries, keys and values are recomputed, and where heads are exchanged for rows, exchanged once more.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

Result = TypeVar("Result")


Park = Callable[[Tensor], Callable[[], Tensor]]  # moves a tensor to another place: x = park(x)()


class Recording:
    """The results of attention in one checkpointed call of a layer, call by call.

    `park` may keep them elsewhere (`model/activations/recompute.py`); by default they stay where they are. They are
    freed with the recording, which the layer's checkpoint holds until its backward pass is over. With
    `keep_exchanged` the queries, keys, values and outputs that `a2a` and `a2a+p2p` exchanged are kept as well, and not
    exchanged again.
    """

    def __init__(self, park: Park | None = None, *, keep_exchanged: bool = False) -> None:
        self._park: Park = park or (lambda x: x.detach)
        self.keep_exchanged = keep_exchanged
        self._calls: list[Any] = []
        self._next: int | None = None  # while recomputing, the call that comes next; None: results are recorded

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return two contexts for `context_fn` of torch's checkpoint: of the forward pass, and of its recomputation."""
        return self.record_outputs(), ReentrantContext(self.replay_outputs)

    def record_outputs(self) -> AbstractContextManager[None]:
        """Return a context that records the results of the attention calls inside, in their order."""
        return _activate_recording(self, None)

    def replay_outputs(self) -> AbstractContextManager[None]:
        """Return a context in which attention calls return the recorded results."""
        return _activate_recording(self, 0)

    def record_or_replay(
        self, compute: Callable[[], Result], inputs: Sequence[Tensor], indices: Tensor | None = None
    ) -> Result:
        """Return the result of a call: of `compute()`, which is recorded; in a recomputation the recorded one instead.

        The result is a tree of tensors; those that share memory with `inputs` are made again from the inputs at hand.
        Raises RuntimeError if a recomputation has other `indices` than the forward pass had: at once on a CPU, on a GPU
        where the host next waits for it.
        """
        checksums = None
        if indices is not None:  # a number (T,) int64 for each row, which depends on its values and their order
            of_rows = indices.flatten(1)
            weights = torch.arange(1, 2 * of_rows.shape[1], 2, dtype=indices.dtype, device=indices.device)
            checksums = (of_rows * weights).sum(1)
        if self._next is None:
            result = compute()
            self._calls.append((tree_map(lambda x: self._keep_output(x, inputs), result), checksums))
            return result
        assert self._next < len(self._calls), (
            "a recomputed layer calls attention more often than its forward pass did"
        )
        call, checksums_before = self._calls[self._next]
        if checksums is not None:
            are_same = (checksums == checksums_before).all()
            torch._assert_async(are_same, "a recomputed layer chose other keys than its forward pass did")
        self._next += 1
        return tree_map(lambda x: x(inputs) if callable(x) else x, call)

    def _keep_output(self, x: Any, inputs: Sequence[Tensor]) -> Any:
        """A tensor in the memory of an input comes back as a view of that input, any other from where it was parked.
        Empty tensors are parked: they have no memory by which an input is recognised."""
        if not isinstance(x, Tensor):
            return x
        for i, source in enumerate(inputs):
            # `_cdata` is one address for all tensors in one memory; a storage has no public identity
            if x.untyped_storage()._cdata == source.untyped_storage()._cdata and x.numel():
                offset = int(x.storage_offset()) - int(source.storage_offset())
                return partial(_view_of_input, i, tuple(x.size()), x.stride(), offset)
        fetch = self._park(x.detach())
        return lambda _: fetch()


active_recording: ContextVar[Recording | None] = ContextVar("recording", default=None)


class ReentrantContext(AbstractContextManager[None]):
    """A context that may be entered again: with `retain_graph` each backward pass recomputes the layer."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make_context = make

    def __enter__(self) -> None:
        self._open_context = self._make_context()
        self._open_context.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._open_context.__exit__(*error)


@contextmanager
def _activate_recording(recording: Recording, start: int | None) -> Iterator[None]:
    """With a start, results are taken from this call on; None records them."""
    token = active_recording.set(recording)
    recording._next = start
    try:
        yield
    finally:
        active_recording.reset(token)


def _view_of_input(
    index: int, size: tuple[int, ...], stride: tuple[int, ...], offset: int, inputs: Sequence[Tensor]
) -> Tensor:
    """`offset` is counted in elements from where the input itself begins."""
    source = inputs[index]
    return source.as_strided(size, stride, source.storage_offset() + offset)
