"""Decoder layers compiled around attention: how many graphs there are, and that the numbers stay those of the layer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager, eager
from torch.torch_version import TorchVersion
from transformers import PreTrainedModel

from longspan import Layout, World, load_model, plan_fixed, prepare, run_step
from longspan.config.file import load_config
from longspan.errors import ModelError
from longspan.model import compiled_layers
from longspan.model.adapters.new_adapter import NewAdapter, add_lora
from longspan.model.compiled_layers import choose_compiled_parts, compile_layers
from longspan.model.execution import model_execution
from longspan.model.layers import decoder_layers
from longspan.model.presets import PRESETS, preset_config
from longspan.testing import backend, run_ranks
from longspan.train import share_prefixes
from tests.model.float8.dense import float8_on_cpus, random_model
from tests.model.stock import VOCABULARY, gradients_of, prepare_untried, texts, tiny, worst
from tests.train.own_loss.test_families import documents_of

LENGTHS = (13, 30, 7, 18)
OTHERS = (40, 3, 9)
pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler warns, and hides that, where warnings are no errors


class Graphs:
    """A backend that runs operators one by one, and counts the graphs that are made and those that are run."""

    def __init__(self, compile_graph: Callable[..., Any] = aot_eager) -> None:
        self.made, self.runs, self.compile_graph = list[int](), 0, compile_graph

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        run = self.compile_graph(graph, inputs)

        def counted(*args: Any) -> Any:
            self.runs += 1
            return run(*args)

        return counted

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Compile by this backend inside, and note how many graphs were made and stayed."""
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        with patch.object(compiled_layers, "BACKEND", self):
            yield
        self.made.append(torch._dynamo.utils.counters["stats"]["unique_graphs"] - before)


def take_step(model: nn.Module, world: World, lengths: tuple[int, ...], *, backward: bool = True) -> dict[str, Tensor]:
    cp = world.home.slots
    plan = plan_fixed(lengths, world.home, cp=cp, max_tokens_per_slot=96, row_multiple=world.home.tp)
    model.zero_grad(set_to_none=True)
    result = run_step(model, plan, texts(lengths), world, backward=backward)
    stages = getattr(model, "stages", None)
    parts = [stage.model for stage in stages] if stages else [model]
    gradients = {f"{i}.{name}": x for i, part in enumerate(parts) for name, x in gradients_of(part).items()}
    return {"loss": torch.tensor(result.loss, dtype=torch.float64)} | gradients


WITH_EVALUATION = ("full", "none", "selective+evaluation")


@pytest.mark.parametrize("measures", [("selective",), pytest.param(WITH_EVALUATION, marks=pytest.mark.whole)])
def test_layers_are_two_graphs_whatever_is_recomputed(measures: tuple[str, ...]) -> None:
    """Of all layers and lengths; recomputation runs them again, and evaluation has two of its own."""
    torch.compiler.reset()
    graphs = Graphs(aot_eager if measures is WITH_EVALUATION else eager)
    with World(Layout(ranks=1)) as world:
        for words in measures:
            measure, _, evaluation = words.partition("+")
            how = {"activation_checkpointing": measure}
            expected = take_step(prepare_untried(tiny("qwen3", torch.float64), world, **how), world, LENGTHS)
            with graphs.counted():
                make = prepare if measures is WITH_EVALUATION else prepare_untried
                model = make(tiny("qwen3", torch.float64), world, compiled="layers", **how)
                graphs.runs = 0
                got = take_step(model, world, LENGTHS)
                assert graphs.runs == (4 if measure == "none" else 8), measure
                take_step(model, world, OTHERS)
            assert worst(got, expected) == 0, measure
            for lengths in (OTHERS, LENGTHS, (1,)) if evaluation else ():  # a single row runs by the class's code
                with graphs.counted():
                    take_step(model, world, lengths, backward=False)
    assert graphs.made == ([2, 0, 0, 2, 0, 0] if measures is WITH_EVALUATION else [2])


def preset_model(preset: str, dtype: str = "float64") -> PreTrainedModel:
    return load_model(config=preset_config(preset, vocab_size=VOCABULARY), dtype=dtype, seed=0)


