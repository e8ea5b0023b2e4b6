"""Segments: of several decoder layers in a row only the first one's input waits for backward.

When the last layer of a segment begins its backward pass, the layers before it run forward once more, without a graph,
and give the inputs of the layers behind them; attention's outputs are kept then, where a layer's measure says so. Each
layer then runs backward as any that is recomputed. Layers follow each other by their tensors: one whose input is not
what the layer before returned, as where a model adds to it in between, begins a segment.

The layers that run again are gathered and freed one by one where FSDP2 shards them, in the same order on every rank.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.utils.checkpoint import checkpoint

from longspan.attention.saved_outputs import Recording, Result
from longspan.model.activations.host_offload import HostOffload, fetch_alone
from longspan.model.activations.tiles import autocast_of, draws_at_random, random_states, use_random_states

Run = Callable[..., Any]


class Segments:
    """The segments of a model's layers, of at most `size` each: `run_layer` runs one layer of a pass.

    >>> segments = Segments(4)
    >>> out = segments.run_layer(layer, layer.forward, x, measure="selective")  # doctest: +SKIP
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._last_link: weakref.ref[_Link] | None = None  # the call before, which only its graph keeps alive

    def run_layer(
        self,
        layer: nn.Module,
        run: Run,
        *args: Any,
        measure: str,
        offload: HostOffload | None = None,
        first: bool = False,
    ) -> Any:
        """Call a layer under a checkpoint; only a segment's first layer keeps its input.

        A layer joins the segment of the call before if its input is what that call returned, and the segment has room.
        The input that is kept waits on the host if its layer's `measure` ends with "+host".
        """
        x, last_link = args[0], self._last_link and self._last_link()
        follows = last_link is not None and last_link.place + 1 < self.size and last_link.has_returned(x)
        link = _Link(layer, run, args[1:], measure, last_link if follows else None)
        keep: Callable[[Tensor], Callable[[], Tensor]] = _keep_in_place
        if link.before is not None:
            keep = link.forget_input
            if offload is not None:  # tensors of earlier layers leave the device as layers go by
                offload.count_empty_layer()
        elif offload is not None and measure.endswith("+host"):
            keep = offload.open_layer(first=first)
        with torch.autograd.graph.saved_tensors_hooks(link.make_input_hook(keep, x), lambda fetch: fetch()):
            out = checkpoint(run, *args, use_reentrant=False, context_fn=link.contexts)
        link.note_output(out[0] if isinstance(out, tuple) else out)
        self._last_link = weakref.ref(link)
        return out


def _keep_in_place(x: Tensor) -> Callable[[], Tensor]:
    return x.detach


