"""What plans read from a config.json that leaves a value out, beside what transformers' class makes of it."""

import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import transformers
from bench.census.class_defaults import FILE, NOT_SIZES, SECTIONS, attributes_of_plans, read_classes
from bench.census.images import image_names
from bench.census.models import default_config, names
from transformers import CONFIG_MAPPING, PreTrainedConfig

from longspan.errors import PlanError
from longspan.plan import ModelShape
from longspan.plan.items.encoder_shape import EncoderShape
from longspan.plan.shape.class_defaults import default_section_type
from longspan.plan.shape.positions import position_limit
from longspan.plan.shape.sharing_rules import read_sharing_rules

READERS = (ModelShape.of, EncoderShape.of, position_limit, read_sharing_rules)
DAILY = ("gemma2", "gemma3", "gpt_bigcode", "qwen3_moe")


def make_config(name: str) -> PreTrainedConfig | None:
    in_census = name.partition("+")[0] in names()
    try:
        return default_config(name) if in_census else CONFIG_MAPPING[name]()
    except Exception:  # its class needs values
        return None


def files(values: Mapping[str, Any], attributes: set[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield files that leave one value out, with its name: of the model, or of one of its sections."""
    for key in sorted(attributes & {*values}):
        yield key, {name: value for name, value in values.items() if name != key}
    for section in (name for name in SECTIONS if isinstance(values.get(name), dict)):
        for key, inner in files(values[section], attributes | {"model_type"}):
            yield f"{section}.{key}", dict(values) | {section: inner}
    if "text_config" in values and not default_section_type(values["model_type"], "text_config"):
        yield "vision_config", {name: value for name, value in values.items() if name != "vision_config"}


def answers(config: Any) -> list[Any]:
    """What each reader says; a PlanError is no silent number, and classes cannot tell sizes that differ by layer."""
    said = list[Any]()
    for reader in READERS:
        try:
            said.append(reader(config))
        except (PlanError, RuntimeError, AttributeError):
            said.append(None)
    return said


def compare(chosen: list[str], caplog: pytest.LogCaptureFixture) -> int:
    """Compare what is read from each file with what is read from its class's object; return how many were compared."""
    caplog.set_level(logging.CRITICAL)
    attributes = {name for name in attributes_of_plans() if name not in NOT_SIZES}
    compared = 0
    wrong = list[str]()
    for name in chosen:
        config = make_config(name)
        for key, values in files(config.to_dict(), attributes) if config else ():
            try:
                made = type(config)(**values)
            except Exception:  # a class may refuse a file
                continue
            pairs = [pair for pair in zip(answers(values), answers(made), strict=True) if None not in pair]
            compared += len(pairs)
            wrong += [f"{name} without {key}: {read}, its class: {made}" for read, made in pairs if read != made]
    assert not wrong
    return compared


def test_what_a_file_leaves_out_is_what_its_class_makes_of_it(caplog: pytest.LogCaptureFixture) -> None:
    assert compare(list(DAILY), caplog) > 180


@pytest.mark.whole
def test_what_a_file_of_any_class_leaves_out_is_what_its_class_makes_of_it(caplog: pytest.LogCaptureFixture) -> None:
    # One class halves its window, and no run takes it; the other's file counts attention and MLPs as layers apart.
    chosen = {*names(), *image_names()} - {"gemma3_text+bidirectional", "dory"}
    assert compare(sorted(chosen), caplog) > 5000


@pytest.mark.whole
def test_the_file_of_defaults_is_what_the_classes_say() -> None:
    written = json.loads(FILE.read_text(encoding="utf-8"))
    if written["transformers"] != transformers.__version__:
        pytest.skip(f"the file is that of transformers {written['transformers']}")
    assert read_classes() == written


def test_gemma_2_has_heads_of_256_numbers_and_one_matrix_of_words() -> None:
    values = {"model_type": "gemma2", "hidden_size": 3584, "num_hidden_layers": 42, "intermediate_size": 14336}
    values |= {"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 256000}  # of the 9B
    shape = ModelShape.of(values)
    assert (shape.query_width, shape.key_width) == (16 * 256, 8 * 256)
    layer = 3584 * (2 * 16 + 2 * 8) * 256 + 3 * 3584 * 14336
    assert shape.stored_weights == 42 * layer + 3584 * 256000
    untied = ModelShape.of(values | {"tie_word_embeddings": False})
    assert untied.stored_weights - shape.stored_weights == 3584 * 256000
