"""What the search for turns could get wrong without an error, put into the code on purpose: the tables show it."""

from pathlib import Path

import pytest

from longspan.corpus.rows.sample import Row, Sample
from tests.corpus.rows.families import FAMILIES, encoding_of, said, write_folder
from tests.corpus.rows.test_chat import BY_HAND
from tests.mutation import mutated

CHATS = "corpus.rows.chats"
TURNS = f"{CHATS}.infer_turns"
TOKENS = f"{CHATS}.turn_tokens"
MUTATIONS = {  # what is wrong -> the module, what stands there, and in its place
    "the prompt is a target": (TURNS, "return at + len(prompt)", "return at"),
    "the prompt of another turn": (TURNS, "text.rfind(prompt, turn_before.ends[-1], begin)", "text.find(prompt)"),
    "a thought is not the assistant's": (TURNS, "pairs.sort(key=lambda pair: pair[0])", "pairs = pairs[-1:]"),
    "the end of a turn is no target": (TOKENS, "return self._find_end_token(inside[i:]).end()", "return start"),
    "an end that is a token too late": (TOKENS, "self._find_end_token(inside[i:]).end()", "tokens[-1].end()"),
    "marks are counted with the others": (TURNS, "removed += len(match.group())", "removed += 0"),
    "tokens by where they end": (f"{CHATS}.chat", "(begins < stop) & (ends > start)",
                                 "(begins < stop) & (ends >= start)"),
    "the beginning of text twice": (f"{CHATS}.chat", "encode_with_spans(text, borders)",
                                    "encode_with_spans(chr(65) + text, borders)"),
}  # fmt: skip


def wrong_tables(folders: dict[str, Path]) -> list[tuple[str, str]]:
    """The families and conversations whose targets are not what the family says."""
    wrong = []
    for name, folder in folders.items():
        encoding, family = encoding_of(folder), FAMILIES[name]
        for kind, chat in BY_HAND.items():
            (result,) = encoding.encode([Row("line 1", family.adapted(chat).row)])
            wanted = family.said(family.adapted(chat).messages)
            if not isinstance(result, Sample) or said(encoding, result) != wanted:
                wrong.append((name, kind))
    return wrong


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("mutations")
    return {name: write_folder(made / name, name) for name in ("qwen3", "gpt-oss", "mistral")}


@pytest.mark.parametrize("name", ["nothing", *MUTATIONS])
def test_what_is_wrong_is_noticed(folders: dict[str, Path], name: str) -> None:
    with mutated(MUTATIONS.get(name)):
        wrong = wrong_tables(folders)
    assert bool(wrong) == (name in MUTATIONS)
