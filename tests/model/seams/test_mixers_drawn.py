"""Families with state-space layers on documents and plans drawn at random, beside the stock model; seeds are printed.

Groups of any degree, with slots in any order and in several groups, both partitions, every type, padding and
recomputation.
"""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longspan.comm import World, bind, run_local
from longspan.doctor.stock import (
    Answer,
    collect_gradients,
    compute_stock_answer,
    draw_documents,
    gradient_errors,
    loss_error,
    missing_errors,
    whole_float64,
)
from longspan.layout import Layout
from longspan.model import prepare
from longspan.model.exactness.small_copies import make_tiny_model
from longspan.plan import Group, MicroBatch, Plan
from longspan.train import run_step
from tests.model.seams.test_mixers import FAMILIES, here, small_config

DRAWS = 4  # for each family and number of ranks
TYPES = ("p2p", "all_gather", "auto", "a2a")
EXACT = 1e-11


@dataclass(frozen=True)
class Draw:
    """A plan over some ranks, how its model is recomputed, and how many copies of its weights there are."""

    plan: Plan
    recompute: str
    copies: int


def draw(seed: int, ranks: int) -> Draw:
    """Documents of 1 to 90 tokens, many of them shorter than a convolution, and a plan of one to four micro-batches."""
    random_ = random.Random(seed)
    sizes = (1, 1, 2, 3, random_.randint(1, 9), random_.randint(5, 40), random_.randint(30, 90))
    lengths = (*(random_.choice(sizes) for _ in range(random_.randint(1, 6))), random_.randint(2, 60))
    left, batches = random_.sample(range(len(lengths)), len(lengths)), list[MicroBatch]()
    while left:
        groups = list[Group]()
        for _ in range(random_.randint(1, 3)):
            count = min(len(left), random_.randint(1, 3))
            if count:
                groups.append(_group(random_, ranks, left[:count], lengths))
                left = left[count:]
        batches.append(MicroBatch(tuple(groups)))
    if random_.random() < 0.2:
        batches.append(MicroBatch())
    plan = Plan(ranks, lengths, tuple(batches), targets=sum(lengths) - len(lengths)).check()
    copies = 2 if ranks % 2 == 0 and random_.random() < 0.3 else 1
    return Draw(plan, random_.choice(("none", "none", "full", "selective")), copies)


def _group(random_: random.Random, ranks: int, documents: list[int], lengths: tuple[int, ...]) -> Group:
    degree = random_.choice((1, 2, ranks, random_.randint(1, ranks)))
    kind = random_.choice(TYPES if 4 % degree == 0 else TYPES[:3])  # small copies have four query heads
    of = tuple(lengths[document] for document in documents)
    padded = random_.choice((None, None, max(of) + random_.randint(0, 4)))
    slots = tuple(random_.sample(range(ranks), degree))
    partition: Any = random_.choice(("zigzag", "contiguous"))
    return Group(slots, tuple(documents), of, kind, partition=partition, pad_to=padded)


def _errors(rank: int, ranks: int, config: Any, cases: list[tuple[Draw, list[np.ndarray], Answer]]) -> list[Any]:
    """The largest error of each draw, and the parameter that has it."""
    found = list[Any]()
    for case, documents, answer in cases:
        with World(Layout(ranks, dp_replicate=case.copies)) as world, whole_float64():
            recompute: Any = case.recompute
            model = prepare(make_tiny_model(config, torch.float64), world, activation_checkpointing=recompute)
            world.prepare(case.plan)
            result = run_step(model, case.plan, documents, world)
            errors = gradient_errors(collect_gradients(model), answer)
            errors |= missing_errors(set(errors), answer) | {"loss": loss_error(result.loss, answer.loss)}
            found.append(max((error, name) for name, error in errors.items()))
    return found


@pytest.mark.whole
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("family", here(tuple(FAMILIES)))
def test_random_documents_and_plans_are_exact(family: str, ranks: int) -> None:
    config, cases = small_config(family), list[tuple[Draw, list[np.ndarray], Answer]]()
    first = 1000 * list(FAMILIES).index(family) + 100 * ranks
    for seed in range(first, first + DRAWS):
        drawn = draw(seed, ranks)
        documents = draw_documents(config, drawn.plan.lengths, seed)
        with whole_float64():
            cases.append((drawn, documents, compute_stock_answer(config, documents, torch.float64)))
        print(f"seed {seed}: {drawn}")
    for errors in run_local(_errors, ranks, (ranks, config, cases), timeout=60 * DRAWS):
        assert all(error <= EXACT for error, _ in errors), dict(enumerate(errors, first))


# ---- each document is its own


def _logits(rank: int, config: Any, plan: Plan, texts: list[list[np.ndarray]]) -> bool:
    """Whether logits of other documents keep their bits where document 1 changes, and those of its rows do not."""
    with World(Layout(plan.slots)) as world, whole_float64(), torch.no_grad():
        model: Any = prepare(make_tiny_model(config, torch.float64), world)
        same = True
        for batch in plan.micro_batches:
            shard = bind(batch, world).with_padding()
            order = [document for group in batch.groups for document in group.documents]
            made = list[Tensor]()
            for documents in texts:
                ids = shard.scatter(torch.from_numpy(np.concatenate([documents[d] for d in order])))
                made.append(model(input_ids=ids, position_ids=shard.position_ids, shard=shard).logits[0])
            changed = torch.repeat_interleave(
                torch.tensor([d == 1 for d in order]), torch.tensor([plan.lengths[d] for d in order])
            )
            rows = shard.rows >= 0
            others = rows & ~shard.scatter(changed)
            same &= torch.equal(made[0][others], made[1][others])
            same &= others.equal(rows) or not torch.equal(made[0][rows], made[1][rows])
        return same


@pytest.mark.whole
@pytest.mark.parametrize(
    "family", here(("qwen3_5_text", "olmo_hybrid", "bamba", "mamba2", "falcon_h1", "lfm2", "zamba2"))
)
@pytest.mark.parametrize("partition", ["zigzag", "contiguous"])
def test_logits_of_other_documents_keep_their_bits(family: str, partition: Any) -> None:
    """Of families without experts, whose products have as many rows as chose them."""
    lengths, everyone = (19, 40, 2, 1, 23), (0, 1, 2)
    groups = (Group(everyone, (0, 1, 2), lengths[:3], partition=partition), Group((2, 0), (3, 4), lengths[3:]))
    plan = Plan(3, lengths, (MicroBatch(groups),), targets=80)
    config = small_config(family)
    texts = draw_documents(config, lengths)
    others = [*texts]
    others[1] = draw_documents(config, lengths, seed=1)[1]
    assert all(run_local(_logits, 3, (config, plan, [texts, others]), timeout=120))
