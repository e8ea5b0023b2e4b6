"""Which activations of decoder layers are kept for backward, which are recomputed, and which wait on the host.

A layer's measure keeps: "none" all; "full" its input; "selective" attention's output and log-sum-exp too; "exchanged"
also what attention exchanged; with "+host" on the host. Of a segment of layers only the first one's input is kept: the
others run once more when backward reaches it. FSDP2 then gathers and frees them in the same order on every rank.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.utils.checkpoint import DefaultDeviceType, checkpoint, noop_context_fn
from transformers import PreTrainedModel

from longspan.attention.saved_outputs import Recording, Reentrant, Result
from longspan.comm import World
from longspan.errors import ModelError
from longspan.model.activations.host_offload import HostArena, HostOffload, check_free_host_memory
from longspan.model.activations.tiles import (
    current_autocast_factory,
    has_active_dropout,
    random_states,
    use_random_states,
)
from longspan.model.layers import Absent, named_layer_list
from longspan.model.mtp import MtpBlocks, model_depths
from longspan.plan.memory.settings import CHECKPOINT_POLICIES, Measure

Run = Callable[..., Any]


class Segments:
    """The segments of a model's layers, of at most `size` each: `run_layer` runs one layer of a pass."""

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

        A layer joins the segment of the call before if its input is what that call returned. A kept input waits on the
        host if `measure` ends with "+host".
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
        with saved_tensors_hooks(link.make_pack_hook(keep, x), lambda fetch: fetch()):
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
        """Whether x is what this call returned, unchanged; the tensor object may differ, since wrappers make views."""
        out = None if self._output is None else self._output()
        if out is None or out._version != self._version or x._version != self._version:
            return False
        same_place = out.data_ptr() == x.data_ptr() and out.shape == x.shape and out.stride() == x.stride()
        return same_place and out.dtype == x.dtype

    def note_output(self, out: Tensor) -> None:
        self._output, self._version = weakref.ref(out), out._version

    def forget_input(self, x: Tensor) -> Callable[[], Tensor]:
        """A `keep` that keeps nothing: to fetch the input, the layers before run again."""
        return self.fetch_input

    def make_pack_hook(self, keep: Callable[[Tensor], Callable[[], Tensor]], x: Tensor) -> Callable[[Tensor], Any]:
        """Keep the input x by `keep`; the checkpoint may save a view of it, so memory tells it from other tensors."""
        self._autocast = current_autocast_factory(x)
        self._states = random_states(x.device) if has_active_dropout(self._layer) else None
        identity = x.data_ptr(), x.shape, x.dtype

        def pack(saved: Tensor) -> Callable[[], Tensor]:
            if (saved.data_ptr(), saved.shape, saved.dtype) != identity:
                return _keep_in_place(saved)
            fetch = keep(saved)
            if self.before is None:  # a segment is fetched ahead once the first layer of the one behind runs backward
                self._fetch_first = partial(fetch, ahead=False) if isinstance(fetch, partial) else fetch
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
                stack.enter_context(self._recording.record_outputs())
            out = self._run(x, *self._other_args)
        return (out[0] if isinstance(out, tuple) else out).detach()

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return self._record_nothing(), Reentrant(self.replay_attention)

    @contextmanager
    def replay_attention(self) -> Iterator[None]:
        recording, self._recording = self._recording, None
        with self._record_nothing() if recording is None else recording.replay_outputs():
            yield

    def _record_nothing(self) -> AbstractContextManager[None]:
        """A recording all the same, so that autograd saves the same tensors in the pass and in its recomputation."""
        return (
            _EmptyRecording(keep_exchanged=self._keeps_exchanged).record_outputs()
            if self._keeps_attention
            else nullcontext()
        )


class _EmptyRecording(Recording):
    def record_or_replay(
        self, compute: Callable[[], Result], inputs: Sequence[Tensor], indices: Tensor | None = None
    ) -> Result:
        return compute()


@contextmanager
def _gather_parameters(layer: nn.Module) -> Iterator[None]:
    """In transformers 5.17 FSDP2's own hooks run inside: in the state PRE_BACKWARD they do nothing."""
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


_CHECKPOINTING = ("none", "full", "selective")


