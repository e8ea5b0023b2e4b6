"""Rows of other formats as rows with messages: ShareGPT and Alpaca; and columns under other names (`data.columns`)."""

from collections.abc import Mapping, Sequence
from typing import Any

from longspan.corpus.rows.kinds import Kind
from longspan.corpus.rows.messages import LEARNT, read_json_value
from longspan.corpus.rows.sample import Row, RowError, preview, require_string, type_name

_ROLES = {  # of ShareGPT's turns
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}


def rename_columns(row: Row, columns: Sequence[str]) -> Row:
    """Give columns of a row the names that are read here, by entries OURS=THEIRS; with OURS= the column is left out."""
    if not columns:
        return row
    pairs = [(ours, theirs) for ours, _, theirs in (column.partition("=") for column in columns)]
    gone = {name for pair in pairs for name in pair}
    values = {key: value for key, value in row.values.items() if key not in gone}
    return row._replace(values=values | {ours: row.values[theirs] for ours, theirs in pairs if theirs in row.values})


def read_chat(values: Mapping[str, Any], kind: Kind) -> Mapping[str, Any]:
    """Return a row of a kind of chats as one with messages. Raises RowError for turns that are not of its format."""
    if kind == "conversations":
        turns = values["conversations"]
        if not isinstance(turns, list) or not turns:
            raise RowError(f'"conversations" is {type_name(turns) if turns != [] else "empty"}; give a list of turns')
        messages = [_read_turn(turn, f"conversations[{i}]") for i, turn in enumerate(turns)]
    elif kind == "instruction+output":
        texts = [require_string(values.get(key) or "", key) for key in ("instruction", "input", "output")]
        question = "\n".join(filter(None, texts[:2]))
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": texts[2]}]
    else:
        return values
    return {**values, "messages": messages}


def _read_turn(turn: Any, name: str) -> dict[str, Any]:
    if not isinstance(turn, dict) or turn.get("from") not in _ROLES:
        roles = ", ".join(_ROLES)
        hint = ' (data.columns = ["messages=conversations"] reads role and content)' * ("role" in str(turn))
        raise RowError(f"{name} needs an object with from, one of {roles}, and value; found {preview(turn)}{hint}")
    present = {key: value for key, value in turn.items() if value is not None and key not in ("from", "value")}
    if unknown := sorted(present.keys() - {*LEARNT}):
        raise RowError(f"{name}.{unknown[0]} is not read: a turn has from and value, perhaps {', '.join(LEARNT)}")
    message = {"role": _ROLES[turn["from"]], **present}
    if turn["from"] != "function_call":
        return {**message, "content": require_string(turn.get("value"), "value")}
    calls = read_json_value(turn.get("value"), f"{name}.value")
    calls = calls if isinstance(calls, list) else [calls]
    return {**message, "content": None, "tool_calls": [{"type": "function", "function": call} for call in calls]}
