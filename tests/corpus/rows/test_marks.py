"""Templates that mark what is generated: tokens and masks are those of the stock tokenizer's own mask."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from longspan.corpus.rows.sample import BadRow, Row, Sample
from tests.corpus.rows.conversations import PLAIN, chats
from tests.corpus.rows.families import encode_one, encoding_of, said, write_folder

# what stands before and behind the marks that are put into each template
MARKED = {
    "gemma3": (
        "+ (system if loop.first else '') + m.content | trim + '<end_of_turn>\\n' }}",
        "}}{%- if m.role == 'assistant' %}{% generation %}{{- m.content | trim + '<end_of_turn>' }}"
        "{% endgeneration %}{{- '\\n' }}{%- else %}"
        "{{- (system if loop.first else '') + m.content | trim + '<end_of_turn>\\n' }}{%- endif %}",
    ),
    "phi3": (
        "{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}",
        "{{- '<|' + m.role + '|>\\n' }}{%- if m.role == 'assistant' %}{% generation %}{{- m.content + '<|end|>' }}"
        "{% endgeneration %}{%- else %}{{- m.content + '<|end|>' }}{%- endif %}{{- '\\n' }}",
    ),
}


def marked_template(name: str) -> str:
    plain, marked = MARKED[name]
    text = (Path(__file__).parent / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
    assert plain in text
    return text.replace(plain, marked)


@pytest.mark.parametrize("name", MARKED)
def test_drawn_conversations(tmp_path: Path, name: str) -> None:
    encoding = encoding_of(write_folder(tmp_path / "marked", name, template=marked_template(name)))
    found = encoding_of(write_folder(tmp_path / "stock", name))
    stock: Any = AutoTokenizer.from_pretrained(tmp_path / "marked")
    for chat in chats(60, tools=False):
        sample, without_marks = (encode_one(one, chat.row) for one in (encoding, found))
        wanted = stock.apply_chat_template(chat.messages, return_assistant_tokens_mask=True, return_dict=True)
        assert sample.labels is not None
        assert sample.ids.tolist() == wanted["input_ids"] == without_marks.ids.tolist()
        assert (sample.labels != -100).astype(int).tolist() == wanted["assistant_masks"]
        np.testing.assert_array_equal(sample.labels, without_marks.labels)


@pytest.mark.parametrize("name", MARKED)
def test_each_turn_as_a_document_of_its_own(tmp_path: Path, name: str) -> None:
    encoding = encoding_of(write_folder(tmp_path, name, template=marked_template(name)), turns="split")
    first, second = encoding.encode([Row("line 1", PLAIN.row)])
    end = "<end_of_turn>" if name == "gemma3" else "<|end|>"
    for sample, text in ((first, "1."), (second, "2.")):
        assert isinstance(sample, Sample) and said(encoding, sample) == [text + end]


def test_a_row_whose_template_marks_nothing_is_masked(tmp_path: Path) -> None:
    template = "{% generation %}{% endgeneration %}{% for m in messages %}{{ m.content }}{% endfor %}"
    encoding = encoding_of(write_folder(tmp_path, "phi3", template=template))
    row = encoding.encode([Row("chat.jsonl, line 3", PLAIN.row)])
    assert row == [BadRow("chat.jsonl, line 3", "none of its tokens is a target", masked=True)]
