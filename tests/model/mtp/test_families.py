"""Depths behind every family that the census calls exact: losses and every gradient are those of one process."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench.census.models import default_config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from longspan import Layout, MtpLoss, World, plan_fixed, prepare, run_step
from longspan.doctor.stock import whole_float64
from longspan.model.exactness.small_copies import make_tiny_model, shrink_configuration
from longspan.testing import run_ranks
from tests.model.mtp.dense import WEIGHT, Answer, add_drawn_depths, dense
from tests.model.stock import gradients_of
from tests.versions import transformers_before

EXACT, SMALL_SHARE = 1e-11, 1e-3  # biases of keys have gradients of nothing but rounding
ELSEWHERE = ("gemma3n_text", "nemotron_h")  # in `test_add.py`, which says why, and `test_exact.py`
CENSUS = json.loads((Path(__file__).parents[3] / "bench/records/census.json").read_text())["models"]
# In transformers 5.17: experts without a meta forward or random values, no small copy, no mask without a padding mask.
LATER = ("aria_text", "cohere_compass_text", "dbrx", "deepseek_v3", "ernie4_5_moe", "moshi")
NAMES = [
    name
    for name, model in CENSUS.items()
    if model["status"] == "exact"
    and name.partition("+")[0] in CONFIG_MAPPING
    and name not in ELSEWHERE
    and not (name in LATER and transformers_before("5.23"))
]
A_RUN = 8
LENGTHS = (13, 1, 5, 2)


def _model(name: str) -> Any:
    tiny = make_tiny_model(shrink_configuration(default_config(name)), torch.float64, attention="eager")
    return add_drawn_depths(tiny, 2).train()


def _error(result: Any, gradients: dict[str, torch.Tensor], exact: Answer) -> float:
    assert gradients.keys() == exact.gradients.keys(), sorted(gradients.keys() ^ exact.gradients.keys())[:4]
    pairs = zip((result.loss, *result.mtp_losses), (exact.loss, *exact.mtp_losses), strict=True)
    least = SMALL_SHARE * float(torch.stack([x.norm() for x in exact.gradients.values()]).norm())
    of_gradients = [(gradients[n] - x).norm() / max(float(x.norm()), least) for n, x in exact.gradients.items()]
    return float(max(*(abs(loss / there - 1) for loss, there in pairs), *of_gradients))


def _errors(rank: int, names: Sequence[str]) -> dict[str, float]:
    documents, errors = [np.arange(n) * 7 % 40 + 3 for n in LENGTHS], dict[str, float]()
    with World(Layout(ranks=2)) as world, whole_float64():
        for name in names:
            exact, model = dense(_model(name), documents), prepare(_model(name), world)
            result = run_step(model, plan_fixed(LENGTHS, world.home, cp=2), documents, world, mtp=MtpLoss(WEIGHT))
            errors[name] = _error(result, gradients_of(model), exact)
    return errors


@pytest.mark.whole
@pytest.mark.parametrize("first", range(0, len(NAMES), A_RUN), ids=lambda first: NAMES[first])
def test_depths_behind_a_family_are_exact(first: int) -> None:
    names = NAMES[first : first + A_RUN]
    for errors in run_ranks(_errors, 2, names, timeout=590):
        assert all(errors[name] < EXACT for name in names), errors
