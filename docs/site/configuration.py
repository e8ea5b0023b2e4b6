"""The page docs/configuration.md, made from the sections of the configuration: every key with type, default and text.

python docs/site/configuration.py
"""

import inspect
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from longspan.cli.train_flags import OFTEN
from longspan.config.file import TABLES
from longspan.config.keys import Key, section_keys, section_texts
from longspan.config.sections import section_kinds
from longspan.config.values import annotation_text

_HEAD = """\
# Configuration

A run of `longspan train` is configured by a TOML file, by flags, or by both; a flag wins over the file. Every key of
this page is a key of its section in the file, and, except those of [[data.sources]] and [[evaluation.sets]], a flag:

```toml
[train]
steps = 50
```

```bash
longspan train examples/first.toml --train.steps 50
```

A flag of a list takes commas and spaces alike, as in `--lora.target_modules q_proj,k_proj`; the
[page on flags](reference/verbs.md) names the lists whose values may hold a comma.

The resolved configuration is written to the run's folder as `config.toml`. An unknown section, key or value is an error
that names the nearest known one. Whether values fit together, and fit the number of ranks, is checked before any
process is started ([limits.md](limits.md#training) lists what is refused).

`longspan train --help-all` shows the same texts. This page is made from them:
`python docs/site/configuration.py`.

## Keys that most runs set

Long-context training of a model of your own needs these twelve. The part before the dot is the section.
"""
_RARELY = """\
## Rarely

The other keys, by section. Their defaults suit most runs.
"""
_COLUMNS = ("| key | type | default | meaning |", "|---|---|---|---|")


def reference_page() -> str:
    """Write the page, in Markdown: a table of the keys that most runs set, and one of the others of each section."""
    kinds = section_kinds()
    common_rows = [_key_row(name, kinds[name.partition(".")[0]], name.partition(".")[2]) for name in OFTEN]
    shown = (*OFTEN, *TABLES)
    others = {
        name: [key for key in section_keys(kind) if f"{name}.{key.name}" not in shown] for name, kind in kinds.items()
    }
    sections = (_section_text(f"[{name}]", kind, others[name]) for name, kind in kinds.items())
    tables = (_section_text(f"[[{name}]]", kind, section_keys(kind)) for name, kind in TABLES.items())
    return "\n".join([_HEAD, *_COLUMNS, *common_rows, "", _RARELY, *sections, *tables])


def _section_text(title: str, kind: Any, keys: Iterable[Key]) -> str:
    """Write a section or table: its title, its docstring, and a table of these keys."""
    rows = [_key_row(key.name, kind, key.name) for key in keys]
    return "\n".join([f"### {title}", "", inspect.getdoc(kind) or "", "", *_COLUMNS, *rows, ""])


def _key_row(title: str, kind: type, name: str) -> str:
    """Write the row of the key `name` of a section, whose first cell is `title`."""
    (key,) = (key for key in section_keys(kind) if key.name == name)
    limit = "" if key.bound is None else f", {key.bound}"
    text = section_texts(kind)[name]
    default = "*see text*" if "Default: " in text else f"`{json.dumps(key.default, ensure_ascii=False)}`"
    cells = f"`{title}`", annotation_text(key.kind) + limit, default, text
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    Path(__file__).resolve().parents[1].joinpath("configuration.md").write_text(reference_page(), encoding="utf-8")
