"""Checkpoints: complete or not there, the newest good one found, loaded on any number of ranks."""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

from longspan import Layout, World
from longspan.checkpoint import checkpoint as checkpoint_module, files as files_module, storage as storage_module
from longspan.checkpoint.checkpoint import check_checkpoint, find_checkpoint, load_checkpoint, save_checkpoint
from longspan.checkpoint.files import (
    PARTIAL,
    check_file_hashes,
    complete_checkpoints,
    create_partial_folder,
    newest_good_checkpoint,
    publish_checkpoint,
    read_checked_manifest,
    read_state,
    remove_old_checkpoints,
    state_value,
    step_of,
    write_damage_notes,
)
from longspan.checkpoint.saver import CheckpointSaver
from longspan.checkpoint.storage import SafetensorsReader, SafetensorsWriter, read_metadata, shard_name
from longspan.comm import all_ranks as waiting
from longspan.errors import CheckpointError, CommError
from longspan.model import load_model, save_model
from longspan.model.weights.local_tensors import local_tensor
from longspan.testing import backend, run_ranks
from longspan.train.optim.optimizer import build_optimizer
from tests.model.stock import SIZES, prepare_untried

FIRST, SECOND = shard_name(0), shard_name(1)


def check_files(path: Path) -> None:
    check_file_hashes(path, read_checked_manifest(path))


def latest_checkpoint(root: Path, log: Any) -> Path | None:
    return newest_good_checkpoint(complete_checkpoints(root, log), check_files, log)[0]


def file_checkpoint(root: Path, step: int) -> Path:
    path = root / f"step-{step:06d}"
    partial = path.with_name(path.name + ".partial")
    create_partial_folder(partial)
    (partial / FIRST).write_bytes(bytes(100))
    written = {file.name: (len(data := file.read_bytes()), sha256(data).hexdigest()) for file in partial.iterdir()}
    publish_checkpoint(partial, path, {"state.json": {"step": step}}, [written])
    return path


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(bytes(data))


def with_format(manifest: Path, version: int | None) -> None:
    values = json.loads(manifest.read_text()) | {"format": version}
    manifest.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


DAMAGE = [
    (FIRST, Path.unlink, r"shard-00001-\S+ is missing"),
    (FIRST, cut, r"shard-00001-\S+ has 99 bytes, 100 were written"),
    (FIRST, flip, r"shard-00001-\S+ has other contents than were written"),
    ("state.json", flip, r"state.json has other contents"),
    ("manifest.json", Path.unlink, r"manifest.json cannot be read"),
    ("manifest.json", cut, r"manifest.json is damaged"),
    ("manifest.json", lambda path: path.write_text('{"format": 2, "files": {}}'), r"manifest.json names no files"),
    ("manifest.json", lambda path: path.write_text('{"format": 2, "files": {"a": 3}}'), r"manifest.json is damaged"),
    (
        "manifest.json",
        lambda path: with_format(path, None),
        r"it has format None, and this version of longspan reads format 2; resume it with the version ",
    ),
    (
        "manifest.json",
        lambda path: with_format(path, 1),
        r"it has format 1, .*; resume it with the version that wrote it, or export its model there \(longspan export\)",
    ),
]


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGE, ids=[message for _, _, message in DAMAGE])
def test_damage_is_named_and_skipped(tmp_path: Path, name: str, damage: Any, message: str) -> None:
    good, bad, said = file_checkpoint(tmp_path, 5), file_checkpoint(tmp_path, 10), list[str]()
    assert latest_checkpoint(tmp_path, said.append) == bad and not said
    damage(bad / name)
    assert read_state(good) == {"step": 5}
    for read in (check_files, read_state) if message.startswith("it ") else (check_files,):
        with pytest.raises(CheckpointError, match=rf"checkpoint .*step-000010: {message}"):
            read(bad)
    assert latest_checkpoint(tmp_path, said.append) == good
    assert len(said) == 1 and "step-000010" in said[0]


