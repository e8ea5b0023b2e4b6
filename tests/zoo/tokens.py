"""Which token predicts which: labels at the borders of ranks and documents, packed batches, and evaluation."""

import numpy as np

from longspan.comm import World
from longspan.data.batch_documents import documents_of
from longspan.doctor.stock import loss_error, whole_float64
from longspan.evaluation.evaluate import evaluate
from longspan.train.step import token_log_probs
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


def _compare_log_probs(world: World) -> float:
    """Return the largest difference of any token's log-probability from the dense model's."""
    config, documents = tiny_configuration(), draw_documents()
    exact = np.concatenate([x.numpy() for x in dense_log_probs(config, documents)])
    with whole_float64():
        scores = token_log_probs(make_model(config, world), plan_documents(documents, world), documents, world)
    return float(np.abs(scores.values - exact).max())


def _compare_two_token_documents(world: World) -> float:
    """Return the error of a step over documents of two tokens: of each the first predicts, the last does not."""
    return step_error(world, tiny_configuration(), draw_documents((2, 5, 2, 2, 9)))


def _compare_packed_batch(world: World) -> float:
    """Return the error of the loss of a packed row, split by its position_ids, against its documents one by one."""
    config, documents = tiny_configuration(), draw_documents()
    row = np.concatenate([d.ids for d in documents])
    positions = np.concatenate([np.arange(len(d)) for d in documents])
    packed = documents_of({"input_ids": row[None], "position_ids": positions[None]}).documents
    exact = dense_answer(config, documents)
    with whole_float64():
        loss = evaluate(make_model(config, world), packed, plan_documents(packed, world), world).loss
    return loss_error(loss, exact.loss)


def _compare_evaluation_degrees(world: World) -> float:
    """Return the worst error of an evaluation's loss at cp 1 and at cp 2, against the dense model's."""
    config, documents = tiny_configuration(), draw_documents()
    exact = dense_answer(config, documents).loss
    with whole_float64():
        model = make_model(config, world)
        losses = [evaluate(model, documents, plan_documents(documents, world, cp), world).loss for cp in (1, 2)]
    return max(loss_error(loss, exact) for loss in losses)


def _compare_uneven_evaluation(world: World) -> float:
    """Return the error of an evaluation's loss over documents of unequal lengths and masks, against a dense one."""
    config, documents = tiny_configuration(), draw_documents((3, 40, 5), mask=lambda d, p: d != 1 or p > 30)
    exact = dense_answer(config, documents).loss
    with whole_float64():
        loss = evaluate(make_model(config, world), documents, plan_documents(documents, world), world).loss
    return loss_error(loss, exact)


def _compare_documents_of_equal_length(world: World) -> float:
    """Return the error of an evaluation's loss over documents of one length.

    With one length for all, a rank that read other documents than its group would fail no check of sizes.
    """
    config, documents = tiny_configuration(), draw_documents((16, 16, 16))
    exact = dense_answer(config, documents).loss
    with whole_float64():
        loss = evaluate(make_model(config, world), documents, plan_documents(documents, world), world).loss
    return loss_error(loss, exact)


ERRORS = (
    KnownError(
        "labels rolled inside a rank's part",
        "verl-project/verl#6268",
        happened="With fused kernels and sequence parallelism, labels were rolled after the sequence had been split: "
        "the last position of each rank's part predicted the first token of that part. The same pair of features had "
        "given wrong log-probabilities before (verl#3723).",
        seen="One wrong label a rank and micro-batch: log-probabilities of the policy differ from the sampler's, and "
        "quality falls slowly.",
        prevented="Labels are made inside documents, before anything is split; a rank reads the token after its last "
        "row where a label needs it.",
        check=_compare_log_probs,
        pull=True,
    ),
    KnownError(
        "a document's last token predicts the next document",
        "verl-project/verl#6564",
        happened="Labels of packed sequences were made by torch.roll over the flat tensor, so that the last token of "
        "one sample had the first token of the next as its label.",
        seen="One wrong target a document, which matters most where documents are short.",
        prevented="The last position of a document has no label, and a step is refused if its ranks count other "
        "targets than its plan.",
        check=_compare_two_token_documents,
        pull=True,
    ),
    KnownError(
        "packed samples see each other",
        "huggingface/nanoVLM#204",
        happened="Packed samples went on counting positions, and attended to the samples before them; restarting the "
        "positions was not enough.",
        seen="A sample's loss depends on what is packed before it.",
        prevented="Documents are values: positions, masks and states begin with each of them. Where a packed batch is "
        "read, position_ids that begin again at 0 begin a document.",
        check=_compare_packed_batch,
        pull=True,
    ),
    KnownError(
        "evaluation loss times the degree",
        "huggingface/transformers#48167",
        happened="The evaluation path did not apply context parallelism: eval_loss was reported as cp_size times its "
        "true value, 13.96 at cp 2 and 27.92 at cp 4 instead of 6.98.",
        seen="Training loss is right; early stopping and the choice of the best checkpoint are not.",
        prevented="An evaluation is a plan without a backward pass, through the code of training.",
        check=_compare_evaluation_degrees,
        pull=True,
    ),
    KnownError(
        "evaluation averages averages",
        "NVIDIA/Megatron-LM#7207",
        happened="The evaluation of SFT averaged the means of micro-batches and ranks, so that unequal masks and "
        "packed micro-batches weighed alike.",
        seen="The validation loss moves with the batch size and the number of ranks.",
        prevented="Sums and counts travel, of each document; the only division is by all targets.",
        check=_compare_uneven_evaluation,
        pull=True,
    ),
    KnownError(
        "members evaluate different documents",
        "NVIDIA-NeMo/Megatron-Bridge#4785",
        happened="Evaluation at another degree than training's still gave samples to ranks by training's data-parallel "
        "size: members of one group read different samples.",
        seen="A validation loss that is finite, smooth and meaningless.",
        prevented="A rank reads what its plan says, and ranks compare their plans before the model runs.",
        check=_compare_documents_of_equal_length,
        pull=True,
    ),
)
