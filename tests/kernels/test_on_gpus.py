"""Our kernels on a GPU: of norms, experts and losses beside float64, of weights in 4 bits beside the CPU."""

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from longspan.model.experts import expert_products, visits
from longspan.model.experts.expert_products import ExpertLoads, GateFormula, find_gate_formulas, run_experts
from longspan.model.experts.moe import connect_experts, mix_experts
from longspan.model.experts.visits import ExpertBiases, Visits, spread_rows, sum_visits
from longspan.model.frozen.packed_format import NF4
from longspan.model.kinds import expert_modules
from longspan.model.seams.norms import NormFormula
from longspan.train.log_probs import distribution_values_by_kernel, target_log_probs_and_gradient
from tests.model.experts.moe_models import moe_config
from tests.model.lora.adapted import drawn
from tests.model.stock import random_model
from tests.reference import relative_error

Errors = dict[str, float]
NORMS = {
    "1 + weight": (NormFormula(offset=1.0), 2048),
    "of heads": (NormFormula(offset=1.0), 256),
    "groups, gate before": (NormFormula(groups=2, gate="first"), 48),
    "one group of many": (NormFormula(gate="first"), 8192),
    "gate after": (NormFormula(gate="last"), 128),
    "sigmoid after": (NormFormula(gate="last", activation="sigmoid"), 20),
}
EXPERTS = ((130, 8, 16, 2048), (7, 1, 3, 40), (3, 2, 4, 3000))  # rows, visits of each, experts, hidden size
GPT_OSS = GateFormula(1.702, 7.0, 1.0, interleaved=True)
# Rows, hidden size, width, experts, visits of each row: the second as in gpt-oss-20b.
GPT_OSS_EXPERTS = ((40, 24, 40, 8, 3), (1024, 2880, 2880, 32, 4))
# Rows, width, formula, and the rows of each expert with a bias.
GATES = (
    (300, 768, GateFormula(), ()),
    (5, 3, GateFormula(limit=1.0), ()),
    (2, 3000, GPT_OSS, ()),
    (41, 1500, GPT_OSS, (0, 9, 32, 0)),
    (7, 3, replace(GPT_OSS, interleaved=False), (7,)),
)
LOGITS = ((33, 151936), (5, 40), (3, 4097))


def norm_errors(case: str, device: str, dtype: torch.dtype, rows: int = 37) -> Errors:
    formula, size = NORMS[case]
    torch.manual_seed(0)
    x, gate, weight = torch.randn(1, rows, size + 8), torch.randn(1, rows, size + 8), torch.randn(size)
    gates = [gate] if formula.gate else []
    inner = slice(4, size + 4)

    def compute(x: Tensor, weight: Tensor, *gates: Tensor) -> Tensor:
        made = formula.run_kernel(x[..., inner], weight, 1e-6, *(g[..., inner] for g in gates))
        assert made is not None, "the kernel did not run"
        return made

    def exact(x: Tensor, weight: Tensor, *gates: Tensor) -> Tensor:
        return formula(x[..., inner], weight, 1e-6, *(g[..., inner] for g in gates))

    return _errors(compute, exact, (x, weight, *gates), device, dtype)


def visit_errors(case: Sequence[int], device: str, dtype: torch.dtype) -> Errors:
    rows, top_k, experts, size = case
    torch.manual_seed(0)
    x, factors = torch.randn(rows, size), torch.randn(experts)
    chosen = torch.stack([torch.randperm(experts)[:top_k] for _ in range(rows)])
    by_expert, order = chosen.flatten().sort(stable=True)
    ends = torch.bincount(by_expert, minlength=experts).cumsum(0)
    errors = Errors()
    for weighted, biased in itertools.product((True, False), repeat=2):
        more = [torch.rand(rows, top_k)] * weighted + [torch.randn(experts, size)] * biased
        parts = partial(_weights_and_values, weighted=weighted, biased=biased)

        def compute(x: Tensor, *more: Tensor, parts: Any = parts) -> Tensor:
            weights, values = parts(more)
            visits = Visits.from_order(order.to(device), top_k)
            going = spread_rows(x, visits)
            biases = None if values is None else ExpertBiases(values, ends.to(device))
            return sum_visits(going * going * factors[by_expert].to(going)[:, None], weights, visits, biases)

        def exact(x: Tensor, *more: Tensor, parts: Any = parts) -> Tensor:
            weights, values = parts(more)
            outputs = x.square()[:, None] * factors[chosen].to(x)[..., None]
            outputs = outputs if values is None else outputs + values[chosen.to(device)]
            return (outputs if weights is None else outputs * weights[..., None]).sum(1)

        named = f"{'weighted' if weighted else 'plain'}{', biased' * biased}: "
        found = _errors(compute, exact, (x, *more), device, dtype)
        errors |= {named + name: error for name, error in found.items()}
    return errors


def _weights_and_values(more: Sequence[Tensor], *, weighted: bool, biased: bool) -> tuple[Tensor | None, Tensor | None]:
    return more[0] if weighted else None, more[-1] if biased else None


