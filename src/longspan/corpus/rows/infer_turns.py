"""Infers the turns of an assistant from the rendering of a conversation, for templates that do not mark them.

Turns are located in the rendering of the whole conversation, as templates write a turn differently once others follow
it. A span begins after the prompt that inference writes there, and ends after the token that ends the turn. Texts
that the template leaves out are no targets. No span contains a text of another message.

Texts are located with marks: words that occur nowhere in the rendering. A mark is put after each text of each
message, and in place of each blank text of a message that is not an assistant's, and the conversation is rendered
again. If the second rendering without its marks equals the first, the marks stand where the texts end. Else blank
texts are left as they are, and if that does not help, each text is marked in a rendering of its own: the rest of that
rendering after the mark must end the first rendering.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, takewhile
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from longspan.corpus.rows.messages import THOUGHTS, Field, replace_field, texts_of_messages
from longspan.corpus.rows.sample import RowError, Unseen, map_strings, short_repr, strings_with_places
from longspan.corpus.rows.template import ChatTemplate, Message, Rendered
from longspan.corpus.tokenizer import pattern_of_any

_HARMLESS = "Z"
_WORDS = ("Zq0user", "Zq1assistant", "Zq2user", "Zq3assistant")


@dataclass(frozen=True)
class TurnTokens:
    """The tokens that begin and end turns.

    `prompts` are the prompt of an answer and its beginnings that precede earlier answers, the longest first. Generation
    stops at `ends`; `closing` is another token after an earlier answer; `headers` begin turns. `special` are the
    tokenizer's special tokens, `plain` its other added tokens.
    """

    prompts: tuple[str, ...]
    ends: frozenset[str]
    closing: frozenset[str]
    headers: frozenset[str]
    special: frozenset[str]
    plain: frozenset[str]

    @cached_property
    def any_token(self) -> re.Pattern[str]:
        return pattern_of_any(self.ends | self.headers | self.special)

    @cached_property
    def _risky_characters(self) -> re.Pattern[str]:
        """The characters with which a text can form a token: first and last ones of tokens, and those not in words."""
        names = self.ends | self.headers | self.special
        characters = {
            character
            for name in names
            for i, character in enumerate(name)
            if i in (0, len(name) - 1) or not (character.isalnum() or character in "_- ")
        }
        return re.compile(f"[{re.escape(''.join(sorted(characters)))}]" if characters else "(?!)")

    def is_harmless(self, value: Any) -> bool:
        return not any(self._risky_characters.search(text) for _, text in strings_with_places(value, ""))

    def make_harmless(self, value: Any) -> Any:
        """Names of `plain` tokens come first, to be matched as a whole: templates look for these names."""
        plain = pattern_of_any(self.plain - self.ends - self.headers)
        pattern = re.compile(f"{plain.pattern}|{self._risky_characters.pattern}")
        replaced = lambda match: match.group() if match.group() in self.plain else _HARMLESS  # noqa: E731
        return map_strings(value, lambda text: pattern.sub(replaced, text))

    def find_end_of_turn(self, text: str, start: int, limit: int, turn: str) -> int:
        """Find the end of the turn whose last text ends at `start`: after the first token there that ends turns.

        If a token that ends generation follows it directly, the turn ends after that one. The token must stand before
        `limit`, and no other turn may begin before it. Another special token ends the turn too, if nothing but blanks
        stands between that token and the next turn or the end of the text. The last turn of the text needs no token at
        its end.
        """
        tokens = list(self.any_token.finditer(text, start, limit))
        inside = list(takewhile(lambda token: token.group() not in self.headers - self.ends, tokens))
        for i, token in enumerate(inside):
            if token.group() in self.ends | self.closing:
                return self._find_end_token(inside[i:]).end()
        next_turn = tokens[len(inside)].start() if len(inside) < len(tokens) else len(text)
        if inside and not text[inside[0].end() : next_turn].strip():
            return inside[0].end()
        if limit == len(text) and not tokens:
            return max(start, len(text.rstrip()))
        raise RowError(
            f"no token that ends a turn follows {turn} in the chat template: behind its last text comes "
            f"{text[start : start + 60]!r}; name the token as eos_token_id in the tokenizer's generation_config.json, "
            "or mark what the assistant says in the template with {% generation %}"
        )

    def _find_end_token(self, tokens: Sequence[re.Match[str]]) -> re.Match[str]:
        """A token that begins a turn, or any text between two tokens, ends the search."""
        last = tokens[0]
        for token in tokens:
            if token.start() > last.end() or token.group() in self.headers - self.ends:
                break
            if token.group() in self.ends:
                return token
            last = token
        return tokens[0]


def find_turn_tokens(template: ChatTemplate, tools: Sequence[Any] | None, engine: Tokenizer) -> TurnTokens:
    """Read off the tokens between turns of a template. Raises RowError if it cannot render a plain conversation.

    Four turns, each a word that nothing else contains, are rendered. Between the second and the third word stand the
    end of an answer and the header of a question; what stands after the last word ends the text. Of several tokens
    between the two words the first ends the answer and the others begin the question. A single one ends the answer if
    generation stops at it or if it also ends the text. The first token after an answer is `closing` only where none
    there stops generation.
    """
    added = engine.get_added_tokens_decoder().values()
    special, ordinary = (
        frozenset(token.content for token in added if token.special == is_special) for is_special in (True, False)
    )
    tokens = pattern_of_any(special | ordinary)
    roles = ("user", "assistant", "user", "assistant")
    turns = [{"role": role, "content": word} for role, word in zip(roles, _WORDS, strict=True)]
    text = template.render(turns, tools).text
    between = text.split(_WORDS[1])[-1].split(_WORDS[2])[0]
    tail = text.split(_WORDS[3])[-1]
    separators = tokens.findall(between)
    ends = frozenset(template.ends)
    tail_tokens = tokens.findall(tail)
    first_is_end = len(separators) > 1 or any(token in ends or token in tail for token in separators)
    prompt = _find_answer_prompt(template, tools, tokens)
    prompt_token = tokens.match(prompt)
    headers = {*separators[1 if first_is_end else 0 :], *([prompt_token.group()] if prompt_token else [])}
    # What stands between each question and its answer.
    answer_heads = [text.split(_WORDS[i])[-1].split(_WORDS[i + 1])[0] for i in (0, 2)]
    closing = frozenset(
        tokens_after[0]
        for tokens_after in (separators if first_is_end else [], tail_tokens)
        if tokens_after and not ends.intersection(tokens_after)
    )
    stops = {match.end() for match in tokens.finditer(prompt)}
    stops |= {match.end() for match in re.finditer("\n+", prompt)} | {len(prompt)}
    beginnings = tuple(prompt[:stop] for stop in sorted(stops, reverse=True) if stop)
    # The longest beginning in each head: a template may write less there than in a prompt. One without any has no say.
    longest = [next((i for i, beginning in enumerate(beginnings) if beginning in head), 0) for head in answer_heads]
    return TurnTokens(
        prompts=beginnings[: max(longest) + 1],
        ends=ends,
        closing=closing,
        headers=frozenset(headers),
        special=special,
        plain=ordinary,
    )


def _find_answer_prompt(template: ChatTemplate, tools: Sequence[Any] | None, tokens: re.Pattern[str]) -> str:
    """It begins where the question rendered with the prompt begins to differ from the question rendered without it."""
    question = [{"role": "user", "content": _WORDS[0]}]
    plain, with_prompt = (template.render(question, tools, prompt=prompt).text for prompt in (False, True))
    common = next((i for i, (a, b) in enumerate(zip(plain, with_prompt, strict=False)) if a != b), len(plain))
    for token in tokens.finditer(with_prompt):  # a token is not cut in two
        if token.start() < common < token.end():
            common = token.start()
    return with_prompt[common:]


_HEAD = 64  # characters that are compared first
_MOST_WORK = 1 << 32  # characters that are compared in all
_CONTEXT = 16  # characters at the end of a question by which its end is recognized
_LONGEST_CLOSING = 32
Render = Callable[[Sequence[Message]], str]


class TurnSpans(NamedTuple):
    """Spans (start, stop) of a rendering in characters, and counts of the assistant's texts that are not in it."""

    spans: tuple[tuple[int, int], ...]
    unseen: Unseen = Unseen()


