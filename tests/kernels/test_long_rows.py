"""Every kernel of longspan in a step on more than 2^32 elements, beside the same rows alone, on a GPU of 100 GiB.

An index of 32 bits goes wrong past 2^31 elements, or past 2^32 where it has no sign. Operators of rows are given more
rows than that; rows at the beginning, on both sides of these numbers and at the end are computed once more by
themselves, and gradients of parameters, which all rows add to, in pieces. `elements` may be small, to try the cases.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longspan.attention import KERNELS, AttendCall, rows as sums
from longspan.attention.call import Saved
from longspan.attention.kernels import table
from longspan.attention.masks import Mask
from longspan.attention.tiles import Launch, RowIdentities, Tile, Tiling
from longspan.comm import World, bind
from longspan.layout import Layout
from longspan.model import prepare
from longspan.model.activations.tiles import count_tiles, run_in_tiles
from longspan.model.compiled_layers import BACKEND
from longspan.model.experts.expert_products import GateFormula
from longspan.model.experts.visits import Visits, spread_rows, sum_visits
from longspan.model.float8.products import Float8Weight, linear_in_float8, quantise_columns, quantise_rows
from longspan.model.seams import norms
from longspan.model.seams.norms import NormFormula, fuse_norms, split_long_norms
from longspan.plan import plan_fixed
from longspan.ssm.kernels.convolutions import TORCH_CONVOLUTION, Convolution, FirstRows, RunInputs, write_first_outputs
from longspan.ssm.kernels.decay import scan_chunks
from longspan.ssm.kernels.delta import compute_run_maps
from longspan.ssm.kernels.local_runs import LocalRuns
from longspan.train.log_probs import target_log_probs_and_gradient
from longspan.train.optim.one_pass_adamw import OnePassAdamW
from tests.model.stock import texts, tiny
from tests.reference import relative_error

PAST = 2**32
WIDTH = 4096
AROUND = 8  # rows that are compared on each side
DOCUMENT = 2048
Errors = dict[str, float]
Operator = tuple[Callable[..., Tensor], list[Tensor]]


class RMSNorm(nn.Module):
    """As transformers writes it, by which `fuse_norms` knows it."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)).to(x)


