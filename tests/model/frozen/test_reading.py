"""Weights of a folder are packed as they are read, under every home, and given out again as they are computed with.

LoRA over weights as a folder holds them equals LoRA over the folder's dequantised weights, bit for bit.
"""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from longspan.comm import World
from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.model import fsdp_params, load_model, weights_by_name
from longspan.model.adapters.new_adapter import NewAdapter, add_lora
from longspan.model.feature import Call
from longspan.model.frozen.frozen_weights import FrozenFeature, weights_to_pack
from longspan.model.host_weights import HostWeightsFeature
from longspan.model.options import PrepareOptions
from longspan.plan.shape.packed import find_packed_form
from longspan.testing import backend, run_ranks
from longspan.train.optim.offload_states import OffloadedStates
from tests.model.frozen.packed_models import MOE, WIDE, are_equal, through_nf4, two_steps
from tests.model.stock import prepare_untried, random_model
from tests.mutation import Change, mutated

PATH = "model.frozen.packed_weight"
MUTATIONS: dict[str, Change] = {  # noticed by the weights that a model gives out
    "columns of the first rank": (PATH, "held_bytes.start // self.row_bytes * self.columns", "0"),
    "rounded before they are packed": (PATH, "self.read_dtype)", "torch.bfloat16)"),
}
HOMES: Mapping[str, tuple[str, Layout]] = {
    "one rank": ("llama", Layout(ranks=1)),
    "cp 2": ("llama", Layout(ranks=2)),
    "tp 2": ("llama", Layout(ranks=2, tp=2)),
    "pp 2": ("llama", Layout(ranks=2, pp=2)),
    "experts": ("moe", Layout(ranks=2)),
    "ep 2": ("moe", Layout(ranks=2, ep=2)),
    "rows that ranks do not divide": ("llama", Layout(ranks=3)),
}


def write_folder(folder: Path, family: str) -> Path:
    config = transformers.Qwen3MoeConfig(**WIDE | MOE) if family == "moe" else transformers.LlamaConfig(**WIDE)
    random_model(config, torch.float32).save_pretrained(folder)
    return folder


def lora_over(folder: str | Path, **how: Any) -> Any:
    return add_lora(load_model(folder, sharded=True, **how), NewAdapter(rank=4))


def dequantised(folder: Path, compute: torch.dtype) -> dict[str, Tensor]:
    """The weights of a folder, packed ones as a layer computes with them."""
    model = load_model(folder)
    weights = dict(model.state_dict())
    for name in weights_to_pack(model):
        weights[name] = through_nf4(weights[name], compute)
    return weights


def _differences(rank: int, folder: Path, names: list[str], change: Change | None = None) -> dict[str, list[str]]:
    found = dict[str, list[str]]()
    for name in names:
        family, layout = HOMES[name]
        wanted = dequantised(folder / family, torch.bfloat16)
        with mutated(change), World(layout, backend=backend(), timeout=60) as world:
            model = prepare_untried(lora_over(folder / family), world, frozen="nf4", compute_dtype=torch.bfloat16)
            weights = {n: x.cpu() for n, x in weights_by_name(model, world) if "lora_" not in n}
            assert weights.keys() == wanted.keys()
            found[name] = [n for n, x in weights.items() if not torch.equal(x, wanted[n])]
    return found


@pytest.mark.timeout(200)
@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.whole) for n in (1, 3))])
def test_each_rank_packs_what_it_reads(tmp_path: Path, ranks: int) -> None:
    for family in ("llama", "moe"):
        write_folder(tmp_path / family, family)
    names = [name for name, (_, layout) in HOMES.items() if len(layout.ranks) == ranks]
    for found in run_ranks(_differences, ranks, tmp_path, names):
        assert found == {name: [] for name in names}


@pytest.mark.whole
@pytest.mark.parametrize("name", MUTATIONS)
def test_other_values_are_noticed(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path / "llama", "llama")
    for found in run_ranks(_differences, 2, tmp_path, ["tp 2"], MUTATIONS[name]):
        assert found["tp 2"]


def test_another_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(fsdp_params.FSDPParam, "init_dtype_attrs")
    monkeypatch.delitem(fsdp_params.FSDPParam.__annotations__, "sharded_size")
    model: Any = nn.Module()
    world: Any = SimpleNamespace(home=ALONE)
    call = Call(model, model, world, PrepareOptions(frozen="nf4"))
    lacks = "torch .* has no sharded_size, init_dtype_attrs of them; use torch 2.11 to 2.15, or"
    for feature, instead in ((FrozenFeature, "whole weights"), (HostWeightsFeature, "weights on the device")):
        with pytest.raises(ModelError, match=f"{lacks} {instead}$"):
            feature(call)
    with pytest.raises(ModelError, match=f"{lacks} no hidden_in"):
        OffloadedStates(torch.optim.SGD([torch.zeros(1)]), torch.device("cpu"), hidden_in=model)


