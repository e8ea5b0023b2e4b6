"""The tokens that begin and end turns of a chat template, read off its rendering of a plain conversation."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

from tokenizers import Tokenizer

from longspan.corpus.rows.template import ChatTemplate
from longspan.corpus.rows.values import RowError, map_strings, strings_with_places
from longspan.corpus.tokenizer import any_name_pattern

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
        """A pattern of every token that may begin or end a turn, and of special ones."""
        return any_name_pattern(self.ends | self.headers | self.special)

    @cached_property
    def _risky_characters(self) -> re.Pattern[str]:
        names = self.ends | self.headers | self.special
        characters = {
            character
            for name in names
            for i, character in enumerate(name)
            if i in (0, len(name) - 1) or not (character.isalnum() or character in "_- ")
        }
        return re.compile(f"[{re.escape(''.join(sorted(characters)))}]" if characters else "(?!)")

    def is_harmless(self, value: Any) -> bool:
        """Return whether no string in a JSON value has a character with which it could form a token."""
        return not any(self._risky_characters.search(text) for _, text in strings_with_places(value, ""))

    def make_harmless(self, value: Any) -> Any:
        """Return a JSON value with a letter in place of each risky character of its strings.

        Names of `plain` tokens come first, to be matched as a whole: templates look for these names.
        """
        plain = any_name_pattern(self.plain - self.ends - self.headers)
        pattern = re.compile(f"{plain.pattern}|{self._risky_characters.pattern}")
        replaced = lambda match: match.group() if match.group() in self.plain else _HARMLESS  # noqa: E731
        return map_strings(value, lambda text: pattern.sub(replaced, text))

    def find_end_of_turn(self, text: str, start: int, limit: int, turn: str) -> int:
        """Find the end of the turn whose last text ends at `start`: after the first token there that ends turns.

        If a token that ends generation follows it directly, the turn ends after that one. The token must stand before
        `limit`, and no other turn may begin before it. Another special token ends the turn too, if nothing but blanks
        stands between that token and the next turn or the end of the text. The last turn of the text needs no token at
        its end. Raises RowError where no token ends the turn.
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
        """A token that begins a turn, or any text between two tokens, ends the search; the first token stands in for
        none."""
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
    generation stops at it or if it also ends the text, else it begins the question. The first token after an answer is
    `closing` only where none there stops generation.
    """
    added = engine.get_added_tokens_decoder().values()
    special, plain = (
        frozenset(token.content for token in added if token.special == is_special) for is_special in (True, False)
    )
    tokens = any_name_pattern(special | plain)
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
    return TurnTokens(
        prompts=_prompt_beginnings(prompt, tokens, answer_heads),
        ends=ends,
        closing=closing,
        headers=frozenset(headers),
        special=special,
        plain=plain,
    )


def _prompt_beginnings(prompt: str, tokens: re.Pattern[str], answer_heads: Sequence[str]) -> tuple[str, ...]:
    """Longest first. A beginning ends behind a token or behind line ends. Of those in a head, which is what stands
    before an earlier answer, the longest counts: a template may write less there than in a prompt."""
    stops = {match.end() for match in tokens.finditer(prompt)}
    stops |= {match.end() for match in re.finditer("\n+", prompt)} | {len(prompt)}
    beginnings = tuple(prompt[:stop] for stop in sorted(stops, reverse=True) if stop)
    longest = [next((i for i, beginning in enumerate(beginnings) if beginning in head), 0) for head in answer_heads]
    return beginnings[: max(longest) + 1]


def _find_answer_prompt(template: ChatTemplate, tools: Sequence[Any] | None, tokens: re.Pattern[str]) -> str:
    """It begins where the question rendered with the prompt begins to differ from the question rendered without it."""
    question = [{"role": "user", "content": _WORDS[0]}]
    plain, with_prompt = (template.render(question, tools, prompt=prompt).text for prompt in (False, True))
    pairs = enumerate(zip(plain, with_prompt, strict=False))
    start = next((i for i, (character, other) in pairs if character != other), len(plain))
    for token in tokens.finditer(with_prompt):  # a token is not cut in two
        if token.start() < start < token.end():
            start = token.start()
    return with_prompt[start:]
