"""A vision-language model under other names is exact too: it is recognised by what its class reads, not by a name."""

from functools import cache
from typing import Any

import pytest
import transformers
from transformers import AutoModel, AutoModelForImageTextToText, PreTrainedModel

from longspan import Layout
from longspan.model.exactness.image_trial import try_images
from longspan.testing import run_ranks
from tests.model.seams.renamed import renamed_class
from tests.model.stock import random_model
from tests.model.vision.documents import Answer, answer_of
from tests.model.vision.joined import BOUND, Case, step
from tests.model.vision.models import config_of

pytestmark = pytest.mark.skipif(not hasattr(transformers, "Gemma4UnifiedConfig"), reason="is of a later transformers")

KINDS = {"gemma4-spans": "Gemma4", "gemma4-unified": "Gemma4Unified"}
CASES = [Case(name, Layout(2), Layout(2), cp=2) for name in KINDS]


@cache
def renamed_config(name: str) -> Any:
    """A configuration of another type, for which transformers makes copies of the classes under other names."""
    kind, config = KINDS[name], config_of(name)
    new = f"Own{kind}"
    model = renamed_class(getattr(transformers, f"{kind}ForConditionalGeneration"), kind, new)
    base = renamed_class(getattr(transformers, f"{kind}Model"), kind, new)
    own = type(f"{new}Config", (type(config),), {"model_type": new.lower(), "__annotations__": {}})
    base.config_class = model.config_class = own
    AutoModel.register(own, base)
    AutoModelForImageTextToText.register(own, model)
    return own(**{key: value for key, value in config.to_dict().items() if key != "model_type"})


def renamed(name: str) -> PreTrainedModel:
    return random_model(renamed_config(name), make=AutoModelForImageTextToText.from_config)


def errors_of(rank: int, answers: dict[str, Answer]) -> dict[str, float]:
    return {case.name: max(step(case, answers[case.name], make=lambda: renamed(case.name)).values()) for case in CASES}  # noqa: B023


@pytest.mark.whole
def test_a_renamed_copy_is_exact() -> None:
    answers = {name: answer_of(name, make=lambda: renamed(name)) for name in KINDS}  # noqa: B023
    for name in KINDS:
        assert type(renamed(name)).__name__.startswith("Own")
    for errors in run_ranks(errors_of, 2, answers, timeout=200):
        assert len(errors) == 2 and max(errors.values()) < BOUND, errors


def test_layers_that_see_an_image_are_told_by_masks() -> None:
    sliding, full = "sliding_attention", "full_attention"
    spans = {name: dict(try_images(config_of(name)).spans) for name in ("gemma4", "llava-clip", "gemma3", *KINDS)}
    assert spans == {
        "gemma4": {},
        "llava-clip": {},
        "gemma3": {sliding: "later", full: "whole"},
        "gemma4-spans": {sliding: "later", full: "none"},
        "gemma4-unified": {sliding: "whole", full: "whole"},
    }
    assert try_images(renamed_config("gemma4-spans")).spans == spans["gemma4-spans"]
