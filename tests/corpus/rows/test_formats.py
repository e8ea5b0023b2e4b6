"""Rows of ShareGPT and Alpaca are messages; columns by other names; ends that templates lack; what the console says."""

import json
import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from longspan.config.file import load_config
from longspan.config.preference_losses import RowForm
from longspan.config.sections import DataConfig
from longspan.corpus import build_documents as builder
from longspan.corpus.lines import encoding_line, missing_end_line, unseen_line
from longspan.corpus.recipe import CorpusSettings
from longspan.corpus.rows.encoding import RowEncoding
from longspan.corpus.rows.kinds import KEYS, Kind, rename_columns, row_kind
from longspan.corpus.rows.sample import BadRow, Row, RowSettings, Sample
from longspan.corpus.run_corpus import load_configured_tokenizer, open_or_build_corpus
from longspan.corpus.tokenizer import load_tokenizer
from longspan.data.manifest import LeftOut
from longspan.errors import ConfigError, DataError
from longspan.model.weights.tokenizer_files import TEMPLATE_FILES, RunFolderFiles
from longspan.run.checks import check_data
from tests.corpus.rows.families import encoding_of, marked_template, write_folder
from tests.corpus.rows.test_bad_rows import TURNS, turns
from tests.corpus.test_formats import rows_as

CALL = {"name": "add", "arguments": {"a": 1}}
# As GLM's: what begins the next turn ends the one before it, and nothing ends the last one.
OPEN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ANSWER = (
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}"
)
OPEN_MARKED = OPEN.replace("{{ m.content }}", ANSWER)


def says(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def encoded(folder: Path, values: dict[str, Any], **settings: Any) -> list[Sample | BadRow]:
    row = Row("line 1", values)
    return RowEncoding(row_kind(row), load_tokenizer(folder), RowSettings(**settings)).encode([row])


def check_same(folder: Path, values: dict[str, Any], messages: list[dict[str, Any]], **settings: Any) -> None:
    found, expected = (encoded(folder, row, **settings) for row in (values, {"messages": messages}))
    for sample, wanted in zip(found, expected, strict=True):
        assert isinstance(sample, Sample) and isinstance(wanted, Sample)
        assert sample.labels is not None and wanted.labels is not None
        assert (sample.ids.tolist(), sample.labels.tolist()) == (wanted.ids.tolist(), wanted.labels.tolist())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("formats") / "qwen2.5", "qwen2.5")


@pytest.mark.parametrize("how", ["together", "split"])
def test_sharegpt_is_messages(folder: Path, how: str) -> None:
    roles = {"human": "user", "gpt": "assistant"}
    messages = [says(roles.get(role, role), text) for role, text in TURNS]
    values = {"conversations": turns(*TURNS), "id": "7", "source": "x"}
    check_same(folder, values, messages, turns=how)
    values["conversations"][2] |= {"weight": 0, "loss": None}  # context, as in messages
    check_same(folder, values, [*messages[:2], {**messages[2], "weight": 0}, *messages[3:]], turns=how)


def test_a_call_of_sharegpt_is_a_tool_call(folder: Path) -> None:
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]}
    messages = [says("user", "1?"), call, says("tool", "1"), says("assistant", "One.")]
    for calls in (json.dumps(CALL), json.dumps([CALL])):
        values = turns(("human", "1?"), ("function_call", calls), ("observation", "1"), ("gpt", "One."))
        check_same(folder, {"conversations": values}, messages)


def test_alpaca_is_a_question_and_an_answer(folder: Path) -> None:
    for more, question in (("", "Say it."), (None, "Say it."), ("blue", "Say it.\nblue")):
        values = {"instruction": "Say it.", "input": more, "output": "Blue."}
        check_same(folder, values, [says("user", question), says("assistant", "Blue.")])


