"""Rows of texts, prompts with completions and tokens: their kind, their ids, what is a target, and their digest."""

import json
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from longspan.config.sections import DataConfig
from longspan.corpus.rows.encoding import RowEncoding
from longspan.corpus.rows.kinds import KIND_TEXTS, MASKS, row_kind
from longspan.corpus.rows.sample import Row, RowSettings, Sample
from longspan.corpus.sources.find_files import CorpusFile
from longspan.corpus.sources.first_rows import find_kind_of_rows
from longspan.corpus.tokenizer import END_OF_TEXT, load_tokenizer, train_tokenizer
from longspan.errors import DataError
from tests.corpus.rows.conversations import PLAIN, asks, says
from tests.corpus.rows.families import encode_one, encoding_of, write_folder
from tests.corpus.rows.test_formats import lines_of
from tests.corpus.test_tokenizer import with_bos

TEXTS = ["def layout(rank):\n    return rank\n" * 5, "für alle Ränge: übrig\n", f"a {END_OF_TEXT} b"]


@pytest.mark.parametrize("parse", [False, True])
def test_texts_are_encoded_as_the_tokenizer_does_also_after_pickling(parse: bool) -> None:
    tokenizer = train_tokenizer(TEXTS, 300)
    encoding = RowEncoding("text", tokenizer, RowSettings(parse_special_tokens=parse))
    rows = [Row(f"line {i}", {"text": text, "id": i}) for i, text in enumerate(TEXTS)]
    again: RowEncoding = pickle.loads(pickle.dumps(encoding))
    assert again.digest == encoding.digest
    wanted = [ids.tolist() for ids in tokenizer.set_parsing(parse).encode(TEXTS)]
    for one in (encoding, again):
        samples = one.encode(rows)
        assert [sample.ids.tolist() for sample in samples if isinstance(sample, Sample)] == wanted
        assert all(isinstance(sample, Sample) and sample.labels is None for sample in samples)


def kind_of_file(folder: Path, rows: list[dict[str, object]]) -> str:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return find_kind_of_rows([CorpusFile(0, "rows.jsonl", folder / "rows.jsonl")], DataConfig())


@pytest.mark.parametrize(
    ("values", "kind", "shown"),
    [
        ({"text": "a"}, "text", "rows hold text"),
        ({"messages": [], "tools": None, "prompt": "p"}, "messages", "rows hold messages (chat)"),
        ({"prompt": "a", "completion": "b"}, "prompt+completion", "rows hold prompt and completion"),
        ({"input_ids": [1], "labels": [1]}, "input_ids", "rows hold input_ids (tokens)"),
        ({"conversations": [], "id": 1}, "conversations", "rows hold conversations (chat, as ShareGPT has it)"),
        (
            {"instruction": "a", "input": "", "output": "b"},
            "instruction+output",
            "rows hold instruction and output (chat, as Alpaca has it)",
        ),
    ],
)
def test_kinds(tmp_path: Path, values: dict[str, object], kind: str, shown: str) -> None:
    assert row_kind(Row("line 1", values)) == kind and f"rows hold {KIND_TEXTS[kind]}" == shown
    assert kind_of_file(tmp_path, [values] * 2) == kind


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"text": "a"}, {"messages": []}],
            r"line 2 holds messages \(chat\), and rows.jsonl, line 1 holds text; rows of one",
        ),
        (
            [{"prompt": "a"}],
            r"line 1: needs text, messages, .*; found keys \['prompt'\]; data.rename_columns gives columns",
        ),
        ([{"instruction": "a"}], r"found keys \['instruction'\]; its answer is called output"),
        (
            [{"instruction": "a", "output": "b", "text": "ab"}],
            "holds text and also instruction and output .*data.rename_columns",
        ),
    ],
)
def test_rows_of_no_kind_or_of_two(tmp_path: Path, rows: list[dict[str, object]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        kind_of_file(tmp_path, rows)


def encoded(encoding: RowEncoding, **values: Any) -> Sample:
    return encode_one(encoding, values)


@pytest.mark.parametrize("closing", ["", "</s>"])
@pytest.mark.parametrize(
    ("prompt", "completion", "said"),
    [
        ("What?\n", "plan ✓", "plan ✓</s>"),
        ("", "plan", "plan</s>"),
        ("a <|im_start|>", "</s> b", "</s> b</s>"),  # names of special tokens are plain text
        ("What? p", "lan plan", "lan plan</s>"),  # tokens of both together would begin with " plan"
    ],
)
def test_targets_are_the_completion_and_its_end(
    tmp_path: Path, prompt: str, completion: str, said: str, closing: str
) -> None:
    tokenizer = load_tokenizer(with_bos(tmp_path / "t", closing))
    sample = encoded(RowEncoding("prompt+completion", tokenizer), prompt=prompt, completion=completion)
    inference = tokenizer.surrounding_ids[0] + tokenizer.encode_with_spans(prompt)[0].tolist()
    assert sample.ids[: len(inference)].tolist() == inference and sample.unseen.inside_tokens == 0
    assert sample.labels is not None
    targets = sample.ids[sample.labels != -100].tolist()
    assert tokenizer.engine.decode(targets, skip_special_tokens=False) == said
    assert targets == sample.ids[-len(targets) :].tolist()


@pytest.mark.parametrize(("prompt", "inside"), [("What? p", 1), ("What?", 0), ("What? ", 1)])
def test_a_token_across_the_border_is_counted_where_parts_cannot_be_encoded_apart(
    tmp_path: Path, prompt: str, inside: int
) -> None:
    """As sentencepiece's tokenizers: each part would begin with a space."""
    texts = ["What? plan plan lan"] * 3
    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer, engine.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    engine.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=90, show_progress=False))
    engine.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    completion = "What? plan plan"[len(prompt) :]
    sample = encoded(RowEncoding("prompt+completion", tokenizer), prompt=prompt, completion=completion)
    assert sample.ids.tolist() == tokenizer.encode([prompt + completion])[0].tolist()
    assert sample.unseen.inside_tokens == inside and not tokenizer.joins_parts
    rows = [{"prompt": prompt, "completion": completion}] * 3
    said = [line for line in lines_of(tmp_path, rows) if "inside a token" in line]
    assert len(said) == inside and all(": 3 answers; let prompts" in line for line in said)


