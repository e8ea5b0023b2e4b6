"""Rows of text: the ids are those of the tokenizer, also in another process; bad rows are told, one line each."""

import pickle

import pytest

from longspan.corpus.rows.encoding import RowEncoding
from longspan.corpus.rows.sample import BadRow, Row, RowSettings, Sample, common_kind, rows_hold
from longspan.corpus.tokenizer import END_OF_TEXT, train_tokenizer
from longspan.errors import DataError

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


def test_a_bad_row_stands_in_its_place() -> None:
    encoding = RowEncoding("text", train_tokenizer(TEXTS, 300))
    good, bad, half = encoding.encode(
        [Row("f, line 1", {"text": "a b"}), Row("f, line 2", {"text": 3}), Row("f, line 3", {"text": "a\ud800"})]
    )
    assert isinstance(good, Sample)
    assert bad == BadRow("f, line 2", 'needs an object with a string "text"; "text" is a number: 3')
    assert isinstance(half, BadRow) and half.reason.startswith("character 2 of its text is \\ud800, a lone surrogate")


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
def test_kinds(values: dict[str, object], kind: str, shown: str) -> None:
    assert common_kind([Row("line 1", values)] * 2) == kind
    assert rows_hold(common_kind([Row("line 1", values)])) == shown


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "there are no rows"),
        ([{"text": "a"}, {"messages": []}], r"line 2 holds messages \(chat\), and line 1 holds text; rows of one"),
        ([{"text": "a", "messages": []}], r"line 1 holds text and also messages \(chat\); a row is of one kind"),
        ([{"prompt": "a"}], r"line 1: needs text, messages, .*; found keys \['prompt'\]; data.columns gives columns"),
        ([{"instruction": "a"}], r"found keys \['instruction'\]; its answer is called output"),
        (
            [{"messages": []}, {"conversations": []}],
            r"line 2 holds conversations \(chat, as ShareGPT has it\), and line",
        ),
        (
            [{"instruction": "a", "output": "b", "text": "ab"}],
            "holds text and also instruction and output .*data.columns",
        ),
    ],
)
def test_rows_of_no_kind_or_of_two(rows: list[dict[str, object]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        common_kind([Row(f"line {i}", values) for i, values in enumerate(rows, 1)])
