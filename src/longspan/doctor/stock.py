"""What the cases of a proof should give: the stock model's answers to documents one by one, tolerances, and errors.

Its attention is transformers' eager one, the only one with every model's soft caps and sinks. In float64 the casts to
float32 inside models are left out, on both sides of a comparison (`compute_in_float64`).
"""

import copy
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel

from longspan.doctor.cases import Case
from longspan.doctor.documents import NO_LABEL, document_labels
from longspan.doctor.outcomes import exception_text
from longspan.errors import ModelError
from longspan.model.exactness.image_documents import (
    TOKEN_KINDS,
    TrialDocument,
    make_stock_arguments,
    token_kinds,
)
from longspan.model.exactness.small_copies import make_tiny_model
from longspan.model.exactness.small_values import EXPERT_GROUPS, PICKED
from longspan.model.exactness.trials import compute_in_float64
from longspan.model.experts.router import RouterCoefficients
from longspan.model.seams.chosen_keys.indexers import order_equal_scores
from longspan.plan.form import Form
from longspan.plan.shape.model_shape import read_experts

# ---- the stock model


ROUTER = RouterCoefficients(balance=0.5, z=0.1)
NO_ROUTER = RouterCoefficients(balance=0.0)
# Gradients below this share of the norm of all gradients are compared with this share.
SMALL_SHARE = 1e-3
EXACT = {torch.float64: 1e-12, torch.float32: 1e-5}
ROUNDING = 2  # so many times the stock model's own error: in bfloat16, and in float32 where that is above EXACT
ROUNDINGS = 10  # so many times what one rounding of every weight does is still rounding
# Each says how many keys, or blocks of keys, a row chooses.
_CHOSEN_KEYS = ("index_topk", "index_topk_blocks", "indexer_budget")
MOST_NUDGED = 1e-9  # more than rounding of float64 does: a row got another expert


@dataclass(frozen=True)
class ModelAnswer:
    """The mean cross entropy over targets, the balance and z of routers, and every gradient in float64 by name."""

    loss: float
    gradients: dict[str, Tensor]
    routers: tuple[float, ...] = ()
    norm: float = field(init=False)

    def __post_init__(self) -> None:
        squares = (gradient.square().sum().item() for gradient in self.gradients.values())
        object.__setattr__(self, "norm", sum(squares) ** 0.5)


def compute_stock_answer(
    config: PreTrainedConfig,
    documents: Sequence[np.ndarray | TrialDocument],
    weights: torch.dtype,
    compute: torch.dtype | None = None,
    *,
    router: RouterCoefficients = NO_ROUTER,
    attention: str = "eager",
    nudge: int = 0,
    form: Form | None = None,
) -> ModelAnswer:
    """Compute loss and gradients of the unchanged model on the CPU.

    Weights are rounded to the dtype `weights`, and arithmetic is in the dtype `compute` (None: the same). With `nudge`,
    a seed above 0, every weight is then changed by the rounding unit of `compute`, up or down. Documents run one by
    one, each from the same states of modules, and the loss is the mean over all targets. With coefficients in `router`,
    the losses of routers are over all tokens and layers of the documents. With a `form`, the model has an adapter over
    weights in 4 bits. Raises what the model's own code raises, and ModelError where it returns no logits of routers.
    """
    images = any(isinstance(document, TrialDocument) for document in documents)
    model: Any = make_stock_model(config, weights, attention, images=images)
    if form:
        from longspan.doctor.frozen import add_adapter_to_dequantised

        model = add_adapter_to_dequantised(model, form)
    model = model.to(compute or weights)
    if nudge:
        _nudge_weights(model, nudge)
    labels_of_documents = [document_labels(document) for document in documents]
    targets = sum(int((labels != NO_LABEL).sum()) for labels in labels_of_documents)
    losses = []
    router_logits = []
    plain_types = bool | int | float | str | None
    states = [
        (
            module,
            {name: value for name, value in vars(module).items() if isinstance(value, plain_types)},
            dict(module._buffers),
        )
        for module in model.modules()
    ]
    for document, labels in zip(documents, labels_of_documents, strict=True):
        # otherwise "dynamic" rotary frequencies would stay those of the longest document so far
        for module, values, buffers in states:
            vars(module).update(values)
            module._buffers.update(buffers)
        output = _run_stock(model, document, with_routers=router.any)
        logits = output.logits[0, :-1]
        logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        losses.append(F.cross_entropy(logits, labels, reduction="sum").double() / targets)
        if router.any:
            if not (layers := getattr(output, "router_logits", None)):
                raise ModelError(
                    f"{config.model_type} returns no router_logits: there are no losses of routers to compare"
                )
            router_logits.append([layer.flatten(0, -2) for layer in layers if layer is not None])  # (T, E) a layer
    loss = torch.stack(losses).sum()
    total = loss
    routers: tuple[Tensor, ...] = ()
    if router.any:
        routers = _router_losses(model, [torch.cat(layer) for layer in zip(*router_logits, strict=True)])
        total = loss + (router.balance or 0.0) * routers[0] + router.z * routers[1]
    total.backward()
    return ModelAnswer(loss.item(), collect_gradients(model), tuple(value.item() for value in routers))


