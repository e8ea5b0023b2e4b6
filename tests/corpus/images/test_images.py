"""Rows with images become the tokens, masks and places that the stock processor makes; pixels are read where asked."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.config.sections import DataConfig
from longspan.corpus.build import ensure_corpus
from longspan.corpus.corpus_settings import CorpusSettings
from longspan.corpus.document_encoder import cut_row
from longspan.corpus.image_documents import ImageDocuments, show_images
from longspan.corpus.images.image_file import ImageFile
from longspan.corpus.images.processor import load_processor
from longspan.corpus.tokenizer import load_tokenizer
from longspan.data.documents import Corpus
from longspan.errors import DataError
from longspan.model.vision.image_tokens import ImageTokens
from tests.corpus.images.folders import llava_folder, qwen_folder, with_broken_pixels, write_images, write_rows

Image = pytest.importorskip("PIL.Image")
SIZES = [(20, 33), (16, 16), (8, 24), (64, 40)]
PART = {"type": "image"}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def asks(*content: Any) -> list[dict[str, Any]]:
    first = content[0] if len(content) == 1 else list(content)
    return [{"role": "user", "content": first}, {"role": "assistant", "content": "a 3"}]


MESSAGES = {
    "parts": (2, asks(PART, text(" and "), PART, text("what?"))),
    "named in a text": (1, asks("<image>\nwho?")),
    "named in a part": (2, asks(text("<image> or <image>?"), text("now"))),
    "without images": (0, asks("hi")),
    "an image of the assistant": (
        1,
        [{"role": "user", "content": "draw"}, {"role": "assistant", "content": [PART, text("a 3")]}],
    ),
}


def corpus_of(folder: Path, rows: list[dict[str, Any]], model: Path, **data: Any) -> Corpus:
    file = write_rows(folder / "rows.jsonl", rows)
    config = replace(DataConfig(), path=str(file), cache=str(folder / "cache"), max_document_tokens=0)
    config = replace(config, **data)
    return ensure_corpus(
        CorpusSettings(config), folder / "run", tokenizer=load_tokenizer(model), resumed=False, log=lambda _: None
    )


def documents_of(corpus: Corpus, model: Path, monkeypatch: pytest.MonkeyPatch) -> ImageDocuments:
    processor = load_processor(model.absolute())
    tokens = ImageTokens(processor.placeholder, 2) if processor.has_grids else ImageTokens(258, fixed_rows=16)
    monkeypatch.setattr("longspan.corpus.image_documents.image_tokens", lambda _: tokens)

    class Model:
        vision_config = object()

    show_images(corpus, Model(), model)  # type: ignore[arg-type]
    documents = corpus.select(range(len(corpus)))
    assert isinstance(documents, ImageDocuments)
    return documents


def ids_of(document: Any) -> list[int]:
    return document[np.arange(len(document))].tolist()


@pytest.mark.parametrize("make", [qwen_folder, llava_folder])
def test_equal_to_the_stock_processor(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, names = make(tmp_path / "model"), write_images(tmp_path, SIZES)
    cases = list(MESSAGES.values())
    rows = [{"messages": messages} | ({"images": names[:count]} if count else {}) for count, messages in cases]
    documents = documents_of(corpus_of(tmp_path, rows, model), model, monkeypatch)
    stock, item = load_processor(model.absolute()).stock, 0
    for document, (count, messages) in zip(documents, cases, strict=True):
        parts = [{**m, "content": _as_parts(m["content"]) if count else m["content"]} for m in messages]
        rendered = stock.tokenizer.apply_chat_template(parts, tokenize=False)
        images = [Image.open(tmp_path / name) for name in names[:count]] or None
        made = stock(text=[rendered], images=images, return_tensors="pt")
        assert ids_of(document) == made["input_ids"][0].tolist()
        if count:
            read = [documents.read(item + i) for i in range(count)]
            assert torch.equal(made["pixel_values"], torch.cat([image.pixels for image in read]))
            if "image_grid_thw" in made:
                assert [image.grid for image in read] == [tuple(grid) for grid in made["image_grid_thw"].tolist()]
        item += count
    assert item == len(documents.items)


def _as_parts(content: Any) -> list[dict[str, Any]]:
    """The content as parts, cut at <image> by hand."""
    parts = [text(content)] if isinstance(content, str) else content
    made = []
    for part in parts:
        for i, piece in enumerate(part.get("text", "").split("<image>")):
            made += [PART] * bool(i) + [text(piece)] * bool(piece)
        made += [part] * (part == PART)
    return made


def test_placeholders_are_no_targets_and_answers_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, names = qwen_folder(tmp_path / "model"), write_images(tmp_path, SIZES)
    rows = [{"messages": messages, "images": names[:count]} for count, messages in MESSAGES.values()]
    documents = documents_of(corpus_of(tmp_path, rows, model), model, monkeypatch)
    engine = load_tokenizer(model).engine
    for document, expected in zip(documents, ["a 3<|im_end|>"] * 4 + [_DRAWN], strict=True):
        labels = document.labels(np.arange(1, len(document)))
        assert engine.decode(labels[labels >= 0].tolist(), skip_special_tokens=False) == expected
        assert document.targets == (labels >= 0).sum()
    assert documents.targets == sum(document.targets for document in documents)


_DRAWN = "<|vision_start|><|vision_end|>a 3<|im_end|>"


def test_texts_name_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, names = qwen_folder(tmp_path / "model"), write_images(tmp_path, SIZES)
    rows = [{"text": "a <image> b<image>", "images": names[:2]}, {"text": "a <image> of text"}]
    documents = documents_of(corpus_of(tmp_path, rows, model), model, monkeypatch)
    engine = load_tokenizer(model).engine
    wrapped = ["<|vision_start|>" + "<|image_pad|>" * rows + "<|vision_end|>" for rows in (8, 4)]
    written = [engine.decode(ids_of(document), skip_special_tokens=False) for document in documents]
    assert written == [f"a {wrapped[0]} b{wrapped[1]}<|im_end|>", "a <image> of text<|im_end|>"]
    assert documents.item_table.targets == tuple(document.targets for document in documents)


def test_bytes_in_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    model, names = qwen_folder(tmp_path / "model"), write_images(tmp_path / "there", SIZES)
    data = [{"bytes": (tmp_path / "there" / name).read_bytes(), "path": name} for name in names]
    rows = [{"text": "<image>", "images": data[i : i + 1]} for i in range(4)] + [{"text": "plain", "images": []}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    corpus = corpus_of(tmp_path, [], model, path=str(tmp_path / "rows.parquet"))
    documents = documents_of(corpus, model, monkeypatch)
    processor = load_processor(model.absolute())
    for number, name in enumerate(names):
        image = processor.image(ImageFile(str(tmp_path / "there" / name)).load())
        assert torch.equal(documents.read(number).pixels, image.pixels) and documents.read(number).grid == image.grid


def test_pixels_are_read_ahead_once_and_only_where_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, names = qwen_folder(tmp_path / "model"), write_images(tmp_path, SIZES)
    rows = [{"text": "<image>", "images": [name]} for name in names]
    documents = documents_of(corpus_of(tmp_path, rows, model), model, monkeypatch)
    assert documents.images is not None and documents.images.reader.images_read == 0
    documents.read_ahead([1, 3])
    documents.read(1), documents.read(3)
    assert documents.images.reader.images_read == 2


@pytest.mark.parametrize("orientation", range(10))
def test_images_stand_upright(orientation: int, tmp_path: Path) -> None:
    image = Image.new("RGB", (24, 8))
    exif = image.getexif()
    exif[0x0112] = orientation
    image.save(tmp_path / "turned.jpg", exif=exif)
    file = ImageFile(str(tmp_path / "turned.jpg"))
    assert file.size() == file.load().size[::-1] == ((24, 8) if 5 <= orientation <= 8 else (8, 24))


BAD = {
    "missing": (["none.png"], asks("<image>"), "line 1: images[0]: {folder}/none.png does not exist"),
    "broken": (["broken.png"], asks("<image>"), "line 1: images[0]: {folder}/broken.png is no image that Pillow"),
    "too few": (["0.png"], asks("<image><image>"), "line 1: its messages name 2 images, and the row has 1"),
    "too many": (["0.png", "1.png"], asks("<image>"), "line 1: its messages name 1 image, and the row has 2"),
    "a web address": (["http://a/b.png"], asks("<image>"), "images[0] is 'http://a/b.png'; nothing is downloaded"),
    "no path": ([3], asks("<image>"), "images[0] is a number; give a path"),
    "too thin": (["thin.png"], asks("<image>"), "refuses an image of 4 x 900 pixels: absolute aspect ratio"),
    "in both places": (["0.png"], asks({"type": "image", "path": "0.png"}, PART), 'the row has "images" too'),
    "its own placeholder": (["0.png"], asks("<image> <|image_pad|>"), "holds '<|image_pad|>', which the tokenizer"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_rows_are_named(case: str, tmp_path: Path) -> None:
    model = qwen_folder(tmp_path / "model")
    write_images(tmp_path, SIZES)
    (tmp_path / "broken.png").write_bytes(b"\x89PNG broken")
    Image.new("RGB", (4, 900)).save(tmp_path / "thin.png")
    images, messages, message = BAD[case]
    with pytest.raises(DataError) as error:
        corpus_of(tmp_path, [{"images": images, "messages": messages}], model)
    assert "rows.jsonl, line 1: " in str(error.value) and message.format(folder=tmp_path) in str(error.value)


def test_broken_pixels_are_named_when_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, names = qwen_folder(tmp_path / "model"), write_images(tmp_path, [(40, 40)])
    data = (tmp_path / names[0]).read_bytes()
    (tmp_path / names[0]).write_bytes(with_broken_pixels(data))
    corpus = corpus_of(tmp_path, [{"text": "<image>", "images": names}], model)
    documents = documents_of(corpus, model, monkeypatch)
    with pytest.raises(
        DataError, match=r"image 1 of rows\.jsonl, the line at byte 0 \(.*0\.png\): .*restore the file, or"
    ):
        documents.read(0)


def test_changed_images_and_processors_make_the_corpus_again(tmp_path: Path) -> None:
    model, names = qwen_folder(tmp_path / "model"), write_images(tmp_path, [(16, 16)])
    row = {"text": "<image>", "images": names}
    first = corpus_of(tmp_path, [row], model)
    write_images(tmp_path, [(16, 32)], seed=1)
    second = corpus_of(tmp_path, [row], model)
    larger = qwen_folder(tmp_path / "larger", size={"shortest_edge": 1024, "longest_edge": 4096})
    third = corpus_of(tmp_path, [row], larger)
    lengths = [int(corpus.lengths[0]) for corpus in (first, second, third)]
    assert lengths == [4 + 3, 8 + 3, 18 + 3]
    assert second.manifest.key != third.manifest.key == corpus_of(tmp_path, [row], larger).manifest.key


def test_a_resumed_run_names_changed_images(tmp_path: Path) -> None:
    model, names = qwen_folder(tmp_path / "model"), write_images(tmp_path, [(16, 16)])
    corpus_of(tmp_path, [{"text": "<image>", "images": names}], model)
    (tmp_path / names[0]).unlink()
    config = replace(
        DataConfig(), path=str(tmp_path / "rows.jsonl"), cache=str(tmp_path / "cache"), max_document_tokens=0
    )
    tokenizer = load_tokenizer(model)
    with pytest.raises(DataError, match=r"changed since the run began: image .*0\.png cannot be read"):
        ensure_corpus(CorpusSettings(config), tmp_path / "run", tokenizer=tokenizer, resumed=True, log=print)


def test_images_for_a_model_without_are_refused(tmp_path: Path) -> None:
    model, names = qwen_folder(tmp_path / "model"), write_images(tmp_path, SIZES)
    corpus = corpus_of(tmp_path, [{"text": "<image>", "images": names[:1]}], model)
    with pytest.raises(DataError, match="1 image stand in the documents, and str is of a model that takes none"):
        show_images(corpus, "", model)  # type: ignore[arg-type]
    (model / "preprocessor_config.json").unlink()
    (model / "processor_config.json").unlink()
    with pytest.raises(
        DataError, match=r"line 1: it has images, and the folder of the tokenizer .* no image processor"
    ):
        corpus_of(tmp_path, [{"text": "<image> ", "images": names[:1]}], model)


def test_other_rows_of_the_model_name_document_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, names = qwen_folder(tmp_path / "model"), write_images(tmp_path, SIZES)
    corpus = corpus_of(tmp_path, [{"text": "plain"}, {"text": "<image>", "images": names[:1]}], model)
    for tokens, message in [
        (ImageTokens(260, 1), "document 1 .* has 8 placeholders .* makes 32 rows"),
        (ImageTokens(7, 2), "token id 260 .* takes id 7"),
    ]:
        monkeypatch.setattr("longspan.corpus.image_documents.image_tokens", lambda _, made=tokens: made)
        model_config = type("Model", (), {"vision_config": object()})()
        with pytest.raises(DataError, match=message):
            show_images(corpus, model_config, model)


def test_long_documents_are_cut_before_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, names = qwen_folder(tmp_path / "model"), write_images(tmp_path, SIZES)
    rows = [{"text": "abcd<image>efghijklmnop<image>", "images": names[:2]}]
    corpus = corpus_of(tmp_path, rows, model, max_document_tokens=12)
    documents = documents_of(corpus, model, monkeypatch)
    assert [item.rows for item in documents.items] == [8, 4]
    for item in documents.items:
        ((start, stop),) = item.spans
        ids = np.array(ids_of(documents[item.document]))
        assert set(np.flatnonzero(ids == 260)) == set(range(start, stop)) and len(ids) <= 12
    with pytest.raises(DataError, match=r"line 1: an image takes 8 tokens: max_document_tokens is 7"):
        corpus_of(tmp_path, rows, model, max_document_tokens=7)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 7)), max_size=6), st.integers(7, 15), st.integers(0, 9))
def test_parts_hold_each_span_whole(gaps: list[tuple[int, int]], longest: int, tail: int) -> None:
    spans, at = [], 0
    for gap, size in gaps:
        spans.append((at + gap, at + gap + size))
        at += gap + size
    counts = Counter[str]()
    parts = cut_row(at + tail, None, longest, counts, spans)
    assert all(2 <= part.stop - part.start <= longest for part in parts)
    assert sum(part.stop - part.start for part in parts) + counts["lost_tokens"] == at + tail
    for start, stop in spans:
        if stop - start > 1:
            assert sum(part.start <= start and stop <= part.stop for part in parts) == 1
