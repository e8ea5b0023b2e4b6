"""LoRA over weights as a folder holds them equals LoRA over the folder's dequantised weights, bit for bit."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from longspan.comm import World
from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.model import load_model
from longspan.model.adapters.new_adapter import NewAdapter, add_lora
from longspan.testing import backend, run_ranks
from tests.model.frozen.packed_models import are_equal, two_steps
from tests.model.stock import prepare_untried

CASES: Any = pytest.importorskip("tests.model.frozen.formats.folders").CASES
FEW = ("float8 in blocks", "mxfp4")  # which are written without bitsandbytes
EVERY = (
    "float8 of experts",
    "nf4",
    "nf4, scales quantised",
    "int8",
    "float8, one scale",
    "compressed by channel",
    "compressed by block",
)


def _lora_over(folder: str) -> Any:
    return add_lora(load_model(folder, sharded=True, quantized=True), NewAdapter(rank=4))


def _compare(rank: int, folders: Mapping[str, str], layout: Layout) -> dict[str, Any]:
    found = dict[str, Any]()
    for case, folder in folders.items():
        with World(layout, backend=backend(), timeout=60) as world:
            stored, whole = (two_steps(_lora_over(folder), world, frozen) for frozen in ("stored", "whole"))
        found[case] = are_equal(stored, whole), stored[2].partition(":")[0]
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("cases", "layout"),
    [
        pytest.param(FEW, Layout(ranks=2), id="few"),
        pytest.param(("float8, one scale",), Layout(ranks=2, tp=2), id="rows that tp cuts"),
        pytest.param(FEW, Layout(ranks=2, pp=2), marks=pytest.mark.whole, id="pp 2"),
        pytest.param((*FEW, *EVERY), Layout(ranks=1), marks=pytest.mark.whole, id="every"),
    ],
)
def test_losses_and_gradients_are_those_over_dequantised_weights(
    tmp_path: Path, cases: tuple[str, ...], layout: Layout
) -> None:
    folders = dict[str, str]()
    for number, case in enumerate(cases):
        CASES[case][0](tmp_path / str(number))
        folders[case] = str(tmp_path / str(number))
    for found in run_ranks(_compare, len(layout.ranks), folders, layout, timeout=250):
        assert len(found) == len(folders)
        names = ("bitsandbytes", "float8", "int8", "mxfp4")
        assert all(equal and text.startswith(names) for equal, text in found.values()), found


def _refused_cut(rank: int, folder: str) -> str:
    with World(Layout(ranks=2, tp=2), backend=backend(), timeout=60) as world, pytest.raises(ModelError) as error:
        prepare_untried(_lora_over(folder), world, frozen="stored")
    return str(error.value)


def test_tensor_parallelism_does_not_cut_blocks(tmp_path: Path) -> None:
    CASES["float8 in blocks"][0](tmp_path)
    for text in run_ranks(_refused_cut, 2, str(tmp_path)):
        assert (
            "down_proj.weight: its rows have 96 numbers, which blocks of 64 do not divide on each of 2 tensor" in text
        )
