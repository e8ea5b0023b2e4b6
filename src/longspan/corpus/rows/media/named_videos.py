"""Videos of a row: lists of frames, with frames a second or the time of each."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from longspan.corpus.images.video_file import VideoFile
from longspan.corpus.rows.media.entries import check_keys, image_of
from longspan.corpus.rows.values import RowError, kind_of_value, shown
from longspan.errors import counted

FPS = 2.0  # frames a second where a row says nothing, as Qwen's own qwen-vl-utils has it for lists of frames
_RATES = ("fps", "sample_fps")
TIMES = (*_RATES, "timestamps")


def video_of(entry: Any, folder: str, name: str, beside: Mapping[str, Any] | None = None) -> VideoFile:
    """A video as a row has it: a list of frames, or an object with `frames` and `fps` or `timestamps`.

    These may also stand `beside` a list. Raises RowError for what is none.
    """
    times = {key: beside[key] for key in TIMES if beside and beside.get(key) is not None}
    frames = entry
    if isinstance(entry, dict):
        check_keys(entry, ("frames", *TIMES), name)
        if times:
            raise RowError(f"{name} has {', '.join(times)} beside an object of frames; give them in one place")
        frames, times = entry.get("frames"), entry
    if not isinstance(frames, list):
        what = shown(frames) if isinstance(frames, str) else kind_of_value(frames)
        raise RowError(
            f"{name} is {what}; files of videos are not read here: give its frames as a list of images, or as "
            '{"frames": […], "fps": 2}'
        )
    if not frames:
        raise RowError(f"{name} has no frames; leave it out")
    files = tuple(image_of(frame, folder, f"{name}.frames[{i}]") for i, frame in enumerate(frames))
    return VideoFile(files, *_times(times, len(files), name))


def _times(said: Mapping[str, Any], frames: int, name: str) -> tuple[tuple[float, ...], float]:
    """The second of each frame, and the seconds from one to the next, in the mean."""
    rate = next((said[key] for key in _RATES if said.get(key) is not None), None)
    times = said.get("timestamps")
    if times is None:
        rate = FPS if rate is None else rate
        if not _is_number(rate) or not rate > 0:
            raise RowError(f"{name} has fps {shown(rate)}; give the frames a second as a number above 0")
        return tuple(i / rate for i in range(frames)), 1 / rate
    if rate is not None:
        raise RowError(f"{name} has fps and timestamps, which both say when frames stand; give one of them")
    if not isinstance(times, list) or not all(map(_is_number, times)) or len(times) != frames:
        found = counted(len(times), "number") if isinstance(times, list) else kind_of_value(times)
        raise RowError(f"{name} has timestamps of {found} for {counted(frames, 'frame')}; give each its second")
    if any(b <= a for a, b in pairwise(times)) or times[0] < 0:
        raise RowError(f"{name} has timestamps that do not rise from 0 or later: {shown(times)}")
    spread = (times[-1] - times[0]) / (frames - 1) if frames > 1 else 1 / FPS
    return tuple(float(time) for time in times), spread


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value and abs(value) < 1e9
