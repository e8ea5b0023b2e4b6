"""The document lengths that `longspan plan` and `bench step` plan for. Nothing here imports torch.

They come from a JSON file, text files (estimated as bytes / 4 unless a tokenizer is given), or a named distribution.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from longspan.corpus.files import CorpusFile, find_files, kind_of_files, text_sizes
from longspan.corpus.row_files import row_file
from longspan.errors import ConfigError, DataError
from longspan.files import parse_json
from longspan.layout import check_lengths
from longspan.plan.distributions import DISTRIBUTIONS, sample_lengths

BYTES_PER_TOKEN = 4  # of English text and code under the usual byte-pair vocabularies


@dataclass(frozen=True, kw_only=True)
class SourceFlags:
    """Where the documents come from: exactly one of --lengths, --data, --distribution and --same."""

    lengths: str = ""
    """JSON file with a list of document lengths in tokens, or a plan; - reads standard input."""
    data: str = ""
    """Rows of data instead, as data.path has them: stdlib, or a folder or file; tokens are estimated as bytes / 4."""
    tokenizer: str = ""
    """With --data: a folder with tokenizer.json, to count tokens instead of estimating them."""
    max_document_tokens: int = 0
    """With --data: cut longer documents into pieces of at most this many tokens; 0: leave them whole."""
    distribution: str = ""
    """Lengths drawn at random instead: lognorm, bimodal, uniform, expo or files."""
    tokens: int = 0
    """With --distribution: draw documents of so many tokens together; 0: 32768 for each slot."""
    longest_document: int = 131072
    """With --distribution: no document is longer."""
    seed: int = 0
    """With --distribution: seed of the draw."""
    same: str = ""
    """Documents of one length instead, such as 1024x8192: 1024 documents of 8192 tokens."""


def read_lengths(flags: SourceFlags, slots: int) -> tuple[tuple[int, ...], str]:
    """Read the lengths of the one source that the flags name, and return them with a text that names it.

    A distribution is drawn for `slots` where --tokens is not given. Raises ConfigError, DataError or LayoutError.
    """
    sources = [name for name in ("lengths", "data", "distribution", "same") if getattr(flags, name)]
    if len(sources) != 1:
        several = " and ".join(f"--{name}" for name in sources) or "none of them, and it needs documents"
        names = "--lengths FILE.json, --data PATH, --distribution NAME and --same COUNTxLENGTH (such as --same 8x8192)"
        raise ConfigError(f"give one of {names}; got {several}")
    if flags.same:
        count, _, length = flags.same.lower().partition("x")
        if not count.isdecimal() or not length.isdecimal() or not int(count):
            raise ConfigError(f"--same {flags.same!r} is not COUNTxLENGTH, such as 1024x8192")
        return check_lengths([int(length)] * int(count)), "equal lengths"
    if flags.lengths:
        return read_json_lengths(flags.lengths), flags.lengths
    if flags.data:
        return _read_text_lengths(flags)
    if flags.distribution not in DISTRIBUTIONS:
        raise ConfigError(f"--distribution {flags.distribution!r} is unknown; use one of {', '.join(DISTRIBUTIONS)}")
    total = flags.tokens or 32768 * slots
    sample = sample_lengths(flags.distribution, total, seed=flags.seed, longest=flags.longest_document)
    return tuple(sample.tolist()), f"{flags.distribution} lengths, seed {flags.seed}"


def read_json_lengths(path: str) -> tuple[int, ...]:
    """Read lengths from a JSON list, or the "lengths" of an object such as a plan; "-" is standard input."""
    try:
        value = parse_json(sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read lengths from {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"cannot read lengths from {path}: it is not JSON ({error})") from error
    if isinstance(value, dict):
        value = value.get("lengths")
    if not isinstance(value, list):
        raise ConfigError(f'{path} holds no lengths; give a JSON list such as [300, 20], or an object with "lengths"')
    if not value:
        raise ConfigError(f"{path} holds no documents: its list of lengths is empty; give at least one length")
    return check_lengths(value)


def _read_text_lengths(flags: SourceFlags) -> tuple[tuple[int, ...], str]:
    files = tuple(CorpusFile(0, name, file) for name, file in find_files(flags.data, key="--data").items())
    if flags.tokenizer:
        counts = _count_tokens(files, flags.tokenizer)
    else:
        counts = [n for size in text_sizes(files) if (n := size // BYTES_PER_TOKEN)]
    if not counts:
        raise DataError(f"--data {flags.data!r} holds no text")
    method = f"counted with {flags.tokenizer}" if flags.tokenizer else f"estimated as bytes / {BYTES_PER_TOKEN}"
    return tuple(cut_lengths(counts, flags.max_document_tokens)), f"{flags.data}, tokens {method}"


def _count_tokens(files: Sequence[CorpusFile], tokenizer: str) -> list[int]:
    # A limit of 0 means none, for the bytes of a row as for the tokens of a document.
    from longspan.corpus.document_encoder import DocumentEncoder, FileChunk
    from longspan.corpus.rows.encoding import RowEncoding
    from longspan.corpus.tokenizer import load_tokenizer

    encoding = RowEncoding(kind_of_files(files, skip_bad=False, most_bytes=0), load_tokenizer(tokenizer))
    encoder, lengths = DocumentEncoder((encoding,), 0, "<u4"), list[int]()
    for number, file in enumerate(files):
        for chunk in row_file(file.name, file.path, 0).chunks():
            lengths += encoder.encode_chunks([FileChunk(0, number, chunk)]).lengths.tolist()
    return lengths


def cut_lengths(counts: list[int], limit: int) -> list[int]:
    """Cut each length into pieces of `limit` tokens and a shorter last piece; a limit of 0 cuts none."""
    if limit <= 0:
        return counts
    return [n for count in counts for n in (*[limit] * (count // limit), count % limit) if n]
