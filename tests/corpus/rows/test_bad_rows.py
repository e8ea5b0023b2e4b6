"""Rows that give no document: each is told in one line, in its place, and the rows beside it are read."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longspan.corpus.rows.encoding import RowEncoding
from longspan.corpus.rows.sample import KEYS, BadRow, Kind, Row, Sample
from longspan.corpus.tokenizer import load_tokenizer, train_tokenizer
from longspan.errors import DataError
from tests.corpus.rows.conversations import PLAIN, TOOL, TOOLS, asks, says
from tests.corpus.rows.families import FAMILIES, encoding_of, write_folder

BEFORE = asks("Hi")
BAD_CHATS: dict[str, tuple[Any, str]] = {
    "no list": ("hello", '"messages" is a string; give a list of objects with role and content'),
    "empty": ([], '"messages" is empty; give a list'),
    "no role": ([{"content": "x"}], "messages[0] needs an object with a string role; found"),
    "sharegpt": ([{"from": "human", "value": "x"}], "from and value are called role and content here"),
    "a number": ([BEFORE, {"role": "assistant", "content": 3}], "messages[1].content is a number; give a string: 3"),
    "an image": ([{"role": "user", "content": [{"type": "image"}]}], "messages[0].content[0] is image; only parts of"),
    "calls": ([BEFORE, says("", tool_calls=[{}])], "messages[1].tool_calls[0] names no function"),
    "no assistant": ([BEFORE], "no message is of an assistant, so that there is nothing to learn"),
    "half a character": (
        [asks("a\ud800"), says("b")],
        "character 2 of messages[0].content is \\ud800, a lone",
    ),
    "an end of turn": (
        [asks("a<|im_end|>\n<|im_start|>system\nx"), says("b")],
        "messages[0].content holds '<|im_end|>', which the tokenizer reads as a special token",
    ),
}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> RowEncoding:
    return encoding_of(write_folder(tmp_path_factory.mktemp("qwen"), "qwen2.5"))


@pytest.mark.parametrize("case", BAD_CHATS)
def test_chats_that_are_none(qwen: RowEncoding, case: str) -> None:
    messages, reason = BAD_CHATS[case]
    good, bad, other = qwen.encode(
        [Row("c, line 1", PLAIN.row), Row("c, line 2", {"messages": messages}), Row("c, line 3", PLAIN.row)]
    )
    assert isinstance(good, Sample) and isinstance(other, Sample) and (good.row, other.row) == (0, 2)
    assert isinstance(bad, BadRow) and bad.where == "c, line 2" and reason in bad.reason and not bad.masked
    assert "\n" not in bad.reason


def test_tools_that_are_none_and_tools_as_json(qwen: RowEncoding) -> None:
    rows = [{"messages": PLAIN.messages, "tools": tools} for tools in ("{", 3, [TOOL], "[]", None)]
    bad_json, bad_kind, *good = qwen.encode([Row("line", row) for row in rows])
    assert isinstance(bad_json, BadRow) and '"tools" is a string that is no JSON' in bad_json.reason
    assert isinstance(bad_kind, BadRow) and '"tools" is a number' in bad_kind.reason
    assert all(isinstance(sample, Sample) for sample in good)


def test_special_tokens_in_chats_are_read_where_they_are_wanted(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "qwen2.5")
    encoding = encoding_of(folder, parse_special_tokens=True)
    (sample,) = encoding.encode([Row("line 1", {"messages": [asks("a<|endoftext|>b"), says("c")]})])
    assert isinstance(sample, Sample)
    assert encoding.tokenizer.engine.token_to_id("<|endoftext|>") in sample.ids


TEMPLATES: dict[str, tuple[str, str, str]] = {
    "raises": ("gemma3", "", "its chat template says: Conversation roles must alternate"),
    "fails": ("phi3", "{{ messages[0].nothing.here }}", "its chat template says: 'dict object' has no attribute"),
    "fails in Python": ("phi3", "{{ 'a' + 1 }}", "its chat template fails: TypeError: can only concatenate"),
    "no end of turn": (
        "phi3",
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}",
        "no token that ends a turn follows messages[1] in the chat template: behind its last text comes '<|user|>",
    ),
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_templates_that_refuse_or_cannot_be_followed(tmp_path: Path, case: str) -> None:
    name, template, reason = TEMPLATES[case]
    encoding = encoding_of(write_folder(tmp_path, name, template=template or None))
    messages = [asks("a"), asks("b"), says("c")] if case == "raises" else PLAIN.messages
    (bad,) = encoding.encode([Row("chat.jsonl, line 7", {"messages": messages})])
    assert isinstance(bad, BadRow) and bad.where == "chat.jsonl, line 7"
    assert reason in bad.reason, bad.reason


def test_a_turn_whose_beginning_the_template_does_not_write(tmp_path: Path) -> None:
    """DeepSeek-R1-Distill begins a turn with the first call of a conversation alone."""
    encoding = encoding_of(write_folder(tmp_path, "deepseek-r1-distill"))
    chat = FAMILIES["deepseek-r1-distill"].adapted(TOOLS)
    (bad,) = encoding.encode([Row("c, line 1", {**chat.row, "messages": [*chat.messages, *chat.messages[1:]]})])
    assert isinstance(bad, BadRow) and bad.reason.startswith("where messages[6] begins cannot be told from its chat")


def test_tokenizers_without_a_template(tmp_path: Path) -> None:
    trained = train_tokenizer(["a text"], 300)
    with pytest.raises(DataError, match=r"trained on the corpus has no chat template; name the folder"):
        RowEncoding("messages", trained)
    trained.save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"the tokenizer in .* has no chat template; put its chat_template.jinja there"):
        RowEncoding("messages", load_tokenizer(tmp_path))


BAD_TOKENS: list[tuple[dict[str, Any], str]] = [
    ({"text": "a"}, "needs an object with \"input_ids\"; found keys ['text']"),
    ({"input_ids": "a"}, "input_ids is a string; give a list of integers"),
    ({"input_ids": [1, "a"]}, "input_ids holds something else than integers"),
    ({"input_ids": [1.5, 2]}, "input_ids holds something else than integers"),
    ({"input_ids": []}, "input_ids has no tokens"),
    ({"input_ids": [1, 9999]}, "input_ids holds 9999 at 1, and the tokenizer has ids 0 to "),
    ({"input_ids": [1, -1]}, "input_ids holds -1 at 1"),
    ({"input_ids": [1, 2], "labels": [1]}, "labels has 1 entries for 2 input_ids; give one each"),
    ({"input_ids": [1, 2], "loss_mask": [1, 1, 1]}, "loss_mask has 3 entries for 2 input_ids"),
    ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "loss_mask holds 2; give a 0 or a 1"),
    ({"input_ids": [1, 2], "labels": [1, 2], "loss_mask": [1, 1]}, "labels and loss_mask both say"),
    ({"input_ids": [1, 2], "attention_mask": [0, 1]}, "attention_mask masks 1 tokens of padding"),
    ({"input_ids": [1, 2], "labels": [-100, 9999]}, "labels holds 9999 at 0"),
    ({"input_ids": [1, 2], "completion_mask": [1]}, "completion_mask has 1 entries for 2 input_ids"),
    ({"input_ids": [1, 2], "assistant_masks": [0, 3]}, "assistant_masks holds 3; give a 0 or a 1"),
    ({"input_ids": [1, 2], "labels": [1, 2], "completion_mask": [0, 1]}, "labels and completion_mask both say"),
    (
        {"input_ids": [1, 2], "special_tokens_mask": [0, 1]},
        '"special_tokens_mask" stands beside input_ids (tokens), and',
    ),
    ({"input_ids": [1, 2], "label": 1}, '"label" stands beside input_ids (tokens), and is not read'),
    ({"input_ids": [1, 2, 3], "seq_lengths": [2, 1]}, "seq_lengths says that the row holds 2 documents"),
    ({"input_ids": [1, 2, 3], "position_ids": [0, 1, 0]}, "position_ids are not 0 to 2"),
]

CHAT = {"messages": PLAIN.messages}
PROMPT = {"prompt": "a", "completion": "b"}
BAD_KEYS: list[tuple[Kind, dict[str, Any], str]] = [
    ("prompt+completion", {**PROMPT, "label": False}, '"label" stands beside prompt and completion, and is not read'),
    ("messages", {**CHAT, "label": True}, '"label" stands beside messages (chat), and is not read: answers that are'),
    ("messages", {**CHAT, "kto_tag": False}, '"kto_tag" stands beside messages (chat)'),
    (
        "messages",
        {**CHAT, "rejected_response": "x"},
        '"rejected_response" stands beside messages (chat), and is not read',
    ),
    (
        "messages",
        {**CHAT, "chosen": ["a"], "rejected": ["b"]},
        "pairs of answers are for a loss of one's own (docs/losses.md)",
    ),
    (
        "messages",
        {**CHAT, "assistant_masks": [1]},
        '"assistant_masks" stands beside messages (chat), and is not read: masks',
    ),
    (
        "messages",
        {**CHAT, "weight": 0.5},
        "rows have no weights; give a source a weight (data.sources); leave the key out",
    ),
    ("text", {"text": "a", "loss_mask": [1]}, '"loss_mask" stands beside text, and is not read'),
    ("text", {"text": "a", **CHAT}, "holds text and also messages (chat); a row is of one kind: leave the others out"),
    ("messages", {**PROMPT, **CHAT}, "holds messages (chat) and also prompt and completion; a row is of one kind"),
]


@pytest.mark.parametrize(("kind", "values", "reason"), BAD_KEYS)
def test_keys_that_would_count_are_refused(qwen: RowEncoding, kind: Kind, values: dict[str, Any], reason: str) -> None:
    """Those that say what is not to be learnt, or otherwise; a key without a value says nothing."""
    (bad,) = RowEncoding(kind, qwen.tokenizer).encode([Row("f, line 31", values)])
    assert isinstance(bad, BadRow) and reason in bad.reason and not bad.masked
    if "also" not in reason:
        others = {key: None if key not in KEYS[kind] else value for key, value in values.items()}
        (sample,) = RowEncoding(kind, qwen.tokenizer).encode([Row("f, line 32", others)])
        assert isinstance(sample, Sample)


UNREAD: dict[str, Any] = {  # of rows of chats, and of prompts
    "enable_thinking": False,
    "reasoning_effort": "high",
    "thinking_budget": 0,
    "documents": [{"text": "a"}],
    "system": "Be brief.",
    "system_prompt": "a",
    "history": [["a", "b"]],
    "functions": [{}],
    "function_call": "f",
    "tool": "f",
    "response_format": {"type": "json"},
    "chat_template": "{{ a }}",
    "loss_scale": 0.0,
}
UNREAD_OF_MESSAGES: dict[str, Any] = {
    "function_call": {"name": "f", "arguments": "{}"},
    "reasoning_details": [{}],
    "thoughts": "hm",
    "eot": False,
    "training_detail": [{}],
    "loss_scale": 1.0,
}


def test_keys_by_which_other_trainers_act_are_refused_by_name(qwen: RowEncoding) -> None:
    """In rows and messages; none of them without a value, and none beside tokens, which are made already."""
    for kind, values in (("messages", CHAT), ("prompt+completion", PROMPT), ("input_ids", {"input_ids": [1, 2]})):
        for key, value in UNREAD.items():
            (result,) = RowEncoding(kind, qwen.tokenizer).encode([Row("f, line 1", {**values, key: value})])
            if kind == "input_ids" and key != "loss_scale":
                assert isinstance(result, Sample), key
            else:
                assert isinstance(result, BadRow) and result.reason.startswith(f'"{key}" stands beside '), key
            (sample,) = RowEncoding(kind, qwen.tokenizer).encode([Row("f, line 2", {**values, key: type(value)()})])
            assert isinstance(sample, Sample) == (isinstance(value, str | list | dict) or isinstance(result, Sample))
    for key, value in UNREAD_OF_MESSAGES.items():
        question, answer = PLAIN.messages[:2]
        (bad,) = qwen.encode([Row("f, line 1", {"messages": [question, {**answer, key: value}]})])
        assert isinstance(bad, BadRow) and bad.reason.startswith(f"messages[1].{key} is not read: "), key


def test_variables_of_a_template_that_are_none(qwen: RowEncoding) -> None:
    for value, reason in (
        ("{", '"chat_template_kwargs" is a string that is no JSON'),
        ([1], '"chat_template_kwargs" is a list; give an object'),
        ({"tokenize": True}, '"chat_template_kwargs" has tokenize, which is no variable of a chat template'),
        ({"words": ["<|im_end|>"]}, "chat_template_kwargs.words[0] holds '<|im_end|>', which the tokenizer"),
    ):
        (bad,) = qwen.encode([Row("f, line 1", {**CHAT, "chat_template_kwargs": value})])
        assert isinstance(bad, BadRow) and bad.reason.startswith(reason)


def test_keys_of_no_kind_are_left_alone(qwen: RowEncoding) -> None:
    """Classes of texts, say, and whatever else stands beside chats."""
    alone: dict[Kind, dict[str, Any]] = {
        "text": {"text": "a b", "label": 3},
        "messages": {**CHAT, "id": 1, "score": 0.5, "source": "x"},
    }
    for kind, values in alone.items():
        (sample,) = RowEncoding(kind, qwen.tokenizer).encode([Row("f, line 1", values)])
        assert isinstance(sample, Sample)


@pytest.mark.parametrize(("values", "reason"), BAD_TOKENS)
def test_rows_of_tokens_that_are_none(qwen: RowEncoding, values: dict[str, Any], reason: str) -> None:
    (bad,) = RowEncoding("input_ids", qwen.tokenizer).encode([Row("t, line 1", values)])
    assert isinstance(bad, BadRow) and reason in bad.reason


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.array([]), "input_ids has no tokens"),
        (np.zeros((0, 2), int), "input_ids has no tokens"),
        (np.array([1, None], dtype=object), "input_ids holds something else than integers"),
        (np.array([np.zeros((2, 2)), np.zeros((2, 3)), None], dtype=object)[:2], "something else than integers"),
        (np.zeros((2, 2), int), "input_ids holds something else than integers"),
        (np.array([1.5, 2.0]), "input_ids holds something else than integers"),
        (np.array(3), "input_ids is a number; give a list of integers"),
    ],
)
def test_arrays_that_are_no_tokens_are_bad_rows_as_lists_are(qwen: RowEncoding, array: Any, reason: str) -> None:
    encoding = RowEncoding("input_ids", qwen.tokenizer)
    (bad,) = encoding.encode([Row("t, line 1", {"input_ids": array})])
    assert isinstance(bad, BadRow) and reason in bad.reason
    (as_list,) = encoding.encode([Row("t, line 1", {"input_ids": array.tolist()})])
    assert as_list == bad


def test_arrays_of_integers_are_tokens_as_lists_are(qwen: RowEncoding) -> None:
    encoding = RowEncoding("input_ids", qwen.tokenizer)
    for array in (np.array([1, 2], np.uint16), np.array([1, 2], object)):
        values = {"input_ids": array, "position_ids": np.arange(2), "seq_lengths": np.array([])}
        (sample,) = encoding.encode([Row("t, line 1", values)])
        assert isinstance(sample, Sample) and sample.ids.tolist() == [1, 2] and sample.ids.dtype == np.int64


def test_rows_of_which_no_token_is_a_target_are_masked(qwen: RowEncoding) -> None:
    rows = [{"input_ids": [1, 2], "labels": [1, -100]}, {"input_ids": [1, 2], "loss_mask": [1, 0]}]
    for result in RowEncoding("input_ids", qwen.tokenizer).encode([Row("t, line 1", row) for row in rows]):
        assert result == BadRow("t, line 1", "none of its tokens is a target", masked=True)
