"""Rows with videos as frames: tokens, times and places as stock processors make them; frames read by group."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longspan.corpus.image_documents import ImageDocuments, attach_images
from longspan.corpus.images.image_file import ImageFile
from longspan.corpus.images.processor import load_processor
from longspan.corpus.tokenizer import load_tokenizer
from longspan.errors import DataError
from longspan.model.vision.image_tokens import ImageTokens
from longspan.model.vision.videos import Video, VideoTokens
from tests.corpus.images.folders import llava_folder, qwen3_folder, qwen_folder, write_images
from tests.corpus.images.test_images import asks, corpus_of, ids_of
from tests.model.vision.models import config_of

Image = pytest.importorskip("PIL.Image")
FRAME = (16, 24)  # of height and width, which both processors keep
GROUP = 6  # rows of two such frames
START, END, PAD = "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"
TEXTS = {
    "qwen2.5-vl": START + PAD * GROUP * 2 + END,
    "qwen3-vl": START + "".join(f"<{t} seconds>{START}{PAD * GROUP}{END}" for t in ("0.2", "1.0")) + END,
}
FOLDERS = {"qwen2.5-vl": qwen_folder, "qwen3-vl": qwen3_folder}


def shown(folder: Path, rows: list[dict[str, Any]], name: str, patch: pytest.MonkeyPatch, **data: Any) -> Any:
    model = FOLDERS[name](folder / "model")
    config = config_of(name)
    config.image_token_id, config.video_token_id = 260, 261  # pyright: ignore[reportAttributeAccessIssue]
    tokens = VideoTokens(ImageTokens(260, 2, config=config), 261, name == "qwen3-vl")
    patch.setattr("longspan.corpus.image_documents.image_tokens", lambda _: tokens.images)
    patch.setattr("longspan.corpus.image_documents.video_tokens", lambda _: tokens)
    corpus = corpus_of(folder, rows, model, **data)
    documents = attach_images(corpus, config, model).select(range(len(corpus)))
    assert isinstance(documents, ImageDocuments)
    return documents, tokens, load_tokenizer(model).engine


def rows_of(folder: Path) -> list[dict[str, Any]]:
    names = write_images(folder, [FRAME] * 3 + [(8, 24)])
    clip, part = {"frames": names[:3], "fps": 2}, {"type": "video", "video": names[:2], "fps": 4}
    videos = [{"frames": names[:3], "timestamps": [0, 0.4, 1.0]}, names[1:3]]
    return [
        {"videos": [clip], "images": names[3:], "messages": asks("<video> and <image>?")},
        {"messages": asks(part, {"type": "text", "text": "now"})},
        {"videos": videos, "images": names[3:], "messages": asks("<video><image> or <video>")},
    ]


@pytest.mark.parametrize("name", FOLDERS)
def test_tokens_places_and_positions(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents, tokens, engine = shown(tmp_path, rows_of(tmp_path), name, monkeypatch)
    first, second, third = (engine.decode(ids_of(document), skip_special_tokens=False) for document in documents)
    image = START + "<|image_pad|>" * 3 + END
    single = START + PAD * GROUP + END
    assert f"user\n{TEXTS[name]} and {image}?" in first
    assert (f"{START}<0.1 seconds>{single}{END}now" if name == "qwen3-vl" else f"{single}now") in second
    assert f"user\n{TEXTS[name]}{image} or " in third
    assert [item.rows for item in documents.items] == [GROUP, GROUP, 3, GROUP, GROUP, GROUP, 3, GROUP]
    clips = [[Video((2, 4, 6), 1.0)], [Video((1, 4, 6), 0.5)], [Video((2, 4, 6), 1.0), Video((1, 4, 6), 1.0)]]
    for number, videos in enumerate(clips):
        ids, grids = np.array(ids_of(documents[number])), np.array([(1, 2, 6)] * (number != 1)).reshape(-1, 3)
        assert np.array_equal(documents.positions(number), tokens.positions(ids, grids, videos))
        labels = documents[number].labels(np.arange(1, len(ids)))
        assert not ({260, 261} & {*labels[labels >= 0].tolist()}) and documents[number].targets == (labels >= 0).sum()


def test_pixels_are_those_of_the_image_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents, _, _ = shown(tmp_path, rows_of(tmp_path), "qwen2.5-vl", monkeypatch)
    processor = load_processor((tmp_path / "model").absolute())
    pictures = [ImageFile(str(tmp_path / f"{i}.png")).load() for i in range(3)]
    alone = [processor.process_image(picture).pixels.view(24, 3, 2, 16) for picture in pictures]
    for item, (a, b) in enumerate([(0, 1), (2, 2)]):
        made = documents.read(item)
        assert made.grid == (1, 4, 6)
        assert torch.equal(made.pixels.view(24, 3, 2, 16), torch.stack([alone[a][:, :, 0], alone[b][:, :, 0]], 2))
    assert documents.read(2).grid == (1, 2, 6)


SIZES = [  # of a class: frames, height and width, bounds; the grid, by hand
    ("Qwen2VLVideoProcessor", 5, (40, 40), (64, 576), (3, 6, 6)),  # at most 576 pixels of a frame: 24 x 24
    ("Qwen3VLVideoProcessor", 4, (40, 40), (64, 2304), (2, 6, 6)),  # of all four frames
    ("Qwen3VLVideoProcessor", 4, (8, 16), (2048, 8192), (2, 4, 8)),  # at least 2048: 16 x 32
]


@pytest.mark.parametrize(("kind", "frames", "size", "bounds", "grid"), SIZES)
def test_all_frames_become_one_size(kind: str, frames: int, size: Any, bounds: Any, grid: Any, tmp_path: Path) -> None:
    folder = FOLDERS["qwen2.5-vl" if kind.startswith("Qwen2") else "qwen3-vl"](tmp_path / "model")
    videos = load_processor(folder.absolute()).videos
    assert videos.kind == kind and videos.frames_per_group == 2
    videos.settings["size"] = dict(zip(("shortest_edge", "longest_edge"), bounds, strict=True))
    assert videos.patch_grid(frames, size) == grid
    pictures = [Image.new("RGB", size[::-1], (255, 0, 0)), Image.new("RGB", size[::-1], (0, 0, 255))]
    pixels = videos.group_patches(pictures, (1, *grid[1:])).view(-1, 3, 2, 16)  # one colour: whatever the size
    mean, deviation = (np.array(videos.settings[key]) for key in ("image_mean", "image_std"))
    low, high = -mean / deviation, (1 - mean) / deviation
    expected = np.stack([[high[0], low[1], low[2]], [low[0], low[1], high[2]]], 1)
    np.testing.assert_allclose(pixels[3, :, :, 7].numpy(), expected, atol=1e-5)


BAD: list[tuple[Any, str, str]] = [
    (["a.mp4"], "<video>", 'line 1: videos[0] is "a.mp4"; files of videos are not read here: give'),
    ([[]], "<video>", "line 1: videos[0] has no frames"),
    ([["0.png", "no.png"]], "<video>", "line 1: videos[0]: frames[1]: {folder}/no.png does not exist"),
    ([["0.png", "3.png"]], "<video>", "videos[0]: frames[1] is of 24 x 8 pixels, and frames[0] of 24 x 16"),
    ([["0.png"]], "look", "line 1: its messages name 0 videos, and the row has 1"),
    ([{"frames": ["0.png"], "fps": 0}], "<video>", "videos[0] has fps 0; give the frames a second"),
    ([{"frames": ["0.png"], "timestamps": [1, 2]}], "<video>", "videos[0] has timestamps of 2 numbers for 1 frame"),
    ([{"frames": ["0.png"], "timestamps": [1], "fps": 2}], "<video>", "has fps and timestamps"),
    ([{"frames": ["0.png", "1.png"], "timestamps": [1, 0]}], "<video>", "timestamps that do not rise"),
]


def test_bad_videos_are_named(tmp_path: Path) -> None:
    model = qwen_folder(tmp_path / "model")
    rows_of(tmp_path)
    for videos, text, message in BAD:
        with pytest.raises(DataError) as error:
            corpus_of(tmp_path, [{"videos": videos, "messages": asks(text)}], model)
        assert message.format(folder=tmp_path) in str(error.value), error.value
    with pytest.raises(DataError, match="line 1: videos are processed here as Qwen2VLVideoProcessor and Qwen3VL"):
        corpus_of(tmp_path, rows_of(tmp_path)[1:2], llava_folder(tmp_path / "other"))


def test_a_frame_that_breaks_or_changes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents, _, _ = shown(tmp_path, rows_of(tmp_path)[:1], "qwen2.5-vl", monkeypatch)
    data = (tmp_path / "2.png").read_bytes()
    (tmp_path / "2.png").write_bytes(data[: len(data) // 2])
    place = r"video 1 of rows\.jsonl, the line at byte 0 \(.*2\.png\), frame 3: .*2\.png is no image"
    with pytest.raises(DataError, match=place):
        documents.read(1)
    assert any("2.png has changed" in line for line in documents.corpus.images.describe_changes())


def test_frames_as_bytes_in_tables_and_cuts_between_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    names = write_images(tmp_path, [FRAME] * 4)
    frames = [{"bytes": (tmp_path / name).read_bytes(), "path": name} for name in names]
    rows = [{"text": "abcd<video>efgh", "videos": [frames]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    table = str(tmp_path / "rows.parquet")
    documents, tokens, _ = shown(tmp_path, [], "qwen2.5-vl", monkeypatch, path=table, max_document_tokens=12)
    assert [(item.document, item.rows) for item in documents.items] == [(0, GROUP), (1, GROUP)]
    processor = load_processor((tmp_path / "model").absolute())
    second = processor.videos.group_patches([ImageFile(str(tmp_path / name)).load() for name in names[2:]], (1, 4, 6))
    assert torch.equal(documents.read(1).pixels, second)
    ids = np.array(ids_of(documents[1]))
    expected = tokens.positions(ids, np.zeros((0, 3)), [Video((1, 4, 6), 1.0)])
    assert np.array_equal(documents.positions(1), expected)
