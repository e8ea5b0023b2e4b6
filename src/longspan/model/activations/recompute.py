"""Which activations of decoder layers are kept for backward, which are recomputed, and which wait on the host.

A layer's policy keeps: "none" all; "full" its input; "selective" attention's output and log-sum-exp too; "exchanged"
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
from torch.utils.checkpoint import DefaultDeviceType, checkpoint, noop_context_fn
from transformers import PreTrainedModel

from longspan.attention.saved_outputs import Recording, ReentrantContext, Result
from longspan.errors import ModelError
from longspan.model.activations.host_offload import HOST_OFFLOAD, HostOffload
from longspan.model.execution import Execution
from longspan.model.feature import Call, Feature
from longspan.model.fsdp_params import gather_parameters
from longspan.model.host_arena import HostArena, check_free_host_memory
from longspan.model.layers import Absent, layers_of_all_stages, mtp_depths
from longspan.plan.form import CHECKPOINT_POLICIES, CheckpointPolicy

Run = Callable[..., Any]  # a layer's call, without the checkpoint
MakeContext = Callable[[], AbstractContextManager[Any]]  # makes a context anew at each call


def current_autocast_factory(x: Tensor) -> MakeContext:
    """Return a function that makes the autocast context that is on now, for the device of `x`, at a later time.

    Its cache is off: a tile would use the cast weights of the tile before, whose graph autograd has freed.
    """
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return nullcontext
    dtype = torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype, cache_enabled=False)


def has_active_dropout(module: nn.Module) -> bool:
    """Return whether a module has nn.Dropout that draws now: of a rate above 0, in training."""
    return any(isinstance(m, nn.Dropout) and m.p > 0 and m.training for m in module.modules())


def random_states(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return the states of the random generators of the host and of a device (None if it is not a GPU)."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


@contextmanager
def use_random_states(states: tuple[Tensor, Tensor | None] | None, device: torch.device) -> Iterator[None]:
    """Set the random generators to these states inside, and then put the caller's back; None changes nothing."""
    if states is None:
        yield
        return
    host_state, device_state = states
    with torch.random.fork_rng(devices=[] if device_state is None else [device]):
        torch.set_rng_state(host_state)
        if device_state is not None:
            torch.cuda.set_rng_state(device_state, device)
        yield


# ---- segments of layers


@dataclass(eq=False)
class LayerSegments:
    """The segments of a model's layers, of at most `size` each: `run_layer` runs one layer of a pass."""

    size: int
    # the call before, which only its graph keeps alive
    _last_link: "weakref.ref[_SegmentCall] | None" = None

    def run_layer(
        self, layer: nn.Module, run: Run, *args: Any, policy: str, offload: HostOffload | None, first: bool
    ) -> Any:
        """Call a layer under a checkpoint; only a segment's first layer keeps its input.

        A layer joins the segment of the call before if its input is what that call returned. A kept input waits on the
        host if `policy` ends with "+host"; `first`: no layer before it in this pass keeps tensors there.
        """
        last_link = self._last_link and self._last_link()
        follows = last_link is not None and last_link.place + 1 < self.size and last_link.has_returned(args[0])
        link = _SegmentCall(layer, run, args, policy, last_link if follows else None)
        keep: Callable[[Tensor], Callable[[], Tensor]] = _keep_in_place
        if link.before is not None:
            keep = link.forget_input
            if offload is not None:  # tensors of earlier layers leave the device as layers go by
                offload.count_empty_layer()
        elif offload is not None and policy.endswith("+host"):
            keep = offload.open_layer(first=first)
        with saved_tensors_hooks(partial(link.pack, keep), lambda fetch: fetch()):
            out = checkpoint(run, *args, use_reentrant=False, context_fn=link.contexts)
        hidden = out[0] if isinstance(out, tuple) else out
        link.output = weakref.ref(hidden)
        link.version = hidden._version
        self._last_link = weakref.ref(link)
        return out


def _keep_in_place(x: Tensor) -> Callable[[], Tensor]:
    return x.detach


