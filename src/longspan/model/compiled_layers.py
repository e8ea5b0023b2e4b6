"""Decoder layers compiled by torch.compile, each as two halves around attention.

All layers of a kind share graphs, for two rows or more; attention, mixers, experts and what crosses ranks run between
them. They are inside a layer's checkpoint (which is around its call in transformers 5.17, in its forward in 5.23), as
torch compiles nothing around a checkpoint with contexts. Layers with a forward of their own are left as they are.
"""

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from types import FunctionType, MethodType
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from longspan.comm.autograd import break_graphs_around
from longspan.errors import ModelError, plural
from longspan.model.activations.tiles import TiledForward
from longspan.model.feature import Call, Feature
from longspan.model.kinds import class_forward, find_mixers
from longspan.model.layers import architecture_name, layers_and_mtp_blocks
from longspan.model.marks import IS_COMPILED
from longspan.model.seams.norms import restore_class_norms
from longspan.plan.cost.machine import resolve_compiled_parts
from longspan.plan.form import Compiled

BACKEND = "inductor"
RECOMPILES = 64  # kinds of layers that share a class, in training and in evaluation
_STARTING = Lock()  # held while processes that compile are started


class CompiledFeature(Feature):
    """Compiled layers; "auto" may choose none."""

    def __init__(self, call: Call) -> None:
        """Start the processes that compile, on GPUs, while the model is checked."""
        super().__init__(call)
        device = self.world.device
        self._parts = choose_compiled_parts(self.options.compiled, call.model, device, self.world.home.tp)
        if self._parts != "none" and device.type == "cuda":
            home = self.world.home
            start_compile_workers(min(len(home.ranks), self.world.node_size * home.tp))  # node_size counts slots

    def connect(self, model: PreTrainedModel) -> None:
        """Give norms outside of mixers the class's forward again: the compiler fuses them in its graphs itself."""
        if self._parts != "none":
            for layer in layers_and_mtp_blocks(model).values():
                restore_class_norms(_modules_in_graphs(layer))

    def finish(self, prepared: Any, models: Sequence[PreTrainedModel]) -> None:
        """Compile the layers here, and describe what was compiled."""
        if self._parts != "none":
            self.words["compiled"] = compile_layers(models)


def choose_compiled_parts(word: str, model: nn.Module, device: torch.device, tp: int = 1) -> Compiled:
    """Return "layers" or "none"; "auto" is "layers" on GPUs for models of 2,048 features or more without tensor
    parallelism. Raises ModelError for an unknown word.

    >>> choose_compiled_parts("auto", model, torch.device("cpu"))
    'none'
    """
    if word not in get_args(Compiled):
        raise ModelError(f"compiled is {word!r}; use {', '.join(map(repr, get_args(Compiled)))}")
    if word == "auto":
        # Another class of model is refused later, by `check_model`.
        if device.type != "cuda" or not isinstance(model, PreTrainedModel):
            return "none"
        return resolve_compiled_parts("auto", hidden=model.config.get_text_config().hidden_size, tp=tp)
    return cast(Compiled, word)


def compile_layers(models: Sequence[PreTrainedModel]) -> str:
    """Compile decoder layers in place, of the models (stages) that were placed on this rank, each at its first call.

    Layers whose forward is not the plain function of their class are left. Returns in words what is compiled, and what
    is not.

    >>> compile_layers([model])
    '36 layers around attention'
    """
    layers = [layer for model in models for layer in layers_and_mtp_blocks(model).values()]
    replaced = [x for x in layers if "forward" in vars(x) or not inspect.isfunction(class_forward(x))]
    for layer in layers:
        if layer not in replaced:
            _compile_one_layer(layer)
    classes = " and ".join(dict.fromkeys(map(architecture_name, replaced)))
    left_out = f", {plural(len(replaced), 'layer')} not: the forward of {classes} was replaced" if replaced else ""
    return f"{plural(len(layers) - len(replaced), 'layer')} around attention{left_out}"


def compiled_graphs_text() -> str:
    """Return in words how many graphs this process has made, and in what time; "" if none."""
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    seconds = torch._dynamo.utils.calculate_time_spent()["total_wall_time"]
    if graphs:
        return f"{plural(graphs, 'graph')} of layers compiled in {seconds:.1f} s"
    return ""


