"""Corpora: which files, which documents, which rows a rank reads, and which texts are held out, whole."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config

from longspan import Layout, SequenceShard, plan_fixed
from longspan.config.plan_section import EvaluationSection
from longspan.config.sections import DataConfig, RunConfig, SourceConfig
from longspan.corpus import build_documents as builder
from longspan.corpus.fit_to_model import check_ids_in_vocabulary
from longspan.corpus.recipe import CorpusSettings
from longspan.corpus.run_corpus import open_or_build_corpus
from longspan.corpus.sources.file_sums import file_differences
from longspan.corpus.sources.find_files import CorpusFile, count_files_of_other_kinds, find_files
from longspan.corpus.sources.first_rows import read_texts_for_tokenizer
from longspan.corpus.tokenizer import load_tokenizer, train_tokenizer
from longspan.data.corpus_documents import Corpus, Manifest
from longspan.data.manifest import LeftOut, SourceFile
from longspan.data.run_epochs import documents_line
from longspan.data.run_order import make_step_order
from longspan.errors import DataError
from longspan.train.rows.read_rows import read_inputs_and_labels
from tests.corpus.rows.families import write_folder
from tests.train.small import write_texts


def build(
    tmp_path: Path, path: Path | str, *, resumed: bool = False, said: list[str] | None = None, **keys: object
) -> Corpus:
    data = DataConfig(path=str(path), **{"vocab_size": 300, "max_document_tokens": 64} | keys)  # type: ignore[arg-type]
    log = (said if said is not None else []).append
    tokenizer = load_tokenizer(data.tokenizer) if data.tokenizer else None
    return open_or_build_corpus(CorpusSettings(data), tmp_path / "run", tokenizer=tokenizer, resumed=resumed, log=log)


def ids_of(corpus: Corpus, document: int = 0) -> list[int]:
    return corpus[document][np.arange(len(corpus[document]))].tolist()


def make_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def test_changes_of_files_that_share_a_name_are_all_described() -> None:
    before = [SourceFile("rows.jsonl", size, 0, "0") for size in (5, 6, 7)]  # of three sources
    now = [SourceFile("rows.jsonl", size, 0, digest) for size, digest in ((9, "0"), (6, "1"))]
    assert file_differences(before, before) == []
    changes = ["had 5 bytes and has 9", "has other contents", "is gone"]
    assert file_differences(before, now) == [f"rows.jsonl {change}" for change in changes]


def test_stdlib_is_the_librarys_own_sources() -> None:
    files = find_files("stdlib")
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= files.keys()
    assert list(files) == sorted(files) and len(files) > 300
    strange = {"test", "tests", "site-packages", "dist-packages", "encodings", "__pycache__", "idle_test"}
    assert not [name for name in files if strange & set(name.split("/")) or not name.endswith(".py")]


def test_documents_hold_the_texts_in_order_cut_at_the_limit(tmp_path: Path) -> None:
    corpus = build(tmp_path, write_texts(tmp_path / "texts"), max_document_tokens=16)
    engine = load_tokenizer(tmp_path / "run").engine
    assert corpus.lengths.max() == 16 and corpus.lengths.min() >= 2
    text = (tmp_path / "texts" / "file03.py").read_text()
    pieces = [ids_of(corpus, d) for d in range(len(corpus)) if corpus.origin(d) == "file03.py"]
    ids = [token for piece in pieces for token in piece]
    assert engine.decode(ids, skip_special_tokens=True) == text
    assert ids[-1] == engine.token_to_id("<|endoftext|>") and ids.count(ids[-1]) == 1
    assert all(len(piece) == 16 for piece in pieces[:-1])


def test_a_rest_of_one_token_is_left_out_and_nothing_else(tmp_path: Path) -> None:
    said: list[str] = []
    whole = build(tmp_path / "a", write_texts(tmp_path / "texts"), max_document_tokens=0, said=said)
    assert not [line for line in said if line.startswith(("cut", "left out"))] and whole.manifest.left_out == LeftOut()
    cut = build(tmp_path / "b", tmp_path / "texts", max_document_tokens=7, said=said)
    single = sum(1 for n in whole.lengths if n % 7 == 1)
    assert single and cut.lengths.sum() == whole.lengths.sum() - single
    longer = whole.lengths[whole.lengths > 7]
    count = len(cut) - len(whole) + len(longer)
    line = f"cut {len(longer)} texts of {longer.sum():,} tokens into {count} documents of at"
    ends = f"left out 0 texts of fewer than 2 tokens, and ends of cut texts: {single} token"
    assert [text.startswith(begin) for text, begin in zip(said[-2:], (line, ends), strict=True)] == [True, True]
    again: list[str] = []
    build(tmp_path / "b", tmp_path / "texts", max_document_tokens=7, said=again)
    assert again == said[-2:], "a run that goes on says it too"


def test_files_and_texts_that_are_left_out_are_said(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts", count=2)
    for name in ("a.html", "b.html", "LICENSE", ".hidden", "config.json"):
        (texts / name).write_text("more text")
    (texts / "empty.txt").write_text("")
    (texts / "latin.txt").write_bytes("\xe9t\xe9".encode("latin-1"))
    said: list[str] = []
    corpus = build(tmp_path, texts, max_document_tokens=0, said=said)
    assert said[-3:] == [
        "left out 1 text of fewer than 2 tokens, and ends of cut texts: 1 token in all",
        "left out 4 files of kinds that are not read: .html (2), LICENSE (1), .json (1); a .json or .csv of rows is "
        "read where a path names it, or the folder has no other texts and rows",
        "left out 1 file, not UTF-8: latin.txt",
    ]
    assert corpus.manifest == Manifest.from_json(corpus.manifest.to_json())
    assert corpus.manifest.skipped == ("latin.txt",)


FOLDERS = [  # files of a folder: those that are read, and others by their kinds; or what is said of several splits
    ("a.txt b.md sub/c.py .git/d.py __pycache__/e.py f.bin run/g.txt .hidden.txt h.jsonl",
     "a.txt b.md h.jsonl sub/c.py", {".bin": 1}),
    ("README.md LICENSE.txt data/readme_de.md data/notes.md .gitattributes dataset_infos.json",
     "LICENSE.txt README.md data/notes.md data/readme_de.md", {".json": 1}),
    ("README.md LICENSE.txt data/readme_de.md data/notes.md dataset_infos.json data/train-00000-of-00001.parquet",
     "data/notes.md data/train-00000-of-00001.parquet", {".md": 2, ".txt": 1, ".json": 1}),
    ("config.json train.jsonl scores.csv rows.json", "train.jsonl", {".json": 2, ".csv": 1}),
    ("README.md LICENSE.txt rows.json lines.json config.json sub/rows.csv",
     "lines.json rows.json sub/rows.csv", {".md": 1, ".txt": 1, ".json": 1}),
    ("notes.txt rows.json rows.csv", "notes.txt", {".json": 1, ".csv": 1}),
    ("train/rows.json test/rows.json", r"train \(1 file\), test \(1 file\)", None),
    ("test.jsonl validation.jsonl", "test.jsonl validation.jsonl", {}),
    ("train.jsonl latest.jsonl evaluate.jsonl", "evaluate.jsonl latest.jsonl train.jsonl", {}),
    ("train.py test.py training.md", "test.py train.py training.md", {}),
    ("train.jsonl test.jsonl", r"train \(1 file\), test \(1 file\)", None),
    ("data/train-00000-of-00002.jsonl data/train-00001-of-00002.jsonl data/validation-0.jsonl",
     r"train \(2 files\), validation \(1 file\)", None),
    ("train/a.txt eval/a.txt", r"train \(1 file\), eval \(1 file\)", None),
    ("chats_training.jsonl chats_dev.v2.jsonl", r"training \(1 file\), dev \(1 file\)", None),
    ("data/train_sft-00000-of-00001.jsonl data/train_gen-00000-of-00001.jsonl",
     r"train_gen \(1 file\), train_sft \(1 file\)", None),
    ("train_prefs.jsonl train_sft.jsonl", r"train_prefs \(1 file\), train_sft \(1 file\)", None),
    ("data/train-00000-of-00001.jsonl data/code-00000-of-00001.jsonl", r"train \(1 file\), code \(1 file\)", None),
    ("data/math-00000-of-00001.jsonl data/code-00000-of-00001.jsonl",
     "data/code-00000-of-00001.jsonl data/math-00000-of-00001.jsonl", {}),
    ("train_a.jsonl train_b.jsonl", "train_a.jsonl train_b.jsonl", {}),
    ("train/chunk1/a_0.jsonl.zst train/chunk10/a_0.jsonl.zst 2023/a.jsonl 2024/a.jsonl main/a.txt other/a.txt",
     "2023/a.jsonl 2024/a.jsonl main/a.txt other/a.txt train/chunk1/a_0.jsonl.zst train/chunk10/a_0.jsonl.zst", {}),
]  # fmt: skip


IN_JSON = {
    "config.json": '{\n "hidden_size": 8\n}\n',
    "dataset_infos.json": '{"default": {}}',
    "rows.json": ' [\n {"text": "a"}]',
    "lines.json": '{"text": "a"}\n\n{"text": "b"}\n',
}


@pytest.mark.parametrize(("names", "read", "others"), FOLDERS, ids=[row[0][:40] for row in FOLDERS])
def test_which_files_of_a_folder_are_read(tmp_path: Path, names: str, read: str, others: dict[str, int] | None) -> None:
    for name in names.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(IN_JSON.get(Path(name).name, "some text of a file\n"))
    if others is None:
        with pytest.raises(DataError, match=rf"data.path .* holds several splits of a data set, .*: {read}; give one"):
            find_files(str(tmp_path))
        return
    left_out = (tmp_path / "run",)
    assert list(find_files(str(tmp_path), leave_out=left_out)) == read.split()
    assert count_files_of_other_kinds(str(tmp_path), leave_out=left_out) == others


def test_ids_that_no_row_has_may_lie_beyond_the_embedding(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["some text of a row"], 300)
    size = tokenizer.size
    tokenizer.engine.add_tokens(["<one>", "<two>"])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    loaded = load_tokenizer(tmp_path / "tokenizer")
    assert (loaded.own_size, loaded.size) == (size, size + 2)
    model, rows = Qwen3Config(vocab_size=size), tmp_path / "rows.jsonl"
    keys: dict[str, Any] = {"tokenizer": str(tmp_path / "tokenizer"), "max_document_tokens": 8}
    rows.write_text('{"text": "some text of a row, which is cut"}\n' * 3)
    check_ids_in_vocabulary(build(tmp_path / "a", rows, **keys), model, "m")
    rows.write_text('{"text": "some text of a row, which is cut"}\n' * 3 + '{"text": "a <two>"}\n{"text": "b <two>"}\n')
    corpus = build(tmp_path / "b", rows, **keys)
    assert (corpus.manifest.largest_id, corpus.manifest.largest_at) == (size + 1, "rows.jsonl, line 4")
    with pytest.raises(DataError, match=rf"line 4 holds token id {size + 1}, and the embedding of m has {size} rows"):
        check_ids_in_vocabulary(corpus, model, "m")
    rows.write_text(json.dumps({"input_ids": [1, 2], "labels": [-100, size]}))
    with pytest.raises(DataError, match=rf"line 1 holds token id {size}, and"):
        check_ids_in_vocabulary(build(tmp_path / "c", rows, **keys), model, "m")


NO_TEXTS = [  # a file and what it holds, the path that is given, and what is said
    ("a.txt", "", "nowhere", r"does not exist; give 'stdlib'"),
    ("a.txt", "", "", r"is empty: of 1 file 0 are not UTF-8"),
    (os.fsdecode(b"a\xff.txt"), "some text", "", r"a.udcff.txt' of a file of the corpus is not UTF-8"),
    ("latin.txt", "\xe9t\xe9", "", r"is not UTF-8 \(1 file\); iconv -f LATIN1 -t UTF-8 latin.txt > utf8-latin.txt con"),
    ("picture.png", "x", "", r"holds no file of .txt .md .py .jsonl"),
    ("picture.png", "x", "picture.png", r"ends in '.png'"),
    ("a.tsv", "a", "a.tsv", r"ends in '.tsv'; a file must be one of .txt .md .py .jsonl .*, in small letters"),
    ("a.json", "[]", "a.json", r"is empty: of 1 file"),
    ("a.json", '{"version": 1, "data": [{"text": "a b"}]}', "a.json",
     r"a.json of the corpus .*\) holds no list of rows: it begins with '\{\"version\": 1.*jq .KEY a.json > rows"),
    ("a.json", '{"version": 1}', "", r"no file of .*; its .json files hold no list of rows; give a folder that does"),
    ("a.json", '[{"text": "good"},\n {"text" "bad"}]', "a.json", r"row 2: not JSON \(Expecting ':' .* column 9"),
    ("a.json", '[{"text": "good"},\n {"text":\n"bad]"x}\n]', "a.json", r"row 2: .* at line 2, column 7 of the row"),
    ("a.json", '[{"text": "good"}, ["bad"]]', "a.json", r"row 2: needs an object, such as .*; found a list"),
    ("a.json", '[{"text": "good"}, {"text": "bad"}}, {"text": "good"}]', "a.json", r"row 2: not JSON \(Extra da"),
    ("a.json", '[{"text": "good"}, {"text": "bad"}}', "a.json", r"it ends inside row 2, which begins at byte 19"),
    ("a.json", '[{"text": "good"},]', "a.json", r"a.json, row 2: not JSON"),
    ("a.json", '[{"text": "good"}] {"text": "bad"}', "a.json", r"behind its list of 1 rows stands '\{\"text\""),
    ("a.json", '[{"text": "good"}, {"text": "b\xe9"}, {"text": "c"}]', "a.json", r"row 2: byte 12 of the line is"),
    ("a.json", '[{"text": "good"}, {"text": "bad}, {"text": "c"}]', "a.json",
     r"it ends inside row 2, which begins at byte 19: it was cut off, or a quote or a bracket is missing there"),
    ("a.csv", "text,id\na b,1,2\n", "a.csv", r"row 1: it has 3 cells, and the header has 2 \(text, id\): 'a b,1"),
    ("a.csv", 'text,id\na b,1\n"a"b,1\n', "a.csv", r"row 2: no row of cells with commas .* \(',' expected after"),
    ("a.csv", 'text,id\n"a b,1\n', "a.csv", r"a.csv .* cannot be read: it ends inside row 1, wh"),
    ("a.csv", "text;id\na b;1\n", "a.csv", r"is 'text;id', and commas separate cells; .*delimiter=\";\"\)\)' < a.csv"),
    ("a.csv", "text\tid\na b\t1\n", "a.csv", r'commas separate cells; python -c .*delimiter="\\t"\)\)'),
    ("a.csv", "text,text\na b,c d\n", "a.csv", r"header of a.csv .* has 2 columns 'text'"),
    ("a.csv", "text\ncaf\xe9 au lait\n", "a.csv", r"a.csv, row 1: byte 4 of the row is not UTF-8"),
    ("h.jsonl", '{"text": "good"}\n{"text": "bad\n', "", r"h.jsonl, line 2: not JSON"),
    ("h.jsonl", '\n\n["text"]\n', "", r"h.jsonl, line 3: needs an object, such as .*; found a list: .*text"),
    ("h.jsonl", "7", "", r"line 1: .*found a number: '7'$"),
    ("h.jsonl", '{"content": "x"}', "", r"line 1: .*found keys \['content'\]"),
    ("h.jsonl", '{"text": "good"}\n{"text": null}', "", r"line 2: needs text, messages.*found keys"),
    ("h.jsonl", '{"text": ["a"]}', "", r"line 1: .*\"text\" is a list: \[\"a\"\]$"),
    ("h.jsonl", '{"text": "good"}\n{"text": "\\ud83d\\ude00 ab\\ud800"}', "",
     r"h.jsonl, line 2: character 5 .* is \\ud800, a lone surrogate"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "path", "message"), NO_TEXTS, ids=[row[-1] for row in NO_TEXTS])
def test_what_gives_no_text_is_named(tmp_path: Path, name: str, text: str, path: str, message: str) -> None:
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=message):
        build(tmp_path / "run", tmp_path / path)


def test_a_pipe_is_no_file_of_a_corpus(tmp_path: Path) -> None:
    os.mkfifo(make_folder(tmp_path / "texts") / "a.json")
    with pytest.raises(DataError, match=r"holds no file of .txt .*; its .json files hold no list of rows"):
        build(tmp_path, tmp_path / "texts")
    os.mkfifo(tmp_path / "texts" / "a.txt")
    with pytest.raises(DataError, match=r"a.txt of the corpus .* is no regular file"):
        build(tmp_path, tmp_path / "texts")


def test_several_processes_give_the_documents_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And count as many keys that nothing reads."""
    texts, said = write_texts(tmp_path / "texts"), ([], [])
    rows = [{"text": f"a text {i}", "source": "web", f"key {i}": 1} for i in range(30)]
    (texts / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(builder, "BATCH_BYTES", 500)
    one = build(tmp_path / "1", texts, said=said[0])
    monkeypatch.setattr(builder, "_IN_PROCESS_BYTES", {"text": 0})
    monkeypatch.setattr(builder, "usable_cores", lambda: 2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    several = build(tmp_path / "2", texts, said=said[1])
    assert [ids_of(several, d) for d in range(len(several))] == [ids_of(one, d) for d in range(len(one))]
    (keys, keys_of_several) = ([line for line in lines if "nothing reads" in line] for lines in said)
    assert keys == keys_of_several and keys[0].count("key ") == 30, said


def test_a_tokenizer_is_trained_on_so_many_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("abc", "defg", "hi", "j")))
    for most in (3, 4, 9):
        monkeypatch.setattr("longspan.corpus.sources.first_rows.SAMPLE_CHARACTERS", most)
        assert "".join(read_texts_for_tokenizer([CorpusFile(0, file.name, file)])) == "abcdefghij"[:most]