ENDS = [  # texts in which special tokens are read, and what a model reads: TRL's, but with one beginning
    ("the fox</s>", "<s>the fox</s>"),
    ("<s>the fox</s>", "<s>the fox</s>"),
    ("<s>the</s> fox", "<s>the</s> fox</s>"),
    ("the<s> fox</s>\n", "<s>the<s> fox</s>\n"),
    ("", "<s></s>"),
    ("</s>", "<s></s>"),
]


@pytest.mark.parametrize("closing", ["", "</s>"])
@pytest.mark.parametrize(("text", "read"), ENDS)
def test_no_second_beginning_or_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, read: str, closing: str
) -> None:
    tokenizer = load_tokenizer(with_bos(tmp_path / "t", closing))
    decode = partial(tokenizer.engine.decode, skip_special_tokens=False)
    settings = RowSettings(parse_special_tokens=True)
    assert decode(encoded(RowEncoding("text", tokenizer, settings), text=text).ids.tolist()) == read
    end = "" if text.rstrip().endswith("</s>") else "</s>"
    prompt, completion = (text[:3], text[3:]) if len(text) > 4 else ("", text)
    if completion:
        encoding = RowEncoding("prompt+completion", tokenizer, settings)
        sample = encoded(encoding, prompt=prompt, completion=completion)
        assert sample.labels is not None and decode(sample.ids.tolist()) == read
        assert decode(sample.ids[sample.labels != -100].tolist()) == completion + end
    monkeypatch.setattr("longspan.corpus.tokenizer.PIECE", 16)
    (ids,) = tokenizer.encode(["the fox " * 4 + text])
    assert decode(ids.tolist()) == "<s>" + "the fox " * 4 + text + end


def test_prompts_of_messages(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "qwen2.5")
    chat = encoding_of(folder)
    encoding = RowEncoding("prompt+completion", chat.tokenizer)
    sample = encoded(encoding, prompt=PLAIN.messages[:3], completion=PLAIN.messages[3:])
    whole = encoded(chat, messages=PLAIN.messages)
    assert sample.ids.tolist() == whole.ids.tolist() and sample.labels is not None
    said = chat.tokenizer.engine.decode(sample.ids[sample.labels != -100].tolist(), skip_special_tokens=False)
    assert said == "2.<|im_end|>"


def test_rows_of_tokens(tmp_path: Path) -> None:
    encoding = RowEncoding("input_ids", load_tokenizer(write_folder(tmp_path, "qwen2.5")))
    assert encoded(encoding, input_ids=[3, 4, 5]).labels is None
    masks = [{name: [0, 0, 1]} for name in MASKS]
    both = {"completion_mask": [0, 1, 1], "assistant_masks": [True, False, True], "seq_lengths": [3]}
    for values in (*masks, both, {"labels": [-100, -100, 5], "position_ids": [0, 1, 2]}):
        sample = encoded(encoding, input_ids=[3, 4, 5], **values)
        assert sample.ids.tolist() == [3, 4, 5] and sample.labels is not None
        assert sample.labels.tolist() == [-100, -100, 5]


def test_what_decides_the_tokens_is_in_the_digest(tmp_path: Path) -> None:
    one = encoding_of(write_folder(tmp_path / "one", "llama3.2"))
    same = encoding_of(write_folder(tmp_path / "two", "llama3.2"))
    others = [
        encoding_of(tmp_path / "one", turns="split"),
        encoding_of(tmp_path / "one", parse_special_tokens=True),
        encoding_of(write_folder(tmp_path / "three", "llama3.2", generation=False)),
        RowEncoding("text", one.tokenizer),
    ]
    template = (tmp_path / "one" / "chat_template.jinja").read_text() + " "
    others.append(encoding_of(write_folder(tmp_path / "four", "llama3.2", template=template)))
    assert one.digest == same.digest
    assert len({one.digest, *(other.digest for other in others)}) == 1 + len(others)


@pytest.mark.parametrize(("name", "shown"), [("llama3.2", "26 Jul 2024"), ("gpt-oss", "2024-07-26")])
def test_a_chat_has_the_same_tokens_on_every_day(tmp_path: Path, name: str, shown: str) -> None:
    folder = write_folder(tmp_path, name)
    ids = encoded(encoding_of(folder), messages=[asks("a"), says("b")]).ids.tolist()
    assert shown in load_tokenizer(folder).engine.decode(ids)
