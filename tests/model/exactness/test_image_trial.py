"""What a model does with images, tried with a small copy: rows at placeholders and positions, or more than that."""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, PreTrainedConfig

from longspan.errors import ModelError
from longspan.model.exactness import image_trial, small_copies
from longspan.model.exactness.image_trial import image_reasons, video_tokens
from tests.model.vision.models import config_of

EXACT = {"llava_next": "tiles, unpadded, and rows that end lines"}
FIELDS = ["deepseek_vl_hybrid", "granite_docling", "idefics2", "idefics3", "lfm2_vl", "smolvlm", "video_llama_3"]
WHOLE = [*FIELDS, "mistral3", "aya_vision", "cohere2_vision", "glm4v", "internvl", "llava_onevision", "qwen3_vl_moe"]


def default(name: str) -> PreTrainedConfig:
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
    return CONFIG_MAPPING[name]()


@pytest.mark.parametrize("name", [*EXACT, *(pytest.param(name, marks=pytest.mark.whole) for name in WHOLE)])
def test_images_that_enter_as_rows_and_positions_alone(name: str) -> None:
    assert image_reasons(default(name)) == ()


def test_images_that_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    assert image_reasons(config_of("paligemma")) == ()
    monkeypatch.setattr(small_copies, "_results", {})
    monkeypatch.setattr(image_trial, "SEEN_BY_IMAGES", ())
    (reason,) = image_reasons(config_of("gemma3"))
    assert reason.startswith("it does more with images than put their rows in the places of their placeholders: logits")


def _without_deeper(add: Callable[..., Any]) -> Callable[..., Any]:
    return lambda model, places, rows, hooks: add(model, places, rows[:1], hooks)


def _plain_positions(document: Callable[..., Any]) -> Callable[..., Any]:
    def plain(tokens: Any, *more: Any) -> Any:
        made = document(tokens, *more)
        return image_trial.TrialDocument(made.ids, made.images, made.rows, None, made.at_images)

    return plain


MUTANTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "no parts for deeper layers": (image_trial, "_hook_image_rows", _without_deeper),
    "positions of the text": (image_trial, "_make_document", _plain_positions),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_what_is_done_otherwise_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, attribute, change = MUTANTS[name]
    monkeypatch.setattr(small_copies, "_results", {})
    monkeypatch.setattr(module, attribute, change(getattr(module, attribute)))
    (reason,) = image_reasons(config_of("qwen3-vl"))
    assert "logits differ by" in reason


VIDEOS = ["qwen3-vl", *(pytest.param(n, marks=pytest.mark.whole) for n in ("qwen2-vl", "qwen2.5-vl", "qwen3.5"))]


@pytest.mark.parametrize("name", VIDEOS)
def test_videos_that_enter_as_groups_of_frames(name: str) -> None:
    assert video_tokens(config_of(name)).placeholder == 59


@pytest.mark.whole
def test_videos_of_other_placeholders_are_refused() -> None:
    with pytest.raises(ModelError, match=r"\(glm4v\) cannot be given videos: .* do not match, tokens: 4, features"):
        video_tokens(default("glm4v"))
