"""Weights and gradients on the host: the same bits as with moments alone there, under every home that has them."""

import gc
import hashlib
import json
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from longspan.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from longspan.comm import World
from longspan.config.file import load_config
from longspan.errors import ModelError, PlanError
from longspan.evaluation import evaluate
from longspan.layout import Layout
from longspan.model import host_arena, load_model, save_model
from longspan.model.adapters.new_adapter import NewAdapter, add_lora
from longspan.model.feature import Call
from longspan.model.fsdp_params import fsdp_modules, fsdp_param_groups
from longspan.model.host_weights import HostShard, HostStore, HostWeightsFeature
from longspan.model.marks import HOST_STORE, packed_weights, waits_on_host
from longspan.model.options import PrepareOptions
from longspan.model.saving.whole_weights import weights_by_name
from longspan.model.weights.local_tensors import local_tensor
from longspan.plan import Plan, plan_dynamic, plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer, clip_grad_norm, grad_norm, run_step
from longspan.train.optim.offload_states import offload_optimizer_states
from longspan.train.training import build_run_optimizer
from tests.model.activations.test_host_arena import bytes_in_use
from tests.model.frozen.packed_models import adapted
from tests.model.stock import prepare_untried, texts
from tests.mutation import Change, mutated
from tests.train.optim.test_offload_states import late as late_method

LENGTHS = (13, 1, 30, 7, 2, 18)
MUTATIONS: dict[str, Change] = {
    "a micro-batch's gradient is dropped": ("model.host_weights", "total.add_(self.staged_sum.wait())", "pass"),
    "the norm without gradients on the host": (
        "train.gradient_norm",
        "[next(remaining_norms) if norm is None else norm for norm in known_norms]",
        "[next(remaining_norms) if norm is None else 0 * norm for norm in known_norms]",
    ),
    "a copy that is not taken anew": ("model.host_weights", "shard.staged = None", "pass"),
}


@dataclass(frozen=True)
class Home:
    """A layout, a preset, its types, keys of [optimizer], how it is prepared, and the rows of a micro-batch."""

    layout: Layout
    preset: str = "qwen3-tiny"
    dtype: str = "float32"
    compute: torch.dtype | None = torch.bfloat16
    keys: Mapping[str, Any] = field(default_factory=dict[str, Any])
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rows: int = 32
    lora: int = 0
    plans: str = "fixed"

    def plan(self) -> Plan:
        if self.plans == "dynamic":
            return plan_dynamic(LENGTHS, self.layout, max_tokens_per_slot=self.rows)
        return self.fixed_plan(cp=self.layout.slots, rows=self.rows)

    def fixed_plan(self, *, cp: int, rows: int) -> Plan:
        multiple = self.layout.tp if "sequence_parallel" in self.options else 1
        return plan_fixed(LENGTHS, self.layout, cp=cp, max_tokens_per_slot=rows, row_multiple=multiple)


BY_CHANCE = {"optimizer.stochastic_rounding": True}
FULL = {"activation_checkpointing": "full"}
HOMES: Mapping[int, Mapping[str, Home]] = {
    1: {
        "one micro-batch": Home(Layout(ranks=1), rows=80),
        "three micro-batches": Home(Layout(ranks=1)),
        "by chance, recomputed": Home(Layout(ranks=1), dtype="bfloat16", compute=None, keys=BY_CHANCE, options=FULL),
        "an adapter": Home(Layout(ranks=1), dtype="bfloat16", compute=None, lora=4),
        "segments, tiles": Home(Layout(ranks=1), options={**FULL, "segment_layers": 2, "mlp_tile_tokens": 8}),
        "compiled": Home(Layout(ranks=1), options={"compiled": "layers"}),
    },
    2: {
        "cp 2": Home(Layout(ranks=2), rows=20),
        "dynamic, by chance": Home(
            Layout(ranks=2), dtype="bfloat16", compute=None, keys=BY_CHANCE, options=FULL, plans="dynamic"
        ),
        "experts, ep 2": Home(Layout(ranks=2, ep=2), "qwen3-moe-tiny", rows=20),
        "experts, ep 2, dynamic, by chance": Home(
            Layout(ranks=2, ep=2), "qwen3-moe-tiny", "bfloat16", None, BY_CHANCE, FULL, rows=30, plans="dynamic"
        ),
        "tp 2": Home(Layout(ranks=2, tp=2), compute=None, options={"sequence_parallel": True}),
        "an adapter": Home(Layout(ranks=2), lora=4, rows=20),
    },
    4: {
        "cp 4": Home(Layout(ranks=4), rows=10),
        "tp 2, cp 2": Home(Layout(ranks=4, tp=2), options=FULL, rows=20),
        "experts, ep 2": Home(Layout(ranks=4, ep=2), "qwen3-moe-tiny", "bfloat16", None, BY_CHANCE, rows=20),
    },
}
DAILY = {2: ("experts, ep 2, dynamic, by chance",)}
WHOLE = pytest.mark.whole


