"""Rows as other trainers write them: the tokens and pixels of rows in our own words, or an error that names them."""

import base64
import io
import struct
import warnings
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longspan.config.sections import DataConfig
from longspan.corpus.build import ensure_corpus
from longspan.corpus.corpus_settings import CorpusSettings
from longspan.corpus.image_documents import ImageDocuments
from longspan.corpus.images.image_file import ImageFile, import_pillow
from longspan.corpus.tokenizer import load_tokenizer
from longspan.errors import DataError
from tests.corpus.images.folders import qwen_folder, write_images, write_rows
from tests.corpus.images.test_images import PART, asks, corpus_of, documents_of, ids_of, text

Image = pytest.importorskip("PIL.Image")
SIZES = [(16, 16), (8, 24)]
Row = dict[str, Any]


def shown(folder: Path, row: Row, patch: pytest.MonkeyPatch, **data: Any) -> tuple[list[int], list[Any]]:
    """The tokens of a row's document, and the pixels of its images."""
    model = folder / "model"
    documents = documents_of(corpus_of(folder, [row], model, **data), model, patch)
    assert isinstance(documents, ImageDocuments) and len(documents) == 1
    return ids_of(documents[0]), [documents.read(i).pixels.tolist() for i in range(len(documents.items))]


def encoded(folder: Path) -> str:
    return base64.b64encode((folder / "0.png").read_bytes()).decode()


def part(**values: Any) -> Row:
    return {"type": "image", **values}


OURS: Row = {"images": ["0.png"], "messages": asks(PART, text(" who?"))}
THEIRS: dict[str, Callable[[Path], Row]] = {
    "a column of one image": lambda _: {"image": "0.png", "messages": asks("<image> who?")},
    "and null in the other": lambda _: {"image": "0.png", "images": None, "messages": asks("<image> who?")},
    "prompts with one image": lambda _: {
        "image": "0.png",
        "prompt": asks("<image> who?")[:1],
        "completion": asks()[1:],
    },
    "LLaVA": lambda _: {
        "id": "000",
        "image": "0.png",
        "conversations": [{"from": "human", "value": "<image> who?"}, {"from": "gpt", "value": "a 3"}],
    },
    "a file: URL": lambda at: {"images": [f"file://{at}/0.png"], "messages": asks("<image> who?")},
    "a file: URL with escapes": lambda at: {"image": f"file://localhost{at}/%30.png", "messages": asks("<image> who?")},
    "a data: URL": lambda at: {"image": f"data:image/png;base64,{encoded(at)}", "messages": asks("<image> who?")},
    "bytes as text": lambda at: {"images": [{"bytes": encoded(at), "path": "x"}], "messages": asks("<image> who?")},
    "bytes that are empty": lambda _: {"images": [{"bytes": "", "path": "0.png"}], "messages": asks("<image> who?")},
    "OpenAI's parts": lambda at: {
        "messages": asks(
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded(at)}", "detail": "auto"}},
            text(" who?"),
        )
    },
    "a part's base64": lambda at: {"messages": asks(part(base64=encoded(at)), text(" who?"))},
    "a part's file: URL": lambda at: {"messages": asks(part(image=f"file://{at}/0.png"), text(" who?"))},
    "keys without a value": lambda _: {
        "messages": asks(part(image="0.png", text=None), {**text(" who?"), "image": None, "max_pixels": None})
    },
    "numbered parts": lambda _: {
        "images": ["0.png"],
        "messages": asks(part(index=0, text=None), {"index": None, **text(" who?")}),
    },
}


ASKS_FOR_KEYS = (
    "{% if c.type == 'image' %}",
    "{% if 'image' in c or c.type == 'image' %}",
)  # as Qwen2-VL's template does