def _compile_one_layer(layer: nn.Module) -> None:
    """Changes settings of torch's compiler for the whole process."""
    config: Any = torch._dynamo.config
    config.nested_graph_breaks = True  # a call of attention ends one graph, not one for each function around it
    config.recompile_limit = max(config.recompile_limit, RECOMPILES)
    # This cache of shapes took 9 of 35 s for a dense layer's graphs on a CPU.
    config.fake_tensor_cache_enabled = False
    # Otherwise each graph is traced anew (5 s) once torch finds that a number does not change.
    config.specialize_float = True
    in_graphs = _modules_in_graphs(layer)
    restore_class_norms(in_graphs)
    # Modules whose forward is an object run outside: a graph is tied to that object, so each layer would need its own.
    modules_outside = [module for module in in_graphs if not isinstance(module.forward, (FunctionType, MethodType))]
    for module in (*find_mixers(layer).values(), *modules_outside):
        forward = vars(module).get("forward")
        if isinstance(forward, TiledForward):  # an MLP in tiles: what runs on one tile is compiled
            forward.run = torch.compile(forward.run, dynamic=True, backend=BACKEND)
        # torch.compile ends its graph before a call of this module and begins another one after it
        vars(module)["forward_outside_graphs"] = module.forward
        module.forward = MethodType(_forward_outside_graphs, module)
    layer_run = _CompiledForward(layer, torch.compile(class_forward(layer), dynamic=True, backend=BACKEND))
    setattr(layer, IS_COMPILED, True)
    # In transformers 5.23 the class's forward runs the checkpoint; in 5.17 the call does.
    forward_checkpoints = isinstance(layer, GradientCheckpointingLayer) and "__call__" not in vars(
        GradientCheckpointingLayer
    )
    layer.forward = partial(_run_within_checkpoint, layer_run) if forward_checkpoints else layer_run


@break_graphs_around
def _forward_outside_graphs(module: Any, *args: Any, **kwargs: Any) -> Any:
    """A graph of a compiled layer ends before it, and another begins after."""
    return module.forward_outside_graphs(*args, **kwargs)


def start_compile_workers(ranks_of_host: int) -> None:
    """Start early, from any thread, the processes that compile kernels.

    `ranks_of_host` ranks share the host's cores.
    """
    from torch._inductor import async_compile, config as inductor

    with _STARTING:
        cores = len(os.sched_getaffinity(0))
        inductor.compile_threads = max(1, min(inductor.compile_threads or cores, cores // ranks_of_host))
        async_compile.maybe_warm_pool()


def _modules_in_graphs(layer: nn.Module) -> list[nn.Module]:
    mixer_modules = {inner for mixer in find_mixers(layer).values() for inner in mixer.modules()}
    return [module for module in layer.modules() if module not in mixer_modules]


@dataclass(eq=False)
class _CompiledForward:
    """A layer's compiled forward: `run` is its class's, compiled."""

    layer: nn.Module
    run: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled forward on hidden states (1, T, D), made to look alike in every pass, so that graphs are
        shared.

        A single row would take a graph of its own: the class's code runs it.
        """
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        if hidden.shape[1] == 1:
            return class_forward(self.layer)(self.layer, *args, **kwargs)
        # torch makes other graphs for views than for other tensors. Rows from FSDP2 are views, those that transformers
        # 5.17 recomputes from are not: all are made views here. It also makes other graphs for rows that require no
        # gradient, so that in training all rows are made to require one.
        trains = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.layer.parameters())
        if hidden.requires_grad or not trains:
            hidden = hidden.view_as(hidden)
        else:
            hidden = _RequireGradient.apply(hidden, hidden.new_empty(()).requires_grad_())
        if args:
            return self.run(self.layer, hidden, *args[1:], **kwargs)
        return self.run(self.layer, **kwargs | {"hidden_states": hidden})


class _RequireGradient(torch.autograd.Function):
    """Makes rows require a gradient, which backward drops: those of the first layer above a frozen embedding.

    That layer then runs the same graphs as the others, and computes three products more: 0.2 % of a step of 36 layers.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, leaf: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None


def _run_within_checkpoint(layer_run: _CompiledForward, *args: Any, **kwargs: Any) -> Any:
    """The compiled forward goes inside the checkpoint that the layer's class runs itself."""
    layer: Any = layer_run.layer
    if layer.gradient_checkpointing and layer.training:
        return layer._gradient_checkpointing_func(partial(layer_run, **kwargs), *args)
    return layer_run(*args, **kwargs)
