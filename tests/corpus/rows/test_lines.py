"""What the console says of rows."""

from pathlib import Path

import pytest

from longspan.config.sections import DataConfig
from longspan.corpus.build import ensure_corpus
from longspan.corpus.corpus_settings import CorpusSettings, missing_end_line, rows_line, unseen_line
from longspan.corpus.rows.sample import Row, Sample, Unseen
from longspan.corpus.tokenizer import load_tokenizer
from longspan.data.manifest import LeftOut
from longspan.errors import DataError
from tests.corpus.rows.families import encoding_of, write_folder
from tests.corpus.rows.test_marks import marked_template
from tests.corpus.test_formats import rows_as


def test_chats_name_their_template_and_how_targets_are_found(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "gemma3", "gemma3")
    assert rows_line(encoding_of(folder)) == (
        f"rows hold messages (chat): written by the chat template of {folder}, which marks no targets: they are what "
        "each assistant turn says, up to the token that ends the turn"
    )
    (folder / "chat_template.jinja").write_text(marked_template("gemma3"))
    assert rows_line(encoding_of(folder)).endswith("whose {% generation %} marks name the targets")


def test_what_is_no_target_is_counted(tmp_path: Path) -> None:
    encoding = encoding_of(write_folder(tmp_path / "qwen3", "qwen3"))
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", " "), ("user", "d"), ("assistant", "e")]
    messages = [{"role": role, "content": text} for role, text in turns]
    messages[1]["reasoning_content"] = "so"
    (sample,) = encoding.encode([Row("line 1", {"messages": messages})])
    assert isinstance(sample, Sample) and sample.unseen == Unseen(unseen_thoughts=1, blank_turns=1)


def test_a_corpus_says_both(tmp_path: Path) -> None:
    folder, lines = write_folder(tmp_path / "qwen3", "qwen3"), list[str]()
    asked, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "so"}
    told = {"role": "developer", "content": "Be brief."}
    path = rows_as("jsonl", tmp_path / "rows", [{"messages": [told, asked, said, asked, {**said, "content": "c"}]}] * 3)
    settings = CorpusSettings(DataConfig(path=str(path), cache=str(tmp_path / "cache"), max_document_tokens=0))
    ensure_corpus(settings, tmp_path / "run", tokenizer=load_tokenizer(folder), resumed=False, log=lines.append)
    assert lines[0].startswith("rows hold messages (chat): written by the chat template of")
    assert lines[-2].startswith("not in the rendered texts, so no targets: 3 thoughts of assistant turns; data.turns")
    assert lines[-1] == ("not in the rendered texts, as the chat template does not write them: 3 developer messages")


def test_a_row_of_two_kinds_is_refused_wherever_it_stands(tmp_path: Path) -> None:
    rows = [*({"text": f"a {i}"} for i in range(30)), {"text": "b", "messages": [{"role": "user", "content": "c"}]}]
    settings = CorpusSettings(DataConfig(path=str(rows_as("jsonl", tmp_path / "rows", rows)), max_document_tokens=0))
    tokenizer = load_tokenizer(write_folder(tmp_path / "qwen3", "qwen3"))
    with pytest.raises(DataError, match=r"line 31: holds text and also messages \(chat\); a row is of one kind"):
        ensure_corpus(settings, tmp_path / "run", tokenizer=tokenizer, resumed=False, log=print)


# GLM's way: what begins the next turn ends the one before it, and nothing ends the last one.
OPEN_END = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
UNMARKED_END = marked_template("phi3").replace("+ '<|end|>' }}{% endgeneration %}", "}}{% endgeneration %}<|end|>")


@pytest.mark.parametrize(
    ("template", "begins"),
    [
        (OPEN_END, "the chat template writes no token behind the last turn of a conversation, so that this end is no"),
        (UNMARKED_END, "the chat template marks no end of the last turn of a conversation, so that this end is no"),
        (marked_template("phi3"), None),
        (None, None),
    ],
)
def test_a_template_that_never_ends_the_last_turn_is_named(
    tmp_path: Path, template: str | None, begins: str | None
) -> None:
    line = missing_end_line(encoding_of(write_folder(tmp_path, "phi3", template=template)))
    if begins is None:
        assert line is None
    else:
        assert line is not None and line.startswith(begins)
        advice = "; data.end_of_chat names a token to be put there" * (template == OPEN_END)
        assert line.endswith(f"chats of one turn do not teach a model to stop (at <|endoftext|> or <|end|>){advice}")


def test_a_corpus_names_a_template_that_never_ends_the_last_turn(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path / "phi3", "phi3", template=OPEN_END))
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    lines, path = list[str](), rows_as("jsonl", tmp_path / "rows", [{"messages": turns}] * 3)
    settings = CorpusSettings(DataConfig(path=str(path), cache=str(tmp_path / "cache"), max_document_tokens=0))
    ensure_corpus(settings, tmp_path / "run", tokenizer=tokenizer, resumed=False, log=lines.append)
    assert lines[1].startswith("the chat template writes no token behind the last turn of a conversation")


@pytest.mark.parametrize(
    ("left_out", "line"),
    [
        (LeftOut(), None),
        (LeftOut(unseen_texts=2), "not in the rendered texts, so no targets: 2 other texts of assistant turns"),
        (LeftOut(blank_turns=1), "no targets, as they are blank: 1 assistant turn"),
        (
            LeftOut(unseen_thoughts=62),
            "not in the rendered texts, so no targets: 62 thoughts of assistant turns; "
            'data.turns = "split" trains each turn as at inference, with its thought if the template has it',
        ),
    ],
)
def test_line_of_what_is_no_target(left_out: LeftOut, line: str | None) -> None:
    assert unseen_line(left_out, "together") == line
    assert line is None or "data.turns" not in (unseen_line(left_out, "split") or "")