class _SegmentCall:
    """One layer's call in a segment, linked to the call before it (None: the segment's first).

    `args` are those of the call: hidden states, then what every layer gets. `output` and `version` are set after it.
    """

    output: weakref.ref[Tensor]
    # torch counts up when the output is modified in place.
    version: int

    def __init__(
        self, layer: nn.Module, run: Run, args: tuple[Any, ...], policy: str, before: "_SegmentCall | None"
    ) -> None:
        x: Tensor = args[0]
        self.before = before
        self.place = 0 if before is None else before.place + 1
        self._layer = layer
        self._run = run
        self._other_args = args[1:]
        self._keeps_attention = not policy.startswith("full")
        self._keeps_exchanged = policy == "exchanged"
        self._recording: Recording | None = None
        # the checkpoint may save a view of its input, so memory tells it from other tensors
        self._memory = x.data_ptr(), x.shape, x.dtype
        self._input: Tensor | None = None  # made again for backward, until it is fetched
        # A segment's first layer fetches its kept input by this function.
        self._fetch_first: Callable[[], Tensor] | None = None
        self._states = random_states(x.device) if has_active_dropout(layer) else None
        self._autocast = current_autocast_factory(x)

    def has_returned(self, x: Tensor) -> bool:
        """Whether x is what this call returned, unchanged; the tensor object may differ, since wrappers make views."""
        out = self.output()
        if out is None or out._version != self.version or x._version != self.version:
            return False
        same_place = out.data_ptr() == x.data_ptr() and out.shape == x.shape and out.stride() == x.stride()
        return same_place and out.dtype == x.dtype

    def forget_input(self, x: Tensor) -> Callable[[], Tensor]:
        """Keep nothing of the input; to fetch it, the layers before run again."""
        return self.fetch_input

    def pack(self, keep: Callable[[Tensor], Callable[[], Tensor]], saved: Tensor) -> Callable[[], Tensor]:
        """The pack hook of the layer's checkpoint: return the function that fetches the tensor.

        The layer's input is kept by `keep`, all else in place. A segment's first layer also keeps a fetch that does not
        prefetch the layer before it (`ahead=False`, which only parked tensors have).
        """
        if (saved.data_ptr(), saved.shape, saved.dtype) != self._memory:
            return _keep_in_place(saved)
        fetch = keep(saved)
        # a segment is fetched ahead once the first layer of the one behind runs backward
        if self.before is None:
            self._fetch_first = partial(fetch, ahead=False) if isinstance(fetch, partial) else fetch
        return fetch

    def fetch_input(self) -> Tensor:
        """Return the input of this call; the layers before run again for it, unless a later layer's fetch did that."""
        if self._input is None:
            # The links go from the segment's first layer to this one.
            links: list[_SegmentCall] = [self]
            while links[0].before is not None:
                links.insert(0, links[0].before)
            fetch = links[0]._fetch_first
            assert fetch is not None
            x = fetch()
            for link, next_link in pairwise(links):
                x = next_link._input = link.run_again(x)
        x = self._input
        self._input = None
        assert x is not None
        return x

    @torch.no_grad()
    def run_again(self, x: Tensor) -> Tensor:
        """Return what this layer made of its input `x`, without a graph; attention's outputs are recorded on the way.

        The backward pass of this layer then takes them from the recording (`replay_attention`).
        """
        self._recording = Recording(keep_exchanged=self._keeps_exchanged) if self._keeps_attention else None
        with ExitStack() as stack:
            stack.enter_context(gather_parameters(self._layer))
            stack.enter_context(use_random_states(self._states, x.device))
            stack.enter_context(self._autocast())
            if self._recording is not None:
                stack.enter_context(self._recording.record_outputs())
            out = self._run(x, *self._other_args)
        return (out[0] if isinstance(out, tuple) else out).detach()

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts of the pass and of its recomputation, as torch's checkpoint asks for them."""
        return self._record_nothing(), ReentrantContext(self.replay_attention)

    def replay_attention(self) -> AbstractContextManager[None]:
        """Return a context in which attention's outputs come from the recording of `run_again`, once; else run anew."""
        recording = self._recording
        self._recording = None
        return self._record_nothing() if recording is None else recording.replay_outputs()

    def _record_nothing(self) -> AbstractContextManager[None]:
        """It must save the same tensors in the pass and in its recomputation, which may replay a recording."""
        if not self._keeps_attention:
            return nullcontext()
        return _EmptyRecording(keep_exchanged=self._keeps_exchanged).record_outputs()


