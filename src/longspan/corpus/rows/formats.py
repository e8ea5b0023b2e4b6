"""Rows of ShareGPT, Alpaca, UltraFeedback, Orca and LLaMA-Factory become rows with messages, or pairs with a prompt."""

import json
from collections.abc import Mapping
from typing import Any, cast

from longspan.config.preference_losses import RowForm
from longspan.corpus.rows.kinds import CHATS, KEYS, Kind, pair_prompt_key
from longspan.corpus.rows.messages import LEARNT, checked_messages, read_json_value, read_tools
from longspan.corpus.rows.preferences import pair_with_prompt
from longspan.corpus.rows.values import RowError, has_value, require_key, require_string, short_repr, type_name
from longspan.data.manifest import PAIRS

Values = Mapping[str, Any]
Message = dict[str, Any]
# Pairs have these prompts.
_CHAT_PROMPTS = ("conversations", "messages")
# ShareGPT's turns have these roles.
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}


def convert_format(values: Values, kind: Kind, preference: RowForm = "") -> Values:
    """Return a row with messages, or with prompt and answers: a pair without a prompt has what both answers begin with,
    and a chat for kto its last answer as the completion.

    Rows of other kinds are returned as they are. Raises RowError for a row that is not of its format.
    """
    if kind == PAIRS:
        values = _convert_pair(values)
        return pair_with_prompt(values) if preference else values
    if kind == "prompt+completion" and has_value(values.get("system")):
        return {**values, "prompt": _with_system(values.get("prompt"), values, "prompt")}
    if kind not in CHATS:
        return values
    values = _convert_chat(values, kind)
    if preference != "kto":
        return values
    *prompt, answer = _messages_under("messages", values)
    if answer.get("role") != "assistant":
        raise RowError(
            f"its last message is of {answer.get('role')}, and label judges an answer; end with the answer"
        )
    others = {key: value for key, value in values.items() if key != "messages"}
    return {**others, "prompt": prompt, "completion": [answer]}


def _convert_chat(values: Values, kind: Kind) -> Values:
    if kind == "conversations":
        messages = _with_system(read_turns(require_key(values, kind)), values, kind)
    elif kind == "instruction+output":
        answer = {"role": "assistant", "content": require_string(values.get("output") or "", "output")}
        messages = [*_with_system(_alpaca_prompt(values), values, "history"), answer]
    elif has_value(values.get("system")):
        return {**values, "messages": _with_system(values.get(kind), values, kind)}
    else:
        return values
    return _with_wrapped_tools({**values, "messages": messages})


def _convert_pair(values: Values) -> Values:
    chosen, rejected = (require_key(values, key) for key in KEYS[PAIRS])
    key = pair_prompt_key(values)
    if key is None:  # the answers begin with it
        answers = {name: _read_answer(values[name], name, is_chat=False) for name in KEYS[PAIRS]}
        return {**_values_beside_chats(values), **answers}
    for other in _CHAT_PROMPTS:
        if key != other and has_value(values.get(other)) and values[other] != chosen:
            raise RowError(
                f'"{other}" and "{key}" stand beside chosen and rejected, and one is the prompt: data.rename_columns = '
                f'["{other}="] takes {key}, and ["{key}="] takes {other}'
            )
    prompt = _with_system(_pair_prompt(values, key), values, key)
    chosen, rejected = (_read_answer(values[name], name, is_chat=key != "prompt") for name in KEYS[PAIRS])
    lists = isinstance(chosen, list) and isinstance(rejected, list)
    if isinstance(prompt, str) and lists and chosen[:1] == rejected[:1]:
        prompt = None  # a copy beside messages that begin with it, as ultrafeedback_binarized has it
    values = {**_values_beside_chats(values), "prompt": prompt, "chosen": chosen, "rejected": rejected}
    return values if key == "prompt" else _with_wrapped_tools(values)


def _values_beside_chats(values: Values) -> Values:
    return {key: value for key, value in values.items() if key not in _CHAT_PROMPTS}


