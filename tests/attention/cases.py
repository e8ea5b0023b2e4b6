"""The parity table of attention: calls, layouts, features, head shapes and types, beside dense attention in float64.

Tests run a part of the table in which every two entries of two axes meet: out, dq, dk, dv and the gradient of sinks.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from types import ModuleType
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longspan import Group, Layout, MicroBatch, World, attend, bind, plan_fixed
from longspan.attention import all_gather, all_to_all, ring
from longspan.attention.saved_outputs import Recording
from longspan.comm import SequenceShard
from longspan.plan import messages
from longspan.testing import backend
from tests.pairs import every_pair
from tests.reference import dense_attention, relative_error

LIMIT = {"float64": 1e-12, "float32": 1e-5}  # of half precision: twice the error of one process
NOISE = 1e-6  # of float32 sums, where half precision alone has no error: rows that see themselves and nothing else
RAGGED = (13, 1, 40, 2, 7)
MANY = tuple(range(19, 49, 3))  # under a window of about their length every one is limited elsewhere
DEGREES = (1, 2, 3, 4, 6, 8)
DRAWN_DEGREES = (1,) * 20 + (2,) * 8 + (3, 4)  # pairs on as few ranks as can be, for each takes its time
HEADS = ("mha", "gqa", "mqa", "mla", "GQA, 48/8", "latents")
KEYS_ARE_VALUES = "latents without further numbers"


def heads_of(name: str, slots: int) -> tuple[int, int, int, int]:
    """N, K, H, Hv. Query heads divide by every degree up to the slots: key/value heads may be fewer, or cut through.

    Of latents k has H − Hv numbers.
    """
    n = 12 if 12 % slots == 0 else 24
    shapes = ((n, n, 4, 4), (n, 4, 8, 8), (n, 1, 8, 8), (n, n // 2, 12, 8), (48, 8, 16, 16), (n, 1, 12, 8))
    return {**dict(zip(HEADS, shapes, strict=True)), KEYS_ARE_VALUES: (n, 1, 8, 8)}[name]


LEVELS: dict[str, Callable[[int], int]] = {  # of a2a+p2p: how many members exchange heads
    "two inside": lambda degree: 2 if degree % 2 == 0 else degree,
    "two outside": lambda degree: degree // 2 if degree % 2 == 0 else 1,
    "one inside": lambda degree: 1,
    "one outside": lambda degree: degree,
}


def micro_batch(*groups: tuple[Any, ...], levels: str = "two inside", **options: Any) -> MicroBatch:
    ids = itertools.count()
    made = list[Group]()
    for slots, lengths, *kind in groups:
        inner = LEVELS[levels](len(slots))
        sizes = {"hierarchical_context_parallel_sizes": (inner, len(slots) // inner)}
        made.append(Group(slots, tuple(next(ids) for _ in lengths), lengths, *kind, **sizes, **options))
    return MicroBatch(tuple(made))


def layouts(slots: int, **options: Any) -> dict[str, MicroBatch]:
    everyone = tuple(range(slots))
    nodes, most = (everyone[: -(-slots // 2)], everyone[slots // 2 :]), everyone[-(3 * slots // 4) :]
    chain = [*itertools.pairwise(everyone), *(zip(*nodes, strict=True) if slots > 1 else ())]
    kinds = itertools.cycle(("a2a", "p2p", "all_gather", "a2a+p2p"))
    groups: dict[str, list[tuple[Any, ...]]] = {
        "ragged": [(everyone, RAGGED)],
        "fewer rows than members": [(everyone, (1, 2, 1))],
        "many documents": [(everyone, MANY)],
        "long": [(everyone, (90, 30))],
        "slots without rows": [(most, (9, 4))],
        "degree 1": [((slot,), (5 + slot, 3)) for slot in everyone],
        "halves": [(nodes[0], (11, 5)), (nodes[1][::-1], (3, 16))],
        "several groups a slot": [  # a slot has no row of the third
            ((slots // 2,), (6,)),
            (everyone, (21, 2)),
            (nodes[1][::-1], (1,)),
            (nodes[1][::-1], (14,)),
            (most, (19,)),
        ],
        "local, node, cross-node": [
            *(((slot,), (5 + slot, 2), "auto") for slot in everyone),
            (nodes[0], (14, 3), "a2a"),
            (nodes[1], (11,), "all_gather"),
            (everyone, (40,), "a2a+p2p"),
        ],
        "chains that overlap": [(pair, (10 + pair[0],), next(kinds)) for pair in chain] or [(everyone, (10,))],
        "one type a layer": [(everyone, (21,), ("p2p", "all_gather")), (nodes[1], (8, 4), ("a2a+p2p", "a2a"))],
    }
    batches = {name: micro_batch(*made, **options) for name, made in groups.items()}
    batches["padded"] = micro_batch((everyone, (5, 17, 1)), pad_to=2 * slots + 17, **options)
    return batches


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
    indices: int = 0  # so many positions, or blocks, that each row has chosen, 0: none
    block_size: int = 1
    by_head: bool = False  # a choice for each key/value head
    spans: int = 0  # rows of runs that see each other, one row between two of them; 0: none
    span_mask: str = "later"
    seed: int = 0

    def spans_of(self, lengths: tuple[int, ...]) -> dict[int, list[tuple[int, int]]]:
        size = self.spans or max(lengths)
        starts = {d: range(1, n - size + 1, size + 1) for d, n in enumerate(lengths)}
        return {d: [(start, start + size) for start in of_document] for d, of_document in starts.items()}

    @property
    def options(self) -> dict[str, Any]:
        names = ("causal", "window", "chunk", "softcap", "scale")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Way:
    """How it is asked: by which communication, with which kernel, in which shares, and what is taken for large."""

    kind: str | None = "p2p"  # None: the types of each group
    levels: str = "two inside"
    kernel: str | None = None
    recomputed: bool = False  # under a checkpoint that keeps attention's output and log-sum-exp
    partition: str = "zigzag"
    padding: int = 0  # rows to pad the shard to
    large: str = "nothing"
    communicators: bool = False  # of the members' own


Case = tuple[Question, Way]
WAYS = (Way("p2p"), Way("all_gather"), Way("a2a"), Way("a2a+p2p"))
SLICES = ((all_gather, "SLICE_BYTES", 0), (all_to_all, "SLICE_BYTES", 0), (ring, "HALVES_BYTES", 0))
LARGE: dict[str, tuple[tuple[ModuleType, str, int], ...]] = {
    "nothing": (),
    "in two slices": SLICES,
    "in four slices": (*SLICES, (all_to_all, "SLICES", 4)),  # some of one key/value head, some of several
    "heads one by one": (*SLICES, (all_to_all, "SLICES", 4), (messages, "QUERY_GRADIENT_BYTES", 1)),
}
FEATURES: dict[str, dict[str, Any]] = {
    "causal": {},
    "full, spans": {"causal": False, "spans": 4},
    "narrow window": {"window": 2, "scale": -0.4},
    "window wider than a share": {"window": 19, "softcap": 1.5},
    "window, sinks, spans": {"window": 5, "sinks": True, "spans": 7},
    "window, whole spans": {"window": 5, "spans": 9, "span_mask": "whole"},
    "chunk": {"chunk": 8},
    "chunk, window, sinks": {"chunk": 24, "window": 5, "sinks": True},
    "sinks, no scale": {"sinks": True, "scale": 0.0},
    "dropout, sinks, spans": {"dropout": 0.3, "sinks": True, "spans": 4},
    "full, softcap, dropout, sinks": {"causal": False, "softcap": 2.0, "dropout": 0.1, "sinks": True},
    "indices, sinks": {"indices": 6, "sinks": True},
    "blocks, sinks": {"indices": 3, "block_size": 4, "sinks": True},
    "blocks by head, window": {"indices": 2, "block_size": 5, "by_head": True, "window": 17},
    "indices, window, dropout": {"indices": 9, "window": 11, "dropout": 0.2, "scale": -0.4},
}
AXES: dict[str, Sequence[Any]] = {
    "slots": DRAWN_DEGREES,
    "feature": tuple(FEATURES),
    "layout": tuple(layouts(1)),
    "heads": HEADS,
    "dtype": ("float64", "float32", "bfloat16"),
    "way": (
        *(Way(None), Way("auto"), Way("p2p"), Way("all_gather"), Way("a2a")),
        *(Way("a2a+p2p", levels) for levels in LEVELS),
    ),
    "kernel, recomputed": tuple(itertools.product((None, "reference"), (False, True))),
    "partition": ("zigzag", "contiguous"),
    "padding": (0, 40),
    "large": tuple(LARGE),
    "communicators": (False, True),
}


GROUPS_OF_OTHERS = ("degree 1", "halves")  # layouts whose groups are among those of other layouts


def pairs(seed: int, *, every_layout: bool) -> dict[int, list[Case]]:
    """By slots, cases in which every two entries of two axes meet, and some in which more than two must."""
    cases: dict[int, list[Case]] = {}
    drawn = [name for name in layouts(1) if every_layout or name not in GROUPS_OF_OTHERS]
    for i, values in enumerate(every_pair([*(AXES | {"layout": drawn}).values()], seed)):
        slots, feature, layout, heads, dtype, way, (kernel, recomputed), *others = values
        names = ("partition", "padding", "large", "communicators")
        question = Question(layout, heads, dtype, seed=i, **FEATURES[feature])
        way = replace(way, kernel=kernel, recomputed=recomputed, **dict(zip(names, others, strict=True)))
        cases.setdefault(slots, []).append((question, way))
    of_slices = cases_of([Question("ragged", "mqa", sinks=True)], [Way("a2a+p2p", large="in four slices")])
    of_windows = cases_of([Question("many documents", "gqa", window=19)], WAYS)
    narrow = [replace(way, partition="contiguous") for way in WAYS]
    cases[4] += of_slices + of_windows + cases_of([Question("long", "mla", window=5)], narrow)
    mixed = [
        Question("local, node, cross-node", "gqa", sinks=True),
        Question("several groups a slot", "mha", "float32"),
    ]
    ways = [Way("a2a+p2p", levels) for levels in ("two inside", "two outside")]
    return cases | {6: cases_of(mixed, ways[1:]), 8: cases_of(mixed[:1], [Way(None), *ways])}


def cases_of(questions: Iterable[Question], ways: Iterable[Way]) -> list[Case]:
    seeded = (replace(question, seed=seed) for seed, question in enumerate(questions))
    return list(itertools.product(seeded, list(ways)))


@cache
def _numbers() -> Tensor:
    return torch.randn(1 << 21, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def tensors(question: Question, slots: int, rows: int) -> list[Tensor]:
    """q, k, v, dout in the question's dtype, and sinks in one that sums; the same on every rank."""
    n, kv, size, v_size = heads_of(question.heads, slots)
    dtype, at, made = getattr(torch, question.dtype), question.seed * 7919 % 499_979, list[Tensor]()
    k_size = size - v_size * (question.heads.startswith("latents"))
    for shape in ((rows, n, size), (rows, kv, k_size), (rows, kv, v_size), (rows, n, v_size), (n,)):
        made.append(_numbers()[at : at + math.prod(shape)].view(shape))  # drawing them anew takes longer than attention
        at += math.prod(shape)
    *made, sinks = made
    return [*(x.to(dtype) for x in made), sinks.to(torch.float32 if dtype == torch.bfloat16 else dtype, copy=True)]