def gate_errors(case: tuple[int, int, GateFormula, Sequence[int]], device: str, dtype: torch.dtype) -> Errors:
    """Some numbers are clamped, and some experts have no row."""
    rows, width, formula, counts = case
    torch.manual_seed(0)
    ends = torch.tensor(counts).cumsum(0).to(device) if counts else torch.zeros(0)

    def compute(x: Tensor, *values: Tensor) -> Tensor:
        return formula.run_kernel(x, ExpertBiases(values[0], ends) if values else None)

    def exact(x: Tensor, *values: Tensor) -> Tensor:
        return formula(ExpertBiases(values[0], ends).add_to(x) if values else x)

    values = [torch.randn(len(counts), 2 * width)] if counts else []
    return _errors(compute, exact, (5 * torch.randn(rows, 2 * width), *values), device, dtype)


def experts_errors(case: Sequence[int], device: str, dtype: torch.dtype) -> Errors:
    """Experts of gpt-oss, with both biases, beside transformers' own forward in float64; one expert has most rows."""
    rows, size, width, count, top_k = case
    config = GptOssConfig(hidden_size=size, intermediate_size=width, num_local_experts=count)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    experts = GptOssExperts(config).to(device, dtype)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-2] ** -0.5 if parameter.ndim == 3 else 1.0)
    find_gate_formulas([experts])
    wide = copy.deepcopy(experts).double()
    chosen = torch.stack([torch.randperm(count)[:top_k] for _ in range(rows)]).to(device)
    chosen[: rows // 2] = torch.arange(top_k)
    parameters = [dict(module.named_parameters()) for module in (experts, wide)]
    given = (torch.randn(rows, size), torch.rand(rows, top_k))
    leaves = [x.to(device, dtype).requires_grad_() for x in given]
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    found = mix_experts(experts, leaves[0], chosen, leaves[1])
    wanted = wide(doubles[0], chosen, doubles[1])
    dout = torch.randn_like(found)
    gradients = torch.autograd.grad(found, [*leaves, *parameters[0].values()], dout)
    expected = torch.autograd.grad(wanted, [*doubles, *parameters[1].values()], dout.double())
    names = ("rows", "weights", *parameters[0])
    errors = {"out": relative_error(found.detach().double(), wanted.detach())}
    pairs = zip(names, gradients, expected, strict=True)
    return errors | {name: relative_error(a.double(), b) for name, a, b in pairs}


def softmax_errors(case: tuple[int, int], device: str, dtype: torch.dtype) -> Errors:
    rows, vocabulary = case
    torch.manual_seed(0)
    logits, ids, slopes = 4 * torch.randn(rows, vocabulary), torch.randint(vocabulary, (rows,)), torch.randn(rows)
    given = logits.to(device, dtype)
    log_probs, gradient_of = target_log_probs_and_gradient(given, ids.to(device))
    wide = given.double().requires_grad_()
    wanted = wide.log_softmax(1).gather(1, ids.to(device)[:, None]).squeeze(1)
    (gradient,) = torch.autograd.grad(wanted, wide, slopes.to(device).double())
    found = gradient_of(slopes.to(device))
    assert found.dtype == dtype
    return {
        "log-probabilities": relative_error(log_probs.double(), wanted.detach()),
        "gradient": relative_error(found.double(), gradient),
    }


def distribution_errors(case: tuple[int, int], device: str, dtype: torch.dtype) -> Errors:
    """Entropy, the likeliest token, the mean of logits and log Σ p², with equal logits and tokens that cannot come."""
    rows, vocabulary = case
    torch.manual_seed(0)
    logits = 4 * torch.randn(rows, vocabulary)
    logits[0, 1::3] = logits[0].max() + 1  # equal ones
    logits = logits.to(device, dtype)
    wide = logits.double()
    ids = wide.argmax(-1)
    ids[1] = (ids[1] + 1) % vocabulary
    numbers = distribution_values_by_kernel(logits, ids)
    assert numbers is not None, "the kernel did not run"
    p = wide.softmax(-1)
    entropy, squares = torch.special.entr(p).sum(-1), (p * p).sum(-1).log()
    assert numbers[1].tolist() == [float(row != 1) for row in range(rows)]
    errors = {
        "entropy": relative_error(numbers[0].double(), entropy),
        "mean logit": _difference(numbers[2], wide.mean(-1)),
        "log Σ p²": relative_error(numbers[3].double(), squares),
    }
    logits[:, ::2] = -torch.inf
    logits[0] = -torch.inf
    logits[0, 3] = 2.0
    p = logits.double().softmax(-1)
    numbers = distribution_values_by_kernel(logits, torch.full_like(ids, 3))
    assert numbers is not None
    assert numbers[1, 0] == 1
    masked = relative_error(numbers[0].double(), torch.special.entr(p).sum(-1))
    return errors | {"entropy with −∞": masked, "log Σ p² with −∞": _difference(numbers[3], (p * p).sum(-1).log())}


def _difference(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).abs().max())


