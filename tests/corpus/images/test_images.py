"""Rows with images become the tokens, masks, places and pixels that the stock processor makes, also rows as other
trainers write them, or an error that names what is wrong.
"""

import base64
import io
import json
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from longspan.config.sections import DataConfig
from longspan.corpus.document_encoder import cut_into_documents
from longspan.corpus.image_documents import ImageDocuments, attach_images
from longspan.corpus.images.image_file import ImageFile, import_pillow
from longspan.corpus.images.processor import load_processor
from longspan.corpus.recipe import CorpusSettings
from longspan.corpus.run_corpus import open_or_build_corpus
from longspan.corpus.tokenizer import load_tokenizer
from longspan.data.corpus_documents import Corpus
from longspan.errors import DataError
from longspan.model.vision.image_tokens import ImageTokens
from tests.corpus.images.folders import llava_folder, qwen_folder, with_broken_pixels, write_images, write_rows
from tests.security.test_hostile_images import png

Image = pytest.importorskip("PIL.Image")
SIZES = [(20, 33), (16, 16), (8, 24), (64, 40)]
PART = {"type": "image"}
Row = dict[str, Any]


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def asks(*content: Any) -> list[Row]:
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


def build(folder: Path, model: Path, *, resumed: bool = False, log: Any = lambda _: None, **data: Any) -> Corpus:
    keys: dict[str, Any] = {"path": str(folder / "rows.jsonl"), "max_document_tokens": 0}
    corpus_settings, tokenizer = CorpusSettings(replace(DataConfig(), **keys | data)), load_tokenizer(model)
    return open_or_build_corpus(corpus_settings, folder / "run", tokenizer=tokenizer, resumed=resumed, log=log)


def corpus_of(folder: Path, rows: list[Row], model: Path, **data: Any) -> Corpus:
    write_rows(folder / "rows.jsonl", rows)
    return build(folder, model, **data)


def documents_of(corpus: Corpus, model: Path, monkeypatch: pytest.MonkeyPatch) -> ImageDocuments:
    processor = load_processor(model.absolute())
    tokens = ImageTokens(processor.placeholder, 2) if processor.has_grids else ImageTokens(258, fixed_rows=16)
    monkeypatch.setattr("longspan.corpus.image_documents.image_tokens", lambda _: tokens)

    class Model:
        vision_config = object()

    attach_images(corpus, Model(), model)  # type: ignore[arg-type]
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
        image = processor.process_image(ImageFile(str(tmp_path / "there" / name)).load())
        assert torch.equal(documents.read(number).pixels, image.pixels) and documents.read(number).grid == image.grid


def test_pixels_are_read_ahead_once_and_only_where_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, names = qwen_folder(tmp_path / "model"), write_images(tmp_path, SIZES)
    rows = [{"text": "<image>", "images": [name]} for name in names]
    documents = documents_of(corpus_of(tmp_path, rows, model), model, monkeypatch)
    assert documents.images is not None and documents.images.reader.images_read == 0
    documents.read_ahead([1, 3])
    documents.read(1), documents.read(3)
    assert documents.images.reader.images_read == 2


def test_images_stand_upright(tmp_path: Path) -> None:
    image, file = Image.new("RGB", (24, 8)), tmp_path / "turned.jpg"
    for orientation in range(10):
        exif = image.getexif()
        exif[0x0112] = orientation
        image.save(file, exif=exif)
        turned = ImageFile(str(file))
        assert turned.size() == turned.load().size[::-1] == ((24, 8) if 5 <= orientation <= 8 else (8, 24))


# ---- rows as other trainers write them


def shown(folder: Path, row: Row, patch: pytest.MonkeyPatch, **data: Any) -> tuple[list[int], list[Any]]:
    model = folder / "model"
    documents = documents_of(corpus_of(folder, [row], model, **data), model, patch)
    assert isinstance(documents, ImageDocuments) and len(documents) == 1
    return ids_of(documents[0]), [documents.read(i).pixels.tolist() for i in range(len(documents.items))]


def encoded(folder: Path) -> str:
    return base64.b64encode((folder / "0.png").read_bytes()).decode()


def part(**values: Any) -> Row:
    return {"type": "image", **values}


WHO = asks("<image> who?")
ASKED = {"from": "human", "value": "<image> who?"}, {"from": "gpt", "value": "a 3"}
OURS: Row = {"images": ["0.png"], "messages": asks(PART, text(" who?"))}


def of_url(url: str) -> Row:
    return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}


