"""Sizes, times and SHA-256 sums of source files, by which a corpus tells that they changed."""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from stat import S_ISREG

from longspan.corpus.sources.find_files import CorpusFile
from longspan.data.manifest import SourceFile
from longspan.errors import DataError
from longspan.files import write_atomically
from longspan.plain_text import LogLine

# The sum of a file is kept once its last change is this long ago.
_SETTLED_SECONDS = 2.0
# This time passes between two lines of progress.
_NEWS_SECONDS = 5.0


def hash_files(
    files: Iterable[CorpusFile], log: LogLine, kept: Path | None = None, earlier: Iterable[SourceFile] = ()
) -> list[SourceFile]:
    """Return size, time and SHA-256 sum of each file.

    A file is not read if one of the `earlier` source files, or a line of the file `kept`, has its path, size and time.
    If a sum is new, `kept` is written again with these sums, except for files that changed just now, as such a file
    may change again within the resolution of its time. Raises DataError for an unreadable file.
    """
    sums = {source.path: source for source in earlier}
    if kept is not None:
        # Without its sums the files are read again.
        with suppress(OSError, ValueError, TypeError):
            lines = kept.read_text(encoding="utf-8").splitlines()
            sums |= {source.path: source for source in (SourceFile(**json.loads(line)) for line in lines)}
    last_log_time = time.monotonic()
    sources = list[SourceFile]()
    for file in files:
        sources.append(_hash_file(file, sums))
        if time.monotonic() - last_log_time > _NEWS_SECONDS:
            last_log_time = time.monotonic()
            log(f"read {len(sources):,} files to see what they hold")
    if kept is not None:
        settled_before_ns = time.time_ns() - int(_SETTLED_SECONDS * 1e9)
        settled = [source for source in sources if source.modified_ns < settled_before_ns]
        if any(sums.get(source.path) != source for source in settled):
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(kept, "".join(json.dumps(asdict(source)) + "\n" for source in settled))
    return sources


def _hash_file(file: CorpusFile, sums: Mapping[str, SourceFile]) -> SourceFile:
    """The file is read unless `sums` has its path with this size and time."""
    path = str(file.path.absolute())
    try:
        stat = file.path.stat()
        path.encode()  # raises for a path that JSON could not keep
        if not S_ISREG(stat.st_mode):
            raise DataError(
                f"{file.name} of the corpus ({file.path}) is no regular file; give one, or leave it out"
            )
        earlier = sums.get(path)
        if earlier is not None and (earlier.bytes, earlier.modified_ns) == (stat.st_size, stat.st_mtime_ns):
            return SourceFile(file.name, earlier.bytes, earlier.modified_ns, earlier.sha256, path)
        with file.path.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        return SourceFile(file.name, stat.st_size, stat.st_mtime_ns, digest, path)
    except UnicodeEncodeError as error:
        raise DataError(f"the path {path!r} of a file of the corpus is not UTF-8; give it another name") from error
    except OSError as error:
        raise DataError(f"cannot read {file.name} of the corpus ({file.path}): {error.strerror}") from error


def file_differences(before: Iterable[SourceFile], now: Iterable[SourceFile]) -> list[str]:
    """Describe how the files of a corpus differ from those that it was built from, one phrase per file, sorted."""
    old_files, new_files = _index_by_name(before), _index_by_name(now)
    changes = [f"{name} is gone" for name, _ in old_files.keys() - new_files.keys()]
    changes += [f"{name} is new" for name, _ in new_files.keys() - old_files.keys()]
    for key in old_files.keys() & new_files.keys():
        old_file, new_file = old_files[key], new_files[key]
        if old_file.bytes != new_file.bytes:
            changes.append(f"{old_file.name} had {old_file.bytes} bytes and has {new_file.bytes}")
        elif old_file.sha256 != new_file.sha256:
            changes.append(f"{old_file.name} has other contents")
    return sorted(changes)


def _index_by_name(sources: Iterable[SourceFile]) -> Mapping[tuple[str, int], SourceFile]:
    """Files of two sources may share a name."""
    by_name = dict[tuple[str, int], SourceFile]()
    counts = Counter[str]()
    for source in sources:
        by_name[source.name, counts[source.name]] = source
        counts[source.name] += 1
    return by_name
