"""Layers whose rows choose their keys equal the stock model where latents travel in place of expanded keys and values.

Loss and every gradient, that of `kv_b_proj` among them, under every type; where a layer's keys must be expanded, they
are, and it is said. From which length on latents are gathered is one rule.
"""

import re
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn

from longspan import World, bind, plan_fixed
from longspan.model.seams.chosen_keys import latents
from longspan.testing import run_ranks
from tests import parity
from tests.model.seams.families import LENGTHS, here, tiny
from tests.model.seams.test_families import FULL, PP, SELECTIVE, Row, cases_of
from tests.mutation import mutated

FAMILIES = here(["deepseek-v3.2", "a.x-k2", "glm-5", "hy-v4", "dots.3"])
KINDS = ("p2p", "all_gather", "a2a", "a2a+p2p", "dynamic")
MEASURES = (FULL, SELECTIVE, {})
IN_CI: list[Row] = [  # the other families and types are in WHOLE, and what they choose is in test_indexers.py
    *((family, {}, kind, SELECTIVE) for family in FAMILIES[:1] for kind in ("p2p", "a2a+p2p", "dynamic")),
    *((family, PP, "p2p", FULL) for family in here(["glm-5"])),
]
WHOLE: list[Row] = [
    (family, {}, kind, MEASURES[(i + j) % 3]) for i, family in enumerate(FAMILIES) for j, kind in enumerate(KINDS)
]
SEAM = "model.seams.chosen_keys.latents"
CHANGES = {
    "keys of other heads": (SEAM, "query)[0], rotated", "query)[0].flip(0), rotated"),
    "values of other heads": (SEAM, "out)[1].transpose", "out)[1].flip(0).transpose"),
    "no gradient of the weight": (SEAM, "kv_b_proj.weight.to", "kv_b_proj.weight.detach().to"),
}
there = pytest.mark.skipif(not FAMILIES, reason="this transformers has no such class")


def errors(rank: int, cases: dict[str, parity.Case], changes: list[Any]) -> list[dict[str, float]]:
    """Of each change of the source, the largest error of each row, where every layer takes latents."""
    found = list[dict[str, float]]()
    for change in changes:
        fold = Mock(wraps=latents.fold_queries)
        with mutated(change), patch.object(latents, "GATHERED_COST", 0.0), patch.object(latents, "fold_queries", fold):
            found.append({f"{row}, {kind}": max(far) for (row, kind), (far, _) in parity.run(rank, cases).items()})
        assert fold.call_count >= 2 * sum(len(case.plans) for case in cases.values())
    return found


def largest_errors(ranks: int, rows: list[Row], changes: list[Any]) -> list[dict[str, float]]:
    of_ranks = run_ranks(errors, ranks, cases_of(ranks, rows), changes, timeout=300)
    return [{row: max(x[i][row] for x in of_ranks) for row in of_ranks[0][i]} for i in range(len(changes))]


@there
@pytest.mark.parametrize("table", ["few", *(pytest.param(n, marks=pytest.mark.whole) for n in "1234")])
def test_equal_to_expanded_keys(table: str) -> None:
    few = [row for row in WHOLE if row[2][:3] != "a2a"]  # 4 heads are dealt to 2 and 4 ranks
    rows = {"few": IN_CI, "2": WHOLE, "4": WHOLE}.get(table, few)
    ranks = 2 if table == "few" else int(table)
    (found,) = largest_errors(ranks, rows, [None])
    assert len(found) == len(rows) and max(found.values()) < 1e-12, found


@there
@pytest.mark.whole
def test_a_wrong_fold_is_noticed() -> None:
    row = (FAMILIES[0], {}, "all_gather", {})
    right, *wrong = largest_errors(2, [row], [None, *CHANGES.values()])
    assert max(right.values()) < 1e-12 and all(min(found.values()) > 1e-3 for found in wrong), wrong


def changed(linear: nn.Linear, change: str) -> nn.Module:
    """A linear under an adapter, with a hook, or in float8."""
    if change == "has hooks":
        linear.register_forward_hook(lambda *_: None)
    if change == "a forward of its own":
        vars(linear)["forward"] = linear.forward
    return nn.Sequential(linear) if change == "no plain linear" else linear


@there
@pytest.mark.parametrize("change", ["no plain linear", "has hooks", "a forward of its own"])
def test_layers_that_must_be_expanded_are_and_say_so(change: str, world: World) -> None:
    model: Any = tiny(FAMILIES[0])
    modules = [layer.self_attn for layer in model.model.layers]
    modules[0].kv_b_proj = changed(modules[0].kv_b_proj, change)
    text = latents.latents_text(modules, None, torch.float32, torch.device("cpu"))
    assert re.fullmatch(
        rf"gathered where a document has .* tokens or more; expanded in 1 of 2 layers: .*{change}.*", text
    )
    with patch.object(latents, "GATHERED_COST", 0.0):
        shard = bind(plan_fixed(LENGTHS, world.home, cp=1).micro_batches[0], world)
        latent = torch.zeros(1, 1, shard.local_rows, modules[0].kv_lora_rank)
        with pytest.warns(UserWarning, match=f"for a masked kernel: .*{change}"):
            assert not latents.takes_latents(modules[0], shard, None, latent)
        assert latents.takes_latents(modules[1], shard, None, latent)


@there
def test_a_length_or_the_name_of_a_kernel_decides(world: World) -> None:
    model: Any = tiny(FAMILIES[0])
    module = model.model.layers[0].self_attn
    least = latents.min_length_to_gather_latents(module, None)
    for length in (6, 7, least - 1, least):  # 6 keys a row are chosen
        shard = bind(plan_fixed((length, 2), world.home, cp=1).micro_batches[0], world)
        latent = torch.zeros(1, 1, length + 2, module.kv_lora_rank)
        taken = {
            name: latents.takes_latents(module, shard, name, latent)
            for name in (None, "triton_flash", "triton_gathered")
        }
        assert taken == {None: length >= least, "triton_flash": False, "triton_gathered": length > 6}
    module.config.index_topk *= 2
    assert abs(latents.min_length_to_gather_latents(module, None) - 2 * least) <= 1