SEALED: list[tuple[dict[str, Any], str]] = [  # states that the manifest has the hash of, and what is told
    ({}, "no number of steps"),
    ({"step": "5"}, "no number of steps"),
    ({"step": 5, "config": []}, "no tables in config"),
    ({"step": 5, "config": {"train": 3}}, "train of config is no table"),
    ({"step": 5, "config": {"optimizer": {"groups": 3}}}, ""),
]


@pytest.mark.parametrize(("state", "message"), SEALED)
def test_a_state_that_lacks_something_is_named(tmp_path: Path, state: dict[str, Any], message: str) -> None:
    path = tmp_path / "step-000005"
    create_partial_folder(path.with_name("step-000005.partial"))
    digest = {"shard": (0, sha256(b"").hexdigest())}
    publish_checkpoint(path.with_name("step-000005.partial"), path, {"state.json": state}, [digest])
    if message:
        with pytest.raises(CheckpointError, match=rf"step-000005: state.json is damaged \(.*{message}"):
            read_state(path)
        return
    with pytest.raises(CheckpointError, match=r"step-000005: state.json is damaged \(no config.train.steps\)"):
        state_value(path, read_state(path), "config", "train", "steps")


def test_unfinished_ones_are_skipped_and_damaged_ones_alone_are_an_error(tmp_path: Path) -> None:
    said = list[str]()
    assert latest_checkpoint(tmp_path / "none", said.append) is None
    create_partial_folder(tmp_path / "step-000007.partial")
    assert latest_checkpoint(tmp_path, said.append) is None
    assert "step-000007.partial: its save was interrupted" in said[0]
    flip(file_checkpoint(tmp_path, 3) / FIRST)
    with pytest.raises(CheckpointError, match=r"no good checkpoint is left in .*step-000003.*start in a new run.dir"):
        latest_checkpoint(tmp_path, said.append)


@pytest.mark.parametrize(("keep", "left"), [(0, [1, 2, 9, 10]), (1, [10]), (3, [2, 9, 10]), (7, [1, 2, 9, 10])])
def test_the_newest_are_kept(tmp_path: Path, keep: int, left: list[int]) -> None:
    for step in (9, 1, 10, 2):
        file_checkpoint(tmp_path, step)
    create_partial_folder(tmp_path / "step-000004.partial")
    linked = tmp_path / "linked" / "file"
    linked.parent.mkdir()
    linked.touch()
    (tmp_path / "step-000005.partial").symlink_to(linked.parent)
    others = ["linked", "step--1", "step-1_0", "step-1x", "step-²", "step-²" + PARTIAL]
    for name in others[1:]:
        (tmp_path / name).mkdir()
    remove_old_checkpoints(tmp_path, keep)
    assert linked.exists()
    assert {p.name for p in tmp_path.iterdir()} == {*others, *(f"step-{step:06d}" for step in left)}


def test_damaged_ones_neither_count_nor_shadow_good_ones(tmp_path: Path) -> None:
    for step in range(1, 8):
        file_checkpoint(tmp_path, step)
    cut(tmp_path / "step-000005" / FIRST)
    write_damage_notes({tmp_path / "step-000007": "its contents have changed"}, tmp_path / "step-000006")
    remove_old_checkpoints(tmp_path, 3)
    assert sorted(step_of(path) for path in tmp_path.iterdir()) == [3, 4, 5, 6, 7]
    write_damage_notes({}, tmp_path / "step-000007")  # restored
    remove_old_checkpoints(tmp_path, 3)
    assert sorted(step_of(path) for path in tmp_path.iterdir()) == [4, 5, 6, 7]


# ---- with ranks: a model under FSDP2, and optimizer state that is not empty


SMALL = SIZES | {"num_hidden_layers": 1}


