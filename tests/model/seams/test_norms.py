"""RMS norms as one kernel: the same model to rounding, wherever it runs; norms of another formula are left alone.

What the kernel computes is tested in `tests/kernels`.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longspan import Layout, World, plan_dynamic, prepare
from longspan.errors import ModelError
from longspan.model.seams import norms
from longspan.model.seams.norms import NormFormula, _run_triton_kernel, fuse_norms
from tests import parity
from tests.model.stock import gradients_of, stock_answer, texts, tiny, worst

LENGTHS = (13, 1, 30, 7, 2, 18)
NORMS = {"qwen3": 9, "llama": 5, "gpt-oss": 5, "deepseek-v3": 9}
HOMES: dict[Layout, dict[str, Any]] = {
    Layout(ranks=2): {},
    Layout(ranks=2, tp=2): {"sequence_parallel": True},
    Layout(ranks=2, pp=2): {"activation_checkpointing": "selective"},
}


def answer(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    ids = torch.from_numpy(texts((40,))[0])
    logits = model.to(dtype)(input_ids=ids[None], use_cache=False).logits
    logits.float().square().mean().backward()
    return {name: x.double() for name, x in ({"logits": logits.detach()} | gradients_of(model)).items()}


@pytest.mark.parametrize("family", NORMS)
def test_fused_norms_are_the_same_to_rounding(family: str) -> None:
    """Further from float64 than the model's own by no more than chance; in float64 they are the model's own."""
    widest = torch.float32 if family == "gpt-oss" else torch.float64  # whose experts have no float64
    exact = answer(tiny(family, attention="eager"), widest)
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        model = tiny(family, attention="eager")
        assert fuse_norms(model) == NORMS[family]
        fused, unfused = answer(model, dtype), answer(tiny(family, attention="eager"), dtype)
        assert worst(fused, exact) <= max(limit, 1.5 * worst(unfused, exact)), dtype
        if dtype == torch.bfloat16 and family != "gpt-oss":  # whose norms round once as well
            assert any((fused[name] != unfused[name]).any() for name in unfused), "nothing was fused"
    model = tiny(family, attention="eager")
    fuse_norms(model)
    assert worst(answer(model, widest), exact) == 0


KINDS = {  # family, its class, and what it is made with: the formula of it
    ("gemma2", "Gemma2RMSNorm", (48,)): NormFormula(offset=1.0),
    ("qwen3_next", "Qwen3NextRMSNorm", (48,)): NormFormula(offset=1.0),
    ("qwen3_next", "Qwen3NextRMSNormGated", (48,)): NormFormula(gate="last"),
    ("kimi_linear", "KimiLinearRMSNormGated", (48,)): NormFormula(gate="last", activation="sigmoid"),
    ("bamba", "BambaRMSNormGated", (48, 16)): NormFormula(groups=3, gate="first"),
    ("falcon_h1", "FalconH1RMSNormGated", (48, 1e-6, 2, False)): NormFormula(groups=2, gate="first"),
    ("falcon_h1", "FalconH1RMSNormGated", (48, 1e-6, 1, True)): NormFormula(gate="last"),
    ("llama", "LlamaRMSNorm", (48,)): NormFormula(),
}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_norms_of_families_compute_is_found(kind: tuple[str, str, tuple[float, ...]]) -> None:
    family, name, given = kind
    source = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    try:
        norm = getattr(source, name)(*given)
    except TypeError:
        pytest.skip(f"this transformers' {name} takes other arguments")
    if KINDS[kind].groups > 1 and not hasattr(norm, "group_size") and not hasattr(norm, "n_groups"):
        pytest.skip(f"this transformers' {name} has no groups")
    model, drawn = nn.ModuleDict({"norm": norm}), torch.get_rng_state()
    assert fuse_norms(model) == 1 and norm.forward.args == (norm, KINDS[kind])
    assert torch.equal(torch.get_rng_state(), drawn)  # trials leave the generator of the run alone
    x, gate = torch.randn(2, 1, 5, 48)
    given = (x, gate) if KINDS[kind].gate else (x,)
    assert torch.allclose(norm(*given), type(norm).forward(norm, *given), rtol=1e-5, atol=1e-6)
    assert (vars(norm)["forward"].func is _run_triton_kernel) is (KINDS[kind] != NormFormula())


class OffByTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(8)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (2 + self.weight)


class NoEps(OffByTwo):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * self.weight


class Gated(OffByTwo):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x * gate


def test_a_program_holds_all_features_of_a_group() -> None:
    widths = {1: 16, 16: 16, 17: 32, 32: 32, 33: 64, 4097: 8192}
    assert {n: norms._launch_sizes(torch.empty(9, n), NormFormula())[2]["COLUMNS"] for n in widths} == widths


@pytest.mark.parametrize("kind", (OffByTwo, NoEps, Gated))
def test_norms_of_another_formula_are_left_alone(kind: type[nn.Module]) -> None:
    named = type(f"{kind.__name__}RMSNorm", (kind,), {})
    model = nn.ModuleDict({"plain": nn.RMSNorm(8, eps=1e-6), "other": named()})
    assert fuse_norms(model) == 1 and "forward" not in vars(model["other"])
    assert fuse_norms(nn.ModuleDict({"other": named()})) == 0


def test_a_wrong_word_is_an_error(world: World) -> None:
    with pytest.raises(ModelError, match="fused_norms is True; use 'auto', 'on' or 'o"):
        prepare(tiny("qwen3"), world, fused_norms=True)  # pyright: ignore[reportArgumentType]


class Refuses(OffByTwo):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError


class SometimesWeighted(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.weight is None else super().forward(x)


@pytest.mark.parametrize("first", (True, False))
def test_norms_of_one_class_with_and_without_a_weight(first: bool) -> None:
    kind = type("SometimesRMSNorm", (SometimesWeighted,), {})
    a, b = (kind(8, eps=1e-6, elementwise_affine=weighted) for weighted in (first, not first))
    model = nn.ModuleDict({"a": a, "b": b, "c": type("RefusesRMSNorm", (Refuses,), {})()})
    assert fuse_norms(model) == 1
    assert all(model[name](torch.ones(2, 8)).shape == (2, 8) for name in "ab")


class FusedCase(parity.Case):
    """Norms of its prepared model are one kernel where it is asked for, and by themselves on GPUs alone."""

    def prepared(self, world: World) -> nn.Module:
        model = super().prepared(world)
        norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
        expected = "fused_norms" in self.options or world.device.type == "cuda"
        assert norms and all(("forward" in vars(norm)) == expected for norm in norms)
        return model


def test_models_with_fused_norms_equal_the_stock_model_under_every_home() -> None:
    documents, cases = texts(LENGTHS), list[FusedCase]()
    stock = stock_answer("qwen3", torch.float32, documents, vocabulary=62)
    model = partial(tiny, "qwen3", vocabulary=62)
    rows: list[tuple[Layout, dict[str, Any]]] = [(Layout(ranks=2), {})]
    rows += [(home, {"fused_norms": "on", **options}) for home, options in HOMES.items()]
    for home, options in rows:
        plan = plan_dynamic(LENGTHS, home, max_tokens_per_slot=62, row_multiple=home.tp)
        cases.append(FusedCase(model, home, {"dynamic": plan}, documents, stock, parity.SINGLE, options))
    parity.check(dict(enumerate(cases)))
