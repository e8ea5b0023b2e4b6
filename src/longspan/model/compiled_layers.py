"""Decoder layers compiled by torch.compile: each as two halves around attention, or only its norms and MLPs.

A layer's own forward is compiled, once for all layers of a kind and any number of rows from two on. What this package
puts inside a layer (attention, mixers, experts, what crosses ranks) runs between the graphs, as it would without them,
and linears in float8 by operators of their own inside: a dense layer is two graphs, one of experts four, and tensor
parallelism adds one for each sum or gather. Elementwise passes, which are a sixth of a layer of Qwen3-8B's size over
16K rows, become few: norms and residuals, norms of heads and rotary angles, SwiGLU and its gradients.

transformers runs the checkpoint of a recomputed layer around the layer's call (5.17) or inside its forward (5.23), and
torch.compile around a checkpoint that has contexts compiles nothing, without a word. So graphs are always made within
the checkpoint. Norms inside run by their class's own code, which the compiler fuses: in half precision it rounds once
where that code rounds between operations.

Not covered: layers whose forward was replaced on the instance; their norms and MLPs are compiled, and `CompiledParts`
says so.
"""

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from types import FunctionType, MethodType
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from longspan.errors import ModelError, plural
from longspan.model.activations.tiles import TiledForward
from longspan.model.experts.moe import note_layer_arguments, remove_argument_hooks
from longspan.model.layers import decoder_layers, expert_modules
from longspan.model.mtp.depths import MtpBlocks, model_depths
from longspan.model.seams.forwards.norms import runs_in_one_pass, use_class_norms
from longspan.model.seams.mixers import find_mixers, run_outside_graphs
from longspan.plan.cost.machine import Compiled, resolve_compiled_parts

BACKEND = "inductor"
RECOMPILES = 64  # kinds of layers that share a class, in training and in evaluation
_IS_COMPILED = "is_compiled_layer"
_STARTING = Lock()  # held while processes that compile are started
_FUNCTIONS = (FunctionType, MethodType)


def read_compiled_parts(word: bool | str, model: nn.Module, device: torch.device, tp: int = 1) -> Compiled:
    """Return what `compiled` stands for: True is "modules", False "none", "auto" a choice for this model and device.

    "auto" is "layers" on GPUs for models of 2,048 features or more without tensor parallelism, else "none".
    Raises ModelError for an unknown word.

    >>> read_compiled_parts("auto", model, torch.device("cpu"))
    'none'
    """
    word = ("modules" if word else "none") if isinstance(word, bool) else word
    if word not in get_args(Compiled):
        raise ModelError(f"compiled is {word!r}; use {', '.join(map(repr, get_args(Compiled)))}, True or False")
    if word == "auto":
        # Another class of model is refused later, by `check_model`.
        if device.type != "cuda" or not isinstance(model, PreTrainedModel):
            return "none"
        return resolve_compiled_parts("auto", hidden=model.config.get_text_config().hidden_size, tp=tp)
    return cast(Compiled, word)


