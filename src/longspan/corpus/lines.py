"""Lines about the rows of a corpus: how they are encoded, what is no target, and what is cut or left out."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

from longspan.corpus.recipe import CorpusSettings, Recipe
from longspan.corpus.rows.encoding import RowEncoding
from longspan.corpus.rows.kinds import CHATS, KIND_TEXTS, is_chat, rename_columns
from longspan.corpus.rows.sample import Row, Sample
from longspan.corpus.rows.values import short_repr
from longspan.corpus.sources.find_files import count_files_of_other_kinds
from longspan.corpus.sources.first_rows import FIRST_ROWS, read_file_rows
from longspan.corpus.tokenizer import any_name_pattern
from longspan.data.corpus_documents import Corpus
from longspan.data.document import NO_TARGET
from longspan.data.manifest import PAIRS, SHORTEST, LeftOut, Manifest
from longspan.errors import DataError, plural


def left_out_lines(settings: CorpusSettings, run_dir: Path, manifest: Manifest, *, key: str) -> Iterator[str]:
    """Yield lines about what is cut or left out; `key` names the setting of the longest document, which cuts texts."""
    left_out = manifest.left_out
    bad = manifest.bad
    if left_out.cut_texts:
        yield (
            f"cut {plural(left_out.cut_texts, 'text')} of {plural(left_out.cut_tokens, 'token')} into "
            f"{plural(left_out.cut_documents, 'document')} of at most {settings.data.max_document_tokens:,} tokens "
            f"({key}; 0 cuts none)"
        )
    if left_out.short_texts or left_out.lost_tokens:
        yield (
            f"left out {plural(left_out.short_texts, 'text')} of fewer than {SHORTEST} tokens, and ends of cut texts: "
            f"{plural(left_out.lost_tokens, 'token')} in all"
        )
    if left_out.masked_parts:
        yield f"left out {plural(left_out.masked_parts, 'part')} of cut texts in which no token is a target ({key})"
    if left_out.masked_rows:
        yield f"left out {plural(left_out.masked_rows, 'row')} in which no token is a target"
    if left_out.bad_rows:
        more_text = f"; and {left_out.bad_rows - len(bad):,} more" if left_out.bad_rows > len(bad) else ""
        yield f'left out {plural(left_out.bad_rows, "bad row")} (data.on_bad_row = "skip"): {"; ".join(bad)}{more_text}'
    other_kinds = Counter[str]()  # files that are not read
    for _, path in settings.source_paths():
        other_kinds.update(count_files_of_other_kinds(path, leave_out=(run_dir,)))
    if other_kinds:
        kinds = ", ".join(f"{kind} ({count:,})" for kind, count in other_kinds.most_common(5))
        advice = ""
        if other_kinds.keys() & {".json", ".csv"}:
            advice = (
                "; a .json or .csv of rows is read where a path names it, or the folder has no other texts and rows"
            )
        yield f"left out {plural(other_kinds.total(), 'file')} of kinds that are not read: {kinds}{advice}"
    if manifest.skipped:
        yield f"left out {plural(len(manifest.skipped), 'file')}, not UTF-8: {', '.join(manifest.skipped[:5])}"
    if (unseen := unseen_line(left_out, split_turns=settings.data.split_turns)) is not None:
        yield unseen
    if left_out.inside_tokens:
        yield (
            "learnt from inside a token of the prompt, which this tokenizer cannot take apart and inference never has: "
            f"{plural(left_out.inside_tokens, 'answer')}; let prompts end with a line break, or before a space"
        )
    if manifest.unread:
        yield unread_line(manifest.unread, manifest.rows)
    if manifest.unseen:
        parts = [plural(count, name) for name, count in list(manifest.unseen.items())[:5]]
        more_text = f" and messages of {len(manifest.unseen) - 5} other roles" if len(manifest.unseen) > 5 else ""
        yield f"not in the rendered texts, as the chat template does not write them: {', '.join(parts)}{more_text}"


def unread_line(unread: Mapping[str, int], rows: int) -> str:
    """Name the keys that nothing reads, each with its share of so many rows."""
    shares = {short_repr(key).strip('"'): 100 * count / rows for key, count in unread.items()}
    return (
        f"keys that nothing reads: {', '.join(f'{key} ({share:.3g} % of rows)' for key, share in shares.items())}"
    )


def row_lines(recipe: Recipe) -> Iterator[str]:
    """Yield a line for each source, of what its rows hold and how they are encoded, and a warning where no end of a
    chat is learnt.
    """
    for number, (key, _) in enumerate(recipe.settings.source_paths()):
        encoding = recipe.encodings[number]
        source_text = f"{key}: " if recipe.settings.data.sources else ""
        yield source_text + encoding_line(encoding)
        if _holds_chats(recipe, number) and (line := missing_end_line(encoding)) is not None:
            yield source_text + line


def _holds_chats(recipe: Recipe, source: int) -> bool:
    """The first row decides where the kind leaves it open."""
    encoding = recipe.encodings[source]
    if encoding.kind not in ("prompt+completion", PAIRS):
        return encoding.kind in CHATS
    most_bytes = recipe.settings.data.max_text_bytes
    rows = (row for file in recipe.files if file.source == source for row in read_file_rows(file, most_bytes))
    first = next((row for row in islice(rows, FIRST_ROWS) if isinstance(row, Row)), None)
    return first is not None and is_chat(rename_columns(first, encoding.settings.columns).values, encoding.kind)


_WORDS = ("Zq0user", "Zq1assistant")


def encoding_line(encoding: RowEncoding) -> str:
    """Return a line of what rows hold, how they are encoded and what is learnt.

    A loss of preferences decides what is learnt, else a head of scores, else the kind of rows, and for chats whether
    the template marks targets.
    """
    title = f"rows hold {KIND_TEXTS[encoding.kind]}"
    surrounding_tokens = _surrounding_tokens_text(encoding)
    source = encoding.tokenizer.template_file or encoding.tokenizer.folder
    if encoding.kind in CHATS:
        surrounding_tokens = f"written by the chat template of {source}"
    elif encoding.kind in ("prompt+completion", PAIRS):
        # Without a template there are no chats.
        with suppress(DataError):
            _ = encoding.template
            title += f": chats are written by the chat template of {source}, texts without one"
    if encoding.settings.preference:
        return f"{title}: {surrounding_tokens}; targets are all tokens behind each prompt"
    if encoding.settings.num_labels:
        scored = "both documents of each pair" if encoding.kind == PAIRS else "each document, which has a label,"
        return f"{title}: {surrounding_tokens}; the model scores {scored} at the last token"
    # Rows of other kinds may have no template.
    if encoding.kind in CHATS:
        targets = (
            "which marks no targets: they are what each assistant turn says, up to the token that ends the turn"
        )
        if encoding.template.has_marks(None):
            targets = "whose {% generation %} marks name the targets"
        return f"{title}: {surrounding_tokens}, {targets}"
    treatment = {  # pairs have a loss of preferences or a head of scores (`find_kinds`)
        "text": surrounding_tokens,
        "prompt+completion": f"{surrounding_tokens}; targets are the completion and its end",
        "input_ids": "taken as they are; targets are those that labels or masks name, or all",
    }
    return f"{title}: {treatment[encoding.kind]}"


def _surrounding_tokens_text(encoding: RowEncoding) -> str:
    opening, closing = map(" ".join, encoding.tokenizer.surrounding_tokens)
    parts = [f"{verb} with {tokens}" for verb, tokens in (("begins", opening), ("ends", closing)) if tokens]
    text = f"each text {' and '.join(parts)}"
    if not parts:
        text = "nothing is put around a text: the tokenizer names no token for its beginning or its end"
    elif opening:  # an end without a beginning may be longspan's own
        text += ", as the tokenizer says"
    if encoding.settings.parse_special_tokens:
        text += "; a text that has them gets no second ones"
    return text


def missing_end_line(encoding: RowEncoding) -> str | None:
    """Return a warning that no end of a conversation's last turn is learnt; None if one is, or if none need be.

    A conversation of two words is encoded. Behind the answer its targets must have a special token, or one that ends
    generation. None need be learnt with `end_of_chat`, and of documents that are scored.
    """
    if encoding.settings.end_of_chat or encoding.settings.num_labels:
        return None
    turns = [{"role": role, "content": word} for role, word in zip(("user", "assistant"), _WORDS, strict=True)]
    settings = replace(encoding.settings, preference="")
    (sample,) = replace(encoding, kind="messages", settings=settings).encode([Row("", {"messages": turns})])
    if not isinstance(sample, Sample) or sample.labels is None:
        return None
    engine = encoding.tokenizer.engine
    ends = frozenset(encoding.template.ends)
    text = engine.decode(sample.ids[sample.labels != NO_TARGET].tolist(), skip_special_tokens=False)
    tokens = any_name_pattern(ends | encoding.tokenizer.special_tokens)
    if tokens.search(text.partition(_WORDS[1])[2]):
        return None
    fault = "writes no token behind"
    advice = "; data.end_of_chat_token names a token to be put there"
    if encoding.template.has_marks(None):
        fault = "marks no end of"
        advice = ""
    return (
        f"the chat template {fault} the last turn of a conversation, so that this end is no target: chats of one turn "
        f"do not teach a model to stop (at {' or '.join(sorted(ends)) or 'a token that its folder would name'}){advice}"
    )


def unseen_line(left_out: LeftOut, *, split_turns: bool) -> str | None:
    """Report what is no target in assistant turns: texts that the chat template leaves out, and blank turns;
    or None.
    """
    unseen = {"thought": left_out.unseen_thoughts, "other text": left_out.unseen_texts}
    parts = [plural(count, name) for name, count in unseen.items() if count]
    lines = list[str]()
    if parts:
        lines.append(f"not in the rendered texts, so no targets: {' and '.join(parts)} of assistant turns")
    if left_out.unseen_thoughts and not split_turns:
        lines.append(
            "data.split_turns = true trains each turn as at inference, with its thought if the template has it"
        )
    if left_out.blank_turns:
        lines.append(f"no targets, as they are blank: {plural(left_out.blank_turns, 'assistant turn')}")
    return "; ".join(lines) or None


def corpus_line(corpus: Corpus, paths: Sequence[str]) -> str:
    """Describe the size of a corpus, for the console."""
    manifest = corpus.manifest
    parts = [f"{plural(len(corpus.sources), 'file')} of {', '.join(paths)}"]
    if set(manifest.kinds) != {"text"}:
        parts.append(
            f"{plural(manifest.rows, 'row')} of {', '.join(KIND_TEXTS[kind] for kind in dict.fromkeys(manifest.kinds))}"
        )
    # Of KTO's documents every other one is a prompt with another row's answer.
    step = 2 if manifest.preference == "kto" else 1
    name = "answer" if step == 2 else "document"
    lengths = corpus.lengths[::step]
    parts += [plural(len(lengths), name), plural(int(lengths.sum()), "token")]
    if manifest.images:
        parts.append(plural(manifest.images, "image"))
    if corpus.targets is not None:
        parts.append(f"{int(corpus.targets[::step].sum()):,} of them targets")
    return ", ".join(parts)
