"""Documents that ranks load themselves: which rows go where, and steps of them against one dense float64 model."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longspan import (
    Document,
    Layout,
    Plan,
    PlannerConfig,
    World,
    bind,
    evaluate,
    gather_documents,
    plan_dynamic,
    plan_fixed,
    plan_padded,
    run_step,
    token_log_probs,
)
from longspan.errors import CommError, DataError
from longspan.multimodal import MediaDocuments, MediaItem
from longspan.testing import backend, run_ranks
from longspan.train.rows.gather_documents import GatheredDocuments
from longspan.train.rows.read_rows import read_rows
from longspan.train.rows.visible_spans import count_prefix_rows
from tests.model.stock import VOCABULARY, gradients_of, prepare_untried, tiny, worst

LENGTHS = (13, 1, 30, 7, 2, 18, 5, 9)
Dealt = tuple[Layout, Sequence[int]]  # a home, and how many documents its ranks get, the last the rest


def document(number: int, length: int) -> Document:
    """A document with labels of other tokens, with a mask, or plain; every other one has weights."""
    draw = np.random.default_rng(number)
    ids = draw.integers(0, VOCABULARY, length)
    labels = np.where(draw.random(length) < 0.6, draw.integers(0, VOCABULARY, length), -100)
    weights = draw.random(length) if number % 2 else None
    numbers: dict[str, Any] = {"advantage": draw.standard_normal(length), "reward": draw.random(), "weights": weights}
    if number % 3 == 0:
        return Document(ids, labels=labels, **numbers)
    if number % 3 == 1:
        return Document(ids, loss_mask=draw.random(length) < 0.5, **numbers)
    return Document(ids, **numbers)


def batch() -> list[Document]:
    return [document(number, length) for number, length in enumerate(LENGTHS)]


def dealt(documents: Sequence[Any], ranks: Sequence[int], of: Sequence[int]) -> dict[int, list[Any]]:
    """Documents for each rank, in the order of the home's ranks; `of` are how many each gets, the last the rest."""
    ends = [0, *np.cumsum(of).tolist(), len(documents)]
    return {rank: list(documents[ends[i] : ends[i + 1]]) for i, rank in enumerate(ranks)}


# ---- who gets what


def plans_of(home: Layout, targets: int) -> list[Plan]:
    mode = "lockstep" if home.pp > 1 else "free"
    return [
        plan_dynamic(LENGTHS, home, max_tokens_per_slot=16, targets=targets, micro_batch_multiple=home.pp),
        plan_dynamic(LENGTHS, home, max_tokens_per_slot=16, targets=targets, mode=mode),
        plan_fixed(LENGTHS, home, cp=home.slots, targets=targets, partition="contiguous"),
        plan_padded(LENGTHS, home, cp=home.slots, max_tokens_per_slot=32, targets=targets),
    ]


def compare_rows(rank: int, cases: Sequence[Dealt]) -> None:
    for home, of in cases:
        with World(home, backend=backend(), timeout=60) as world:
            local = dealt(batch(), home.ranks, of)[rank]
            compare_with_list(gather_documents(local, world), local, world)


def compare_with_list(gathered: GatheredDocuments, local: Sequence[Document], world: World) -> None:
    """Read micro-batches of several plans from what arrived and from the list; no other rows are here than are read."""
    documents = batch()
    assert gathered.lengths == LENGTHS and gathered.targets == sum(d.targets for d in documents)
    assert [len(d) for d in gathered] == list(LENGTHS)
    assert [len(documents[d]) for d in gathered.local] == [len(d) for d in local]
    for d in gathered.local:
        assert np.array_equal(gathered[d][:], documents[d].ids)
        assert np.array_equal(gathered[d].labels(), documents[d].labels())
    for d, length in enumerate(LENGTHS):
        assert count_prefix_rows(gathered[d], d, length) == count_prefix_rows(documents[d], d, length)
    for plan, depths in zip(plans_of(world.home, gathered.targets), (2, 0, 2, 0), strict=True):
        rows, places = gathered.rows_under(plan, depths), set[tuple[int, int]]()
        for micro_batch in plan.micro_batches:
            shard = bind(micro_batch, world).with_padding(minimum=1, multiple=plan.row_multiple)
            ours, plain = (read_rows(x, shard, VOCABULARY, depths=depths) for x in (rows, documents))
            for one, other in zip((ours, *ours.deeper), (plain, *plain.deeper), strict=True):
                assert np.array_equal(one.ids, other.ids) and np.array_equal(one.labels, other.labels)
                assert one.values.keys() == other.values.keys()
                assert all(np.array_equal(one.values[name], other.values[name]) for name in one.values)
            for part in shard.parts:
                for local_number, start, stop, _ in part.segments() if part.index >= 0 else ():
                    end = min(stop, part.group.lengths[local_number])
                    ahead = min(end + depths + 1, part.group.lengths[local_number]) if end > start else start
                    places |= {(part.group.documents[local_number], p) for p in range(start, ahead)}
        assert len(rows._rows_here.numbers) == len(places)


