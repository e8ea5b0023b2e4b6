"""Weights of a folder are packed as they are read, under every home, and given out again as they are computed with."""

from collections.abc import Mapping
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from longspan.comm import World
from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.model import load_model, weights_by_name
from longspan.model.adapters.new_adapter import NewAdapter, add_lora
from longspan.model.frozen import packed_param
from longspan.model.frozen.frozen_weights import weights_to_pack
from longspan.testing import backend, run_ranks
from tests.model.frozen.packed_models import MOE, WIDE, through_nf4
from tests.model.stock import prepare_untried, random_model
from tests.mutation import Change, mutated

PATH = "model.frozen.packed_param"
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
    monkeypatch.delattr(packed_param.FSDPParam, "init_dtype_attrs")
    with pytest.raises(ModelError, match=r"torch .* has no init_dtype_attrs of them; use torch 2.11 to 2.14, or whole"):
        run_path(packed_param.__file__)
