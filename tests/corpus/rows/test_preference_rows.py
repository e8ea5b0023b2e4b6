"""Rows of preferences: documents and targets are those of TRL's trainers; what prefers nothing is a bad row."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from longspan.config.preference_losses import RowForm
from longspan.corpus.document_encoder import NOTHING, OWN_TOKEN, EncodedDocuments
from longspan.corpus.mismatched_answers import MismatchedAnswers
from longspan.corpus.rows.encoding import RowEncoding
from longspan.corpus.rows.kinds import row_kind
from longspan.corpus.rows.sample import BadRow, Row as DataRow, RowSettings, Sample
from longspan.corpus.tokenizer import load_tokenizer
from longspan.data.document import NO_TARGET
from tests.corpus.rows.conversations import TOOL, asks, says
from tests.corpus.rows.families import marked_template, write_folder

QUESTION, GOOD, BAD = asks("Why?"), says("It scatters."), says("No.")
AGAIN = [QUESTION, says("Guess."), asks("Dust?")]
PAIRS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "a b", "chosen": " c d", "rejected": " e"},
    "texts that begin alike": {"chosen": "a b c d", "rejected": "a b e"},
    "conversations": {"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]},
    "of several turns": {"prompt": AGAIN, "chosen": [GOOD], "rejected": [BAD]},
    "conversations that begin alike": {"chosen": [*AGAIN, GOOD], "rejected": [*AGAIN, BAD]},
    "with tools": {"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD], "tools": [TOOL]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("qwen"), "qwen2.5")


def encode(folder: Path, values: dict[str, Any], form: RowForm = "pairs") -> list[Sample | BadRow]:
    row = DataRow("line 1", values)
    return RowEncoding(row_kind(row), load_tokenizer(folder), RowSettings(preference=form)).encode([row])


def documents_of(sample: Any) -> list[tuple[list[int], list[int]]]:
    """Token ids and targets of each document of a row."""
    stops = [*sample.stops][:-1]
    labels = [part[part != NO_TARGET].tolist() for part in np.split(sample.labels, stops)]
    return list(zip([part.tolist() for part in np.split(sample.ids, stops)], labels, strict=True))


def of_trl(trainer: str, folder: Path, values: dict[str, Any]) -> Any:
    """The columns that a trainer of TRL makes of a row."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    datasets.disable_progress_bars()
    settings = SimpleNamespace(dataset_num_proc=None, max_length=None, truncation_mode="keep_start")
    of_trainer = SimpleNamespace(_tokenizer=tokenizer, calculate_KL=False)
    rows = datasets.Dataset.from_list([values])
    return getattr(trl, trainer)._prepare_dataset(of_trainer, rows, tokenizer, settings, "eval")[0]


@pytest.mark.whole
@pytest.mark.parametrize("case", PAIRS)
def test_pairs_are_those_of_trl(folder: Path, case: str) -> None:
    (sample,) = encode(folder, PAIRS[case])
    row = of_trl("DPOTrainer", folder, PAIRS[case])
    wanted = [(row["prompt_ids"] + row[f"{side}_ids"], row[f"{side}_ids"]) for side in ("chosen", "rejected")]
    assert documents_of(sample) == wanted
    (learnt,) = encode(folder, PAIRS[case], "orpo")  # whose chosen document is learnt with its prompt
    assert documents_of(learnt) == [(wanted[0][0], wanted[0][0]), wanted[1]]
    assert isinstance(learnt, Sample) and learnt.numbers == (len(row["prompt_ids"]),)


@pytest.mark.whole
def test_answers_with_labels_are_those_of_trl(folder: Path) -> None:
    values = {"prompt": [QUESTION], "completion": [GOOD], "label": True}
    (sample,) = encode(folder, values, "kto")
    row = of_trl("KTOTrainer", folder, values)
    assert documents_of(sample) == [(row["prompt_ids"] + row["completion_ids"], row["completion_ids"])]
    pair = encode(folder, PAIRS["conversations"], "kto")  # one answer that is wanted, and one that is not
    assert [sample.numbers for sample in pair if isinstance(sample, Sample)] == [(1.0,), (0.0,)]
    assert [documents_of(one)[0] for one in pair] == documents_of(encode(folder, PAIRS["conversations"])[0])