# ---- weights that a folder holds in 4 or 8 bits


CASES: Any = pytest.importorskip("tests.model.frozen.formats.folders").CASES
FEW = ("float8 in blocks", "mxfp4", "int4 by group")
BITSANDBYTES = [case for case, (_, _, text) in CASES.items() if "bitsandbytes" in text]


def _lora_over(folder: str) -> Any:
    return add_lora(load_model(folder, sharded=True, quantized=True), NewAdapter(rank=4))


Rows = list[tuple[str, Layout]]  # a kind of folder, and the home of a model over it
ALONE, CP, TP, PP = Layout(ranks=1), Layout(ranks=2), Layout(ranks=2, tp=2), Layout(ranks=2, pp=2)
TABLES: dict[str, Rows] = {
    "few": [*((case, CP) for case in FEW), *((case, TP) for case in ("int4 by channel", "float8, one scale"))],
    "pp 2": [(case, PP) for case in FEW],
    "bitsandbytes": [(case, ALONE) for case in BITSANDBYTES],
    "others": [(case, ALONE) for case in CASES if case not in BITSANDBYTES],
}


def _compare(rank: int, folders: list[str], rows: Rows) -> tuple[list[bool], list[str], str]:
    """Whether steps are equal, what is said to be frozen, and how a cut of blocks is refused."""
    equal = list[bool]()
    texts = list[str]()
    for folder, (_, layout) in zip(folders, rows, strict=True):
        with World(layout, backend=backend(), timeout=60) as world:
            stored, whole = (two_steps(_lora_over(folder), world, frozen) for frozen in ("stored", "whole"))
        equal.append(are_equal(stored, whole))
        texts.append(stored[2])
    if rows[-1][1] != TP:
        return equal, texts, ""
    with World(TP, backend=backend(), timeout=60) as world, pytest.raises(ModelError) as error:
        prepare_untried(_lora_over(folders[0]), world, frozen="stored")
    return equal, texts, str(error.value)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("table", [pytest.param(t, marks=[pytest.mark.whole] * (t != "few")) for t in TABLES])
def test_losses_and_gradients_are_those_over_dequantised_weights(tmp_path: Path, table: str) -> None:
    rows = TABLES[table]
    folders = [str(tmp_path / str(number)) for number in range(len(rows))]
    for folder, (case, _) in zip(folders, rows, strict=True):
        CASES[case][0](Path(folder))
    names = [find_packed_form(Path(folder), "stored").name for folder in folders]
    for equal, texts, refused in run_ranks(_compare, len(rows[0][1].ranks), folders, rows, timeout=250):
        assert equal == [True] * len(rows)
        for text, name in zip(texts, names, strict=True):
            assert text.startswith((name, "bitsandbytes ")), (text, name)
        says = "down_proj.weight: its rows have 96 numbers, which blocks of 64 do not divide on each of 2 tensor"
        assert table != "few" or says in refused


def _messages_over_peft(_: int, folder: str) -> list[str]:
    """How an adapter of peft over a stored folder is refused, by `sharded` and `frozen`; the advised call passes."""
    messages = list[str]()
    with World(ALONE, backend=backend(), timeout=60) as world:
        for sharded, frozen in ((False, "stored"), (True, "stored"), (True, "nf4")):
            model: Any = get_peft_model(load_model(folder, sharded=sharded, quantized=True), LoraConfig(r=2))
            with pytest.raises(ModelError) as error:
                prepare_untried(model, world, frozen=frozen)
            messages.append(str(error.value))
        prepare_untried(get_peft_model(load_model(folder, quantized=True), LoraConfig(r=2)), world, frozen="nf4")
    return messages


def test_an_adapter_of_peft_over_a_stored_folder_is_told_the_one_call_that_works(tmp_path: Path) -> None:
    CASES[FEW[0]][0](tmp_path)
    ((whole, *deferred),) = run_ranks(_messages_over_peft, 1, str(tmp_path))
    assert 'load_model(folder, quantized=True), which dequantises it, and use frozen="nf4"' in whole
    for message in deferred:
        assert "load_model(folder, sharded=False), dequantised where it is in 4 or 8 bits (quantized=True" in message
        assert 'frozen="nf4" in prepare' in message