THEIRS: dict[str, Callable[[Path], Row]] = {
    "a column of one image": lambda _: {"image": "0.png", "messages": WHO},
    "and null in the other": lambda _: {"image": "0.png", "images": None, "messages": WHO},
    "prompts with one image": lambda _: {"image": "0.png", "prompt": WHO[:1], "completion": asks()[1:]},
    "LLaVA": lambda _: {"id": "000", "image": "0.png", "conversations": [*ASKED]},
    "a file: URL": lambda at: {"images": [f"file://{at}/0.png"], "messages": WHO},
    "a file: URL with escapes": lambda at: {"image": f"file://localhost{at}/%30.png", "messages": WHO},
    "a data: URL": lambda at: {"image": f"data:image/png;base64,{encoded(at)}", "messages": WHO},
    "bytes as text": lambda at: {"images": [{"bytes": encoded(at), "path": "x"}], "messages": WHO},
    "bytes that are empty": lambda _: {"images": [{"bytes": "", "path": "0.png"}], "messages": WHO},
    "OpenAI's parts": lambda at: {"messages": asks(of_url(f"data:image/png;base64,{encoded(at)}"), text(" who?"))},
    "a part's base64": lambda at: {"messages": asks(part(base64=encoded(at)), text(" who?"))},
    "a part's file: URL": lambda at: {"messages": asks(part(image=f"file://{at}/0.png"), text(" who?"))},
    "keys without a value": lambda _: {
        "messages": asks(part(image="0.png", text=None), {**text(" who?"), "image": None})
    },
    "numbered parts": lambda _: {
        "images": ["0.png"],
        "messages": asks(part(index=0, text=None), {"index": None, "max_pixels": None, **text(" who?")}),
    },
}
# as Qwen2-VL's template does
ASKS_FOR_KEYS = ("{% if c.type == 'image' %}", "{% if 'image' in c or c.type == 'image' %}")


