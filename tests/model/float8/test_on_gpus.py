"""Float8 by rows on a GPU: the bits of its kernels, and each row of its products beside float64."""

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor, nn

from longspan.comm import World
from longspan.layout import Layout
from longspan.model import load_model, prepare, preset_config
from longspan.model.float8 import products
from longspan.model.float8.products import (
    ExpertRows,
    Float8Weight,
    ScaledRows,
    linear_in_float8,
    multiply_in_float8,
    quantise_columns,
    quantise_rows,
)
from longspan.model.float8_layers import float8_device_reason
from longspan.plan import plan_fixed
from longspan.train import run_step
from tests.model.stock import texts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available()
        or find_spec("triton") is None
        or float8_device_reason(torch.device("cuda")) != "",
        reason="needs a GPU of compute capability 8.9 and triton",
    ),
]
WIDTHS = ((4096, 4096), (4096, 1024), (4096, 12288), (12288, 4096))  # inputs and outputs of Qwen3-8B's linears
ROWS = 4100


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16, spread: float = 2.0) -> Tensor:
    sizes = torch.exp(spread * torch.randn(*shape[:-1], 1, device="cuda"))
    return (torch.randn(shape, device="cuda") * sizes).to(dtype)


def worst_row(rows: Tensor, exact: Tensor) -> float:
    return ((rows.double() - exact).norm(dim=-1) / exact.norm(dim=-1).clamp(min=1e-300)).max().item()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("shape", ((37, 4096), (5, 20000), (3, 70, 130), (130, 24), (1, 12288)), ids=str)
def test_kernels_make_the_bits_of_torch_on_a_cpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = numbers(*shape, dtype=dtype)
    x[..., 0, :] = 0
    inner = numbers(*shape[:-1], shape[-1] + 8, dtype=dtype)[..., 4:-4]
    for given in (x, inner):
        for convert in (quantise_rows, quantise_columns):
            here, there = convert(given), convert(given.cpu())
            assert torch.equal(here.scales.cpu(), there.scales)
            assert torch.equal(here.values.cpu().view(torch.uint8), there.values.view(torch.uint8))


