"""Whole runs: parameters that several ranks or stages share, the order of documents, and checkpoints."""

import pickle
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

from longspan.checkpoint.files import (
    checkpoint_path,
    complete_checkpoints,
    create_partial,
    partial_path,
    publish_checkpoint,
    remove_old_checkpoints,
)
from longspan.comm import World
from longspan.data.step_order import StepOrder
from longspan.layout import Layout
from longspan.plan.planners.fixed import plan_fixed
from tests.zoo.dense import draw_documents, plan_documents, step_error, tiny_configuration
from tests.zoo.known_error import KnownError


def _compare_tied_embeddings(world: World) -> float:
    """Return the error of a step over two stages, of which both have the embedding that is tied to the head."""
    documents = draw_documents()
    config = tiny_configuration(tie_word_embeddings=True)
    return step_error(world, config, documents, plan_documents(documents, world, 1))


def _compare_split_layers(world: World) -> float:
    """Return the error of a step whose layers are split over two tensor-parallel ranks."""
    documents = draw_documents()
    return step_error(world, tiny_configuration(), documents, plan_documents(documents, world, 1))


def _make_order(epochs: float) -> StepOrder:
    """Make the order of a run of 60 documents of random lengths, of which 3 are held out for evaluation."""
    lengths = np.random.default_rng(0).integers(4, 40, size=60)
    return StepOrder(lengths, tokens_per_step=96, seed=7, eval_documents=3, epochs=epochs)


def _count_wrong_documents(world: World) -> float:
    """Count documents that two epochs do not take twice, under plans for 1 to 8 slots."""
    order, wrong = _make_order(2.0), 0
    trained = set(range(60)) - set(order.evaluation)
    for slots, cp in ((1, 1), (8, 1), (8, 2), (8, 8)):
        counts = Counter[int]()
        for step in range(order.count_steps()):
            ids, plan = order.documents_of_step(step), plan_fixed(order.lengths_of_step(step), Layout(slots), cp)
            counts.update(ids[d] for batch in plan.micro_batches for group in batch.groups for d in group.documents)
        wrong += sum(counts[document] != 2 for document in trained) + len(counts.keys() - trained)
    return float(wrong)


def _count_wrong_steps(world: World) -> float:
    """Count steps that a resumed run takes with other documents, and epochs that repeat the first one's order.

    A run is resumed before each step: its order is pickled and read again.
    """
    order = _make_order(3.0)
    steps = order.count_steps()
    documents_of_steps = [order.documents_of_step(step) for step in range(steps)]
    resumed = [pickle.loads(pickle.dumps(order)).documents_of_step(step) for step in range(steps)]
    epoch_size = 60 - len(order.evaluation)
    stream = [document for step in documents_of_steps for document in step]
    repeated = sum(stream[:epoch_size] == stream[i * epoch_size : (i + 1) * epoch_size] for i in (1, 2))
    return float(sum(a != b for a, b in zip(documents_of_steps, resumed, strict=True)) + repeated)


def _check_newest_checkpoint(world: World) -> float:
    """Return 0 if the checkpoint before an interrupted save is the newest, and stays when old ones are removed; else 1.

    The interrupted save has made its folder and never published it.
    """
    with tempfile.TemporaryDirectory(prefix="longspan-zoo-") as folder:
        root = Path(folder)
        first, second = (checkpoint_path(root, step) for step in (1, 2))
        for path in (first, second):
            create_partial(partial_path(path))
        publish_checkpoint(partial_path(first), first, {"step": 1}, [])
        newest = complete_checkpoints(root)[:1] == [first]
        remove_old_checkpoints(root, keep=1)
        return float(not newest or not first.is_dir())


ERRORS = (
    KnownError(
        "tied embeddings over pipeline stages",
        "NVIDIA/Megatron-LM#844",
        happened="With a distributed optimizer gradients were reduced over data-parallel ranks before those of the "
        "shared embedding were summed over the first and the last stage; partial sums were added up.",
        seen="Copies of one embedding drift apart, or learn from a part of the batch.",
        prevented="Copies of a shared parameter are summed over the stages that hold it, each element once; one of "
        "them is trained.",
        check=_compare_tied_embeddings,
        home=Layout(ranks=2, pp=2),
    ),
    KnownError(
        "a sum over ranks without its gradient",
        "modelscope/ms-swift#9947",
        happened="The log-probability of a token was summed over tensor-parallel ranks by a plain all-reduce, which "
        "autograd does not see: ranks without the token's part of the vocabulary got zero or wrong gradients.",
        seen="Log-probabilities are right on all ranks, and the policy does not improve.",
        prevented="Each collective over tensor-parallel ranks states its gradient, identical or partial, and has a "
        "backward pass.",
        check=_compare_split_layers,
        pull=True,
        home=Layout(ranks=2, tp=2),
    ),
    KnownError(
        "epochs times the degree",
        "axolotl-ai-cloud/axolotl#3218",
        happened="With context_parallel_size set, a run of the same configuration ended at epoch 5.42 instead of 0.84: "
        "steps were counted as if each rank had data of its own.",
        seen="Several times the epochs, and a schedule that does not fit the data.",
        prevented="A step takes documents by the seed and its number; slots and degrees are no part of that.",
        check=_count_wrong_documents,
    ),
    KnownError(
        "a resumed run repeats the first epoch's order",
        "modelscope/ms-swift#10050",
        happened="Resuming in a later epoch rebuilt the sampler with the seed of epoch 0: samples that were trained on "
        "came again, and others never came.",
        seen="Nothing, except a training loss that is a little too good after a restart.",
        prevented="The documents of a step are computed from the seed and the step; there is no state to lose.",
        check=_count_wrong_steps,
    ),
    KnownError(
        "the newest checkpoint is not there yet",
        "KempnerInstitute/KempnerForge#102",
        happened="An asynchronous save moved `latest` and removed older checkpoints as soon as it was dispatched; for "
        "about a minute `latest` named a folder without its metadata.",
        seen="Nothing, until the process dies in that minute: then no checkpoint can be loaded.",
        prevented="A save is written under another name, and gets its own once every rank's files are durable; older "
        "ones are removed only then.",
        check=_check_newest_checkpoint,
    ),
)
