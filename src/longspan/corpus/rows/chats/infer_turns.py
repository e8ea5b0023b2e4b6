"""Infers the turns of an assistant from the rendering of a conversation, for templates that do not mark them.

Turns are located in the rendering of the whole conversation, as templates write a turn differently once others follow
it. A span begins after the prompt that inference writes there, and ends after the token that ends the turn. Texts
that the template leaves out are no targets. No span contains a text of another message.
"""

import re
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple

from longspan.corpus.rows.chats.turn_tokens import TurnTokens
from longspan.corpus.rows.message_texts import THOUGHTS, Field, replace_field, texts_of_messages
from longspan.corpus.rows.sample import UnseenCounts
from longspan.corpus.rows.template import ChatTemplate, Message
from longspan.corpus.rows.values import RowError, short_repr

_HEAD = 64  # characters that are compared first
_MOST_WORK = 1 << 32  # characters that are compared in all
_LONGEST_CLOSING = 32  # characters behind a mark that close it
_CONTEXT = 16  # characters at the end of a question by which its end is recognized


class TurnSpans(NamedTuple):
    """Spans (start, stop) of a rendering in characters, and counts of the assistant's texts that are not in it."""

    spans: tuple[tuple[int, int], ...]
    unseen: UnseenCounts = UnseenCounts()


@dataclass(frozen=True)
class _Turn:
    """The texts of one message that are in the rendering, ordered by their ends there."""

    message: int
    fields: tuple[Field, ...]
    ends: tuple[int, ...]


@dataclass(frozen=True)
class Conversation:
    """The rendering `text` of messages and, once these are located, the turns in it, by message.

    `ends` are the places where texts of messages end in it, each with the number of the message, ascending.
    """

    messages: Sequence[Message]
    tools: Sequence[Any] | None
    template: ChatTemplate
    text: str
    turns: tuple[_Turn, ...] = ()
    ends: tuple[tuple[int, int], ...] = ()

    def render(self, messages: Sequence[Message]) -> str:
        return self.template.render(messages, self.tools).text

    def turn_before(self, turn: _Turn) -> _Turn:
        """The last earlier turn that the template also writes before this one; an empty turn if there is none."""
        earlier = [t for t in self.turns if t.message < turn.message and t.ends[-1] <= turn.ends[0]]
        return earlier[-1] if earlier else _Turn(-1, (), (0,))

    def messages_between(self, start: int, stop: int) -> set[int]:
        """Return the numbers of the messages of which a text ends behind `start` and not behind `stop`."""
        # The number len(messages) is above every message's, so that all texts that end at a place count.
        first, last = (bisect_right(self.ends, (place, len(self.messages))) for place in (start, stop))
        return {message for _, message in self.ends[first:last]}

    def messages_around(self, start: int, stop: int) -> range:
        """Return the messages from the last of which a text ends up to `start` to the first of which one ends behind
        `stop`.
        """
        before, behind = (bisect_right(self.ends, (place, len(self.messages))) for place in (start, stop))
        first = self.ends[before - 1][1] if before else 0
        last = self.ends[behind][1] if behind < len(self.ends) else len(self.messages) - 1
        return range(first, last + 1)


def find_assistant_spans(
    conversation: Conversation, tokens: TurnTokens, learnt: Collection[int], first: int
) -> TurnSpans:
    """Find the spans of the `learnt` messages of an assistant in the rendering, and count what it lacks.

    Of messages before number `first` only the assistant's are counted. Raises RowError for a turn whose begin or end
    cannot be told.
    """
    fields = texts_of_messages(conversation.messages)
    conversation, ends = _locate_turns(conversation, fields)
    unseen = _count_unrendered(conversation, fields, ends, learnt, first)
    turns = [turn for turn in conversation.turns if turn.message in learnt]
    return TurnSpans(tuple(span for turn in turns for span in _turn_spans(conversation, turn, tokens)), unseen)


