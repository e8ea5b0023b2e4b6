"""Layouts and calls of the parity table, and what one rank does with them."""

import itertools
import math
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longspan import Group, Layout, MicroBatch, World, attend, bind
from longspan.attention.all_gather import gather_bytes_per_head
from longspan.attention.saved_outputs import Recording
from longspan.comm import SequenceShard
from longspan.testing import backend
from tests.reference import dense_attention, relative_error

LIMIT = {"float64": 1e-12, "float32": 1e-5}
RAGGED = (13, 1, 40, 2, 7)
MANY = tuple(range(19, 49, 3))  # under a window of about their length every one is limited elsewhere
LEVELS = {1: (1, 1), 2: (2, 1), 3: (3, 1), 4: (2, 2), 6: (2, 3), 8: (4, 2)}  # of a2a+p2p by degree, in these layouts
Sizes = tuple[int, int]


HEADS = {  # N, K, H, Hv at the size of models
    "MHA, 24 of 32": (24, 24, 32, 32),
    "GQA, 32/4 of 128": (32, 4, 128, 128),
    "MQA, 24/1 of 64": (24, 1, 64, 64),
    "MLA, 24 of 192/128": (24, 24, 192, 128),
    "MLA, 8 of 192/128": (8, 8, 192, 128),
    "GQA, 64/8 of 64": (64, 8, 64, 64),
}


