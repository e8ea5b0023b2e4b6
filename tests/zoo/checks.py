"""Checks that silent errors of others do not happen here: each gives this rank's relative error, or counts errors.

Every rank of the world enters a check, under `compute_in_float64`; a result that is missing is infinite. What a model
should give is what the unchanged transformers model says of documents one by one, in one process.
"""

import ast
import json
import pickle
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig

from longspan.attention import attend
from longspan.checkpoint.files import (
    checkpoint_path,
    complete_checkpoints,
    create_partial_folder,
    partial_path,
    publish_checkpoint,
    remove_old_checkpoints,
)
from longspan.comm import World, bind
from longspan.data.batch_documents import documents_of
from longspan.data.document import NO_TARGET, Document
from longspan.data.step_order import StepOrder
from longspan.doctor.stock import (
    ROUTER,
    ModelAnswer,
    collect_gradients,
    compute_stock_answer,
    errors_of_missing_gradients,
    gradient_errors,
    loss_error,
    make_stock_model,
)
from longspan.evaluation.live import evaluate
from longspan.layout import Layout
from longspan.model import add_mtp
from longspan.model.exactness.small_copies import make_tiny_model
from longspan.model.frozen.formats.four_bit import stored_four_bit_weight
from longspan.model.seams.norms import fuse_norms
from longspan.plan import Group, MicroBatch, Plan
from longspan.plan.planners.fixed import plan_fixed
from longspan.ssm import causal_conv, linear_scan
from longspan.train.document_log_probs import token_log_probs
from longspan.train.gradient_norm import clip_grad_norm
from longspan.train.step import run_step
from longspan.train.terms.mtp import MtpLoss
from tests.model.stock import SIZES, prepare_untried
from tests.reference import dense_attention, relative_error
from tests.ssm.parity import by_rows, convolved

LENGTHS = (13, 6, 22, 9)
Check = Callable[[World], float]
Mask = Callable[[int, int], bool]


def tiny_configuration(name: str = "Qwen3Config", **changes: Any) -> PreTrainedConfig:
    return getattr(transformers, name)(**(SIZES | changes))


def draw_documents(lengths: Sequence[int] = LENGTHS, mask: Mask | None = None) -> list[Document]:
    """Documents of random ids; `mask` says of a document's number and a position whether it is a target."""
    random, documents = np.random.default_rng(0), list[Document]()
    for number, length in enumerate(lengths):
        flags = None if mask is None else [mask(number, position) for position in range(length)]
        documents.append(Document(random.integers(0, SIZES["vocab_size"], length), loss_mask=flags))
    return documents


def plan_documents(documents: Sequence[Document], world: World, cp: int = 2, **options: Any) -> Plan:
    targets = sum(document.targets for document in documents)
    return plan_fixed([len(d) for d in documents], world.home, cp, targets=targets, **options)


def dense_log_probs(config: PreTrainedConfig, documents: Sequence[Document]) -> list[Tensor]:
    """The log-probability of each token, (length,) for each document, one by one; 0 where it is no target."""
    with torch.no_grad():
        model = make_stock_model(config, torch.float64).eval()
        return [_document_log_probs(model, document) for document in documents]


_KEPT = dict[Any, Any]()  # answers by configuration and documents; worlds, and their models by configuration


def dense_answer(config: PreTrainedConfig, documents: Sequence[Document]) -> ModelAnswer:
    """The mean cross entropy over all targets, and its gradients, of documents one by one."""
    key = config.to_json_string(), *(document.labels().tobytes() for document in documents)
    if key in _KEPT:
        return _KEPT[key]
    model: Any = make_stock_model(config, torch.float64)
    targets = sum(document.targets for document in documents)
    loss = torch.stack([-_document_log_probs(model, d).sum() for d in documents]).sum() / targets
    loss.backward()
    return _KEPT.setdefault(key, ModelAnswer(loss.item(), collect_gradients(model)))


def _document_log_probs(model: Any, document: Document) -> Tensor:
    ids, labels = torch.from_numpy(document.ids), torch.from_numpy(document.labels())
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    is_target = labels[1:] != NO_TARGET
    log_probs = -F.cross_entropy(logits, labels[1:].where(is_target, 0), reduction="none")
    return F.pad(torch.where(is_target, log_probs, 0.0), (1, 0))


def make_model(config: PreTrainedConfig, world: World) -> Any:
    key = id(world), config.to_json_string()
    if key not in _KEPT:
        _KEPT[key] = prepare_untried(make_tiny_model(config, torch.float64), world), world
    model, _ = _KEPT[key]
    model.zero_grad()
    return model