def marked_spans(
    conversation: Conversation, marks: tuple[tuple[int, int], ...], learnt: Collection[int], first: int
) -> TurnSpans:
    """Return the template's own marks of the `learnt` messages as spans, and count what the rendering lacks.

    A mark without a text belongs to the assistant's messages between the texts next to it. Raises RowError for a mark
    around several messages of which some are not learnt.
    """
    messages = conversation.messages
    answers = {i for i, message in enumerate(messages) if message["role"] == "assistant"}
    all_learnt = answers == set(learnt)
    fields = texts_of_messages(messages)
    # If all answers are learnt, no mark is another message's. Where texts end matters only to count those that the
    # rendering lacks; if it has all, any place (0) will do.
    if all_learnt and all(field.added or str(field.value).strip() in conversation.text for field in fields):
        return TurnSpans(marks, _count_unrendered(conversation, fields, [(0,)] * len(fields), learnt, first))
    try:
        conversation, ends = _locate_turns(conversation, fields)
    except RowError:
        if all_learnt:  # the marks are all that is needed
            return TurnSpans(marks)
        raise
    unseen = _count_unrendered(conversation, fields, ends, learnt, first)
    if all_learnt:
        return TurnSpans(marks, unseen)
    spans = list[tuple[int, int]]()
    for start, stop in marks:
        owners = conversation.messages_between(start, stop) or answers.intersection(
            conversation.messages_around(start, stop)
        )
        if owners.issubset(learnt):  # also a mark that is no message's
            spans.append((start, stop))
        elif not owners.isdisjoint(learnt):
            names = ", ".join(f"messages[{i}]" for i in sorted(owners))
            raise RowError(
                f"its chat template marks {names} as one with {{% generation %}}, and not all of them are to be "
                "learnt; mark each of them for itself"
            )
    return TurnSpans(tuple(spans), unseen)


def _count_unrendered(
    conversation: Conversation,
    fields: Sequence[Field],
    ends: Sequence[tuple[int, ...]],
    learnt: Collection[int],
    first: int,
) -> UnseenCounts:
    """Counted are thoughts of learnt messages, left out whole or cut off an answer, and their other texts; learnt
    messages without a text; and, from message number `first` on, messages of other roles. Tools of which the rendering
    names none are counted once, where `first` is 0."""
    messages = conversation.messages
    turns = [turn for turn in conversation.turns if turn.message in learnt]
    absent = [field for field, places in zip(fields, ends, strict=True) if not places and not field.blank]
    absent_learnt = [field for field in absent if field.message in learnt]
    thoughts = sum(field.path[0] in THOUGHTS for field in absent_learnt)
    cut_thoughts = sum(bool(_shortened_thought(conversation, turn)) for turn in turns)
    blank = len(set(learnt) - {field.message for field in fields})
    roles = {field.message: messages[field.message]["role"] for field in absent if field.message >= first}
    others = [f"{role} message" for role in roles.values() if role != "assistant"]
    names = [str(tool.get("function", tool).get("name")) for tool in conversation.tools or ()]
    if names and not first and not any(name in conversation.text for name in names):
        others.append("tool list")
    return UnseenCounts(thoughts + cut_thoughts, len(absent_learnt) - thoughts, blank, tuple(others))


def _shortened_thought(conversation: Conversation, turn: _Turn) -> str:
    """A thought is "<think>…</think>"; the text is "" if the answer has no thought, or the template writes it."""
    contents = [field.value for field in turn.fields if field.path[0] == "content" and "</think>" in field.value]
    before, _, answer = contents[0].strip().partition("</think>") if contents else ("", "", "")
    thought = before.rpartition("<think>")[-1].strip()
    written = conversation.text[conversation.turn_before(turn).ends[-1] : turn.ends[-1]]
    return "" if thought in written.removesuffix(answer.strip()) else thought


def _locate_turns(
    conversation: Conversation, fields: Sequence[Field]
) -> tuple[Conversation, list[tuple[int, ...]]]:
    ends = _locate_ends(conversation, fields)
    turns = list[_Turn]()
    # Of a text that is rendered several times the last end counts.
    for message in range(len(conversation.messages)):
        fields_and_ends = zip(fields, ends, strict=True)
        pairs = [(places[-1], field) for field, places in fields_and_ends if field.message == message and places]
        pairs.sort(key=lambda pair: pair[0])
        if pairs:
            turns.append(_Turn(message, tuple(field for _, field in pairs), tuple(end for end, _ in pairs)))
    all_ends = sorted((end, field.message) for field, places in zip(fields, ends, strict=True) for end in places)
    return replace(conversation, turns=tuple(turns), ends=tuple(all_ends)), ends