ANSWERED = [says("user", "c"), says("assistant", "d"), says("user", "a\nb"), says("assistant", "e")]
ALPACA = {"instruction": "a", "input": "b", "output": "e"}
BRIEF = says("system", "Be brief.")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FUNCTION = {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize(
    ("values", "messages"),
    [
        ({**ALPACA, "history": [["c", "d"]]}, ANSWERED),
        ({**ALPACA, "history": '[["c", "d"]]', "system": "Be brief."}, [BRIEF, *ANSWERED]),
        ({**ALPACA, "history": [], "system": ""}, ANSWERED[2:]),
        ({"messages": ANSWERED, "system": "Be brief."}, [BRIEF, *ANSWERED]),
        ({"messages": [BRIEF, *ANSWERED], "system": "Be brief."}, [BRIEF, *ANSWERED]),
        ({"conversations": turns(("human", "c"), ("gpt", "d")), "system": "Be brief."}, [BRIEF, *ANSWERED[:2]]),
    ],
)
def test_rows_of_llama_factory_are_messages(
    folder: Path, values: dict[str, Any], messages: list[dict[str, Any]]
) -> None:
    """Answers of a history are learnt, as there, and every key of the rows is read."""
    check_same(folder, values, messages)
    encoding = RowEncoding(row_kind(Row("", values)), load_tokenizer(folder))
    assert encoding.unread_columns({**values, "id": 3}) == ["id"]


@pytest.mark.parametrize("template", ["chatml", "gemma3"])
def test_a_template_without_tools_is_named_with_what_to_do(tmp_path: Path, template: str) -> None:
    text = CHATML if template == "chatml" else None
    folder = write_folder(tmp_path / "model", "gemma3" if text is None else "qwen2.5", template=text)
    rows = turns(("human", "1?"), ("function_call", json.dumps(CALL)), ("observation", "1"), ("gpt", "One."))
    (bad,) = encoded(folder, {"conversations": rows, "tools": json.dumps([FUNCTION])})
    assert isinstance(bad, BadRow)
    assert bad.reason.startswith(
        "messages[1] calls a tool, and its chat template writes no calls of tools (its chat templ"
    )
    assert bad.reason.endswith(
        "name one that does with data.chat_template, as models that were trained with tools have it, "
        "or leave the row out"
    )
    (bad,) = encoded(folder, {"messages": [says("user", "1?"), says("user", "2?"), {"role": "assistant"}]})
    assert isinstance(bad, BadRow) and "calls" not in bad.reason


KEY_VALUES = {key: "a" for keys in KEYS.values() for key in keys} | {"instruction": "the prompt"}


@pytest.mark.parametrize("kinds", [*combinations(KEYS, 2), ("text", "messages", "instruction+output")])
def test_columns_that_a_row_of_several_kinds_names_leave_one(kinds: tuple[Kind, ...]) -> None:
    """Each list of columns leaves the kind that it names, and a pair keeps its prompt."""
    row = Row("line 1", {key: KEY_VALUES[key] for kind in kinds for key in KEYS[kind]})
    if {*kinds} & {"messages", "conversations"} and "chosen+rejected" in kinds:
        assert row_kind(row) == "chosen+rejected"  # the chat is the prompt
        return
    with pytest.raises(DataError) as error:
        row_kind(row)
    lists = re.findall(r"(\[.*?\]) reads", str(error.value))
    assert [row_kind(rename_columns(row, json.loads(columns))) for columns in lists] == [k for k in KEYS if k in kinds]
    of_pair = rename_columns(row, json.loads(lists[-1])).values
    assert "chosen" not in of_pair or {"instruction", "prompt"} & row.values.keys() <= of_pair.keys()


def test_columns_that_a_system_prompt_beside_a_text_names_make_a_chat(folder: Path) -> None:
    """Also those of OpenOrca."""
    row = Row("line 1", {"system": "Be brief.", "prompt": "c", "completion": "d"})
    (bad,) = encoded(folder, dict(row.values))
    assert isinstance(bad, BadRow)
    columns = json.loads(bad.reason[bad.reason.index("[") : bad.reason.index("]") + 1])
    check_same(folder, dict(rename_columns(row, columns).values), [BRIEF, *ANSWERED[:2]])


def test_tools_of_llama_factory_are_functions_that_are_wrapped(folder: Path) -> None:
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]}
    messages = [BRIEF, says("user", "1?"), call, says("tool", "1"), says("assistant", "One.")]
    rows = turns(("human", "1?"), ("function_call", json.dumps(CALL)), ("observation", "1"), ("gpt", "One."))
    (wanted,) = encoded(folder, {"messages": messages, "tools": [{"type": "function", "function": FUNCTION}]})
    (found,) = encoded(folder, {"conversations": rows, "system": "Be brief.", "tools": json.dumps([FUNCTION])})
    assert isinstance(found, Sample) and isinstance(wanted, Sample) and wanted.labels is not None
    assert found.labels is not None and found.ids.tolist() == wanted.ids.tolist()
    assert found.labels.tolist() == wanted.labels.tolist()


