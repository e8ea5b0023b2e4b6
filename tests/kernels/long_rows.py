"""Every operator and kernel of a step on more than 2^32 elements, beside the same rows alone.

An index of 32 bits goes wrong past 2^31 elements, or past 2^32 where it has no sign. Operators of rows are given more
rows than that; rows at the beginning, on both sides of these numbers and at the end are computed once more by
themselves, and gradients of parameters, which all rows add to, in pieces. `elements` may be small, to try the cases.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longspan.attention import KERNELS, AttendCall
from longspan.attention import rows as sums
from longspan.attention.call import Saved
from longspan.attention.tiles import Launch, Mask, Tile, Tiling
from longspan.model.activations.tiles import count_tiles, run_in_tiles
from longspan.model.compiled_layers import BACKEND
from longspan.model.experts.experts import Visits, gate_in_one_pass, spread_rows, sum_visits
from longspan.model.float8.products import Float8Weight, linear_in_float8, quantise_columns, quantise_rows
from longspan.model.seams.norms import NormFormula, fuse_norms, split_long_norms
from longspan.ssm.kernels.call import LocalRuns
from longspan.ssm.kernels.convolutions import Convolution, FirstRows, RowsBefore, write_first
from longspan.ssm.kernels.decay import scan_chunks
from longspan.ssm.kernels.delta import run_maps
from longspan.train.loss import row_softmax
from longspan.train.optim.one_pass_adamw import OnePassAdamW
from tests.reference import relative_error

PAST = 2**32
WIDTH = 4096
AROUND = 8  # rows that are compared on each side
DOCUMENT = 2048
Errors = dict[str, float]


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
    """Normal numbers (rows, width), a little more than so many elements."""
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


def rms_norm(device: str, elements: int) -> Errors:
    norm = RMSNorm(WIDTH).to(device, torch.bfloat16)
    assert fuse_norms(norm) == 1
    return row_errors(lambda x, weight: norm(x), rows_of(elements, WIDTH, device), [norm.weight])


def stock_rms_norm(device: str, elements: int) -> Errors:
    norm = nn.RMSNorm(WIDTH, device=device, dtype=torch.bfloat16)
    split_long_norms(norm)
    return row_errors(lambda x, weight: norm(x), rows_of(elements, WIDTH, device), [norm.weight])


def compiled_rows(device: str, elements: int) -> Errors:
    """Of the elementwise part of a layer, compiled for few rows first, as in a run."""
    norm = RMSNorm(WIDTH).to(device, torch.bfloat16)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return x + F.silu(norm(x)) * x

    compute = torch.compile(plain, dynamic=True, backend=BACKEND)
    row_errors(compute, rows_of(64 * WIDTH, WIDTH, device), [norm.weight])
    return row_errors(compute, rows_of(elements, WIDTH, device), [norm.weight])


def layer_norm(device: str, elements: int) -> Errors:
    norm = nn.LayerNorm(WIDTH, device=device, dtype=torch.bfloat16)
    split_long_norms(norm)
    parameters = [norm.weight, norm.bias]
    return row_errors(lambda x, weight, bias: norm(x), rows_of(elements, WIDTH, device), parameters)


def formula_norm(device: str, elements: int) -> Errors:
    return _by_formula(NormFormula(offset=1.0), device, elements)


def gated_norm(device: str, elements: int) -> Errors:
    return _by_formula(NormFormula(groups=8, gate="last"), device, elements)


def _by_formula(formula: NormFormula, device: str, elements: int) -> Errors:
    weight = torch.randn(WIDTH, device=device, dtype=torch.bfloat16)

    def compute(x: Tensor, weight: Tensor) -> Tensor:
        gate = (x.detach(),) if formula.gate else ()
        made = formula.run_kernel(x, weight, 1e-6, *gate)
        return formula(x, weight, 1e-6, *gate) if made is None else made

    return row_errors(compute, rows_of(elements, WIDTH, device), [weight])


def product(device: str, elements: int) -> Errors:
    weight = torch.randn(WIDTH, WIDTH, device=device, dtype=torch.bfloat16)
    return row_errors(F.linear, rows_of(elements, WIDTH, device), [weight])


def swiglu(device: str, elements: int) -> Errors:
    return row_errors(lambda x: F.silu(x) * x.flip(1), rows_of(elements, WIDTH, device))


def mlp_in_tiles(device: str, elements: int) -> Errors:
    """Rows, their gradients and those of weights, written and added tile by tile."""
    weights = [torch.randn(WIDTH, WIDTH, device=device, dtype=torch.bfloat16) / WIDTH**0.5 for _ in range(3)]

    def compute(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        def run(rows: Tensor) -> Tensor:
            return F.linear(F.silu(F.linear(rows, gate)) * F.linear(rows, up), down)

        return run_in_tiles(run, (x,), (gate, up, down), count_tiles(len(x), max(4, elements // WIDTH // 32)))

    return row_errors(compute, rows_of(elements, WIDTH, device), weights)


def gelu(device: str, elements: int) -> Errors:
    return row_errors(lambda x: F.gelu(x, approximate="tanh"), rows_of(elements, WIDTH, device))


def gate_of_experts(device: str, elements: int) -> Errors:
    gate = gate_in_one_pass if device == "cuda" else lambda x: F.silu(x.chunk(2, 1)[0]) * x.chunk(2, 1)[1]
    return row_errors(gate, rows_of(elements, 2 * WIDTH, device))


def products_of_experts(device: str, elements: int) -> Errors:
    """Both ends past it: rows in, and rows out; the last three quarters of the rows are the last expert's."""
    from longspan.model.experts.experts import _grouped_mm

    x, weights = rows_of(elements, WIDTH, device), torch.randn(4, WIDTH, WIDTH, device=device, dtype=torch.bfloat16)
    if _grouped_mm is None:
        return {}
    multiply, count = _grouped_mm, len(x)

    first = count // 4 // 16 * 16  # rows before it are other experts'
    ends = torch.tensor([first // 2 // 16 * 16, first, first, count], device=device, dtype=torch.int32)
    at = compared_rows(count, WIDTH)
    last = at[at >= first].to(device)
    out = multiply(x, weights, offs=ends)
    return {"rows": relative_error(out[last].double(), (x[last] @ weights[3]).double())}


def visits(device: str, elements: int) -> Errors:
    """Rows to four experts each and back: more copies than that; each comes back as it went."""
    rows, top_k = elements // WIDTH // 4 + 64, 4
    x = torch.empty(rows, WIDTH, device=device, dtype=torch.bfloat16).normal_().requires_grad_()
    weights = torch.rand(rows, top_k, device=device, dtype=torch.bfloat16).requires_grad_()
    order = torch.randperm(rows * top_k, device=device)
    of = Visits.of(order, top_k)
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


def float8_product(device: str, elements: int) -> Errors:
    """As wide as it is deep, so that its output has as many elements."""
    weight = torch.randn(WIDTH, WIDTH, device=device, dtype=torch.bfloat16) * WIDTH**-0.5
    return row_errors(
        lambda x, weight: linear_in_float8(x, weight, None, Float8Weight()), rows_of(elements, WIDTH, device), [weight]
    )


def float8_weights_of_experts(device: str, elements: int) -> Errors:
    """The last expert's rows and columns in float8, beside the same expert alone."""
    experts = torch.empty(elements // WIDTH**2 + 2, WIDTH, WIDTH, device=device, dtype=torch.bfloat16).normal_()
    errors = Errors()
    for quantise in (quantise_rows, quantise_columns):
        every, alone = quantise(experts), quantise(experts[-1])
        values = relative_error(every.values[-1].double(), alone.values.double())
        errors[quantise.__name__] = values + relative_error(every.scales[-1].double(), alone.scales.double())
    return errors


def embedding(device: str, elements: int) -> Errors:
    table = torch.randn(1000, WIDTH, device=device, dtype=torch.bfloat16).requires_grad_()
    ids = torch.randint(1000, (elements // WIDTH + 64,), device=device)
    ids[-1], ids[:-1] = 999, ids[:-1] % 999  # one id is of the last row alone
    out = F.embedding(ids, table)
    dout = torch.empty_like(out).normal_()
    at = compared_rows(len(ids), WIDTH).to(device)
    errors = {"rows": relative_error(out.detach()[at].double(), table.detach()[ids[at]].double())}
    (gradient,) = torch.autograd.grad(out, table, dout)
    return errors | {"gradient": relative_error(gradient[999].double(), dout[-1].double())}


def rows_by_index(device: str, elements: int) -> Errors:
    """Taken, put back and added, as rows of documents are."""
    x = rows_of(elements, WIDTH, device)
    at, back = compared_rows(len(x), WIDTH).to(device), torch.arange(len(x), device=device).flip(0)
    taken = x.index_select(0, back)
    errors = {"index_select": relative_error(taken[at].double(), x[back[at]].double())}
    into = torch.zeros_like(x).index_copy_(0, back, taken)
    errors["index_copy_"] = relative_error(into[at].double(), x[at].double())
    into.index_add_(0, back, taken)
    errors["index_add_"] = relative_error(into[at].double(), 2 * x[at].double())
    joined = torch.cat([x[:3], taken, into[:3]])
    return errors | {"cat": relative_error(joined[at + 3].double(), taken[at].double())}


def softmax_of_logits(device: str, elements: int) -> Errors:
    vocabulary = 151936
    logits = rows_of(elements, vocabulary, device)
    ids, slopes = torch.randint(vocabulary, (len(logits),), device=device), torch.randn(len(logits), device=device)
    at = compared_rows(len(logits), vocabulary).to(device)
    log_probs, gradient_of = row_softmax(logits, ids)
    isolated, gradient_alone = row_softmax(logits[at], ids[at])
    return {
        "log-probabilities": relative_error(log_probs[at].double(), isolated.double()),
        "gradient": relative_error(gradient_of(slopes)[at].double(), gradient_alone(slopes[at]).double()),
    }


def rotary(device: str, elements: int) -> Errors:
    angles = torch.randn(elements // WIDTH + 64, 1, 128, device=device, dtype=torch.bfloat16)
    at = compared_rows(len(angles), WIDTH).to(device)

    def compute(x: Tensor) -> Tensor:
        cos = angles.cos() if len(x) == len(angles) else angles[at].cos()
        heads = x.view(-1, 32, 128)
        a, b = heads.chunk(2, -1)
        return (heads * cos + torch.cat([-b, a], -1) * cos).flatten(1)

    return row_errors(compute, rows_of(elements, WIDTH, device))


def running_sums(device: str, elements: int) -> Errors:
    """As of log-decays: over rows, of each of many heads."""
    x = torch.randint(-1, 2, (elements // WIDTH + 64, WIDTH), device=device, dtype=torch.float32)
    ends = x.cumsum(0)[-AROUND:]
    exact = torch.stack([piece.sum(0, dtype=torch.float64) for piece in x.chunk(16)]).sum(0)
    return {"last": relative_error(ends[-1].double(), exact)}


def attention(kernel: str, device: str, elements: int) -> Errors:
    """Documents of 2,048 rows, under 32 heads that lie one after another."""
    heads, size = 32, WIDTH // 32
    lengths = [DOCUMENT] * (elements // WIDTH // DOCUMENT) + [64]
    rows, ends = sum(lengths), np.cumsum(lengths).tolist()
    q, k, v, dout = (
        torch.empty(heads, rows, size, device=device, dtype=torch.bfloat16).normal_().transpose(0, 1) for _ in range(4)
    )
    call = AttendCall(heads, heads, size, size, torch.bfloat16, torch.device(device), Mask(), size**-0.5)
    compute = next(k for k in KERNELS if k.name == kernel)

    def computed(tensors: Sequence[Tensor], lengths: Sequence[int]) -> Sequence[Tensor]:
        stops = np.cumsum(lengths).tolist()
        tiles = [Tile(stop - n, stop, stop - n, stop, right=0) for stop, n in zip(stops, lengths, strict=True)]
        launch, (q, k, v, dout) = Launch(Tiling.from_tiles(tiles), torch.device(device)), tensors
        out, lse = compute.forward(q, k, v, launch, call)
        return out, *compute.backward(dout, Saved(q, k, v, out, lse), launch, call)

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
    before = RowsBefore(
        width, (source + width) % (2 * width), source[width:], source[:width] * 0, source[1 : width + 1]
    )
    first = FirstRows(
        places + start,
        before,
        torch.tensor([start], device=device),
        torch.tensor([width], device=device),
        places[None],
    )
    write_rows = write_first
    if device == "cpu":
        from longspan.ssm.kernels.convolutions import TORCH_CONVOLUTION

        write_rows = TORCH_CONVOLUTION.write_first
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
    """Maps of a delta rule's runs, the last one beside itself alone."""
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
    of_both, exact = run_maps(named(slice(None)), runs), run_maps(named(slice(rows - last, rows)), isolated)
    pairs = zip(("states", "transitions"), of_both, exact, strict=True)
    return {name: relative_error(a[1].double(), b[0].double()) for name, a, b in pairs}


def updates(device: str, elements: int) -> Errors:
    """AdamW's step in one pass and the norm of gradients, of one parameter."""
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
    """Every case by its name."""
    of_rows = (
        *(float8_product, float8_weights_of_experts, mlp_in_tiles),
        *(rms_norm, stock_rms_norm, compiled_rows, layer_norm, formula_norm, gated_norm, product, swiglu, gelu, rotary),
        *(gate_of_experts, products_of_experts, visits, embedding, rows_by_index, softmax_of_logits, running_sums),
        *(sums_of_attention, first_rows_of_runs, faded_states, maps_of_runs, updates),
    )
    kernels = [kernel.name for kernel in KERNELS if "cuda" in kernel.devices and kernel.name != "reference"]
    named = {case.__name__.replace("_", " "): case for case in of_rows}
    return named | {f"attention {name}": partial(attention, name) for name in kernels}
