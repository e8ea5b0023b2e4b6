"""Rows of ShareGPT and Alpaca are read as messages, columns by other names, and ends that a template does not write."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from longspan.config.file import load_config
from longspan.config.sections import DataConfig
from longspan.corpus.build import configured_tokenizer, ensure_corpus
from longspan.corpus.corpus_settings import CorpusSettings
from longspan.corpus.rows.encoding import RowEncoding
from longspan.corpus.rows.sample import BadRow, Kind, Row, RowSettings, Sample, rename_columns, row_kind
from longspan.corpus.tokenizer import RunFolderFiles, load_tokenizer
from longspan.errors import ConfigError, DataError
from longspan.model.weights.file_names import TEMPLATE_FILES
from longspan.run.checks import check_data
from tests.corpus.rows.families import encoding_of, write_folder
from tests.corpus.test_formats import rows_as

TURNS = [("system", "Be brief."), ("human", "Why?"), ("gpt", "So."), ("tool", "4"), ("gpt", "Yes.")]
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


def turns(*pairs: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"from": role, "value": text} for role, text in pairs]


def says(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def encoded(folder: Path, values: dict[str, Any], **settings: Any) -> list[Sample | BadRow]:
    row = Row("line 1", values)
    return RowEncoding(row_kind(row), load_tokenizer(folder), RowSettings(**settings)).encode([row])


def check_same(folder: Path, values: dict[str, Any], messages: list[dict[str, Any]], **settings: Any) -> None:
    """Rows give the samples that these messages give."""
    for sample, wanted in zip(
        encoded(folder, values, **settings), encoded(folder, {"messages": messages}, **settings), strict=True
    ):
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


@pytest.mark.parametrize(
    "calls", ['{"name": "add", "arguments": {"a": 1}}', '[{"name": "add", "arguments": {"a": 1}}]']
)
def test_a_call_of_sharegpt_is_a_tool_call(folder: Path, calls: str) -> None:
    values = {"conversations": turns(("human", "1?"), ("function_call", calls), ("observation", "1"), ("gpt", "One."))}
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]}
    check_same(folder, values, [says("user", "1?"), call, says("tool", "1"), says("assistant", "One.")])


@pytest.mark.parametrize(("more", "question"), [("", "Say it."), (None, "Say it."), ("blue", "Say it.\nblue")])
def test_alpaca_is_a_question_and_an_answer(folder: Path, more: str | None, question: str) -> None:
    values = {"instruction": "Say it.", "input": more, "output": "Blue."}
    check_same(folder, values, [says("user", question), says("assistant", "Blue.")])


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"conversations": []}, '"conversations" is empty; give a list of turns'),
        ({"conversations": "a"}, '"conversations" is a string; give a list of turns'),
        (
            {"conversations": [{"from": "narrator", "value": "a"}]},
            r"conversations\[0\] needs an object with from, one of",
        ),
        ({"conversations": [says("user", "a")]}, r'data.columns = \["messages=conversations"\] reads role and content'),
        (
            {"conversations": [{"from": "human", "value": "a", "markdown": 1}]},
            r"conversations\[0\].markdown is not read",
        ),
        ({"conversations": turns(("human", "a"))}, "no message is of an assistant"),
        ({"conversations": [{"from": "gpt", "value": 1}]}, '"value" is a number'),
        ({"conversations": turns(("human", "a"), ("function_call", "f"))}, r"conversations\[1\].value.* no JSON"),
        ({"conversations": turns(("human", "a"), ("function_call", "3"))}, "names no function"),
        ({"conversations": turns(*TURNS), "system": "Be brief."}, '"system" stands beside conversations'),
        ({"conversations": turns(*TURNS), "messages": []}, "holds messages .* and also conversations"),
        ({"instruction": 1, "output": "b"}, '"instruction" is a number'),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, '"history" stands beside instruction'),
        ({"instruction": "a", "output": ""}, "none of its tokens is a target"),
    ],
)
def test_what_is_wrong_with_such_rows(folder: Path, values: dict[str, Any], reason: str) -> None:
    kind: Kind = "conversations" if "conversations" in values else "instruction+output"
    (bad,) = RowEncoding(kind, load_tokenizer(folder)).encode([Row("line 1", values)])
    assert isinstance(bad, BadRow)
    with pytest.raises(ValueError, match=reason):
        raise ValueError(bad.reason)


def test_columns_are_renamed_at_once() -> None:
    row = Row("line 1", {"a": 1, "b": 2, "text": 3, "c": 4})
    assert rename_columns(row, ()) is row
    assert rename_columns(row, ("a=b", "b=a", "text=")).values == {"a": 2, "b": 1, "c": 4}
    assert rename_columns(row, ("prompt=x=y",)).values == row.values


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_corpus_of_renamed_columns(tmp_path: Path, folder: Path, form: str) -> None:
    """Its kind is that of the new names, and other columns make another corpus."""
    rows = [{"question": f"Why {i}?", "answer": "So.", "text": "no"} for i in range(3)]
    plain = [{"prompt": row["question"], "completion": row["answer"]} for row in rows]
    columns = ("prompt=question", "completion=answer", "text=")

    def build(rows: list[dict[str, Any]], name: str, columns: tuple[str, ...], *, resumed: bool = False) -> list[int]:
        path = tmp_path / name / f"rows.{form}"
        path = path if path.exists() else rows_as(form, tmp_path / name, rows)
        data = DataConfig(path=str(path), columns=columns, cache=str(tmp_path / "cache"), max_document_tokens=0)
        run, tokenizer = tmp_path / f"run-{name}", load_tokenizer(folder)
        corpus = ensure_corpus(CorpusSettings(data), run, tokenizer=tokenizer, resumed=resumed, log=print)
        return corpus.lengths.tolist()

    assert build(rows, "renamed", columns) == build(plain, "plain", ())
    assert build(rows, "renamed", columns, resumed=True)
    with pytest.raises(DataError, match=r"data.columns was \[.*\] and is None"):
        build(rows, "renamed", (), resumed=True)


def test_columns_of_a_file_and_of_flags(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('[data.columns]\nprompt = "question"\ncompletion = "answer"\n')
    data = load_config(tmp_path / "a.toml").data
    assert data.columns == ("prompt=question", "completion=answer")
    for wrong in ("question", "question=prompt"):
        with pytest.raises(ConfigError, match=f"data.columns has '{wrong}'; give OURS=THEIRS"):
            check_data(replace(load_config(), data=DataConfig(columns=(wrong,))))
    check_data(replace(load_config(), data=DataConfig(columns=("system=",))))  # is left out


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
    """Blanks that the template writes, and does not mark, go; anything else there is refused."""
    folder = write_folder(tmp_path / "phi3", "phi3", template=OPEN_MARKED + "{{ '\n' }}")
    chat = {"messages": [says("user", "a"), says("assistant", "b")]}
    ((plain,), (ended,)) = (encoded(folder, chat, end_of_chat=end) for end in ("", "<|end|>"))
    assert isinstance(plain, Sample) and isinstance(ended, Sample) and ended.labels is not None
    engine = load_tokenizer(folder).engine
    assert engine.decode(ended.ids.tolist(), skip_special_tokens=False).endswith("<|assistant|>b<|end|>")
    assert ended.ids[:-1].tolist() == plain.ids[:-1].tolist() and ended.labels[-1] == engine.token_to_id("<|end|>")
    (folder / "chat_template.jinja").write_text(OPEN_MARKED + "<|end|>")
    (bad,) = encoded(folder, chat, end_of_chat="<|endoftext|>")
    assert isinstance(bad, BadRow) and "and the chat template writes '<|end|>' there" in bad.reason


@pytest.mark.parametrize(
    ("template", "end", "reason"),
    [
        (OPEN, "<|stop|>", "'<|stop|>', which is no token of the tokenizer; generation stops at <|end"),
        (None, "<|end|>", "'<|end|>', and the chat template writes '<|endoftext|>' there; leave it out"),
        (OPEN + "<|end|>", "<|endoftext|>", "and the chat template writes '<|end|>' there"),
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
    tokenizer = configured_tokenizer(config)
    assert tokenizer is not None
    encoding, stock = RowEncoding("messages", tokenizer), encoding_of(folder)
    assert encoding.template.plain == OPEN and encoding.digest != stock.digest
    run = tmp_path / "run"
    ensure_corpus(CorpusSettings(config.data), run, tokenizer=tokenizer, resumed=False, log=print)
    RunFolderFiles(run).save_pretrained(tmp_path / "export")
    for saved in (run, tmp_path / "export"):
        assert [name for name in TEMPLATE_FILES if (saved / name).exists()] == ["chat_template.jinja"]
        assert AutoTokenizer.from_pretrained(saved).chat_template == OPEN
        assert encoding_of(saved).template.plain == OPEN
    file.write_text(OPEN + " ")
    with pytest.raises(DataError, match="its rows become other tokens than they did"):
        ensure_corpus(CorpusSettings(config.data), run, tokenizer=configured_tokenizer(config), resumed=True, log=print)
    file.unlink()
    with pytest.raises(DataError, match=r"cannot read data.chat_template .*own.jinja"):
        RowEncoding("messages", replace(tokenizer))
    with pytest.raises(DataError, match="a tokenizer trained on the corpus has no tokens of chats"):
        configured_tokenizer(load_config(None, {"data.chat_template": str(file)}))