def test_columns_are_renamed_at_once() -> None:
    row = Row("line 1", {"a": 1, "b": 2, "text": 3, "c": 4})
    assert rename_columns(row, ()) is row
    assert rename_columns(row, ("a=b", "b=a", "text=")).values == {"a": 2, "b": 1, "c": 4}
    assert rename_columns(row, ("prompt=x=y",)).values == row.values


def test_a_corpus_of_renamed_columns(tmp_path: Path, folder: Path) -> None:
    rows = [{"question": f"Why {i}?", "answer": "So.", "text": "no"} for i in range(3)]
    plain = [{"prompt": row["question"], "completion": row["answer"]} for row in rows]
    columns = ("prompt=question", "completion=answer", "text=")

    def build(rows: list[dict[str, Any]], name: str, columns: tuple[str, ...], *, resumed: bool = False) -> list[int]:
        path = tmp_path / name / "rows.parquet"
        path = path if path.exists() else rows_as("parquet", tmp_path / name, rows)
        data = DataConfig(path=str(path), rename_columns=columns, max_document_tokens=0)
        run, tokenizer = tmp_path / f"run-{name}", load_tokenizer(folder)
        corpus = open_or_build_corpus(CorpusSettings(data), run, tokenizer=tokenizer, resumed=resumed, log=print)
        return corpus.lengths.tolist()

    assert build(rows, "renamed", columns) == build(plain, "plain", ())
    assert build(rows, "renamed", columns, resumed=True)
    with pytest.raises(DataError, match=r"data.rename_columns was \[.*\] and is None"):
        build(rows, "renamed", (), resumed=True)