def choices(question: Question, lengths: tuple[int, ...], kv_heads: int) -> Tensor | None:
    """Of every packed row, positions in its document, or blocks of them, in any order (S, k), or (S, K, k): some that
    it does not see, some −1."""
    if not question.indices:
        return None
    random = np.random.default_rng(question.seed)
    heads = kv_heads if question.by_head else 1
    rows = np.full((sum(lengths), heads, question.indices), -1, dtype=np.int32)
    for row, length in enumerate(np.repeat(lengths, lengths)):
        count = -(-length // question.block_size)
        for head in range(heads):
            chosen = random.permutation(np.arange(-2, count + 1))[: question.indices]
            rows[row, head, : len(chosen)] = np.where((chosen >= 0) & (chosen < count), chosen, -1)
    return torch.from_numpy(rows if question.by_head else rows[:, 0])


def positions_of(choices: Tensor, block_size: int) -> Tensor:
    """The positions (S, k · m) of chosen blocks (S, k), −1 for none."""
    positions = choices[..., None] * block_size + torch.arange(block_size)
    return positions.masked_fill(choices[..., None] < 0, -1).flatten(1)


@lru_cache(maxsize=2)
def wanted(question: Question, slots: int, lengths: tuple[int, ...]) -> list[Tensor]:
    """out, dq, dk, dv of the packed rows and dsinks, dense and in float64."""
    *qkv, dout, sinks = tensors(question, slots, sum(lengths))
    leaves = [x.double().detach().requires_grad_() for x in (*qkv, sinks)]
    q, k, v = leaves[:3]
    indices = choices(question, lengths, k.shape[1])
    group = q.shape[1] // k.shape[1]
    outs = list[Tensor]()
    for head in range(k.shape[1] if question.by_head else 1):
        kv = slice(head, head + 1) if question.by_head else slice(None)
        heads = slice(head * group, (head + 1) * group) if question.by_head else slice(None)
        chosen = indices[:, head] if indices is not None and question.by_head else indices
        key, value = k[:, kv], v[:, kv]
        out = dense_attention(
            *(q[:, heads], torch.cat((value, key), -1) if question.heads.startswith("latents") else key, value),
            lengths,
            sinks=leaves[3][heads] if question.sinks else None,
            factors=dropout_factors(question) if question.dropout else None,
            spans=question.spans_of(lengths) if question.spans and question.span_mask != "none" else None,
            whole_spans=question.span_mask == "whole",
            indices=None if chosen is None else positions_of(chosen, question.block_size),
            **question.options,
        )
        outs.append(out)
    out = torch.cat(outs, 1)
    out.backward(dout.double())
    return [out.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)]


