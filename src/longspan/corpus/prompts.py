"""Prompts that a model goes on with: texts, or conversations up to where an answer begins."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from longspan.corpus.rows.messages import checked_messages, read_tools
from longspan.corpus.rows.sample import BadRow, Row
from longspan.corpus.rows.values import RowError, require_string
from longspan.corpus.sources.row_chunks import parse_chunk
from longspan.corpus.sources.row_files import make_row_file
from longspan.corpus.tokenizer import TextTokenizer
from longspan.errors import DataError

_KEYS = ("prompt", "text", "messages")


class Prompt(NamedTuple):
    """A prompt in words and tokens; without a temperature above 0 the likeliest token follows, else one is drawn."""

    text: str
    ids: tuple[int, ...]
    temperature: float | None = None


def read_prompt_rows(file: Path) -> list[Row]:
    """Read the rows of a file of prompts, .jsonl, .json or .csv, or else a prompt for each line. Raises DataError."""
    try:
        if file.suffix in (".jsonl", ".json", ".csv"):
            chunks = make_row_file(str(file), file).read_chunks()
            rows = [placed.row for chunk in chunks for placed in parse_chunk(chunk)]
        else:
            lines = [line for line in file.read_bytes().splitlines() if line.strip()]
            rows = [Row(f"{file}, prompt {i}", {"prompt": line.decode()}) for i, line in enumerate(lines, 1)]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"prompts cannot be read from {file}: {error}") from error
    if bad := next((row for row in rows if isinstance(row, BadRow)), None):
        raise DataError(f"{bad.where}: {bad.reason}")
    return [row for row in rows if isinstance(row, Row)]


def encode_prompts(rows: Sequence[Row], tokenizer: TextTokenizer, positions: int | None) -> list[Prompt]:
    """Encode the prompt of each row: its `text`, a plain text; its `prompt`, which is what a user says if the tokenizer
    has a chat template, else a text; or its `messages`, perhaps with `tools`.

    Raises DataError, with the row's place, for other rows, for a prompt without tokens, and for one of more tokens than
    the model has `positions` (None: no limit).
    """
    if not rows:
        raise DataError("there are no prompts; give a line, or a row of JSON, for each")
    try:
        prompts = [_encode_prompt(row, tokenizer) for row in rows]
    except RowError as error:
        raise DataError(str(error)) from error
    for row, prompt in zip(rows, prompts, strict=True):
        if not prompt.ids:
            raise DataError(
                f"{row.where}: the prompt has no tokens, and a model goes on from one at least; give a text"
            )
        if positions is not None and len(prompt.ids) > positions:
            raise DataError(
                f"{row.where}: the prompt has {len(prompt.ids)} tokens, and the model knows {positions} positions "
                "(max_position_embeddings of its configuration); give a shorter prompt"
            )
    return prompts


def _key_of_prompt(row: Row) -> str:
    values = row.values
    keys = [key for key in _KEYS if values.get(key) is not None]
    temperature = values.get("temperature")
    unknown = values.keys() - {*_KEYS, "tools", "temperature"}
    temperature_fits = temperature is None or (isinstance(temperature, int | float) and temperature >= 0)
    if len(keys) != 1 or unknown or not temperature_fits or (values.get("tools") and keys == ["text"]):
        raise RowError(
            f"{row.where}: it has {', '.join(map(repr, values))}; give one of {', '.join(_KEYS)}, and besides tools "
            "of a conversation, or a temperature of at least 0"
        )
    return keys[0]


def _encode_prompt(row: Row, tokenizer: TextTokenizer) -> Prompt:
    from longspan.corpus.rows.template import ChatTemplate

    key = _key_of_prompt(row)
    value: Any = row.values[key]
    temperature = row.values.get("temperature")
    template = None
    with suppress(DataError):  # a prompt that is a string needs no template
        template = None if key == "text" else ChatTemplate.from_tokenizer(tokenizer)
    try:
        if isinstance(value, str) and template is None:
            opening = tokenizer.surrounding_ids[0]
            ids = tokenizer.set_parsing(False).encode_with_spans(require_string(value, key))[0].tolist()
            return Prompt(value, tuple(ids if ids[: len(opening)] == opening else [*opening, *ids]), temperature)
        messages = [{"role": "user", "content": value}] if isinstance(value, str) else checked_messages(value, key)
        template = template or ChatTemplate.from_tokenizer(tokenizer)  # raises DataError
        tools = read_tools(row.values.get("tools"))
        text = template.render(template.fit_arguments(messages, tools), tools, prompt=True).text
    except RowError as error:
        raise RowError(f"{row.where}: {error}") from error
    ids = tokenizer.set_parsing(True).encode_with_spans(text)[0].tolist()
    question = messages[-1].get("content")
    return Prompt(question if isinstance(question, str) else text, tuple(ids), temperature)
