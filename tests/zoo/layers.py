"""Layers other than attention: state-space layers, routers, norms, multi-token prediction, offsets in kernels."""

import ast
from collections.abc import Sequence
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.comm import World, bind
from longspan.doctor.stock import (
    ROUTER,
    collect_gradients,
    compute_stock_answer,
    loss_error,
    whole_float64,
)
from longspan.model import add_mtp, prepare
from longspan.model.exactness.small_copies import make_tiny_model
from longspan.model.seams.norms import fuse_norms
from longspan.plan import Group, MicroBatch, Plan
from longspan.plan.planners.fixed import plan_fixed
from longspan.ssm import causal_conv, linear_scan
from longspan.train.step import run_step
from longspan.train.terms.mtp import MtpLoss
from tests.zoo.dense import (
    draw_documents,
    make_model,
    model_error,
    plan_documents,
    tensor_error,
    tiny_configuration,
)
from tests.zoo.known_error import KnownError

_LENGTHS = (9, 14, 5)


def _compare_states(world: World) -> float:
    """Return the error of a scan of packed documents over two ranks, against scans of each document, step by step."""
    random, rows = torch.Generator().manual_seed(0), sum(_LENGTHS)
    shapes = ((rows, 2, 4), (rows, 2, 4), (rows, 2, 3), (rows, 2, 1), (rows, 2))
    q, k, v, log_decays, beta = (torch.rand(*shape, generator=random, dtype=torch.float64) for shape in shapes)
    inputs = (q, F.normalize(k, dim=-1), v, -log_decays, beta)
    borders = np.cumsum((0, *_LENGTHS)).tolist()
    exact = torch.cat([_scan_document([x[a:b] for x in inputs]) for a, b in pairwise(borders)])
    shard = bind(plan_fixed(_LENGTHS, world.home, 2).micro_batches[0], world)
    q, k, v, log_decays, beta = (shard.scatter(x) for x in inputs)
    out = linear_scan(q, k, v, log_decays, beta, shard)
    return tensor_error(out, shard.scatter(exact))


