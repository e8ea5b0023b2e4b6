"""What placeholders and places of images could get wrong without an error, put into the code on purpose."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.corpus.images import test_families as families, test_images as tables, test_videos as videos
from tests.corpus.images.folders import qwen_folder
from tests.mutation import mutated


def stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables.test_equal_to_the_stock_processor(qwen_folder, tmp_path, monkeypatch)


def family(name: str) -> Callable[..., Any]:
    return lambda tmp_path, _: families.test_ids_and_rows_are_those_of_the_stock_processor(name, tmp_path)


ROWS, DOCUMENTS, ENCODER = "corpus.rows.media.placeholders", "corpus.image_documents", "corpus.document_encoder"
Change = tuple[str, str, str]
moving = partial(videos.test_tokens_places_and_positions, "qwen2.5-vl")
cut = tables.test_long_documents_are_cut_before_an_image
PIXELS = "enumerate(self._image_files(placed))"
PLACES = "image._replace(start=image.start - piece.start, stop=image.stop - piece.start)"
FIELDS = "for name, x in tensors.items()}"
MUTATIONS: dict[str, tuple[Change, Callable[..., Any]]] = {
    "answers where they stood before placeholders": (
        (ROWS, "int(start + grown_before[(starts < start).sum()])", "int(start)"),
        tables.test_placeholders_are_no_targets_and_answers_are,
    ),
    "placeholders are targets": (
        (ROWS, "np.where(sample.ids == placeholder, NO_TARGET, labels)", "labels"),
        tables.test_texts_name_images,
    ),
    "another image's pixels": (
        (DOCUMENTS, PIXELS, PIXELS.replace("files(placed)", "files(self.table[0])")),
        tables.test_bytes_in_tables,
    ),
    "frames of the video's beginning": (
        (DOCUMENTS, "frames[frame : frame + ", "frames[0 : "),
        videos.test_frames_as_bytes_in_tables_and_cuts_between_groups,
    ),
    "times of groups as if of frames": ((ROWS, "video.interval * size", "video.interval"), moving),
    "frames of a group in one order for all": (
        ("corpus.images.video_processor", "torch.stack(patches, 2)", "torch.stack(patches[::-1], 2)"),
        videos.test_pixels_are_those_of_the_image_processor,
    ),
    "videos of a row are one": ((DOCUMENTS, "(p.document, p.image.number)", "0"), moving),
    "the images of the document before": (
        ("data.image_table", "(document, document + 1)", "(document - 1, document)"),
        stock,
    ),
    "a field is dropped": (
        ("corpus.images.processor", FIELDS, "for name, x in [*tensors.items()][:0]}"),
        family("video_llama_3"),
    ),
    "an image alone in its document": (
        (DOCUMENTS, "pictures[0], placed.image.among", "pictures[0], 1"),
        family("llava_onevision"),
    ),
    "placeholders of an image alone": (
        (ROWS, "self.processor.image_text(size, images)", "self.processor.image_text(size)"),
        family("llava_onevision"),
    ),
    "places in the row, not in its part": ((ENCODER, PLACES, "image"), cut),
    "cut in an image": ((ENCODER, "if start < span_start < stop < span_stop", "if False"), cut),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_what_is_wrong_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change, table = MUTATIONS[name]
    with mutated(change), pytest.raises(Exception):  # noqa: B017
        table(tmp_path, monkeypatch)
