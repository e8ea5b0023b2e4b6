"""Updates of moments on the host behind the next forward pass: the same bits as at once, whoever reads parameters."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from longspan.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from longspan.comm import World
from longspan.config.file import load_config
from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.model import load_model
from longspan.model.fsdp_params import HookedParamGroup, fsdp_modules
from longspan.model.marks import HOST_STORE
from longspan.model.weights.local_tensors import local_tensor
from longspan.plan import plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import run_step, step_end
from longspan.train.optim import offload_states
from longspan.train.optim.offload_states import OffloadedStates
from longspan.train.training import build_run_optimizer
from tests.model.stock import prepare_untried, texts
from tests.mutation import Change, mutated
from tests.train.optim.test_offload_states import late

LENGTHS = (13, 1, 30, 7)
BUCKET = 128 << 10  # bytes: a layer's matrices come apart


class _Store:
    """Stands for a HostStore."""


@dataclass(frozen=True)
class Case:
    """A home and the type of its parameters; `on_device`: the end of a step is that of GPUs; options of `prepare`;
    `on_host`: every other parameter is treated as one that waits on the host."""

    home: Layout
    dtype: str = "float32"
    on_device: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    on_host: bool = False


CASES = {
    "one rank": Case(Layout(1)),
    "one rank, by chance": Case(Layout(1), "bfloat16", on_device=True),
    "two ranks": Case(Layout(2), on_device=True),
    "two ranks, gathered once": Case(Layout(2), options=(("reshard_after_forward", False),)),
    "two ranks, by chance": Case(Layout(2), "bfloat16", on_host=True),
    "replicas": Case(Layout(2, dp_replicate=2)),
    "a pipeline": Case(Layout(2, pp=2)),
}


def _open(case: Case, world: World, *, hidden: bool) -> tuple[nn.Module, Any]:
    model: Any = load_model(None, "qwen3-tiny", dtype=case.dtype, vocab_size=64, seed=1)
    model = prepare_untried(model, world, **dict(case.options))
    world.seed = 7
    keys = {"optimizer.lr": 1e-2, "optimizer.stochastic_rounding": case.dtype == "bfloat16"}
    optimizer = build_run_optimizer(load_config(None, keys), world, model)
    if hidden:
        store = _Store()
        for parameter in [*model.parameters()][::2] if case.on_host else ():
            setattr(parameter, HOST_STORE, store)
        optimizer = OffloadedStates(optimizer, world.device, bucket_bytes=BUCKET, hidden_in=model)
    return model, optimizer


def _contents(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    states = {
        f"{i}.{name}": value
        for i, state in enumerate(optimizer.state[parameter] for parameter in model.parameters())
        for name, value in state.items()
    }
    values = {name: parameter.detach() for name, parameter in model.named_parameters()} | states
    return {name: local_tensor(value).cpu().clone() for name, value in values.items()}


def _files(folder: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted(folder.glob("*.safetensors"))]


def _take_five_steps(case: Case, world: World, folder: Path, *, hidden: bool) -> list[Any]:
    """Five steps, of several micro-batches each: the third is followed by an evaluation, the fourth by a save."""
    model, optimizer = _open(case, world, hidden=hidden)
    plan = plan_fixed(LENGTHS, case.home, cp=case.home.slots, max_tokens_per_slot=32 // case.home.slots)
    assert len(plan.micro_batches) > 1
    figures = list[Any]()
    for step in range(1, 6):
        optimizer.param_groups[0]["lr"] = 1e-2 / step
        result = run_step(
            model, plan, texts(LENGTHS, seed=step), world, optimizer, max_grad_norm=(0.5, 1e6)[step % 2], step=step
        )
        figures.append((result.loss, result.grad_norm))
        if step == 3:
            figures.append(run_step(model, plan, texts(LENGTHS, seed=9), world, backward=False).loss)
        if step == 4:
            save_checkpoint(folder, model, optimizer, world, step=4)
            figures.append(_files(folder / "step-000004"))
    begun = [local_tensor(parameter.detach()).clone() for parameter in model.parameters()]
    contents = _contents(model, optimizer)
    now = [local_tensor(parameter.detach()) for parameter in model.parameters()]
    if world.device.type == "cpu":
        assert all(map(torch.equal, begun, now)) != hidden, "an update is made before its gather asks for it"
    return [*figures, contents]


def _over_ranks(rank: int, root: Path, names: Sequence[str]) -> None:
    for name in names:
        case = CASES[name]
        with World(case.home, backend=backend(), timeout=60) as world, pytest.MonkeyPatch.context() as patched:
            patched.setattr(step_end, "sums_stay_on_device", lambda world, chosen=case.on_device: chosen)
            (*expected, contents), (*others, other_contents) = (
                _take_five_steps(case, world, root / name / str(hidden), hidden=hidden) for hidden in (False, True)
            )
            assert expected == others, name
            assert [*contents] == [*other_contents]
            assert all(map(torch.equal, contents.values(), other_contents.values())), name


def _late_updates(rank: int, root: Path, name: str) -> None:
    with World(Layout(1), timeout=60) as world, pytest.MonkeyPatch.context() as patched:
        case = CASES[name]
        *expected, contents = _take_five_steps(case, world, root / "at once", hidden=False)
        update = offload_states._OffloadedUpdate._update_bucket  # which a gather must wait for
        patched.setattr(offload_states._OffloadedUpdate, "_update_bucket", late(update))
        *others, other_contents = _take_five_steps(case, world, root / "hidden", hidden=True)
        assert expected == others
        assert all(map(torch.equal, contents.values(), other_contents.values()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["one rank", "one rank, by chance"])
def test_gathers_wait_for_late_updates(tmp_path: Path, name: str) -> None:
    run_ranks(_late_updates, 1, tmp_path, name)


ONE = ("one rank, by chance",)
TWO = ("two ranks",)
MORE_OF_ONE = ("one rank",)
MORE_OF_TWO = tuple(name for name in CASES if name not in ONE + TWO + MORE_OF_ONE)
ROWS = [
    *(pytest.param(ONE, id="1"), pytest.param(TWO, id="2")),
    pytest.param(MORE_OF_ONE, marks=pytest.mark.whole, id="more of 1"),
    pytest.param(MORE_OF_TWO, marks=pytest.mark.whole, id="more of 2"),
]


@pytest.mark.parametrize("names", ROWS)
def test_steps_evaluations_and_saves_are_the_same_bits(tmp_path: Path, names: Sequence[str]) -> None:
    run_ranks(_over_ranks, len(CASES[names[0]].home.ranks), tmp_path, names, timeout=120)


@pytest.mark.parametrize("owner", ["group", "context"])  # the second since torch 2.15
def test_streams_of_a_gather_wait_for_updates(owner: str) -> None:
    waited = list[Any]()
    group: Any = SimpleNamespace(_wait_all_gather_streams_on_event=waited.append)
    if owner == "context":
        group = SimpleNamespace(comm_ctx=SimpleNamespace(wait_all_gather_streams_on_event=waited.append))
    HookedParamGroup._let_gather_streams_wait(group, "event")
    assert waited == ["event"]


MUTATIONS: dict[str, Change] = {
    "a gather waits for no update": (
        "model.fsdp_params",
        "self.before_next_gather.pop(0)(sharded_parameters(self))",
        "self.before_next_gather.clear()",
    ),
    "states are read before their update ends": (
        "train.optim.offload_states",
        "self.finish_step()\n        return self.host_states",
        "return self.host_states",
    ),
    "an update under the next step's settings": (
        "train.optim.state_buckets",
        "group = {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}",
        "pass",
    ),
    "an update under the next step's scale": (
        "train.optim.offload_states",
        "self._scale = inner.gradient_scale if isinstance(inner, OnePassAdamW) else None",
        "self._scale = None",
    ),
    "parameters stay on the device": ("train.optim.offload_states", "self._copies.store(pairs)", "pass"),
}


def _mutated(rank: int, root: Path, name: str) -> bool:
    with mutated(MUTATIONS[name]):
        try:
            _over_ranks(rank, root, ("one rank",))
        except AssertionError:
            return True
    return False


@pytest.mark.whole
@pytest.mark.parametrize("name", MUTATIONS)
def test_other_orders_are_noticed(tmp_path: Path, name: str) -> None:
    assert run_ranks(_mutated, 1, tmp_path, name) == [True]


def _each_layer_waits_for_its_own(rank: int) -> None:
    home = Layout(1)
    with World(home, backend=backend(), timeout=60) as world, pytest.MonkeyPatch.context() as patched:
        patched.setattr(offload_states, "AHEAD", 0)  # on a GPU
        model, optimizer = _open(CASES["one rank"], world, hidden=True)
        plan = plan_fixed(LENGTHS, home, cp=1, max_tokens_per_slot=64)
        run_step(model, plan, texts(LENGTHS), world, optimizer, step=1)
        update: Any = optimizer._update
        assert update._launched == 0
        gradients: list[Any] = [weakref.ref(parameter.grad._local_tensor) for parameter in model.parameters()]
        waiting = list[tuple[int, int]]()

        def note(*_: Any) -> None:
            alive = sum(gradient() is not None for gradient in gradients)
            waiting.append((update._total - update._launched, alive))

        for module in fsdp_modules(model):
            module.register_forward_hook(note)
        run_step(model, plan, texts(LENGTHS, seed=2), world, optimizer, step=2)
        buckets, alive = zip(*waiting, strict=True)
        for left in (buckets, alive):  # the root's hook is the last, behind that of the last layer
            assert [*left] == sorted(left, reverse=True) and len({*left}) == len(left) - 1 and left[-1] == 0, waiting


def test_a_layer_waits_for_its_own_parameters_and_frees_their_gradients() -> None:
    run_ranks(_each_layer_waits_for_its_own, 1)


def _fails(rank: int, root: Path) -> None:
    home = Layout(1)
    with World(home, backend=backend(), timeout=60) as world:
        plan = plan_fixed(LENGTHS, home, cp=1, max_tokens_per_slot=64)
        straight = _open(CASES["one rank"], world, hidden=True)
        for step in (1, 2, 3):
            expected = run_step(straight[0], plan, texts(LENGTHS), world, straight[1], step=step)
        model, optimizer = _open(CASES["one rank"], world, hidden=True)
        run_step(model, plan, texts(LENGTHS), world, optimizer, step=1)
        saved = save_checkpoint(root, model, optimizer, world, step=1)
        run_step(model, plan, texts(LENGTHS), world, optimizer, step=2)
        with pytest.MonkeyPatch.context() as patched:
            store = offload_states._OffloadedUpdate._store_bucket
            patched.setattr(offload_states._OffloadedUpdate, "_store_bucket", _third_time_fails(store))
            with pytest.raises(MemoryError) as caught:
                run_step(model, plan, texts(LENGTHS), world, optimizer, step=3)
        assert "an update failed after 2 of" in caught.value.__notes__[0]
        save = partial(save_checkpoint, root, model, optimizer, world, step=1)
        for read in (save, optimizer.state_dict, optimizer.step):
            with pytest.raises(ModelError, match=r"failed after 2 of \d+ buckets: .* start again from a checkpoint"):
                read()
        load_checkpoint(saved, model, optimizer, world)
        for step in (2, 3):
            result = run_step(model, plan, texts(LENGTHS), world, optimizer, step=step)
        assert (result.loss, result.grad_norm) == (expected.loss, expected.grad_norm)
        contents, others = (_contents(*run) for run in ((model, optimizer), straight))
        assert all(map(torch.equal, contents.values(), others.values()))


def _third_time_fails(method: Any) -> Any:
    calls = list[int]()

    def store(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError("no room")
        return method(*arguments)

    return store


def test_an_update_that_fails_between_two_layers_is_not_saved_and_a_checkpoint_goes_on(tmp_path: Path) -> None:
    run_ranks(_fails, 1, tmp_path)