def with_adapter() -> PreTrainedModel:
    """Its frozen embedding gives the first layer rows without a gradient, which run the same graphs."""
    model = add_lora(tiny("qwen3", torch.float64), NewAdapter(rank=4, seed=0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter += torch.linspace(-1, 1, parameter.numel(), dtype=torch.float64).view_as(parameter)
    return model


OF_FAMILIES = ("qwen3-moe-tiny", "qwen3-next-tiny", "gpt-oss-tiny", "an adapter", "inductor")
SELECTIVE: dict[str, Any] = {"activation_checkpointing": "selective"}
TILES = SELECTIVE | {"mlp_tile_tokens": 16}
BETWEEN: dict[str, tuple[Callable[[], PreTrainedModel], dict[str, Any], float, range]] = {  # error and graphs at most
    "qwen3-moe-tiny": (partial(preset_model, "qwen3-moe-tiny"), SELECTIVE, 1e-12, range(4, 5)),
    "granite-hybrid-tiny": (partial(preset_model, "granite-hybrid-tiny"), SELECTIVE, 1e-12, range(6, 7)),
    "qwen3-next-tiny": (partial(preset_model, "qwen3-next-tiny"), SELECTIVE, 1e-12, range(6, 7)),
    # its first half once with a window and once without
    "gpt-oss-tiny": (partial(preset_model, "gpt-oss-tiny"), SELECTIVE, 1e-12, range(5, 6)),
    "an adapter": (with_adapter, {}, 1e-12, range(2, 3)),
    "tiles": (partial(preset_model, "qwen3-tiny"), TILES, 1e-12, range(1, 7)),
    "tiles and experts": (partial(preset_model, "qwen3-moe-tiny"), TILES, 1e-12, range(1, 7)),
    "float8": (random_model, SELECTIVE | {"float8": "rowwise"}, 0.0, range(2, 3)),
}


def take_both(make: Callable[[], Any], world: World, graphs: Graphs, how: dict[str, Any]) -> tuple[float, Any]:
    """The error of a compiled model's step beside one that is not, and that model; a second step has other lengths."""
    answers = list[dict[str, Tensor]]()
    for compiled in ("none", "layers"):
        with graphs.counted():
            model: Any = prepare(make(), world, compiled=compiled, **how)
            answers.append(take_step(model, world, LENGTHS))
            take_step(model, world, OTHERS)
    return worst(answers[1], answers[0]), model


@pytest.mark.whole
@pytest.mark.parametrize("case", BETWEEN)
def test_experts_mixers_adapters_tiles_and_float8_run_in_and_between_graphs(case: str) -> None:
    torch.compiler.reset()
    make, how, limit, of_layers = BETWEEN[case]
    graphs = Graphs()
    with float8_on_cpus() if case == "float8" else nullcontext(), World(Layout(ranks=1)) as world:
        error, model = take_both(make, world, graphs, how)
        layers = len(decoder_layers(model))
        assert case not in PRESETS or model_execution(model).words["compiled"] == f"{layers} layers around attention"
    assert error <= limit and graphs.made[0] == 0 and graphs.made[1] in of_layers


def take_step_of_families(model: nn.Module, world: World) -> dict[str, Tensor]:
    shared = share_prefixes(documents_of(), least_rows=3)
    model.zero_grad(set_to_none=True)
    plan = plan_fixed(shared.lengths, world.home, 1, parents=shared.parents, targets=shared.targets)
    result = run_step(model, plan, shared, world)
    return {"loss": torch.tensor(result.loss, dtype=torch.float64)} | gradients_of(model)


@pytest.mark.whole
@pytest.mark.parametrize("case", ["qwen3", *(name for name in (*BETWEEN, "inductor") if name in OF_FAMILIES)])
def test_documents_that_share_prefixes_run_the_same_graphs(case: str) -> None:
    """As attention, states and routers are between graphs; with torch's own compiler too, which rounds as it fuses."""
    torch.compiler.reset()
    make, how, _, of_layers = BETWEEN.get(case, (partial(tiny, "qwen3", torch.float64), SELECTIVE, 0.0, range(2, 3)))
    graphs, answers = Graphs(aot_eager), []
    with World(Layout(ranks=1)) as world:
        for compiled in ("none", "layers"):
            with graphs.counted() if case != "inductor" else nullcontext():
                model = prepare(make(), world, compiled=compiled, **how)
                take_step(model, world, LENGTHS)
                answers.append(take_step_of_families(model, world))
    assert worst(answers[1], answers[0]) <= (1e-5 if case == "inductor" else 1e-12)
    assert case == "inductor" or graphs.made[1] in of_layers


HOMES: dict[str, tuple[Layout, str, dict[str, Any]]] = {
    "cp 2": (Layout(ranks=2), "qwen3-tiny", {"activation_checkpointing": "selective"}),
    "tp 2, rows split": (Layout(ranks=2, tp=2), "qwen3-tiny", {"sequence_parallel": True}),
    "pp 2": (Layout(ranks=2, pp=2), "qwen3-tiny", {"activation_checkpointing": "full"}),
    "ep 2": (Layout(ranks=2, ep=2), "qwen3-moe-tiny", {}),
}


def layers_under_home(rank: int, home: str) -> tuple[float, int]:
    layout, preset, how = HOMES[home]
    graphs = Graphs()
    with World(layout, backend=backend()) as world:
        return take_both(partial(preset_model, preset), world, graphs, how)[0], graphs.made[1]


@pytest.mark.whole
@pytest.mark.parametrize("home", HOMES)
def test_layers_under_every_home(home: str) -> None:
    # Under tensor parallelism graphs end at each sum; before torch 2.13 also where views replace a module's attributes.
    of_tensor_parallelism = 12 if TorchVersion(torch.__version__) >= (2, 13) else 15
    for error, graphs in run_ranks(layers_under_home, 2, home):
        assert error <= 1e-12
        assert 0 < graphs <= (of_tensor_parallelism if "tp" in home else 4), graphs


def rounding_errors(device: str, dtype: torch.dtype) -> dict[str, float]:
    errors = {}
    with World(Layout(ranks=1)) as world:
        expected = take_step(prepare_untried(tiny("qwen3", torch.float64), world), world, LENGTHS)
        for compiled in ("none", "layers"):
            how = {"fused_norms": "off", "activation_checkpointing": "selective"}
            got = take_step(prepare(tiny("qwen3", dtype), world, compiled=compiled, **how), world, LENGTHS)
            errors[compiled] = worst({name: x.double() for name, x in got.items()}, expected)
    return errors


@pytest.mark.gpu
def test_generated_kernels_compute_the_formulas_and_round_no_more_often() -> None:
    torch.compiler.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    errors = rounding_errors("cuda", torch.float32)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 2
    assert errors["layers"] <= max(2e-6, 1.2 * errors["none"]), errors
    in_half = rounding_errors("cuda", torch.bfloat16)
    assert in_half["layers"] <= 1.2 * in_half["none"], in_half


def test_words_of_the_option() -> None:
    model, cpu, gpu = tiny("qwen3"), torch.device("cpu"), torch.device("cuda")
    for word, parts in (("none", "none"), ("auto", "none"), ("layers", "layers")):
        assert choose_compiled_parts(word, model, cpu) == parts
    assert choose_compiled_parts("auto", model, gpu) == "none"
    model.config.hidden_size = 2048
    assert [choose_compiled_parts("auto", model, gpu, tp) for tp in (1, 2)] == ["layers", "none"]
    with pytest.raises(ModelError, match="compiled is 'all'; use 'auto', 'layers', 'none'"):
        choose_compiled_parts("all", model, cpu)
    for value, word in ((True, "layers"), (False, "none"), ("layers", "layers"), ("auto", "auto")):
        assert load_config(overrides={"train.compile": value}).train.compile == word


def test_layers_that_are_not_cut_are_named() -> None:
    model = tiny("qwen3")
    layer: Any = model.model.layers[1]
    layer.forward = partial(layer.forward)
    said = "1 layer around attention, 1 layer not: the forward of Qwen3DecoderLayer was replaced"
    assert compile_layers([model]) == said
