"""`longspan train --show N`: the first rows of each source as tokens, with the targets marked; nothing is trained."""

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from longspan.config.keys import AUTO
from longspan.config.sections import DataConfig, RunConfig
from longspan.corpus.lines import row_lines, unread_line
from longspan.corpus.recipe import CorpusSettings, make_recipe
from longspan.corpus.rows.encoding import RowEncoding
from longspan.corpus.rows.kinds import rename_columns
from longspan.corpus.rows.sample import BadRow, Row, Sample
from longspan.corpus.rows.values import has_value
from longspan.corpus.run_corpus import load_configured_tokenizer
from longspan.corpus.sources.first_rows import read_file_rows, read_texts_for_tokenizer
from longspan.corpus.tokenizer import train_tokenizer
from longspan.data.document import NO_TARGET, Document
from longspan.data.shared_prefixes import find_prefix_trees
from longspan.errors import DataError, plural
from longspan.layout import Integers
from longspan.plain_text import escape_controls

# A longer row is shown at its beginning and its end.
_SHOWN_TOKENS = 2000
_MARKS = "⟦", "⟧"
_COLOURS = "\x1b[30;42m", "\x1b[0m"


def show_rows(config: RunConfig, count: int) -> None:
    """Print the first `count` rows of each source: tokens with dots between, each run of targets marked, and both
    counts.

    A row is shown as it is before it is cut or packed. At the end come the prefix trees: the rows shown that begin
    alike, where the run would compute their beginnings once. A tokenizer that the run would train is trained, and not
    kept. Raises DataError as the run does. A bad row raises it too, unless data.on_bad_row is "skip": then the row is
    shown with its reason.
    """
    settings = CorpusSettings.for_run(config)
    data = config.data
    files = settings.find_source_files(Path(config.run.dir))
    texts = read_texts_for_tokenizer(files, data.max_text_bytes)
    tokenizer = load_configured_tokenizer(config) or train_tokenizer(texts, data.vocab_size)
    recipe = make_recipe(settings, files, (), tokenizer)
    marks = _COLOURS if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else _MARKS
    legend = f"· between tokens, ⏎ a line break, targets {marks[0]}so{marks[1]}"
    print("\n".join([*map(escape_controls, row_lines(recipe)), legend]))
    # Each document stands with the place of its row.
    shown = list[tuple[str, Document]]()
    shares = data.share_prefixes == AUTO and not config.model.num_labels
    depths = config.mtp.num_layers if shares else None
    for source, encoding in enumerate(recipe.encodings):
        source_files = (file for file in files if file.source == source)
        rows = (row for file in source_files for row in read_file_rows(file, data.max_text_bytes))
        _show_source(islice(rows, count), encoding, data, marks, shown, depths)
    if depths is not None:
        for line in _tree_lines([document for _, document in shown], depths):
            print(line)


def _show_source(
    rows: Iterable[Row | BadRow],
    encoding: RowEncoding,
    data: DataConfig,
    marks: Sequence[str],
    shown: list[tuple[str, Document]],
    depths: int | None,
) -> None:
    """A beginning that a row shares with one shown before is printed there alone (`depths` None: no rows share any)."""
    # These keys have a value; they are in their order.
    keys = dict[str, None]()
    unread = Counter[str]()
    count = 0
    for row in rows:
        count += 1
        samples: Sequence[Sample | BadRow] = [row] if isinstance(row, BadRow) else []
        if isinstance(row, Row):
            row = rename_columns(row, data.rename_columns)
            samples = encoding.encode([row])
            keys |= dict.fromkeys(key for key, value in row.values.items() if has_value(value))
            unread.update(encoding.unread_columns(row.values))
        for sample in samples:
            if isinstance(sample, Sample):
                document = Document(sample.ids, labels=sample.labels)
                repeated, name = (0, "") if depths is None else _find_repeated(document, shown, depths)
                text = _text_with_marked_targets(sample, encoding.tokenizer.engine, marks, repeated, name)
                print(f"\n{escape_controls(row.where)}: {text}")
                shown.append((row.where, document))
            elif data.on_bad_row == "error" and not sample.masked:
                raise DataError(f"{sample.where}: {sample.reason}")
            else:
                print(escape_controls(f"\n{sample.where}: left out, {sample.reason}"))
    if len(keys) > 1:
        print(f"\nkeys that are read: {', '.join(key for key in keys if key not in unread)}")
    if unread:
        print(unread_line(unread, count))