def _turn_spans(conversation: Conversation, turn: _Turn, tokens: TurnTokens) -> Iterator[tuple[int, int]]:
    """Several spans where tokens inside the turn end generation."""
    name = f"messages[{turn.message}]"
    start = _find_answer_start(conversation, turn, tokens)
    later_ends = (t.ends[0] for t in conversation.turns if t.message > turn.message and t.ends[0] >= turn.ends[-1])
    limit = next(later_ends, len(conversation.text))
    end = tokens.find_end_of_turn(conversation.text, turn.ends[-1], limit, name)
    if start is None:
        thought = _shortened_thought(conversation, turn)
        hint = (
            f"the template leaves out its thought {short_repr(thought)}: give the answer alone, or "
            if thought
            else ""
        )
        raise RowError(
            f"where {name} begins cannot be told from its chat template: neither the prompt of an answer nor its first "
            f"word is in the text; {hint}mark it in the template with {{% generation %}}"
        )
    if intruders := conversation.messages_between(start, end) - {turn.message}:
        raise RowError(
            f"its chat template writes messages[{min(intruders)}] into {name}, so that it would be learnt as what the "
            "assistant says; give its texts and its calls as messages of their own"
        )
    for token in tokens.any_token.finditer(conversation.text, start, end):
        if token.group() in tokens.ends and token.end() < end:
            yield start, token.end()
            at = token.end()
            while conversation.text[at : at + 1].isspace():
                at += 1
            # the prompt of the next answer must follow
            prompt = next((p for p in tokens.prompts if conversation.text.startswith(p, at)), None)
            if prompt is None:
                raise RowError(
                    f"its chat template writes {name} as two turns; give its texts as messages of their own"
                )
            start = at + len(prompt)
    yield start, end


def _find_answer_start(conversation: Conversation, turn: _Turn, tokens: TurnTokens) -> int | None:
    """Behind its prompt, else behind its question, else at its first word, which a call of a tool has not; None without
    these."""
    text = conversation.text
    turn_before = conversation.turn_before(turn)
    first_field = turn.fields[0]
    first_text = first_field.value.strip() if isinstance(first_field.value, str) else ""
    begin = turn.ends[0] - len(first_text) if text[: turn.ends[0]].endswith(first_text) else turn.ends[0]
    for prompt in tokens.prompts:
        if (at := text.rfind(prompt, turn_before.ends[-1], begin)) >= 0:
            return at + len(prompt)
    if (start := _find_start_after_question(conversation, turn, turn_before)) is not None:
        return start
    is_call = first_field.path[0] == "tool_calls"  # the text of a call does not begin with its arguments
    return None if is_call else _locate_start(conversation, first_field)


def _find_start_after_question(conversation: Conversation, turn: _Turn, turn_before: _Turn) -> int | None:
    """The end of the conversation, rendered as a prompt, is looked for from the last words of the question on. None if
    the template refuses the prompt, or writes something else there."""
    try:
        prompt = conversation.template.render(
            conversation.messages[: turn.message], conversation.tools, prompt=True
        )
    except RowError:  # a conversation that begins with the assistant
        return None
    text = conversation.text
    end = turn_before.ends[-1]
    last_words = str(turn_before.fields[-1].value).rstrip()[-_CONTEXT:] if turn_before.fields else ""
    begin = end - len(last_words) if last_words and text[:end].endswith(last_words) else end
    length = longest_overlap(prompt.text, text[begin : turn.ends[0]])
    return begin + length if length > end - begin else None


def longest_overlap(text: str, other: str) -> int:
    """Return how many characters, at most, both end `text` and begin `other`; both may be long.

    After _MOST_WORK characters were compared in vain, only overlaps of up to _HEAD characters are looked for.
    """
    head = other[:_HEAD]
    work = _MOST_WORK
    at = text.find(head, max(0, len(text) - len(other))) if len(other) >= _HEAD else -1
    while at >= 0 and work > 0:  # only texts that repeat themselves have many places
        if other.startswith(text[at:]):
            return len(text) - at
        work -= len(text) - at
        at = text.find(head, at + 1)
    return next((n for n in range(min(_HEAD, len(text), len(other)), 0, -1) if text.endswith(other[:n])), 0)