def drawn(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    return load_model(config=config, dtype="float32", seed=seed)


def opened(world: World, seed: int = 0) -> tuple[nn.Module, Optimizer]:
    model = prepare_untried(drawn(Qwen3Config(**SMALL), seed), world)
    return model, build_optimizer(model, "adamw", 1e-2, 0.1)


def update(model: nn.Module, optimizer: Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.sin(3 * parameter.detach())
    optimizer.step()


def contents(model: nn.Module, optimizer: Optimizer, of: Callable[[Tensor], Tensor] = local_tensor) -> list[Tensor]:
    parameters = list(model.parameters())
    moments = [v for p in parameters for _, v in sorted(optimizer.state[p].items()) if isinstance(v, Tensor)]
    return [of(t).to("cpu", copy=True) for t in [p.detach() for p in parameters] + moments]


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def save_rank(rank: int, ranks: int, root: Path) -> list[Tensor]:
    with World(Layout(ranks), backend=backend(), timeout=60) as world:
        model, optim = opened(world)
        update(model, optim)
        save_checkpoint(root, model, optim, world, step=1, state={"note": "one"}, keep=0)
        update(model, optim)
        return contents(model, optim, whole)


def load_rank(rank: int, ranks: int, root: Path) -> list[Tensor]:
    with World(Layout(ranks), backend=backend(), timeout=60) as world:
        model, optim = opened(world, seed=7)
        path = find_checkpoint(root, world, print)
        assert path is not None
        state = load_checkpoint(path, model, optim, world)
        assert (state["step"], state["note"]) == (1, "one")
        update(model, optim)
        return contents(model, optim, whole)


def test_weights_and_moments_come_back_bit_for_bit(tmp_path: Path) -> None:
    straight = run_ranks(save_rank, 2, 2, tmp_path)[0]
    resumed = run_ranks(load_rank, 3, 3, tmp_path)[0]
    assert len(straight) == len(resumed) > 4 * 11  # weights, two moments and their steps
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))
    files = sorted(p.name for p in (tmp_path / "step-000001").iterdir())
    assert files == ["manifest.json", "optimizer.json", FIRST, SECOND, "state.json"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_these_files_and_its_own_are_read(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4, dtype=torch.bfloat16), "b": torch.arange(5), "c": torch.tensor(2.0)}
    tensors |= {
        "d": torch.ones(0, 4),
        "e": torch.randn(4, 6).T,
        "f": torch.randn(2, 4).to(torch.float8_e4m3fn),
        "g": torch.tensor([True]),
    }
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    dcp.save(tensors, storage_writer=SafetensorsWriter(ours), no_dist=True)
    writer = HuggingFaceStorageWriter(str(theirs), save_distributed=True)
    dcp.save(tensors | {"e": tensors["e"].contiguous()}, storage_writer=writer, no_dist=True)
    for reader in (HuggingFaceStorageReader(str(ours)), SafetensorsReader(theirs, read_metadata(theirs))):
        loaded = {name: torch.zeros_like(x) for name, x in tensors.items()}
        dcp.load(loaded, storage_reader=reader, no_dist=True)
        assert all(torch.equal(loaded[name].double(), x.double()) for name, x in tensors.items())
    stored = load_file(ours / FIRST)
    assert stored.keys() == tensors.keys()
    assert all(torch.equal(stored[name].double(), x.double()) for name, x in tensors.items())


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def keeps_hyperparameters(rank: int, root: Path, model: nn.Module, world: World, patch: pytest.MonkeyPatch) -> None:
    for optimizer in ("adamw", "sgd"):
        before = build_optimizer(model, optimizer, 1e-2, 0.1)
        update(model, before)
        path = save_checkpoint(root / optimizer, model, before, world, step=1, state={}, keep=0)
        after = build_optimizer(model, optimizer, 0.5, 0.25, betas=(0.7, 0.8))
        after.param_groups[0]["maximize"] = True
        own = settings_of(after)
        load_checkpoint(path, model, after, world)
        assert settings_of(after) == own
        assert all(map(torch.equal, contents(model, before), contents(model, after)))


