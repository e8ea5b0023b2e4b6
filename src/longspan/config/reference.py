"""The page docs/configuration.md, made from the configuration's dataclasses: every key with its type, default and text.

python -m longspan.config.reference docs/configuration.md
"""

import ast
import inspect
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

from longspan.config.bounds import AtLeast, bounds_of
from longspan.config.eval_set import EvalConfig
from longspan.config.file import TABLES, kind_text
from longspan.config.sections import SourceConfig, section_kinds

_HEAD = """\
# Configuration

A run of `longspan train` is configured by a TOML file, by flags, or by both; a flag wins over the file. Every key of
this page is a key of its section in the file, and, but for those of [[data.sources]] and [[eval]], a flag:

```toml
[train]
steps = 50
```

```bash
longspan train examples/first.toml --train.steps 50
```

The resolved configuration is written to the run's folder as `config.toml`. An unknown section, key or value is an error
that names the nearest known one. Whether values fit together, and fit the number of ranks, is checked before any
process is started ([limits.md](limits.md#training) lists what is refused).

`longspan train --help` shows the same texts. This page is made from them:
`python -m longspan.config.reference docs/configuration.md`.
"""


def reference() -> str:
    """The whole page, in Markdown: a table for each section."""
    sections = (_section(f"[{name}]", kind) for name, kind in section_kinds().items())
    arrays = (_section(f"[[{TABLES}]]", SourceConfig), _section("[[eval]]", EvalConfig))
    return "\n".join([_HEAD, *sections, *arrays])


def _section(title: str, kind: Any) -> str:
    hints, texts, bounds = get_type_hints(kind), _texts_of(kind), bounds_of(kind)
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for field in fields(kind):
        if f"{title[1:-1]}.{field.name}" == TABLES:
            continue
        bound = bounds.get(field.name)
        limit = "" if bound is None else f", {'at least' if isinstance(bound, AtLeast) else 'above'} {bound.value}"
        default = f"`{json.dumps(field.default, ensure_ascii=False)}`"
        if "Default: " in (text := texts[field.name]):  # it depends on the model
            default = "*see text*"
        cells = f"`{field.name}`", kind_text(hints[field.name]) + limit, default, text
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([f"## {title}", "", inspect.getdoc(kind) or "", "", *rows, ""])


def _texts_of(kind: type) -> dict[str, str]:
    """The text under each key of a section, from the source."""
    (section,) = (
        node
        for node in ast.parse(Path(inspect.getfile(kind)).read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    )
    texts: dict[str, str] = {}
    for key, text in zip(section.body, section.body[1:], strict=False):
        if isinstance(key, ast.AnnAssign) and isinstance(key.target, ast.Name):
            assert isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant), f"{key.target.id} has no text"
            texts[key.target.id] = " ".join(str(text.value.value).split())
    return texts


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference(), encoding="utf-8")
