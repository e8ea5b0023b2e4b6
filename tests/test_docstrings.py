"""Examples in docstrings: each calls what it documents, and those of rooms without torch give what they say."""

import ast
import doctest
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

import longspan
from longspan import layout, plan

ROOT = Path(longspan.__file__).parent
WITHOUT_TORCH = ("config", "data", "errors", "files", "hub", "layout", "plain_text", "plan", "report", "versions")
NAMES: dict[str, Any] = {"np": np} | {name: getattr(room, name) for room in (layout, plan) for name in room.__all__}

Documented = ast.FunctionDef | ast.ClassDef


def public_examples(node: ast.AST) -> Iterator[tuple[Documented, str]]:
    """The public functions and classes inside a node whose docstrings have examples, each with their lines."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Documented) and not child.name.startswith("_"):
            lines = (ast.get_docstring(child) or "").splitlines()
            if example := "\n".join(line for line in lines if line.lstrip().startswith((">>>", "..."))):
                yield child, example
            yield from public_examples(child)


def names_of(documented: Documented) -> set[str]:
    """What an example may call: the name itself; of a class also its methods, as other functions may make the value."""
    members = documented.body if isinstance(documented, ast.ClassDef) else []
    return {documented.name.lower(), *(member.name for member in members if isinstance(member, ast.FunctionDef))}


def test_each_example_calls_what_it_documents() -> None:
    wrong, seen = [], 0
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for documented, example in public_examples(ast.parse(text)) if ">>>" in text else ():
            seen += 1
            if not names_of(documented).intersection(re.findall(r"\w+", example.lower())):
                wrong.append(
                    f"{path.relative_to(ROOT)}:{documented.lineno}: the example of {documented.name} has no call of it"
                )
    assert seen > 150 and not wrong, "\n".join(wrong)


def test_examples_without_torch_give_what_they_say() -> None:
    failed, tried = [], 0
    for path in sorted(ROOT.rglob("*.py")):
        module = path.relative_to(ROOT).with_suffix("")
        if module.parts[0] in WITHOUT_TORCH and ">>>" in path.read_text(encoding="utf-8"):
            name = ".".join(("longspan", *module.parts)).removesuffix(".__init__")
            outcome = doctest.testmod(import_module(name), extraglobs=NAMES)
            tried += outcome.attempted
            failed += [name] * bool(outcome.failed)
    assert tried > 80 and not failed
