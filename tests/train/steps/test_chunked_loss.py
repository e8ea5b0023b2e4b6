"""Cross entropy a few rows at a time equals that of all logits, and all logits never exist."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PhiConfig, PhiForCausalLM

from longspan.comm import World
from longspan.data.document import NO_TARGET
from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.model import prepare
from longspan.model.seams.row_loss import OutputHead
from longspan.plan import plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import run_step
from longspan.train.loss import chunked_cross_entropy, rows_per_chunk, uses_kernels
from tests.attention.test_memory import Allocated
from tests.model.stock import error, gradients_of, stock_answer, texts, tiny, worst

SIZE, VOCABULARY = 16, 37
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


@dataclass
class Plain:
    """A head without transformers: linear, with a soft cap where one is given."""

    linear: nn.Linear
    cap: float | None = None

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return tuple(p for p in self.linear.parameters() if p.requires_grad)

    @property
    def vocabulary(self) -> int:
        return self.linear.out_features

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self.linear(hidden)
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def _drawn(rows: int, dtype: torch.dtype, *, bias: bool = False) -> tuple[Tensor, Tensor, nn.Linear]:
    torch.manual_seed(rows)
    hidden = torch.randn(rows, SIZE, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (rows,))
    labels[::3] = NO_TARGET
    return hidden, labels, nn.Linear(SIZE, VOCABULARY, bias=bias, dtype=dtype)


def _whole(hidden: Tensor, labels: Tensor, head: Plain) -> Tensor:
    return F.cross_entropy(head(hidden), labels, ignore_index=NO_TARGET, reduction="sum")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [0, 1, 4, 11, 100])
@pytest.mark.parametrize(("bias", "cap"), [(False, None), (True, None), (True, 0.7)])
def test_loss_and_gradients_are_those_of_all_logits(
    dtype: torch.dtype, rows: int, bias: bool, cap: float | None
) -> None:
    hidden, labels, linear = _drawn(11, dtype, bias=bias)
    head, inputs = Plain(linear, cap), (hidden, *linear.parameters())
    wanted = _whole(hidden, labels, head)
    found = chunked_cross_entropy(hidden, labels, head, rows)
    with torch.no_grad():
        alone = chunked_cross_entropy(hidden, labels, head, rows)
    loss_bound = 1e-12 if dtype == torch.float64 else 1e-6
    assert abs(found.item() / wanted.item() - 1) < loss_bound and alone.item() == pytest.approx(found.item(), rel=1e-14)
    gradients = torch.autograd.grad(found / 7, inputs), torch.autograd.grad(wanted / 7, inputs)
    for a, b in zip(*gradients, strict=True):
        assert error(a, b) < TOLERANCE[dtype]


def test_frozen_parts_get_no_gradient() -> None:
    hidden, labels, linear = _drawn(9, torch.float64)
    wanted = torch.autograd.grad(_whole(hidden, labels, Plain(linear)), (hidden, linear.weight))
    chunked_cross_entropy(hidden.detach(), labels, Plain(linear), 2).backward()
    assert linear.weight.grad is not None and error(linear.weight.grad, wanted[1]) < 1e-12
    linear.requires_grad_(False)
    chunked_cross_entropy(hidden, labels, Plain(linear), 2).backward()
    assert hidden.grad is not None and error(hidden.grad, wanted[0]) < 1e-12
    assert not chunked_cross_entropy(hidden.detach(), labels, Plain(linear), 2).requires_grad


def test_rows_without_any_label_give_zeros() -> None:
    hidden, labels, linear = _drawn(5, torch.float64)
    loss = chunked_cross_entropy(hidden, torch.full_like(labels, NO_TARGET), Plain(linear), 2)
    loss.backward()
    assert loss.item() == 0 and hidden.grad is not None and not hidden.grad.any()
    assert linear.weight.grad is not None and not linear.weight.grad.any()


def test_gradients_of_a_low_precision_head_are_summed_in_float32() -> None:
    """512 chunks: summed in bfloat16, the gradient of the head would be off by several per cent."""
    hidden, labels, linear = _drawn(512, torch.bfloat16)
    chunked_cross_entropy(hidden, labels, Plain(linear), 1).backward()
    exact = nn.Linear(SIZE, VOCABULARY, bias=False, dtype=torch.float64)
    exact.weight.data.copy_(linear.weight.data)
    (wanted,) = torch.autograd.grad(_whole(hidden.detach().double(), labels, Plain(exact)), (exact.weight,))
    assert linear.weight.grad is not None and linear.weight.grad.dtype == torch.bfloat16
    assert ((linear.weight.grad.double() - wanted).norm() / wanted.norm()).item() < 0.006


def test_logits_of_all_rows_never_exist() -> None:
    rows, vocabulary, size, chunk = 1024, 2048, 32, 64
    head = Plain(nn.Linear(size, vocabulary, bias=False))
    hidden, labels = torch.randn(rows, size, requires_grad=True), torch.randint(0, vocabulary, (rows,))
    with Allocated() as counted:
        chunked_cross_entropy(hidden, labels, head, chunk).backward()
    logits = 4 * chunk * vocabulary
    small = 4 * (4 * vocabulary * size + 3 * rows * size)  # gradients of the head, of hidden states
    assert logits < counted.peak < 3 * logits + small < 4 * rows * vocabulary / 2, counted.peak / logits


def test_rows_of_a_chunk_fit_its_bytes() -> None:
    copied = 0 if uses_kernels(torch.bfloat16, "cuda") else 4
    assert rows_per_chunk(151936, torch.bfloat16, "cuda") == (2 << 30) // (151936 * (4 + copied))
    assert rows_per_chunk(151936, torch.float64, "cuda") == (2 << 30) // (151936 * 24)
    assert rows_per_chunk(2048, torch.float32, "cpu") == (64 << 20) // (2048 * 12)
    assert rows_per_chunk(1 << 40, torch.float64, "cpu") == 1


LENGTHS = (13, 1, 30, 7, 2, 18)
FAMILIES = ("qwen3", "llama", "gemma2", "mistral", "qwen3-moe", "gpt-oss")


def _families(rank: int) -> dict[object, tuple[float, float]]:
    """Errors of loss and gradients with chunks of three rows, against the stock model on documents one by one."""
    found, documents = {}, texts(LENGTHS)
    with World(Layout(ranks=2), backend=backend()) as world:
        plan = plan_fixed(LENGTHS, world.home, cp=2)
        cases = [(family, torch.float32, True) for family in FAMILIES]
        for family, dtype, sharded in [*cases, ("qwen3", torch.float64, True), ("llama", torch.float64, False)]:
            wanted = stock_answer(family, dtype, documents, world.device)
            model = tiny(family, dtype, attention="eager")
            prepare(model, world, shard_parameters=sharded, probe=family != "gpt-oss")
            loss = run_step(model, plan, documents, world, loss_chunk_rows=3).loss
            gradients = worst(gradients_of(model), wanted.gradients)
            seen = run_step(model, plan, documents, world, backward=False, loss_chunk_rows=5).loss
            found[family, dtype] = (max(abs(loss / wanted.loss - 1), abs(seen / wanted.loss - 1)), gradients)
        found["mixed"] = _mixed(world)
    return found


def _mixed(world: World) -> tuple[float, float]:
    """bfloat16 over float32 parameters: the loss beside float32, and the type of the gradients (0: float32)."""
    documents = texts(LENGTHS)
    wanted = stock_answer("gemma2", torch.float32, documents, world.device)
    model = prepare(tiny("gemma2", attention="eager"), world, compute_dtype=torch.bfloat16)
    loss = run_step(model, plan_fixed(LENGTHS, world.home, cp=2), documents, world, loss_chunk_rows=4).loss
    kinds = {p.grad.dtype for p in model.parameters() if p.grad is not None}
    return abs(loss / wanted.loss - 1), float(kinds != {torch.float32})


def test_families_under_fsdp_equal_the_stock_model() -> None:
    for found in run_ranks(_families, 2):
        loss, kinds = found.pop("mixed")
        assert loss < 1e-2 and kinds == 0
        for (family, dtype), (loss, gradients) in found.items():
            assert loss < (1e-12 if dtype == torch.float64 else 1e-6), (family, loss)
            assert gradients < TOLERANCE[dtype], (family, gradients)


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 61,
}


def test_a_head_with_a_bias() -> None:
    with World(Layout(ranks=1), backend="gloo") as world:
        model = prepare(PhiForCausalLM(PhiConfig(**SIZES)), world, shard_parameters=False)
        hidden = torch.randn(5, 32)
        model.lm_head.bias.data.normal_()
        seen = OutputHead(model, type(model).forward)
        assert torch.equal(seen(hidden), model.lm_head(hidden)) and len(seen.parameters) == 2


class Beside(PhiForCausalLM):
    """Logits depend on a parameter that is neither the base model's nor the head's."""

    def __init__(self, config: PhiConfig) -> None:
        super().__init__(config)
        self.temperature = nn.Parameter(torch.ones(()))


def test_a_loss_that_depends_on_more_is_refused() -> None:
    with World(Layout(ranks=1), backend="gloo") as world, pytest.raises(ModelError, match=r"beside.*temperature"):
        prepare(Beside(PhiConfig(**SIZES)), world, shard_parameters=False)
