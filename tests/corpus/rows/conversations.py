"""Conversations made from a seed: system prompts, tools, thoughts, several turns; and some that are made by hand."""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

Message = dict[str, Any]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
_WORDS = ("rain", "größer", "plan ✓", "Why?", "<b>", "a\nb", "{x}", "日本", "user", "assistant", "Zq0w")
_WORDS += ("\\n", '"q"', "\t.")


class Chat(NamedTuple):
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None

    @property
    def row(self) -> dict[str, Any]:
        return {"messages": self.messages} if self.tools is None else self._asdict()


def call(arguments: dict[str, Any], number: int = 0) -> dict[str, Any]:
    return {"type": "function", "id": f"call{number:05d}", "function": {"name": "weather", "arguments": arguments}}


def asks(text: str) -> Message:
    return {"role": "user", "content": text}


def says(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def text_parts(message: Message, *texts: str) -> Message:
    parts = texts or ([message["content"]] if message["content"] else ())
    return {**message, "content": [{"type": "text", "text": text} for text in parts]}


PLAIN = Chat([asks("One?"), says("1."), asks("Two?"), says("2.")])
THINKING = Chat([asks("One?"), says("1.", reasoning_content="hm one")])
THINKING.messages.extend([asks("Two?"), says("2.", reasoning_content="hm two")])
TOOLS = Chat(
    [
        {"role": "system", "content": "Be brief."},
        asks("Rain?"),
        says("", tool_calls=[call({"days": 2, "city": "Ulm"})]),
        {"role": "tool", "name": "weather", "tool_call_id": "call00000", "content": "dry"},
        says("No."),
    ],
    [TOOL],
)


def chats(number: int, *, tools: bool = True, calls: int = 9, seed: int = 16) -> Iterator[Chat]:
    draw = random.Random(seed)
    for i in range(number):
        with_tools = tools and i % 3 == 1
        thinks = i % 2 == 1
        messages = [{"role": "system", "content": _text(draw)}] if draw.random() < 0.4 else []
        for _ in range(draw.randint(1, 4)):
            called = sum("tool_calls" in message for message in messages)
            may_call = with_tools and called < calls and draw.random() < 0.7
            messages += _turn(draw, with_tools=may_call, thinks=thinks)
        yield Chat(messages, [TOOL] if with_tools else None)


def _turn(draw: random.Random, *, with_tools: bool, thinks: bool) -> list[Message]:
    thought = {"reasoning_content": _text(draw)} if thinks else {}
    turn: list[Message] = [asks(_text(draw))]
    if with_tools:
        arguments = draw.choice([{"city": _text(draw)}, {"city": _text(draw), "days": 2}, {}])
        number = draw.randint(0, 99999)
        turn.append({"role": "assistant", "content": "", "tool_calls": [call(arguments, number)], **thought})
        turn.append({"role": "tool", "name": "weather", "tool_call_id": f"call{number:05d}", "content": _text(draw)})
    return [*turn, says(_text(draw), **thought)]


def _text(draw: random.Random) -> str:
    return " ".join(draw.choice(_WORDS) for _ in range(draw.randint(1, 6))).strip()