def open_run(home: Home, world: World, *, on_host: bool) -> tuple[Any, Any]:
    """A model whose weights are drawn once it is prepared, and its optimizer, whose moments are on the host."""
    model: Any = load_model(None, home.preset, dtype=home.dtype, vocab_size=64, seed=1, sharded=True)
    model = add_lora(model, NewAdapter(rank=home.lora)) if home.lora else model
    options = {"offload_weights": True} if on_host else {}
    model = prepare_untried(model, world, compute_dtype=home.compute, **home.options, **options)
    world.seed = 7
    keys = {"optimizer.lr": 1e-2, "train.offload_optimizer_states": True, "train.offload_weights": on_host}
    return model, build_run_optimizer(load_config(None, keys | dict(home.keys)), world, model)


def take_steps(home: Home, world: World, model: Any, optimizer: Any, steps: range) -> list[Any]:
    figures = list[Any]()
    for step in steps:
        result = run_step(
            model, home.plan(), texts(LENGTHS, step), world, optimizer=optimizer, max_grad_norm=0.5, step=step
        )
        figures.append((result.loss, result.grad_norm))
    return figures


def contents(model: Any, optimizer: Any) -> dict[str, Any]:
    values = dict[str, Tensor]()
    for name, parameter in model.named_parameters():
        values[name] = parameter.detach()
        values |= {f"{name}.{key}": x for key, x in optimizer.state.get(parameter, {}).items()}
    return {name: (x.dtype, x.shape, digest_of(local_tensor(x))) for name, x in values.items()}


def digest_of(x: Tensor) -> str:
    return hashlib.sha256(x.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def _compare(rank: int, root: Path, homes: Mapping[str, Home]) -> dict[str, list[str]]:
    differ = dict[str, list[str]]()
    for name, home in homes.items():
        with World(home.layout, backend=backend(), timeout=60) as world:
            places = ("device", "host")
            runs = {place: open_run(home, world, on_host=place == "host") for place in places}
            for parameter in runs["host"][0].parameters():
                assert waits_on_host(parameter) == (not home.lora or not parameter.requires_grad), name
                assert local_tensor(parameter.detach()).device.type == "cpu" or not waits_on_host(parameter)
            figures = {place: take_steps(home, world, *run, range(1, 3)) for place, run in runs.items()}
            for place, run in runs.items():
                evaluated = home.fixed_plan(cp=1, rows=32)  # at another degree
                figures[place].append(evaluate(run[0], texts(LENGTHS), evaluated, world).loss)
                save_checkpoint(root / name / place, *run, world, step=2)
                save_model(run[0], root / name / place / "model", world)
            states = {place: contents(*run) for place, run in runs.items()}
            manifests = {place: root / name / place / "step-000002" / "manifest.json" for place in places}
            saved = {place: json.loads(manifest.read_text())["files"] for place, manifest in manifests.items()}
            resumed = {place: open_run(home, world, on_host=place == "host") for place in places}
            load_checkpoint(root / name / "host" / "step-000002", *resumed["device"], world)
            load_checkpoint(root / name / "device" / "step-000002", *resumed["host"], world)
            for place, run in resumed.items():  # and so across the switch
                figures[place] += take_steps(home, world, *run, range(3, 4))
                states[place] |= {f"resumed {key}": value for key, value in contents(*run).items()}
            pairs = {"figures": figures, "files": saved}
            differ[name] = [key for key, pair in pairs.items() if pair["device"] != pair["host"]]
            differ[name] += [key for key, value in states["device"].items() if states["host"][key] != value]
            if rank == 0:
                folders = [sorted((root / name / place / "model").glob("*.safetensors")) for place in places]
                assert len(folders[0]) == len(folders[1]) > 0
                for a, b in zip(*folders, strict=True):
                    differ[name] += [f"saved {a.name}"] * (a.read_bytes() != b.read_bytes())
    return differ


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("ranks", "daily"), [(2, True), *(pytest.param(ranks, False, marks=pytest.mark.whole) for ranks in HOMES)]
)
def test_weights_and_files_are_those_with_moments_alone_on_the_host(tmp_path: Path, ranks: int, daily: bool) -> None:
    homes = {name: home for name, home in HOMES[ranks].items() if (name in DAILY.get(ranks, ())) == daily}
    assert run_ranks(_compare, ranks, tmp_path, homes, timeout=500) == [{name: [] for name in homes}] * ranks


