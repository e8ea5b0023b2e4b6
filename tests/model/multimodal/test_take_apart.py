"""A vision-language model as two modules that share its weights, and what has no such parts."""

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from longspan import Layout, World, load_model, prepare
from longspan.errors import DataError, ModelError
from longspan.model.multimodal.image_modules import freeze_image_modules
from longspan.model.multimodal.take_apart import image_cost, split_off_image_encoder_or_undo
from longspan.model.seams.call_rules import is_prepared
from longspan.model.vision.image_encoder import split_off_image_encoder
from longspan.model.vision.image_inputs import ImageInput, image_arguments
from longspan.testing import run_ranks
from tests.model.seams.wrappers import tiny as wrapper
from tests.model.stock import tiny as text_model, weights_of
from tests.model.vision.models import config_of, here, tiny

LIKE = torch.zeros(1)


@pytest.mark.parametrize("name", here())
def test_parts_share_the_weights_under_the_names_of_the_whole(name: str) -> None:
    model = tiny(name)
    whole = dict(model.named_parameters())
    encoder = split_off_image_encoder(model)
    made = dict(encoder.named_parameters()) | dict(model.named_parameters())
    assert made.keys() == whole.keys() and all(made[n] is whole[n] for n in whole)
    assert encoder.deep_layers == (2 if name.startswith("qwen3-vl") else 0)
    cost = image_cost(model.config, encoder, again=0, gpu=False)
    assert cost.linear_seconds > 0 and (cost.attention_seconds > 0) == (name != "gemma4-unified")


def test_an_error_leaves_the_model_whole() -> None:
    model = tiny("qwen3-vl")
    names = [name for name, _ in model.named_modules()]
    with pytest.raises(ModelError, match="x"), split_off_image_encoder_or_undo(model):
        assert len([*model.named_modules()]) < len(names)
        raise ModelError("x")
    assert [name for name, _ in model.named_modules()] == names


def _refused(model: PreTrainedModel | nn.Module, encoder: object) -> str:
    with World(Layout(1), backend="gloo") as world, pytest.raises(ModelError) as refused:
        prepare(model, world, encoder=encoder)  # pyright: ignore[reportCallIssue, reportArgumentType]
    assert not is_prepared(model)
    return str(refused.value)


def test_refusals() -> None:
    assert "Qwen3ForCausalLM has no tower and projector for images" in _refused(text_model("qwen3"), Layout(1))
    assert "Gemma4ForConditionalGeneration has no tower and projector for images" in _refused(
        wrapper("gemma4", vision=None), Layout(1)
    )
    (model := tiny("llava-clip")).config.image_token_id = 62
    assert "placeholders of images are token id 62, and its embedding has 62 rows" in _refused(model, Layout(1))
    assert "encoder is a int; give a Layout over the language model's ranks" in _refused(tiny("llava-clip"), 2)
    assert "is over ranks (0, 1), the language model over (0)" in _refused(tiny("llava-clip"), Layout(2))


@pytest.mark.skipif("gemma4-audio" not in here(), reason="transformers has no Gemma 4 yet")
def test_what_a_model_has_for_audio_is_frozen_and_refused_by_name() -> None:
    model = tiny("gemma4-audio")
    freeze_image_modules(model, "projector")
    towers = {name for name, p in model.named_parameters() if p.requires_grad and "language_model" not in name}
    assert towers == {"model.embed_vision.embedding_projection.weight"}
    model = tiny("gemma4-audio")
    with pytest.raises(DataError, match="images have input_features, and get_image_features of Gemma4Model takes"):
        image_arguments(model.model, [ImageInput(torch.zeros(1), fields={"input_features": torch.zeros(1)})], LIKE)
    with World(Layout(1), backend="gloo") as world:
        joined = prepare(model, world, encoder=Layout(1))
    sounds = {name: p.requires_grad for name, p in joined.named_parameters() if "audio" in name}
    assert len(sounds) > 2 and not any(sounds.values())
    assert all(p.requires_grad for name, p in joined.named_parameters() if name not in sounds)


@pytest.mark.whole
def test_deep_layers_of_a_later_stage_are_refused() -> None:
    for message in run_ranks(_of_stages, 4):
        assert "are added after 2 decoder layers, and the first of 4 pipeline stages has 1; use fewer stages" in message


def _of_stages(rank: int) -> str:
    with World(Layout(4, pp=4), backend="gloo") as world, pytest.raises(ModelError) as refused:
        prepare(tiny("qwen3-vl"), world, encoder=Layout(4))
    return str(refused.value)


# ---- drawn at random


def test_random_weights_and_the_class_of_a_configuration() -> None:
    names = {name for name, _ in tiny("llava-clip").named_parameters()}
    for sharded in (False, True):
        model = load_model(config=config_of("llava-clip"), sharded=sharded)
        assert {name for name, _ in model.named_parameters()} == names
        with World(Layout(1), backend="gloo") as world:
            joined = prepare(model, world, encoder=Layout(1))
            assert all(x.isfinite().all() and not x.is_meta for x in weights_of(joined).values())
    assert type(load_model(config=config_of("qwen3.5"), images=True)).__name__ == "Qwen3_5ForConditionalGeneration"
    with pytest.raises(ModelError, match="LlamaConfig stands for no model from images and text to text"):
        load_model(config=config_of("llava-clip").get_text_config(), images=True)
