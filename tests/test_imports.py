"""Names that no type checker reads are there: what benches, tests and examples import, and the files in prose."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = sorted(file for folder in ("src", "bench", "examples", "tests") for file in (ROOT / folder).rglob("*.py"))
ELSEWHERE = {"qwen3_next_mtp.py", "deepseek_mtp.py", "nemotron_h_mtp.py"}  # vLLM's
FILE = re.compile(r"`([\w./-]+\.py|[\w.-]+/[\w./-]*/)`")
IMPORT = re.compile(r"^ *from ([\w.]+) import (\([^)]*\)|[^#\n]*)", re.MULTILINE)


@cache
def names_in(place: Path) -> set[str]:
    """The names of a file: what it defines, imports and assigns; of a package those of its files, too."""
    file, inside = place / "__init__.py" if place.is_dir() else place, set[str]()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            inside.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            inside |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name):
            inside.add(node.id)
        elif isinstance(node, ast.Constant) and file.name == "__init__.py":
            inside.add(str(node.value))  # names that are imported when they are asked for
    return inside | ({path.stem for path in place.iterdir()} if place.is_dir() else set())


def place_of(module: str, importer: Path) -> Path | None:
    """Where a module of longspan is, or one beside a bench, which is run as a file; None for those of others."""
    beside = importer.with_name(f"{module}.py")
    if module.partition(".")[0] == "longspan":
        folder = ROOT / "src" / Path(*module.split("."))
        return folder if (folder / "__init__.py").exists() else folder.with_suffix(".py")
    return beside if importer.is_relative_to(ROOT / "bench") and beside.exists() else None


def test_every_import_of_longspan_and_of_files_beside_benches_finds_its_name() -> None:
    wrong, seen = [], 0
    for path in (file for file in SOURCES if not file.is_relative_to(ROOT / "src")):
        for module, names in IMPORT.findall(path.read_text(encoding="utf-8")):
            if place := place_of(module, path):
                inside = names_in(place) if place.exists() else set()
                imported = re.findall(r"\w+", re.sub(r"\bas \w+|#.*|\\n|[\"']", "", names))
                wrong += [
                    f"{path.relative_to(ROOT)}: {module} has no {name}" for name in imported if name not in inside
                ]
                seen += 1
    assert seen > 1000 and not wrong, "\n".join(wrong)


def prose_of(text: str) -> Iterator[tuple[int, str]]:
    """The docstrings and comments of a program, with the line that each begins in."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def test_files_and_folders_in_docstrings_and_comments_exist() -> None:
    """`call.py`, `attention/call.py`, `attention/kernels/`; a single folder may be one of a run."""
    places = {f"/{path.relative_to(ROOT)}" for file in SOURCES for path in (file, file.parent)}
    wrong = []
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        for line, words in prose_of(text) if FILE.search(text) else ():
            names = set(FILE.findall(words)) - ELSEWHERE
            missing = [name for name in names if not any(place.endswith(f"/{name.rstrip('/')}") for place in places)]
            wrong += [f"{path.relative_to(ROOT)}:{line}: there is no {name}" for name in missing]
    assert not wrong, "\n".join(wrong)