@dataclass(frozen=True)
class CompiledParts:
    """How many layers are compiled around attention, how many only in norms and MLPs, and why these are not."""

    layers: int = 0
    in_modules: int = 0
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Say in one line what is compiled; "" where nothing is."""
        words = [f"{plural(self.layers, 'layer')} around attention"] if self.layers else []
        if self.in_modules:
            because = f" ({'; '.join(self.reasons)})" if self.reasons else ""
            words.append(f"norms and MLPs of {plural(self.in_modules, 'layer')}{because}")
        return ", ".join(words)


def compile_layers(models: Sequence[PreTrainedModel], word: Compiled) -> CompiledParts:
    """Compile decoder layers in place, of the models (stages) that were placed on this rank, each at its first call.

    >>> str(compile_layers([model], "layers"))
    '36 layers around attention'
    """
    if word == "none":
        return CompiledParts()
    whole_layers, layers_in_modules, reasons = 0, 0, dict[str, None]()
    for layer in _all_layers(models):
        reason = "" if word == "modules" else _refusal_of_layer(layer)
        if word == "layers" and not reason:
            _compile_layer(layer)
            whole_layers += 1
        else:
            _compile_modules(layer)
            layers_in_modules += 1
            reasons |= {reason: None} if reason else {}
    return CompiledParts(whole_layers, layers_in_modules, tuple(reasons))


def graphs_text() -> str:
    """Return in words how many graphs this process has made, and in what time; "" if none.

    With kernels in torch's cache on disk the time is shorter.
    """
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    seconds = torch._dynamo.utils.calculate_time_spent()["total_wall_time"]
    return f"{plural(graphs, 'graph')} of layers compiled in {seconds:.1f} s" if graphs else ""


def is_compiled(model: nn.Module) -> bool:
    """Return whether anything inside a model is compiled."""
    return any(module._compiled_call_impl is not None or _IS_COMPILED in vars(module) for module in model.modules())


def _all_layers(models: Iterable[PreTrainedModel]) -> Iterator[nn.Module]:
    for model in models:
        yield from decoder_layers(model).values()
        for depth in model_depths(model):
            yield from [*depth.mtp_block] if isinstance(depth.mtp_block, MtpBlocks) else [depth.mtp_block]


def _refusal_of_layer(layer: nn.Module) -> str:
    if "forward" in vars(layer) or not inspect.isfunction(_own_forward(layer)):
        return f"the forward of {type(layer).__name__.removeprefix('FSDP')} was replaced"
    return ""


def _compile_modules(layer: nn.Module) -> None:
    """Norms that run by a kernel of our own are left as they are. Of what runs in tiles, the forward of one is
    compiled.
    """
    for inner in layer.modules():
        if _compile_tiles(inner):
            continue
        if type(inner).__name__.endswith(("RMSNorm", "MLP")) and not runs_in_one_pass(inner):
            inner.compile(dynamic=True, backend=BACKEND)


def _compile_tiles(module: nn.Module) -> bool:
    forward = vars(module).get("forward")
    if not isinstance(forward, TiledForward):
        return False
    forward.compile_run(BACKEND)
    return True


def _compile_layer(layer: nn.Module) -> None:
    _set_up_compiler()
    use_class_norms(_modules_in_graphs(layer))
    # Modules whose forward is an object run outside: a graph is tied to that object, so each layer would need its own.
    with_objects = [module for module in _modules_in_graphs(layer) if not isinstance(module.forward, _FUNCTIONS)]
    for module in (*find_mixers(layer).values(), *with_objects):
        _compile_tiles(module)
        run_outside_graphs(module)
    remove_argument_hooks(layer)  # `_LayerRun` does what they do
    run = torch.compile(_own_forward(layer), dynamic=True, backend=BACKEND)
    layer_run = _LayerRun(layer, run, has_experts=bool(expert_modules(layer)))
    setattr(layer, _IS_COMPILED, True)
    # In transformers 5.23 the class's forward runs the checkpoint; in 5.17 the call does.
    in_forward = isinstance(layer, GradientCheckpointingLayer) and "__call__" not in vars(GradientCheckpointingLayer)
    layer.forward = partial(_run_within_checkpoint, layer_run) if in_forward else layer_run


def _set_up_compiler() -> None:
    """Set how dynamo compiles in this process, also what else is compiled in it.

    The cache of shapes is off, and numbers such as a norm's epsilon are constants. Of the 35 s that the graphs of a
    dense layer with adapters took on a CPU, that cache took 9, as it compares formulas with all that it holds; and each
    graph was traced anew once the compiler had found that a number does not change (5 s).
    """
    config: Any = torch._dynamo.config
    config.nested_graph_breaks = True  # a call of attention ends one graph, not one for each function around it
    config.recompile_limit = max(config.recompile_limit, RECOMPILES)
    config.fake_tensor_cache_enabled = False
    config.specialize_float = True


def start_compile_workers(ranks_of_host: int) -> None:
    """Start early the processes that compile kernels, so that they import torch while weights are filled.

    The `ranks_of_host` ranks of this host share its cores, one for each process. May be called from several threads;
    only the first call starts processes.
    """
    from torch._inductor import async_compile
    from torch._inductor import config as inductor

    with _STARTING:
        cores = len(os.sched_getaffinity(0))
        inductor.compile_threads = max(1, min(inductor.compile_threads or cores, cores // ranks_of_host))
        async_compile.maybe_warm_pool()


def unfuse_norms_in_graphs(model: PreTrainedModel) -> None:
    """Let the norms that graphs will contain, those of layers outside mixers, run by their class's own code again."""
    for layer in _all_layers([model]):
        use_class_norms(_modules_in_graphs(layer))


def _modules_in_graphs(layer: nn.Module) -> list[nn.Module]:
    outside = {inner for mixer in find_mixers(layer).values() for inner in mixer.modules()}
    return [module for module in layer.modules() if module not in outside]


def _own_forward(layer: nn.Module) -> Callable[..., Any]:
    return inspect.unwrap(type(layer).forward)


class _LayerRun:
    """A layer's compiled forward (`run`), which takes the arguments of its class's forward.

    Of a layer that `has_experts` it notes the arguments, as the hook did that `_compile_layer` has removed.
    """

    def __init__(self, layer: nn.Module, run: Callable[..., Any], *, has_experts: bool) -> None:
        self.layer, self.run, self.has_experts = layer, run, has_experts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graphs; for a single row, which would take a graph of its own, run the class's code.

        Rows that do not fit the graphs are made to require a gradient (`_Begun`), so that they run the same graphs.
        """
        if self.has_experts:
            note_layer_arguments(kwargs)
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        if hidden.shape[1] == 1:
            return _own_forward(self.layer)(self.layer, *args, **kwargs)
        # Graphs differ for views and other tensors. Rows from FSDP2 are views, those that transformers 5.17 recomputes
        # from are not; made views here, all run the same graphs.
        if self._fits_graphs(hidden):
            hidden = hidden.view_as(hidden)
        else:
            hidden = _Begun.apply(hidden, hidden.new_empty(()).requires_grad_())
        if args:
            return self.run(self.layer, hidden, *args[1:], **kwargs)
        return self.run(self.layer, **kwargs | {"hidden_states": hidden})

    def _fits_graphs(self, hidden: Tensor) -> bool:
        """Graphs for training are made for rows that require a gradient. A layer that computes none for its weights
        (they are frozen, or gradients are off) has graphs of its own, and takes rows as they come.
        """
        if hidden.requires_grad or not torch.is_grad_enabled():
            return True
        return not any(parameter.requires_grad for parameter in self.layer.parameters())


class _Begun(torch.autograd.Function):
    """Makes rows require a gradient, which backward then drops: those of the first layer above a frozen embedding.

    That layer then runs the same graphs as the others, which take seconds to compile; computing a gradient that is
    dropped costs three products, 0.2 % of a step of 36 layers.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, leaf: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None


def _run_within_checkpoint(layer_run: _LayerRun, *args: Any, **kwargs: Any) -> Any:
    layer: Any = layer_run.layer
    if layer.gradient_checkpointing and layer.training:
        return layer._gradient_checkpointing_func(partial(layer_run, **kwargs), *args)
    return layer_run(*args, **kwargs)