@dataclass(frozen=True, kw_only=True)
class Recomputation:
    """The measure of each decoder layer and then of each depth: `measures`, or `measure` for all.

    `host_bytes` is the first size of a rank's arena on the host; with 0 it grows in the first step. Of `segment_layers`
    layers in a row that recompute, only the first one's input waits for backward; 0: no segments.
    """

    measure: Measure = "none"
    measures: tuple[Measure, ...] | None = None
    host_bytes: int = 0
    segment_layers: int = 0

    @classmethod
    def from_options(cls, checkpointing: bool | str, *, offload: bool = False, host_bytes: int = 0) -> "Recomputation":
        """Make a Recomputation from options of `prepare`; ModelError for another word, or options of checkpoints."""
        kind = ("full" if checkpointing else "none") if isinstance(checkpointing, bool) else checkpointing
        if kind not in _CHECKPOINTING:
            raise ModelError(f"activation_checkpointing is {kind!r}; use one of {', '.join(_CHECKPOINTING)}")
        if kind == "none" and offload:
            raise ModelError(
                "offload_activations moves what checkpointed layers keep; it needs activation_checkpointing "
                "'full' or 'selective'"
            )
        return cls(measure=cast(Measure, f"{kind}+host" if offload else kind), host_bytes=host_bytes)

    @classmethod
    def from_measures(cls, measures: str | Sequence[str], host_bytes: int = 0) -> "Recomputation":
        """Make a Recomputation from one word for all layers, or a word for each; ModelError for an unknown word."""
        words = (measures,) if isinstance(measures, str) else tuple(measures)
        if wrong := [word for word in words if word not in CHECKPOINT_POLICIES]:
            raise ModelError(f"measures has {wrong[0]!r}; use {', '.join(CHECKPOINT_POLICIES)}")
        if isinstance(measures, str):
            return cls(measure=cast(Measure, measures), host_bytes=host_bytes)
        return cls(measures=cast("tuple[Measure, ...]", words), host_bytes=host_bytes)

    @property
    def repeats_exchanges(self) -> bool:
        """Whether any layer is "selective": its backward repeats the all-to-all before attention, but not attention."""
        return any(word.startswith("selective") for word in self.measures or (self.measure,))

    def check_measures(self, model: PreTrainedModel) -> None:
        """Raise ModelError, alike on all ranks, before any change, where a model cannot have these measures."""
        if (size := self.segment_layers) < 0:
            raise ModelError(f"segment_layers is {size}; use 0 (no segments), or the layers of a segment, such as 4")
        if size > 1 and all(word == "none" for word in self.measures or (self.measure,)):
            raise ModelError(
                f"segment_layers is {size}: of so many layers that recompute the first one's input is kept, and no "
                "layer recomputes; use activation_checkpointing 'full' or 'selective', or segment_layers 0"
            )
        layers, depths = len(named_layer_list(model)[1]), len(model_depths(model))
        if self.measures is not None and len(self.measures) != layers + depths:
            depths_text = f" and {depths} depths of multi-token prediction" if depths else ""
            raise ModelError(
                f"measures has {len(self.measures)} words; {type(model).__name__} has {layers} decoder layers"
                f"{depths_text}: give one word for each, or one for all"
            )
        for name, layer, measure in self._layer_measures(model):
            supported = model.supports_gradient_checkpointing and hasattr(layer, "gradient_checkpointing")
            if measure != "none" and not supported:
                raise ModelError(
                    f"{type(model).__name__}: {name} ({type(layer).__name__}) does not support activation "
                    "checkpointing; switch it off"
                )

    def make_offload(self, world: World) -> HostOffload | None:
        """Make the store in which a rank's layers keep tensors on the host, or None; all ranks enter.

        ModelError for no room.
        """
        if not any(word.endswith("+host") for word in self.measures or (self.measure,)):
            return None
        if self.host_bytes:
            check_free_host_memory(self.host_bytes, world, "activations on the host take")
        arena = HostArena(world.device, self.host_bytes)
        arena.close_when_world_is_left(world)
        return HostOffload(arena)

    def apply_measures(self, model: PreTrainedModel, offload: HostOffload | None) -> None:
        """Have the layers that are here keep what their measures say.

        A layer that keeps nothing on the host, behind one that does, only tells the offload that it runs.
        """
        first = True  # no layer so far keeps tensors on the host
        segments = Segments(self.segment_layers) if self.segment_layers > 1 else None
        for _, layer, measure in self._layer_measures(model):
            module: Any = layer  # the attributes that transformers' gradient_checkpointing_enable sets, in 5.17 to 5.23
            if measure != "none":
                run = run_checkpointed if segments is None else partial(segments.run_layer, layer)
                module._gradient_checkpointing_func = partial(run, measure=measure, offload=offload, first=first)
                module.gradient_checkpointing = True
            if measure.endswith("+host"):
                first = False
            elif offload is not None and not first:
                module.register_forward_pre_hook(lambda *_: offload.count_empty_layer())

    def _layer_measures(self, model: PreTrainedModel) -> list[tuple[str, nn.Module, Measure]]:
        name, layers = named_layer_list(model)
        local_layers = [(i, f"{name}.{i}", layer) for i, layer in enumerate(layers) if not isinstance(layer, Absent)]
        for number, depth in enumerate(model_depths(model)):
            block = depth.mtp_block
            depth_layers = [*block] if isinstance(block, MtpBlocks) else [block]
            local_layers += [
                (len(layers) + number, f"depth {number} of multi-token prediction", depth_layer)
                for depth_layer in depth_layers
            ]
        measures = self.measures
        return [(name, layer, measures[i] if measures else self.measure) for i, name, layer in local_layers]


def run_checkpointed(
    run: Callable[..., Any], *args: Any, measure: Measure, offload: HostOffload | None = None, first: bool = False
) -> Any:
    """Call a layer under a checkpoint of its own; `first`: it is the first layer of a pass that parks on the host."""
    park = offload.open_layer(first=first) if offload is not None and measure.endswith("+host") else None
    contexts = noop_context_fn
    if not measure.startswith("full"):
        contexts = Recording(park, keep_exchanged=measure == "exchanged").contexts
    # Torch takes a GPU, where there is one, for the device of a checkpoint, and fails for rows on a CPU if a compiler
    # initialises that GPU inside.
    if args:
        DefaultDeviceType.set_device_type(args[0].device.type)
    # Inside, the checkpoint's own hooks are innermost: those that park see the layer's inputs and nothing else.
    with saved_tensors_hooks(park, lambda fetch: fetch()) if park is not None else nullcontext():
        return checkpoint(run, *args, use_reentrant=False, context_fn=contexts)
