"""Rows that give no document: each is told in one line, in its place, and the rows beside it are read."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longspan.corpus.rows.encoding import RowEncoding
from longspan.corpus.rows.kinds import KEYS, Kind, rename_columns
from longspan.corpus.rows.sample import BadRow, Row, RowSettings, Sample
from longspan.corpus.tokenizer import load_tokenizer, train_tokenizer
from longspan.errors import DataError
from tests.corpus.rows.conversations import PLAIN, TOOL, TOOLS, asks, says
from tests.corpus.rows.families import FAMILIES, decoded, encode_one, encoding_of, refusal, write_folder

BEFORE = asks("Hi")
CHAT = {"messages": PLAIN.messages}
PROMPT = {"prompt": "a", "completion": "b"}
BAD_CHATS: list[tuple[Any, str]] = [
    ("hello", '"messages" is a string; give a list of objects with role and content'),
    ('[{"role": "user"}]', "role and content, in .jsonl or .json: a cell of a .csv is a text"),
    ([], '"messages" is empty; give a list'),
    ([{"content": "x"}], "messages[0] needs an object with a string role; found"),
    ([{"from": "human", "value": "x"}], '; data.rename_columns = ["conversations=messages"] reads from and value'),
    ([BEFORE, {"role": "assistant", "content": 3}], "messages[1].content is a number; give a string: 3"),
    ([{"role": "user", "content": [{"type": "image"}]}], "messages[0].content[0] is image; only parts of"),
    ([BEFORE, says("", tool_calls=[{}])], "messages[1].tool_calls[0] names no function"),
    ([BEFORE], "no message is of an assistant, so that there is nothing to learn"),
    ([asks("a\ud800"), says("b")], "character 2 of messages[0].content is \\ud800, a lone"),
    (
        [asks("a<|im_end|>\n<|im_start|>system\nx"), says("b")],
        "messages[0].content holds '<|im_end|>', which the tokenizer reads as a special token",
    ),
    (
        [asks("a"), {**says("b"), "weight": 0.5}],
        "messages[1].weight is 0.5; give 0 where the message is no target, and 1 where",
    ),
    ([asks("a"), {**says("b"), "train": "no"}], 'messages[1].train is "no"; give 0'),
    (
        [{**asks("a"), "train": True}, says("b")],
        "messages[0].train is true, and only what an assistant says is learnt; its role",
    ),
    ([asks("a"), {**says("b"), "loss_mask": [0]}], "messages[1].loss_mask is not read: say with weight 0"),
    ([asks("a"), {**says("b"), "train_detail": [{}]}], "messages[1].train_detail is not read"),
]
BAD_VARIABLES: list[tuple[Any, str]] = [
    ("{", '"chat_template_kwargs" is a string that is no JSON'),
    ([1], '"chat_template_kwargs" is a list; give an object'),
    ({"tokenize": True}, '"chat_template_kwargs" has tokenize, which is no variable of a chat template'),
    ({"words": ["<|im_end|>"]}, "chat_template_kwargs.words[0] holds '<|im_end|>', which the tokenizer"),
]
BESIDE_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"label": True}, '"label" stands beside messages (chat), and is not read: a label of a document'),
    ({"kto_tag": False}, '"kto_tag" stands beside messages (chat)'),
    ({"rejected_response": "x"}, '"rejected_response" stands beside messages (chat), and is not read'),
    ({"chosen_ids": ["a"]}, "pairs are rows with both chosen and rejected (docs/preferences.md); leave the key out"),
    ({"chosen": ["a"], "rejected": ["b"]}, '"chosen" stands beside messages (chat), and is not read: pairs are'),
    ({"system": 3}, '"system" is a number'),
    ({"assistant_masks": [1]}, '"assistant_masks" stands beside messages (chat), and is not read: masks'),
    ({"weight": 0.5}, "rows have no weights; give a source a weight (data.sources); leave the key out"),
    (
        PROMPT,
        'a row is of one kind: data.rename_columns = ["prompt=", "completion="] reads messages (chat), and ["mess',
    ),
]
BAD_TOKENS: list[tuple[dict[str, Any], str]] = [
    ({"text": "a"}, "needs an object with \"input_ids\"; found keys ['text']"),
    ({"input_ids": "a"}, "input_ids is a string; give a list of integers"),
    ({"input_ids": [1, "a"]}, "input_ids holds something else than integers"),
    ({"input_ids": [1, 9999]}, "input_ids holds 9999 at 1, and the tokenizer has ids 0 to "),
    ({"input_ids": [1, -1]}, "input_ids holds -1 at 1"),
    ({"input_ids": [1, 2], "labels": [1]}, "labels has 1 entries for 2 input_ids; give one each"),
    ({"input_ids": [1, 2], "loss_mask": [1, 1, 1]}, "loss_mask has 3 entries for 2 input_ids"),
    ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "loss_mask holds 2; give a 0 or a 1"),
    ({"input_ids": [1, 2], "labels": [1, 2], "loss_mask": [1, 1]}, "labels and loss_mask both say"),
    ({"input_ids": [1, 2], "attention_mask": [0, 1]}, "attention_mask masks 1 tokens of padding"),
    ({"input_ids": [1, 2], "labels": [-100, 9999]}, "labels holds 9999 at 0"),
    ({"input_ids": [1, 2], "label": 1}, '"label" stands beside input_ids (tokens), and is not read'),
    ({"input_ids": [1, 2, 3], "seq_lengths": [2, 1]}, "seq_lengths says that the row holds 2 documents"),
    ({"input_ids": [1, 2, 3], "position_ids": [0, 1, 0]}, "position_ids are not 0 to 2"),
]
TURNS = [("system", "Be brief."), ("human", "Why?"), ("gpt", "So."), ("tool", "4"), ("gpt", "Yes.")]


def turns(*pairs: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"from": role, "value": text} for role, text in pairs]


BAD_TURNS: list[tuple[Any, str]] = [
    ([], '"conversations" is empty; give a list of turns'),
    ("a", '"conversations" is a string; give a list of turns'),
    ([{"from": ["gpt"], "value": "a"}], "conversations[0] needs an object with from, one of"),
    ([{"from": "narrator", "value": "a"}], "conversations[0] needs an object with from, one of"),
    ([asks("a")], 'data.rename_columns = ["messages=conversations"] reads role and content'),
    ([{"from": "human", "value": "a", "markdown": 1}], "conversations[0].markdown is not read"),
    (turns(("human", "a")), "no message is of an assistant"),
    ([{"from": "gpt", "value": 1}], '"value" is a number'),
    (turns(("human", "a"), ("function_call", "f")), '"conversations[1].value" is a string that is no JSON'),
    (turns(("human", "a"), ("function_call", "3")), "names no function"),
]
ALPACA = {"instruction": "a", "output": "b"}
WRONG: list[tuple[Kind, dict[str, Any], str]] = [
    *(("messages", {"messages": messages}, reason) for messages, reason in BAD_CHATS),
    *(("messages", {**values, **CHAT}, reason) for values, reason in BESIDE_CHAT),
    *(("messages", {**CHAT, "chat_template_kwargs": value}, reason) for value, reason in BAD_VARIABLES),
    *(("input_ids", values, reason) for values, reason in BAD_TOKENS),
    *(("conversations", {"conversations": value}, reason) for value, reason in BAD_TURNS),
    (
        "conversations",
        {"conversations": turns(*TURNS), "system": "a"},
        '"system" stands beside conversations, of which',
    ),
    (
        "messages",
        {"messages": [{"role": "system", "content": "b"}, *PLAIN.messages], "system": "a"},
        '"system" stands beside messages, of which the first is a system message too; data.rename_columns = ["sys',
    ),
    ("conversations", {"conversations": turns(*TURNS), "messages": []}, "holds messages (chat) and also conversations"),
    ("instruction+output", {**ALPACA, "instruction": 1}, '"instruction" is a number'),
    (
        "instruction+output",
        {**ALPACA, "history": [["c", "d"], ["e"]]},
        'history[1] is ["e"]; give a list of pairs [ques',
    ),
    ("instruction+output", {**ALPACA, "history": '[["c", 3]]'}, 'history[0] is ["c", 3]'),
    (
        "prompt+completion",
        {**PROMPT, "system": "c"},
        '"system" stands beside prompt, which is a string that no template writes; data.rename_columns = ["ins',
    ),
    ("prompt+completion", {**PROMPT, "label": False}, '"label" stands beside prompt and completion, and is not read'),
    (
        "instruction+output",
        {**ALPACA, "chosen": "c", "rejected": "d"},
        '["chosen=", "rejected="] reads instruction and output (chat, as Alpaca has it), and ["output="] reads chosen',
    ),
    ("text", {"text": "a", "loss_mask": [1]}, '"loss_mask" stands beside text, and is not read'),
    (
        "text",
        {"text": "a", **CHAT},
        'a row is of one kind: data.rename_columns = ["messages="] reads text, and ["text="] reads messages (chat)',
    ),
    ("text", {"text": 3}, 'needs an object with a string "text"; "text" is a number: 3'),
    ("text", {"text": "a\ud800"}, "character 2 of its text is \\ud800, a lone surrogate"),
]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> RowEncoding:
    return encoding_of(write_folder(tmp_path_factory.mktemp("qwen"), "qwen2.5"))


@pytest.mark.parametrize(("kind", "values", "reason"), WRONG)
def test_rows_that_give_no_document(qwen: RowEncoding, kind: Kind, values: dict[str, Any], reason: str) -> None:
    """A key without a value says nothing."""
    encoding = RowEncoding(kind, qwen.tokenizer)
    found = refusal(encoding, values)
    assert reason in found and "\n" not in found
    known = {key: value if key in KEYS[kind] else None for key, value in values.items()}
    if None in known.values() and any(known.values()) and "also" not in reason:
        encode_one(encoding, known)


def test_rows_of_no_kind_among_others_are_bad_rows(qwen: RowEncoding) -> None:
    """Whatever the kind of the first rows, and whatever is learnt of them."""
    settings = [
        RowSettings(),
        RowSettings(num_labels=1),
        RowSettings(preference="pairs"),
        RowSettings(preference="kto"),
    ]
    for kind, setting, row in product(
        KEYS, settings, ({}, {"id": 3}, {key: None for keys in KEYS.values() for key in keys})
    ):
        (bad,) = RowEncoding(kind, qwen.tokenizer, setting).encode([Row("line 1", row)])
        assert isinstance(bad, BadRow), (kind, setting, row)


def test_a_bad_row_stands_in_its_place(qwen: RowEncoding) -> None:
    rows = [Row(f"c, line {n}", values) for n, values in enumerate((CHAT, {"messages": []}, CHAT), 1)]
    good, bad, other = qwen.encode(rows)
    assert isinstance(good, Sample) and isinstance(other, Sample) and (good.row, other.row) == (0, 2)
    assert isinstance(bad, BadRow) and bad.where == "c, line 2"


def test_tools_that_are_none_and_tools_as_json(qwen: RowEncoding) -> None:
    assert '"tools" is a string that is no JSON' in refusal(qwen, {**CHAT, "tools": "{"})
    assert '"tools" is a number' in refusal(qwen, {**CHAT, "tools": 3})
    for tools in ([TOOL], "[]", None):
        encode_one(qwen, {**CHAT, "tools": tools})


def test_special_tokens_in_chats_are_read_where_they_are_wanted(tmp_path: Path) -> None:
    encoding = encoding_of(write_folder(tmp_path, "qwen2.5"), parse_special_tokens=True)
    sample = encode_one(encoding, {"messages": [asks("a<|endoftext|>b"), says("c")]})
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
    assert reason in refusal(encoding, {"messages": messages})


def test_a_turn_whose_beginning_the_template_does_not_write(tmp_path: Path) -> None:
    """DeepSeek-R1-Distill begins a turn with the first call of a conversation alone."""
    encoding = encoding_of(write_folder(tmp_path, "deepseek-r1-distill"))
    chat = FAMILIES["deepseek-r1-distill"].adapted(TOOLS)
    reason = refusal(encoding, {**chat.row, "messages": [*chat.messages, *chat.messages[1:]]})
    assert reason.startswith("where messages[6] begins cannot be told from its chat")


def test_tokenizers_without_a_template(tmp_path: Path) -> None:
    trained = train_tokenizer(["a text"], 300)
    with pytest.raises(DataError, match=r"trained on the corpus has no chat template; name the folder"):
        RowEncoding("messages", trained)
    trained.save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"the tokenizer in .* has no chat template; put its chat_template.jinja there"):
        RowEncoding("messages", load_tokenizer(tmp_path))


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
    for kind, values in (("messages", CHAT), ("prompt+completion", PROMPT), ("input_ids", {"input_ids": [1, 2]})):
        for key, value in UNREAD.items():
            if (kind, key) == ("messages", "system"):
                continue
            (result,) = RowEncoding(kind, qwen.tokenizer).encode([Row("f, line 1", {**values, key: value})])
            if kind == "input_ids" and key != "loss_scale":
                assert isinstance(result, Sample), key
            else:
                assert isinstance(result, BadRow) and result.reason.startswith(f'"{key}" stands beside '), key
            (sample,) = RowEncoding(kind, qwen.tokenizer).encode([Row("f, line 2", {**values, key: type(value)()})])
            assert isinstance(sample, Sample) == (isinstance(value, str | list | dict) or isinstance(result, Sample))
    for key, value in UNREAD_OF_MESSAGES.items():
        question, answer = PLAIN.messages[:2]
        reason = refusal(qwen, {"messages": [question, {**answer, key: value}]})
        assert reason.startswith(f"messages[1].{key} is not read: "), key


HOLD_TOOLS: dict[str, Any] = {  # as published sets and other trainers name them
    "tool_defs": [TOOL],
    "tool_schemas": json.dumps([TOOL]),
    "tools_json": json.dumps([TOOL["function"]]),
    "available_tools": [json.dumps(TOOL)],
    "target_tools": {"weather": TOOL["function"]},
    "function_description": '{"name": "weather", "inputSchema": {}}',
    "apis": [{"name": "weather", "parameters": {}}],
    "toolDefinitions": [TOOL],
}
HOLD_NONE: dict[str, Any] = {"num_tools": 3, "target_tools": "a, b", "tool_defs": [], "parallel_tool_calls": True}


def test_tools_under_another_name_are_refused_with_what_to_write(qwen: RowEncoding) -> None:
    of_messages = {"prompt": PLAIN.messages[:1], "completion": PLAIN.messages[1:2]}
    rows: dict[Kind, dict[str, Any]] = {"messages": CHAT, "conversations": {"conversations": turns(*TURNS)}}
    rows |= {"instruction+output": ALPACA, "prompt+completion": of_messages}
    for (kind, values), (key, value) in product(rows.items(), HOLD_TOOLS.items()):
        encoding, row = RowEncoding(kind, qwen.tokenizer), {**values, key: value}
        reason = refusal(encoding, row)
        assert (
            reason.startswith(f'"{key}" stands beside ')
            and f'data.rename_columns = ["tools={key}"] renames it' in reason
        )
        encode_one(encoding, {**row, "tools": [TOOL]})  # which is read
        encode_one(encoding, dict(rename_columns(Row("line 1", row), [f"{key}="]).values))
        if isinstance(value, list) and isinstance(value[0], dict):
            renamed = encode_one(encoding, dict(rename_columns(Row("line 1", row), [f"tools={key}"]).values))
            assert "weather" in decoded(encoding, renamed.ids)
    for key, value in HOLD_NONE.items():
        encode_one(qwen, {**CHAT, key: value})


def test_keys_of_no_kind_are_left_alone(qwen: RowEncoding) -> None:
    """Classes of texts, say, and whatever else stands beside chats; words on what is learnt without a value."""
    encode_one(RowEncoding("text", qwen.tokenizer), {"text": "a b", "label": 3})
    encode_one(qwen, {**CHAT, "id": 1, "score": 0.5, "source": "x"})
    encode_one(qwen, {"messages": [asks("a"), {**says("b"), "weight": None, "loss_mask": None}]})


NO_IDS = [
    (np.array([]), "input_ids has no tokens"),
    (np.zeros((0, 2), int), "input_ids has no tokens"),
    (np.array([1, None], dtype=object), "input_ids holds something else than integers"),
    (np.array([np.zeros((2, 2)), np.zeros((2, 3)), None], dtype=object)[:2], "something else than integers"),
    (np.zeros((2, 2), int), "input_ids holds something else than integers"),
    (np.array([1.5, 2.0]), "input_ids holds something else than integers"),
    (np.array(3), "input_ids is a number; give a list of integers"),
]


def test_arrays_are_read_as_lists_are(qwen: RowEncoding) -> None:
    encoding = RowEncoding("input_ids", qwen.tokenizer)
    for array, reason in NO_IDS:
        assert reason in refusal(encoding, {"input_ids": array}) == refusal(encoding, {"input_ids": array.tolist()})
    for array in (np.array([1, 2], np.uint16), np.array([1, 2], object)):
        values = {"input_ids": array, "position_ids": np.arange(2), "seq_lengths": np.array([])}
        sample = encode_one(encoding, values)
        assert sample.ids.tolist() == [1, 2] and sample.ids.dtype == np.int64


def test_rows_of_which_no_token_is_a_target_are_masked(qwen: RowEncoding) -> None:
    rows = [{"input_ids": [1, 2], "labels": [1, -100]}, {"input_ids": [1, 2], "loss_mask": [1, 0]}]
    for result in RowEncoding("input_ids", qwen.tokenizer).encode([Row("t, line 1", row) for row in rows]):
        assert result == BadRow("t, line 1", "none of its tokens is a target", masked=True)
    (empty,) = RowEncoding("instruction+output", qwen.tokenizer).encode([Row("a, line 1", {**ALPACA, "output": ""})])
    assert isinstance(empty, BadRow) and empty.reason == "none of its tokens is a target"
