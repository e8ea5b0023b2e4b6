"""Arguments of a trainer by name, whatever the constructor of a subclass takes."""

import pickle
from typing import Any

import pytest
from transformers import HfArgumentParser, Trainer, TrainingArguments

from longspan.errors import ConfigError
from longspan.hf import LongspanArguments
from longspan.hf.trainer import GivenArguments


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
    assert "train_dataset" in found.parameter_names
    positional, keywords = found.call_with(mine)
    values = (*positional, *keywords.values())
    assert not any(value is stock for value in values)
    assert any(value is mine for value in values)


def test_a_constructor_must_take_arguments() -> None:
    """What it takes is named."""
    with pytest.raises(ConfigError, match="takes model, and longspan must give it args"):
        given(Makes, "model").call_with(bare())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"context_parallel_size": 0}, "context_parallel_size is 0"),
        ({"memory_bytes": -1}, "^memory_bytes is -1"),
        ({"memory_bytes": -1}, "^memory_bytes is -1"),
    ],
)
def test_numbers_of_keys_have_bounds(keys: dict[str, Any], message: str) -> None:
    """As in `longspan train`."""
    with pytest.raises(ConfigError, match=message):
        LongspanArguments(**keys).home(4)


def test_keys_are_read_from_a_command_line() -> None:
    """Lists, "auto", numbers where a text may stand."""
    words = [
        "--hierarchical_context_parallel_sizes",
        "2",
        "2",
        "--context_parallel_size",
        "4",
        "--cp_comm_type",
        "a2a+p2p",
    ]
    words += [
        "--max_tokens_per_slot",
        "512",
        "--eval_context_parallel_size",
        "auto",
        "--reshard_after_forward",
        "false",
    ]
    (keys,) = HfArgumentParser(LongspanArguments).parse_args_into_dataclasses(words)  # pyright: ignore[reportArgumentType]
    assert keys.home(4).slots == 4
    assert keys.config().context.hierarchical_context_parallel_sizes == (2, 2)
    assert LongspanArguments(max_tokens_per_slot=512).config().context.max_tokens_per_slot == 512  # pyright: ignore[reportArgumentType]
    assert pickle.loads(pickle.dumps(keys)) == keys