def _mutated(rank: int, root: Path, name: str) -> list[str]:
    with mutated(MUTATIONS[name]):
        try:
            return _compare(rank, root, {"cp 2": Home(Layout(ranks=2), rows=20, compute=None)})["cp 2"]
        except (AssertionError, RuntimeError) as error:
            return [str(error)]


@pytest.mark.whole
@pytest.mark.parametrize("name", MUTATIONS)
def test_other_numbers_are_noticed(tmp_path: Path, name: str) -> None:
    assert all(run_ranks(_mutated, 2, tmp_path, name))


# ---- where copies are, and when they begin


ONE = Home(Layout(ranks=1), compute=None)


def _order_of_copies(world: World, rows: int) -> list[tuple[str, int]]:
    """Gathers ("g") of a step, and copies that begin, of weights ("c") and earlier sums ("s"), by the place of the
    group (root: 0).
    """
    home = replace(ONE, rows=rows)
    noted = list[tuple[str, int]]()
    with pytest.MonkeyPatch.context() as patched:
        model, optimizer = open_run(ONE, world, on_host=True)
        groups: list[Any] = [*fsdp_param_groups(fsdp_modules(model))]
        take_steps(home, world, model, optimizer, range(1))
        fetch, unsharded = HostStore.fetch, FSDPParamGroup.wait_for_unshard
        fetch_gradients = HostStore.fetch_gradients

        def noted_fetch(store: HostStore, shards: Any) -> None:
            shards = [*shards]
            if any(shard.staged is None for shard in shards):
                noted.append(("c", next(i for i, g in enumerate(groups) if shards[0] in g.listener.waiting)))
            fetch(store, shards)

        def noted_sums(store: HostStore, shards: Any) -> None:
            fetch_gradients(store, shards)
            if all(shard.staged_sum is not None for shard in shards):
                noted.append(("s", next(i for i, g in enumerate(groups) if shards[0] in g.listener.waiting)))

        def noted_wait(group: Any) -> None:
            if group._all_gather_result is not None:
                noted.append(("g", groups.index(group)))
            unsharded(group)

        patched.setattr(HostStore, "fetch", noted_fetch)
        patched.setattr(HostStore, "fetch_gradients", noted_sums)
        patched.setattr(FSDPParamGroup, "wait_for_unshard", noted_wait)
        take_steps(home, world, model, optimizer, range(1, 2))
        assert all(x.staged is x.staged_sum is None for group in groups for x in group.listener.waiting)
    return [*dict.fromkeys(noted[: noted.index(("g", 1))]), *noted[noted.index(("g", 1)) :]]


def test_copies_begin_a_group_ahead_forward_and_backward(world: World) -> None:
    one_pass, two_passes = (_order_of_copies(world, rows) for rows in (80, 40))
    layers = max(place for _, place in one_pass)
    forward = [("g", 0), ("c", 0), ("c", 1)]
    forward += [step for i in range(1, layers + 1) for step in (("g", i), ("c", i + 1))][:-1]
    backward = [("c", layers), *(step for i in range(layers, 0, -1) for step in (("g", i), ("c", i - 1)))][:-1]
    assert one_pass == forward + backward
    # the next pass of a step finds the root's copies, which begin with the last gather, and fetches earlier sums
    again = [x for step in backward for x in (step, *[("s", step[1])] * (step[0] == "g"))]
    assert two_passes == [*forward, *backward, ("c", 0), ("g", 0), *forward[2:], *again, ("s", 0)]


def test_a_copy_from_before_an_update_is_taken_anew(world: World) -> None:
    models = [open_run(ONE, world, on_host=on_host)[0] for on_host in (False, True)]
    run_step(models[1], ONE.plan(), texts(LENGTHS), world, backward=False)
    for group in fsdp_param_groups(fsdp_modules(models[1])):
        group.listener.store.fetch(group.listener.waiting)
    with torch.no_grad():
        for parameter in (x for model in models for x in model.parameters()):
            parameter.mul_(1.5)
    losses = [run_step(model, ONE.plan(), texts(LENGTHS), world, backward=False).loss for model in models]
    assert losses[0] == losses[1]


