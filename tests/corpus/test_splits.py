"""Splits and configurations of data sets, in folders that the packages datasets and huggingface_hub wrote."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import DatasetCardData, constants

from longspan.config.sections import DataConfig, SourceConfig
from longspan.corpus.recipe import CorpusSettings
from longspan.corpus.rows.sample import Row
from longspan.corpus.sources.find_files import CorpusFile, find_files, find_rows
from longspan.corpus.sources.first_rows import read_file_rows
from longspan.corpus.sources.splits import read_split_parts
from longspan.errors import DataError

datasets: Any = pytest.importorskip("datasets")


def texts(name: str, rows: int) -> Any:
    return datasets.Dataset.from_dict({"text": [f"{name} {i}" for i in range(rows)]})


def texts_read(path: Path, split: str = "") -> list[str]:
    rows = [row for file in find_rows(str(path), split) for row in read_file_rows(file, 0)]
    return [row.values["text"] for row in rows if isinstance(row, Row)]


def write_card(folder: Path, **configurations: Any) -> None:
    """Each configuration has its data_files, or data_dir where it is a text that ends with a slash."""
    configs = [
        {"config_name": name} | ({"data_dir": files} if str(files).endswith("/") else {"data_files": files})
        for name, files in configurations.items()
    ]
    card = DatasetCardData(license="mit", configs=configs)
    (folder / "README.md").write_text(f"---\n{card.to_yaml()}\n---\n# A set\n", encoding="utf-8")


def write_gsm(folder: Path, *splits: str) -> Path:
    """As the hub has gsm8k: of two configurations the same questions."""
    for name in ("main", "socratic"):
        (folder / name).mkdir(parents=True)
        for split in splits:
            texts(split, 6).to_parquet(folder / name / f"{split}-00000-of-00001.parquet")
    return folder


COUNTS = r"main \(1 file\), socratic \(1 file\); give the folder or file of one, such as .*gsm/main; several are"
CARDS: dict[str, dict[str, Any]] = {
    "splits in a list": {n: [{"split": "train", "path": [f"{n}/train-*"]}] for n in ("main", "socratic")},
    "a pattern": {n: f"{n}/**/*.parquet" for n in ("main", "socratic")},
    "folders": {n: f"{n}/" for n in ("main", "socratic")},
}


@pytest.mark.parametrize("card", [*CARDS, "no card", "another card", "no YAML"])
def test_several_configurations_are_refused_and_one_is_read(tmp_path: Path, card: str) -> None:
    folder = write_gsm(tmp_path / "gsm", "train")
    if card in CARDS:
        write_card(folder, **CARDS[card])
        loaded = datasets.load_dataset(str(folder), "main", split="train", cache_dir=str(tmp_path / "cache"))
        assert loaded["text"][:] == texts_read(folder / "main")
    elif card != "no card":
        (folder / "README.md").write_text("---\nconfigs: {\n---\n" if card == "no YAML" else "---\nlicense: mit\n---\n")
    reason = r"by its README.md" if card in CARDS else "by folders that hold files of one name"
    with pytest.raises(DataError, match=rf"^data.path .*gsm' holds several configurations .*, {reason}: {COUNTS}"):
        find_files(str(folder))
    with pytest.raises(DataError, match=r"^eval.a.path .* holds several configurations"):
        find_files(str(folder), split="train", key="eval.a.path")
    assert list(find_files(str(folder / "main"))) == ["train-00000-of-00001.parquet"]
    shutil.rmtree(folder / "socratic")
    assert list(find_files(str(folder))) == ["main/train-00000-of-00001.parquet"]


def test_a_configuration_that_has_all_files_is_read(tmp_path: Path) -> None:
    folder = write_gsm(tmp_path / "gsm", "train")
    write_card(folder, default="*/*.parquet", main="main/*", socratic="socratic/*")
    assert len(texts_read(folder)) == 12


def test_a_name_of_the_hub_with_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    repo = tmp_path / "hub" / "datasets--acme--gsm"
    folder = write_gsm(repo / "snapshots" / "abc", "train", "test")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    for file in [*folder.glob("*/*.parquet")]:  # as the cache holds them
        (repo / "blobs").mkdir(exist_ok=True)
        blob = file.rename(repo / "blobs" / f"{file.parent.name}-{file.name[:4]}")
        file.symlink_to(Path("../../../blobs") / blob.name)
    with pytest.raises(DataError, match=r"'acme/gsm' holds several .*: main \(2 files\), .* such as acme/gsm/main;"):
        find_files("acme/gsm")
    with pytest.raises(DataError, match=r'holds several splits .*: train \(1 file\), test \(1 file\); .* = "train" \('):
        find_files("acme/gsm/main")
    assert [file.name for file in find_rows("acme/gsm/main", "test")] == ["test-00000-of-00001.parquet"]


def write_splits(form: str, folder: Path) -> Path:
    data = datasets.DatasetDict({"train": texts("train", 25), "test": texts("test", 7), "validation": texts("val", 3)})
    if form == "save_to_disk":
        data.save_to_disk(folder, num_shards={"train": 3, "test": 1, "validation": 1})
    elif form == "card":
        folder.mkdir()
        for split, rows in data.items():
            rows.to_json(folder / f"{split[::-1]}.jsonl")
        write_card(folder, default=[{"split": split, "path": f"{split[::-1]}.jsonl"} for split in data])
    else:
        for split, rows in data.items():
            for shard in range(count := 3 if split == "train" else 1):
                part = rows.shard(count, shard, contiguous=True)
                if form == "parquet":
                    (folder / "data").mkdir(parents=True, exist_ok=True)
                    part.to_parquet(folder / "data" / f"{split}-{shard:05}-of-{count:05}.parquet")
                else:
                    (folder / split).mkdir(parents=True, exist_ok=True)
                    part.to_json(folder / split / f"rows{shard}.{form}", compression="infer")
    return folder


@pytest.mark.parametrize("form", ["save_to_disk", "card", "parquet", "jsonl", "jsonl.gz"])
def test_rows_of_a_split_are_those_of_datasets(tmp_path: Path, form: str) -> None:
    folder = write_splits(form, tmp_path / "set")
    with pytest.raises(DataError, match=r"several splits .*: train \(\d files?\), (test|validation) \(1 file\), "):
        find_files(str(folder))
    whole = None if form == "save_to_disk" else datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))
    names = {"train": ("train", 25), "test": ("test", 7), "validation": ("val", 3)}
    for split in ("train", "test", "validation", "train[:9]", "train[9:20]+validation", "train[-4:]+train[:1]"):
        read = texts_read(folder, split)
        if whole is not None:
            loaded = datasets.load_dataset(str(folder), split=split, cache_dir=str(tmp_path / "cache"))
            assert read == loaded["text"][:], split
        for name, (word, rows) in names.items():
            if split == name:
                assert read == [f"{word} {i}" for i in range(rows)]
    with pytest.raises(DataError, match=r"data.split is 'dev\+tset', and .* has no tset; it has train \("):
        find_files(str(folder), split="dev+tset")
    with pytest.raises(DataError, match=r"'train\[30:\]' takes no row of 25 in train"):
        texts_read(folder, "train[30:]")


def test_bounds_are_those_of_datasets() -> None:
    ends = ("", "0", "1", "7", "30", "-1", "-7", "-30"), ("", "0%", "1%", "33%", "50%", "99%", "100%", "-10%", "-100%")
    for rows in (1, 7, 25, 250):
        for start, stop in [(a, b) for kind in ends for a in kind for b in kind]:
            text = f"train[{start}:{stop}]"
            (wanted,) = datasets.ReadInstruction.from_spec(text).to_absolute({"train": rows})
            (part,) = read_split_parts(text, "data.split")
            assert part.bounds(rows) == (wanted.from_, wanted.to), (text, rows)


@pytest.mark.parametrize("split", ["train[", "train[5]", "train[a:]", "train[:101%]", "train[1:5%]", "+", "train[::2]"])
def test_what_is_no_split_is_refused_with_the_grammar(split: str) -> None:
    with pytest.raises(DataError, match=r'data.split is .*; give a split .* as "train", .* "train\[:100\]", .*\+'):
        read_split_parts(split, "data.split")


def test_empty_lines_and_files_without_a_split(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"row {i}"}) for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n\n".join(["", *lines[:3], "\ufeff", *lines[3:], " \n"]), encoding="utf-8")
    for path in (tmp_path, tmp_path / "rows.jsonl"):
        assert texts_read(path, "train[2:5]") == ["row 2", "row 3", "row 4"]
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text(f"text {i}")
    assert texts_read(tmp_path, "train[1:3]+train[-5:-4]") == ["text 1", "text 2", "row 1"]


def test_sources_and_what_decides_documents_have_the_split(tmp_path: Path) -> None:
    folder = write_splits("jsonl", tmp_path / "set")
    sources = SourceConfig(str(folder), split="train[:2]"), SourceConfig(str(folder), split="test[5:]")
    settings = CorpusSettings(DataConfig(sources=sources))
    files = settings.find_source_files(tmp_path / "run")
    place = folder / "train" / "rows0.jsonl", folder / "test" / "rows0.jsonl"
    rows = [("set/train/rows0.jsonl", place[0], (0, 2)), ("set/test/rows0.jsonl", place[1], (5, 7))]
    assert files == tuple(CorpusFile(number, *values) for number, values in enumerate(rows))
    assert settings.deciding_values()["sources"] == [f"{folder} train[:2]", f"{folder} test[5:]"]