@dataclass(frozen=True)
class _Turn:
    """The texts of one message that are in the rendering, ordered by their ends there."""

    message: int
    fields: tuple[Field, ...]
    ends: tuple[int, ...]


@dataclass(frozen=True)
class _Conversation:
    """A rendering, the turns in it, and the places where texts end in it, with the messages of these texts."""

    messages: Sequence[Message]
    text: str
    template: ChatTemplate
    tools: Sequence[Any] | None
    turns: tuple[_Turn, ...]
    ends: tuple[tuple[int, int], ...]

    def render(self, messages: Sequence[Message]) -> str:
        return self.template.render(messages, self.tools).text

    def turn_before(self, turn: _Turn) -> _Turn:
        """The last earlier turn that the template also writes before this one; an empty turn without one."""
        earlier = [t for t in self.turns if t.message < turn.message and t.ends[-1] <= turn.ends[0]]
        return earlier[-1] if earlier else _Turn(-1, (), (0,))

    def messages_in(self, start: int, stop: int) -> set[int]:
        # The number len(messages) is above every message's, so that all texts that end at a place count.
        first, last = (bisect_right(self.ends, (place, len(self.messages))) for place in (start, stop))
        return {message for _, message in self.ends[first:last]}

    def messages_around(self, start: int, stop: int) -> range:
        before, behind = (bisect_right(self.ends, (at, len(self.messages))) for at in (start, stop))
        first = self.ends[before - 1][1] if before else 0
        last = self.ends[behind][1] if behind < len(self.ends) else len(self.messages) - 1
        return range(first, last + 1)