def filled(folder: Path) -> Path:
    """A folder with a model's and two images."""
    template = qwen_folder(folder / "model") / "chat_template.jinja"
    template.write_text(template.read_text().replace(*ASKS_FOR_KEYS))
    write_images(folder, SIZES)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return filled(tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which rows are written one after another."""
    return filled(tmp_path_factory.mktemp("shared"))


@pytest.mark.parametrize("name", THEIRS)
def test_rows_of_other_trainers(name: str, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(shared, THEIRS[name](shared), monkeypatch) == shown(shared, OURS, monkeypatch)


@pytest.mark.parametrize(("image_key", "columns"), [("image", ()), ("picture", ("image=picture",))])
def test_a_column_of_one_image_in_a_table(
    image_key: str, columns: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    image = {"bytes": (folder / "0.png").read_bytes(), "path": "x.png"}
    parquet.write_table(
        pyarrow.Table.from_pylist([{image_key: image, "messages": asks("<image> who?")}]), folder / "rows.parquet"
    )
    ours, path = shown(folder, OURS, monkeypatch), str(folder / "rows.parquet")
    assert shown(folder, {}, monkeypatch, path=path, columns=columns) == ours


def test_a_hole_in_a_table_is_no_text(folder: Path) -> None:
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    rows = [{"images": images, "text": "<image> who?"} for images in ([{"path": "0.png"}], None)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    with pytest.raises(DataError, match=r"rows\.parquet, row 2: its texts name 1 image, and the row has 0"):
        corpus_of(folder, [], folder / "model", path=str(folder / "rows.parquet"))


def test_where_parts_name_images_texts_are_texts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"images": ["0.png"], "messages": asks(PART, text("![x](<image>)"))}
    ids, pixels = shown(folder, row, monkeypatch)
    written = load_tokenizer(folder / "model").engine.decode(ids, skip_special_tokens=False)
    assert "<|vision_end|>![x](<image>)<|im_end|>" in written and len(pixels) == 1


NAMES_ONE = asks("<image>\nwho?")
REFUSED: dict[str, tuple[Row, str]] = {
    "no images": ({"images": [], "messages": NAMES_ONE}, "its messages name 1 image, and the row has 0"),
    "null": ({"images": None, "messages": NAMES_ONE}, 'a row without the key "images" has <image> as text'),
    "null in a column of one": ({"image": None, "messages": NAMES_ONE}, "its messages name 1 image, and the row has 0"),
    "of a text": ({"images": [], "text": "<image>"}, "its texts name 1 image, and the row has 0"),
    "of a completion": ({"images": [], "prompt": "<image>", "completion": "a"}, "its texts name 1 image, and the row"),
    "videos": ({"videos": [], "messages": asks("<video>")}, "its messages name 1 video, and the row has 0"),
    "audio": ({"audios": ["a.wav"], "messages": asks("<audio>")}, 'it has "audios", and audio is not read here'),
    "no audio": ({"audios": [], "text": "<audio>"}, "its texts name audio 1 times, which is not read here"),
    "unnamed": ({"image": "0.png", "messages": asks("who?")}, "its messages name 0 images, and the row has 1"),
    "both columns": ({"image": "0.png", "images": ["0.png"], "messages": NAMES_ONE}, '"image" and "images"; give them'),
    "a list in a column of one": ({"image": ["0.png"], "messages": NAMES_ONE}, '"image" is a list; give one image'),
    "max_pixels": (
        {"messages": asks(part(image="0.png", max_pixels=256), text("?"))},
        'content[0] has "max_pixels", and type, ',
    ),
    "two sizes": (
        {"messages": asks(part(image="0.png", resized_height=8, resized_width=8), text("?"))},
        'has "resized_height" and "resized_width", and',
    ),
    "a size of an entry": ({"images": [{"path": "0.png", "max_pixels": 2}], "messages": NAMES_ONE}, 'has "max_pixels"'),
    "a size of a video": (
        {"messages": asks({"type": "video", "video": ["0.png"], "nframes": 2}, text("?"))},
        'messages[0].content[0] has "nframes", and type, ',
    ),
    "a rate in two places": (
        {"messages": asks({"type": "video", "video": {"frames": ["0.png"]}, "fps": 2}, text("?"))},
        "has fps beside an object of frames",
    ),
    "a detail": (
        {"messages": asks({"type": "image_url", "image_url": {"url": "0.png", "detail": "low"}}, text("?"))},
        'content[0].image_url has "detail", and url alone',
    ),
    "two images in a part": (
        {"messages": asks(part(image="0.png", path="1.png"), text("?"))},
        "brings image and path; give one",
    ),
    "another order": (
        {"images": ["0.png", "1.png"], "messages": asks(part(index=1), part(index=0))},
        "has index 1, and is image 0 of the row",
    ),
    "no type": (
        {"messages": asks({"image": "0.png"}, text("?"))},
        'is without a type, and has "image"; give it as a part {"type": ',
    ),
    "base64": (
        {"images": ["iVBORw0KGgo" + "A" * 9000], "messages": NAMES_ONE},
        "looks like an image as base64, of 9,011",
    ),
    "no path": (
        {"images": ["a/" * 9000], "messages": NAMES_ONE},
        "images[0] has 18,000 characters, and a path at most",
    ),
    "wrong base64": ({"images": [{"bytes": "%%"}], "messages": NAMES_ONE}, "images[0].bytes is no base64 ("),
    "an empty data: URL": ({"image": "data:,", "messages": NAMES_ONE}, "which brings no bytes"),
    "a web address": ({"images": ["http://a/b.png"], "messages": NAMES_ONE}, "nothing is downloaded"),
    "a pair": (
        {"messages": asks("who?"), "rejected_response": "a dog"},
        '"rejected_response" stands beside messages (chat)',
    ),
    "boxes": (
        {"image": "0.png", "objects": {"bbox": [[1, 2, 3, 4]]}, "messages": asks("<image>find <bbox>")},
        'holds <bbox>, for which "objects" has words or boxes',
    ),
    "a file of a host": ({"image": "file://a/b.png", "messages": NAMES_ONE}, "a file of the host 'a'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, shared: Path) -> None:
    row, message = REFUSED[name]
    with pytest.raises(DataError) as error:
        corpus_of(shared, [row], shared / "model")
    assert "rows.jsonl, line 1: " in str(error.value) and message in str(error.value)
    assert len(str(error.value)) < 500


def lines_of(folder: Path, rows: list[Row], **data: Any) -> list[str]:
    """What the console says of a corpus of these rows."""
    config = replace(DataConfig(), path=str(write_rows(folder / "rows.jsonl", rows)), cache=str(folder / "cache"))
    settings = CorpusSettings(replace(config, max_document_tokens=0, **data))
    lines, tokenizer = list[str](), load_tokenizer(folder / "model")
    ensure_corpus(settings, folder / "run", tokenizer=tokenizer, resumed=False, log=lines.append)
    return lines


def test_names_that_are_read_as_text_are_counted(folder: Path) -> None:
    rows = [{"messages": asks("<image> who?")}, {"messages": asks("<image><audio>")}, OURS]
    for _ in range(2):  # whenever a run starts
        assert [line.split(", and")[0] for line in lines_of(folder, rows) if "as these" in line] == [
            "<audio> stands in 1 text",
            "<image> stands in 2 texts",
        ]


def broken(data: bytes, kind: str) -> bytes:
    """An image of this kind without its end."""
    file = io.BytesIO()
    Image.open(io.BytesIO(data)).convert("RGB").save(file, kind)
    return file.getvalue()[: len(file.getvalue()) * 2 // 3]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_broken_images_are_left_out_before_the_first_step(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (whole,) = write_images(folder / "large", [(40, 40)])
    data = (folder / "large" / whole).read_bytes()
    (folder / "cut.png").write_bytes(broken(data, kind))
    frames = {"videos": [["0.png", "none.png"]], "text": "<video>"}
    rows = [{"image": "cut.png", "text": "<image>"}, {"image": f"large/{whole}", "text": "<image>"}, frames]
    assert any("left out 2 bad rows" in line for line in lines_of(folder, rows, on_bad="skip"))
    documents = documents_of(corpus_of(folder, rows, folder / "model", on_bad="skip"), folder / "model", monkeypatch)
    assert len(documents) == 1 and len(documents.items) == 1 and documents.read(0).grid == (1, 10, 10)


def png_of_size(width: int, height: int) -> bytes:
    """A .png without pixels, which its header says it has."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = [
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in (header, b"IEND")
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def test_huge_images() -> None:
    """Up to Pillow's bound without a word of it; beyond with figures."""
    import_pillow.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ImageFile("", png_of_size(10_000, 15_000)).size() == (15_000, 10_000)
        with pytest.raises(DataError, match="has 200,000,000 pixels, and at most 178,956,970 are read"):
            ImageFile("", png_of_size(20_000, 10_000)).size()
    import_pillow.cache_clear()
    assert np.prod((20_000, 10_000)) > 2 * Image.MAX_IMAGE_PIXELS


def test_models_without_images_refuse_conversations_with_one(folder: Path) -> None:
    """A column of that name beside plain text is left alone."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        (folder / "model" / name).unlink()
    assert len(corpus_of(folder, [{"image": "http://a/b.png", "text": "a news"}], folder / "model")) == 1
    with pytest.raises(
        DataError, match=r"line 1: it has images, and the folder of the tokenizer .* no image processor"
    ):
        corpus_of(folder, [{"image": "0.png", "messages": asks("who?")}], folder / "model")
