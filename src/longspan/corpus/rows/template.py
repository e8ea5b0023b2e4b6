"""A tokenizer's chat template: renders messages as text by transformers' renderer, on a fixed day.

Which characters of a rendering are targets is decided in `chat.py` and `infer_turns.py`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from inspect import signature
from itertools import product
from typing import Any, NamedTuple

from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from longspan.corpus.images.processor import load_processor
from longspan.corpus.rows.kinds import KIND_TEXTS
from longspan.corpus.rows.message_texts import Field, replace_field
from longspan.corpus.rows.messages import read_json_value
from longspan.corpus.rows.sample import DATE
from longspan.corpus.rows.values import RowError, short_repr, type_name
from longspan.corpus.tokenizer import TextTokenizer
from longspan.errors import DataError
from longspan.model.weights.hf_folder import FOLDER_OPTIONS
from longspan.model.weights.tokenizer_files import has_image_processor, read_stop_token_ids

Message = Mapping[str, Any]
SOME_TOOL = [
    {
        "type": "function",
        "function": {"name": "f", "description": "f", "parameters": {"type": "object", "properties": {}}},
    }
]
# Arguments of apply_chat_template, which are no variables of a template, save one.
_ARGUMENTS = {"messages", *signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {"documents"}
_ROLES = ("system", "developer", "user", "assistant", "tool")
_WORDS = ("Zq0part", "Zq1part")
# A content is a text, or its parts.
_SAMPLE_CONTENTS = ("Zq", [{"type": "text", "text": "Zq"}])
# Mistral's ids of calls have nine letters and digits.
_ID = "callZq000"
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_DATES = re.compile(r"strftime_now\(\s*(?P<quote>['\"])(?P<format>.*?)(?P=quote)\s*\)")
# This stands in place of the renderer's own strftime_now, which writes today's date.
_DAY = (
    "{%- macro strftime_now(format) -%}{{- longspan_dates[format] if format in longspan_dates else "
    "raise_exception('strftime_now: the format must be written as text') -}}{%- endmacro -%}"
)


_renderer: Callable[..., tuple[list[str], list[list[tuple[int, int]]]]] = render_jinja_template  # pyright: ignore


class RenderedChat(NamedTuple):
    """A conversation as text; `marks` are the spans that the template marks as generated, in characters."""

    text: str
    marks: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class ChatTemplate:
    """The templates of a tokenizer, with and without tools, the names of its special tokens, and the ends of turns.

    `variables` are further ones that the templates read, as JSON: what a row gives as chat_template_kwargs.
    """

    plain: str
    with_tools: str
    special: tuple[tuple[str, str], ...]
    ends: tuple[str, ...]
    day: str = DATE  # a conversation has the same tokens on every day
    variables: str = "{}"

    @classmethod
    def from_tokenizer(cls, tokenizer: TextTokenizer) -> "ChatTemplate":
        """Return the templates of a tokenizer's folder. Raises DataError if it has none."""
        folder = tokenizer.folder
        if folder is None:
            raise DataError(
                f"rows hold {KIND_TEXTS['messages']}, and a tokenizer that is trained on the corpus has no chat "
                "template; name the folder of a chat model's tokenizer with data.tokenizer, or put its files into "
                "that of model.path"
            )
        stock: Any = AutoTokenizer.from_pretrained(folder, **FOLDER_OPTIONS)
        if tokenizer.template_file is not None:
            try:
                stock.chat_template = tokenizer.template_file.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise DataError(
                    f"cannot read data.chat_template {str(tokenizer.template_file)!r}: {error}; give a file with a "
                    "template"
                ) from error
        elif not stock.chat_template and has_image_processor(folder):
            # some models' folders have it for the processor only
            stock.chat_template = load_processor(folder.absolute()).stock.chat_template
        if not stock.chat_template:
            raise DataError(
                f"rows hold {KIND_TEXTS['messages']}, and the tokenizer in {folder} has no chat template; put its "
                "chat_template.jinja there, or name the file in a run with data.chat_template"
            )
        template = stock.get_chat_template()
        with_tools = stock.get_chat_template(tools=[{}])  # [{}]: any tools
        special = tuple(sorted((k, str(v)) for k, v in stock.special_tokens_map.items() if isinstance(v, str)))
        ids = read_stop_token_ids(folder) | ({tokenizer.end} if tokenizer.end is not None else set[int]())
        # None for ids that the tokenizer does not have
        ends = (tokenizer.engine.id_to_token(i) for i in sorted(ids))
        return cls(template, with_tools, special, tuple(name for name in ends if name is not None))

    def has_marks(self, tools: Sequence[Any] | None) -> bool:
        """Return whether the template, with or without tools, marks what is generated."""
        return _MARKS.search(self._template_for(tools)) is not None

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, *, prompt: bool = False, marks: bool = False
    ) -> RenderedChat:
        """Render messages; with `prompt` up to where an answer begins, with `marks` also with the template's own marks.

        A content that is a text becomes a list of parts, or a list a text, if the template reads only the other form.
        Raises RowError if the template raises.
        """
        contents = [self._contents.get((m["role"], bool(tools)), _TEXT).fit_content(m) for m in messages]
        try:
            return self._render_messages(contents, tools, prompt=prompt, marks=marks)
        except RowError as error:
            of_tools = (i for i, m in enumerate(messages) if m["role"] == "tool" or m.get("tool_calls"))
            number = next(of_tools, None)
            if number is None or self._writes_calls[bool(tools)]:
                raise
            deed = "is the answer of a tool" if messages[number]["role"] == "tool" else "calls a tool"
            raise RowError(
                f"messages[{number}] {deed}, and its chat template writes no calls of tools ({error}); name one that "
                "does with data.chat_template, as models that were trained with tools have it, or leave the row out"
            ) from error

    @cached_property
    def _contents(self) -> Mapping[tuple[str, bool], "_Contents"]:
        """By role and by whether there are tools. A template reads parts if these give the same as one text, except for
        blanks. Other templates write the list itself, as Python or JSON, or leave it out; some read only parts, or only
        the first part. One that shows no word in either form counts as one that reads texts."""
        contents = dict[tuple[str, bool], _Contents]()
        text = "".join(_WORDS)
        one_part, two_parts = ([{"type": "text", "text": word} for word in words] for words in ([text], _WORDS))
        for role, tools in product(_ROLES, (None, SOME_TOOL)):
            # The template writes this for each of them; blanks are left out.
            from_text, from_part, from_parts = (
                "".join(self._render_content(role, content, tools, {}, "{}").split())
                for content in (text, one_part, two_parts)
            )
            # Several parts are read if all are shown, as one text would be; if no text is shown, to show all is enough.
            reads_parts = all(word in from_parts for word in _WORDS) and (
                from_parts == from_text or text not in from_text
            )
            reads_text = text in from_text or text not in from_part
            contents[role, bool(tools)] = _Contents(text=reads_text, parts=reads_parts)
        return contents

    def _render_content(self, role: str, content: Any, tools: Sequence[Any] | None, *arguments: Any) -> str:
        """The text is "" if the template refuses it. A tool's message needs a call before it, with the first of the
        `arguments` that the template takes. Other messages have contents of the same form: text or parts."""
        message = {"role": role, "content": content, "name": "f", "tool_call_id": _ID}
        sample_content = "Zq" if isinstance(content, str) else [{"type": "text", "text": "Zq"}]
        question, answer = (
            {"role": sample_role, "content": sample_content} for sample_role in ("user", "assistant")
        )
        for call_arguments in arguments:
            call = {"id": _ID, "type": "function", "function": {"name": "f", "arguments": call_arguments}}
            turns = {
                "system": [message, question, answer],
                "user": [message, answer],
                "tool": [question, {**answer, "tool_calls": [call]}, message, answer],
            }
            with suppress(RowError):
                return self._render_messages(turns.get(role, [question, message]), tools).text
        return ""

    def fit_arguments(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> list[Message]:
        """Return messages whose calls have arguments as the template takes them: as objects, or as their JSON.

        A template that would quote a string of JSON, or refuse it, gets the object; one that refuses an object, or
        would print it as Python does, gets its JSON. Raises RowError for a string that would be quoted and is no object
        of JSON.
        """
        fitted = list(messages)
        for i, message in enumerate(messages):
            for k, call in enumerate(message.get("tool_calls") or ()):
                path: tuple[str | int, ...] = ("tool_calls", k, *(["function"] if "function" in call else []))
                arguments = call.get("function", call).get("arguments")
                form = self._argument_forms[bool(tools)]
                value = "{}" if isinstance(arguments, str) and not arguments.strip() else arguments
                if isinstance(value, str) and form is dict:
                    name = f"messages[{i}].tool_calls[{k}].arguments"
                    value = read_json_value(value, name) or {}
                    if not isinstance(value, dict):
                        raise RowError(f"{name} is {type_name(value)}; give an object: {short_repr(value)}")
                elif isinstance(value, dict) and form is str:
                    value = json.dumps(value, ensure_ascii=False)
                if value is not arguments:
                    fitted = replace_field(fitted, Field(i, (*path, "arguments"), None), value)
        return fitted

    @cached_property
    def _argument_forms(self) -> Mapping[bool, type | None]:
        """By whether there are tools: an object (dict), its JSON (str), or both (None)."""
        forms = dict[bool, type | None]()
        arguments = dict([_WORDS])  # the first word is the key, the second its value
        text = json.dumps(arguments)
        for tools in (None, SOME_TOOL):
            as_object, as_text = (
                next(filter(None, (self._render_content("tool", c, tools, form) for c in _SAMPLE_CONTENTS)), "")
                for form in (arguments, text)
            )
            forms[bool(tools)] = None
            if text in as_text and (not as_object or str(arguments) in as_object):
                forms[bool(tools)] = str  # an object is refused, or printed as Python does
            elif _WORDS[1] in as_object and not (text in as_text and text in as_object):
                # The template shows an object, and does not write both forms alike.
                forms[bool(tools)] = dict
        return forms

    @cached_property
    def _writes_calls(self) -> Mapping[bool, bool]:
        """By whether there are tools."""
        arguments = dict([_WORDS])
        forms = (arguments, json.dumps(arguments))
        return {
            bool(tools): any(
                _WORDS[1] in self._render_content("tool", content, tools, *forms) for content in _SAMPLE_CONTENTS
            )
            for tools in (None, SOME_TOOL)
        }

    def _render_messages(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, *, prompt: bool = False, marks: bool = False
    ) -> RenderedChat:
        """Keys without a value are left out, as templates ask whether a key is there."""
        template = self._template_for(tools)
        present = [{key: value for key, value in message.items() if value is not None} for message in messages]
        day = datetime.strptime(DATE, "%d %b %Y")
        formats = {match["format"] for match in _DATES.finditer(template)}
        try:
            dates = {date_format: day.strftime(date_format) for date_format in formats}
            texts, spans = _renderer(
                conversations=[present],
                tools=None if tools is None else list(tools),
                chat_template=_DAY + template if "strftime_now" in template else template,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **dict(self.special) | {"date_string": DATE, "longspan_dates": dates} | json.loads(self.variables),
            )
        except TemplateError as error:
            raise RowError(f"its chat template says: {error.message or type(error).__name__}") from error
        except Exception as error:  # a template may fail in any way that Python can
            raise RowError(f"its chat template fails: {type(error).__name__}: {error}") from error
        return RenderedChat(texts[0], tuple((start, stop) for start, stop in spans[0]) if marks else ())

    def _template_for(self, tools: Sequence[Any] | None) -> str:
        return self.with_tools if tools else self.plain


@dataclass(frozen=True)
class _Contents:
    """Which contents of a message a template reads: a text (else only parts), a list of several text parts."""

    text: bool
    parts: bool

    def fit_content(self, message: Message) -> Message:
        """Return a message whose content has a form that the template reads.

        Several text parts become one, and a text a list of one part, where the template reads only that.
        """
        content = message.get("content")
        if isinstance(content, list):
            if self.parts or not all(isinstance(part.get("text"), str) for part in content):
                return message
            content = "".join(part["text"] for part in content)
        elif not isinstance(content, str) or self.text:
            return message
        return {**message, "content": content if self.text else [{"type": "text", "text": content}]}


_TEXT = _Contents(text=True, parts=False)


def read_variables(value: Any) -> dict[str, Any]:
    """Return the variables that a row gives its template. Raises RowError for arguments of the renderer."""
    value = read_json_value(value, "chat_template_kwargs") or {}
    if not isinstance(value, dict):
        raise RowError(f'"chat_template_kwargs" is {type_name(value)}; give an object: {short_repr(value)}')
    if wrong := sorted(_ARGUMENTS & value.keys()):
        raise RowError(
            f'"chat_template_kwargs" has {wrong[0]}, which is no variable of a chat template; leave it out'
        )
    return value