def find_assistant_spans(
    messages: Sequence[Message],
    text: str,
    template: ChatTemplate,
    tools: Sequence[Any] | None,
    tokens: TurnTokens,
    learnt: Collection[int],
    first: int,
) -> TurnSpans:
    """Find the spans of the `learnt` messages of an assistant in the rendering `text`, and count what it lacks."""
    fields = texts_of_messages(messages)
    conversation, ends = _locate_turns(fields, messages, text, template, tools)
    unseen = _count_unseen(conversation, fields, ends, learnt, first)
    turns = [turn for turn in conversation.turns if turn.message in learnt]
    return TurnSpans(tuple(span for turn in turns for span in _turn_spans(conversation, turn, tokens)), unseen)


def marked_spans(
    messages: Sequence[Message],
    rendered: Rendered,
    template: ChatTemplate,
    tools: Sequence[Any] | None,
    learnt: Collection[int],
    first: int,
) -> TurnSpans:
    """Select the template's own marks of the `learnt` messages, and count what the rendering lacks.

    A mark without a text belongs to the assistant's messages between the texts next to it.
    """
    answers = {i for i, message in enumerate(messages) if message["role"] == "assistant"}
    all_learnt = answers == set(learnt)
    fields = texts_of_messages(messages)  # then no mark is another message's
    if all_learnt and all(field.added or str(field.value).strip() in rendered.text for field in fields):
        conversation = _Conversation(messages, rendered.text, template, tools, (), ())
        return TurnSpans(rendered.marks, _count_unseen(conversation, fields, [(0,)] * len(fields), learnt, first))
    try:
        conversation, ends = _locate_turns(fields, messages, rendered.text, template, tools)
    except RowError:
        if all_learnt:  # the marks are all that is needed
            return TurnSpans(rendered.marks)
        raise
    unseen = _count_unseen(conversation, fields, ends, learnt, first)
    if all_learnt:
        return TurnSpans(rendered.marks, unseen)
    spans = list[tuple[int, int]]()
    for start, stop in rendered.marks:
        owners = conversation.messages_in(start, stop)
        owners = owners or answers.intersection(conversation.messages_around(start, stop))
        if owners.issubset(learnt):  # also a mark that is no message's
            spans.append((start, stop))
        elif not owners.isdisjoint(learnt):
            names = ", ".join(f"messages[{i}]" for i in sorted(owners))
            raise RowError(
                f"its chat template marks {names} as one with {{% generation %}}, and not all of them are to be "
                "learnt; mark each of them for itself"
            )
    return TurnSpans(tuple(spans), unseen)


def _count_unseen(
    conversation: _Conversation,
    fields: Sequence[Field],
    ends: Sequence[tuple[int, ...]],
    learnt: Collection[int],
    first: int,
) -> Unseen:
    """Count what a rendering lacks: thoughts of learnt messages (left out whole, or cut off an answer) and their other
    texts; learnt messages without a text; and from message number `first` on the messages of all other roles, and tools
    that it does not name."""
    messages = conversation.messages
    turns = [turn for turn in conversation.turns if turn.message in learnt]
    absent = [field for field, places in zip(fields, ends, strict=True) if not places and not field.blank]
    lacking = [field for field in absent if field.message in learnt]
    thoughts = sum(field.path[0] in THOUGHTS for field in lacking)
    cut_thoughts = sum(bool(_shortened_thought(conversation, turn)) for turn in turns)
    blank = len(set(learnt) - {field.message for field in fields})
    roles = {field.message: messages[field.message]["role"] for field in absent if field.message >= first}
    others = [f"{role} message" for role in roles.values() if role != "assistant"]
    names = [str(tool.get("function", tool).get("name")) for tool in conversation.tools or ()]
    if names and not first and not any(name in conversation.text for name in names):
        others.append("tool list")
    return Unseen(thoughts + cut_thoughts, len(lacking) - thoughts, blank, tuple(others))