def test_columns_of_a_file_and_of_flags(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('[data.rename_columns]\nprompt = "question"\ncompletion = "answer"\n')
    data = load_config(tmp_path / "a.toml").data
    assert data.rename_columns == ("prompt=question", "completion=answer")
    for wrong in ("question", "query=prompt"):
        with pytest.raises(ConfigError, match=f"data.rename_columns has '{wrong}'; give OURS=THEIRS"):
            check_data(replace(load_config(), data=DataConfig(rename_columns=(wrong,))))
    check_data(replace(load_config(), data=DataConfig(rename_columns=("system=",))))  # is left out


def test_an_end_behind_the_last_answer_is_a_target(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "phi3", "phi3", template=OPEN)
    token = load_tokenizer(folder).engine.token_to_id("<|user|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [token]}))
    chat = [says("user", "a"), says("assistant", "b"), says("user", "c"), says("assistant", "d")]
    ((plain,), (ended,)) = (encoded(folder, {"messages": chat}, end_of_chat=end) for end in ("", "<|user|>"))
    assert isinstance(plain, Sample) and isinstance(ended, Sample) and ended.labels is not None
    assert ended.ids.tolist() == [*plain.ids.tolist(), token] and ended.labels[-1] == token
    split = encoded(folder, {"messages": chat}, end_of_chat="<|user|>", turns="split")
    assert [int(sample.ids[-1]) for sample in split if isinstance(sample, Sample)] == [token, token]
    (context,) = encoded(folder, {"messages": [*chat[:3], {**chat[3], "weight": 0}]}, end_of_chat="<|user|>")
    assert isinstance(context, Sample) and context.ids.tolist() == plain.ids.tolist()
    call = {"role": "assistant", "content": "b", "tool_calls": [{"type": "function", "function": CALL}]}
    (called,) = encoded(folder, {"messages": [chat[0], call]}, end_of_chat="<|user|>")
    assert isinstance(called, Sample) and called.ids[-1] != token  # a model stops at another token there


def test_an_end_stands_directly_behind_the_answer(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "phi3", "phi3", template=OPEN_MARKED + "{{ '\n' }}")
    chat = {"messages": [says("user", "a"), says("assistant", "b")]}
    ((plain,), (ended,)) = (encoded(folder, chat, end_of_chat=end) for end in ("", "<|end|>"))
    assert isinstance(plain, Sample) and isinstance(ended, Sample) and ended.labels is not None
    engine = load_tokenizer(folder).engine
    assert engine.decode(ended.ids.tolist(), skip_special_tokens=False).endswith("<|assistant|>b<|end|>")
    assert ended.ids[:-1].tolist() == plain.ids[:-1].tolist() and ended.labels[-1] == engine.token_to_id("<|end|>")


@pytest.mark.parametrize(
    ("template", "end", "reason"),
    [
        (OPEN, "<|stop|>", "'<|stop|>', which is no token of the tokenizer; generation stops at <|end"),
        (None, "<|end|>", "'<|end|>', and the chat template writes '<|endoftext|>' there; leave it out"),
        (OPEN + "<|end|>", "<|endoftext|>", "and the chat template writes '<|end|>' there"),
        (OPEN_MARKED + "<|end|>", "<|endoftext|>", "and the chat template writes '<|end|>' there"),
    ],
)
def test_an_end_that_is_none_or_one_too_many(tmp_path: Path, template: str | None, end: str, reason: str) -> None:
    folder = write_folder(tmp_path / "phi3", "phi3", template=template)
    (bad,) = encoded(folder, {"messages": [says("user", "a"), says("assistant", "b")]}, end_of_chat=end)
    assert isinstance(bad, BadRow) and reason in bad.reason


def test_a_template_of_a_file_writes_chats_and_goes_with_the_model(tmp_path: Path, folder: Path) -> None:
    file, values = tmp_path / "own.jinja", [{"messages": [says("user", "a"), says("assistant", "b")]}] * 3
    file.write_text(OPEN)
    (tmp_path / "model").mkdir()
    for name in folder.iterdir():
        (tmp_path / "model" / name.name).write_bytes(name.read_bytes())
    (tmp_path / "model" / "chat_template.json").write_text('{"chat_template": "old"}')
    keys = {"data.tokenizer": str(tmp_path / "model"), "data.chat_template": str(file)}
    config = load_config(None, {**keys, "data.path": str(rows_as("jsonl", tmp_path / "rows", values))})
    tokenizer = load_configured_tokenizer(config)
    assert tokenizer is not None
    encoding, stock = RowEncoding("messages", tokenizer), encoding_of(folder)
    assert encoding.template.plain == OPEN and encoding.digest != stock.digest
    run = tmp_path / "run"
    open_or_build_corpus(CorpusSettings(config.data), run, tokenizer=tokenizer, resumed=False, log=print)
    RunFolderFiles(run).save_pretrained(tmp_path / "export")
    for saved in (run, tmp_path / "export"):
        assert [name for name in TEMPLATE_FILES if (saved / name).exists()] == ["chat_template.jinja"]
        assert AutoTokenizer.from_pretrained(saved).chat_template == OPEN
        assert encoding_of(saved).template.plain == OPEN
    file.write_text(OPEN + " ")
    with pytest.raises(DataError, match="its rows become other tokens than they did"):
        loaded = load_configured_tokenizer(config)
        open_or_build_corpus(CorpusSettings(config.data), run, tokenizer=loaded, resumed=True, log=print)
    file.unlink()
    with pytest.raises(DataError, match=r"cannot read data.chat_template .*own.jinja"):
        RowEncoding("messages", replace(tokenizer))
    with pytest.raises(DataError, match="a tokenizer trained on the corpus has no tokens of chats"):
        load_configured_tokenizer(load_config(None, {"data.chat_template": str(file)}))


def test_chats_name_their_template_and_how_targets_are_found(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "gemma3", "gemma3")
    assert encoding_line(encoding_of(folder)) == (
        f"rows hold messages (chat): written by the chat template of {folder}, which marks no targets: they are what "
        "each assistant turn says, up to the token that ends the turn"
    )
    (folder / "chat_template.jinja").write_text(marked_template("gemma3"))
    assert encoding_line(encoding_of(folder)).endswith("whose {% generation %} marks name the targets")


def lines_of(
    folder: Path, rows: list[dict[str, Any]], *, form: str = "jsonl", num_labels: int = 0, loss: RowForm = ""
) -> list[str]:
    lines, path = list[str](), folder / "rows" / f"rows.{form}"
    path = path if path.exists() else rows_as(form, folder / "rows", rows)
    data = DataConfig(path=str(path), max_document_tokens=0)
    settings = CorpusSettings(data, num_labels=num_labels, preference=loss)
    open_or_build_corpus(settings, folder / "run", tokenizer=load_tokenizer(folder), resumed=False, log=lines.append)
    return lines


def test_a_corpus_says_both(tmp_path: Path) -> None:
    asked, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "so"}
    told = {"role": "developer", "content": "Be brief."}
    rows = [{"messages": [told, asked, said, asked, {**asked, "role": "assistant", "content": " "}, asked, said]}] * 3
    lines = lines_of(write_folder(tmp_path, "qwen3"), rows)
    assert lines[0].startswith("rows hold messages (chat): written by the chat template of")
    assert lines[-2].startswith(
        "not in the rendered texts, so no targets: 3 thoughts of assistant turns; data.split_turns"
    )
    assert lines[-2].endswith("; no targets, as they are blank: 3 assistant turns")
    assert lines[-1] == ("not in the rendered texts, as the chat template does not write them: 3 developer messages")


ASKED = {"role": "user", "content": "a"}
# Rows of each kind with all that is read beside it, how many scores a model makes, and keys that nothing reads.
UNREAD: list[tuple[dict[str, Any], int, str]] = [
    ({"text": "a b", "label": 3, "image": "no list"}, 0, "image label"),
    ({"text": "a b", "label": 3}, 4, ""),
    ({"messages": [ASKED, says("assistant", "b")], "tools": [], "chat_template_kwargs": {"x": 1}, "id": 4}, 0, "id"),
    ({"prompt": "a", "completion": "b", "tools": [{"name": "f"}], "chat_template_kwargs": {"x": 1}}, 0,
     "chat_template_kwargs tools"),
    ({"prompt": [ASKED], "completion": [says("assistant", "b")], "chat_template_kwargs": {"x": 1}}, 0, ""),
    ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "task": "c"}, 0, "task"),
    ({"instruction": "a", "input": "b", "output": "c", "prompt": "d"}, 0, "prompt"),
    ({"input_ids": [1, 2, 3], "labels": [1, 2, 3], "attention_mask": [1, 1, 1], "input": "a"}, 0, "input"),
    ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": 0.5, "messages": None, "n": 0}, 1, "n"),
]  # fmt: skip


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize(("row", "scores", "unread"), UNREAD)
def test_keys_that_nothing_reads_are_named_once_with_their_share(
    tmp_path: Path, row: dict[str, Any], scores: int, unread: str, form: str
) -> None:
    """Also where the tokens are taken from the cache; a key without a value says nothing."""
    keys = [f"{key} (100 % of rows)" for key in unread.split()]
    rows = [{**row, "source": "web", "few": "a" if i == 0 else None, "none": None} for i in range(8)]
    folder = write_folder(tmp_path / "qwen", "qwen2.5")
    for _ in range(2):
        said = lines_of(folder, rows, form=form, num_labels=scores)
        (line,) = [line for line in said if "nothing reads" in line]
        head, *named = line.removeprefix("keys that nothing reads: ").split(", ")
        assert sorted([head, *named]) == sorted(["few (12.5 % of rows)", "source (100 % of rows)", *keys])
        assert named[-1].startswith("few")