def test_a_corpus_is_built_once_and_built_again_when_it_changed(tmp_path: Path) -> None:
    texts, said = write_texts(tmp_path / "texts"), list[str]()
    build(tmp_path, texts, said=said)
    assert said and not said.clear()
    build(tmp_path, texts, said=said, resumed=True)
    assert [line.split()[0] for line in said] == ["cut"], "nothing is built"
    (texts / "file00.py").touch()
    build(tmp_path, texts, said=said, resumed=True)
    assert [line.split()[0] for line in said] == ["cut"] * 2  # another time, the same contents
    (texts / "file00.py").write_text("changed text\n")
    build(tmp_path, texts, said=said)
    assert "the corpus changed (file00.py" in said[2]


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts")
    (texts / "rows.jsonl").write_text(json.dumps({"text": "a text"}) + "\n")
    settings = CorpusSettings(DataConfig(path=str(texts), vocab_size=300, max_document_tokens=64))

    def write_at_the_end(line: str) -> None:
        if line.startswith("tokenized"):
            (texts / "rows.jsonl").write_text(json.dumps({"text": "another text"}) + "\n")

    message = rf"rows.jsonl of the corpus \({texts}/rows.jsonl\) changed while it was read; start again"
    with pytest.raises(DataError, match=message):
        open_or_build_corpus(settings, tmp_path / "run", tokenizer=None, resumed=False, log=write_at_the_end)
    assert len(build(tmp_path, texts)) > 12, "the next run makes all of them"