@pytest.mark.parametrize("fast", (True, False), ids=("fast sums", "sums in float32"))
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_every_row_is_near_the_exact_product(
    widths: tuple[int, int], fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "FAST_SUMS", fast)
    torch.manual_seed(0)
    x, dy = numbers(ROWS, widths[0]).requires_grad_(), numbers(ROWS, widths[1])
    linear = nn.Linear(*widths, device="cuda", dtype=torch.bfloat16)
    weight, bias = linear.weight, linear.bias
    y = linear_in_float8(x, weight, bias, Float8Weight())
    dx, dw, db = torch.autograd.grad(y, (x, weight, bias), dy)
    wide_x, wide_dy, wide = x.detach().double(), dy.double(), weight.detach().double()
    of_numbers = (
        quantise_rows(x.detach()).dequantise() @ quantise_rows(weight.detach()).dequantise().t() + bias.double()
    )
    of_gradient = quantise_rows(dy).dequantise() @ quantise_columns(weight.detach()).dequantise().t()
    errors = {
        "y": worst_row(y.detach(), wide_x @ wide.t() + bias.detach().double()),
        "dx": worst_row(dx, wide_dy @ wide),
        "y of the float8 numbers": worst_row(y.detach(), of_numbers.detach()),
        "dx of the float8 numbers": worst_row(dx, of_gradient),
        "dw": ((dw.double() - wide_dy.t() @ wide_x).norm() / dw.double().norm()).item(),
        "db": ((db.double() - wide_dy.sum(0)).norm() / db.double().norm()).item(),
    }
    print(widths, "fast" if fast else "float32", {name: f"{error:.1e}" for name, error in errors.items()})
    bounds = {"y": 0.06, "dx": 0.06, "dw": 0.004, "db": 0.01}
    assert all(error <= bounds.get(name, 0.004) for name, error in errors.items()), errors


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(widths: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x, dy = numbers(16384, widths[0], spread=0.5), numbers(16384, widths[1], spread=0.5)
    weight = torch.randn(widths[1], widths[0], device="cuda", dtype=torch.bfloat16) * 0.02

    def passes(take: slice) -> tuple[Tensor, Tensor]:
        rows = x[take].clone().requires_grad_()
        y = linear_in_float8(rows, weight, None, Float8Weight())
        return y.detach(), torch.autograd.grad(y, rows, dy[take])[0]

    every, other = passes(slice(None)), dict[str, list[int]]()
    for count in (1, 7, 64, 200, 1000, 2048, 4100, 8192, 12000):
        for start in (0, 3, 16384 - count):
            take = slice(start, start + count)
            for name, a, b in zip(("y", "dx"), passes(take), every, strict=True):
                if not torch.equal(a, b[take]):
                    other.setdefault(name, []).append(count)
    print(widths, "rows whose bits differ:", other or "none")
    assert not other, other


@pytest.mark.parametrize("transposed", (False, True))
def test_experts_by_grouped_products_are_those_one_by_one(transposed: bool) -> None:
    torch.manual_seed(0)
    loads = torch.tensor([130, 0, 7, 1000, 1, 64, 333, 25], device="cuda")
    ends, counts, rows = loads.cumsum(0).to(torch.int32), loads.tolist(), int(loads.sum())
    x, dy = numbers(rows, 2048).requires_grad_(), numbers(rows, 768)
    shape = (8, 2048, 768) if transposed else (8, 768, 2048)
    weight = nn.Parameter(torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02)
    results = list[list[Tensor]]()
    for given in (counts, None):
        y = multiply_in_float8(x, weight, None, Float8Weight(), ExpertRows(ends, given, transposed))
        results.append([y.detach(), *torch.autograd.grad(y, (x, weight), dy)])
    one_by_one, grouped = results
    assert worst_row(grouped[0], one_by_one[0].double()) <= 0.004
    assert worst_row(grouped[1], one_by_one[1].double()) <= 0.004
    error = (grouped[2].double() - one_by_one[2].double()).norm() / one_by_one[2].double().norm()
    assert error <= 0.004 and not grouped[2][1].any()
    ends = torch.tensor([0, 0, 7] + [7] * 5, device="cuda", dtype=torch.int32)
    alone = multiply_in_float8(x[130:137], weight, None, Float8Weight(), ExpertRows(ends, None, transposed))
    assert torch.equal(alone, grouped[0][130:137])


KINDS = ("qwen3-tiny", "qwen3-moe-tiny", "gpt-oss-tiny", "qwen3-next-tiny", "bamba-tiny")


@pytest.mark.filterwarnings("ignore")  # the compiler warns, of TF32 too, and where that is an error compiles nothing
@pytest.mark.parametrize(("preset", "compiled"), [*((preset, "none") for preset in KINDS), (KINDS[0], "layers")])
def test_a_step_of_every_kind_of_layer_is_near_bfloat16(preset: str, compiled: str) -> None:
    lengths, losses = (300, 700, 24), list[float]()
    for float8 in ("", "rowwise"):
        with World(Layout(ranks=1)) as world:
            model = load_model(config=preset_config(preset, vocab_size=64), dtype="float32", seed=0)
            model = prepare(
                model,
                world,
                float8=float8,
                compiled=compiled,
                compute_dtype=torch.bfloat16,
                activation_checkpointing="selective",
            )
            plan = plan_fixed(lengths, world.home, cp=1, max_tokens_per_slot=1024)
            losses.append(run_step(model, plan, texts(lengths), world).loss)
            assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert 0 < abs(losses[1] - losses[0]) <= 0.01 * losses[0]


def test_scaled_rows_of_nothing() -> None:
    empty = ScaledRows(torch.empty(0, 64, device="cuda", dtype=torch.float8_e4m3fn), torch.empty(0, device="cuda"))
    assert products.multiply_scaled_rows(empty, quantise_rows(numbers(32, 64)), torch.bfloat16).shape == (0, 32)
