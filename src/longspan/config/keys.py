"""What a key of the configuration is: its type, bounds and default, and how the keys of a section are read and set.

No key stands here, nothing is decided, and torch is not imported.
"""

import ast
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from keyword import iskeyword
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_type_hints

from longspan.errors import ConfigError

AnySection = TypeVar("AnySection", bound=Any)
AUTO = "auto"  # a value that the run chooses
# A key whose default depends on other keys is this until `resolve_defaults`; types of keys are those that it has then.
NOT_GIVEN: Any = None
FIRST = ("name", "path")  # keys that begin a table


@dataclass(frozen=True)
class AtLeast:
    """The smallest value that a key may have (`value`), the largest (`most`), and one that it must be `below`.

    Of a list it bounds each entry.
    """

    value: int
    most: float = math.inf
    below: float = math.inf

    def allows(self, number: float) -> bool:
        return self.value <= number <= self.most and number < self.below

    def __str__(self) -> str:
        most = f", at most {self.most}" if self.most < math.inf else ""
        return f"at least {self.value}{most}" + (f", below {self.below}" if self.below < math.inf else "")


@dataclass(frozen=True)
class Above(AtLeast):
    """A number that a key must exceed, and the largest value that it may have."""

    def allows(self, number: float) -> bool:
        return self.value < number and super().allows(number)

    def __str__(self) -> str:
        return super().__str__().replace("at least", "above")


@dataclass(frozen=True)
class Needs:
    """Another key (section.key), and the values of it without which this key would do nothing, or nothing exact; with
    `value` only that value of this key needs them.
    """

    key: str
    values: AtLeast | tuple[str | int, ...]
    value: str = ""

    def allows(self, value: Any) -> bool:
        if isinstance(self.values, AtLeast):
            return self.values.allows(value)
        return value in self.values

    def __str__(self) -> str:
        values = self.values
        return f"{self.key} {values if isinstance(values, AtLeast) else ' or '.join(map(repr, values))}"


PositiveInt = Annotated[int, AtLeast(1)]
NonNegativeInt = Annotated[int, AtLeast(0)]
PositiveFloat = Annotated[float, Above(0)]
NonNegativeFloat = Annotated[float, AtLeast(0)]


@dataclass(frozen=True)
class Key:
    """A key of a section or table as files and flags name it: the type of its value, its bounds and its default."""

    name: str
    kind: Any
    bound: AtLeast | None
    default: Any
    needs: tuple[Needs, ...] = ()


@dataclass(frozen=True)
class Section:
    """A section or table of the configuration. The values of its keys are checked one by one where it is made."""

    # Files name the section so.
    SECTION: ClassVar[str] = ""
    INHERITED: ClassVar[tuple[str, ...]] = ()  # fields that are no keys: they have the values of another section

    @property
    def prefix(self) -> str:
        """How messages name the section before a key of it."""
        return f"{self.SECTION}."

    def __post_init__(self) -> None:
        for key in section_keys(type(self)):
            value = key_value(self, key.name)
            if key.bound is None or value in (key.default, AUTO):
                continue
            name = f"{self.prefix}{key.name}"
            if name.endswith("max_document_tokens") and value == 1:
                raise ConfigError(f"{name} is 1; a document of one token predicts nothing: use 2 or more")
            if isinstance(value, str):
                raise ConfigError(f'{name} is {value!r}; give a number, or "{AUTO}"')
            numbers = value if isinstance(value, tuple) else (value,)
            if not all(map(math.isfinite, numbers)):
                raise ConfigError(f"{name} is {value}; it must be a finite number, {key.bound}")
            if not all(map(key.bound.allows, numbers)):
                raise ConfigError(f"{name} is {value}; it must be {key.bound}")


@cache
def section_keys(kind: type[Any]) -> tuple[Key, ...]:
    """List the keys of a section or table, in order."""
    kinds = get_type_hints(kind)
    marked = get_type_hints(kind, include_extras=True)
    keys: list[Key] = []
    for field in (field for field in fields(kind) if field.name not in getattr(kind, "INHERITED", ())):
        marks = getattr(marked[field.name], "__metadata__", ())
        bound = next((mark for mark in marks if isinstance(mark, AtLeast)), None)
        needs = tuple(mark for mark in marks if isinstance(mark, Needs))
        name = field.name.removesuffix("_")  # optimizer.class is a word of Python: class_
        keys.append(Key(name, kinds[field.name], bound, field.default, needs))
    return tuple(sorted(keys, key=lambda key: FIRST.index(key.name) if key.name in FIRST else len(FIRST)))


def _attribute(key: str) -> str:
    """A word of Python has a "_" behind it (optimizer.class is `class_`)."""
    return f"{key}_" if iskeyword(key) else key


def key_value(section: Any, key: str) -> Any:
    """Return the value of a key of a section, as files name the key."""
    return getattr(section, _attribute(key))


def with_key_values(section: AnySection, values: Mapping[str, Any]) -> AnySection:
    """Return a section with other values of keys, as files name the keys."""
    return replace(section, **{_attribute(key): value for key, value in values.items()})


def key_values(section: Any) -> dict[str, Any]:
    """Return the values of all keys of a section or table, as files name the keys; tables as dictionaries."""
    values = {key.name: key_value(section, key.name) for key in section_keys(type(section))}
    for name, value in values.items():
        if isinstance(value, tuple):
            values[name] = tuple(key_values(item) if is_dataclass(item) else item for item in value)
    return values


@cache
def section_texts(kind: type[Any]) -> Mapping[str, str]:
    """Return the text of every key of a section or table: the string under it in the source; of a class and its bases,
    which may each have one, the class's own.
    """
    texts = dict[str, str]()
    for base in reversed(kind.__mro__[:-1]):
        texts |= read_own_texts(base)
    return texts


def read_own_texts(kind: type) -> dict[str, str]:
    """Read the texts under the keys that one class declares, without those of its bases, from its source file."""
    (section,) = (
        node
        for node in ast.parse(Path(inspect.getfile(kind)).read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    )
    texts = dict[str, str]()
    for key, text in zip(section.body, section.body[1:], strict=False):
        match key, text:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(words))):
                texts[name.removesuffix("_")] = " ".join(words.split())
            case _:
                pass
    return texts
