"""Chats of eight families: tokens are those of the stock tokenizer, targets what the assistant says, nothing else."""

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
from longspan.corpus.rows.sample import Row, Sample
from longspan.corpus.tokenizer import GENERATION
from tests.corpus.rows.conversations import PLAIN, THINKING, TOOLS, Chat, Message, chats
from tests.corpus.rows.families import FAMILIES, encoding_of, write_folder

NUMBER = 80
FEW = 30
DAY = {"date_string": "26 Jul 2024"}

# What a model of each family says in the conversations made by hand, in order; written by hand.
_IM = "<|im_end|>"
_CALL = '<tool_call>\n{"name": "weather", "arguments": {"days": 2, "city": "Ulm"}}\n</tool_call>'
_ARGUMENTS = '{"days": 2, "city": "Ulm"}'
EXPECTED: dict[str, dict[str, list[str]]] = {
    "qwen2.5": {
        "plain": [f"1.{_IM}", f"2.{_IM}"],
        "thinking": [f"1.{_IM}", f"2.{_IM}"],
        "tools": [f"{_CALL}{_IM}", f"No.{_IM}"],
    },
    "qwen3": {
        "plain": [f"1.{_IM}", f"<think>\n\n</think>\n\n2.{_IM}"],
        "thinking": [f"1.{_IM}", f"<think>\nhm two\n</think>\n\n2.{_IM}"],
        "tools": [f"{_CALL}{_IM}", f"<think>\n\n</think>\n\nNo.{_IM}"],
    },
    "llama3.2": {
        "plain": ["1.<|eot_id|>", "2.<|eot_id|>"],
        "thinking": ["1.<|eot_id|>", "2.<|eot_id|>"],
        "tools": ['{"name": "weather", "parameters": {"days": 2, "city": "Ulm"}}<|eot_id|>', "No.<|eot_id|>"],
    },
    "gemma3": {"plain": ["1.<end_of_turn>", "2.<end_of_turn>"], "thinking": ["1.<end_of_turn>", "2.<end_of_turn>"]},
    "mistral": {
        "plain": [" 1.</s>", " 2.</s>"],
        "thinking": [" 1.</s>", " 2.</s>"],
        "tools": [
            f'[TOOL_CALLS] [{{"name": "weather", "arguments": {_ARGUMENTS}, "id": "call00000"}}]</s>',
            " No.</s>",
        ],
    },
    "phi3": {
        "plain": ["1.<|end|>", "2.<|end|>"],
        "thinking": ["1.<|end|>", "2.<|end|>"],
        "tools": ["No.<|end|>"],
    },
    "deepseek-r1-distill": {
        "plain": ["1.<｜end▁of▁sentence｜>", "2.<｜end▁of▁sentence｜>"],
        "thinking": ["1.<｜end▁of▁sentence｜>", "2.<｜end▁of▁sentence｜>"],
        "tools": [
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
            f"{_ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
            "No.<｜end▁of▁sentence｜>",
        ],
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
    """Each family, with and without a generation_config.json that names what ends a turn."""
    name, generation = request.param
    folder = write_folder(tmp_path_factory.mktemp("families") / name, name, generation=generation)
    return name, encoding_of(folder)


def encoded(encoding: RowEncoding, chat: Chat) -> Sample:
    (sample,) = encoding.encode([Row("line 1", chat.row)])
    assert isinstance(sample, Sample), sample
    return sample


def said(encoding: RowEncoding, sample: Sample) -> list[str]:
    """The texts of the runs of targets."""
    assert sample.labels is not None
    targets = sample.labels != -100
    np.testing.assert_array_equal(sample.labels[targets], sample.ids[targets])
    edges = np.flatnonzero(np.diff(np.concatenate([[False], targets, [False]])))
    decode = encoding.tokenizer.engine.decode
    return [decode(sample.ids[a:b].tolist(), skip_special_tokens=False) for a, b in edges.reshape(-1, 2)]


@pytest.mark.parametrize("kind", BY_HAND)
def test_a_table_made_by_hand(made: tuple[str, RowEncoding], kind: str) -> None:
    name, encoding = made
    if kind not in EXPECTED[name]:
        return
    sample = encoded(encoding, FAMILIES[name].adapted(BY_HAND[kind]))
    assert said(encoding, sample) == EXPECTED[name][kind]
    if kind == "thinking":
        assert sample.unseen.unseen_thoughts == UNSEEN.get(name, 1)


def test_drawn_conversations(made: tuple[str, RowEncoding]) -> None:
    """Tokens are the stock tokenizer's; targets are what the family says, the end of each turn, and nothing else."""
    (name, encoding), family = made, FAMILIES[made[0]]
    stock: Any = AutoTokenizer.from_pretrained(encoding.tokenizer.folder)
    drawn = chats(
        NUMBER if (encoding.tokenizer.folder / GENERATION).is_file() else FEW, tools=family.tools, calls=family.calls
    )
    conversations = [family.adapted(chat) for chat in drawn]
    samples = encoding.encode([Row(f"line {i}", chat.row) for i, chat in enumerate(conversations)])
    for chat, sample in zip(conversations, samples, strict=True):
        assert isinstance(sample, Sample), sample
        if name != "gpt-oss":  # its template asks for today
            ids = stock.apply_chat_template(chat.messages, tools=chat.tools, tokenize=True, **DAY)["input_ids"]
            assert sample.ids.tolist() == ids
        assert said(encoding, sample) == family.said(chat.messages)


def test_a_span_that_is_shifted_by_a_token_is_seen(made: tuple[str, RowEncoding]) -> None:
    name, encoding = made
    sample = encoded(encoding, PLAIN)
    assert sample.labels is not None
    for shift in (1, -1):
        mask = np.roll(sample.labels != -100, shift)
        shifted = sample._replace(labels=np.where(mask, sample.ids, -100))
        assert said(encoding, shifted) != EXPECTED[name]["plain"]


TRL_TEMPLATES = Path(str(find_spec("trl.chat_templates").submodule_search_locations[0]))  # type: ignore[union-attr]
# Qwen3's prompt then has the empty thought, which is no target.
VARIABLES: list[tuple[str, str, dict[str, Any], str]] = [
    ("qwen3", "qwen3", {"enable_thinking": False}, "2.<|im_end|>"),
    ("gpt-oss", "gptoss", {"reasoning_effort": "high"}, "<|channel|>final<|message|>2.<|return|>"),
    (
        "gpt-oss",
        "gptoss",
        {"reasoning_effort": "low", "model_identity": "You are Zed."},
        "<|channel|>final<|message|>2.<|return|>",
    ),
]


def trl_encoding(folder: Path, family: str, template: str, **settings: Any) -> RowEncoding:
    """A family with a template that TRL has."""
    text = (TRL_TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    return encoding_of(write_folder(folder, family, template=text), **settings)


@pytest.mark.parametrize(("family", "template", "variables", "last"), VARIABLES, ids=str)
def test_chat_template_kwargs_of_a_row_are_those_of_the_template(
    tmp_path: Path, family: str, template: str, variables: dict[str, Any], last: str
) -> None:
    """As TRL gives them to it; also as the JSON of them, and not to the rows beside."""
    encoding = trl_encoding(tmp_path, family, template)
    stock: Any = AutoTokenizer.from_pretrained(encoding.tokenizer.folder)
    rows = [{**PLAIN.row, "chat_template_kwargs": value} for value in (None, variables, json.dumps(variables), {})]
    samples = encoding.encode([Row("line 1", row) for row in rows])
    texts = list[str]()
    for row, sample in zip(rows, samples, strict=True):
        assert isinstance(sample, Sample), sample
        texts.append(encoding.tokenizer.engine.decode(sample.ids.tolist(), skip_special_tokens=False))
        kwargs = row["chat_template_kwargs"] if isinstance(row["chat_template_kwargs"], dict) else {}
        wanted = apply_chat_template({**row, "chat_template_kwargs": kwargs}, stock)["text"]
        if sample is not samples[2]:
            assert re.sub(r"date: [-\d]+", "", texts[-1]) == re.sub(r"date: [-\d]+", "", wanted)
    assert texts[0] == texts[3] and texts[1] == texts[2] and isinstance(samples[1], Sample)
    assert (texts[0] != texts[1]) == (family == "gpt-oss") and said(encoding, samples[1])[-1] == last


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
