"""Lines for the console about rows: their contents and tokens, what is no target, and what is cut or left out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from longspan.corpus.rows.encoding import RowEncoding
from longspan.corpus.rows.kinds import CHATS, rows_hold
from longspan.corpus.rows.sample import Row, Sample, Turns
from longspan.corpus.tokenizer import TextTokenizer, any_of_pattern
from longspan.data.document import NO_TARGET
from longspan.data.manifest import SHORTEST, LeftOut
from longspan.errors import plural

_WORDS = ("Zq0user", "Zq1assistant")


def rows_line(encoding: RowEncoding) -> str:
    """Describe the contents of rows, and how they become tokens and targets."""
    surrounding_tokens = describe_surrounding_tokens(encoding.tokenizer)
    if encoding.settings.parse_special_tokens:
        surrounding_tokens += "; a text that has them gets no second ones"
    treatment = {
        "text": surrounding_tokens,
        "prompt+completion": f"{surrounding_tokens}; targets are the completion and its end",
        "input_ids": "taken as they are; targets are those that labels or masks name, or all",
    }
    is_chat = encoding.kind in CHATS  # others may have no template
    return f"{rows_hold(encoding.kind)}: {_template_line(encoding) if is_chat else treatment[encoding.kind]}"


def _template_line(encoding: RowEncoding) -> str:
    marks = encoding.template.has_marks(None)
    targets = (
        "whose {% generation %} marks name the targets"
        if marks
        else "which marks no targets: they are what each assistant turn says, up to the token that ends the turn"
    )
    source = encoding.tokenizer.template_file or encoding.tokenizer.folder
    return f"written by the chat template of {source}, {targets}"


def missing_end_line(encoding: RowEncoding) -> str | None:
    """Return a warning that no end of a conversation's last turn is learnt; None if one is, and for other kinds.

    A conversation of two words is encoded: behind the answer its targets must have a special token, or one that ends
    generation.
    """
    if encoding.kind not in CHATS or encoding.settings.end_of_chat:
        return None
    turns = [{"role": role, "content": word} for role, word in zip(("user", "assistant"), _WORDS, strict=True)]
    (sample,) = replace(encoding, kind="messages").encode([Row("", {"messages": turns})])
    if not isinstance(sample, Sample) or sample.labels is None:
        return None
    engine, ends = encoding.tokenizer.engine, frozenset(encoding.template.ends)
    text = engine.decode(sample.ids[sample.labels != NO_TARGET].tolist(), skip_special_tokens=False)
    special = {token.content for token in engine.get_added_tokens_decoder().values() if token.special}
    tokens = any_of_pattern(ends | special)
    if tokens is not None and tokens.search(text.partition(_WORDS[1])[2]):
        return None
    fault, advice = "writes no token behind", "; data.end_of_chat names a token to be put there"
    if encoding.template.has_marks(None):
        fault, advice = "marks no end of", ""
    return (
        f"the chat template {fault} the last turn of a conversation, so that this end is no target: chats of one turn "
        f"do not teach a model to stop (at {' or '.join(sorted(ends)) or 'a token that its folder would name'}){advice}"
    )


def describe_surrounding_tokens(tokenizer: TextTokenizer) -> str:
    """Describe the tokens that are put before and after every text."""
    opening, closing = " ".join(tokenizer.opening), " ".join(tokenizer.closing)
    parts = [f"{verb} with {tokens}" for verb, tokens in (("begins", opening), ("ends", closing)) if tokens]
    if not parts:
        return "nothing is put around a text: the tokenizer names no token for its beginning or its end"
    # An end without a beginning may be longspan's own and not the tokenizer's.
    return f"each text {' and '.join(parts)}, as the tokenizer says" if opening else f"each text {parts[0]}"


def special_line(special: dict[str, int], *, parsed: bool) -> str:
    """Report how often the names of special tokens occur in texts, by their counts, the most frequent name first.

    `parsed`: the names are read as these tokens.
    """
    names_text = ", ".join(f"{name} ({count:,})" for name, count in list(special.items())[:5])
    more_text = f" and {len(special) - 5} others" if len(special) > 5 else ""
    times = plural(sum(special.values()), "time")
    read = "are read as these tokens" if parsed else "are read as plain text"
    hint = "data.parse_special_tokens = " + ("false reads plain text" if parsed else "true parses them")
    return f"names of special tokens stand in the texts {times}: {names_text}{more_text}; they {read} ({hint})"


def names_line(name: str, texts: int) -> str:
    """Report in how many `texts` a name of media, such as `<image>`, is plain text."""
    return (
        f"{name} stands in {plural(texts, 'text')}, and is read as these {len(name)} characters there: their rows "
        f'have no key "{name.strip("<>")}s", or parts of messages that name what is shown (docs/multimodal.md)'
    )


def unseen_line(left_out: LeftOut, turns: Turns) -> str | None:
    """Report what is no target in assistant turns: texts that the chat template leaves out, and blank turns.

    None if there is nothing of that kind.
    """
    unseen = {"thought": left_out.unseen_thoughts, "other text": left_out.unseen_texts}
    parts = [plural(count, name) for name, count in unseen.items() if count]
    lines = [f"not in the rendered texts, so no targets: {' and '.join(parts)} of assistant turns"] * bool(parts)
    if left_out.unseen_thoughts and turns == "together":
        lines.append('data.turns = "split" trains each turn as at inference, with its thought if the template has it')
    if left_out.blank_turns:
        lines.append(f"no targets, as they are blank: {plural(left_out.blank_turns, 'assistant turn')}")
    return "; ".join(lines) or None


def others_line(unseen: Mapping[str, int]) -> str:
    """Report what chat templates leave out beside texts of assistants: messages by their role, and tools."""
    parts = [plural(count, name) for name, count in list(unseen.items())[:5]]
    more_text = f" and messages of {len(unseen) - 5} other roles" if len(unseen) > 5 else ""
    return f"not in the rendered texts, as the chat template does not write them: {', '.join(parts)}{more_text}"


def left_out_lines(
    left_out: LeftOut,
    longest: int,
    other_kinds: Mapping[str, int],
    not_utf8: Sequence[str],
    *,
    key: str = "data.max_document_tokens",
    bad: Sequence[str] = (),
) -> Iterator[str]:
    """Yield a line for each way in which something is cut or left out, with numbers and the `key` that decides it.

    `longest` is the value of that key: the most tokens of a document. `other_kinds` counts the files that are not read,
    by kind; `not_utf8` names files. `bad` describes the first bad rows.
    """
    if left_out.cut_texts:
        yield (
            f"cut {plural(left_out.cut_texts, 'text')} of {plural(left_out.cut_tokens, 'token')} into "
            f"{plural(left_out.cut_documents, 'document')} of at most {longest:,} tokens "
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
        yield f'left out {plural(left_out.bad_rows, "bad row")} (data.on_bad = "skip"): {"; ".join(bad)}{more_text}'
    if other_kinds:
        kinds = ", ".join(f"{kind} ({count:,})" for kind, count in list(other_kinds.items())[:5])
        yield f"left out {plural(sum(other_kinds.values()), 'file')} of kinds that are not read: {kinds}"
    if not_utf8:
        yield f"left out {plural(len(not_utf8), 'file')}, not UTF-8: {', '.join(not_utf8[:5])}"
