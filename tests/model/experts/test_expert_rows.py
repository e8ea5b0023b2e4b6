"""Gates of experts by their formulas, and biases: beside the classes' own forwards in float64, and by kernels."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longspan.model.experts.expert_products import GATE_FORMULA, GateFormula, find_gate_formulas
from longspan.model.kinds import expert_modules
from tests.interpreter import run_interpreted
from tests.kernels.test_on_gpus import GPT_OSS, GPT_OSS_EXPERTS, experts_errors, visit_errors
from tests.model.experts.moe_models import FAMILIES, family_model


def test_experts_with_biases_are_those_of_the_class() -> None:
    """Without kernels, in float64: outputs, and gradients of rows, weights, matrices and both biases."""
    for errors, case in ((experts_errors, GPT_OSS_EXPERTS[0]), (visit_errors, (7, 2, 3, 40))):
        found = errors(case, "cpu", torch.float64)
        assert max(found.values()) <= 1e-12, found


def test_kernels_by_the_interpreter() -> None:
    run_interpreted("tests.kernels.test_on_gpus")


@pytest.mark.parametrize(
    ("family", "formula"),
    [
        ("qwen3_moe", GateFormula()),
        ("gpt_oss", GPT_OSS),
        ("minimax_m3_vl_text", replace(GPT_OSS, interleaved=False)),
        ("gemma4_text", None),  # its gates go through GELU
    ],
)
def test_formulas_of_gates(family: str, formula: GateFormula | None) -> None:
    if family not in FAMILIES:
        pytest.skip(f"this transformers has no {family}")
    modules = [*expert_modules(family_model(family)).values()]
    find_gate_formulas(modules)
    assert modules
    assert [vars(experts)[GATE_FORMULA] for experts in modules] == [formula] * len(modules)


class Renamed(nn.Module):
    """A gate as gpt-oss's, in other words and other places; parts can be changed."""

    def __init__(
        self, sharpness: float = 1.5, bound: float = 4.0, least: float | None = None, add: float = 1.0
    ) -> None:
        super().__init__()
        self.sharpness, self.bound = sharpness, bound
        self.settings = least, add  # no numbers of its own

    def _apply_gate(self, rows: Tensor) -> Tensor:
        least, add = self.settings
        gates = torch.clamp(rows[..., ::2], least, self.bound)
        values = rows[..., 1::2].clamp(-self.bound, self.bound)
        glu = torch.sigmoid(self.sharpness * gates) * gates
        return values * glu + add * glu


@pytest.mark.parametrize(
    ("experts", "formula"),
    [
        (Renamed(), GateFormula(1.5, 4.0, 1.0, interleaved=True)),
        (Renamed(1.0, 1e9, add=0.0), GateFormula(interleaved=True)),
        (Renamed(least=-4.0), None),
        (Renamed(add=0.5), None),
        (nn.Linear(64, 64), None),
    ],
    ids=str,
)
def test_a_gate_is_known_by_its_numbers(experts: nn.Module, formula: GateFormula | None) -> None:
    find_gate_formulas([experts])
    assert vars(experts)[GATE_FORMULA] == formula
    if formula is not None:
        x = 3 * torch.randn(9, 10, dtype=torch.float64)
        module: Any = experts
        assert torch.allclose(formula(x), module._apply_gate(x), rtol=1e-13, atol=0)