def test_what_stands_around_texts_is_said_and_special_tokens_in_them_are_text(tmp_path: Path) -> None:
    texts, said = tmp_path / "texts", list[str]()
    texts.mkdir()
    (texts / "a.txt").write_text("one <|endoftext|> two <|endoftext|> three\n")
    plain = build(tmp_path, texts, said=said)
    assert "rows hold text: each text ends with <|endoftext|>" in said
    end = load_tokenizer(tmp_path / "run").end
    assert ids_of(plain).count(end or 0) == 1
    said.clear()
    parsed = build(tmp_path, texts, said=said, parse_special_tokens=True)
    assert said[0] == "the corpus changed (data.parse_special_tokens was False and is True): building it again"
    assert ids_of(parsed).count(end or 0) == 3
    with pytest.raises(DataError, match=r"data.parse_special_tokens was True and is False"):
        build(tmp_path, texts, resumed=True)


def test_a_resumed_run_refuses_a_corpus_that_changed(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts")
    build(tmp_path, texts)
    with pytest.raises(DataError, match=r"data.max_document_tokens was 64 and is 32"):
        build(tmp_path, texts, resumed=True, max_document_tokens=32)
    same_size = (texts / "file01.py").read_text().swapcase()
    (texts / "file01.py").write_text(same_size)
    (texts / "file02.py").unlink()
    (texts / "new.md").write_text("new")
    with pytest.raises(DataError, match=r"file01.py has other contents; file02.py is gone; new.md is new; restore it"):
        build(tmp_path, texts, resumed=True)
    record = tmp_path / "run" / "corpus" / "corpus.json"
    values = json.loads(record.read_text())
    for text in (record.read_text()[:40], json.dumps(values | {"asked": 7})):
        record.write_text(text)
        with pytest.raises(DataError, match=r"has checkpoints, and \S+/run/corpus/corpus.json is damaged: restore"):
            build(tmp_path, texts, resumed=True)
    record.unlink()
    with pytest.raises(DataError, match=r"has checkpoints but no corpus"):
        build(tmp_path, texts, resumed=True)


def test_a_damaged_corpus_is_named(tmp_path: Path) -> None:
    build(tmp_path, write_texts(tmp_path / "texts"))
    folder = tmp_path / "run" / "corpus"
    documents = folder / json.loads((folder / "corpus.json").read_text())["documents"]
    (documents / "tokens.bin").write_bytes((documents / "tokens.bin").read_bytes()[:-2])
    with pytest.raises(DataError, match=r"is damaged: tokens.bin has \d+ tokens, corpus.json wants \d+"):
        Corpus(folder)
    said: list[str] = []
    again = build(tmp_path, tmp_path / "texts", said=said)
    assert f"{documents} is damaged: its documents are made again" in said and len(again) > 12
    shutil.rmtree(documents)
    with pytest.raises(DataError, match=r"its documents are not in .* any more; start its run again"):
        Corpus(folder)
    assert build(tmp_path, tmp_path / "texts", resumed=True).lengths.tolist() == again.lengths.tolist()
    for text in (json.dumps({"path": "x"}), '{"documents": "'):
        (folder / "corpus.json").write_text(text)
        with pytest.raises(DataError, match=r"run/corpus/corpus.json is damaged: "):
            Corpus(folder)


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_a_rank_reads_only_its_rows_and_the_next_token_of_each_run(tmp_path: Path, degree: int) -> None:
    corpus = build(tmp_path, write_texts(tmp_path / "texts"))
    documents = corpus.select([0, 3, 5, 6])
    plan = plan_fixed(documents.lengths, Layout(ranks=4), degree)
    read = list[int]()
    for slot in range(4):
        before, runs, rows = corpus.rows_read, 0, 0
        for batch in plan.micro_batches:
            shard = SequenceShard(batch, slot, 0, torch.device("cpu"))
            read_inputs_and_labels(documents, shard)
            runs += sum(len(part.segments().start) for part in shard.parts)
            rows += shard.local_rows
        read.append(corpus.rows_read - before)
        assert rows <= read[-1] <= rows + runs
    assert plan.tokens <= sum(read) < plan.tokens + 4 * 2 * degree * 4


def test_positions_outside_a_document_are_refused(tmp_path: Path) -> None:
    corpus = build(tmp_path, write_texts(tmp_path / "texts"))
    for positions in ([-1], [len(corpus[1])]):
        with pytest.raises(IndexError, match=r"of a document of"):
            corpus[1][np.array(positions)]
    with pytest.raises(IndexError):
        corpus[len(corpus)]


def test_other_settings_of_a_tokenizer_make_other_documents_in_the_same_cache(tmp_path: Path) -> None:
    folder, texts = tmp_path / "tokenizer", tmp_path / "texts"
    train_tokenizer(["hello there"], 300).save_pretrained(make_folder(folder))
    (make_folder(texts) / "a.txt").write_text("hello <tool> there " * 5)
    keys = {"tokenizer": str(folder), "max_document_tokens": 0}
    before = build(tmp_path, texts, **keys)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"] = {str(load_tokenizer(folder).size): {"content": "<tool>", "normalized": False}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    after = build(tmp_path / "new", texts, **keys)
    assert after.lengths.sum() < before.lengths.sum()
    assert ids_of(after)[:-1] == AutoTokenizer.from_pretrained(folder)((texts / "a.txt").read_text())["input_ids"]
    with pytest.raises(DataError, match="the tokenizer is another one"):
        build(tmp_path, texts, resumed=True, **keys)


def test_a_trained_tokenizer_is_the_one_that_transformers_reads_beside_the_config(tmp_path: Path) -> None:
    (make_folder(tmp_path / "run") / "config.json").write_text('{"model_type": "qwen2"}')  # with a class of its own
    texts, text = make_folder(tmp_path / "texts"), "e\u0301 123 or so\n" * 9  # an accent apart, which it joins
    (texts / "a.txt").write_text(text)
    corpus = build(tmp_path, texts, max_document_tokens=0)
    stock = AutoTokenizer.from_pretrained(tmp_path / "run")
    assert type(stock).__name__ == "Qwen2Tokenizer"
    assert ids_of(corpus)[:-1] == stock(text)["input_ids"]
    build(tmp_path, texts, max_document_tokens=0, resumed=True)


def test_a_tokenizer_that_is_read_otherwise_beside_the_models_config_is_refused(tmp_path: Path) -> None:
    train_tokenizer(["hello there"], 300).save_pretrained(make_folder(tmp_path / "tokenizer"))
    (make_folder(tmp_path / "run") / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(DataError, match=r"reads it there with the class Qwen2Tokenizer, and in its own folder with"):
        build(tmp_path, write_texts(tmp_path / "texts"), tokenizer=str(tmp_path / "tokenizer"))


def save_as_datasets(folder: Path, files: Mapping[str, int], *named: str, **settings: Any) -> Path:
    pyarrow: Any = pytest.importorskip("pyarrow")
    folder.mkdir(exist_ok=True)
    for name, rows in files.items():
        table = pyarrow.table({"text": [f"row {i} of a table" for i in range(rows)]})
        with pyarrow.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": n} for n in named], **settings}))
    return folder


def test_of_a_saved_data_set_the_files_are_read_that_its_state_names(tmp_path: Path) -> None:
    data = save_as_datasets(tmp_path / "data", {"data-0.arrow": 4, "cache-1.arrow": 3}, "data-0.arrow")
    (data / "dataset_info.json").write_text("{}")
    assert list(find_files(str(data))) == ["data-0.arrow"] and not count_files_of_other_kinds(str(data))
    said = list[str]()
    assert len(build(tmp_path, data, said=said)) == 4 and not [line for line in said if line.startswith("left out")]
    missing = (("data-0.arrow", "data-1.arrow"), "2 files, of which 1 are not")
    for named, message in (missing, (("../a.arrow",), "1 are")):
        save_as_datasets(data, {}, *named)
        with pytest.raises(DataError, match=message):
            find_files(str(data))
    save_as_datasets(data, {}, "data-0.arrow", _indices_data_files=[{"filename": "indices.arrow"}])
    with pytest.raises(DataError, match="a selection of rows"):
        find_files(str(data))
    (data / "state.json").write_text('["of another program"]')
    assert list(find_files(str(data))) == ["cache-1.arrow", "data-0.arrow"]
    for split in ("train", "test"):  # saved as one, in a folder of the one that is named
        (tmp_path / "outer" / "saved").mkdir(parents=True, exist_ok=True)
        save_as_datasets(tmp_path / "outer" / "saved" / split, {"data-0.arrow": 2}, "data-0.arrow")
    with pytest.raises(DataError, match=r"several splits of a data set, by .*: train \(1 file\), test \(1 file\)"):
        find_files(str(tmp_path / "outer"))


def test_folders_behind_links_are_read_once(tmp_path: Path) -> None:
    texts, other = write_texts(tmp_path / "texts", count=2), write_texts(tmp_path / "other", count=3)
    for link, target in (("a", other), ("b", other), ("loop", texts), ("up", tmp_path), ("c", texts / "d")):
        (texts / link).symlink_to(target)
    write_texts(texts / "d", count=1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "of_the_run.txt").write_text("of the run")
    (other / "back").symlink_to(tmp_path / "run")
    files = find_files(str(texts), leave_out=(tmp_path / "run",))
    assert [*files] == ["a/file00.py", "a/file01.py", "a/file02.py", "d/file00.py", "file00.py", "file01.py"]


NAMES = "abcdefghijkl"  # of rows; each is written with its own letter alone, in capitals
LOWEST = ord("!")  # the byte of token 0


def chat(name: str) -> dict[str, Any]:
    turns = 1 + ord(name) % 3
    return {"messages": [{"role": role, "content": name.upper() * 9} for role in ("user", "assistant") * turns]}


ROWS = {
    "text": lambda name: {"text": name.upper() * (5 + 3 * ord(name) % 50)},
    "tokens": lambda name: {"input_ids": [ord(name.upper()) - LOWEST] * (2 + 3 * ord(name) % 50)},
    "prompts": lambda name: {"prompt": name.upper() * 20, "completion": name.upper() * (ord(name) % 30 + 1)},
    "chats": chat,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "files that are cut": ("files", {"max_document_tokens": 16}),
    "texts that are cut": ("text", {"max_document_tokens": 16}),
    "completions that are cut": ("prompts", {"max_document_tokens": 16}),
    "chats in turns that are cut": ("chats", {"split_turns": True, "max_document_tokens": 30}),
    "a number of texts": ("chats", {"split_turns": True, "documents": 5}),
    "several sources": ("sources", {"max_document_tokens": 16}),
    "whole texts": ("text", {}),
}


def write_letters(folder: Path, form: str, names: str = NAMES) -> Path:
    folder.mkdir()
    if form == "files":
        for name in names:
            (folder / f"{name}.txt").write_text(ROWS["text"](name)["text"])
        return folder
    path = folder / f"{form}.jsonl"
    path.write_text("".join(json.dumps(ROWS[form](name)) + "\n" for name in names))
    return path


def names_of(folder: Path, corpus: Corpus, documents: Any) -> set[str]:
    engine = load_tokenizer(folder / "run").engine
    found = [{*NAMES.upper()} & {*engine.decode(ids_of(corpus, d))} for d in documents]
    assert all(len(row) == 1 for row in found)
    return {row.pop() for row in found}


@pytest.mark.parametrize(("form", "keys"), CASES.values(), ids=CASES)
def test_no_part_of_a_held_out_text_is_trained_on(
    tmp_path: Path, form: str, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "BATCH_BYTES", 100)  # texts of several batches
    documents = keys.get("documents", "auto")
    data = DataConfig(**{"max_document_tokens": 0} | {key: keys[key] for key in keys if key != "documents"})
    if form == "sources":
        paths = write_letters(tmp_path / "a", "text", NAMES[:8]), write_letters(tmp_path / "b", "tokens", NAMES[8:])
        data = replace(data, sources=tuple(SourceConfig(str(path), 1.0) for path in paths))
    else:
        data = replace(data, path=str(write_letters(tmp_path / "rows", form)))
    tokenizer = load_tokenizer(write_folder(tmp_path / "phi3", "phi3"))
    settings = CorpusSettings(data)
    corpus = open_or_build_corpus(settings, tmp_path / "run", tokenizer=tokenizer, resumed=False, log=lambda _: None)
    config = RunConfig(data=data, evaluation=EvaluationSection(documents=documents))
    config = replace(config, train=replace(config.train, tokens_per_step=64, steps=1))
    order = make_step_order(config, corpus)
    trained = set(range(len(corpus))) - {*order.evaluation}
    held_out, others = names_of(tmp_path, corpus, order.evaluation), names_of(tmp_path, corpus, trained)
    assert not held_out & others and held_out | others == {*NAMES.upper()}
    count = documents if isinstance(documents, int) else 1  # one in ten of twelve
    count += form == "sources"  # one of each
    assert (len(held_out), len(others)) == (count, 12 - count) == (order.held_out_texts, order.training_texts)
    assert (corpus.texts is None) == (len(corpus) == 12) == (not {"split_turns", "max_document_tokens"} & {*keys})
    line = documents_line(config, order)
    assert f"; {count} text" in line and ("of 11 texts to train on" in line or len(trained) == 11 or count > 1)
