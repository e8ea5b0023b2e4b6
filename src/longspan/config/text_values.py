"""Values that a key holds as a short text: "name=value", "word:number", a figure, or a group of parameters."""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from longspan.config.keys import AtLeast
from longspan.errors import ConfigError

_ORDERS = "higher", "lower"


@dataclass(frozen=True)
class BestFigure:
    """Which figure of which evaluation set is compared, and whether the highest or the lowest is the best.

    >>> BestFigure.from_text("code/eval_token_accuracy:higher")
    BestFigure(set='code', column='eval_token_accuracy', higher=True)
    """

    set: str
    column: str
    higher: bool

    @classmethod
    def from_text(cls, text: str) -> "BestFigure":
        """Read the figure that `checkpoint.keep_best` names. Raises ConfigError for a text that names none."""
        figure, _, order = text.partition(":")
        name, _, rest = figure.rpartition("/eval_")  # figures of preferences have a / too
        column = f"eval_{rest}" if name else figure
        if not column.startswith("eval_") or (order and order not in _ORDERS):
            raise ConfigError(
                f"checkpoint.keep_best is {text!r}; give a figure of an evaluation as metrics.jsonl has it, such as "
                "eval_loss, with the name of its set before it (code/eval_loss) and :higher after it where more is "
                "better"
            )
        return cls(name, column, order == "higher")

    @property
    def name(self) -> str:
        """The figure as `checkpoint.keep_best` names it, without its order."""
        return f"{self.set}/{self.column}" if self.set else self.column

    def check_sets(self, names: Collection[str]) -> None:
        """Raise ConfigError for a set that is not evaluated; `names` are the run's sets, "" the held-out documents."""
        if self.set in names:
            return
        names_text = ", ".join(sorted(filter(None, names))) or "none"
        absent = f"the set {self.set!r}" if self.set else "documents that are held out (evaluation.documents)"
        raise ConfigError(
            f"checkpoint.keep_best names {self.column} of {absent}, which the run has not; its sets: {names_text}"
        )

    def figure_in_row(self, row: Mapping[str, Any]) -> float | None:
        """Return the figure in the row of an evaluation; None for that of another set. Raises ConfigError for an
        unknown figure.
        """
        if row.get("eval_name", "") != self.set:
            return None
        if self.column not in row:
            columns = ", ".join(name for name in row if name.startswith("eval_") and name != "eval_name")
            raise ConfigError(f"checkpoint.keep_best names {self.column}, and the evaluation has {columns}")
        return row[self.column]


@dataclass(frozen=True)
class NamedGroup:
    """Parameters by a pattern of their names, and the learning rate and weight decay of their own that they have.

    >>> NamedGroup.from_text("embed* lr=1e-5")
    NamedGroup(pattern='embed*', lr=1e-05, weight_decay=None)
    """

    pattern: str
    lr: float | None = None
    weight_decay: float | None = None

    @classmethod
    def from_text(cls, text: str) -> "NamedGroup":
        """Read an entry of `optimizer.groups`. Raises ConfigError for a text that is none."""
        pattern, *settings = text.split() or [""]
        pairs = [setting.partition("=")[::2] for setting in settings]
        values = dict[str, float]()
        # A value may be no number.
        with suppress(ValueError):
            values = {name: float(value) for name, value in pairs}
        names = values.keys()  # fewer than the pairs where a name stands twice; none where a value is no number
        are_allowed = all(map(math.isfinite, values.values())) and values.get("lr", 1) > 0
        if not names or len(names) < len(pairs) or names - {"lr", "weight_decay"} or not are_allowed:
            raise ConfigError(
                f"optimizer.groups has {text!r}; give a pattern of names with lr= above 0, weight_decay= or both, as "
                "in 'embed* lr=1e-5 weight_decay=0'; train.freeze leaves parameters as they are"
            )
        if values.get("weight_decay", 0) < 0:
            raise ConfigError(f"optimizer.groups has {text!r}; weight_decay must be at least 0")
        return cls(pattern, **values)


def read_arguments(name: str, texts: Sequence[str]) -> dict[str, Any]:
    """Read arguments written as "momentum=0.9", with values as in JSON; a value that is not JSON is a string.

    >>> read_arguments("optimizer.arguments", ("momentum=0.9", "nesterov=true"))
    {'momentum': 0.9, 'nesterov': True}

    Raises ConfigError, which names the key `name`, for a text without "=".
    """
    arguments = dict[str, Any]()
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f'{name} has {text!r}; write name=value, as in "beta=0.9"')
        try:
            arguments[key] = json.loads(value)
        except ValueError:
            arguments[key] = value
    return arguments


def read_word_and_number(name: str, text: str, words: Mapping[str, AtLeast | None]) -> tuple[str, float]:
    """Read a text "word" or "word:number"; return the word and the number, 0 where none is given.

    `words` has the bound of each word's number; None where it takes none.

    >>> read_word_and_number("optimizer.lr_schedule", "wsd:200", {"cosine": None, "wsd": AtLeast(1)})
    ('wsd', 200.0)

    Raises ConfigError, which names the key `name`, for another text.
    """
    word, colon, rest = text.partition(":")
    bound = words.get(word)
    number = 0.0
    # What is no number is 0, which is outside every bound.
    with suppress(ValueError):
        number = float(rest or 0)
    if word in words and (not colon or (bound is not None and bound.allows(number))):
        return word, number
    forms = ", ".join(
        repr(known_word) + (f" or '{known_word}:NUMBER' ({number_bound})" if number_bound else "")
        for known_word, number_bound in words.items()
    )
    raise ConfigError(f"{name} is {text!r}; give {forms}")
