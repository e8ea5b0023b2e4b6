"""The tokens of a chat template between turns, read off its rendering of a conversation of four turns.

Texts without the characters of such tokens are made here too, so that a rendering can be compared with a harmless one.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

from tokenizers import Tokenizer

from longspan.corpus.rows.sample import RowError, map_strings, strings
from longspan.corpus.rows.template import ChatTemplate

_HARMLESS = "Z"
_WORDS = ("Zq0user", "Zq1assistant", "Zq2user", "Zq3assistant")


@dataclass(frozen=True)
class TurnTokens:
    """The tokens that begin and end turns.

    `prompts` are the prompt of an answer and the beginnings of it that precede earlier answers, the longest first.
    `ends` are the tokens at which generation stops. `closing` is the token after an earlier answer, if it is another
    one. `headers` are tokens that begin turns. `special` are the tokenizer's special tokens, `plain` its other added
    tokens.
    """

    prompts: tuple[str, ...]
    ends: frozenset[str]
    closing: frozenset[str]
    headers: frozenset[str]
    special: frozenset[str]
    plain: frozenset[str]

    @cached_property
    def any_token(self) -> re.Pattern[str] | None:
        """Return a pattern for any of the tokens, the longest first; None if there are none."""
        return any_of_pattern(self.ends | self.headers | self.special)

    @cached_property
    def _risky_characters(self) -> re.Pattern[str]:
        """Return the pattern of characters with which a text can form a token.

        They are the first and last ones of tokens, and all of their characters except those in words (`_is_word`).
        Without tokens the pattern matches nothing.
        """
        names = self.ends | self.headers | self.special
        characters = {
            character
            for name in names
            for i, character in enumerate(name)
            if i in (0, len(name) - 1) or not _is_word(character)
        }
        return re.compile(f"[{re.escape(''.join(sorted(characters)))}]" if characters else "(?!)")

    @cached_property
    def _risky_or_plain(self) -> re.Pattern[str]:
        """Return a pattern for names of `plain` tokens, then for `_risky_characters`.

        Templates look for these names, so they stay as they are; they come first, to be matched as a whole.
        """
        plain = any_of_pattern(self.plain - self.ends - self.headers)
        return re.compile(f"{plain.pattern}|{self._risky_characters.pattern}") if plain else self._risky_characters

    def is_harmless(self, value: Any) -> bool:
        """Return whether no string in a value has a character with which a text can form a token."""
        return not any(self._risky_characters.search(text) for _, text in strings(value, ""))

    def make_harmless(self, value: Any) -> Any:
        """Replace the characters with which the strings in a value could form a token; names of `plain` tokens stay."""
        replaced = lambda match: match.group() if match.group() in self.plain else _HARMLESS  # noqa: E731
        return map_strings(value, lambda text: self._risky_or_plain.sub(replaced, text))

    def find_end_of_turn(self, text: str, start: int, limit: int, turn: str) -> int:
        """Find the end of the turn whose last text ends at `start`: after the first token there that ends turns.

        If a token that ends generation follows it directly, the turn ends after that one. The token must stand before
        `limit`, and no other turn may begin before it. Another special token ends the turn too, if nothing but blanks
        stands between that token and the next turn or the end of the text. The last turn of the text needs no token at
        its end. Raises RowError otherwise; the message names the turn as `turn`.
        """
        tokens = list(self.any_token.finditer(text, start, limit)) if self.any_token else []
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
        """Return the first of these tokens that ends generation; the first of all if there is none.

        A token that begins a turn, or any text between two tokens, ends the search.
        """
        last = tokens[0]
        for token in tokens:
            if token.start() > last.end() or token.group() in self.headers - self.ends:
                break
            if token.group() in self.ends:
                return token
            last = token
        return tokens[0]


def turn_tokens(template: ChatTemplate, tools: Sequence[Any] | None, engine: Tokenizer) -> TurnTokens:
    """Read off the tokens between turns of a template. Raises RowError if it cannot render a plain conversation.

    A conversation of four turns, each a word that nothing else contains, is rendered: what stands between the second
    and the third word are the end of an answer and the header of a question, and what stands after the last word ends
    the text.

    Of several tokens between the two words the first ends the answer and the others begin the question. A single one
    ends the answer if generation stops at it or if it also ends the text; otherwise it begins the question. The first
    token after an answer is `closing` only where none of the tokens there stops generation.
    """
    added = engine.get_added_tokens_decoder().values()
    special, ordinary = (
        frozenset(token.content for token in added if token.special == is_special) for is_special in (True, False)
    )
    tokens = any_of_pattern(special | ordinary)
    roles = ("user", "assistant", "user", "assistant")
    turns = [{"role": role, "content": word} for role, word in zip(roles, _WORDS, strict=True)]
    text = template.render(turns, tools).text
    between, tail = text.split(_WORDS[1])[-1].split(_WORDS[2])[0], text.split(_WORDS[3])[-1]
    separators = tokens.findall(between) if tokens else []
    ends = frozenset(template.ends)
    tail_tokens = tokens.findall(tail) if tokens else []
    first_is_end = len(separators) > 1 or any(token in ends or token in tail for token in separators)
    prompt = _answer_prompt(template, tools, tokens)
    prompt_token = tokens.match(prompt) if tokens else None
    headers = {*separators[1 if first_is_end else 0 :], *([prompt_token.group()] if prompt_token else [])}
    # What stands between each question and its answer.
    answer_heads = [text.split(_WORDS[i])[-1].split(_WORDS[i + 1])[0] for i in (0, 2)]
    closing = frozenset(
        tokens_after[0]
        for tokens_after in (separators if first_is_end else [], tail_tokens)
        if tokens_after and not ends.intersection(tokens_after)
    )
    return TurnTokens(
        prompts=_list_needed_beginnings(_prompt_beginnings(prompt, tokens), answer_heads),
        ends=ends,
        closing=closing,
        headers=frozenset(headers),
        special=special,
        plain=ordinary,
    )


def _is_word(character: str) -> bool:
    """Return whether a character is common in words: one inside a token's name does not make a text form the token."""
    return character.isalnum() or character in "_- "


