"""Arguments of a trainer by name, whatever the constructor of a subclass takes."""

from typing import Any

import pytest
from transformers import Trainer, TrainingArguments

from longspan.errors import ConfigError
from longspan.hf.construction import GivenArguments


class PassesAll(Trainer):
    """Passes everything on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class PassesRest(Trainer):
    """Takes the model, and a number of its own."""

    def __init__(self, model: Any, *args: Any, weight: float = 1.0, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)


class Makes(Trainer):
    """Makes its arguments."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, TrainingArguments())


def given(kind: type[Trainer], *args: Any, **keywords: Any) -> GivenArguments:
    """What a trainer of this class gets, as `with_longspan` asks for it."""
    mine = type("Mine", (kind,), {})
    return GivenArguments(mine, kind.__init__.__get__(object()), args, keywords)


def bare() -> TrainingArguments:
    """Arguments that start nothing."""
    return TrainingArguments.__new__(TrainingArguments)


@pytest.mark.parametrize("kind", [Trainer, PassesAll, PassesRest])
@pytest.mark.parametrize("named", [False, True])
def test_arguments_are_found_and_replaced(kind: type[Trainer], named: bool) -> None:
    """By position and by keyword."""
    stock, mine = bare(), bare()
    found = given(kind, "model", args=stock) if named else given(kind, "model", stock)
    assert found.args is stock
    assert "train_dataset" in found.takes
    positional, keywords = found.call_with(mine)
    values = (*positional, *keywords.values())
    assert not any(value is stock for value in values)
    assert any(value is mine for value in values)


def test_a_constructor_must_take_arguments() -> None:
    """What it takes is named."""
    with pytest.raises(ConfigError, match="takes model, and longspan must give it args"):
        given(Makes, "model").call_with(bare())
