"""Documents beyond a model's positions: refused before the first step, or its positions are scaled by key."""

import pytest
from transformers import NemotronHConfig, Qwen3Config

from longspan.config.sections import ModelConfig
from longspan.errors import ConfigError
from longspan.train.training import scale_positions

KNOWN = Qwen3Config(max_position_embeddings=100)


def test_a_longest_document_that_is_known_changes_nothing() -> None:
    lines = list[str]()
    assert scale_positions(KNOWN, ModelConfig(), 100, "a.txt", lines.append) is KNOWN and not lines
    assert scale_positions(KNOWN, ModelConfig(rope_scaling="yarn"), 100, "a.txt", lines.append) is KNOWN
    assert lines == [
        'rope: the longest document has 100 tokens and the model knows 100: model.rope_scaling = "yarn" changes nothing'
    ]


def test_a_factor_is_chosen_and_said() -> None:
    lines = list[str]()
    scaled = scale_positions(KNOWN, ModelConfig(rope_scaling="yarn"), 130, "a.txt", lines.append)
    assert scaled.rope_parameters["factor"] == 1.5 and scaled.max_position_embeddings == 150
    assert lines == [
        "rope: yarn by 1.5, for documents of up to 150 tokens; the model knows 100, and the longest document has 130"
    ]
    given = scale_positions(KNOWN, ModelConfig(rope_scaling="linear", rope_factor=4.0), 130, "a.txt", lines.append)
    assert given.rope_parameters["factor"] == 4.0


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            ModelConfig(),
            r'130 tokens \(a.txt\), and the model knows 100 positions .* model.rope_scaling = "yarn" \(a '
            r"factor of 1.5\), or cut documents with data.max_document_tokens = 100",
        ),
        (
            ModelConfig(rope_scaling="yarn", rope_factor=1.25),
            r"knows 125 positions under model.rope_factor 1.25 .*; raise "
            r"model.rope_factor to 1.5",
        ),
    ],
    ids=["no scaling", "a factor that is too small"],
)
def test_longer_documents_are_refused(model: ModelConfig, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        scale_positions(KNOWN, model, 130, "a.txt", print)


def test_attention_without_positions_knows_documents_of_any_length() -> None:
    config, lines = NemotronHConfig(max_position_embeddings=100), list[str]()
    assert scale_positions(config, ModelConfig(), 100, "a.txt", lines.append) is config and not lines
    assert scale_positions(config, ModelConfig(), 130, "a.txt", lines.append) is config
    assert lines == [
        "the longest document has 130 tokens, more than max_position_embeddings, 100, which limits nothing: attention "
        "of nemotron_h has no positions"
    ]
