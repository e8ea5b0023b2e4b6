"""The mask of images whose tokens see each other never vanishes without an error."""

from dataclasses import replace

import pytest
import torch

from longspan import Document, Layout, MultimodalModel, World, bind, plan_fixed, prepare
from longspan.comm import SequenceShard
from longspan.errors import DataError, ModelError
from longspan.model.seams.call_rules import CallRules
from longspan.plan import Group, MicroBatch
from longspan.plan.items.item_table import ItemTable, MediaItem
from longspan.train.rows.visible_spans import bind_spans, count_prefix_rows
from tests.model.vision.models import tiny


def test_calls_say_which_rows_see_each_other(world: World) -> None:
    model = prepare(tiny("gemma3"), world, encoder=Layout(1))
    shard = bind(plan_fixed([5, 3], world.home, cp=1).micro_batches[0], world)
    inputs = {"input_ids": torch.arange(8)[None], "position_ids": shard.position_ids[None]}
    with pytest.raises(ModelError, match="image see each other, and the shard of 2 documents says nothing"):
        model.language_model(**inputs, shard=shard)
    causal = model.language_model(**inputs, shard=shard.with_spans({})).logits
    spans = model.language_model(**inputs, shard=shard.with_spans({0: [(1, 4)]})).logits
    same = torch.isclose(causal, spans, rtol=1e-5).all(-1)[0].tolist()
    assert same == [True, False, False, False, False, True, True, True]  # row 3 in the second layer
    alone = {"image": replace(model.encoder_settings["image"], in_spans=False)}
    with pytest.raises(ModelError, match=r"see each other in gemma3, and none of its 1 encoders says so"):
        MultimodalModel(alone, model.language_model, world)


LONG, SHORT = Document(range(8), labels=[-100] * 6 + [6, 7]), list(range(8))


def test_a_prefix_is_what_stands_before_the_first_target() -> None:
    items = ItemTable([8, 8], [MediaItem(1, ((0, 3),))])
    assert [count_prefix_rows(*of) for of in ((LONG, 0, 8), (SHORT, 0, 8), ([5], 0, 1))] == [6, 1, 1]
    assert count_prefix_rows(SHORT, 1, 8, items) == 3
    assert count_prefix_rows(Document([1, 2], loss_mask=[0, 0]), 0, 2) == 2
    shard = SequenceShard(MicroBatch((Group((0,), (0, 1), (8, 8)),)), 0, -1, torch.device("cpu"))
    rules = CallRules("PaliGemma", prefix=True, prefix_window=6)
    (spans,) = bind_spans(shard, rules, [LONG, SHORT], None).spans or ()
    assert [*spans.start] == [0] and [*spans.stop] == [6]
    with pytest.raises(DataError, match="document 0 has a prefix of 6 rows, and layers of PaliGemma a window of 5"):
        bind_spans(shard, replace(rules, prefix_window=5), [LONG, SHORT], None)
    with pytest.raises(ModelError, match="PaliGemma: rows of a prefix see each other, and the shard of 2 documents"):
        rules.check_shard(shard)