def step(
    name: str = "Qwen3Config",
    lengths: Sequence[int] = LENGTHS,
    mask: Mask | None = None,
    cp: int = 2,
    max_tokens_per_slot: int | None = None,
    **changes: Any,
) -> Check:
    config, documents = tiny_configuration(name, **changes), draw_documents(lengths, mask)

    def error(world: World) -> float:
        answer, model = dense_answer(config, documents), make_model(config, world)
        plan = plan_documents(documents, world, cp, max_tokens_per_slot=max_tokens_per_slot)
        result = run_step(model, plan, documents, world)
        norm = 0.0 if result.grad_norm is None else loss_error(result.grad_norm, answer.norm)
        return max(loss_error(result.loss, answer.loss), model_error(model, answer, world), norm)

    return error


def model_error(model: Any, answer: ModelAnswer, world: World) -> float:
    """The worst error of this rank's gradients, and of those that no rank has, which count as 0; all ranks call it."""
    errors = gradient_errors(collect_gradients(model), answer)
    names = {name for of_rank in world.control.gather_objects([*errors], "names of gradients") for name in of_rank}
    return max([*errors.values(), *errors_of_missing_gradients(names, answer).values()], default=float("inf"))


# ---- losses and gradients


def norms_at_degrees_1_and_2(world: World) -> float:
    config, documents = tiny_configuration(), draw_documents()
    norm, model, norms = dense_answer(config, documents).norm, make_model(config, world), list[float]()
    for cp in (1, 2):
        norms.append(run_step(model, plan_documents(documents, world, cp), documents, world).grad_norm or 0.0)
        model.zero_grad()
    return max(loss_error(value, norm) for value in norms)


def clipped_norm(world: World) -> float:
    """The norm before clipping to half of it, and that of the clipped gradients."""
    config, documents = tiny_configuration(), draw_documents()
    norm, model = dense_answer(config, documents).norm, make_model(config, world)
    run_step(model, plan_documents(documents, world, 1), documents, world)
    reported = clip_grad_norm(model, norm / 2, world)
    clipped = sum(float(x.square().sum()) for x in collect_gradients(model).values()) ** 0.5
    # Clipping divides by the norm plus 1e-6, as torch's does.
    return max(loss_error(reported, norm), loss_error(clipped, norm / 2 * norm / (norm + 1e-6)))


# ---- tokens, labels and evaluation


def log_probs(cp: int) -> Check:
    config, documents = tiny_configuration(), draw_documents()

    def error(world: World) -> float:
        exact = dense_log_probs(config, documents)
        scores = token_log_probs(make_model(config, world), plan_documents(documents, world, cp), documents, world)
        sums = [loss_error(score, float(x.sum())) for score, x in zip(scores.sums.tolist(), exact, strict=True)]
        return max(*sums, float(np.abs(scores.values - torch.cat(exact).numpy()).max()))

    return error


def evaluation(
    lengths: Sequence[int] = LENGTHS, mask: Mask | None = None, degrees: Sequence[int] = (2,), packed: bool = False
) -> Check:
    """The worst error of an evaluation's loss, of documents or of a packed row that is split by its position_ids."""
    documents, config = draw_documents(lengths, mask), tiny_configuration()
    row = np.concatenate([d.ids for d in documents])[None]
    positions = np.concatenate([np.arange(length) for length in lengths])[None]

    def error(world: World) -> float:
        exact, model, read = dense_answer(config, documents).loss, make_model(config, world), documents
        if packed:
            read = documents_of({"input_ids": row, "position_ids": positions}).documents
        losses = [evaluate(model, read, plan_documents(read, world, cp), world).loss for cp in degrees]
        return max(loss_error(loss, exact) for loss in losses)

    return error


# ---- attention


def attention(lengths: Sequence[int], *causal: bool) -> Check:
    """The worst relative error of attention's output and of the gradients of queries, keys and values."""
    return lambda world: max(_attention_error(world, lengths, is_causal) for is_causal in causal)


def _attention_error(world: World, lengths: Sequence[int], causal: bool) -> float:
    shard = bind(plan_fixed(lengths, world.home, 2).micro_batches[0], world)
    random = torch.Generator().manual_seed(0)
    *leaves, out_gradient = (torch.randn(sum(lengths), n, 8, generator=random).double() for n in (4, 2, 2, 4))
    local = [shard.scatter(x).requires_grad_() for x in leaves]
    q, k, v = (x.requires_grad_() for x in leaves)
    out = dense_attention(q, k, v, lengths, causal=causal)
    exact = [out.detach(), *torch.autograd.grad(out, (q, k, v), out_gradient)]
    out = attend(local[0], local[1], local[2], shard, cp_comm_type="p2p", causal=causal)
    results = [out.detach(), *torch.autograd.grad(out, local, shard.scatter(out_gradient))]
    return max(relative_error(result, shard.scatter(x)) for result, x in zip(results, exact, strict=True))


