"""What indexers choose over a shard, as integers: the same at every degree, document by document, as the class does.

Few index heads tie, and of those the lowest positions are chosen. Each rule, broken on purpose, is noticed.
"""

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from longspan import Layout, World, attend, bind, plan_fixed
from longspan.attention.saved_outputs import Recording
from longspan.doctor.stock import compute_in_float64
from longspan.model.kinds import find_indexers
from longspan.model.seams.chosen_keys import index_scores, indexers
from longspan.testing import backend, run_ranks
from tests.interpreter import run_interpreted
from tests.model.seams.families import MANY_HEADS, here, tiny
from tests.model.stock import prepare_untried, texts
from tests.mutation import each_mutated

LENGTHS, K = (19, 3, 40, 1, 8), 6  # documents shorter and longer than so many keys, in one packed row
FAMILIES = here(["deepseek-v3.2", f"deepseek-v3.2{MANY_HEADS}", "glm-5", "a.x-k2", "hy-v4", "dots.3"])
MOST = {2: 3}  # families at this degree, each of another kind; at the others all
SEAM = "model.seams.chosen_keys.indexers"
CHANGES = {
    "a tie is broken otherwise": (SEAM, "(scores + 0.0)", "(scores + 1e-12 * torch.arange(scores.shape[-1]))"),
    "a key of another document": (
        "model.seams.chosen_keys.row_runs",
        "accumulate(laid_out, initial=0)",
        "0 for _ in laid_out",
    ),
    "a later key": (SEAM, "visible = key_positions <= key_positions", "visible = key_positions <= 1 + key_positions"),
    "a choice of another layer": (SEAM, "return chosen", "return _choose_keys.__dict__.setdefault('first', chosen)"),
    "a sum in half precision": (SEAM, "(scores + 0.0).sort(dim=-1", "scores.bfloat16().sort(dim=-1"),
}
IN_TILES = {  # from what the class multiplies, as on GPUs
    "a later key": (SEAM, "keys, positions.start, k)", "keys, positions.start + 1, k)"),
    "weights without sign": ("model.seams.chosen_keys.index_scores", "weights[0, :, 0]", "weights[0, :, 0].abs()"),
    "queries of other rows": (
        SEAM,
        "*operands.queries_and_weights()",
        "*(x.flip(0) for x in operands.queries_and_weights())",
    ),
}
Choices = list[list[set[int]]]  # of each row of a document, one document after another


def choices_of_the_class(family: str) -> list[Choices]:
    """Of each indexer, in float64: what the class itself chooses of what a row sees, documents one by one."""
    model, by_indexer = tiny(family), list[Choices]()
    if MANY_HEADS not in family:
        indexers.order_equal_scores(model)
    for indexer in find_indexers(model).values():
        by_indexer.append([])

        def note(_: Any, __: Any, out: Tensor, choices: Choices = by_indexer[-1]) -> None:
            choices.append([{key for key in keys if key <= row} for row, keys in enumerate(out[0].tolist())])

        indexer.register_forward_hook(note)
    with torch.no_grad():
        for document in texts(LENGTHS):
            model(input_ids=torch.from_numpy(document)[None], use_cache=False)
    return by_indexer


def best_of_all(q: Tensor, weights: Tensor, keys: Tensor, first_position: int, k: int, stride: int = 1) -> Tensor:
    """What `choose_best_keys` chooses, from all scores at once."""
    scores = torch.einsum("rh,rhs->rs", weights, torch.einsum("rhd,sd->rhs", q, keys.to(q.dtype)).relu())
    rows = first_position + torch.arange(len(q), device=q.device)[:, None]
    positions = torch.arange(len(keys), device=q.device) * stride + stride - 1
    scores = (scores + 0.0).masked_fill(positions > rows, -torch.inf)
    scores, order = (x[:, :k] for x in scores.sort(dim=1, descending=True, stable=True))
    return pad(order.int().masked_fill(scores == -torch.inf, -1), (0, k - order.shape[1]), value=-1)


