"""What benches, tests and examples import of longspan is there; pyright reads the sources alone."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent


@cache
def names_of(module: str) -> set[str] | None:
    """What a module of longspan has, as its text says; None where there is none."""
    place = ROOT / "src" / Path(*module.split("."))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    if not file.exists():
        return None
    inside = {path.stem for path in place.iterdir()} if place.is_dir() else set[str]()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            inside.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            inside |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name):
            inside.add(node.id)
        elif isinstance(node, ast.Constant) and file.name == "__init__.py":
            inside.add(str(node.value))  # names that are imported when they are asked for
    return inside


def test_every_import_of_longspan_finds_its_name() -> None:
    wrong = []
    for path in sorted(file for folder in ("bench", "examples", "tests") for file in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "longspan":
                found = names_of(node.module or "")
                missing = [alias.name for alias in node.names if found is None or alias.name not in found]
                wrong += [f"{path.relative_to(ROOT)}:{node.lineno}: {node.module} has no {name}" for name in missing]
    assert not wrong, "\n".join(wrong)
