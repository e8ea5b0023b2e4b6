"""LoRA over weights as a folder holds them equals LoRA over the folder's dequantised weights, bit for bit."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.comm import World
from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.model import load_model
from longspan.model.execution import model_execution
from longspan.model.kinds import packed_weights
from longspan.model.lora import NewAdapter, add_lora
from longspan.plan import plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import run_step
from tests.model.stock import gradients_of, prepare_untried, texts

CASES: Any = pytest.importorskip("tests.model.frozen.formats.folders").CASES
LENGTHS = (13, 1, 30, 7)
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


def _run(folder: str, layout: Layout, frozen: str) -> tuple[list[float], dict[str, torch.Tensor], str]:
    with World(layout, backend=backend(), timeout=60) as world:
        peft_model = add_lora(load_model(folder, sharded=True, quantized=True), NewAdapter(rank=4))
        model = prepare_untried(peft_model, world, frozen=frozen, compute_dtype=torch.bfloat16)
        assert bool(packed_weights(model)) == (frozen == "stored")
        plan = plan_fixed(LENGTHS, layout, cp=layout.slots, max_tokens_per_slot=32)
        losses = [run_step(model, plan, texts(LENGTHS), world).loss for _ in range(2)]
        return losses, gradients_of(model), model_execution(model).frozen


def _compare(rank: int, folders: Mapping[str, str], layout: Layout) -> dict[str, Any]:
    found = dict[str, Any]()
    for case, folder in folders.items():
        (losses, gradients, text), (wanted_losses, wanted, _) = (
            _run(folder, layout, frozen) for frozen in ("stored", "whole")
        )
        assert gradients.keys() == wanted.keys()
        others = [key for key, x in gradients.items() if not torch.equal(x, wanted[key])]
        found[case] = (losses == wanted_losses and not others, text.partition(":")[0])
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
        peft_model = add_lora(load_model(folder, sharded=True, quantized=True), NewAdapter(rank=4))
        prepare_untried(peft_model, world, frozen="stored")
    return str(error.value)


def test_tensor_parallelism_does_not_cut_blocks(tmp_path: Path) -> None:
    CASES["float8 in blocks"][0](tmp_path)
    for text in run_ranks(_refused_cut, 2, str(tmp_path)):
        assert (
            "down_proj.weight: its rows have 96 numbers, which blocks of 64 do not divide on each of 2 tensor" in text
        )