def test_a_prompt_may_be_a_copy_beside_messages(folder: Path) -> None:
    """As in ultrafeedback_binarized: messages hold it, and TRL's `maybe_extract_prompt` takes it from there."""
    values = {"chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]}
    (copy,) = encode(folder, {"prompt": "Why?", **values})
    (expected,) = encode(folder, values)
    assert documents_of(copy) == documents_of(expected)


PAIR: dict[str, Any] = {"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]}
BRIEF = {"role": "system", "content": "Be brief."}
ANSWERS = {"chosen": "It scatters.", "rejected": "No."}
TURN_ANSWERS = {key: {"from": "gpt", "value": text} for key, text in ANSWERS.items()}
ASKED = [{"from": "human", "value": "Why?"}]
CHATS = {"chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]}
SEVERAL = [*ASKED, {"from": "gpt", "value": "Guess."}, {"from": "human", "value": "Dust?"}]
BOTH = {"system": "Be brief.", "tools": json.dumps([TOOL["function"]])}
HISTORY = {"history": [["Why?", "Guess."]], "system": "Be brief."}
# Rows as others have them, what differs in the same pair in messages, and the keys that nothing reads.
FORMATS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"prompt": "Why?", "score_chosen": 9.0, **CHATS, "messages": CHATS["chosen"]}, {}, "score_chosen messages"),
    ({"prompt_id": "7", **CHATS, "messages": CHATS["chosen"]}, {}, "prompt_id messages"),
    ({"system": "", "question": "Why?", **ANSWERS}, {}, ""),
    ({"system": "Be brief.", "question": "Why?", "id": "3", **ANSWERS}, {"prompt": [BRIEF, QUESTION]}, "id"),
    ({"conversations": ASKED, **TURN_ANSWERS}, {}, ""),
    ({"conversations": SEVERAL, **BOTH, **TURN_ANSWERS}, {"prompt": [BRIEF, *AGAIN], "tools": [TOOL]}, ""),
    ({"messages": AGAIN, "chosen": GOOD, "rejected": BAD}, {"prompt": AGAIN}, ""),
    ({"messages": [QUESTION], **ANSWERS, "source": "a"}, {}, "source"),
    ({"instruction": "Why?", "input": "", **ANSWERS}, {}, ""),
    (
        {"instruction": "Why", "input": "red?", **HISTORY, **ANSWERS},
        {"prompt": [BRIEF, QUESTION, says("Guess."), asks("Why\nred?")]},
        "",
    ),
    ({**PAIR, "system": "Be brief."}, {"prompt": [BRIEF, QUESTION]}, ""),
]


@pytest.mark.parametrize(("values", "changes", "unread"), FORMATS)
def test_pairs_of_other_formats_are_those_of_messages(
    folder: Path, values: dict[str, Any], changes: dict[str, Any], unread: str
) -> None:
    """Of ultrafeedback_binarized, Orca, and LLaMA-Factory's ShareGPT and Alpaca; scored ones too."""
    tokenizer = load_tokenizer(folder)
    assert row_kind(DataRow("", values)) == "chosen+rejected"
    settings = [RowSettings(preference="pairs"), RowSettings(preference="kto"), RowSettings(num_labels=1)]
    for encoding in [RowEncoding("chosen+rejected", tokenizer, setting) for setting in settings]:
        assert encoding.unread_columns(values) == unread.split()
        results = [encoding.encode([DataRow("", row)]) for row in (values, {**PAIR, **changes})]
        for found, wanted in zip(*results, strict=True):
            assert isinstance(found, Sample) and isinstance(wanted, Sample), found
            assert (found.ids.tolist(), found.stops) == (wanted.ids.tolist(), wanted.stops)
            assert np.array_equal(found.labels, wanted.labels)


