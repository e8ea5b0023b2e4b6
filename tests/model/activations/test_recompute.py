"""Recomputed layers give the gradients of the stock model; kept attention is neither computed nor sent again."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import DefaultDeviceType, checkpoint, noop_context_fn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Llama4TextConfig, PreTrainedModel

from longspan.attention import attend
from longspan.attention.kernels import find_kernel
from longspan.attention.saved_outputs import Recording
from longspan.comm import Channel, World, bind
from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.model import execution, prepare
from longspan.model.activations.host_offload import HostOffload
from longspan.model.activations.recompute import run_checkpointed
from longspan.model.exactness.small_copies import make_tiny_model, shrink_configuration
from longspan.model.host_arena import HostArena
from longspan.plan import Group, MicroBatch, Plan, plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import run_step
from tests.model.mtp.dense import with_depths
from tests.model.stock import SIZES, Answer, gradients_of, prepare_untried, stock_answer, texts, tiny, worst

LENGTHS = (13, 1, 30, 7, 2, 18)
WAYS = ("none", "full", "selective")  # test_tiles.py has activations on the host
PLANS = {"qwen3": ("by hand",), "gpt-oss": ("all_gather",)}  # by hand: p2p and a2a
TYPES = {"qwen3": torch.float64, "gpt-oss": torch.float32}
TOLERANCE = {torch.float64: (1e-12, 1e-12), torch.float32: (1e-6, 1e-5)}


def by_hand() -> Plan:
    """Slots in several groups, and in none, and several micro-batches."""
    first = MicroBatch((Group((0,), (0,), (13,)), Group((0, 1), (2, 1), (30, 1)), Group((1,), (3,), (7,))))
    second = MicroBatch((Group((1, 0), (5,), (18,), "a2a"), Group((1,), (4,), (2,))))
    return Plan(2, LENGTHS, (first, second, MicroBatch()), targets=sum(LENGTHS) - len(LENGTHS))


def _compare(rank: int, exact: dict[str, Answer]) -> dict[object, tuple[float, float, int]]:
    of_cases, documents, sent = {}, texts(LENGTHS), list[int]()
    with pytest.MonkeyPatch.context() as monkeypatch, World(Layout(ranks=2), backend=backend()) as world:
        for name in ("exchange", "shift", "all_gather_rows", "all_to_all_rows"):
            monkeypatch.setattr(Channel, name, _noting(getattr(Channel, name), sent))
        plans = {"by hand": by_hand(), "all_gather": plan_fixed(LENGTHS, world.home, cp=2, cp_comm_type="all_gather")}
        for family, dtype in TYPES.items():
            stock = exact[family]
            for way in WAYS:
                model = tiny(family, dtype, attention="eager")
                how: dict[str, Any] = {"activation_checkpointing": way}
                tried = (family, way) == ("qwen3", "full")  # recomputation is tried
                (prepare if tried else prepare_untried)(model, world, **how)
                for name in PLANS[family]:
                    sent.clear()
                    loss = run_step(model, plans[name], documents, world).loss
                    errors = abs(loss / stock.loss - 1), worst(gradients_of(model), stock.gradients)
                    of_cases[way, family, dtype, name] = (*errors, len(sent))
                    model.zero_grad()
    return of_cases


def test_gradients_and_messages() -> None:
    exact = {family: stock_answer(family, dtype, texts(LENGTHS)) for family, dtype in TYPES.items()}
    for errors in run_ranks(_compare, 2, exact):
        assert len(errors) == len(WAYS) * 2
        for (way, family, dtype, name), (loss, gradients, sent) in errors.items():
            bounds = TOLERANCE[dtype]
            assert loss < bounds[0] and gradients < bounds[1], (way, family, name, loss, gradients)
            without = errors["none", family, dtype, name][2]
            if way.startswith("selective"):
                assert sent == without, (way, family, name)
            elif way.startswith("full"):
                assert sent > without, (way, family, name)


def llama4() -> PreTrainedModel:
    config = Llama4TextConfig(**SIZES, intermediate_size_mlp=48, num_local_experts=2)
    return AutoModelForCausalLM.from_config(config)


QWEN3 = partial(tiny, "qwen3")
REFUSED: list[tuple[Callable[[], PreTrainedModel], dict[str, Any], str]] = [
    (QWEN3, {"activation_checkpointing": "some"}, "activation_checkpointing is 'some'; use one of none, full, selec"),
    (QWEN3, {"offload_activations": True}, "needs activation_checkpointing 'full' or 'selective'"),
    (QWEN3, {"checkpoint_policies": "some"}, "checkpoint_policies has 'some'; use none, exchanged, selective, full, s"),
    (
        QWEN3,
        {"checkpoint_policies": ("none", "full", "full")},
        "checkpoint_policies has 3 words; Qwen3ForCausalLM has 2 decoder layers: give one",
    ),
    (
        partial(with_depths, "qwen3", 2),
        {"checkpoint_policies": ("none", "full")},
        "has 2 decoder layers and 2 depths of multi-token prediction",
    ),
    (
        QWEN3,
        {"checkpoint_policies": "full", "offload_activations": True},
        "what each layer keeps, and offload_activations is True; use one",
    ),
    (
        QWEN3,
        {"checkpoint_policies": "full+host", "offload_bytes": 1 << 60},
        "activations on the host take .* bytes .* for 1 rank of host .* are free",
    ),
    (QWEN3, {"segment_layers": -2}, "segment_layers is -2; use 0"),
    (QWEN3, {"segment_layers": 4}, "segment_layers is 4: .* no layer recomputes"),
    (QWEN3, {"mlp_tile_tokens": -1}, "mlp_tile_tokens is -1; use 0"),
    (llama4, {"mlp_tile_tokens": 8}, r"feed_forward.experts \(Llama4TextExperts\) does not use transformers'"),
]


def test_what_layers_cannot_keep_or_run_in_tiles_is_refused(world: World) -> None:
    for make, options, message in REFUSED:
        with pytest.raises(ModelError, match=message):
            prepare(make(), world, **options)


def _prepare_with_kernels(rank: int) -> None:
    with World(Layout(ranks=2), backend=backend()) as world, pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            patched.setattr(execution, "choose_kernel", lambda call, name: find_kernel("reference"))
        for words in ("selective", "selective+host"):
            with pytest.raises(ModelError, match=r"found \w+ on rank 0, reference on rank 1; name one"):
                prepare(tiny("qwen3", torch.float64), world, checkpoint_policies=words)
        for words in ("exchanged", "full"):
            prepare_untried(tiny("qwen3", torch.float64), world, checkpoint_policies=words)


def test_ranks_compute_with_the_same_kernel() -> None:
    run_ranks(_prepare_with_kernels, 2)


class Layer(nn.Module):
    """Two attention calls, of which the second sees what the first gave, and weights around them."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Tensor, shard: Any) -> Tensor:
        for projection in self.projections:
            q = projection(x).unflatten(1, (2, 4))
            x = x + attend(q, q, q.tanh(), shard).flatten(1)
        return x


