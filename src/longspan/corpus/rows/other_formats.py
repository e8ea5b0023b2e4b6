"""Rows in the formats of ShareGPT and Alpaca become rows with messages."""

from collections.abc import Mapping
from typing import Any

from longspan.corpus.rows.kinds import Kind
from longspan.corpus.rows.messages import LEARNT, read_json_value
from longspan.corpus.rows.values import RowError, require_string, short_repr, type_name

_ROLES = {  # of ShareGPT's turns
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}


def convert_to_messages(values: Mapping[str, Any], kind: Kind) -> Mapping[str, Any]:
    """Return a row of ShareGPT's or Alpaca's kind as one with messages, and any other as it is.

    Raises RowError for turns that are not of their format.
    """
    if kind == "conversations":
        turns = values["conversations"]
        if not isinstance(turns, list) or not turns:
            raise RowError(
                f'"conversations" is {type_name(turns) if turns != [] else "empty"}; give a list of turns'
            )
        messages = [_read_turn(turn, f"conversations[{i}]") for i, turn in enumerate(turns)]
    elif kind == "instruction+output":
        texts = [require_string(values.get(key) or "", key) for key in ("instruction", "input", "output")]
        question = "\n".join(filter(None, texts[:2]))
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": texts[2]}]
    else:
        return values
    return {**values, "messages": messages}


def _read_turn(turn: Any, name: str) -> dict[str, Any]:
    """Return a turn of ShareGPT, which errors call `name`, as a message. Raises RowError for a turn of another form."""
    if not isinstance(turn, dict) or turn.get("from") not in _ROLES:
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
