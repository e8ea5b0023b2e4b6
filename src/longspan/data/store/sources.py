"""The files that a corpus is made from, and what is in them: SHA-256 sums, which are not taken twice of one file."""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from stat import S_ISREG

from longspan.errors import DataError
from longspan.files import write_atomically

LogLine = Callable[[str], None]

_BLOCK = 1 << 20
_SETTLED_SECONDS = 2.0  # a file may be written again within the resolution of its time
_NEWS_SECONDS = 5.0


@dataclass(frozen=True)
class CorpusFile:
    """A file to read: which of the sources it belongs to, its name in the corpus, and where it lies."""

    source: int
    name: str
    path: Path


@dataclass(frozen=True)
class Source:
    """One file of a corpus as it was when it was read."""

    name: str
    bytes: int
    modified_ns: int
    sha256: str
    path: str = ""


class KnownSums:
    """SHA-256 sums of files that were read before, by place, size and time; kept in `file` where one is given."""

    def __init__(self, file: Path | None = None, known: Iterable[Source] = ()) -> None:
        self._file = file
        self._known = {source.path: source for source in known}
        if file is not None:
            with suppress(OSError, ValueError, TypeError):
                lines = file.read_text(encoding="utf-8").splitlines()
                self._known |= {source.path: source for source in (Source(**json.loads(line)) for line in lines)}

    def of(self, files: Iterable[CorpusFile], log: LogLine) -> list[Source]:
        """What each file holds, from its sum or read now. Raises DataError for a file that cannot be read."""
        said, sources = time.monotonic(), list[Source]()
        for file in files:
            sources.append(self._source(file))
            if time.monotonic() - said > _NEWS_SECONDS:
                said = time.monotonic()
                log(f"read {len(sources):,} files to see what they hold")
        return sources

    def _source(self, file: CorpusFile) -> Source:
        path = str(file.path.absolute())
        try:
            stat = file.path.stat()
            path.encode()
            if not S_ISREG(stat.st_mode):
                raise DataError(
                    f"{file.name} of the corpus ({file.path}) is no regular file; give one, or leave it out"
                )
            old = self._known.get(path)
            if old is not None and (old.bytes, old.modified_ns) == (stat.st_size, stat.st_mtime_ns):
                return Source(file.name, old.bytes, old.modified_ns, old.sha256, path)
            return Source(file.name, stat.st_size, stat.st_mtime_ns, sha256_of(file.path), path)
        except UnicodeEncodeError as error:
            raise DataError(f"the path {path!r} of a file of the corpus is not UTF-8; give it another name") from error
        except OSError as error:
            raise DataError(f"cannot read {file.name} of the corpus ({file.path}): {error.strerror}") from error

    def keep(self, sources: Iterable[Source]) -> None:
        """Write down the sums of these files, for later starts."""
        if self._file is None:
            return
        settled = time.time_ns() - int(_SETTLED_SECONDS * 1e9)
        certain = [source for source in sources if source.modified_ns < settled]
        if any(self._known.get(source.path) != source for source in certain):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._file, "".join(json.dumps(asdict(source)) + "\n" for source in certain))


def sha256_of(path: Path) -> str:
    """The SHA-256 sum of a file, which is read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def differences(before: Iterable[Source], now: Iterable[Source]) -> list[str]:
    """What differs between the files that a corpus was made from and those that are there now, one phrase each."""
    old, new = _by_name(before), _by_name(now)
    changes = [f"{name} is gone" for name in old.keys() - new.keys()]
    changes += [f"{name} is new" for name in new.keys() - old.keys()]
    for name in old.keys() & new.keys():
        if old[name].bytes != new[name].bytes:
            changes.append(f"{name} had {old[name].bytes} bytes and has {new[name].bytes}")
        elif old[name].sha256 != new[name].sha256:
            changes.append(f"{name} has other contents")
    return sorted(changes)


def _by_name(sources: Iterable[Source]) -> Mapping[str, Source]:
    return {source.name: source for source in sources}