def _shortened_thought(conversation: _Conversation, turn: _Turn) -> str:
    contents = [field.value for field in turn.fields if field.path[0] == "content" and "</think>" in field.value]
    before, _, answer = contents[0].strip().partition("</think>") if contents else ("", "", "")
    thought = before.rpartition("<think>")[-1].strip()
    written = conversation.text[conversation.turn_before(turn).ends[-1] : turn.ends[-1]]
    return "" if thought in written.removesuffix(answer.strip()) else thought


def _locate_turns(
    fields: Sequence[Field],
    messages: Sequence[Message],
    text: str,
    template: ChatTemplate,
    tools: Sequence[Any] | None,
) -> tuple[_Conversation, list[tuple[int, ...]]]:
    """Also return where each field's text ends in the rendering, which may be several places."""
    render: Render = lambda changed: template.render(changed, tools).text  # noqa: E731
    ends = locate_ends(fields, messages, text, render)
    turns = list[_Turn]()
    for message in range(len(messages)):  # of a text that is rendered several times the last end counts
        pairs = [(at[-1], field) for field, at in zip(fields, ends, strict=True) if field.message == message and at]
        pairs.sort(key=lambda pair: pair[0])
        if pairs:
            turns.append(_Turn(message, tuple(field for _, field in pairs), tuple(end for end, _ in pairs)))
    places = sorted(
        (end, field.message) for field, field_ends in zip(fields, ends, strict=True) for end in field_ends
    )
    return _Conversation(messages, text, template, tools, tuple(turns), tuple(places)), ends


def _turn_spans(conversation: _Conversation, turn: _Turn, tokens: TurnTokens) -> Iterator[tuple[int, int]]:
    """One span of a turn, or several where tokens inside the turn end generation."""
    name = f"messages[{turn.message}]"
    start = _find_answer_start(conversation, turn, tokens)
    later = (t.ends[0] for t in conversation.turns if t.message > turn.message and t.ends[0] >= turn.ends[-1])
    end = tokens.find_end_of_turn(conversation.text, turn.ends[-1], next(later, len(conversation.text)), name)
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
    if intruders := conversation.messages_in(start, end) - {turn.message}:
        raise RowError(
            f"its chat template writes messages[{min(intruders)}] into {name}, so that it would be learnt as what the "
            "assistant says; give its texts and its calls as messages of their own"
        )
    for token in tokens.any_token.finditer(conversation.text, start, end):
        if token.group() in tokens.ends and token.end() < end:
            yield start, token.end()
            if (start := _skip_prompt(conversation.text, token.end(), tokens)) is None:
                raise RowError(
                    f"its chat template writes {name} as two turns; give its texts as messages of their own"
                )
    yield start, end


def _skip_prompt(text: str, at: int, tokens: TurnTokens) -> int | None:
    """Return the end of the answer's prompt that begins at `at`, or behind the blanks there; None without a prompt."""
    while text[at : at + 1].isspace():
        at += 1
    return next((at + len(prompt) for prompt in tokens.prompts if text.startswith(prompt, at)), None)


def _find_answer_start(conversation: _Conversation, turn: _Turn, tokens: TurnTokens) -> int | None:
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
    return None if is_call else locate_start(first_field, conversation.messages, text, conversation.render)


def _find_start_after_question(conversation: _Conversation, turn: _Turn, turn_before: _Turn) -> int | None:
    """Find where an answer begins: after its question, and what the template writes between the two.

    The end of the prompt for the answer is looked for from the last words of the question on. None if the prompt is
    refused, or has nothing in common with what is behind these words.
    """
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
    """None if the template refuses marks or alters the rest."""
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
    """Return where `text` goes on as `rendered` does after the mark: one place, or [] if `rendered` lacks the mark."""
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