JUDGED = {"prompt": [QUESTION], "completion": [GOOD], "label": True}


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"messages": [QUESTION, GOOD], "label": True}, JUDGED),
        ({"messages": [*AGAIN, BAD], "kto_tag": False}, {"prompt": AGAIN, "completion": [BAD], "label": False}),
        ({"conversations": [*ASKED, TURN_ANSWERS["chosen"]], "kto_tag": True}, JUDGED),
        ({"instruction": "Why?", "input": "", "output": "It scatters.", "label": "True"}, JUDGED),
        ({"prompt": [QUESTION], "completion": [GOOD], "label": "1"}, JUDGED),
    ],
)
def test_answers_with_labels_of_other_formats(folder: Path, values: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Of a chat the last answer is the one that the label judges; a cell of a .csv is a text."""
    (found,), (sample,) = encode(folder, values, "kto"), encode(folder, wanted, "kto")
    assert isinstance(found, Sample) and isinstance(sample, Sample)
    assert (documents_of(found), found.numbers) == (documents_of(sample), sample.numbers)
    encoding = RowEncoding(row_kind(DataRow("", values)), load_tokenizer(folder), RowSettings(preference="kto"))
    assert encoding.unread_columns(values) == []


LATER = [says("yes"), asks("more"), says("SECRET"), asks("and"), says("end")]
MASKED = {"weight": 0, "train": False, "training": False, "trainable": 0, "loss": False}
# how a row is made of a prompt and the turns behind it, and for which loss
ROWS_OF_TURNS: dict[str, tuple[RowForm, Any]] = {
    "pair": ("pairs", lambda prompt, turns: {"prompt": prompt, "chosen": turns, "rejected": [BAD]}),
    "rejected": ("pairs", lambda prompt, turns: {"prompt": prompt, "chosen": [BAD], "rejected": turns}),
    "no prompt": ("pairs", lambda prompt, turns: {"chosen": prompt + turns, "rejected": [*prompt, BAD]}),
    "orpo": ("orpo", lambda prompt, turns: {"prompt": prompt, "chosen": turns, "rejected": [BAD]}),
    "pair for kto": ("kto", lambda prompt, turns: {"prompt": prompt, "chosen": turns, "rejected": [BAD]}),
    "kto": ("kto", lambda prompt, turns: {"prompt": prompt, "completion": turns, "label": True}),
    "completion": ("", lambda prompt, turns: {"prompt": prompt, "completion": turns}),
    "messages": ("", lambda prompt, turns: {"messages": prompt + turns}),
    "sharegpt": ("", lambda prompt, turns: {"conversations": [
        {"from": "gpt" if role == "assistant" else "human", "value": content, **keys}
        for role, content, keys in ((m["role"], m["content"], {k: m[k] for k in m if k in MASKED})
                                    for m in prompt + turns)
    ]}),
}  # fmt: skip


def learnt_text(folder: Path, samples: list[Sample | BadRow]) -> tuple[list[int], str]:
    """Token ids of a row, and what its targets say, with a bar between runs of them."""
    engine = load_tokenizer(folder).engine
    ids = np.concatenate([sample.ids for sample in samples if isinstance(sample, Sample)])
    labels = np.concatenate([sample.labels for sample in samples if isinstance(sample, Sample) and len(sample.labels)])
    runs = np.split(labels, np.flatnonzero(np.diff(labels == NO_TARGET)) + 1)
    texts = [engine.decode(run.tolist(), skip_special_tokens=False) for run in runs if run[0] != NO_TARGET]
    return ids.tolist(), "".join(texts)


@pytest.mark.parametrize("marked", [False, True], ids=["plain", "generation"])
@pytest.mark.parametrize("case", ROWS_OF_TURNS)
def test_a_turn_that_a_row_keeps_out_is_no_target(tmp_path: Path, case: str, marked: bool) -> None:
    """It alone: all other targets are those of the row without the key."""
    folder = (
        write_folder(tmp_path, "phi3", template=marked_template("phi3"))
        if marked
        else write_folder(tmp_path, "qwen2.5")
    )
    form, row_of = ROWS_OF_TURNS[case]
    ids, text = learnt_text(folder, encode(folder, row_of([QUESTION], LATER), form))
    end = "<|end|>" if marked else "<|im_end|>"
    assert f"SECRET{end}" in text
    for key, value in MASKED.items():
        turns = [{**turn, key: value} if turn["content"] == "SECRET" else turn for turn in LATER]
        found = learnt_text(folder, encode(folder, row_of([QUESTION], turns), form))
        assert found == (ids, text.replace(f"SECRET{end}", "")), key


def test_what_cannot_be_kept_out_is_refused(folder: Path) -> None:
    """Tokens of other roles, which losses of preferences learn; and for orpo a turn of the prompt is kept out too."""
    turns = [says("yes"), {**asks("more"), "train": False}, says("end")]
    (bad,) = encode(folder, {"prompt": [QUESTION], "chosen": turns, "rejected": [BAD]})
    assert isinstance(bad, BadRow) and "train of a message is false, its role is user" in bad.reason
    prompt = [QUESTION, says("Guess.", weight=0), asks("Dust?")]
    row = {"prompt": prompt, "chosen": [GOOD], "rejected": [BAD]}
    assert "Guess." not in learnt_text(folder, encode(folder, row, "orpo"))[1]
    assert learnt_text(folder, encode(folder, row)) == learnt_text(folder, encode(folder, row | {"prompt": AGAIN}))


@pytest.mark.parametrize("form", ["pairs", "orpo", "kto"])
def test_a_prompt_that_answers_repeat_is_taken_once(folder: Path, form: RowForm) -> None:
    row = PAIRS["of several turns"]
    repeated = row | {key: [*AGAIN, *row[key]] for key in ("chosen", "rejected")}
    wanted, found = ([documents_of(one) for one in encode(folder, values, form)] for values in (row, repeated))
    assert found == wanted
    answer = {"prompt": AGAIN, "completion": [*AGAIN, GOOD], "label": True}
    (one,), (other,) = (encode(folder, values, "kto") for values in (answer, answer | {"completion": [GOOD]}))
    assert documents_of(one) == documents_of(other)


def test_a_model_that_scores_reads_a_repeated_prompt_once(folder: Path) -> None:
    row, encoding = (
        PAIRS["of several turns"],
        RowEncoding("chosen+rejected", load_tokenizer(folder), RowSettings(num_labels=1)),
    )
    repeated = row | {key: [*AGAIN, *row[key]] for key in ("chosen", "rejected")}
    wanted, found = (encoding.encode([DataRow("", values)])[0] for values in (row, repeated))
    assert isinstance(wanted, Sample) and isinstance(found, Sample) and found.ids.tolist() == wanted.ids.tolist()


@pytest.mark.parametrize("form", ["", "pairs", "orpo", "kto"])
def test_the_end_that_answers_teach_is_known_of_each_loss(folder: Path, form: RowForm) -> None:
    """Also where the line break behind it is a target; an answer that is not wanted teaches none."""
    rows = {"": {"messages": [QUESTION, GOOD]}, "kto": {"prompt": [QUESTION], "completion": [GOOD], "label": True}}
    row = rows.get(form, PAIRS["conversations"])
    (sample,) = encode(folder, row, form)
    end = load_tokenizer(folder).engine.token_to_id("<|im_end|>")
    assert isinstance(sample, Sample) and sample.ends == (("<|im_end|>", end),)
    if form == "kto":
        (unwanted,) = encode(folder, row | {"label": False}, form)
        assert isinstance(unwanted, Sample) and unwanted.ends == ()


@pytest.mark.parametrize("pairs", [True, False])
def test_a_mismatched_answer_is_of_another_row(pairs: bool) -> None:
    """Of pairs, whose answers have one prompt, each side's is that of the pair before."""
    answers = MismatchedAnswers(0)
    before = np.array([[7, 8]])
    for batch in (range(2), range(2, 4)):
        texts = [(prompt, 10 * prompt + side) for prompt in batch for side in range(1 + pairs)]
        ids = np.array([[prompt, 0, answer] for prompt, answer in texts]).ravel()
        rows = np.array([prompt for prompt, _ in texts])
        ones = np.ones(len(rows), int)
        codes = np.tile(np.array([NOTHING, NOTHING, OWN_TOKEN], np.uint8), len(rows))
        encoded = EncodedDocuments(ids, codes, 3 * ones, ones, 0 * ones, rows, rows, (), numbers=ones)
        made = answers.add_mismatched_documents(encoded).ids.reshape(-1, 2, 3)
        first = batch[0] == 0
        others = np.roll(made[:, 0, 2], 1 + pairs) if first else np.append(before, made[:, 0, 2])[: len(rows)]
        assert (made[:, 1, :2] == made[:, 0, :2]).all() and made[:, 1, 2].tolist() == others.tolist()
        assert (made[:, 1, 2] // 10 != made[:, 0, 2] // 10).all()
        before = made[-(1 + pairs) :, 0, 2]


@pytest.mark.parametrize(
    ("values", "form", "reason"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "pairs", "chosen and rejected are the same tokens"),
        ({"chosen": [QUESTION, GOOD], "rejected": [QUESTION, GOOD]}, "pairs", "chosen is empty: []"),
        ({"prompt": "a", "chosen": " ", "rejected": "b"}, "orpo", 'chosen is empty: " "; give an answer'),
        ({"prompt": [QUESTION], "chosen": [GOOD], "rejected": [says("")]}, "pairs", "rejected is empty"),
        ({"chosen": "a", "rejected": "b"}, "pairs", "it has no prompt, and its answers do not begin with the same"),
        ({"prompt": "", "chosen": "a", "rejected": "b"}, "pairs", "it has no prompt"),
        ({"prompt": "a", "chosen": [GOOD], "rejected": [BAD]}, "pairs", '"prompt" is a string; give a list'),
        (
            {"query": "a", "chosen": "b", "rejected": "c"},
            "pairs",
            'data.rename_columns = ["question=NAME"] for one that',
        ),
        ({"prompt": "a", "system": "b", **ANSWERS}, "pairs", '"system" stands beside prompt, which is a string'),
        ({"messages": [QUESTION, GOOD], **ANSWERS}, "pairs", '"messages" ends with an answer, and chosen and rejected'),
        ({"prompt": "a", "messages": [QUESTION], **ANSWERS}, "pairs", '["messages="] takes prompt, and ["prompt="] t'),
        ({"conversations": [QUESTION], **ANSWERS}, "pairs", 'data.rename_columns = ["messages=conversations"] reads'),
        ({"question": 3, **ANSWERS}, "pairs", '"question" is a number: 3'),
        ({"question": "a", "rejected": "b", "chosen": ""}, "pairs", "chosen is empty"),
        ({"messages": [QUESTION], "label": True}, "kto", "its last message is of user, and label judges an answer"),
        ({"messages": [QUESTION, GOOD]}, "kto", "label is null; give true for an answer that is wanted"),
        ({"prompt": "a", "completion": "b"}, "kto", "label is null; give true for an answer that is wanted"),
        ({"prompt": "a", "completion": "b", "label": 2}, "kto", "label is 2; give true"),
        ({"prompt": "a", "completion": "", "label": 0}, "kto", "completion is empty"),
    ],
)
def test_rows_that_prefer_nothing(folder: Path, values: dict[str, Any], form: RowForm, reason: str) -> None:
    (bad,) = encode(folder, values, form)
    assert isinstance(bad, BadRow) and reason in bad.reason, bad
