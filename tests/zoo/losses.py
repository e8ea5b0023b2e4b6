"""What a loss is divided by, and how gradients are summed: the commonest silent error of context parallelism.

Most checks compare a step over two ranks with the dense model in float64: the loss, every gradient and their norm.
"""

from longspan.comm import World
from longspan.doctor.stock import collect_gradients, loss_error, whole_float64
from longspan.layout import Layout
from longspan.train.step import run_step, token_log_probs
from longspan.train.step_end import clip_grad_norm
from tests.zoo.dense import (
    dense_answer,
    dense_log_probs,
    draw_documents,
    make_model,
    plan_documents,
    step_error,
    tiny_configuration,
)
from tests.zoo.known_error import KnownError

TP = Layout(ranks=2, tp=2)


def _compare_step(world: World) -> float:
    """Return the error of one step in which both ranks share every document."""
    return step_error(world, tiny_configuration(), draw_documents())


def _compare_norms(world: World) -> float:
    """Return the worse error of the gradient norms of steps at degree 1 and 2; a step without a norm counts as 0."""
    config, documents = tiny_configuration(), draw_documents()
    norm = dense_answer(config, documents).norm
    with whole_float64():
        model = make_model(config, world)
        norms = list[float]()
        for cp in (1, 2):
            norms.append(run_step(model, plan_documents(documents, world, cp), documents, world).grad_norm or 0.0)
            model.zero_grad()
    return max(loss_error(value, norm) for value in norms)


def _compare_rank_without_targets(world: World) -> float:
    """Return the error of a step with the first tokens as targets: at degree 2 in zigzag order rank 1 has none."""
    documents = draw_documents((32, 40), mask=lambda _, position: position < 8)
    return step_error(world, tiny_configuration(), documents)


def _compare_uneven_masks(world: World) -> float:
    """Return the error of a step in which the ranks of a group have different numbers of targets."""
    documents = draw_documents((24, 40), mask=lambda _, position: position < 9 or position % 5 == 0)
    return step_error(world, tiny_configuration(), documents)


def _compare_several_micro_batches(world: World) -> float:
    """Return the error of a step whose micro-batches hold very different numbers of targets."""
    documents = draw_documents((30, 4, 3, 17))
    plan = plan_documents(documents, world, max_tokens_per_slot=15)
    return step_error(world, tiny_configuration(), documents, plan)


def _compare_sums_of_log_probs(world: World) -> float:
    """Return the worst error of a document's sum of log-probabilities, where tp ranks hold the same rows."""
    config, documents = tiny_configuration(), draw_documents()
    sums = [float(x.sum()) for x in dense_log_probs(config, documents)]
    with whole_float64():
        model = make_model(config, world)
        scores = token_log_probs(model, plan_documents(documents, world, 1), documents, world)
    return max(loss_error(score, value) for score, value in zip(scores.sums.tolist(), sums, strict=True))


def _compare_clipped_norm(world: World) -> float:
    """Clip gradients to half the dense model's norm, and return the worse error of two norms.

    They are the norm before clipping, which `clip_grad_norm` returns, and that of the clipped gradients.
    """
    config, documents = tiny_configuration(), draw_documents()
    norm = dense_answer(config, documents).norm
    with whole_float64():
        model = make_model(config, world)
        run_step(model, plan_documents(documents, world, 1), documents, world)
        reported = clip_grad_norm(model, norm / 2, world)
    clipped = sum(float(x.square().sum()) for x in collect_gradients(model).values()) ** 0.5
    # Clipping divides by the norm plus 1e-6, as torch's does.
    return max(loss_error(reported, norm), loss_error(clipped, norm / 2 * norm / (norm + 1e-6)))


ERRORS = (
    KnownError(
        "loss times the degree",
        "NVIDIA/Megatron-LM#673",
        happened="The loss of a rank was multiplied by the size of its context-parallel group before gradients were "
        "averaged over data and context parallel ranks; whether the two cancel, the thread discusses into 2025.",
        seen="The gradient norm at degree 4 is not that at degree 1 on the same batch.",
        prevented="A loss is a sum over targets, divided once by the plan's number of targets; gradients are a plain "
        "sum over slots. The degree stands in neither.",
        check=_compare_step,
    ),
    KnownError(
        "gradients averaged over other ranks than the loss",
        "NVIDIA/Megatron-LM#906",
        happened="The loss was still scaled by the context-parallel size when gradients were already divided by the "
        "size of the data-parallel group without context parallelism: dp 2 with cp 4 had other gradients than dp 8.",
        seen="Gradients grow with the degree, and clipping hides it.",
        prevented="FSDP2's divide factor is 1 and all slots are summed, whatever groups a plan has made of them.",
        check=_compare_norms,
    ),
    KnownError(
        "nan on a rank without targets",
        "NVIDIA/Megatron-LM#1764",
        happened="Where all tokens of a rank's part of a sequence were masked, the rank divided its loss by a count of "
        "0, and loss and gradients became nan.",
        seen="A short answer behind a long prompt, or much padding, at a high degree: nan.",
        prevented="No rank divides by what it holds itself. A rank without targets adds 0.",
        check=_compare_rank_without_targets,
    ),
    KnownError(
        "loss divided by a rank's own targets",
        "NVIDIA/Megatron-LM#7513",
        happened="Each rank divided by its own count of valid tokens before gradients were averaged: with one valid "
        "token, cp 2 halves the gradient and cp 4 takes a quarter (finding 9 of Megatron-LM#7452).",
        seen="Training on masked chats depends on the degree and on where the answers lie.",
        prevented="The divisor is the plan's; all ranks agree on the plan before the model runs, and the targets that "
        "were counted are compared with it after each step.",
        check=_compare_uneven_masks,
        pull=True,
    ),
    KnownError(
        "mean of the means of micro-batches",
        "PrimeIntellect-ai/prime-rl#583",
        happened="Each micro-batch was divided by its own number of tokens instead of that of the whole batch.",
        seen="Short micro-batches weigh as much as long ones, and the loss depends on how documents are packed.",
        prevented="Every micro-batch of a step is divided by the same number, the targets of the step.",
        check=_compare_several_micro_batches,
        pull=True,
    ),
    KnownError(
        "metrics summed over ranks that hold the same",
        "NovaSky-AI/SkyRL#1420",
        happened="Every context-parallel rank had gathered the log-probabilities and computed the same policy loss; "
        "summing it over these ranks doubled it, and the correction of gradients lacked the degree.",
        seen="The policy loss is −57.36 where another backend has −28.43.",
        prevented="Of ranks that hold the same rows one counts; all others add 0.",
        check=_compare_sums_of_log_probs,
        pull=True,
        home=TP,
    ),
    KnownError(
        "gradient norm counts copies",
        "NVIDIA-NeMo/RL#3788",
        happened="The squared norm of every parameter was summed over tensor-parallel ranks; parameters that all of "
        "them hold, such as norms of queries and keys, were counted as often as there are ranks.",
        seen="The reported norm grows with tp, and gradients are clipped too much.",
        prevented="The norm counts each element once, by the placement of its gradient.",
        check=_compare_clipped_norm,
        pull=True,
        home=TP,
    ),
)
