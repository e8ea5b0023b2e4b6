"""The tokens of a chat template that stand between turns, learnt from what it makes of two turns of each side.

And what texts are without characters of such tokens, so that a rendering can be compared with a harmless one.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

from tokenizers import Tokenizer

from longspan.corpus.rows.sample import RowError, strings, with_strings
from longspan.corpus.rows.template import ChatTemplate

_HARMLESS = "Z"
_WORDS = ("Zq0user", "Zq1assistant", "Zq2user", "Zq3assistant")


@dataclass(frozen=True)
class TurnTokens:
    """What begins and ends turns.

    `prompts` is the prompt of an answer, and the beginnings of it that stand before answers already given, the longest
    first; `ends` are tokens at which generation stops; `closing` is the one that stands behind an answer already given,
    where that is another; `headers` are tokens that begin turns; `special` are those that mean nothing but themselves,
    and `plain` the others that the tokenizer has beside its vocabulary.
    """

    prompts: tuple[str, ...]
    ends: frozenset[str]
    closing: frozenset[str]
    headers: frozenset[str]
    special: frozenset[str]
    plain: frozenset[str]

    @cached_property
    def between(self) -> re.Pattern[str] | None:
        """Any of the tokens, the longest first; None where there are none."""
        return pattern_of(self.ends | self.headers | self.special)

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        """The characters that a text can bring to one of the tokens: those that they begin or end with, and what they
        have beside letters, digits and blanks."""
        names = self.ends | self.headers | self.special
        characters = {c for name in names for i, c in enumerate(name) if i in (0, len(name) - 1) or not _is_word(c)}
        return re.compile(f"[{re.escape(''.join(sorted(characters)))}]" if characters else "(?!)")

    @cached_property
    def _marks_and_plain(self) -> re.Pattern[str]:
        """The same, behind names of `plain` tokens, which stay as they are: templates look for them in texts."""
        plain = pattern_of(self.plain - self.ends - self.headers)
        return re.compile(f"{plain.pattern}|{self._marks.pattern}") if plain else self._marks

    def is_harmless(self, value: Any) -> bool:
        """Whether no string in a value has a character of the tokens."""
        return not any(self._marks.search(text) for _, text in strings(value, ""))

    def harmless(self, value: Any) -> Any:
        """A value with other characters where its strings could make one of the tokens, alone or joined."""
        replaced = lambda match: match.group() if match.group() in self.plain else _HARMLESS  # noqa: E731
        return with_strings(value, lambda text: self._marks_and_plain.sub(replaced, text))

    def end_of_turn(self, text: str, start: int, limit: int, turn: str) -> int:
        """Where the turn whose last text ends at `start` ends: behind the first token there that ends turns.

        Another special token ends it too where it stands alone before the next turn, or at the end of the text. Before
        the end no other turn may begin. A turn that ends the text needs no such token. Raises RowError otherwise.
        """
        tokens = list(self.between.finditer(text, start, limit)) if self.between else []
        inside = list(takewhile(lambda token: token.group() not in self.headers - self.ends, tokens))
        for i, token in enumerate(inside):
            if token.group() in self.ends | self.closing:
                return self._last_of(inside[i:]).end()
        behind = tokens[len(inside)].start() if len(inside) < len(tokens) else len(text)
        if inside and not text[inside[0].end() : behind].strip():
            return inside[0].end()
        if limit == len(text) and not tokens:
            return max(start, len(text.rstrip()))
        raise RowError(
            f"no token that ends a turn follows {turn} in the chat template: behind its last text comes "
            f"{text[start : start + 60]!r}; name the token as eos_token_id in the tokenizer's generation_config.json, "
            "or mark what the assistant says in the template with {% generation %}"
        )

    def _last_of(self, tokens: Sequence[re.Match[str]]) -> re.Match[str]:
        """The first token, or one that ends generation where nothing but other tokens stands between the two."""
        last = tokens[0]
        for token in tokens:
            if token.start() > last.end() or token.group() in self.headers - self.ends:
                break
            if token.group() in self.ends:
                return token
            last = token
        return tokens[0]


def turn_tokens(template: ChatTemplate, tools: Sequence[Any] | None, engine: Tokenizer) -> TurnTokens:
    """The tokens between turns of a template. Raises RowError where it cannot render a plain conversation."""
    added = engine.get_added_tokens_decoder().values()
    special, plain = (frozenset(t.content for t in added if t.special == kind) for kind in (True, False))
    tokens = pattern_of(special | plain)
    roles = ("user", "assistant", "user", "assistant")
    turns = [{"role": role, "content": word} for role, word in zip(roles, _WORDS, strict=True)]
    text = template.render(turns, tools).text
    between, tail = text.split(_WORDS[1])[-1].split(_WORDS[2])[0], text.split(_WORDS[3])[-1]
    found = tokens.findall(between) if tokens else []
    ends = frozenset(template.ends)
    last = tokens.findall(tail) if tokens else []
    is_end = len(found) > 1 or any(token in ends or token in tail for token in found)
    prompt = _prompt(template, tools, tokens)
    first = tokens.match(prompt) if tokens else None
    headers = {*found[1 if is_end else 0 :], *([first.group()] if first else [])}
    heads = [text.split(_WORDS[i])[-1].split(_WORDS[i + 1])[0] for i in (0, 2)]
    closing = frozenset(some[0] for some in (found * is_end, last) if some and not ends.intersection(some))
    return TurnTokens(
        prompts=_written(_beginnings(prompt, tokens), heads),
        ends=ends,
        closing=closing,
        headers=frozenset(headers),
        special=special,
        plain=plain,
    )


def _is_word(character: str) -> bool:
    return character.isalnum() or character in "_- "


def pattern_of(names: set[str] | frozenset[str]) -> re.Pattern[str] | None:
    """Any of these names, the longest first; None where there are none."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True)))) if names else None


def _prompt(template: ChatTemplate, tools: Sequence[Any] | None, tokens: re.Pattern[str] | None) -> str:
    """What a template puts behind a question when an answer is wanted, from the first token that differs."""
    question = [{"role": "user", "content": _WORDS[0]}]
    without, with_prompt = (template.render(question, tools, prompt=prompt).text for prompt in (False, True))
    same = next((i for i, (a, b) in enumerate(zip(without, with_prompt, strict=False)) if a != b), len(without))
    for token in tokens.finditer(with_prompt) if tokens else ():
        if token.start() < same < token.end():
            same = token.start()
    return with_prompt[same:]


def _beginnings(prompt: str, tokens: re.Pattern[str] | None) -> tuple[str, ...]:
    """The prompt, and its beginnings up to the end of a token or a line, the longest first."""
    stops = {match.end() for match in tokens.finditer(prompt)} if tokens else set[int]()
    stops |= {match.end() for match in re.finditer("\n+", prompt)} | {len(prompt)}
    return tuple(prompt[:stop] for stop in sorted(stops, reverse=True) if stop)


def _written(beginnings: tuple[str, ...], heads: Sequence[str]) -> tuple[str, ...]:
    """The beginnings of a prompt from the whole one to the longest that each head of an answer has."""
    longest = [next((i for i, beginning in enumerate(beginnings) if beginning in head), 0) for head in heads]
    return beginnings[: max(longest) + 1]
