"""Divergences of rows and their gradients equal TRL's `generalized_jsd_loss`, and plain torch where TRL has none."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.errors import LossError
from longspan.train import divergence
from longspan.train.divergence import Divergence, RowDivergences
from tests.interpreter import run_interpreted
from tests.mutation import mutated
from tests.reference import relative_error

BETAS = (0.0, 0.001, 0.3, 0.5, 1.0)
ROWS, COLUMNS = 19, 37


def _drawn(more: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    student = 3 * torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64)
    teacher = 3 * torch.randn(ROWS, COLUMNS + more, generator=generator, dtype=torch.float64)
    return student.requires_grad_(), teacher


def _jsd(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Rows' divergences (t,) by definition."""
    if beta == 0:
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    if beta == 1:
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    log_m = ((1 - beta) * log_p.exp() + beta * log_q.exp()).log()
    return beta * (log_q.exp() * (log_q - log_m)).sum(-1) + (1 - beta) * (log_p.exp() * (log_p - log_m)).sum(-1)


def reference(student: Tensor, teacher: Tensor, settings: Divergence) -> Tensor:
    """Rows' divergences (t,) in one graph, by definition."""
    columns = min(student.shape[1], teacher.shape[1])
    p, q = ((x[:, :columns] / settings.temperature).softmax(-1) for x in (student, teacher))
    if settings.top_k:
        ids = q.topk(settings.top_k, dim=-1).indices
        others = torch.ones_like(q).scatter(1, ids, 0.0)
        p, q = (
            torch.cat([x.gather(1, ids), (x * others).sum(-1, keepdim=True)], 1)
            if settings.add_tail
            else F.normalize(x.gather(1, ids), p=1, dim=-1)
            for x in (p, q)
        )
    return _jsd(p.log(), q.log(), settings.beta)


def reference_of_tables(student: Tensor, table: Any, vocabulary: int, settings: Divergence) -> Tensor:
    """Rows' divergences (t,) from a teacher's likeliest tokens, a table (t, k + 1), in one graph, by definition."""
    p = (student[:, :vocabulary] / settings.temperature).softmax(-1)
    ids = torch.from_numpy(table["id"][:, :-1].astype("int64"))
    q = torch.from_numpy(table["log_prob"].astype("float64")).exp()
    rest = (p * torch.ones_like(p).scatter(1, ids, 0.0)).sum(-1, keepdim=True)
    p = torch.cat([p.gather(1, ids), rest], 1)
    if not settings.add_tail:
        p, q = (F.normalize(x[:, :-1], p=1, dim=-1) for x in (p, q))
    return _jsd(p.log(), q.log(), settings.beta)


def _errors(settings: Divergence, wanted: Tensor, student: Tensor, teacher: Tensor) -> float:
    """The larger relative error of the sum of weighted rows and of its gradient."""
    weights = torch.linspace(0.5, 2, ROWS, dtype=torch.float64)
    (wanted_gradient,) = torch.autograd.grad((weights * wanted).sum(), student)
    found = settings.compare_rows(student, teacher.clone(), weights)
    assert found.gradient is not None
    gradient = found.gradient
    of_losses = ((found.losses - wanted).abs().max() / wanted.abs().max()).item()
    return max(of_losses, ((gradient - wanted_gradient).norm() / wanted_gradient.norm()).item())


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_equals_trl(beta: float, temperature: float) -> None:
    gkd: Any = pytest.importorskip("trl.experimental.gkd")
    student, teacher = _drawn()
    options = {"beta": beta, "temperature": temperature}
    wanted = gkd.GKDTrainer.generalized_jsd_loss(student, teacher, reduction="none", **options).sum(-1)
    assert _errors(Divergence(**options), wanted, student, teacher) < 1e-12


SETTINGS = [
    Divergence(beta, temperature, top_k, tail)
    for beta in BETAS
    for temperature, top_k, tail in ((0.7, 0, True), (2.0, 5, True), (2.0, 5, False), (0.7, 1, True), (1.0, 36, True))
]


@pytest.mark.parametrize("more", [0, 6, -9])
def test_equals_plain_torch(more: int) -> None:
    """Over the first columns that both have; the student's others get no gradient."""
    student, teacher = _drawn(more)
    for settings in SETTINGS:
        if settings.top_k < teacher.shape[1]:
            assert _errors(settings, reference(student, teacher, settings), student, teacher) < 1e-12, settings


def test_figures_and_values_without_a_gradient() -> None:
    student, teacher = _drawn()
    settings = Divergence(beta=0.5, top_k=4)
    with_gradient, found = (settings.compare_rows(student, teacher.clone(), x) for x in (torch.ones(ROWS), None))
    assert found.gradient is None and torch.equal(found.losses, with_gradient.losses)
    log_p, q = student.log_softmax(-1), teacher.softmax(-1)
    assert torch.allclose(found.entropies, -(log_p.exp() * log_p).sum(-1), rtol=1e-12)
    assert torch.allclose(found.teacher_mass, q.topk(4).values.sum(-1), rtol=1e-12)


def test_tokens_that_cannot_come_and_low_precision() -> None:
    student, teacher = (x.detach() for x in _drawn())
    student[:, 3], teacher[:, 3] = -torch.inf, -torch.inf
    for settings in SETTINGS:
        if settings.top_k < 36:
            found = settings.compare_rows(student, teacher.clone(), torch.ones(ROWS))
            assert found.gradient is not None and found.gradient.isfinite().all() and found.losses.isfinite().all()
            narrow = settings.compare_rows(student.bfloat16(), teacher.bfloat16(), torch.ones(ROWS))
            assert narrow.losses.dtype == torch.float32 and narrow.gradient is not None
            assert narrow.gradient.dtype == torch.bfloat16 and narrow.gradient.isfinite().all()
    # A token that the student may write and the teacher never is infinitely far from it.
    student[:, 3] = 0.0
    assert Divergence(beta=1.0).compare_rows(student, teacher).losses.isposinf().all()


