"""`longspan upgrade`: rewrite a configuration file of version 0.3 with the keys of now; comments stay."""

import json
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from longspan.cli.flags import Word, parse_flags
from longspan.config.renamed import (
    GONE,
    OLD_SETS,
    RENAMED,
    REPLACING,
    SETS,
    gone_keys_of_sets,
    renamed_value,
    upgraded_tables,
)
from longspan.errors import ConfigError, plural
from longspan.files import write_atomically

NOT_CARRIED_OVER = "; not carried over: "


@dataclass(frozen=True)
class UpgradeFlags:
    """Rewrite a configuration of version 0.3 with the keys of now. Comments stay; a file that has the keys of now is
    left as it is.

    longspan upgrade run.toml                    rewrite it, and say what changed

    longspan upgrade run.toml --dry-run          print the new text, and what changed on standard error
    """

    file: Annotated[str, Word("FILE.toml", "a configuration file", "run.toml")]
    """The configuration file."""
    dry_run: bool = False
    """Print the new text, and write nothing."""


def main(argv: Sequence[str]) -> int:
    """Run the verb; returns 0."""
    flags = parse_flags(UpgradeFlags, argv, "longspan upgrade")
    path = Path(flags.file)
    try:
        text = path.read_text(encoding="utf-8")
        new_text, changes = upgrade_text(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}; give a configuration file in TOML") from error
    if flags.dry_run:
        print(new_text, end="", flush=True)
    elif changes:
        write_atomically(path, new_text)
    lost = [change.partition(" is gone")[0] for change in changes if NOT_CARRIED_OVER in change]
    summary = f"{path}: {plural(len(changes), 'change')}"
    if lost:
        summary += f"; not carried over: {', '.join(lost)}, see above what to write in their place"
    print("\n".join([*changes, summary]), file=sys.stderr if flags.dry_run else sys.stdout)
    return 0


def upgrade_text(text: str) -> tuple[str, list[str]]:
    """Return the text of a configuration with the keys of now, and a line for each change.

    >>> upgrade_text('[train]\\nmemory = "none"  # by hand\\n')
    ('[train]\\nplan_memory = false  # by hand\\n', ['train.memory is train.plan_memory = false'])

    Raises ConfigError for a file that gives a key twice, or whose keys do not stand below [section]; ValueError
    for a text that is not TOML.
    """
    import tomlkit
    from tomlkit.items import InlineTable, Table

    tables = tomllib.loads(text)
    sets = tables.get(OLD_SETS, [])
    if not isinstance(sets, list) or not all(isinstance(table, Mapping) for table in sets):
        raise ConfigError(f"{OLD_SETS} is {sets!r}; give tables, each below a line [[{OLD_SETS}]]")
    named_tables = {name: table for name, table in tables.items() if isinstance(table, Mapping) or name == OLD_SETS}
    changes = list(_list_changes(named_tables))
    if not changes:
        return text, []
    if names := [name for name in tables if name not in named_tables]:
        raise ConfigError(f"{names[0]} is {tables[names[0]]!r}; give a table, with its keys below [{names[0]}]")
    given_keys = {
        f"{section}.{key}" for section, table in tables.items() if isinstance(table, Mapping) for key in table
    }
    if OLD_SETS in tables:
        given_keys.add(OLD_SETS)
    renamed = {OLD_SETS: SETS} | RENAMED
    if twice := [f"{old} and {renamed[old]}" for old in renamed if {old, renamed[old]} <= given_keys]:
        raise ConfigError(f"the file gives a key by its old and its new name: {', '.join(twice)}; leave one out")
    document = tomlkit.parse(text)  # with its comments, in contrast to `tables`
    moved = dict[str, Any]()  # tables of keys that belong to another section now, by that section
    for section in [name for name, table in document.items() if isinstance(table, Table)]:
        _rename_keys(document, section, moved)
    old_sets = document.pop(OLD_SETS, None)  # is appended at the end, under its new name
    if gone := [key.removeprefix(f"{OLD_SETS}.") for key in gone_keys_of_sets(tables)]:
        for table in (*(old_sets or ()), *document.get("evaluation", {}).get("sets", ())):
            for key in [key for key in table if key in gone]:
                table.remove(key)
    for section, items in moved.items():
        if section not in document:
            document.add(tomlkit.nl())
            document.add(section, tomlkit.table())
        for key, item in items.value.body:
            document[section].append(key, item)
    upgraded = upgraded_tables(tables)
    # keys whose value stands in place of a key that is gone
    for section, _, key in (name.partition(".") for name in REPLACING):
        if (value := upgraded.get(section, {}).get(key)) != document.get(section, {}).get(key):
            document.setdefault(section, tomlkit.table())[key] = value
    new_text = tomlkit.dumps(document).rstrip("\n") + "\n"
    for table in old_sets or ():
        is_inline = isinstance(table, InlineTable)  # of eval = [{...}]
        new_text += f"\n[[{SETS}]]\n{tomlkit.dumps(table.unwrap() if is_inline else table).strip()}\n"
    with suppress(tomllib.TOMLDecodeError):
        if tomllib.loads(new_text) == upgraded:
            return new_text, changes
    # such as dotted keys or inline tables, which are not rewritten
    raise ConfigError(
        "this file's keys stand in another form than key = value below [section]: change them by hand"
    )