@pytest.mark.parametrize(
    "cases",
    [
        [(Layout(ranks=(2, 0, 1)), (3, 0))],  # rank 0 brings nothing; the order is the home's
        [(Layout(ranks=4, tp=2), (1, 4, 0)), (Layout(ranks=4, pp=2), (2, 3, 0))],
    ],
    ids=["three slots", "tp 2, pp 2"],
)
def test_each_rank_gets_the_rows_that_it_reads(cases: list[Dealt]) -> None:
    run_ranks(compare_rows, len(cases[0][0].ranks), cases)


# ---- steps


def own_loss(log_probs: Tensor, at: Any) -> Tensor:
    return -(log_probs * at["advantage"] + at["reward"] * log_probs.exp()) * at["weights"]


def train(rank: int) -> None:
    """Steps until all ranks have run out, beside those of the whole list: of all documents, then of the first rank's.

    That steps of a list are those of one process is shown elsewhere.
    """
    for home, of in ((Layout(2), (3,)), (Layout(2, pp=2), (0,))):
        wholes = [batch(), batch()[3:6]]
        shares = iter([dealt(batch(), home.ranks, of)[rank], wholes[1] if rank == home.ranks[0] else [], []])
        with World(home, backend=backend(), timeout=60) as world:
            model = prepare_untried(tiny("qwen3", torch.float64), world)
            while documents := gather_documents(next(shares), world):
                compare_steps(model, documents, wholes.pop(0), world)
        assert not wholes


def compare_steps(model: Any, documents: GatheredDocuments, whole: Sequence[Document], world: World) -> None:
    targets, home = documents.targets, world.home
    options = {"max_tokens_per_slot": 32, "targets": targets, "micro_batch_multiple": home.pp}
    plan = plan_dynamic(documents.lengths, home, **options)
    answers = list[tuple[float, dict[str, Tensor]]]()
    for of_step in (documents, whole):
        answers.append((run_step(model, plan, of_step, world, loss=own_loss).loss, gradients_of(model)))
        model.zero_grad()
    assert answers[0][0] == answers[1][0] and worst(answers[0][1], answers[1][1]) == 0
    if home.pp == 1:
        log_probs, expected = (token_log_probs(model, plan, x, world) for x in (documents, whole))
        assert np.array_equal(log_probs.of(0), expected.of(0)) and len(log_probs.of(0)) == plan.lengths[0]
        assert evaluate(model, documents, PlannerConfig.fixed(home.slots), world).targets == targets


def test_steps_of_gathered_documents_are_those_of_the_list() -> None:
    run_ranks(train, 2)


# ---- what is refused


def refuse(rank: int) -> None:
    first, plain = rank == 0, [[1, 2, 3], [4, 5]]
    items = MediaDocuments([np.zeros(4, dtype=np.int64)], [MediaItem(0, ((1, 2),))], lambda item: None)
    mistakes: list[tuple[Any, str]] = [  # what this rank brings, and what all say
        (
            [Document([1, 2], reward=1.0)] if first else [Document([1, 2])],
            "documents of ranks (0) have 'reward' and those of ranks (1) have not",
        ),
        (
            [] if first else [Document([1, 2], reward=1.0), Document([1, 2])],
            "document 0 has 'reward' and document 1 has not",
        ),
        (plain if first else [[1, 2], [0.5, 0.25]], "document 1 gave float64 of shape (2,) for 2 positions"),
        (plain if first else [[1, 2], [0.5, 0.25]], "rank 1 could not read its rows"),
        (plain if first else {"input_ids": torch.zeros(2, 3)}, "documents_of(batch).documents"),
        (plain if first else None, "documents_of(batch).documents"),
        (plain if first else [{"input_ids": [1, 2]}], "document 0 is a dict of input_ids"),
        (plain if first else Document([1, 2]), "document 0 is np.int64(1), which has no length"),
        (plain, "ranks 0 and 1 bring the same 2 documents of (3, 2) tokens"),
        (items, "have items"),
    ]
    with World(Layout(ranks=2), backend=backend(), timeout=60) as world:
        for local, said in mistakes:
            with pytest.raises(DataError, match=re.escape(said)):
                gather_documents(local, world)
        documents = gather_documents([[1, 2, 3], torch.tensor([4, 5])] if first else [[1, 2, 3, 4]], world)
        assert documents.lengths == (3, 2, 4)
        assert len(gather_documents([[7, 8]], world)) == 2  # one document that is the same may be chance
        number, read = (2, 2) if first else (0, 1)
        said = rf"^row 1 of document {number} is not on rank {rank}, which read {read} documents? of 3"
        with pytest.raises(DataError, match=said):
            documents[number][np.array([1])]
        said = r"the plan has 2 documents of \(3, 2\) tokens, 3 of \(3, 2, 4\) were gathered"
        with pytest.raises(DataError, match=said):
            documents.rows_under(plan_fixed([3, 2], world.home, cp=1))
        with pytest.raises(CommError, match="2 different plans"):
            documents.rows_under(plan_fixed([3, 2, 4], world.home, cp=1 + rank))


def test_mistakes_are_named_on_every_rank() -> None:
    run_ranks(refuse, 2)