def heads_of(name: str, slots: int) -> tuple[int, int, int, int]:
    """N, K, H, Hv. Query heads divide by every degree up to the slots: key/value heads may be fewer, or cut through."""
    n = 12 if 12 % slots == 0 else 8
    return (HEADS | {"mha": (n, n, 4, 4), "gqa": (n, 4, 8, 8), "mqa": (n, 1, 8, 8), "mla": (n, n // 2, 12, 8)})[name]


def micro_batch(*groups: tuple[tuple[int, ...], tuple[int, ...]], **options: Any) -> MicroBatch:
    ids = itertools.count()
    made = (
        Group(
            slots,
            tuple(next(ids) for _ in lengths),
            lengths,
            **{"hierarchical_context_parallel_sizes": LEVELS.get(len(slots)), **options},
        )
        for slots, lengths in groups
    )
    return MicroBatch(tuple(made))


def layouts(slots: int) -> dict[str, MicroBatch]:
    """Micro-batches for a home of this many slots: every document split over all of them, and others."""
    everyone = tuple(range(slots))
    batches = {
        "ragged": micro_batch((everyone, RAGGED)),
        "even": micro_batch((everyone, (4 * slots, 2 * slots))),
        "contiguous": micro_batch((everyone, RAGGED), partition="contiguous"),
        "padded": micro_batch((everyone, (5, 17, 1)), pad_to=2 * slots + 17),
        "shares without rows": micro_batch((everyone, (1, 1))),
        "many documents": micro_batch((everyone, MANY)),
    }
    if slots >= 2:
        batches["long"] = micro_batch((everyone, (90, 30)))
        batches["slots without rows"] = micro_batch((everyone[1:], (9, 4)))
        batches["degree 1"] = micro_batch(*(((slot,), (5 + slot, 3)) for slot in everyone))
    if slots >= 4:
        halves = ((0, 1), (11, 5)), ((3, 2), (3, 16))
        batches["halves"] = micro_batch(*halves)
        few = ((1,), (6,)), (everyone, (21, 2)), ((3, 1), (1,)), ((3, 1), (14,))  # slot 1 has no row of the third
        batches["several groups a slot"] = micro_batch(*few, ((0, 3), (1, 8)), ((2,), (4, 4)), (everyone[1:], (19,)))
    return batches


def drawn_layout(slots: int, seed: int) -> MicroBatch:
    draw = random.Random(seed)
    degrees = [degree for degree in LEVELS if degree <= slots]
    groups: list[Group] = []
    document = 0
    for _ in range(draw.randint(1, 4)):
        degree = draw.choice(degrees)
        lengths = tuple(draw.choice((1, 2, 5, 9, 24, draw.randint(1, 60))) for _ in range(draw.randint(1, 3)))
        ids = tuple(range(document, document + len(lengths)))
        sizes = draw.choice([(a, degree // a) for a in range(1, degree + 1) if degree % a == 0])
        pad_to = draw.choice((None, None, max(lengths) + 3))
        partition = draw.choice(("zigzag", "zigzag", "contiguous"))
        kinds = tuple(draw.choice(("p2p", "all_gather", "a2a", "a2a+p2p", "auto")) for _ in range(2))  # by layer
        members = tuple(draw.sample(range(slots), degree))
        groups.append(Group(members, ids, lengths, kinds, sizes, partition, pad_to))
        document += len(lengths)
    return MicroBatch(tuple(groups))


@dataclass(frozen=True)
class Question:
    """What is asked of attend on one layout, with the seed of its tensors; the answer does not depend on the way."""

    layout: str
    heads: str
    dtype: str = "float64"
    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    scale: float | None = None
    sinks: bool = False
    dropout: float = 0.0
    spans: int = 0  # rows of runs that see each other, one row between two of them; 0: none
    seed: int = 0

    def spans_of(self, lengths: tuple[int, ...]) -> dict[int, list[tuple[int, int]]]:
        """The spans of each document."""
        size = self.spans or max(lengths)
        starts = {d: range(1, n - size + 1, size + 1) for d, n in enumerate(lengths)}
        return {d: [(start, start + size) for start in of_document] for d, of_document in starts.items()}

    @property
    def options(self) -> dict[str, Any]:
        names = ("causal", "window", "chunk", "softcap", "scale")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Way:
    """How it is asked: by which communication, with which kernel."""

    kind: str | None = "p2p"
    sizes: Sizes | None = None
    kernel: str | None = None
    layer: int | None = None
    padding: int = 0  # rows to pad the shard to
    heads_at_once: int | None = None  # of all_gather, through its byte budget
    recomputed: bool = False  # under a checkpoint that keeps attention's output and log-sum-exp


Case = tuple[Question, Way]
WAYS = (Way("p2p"), Way("all_gather"), Way("a2a"), Way("a2a+p2p"))
QUESTIONS = (
    Question("", "gqa"),
    Question("", "mha", causal=False),
    Question("", "mla", window=5, sinks=True, spans=7),
    Question("", "mqa", softcap=1.5, window=19),
    Question("", "gqa", dropout=0.3, sinks=True, spans=4),
    Question("", "mla", "float32"),
)


def cases_of(questions: Iterable[Question], ways: Iterable[Way]) -> list[Case]:
    seeded = (replace(question, seed=seed) for seed, question in enumerate(questions))
    return list(itertools.product(seeded, list(ways)))


def cut(cases: list[Case], count: int = 1) -> list[Case]:
    """Of each question so many ways, in turn: every way with questions of each kind and in layouts of each kind."""
    chosen = list[Case]()
    for i, (_, group) in enumerate(itertools.groupby(cases, lambda case: case[0])):
        ways, start = list(group), i + i // len(QUESTIONS)
        taken = min(count, len(ways))
        chosen += [ways[(start + n * len(ways) // taken) % len(ways)] for n in range(taken)]
    return chosen


def table(slots: int) -> list[Case]:
    """Every layout × mask, feature and head shape × type in float64, and a cut through the rest."""
    names = [*layouts(slots)]
    cases = cases_of((replace(q, layout=name) for name in names for q in QUESTIONS), WAYS)
    windows = [Question(name, "mha", window=window) for name in ("ragged", "padded") for window in (1, sys.maxsize)]
    cases += cases_of(windows, WAYS)
    chunks = [Question("ragged", "gqa", chunk=11), Question("padded", "gqa", chunk=1)]
    chunks += [Question("ragged", "mla", chunk=8, window=5, sinks=True), Question("many documents", "mqa", chunk=24)]
    cases += cases_of(chunks, WAYS)
    scales = [Question("padded", "gqa", window=window, scale=scale) for window in (None, 5) for scale in (-0.4, 0.0)]
    cases += cases_of([*scales, Question("ragged", "mla", "float32", scale=-0.4, sinks=True)], WAYS)
    padded = [Question(name, "gqa", sinks=True) for name in names]
    cases += cases_of(padded, [Way("p2p", padding=40), Way("a2a+p2p", padding=40)])
    others = [Way("p2p", kernel="reference"), Way("all_gather", heads_at_once=1), Way("all_gather", heads_at_once=3)]
    cases += cases_of([Question("ragged", "gqa", sinks=True), Question("ragged", "gqa", dropout=0.2)], others)
    return cases


def wide_table(slots: int) -> list[Case]:
    """A cut through the table for many slots, in every pair of levels."""
    names = ("ragged", "shares without rows", "long")
    questions = (Question("", "gqa"), Question("", "mla", window=5, sinks=True), Question("", "mqa", causal=False))
    levels = [Way("a2a+p2p", (a, slots // a)) for a in range(1, slots + 1) if slots % a == 0]
    return cases_of((replace(q, layout=name) for name in names for q in questions), (*WAYS[:3], *levels))


def head_shapes() -> list[Case]:
    shapes = ("GQA, 32/4 of 128", "MLA, 8 of 192/128", "GQA, 64/8 of 64")
    questions = [Question("halves", name, dtype, sinks=True) for name in shapes for dtype in ("float64", "float32")]
    return cases_of(questions, WAYS)


def random_cases(slots: int, count: int, seed: int) -> list[Case]:
    """Calls and layouts drawn at random; a way without a type takes each group's own."""
    draw = random.Random(seed)
    kinds = (None, "p2p", "all_gather", "a2a", "a2a+p2p", "auto")
    return [
        (
            Question(
                layout=f"drawn {draw.randrange(1 << 30)}",
                heads=draw.choice(("mha", "gqa", "mqa", "mla")),
                window=draw.choice((None, 1, 2, 7, 30)),
                chunk=draw.choice((None, None, 3, 16)),
                softcap=draw.choice((None, None, 2.0)),
                sinks=draw.random() < 0.5,
                dropout=draw.choice((0.0, 0.0, 0.25)),
                seed=draw.randrange(1 << 30),
            ),
            Way(
                kind=draw.choice(kinds),
                layer=draw.randrange(2),
                padding=draw.choice((0, 0, 33)),
                heads_at_once=draw.choice((None, 1)),
            ),
        )
        for _ in range(count)
    ]


@cache
def _numbers() -> Tensor:
    return torch.randn(1 << 21, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def tensors(question: Question, slots: int, rows: int) -> list[Tensor]:
    """q, k, v, dout in the question's dtype, and sinks in one that sums; the same on every rank."""
    n, kv, size, v_size = heads_of(question.heads, slots)
    dtype, at, made = getattr(torch, question.dtype), question.seed * 7919 % 499_979, list[Tensor]()
    for shape in ((rows, n, size), (rows, kv, size), (rows, kv, v_size), (rows, n, v_size), (n,)):
        made.append(_numbers()[at : at + math.prod(shape)].view(shape))  # drawing them anew takes longer than attention
        at += math.prod(shape)
    *made, sinks = made
    return [*(x.to(dtype) for x in made), sinks.to(torch.float32 if dtype == torch.bfloat16 else dtype, copy=True)]


@lru_cache(maxsize=2)
def wanted(question: Question, slots: int, lengths: tuple[int, ...]) -> list[Tensor]:
    """out, dq, dk, dv of the packed rows and dsinks, dense and in float64."""
    *qkv, dout, sinks = tensors(question, slots, sum(lengths))
    leaves = [x.double().detach().requires_grad_() for x in (*qkv, sinks)]
    out = dense_attention(
        *leaves[:3],
        lengths,
        sinks=leaves[3] if question.sinks else None,
        factors=dropout_factors(question) if question.dropout else None,
        spans=question.spans_of(lengths) if question.spans else None,
        **question.options,
    )
    out.backward(dout.double())
    return [out.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)]


def dropout_factors(question: Question) -> Callable[[int, int, int], Tensor]:
    """(document, rows, heads) to the factors (N, L, L) of its weights, from the formula in `attention/call.py`."""

    def absorb(state: np.ndarray, word: np.ndarray) -> np.ndarray:
        x = state + (word.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    def factors(document: int, rows: int, heads: int) -> Tensor:
        at = np.arange(rows)
        state = absorb(np.zeros(1, np.uint64), np.array([question.seed]))
        state = absorb(state, np.arange(heads))[:, None]
        state = absorb(absorb(state, np.array([document])), at[None])[:, :, None]
        word = absorb(state, at[None, None])
        is_kept = (word >> np.uint64(33)) >= round(question.dropout * (1 << 31))
        return torch.from_numpy(is_kept).double() / (1 - question.dropout)

    return factors


def found(case: Case, slots: int, shard: SequenceShard) -> list[Tensor]:
    question = case[0]
    *qkv, dout, sinks = (x.to(shard.device) for x in tensors(question, slots, shard.tokens))
    leaves = [x.requires_grad_() for x in (*(shard.scatter(x) for x in qkv), sinks)]
    sink_leaf = leaves[3] if question.sinks else None

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, shard, sinks=sink_leaf, **question.options, **options_of(case, shard, leaves))

    out = _recomputed(layer, *leaves[:3]) if case[1].recomputed else layer(*leaves[:3])
    out.backward(shard.scatter(dout))
    assert question.sinks == (leaves[3].grad is not None)
    for name, x in zip("qkv", leaves, strict=False):
        assert x.grad is not None, f"no gradient of {name} at {len(x)} rows"
    return [out.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)]


def _recomputed(layer: Callable[..., Tensor], *qkv: Tensor) -> Tensor:
    def whole(*qkv: Tensor) -> Tensor:
        return layer(*(x * 1 for x in qkv))

    return cast(Tensor, checkpoint(whole, *qkv, use_reentrant=False, context_fn=Recording().contexts))


def options_of(case: Case, shard: SequenceShard, leaves: list[Tensor]) -> dict[str, Any]:
    question, way = case
    rows = max(sum(group.laid_out) for group in shard.micro_batch.groups)
    budget = gather_bytes_per_head(rows, leaves[1], leaves[2]) * (way.heads_at_once or 0)
    return {
        "cp_comm_type": way.kind,
        "hierarchical_context_parallel_sizes": way.sizes,
        "kernel": way.kernel,
        "layer": way.layer,
        "max_gather_bytes": budget or None,
        "dropout": question.dropout,
        "dropout_seed": question.seed,
    }


def squares_of(case: Case, slots: int, shard: SequenceShard) -> list[float]:
    """Sums of squares of errors and of what is wanted of out, dq, dk, dv on this rank, and its part of dsinks."""
    *rows, sinks = found(case, slots, shard)
    *full_rows, _ = wanted(case[0], slots, shard.micro_batch.lengths)
    squares: list[float] = []
    for mine, full in zip(rows, full_rows, strict=True):
        full_local = shard.scatter(full.to(shard.device))
        squares += [(mine.double() - full_local).square().sum().item(), full_local.square().sum().item()]
    return [*squares, *sinks.tolist()]


def relative_errors(sums: list[float], sinks: Tensor) -> list[float]:
    """Of out, dq, dk, dv and dsinks, from the squares of all ranks and what dsinks is to be."""
    errors = [(sums[i] / (sums[i + 1] or 1.0)) ** 0.5 for i in range(0, 8, 2)]
    return [*errors, relative_error(torch.tensor(sums[8:], dtype=torch.float64), sinks)]


def errors_over_ranks(cases: Sequence[tuple[Case, SequenceShard]], slots: int, world: World) -> list[list[float]]:
    mine, sinks = list[list[float]](), list[Tensor]()
    for case, shard in cases:
        mine.append(squares_of(case, slots, shard))
        sinks.append(wanted(case[0], slots, shard.micro_batch.lengths)[-1])
    flat = iter(world.control.sum_over_slots([x for squares in mine for x in squares]))
    summed = [[next(flat) for _ in squares] for squares in mine]
    return [relative_errors(sums, exact) for sums, exact in zip(summed, sinks, strict=True)]


def run_cases(rank: int, slots: int, cases: list[Case]) -> list[float]:
    with World(Layout(ranks=slots), backend=backend()) as world:
        return worst_errors(cases, slots, world)


def worst_errors(cases: list[Case], slots: int, world: World) -> list[float]:
    named = layouts(slots)
    bound: dict[tuple[str, int, int], SequenceShard] = {}
    for case in cases:
        key = layout, padding, spans = key_of(case)
        if key not in bound:
            batch = named[layout] if layout in named else drawn_layout(slots, int(layout.split()[1]))
            shard = bind(batch, world)
            shard = shard.with_spans(case[0].spans_of(batch.lengths)) if spans else shard
            bound[key] = shard.with_padding(minimum=padding) if padding else shard
    return [max(errors) for errors in errors_over_ranks([(c, bound[key_of(c)]) for c in cases], slots, world)]


def key_of(case: Case) -> tuple[str, int, int]:
    return case[0].layout, case[1].padding, case[0].spans