def dropout_factors(question: Question) -> Callable[[int, int, int], Tensor]:
    """(document, rows, heads) to the factors (N, L, L) of its weights, from the formula in `attention/dropout.py`."""

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
    question, way = case
    *qkv, dout, sinks = (x.to(shard.device) for x in tensors(question, slots, shard.tokens))
    leaves = [x.requires_grad_() for x in (*(shard.scatter(x) for x in qkv), sinks)]
    sink_leaf = leaves[3] if question.sinks else None
    indices = choices(question, shard.micro_batch.lengths, qkv[1].shape[1])
    indices = None if indices is None else shard.scatter(indices.to(shard.device))

    options: dict[str, Any] = {
        "cp_comm_type": way.kind,
        "latents": question.heads.startswith("latents"),
        "block_size": question.block_size,
        "kernel": way.kernel,
        "spans": question.span_mask,
    }
    options |= {"dropout": question.dropout, "dropout_seed": question.seed, "layer": question.seed % 2}

    def layer(*qkv: Tensor) -> Tensor:
        q, k, v = (x * 1 if way.recomputed else x for x in qkv)
        return attend(q, k, v, shard, sinks=sink_leaf, indices=indices, **question.options, **options)

    with ExitStack() as patched:
        for module, name, value in LARGE[way.large]:
            patched.enter_context(patch.object(module, name, value))
        if way.recomputed:
            out = cast(Tensor, checkpoint(layer, *leaves[:3], use_reentrant=False, context_fn=Recording().contexts))
        else:
            out = layer(*leaves[:3])
        out.backward(shard.scatter(dout))
    assert question.sinks == (leaves[3].grad is not None)
    for name, x in zip("qkv", leaves, strict=False):
        assert x.grad is not None, f"no gradient of {name} at {len(x)} rows"
    return [out.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)]


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


