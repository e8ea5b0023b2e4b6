"""Mixers whose heads are split over tp equal the stock model: loss and every gradient, of every way to split a part."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedConfig

from longspan import Layout, World, load_model, prepare
from longspan.doctor.cases import Case
from longspan.doctor.proof import prove
from longspan.errors import ModelError
from longspan.model.exactness.small_copies import make_tiny_model
from longspan.model.kinds import find_mixers
from longspan.model.tensor_parallel.mixer_parts import EvenRows, FusedRows, GroupRows
from longspan.testing import backend, run_ranks
from tests.model.seams.test_mixers import here, small_config
from tests.model.stock import weights_of, worst

TP, ROWS_IN_PARTS = Case(tp=2, cp=2), Case(tp=2, cp=2, sequence_parallel=True)
OF_TWO = Case(tp=2, sequence_parallel=True)
GROUPS = {"mamba_rms_norm": True, "mamba_n_heads": 6, "mamba_d_ssm": 96, "mamba_n_groups": 3}
EIGHT_HEADS = {"hidden_size": 64, "num_heads": 8}
CASES: dict[str, tuple[str, dict[str, Any], Case]] = {
    "projections by key head": ("qwen3_next", {}, OF_TWO),
    "gates of low rank": ("kimi_linear", {}, TP),
    "a norm over all ranks, B and C for all heads": ("bamba", {}, OF_TWO),
    "groups that ranks share in part": ("falcon_h1", GROUPS, OF_TWO),
    "rows that tp does not divide": ("mamba2", EIGHT_HEADS | {"n_groups": 1, "state_size": 5}, Case(tp=4)),
    "whole groups": ("nemotron_h", {}, TP),
    "a norm before the gate": ("falcon_h1", GROUPS | {"mamba_norm_before_gate": True}, TP),
    "blocks that layers share": ("zamba2", {}, ROWS_IN_PARTS),
    "channels": ("lfm2", {}, Case(tp=2, cp=2, plan="several", recompute="full")),
}

# Projections by key head are split daily under an adapter (tests/model/lora/test_exact.py).
IN_CI = ("a norm over all ranks, B and C for all heads",)


def _config(family: str, changes: dict[str, Any]) -> PreTrainedConfig:
    config = small_config(family)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize("name", [name for name in IN_CI if here((CASES[name][0],))])
def test_equals_the_stock_model(name: str) -> None:
    family, changes, case = CASES[name]
    (outcome,) = prove(_config(family, changes), [case], 2)
    assert outcome.status == "exact", outcome


@pytest.mark.whole
@pytest.mark.parametrize("name", [name for name in CASES if name not in IN_CI])
def test_other_parts(name: str) -> None:
    family, changes, case = CASES[name]
    (outcome,) = prove(_config(family, changes), [case], 4)
    assert outcome.status == "exact", outcome


# ---- rows


@pytest.mark.parametrize(
    ("heads", "groups", "tp"), [(8, 1, 4), (8, 4, 2), (8, 2, 4), (6, 3, 2), (12, 3, 4), (12, 4, 6)]
)
def test_every_head_has_its_group(heads: int, groups: int, tp: int) -> None:
    states = GroupRows(groups, width=3, heads=heads)
    rows = FusedRows((EvenRows(2 * heads), states))
    for rank in range(tp):
        runs = rows.runs(tp, rank)
        local = heads // tp
        assert runs[0] == range(2 * local * rank, 2 * local * (rank + 1))
        count = local // states.heads_together(tp)
        of_heads = [(runs[1 + head // (local // count)].start - 2 * heads) // 3 for head in range(local)]
        assert of_heads == [(rank * local + head) // (heads // groups) for head in range(local)]
        sizes, order = rows.cut_pieces(tp, rank)
        pieces = torch.arange(rows.size).split(sizes)
        assert torch.cat([pieces[i] for i in order]).tolist() == [row for run in runs for row in run]


# ---- what lies where, and what does not fit


REFUSED: list[tuple[str, dict[str, int], Callable[[Any], object], str]] = [
    (
        "mamba2",
        {"hidden_size": 24, "num_heads": 3},
        lambda mixer: None,
        r"tp 2 does not divide 3 \(heads of .*\.mixer\) of .* use tp 1",
    ),
    (
        "bamba",
        {},
        lambda mixer: mixer.register_parameter("scale", torch.nn.Parameter(torch.ones(3))),
        r"model.layers.0.mamba.scale \(3,\) of BambaMixer is not known",
    ),
    (
        "bamba",
        {},
        lambda mixer: setattr(mixer.norm, "forward", lambda hidden_states, gate=None: hidden_states),
        r"model.layers.0.mamba.norm \(BambaRMSNormGated\) is not an RMS norm over 1 group of",
    ),
]


def _look(rank: int, folder: Path) -> list[tuple[float, dict[str, tuple[int, ...]]]]:
    """How far weights that are read in parts are from the stock model's, and slices of the first mixer."""
    found = []
    with World(Layout(ranks=2, tp=2), backend=backend()) as world:
        for family in ("bamba", "lfm2"):
            model = load_model(folder / family, dtype="float64", sharded=True)
            model = prepare(model, world, shard_parameters=False)
            stock = make_tiny_model(_config(family, {}), torch.float64)
            mixer = next(iter(find_mixers(model).values()))
            lie = {n: tuple(p.to_local().shape) for n, p in mixer.named_parameters() if isinstance(p, DTensor)}
            assert all(p.placements[0] in (Shard(0), Shard(1)) for p in mixer.parameters() if isinstance(p, DTensor))
            assert list(model.state_dict()) == list(stock.state_dict())
            found.append((worst(weights_of(model), weights_of(stock)), lie))
        for family, changes, change, says in REFUSED:
            model = make_tiny_model(_config(family, changes), torch.float32)
            change(next(iter(find_mixers(model).values())))
            with pytest.raises(ModelError, match=says):
                prepare(model, world)
            assert not any(isinstance(p, DTensor) for p in model.parameters())
    return found


def test_parameters_lie_as_in_checkpoints_and_what_is_not_known_is_refused_before_anything_is_split(
    tmp_path: Path,
) -> None:
    for family in ("bamba", "lfm2"):
        make_tiny_model(_config(family, {}), torch.float64).save_pretrained(tmp_path / family)
    stock = next(iter(find_mixers(make_tiny_model(_config("bamba", {}), torch.float64)).values()))
    whole = {name: tuple(p.shape) for name, p in stock.named_parameters()}
    rows = {name: (shape[0] // 2, *shape[1:]) for name, shape in whole.items()}
    columns = {"out_proj.weight": (whole["out_proj.weight"][0], whole["out_proj.weight"][1] // 2)}
    for (of_bamba, bamba), (of_lfm2, lfm2) in run_ranks(_look, 2, tmp_path):
        assert of_bamba == of_lfm2 == 0.0
        assert bamba == rows | columns and len(lfm2) == 3