def any_of_pattern(names: set[str] | frozenset[str]) -> re.Pattern[str] | None:
    """Return a pattern for any of these names, the longest first; None if there are none."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True)))) if names else None


def _answer_prompt(template: ChatTemplate, tools: Sequence[Any] | None, tokens: re.Pattern[str] | None) -> str:
    """Return what the template writes behind a question as the prompt of an answer.

    It begins where the question rendered with the prompt begins to differ from the question rendered without it.
    """
    question = [{"role": "user", "content": _WORDS[0]}]
    plain, with_prompt = (template.render(question, tools, prompt=prompt).text for prompt in (False, True))
    common = next((i for i, (a, b) in enumerate(zip(plain, with_prompt, strict=False)) if a != b), len(plain))
    for token in tokens.finditer(with_prompt) if tokens else ():  # a token is not cut in two
        if token.start() < common < token.end():
            common = token.start()
    return with_prompt[common:]


def _prompt_beginnings(prompt: str, tokens: re.Pattern[str] | None) -> tuple[str, ...]:
    """List the prompt and its beginnings up to the end of a token or a line, the longest first."""
    stops = {match.end() for match in tokens.finditer(prompt)} if tokens else set[int]()
    stops |= {match.end() for match in re.finditer("\n+", prompt)} | {len(prompt)}
    return tuple(prompt[:stop] for stop in sorted(stops, reverse=True) if stop)


def _list_needed_beginnings(beginnings: tuple[str, ...], heads: Sequence[str]) -> tuple[str, ...]:
    """List the beginnings of a prompt from the longest down to the longest one that every head of an answer contains.

    `beginnings` are in this order. A head is the text between a question and its answer, in which a template may write
    less than in a prompt. A head that contains no beginning does not count.
    """
    # The index of the longest beginning in each head; 0 for a head with none.
    indices = [next((i for i, beginning in enumerate(beginnings) if beginning in head), 0) for head in heads]
    return beginnings[: max(indices) + 1]
