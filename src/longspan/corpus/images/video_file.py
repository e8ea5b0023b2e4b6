"""A video as ready frames: images where they lie, and the time of each."""

from collections.abc import Sequence
from typing import NamedTuple

from longspan.corpus.images.image_file import ImageFile, Size
from longspan.errors import DataError

_BETWEEN = "\0"  # paths of frames, which cannot hold it


class VideoFile(NamedTuple):
    """A video: its frames in order, the second at which each stands, and the seconds from one to the next."""

    frames: tuple[ImageFile, ...]
    times: tuple[float, ...]
    interval: float

    def size(self) -> Size:
        """Height and width of every upright frame, from their headers.

        Raises DataError, naming the frame, for one that is missing, no image, or of another size than the first.
        """
        sizes = [_size(frame, number) for number, frame in enumerate(self.frames)]
        other = next((i for i, size in enumerate(sizes) if size != sizes[0]), None)
        if other is not None:
            (height, width), (first_height, first_width) = sizes[other], sizes[0]
            raise DataError(
                f"frames[{other}] is of {width} x {height} pixels, and frames[0] of {first_width} x {first_height}; "
                "frames of a video are of one size"
            )
        return sizes[0]


def _size(frame: ImageFile, number: int) -> Size:
    try:
        return frame.size()
    except DataError as error:
        raise DataError(f"frames[{number}]: {error}") from error


def joined_paths(frames: Sequence[ImageFile]) -> str:
    """The paths of frames as one text; empty where a frame's bytes are in its row."""
    return _BETWEEN.join(frame.path for frame in frames) if all(frame.path for frame in frames) else ""


def files_of_paths(paths: str) -> list[ImageFile]:
    """The files that one path, or joined ones, name."""
    return [ImageFile(path) for path in paths.split(_BETWEEN)]


def shown_paths(paths: str) -> str:
    """One path, or joined ones, as messages write them."""
    return paths.replace(_BETWEEN, " or ")


def joined_stamp(frames: Sequence[ImageFile]) -> tuple[int, int]:
    """Bytes and times of change (ns) of all frames, by which a change of any is seen."""
    sizes, times = zip(*(frame.stamp() for frame in frames), strict=True)
    return sum(sizes), sum(times) % (1 << 62)
