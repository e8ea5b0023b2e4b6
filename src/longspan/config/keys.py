"""What a key of the configuration is: its type, bounds and default, and how the keys of a section are read and set.

No key stands here, nothing is decided, and torch is not imported.
"""

import ast
import inspect
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

from longspan.errors import ConfigError

Section = TypeVar("Section", bound=Any)
AUTO = "auto"  # a value that the run chooses
NOT_GIVEN = -1  # of a number whose default depends on other keys; of a word it is ""
GONE = "it is gone; docs/upgrade.md says what to write instead"
# Values of keys that are gone, which every run of version 0.2 has in its config.toml; they are read over.
GONE_VALUES: dict[str, tuple[object, ...]] = {
    "context.mixer_kernels": ([],),
    "context.cost_model": ("",),
    "context.plan_ahead": (2,),
    "train.memory_history": (0,),
    "train.recompute_layers": (0,),
    "train.segment_layers": (0,),
    "context.eval_attention_kernel": ("",),
    "context.eval_partition": ("auto", "zigzag", "contiguous"),
    "data.check_images": ("headers",),
    "data.pack_to": (0,),
    "data.pack_attention": ("document",),
    "data.date_string": ("26 Jul 2024",),
    "data.workers": (0,),  # one process a core, of those that `taskset` leaves it
    "train.eps": (1e-8,),  # optimizer_arguments = ["eps=1e-6"]
    "train.eval_document_losses": (False,),  # longspan eval RUN --out FOLDER
    "train.eval_seconds": (0.0,),  # fewer documents: evaluation.documents, documents of [[evaluation.sets]]
    "train.loss_chunk_rows": (0,),
    "train.memory_fraction": (0.92,),  # train.device_memory_limit
    "eval.attention_kernel": ("",),
    "lora.parts": (["language_model"],),
    "run.compile_cache": ("",),
    "run.refine": ("auto",),
    "run.save_timeout_seconds": (1800.0,),
    "run.timeout_seconds": ("auto",),
    "eval.max_seconds": (0.0,),
    "eval.partition": ("auto", "zigzag", "contiguous"),
    "eval.passkey_lengths": ([],),
    "eval.passkey_depths": ([0.0, 0.25, 0.5, 0.75, 1.0],),
    "eval.passkey_samples": (4,),
}
FIRST = ("name", "path")  # keys that begin a table


@dataclass(frozen=True)
class AtLeast:
    """The smallest value that a key may have, the largest, and one that it must be below; of a list, each entry."""

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
        return self.values.allows(value) if isinstance(self.values, AtLeast) else value in self.values

    def __str__(self) -> str:
        values = self.values
        return f"{self.key} {values if isinstance(values, AtLeast) else ' or '.join(map(repr, values))}"


@dataclass(frozen=True)
class Texts:
    """The texts of a key of every plan section where it is a key of evaluation, and of a table [[evaluation.sets]]."""

    evaluation: str
    table: str


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


@cache
def section_keys(kind: type[Any]) -> tuple[Key, ...]:
    """List the keys of a section or table, in order; keys of a section inside it have a prefix (`key_prefix`)."""
    kinds, marked = get_type_hints(kind), get_type_hints(kind, include_extras=True)
    keys: list[Key] = []
    for field in fields(kind):
        marks = getattr(marked[field.name], "__metadata__", ())
        if is_dataclass(kinds[field.name]):
            inner, prefix = kinds[field.name], key_prefix(field.name)
            keys += [replace(key, name=prefix + key.name) for key in section_keys(inner)]
            continue
        bound = next((mark for mark in marks if isinstance(mark, AtLeast)), None)
        needs = tuple(mark for mark in marks if isinstance(mark, Needs))
        keys.append(Key(field.name, kinds[field.name], bound, field.default, needs))
    return tuple(sorted(keys, key=lambda key: FIRST.index(key.name) if key.name in FIRST else len(FIRST)))


def key_prefix(name: str) -> str:
    """Return how the keys of a section inside another one begin: those of `evaluation` with eval_."""
    return {"evaluation": "eval_"}[name]


def key_value(section: Any, key: str) -> Any:
    """Return the value of a key of a section, as files name the key."""
    inner, name = _find_section(section, key)
    return getattr(getattr(section, inner), name) if inner else getattr(section, name)


def check_bounds(values: Any, kind: type[Any], prefix: str, leave_out: Collection[str] = ()) -> None:
    """Raise ConfigError for the first number outside its key's bound; the only word is "auto"; `prefix` begins keys."""
    for key in section_keys(kind):
        name, value = prefix + key.name, key_value(values, key.name)
        if key.bound is None or name in leave_out:
            continue
        if key.name == "max_document_tokens" and value == 1:
            raise ConfigError(f"{name} is 1; a document of one token predicts nothing: use 2 or more")
        if isinstance(value, str):
            if value != AUTO:
                raise ConfigError(f'{name} is {value!r}; give a number, or "{AUTO}"')
        elif not all(map(math.isfinite, numbers := value if isinstance(value, tuple) else (value,))):
            raise ConfigError(f"{name} is {value}; it must be a finite number, {key.bound}")
        elif not all(map(key.bound.allows, numbers)):
            raise ConfigError(f"{name} is {value}; it must be {key.bound}")


def with_key_values(section: Section, values: Mapping[str, Any]) -> Section:
    """Set other values of keys in a section, as files name the keys."""
    changes: dict[str, Any] = {}
    for key, value in values.items():
        inner, name = _find_section(section, key)
        if inner:
            changes[inner] = replace(changes.get(inner, getattr(section, inner)), **{name: value})
        else:
            changes[name] = value
    return replace(section, **changes)


def key_values(section: Any) -> dict[str, Any]:
    """Return the values of all keys of a section or table, as files name the keys; tables as dictionaries."""
    return {key.name: _plain_value(key_value(section, key.name)) for key in section_keys(type(section))}


def _plain_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(key_values(item) if is_dataclass(item) else item for item in value)
    return value


def _find_section(section: Any, key: str) -> tuple[str, str]:
    names = [field.name for field in fields(section)]
    if key not in names:
        for name in names:
            if is_dataclass(getattr(section, name)) and key.startswith(prefix := key_prefix(name)):
                return name, key.removeprefix(prefix)
    return "", key


@cache
def section_texts(kind: type[Any]) -> Mapping[str, str]:
    """Return the text of every key of a section or table: the string under it in the source, or one of its `Texts`."""
    texts = dict[str, str]()
    for base in reversed(kind.__mro__[:-1]):
        texts |= class_texts(base)
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if is_dataclass(hint):
            texts |= {key_prefix(name) + key: marks.evaluation for key, marks in _key_texts(hint)}
    if FIRST[0] in texts:  # only tables [[evaluation.sets]] have the key "name"
        texts |= {key: marks.table for key, marks in _key_texts(kind)}
    return texts


def _key_texts(kind: Any) -> Iterator[tuple[str, Texts]]:
    for name, hint in get_type_hints(kind, include_extras=True).items():
        yield from ((name, mark) for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Texts))


def class_texts(kind: type) -> dict[str, str]:
    """Read the texts under the keys that one class declares, without those of its bases, from its source file."""
    (section,) = (
        node
        for node in ast.parse(Path(inspect.getfile(kind)).read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    )
    texts: dict[str, str] = {}
    for key, text in zip(section.body, section.body[1:], strict=False):
        match key, text:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(words))):
                texts[name] = " ".join(words.split())
            case _:
                pass
    return texts