def _find_repeated(document: Document, shown: Sequence[tuple[str, Document]], depths: int) -> tuple[int, str]:
    """(tokens that were shown before, place of the first row that has them)."""
    trees = find_prefix_trees([*(other for _, other in shown), document], depths=depths)
    # What is the document's own is one part.
    repeated = len(document) - trees.lengths[len(shown)]
    beginning = document.ids[:repeated]
    return repeated, next(where for where, other in (*shown, ("", document)) if _begins_with(other, beginning))


def _begins_with(document: Document, ids: Integers) -> bool:
    return np.array_equal(document.ids[: len(ids)], ids)


def _tree_lines(documents: Sequence[Document], depths: int) -> Iterator[str]:
    trees = find_prefix_trees(documents, depths=depths)
    branches = dict[int, list[int]]()
    for number, parent in enumerate(trees.parents):
        branches.setdefault(parent, []).append(number)
    # a part's number, what is drawn before it, and what is drawn before the parts that continue it
    waiting = [(number, "", "") for number in reversed(branches.get(-1, ())) if number in branches]
    if waiting:
        yield "\nbegin alike, and are computed once in a step that has them (data.share_prefixes):"
    while waiting:
        number, mark, margin = waiting.pop()
        name = f"shown as {number + 1}" if number < len(documents) else "prefix"
        yield f"{mark}{name}, {plural(trees.lengths[number], 'token')}"
        continued = branches.get(number, [])
        waiting += [(branch, f"{margin}└─ ", f"{margin}   ") for branch in continued[-1:]]
        waiting += [(branch, f"{margin}├─ ", f"{margin}│  ") for branch in reversed(continued[:-1])]


def _text_with_marked_targets(
    sample: Sample, engine: Tokenizer, marks: Sequence[str], repeated: int, name: str
) -> str:
    targets = np.ones(len(sample.ids), dtype=bool) if sample.labels is None else sample.labels != NO_TARGET
    is_scored = sample.labels is None and len(sample.stops) > 0
    # nothing predicts the first token, and no token of a document that is scored is a target
    targets[: len(targets) if is_scored else 1] = False
    scored_text = f"label or margin {', '.join(f'{x:g}' for x in sample.numbers)}" if sample.numbers else ""
    runs = [f"{plural(len(sample.ids), 'token')}, {scored_text or plural(int(targets.sum()), 'target')}\n"]
    for is_target, tokens in groupby(
        _token_texts(sample.ids.tolist(), targets.tolist(), engine, repeated, name), key=itemgetter(0)
    ):
        text = "·".join(text for _, text in tokens)
        runs.append(f"{marks[0]}{text}{marks[1]}" if is_target else text)
    return runs[0] + "·".join(runs[1:]).rstrip("\n")


def _token_texts(
    ids: Sequence[int], targets: Sequence[bool], engine: Tokenizer, repeated: int, name: str
) -> Iterator[tuple[bool, str]]:
    """(is a target, text) for each token; tokens that are parts of one character are one text. Of a row of more than
    _SHOWN_TOKENS the middle is one text that says how many are left out."""
    half = _SHOWN_TOKENS // 2
    stream = DecodeStream(skip_special_tokens=False)
    if repeated:
        yield False, f"… {plural(repeated, 'token')} as in {name} …"
    hidden = range(repeated + half, len(ids) - half)
    for i, (token, is_target) in enumerate(zip(ids, targets, strict=True)):
        if i < repeated:
            continue
        if i == hidden.start and hidden:
            yield False, f"… {plural(len(hidden), 'token')} …"
        if i not in hidden and (text := stream.step(engine, token)):
            shown = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
            yield is_target, shown.replace("\n", "⏎\n")