def wrong_choices_of_kernels(device: torch.device) -> list[tuple[int, ...]]:
    """Of small whole numbers, whose sums are exact and often equal."""
    wrong, generator = list[tuple[int, ...]](), torch.Generator().manual_seed(0)
    half = (
        torch.bfloat16 if device.type == "cuda" else torch.float16
    )  # the interpreter's products of bfloat16 are wrong
    cases = (
        *((half, 70, 3, 24, 0, 9, 1), (torch.float32, 20, 2, 16, 130, 60, 1), (half, 130, 1, 128, 7, 50, 1)),
        *((half, 300, 2, 32, 0, 5, 4), (torch.float32, 70, 2, 16, 61, 20, 3)),  # pools of so many keys
    )
    for dtype, rows, heads, size, first, k, stride in cases:
        q, weights, keys = (
            torch.randint(-2, 3, shape, generator=generator).to(device)
            for shape in ((rows, heads, size), (rows, heads), ((first + rows) // stride, size))
        )
        q, keys, weights = q.to(dtype), keys.to(dtype), weights.float()
        with patch.object(index_scores, "_SCORE_BYTES", 4 * 64 * len(keys)):  # runs of 64 rows
            chosen = index_scores.choose_best_keys(q, weights, keys, first, k, stride)
        expected = best_of_all(q.float(), weights, keys, first, k, stride).sort(dim=1, stable=True).values
        if not torch.equal(chosen.sort(dim=1).values, expected):
            wrong.append((rows, heads, size, first, k, stride))
    return wrong


def wrong_scores_of_blocks(device: torch.device) -> list[tuple[int, ...]]:
    """Of small whole numbers, as above, beside products of all keys."""
    wrong, generator = list[tuple[int, ...]](), torch.Generator().manual_seed(0)
    half = torch.bfloat16 if device.type == "cuda" else torch.float16
    cases = (
        *((half, 2, 130, 128, 0, 130, 128), (half, 1, 40, 16, 60, 100, 4), (torch.float32, 3, 70, 24, 300, 365, 20)),
        *((half, 1, 3, 128, 700, 701, 300), (torch.float32, 1, 66, 256, 7, 73, 3)),
    )
    for dtype, heads, rows, size, first, keys, block in cases:
        q, k = (
            torch.randint(-2, 3, shape, generator=generator).to(device, dtype)
            for shape in ((heads, rows, size), (keys, size))
        )
        scores = index_scores.score_blocks(q, k, first, block)
        products = torch.einsum("hrd,sd->hrs", q.float(), k.float())
        later = torch.arange(keys, device=device) > first + torch.arange(rows, device=device)[:, None]
        products = pad(products.masked_fill(later, -torch.inf), (0, -keys % block), value=-torch.inf)
        if not torch.equal(scores, torch.stack([x.amax(2) for x in products.split(block, 2)], 2)):
            wrong.append((heads, rows, size, first, keys, block))
    return wrong


def interpreted() -> None:
    assert not wrong_choices_of_kernels(torch.device("cpu"))
    with patch.object(index_scores, "can_score", lambda q: True):
        assert not wrong_scores_of_blocks(torch.device("cpu"))


def test_kernels_choose_the_lowest_of_equal_scores() -> None:
    if backend() == "nccl":
        assert not wrong_choices_of_kernels(torch.device("cuda"))
        assert not wrong_scores_of_blocks(torch.device("cuda"))
    else:
        run_interpreted("tests.model.seams.test_indexers")


def other_choices(rank: int, ranks: int, changed: bool) -> dict[str, int]:
    torch.set_num_threads(1)
    ids, documents = np.concatenate(texts(LENGTHS)), np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    rows: dict[str, int] = {}
    with (
        World(Layout(ranks=ranks), backend=backend()) as world,
        compute_in_float64(),
        patch.object(indexers, "choose_best_keys", best_of_all),
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        shard = bind(plan_fixed(LENGTHS, world.home, cp=ranks).micro_batches[0], world)
        places = list(
            zip(shard.scatter(torch.from_numpy(documents)).tolist(), shard.position_ids.tolist(), strict=True)
        )
        for family in FAMILIES[:1] if changed else FAMILIES[: MOST.get(ranks)]:
            expected, chosen = choices_of_the_class(family), list[Tensor]()
            model = prepare_untried(tiny(family), world, shard_parameters=False)
            for indexer in find_indexers(model).values():
                indexer.register_forward_hook(lambda _, __, out, chosen=chosen: chosen.append(out[0]))
            for in_tiles, changes in ((False, CHANGES), (True, IN_TILES)):
                monkeypatch.setattr(index_scores, "can_score", lambda q, in_tiles=in_tiles: in_tiles)
                for change in each_mutated(changes if changed else {}):
                    chosen.clear()
                    with torch.no_grad():
                        local_ids = shard.scatter(torch.from_numpy(ids).to(world.device))
                        model(input_ids=local_ids[None], position_ids=shard.position_ids[None], shard=shard)
                    rows[f"{family}, {in_tiles}, {change}"] = sum(
                        sorted(key for key in keys if key >= 0) != sorted(layer[document][position])
                        for layer, layer_chosen in zip(expected, chosen, strict=True)
                        for (document, position), keys in zip(places, layer_chosen.tolist(), strict=True)
                    )
    return rows


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.whole) for n in (1, 3, 4))])
def test_chosen_as_the_class_does_at_every_degree(ranks: int) -> None:
    for rows in run_ranks(other_choices, ranks, ranks, False):
        assert not any(rows.values()) and len(rows) == 2 * len(FAMILIES[: MOST.get(ranks)]), rows