def kernel_errors(
    settings: Divergence, shape: tuple[int, int, int], device: str, dtype: torch.dtype
) -> dict[str, float]:
    """Of logits of (rows, columns, more of the teacher), beside float64; some tokens cannot come."""
    rows, columns, more = shape
    torch.manual_seed(0)
    student, teacher = 1.5 * torch.randn(rows, columns), 1.5 * torch.randn(rows, columns + more)
    student[:, 1::7], teacher[:, 1::7] = -torch.inf, -torch.inf
    student, teacher, weights = (x.to(device, dtype) for x in (student, teacher, torch.rand(rows) + 0.5))
    wanted = settings.compare_rows(student.double(), teacher.double(), weights.double())
    before = student.clone()
    alone = settings.compare_rows(student, teacher.clone())
    found = settings.compare_rows(student, teacher, weights)
    assert torch.equal(student, before) and alone.gradient is None
    # A compiler may fuse products and sums otherwise where there is a gradient.
    assert relative_error(alone.losses, found.losses) <= 1e-6
    assert found.gradient is not None and wanted.gradient is not None and found.gradient.dtype == dtype
    pairs = zip(RowDivergences._fields, found, wanted, strict=True)
    errors = {name: relative_error(a.double(), b) for name, a, b in pairs}
    # Of nearly equal distributions the terms of a divergence cancel: its error is then one of terms of about 1.
    errors["losses"] *= min(1.0, float(wanted.losses.norm()))
    return errors


KERNEL_SHAPES = ((3, 4097, 0), (5, 40, 3), (2, 300, -9))
KERNEL_SETTINGS = [
    Divergence(beta, temperature, top_k, tail)
    for beta in (0.0, 0.3, 1.0)
    for temperature, top_k, tail in ((1.0, 0, True), (0.7, 0, True), (2.0, 5, True), (0.7, 5, False))
]


def interpreted() -> None:
    divergence._uses_kernels = lambda logits: logits.dtype != torch.float64  # pyright: ignore[reportPrivateUsage]
    for settings in KERNEL_SETTINGS:
        for shape in KERNEL_SHAPES:
            errors = kernel_errors(settings, shape, "cpu", torch.float32)
            print(settings, shape, errors)
            assert max(errors.values()) <= 2e-6, (settings, shape, errors)


@pytest.mark.timeout(300)
def test_kernels_in_the_interpreter() -> None:
    run_interpreted("tests.train.steps.test_divergence")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [*KERNEL_SHAPES, (33, 151936, 0)], ids=str)
def test_kernels_on_a_gpu(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    for settings in KERNEL_SETTINGS:
        errors = kernel_errors(settings, shape, "cuda", dtype)
        assert max(errors.values()) <= {torch.float32: 4e-6, torch.bfloat16: 1e-2}[dtype], (settings, errors)


MUTATIONS = {
    "temperature on one side": (
        "teacher[part, :columns].to(dtype) / self.temperature", "teacher[part, :columns].to(dtype)"),
    "a temperature squared": ("_column(weights[part] / self.temperature)", "_column(weights[part] * self.temperature)"),
    "β and 1 − β exchanged in m": ("log_p + student, log_q + teacher", "log_p + teacher, log_q + student"),
    "β and 1 − β exchanged": (
        "losses = self.beta * _products(log_q, log_q - log_m).sum(-1) + (1 - self.beta) * terms.sum(-1)",
        "losses = (1 - self.beta) * _products(log_q, log_q - log_m).sum(-1) + self.beta * terms.sum(-1)",
    ),
    "student detached in m": (
        "return losses, (1 - self.beta) * terms",
        "return losses, (1 - self.beta) * (terms + log_p.exp())"
        " + (1 - self.beta) * log_p.exp() * (1 - self.beta) * log_p.exp() / log_m.exp()",
    ),
    "weights forgotten": ("(slopes * _column(weights[part] / self.temperature))", "(slopes / self.temperature)"),
    "a rest without gradient": ("of_others = slopes[:, :-1], slopes[:, -1]", "of_others = slopes[:, :-1], 0 * rest_p"),
    "a rest without a sum of slopes": (
        "of_others = slopes[:, :-1], slopes[:, -1]", "of_others = slopes[:, :-1], -compared_q.exp()[:, -1]"),
    "a temperature squared, of few tokens": ("weights.to(dtype) / self", "weights.to(dtype) * self"),
    "renormalised without a gradient": (
        "slopes = slopes - renormalised.exp() * slopes.sum(-1, keepdim=True)", "pass"),
    "a rest of all tokens": ("log_others - log_totals", "0 * log_others"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_noticed(name: str) -> None:
    student, teacher = _drawn()
    before, after = MUTATIONS[name]
    with mutated(("train.divergence", before, after)):
        assert max(_errors(s, reference(student, teacher, s), student, teacher) for s in SETTINGS) > 1e-6


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"beta": 2}, "beta is 2; give a number from 0"),
        ({"beta": float("nan")}, "beta is nan"),
        ({"temperature": 0}, "temperature is 0; give a number above 0"),
        ({"top_k": -1}, "top_k is -1; give how many"),
        ({"top_k": True}, "top_k is True"),
        ({"add_tail": 1}, "add_tail is 1; give True or False"),
    ],
)
def test_other_values_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(LossError, match=text):
        Divergence(**arguments)
