"""The images and videos of a row, each kind in the order in which its texts name them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from longspan.train.data.images.image_file import ImageFile
from longspan.train.data.images.video_file import VideoFile


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

    def in_order(self, kinds: Sequence[str]) -> Iterator[tuple[str, ImageFile | VideoFile]]:
        """Each with its name (`images[0]`), where these kinds ("image", "video") follow one another."""
        counts = {"image": 0, "video": 0}
        for kind in kinds:
            number = counts[kind]
            counts[kind] += 1
            yield f"{kind}s[{number}]", (self.images if kind == "image" else self.videos)[number]


NOTHING_SHOWN = RowMedia()