# ---- gradients between passes


def test_norms_and_gradients_of_a_caller_stay_his(world: World) -> None:
    model, optimizer = open_run(ONE, world, on_host=True)
    plan = ONE.plan()
    norm = run_step(model, plan, texts(LENGTHS), world).grad_norm
    for parameter in model.parameters():
        parameter.grad.data.mul_(2)  # which changes no version
    assert grad_norm(model, world) == pytest.approx(2 * norm, rel=1e-6)
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)
    assert norm == grad_norm(model, world) == clip_grad_norm(model, 0.25, world)
    assert grad_norm(model, world) == pytest.approx(0.25, rel=1e-5)  # not the norm that they came with
    kept = {name: p.grad for name, p in model.named_parameters()}
    before = {name: local_tensor(g).clone() for name, g in kept.items()}
    optimizer.zero_grad()
    run_step(model, plan, texts(LENGTHS, 5), world)
    for name, parameter in model.named_parameters():
        assert torch.equal(local_tensor(kept[name]), before[name]), "a caller's gradient was overwritten"
        assert not torch.equal(local_tensor(parameter.grad), before[name])


class BrokenError(RuntimeError):
    pass


def _after_an_error(rank: int, home: Home) -> list[Any]:
    results = list[Any]()
    with World(home.layout, backend=backend(), timeout=60) as world:
        # Passes of a step, the last among them.
        for breaks_in, place in ((None, ""), (0, "backward"), (1, "backward"), (0, "forward"), (1, "forward")):
            model, optimizer = open_run(home, world, on_host=True)
            figures = take_steps(home, world, model, optimizer, range(1))
            if breaks_in is not None:
                layer = model.model.layers[0]
                passes = iter(range(9))

                def fail(*_: Any, passes: Any = passes, breaks_in: int = breaks_in) -> None:
                    if next(passes) == breaks_in:
                        raise BrokenError("in a pass")

                hook = layer.register_full_backward_hook if place == "backward" else layer.register_forward_hook
                handle = hook(fail)
                with pytest.raises(BrokenError):
                    take_steps(home, world, model, optimizer, range(1, 2))
                handle.remove()
                groups = [group for group in fsdp_param_groups(fsdp_modules(model)) if group.listener is not None]
                assert all(x.staged is x.staged_sum is None for group in groups for x in group.listener.waiting)
            figures += take_steps(home, world, model, optimizer, range(1, 2))
            results.append((figures, contents(model, optimizer)))
    return results


