"""Chats of eight families: tokens are those of the stock tokenizer, targets what the assistant says, nothing else.

Where a template marks what is generated, targets are those of the stock tokenizer's own mask.
"""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer
from trl.data_utils import apply_chat_template

from longspan.corpus.rows.encoding import RowEncoding
from longspan.corpus.rows.sample import BadRow, Row, Sample
from longspan.model.weights.tokenizer_files import GENERATION
from tests.corpus.rows.conversations import PLAIN, THINKING, TOOLS, Chat, Message, asks, chats, says, text_parts
from tests.corpus.rows.families import (
    BREAKS,
    FAMILIES,
    LLAMA_SPLIT,
    MARKED,
    decoded,
    encode_one,
    encoding_of,
    marked_template,
    said,
    write_folder,
)

NUMBER, FEW = 25, 10  # conversations
DAY = {"date_string": "26 Jul 2024"}

# What a model of two families says in the conversations made by hand, in order; written by hand.
_IM = "<|im_end|>"
_CALL = '<tool_call>\n{"name": "weather", "arguments": {"days": 2, "city": "Ulm"}}\n</tool_call>'
_ARGUMENTS = '{"days": 2, "city": "Ulm"}'
EXPECTED: dict[str, dict[str, list[str]]] = {
    "qwen3": {
        "plain": [f"1.{_IM}", f"<think>\n\n</think>\n\n2.{_IM}"],
        "thinking": [f"1.{_IM}", f"<think>\nhm two\n</think>\n\n2.{_IM}"],
        "tools": [f"{_CALL}{_IM}", f"<think>\n\n</think>\n\nNo.{_IM}"],
    },
    "gpt-oss": {
        "plain": ["<|channel|>final<|message|>1.<|end|>", "<|channel|>final<|message|>2.<|return|>"],
        "thinking": [
            "<|channel|>final<|message|>1.<|end|>",
            "<|channel|>analysis<|message|>hm two<|end|><|start|>assistant<|channel|>final<|message|>2.<|return|>",
        ],
        "tools": [
            f" to=functions.weather<|channel|>commentary json<|message|>{_ARGUMENTS}<|call|>",
            "<|channel|>final<|message|>No.<|return|>",
        ],
    },
}
UNSEEN = {"llama3.2": 2, "gemma3": 2, "mistral": 2, "phi3": 2, "qwen2.5": 2, "deepseek-r1-distill": 2}  # thoughts
BY_HAND = {"plain": PLAIN, "thinking": THINKING, "tools": TOOLS}


@pytest.fixture(scope="module", params=[(name, named) for name in FAMILIES for named in (True, False)])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, RowEncoding]:
    name, generation = request.param
    folder = write_folder(tmp_path_factory.mktemp("families") / name, name, generation=generation)
    return name, encoding_of(folder)


@pytest.mark.parametrize("name", EXPECTED)
def test_what_families_say_is_what_is_written_by_hand(name: str) -> None:
    family = FAMILIES[name]
    for kind, wanted in EXPECTED[name].items():
        assert family.said(family.adapted(BY_HAND[kind]).messages) == wanted


def test_drawn_conversations(made: tuple[str, RowEncoding]) -> None:
    (name, encoding), family = made, FAMILIES[made[0]]
    stock: Any = AutoTokenizer.from_pretrained(encoding.tokenizer.folder)
    count = NUMBER if (encoding.tokenizer.folder / GENERATION).is_file() else FEW
    by_hand = [chat for kind, chat in BY_HAND.items() if family.tools or kind != "tools"]
    drawn = [*by_hand, *chats(count, tools=family.tools, calls=family.calls)]
    conversations = [family.adapted(chat) for chat in drawn]
    samples = encoding.encode([Row(f"line {i}", chat.row) for i, chat in enumerate(conversations)])
    for chat, sample in zip(conversations, samples, strict=True):
        assert isinstance(sample, Sample), sample
        if name != "gpt-oss":  # its template asks for today
            ids = stock.apply_chat_template(chat.messages, tools=chat.tools, tokenize=True, **DAY)["input_ids"]
            assert sample.ids.tolist() == ids
        assert said(encoding, sample) == family.said(chat.messages)
    thinking = samples[1]
    assert isinstance(thinking, Sample) and thinking.unseen.unseen_thoughts == UNSEEN.get(name, 1)
    for chat, whole in zip(conversations, samples[: len(by_hand)], strict=False):
        of_parts = chat._replace(messages=[text_parts(message) for message in chat.messages])
        (sample,) = encoding.encode([Row("line 1", of_parts.row)])
        assert isinstance(sample, Sample) and isinstance(whole, Sample)
        assert sample.ids.tolist() == whole.ids.tolist() and said(encoding, sample) == said(encoding, whole)


TRL_TEMPLATES = Path(str(find_spec("trl.chat_templates").submodule_search_locations[0]))  # type: ignore[union-attr]
# Qwen3's prompt then has the empty thought, which is no target.
VARIABLES: list[tuple[str, str, dict[str, Any], str]] = [
    ("qwen3", "qwen3", {"enable_thinking": False}, "2.<|im_end|>"),
    (
        "gpt-oss",
        "gptoss",
        {"reasoning_effort": "low", "model_identity": "You are Zed."},
        "<|channel|>final<|message|>2.<|return|>",
    ),
]