def _locate_ends(conversation: Conversation, fields: Sequence[Field]) -> list[tuple[int, ...]]:
    """In characters. A mark, a word that occurs nowhere in the rendering, is put after each text of each message, and
    in place of each blank text of a message that is not an assistant's. If the rendering without its marks equals the
    first, the marks stand where the texts end. Else blank texts stay unmarked; if that fails too, each other text is
    marked in its own rendering, as is any field whose mark is a quoted key (`added`)."""
    marks = _make_marks(conversation.text, len(fields))
    texts = [k for k, field in enumerate(fields) if not field.added]
    nonblank = [k for k in texts if not fields[k].blank]
    places = _locate_marks(conversation, {marks[k]: fields[k] for k in texts})
    if places is None and len(nonblank) < len(texts):
        places = _locate_marks(conversation, {marks[k]: fields[k] for k in nonblank})
    marked_alone = [k for k, field in enumerate(fields) if field.added or (places is None and not field.blank)]
    places = places or {}
    for k in marked_alone:
        places[marks[k]] = _locate_mark_alone(conversation, fields[k], marks[k])
    return [tuple(places.get(mark, ())) for mark in marks]


def _locate_marks(conversation: Conversation, fields: Mapping[str, Field]) -> dict[str, list[int]] | None:
    """All `fields` are marked in one rendering; None if the template refuses marks or alters the rest."""
    if not fields:
        return {}
    messages = conversation.messages
    for mark, field in fields.items():
        messages = _add_mark(messages, field, mark)
    try:
        rendered = conversation.render(messages)
    except RowError:
        return None
    pattern = re.compile("|".join(map(re.escape, fields)))
    places = {mark: list[int]() for mark in fields}
    removed = 0
    for match in pattern.finditer(rendered):
        places[match.group()].append(match.start() - removed)
        removed += len(match.group())
    return places if pattern.sub("", rendered) == conversation.text else None


def _locate_mark_alone(conversation: Conversation, field: Field, mark: str) -> list[int]:
    """The place is where what follows the mark begins in the rendering without it; [] if the template leaves the mark
    out."""
    text = conversation.text
    rendered = conversation.render(_add_mark(conversation.messages, field, mark))
    at = rendered.rfind(mark)
    if at < 0:
        return []
    behind_mark = rendered[at + len(mark) :]
    closing = _LONGEST_CLOSING if field.added else 0  # characters that may close the mark, such as a quote
    text_after = next((behind_mark[i:] for i in range(closing + 1) if text.endswith(behind_mark[i:])), None)
    if text_after is None:
        raise RowError(
            "its chat template writes what follows a turn differently when the turn has one word more, so that it "
            "cannot be told what the assistant says; mark it in the template with {% generation %}"
        )
    return [len(text) - len(text_after)]


def _locate_start(conversation: Conversation, field: Field) -> int | None:
    """None if the beginning is altered, or if `added`."""
    (mark,) = _make_marks(conversation.text, 1)
    if field.added:
        return None
    blanks = len(field.value) - len(field.value.lstrip())  # templates may strip these
    marked = field.value[:blanks] + mark + field.value[blanks:]
    rendered = conversation.render(replace_field(conversation.messages, field, marked))
    at = rendered.find(mark)
    return at if at >= 0 and conversation.text.startswith(rendered[:at]) else None


def _make_marks(text: str, number: int) -> list[str]:
    """No template escapes letters and digits; none of the words occurs in the text or in another."""
    stem = next(stem for k in count() if (stem := f"Zq{k}w") not in text)
    return [f"{stem}{k}v" for k in range(number)]


def _add_mark(messages: Sequence[Message], field: Field, mark: str) -> Sequence[Message]:
    """Templates may strip blanks at a text's end."""
    if field.added:
        return replace_field(messages, field, {**field.value, mark: mark})
    if field.blank:
        return replace_field(messages, field, mark)
    end = len(field.value.rstrip())
    return replace_field(messages, field, field.value[:end] + mark + field.value[end:])
