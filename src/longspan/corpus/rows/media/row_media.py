"""The images and videos of a row, each kind in the order in which its texts name them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from longspan.corpus.images.image_file import ImageFile
from longspan.corpus.images.video_file import VideoFile
from longspan.corpus.rows.values import RowError
from longspan.errors import DataError


@dataclass(frozen=True)
class RowMedia:
    """What a row shows beside its texts."""

    images: Sequence[ImageFile] = ()
    videos: Sequence[VideoFile] = ()

    def __len__(self) -> int:
        return len(self.images) + len(self.videos)

    def first(self, images: int, videos: int) -> "RowMedia":
        """So many of each, from the beginning."""
        return RowMedia(self.images[:images], self.videos[:videos])

    def check_pixels(self) -> None:
        """Read the pixels of all. Raises RowError, naming it, for one that is broken."""
        files = [(f"images[{i}]", file) for i, file in enumerate(self.images)]
        for i, video in enumerate(self.videos):
            files += [(f"videos[{i}]: frames[{k}]", file) for k, file in enumerate(video.frames)]
        for name, file in files:
            try:
                file.load()
            except DataError as error:
                raise RowError(f"{name}: {error}") from error

    def in_order(self, kinds: Sequence[str]) -> Iterator[tuple[str, ImageFile | VideoFile]]:
        """Each with its name (`images[0]`), where these kinds ("image", "video") follow one another."""
        counts = {"image": 0, "video": 0}
        for kind in kinds:
            number = counts[kind]
            counts[kind] += 1
            yield f"{kind}s[{number}]", (self.images if kind == "image" else self.videos)[number]


NOTHING_SHOWN = RowMedia()
