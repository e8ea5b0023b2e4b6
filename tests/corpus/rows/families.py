"""Families of chat models: a small byte-level tokenizer with each one's special tokens, its template, what it says.

The templates are written for these tests. Folders of published ones, as NAME.jinja, are read instead of them where
LONGSPAN_CHAT_TEMPLATES names one.
"""

import json
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from longspan.corpus.rows.encoding import RowEncoding
from longspan.corpus.rows.sample import BadRow, Row, RowSettings, Sample
from longspan.corpus.tokenizer import load_tokenizer
from tests.corpus.rows.conversations import Chat, Message

TEMPLATES = Path(os.environ.get("LONGSPAN_CHAT_TEMPLATES", Path(__file__).parent / "templates"))
_TEXTS = ("def layout(rank):\n    return rank\n" * 5, "Why is the sky blue? Because of the rain.\n" * 5)
Said = Callable[[Sequence[Message]], list[str]]


class Family(NamedTuple):
    special: str
    eos: str
    said: Said
    ends: str = ""  # beside eos, as generation_config.json names them
    bos: str = ""
    tools: bool = True
    thought: str = "reasoning_content"
    calls: int = 9  # turns with calls that a conversation may have
    text_arguments: bool = False

    def adapted(self, chat: Chat) -> Chat:
        return chat._replace(messages=[self._adapted(message) for message in chat.messages])

    def _adapted(self, message: Message) -> Message:
        renamed = {self.thought if key == "reasoning_content" else key: value for key, value in message.items()}
        if self.text_arguments and "tool_calls" in renamed:
            (call,) = renamed["tool_calls"]
            function = {**call["function"], "arguments": _json(call["function"]["arguments"])}
            renamed["tool_calls"] = [{**call, "function": function}]
        return renamed


def _call(message: Message) -> dict[str, Any]:
    return message["tool_calls"][0]["function"]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _answers(messages: Sequence[Message]) -> list[Message]:
    return [message for message in messages if message["role"] == "assistant"]


def _hermes(message: Message) -> str:
    call = _call(message)
    return f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {_json(call["arguments"])}}}\n</tool_call>'


def _qwen25(messages: Sequence[Message]) -> list[str]:
    said = [_hermes(m) if "tool_calls" in m else m["content"] for m in _answers(messages)]
    return [text + "<|im_end|>" for text in said]


def _qwen3(messages: Sequence[Message]) -> list[str]:
    question = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    said = []
    for i, m in enumerate(messages):
        if m["role"] == "assistant":
            text = _hermes(m) if "tool_calls" in m else m["content"]
            thought = m.get("reasoning_content", "")
            kept = i > question and (thought or i == len(messages) - 1)
            said.append((f"<think>\n{thought}\n</think>\n\n" if kept else "") + text + "<|im_end|>")
    return said


def _llama(messages: Sequence[Message]) -> list[str]:
    def text(m: Message) -> str:
        if "tool_calls" in m:
            return f'{{"name": "{_call(m)["name"]}", "parameters": {_json(_call(m)["arguments"])}}}'
        return m["content"].strip()

    return [text(m) + "<|eot_id|>" for m in _answers(messages)]


def _gemma(messages: Sequence[Message]) -> list[str]:
    return [m["content"].strip() + "<end_of_turn>" for m in _answers(messages)]


def _mistral(messages: Sequence[Message]) -> list[str]:
    def text(m: Message) -> str:
        if "tool_calls" in m:
            return f'[TOOL_CALLS] [{_json(_call(m))[:-1]}, "id": "{m["tool_calls"][0]["id"]}"}}]'
        return " " + m["content"].strip()

    return [text(m) + "</s>" for m in _answers(messages)]


def _phi3(messages: Sequence[Message]) -> list[str]:
    return [m["content"] + "<|end|>" for m in _answers(messages) if m.get("content")]


def _deepseek(messages: Sequence[Message]) -> list[str]:
    def text(m: Message) -> str:
        if "tool_calls" in m:
            arguments = f"\n```json\n{_call(m)['arguments']}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
            return "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather" + arguments
        return m["content"]

    return [text(m) + "<｜end▁of▁sentence｜>" for m in _answers(messages)]


def _gpt_oss(messages: Sequence[Message]) -> list[str]:
    said = []
    for i, m in enumerate(messages):
        if m["role"] != "assistant":
            continue
        last, thought = i == len(messages) - 1, m.get("thinking", "")
        answered = any("tool_calls" not in later for later in _answers(messages[i + 1 :]))
        kept = thought and (last or ("tool_calls" in m and not answered))
        text = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if kept else ""
        if "tool_calls" in m:
            call = f"{_call(m)['name']}<|channel|>commentary json<|message|>{_json(_call(m)['arguments'])}"
            said.append(f"{text} to=functions.{call}<|call|>")
        else:
            end = "<|return|>" if last else "<|end|>"
            said.append(f"{text}<|channel|>final<|message|>{m['content']}{end}")
    return said