@torch.no_grad()
def _nudge_weights(model: nn.Module, seed: int) -> None:
    """Every weight is multiplied in place by 1 + eps or 1 − eps of its dtype."""
    random = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        signs = torch.randint(2, weight.shape, generator=random) * 2 - 1
        weight.mul_(1 + torch.finfo(weight.dtype).eps * signs.to(weight.dtype))


def make_stock_model(
    config: PreTrainedConfig, dtype: torch.dtype, attention: str = "eager", *, images: bool = False
) -> PreTrainedModel:
    """Make the unchanged model in training mode, with transformers' eager experts where it has a choice of them,
    and indexers that take the lowest positions among equal scores."""
    model = make_tiny_model(config, dtype, attention=attention, images=images)
    if read_experts(config.get_text_config()).of_layer > 1:
        with suppress(ValueError, AttributeError):  # the model's own code computes its experts: there is no choice
            model.set_experts_implementation("eager")
    order_equal_scores(model)
    return model.train()


def config_with_every_expert(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of a configuration in which every row gets all experts of all groups; one without experts is
    returned itself.
    """
    experts = read_experts(config.get_text_config()).of_layer
    copied_config = copy.deepcopy(config)
    text = copied_config.get_text_config()

    def integer_fields(names: Sequence[str]) -> list[str]:
        return [name for name in names if isinstance(getattr(text, name, None), int)]

    names = integer_fields(PICKED)  # fields: experts per row
    if experts < 2 or not names:
        return config
    for name in names:
        setattr(text, name, experts)
    groups = integer_fields(EXPERT_GROUPS)
    if groups and integer_fields(["topk_group"]):
        text.topk_group = getattr(text, groups[0])  # routers that choose groups of experts first choose all of them
    return copied_config


def _run_stock(model: PreTrainedModel, document: np.ndarray | TrialDocument, *, with_routers: bool) -> Any:
    if isinstance(document, TrialDocument):
        return model(**make_stock_arguments(model, document))
    # a model of text alone gets no kinds of tokens: GPT-2 would embed them as tokens
    is_text_model = model.config.get_text_config() is model.config
    arguments = () if is_text_model else inspect.signature(model.forward).parameters
    options: dict[str, Any] = {name: token_kinds(model, len(document)) for name in TOKEN_KINDS if name in arguments}
    if with_routers:
        options["output_router_logits"] = True
    return model(input_ids=torch.from_numpy(document)[None], use_cache=False, **options)


def _router_losses(model: PreTrainedModel, layers: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Logits (T, E) per layer; the losses are float64. The balance loss is compared with transformers' own function, in
    float32."""
    config = model.config.get_text_config()
    rows = torch.cat([layer.double() for layer in layers])  # (layers T, E)
    top_k = int(getattr(config, "num_experts_per_tok", None) or getattr(config, "moe_topk", None) or 0)
    one_hot = F.one_hot(rows.topk(top_k).indices, rows.shape[1]).double()
    balance = rows.shape[1] * (one_hot.sum((0, 1)) / len(rows) * rows.softmax(-1).mean(0)).sum()
    family_loss = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    if family_loss is not None:
        expected = float(family_loss(tuple(layer.detach().float() for layer in layers), rows.shape[1], top_k))
        if abs(expected - balance.item()) > 1e-5 * balance.item():
            raise ModelError(
                f"{type(model).__name__} weighs its experts by a function of its own: its balance loss is "
                f"{expected:.6g}, that of softmax and top {top_k} is {balance.item():.6g}"
            )
    return balance, rows.logsumexp(-1).square().mean()


# ---- errors


def collect_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Collect every gradient, unsharded, in float64 on the CPU. All ranks that hold a parameter call it together."""
    gradients: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if (gradient := parameter.grad) is not None:
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            gradients[name] = whole.detach().to("cpu", torch.float64, copy=True)
    return gradients


def gradient_errors(gradients: dict[str, Tensor], stock: ModelAnswer) -> dict[str, float]:
    """Compute the relative error of each of these gradients; infinite for one that is not finite. A gradient whose norm
    is below a thousandth of that of all together is compared with that thousandth: the gradient of a key's bias without
    rotary positions, for example, is zero up to rounding.
    """
    floor = SMALL_SHARE * stock.norm or 1e-30
    errors = dict[str, float]()
    for name, gradient in gradients.items():
        exact = stock.gradients.get(name)
        exact = torch.zeros_like(gradient) if exact is None else exact
        error = float((gradient - exact).norm() / max(float(exact.norm()), floor))
        errors[name] = math.inf if math.isnan(error) else error
    return errors


def errors_of_missing_gradients(names: set[str], stock: ModelAnswer) -> dict[str, float]:
    """Return the errors of gradients of the stock model that are not among `names`; a missing one counts as 0."""
    missing = {name: torch.zeros_like(exact) for name, exact in stock.gradients.items() if name not in names}
    return gradient_errors(missing, stock)


def loss_error(loss: float, stock: float) -> float:
    """Return the relative error of a loss; infinite for one that is not finite."""
    error = abs(loss - stock) / max(abs(stock), 1e-30)
    return math.inf if math.isnan(error) else error


def _worst_error(answer: ModelAnswer, exact: ModelAnswer) -> float:
    return max(loss_error(answer.loss, exact.loss), *gradient_errors(answer.gradients, exact).values())


# ---- tolerances


@dataclass(frozen=True)
class ExpectedAnswer:
    """The stock model's answer in one dtype, the tolerance of a case, and the mode in which both are computed.
    `in_float64`: float64 without casts to float32. `every_expert`: each row gets every expert, on both sides.
    `near_ties`: rounding changes the stock model's own choice of keys, so that a larger error says nothing.
    """

    answer: ModelAnswer
    tolerance: float
    in_float64: bool = False
    every_expert: bool = False
    near_ties: bool = False


def compute_expected_answers(
    config: PreTrainedConfig,
    cases: Sequence[Case],
    documents: Sequence[Any],
    image_documents: Sequence[TrialDocument] = (),
    form: Form | None = None,
) -> dict[tuple[str, bool, bool], ExpectedAnswer | str]:
    """Compute the expected answer, or why there is none, for every dtype that the cases use, by `Case.answer_key`.
    Answers without losses of routers are always computed, as they say in which mode a model is prepared. `form` as of
    `compute_stock_answer`.
    """
    keys = dict.fromkeys((case.dtype, False, case.encoder > 0) for case in cases)
    keys |= dict.fromkeys(case.answer_key for case in cases if case.router_losses)
    answers: dict[tuple[str, bool, bool], ExpectedAnswer | str] = {}
    for name, with_routers, with_images in keys:
        router = ROUTER if with_routers else NO_ROUTER
        key_documents = image_documents if with_images else documents
        answer_of = partial(compute_stock_answer, documents=key_documents, router=router, form=form)
        # one prepared model serves cases with and without losses of routers: both have every expert, or neither
        plain = answers.get((name, False, with_images))
        every_expert = plain.every_expert if isinstance(plain, ExpectedAnswer) else None
        try:
            answers[name, with_routers, with_images] = _compute_expected_answer(
                config, answer_of, getattr(torch, name), every_expert
            )
        except Exception as error:
            # The model's own code may raise anything.
            answers[name, with_routers, with_images] = exception_text(error)
    return answers


def _compute_expected_answer(
    config: PreTrainedConfig, answer_of: Callable[..., ModelAnswer], dtype: torch.dtype, every_expert: bool | None
) -> ExpectedAnswer:
    """In float32 the tolerance is EXACT, or what two float32 computations may differ by: ROUNDING times the error of
    the stock model's own float32 pass against float64, if its conditioning explains this error. A larger error has
    other causes, such as a row that got another expert, and EXACT stays. In float64 it is EXACT, or what rounding may
    do. A model whose code cannot run in float64 throughout keeps its own casts to float32 and EXACT; its attention is
    then "sdpa" in float64, as the eager one casts its softmax to float32."""
    if dtype not in EXACT:
        return _expect_half_precision(config, answer_of, dtype, every_expert)
    answer = answer_of(config, weights=dtype) if dtype == torch.float32 else None
    try:
        with compute_in_float64():  # scans and norms in float64 too
            exact = answer_of(config, weights=dtype, compute=torch.float64)
            nudged = [answer_of(config, weights=dtype, compute=torch.float64, nudge=seed) for seed in (1, 2)]
    except (RuntimeError, TypeError):
        # For instance, a product of two dtypes raises.
        return ExpectedAnswer(answer or answer_of(config, weights=dtype, attention="sdpa"), EXACT[dtype])
    # The conditioning: how far rounding to the dtype can move the answer, from what one unit of float64 does.
    change = max(_worst_error(moved, exact) for moved in nudged)
    units = torch.finfo(dtype).eps / torch.finfo(torch.float64).eps
    most_rounding = ROUNDINGS * units * change if change <= MOST_NUDGED else 0.0
    if answer is None:
        return ExpectedAnswer(exact, max(EXACT[dtype], most_rounding), in_float64=True)
    error = _worst_error(answer, exact)
    near_ties = error > max(EXACT[dtype], most_rounding) and any(
        getattr(config.get_text_config(), name, None) for name in _CHOSEN_KEYS
    )
    tolerance = max(EXACT[dtype], ROUNDING * error if error <= most_rounding else 0.0)
    return ExpectedAnswer(answer, tolerance, near_ties=near_ties)


def _expect_half_precision(
    config: PreTrainedConfig, answer_of: Callable[..., ModelAnswer], dtype: torch.dtype, every_expert: bool | None
) -> ExpectedAnswer:
    """The answer is in float32 of weights in half precision; the tolerance is ROUNDING times the error of the stock
    model's own pass in that precision. Each row gets every expert if `every_expert` is true, or is None and the model's
    code can run so: otherwise rounding would change which experts are chosen."""
    run_config = config if every_expert is False else config_with_every_expert(config)
    try:
        exact = answer_of(run_config, weights=dtype, compute=torch.float32)
        rounded = answer_of(run_config, weights=dtype, compute=dtype)
    except Exception:
        # The model's own code may raise anything.
        if run_config is config or every_expert:
            raise
        return _expect_half_precision(config, answer_of, dtype, False)
    return ExpectedAnswer(exact, ROUNDING * _worst_error(rounded, exact), every_expert=run_config is not config)