def _list_changes(tables: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each key of a file's `tables` that has another name or value now, or is gone."""
    for section, table in tables.items():
        for key, value in table.items() if isinstance(table, Mapping) else ():
            old = f"{section}.{key}"
            new = RENAMED.get(old, old)
            if new in GONE:
                others = {**tables, section: {name: v for name, v in table.items() if name != key}}
                yield f"{old} is gone: {GONE[new]}{_what_became_of(value, tables, others)}"
                continue
            new_value = renamed_value(new, value)
            if new != old or new_value != value:
                yield f"{old} is {new}" + (f" = {str(new_value).lower()}" if new_value != value else "")
    for key in gone_keys_of_sets(tables):
        yield f"{key} is gone: {GONE[key]}"
    if OLD_SETS in tables:
        yield f"[[{OLD_SETS}]] is [[{SETS}]]"


def _what_became_of(value: object, tables: Mapping[str, Any], others: Mapping[str, Any]) -> str:
    """Say which keys stand for the value of a key that is gone, or that none does; "" for a value that changed nothing.
    `others` are the file's `tables` without that key.
    """
    upgraded = upgraded_tables(tables)
    without = upgraded_tables(others)
    for name in REPLACING:
        section, _, key = name.partition(".")
        if (written := upgraded.get(section, {}).get(key)) != without.get(section, {}).get(key):
            return f"; written: {name} = {json.dumps(written)}"
    if value in (False, 0, "", [], [0.9, 0.95]):
        return ""
    return f"{NOT_CARRIED_OVER}{json.dumps(value, default=str)}"


def _rename_keys(document: Any, section: str, moved: dict[str, Any]) -> None:
    """Replace a section of a tomlkit document by one with the keys of now; it is removed if no key is left.

    Keys that belong to other sections now, with the comments right above them, are added to `moved`, tables by section.
    """
    import tomlkit
    from tomlkit.items import Comment

    table = tomlkit.table()
    comments = list[Any]()
    for key, item in document[section].value.body:
        if isinstance(item, Comment):
            comments.append(item)
            continue
        new_section = section
        name = None  # of an empty line, which has no key
        if key is not None:
            old = f"{section}.{key.key}"
            new = RENAMED.get(old, old)
            if new in GONE:
                continue
            new_section, _, name = new.partition(".")
            value = item.unwrap()
            if (new_value := renamed_value(new, value)) != value:
                new_item = tomlkit.item(new_value)
                new_item.trivia.comment_ws = item.trivia.comment_ws
                new_item.trivia.comment = item.trivia.comment
                item = new_item
        place = table if new_section == section else moved.setdefault(new_section, tomlkit.table())
        for comment in comments:
            place.add(comment)
        comments = []
        place.append(name, item)
    for comment in comments:
        table.add(comment)
    if any(key is not None for key, _ in table.value.body):
        document[section] = table
    else:
        document.remove(section)