def compared_rows(rows: int, width: int) -> Tensor:
    """Rows at the beginning, where 31 and 32 bits are full, and at the end."""
    places = [0, *(2**bits // width for bits in (31, 32)), rows]
    chosen = np.concatenate([np.arange(at - AROUND, at + AROUND) for at in places])
    return torch.from_numpy(np.unique(chosen[(chosen >= 0) & (chosen < rows)]))


def rows_of(elements: int, width: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(elements // width + 64, width, dtype=dtype, device=device).normal_()


def row_errors(compute: Callable[..., Tensor], x: Tensor, parameters: Sequence[Tensor] = ()) -> Errors:
    """Of an operator from rows (R, W) to rows (R, V), and of its gradients."""
    leaves = [y.requires_grad_() for y in (x, *parameters)]
    out = compute(*leaves)
    dout = torch.empty_like(out).normal_()
    at = compared_rows(len(x), x.shape[1]).to(x.device)
    isolated = x.detach()[at].requires_grad_()
    out_alone = compute(isolated, *parameters)
    errors = {"rows": relative_error(out.detach()[at].double(), out_alone.detach().double())}
    (dx_alone,) = torch.autograd.grad(out_alone, isolated, dout[at])
    dx, *of_parameters = torch.autograd.grad(out, leaves, dout)
    errors["gradient of rows"] = relative_error(dx[at].double(), dx_alone.double())
    del out, dx
    if parameters:
        sums_of = [torch.zeros_like(y, dtype=torch.float64) for y in parameters]
        for piece, of_piece in zip(x.detach().chunk(16), dout.chunk(16), strict=True):
            for total, gradient in zip(
                sums_of, torch.autograd.grad(compute(piece, *parameters), parameters, of_piece), strict=True
            ):
                total += gradient
        pairs = zip(of_parameters, sums_of, strict=True)
        errors |= {f"gradient of parameter {i}": relative_error(a.double(), b) for i, (a, b) in enumerate(pairs)}
    return errors


def _parameter(*shape: int, device: str) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def _module(make: Callable[..., nn.Module], device: str) -> Operator:
    norm = make(WIDTH).to(device, torch.bfloat16)
    if isinstance(norm, RMSNorm):
        assert fuse_norms(norm) == 1
    else:
        split_long_norms(norm)
    return (lambda x, *parameters: norm(x)), [*norm.parameters()]


def _formula(formula: NormFormula, device: str) -> Operator:
    def compute(x: Tensor, weight: Tensor) -> Tensor:
        gate = (x.detach(),) if formula.gate else ()
        made = formula.run_kernel(x, weight, 1e-6, *gate)
        return formula(x, weight, 1e-6, *gate) if made is None else made

    return compute, [_parameter(WIDTH, device=device)]


def _tiled_mlp(device: str, elements: int) -> Operator:
    weights = [_parameter(WIDTH, WIDTH, device=device) / WIDTH**0.5 for _ in range(3)]

    def compute(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        def run(rows: Tensor) -> Tensor:
            return F.linear(F.silu(F.linear(rows, gate)) * F.linear(rows, up), down)

        module: Any = SimpleNamespace(parameters=lambda: (gate, up, down), modules=tuple)
        return run_in_tiles(run, (x,), module, count_tiles(len(x), max(4, elements // WIDTH // 32)))

    return compute, weights


def _float8(device: str) -> Operator:
    weight = _parameter(WIDTH, WIDTH, device=device) * WIDTH**-0.5
    return (lambda x, weight: linear_in_float8(x, weight, None, Float8Weight())), [weight]


def _gate(x: Tensor) -> Tensor:
    return GateFormula().run_kernel(x) if x.is_cuda else F.silu(x.chunk(2, 1)[0]) * x.chunk(2, 1)[1]


OPERATORS: dict[str, Callable[[str, int], Operator]] = {  # from rows to rows, with their parameters
    "rms norm": lambda device, _: _module(RMSNorm, device),
    "stock rms norm": lambda device, _: _module(nn.RMSNorm, device),
    "layer norm": lambda device, _: _module(nn.LayerNorm, device),
    "formula norm": lambda device, _: _formula(NormFormula(offset=1.0), device),
    "gated norm": lambda device, _: _formula(NormFormula(groups=8, gate="last"), device),
    "mlp in tiles": _tiled_mlp,
    "float8 product": lambda device, _: _float8(device),
}


def operator(name: str, device: str, elements: int) -> Errors:
    compute, parameters = OPERATORS[name](device, elements)
    return row_errors(compute, rows_of(elements, WIDTH, device), parameters)


def gate_of_experts(device: str, elements: int) -> Errors:
    return row_errors(_gate, rows_of(elements, 2 * WIDTH, device))


def compiled_rows(device: str, elements: int) -> Errors:
    norm = RMSNorm(WIDTH).to(device, torch.bfloat16)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return x + F.silu(norm(x)) * x

    compute = torch.compile(plain, dynamic=True, backend=BACKEND)
    row_errors(compute, rows_of(64 * WIDTH, WIDTH, device), [norm.weight])
    return row_errors(compute, rows_of(elements, WIDTH, device), [norm.weight])


def visits(device: str, elements: int) -> Errors:
    """Rows to four experts each and back: more copies than that; each comes back as it went."""
    rows, top_k = elements // WIDTH // 4 + 64, 4
    x = torch.empty(rows, WIDTH, device=device, dtype=torch.bfloat16).normal_().requires_grad_()
    weights = torch.rand(rows, top_k, device=device, dtype=torch.bfloat16).requires_grad_()
    order = torch.randperm(rows * top_k, device=device)
    of = Visits.from_order(order, top_k)
    out = sum_visits(spread_rows(x, of), weights, of)
    dout = torch.empty_like(out).normal_()
    dx, dweights = torch.autograd.grad(out, (x, weights), dout)
    at = torch.cat([torch.arange(AROUND), torch.arange(rows - AROUND, rows)]).to(device)
    total = weights.detach()[at].double().sum(1, keepdim=True)
    products = (x.detach()[at].double() * dout[at].double()).sum(1, keepdim=True).expand(-1, top_k)
    return {
        "rows": relative_error(out.detach()[at].double(), x.detach()[at].double() * total),
        "gradient of rows": relative_error(dx[at].double(), dout[at].double() * total),
        "gradient of weights": relative_error(dweights[at].double(), products),
    }


def float8_weights_of_experts(device: str, elements: int) -> Errors:
    experts = torch.empty(elements // WIDTH**2 + 2, WIDTH, WIDTH, device=device, dtype=torch.bfloat16).normal_()
    errors = Errors()
    for quantise in (quantise_rows, quantise_columns):
        every, alone = quantise(experts), quantise(experts[-1])
        values = relative_error(every.values[-1].double(), alone.values.double())
        errors[quantise.__name__] = values + relative_error(every.scales[-1].double(), alone.scales.double())
    return errors


def softmax_of_logits(device: str, elements: int) -> Errors:
    vocabulary = 151936
    logits = rows_of(elements, vocabulary, device)
    ids, slopes = torch.randint(vocabulary, (len(logits),), device=device), torch.randn(len(logits), device=device)
    at = compared_rows(len(logits), vocabulary).to(device)
    log_probs, gradient_of = target_log_probs_and_gradient(logits, ids)
    isolated, gradient_alone = target_log_probs_and_gradient(logits[at], ids[at])
    return {
        "log-probabilities": relative_error(log_probs[at].double(), isolated.double()),
        "gradient": relative_error(gradient_of(slopes)[at].double(), gradient_alone(slopes[at]).double()),
    }


def attention(kernel: str, device: str, elements: int) -> Errors:
    """Documents of 2,048 rows, under 32 heads that lie one after another; a kernel of latents sees 64 keys of a row."""
    heads, size = 32, WIDTH // 32
    gathered = kernel == "triton_gathered"
    lengths = [DOCUMENT] * (elements // WIDTH // DOCUMENT) + [64]
    rows, ends = sum(lengths), np.cumsum(lengths).tolist()
    shapes = [(heads, size), *((1, size // 2),) * 2, (heads, size // 2)] if gathered else [(heads, size)] * 4
    q, k, v, dout = (
        torch.empty(n, rows, numbers, device=device, dtype=torch.bfloat16).normal_().transpose(0, 1)
        for n, numbers in shapes
    )
    options = (torch.bfloat16, torch.device(device), Mask(), size**-0.5)
    call = AttendCall(heads, k.shape[1], size, v.shape[2], *options)
    compute = next(k for k in KERNELS if k.name == kernel)

    def computed(tensors: Sequence[Tensor], lengths: Sequence[int]) -> Sequence[Tensor]:
        stops = np.cumsum(lengths).tolist()
        tiles = [Tile(stop - n, stop, stop - n, stop, right=0) for stop, n in zip(stops, lengths, strict=True)]
        positions = np.concatenate([np.arange(n) for n in lengths])
        launch = Launch(Tiling.from_tiles(tiles), torch.device(device), lambda: RowIdentities(*[positions] * 3))
        last = torch.from_numpy(positions).to(device, torch.int32)[:, None] - torch.arange(64, device=device)
        chosen = replace(call, indices=last.int() if gathered else None)
        q, k, v, dout = tensors
        out, lse = compute.forward(q, k, v, launch, chosen)
        return out, *compute.backward(dout, Saved(q, k, v, out, lse), launch, chosen)

    every = computed((q, k, v, dout), lengths)
    errors = Errors()
    for name, end in zip(("first", "at 2^31", "last"), (ends[0], ends[len(ends) // 2], ends[-1]), strict=True):
        part = slice(end - lengths[ends.index(end)], end)
        isolated = computed([x[part].contiguous() for x in (q, k, v, dout)], [part.stop - part.start])
        for what, a, b in zip(("out", "dq", "dk", "dv"), every, isolated, strict=True):
            errors[f"{what} {name}"] = relative_error(a[part].double(), b.double())
    return errors


def sums_of_attention(device: str, elements: int) -> Errors:
    """Merges, copies, additions and sums of rows (T, 32, 128) in float32."""
    rows = elements // WIDTH + 64
    total = torch.empty(rows, 32, 128, device=device).normal_()
    out = torch.empty(rows, 32, 128, device=device, dtype=torch.bfloat16).normal_()
    total_lse, lse = torch.randn(2, rows, 32, device=device).unbind()
    at = compared_rows(rows, WIDTH).to(device)
    back = torch.arange(rows, device=device).flip(0)
    exact_out, exact_lse = total[at].clone(), total_lse[at].clone()
    sums.merge_rows_(exact_out, exact_lse, slice(None), out[at], lse[at])
    sums.merge_rows_(total, total_lse, torch.arange(rows, device=device), out, lse)
    errors = {"merge": relative_error(total[at].double(), exact_out.double())}
    errors["merged lse"] = relative_error(total_lse[at].double(), exact_lse.double())
    before = total[at].clone()
    sums.add_rows([(out, total)], back)
    errors["add"] = relative_error(total[at].double(), (before + out[back[at]].float()).double())
    into = torch.empty_like(out)
    sums.copy_rows([(out, into)], back)
    errors["copy"] = relative_error(into[at].double(), out[back[at]].double())
    flat = total.flatten(1)
    sums.sum_rows(flat, [(out.flatten(1), back), (out.flatten(1), back)])
    return errors | {"sum": relative_error(flat[at].double(), 2 * out[back[at]].flatten(1).double())}


def first_rows_of_runs(device: str, elements: int) -> Errors:
    """Of a convolution over channels that lie one after another, all rows apart."""
    rows, width = elements // WIDTH + 64, 3
    x = torch.empty(WIDTH, rows, device=device, dtype=torch.bfloat16).normal_().t()
    y = torch.zeros_like(x)
    convolution = Convolution(torch.randn(WIDTH, width + 1, device=device, dtype=torch.bfloat16), None, silu=False)
    start, places = rows - width, torch.arange(width, device=device)
    arrived = torch.randn(width, WIDTH, device=device, dtype=torch.bfloat16)
    joined = torch.cat([arrived, x[start:]]).double()
    source = torch.arange(2 * width, device=device)
    before = RunInputs(width, (source + width) % (2 * width), source[width:], source[:width] * 0, source[1 : width + 1])
    first = FirstRows(
        places + start, before, torch.tensor([start], device=device), torch.tensor([width], device=device), places[None]
    )
    write_rows = TORCH_CONVOLUTION.write_first_outputs if device == "cpu" else write_first_outputs
    write_rows(y, x, arrived, convolution, first)
    windows = [joined[i : i + width] * convolution.weight.double()[:, i] for i in range(width + 1)]
    exact = torch.stack(windows).sum(0)
    return {"first rows": relative_error(y[start:].double(), exact)}


def faded_states(device: str, elements: int) -> Errors:
    """Sums of chunks with decays, of two runs, the second of one chunk behind all others."""
    heads, size, width = 32, 128, 64
    chunks = elements // (heads * size * width) + 2
    added = torch.empty(chunks, 1, size, heads * width, device=device).normal_()
    decays = -torch.rand(chunks, heads, device=device)
    runs = LocalRuns(np.array([(chunks - 1) * 64, 64]), torch.device(device))
    states = torch.randn(2, heads, size, width, device=device)
    final = scan_chunks(added, decays, states, runs)[1]
    of_heads = added[-1, 0].view(size, heads, width).transpose(0, 1)
    exact = states[1].double() * torch.exp2(decays[-1].double())[:, None, None] + of_heads.double()
    return {"state": relative_error(final.double(), exact)}


def maps_of_runs(device: str, elements: int) -> Errors:
    heads, size, last = 32, 128, 192
    rows = elements // (heads * size) + 64

    def named(take: slice) -> dict[str, Tensor]:
        return {"k": k[:, take], "w": w[:, take], "u": u[:, take], "g": g[:, take]}

    k, w, u = (
        torch.empty(1, rows, heads, size, device=device, dtype=torch.bfloat16).normal_(std=0.05) for _ in range(3)
    )
    g = -torch.rand(1, rows, heads, device=device)
    runs = LocalRuns(np.array([rows - last, last]), torch.device(device))
    isolated = LocalRuns(np.array([last]), torch.device(device))
    of_both, exact = (
        compute_run_maps(named(slice(None)), runs),
        compute_run_maps(named(slice(rows - last, rows)), isolated),
    )
    pairs = zip(("states", "transitions"), of_both, exact, strict=True)
    return {name: relative_error(a[1].double(), b[0].double()) for name, a, b in pairs}


def updates(device: str, elements: int) -> Errors:
    parameter = nn.Parameter(torch.empty(elements + 64, device=device, dtype=torch.bfloat16).normal_())
    parameter.grad = torch.empty_like(parameter).normal_()
    at = compared_rows(len(parameter), 1).to(device)
    isolated = nn.Parameter(parameter.detach()[at].clone())
    isolated.grad = parameter.grad[at].clone()
    exact = torch.stack([x.double().square().sum() for x in parameter.grad.chunk(64)]).sum().sqrt()
    norm = torch.nn.utils.get_total_norm([parameter.grad])
    for leaf in (parameter, isolated):
        OnePassAdamW([leaf], lr=0.1).step()
    errors = {"norm": relative_error(norm.double(), exact)}
    return errors | {"step": relative_error(parameter.detach()[at].double(), isolated.detach().double())}


def cases() -> dict[str, Callable[[str, int], Errors]]:
    others = (
        *(float8_weights_of_experts, compiled_rows, gate_of_experts, visits, softmax_of_logits, sums_of_attention),
        *(first_rows_of_runs, faded_states, maps_of_runs, updates),
    )
    kernels = [kernel.name for kernel in KERNELS if "cuda" in kernel.devices and kernel.name != "reference"]
    named = {name: partial(operator, name) for name in OPERATORS}
    named |= {case.__name__.replace("_", " "): case for case in others}
    return named | {f"attention {name}": partial(attention, name) for name in kernels}


BOUND = 2e-2
CASES = cases()
MEMORY = 100 * 2**30
HAS_MEMORY = torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory >= MEMORY


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_MEMORY or find_spec("triton") is None, reason="needs a GPU of 100 GiB")
@pytest.mark.parametrize("case", CASES)
def test_rows_are_those_of_the_same_rows_alone(case: str) -> None:
    kernel = case.removeprefix("attention ")
    if kernel != case and (lack := table.find_kernel(kernel).unsupported_reason(torch.device("cuda"))):
        pytest.skip(f"{kernel} {lack}")
    errors = CASES[case]("cuda", PAST)
    torch.cuda.empty_cache()
    assert errors and max(errors.values()) <= BOUND, errors


def test_norms_of_long_inputs_take_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = list[int]()

    def recorded(norm):
        def noted(x, *others, **named):
            sizes.append(x.numel())
            return norm(x, *others, **named)

        return noted

    for module, name in ((norms, "rms_norm"), (F, "layer_norm"), (F, "rms_norm")):
        monkeypatch.setattr(module, name, recorded(getattr(module, name)))
    ids = torch.from_numpy(texts((40,))[0])
    x = torch.randn(3, 7, 6)
    plan = plan_fixed([40], Layout(ranks=1), cp=1, max_tokens_per_slot=40)
    with World(Layout(ranks=1)) as world:
        model = prepare(tiny("qwen3"), world, fused_norms="on")
        encoder = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.RMSNorm(5))
        norms.split_long_norms(encoder)
        shard, results = bind(plan.micro_batches[0], world), []
        for most in (norms.MOST_ELEMENTS, 100):
            monkeypatch.setattr(norms, "MOST_ELEMENTS", most)
            sizes.clear()
            logits = model(input_ids=ids[None], position_ids=shard.position_ids[None], shard=shard).logits
            results.append((logits, encoder(x)))
            assert max(sizes) <= most and len(sizes) > 9
    for whole, in_pieces in zip(*results, strict=True):
        assert torch.allclose(whole, in_pieces, rtol=1e-5, atol=1e-6)