def bound(case: Case, world: World, batch: MicroBatch) -> SequenceShard:
    question, way = case
    shard = bind(batch, world)
    shard = shard.with_spans(question.spans_of(batch.lengths)) if question.spans else shard
    return shard.with_padding(minimum=way.padding) if way.padding else shard


def errors_over_limits(cases: Sequence[Case], slots: int, world: World) -> list[float]:
    """The largest error of each case over its limit, so that 1 is the most."""
    batches = {
        (way.levels, way.partition): layouts(slots, levels=way.levels, partition=way.partition) for _, way in cases
    }
    mine, sinks, limits = list[list[float]](), list[Tensor](), list[list[float]]()
    for question, way in cases:
        batch = batches[way.levels, way.partition][question.layout]
        mine.append(squares_of((question, way), slots, bound((question, way), world, batch)))
        sinks.append(wanted(question, slots, batch.lengths)[-1])
        limits.append(
            [LIMIT[question.dtype]] * 5 if question.dtype in LIMIT else _errors_alone(question, batch, slots, world)
        )
    flat = iter(world.control.sum_over_slots([x for squares in mine for x in squares]))
    summed = [[next(flat) for _ in squares] for squares in mine]
    errors = [relative_errors(sums, exact) for sums, exact in zip(summed, sinks, strict=True)]
    # What is no number is the largest error of all.
    ratios = [[e / limit for e, limit in zip(*both, strict=True)] for both in zip(errors, limits, strict=True)]
    return [max(x, key=lambda ratio: math.inf if math.isnan(ratio) else ratio) for x in ratios]


def _errors_alone(question: Question, batch: MicroBatch, slots: int, world: World) -> list[float]:
    ids = tuple(range(len(batch.lengths)))
    case, alone = (question, Way()), MicroBatch((Group((world.slot,), ids, batch.lengths),))
    sums = squares_of(case, slots, bound(case, world, alone))
    return [2 * error + NOISE for error in relative_errors(sums, wanted(question, slots, batch.lengths)[-1])]


def run_cases(rank: int, slots: int, cases: list[Case]) -> list[float]:
    torch.set_num_threads(1)  # these are small tensors
    errors = dict[Case, float]()
    for communicators in sorted({way.communicators for _, way in cases}):
        home, of_world = Layout(ranks=slots), [case for case in cases if case[1].communicators == communicators]
        with World(home, backend=backend(), timeout=60, max_groups=8 if communicators else 0) as world:
            for cp in (slots, slots // 2) if communicators and slots % 2 == 0 else ():
                world.prepare(plan_fixed([9] * slots, home, cp=cp))
            errors |= zip(of_world, errors_over_limits(of_world, slots, world), strict=True)
    return [errors[case] for case in cases]