def is_of_the_optimizer_only(rank: int, root: Path, model: nn.Module, world: World, patch: pytest.MonkeyPatch) -> str:
    """The model that it is loaded next to stays as it is."""
    before, after = (build_optimizer(model, "adamw", 1e-2) for _ in range(2))
    update(model, before)
    path = save_checkpoint(root, model, before, world, step=1, weights=False)
    saved = contents(model, before)
    update(model, after)
    weights = contents(model, after)[: len(list(model.parameters()))]
    assert load_checkpoint(path, model, after, world, weights=False) == {"step": 1}
    loaded = contents(model, after)
    assert all(map(torch.equal, weights, loaded)) and not all(map(torch.equal, weights, saved))
    assert len(loaded) == len(saved) and all(map(torch.equal, saved[len(weights) :], loaded[len(weights) :]))
    stored = read_metadata(path).state_dict_metadata
    assert stored and all(name.startswith("optimizer.") for name in stored)
    return refusal(load_checkpoint, path, model, after, world)


def refusal(work: Callable[..., object], *arguments: Any, **named: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        work(*arguments, **named)
    return str(error.value)


class Counting(torch.optim.SGD):
    """An optimizer that counts its updates of a parameter in a number."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1


def holds_numbers(rank: int, root: Path, model: nn.Module, world: World, patch: pytest.MonkeyPatch) -> list[str]:
    """Numbers of an optimizer come back; what a checkpoint cannot hold, or one lacks, is named everywhere."""
    before, after = Counting(model.parameters(), 0.1), Counting(model.parameters(), 0.1)
    for _ in range(2):
        update(model, before)
    path = save_checkpoint(root, model, before, world, step=1)
    load_checkpoint(path, model, after, world)
    assert [state["count"] for state in after.state.values()] == [2] * len(list(model.parameters()))
    other = save_checkpoint(root, model, build_optimizer(model, "sgd"), world, step=2, weights=False)
    if rank == 0:
        stored = (other / "optimizer.json").read_text()
        (other / "optimizer.json").write_text(stored.replace('"settings": {', '"settings": {"a weight": [3],'))
    world.control.barrier()
    save, adamw = dcp.save, build_optimizer(model, lr=1e-2)
    update(model, adamw)

    def lacking(tensors: dict[str, Any], **named: Any) -> None:
        del tensors["optimizer"]["state.model.layers.0.mlp.up_proj.weight.exp_avg_sq"]
        save(tensors, **named)

    with patch.context() as changed:
        changed.setattr(dcp, "save", lacking)
        lacks = save_checkpoint(root, model, adamw, world, step=4)
    refused = [refusal(load_checkpoint, lacks, model, adamw, world)]
    refused += [refusal(load_checkpoint, other, model, before, world, weights=False)]
    if rank == 1:
        patch.setattr(type(model), "get_extra_state", lambda _: {"calls": 3})
    refused += [refusal(save_checkpoint, root, model, before, world, step=3)]
    refused += [refusal(CheckpointSaver(root, world).save, model, before, step=3)]
    assert not (root / "step-000003").exists()
    return refused


def has_some_moments(rank: int, root: Path, model: nn.Module, world: World, patch: pytest.MonkeyPatch) -> list[str]:
    """Optimizers that have no moments, or not for all parameters; returns what was refused."""
    before = build_optimizer(model, lr=1e-2)
    save_checkpoint(root, model, before, world, step=0)  # before the first step
    assert not before.state
    names = [name for name, _ in model.named_parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.sin(3 * parameter.detach())
    model.get_parameter(names[3]).grad = None
    before.step()
    save_checkpoint(root, model, before, world, step=1)
    left = build_optimizer(model, lr=1e-2)
    for step, count in ((1, len(names) - 1), (0, 0), (1, len(names) - 1)):  # gradients are there the first time
        load_checkpoint(root / f"step-00000{step}", model, left, world)
        assert sum(bool(state) for state in left.state.values()) == count
        assert all(parameter.grad is None for parameter in model.parameters())
    assert not left.state.get(model.get_parameter(names[3]))
    assert all(map(torch.equal, contents(model, before), contents(model, left)))
    model.get_parameter(names[2]).requires_grad_(False)
    save_checkpoint(root, model, build_optimizer(model, lr=1e-2), world, step=2)
    model.get_parameter(names[2]).requires_grad_(True)
    save_checkpoint(root, model, build_optimizer(model, "sgd"), world, step=3)
    return [refusal(load_checkpoint, root / f"step-00000{step}", model, left, world) for step in (2, 3)]


def is_damaged(
    rank: int, root: Path, model: nn.Module, world: World, patch: pytest.MonkeyPatch
) -> tuple[list[str], list[str]]:
    """A run whose second of two checkpoints has a flipped byte goes on from the first and saves once more."""
    hashed, said, digest = list[str](), list[str](), files_module._file_digest
    optim = build_optimizer(model, lr=1e-2)
    update(model, optim)
    for step in (2, 4):
        save_checkpoint(root, model, optim, world, step=step, state={}, keep=0)
    if rank == 0:
        flip(root / "step-000004" / SECOND)
    world.control.barrier()
    with patch.context() as changed:
        changed.setattr(files_module, "_file_digest", lambda path: (hashed.append(path.name), digest(path))[1])
        path = find_checkpoint(root, world, said.append, note=True)
        assert path is not None and load_checkpoint(path, model, optim, world)["step"] == 2
        checked = list(hashed)
        save_checkpoint(root, model, optim, world, step=3, state={}, keep=1)
    again = ["state.json", "optimizer.json"] if rank == 0 else []  # the others, while they were written
    assert hashed[len(checked) :] == again
    assert find_checkpoint(root, world, said.append) == root / "step-000003"
    return checked, said


def is_on_slow_disks(rank: int, root: Path, model: nn.Module, world: World, patch: pytest.MonkeyPatch) -> list[int]:
    """How often ranks tell each other that they still work while the second one writes, hashes and reads slowly."""
    patch.setattr(waiting, "_BEAT", 0.01)
    disk_work = [(storage_module, "write_chunks", 0.3), (storage_module, "_read_part", 0.008)]
    for place, name, seconds in [*disk_work, (files_module, "_file_digest", 0.3)] if rank == 1 else ():
        patch.setattr(place, name, slow(seconds, getattr(place, name)))
    optim = build_optimizer(model, lr=1e-2)
    update(model, optim)
    beats, ask = [0], world.control.flag_on_any_rank
    patch.setattr(world.control, "flag_on_any_rank", lambda flag: (beats.append(beats.pop() + 1), ask(flag))[1])
    path = save_checkpoint(root, model, optim, world, step=1, state={}, keep=0)
    beats.append(0)
    check_checkpoint(path, world)
    beats.append(0)
    load_checkpoint(path, model, optim, world)
    return beats


def slow(seconds: float, work: Any) -> Any:
    def slowly(*arguments: Any) -> Any:
        time.sleep(seconds)
        return work(*arguments)

    return slowly


def is_on_a_full_disk(rank: int, root: Path, model: nn.Module, world: World, patch: pytest.MonkeyPatch) -> list[str]:
    """One rank's file, then what all wrote, before the manifest; and models that do not fit what was left."""
    optim = build_optimizer(model, lr=1e-2)
    path = save_checkpoint(root, model, optim, world, step=1, state={"note": "one"}, keep=1)

    def begin_on_full_disk(folder: Path) -> None:
        create_partial_folder(folder)
        (folder / SECOND).symlink_to("/dev/full")

    def broken(partial: Path, *_: object) -> None:
        (partial / "state.json").write_text("{")
        raise OSError(28, "No space left on device", str(partial))

    texts = list[str]()
    for name, work in (("create_partial_folder", begin_on_full_disk), ("publish_checkpoint", broken)):
        with patch.context() as changed:
            changed.setattr(checkpoint_module, name, work)
            texts.append(refusal(save_checkpoint, root, model, optim, world, step=2, state={}, keep=1))
    others = (LlamaConfig(**SMALL), Qwen3Config(**SMALL | {"vocab_size": 80}))
    return texts + [refusal(load_checkpoint, path, drawn(other), None, world) for other in others]


CASES: tuple[Callable[..., Any], ...] = (keeps_hyperparameters, is_of_the_optimizer_only, holds_numbers)
CASES += (has_some_moments, is_damaged, is_on_slow_disks, is_on_a_full_disk)


def cases_rank(rank: int, root: Path) -> dict[str, Any]:
    found = dict[str, Any]()
    with World(Layout(2), backend=backend(), timeout=60) as world:
        model, _ = opened(world)
        for case in CASES:
            with pytest.MonkeyPatch.context() as patch:
                found[case.__name__] = case(rank, root / case.__name__, model, world, patch)
            world.control.barrier()
    return found


def test_what_a_checkpoint_holds_and_what_is_said_of_others(tmp_path: Path) -> None:
    first, second = run_ranks(cases_rank, 2, tmp_path, timeout=300)
    (checked, said), (also_checked, silent) = (found.pop("is_damaged") for found in (first, second))
    assert first == second
    assert "step-000001 holds an optimizer without weights" in first["is_of_the_optimizer_only"]
    lacks, damaged, *extra = first["holds_numbers"]
    assert re.search(r"does not fit this model: Missing key .*layers.0.mlp.up_proj.*exp_avg_sq", lacks)
    assert "step-000002: optimizer.json is damaged" in damaged and extra[0] == extra[1]
    assert extra[0].startswith("model entry _extra_state is a dict, and a checkpoint holds tensors of F64, F32, ")
    frozen, others = first["has_some_moments"]
    assert re.search(
        r"no moments of 1 parameter that this optimizer updates \(model.layers.0.*\), which were fro", frozen
    )
    assert "no moments for OnePassAdamW: it was saved with another optimizer; use that one" in others
    files = [FIRST, SECOND, "optimizer.json", "state.json"]
    assert sorted(checked + also_checked) == sorted(files * 2) and min(map(len, (checked, also_checked))) >= 2
    assert len(said) == 2 and not silent
    assert all(f"step-000004: {SECOND} has other contents than were written" in text for text in said)
    root = tmp_path / "is_damaged"
    assert {path.name for path in root.iterdir()} == {"step-000003", "step-000004"}
    assert f"{SECOND} has other contents" in (root / "step-000004" / "damaged.txt").read_text()
    assert min(first["is_on_slow_disks"]) >= 10, first["is_on_slow_disks"]
    full, broken, other, wide = first["is_on_a_full_disk"]
    wanted = (
        r"checkpoint .*/step-000002 could not be written: .*/step-000002.partial/shard-00002-\S+: No space left "
        r"on device \([\d,]+ bytes are free\); make room there .* \(on rank 1\)"
    )
    assert re.fullmatch(wanted, full) and "step-000002.partial: No space left on device" in broken
    root = tmp_path / "is_on_a_full_disk"
    assert [path.name for path in root.iterdir()] == ["step-000001"]
    assert latest_checkpoint(root, print) == root / "step-000001" and read_state(root / "step-000001")["note"] == "one"
    assert "is of another model: it lacks 0 of this model's weights (none) and has 2 that this model has not" in other
    assert re.search(r"does not fit this model: Size mismatch .*\(on rank 0\)$", wide)


def killed_rank(rank: int, root: Path, lost: int, inside: str) -> None:
    with World(Layout(3), backend=backend(), timeout=20) as world:
        model, optim = opened(world)
        save_checkpoint(root, model, optim, world, step=1, state={})
        kind, method = (SafetensorsWriter, "write_data") if inside == "checkpoint" else (DTensor, "full_tensor")
        if rank == lost:
            setattr(kind, method, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        world.step = 2
        if inside == "checkpoint":
            save_checkpoint(root, model, optim, world, step=2, state={})
        save_model(model, root.with_name("model"), world)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("lost", "inside", "what"),
    [(0, "checkpoint", "writing of checkpoint step-000002"), (1, "model", "gathering of model.embed_tokens.weight")],
)
def test_other_ranks_name_one_that_is_killed_while_all_write(tmp_path: Path, lost: int, inside: str, what: str) -> None:
    with pytest.raises(CommError, match=rf"rank {lost} of 3 was killed by signal 9") as raised:
        run_ranks(killed_rank, 3, tmp_path / "run", lost, inside)
    report = rf"rank \d: RankLostError: '{what}' of step 2 .* rank {lost} does not answer: it was killed by signal 9"
    assert [bool(re.match(report, note)) for note in raised.value.__notes__] == [True, True], raised.value.__notes__
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-000001"]