_CHATML = "<|im_start|> <|im_end|> <|endoftext|> +<tool_call> +</tool_call> +<think> +</think>"
_DEEPSEEK = "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> +<｜User｜> +<｜Assistant｜> +<think> +</think>"
_DEEPSEEK_TOOLS = (
    "+<｜tool▁calls▁begin｜> +<｜tool▁call▁begin｜> +<｜tool▁call▁end｜> +<｜tool▁calls▁end｜> +<｜tool▁sep｜>"
)
_MISTRAL = "<s> </s> [INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS]"
_LLAMA = "<|begin_of_text|> <|eot_id|> <|eom_id|> <|start_header_id|> <|end_header_id|> <|python_tag|>"
_HARMONY = "<|start|> <|end|> <|message|> <|channel|> <|call|> <|return|> <|endoftext|> <|constrain|>"
FAMILIES: dict[str, Family] = {
    "qwen2.5": Family(_CHATML, "<|im_end|>", _qwen25, ends="<|endoftext|>"),
    "qwen3": Family(_CHATML, "<|im_end|>", _qwen3, ends="<|endoftext|>"),
    "llama3.2": Family(_LLAMA, "<|eot_id|>", _llama, ends="<|eom_id|>", bos="<|begin_of_text|>"),
    "gemma3": Family(
        "<bos> <eos> <start_of_turn> <end_of_turn>", "<eos>", _gemma, "<end_of_turn>", "<bos>", tools=False
    ),
    "mistral": Family(_MISTRAL, "</s>", _mistral, bos="<s>"),
    "phi3": Family("<s> <|endoftext|> <|end|> <|system|> <|user|> <|assistant|>", "<|endoftext|>", _phi3, "<|end|>"),
    "deepseek-r1-distill": Family(
        f"{_DEEPSEEK} {_DEEPSEEK_TOOLS}",
        "<｜end▁of▁sentence｜>",
        _deepseek,
        bos="<｜begin▁of▁sentence｜>",
        calls=1,
        text_arguments=True,
    ),
    "gpt-oss": Family(_HARMONY, "<|return|>", _gpt_oss, ends="<|endoftext|> <|call|>", thought="thinking"),
}


def write_folder(folder: Path, name: str, *, template: str | None = None, **tokenizer: Any) -> Path:
    text = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8") if template is None else template
    return write_family(folder, FAMILIES[name], text, **tokenizer)


# How Llama 3, Qwen and others split texts; without it as GPT-2 does. Texts whose tokens are line breaks and blanks.
LLAMA_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
LLAMA_SPLIT += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
BREAKS = ("a\n\n\nb\n\nYes  no   so: \n\n" * 9, "Why is it? Because.\n" * 5)


@cache
def _trained(texts: Sequence[str], split: str) -> str:
    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer, engine.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if split:
        in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        engine.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), in_bytes])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    engine.train_from_iterator(texts, trainer)
    return engine.to_str()


def trained_engine(texts: Sequence[str], split: str = "") -> Tokenizer:
    return Tokenizer.from_str(_trained(texts, split))


def write_family(
    folder: Path,
    family: Family,
    template: str,
    *,
    generation: bool = True,
    texts: Sequence[str] = _TEXTS,
    split: str = "",
) -> Path:
    engine = trained_engine(texts, split)
    names = f"{family.special} {family.eos} {family.bos} {family.ends}".split()
    engine.add_special_tokens([n for n in names if n[0] != "+"])
    engine.add_tokens([AddedToken(n[1:], normalized=False) for n in names if n[0] == "+"])
    folder.mkdir(parents=True, exist_ok=True)
    engine.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": family.eos}
    settings |= {"bos_token": family.bos} if family.bos else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    if generation:
        ends = [engine.token_to_id(end) for end in [family.eos, *family.ends.split()]]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


# what stands before and behind the marks that are put into each template
MARKED = {
    "gemma3": (
        "+ (system if loop.first else '') + m.content | trim + '<end_of_turn>\\n' }}",
        "}}{%- if m.role == 'assistant' %}{% generation %}{{- m.content | trim + '<end_of_turn>' }}"
        "{% endgeneration %}{{- '\\n' }}{%- else %}"
        "{{- (system if loop.first else '') + m.content | trim + '<end_of_turn>\\n' }}{%- endif %}",
    ),
    "phi3": (
        "{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}",
        "{{- '<|' + m.role + '|>\\n' }}{%- if m.role == 'assistant' %}{% generation %}{{- m.content + '<|end|>' }}"
        "{% endgeneration %}{%- else %}{{- m.content + '<|end|>' }}{%- endif %}{{- '\\n' }}",
    ),
}


def marked_template(name: str) -> str:
    plain, marked = MARKED[name]
    text = (Path(__file__).parent / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
    assert plain in text
    return text.replace(plain, marked)


def encoding_of(folder: Path, **settings: Any) -> RowEncoding:
    return RowEncoding("messages", load_tokenizer(folder), RowSettings(**settings))


def encode_one(encoding: RowEncoding, values: dict[str, Any]) -> Sample:
    (sample,) = encoding.encode([Row("line 1", values)])
    assert isinstance(sample, Sample), sample
    return sample


def refusal(encoding: RowEncoding, values: dict[str, Any]) -> str:
    (bad,) = encoding.encode([Row("line 1", values)])
    assert isinstance(bad, BadRow) and not bad.masked and bad.where == "line 1", bad
    return bad.reason


def decoded(encoding: RowEncoding, ids: Any) -> str:
    return encoding.tokenizer.engine.decode(ids.tolist(), skip_special_tokens=False)


def said(encoding: RowEncoding, sample: Sample) -> list[str]:
    assert sample.labels is not None
    targets = sample.labels != -100
    np.testing.assert_array_equal(sample.labels[targets], sample.ids[targets])
    edges = np.flatnonzero(np.diff(np.concatenate([[False], targets, [False]])))
    return [decoded(encoding, sample.ids[a:b]) for a, b in edges.reshape(-1, 2)]