# ---- layers

_LENGTHS = (9, 14, 5)


def states_of_packed_documents(world: World) -> float:
    """A gated delta rule over two ranks, against the recurrence of each document."""
    random, rows = torch.Generator().manual_seed(0), sum(_LENGTHS)
    shapes = ((rows, 2, 4), (rows, 2, 4), (rows, 2, 3), (rows, 2, 1), (rows, 2))
    q, k, v, log_decays, beta = (torch.rand(*shape, generator=random, dtype=torch.float64) for shape in shapes)
    inputs = (q, F.normalize(k, dim=-1), v, -log_decays, beta)
    exact = by_rows(*inputs, _LENGTHS)
    shard = bind(plan_fixed(_LENGTHS, world.home, 2).micro_batches[0], world)
    q, k, v, log_decays, beta = (shard.scatter(x) for x in inputs)
    return relative_error(linear_scan(q, k, v, log_decays, beta, shard), shard.scatter(exact))


def convolutions_of_packed_documents(world: World) -> float:
    random = torch.Generator().manual_seed(0)
    x, weight = (torch.rand(*shape, generator=random, dtype=torch.float64) for shape in ((sum(_LENGTHS), 6), (6, 4)))
    exact = convolved(x, weight, None, _LENGTHS)
    shard = bind(plan_fixed(_LENGTHS, world.home, 2).micro_batches[0], world)
    return relative_error(causal_conv(shard.scatter(x), weight, None, shard), shard.scatter(exact))


