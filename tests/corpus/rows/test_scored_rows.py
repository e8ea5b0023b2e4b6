"""Rows for a model that scores: documents as transformers and TRL make them, with their labels, margins and ends."""

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from longspan.corpus.rows.encoding import RowEncoding
from longspan.corpus.rows.kinds import row_kind
from longspan.corpus.rows.sample import Row as DataRow, RowSettings
from longspan.corpus.tokenizer import load_tokenizer
from tests.corpus.rows.conversations import TOOL, asks, says
from tests.corpus.rows.families import encode_one, refusal, write_folder

QUESTION, GOOD, BAD = asks("Why?"), says("It scatters."), says("No.")
CHAT = {"chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]}  # with the prompt in both, as TRL calls implicit
TURNS = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "No."}]
# A row, how many scores, its label or margin, and texts or conversations that transformers encodes.
CASES: list[tuple[dict[str, Any], int, tuple[float, ...], list[Any]]] = [
    ({"prompt": "a ", "chosen": "b c", "rejected": "d"}, 1, (0.0,), ["a b c", "a d"]),
    ({"chosen": "a b", "rejected": "a c", "margin": 0.5}, 1, (0.5,), ["a b", "a c"]),
    ({"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]}, 1, (0.0,), [[QUESTION, GOOD], [QUESTION, BAD]]),
    ({**CHAT, "tools": [TOOL], "chosen_score": None}, 1, (0.0,), [[QUESTION, GOOD], [QUESTION, BAD]]),
    ({"text": "a b", "label": 2}, 3, (2.0,), ["a b"]),
    ({"text": "a b", "label": [0.5, -1]}, 2, (0.5, -1.0), ["a b"]),
    ({"text": "a b", "label": True}, 1, (1.0,), ["a b"]),
    ({"messages": [QUESTION], "label": 0}, 2, (0.0,), [[QUESTION]]),  # without an answer too
    ({"conversations": TURNS, "label": 1}, 2, (1.0,), [[QUESTION, BAD]]),
    ({"instruction": "Why?", "output": "No.", "label": 1}, 2, (1.0,), [[QUESTION, BAD]]),
    ({"prompt": "a ", "completion": "b", "label": np.float64(0.25)}, 1, (0.25,), ["a b"]),
    ({"input_ids": [5, 6, 7], "label": 1, "attention_mask": [1, 1, 1]}, 2, (1.0,), [[5, 6, 7]]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("qwen"), "qwen2.5")


def encoding_of(folder: Path, values: dict[str, Any], num_labels: int) -> RowEncoding:
    return RowEncoding(row_kind(DataRow("line 1", values)), load_tokenizer(folder), RowSettings(num_labels=num_labels))


@pytest.mark.parametrize(("values", "num_labels", "numbers", "documents"), CASES)
def test_documents_are_those_of_transformers(
    folder: Path, values: dict[str, Any], num_labels: int, numbers: tuple[float, ...], documents: list[Any]
) -> None:
    encoding, stock = encoding_of(folder, values, num_labels), AutoTokenizer.from_pretrained(folder)
    sample = encode_one(encoding, values)
    wanted = list[list[int]]()
    for document in documents:
        if isinstance(document, str):
            wanted.append([*stock(document).input_ids, encoding.tokenizer.end or 0])
        elif isinstance(document[0], int):
            wanted.append(document)
        else:
            wanted.append(stock.apply_chat_template(document, tools=values.get("tools"), return_dict=True)["input_ids"])
    assert sample.ids.tolist() == [*chain(*wanted)] and sample.labels is None
    assert sample.numbers == numbers and sample.stops == tuple(np.cumsum([*map(len, wanted)]).tolist())


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"prompt": "a", "chosen": [GOOD], "rejected": [BAD]}, '"prompt" is a string; give a list of objects'),
        ({"chosen": [GOOD], "rejected": "b"}, '"rejected" is a string'),
        ({"chosen": "a", "rejected": 3}, '"rejected" is a number'),
        ({"chosen": "a", "rejected": "b", "margin": "x"}, 'margin is "x"; give a finite number'),
        ({"chosen": "a", "rejected": "b", "chosen_score": 3}, '"chosen_score" stands beside chosen and rejected'),
        ({"text": "a", "label": float("nan")}, "label is NaN; give a finite number"),
        (
            {"input_ids": [5, 6], "labels": [5, 6]},
            '"labels" stands beside input_ids (tokens), and is not read: a label',
        ),
        ({"messages": [asks("a<|im_end|>")], "label": 1}, "holds '<|im_end|>', which the tokenizer reads as a special"),
    ],
)
def test_rows_that_have_no_score(folder: Path, values: dict[str, Any], reason: str) -> None:
    assert reason in refusal(encoding_of(folder, values, 1), values)


@pytest.mark.parametrize("prompt", [{}, {"prompt": "a "}])
def test_a_pair_without_an_answer_has_no_score(folder: Path, prompt: dict[str, str]) -> None:
    encoding = encoding_of(folder, {"chosen": "b", "rejected": "c"}, 1)
    assert '"rejected" is null' in refusal(encoding, {**prompt, "chosen": "b", "rejected": None})
    assert 'needs an object with "rejected"' in refusal(encoding, {**prompt, "chosen": "b"})
