"""Divergences of rows and their gradients equal TRL's `generalized_jsd_loss`, and plain torch where TRL has none."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.errors import LossError
from longspan.train.divergence import Divergence
from tests.mutation import mutated

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


def _errors(settings: Divergence, wanted: Tensor, student: Tensor, teacher: Tensor) -> float:
    """The larger relative error of the sum of weighted rows and of its gradient."""
    weights = torch.linspace(0.5, 2, ROWS, dtype=torch.float64)
    (wanted_gradient,) = torch.autograd.grad((weights * wanted).sum(), student)
    found = settings.compare_rows(student, teacher, gradient=True)
    assert found.gradient is not None
    gradient = weights[:, None] * found.gradient
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
    with_gradient, found = (settings.compare_rows(student, teacher, gradient=wanted) for wanted in (True, False))
    assert found.gradient is None and torch.equal(found.losses, with_gradient.losses)
    log_p, q = student.log_softmax(-1), teacher.softmax(-1)
    assert torch.allclose(found.entropies, -(log_p.exp() * log_p).sum(-1), rtol=1e-12)
    assert torch.allclose(found.teacher_mass, q.topk(4).values.sum(-1), rtol=1e-12)


def test_tokens_that_cannot_come_and_low_precision() -> None:
    student, teacher = (x.detach() for x in _drawn())
    student[:, 3], teacher[:, 3] = -torch.inf, -torch.inf
    for settings in SETTINGS:
        if settings.top_k < 36:
            found = settings.compare_rows(student, teacher, gradient=True)
            assert found.gradient is not None and found.gradient.isfinite().all() and found.losses.isfinite().all()
            narrow = settings.compare_rows(student.bfloat16(), teacher.bfloat16(), gradient=True)
            assert narrow.losses.dtype == torch.float32 and narrow.gradient is not None
            assert narrow.gradient.dtype == torch.bfloat16 and narrow.gradient.isfinite().all()
    # A token that the student may write and the teacher never is infinitely far from it.
    student[:, 3] = 0.0
    assert Divergence(beta=1.0).compare_rows(student, teacher, gradient=False).losses.isposinf().all()


MUTATIONS = {
    "temperature on one side": (
        "teacher[part, :columns].to(dtype) / self.temperature", "teacher[part, :columns].to(dtype)"),
    "a temperature squared": ("(slopes / self.temperature)", "(slopes * self.temperature)"),
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
    "a rest without gradient": ("shares.mul_(slopes_k[:, -1:])", "shares.mul_(0.0)"),
    "renormalised without a gradient": ("slopes_k = slopes_k - log_p_k.exp() * slopes_k.sum(-1, keepdim=True)", "pass"),
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