def test_keys_are_counted_over_batches_and_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/corpus/test_data.py has them of several processes."""
    rows = [{"messages": [ASKED, says("assistant", "b")], "source": "web", f"key {i}\n": 1} for i in range(150)]
    monkeypatch.setattr(builder, "BATCH_BYTES", 2000)
    (line,) = [line for line in lines_of(write_folder(tmp_path, "qwen2.5"), rows) if "nothing reads" in line]
    assert line.startswith("keys that nothing reads: source (100 % of rows), key ") and "\n" not in line
    assert line.count("(0.667 % of rows)") == 99


def test_a_row_of_two_kinds_is_refused_wherever_it_stands(tmp_path: Path) -> None:
    rows = [*({"text": f"a {i}"} for i in range(30)), {"text": "b", "messages": [{"role": "user", "content": "c"}]}]
    with pytest.raises(DataError, match=r"line 31: holds text and also messages \(chat\); a row is of one kind"):
        lines_of(write_folder(tmp_path, "qwen3"), rows)


UNMARKED_END = marked_template("phi3").replace("+ '<|end|>' }}{% endgeneration %}", "}}{% endgeneration %}<|end|>")


@pytest.mark.parametrize(
    ("template", "begins"),
    [
        (OPEN, "the chat template writes no token behind the last turn of a conversation, so that this end is no"),
        (UNMARKED_END, "the chat template marks no end of the last turn of a conversation, so that this end is no"),
        (marked_template("phi3"), None),
        (None, None),
    ],
)
def test_a_template_that_never_ends_the_last_turn_is_named(
    tmp_path: Path, template: str | None, begins: str | None
) -> None:
    folder = write_folder(tmp_path, "phi3", template=template)
    line = missing_end_line(encoding_of(folder))
    said = lines_of(folder, [{"messages": [says("user", "a"), says("assistant", "b")]}] * 3)
    assert (line == said[1]) == (line is not None)
    if begins is None:
        assert line is None
    else:
        assert line is not None and line.startswith(begins)
        advice = "; data.end_of_chat_token names a token to be put there" * (template == OPEN)
        assert line.endswith(f"chats of one turn do not teach a model to stop (at <|endoftext|> or <|end|>){advice}")


@pytest.mark.parametrize(("loss", "keys"), [
    ("", {}), ("", {"prompt", "completion"}), ("pairs", {"prompt", "chosen", "rejected"}),
    ("orpo", {"chosen", "rejected"}), ("kto", {"prompt", "completion", "label"}),
])  # fmt: skip
def test_a_corpus_names_a_template_that_never_ends_the_last_turn(tmp_path: Path, loss: RowForm, keys: set[str]) -> None:
    asked, said, other = says("user", "a"), says("assistant", "b"), says("assistant", "no")
    values = {"messages": [asked, said], "prompt": [asked], "completion": [said], "label": True}
    values |= {"chosen": [said], "rejected": [other]}
    if keys and "prompt" not in keys:
        values |= {"chosen": [asked, said], "rejected": [asked, other]}
    row = {key: values[key] for key in keys or {"messages"}}
    lines = lines_of(write_folder(tmp_path, "phi3", template=OPEN), [row] * 3, loss=loss)
    assert lines[1].startswith("the chat template writes no token behind the last turn of a conversation")


def test_line_of_what_is_no_target() -> None:
    assert unseen_line(LeftOut(), split_turns=False) is None
    line = "not in the rendered texts, so no targets: 2 other texts of assistant turns"
    assert unseen_line(LeftOut(unseen_texts=2), split_turns=False) == line
    assert unseen_line(LeftOut(blank_turns=1), split_turns=False) == "no targets, as they are blank: 1 assistant turn"
    line = "not in the rendered texts, so no targets: 62 thoughts of assistant turns"
    assert unseen_line(LeftOut(unseen_thoughts=62), split_turns=True) == line
    advice = "data.split_turns = true trains each turn as at inference, with its thought if the template has it"
    assert unseen_line(LeftOut(unseen_thoughts=62), split_turns=False) == f"{line}; {advice}"