class _EmptyRecording(Recording):
    """A recording that keeps no output: attention is computed."""

    def record_or_replay(
        self, compute: Callable[[], Result], inputs: Sequence[Tensor], indices: Tensor | None = None
    ) -> Result:
        """Compute, and keep nothing."""
        return compute()


_CHECKPOINTING = ("none", "full", "selective")


def uniform_policy(checkpointing: bool | str, *, offload: bool = False) -> CheckpointPolicy:
    """Return the policy of all layers by two options of `prepare`. ModelError for words that do not fit."""
    word = ("full" if checkpointing else "none") if isinstance(checkpointing, bool) else checkpointing
    if word not in _CHECKPOINTING:
        raise ModelError(f"activation_checkpointing is {word!r}; use one of {', '.join(_CHECKPOINTING)}")
    if word == "none" and offload:
        raise ModelError(
            "offload_activations moves what checkpointed layers keep; it needs activation_checkpointing "
            "'full' or 'selective'"
        )
    return cast(CheckpointPolicy, f"{word}+host" if offload else word)


class RecomputationFeature(Feature):
    """What layers keep for backward, what they recompute, and what waits on the host.

    A rank's arena on the host begins with `offload_bytes`; with 0 it grows in the first step. Of `segment_layers`
    layers in a row that recompute, only the first one's input waits for backward; 0: no segments.
    """

    def __init__(self, call: Call) -> None:
        """Read the policies of layers: one for all, or one for each. ModelError for words that are none."""
        super().__init__(call)
        options = self.options
        self._offload: HostOffload | None = None
        if options.checkpoint_policies is None:
            policies = uniform_policy(options.activation_checkpointing, offload=options.offload_activations)
        else:
            policies = options.checkpoint_policies
            for name in ("activation_checkpointing", "offload_activations"):
                if (value := getattr(options, name)) not in (False, "none"):
                    raise ModelError(
                        f"checkpoint_policies say what each layer keeps, and {name} is {value!r}; use one of them"
                    )
        # One policy is for all layers; several are for each decoder layer and then for each depth.
        self._is_one = isinstance(policies, str)
        self._policies = [policies] if isinstance(policies, str) else [*policies]
        if unknown := [word for word in self._policies if word not in CHECKPOINT_POLICIES]:
            raise ModelError(f"checkpoint_policies has {unknown[0]!r}; use {', '.join(CHECKPOINT_POLICIES)}")

    def refuse(self, model: PreTrainedModel) -> None:
        """Raise ModelError for segments that recompute nothing, a wrong number of policies, and unfit layers."""
        size = self.options.segment_layers
        if size < 0:
            raise ModelError(
                f"segment_layers is {size}; use 0 (no segments), or the layers of a segment, such as 4"
            )
        if size > 1 and all(word == "none" for word in self._policies):
            raise ModelError(
                f"segment_layers is {size}: of so many layers that recompute the first one's input is kept, and no "
                "layer recomputes; use activation_checkpointing 'full' or 'selective', or segment_layers 0"
            )
        layers = len(layers_of_all_stages(model))
        depths = len(mtp_depths(model))
        if not self._is_one and len(self._policies) != layers + depths:
            depths_text = f" and {depths} depths of multi-token prediction" if depths else ""
            raise ModelError(
                f"checkpoint_policies has {len(self._policies)} words; {type(model).__name__} has {layers} decoder "
                f"layers{depths_text}: give one word for each, or one for all"
            )
        for name, layer, policy in self._layer_policies(model):
            supported = model.supports_gradient_checkpointing and hasattr(layer, "gradient_checkpointing")
            if policy != "none" and not supported:
                raise ModelError(
                    f"{type(model).__name__}: {name} ({type(layer).__name__}) does not support activation "
                    "checkpointing; switch it off"
                )

    def convert(self, model: PreTrainedModel, execution: Execution) -> None:
        """Make the store in which layers keep tensors on the host, if any do.

        ModelError where the host has no room for it; and, on all ranks, where selective layers have other kernels of
        attention on some ranks. Where heads are exchanged, the kernel decides whether backward of such a layer sends
        the output or its products with dout: ranks would wait for messages of another size.
        """
        world = self.world
        if world.home.slots > 1 and any(word.startswith("selective") for word in self._policies):
            first, *others = world.control.gather_objects(execution.kernel_texts, "kernels of attention")
            for rank, kernels in zip(world.home.ranks[1:], others, strict=True):
                if kernels != first:
                    raise ModelError(
                        "selective layers need the same kernel of attention on every rank, for under a2a and a2a+p2p "
                        f"its backward decides what is sent; found {' and '.join(first)} on rank "
                        f"{world.home.ranks[0]}, {' and '.join(kernels)} on rank {rank}; name one that all ranks have "
                        "(attention_kernel=), install the same packages on every host, or recompute with 'full' or "
                        "'exchanged'"
                    )
        if any(word.endswith("+host") for word in self._policies):
            size = self.options.offload_bytes
            if size:
                check_free_host_memory(size, world, "activations on the host take")
            arena = HostArena(world.device, size)
            arena.close_when_world_is_left(world)
            self._offload = HostOffload(arena)

    def place(self, model: PreTrainedModel, root: nn.Module) -> None:
        """Have the layers that are here keep what their policies say.

        A layer that keeps nothing on the host, behind one that does, only tells the offload that it runs.
        """
        offload = self._offload
        first = True  # no layer so far keeps tensors on the host
        segments = LayerSegments(self.options.segment_layers) if self.options.segment_layers > 1 else None
        for _, layer, policy in self._layer_policies(model):
            # the attributes that transformers' gradient_checkpointing_enable sets, in 5.17 to 5.23
            module: Any = layer
            if policy != "none":
                run = run_checkpointed if segments is None else partial(segments.run_layer, layer)
                module._gradient_checkpointing_func = partial(run, policy=policy, offload=offload, first=first)
                module.gradient_checkpointing = True
            if policy.endswith("+host"):
                first = False
            elif offload is not None and not first:
                module.register_forward_pre_hook(lambda *_: offload.count_empty_layer())

    def _layer_policies(self, model: PreTrainedModel) -> list[tuple[str, nn.Module, str]]:
        layers = layers_of_all_stages(model)
        local_layers = [
            (i, name, layer) for i, (name, layer) in enumerate(layers.items()) if not isinstance(layer, Absent)
        ]
        for number, depth in enumerate(mtp_depths(model)):
            block = depth.mtp_block
            depth_layers = [*block] if isinstance(block, nn.ModuleList) else [block]
            local_layers += [
                (len(layers) + number, f"depth {number} of multi-token prediction", depth_layer)
                for depth_layer in depth_layers
            ]
        return [(name, layer, self._policies[0 if self._is_one else i]) for i, name, layer in local_layers]

    def finish(self, prepared: Any, models: Sequence[PreTrainedModel]) -> None:
        """Leave the store of tensors on the host at the model, None without one."""
        setattr(prepared, HOST_OFFLOAD, self._offload)


def run_checkpointed(
    run: Callable[..., Any], *args: Any, policy: str, offload: HostOffload | None = None, first: bool = False
) -> Any:
    """Call a layer, `run(*args)`, under a checkpoint of its own, which keeps what `policy` says.

    Transformers' layers call it as their checkpoint function. `first`: the first layer of a pass that parks on the
    host.
    """
    park = offload.open_layer(first=first) if offload is not None and policy.endswith("+host") else None
    contexts = noop_context_fn
    if not policy.startswith("full"):
        contexts = Recording(park, keep_exchanged=policy == "exchanged").contexts
    # Torch takes a GPU, where there is one, for the device of a checkpoint, and fails for rows on a CPU if a compiler
    # initialises that GPU inside.
    if args:
        DefaultDeviceType.set_device_type(args[0].device.type)
    # Inside, the checkpoint's own hooks are innermost: those that park see the layer's inputs and nothing else.
    with saved_tensors_hooks(park, lambda fetch: fetch()) if park is not None else nullcontext():
        return checkpoint(run, *args, use_reentrant=False, context_fn=contexts)