@pytest.mark.parametrize(
    "home",
    [
        Home(Layout(ranks=2), rows=20),
        *(pytest.param(Home(Layout(n), rows=40 // n, lora=4), marks=pytest.mark.whole) for n in (1, 2)),
    ],
)
def test_an_error_in_a_pass_leaves_no_half_gradient(home: Home) -> None:
    for straight, *broken in run_ranks(_after_an_error, home.layout.slots, home):
        assert broken == [straight] * 4


# ---- memory


def test_the_arena_is_of_exact_size_and_given_back() -> None:
    with World(ONE.layout, backend=backend()) as world:
        open_run(ONE, world, on_host=False)  # the record of its pass stays, for models like it
        model, optimizer = open_run(ONE, world, on_host=True)
        store: Any = vars(next(iter(model.parameters())))[HOST_STORE]
        expected = sum(2 * max(-(-p.nbytes // 256), 1) * 256 for p in model.parameters())
        assert store.arena.bytes == bytes_in_use(store.arena) == expected and store.arena.parts == 1
        take_steps(ONE, world, model, optimizer, range(2))
        assert store.arena.bytes == expected
        assert "weights of" in (words := model.execution.words["on the host"]) and "gradients of" in words
        (part,) = store.arena._parts
        begin, alive = part.memory.data_ptr(), weakref.ref(part)
        for parameter in model.parameters():
            for x in (parameter.detach(), parameter.grad):
                assert begin <= local_tensor(x).data_ptr() < begin + expected
        del store, part, parameter, x
    assert alive() is not None, "the model's weights are in it"
    del model, optimizer
    gc.collect()
    assert alive() is None


# ---- beside packed weights, and what is refused


PACKED: Mapping[int, Mapping[str, tuple[Layout, str, Mapping[str, Any]]]] = {
    1: {
        "one rank": (Layout(1), "llama", {}),
        "bfloat16": (Layout(1), "llama", {"compute_dtype": torch.bfloat16}),
        "recomputed, segments": (Layout(1), "llama", {**FULL, "segment_layers": 2, "mlp_tile_tokens": 8}),
    },
    2: {
        "cp 2": (Layout(2), "llama", {"compute_dtype": torch.bfloat16}),
        "experts, ep 2": (Layout(2, ep=2), "adapted experts", {}),
        "tp 2": (Layout(2, tp=2), "llama", {"sequence_parallel": True}),
    },
    4: {"tp 2, cp 2": (Layout(4, tp=2), "llama", FULL), "experts, cp 4": (Layout(4, ep=2), "experts", {})},
}


def _compare_packed(rank: int, names: Sequence[str]) -> dict[str, list[str]]:
    differ = dict[str, list[str]]()
    cases = {name: case for cases in PACKED.values() for name, case in cases.items()}
    for name in names:
        layout, family, options = cases[name]
        results = list[Any]()
        with World(layout, backend=backend(), timeout=60) as world:
            for place in ({}, {"offload_weights": True}):
                model = prepare_untried(adapted(family), world, frozen="nf4", **options, **place)
                optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
                multiple = layout.tp if "sequence_parallel" in options else 1
                plans = [
                    plan_fixed(LENGTHS, layout, cp=cp, max_tokens_per_slot=40 // cp, row_multiple=multiple)
                    for cp in (1, layout.slots)
                ]
                losses = [
                    run_step(model, plan, texts(LENGTHS, step), world, optimizer=optimizer).loss
                    for step, plan in enumerate(plans)
                ]
                losses.append(evaluate(model, texts(LENGTHS), plans[0], world).loss)
                state = {n: local_tensor(p.detach()).clone() for n, p in model.named_parameters() if p.requires_grad}
                results.append((losses, state, dict(weights_by_name(model, world))))
            waiting = {n for n, p in model.named_parameters() if waits_on_host(p)}
            assert waiting > {*packed_weights(model)} > set(), name
            assert not waiting & {*state}, name
            assert {
                local_tensor(p.detach()).dtype for n, p in model.named_parameters() if n in packed_weights(model)
            } == {torch.uint8}
        (losses, *tensors), (other_losses, *other_tensors) = results
        differ[name] = ["losses"] * (losses != other_losses)
        for some, others in zip(tensors, other_tensors, strict=True):
            differ[name] += [key for key, x in some.items() if not torch.equal(x, others[key])]
    return differ


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (1, ("bfloat16",)),
        (2, ("experts, ep 2",)),
        *(
            pytest.param(ranks, tuple(name for name in cases if name not in ("bfloat16", "experts, ep 2")), marks=WHOLE)
            for ranks, cases in PACKED.items()
        ),
    ],
)
def test_packed_weights_on_the_host_have_the_bits_of_those_on_the_device(ranks: int, names: tuple[str, ...]) -> None:
    assert run_ranks(_compare_packed, ranks, names) == [{name: [] for name in names}] * ranks


REFUSED: Sequence[tuple[Layout, dict[str, Any], str]] = [
    (Layout(2), {"shard_parameters": False}, "shard_parameters=False"),
    (Layout(2), {"reshard_after_forward": False}, "reshard_after_forward=False"),
    (Layout(2), {"reshard_after_forward": False, "sync_each_batch": False}, "reshard_after_forward=False"),
    (Layout(2, pp=2), {}, "use pp 1, not 2"),
    (Layout(2, dp_replicate=2), {}, "use dp_replicate 1"),
]


@pytest.mark.parametrize(("layout", "options", "text"), REFUSED)
def test_homes_and_options_that_do_not_suit_are_refused(layout: Layout, options: dict[str, Any], text: str) -> None:
    world: Any = SimpleNamespace(home=layout)
    model = load_model(preset="qwen3-tiny", vocab_size=64, sharded=True)
    feature = HostWeightsFeature(Call(model, model, world, PrepareOptions(offload_weights=True, **options)))
    with pytest.raises(ModelError, match=rf"{text}.*leave offload_weights out"):
        feature.refuse(model)


def _refuse_to_pin(*_: Any) -> None:
    raise ModelError("no more pinned")


def _refusals(rank: int) -> None:
    with World(Layout(2), backend=backend(), timeout=60) as world:
        says = r"weights and gradients on the host \(train.offload_weights\) take .* 300,000 are free "
        says += '.* model.dtype = "bfloat16" halves'
        with pytest.MonkeyPatch.context() as patched, pytest.raises(ModelError, match=says):
            patched.setattr(host_arena, "free_host_bytes", lambda: 300_000 if rank else None)
            prepare_untried(load_model(preset="qwen3-tiny", vocab_size=64), world, offload_weights=True)
        with pytest.MonkeyPatch.context() as patched, pytest.raises(ModelError, match="no more pinned"):
            patched.setattr(host_arena._ArenaPart, "pin", _refuse_to_pin if rank else lambda *_: None)
            prepare_untried(load_model(preset="qwen3-tiny", vocab_size=64), world, offload_weights=True)
        model = prepare_untried(load_model(preset="qwen3-tiny", vocab_size=64), world, offload_weights=True)
        free = plan_dynamic(LENGTHS, world.home, max_tokens_per_slot=30, mode="free")
        with pytest.raises(PlanError, match="free mode, which keeps weights whole"):
            run_step(model, free, texts(LENGTHS), world)
        bare = torch.optim.AdamW(model.parameters())
        with pytest.raises(ModelError, match=r"24 parameters of the optimizer, AdamW, wait on the host .* pass what"):
            run_step(model, plan_fixed(LENGTHS, world.home, cp=2), texts(LENGTHS), world, bare)
        wrapped = offload_optimizer_states(bare, world)
        run_step(model, plan_fixed(LENGTHS, world.home, cp=2), texts(LENGTHS), world, wrapped)


def test_what_cannot_wait_is_refused_on_every_rank() -> None:
    run_ranks(_refusals, 2)


# ---- on GPUs


LATE: Mapping[str, Any] = {
    "none": None,
    "weights": (HostStore, "fetch", lambda store: [store._stream]),
    "gradients": (HostShard, "store_sum", None),
    "products": (HostStore, "take", None),
}


def _bare_steps(rank: int) -> None:
    with World(ONE.layout, backend="nccl") as world:
        weights = list[Any]()
        for bare in (False, True):
            model, _ = open_run(ONE, world, on_host=True)
            optimizer = build_optimizer(model, lr=1e-2)
            optimizer = optimizer if bare else offload_optimizer_states(optimizer, world)
            for step in range(3):
                run_step(model, ONE.plan(), texts(LENGTHS, step), world)
                optimizer.step()
                optimizer.zero_grad()
            weights.append({name: digest_of(local_tensor(p.detach())) for name, p in model.named_parameters()})
        assert weights[0] == weights[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_of_ones_own_on_the_host_finds_all_gradients_there() -> None:
    run_ranks(_bare_steps, 1)


def _late_copies(rank: int, ranks: int, late: str, dtype: str) -> None:
    compute = torch.bfloat16 if dtype == "float32" else None
    home = Home(Layout(ranks=ranks), rows=34 // ranks, dtype=dtype, compute=compute)
    results = list[Any]()
    streams = set[Any]()
    send = HostShard.store_sum

    def noted_send(self: Any, *arguments: Any) -> Any:
        streams.add(torch.cuda.current_stream())
        return send(self, *arguments)

    with World(home.layout, backend="nccl", timeout=60) as world, pytest.MonkeyPatch.context() as patched:
        patched.setattr(HostShard, "store_sum", noted_send)
        computing = torch.cuda.current_stream()
        for on_host in (False, True):
            if on_host and (found := LATE[late]):
                owner, name, late_streams = found
                patched.setattr(owner, name, late_method(getattr(owner, name), late_streams))
            before = torch.cuda.memory_allocated()
            model, optimizer = open_run(home, world, on_host=on_host)
            taken = torch.cuda.memory_allocated() - before
            weights = sum(local_tensor(p.detach()).nbytes for p in model.parameters())
            assert (taken < weights // 4) == on_host
            figures = take_steps(home, world, model, optimizer, range(1, 4))
            results.append((figures, contents(model, optimizer)))
            for x in (y for p in model.parameters() for y in (p.detach(), p.grad)):
                assert not on_host or local_tensor(x).is_pinned()
    assert results[0] == results[1]
    assert streams and computing not in streams, "products would wait for gradients that leave"


@pytest.mark.gpu
@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize(("ranks", "dtype"), [(1, "float32"), (1, "bfloat16"), (2, "float32")])
def test_late_copies_are_waited_for(ranks: int, dtype: str, late: str) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    run_ranks(_late_copies, ranks, ranks, late, dtype)
