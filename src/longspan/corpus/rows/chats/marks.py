"""Finds where the texts of messages begin and end in a rendering, by marks: words that occur nowhere in it.

A mark is put after each text of each message, and in place of each blank text of a message that is not an assistant's,
and the conversation is rendered again. If that rendering without its marks equals the first, the marks stand where the
texts end. Else fewer texts are marked at a time (`locate_ends`).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import count

from longspan.corpus.rows.message_texts import Field, replace_field
from longspan.corpus.rows.template import Message
from longspan.corpus.rows.values import RowError

_LONGEST_CLOSING = 32
Render = Callable[[Sequence[Message]], str]


def locate_ends(
    fields: Sequence[Field], messages: Sequence[Message], text: str, render: Render
) -> list[tuple[int, ...]]:
    """Find the ends of each text in the rendering, in characters; empty for a text that is not in it.

    All are marked in one rendering. If that fails, blank texts stay unmarked; if that fails too, each other text is
    marked in its own rendering, as is any field whose mark is a quoted key (`added`).
    """
    marks = _make_marks(text, len(fields))
    texts = [k for k, field in enumerate(fields) if not field.added]
    nonblank = [k for k in texts if not fields[k].blank]
    places = _locate_marks(messages, {marks[k]: fields[k] for k in texts}, text, render)
    if places is None and len(nonblank) < len(texts):
        places = _locate_marks(messages, {marks[k]: fields[k] for k in nonblank}, text, render)
    marked_alone = [k for k, field in enumerate(fields) if field.added or (places is None and not field.blank)]
    places = places or {}
    for k in marked_alone:
        rendered = render(_add_mark(messages, fields[k], marks[k]))
        places[marks[k]] = _locate_mark(rendered, marks[k], text, fields[k])
    return [tuple(places.get(mark, ())) for mark in marks]


def _locate_marks(
    messages: Sequence[Message], fields: Mapping[str, Field], text: str, render: Render
) -> dict[str, list[int]] | None:
    """Find where each marked text ends, with all `fields` (by their marks) marked in one rendering.

    None if the template refuses marks or alters the rest.
    """
    if not fields:
        return {}
    for mark, field in fields.items():
        messages = _add_mark(messages, field, mark)
    try:
        rendered = render(messages)
    except RowError:
        return None
    pattern = re.compile("|".join(map(re.escape, fields)))
    places = {mark: list[int]() for mark in fields}
    removed = 0
    for match in pattern.finditer(rendered):
        places[match.group()].append(match.start() - removed)
        removed += len(match.group())
    return places if pattern.sub("", rendered) == text else None


def _locate_mark(rendered: str, mark: str, text: str, field: Field) -> list[int]:
    """Return where `text` goes on as `rendered` does after the mark: one place, or [] if `rendered` lacks the mark.

    Raises RowError where what follows is another text with the mark.
    """
    at = rendered.rfind(mark)
    if at < 0:
        return []
    text_after = rendered[at + len(mark) :]
    closing = _LONGEST_CLOSING if field.added else 0  # characters that close the mark: a quote, say
    text_after = next((text_after[i:] for i in range(closing + 1) if text.endswith(text_after[i:])), None)
    if text_after is None:
        raise RowError(
            "its chat template writes what follows a turn differently when the turn has one word more, so that it "
            "cannot be told what the assistant says; mark it in the template with {% generation %}"
        )
    return [len(text) - len(text_after)]


def locate_start(field: Field, messages: Sequence[Message], text: str, render: Render) -> int | None:
    """Find where a field's text begins in the rendering `text`; None if the beginning is altered, or if `added`."""
    (mark,) = _make_marks(text, 1)
    if field.added:
        return None
    blanks = len(field.value) - len(field.value.lstrip())  # templates may strip these
    rendered = render(replace_field(messages, field, field.value[:blanks] + mark + field.value[blanks:]))
    at = rendered.find(mark)
    return at if at >= 0 and text.startswith(rendered[:at]) else None


def _make_marks(text: str, number: int) -> list[str]:
    """Make words that occur nowhere in the text, none in another; of letters and digits, which no template escapes."""
    stem = next(stem for k in count() if (stem := f"Zq{k}w") not in text)
    return [f"{stem}{k}v" for k in range(number)]


def _add_mark(messages: Sequence[Message], field: Field, mark: str) -> Sequence[Message]:
    """Add a mark: after a text (before blanks at its end, which templates may strip), as a blank one, or as a key."""
    if field.added:
        return replace_field(messages, field, {**field.value, mark: mark})
    if field.blank:
        return replace_field(messages, field, mark)
    end = len(field.value.rstrip())
    return replace_field(messages, field, field.value[:end] + mark + field.value[end:])