def _pair_prompt(values: Values, key: str) -> Any:
    if key == "prompt":
        return values[key]
    if key == "conversations":
        messages = read_turns(values[key])
    elif key == "messages":
        messages = _messages_under(key, values)
    elif key == "question":
        messages = [{"role": "user", "content": require_string(values[key], key)}]
    else:
        messages = _alpaca_prompt(values)
    if messages[-1].get("role") == "assistant":
        raise RowError(
            f'"{key}" ends with an answer, and chosen and rejected are two others; end it with the question'
        )
    return messages


def _read_answer(value: Any, name: str, *, is_chat: bool) -> Any:
    if isinstance(value, dict):
        value = [value]
    elif is_chat and isinstance(value, str):
        value = [{"role": "assistant", "content": value}] if value.strip() else []
    if isinstance(value, list) and value and isinstance(value[0], dict) and "from" in value[0]:
        return read_turns(value, name)
    return value


def _with_system(messages: Any, values: Values, name: str) -> list[Message]:
    system = values.get("system")
    if not has_value(system):
        return messages
    if not isinstance(messages, list):
        columns = ["question=prompt"] if "chosen" in values else ["instruction=prompt", "output=completion"]
        raise RowError(
            f'"system" stands beside {name}, which is {type_name(messages)} that no template writes; '
            f"data.rename_columns = {json.dumps(columns)} makes a chat of them"
        )
    first = messages[0] if messages else None
    if isinstance(first, dict) and first.get("role") in ("system", "developer"):
        if first.get("content") == system:
            return messages
        raise RowError(
            f'"system" stands beside {name}, of which the first is a system message too; data.rename_columns = '
            '["system="] leaves the key out'
        )
    return [{"role": "system", "content": require_string(system, "system")}, *messages]


def _alpaca_prompt(values: Values) -> list[Message]:
    """Alpaca's history comes before the question."""
    texts = [require_string(values.get(key) or "", key) for key in ("instruction", "input")]
    history = read_json_value(values.get("history"), "history") or []
    messages = list[Message]()
    for i, pair in enumerate(history if isinstance(history, list) else [history]):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise RowError(f"history[{i}] is {short_repr(pair)}; give a list of pairs [question, answer]")
        messages += [
            {"role": role, "content": text} for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
    return [*messages, {"role": "user", "content": "\n".join(filter(None, texts))}]


def _messages_under(key: str, values: Values) -> list[Message]:
    """Images in the messages are not yet read."""
    messages = values.get(key)
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        checked_messages(messages, key)  # raises
    return cast(list[Message], messages)


def _with_wrapped_tools(values: Values) -> Values:
    """LLaMA-Factory's tools are the functions alone."""
    tools = read_tools(values.get("tools"))
    if tools is None:
        return values
    wrapped = [{"type": "function", "function": tool} if "name" in tool else tool for tool in tools]
    return {**values, "tools": wrapped}


def read_turns(turns: Any, name: str = "conversations") -> list[Message]:
    """Return turns of ShareGPT as messages. Raises RowError for turns of another form."""
    if not isinstance(turns, list) or not turns:
        raise RowError(f'"{name}" is {type_name(turns) if turns != [] else "empty"}; give a list of turns')
    return [_read_turn(turn, f"{name}[{i}]") for i, turn in enumerate(turns)]


def _read_turn(turn: Any, name: str) -> dict[str, Any]:
    if not isinstance(turn, dict) or not isinstance(turn.get("from"), str) or turn["from"] not in _ROLES:
        roles = ", ".join(_ROLES)
        hint = ""
        if "role" in str(turn):
            hint = ' (data.rename_columns = ["messages=conversations"] reads role and content)'
        raise RowError(
            f"{name} needs an object with from, one of {roles}, and value; found {short_repr(turn)}{hint}"
        )
    present = {key: value for key, value in turn.items() if value is not None and key not in ("from", "value")}
    if unknown := sorted(present.keys() - {*LEARNT}):
        raise RowError(f"{name}.{unknown[0]} is not read: a turn has from and value, perhaps {', '.join(LEARNT)}")
    message = {"role": _ROLES[turn["from"]], **present}
    if turn["from"] != "function_call":
        return {**message, "content": require_string(turn.get("value"), "value")}
    calls = read_json_value(turn.get("value"), f"{name}.value")
    calls = calls if isinstance(calls, list) else [calls]
    return {**message, "content": None, "tool_calls": [{"type": "function", "function": call} for call in calls]}