def router_losses(world: World) -> float:
    """A step with balance and z losses of routers, against the stock model on all documents."""
    config = tiny_configuration("Qwen3MoeConfig", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    documents = draw_documents()
    answer = compute_stock_answer(config, [d.ids for d in documents], torch.float64, router=ROUTER)
    model = make_model(config, world)
    result = run_step(model, plan_documents(documents, world), documents, world, router=ROUTER)
    losses = [loss_error(x, y) for x, y in zip(result.router or (), answer.routers, strict=True)]
    return max(loss_error(result.loss, answer.loss), model_error(model, answer, world), *losses)


def depths(lengths: Sequence[int] = LENGTHS, mask: Mask | None = None) -> Check:
    """Gradients at degree 2 against those where one slot has all documents: the unchanged model has no depths."""
    documents = draw_documents(lengths, mask)

    def error(world: World) -> float:
        numbers = tuple(range(len(documents)))
        plan, one_slot = plan_documents(documents, world), MicroBatch((Group((0,), numbers, (*lengths,)),))
        model = prepare_untried(add_mtp(make_tiny_model(tiny_configuration(), torch.float64), 1), world)
        gradients = list[dict[str, Tensor]]()
        for step_plan in (Plan(world.home.slots, (*lengths,), (one_slot,), targets=plan.targets).check(), plan):
            run_step(model, step_plan, documents, world, mtp=MtpLoss(0.3))
            gradients.append(collect_gradients(model))
            model.zero_grad()
        return max(relative_error(gradients[1][name], exact) for name, exact in gradients[0].items())

    return error


def norm_formulas(world: World) -> float:
    """Of fused norms in two families, against the norms' own code, which rounds to float32: 0 below 1e-6."""
    errors = list[float]()
    for name in ("GemmaConfig", "Qwen3Config"):
        model: Any = make_tiny_model(tiny_configuration(name), torch.float32)
        fuse_norms(model)
        norm = model.model.norm
        _, formula = vars(norm)["forward"].args  # the forward is bound to the norm and its formula
        x, weight = torch.linspace(-2, 3, norm.weight.numel(), dtype=torch.float64), norm.weight.detach().double()
        eps = getattr(norm, "variance_epsilon", None) or norm.eps
        errors.append(relative_error(formula(x, weight, eps), type(norm).forward(norm.double(), x)))
    return max(error if error >= 1e-6 else 0.0 for error in errors)


def kernel_sources() -> dict[str, str]:
    """The source of each Triton kernel that asks for its program's number, by file and name."""
    root, sources = Path(str(files("longspan"))), dict[str, str]()
    for path in sorted(root.rglob("*kernels.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
                source = ast.unparse(node)
                if "program_id" in source:
                    sources[f"{path.name}: {node.name}"] = source
    return sources


def kernels_without_64_bits(world: World) -> float:
    """Which products are widened is not looked at: tests on GPUs run every kernel past 2^32 elements."""
    sources = kernel_sources()
    return float(sum("tl.int64" not in source for source in sources.values())) if sources else float("inf")


# ---- weights in 4 bits


def _four_bit_tensors(rows: int, columns: int) -> dict[str, Tensor]:
    """Codes of which every pair of bytes is no number as bfloat16 has it, and a scale for each row."""
    codes = (0x7F81 + torch.arange(rows * columns // 4, dtype=torch.int32) % 127).to(torch.int16)
    state = {"quant_type": "nf4", "blocksize": columns, "dtype": "float32", "shape": [rows, columns]}
    return {
        "linear.weight": codes.view(torch.bfloat16)[:, None],
        "linear.weight.absmax": torch.exp2(torch.arange(rows, dtype=torch.float32) % 5),  # products are exact
        "linear.weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }


def codes_in_bfloat16(world: World) -> float:
    """How many bytes of this rank's codes are others than those of the folder, which holds them in bfloat16."""
    tensors = _four_bit_tensors(rows=16, columns=64)
    own = slice(8 * world.slot, 8 * world.slot + 8)
    weight = stored_four_bit_weight("linear.weight", tensors)
    exact = tensors["linear.weight"].view(torch.uint8).view(16, 32)[own]
    return float((weight.read(own)[:, :32] != exact).sum())


def scales_of_a_shard(world: World) -> float:
    """The error of this rank's rows of a weight, which it unpacks without those of others."""
    tensors = _four_bit_tensors(rows=16, columns=64)
    own = slice(8 * world.slot, 8 * world.slot + 8)
    weight = stored_four_bit_weight("linear.weight", tensors)
    values, unit = torch.empty(8, 64), torch.empty(16, 64)
    weight.format.unpack(weight.read(own), values)
    scales = tensors["linear.weight.absmax"]
    ones = stored_four_bit_weight("linear.weight", tensors | {"linear.weight.absmax": torch.ones(16)})
    ones.format.unpack(ones.read(), unit)
    return relative_error(values, (unit * scales[:, None])[own])


# ---- runs


def _make_order(epochs: float) -> StepOrder:
    """Of 24 documents of random lengths, of which 3 are held out for evaluation."""
    lengths = np.random.default_rng(0).integers(4, 40, size=24)
    return StepOrder(lengths, tokens_per_step=96, seed=7, eval_documents=3, epochs=epochs)


def documents_of_two_epochs(world: World) -> float:
    """How many documents two epochs do not take twice, under plans for 1 to 8 slots."""
    order, wrong = _make_order(2.0), 0
    trained = set(range(24)) - set(order.evaluation)
    for slots, cp in ((1, 1), (8, 1), (8, 2), (8, 8)):
        counts = Counter[int]()
        for step in range(order.count_steps()):
            ids, plan = order.documents_of_step(step), plan_fixed(order.lengths_of_step(step), Layout(slots), cp)
            counts.update(ids[d] for batch in plan.micro_batches for group in batch.groups for d in group.documents)
        wrong += sum(counts[document] != 2 for document in trained) + len(counts.keys() - trained)
    return float(wrong)


def steps_of_resumed_runs(world: World) -> float:
    """How many steps of a resumed run have other documents, and how many epochs repeat the first one's order."""
    order = _make_order(3.0)
    steps = range(order.count_steps())
    documents_of_steps = [order.documents_of_step(step) for step in steps]
    resumed = [pickle.loads(pickle.dumps(order)).documents_of_step(step) for step in steps]
    epoch_size = 24 - len(order.evaluation)
    stream = [document for step in documents_of_steps for document in step]
    repeated = sum(stream[:epoch_size] == stream[i * epoch_size : (i + 1) * epoch_size] for i in (1, 2))
    return float(sum(a != b for a, b in zip(documents_of_steps, resumed, strict=True)) + repeated)


def newest_checkpoint(world: World) -> float:
    """0 if the checkpoint before a save that was never published is the newest, and stays when old ones go."""
    with tempfile.TemporaryDirectory(prefix="longspan-zoo-") as folder:
        root = Path(folder)
        first, second = (checkpoint_path(root, step) for step in (1, 2))
        for path in (first, second):
            create_partial_folder(partial_path(path))
        publish_checkpoint(partial_path(first), first, {"step": 1}, [])
        newest = complete_checkpoints(root)[:1] == [first]
        remove_old_checkpoints(root, keep=1)
        return float(not newest or not first.is_dir())
