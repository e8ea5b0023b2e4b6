"""Which activations of decoder layers are kept for backward, which are recomputed, and which wait on the host.

Each layer has one word, its measure:

    none            all activations stay
    exchanged       "selective", and what attention exchanged over all-to-all stays too
    selective       the layer's input, and attention's output and log-sum-exp: attention runs once
    full            the layer's input: the layer is recomputed, attention and its communication included
    selective+host  what "selective" keeps, waiting on the host
    full+host       what "full" keeps, waiting on the host

Built on `torch.utils.checkpoint`, for each layer, without re-entrance; whatever a layer was called with, its shard
included, is bound into the recomputation. How tensors wait on the host is in `host_offload.py`.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torch import nn
from torch.utils.checkpoint import DefaultDeviceType, checkpoint, noop_context_fn
from transformers import PreTrainedModel

from longspan.attention.saved_outputs import Recording
from longspan.comm import World
from longspan.errors import ModelError
from longspan.model.activations.host_arena import HostArena, check_host_room
from longspan.model.activations.host_offload import HostOffload, park_saved_tensors
from longspan.model.activations.segments import Segments
from longspan.model.layers import Absent, layer_list
from longspan.model.mtp.depths import MtpBlocks, model_depths
from longspan.plan.memory.settings import MEASURES, Measure

_CHECKPOINTING = ("none", "full", "selective")


@dataclass(frozen=True, kw_only=True)
class Recomputation:
    """The measure of each decoder layer: of a whole model in `measures`, or `measure` for all.

    `measures` has a word for each decoder layer of the model, and then one for each depth of multi-token prediction.
    `host_bytes` is the first size of a rank's arena on the host; with 0 it grows in the first step. Of `segment_layers`
    layers in a row that recompute, only the first one's input waits for backward (`segments.py`); 0: no segments.
    """

    measure: Measure = "none"
    measures: tuple[Measure, ...] | None = None
    host_bytes: int = 0
    segment_layers: int = 0

    @classmethod
    def from_options(cls, checkpointing: bool | str, *, offload: bool = False, host_bytes: int = 0) -> "Recomputation":
        """Make a Recomputation from the options of `prepare`: `activation_checkpointing` True is "full", False "none".

        Raises ModelError for another word, and for options that only checkpointed layers can have.
        """
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
    def parse_measures(cls, measures: str | Sequence[str], host_bytes: int = 0) -> "Recomputation":
        """Make a Recomputation from one word for all layers, or a word for each; ModelError for an unknown word."""
        words = (measures,) if isinstance(measures, str) else tuple(measures)
        if wrong := [word for word in words if word not in MEASURES]:
            raise ModelError(f"measures has {wrong[0]!r}; use {', '.join(MEASURES)}")
        if isinstance(measures, str):
            return cls(measure=cast(Measure, measures), host_bytes=host_bytes)
        return cls(measures=cast("tuple[Measure, ...]", words), host_bytes=host_bytes)

    @property
    def waits_on_host(self) -> bool:
        """Whether any layer's tensors wait on the host."""
        return any(word.endswith("+host") for word in self.measures or (self.measure,))

    @property
    def exchanges_again(self) -> bool:
        """Whether any layer is "selective": its backward repeats the all-to-all before attention, but not attention."""
        return any(word.startswith("selective") for word in self.measures or (self.measure,))

    def check_measures(self, model: PreTrainedModel) -> None:
        """Raise ModelError where a whole model cannot have these measures.

        Refused are another number of words than layers and depths, segments where no layer recomputes, and layers that
        cannot be recomputed. The result is the same on every rank, before anything is changed.
        """
        if (size := self.segment_layers) < 0:
            raise ModelError(f"segment_layers is {size}; use 0 (no segments), or the layers of a segment, such as 4")
        if size > 1 and all(word == "none" for word in self.measures or (self.measure,)):
            raise ModelError(
                f"segment_layers is {size}: of so many layers that recompute the first one's input is kept, and no "
                "layer recomputes; use activation_checkpointing 'full' or 'selective', or segment_layers 0"
            )
        layers, depths = len(layer_list(model)[1]), len(model_depths(model))
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
        """Make the store in which all layers of a rank keep tensors on the host; None if no layer does.

        Entered by all ranks. Raises ModelError where a host has less free memory than its ranks' `host_bytes`.
        """
        if not self.waits_on_host:
            return None
        if self.host_bytes:
            check_host_room(self.host_bytes, world, "activations on the host take")
        arena = HostArena(world.device, self.host_bytes)
        arena.close_with_world(world)
        return HostOffload(arena)

    def apply_measures(self, model: PreTrainedModel, offload: HostOffload | None) -> None:
        """Have the layers that are here, of a whole model or of a stage, keep what their measures say.

        A layer that keeps nothing on the host, behind one that does, only tells the offload that it runs, so that
        tensors of earlier layers leave the device.
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
        """All layers of one depth of multi-token prediction share the measure of that depth; they come last."""
        name, layers = layer_list(model)
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
    run: Callable[..., Any],
    *args: Any,
    measure: Measure,
    offload: HostOffload | None = None,
    first: bool = False,
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
    with park_saved_tensors(park) if park is not None else nullcontext():
        return checkpoint(run, *args, use_reentrant=False, context_fn=contexts)