class _Link:
    """One layer's call in a segment, linked to the call before it."""

    def __init__(
        self, layer: nn.Module, run: Run, others: tuple[Any, ...], measure: str, before: "_Link | None"
    ) -> None:
        """`others` are the layer's arguments besides its input; `run` takes the input and then these. The call notes
        its output, to recognise the next one, and its random states and autocast, to run again alike.
        """
        self.before = before
        self.place = 0 if before is None else before.place + 1
        self._layer, self._run, self._other_args = layer, run, others
        self._keeps_attention, self._keeps_exchanged = not measure.startswith("full"), measure == "exchanged"
        self._recording: Recording | None = None
        self._input: Tensor | None = None  # made again for backward, until it is fetched
        self._fetch_first: Callable[[], Tensor] | None = None  # of a segment's first layer: fetches its kept input
        self._output: weakref.ref[Tensor] | None = None
        self._version = -1  # of the output; torch counts up when a tensor is modified in place
        self._states: Any = None
        self._autocast: Callable[[], AbstractContextManager[Any]] = nullcontext

    def has_returned(self, x: Tensor) -> bool:
        """Return whether x is what this call returned, unchanged: the same memory, shape and dtype.

        The tensor object may be another, since wrappers make views.
        """
        out = None if self._output is None else self._output()
        if out is None or out._version != self._version or x._version != self._version:
            return False
        same_place = out.data_ptr() == x.data_ptr() and out.shape == x.shape and out.stride() == x.stride()
        return same_place and out.dtype == x.dtype

    def note_output(self, out: Tensor) -> None:
        self._output, self._version = weakref.ref(out), out._version

    def forget_input(self, x: Tensor) -> Callable[[], Tensor]:
        return self.fetch_input

    def make_input_hook(self, keep: Callable[[Tensor], Callable[[], Tensor]], x: Tensor) -> Callable[[Tensor], Any]:
        """Make the hook for tensors that the checkpoint saves: it keeps the input x by `keep`, others as they are.

        The input is recognised by its memory, as the checkpoint may save a view. The autocast and the random states of
        now are noted, for `run_again`.
        """
        self._autocast = autocast_of(x)
        self._states = random_states(x.device) if draws_at_random(self._layer) else None
        identity = x.data_ptr(), x.shape, x.dtype

        def pack(saved: Tensor) -> Callable[[], Tensor]:
            if (saved.data_ptr(), saved.shape, saved.dtype) != identity:
                return _keep_in_place(saved)
            fetch = keep(saved)
            if self.before is None:  # a segment is fetched ahead once the first layer of the one behind runs backward
                self._fetch_first = fetch_alone(fetch)
            return fetch

        return pack

    def fetch_input(self) -> Tensor:
        """Return the input of this call; the layers before run again for it, unless a later layer's fetch did that."""
        if self._input is None:
            links: list[_Link] = [self]  # from the segment's first layer to this one
            while links[0].before is not None:
                links.insert(0, links[0].before)
            fetch = links[0]._fetch_first
            assert fetch is not None
            x = fetch()
            for link, next_link in pairwise(links):
                x = next_link._input = link.run_again(x)
        x, self._input = self._input, None
        assert x is not None
        return x

    @torch.no_grad()
    def run_again(self, x: Tensor) -> Tensor:
        self._recording = Recording(keep_exchanged=self._keeps_exchanged) if self._keeps_attention else None
        with ExitStack() as stack:
            stack.enter_context(_gather_parameters(self._layer))
            stack.enter_context(use_random_states(self._states, x.device))
            stack.enter_context(self._autocast())
            if self._recording is not None:
                stack.enter_context(self._recording.forward())
            out = self._run(x, *self._other_args)
        return (out[0] if isinstance(out, tuple) else out).detach()

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return self._forget_attention(), _RecomputeContext(self)

    @contextmanager
    def replay_attention(self) -> Iterator[None]:
        recording, self._recording = self._recording, None
        with self._forget_attention() if recording is None else recording.recompute():
            yield

    def _forget_attention(self) -> AbstractContextManager[None]:
        """Make the context of a pass that keeps no output of attention.

        It is a recording all the same, so that autograd saves the same tensors in the pass and in its recomputation.
        """
        return (
            _EmptyRecording(keep_exchanged=self._keeps_exchanged).forward() if self._keeps_attention else nullcontext()
        )


class _EmptyRecording(Recording):
    def output(self, compute: Callable[[], Result], inputs: Sequence[Tensor]) -> Result:
        return compute()


class _RecomputeContext(AbstractContextManager[None]):
    """The context of a recomputation. It may be entered repeatedly, as by backward with `retain_graph`."""

    def __init__(self, link: _Link) -> None:
        self._link = link

    def __enter__(self) -> None:
        self._open_context = self._link.replay_attention()
        self._open_context.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._open_context.__exit__(*error)


@contextmanager
def _gather_parameters(layer: nn.Module) -> Iterator[None]:
    """Gather a layer's FSDP2 parameters inside; afterwards free the parameters that were not gathered before.

    In transformers 5.17 FSDP2's own hooks run inside: in the state PRE_BACKWARD they do nothing.
    """
    modules = [module for module in layer.modules() if isinstance(module, FSDPModule)]
    states: list[Any] = [module._get_fsdp_state() for module in modules]
    training_states = [state._training_state for state in states]
    sharded_before = [module for module, state in zip(modules, states, strict=True) if _is_sharded(state)]
    for module, state in zip(modules, states, strict=True):
        module.unshard()
        state._training_state = TrainingState.PRE_BACKWARD
    try:
        yield
    finally:
        for state, training_state in zip(states, training_states, strict=True):
            state._training_state = training_state
        for module in sharded_before:
            module.reshard()


def _is_sharded(state: Any) -> bool:
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return any(group is not None and group.is_sharded for group in groups)