def _errors(
    compute: Callable[..., Tensor],
    exact: Callable[..., Tensor],
    given: Sequence[Tensor],
    device: str,
    dtype: torch.dtype,
) -> Errors:
    leaves = [x.to(device, dtype).requires_grad_() for x in given]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    found, wanted = compute(*leaves), exact(*wide)
    dout = torch.randn(wanted.shape).to(device)
    gradients = zip(
        torch.autograd.grad(found, leaves, dout.to(found.dtype)),
        torch.autograd.grad(wanted, wide, dout.to(found.dtype).double()),
        strict=True,
    )
    errors = {"out": relative_error(found.detach().double(), wanted.detach())}
    return errors | {f"gradient {i}": relative_error(a.double(), b) for i, (a, b) in enumerate(gradients)}


def interpreted() -> None:
    """Kernels of experts by Triton's interpreter, in float32: each is launched."""
    from longspan.model.experts import row_kernels

    launched = set[str]()

    class Kernels:
        def __getattr__(self, name: str) -> Any:
            launched.add(name)
            return getattr(row_kernels, name)

    for module in (visits, expert_products):
        module.find_row_kernels = lambda *_: Kernels()
    visits._PROGRAMS = 12
    found = experts_errors(GPT_OSS_EXPERTS[0], "cpu", torch.float32)
    assert max(found.values()) <= 1e-6, found
    assert launched == {"gate_kernel", "gate_backward_kernel", "sum_visits_kernel", "visit_gradients_kernel"}
    for errors, case in (*((visit_errors, case) for case in EXPERTS[1:]), *((gate_errors, case) for case in GATES[1:])):
        found = errors(case, "cpu", torch.float32)
        assert max(found.values()) <= 1e-6, (errors.__name__, case, found)


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or find_spec("triton") is None, reason="needs a CUDA device"),
]
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
EVERY = [
    *((norm_errors, case) for case in NORMS),
    *((visit_errors, case) for case in EXPERTS),
    *((gate_errors, case) for case in GATES),
    *((softmax_errors, case) for case in LOGITS),
    *((distribution_errors, case) for case in LOGITS),
]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("errors", "case"), EVERY, ids=[f"{errors.__name__} {case}" for errors, case in EVERY])
def test_results_and_gradients_are_those_of_float64(errors, case, dtype: torch.dtype) -> None:
    found = errors(case, "cuda", dtype)
    assert max(found.values()) <= BOUNDS[dtype], found


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 5e-6), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize("case", GPT_OSS_EXPERTS, ids=str)
def test_experts_with_biases_are_those_of_the_class(case: Sequence[int], dtype: torch.dtype, bound: float) -> None:
    """Two products of true widths round more than a kernel does; one product of all groups in bfloat16."""
    found = experts_errors(case, "cuda", dtype)
    assert max(found.values()) <= bound, found


def test_many_rows_of_few_features() -> None:
    found = norm_errors("of heads", "cuda", torch.float32, rows=100_003)
    assert max(found.values()) <= BOUNDS[torch.float32], found


PACKED = ((1, 64), (37, 192), (130, 2048), (3, 12288), (700, 9216))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", PACKED, ids=str)
def test_bytes_and_values_are_those_of_the_host(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Frozen weights in 4 bits: bytes that are made on a GPU, and the kernel's values, are those of the CPU."""
    weight = 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight[0, :64] = 0.0
    packed = NF4.pack(weight)
    assert torch.equal(NF4.pack(weight.cuda()).cpu(), packed)
    values, on_gpu = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype, device="cuda")
    NF4.unpack(packed, values)
    NF4.unpack(packed.cuda(), on_gpu)
    assert torch.equal(on_gpu.cpu(), values)


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])  # the second one's matrices are transposed
def test_grouped_products_are_those_of_each_expert(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters of experts: one product of all groups gives what one product for each expert gives."""
    names = ["experts.gate_up_proj", "experts.down_proj"]
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj"], target_parameters=names)
    peft_model: Any = drawn(peft.get_peft_model(random_model(moe_config(family), torch.bfloat16), lora))
    model = peft_model.get_base_model().to("cuda", torch.bfloat16)
    connect_experts(model)
    experts = next(iter(expert_modules(model).values()))
    counts = [0, 3, 17, 1, 40, 8, 0, 11]
    rows = 0.5 * torch.randn((sum(counts), model.config.hidden_size), generator=torch.Generator().manual_seed(0))
    found = dict[bool, list[torch.Tensor]]()
    trained = [p for n, p in model.named_parameters() if ".layers.0.mlp.experts." in n and p.requires_grad]
    assert len(trained) == 4
    for grouped in (True, False):
        monkeypatch.setattr(expert_products, "can_group_products", lambda *_, grouped=grouped, **__: grouped)
        x = rows.to("cuda", torch.bfloat16).requires_grad_()
        visits = Visits.from_order(torch.arange(len(x), device="cuda"), 1)
        y = run_experts(experts, x, ExpertLoads(torch.tensor(counts, device="cuda")), visits)
        found[grouped] = [y, *torch.autograd.grad(y.float().square().sum(), [x, *trained])]
    for together, looped in zip(found[True], found[False], strict=True):
        assert looped.abs().max() > 0
        assert (together - looped).float().norm() <= 2e-2 * looped.float().norm()