there = pytest.mark.skipif(not FAMILIES, reason="this transformers has no such class")


@there
@pytest.mark.whole
def test_a_broken_rule_is_noticed() -> None:
    of_ranks = run_ranks(other_choices, 2, 2, True)
    unnoticed = [name for name in of_ranks[0] if not any(rows[name] for rows in of_ranks)]
    assert unnoticed == [f"{FAMILIES[0]}, {in_tiles}, nothing" for in_tiles in (False, True)]


@there
def test_scores_are_sums_in_float32_whatever_the_model_is(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    dtypes = list[torch.dtype]()

    class Noted(indexers.LowestFirst):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            dtypes.extend([args[0].dtype] if func is Tensor.topk else [])
            return super().__torch_function__(func, types, args, kwargs)

    monkeypatch.setattr(indexers, "LowestFirst", Noted)
    monkeypatch.setattr(index_scores, "can_score", lambda q: False)
    shard = bind(plan_fixed(LENGTHS, world.home, cp=1).micro_batches[0], world)
    model = prepare_untried(tiny(FAMILIES[0]).bfloat16(), world)
    ids = torch.zeros(1, shard.local_rows, dtype=torch.long, device=world.device)
    model(input_ids=ids, position_ids=shard.position_ids[None], shard=shard)
    assert {*dtypes} == {torch.float32}


@there
def test_documents_of_no_more_rows_than_keys_need_no_choice(world: World) -> None:
    shapes = list[torch.Size]()
    shard = bind(plan_fixed((K, 2), world.home, cp=1).micro_batches[0], world)
    model = prepare_untried(tiny(FAMILIES[0]), world)
    for indexer in find_indexers(model).values():
        indexer.register_forward_hook(lambda _, __, out: shapes.append(out.shape))
    ids = torch.zeros(1, shard.local_rows, dtype=torch.long, device=world.device)
    model(input_ids=ids, position_ids=shard.position_ids[None], shard=shard)
    assert {*shapes} == {(1, K + 2, 0)}


@pytest.mark.skipif(backend() == "nccl", reason="a GPU would be of no more use to this process")
def test_a_recomputed_layer_that_chooses_other_keys_ends(world: World) -> None:
    shard = bind(plan_fixed(LENGTHS, world.home, cp=1).micro_batches[0], world)
    q = torch.zeros(shard.local_rows, 2, 8, device=world.device, requires_grad=True)
    indices = torch.zeros(shard.local_rows, K, dtype=torch.int32, device=world.device)

    def layer(q: Tensor) -> Tensor:
        return attend(q * 1, q * 1, q * 1, shard, indices=indices.clone())

    for change, ends in ((0, False), (1, True)):
        out = checkpoint(layer, q, use_reentrant=False, context_fn=Recording().contexts)
        indices[3, 1] += change
        if ends:
            with pytest.raises(RuntimeError, match="chose other keys than its forward pass did"):
                out.sum().backward()
        else:
            out.sum().backward()