def filled(folder: Path) -> Path:
    template = qwen_folder(folder / "model") / "chat_template.jinja"
    template.write_text(template.read_text().replace(*ASKS_FOR_KEYS))
    write_images(folder, SIZES)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return filled(tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return filled(tmp_path_factory.mktemp("shared"))


def test_rows_of_other_trainers(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = shown(shared, OURS, monkeypatch)
    for name, row in THEIRS.items():
        assert shown(shared, row(shared), monkeypatch) == ours, name


def test_columns_of_images_in_a_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column of one image, also renamed; a hole in a column of lists is no text."""
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    image, path = {"bytes": (folder / "0.png").read_bytes(), "path": "x.png"}, folder / "rows.parquet"
    ours = shown(folder, OURS, monkeypatch)
    for key, columns in (("image", ()), ("picture", ("image=picture",))):
        parquet.write_table(pyarrow.Table.from_pylist([{key: image, "messages": WHO}]), path)
        assert shown(folder, {}, monkeypatch, path=str(path), rename_columns=columns) == ours
    rows = [{"images": images, "text": "<image> who?"} for images in ([{"path": "0.png"}], None)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    with pytest.raises(DataError, match=r"rows\.parquet, row 2: its texts name 1 image, and the row has 0"):
        corpus_of(folder, [], folder / "model", path=str(path))


def test_images_in_the_rows_of_pairs_are_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where both answers begin with the prompt, a copy stands beside them, and the rows are a list of JSON."""
    url = f"data:image/png;base64,{encoded(folder)}"
    question = {"role": "user", "content": [{"type": "image", "image": url}, text("Who?")]}
    answers = [{"role": "assistant", "content": [text(words)]} for words in ("Ann.", "Bob.")]
    chosen, rejected = ([question, answer] for answer in answers)
    rows = [
        {"chosen": chosen, "rejected": rejected},
        {"chosen": chosen, "rejected": rejected, "messages": chosen},
        {"messages": [question], "chosen": answers[0], "rejected": answers[1]},
    ]
    (folder / "rows.json").write_text(json.dumps(rows, indent=1))
    settings = CorpusSettings(DataConfig(path=str(folder / "rows.json"), max_document_tokens=0), preference="pairs")
    tokenizer = load_tokenizer(folder / "model")
    corpus = open_or_build_corpus(settings, folder / "run", tokenizer=tokenizer, resumed=False, log=lambda _: None)
    documents = documents_of(corpus, folder / "model", monkeypatch)
    pixels = load_processor((folder / "model").absolute()).process_image(ImageFile(str(folder / "0.png")).load()).pixels
    assert len(corpus) == 6 and all(torch.equal(documents.read(number).pixels, pixels) for number in range(6))


def test_where_parts_name_images_texts_are_texts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"images": ["0.png"], "messages": asks(PART, text("![x](<image>)"))}
    ids, pixels = shown(folder, row, monkeypatch)
    written = load_tokenizer(folder / "model").engine.decode(ids, skip_special_tokens=False)
    assert "<|vision_end|>![x](<image>)<|im_end|>" in written and len(pixels) == 1


NAMES_ONE = asks("<image>\nwho?")


def shown_as(*images: Any, **more: Any) -> Row:
    return ({"images": [*images]} if images else {}) | more | {"messages": NAMES_ONE}


def asked(*parts: Row) -> Row:
    return {"messages": asks(*parts, text("?"))}


VIDEO = {"type": "video", "video": ["0.png"]}
REFUSED: dict[str, tuple[Row, str]] = {
    "no images": (shown_as(images=[]), "its messages name 1 image, and the row has 0"),
    "null": (shown_as(images=None), 'a row without the key "images" has <image> as text'),
    "null in a column of one": (shown_as(image=None), "its messages name 1 image, and the row has 0"),
    "of a text": ({"images": [], "text": "<image>"}, "its texts name 1 image, and the row has 0"),
    "videos": ({"videos": [], "messages": asks("<video>")}, "its messages name 1 video, and the row has 0"),
    "audio": ({"audios": ["a.wav"], "messages": asks("<audio>")}, 'it has "audios", and audio is not read here'),
    "no audio": ({"audios": [], "text": "<audio>"}, "its texts name audio 1 times, which is not read here"),
    "unnamed": ({"image": "0.png", "messages": asks("who?")}, "its messages name 0 images, and the row has 1"),
    "both columns": (shown_as("0.png", image="0.png"), '"image" and "images"; give them'),
    "a list in a column of one": (shown_as(image=["0.png"]), '"image" is a list; give one image'),
    "max_pixels": (asked(part(image="0.png", max_pixels=256)), 'content[0] has "max_pixels", and type, '),
    "two sizes": (
        asked(part(image="0.png", resized_height=8, resized_width=8)),
        'has "resized_height" and "resized_width", and',
    ),
    "a size of an entry": (shown_as({"path": "0.png", "max_pixels": 2}), 'has "max_pixels"'),
    "a size of a video": (asked({**VIDEO, "nframes": 2}), 'messages[0].content[0] has "nframes", and type, '),
    "a rate in two places": (
        asked({**VIDEO, "video": {"frames": ["0.png"]}, "fps": 2}),
        "has fps beside an object of frames",
    ),
    "a detail": (
        asked({**of_url("0.png"), "image_url": {"url": "0.png", "detail": "low"}}),
        'content[0].image_url has "detail", and url alone',
    ),
    "two images in a part": (asked(part(image="0.png", path="1.png")), "brings image and path; give one"),
    "another order": (
        shown_as("0.png", "1.png") | asked(part(index=1), part(index=0)),
        "has index 1, and is image 0 of the row",
    ),
    "no type": (asked({"image": "0.png"}), 'is without a type, and has "image"; give it as a part {"type": '),
    "base64": (shown_as("iVBORw0KGgo" + "A" * 9000), "no image that Pillow can read: File name too long"),
    "no path": (shown_as("a/" * 9000), "no image that Pillow can read: File name too long"),
    "wrong base64": (shown_as({"bytes": "%%"}), "images[0].bytes is no base64 ("),
    "an empty data: URL": (shown_as(image="data:,"), "which brings no bytes"),
    "a web address": (shown_as("http://a/b.png"), "images[0] is 'http://a/b.png'; nothing is downloaded"),
    "missing": (shown_as("none.png"), "images[0]: {folder}/none.png does not exist"),
    "broken": (shown_as("broken.png"), "images[0]: {folder}/broken.png is no image that Pillow"),
    "a number": (shown_as(3), "images[0] is a number; give a path"),
    "too thin": (shown_as("thin.png"), "refuses an image of 4 x 900 pixels: absolute aspect ratio"),
    "in both places": (asked(part(path="0.png"), PART) | {"images": ["0.png"]}, 'the row has "images" too'),
    "its own placeholder": (
        shown_as("0.png") | {"messages": asks("<image> <|image_pad|>")},
        "holds '<|image_pad|>', which the tokenizer",
    ),
    "boxes": (
        {"image": "0.png", "objects": {"bbox": [[1, 2, 3, 4]]}, "messages": asks("<image>find <bbox>")},
        'holds <bbox>, for which "objects" has words or boxes',
    ),
    "a file of a host": (shown_as(image="file://a/b.png"), "is 'file://a/b.png'; nothing is downloaded: give"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, shared: Path) -> None:
    (shared / "broken.png").write_bytes(b"\x89PNG broken")
    Image.new("RGB", (4, 900)).save(shared / "thin.png")
    row, message = REFUSED[name]
    with pytest.raises(DataError) as error:
        corpus_of(shared, [row], shared / "model")
    assert "rows.jsonl, line 1: " in str(error.value) and message.replace("{folder}", str(shared)) in str(error.value)
    assert len(str(error.value)) < 500


def lines_of(folder: Path, rows: list[Row], **data: Any) -> list[str]:
    lines = list[str]()
    corpus_of(folder, rows, folder / "model", log=lines.append, **data)
    return lines


def test_broken_images_are_left_out_before_the_first_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (whole,) = write_images(folder / "large", [(40, 40)])
    kinds = ("PNG", "JPEG", "GIF", "WEBP")
    for kind in kinds:
        file = io.BytesIO()
        Image.open(folder / "large" / whole).save(file, kind)
        (folder / f"{kind}.png").write_bytes(file.getvalue()[: len(file.getvalue()) * 2 // 3])
    frames = {"videos": [["0.png", "none.png"]], "text": "<video>"}
    rows = [{"image": name, "text": "<image>"} for name in (*(f"{kind}.png" for kind in kinds), f"large/{whole}")]
    rows += [frames]
    assert any("left out 5 bad rows" in line for line in lines_of(folder, rows, on_bad_row="skip"))
    model = folder / "model"
    documents = documents_of(corpus_of(folder, rows, model, on_bad_row="skip"), model, monkeypatch)
    assert len(documents) == 1 and len(documents.items) == 1 and documents.read(0).grid == (1, 10, 10)


def test_huge_images() -> None:
    import_pillow.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ImageFile("", png(10_000, 15_000)).size() == (15_000, 10_000)
        with pytest.raises(DataError, match="has 200,000,000 pixels, and at most 178,956,970 are read"):
            ImageFile("", png(20_000, 10_000)).size()
    import_pillow.cache_clear()
    assert np.prod((20_000, 10_000)) > 2 * Image.MAX_IMAGE_PIXELS


# ---- pixels and files that change


def test_broken_pixels_are_named_when_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, names = qwen_folder(tmp_path / "model"), write_images(tmp_path, [(40, 40)])
    data = (tmp_path / names[0]).read_bytes()
    (tmp_path / names[0]).write_bytes(with_broken_pixels(data))
    corpus = corpus_of(tmp_path, [{"text": "<image>", "images": names}], model)
    documents = documents_of(corpus, model, monkeypatch)
    message = r"image 1 of rows\.jsonl, the line at byte 0 \(.*0\.png\): .*restore the file, or"
    with pytest.raises(DataError, match=message):
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
    again = corpus_of(tmp_path, [row], larger)
    assert second.documents_folder != third.documents_folder == again.documents_folder
    (tmp_path / names[0]).unlink()
    with pytest.raises(DataError, match=r"changed since the run began: image .*0\.png cannot be read"):
        build(tmp_path, larger, resumed=True)


def test_images_for_a_model_without_are_refused(tmp_path: Path) -> None:
    """A column of that name beside plain text is left alone."""
    model, names = qwen_folder(tmp_path / "model"), write_images(tmp_path, SIZES)
    corpus = corpus_of(tmp_path, [{"text": "<image>", "images": names[:1]}], model)
    with pytest.raises(DataError, match="1 image stand in the documents, and str is of a model that takes none"):
        attach_images(corpus, "", model)  # type: ignore[arg-type]
    for name in ("preprocessor_config.json", "processor_config.json"):
        (model / name).unlink()
    assert len(corpus_of(tmp_path, [{"image": "http://a/b.png", "text": "a news"}], model)) == 1
    for row in ({"text": "<image> ", "images": names[:1]}, {"image": "0.png", "messages": asks("who?")}):
        message = r"line 1: it has images, and the folder of the tokenizer .* no image processor"
        with pytest.raises(DataError, match=message):
            corpus_of(tmp_path, [row], model)


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
            attach_images(corpus, model_config, model)


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


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 7)), max_size=6), st.integers(7, 15), st.integers(0, 9))
def test_parts_hold_each_span_whole(gaps: list[tuple[int, int]], longest: int, tail: int) -> None:
    spans, at = [], 0
    for gap, size in gaps:
        spans.append((at + gap, at + gap + size))
        at += gap + size
    counts = Counter[str]()
    parts = cut_into_documents(at + tail, None, longest, counts, spans)
    assert all(2 <= part.stop - part.start <= longest for part in parts)
    assert sum(part.stop - part.start for part in parts) + counts["lost_tokens"] == at + tail
    for start, stop in spans:
        if stop - start > 1:
            assert sum(part.start <= start and stop <= part.stop for part in parts) == 1
