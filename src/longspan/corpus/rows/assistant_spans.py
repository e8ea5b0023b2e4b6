"""What the assistant says in a conversation, as spans of characters of its rendering.

One rendering is the truth: turns are found in it, never rendered one by one, because templates write a turn otherwise
once others follow it. A span begins behind the prompt that inference puts there and ends behind the token that ends the
turn. What the template leaves out (an earlier thought, say) is not in the text, and so no target. No span holds a text
of another message. A template's own marks are taken as they are, those of the messages that are learnt.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from longspan.corpus.rows.fields import Field, Render, ends_of, fields_of, start_of
from longspan.corpus.rows.sample import Unseen
from longspan.corpus.rows.template import ChatTemplate, Message, Rendered
from longspan.corpus.rows.turn_tokens import TurnTokens
from longspan.corpus.rows.values import RowError

_CONTEXT = 16  # characters of a question by which its end is known again


class Spans(NamedTuple):
    """Spans (start, stop) of a rendering in characters, and what of the assistant is not in it."""

    spans: tuple[tuple[int, int], ...]
    unseen: Unseen = Unseen()


@dataclass(frozen=True)
class _Turn:
    """The texts of one message that the rendering has, by where they end there."""

    message: int
    fields: tuple[Field, ...]
    ends: tuple[int, ...]


@dataclass(frozen=True)
class _Conversation:
    """A rendering, the turns that are in it, and where texts end in it: places with the messages of these texts."""

    messages: Sequence[Message]
    text: str
    template: ChatTemplate
    tools: Sequence[Any] | None
    turns: tuple[_Turn, ...]
    ends: tuple[tuple[int, int], ...]

    def render(self, messages: Sequence[Message]) -> str:
        return self.template.render(messages, self.tools).text

    def before(self, turn: _Turn) -> _Turn:
        """The last turn before a turn whose texts end before it, or one that is empty."""
        earlier = [t for t in self.turns if t.message < turn.message and t.ends[-1] <= turn.ends[0]]
        return earlier[-1] if earlier else _Turn(-1, (), (0,))

    def after(self, turn: _Turn) -> int:
        """Where the first text of the next turn ends, or the whole text."""
        later = [t.ends[0] for t in self.turns if t.message > turn.message and t.ends[0] >= turn.ends[-1]]
        return later[0] if later else len(self.text)

    def messages_in(self, start: int, stop: int) -> set[int]:
        """The messages of which a text ends inside a span, or at its end."""
        first, last = (bisect_right(self.ends, (place, len(self.messages))) for place in (start, stop))
        return {message for _, message in self.ends[first:last]}

    def around(self, start: int, stop: int) -> range:
        """The messages from that whose text ends last before a span to that whose text ends first behind it."""
        before, behind = (bisect_right(self.ends, (place, len(self.messages))) for place in (start, stop))
        first = self.ends[before - 1][1] if before else 0
        return range(first, (self.ends[behind][1] if behind < len(self.ends) else len(self.messages) - 1) + 1)


def assistant_spans(
    messages: Sequence[Message],
    text: str,
    template: ChatTemplate,
    tools: Sequence[Any] | None,
    tokens: TurnTokens,
    wanted: Collection[int],
) -> Spans:
    """The spans of the `wanted` messages of an assistant in the rendering `text` of all messages.

    Raises RowError where a span cannot be told from what stands around it.
    """
    fields = fields_of(messages)
    conversation, ends = _conversation(fields, messages, text, template, tools)
    learnt = [turn for turn in conversation.turns if turn.message in wanted]
    spans = tuple(span for turn in learnt for span in _spans(conversation, turn, tokens))
    lacking = [field for field, places in zip(fields, ends, strict=True) if field.message in wanted and not places]
    cut = sum(_is_cut(field, text) for turn in learnt for field in turn.fields)
    thoughts = sum(field.is_thought for field in lacking)
    blank = len(set(wanted) - {field.message for field in fields})
    return Spans(spans, Unseen(thoughts + cut, len(lacking) - thoughts, blank))


def marked_spans(
    messages: Sequence[Message],
    rendered: Rendered,
    template: ChatTemplate,
    tools: Sequence[Any] | None,
    wanted: Collection[int],
) -> tuple[tuple[int, int], ...]:
    """Of a template's own marks those of the `wanted` messages.

    A mark without a text is of the assistant's messages between the texts beside it. Raises RowError where a mark is of
    messages that are wanted and of others.
    """
    answers = {i for i, message in enumerate(messages) if message["role"] == "assistant"}
    if answers == set(wanted):
        return rendered.marks
    conversation, _ = _conversation(fields_of(messages), messages, rendered.text, template, tools)
    spans = list[tuple[int, int]]()
    for start, stop in rendered.marks:
        owners = conversation.messages_in(start, stop) or answers.intersection(conversation.around(start, stop))
        if owners.issubset(wanted):
            spans.append((start, stop))
        elif not owners.isdisjoint(wanted):
            names = ", ".join(f"messages[{i}]" for i in sorted(owners))
            raise RowError(
                f"its chat template marks {names} as one with {{% generation %}}, and not all of them are to be "
                "learnt; mark each of them for itself"
            )
    return tuple(spans)


def _conversation(
    fields: Sequence[Field],
    messages: Sequence[Message],
    text: str,
    template: ChatTemplate,
    tools: Sequence[Any] | None,
) -> tuple[_Conversation, list[tuple[int, ...]]]:
    """A rendering with the turns that are in it, and where the texts of each field end."""
    render: Render = lambda changed: template.render(changed, tools).text  # noqa: E731
    ends = ends_of(fields, messages, text, render)
    turns = tuple(turn for i in range(len(messages)) if (turn := _turn(i, fields, ends)).ends)
    places = sorted((place, field.message) for field, ends in zip(fields, ends, strict=True) for place in ends)
    return _Conversation(messages, text, template, tools, turns, tuple(places)), ends


def _turn(message: int, fields: Sequence[Field], ends: Sequence[tuple[int, ...]]) -> _Turn:
    known = [(places[-1], f) for f, places in zip(fields, ends, strict=True) if f.message == message and places]
    known.sort(key=lambda pair: pair[0])
    return _Turn(message, tuple(field for _, field in known), tuple(end for end, _ in known))


def _is_cut(field: Field, text: str) -> bool:
    """Whether a template leaves out the beginning of an answer: the thought in it."""
    return field.path[0] == "content" and "</think>" in field.value and field.value.strip() not in text


def _spans(conversation: _Conversation, turn: _Turn, tokens: TurnTokens) -> Iterator[tuple[int, int]]:
    """What is generated of a turn: one span, or one for each time that generation stops and begins again."""
    name = f"messages[{turn.message}]"
    start = _start(conversation, turn, tokens)
    end = tokens.end_of_turn(conversation.text, turn.ends[-1], conversation.after(turn), name)
    if start is None:
        raise RowError(
            f"where {name} begins cannot be told from its chat template: neither the prompt of an answer nor its first "
            "word is in the text; mark it in the template with {% generation %}"
        )
    if others := conversation.messages_in(start, end) - {turn.message}:
        raise RowError(
            f"its chat template writes messages[{min(others)}] into {name}, so that it would be learnt as what the "
            "assistant says; give its texts and its calls as messages of their own"
        )
    for token in tokens.between.finditer(conversation.text, start, end) if tokens.between else ():
        if token.group() in tokens.ends and token.end() < end:
            yield start, token.end()
            if (start := _behind_prompt(conversation.text, token.end(), tokens)) is None:
                raise RowError(f"its chat template writes {name} as two turns; give its texts as messages of their own")
    yield start, end


def _behind_prompt(text: str, at: int, tokens: TurnTokens) -> int | None:
    """Where the prompt of an answer ends that begins here, behind blanks; None where there is none."""
    while text[at : at + 1].isspace():
        at += 1
    return next((at + len(prompt) for prompt in tokens.prompts if text.startswith(prompt, at)), None)


def _start(conversation: _Conversation, turn: _Turn, tokens: TurnTokens) -> int | None:
    """Where what the model generates begins: behind the prompt, or where the turn's first text does."""
    text, before, first = conversation.text, conversation.before(turn), turn.fields[0]
    words = first.value.strip() if isinstance(first.value, str) else ""
    begin = turn.ends[0] - len(words) if text[: turn.ends[0]].endswith(words) else turn.ends[0]
    for prompt in tokens.prompts:
        if (at := text.rfind(prompt, before.ends[-1], begin)) >= 0:
            return at + len(prompt)
    if (start := _behind_question(conversation, turn, before)) is not None:
        return start
    is_call = first.path[0] == "tool_calls"  # its text does not begin with its arguments
    return None if is_call else start_of(first, conversation.messages, text, conversation.render)


def _behind_question(conversation: _Conversation, turn: _Turn, before: _Turn) -> int | None:
    """Where the messages before a turn end as a prompt does, found from the last words of their last text on."""
    try:
        asked = conversation.template.render(conversation.messages[: turn.message], conversation.tools, prompt=True)
    except RowError:  # a conversation that begins with the assistant
        return None
    text, end = conversation.text, before.ends[-1]
    words = str(before.fields[-1].value).rstrip()[-_CONTEXT:] if before.fields else ""
    begin = end - len(words) if words and text[:end].endswith(words) else end
    return next((stop for stop in range(turn.ends[0], end, -1) if asked.text.endswith(text[begin:stop])), None)