def trl_encoding(folder: Path, family: str, template: str, **settings: Any) -> RowEncoding:
    text = (TRL_TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    return encoding_of(write_folder(folder, family, template=text), **settings)


@pytest.mark.parametrize(("family", "template", "variables", "last"), VARIABLES, ids=str)
def test_chat_template_kwargs_of_a_row_are_those_of_the_template(
    tmp_path: Path, family: str, template: str, variables: dict[str, Any], last: str
) -> None:
    encoding = trl_encoding(tmp_path, family, template)
    stock: Any = AutoTokenizer.from_pretrained(encoding.tokenizer.folder)
    rows = [{**PLAIN.row, "chat_template_kwargs": value} for value in (None, variables, json.dumps(variables), {})]
    samples = encoding.encode([Row("line 1", row) for row in rows])
    texts = list[str]()
    for row, sample in zip(rows, samples, strict=True):
        assert isinstance(sample, Sample), sample
        texts.append(decoded(encoding, sample.ids))
        kwargs = row["chat_template_kwargs"] if isinstance(row["chat_template_kwargs"], dict) else {}
        wanted = apply_chat_template({**row, "chat_template_kwargs": kwargs}, stock)["text"]
        if sample is not samples[2]:
            assert re.sub(r"date: [-\d]+", "", texts[-1]) == re.sub(r"date: [-\d]+", "", wanted)
    assert texts[0] == texts[3] and texts[1] == texts[2] and isinstance(samples[1], Sample)
    assert (texts[0] != texts[1]) == (family == "gpt-oss") and said(encoding, samples[1])[-1] == last


ANSWERS = ["\n\nYes", "  no", "\n \nYes\n"]


@pytest.mark.parametrize("split", ["", LLAMA_SPLIT], ids=["gpt2", "llama3"])
@pytest.mark.parametrize(("family", "template"), [
    ("qwen2.5", "qwen2_5"), ("qwen2.5", "qwen2_5_training"), ("qwen3", "qwen3_instruct_2507"),
    ("qwen3", "qwen3_5_think"), ("llama3.2", "llama3_1"), ("phi3", "phi3"), ("phi3", "phi3_training"),
])  # fmt: skip
def test_an_answer_begins_behind_the_tokens_of_the_prompt_that_inference_has(
    tmp_path: Path, family: str, template: str, split: str
) -> None:
    """Templates of TRL, answers that begin with line breaks and blanks, questions that end in them."""
    text = (TRL_TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    folder = write_folder(tmp_path, family, template=text, texts=BREAKS, split=split)
    stock: Any = AutoTokenizer.from_pretrained(folder)
    for answer in ANSWERS:
        messages = [message for i in range(2) for message in (asks(f"Why {i}? "), says(answer))]
        rows = [Row("line 1", {"messages": messages})]
        (together,), samples = (encoding_of(folder, turns=turns).encode(rows) for turns in ("together", "split"))
        for sample, n in zip(samples, (1, 3), strict=True):
            prompt = stock.apply_chat_template(messages[:n], add_generation_prompt=True)["input_ids"]
            assert isinstance(sample, Sample) and sample.labels is not None
            assert sample.ids[: len(prompt)].tolist() == prompt and sample.unseen.inside_tokens == 0
            assert sample.labels[len(prompt)] == sample.ids[len(prompt)]
            if n == 1 and template != "qwen3_5_think":  # which leaves out the thought of an earlier turn
                assert isinstance(together, Sample) and together.ids[: len(prompt) + 2].tolist() == [
                    *prompt,
                    *sample.ids[len(prompt) : len(prompt) + 2].tolist(),
                ]


def _turns(messages: list[Message]) -> list[list[Message]]:
    return [messages[: i + 1] for i, m in enumerate(messages) if m["role"] == "assistant"]


@pytest.mark.parametrize("chat", [PLAIN, THINKING, TOOLS], ids=list(BY_HAND))
def test_each_turn_as_a_document_of_its_own(tmp_path: Path, chat: Chat) -> None:
    encoding = encoding_of(write_folder(tmp_path, "qwen3"), turns="split")
    samples = encoding.encode([Row("line 1", chat.row), Row("line 2", PLAIN.row)])
    assert [s.row for s in samples if isinstance(s, Sample)] == [0] * len(_turns(chat.messages)) + [1, 1]
    for sample, messages in zip(samples, _turns(chat.messages), strict=False):
        assert isinstance(sample, Sample)
        assert said(encoding, sample) == FAMILIES["qwen3"].said(messages)[-1:]


# ---- templates that mark what is generated


@pytest.mark.parametrize("name", MARKED)
def test_templates_with_marks(tmp_path: Path, name: str) -> None:
    encoding = encoding_of(write_folder(tmp_path / "marked", name, template=marked_template(name)))
    found = encoding_of(write_folder(tmp_path / "stock", name))
    stock: Any = AutoTokenizer.from_pretrained(tmp_path / "marked")
    for chat in chats(25, tools=False):
        sample, without_marks = (encode_one(one, chat.row) for one in (encoding, found))
        wanted = stock.apply_chat_template(chat.messages, return_assistant_tokens_mask=True, return_dict=True)
        assert sample.labels is not None
        assert sample.ids.tolist() == wanted["input_ids"] == without_marks.ids.tolist()
        assert (sample.labels != -100).astype(int).tolist() == wanted["assistant_masks"]
        np.testing.assert_array_equal(sample.labels, without_marks.labels)


def test_a_row_whose_template_marks_nothing_is_masked(tmp_path: Path) -> None:
    template = "{% generation %}{% endgeneration %}{% for m in messages %}{{ m.content }}{% endfor %}"
    encoding = encoding_of(write_folder(tmp_path, "phi3", template=template))
    row = encoding.encode([Row("chat.jsonl, line 3", PLAIN.row)])
    assert row == [BadRow("chat.jsonl, line 3", "none of its tokens is a target", masked=True)]
