"""The mask of images whose tokens see each other never vanishes without an error."""

from dataclasses import replace

import pytest
import torch

from longspan import Layout, MultimodalModel, World, bind, plan_fixed, prepare
from longspan.errors import ModelError
from longspan.testing import backend, run_ranks
from tests.model.vision.documents import answer_of
from tests.model.vision.joined import Case, step
from tests.model.vision.models import tiny
from tests.mutation import mutated


def test_calls_say_which_rows_see_each_other() -> None:
    with World(Layout(1), backend=backend()) as world:
        model = prepare(tiny("gemma3"), world, encoder=Layout(1), probe=False)
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


@pytest.mark.whole
def test_steps_that_say_nothing_of_them_are_refused_on_every_rank() -> None:
    for message in [*run_ranks(_refused, 2, 1), *run_ranks(_refused, 2, 2)]:
        assert "rows of image see each other, and the shard of" in message


def _refused(rank: int, pp: int) -> str:
    silent = ("train.reading.local_batch", "modalities = call_rules(model).in_spans", "modalities = ()")
    with mutated(silent), pytest.raises(ModelError) as refused:
        step(Case("gemma3", Layout(2, pp=pp), Layout(2), 1), answer_of("gemma3"))
    return str(refused.value)
