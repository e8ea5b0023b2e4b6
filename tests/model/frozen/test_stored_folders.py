"""LoRA over weights as a folder holds them equals LoRA over the folder's dequantised weights, bit for bit."""

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


Rows = list[tuple[str, Layout]]  # a kind of folder, and the home of a model over it
ALONE, CP, TP, PP = Layout(ranks=1), Layout(ranks=2), Layout(ranks=2, tp=2), Layout(ranks=2, pp=2)
TABLES: dict[str, Rows] = {
    "few": [*((case, CP) for case in FEW), ("float8, one scale", TP)],  # with rows that tp cuts
    "pp 2": [(case, PP) for case in FEW],
    "every": [(case, ALONE) for case in (*FEW, *EVERY)],
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
    for equal, texts, refused in run_ranks(_compare, len(rows[0][1].ranks), folders, rows, timeout=250):
        assert equal == [True] * len(rows)
        assert all(text.startswith(("bitsandbytes", "float8", "int8", "mxfp4")) for text in texts), texts
        says = "down_proj.weight: its rows have 96 numbers, which blocks of 64 do not divide on each of 2 tensor"
        assert table != "few" or says in refused