def _scan_document(inputs: Sequence[Tensor]) -> Tensor:
    """Run the gated delta rule over one document's q, k, v, log decays and beta; returns its output (n, H, V)."""
    q, k, v, log_decays, beta = inputs  # (n, H, K), (n, H, K), (n, H, V), (n, H, 1), (n, H)
    state, outs = q.new_zeros(q.shape[1], q.shape[2], v.shape[2]), list[Tensor]()  # state (H, K, V)
    for t in range(len(q)):
        state = state * log_decays[t].exp().unsqueeze(-1)
        change = beta[t][:, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
        state = state + torch.einsum("hk,hv->hkv", k[t], change)
        outs.append(torch.einsum("hk,hkv->hv", q[t], state))
    return torch.stack(outs)


def _compare_convolutions(world: World) -> float:
    """Return the error of a convolution of packed documents over two ranks, against torch's of each document."""
    random = torch.Generator().manual_seed(0)
    x, weight = (torch.rand(*shape, generator=random, dtype=torch.float64) for shape in ((sum(_LENGTHS), 6), (6, 4)))
    documents = x.split(_LENGTHS)
    padded = [F.pad(document.T, (3, 0))[None] for document in documents]
    exact = torch.cat([F.conv1d(columns, weight[:, None], groups=6)[0].T for columns in padded])
    shard = bind(plan_fixed(_LENGTHS, world.home, 2).micro_batches[0], world)
    return tensor_error(causal_conv(shard.scatter(x), weight, None, shard), shard.scatter(exact))


def _compare_router_losses(world: World) -> float:
    """Return the error of a step with balance and z losses of routers, against the stock model on all documents."""
    config = tiny_configuration("Qwen3MoeConfig", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    documents = draw_documents()
    with whole_float64():
        answer = compute_stock_answer(config, [d.ids for d in documents], torch.float64, router=ROUTER)
        model = make_model(config, world)
        result = run_step(model, plan_documents(documents, world), documents, world, router=ROUTER)
    losses = [loss_error(x, y) for x, y in zip(result.router or (), answer.routers, strict=True)]
    return max(loss_error(result.loss, answer.loss), model_error(model, answer, world), *losses)


def _compare_depths(world: World, documents: Sequence[Any]) -> float:
    """Return the error of gradients of a step at degree 2 against those of a step in which one slot has all documents.

    The model has one depth of multi-token prediction, which the unchanged model lacks: so there is no dense answer.
    """
    numbers, lengths = tuple(range(len(documents))), tuple(map(len, documents))
    one_slot = MicroBatch((Group((0,), numbers, lengths),))
    plan = plan_documents(documents, world)
    plans = (Plan(world.home.slots, lengths, (one_slot,), targets=plan.targets).check(), plan)
    with whole_float64():
        model = prepare(add_mtp(make_tiny_model(tiny_configuration(), torch.float64), 1), world)
        gradients = list[dict[str, Tensor]]()
        for step_plan in plans:
            run_step(model, step_plan, documents, world, mtp=MtpLoss(0.3))
            gradients.append(collect_gradients(model))
            model.zero_grad()
    return max(tensor_error(gradients[1][name], exact) for name, exact in gradients[0].items())


def _compare_depths_without_masks(world: World) -> float:
    """Compare depths on documents in which every token but the first is a target."""
    return _compare_depths(world, draw_documents())


def _compare_depths_uneven_masks(world: World) -> float:
    """Compare depths on documents whose targets are among the first tokens, so that the ranks' numbers differ."""
    return _compare_depths(world, draw_documents((24, 40), mask=lambda _, position: position < 11))


def _compare_norm_formulas(world: World) -> float:
    """Return the worst error of fused norms' formulas, in two families, against the norms' own code.

    Weights of the norms are random, so that an offset of 1 shows. Infinite if a family has no fused norm.
    """
    worst_error = 0.0
    for name in ("GemmaConfig", "Qwen3Config"):
        model = make_tiny_model(tiny_configuration(name), torch.float32)
        fuse_norms(model)
        # A fused norm's forward is bound to the norm and its formula.
        fused = [x for x in model.modules() if isinstance(getattr(vars(x).get("forward"), "args", None), tuple)]
        for norm in fused:
            _, formula = vars(norm)["forward"].args
            x = torch.linspace(-2, 3, norm.weight.numel(), dtype=torch.float64)  # pyright: ignore
            weight: Any = norm.weight.detach().double()  # pyright: ignore[reportCallIssue]
            eps = next(float(getattr(norm, key)) for key in ("variance_epsilon", "eps") if hasattr(norm, key))
            exact = type(norm).forward(norm.double(), x)  # pyright: ignore[reportArgumentType]
            worst_error = max(worst_error, _error_above_rounding(formula(x, weight, eps), exact))
        worst_error = worst_error if fused else float("inf")
    return worst_error


def _error_above_rounding(result: Tensor, exact: Tensor) -> float:
    """Return the relative error of a result; 0 where it is below 1e-6, as norms compute in float32, which rounds."""
    error = tensor_error(result, exact.detach().to(result.dtype))
    return 0.0 if error < 1e-6 else error


def kernel_sources() -> dict[str, str]:
    """Return the source of each Triton kernel that asks for its program's number, by file and name.

    Kernels are in files whose names end with "kernels.py". One without a program's number computes no offset by it.
    """
    root, sources = Path(str(files("longspan"))), dict[str, str]()
    for path in sorted(root.rglob("*kernels.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
                source = ast.unparse(node)
                if "program_id" in source:
                    sources[f"{path.name}: {node.name}"] = source
    return sources


def _count_narrow_kernels(world: World) -> float:
    """Count the kernels in whose source nothing is widened to 64 bits; infinite where no kernel can be read.

    Which products are widened is not looked at: tests on GPUs run every kernel past 2^32 elements.
    """
    sources = kernel_sources()
    return float(sum("tl.int64" not in source for source in sources.values())) if sources else float("inf")


ERRORS = (
    KnownError(
        "states leak between packed documents",
        "THUDM/slime#1686",
        happened="In Qwen3-Next and Qwen3.5 the boundaries of packed samples reached the convolution, but not the "
        "gated delta rule behind it: its state ran on from one sample into the next.",
        seen="A sample's loss depends on what is packed before it, in linear-attention layers only.",
        prevented="A chain of runs is one document's; the state before its first run is zero, on whichever rank that "
        "run lies.",
        check=_compare_states,
        pull=True,
    ),
    KnownError(
        "convolutions reach into the document before",
        "NVIDIA-NeMo/Automodel#2147",
        happened="The convolution of four taps in front of the delta rule did not know where samples begin: the last "
        "three tokens of one bled into the first three of the next.",
        seen="Outputs of packed samples differ from those of the same samples one by one (0.4 in the thread).",
        prevented="A run fetches rows of its own document only, and zeros stand before its start.",
        check=_compare_convolutions,
        pull=True,
    ),
    KnownError(
        "losses of routers without a gradient",
        "NVIDIA-NeMo/Automodel#1412",
        happened="The return value of the function that attaches the balance loss to the router's weights was "
        "discarded; its gradient never reached the router.",
        seen="The balance loss is logged, and experts stay unbalanced.",
        prevented="The gradients of routers are compared with those of transformers' own loss over the same documents.",
        check=_compare_router_losses,
        pull=True,
    ),
    KnownError(
        "losses of routers shrink with the ranks",
        "NVIDIA/Megatron-LM#3769",
        happened="The global balance loss divided by the tokens of all ranks twice, while its probabilities were those "
        "of one rank: its gradient was too small by the data-parallel size.",
        seen="The same coefficient balances less on more GPUs.",
        prevented="Loads are summed over all slots before the first backward pass, and the divisor is the step's.",
        check=_compare_router_losses,
        pull=True,
    ),
    KnownError(
        "weights of norms without their offset",
        "linkedin/Liger-Kernel#74",
        happened="A fused RMSNorm made for Llama was put into Gemma, whose norms multiply by 1 + weight.",
        seen="A pretrained Gemma begins with a high loss, and learns its way out of it.",
        prevented="What a norm computes is tried on a copy of it, and the kernel gets that formula; a norm of another "
        "formula keeps its own code.",
        check=_compare_norm_formulas,
    ),
    KnownError(
        "losses of later tokens divided by the degree",
        "NVIDIA/Megatron-LM#3959",
        happened="With context parallelism the count of micro-batches was inflated by its size; the balance loss made "
        "up for that and the loss of multi-token prediction did not.",
        seen="The depths learn less the higher the degree.",
        prevented="A depth's loss is a sum over its targets in the step, divided once by their number.",
        check=_compare_depths_without_masks,
        pull=True,
    ),
    KnownError(
        "losses of later tokens divided by a rank's targets",
        "NVIDIA/Megatron-LM#7452",
        happened="Multi-token prediction divided by local token counts: with uneven counts a gradient was 14/3 where "
        "4 is right (finding 3 of the thread, found by a checker of types).",
        seen="The gradient of the depths depends on how documents lie on ranks.",
        prevented="The targets of each depth are counted over all slots before the passes.",
        check=_compare_depths_uneven_masks,
    ),
    KnownError(
        "offsets of 32 bits",
        "linkedin/Liger-Kernel#1483",
        happened="A Triton kernel multiplied a 32-bit program number by a stride: from 2^31 elements on the offset "
        "wraps, and rows are read and written elsewhere. Mamba 2's scan had the same from 61K tokens "
        "(state-spaces/mamba#1015).",
        seen="Finite, plausible, wrong numbers in long sequences only.",
        prevented="Kernels widen what they multiply by a stride to 64 bits. Without a GPU their source is read; with "
        "one, tests run every kernel past 2^32 elements.",
        check=_count_narrow_kernels,
    ),
)