def _host_offload() -> HostOffload:
    return HostOffload(HostArena(torch.device("cpu")))


def _layer() -> tuple[Layer, Tensor]:
    torch.manual_seed(0)
    return Layer(), torch.randn(9, 8, dtype=torch.float64, requires_grad=True)


def _gradients(layer: Layer, x: Tensor, out: Tensor, *, twice: bool = False) -> list[Tensor]:
    if twice:
        torch.autograd.grad(out.square().sum(), (x, *layer.parameters()), retain_graph=True)
    return list(torch.autograd.grad(out.square().sum(), (x, *layer.parameters())))


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("twice", [False, True])
def test_several_calls_in_flight(offload: bool, twice: bool, monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    computed = list[int]()
    layer, x = _layer()
    shards = [bind(MicroBatch((Group((0,), (0, 1), (n, 9 - n)),)), world) for n in (1, 4, 6)]
    expected = [_gradients(layer, x, layer(x, shard)) for shard in shards]
    module = import_module("longspan.attention.attend")
    monkeypatch.setattr(module, "_attend_parts", _noting(module._attend_parts, computed))
    host_offload, outs = _host_offload() if offload else None, []
    for shard in shards:
        park = host_offload.open_layer(first=True) if host_offload is not None else None
        recording = Recording(park)
        with saved_tensors_hooks(park, lambda fetch: fetch()) if park is not None else nullcontext():
            outs.append(checkpoint(layer, x, shard, use_reentrant=False, context_fn=recording.contexts))
    assert len(computed) == 9
    of_outs = [_gradients(layer, x, out, twice=twice) for out in outs]
    assert len(computed) == 9, "attention ran again"
    for gradients, exact in zip(of_outs, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(gradients, exact, strict=True))


def _noting(original: Callable[..., Any], computed: list[int]) -> Callable[..., Any]:
    def noting(*args: Any, **kwargs: Any) -> Any:
        computed.append(1)
        return original(*args, **kwargs)

    return noting


class Writing(Layer):
    """Writes into attention's output, as a tensor, as a view of it, or where autograd does not look."""

    how = ""

    def forward(self, x: Tensor, shard: Any) -> Tensor:
        q = self.projections[0](x).unflatten(1, (2, 4))
        out = attend(q, q, q.tanh(), shard)
        with torch.set_grad_enabled(self.how != "without a graph"):
            (out if self.how == "itself" else out.flatten(1)).mul_(2.0)
        return self.projections[1](out.flatten(1))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("saved", ["full", "selective", "selective, offloaded"])
@pytest.mark.parametrize("how", ["itself", "a view", "without a graph"])
def test_a_layer_that_writes_into_attentions_output_is_an_error(
    how: str, saved: str, groups: int, world: World
) -> None:
    """torch's checkpoints do not look at version counters: gradients would be wrong, without a word."""
    _, x = _layer()
    layer = Writing()
    layer.how = how
    recording = Recording(_host_offload().open_layer(first=True) if "offloaded" in saved else None)
    parts = [Group((0,), (0,), (4,)), Group((0,), (1,), (5,))] if groups == 2 else [Group((0,), (0, 1), (4, 5))]
    contexts = noop_context_fn if saved == "full" else recording.contexts
    shard = bind(MicroBatch(tuple(parts)), world)
    with pytest.raises(RuntimeError, match="modified inplace"):
        out = checkpoint(layer, x, shard, use_reentrant=False, context_fn=contexts)
        torch.autograd.grad(out.square().sum(), x)


def test_a_gpu_initialized_inside_a_checkpoint_on_the_cpu_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler of a layer on the CPU asks the machine's GPU for its properties, which initializes it."""
    monkeypatch.setattr(DefaultDeviceType, "_default_device_type", "cuda")  # what torch takes on a machine with a GPU
    monkeypatch.setattr(torch.cuda, "_initialized", False)

    def run(rows: Tensor) -> Tensor:
        monkeypatch.setattr(torch.cuda, "_initialized", True)
        return rows.sin()

    rows = torch.ones(3, requires_grad=True)
    run_checkpointed(run, rows, policy="full").sum().backward()
    assert rows.grad is not None


@pytest.mark.parametrize(
    ("family", "before", "reentrant"),
    [("stablelm", False, False), ("nemotron_h", True, True), ("gemma3n_text", True, True)],
)
def test_the_switch_of_transformers_in_a_script(family: str, before: bool, reentrant: bool, world: World) -> None:
    """Layers that do not hand the shard down find it in recomputation too; Gemma 3n's get tensors by keyword, to which
    a re-entrant checkpoint gives no gradients."""
    pytest.importorskip(f"transformers.models.{family.removesuffix('_text')}")
    config, answers = shrink_configuration(CONFIG_MAPPING[family]()), []
    for switched in (False, True):
        model = make_tiny_model(config, torch.float64).train()
        switch: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        if switched and before:
            switch({"use_reentrant": reentrant})
        prepared = prepare_untried(model, world)
        if switched and not before:
            switch({"use_reentrant": reentrant})
        loss = run_step(prepared, plan_fixed(LENGTHS, world.home, cp=1), texts(LENGTHS), world).loss
        answers.append((loss, gradients_of(prepared)))
    (loss, gradients), (other, of_other) = answers
    assert other == pytest.approx(loss, rel=1e-12) and worst(of_other, gradients) < 1e-12
