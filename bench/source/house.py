"""Measures of the source: lines and files by room, long functions, circles, and the modules that one call enters.

python bench/source/house.py                                  this checkout
python bench/source/house.py --against PATH_OF_ANOTHER        two checkouts beside each other, as bench/records/house.md

Code lines are those without blank lines, comments and docstrings. `attend` is called forward and backward once on two
processes (p2p), and once more, when the geometry of its shard is known.
"""

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ELLIPTIC = {"found", "own", "held", "given", "each", "kept", "told", "asked"}
KEYS = ("context_parallel_size", "cp_comm_type", "min_dynamic_context_parallel_size", "max_document_tokens", "lr")
CALL = """
import json, sys
import torch
from longspan import Layout, World, attend, bind, plan_fixed
from longspan.testing import run_ranks

def entered(q, shard):
    modules, deepest, depth = set(), 0, 0
    def see(frame, event, _):
        nonlocal deepest, depth
        name = frame.f_globals.get("__name__", "")
        if not name.startswith("longspan."):
            return
        if event == "call":
            modules.add(name)
            depth += 1
            deepest = max(deepest, depth)
        elif event == "return":
            depth -= 1
    sys.setprofile(see)
    attend(q, q, q, shard).sum().backward()
    sys.setprofile(None)
    return len(modules), deepest

def rank(_):
    home = Layout(ranks=2)
    with World(home) as world:
        plan = plan_fixed([64], home, cp=2)
        world.prepare(plan)
        shard = bind(plan.micro_batches[0], world)
        q = torch.rand(shard.local_rows, 2, 8, requires_grad=True)
        return entered(q, shard), entered(q, shard)

if __name__ == "__main__":
    print(json.dumps(run_ranks(rank, 2)[0]))
"""


@dataclass(frozen=True)
class Function:
    """One function of the source."""

    lines: int
    arguments: int
    elliptic: bool


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--against", type=Path, help="another checkout of longspan, measured before this one")
    flags.add_argument("--json", action="store_true")
    options = flags.parse_args()
    here = Path(__file__).parents[2]
    roots = [root for root in (options.against, here) if root is not None]
    measures = [measure(root.resolve()) for root in roots]
    print(json.dumps(measures, indent=2) if options.json else "\n".join(_tables(measures)))


def measure(root: Path) -> dict[str, Any]:
    """All figures of one checkout."""
    files = {path: ast.parse(path.read_text()) for path in sorted((root / "src/longspan").rglob("*.py"))}
    functions = [function for tree in files.values() for function in _functions(tree)]
    lengths = sorted(function.lines for function in functions)
    rooms: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for path, tree in files.items():
        inside = path.relative_to(root / "src/longspan").parts
        room = rooms[inside[0] if len(inside) > 1 else "(top)"]
        for i, number in enumerate((1, len(path.read_text().splitlines()), _code_lines(path, tree))):
            room[i] += number
    tests = sorted((root / "tests").rglob("*.py"))
    scripts = [*tests, *sorted((root / "bench").rglob("*.py"))]
    of_tests = [function for path in scripts for function in _functions(ast.parse(path.read_text()))]
    folders = Counter(path.parent for path in files if path.name != "__init__.py")
    return {
        "rooms": dict(sorted(rooms.items())),
        "figures": {
            "files": len(files),
            "lines": sum(room[1] for room in rooms.values()),
            "code lines": sum(room[2] for room in rooms.values()),
            "code lines of tests": sum(
                _code_lines(p, ast.parse(p.read_text())) for p in (root / "tests").rglob("*.py")
            ),
            "assertions in tests": sum(_assertions(p) for p in tests),
            "folders of more than 15 files": sum(count > 15 for count in folders.values()),
            "import circles": len(_circles(_imports(root, files))),
            "functions": len(functions),
            "lines of a function, median": lengths[len(lengths) // 2],
            "functions over 30 lines": sum(length > 30 for length in lengths),
            "functions over 6 arguments": sum(function.arguments > 6 for function in functions),
            "functions with an elliptic local, %": _elliptic_share(functions),
            "the same in tests and benches, %": _elliptic_share(of_tests),
            **_entered(root),
            **{f"files that name {key}": _files_naming(key, files) for key in KEYS},
        },
    }


def _elliptic_share(functions: list[Function]) -> float:
    return round(100 * sum(f.elliptic for f in functions) / len(functions), 1)


def _functions(tree: ast.Module) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            stored = {x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
            names = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            start = _body_start(node)
            yield Function((node.end_lineno or start) - start + 1, len(names), bool(stored & ELLIPTIC))


def _body_start(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The line of its first statement that is no docstring."""
    statements = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return statements[0].lineno if statements else (node.end_lineno or node.lineno)


def _code_lines(path: Path, tree: ast.Module) -> int:
    """Lines but for blank ones, comments and docstrings."""
    prose = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(path.read_text().splitlines(), 1)
    return sum(bool(line.strip()) and not line.strip().startswith("#") and n not in prose for n, line in lines)


def _assertions(path: Path) -> int:
    text = path.read_text()
    return len(re.findall(r"^\s*assert |pytest\.raises|assert_close|pytest\.warns", text, flags=re.MULTILINE))


def _imports(root: Path, files: dict[Path, ast.Module]) -> dict[str, set[str]]:
    """Which module imports which when it is loaded or run; imports for types alone are left out."""
    names = {_module(root, path): path for path in files}
    imports: dict[str, set[str]] = {name: set() for name in names}
    for name, path in names.items():
        for node in _at_run_time(files[path]):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("longspan"):
                for alias in node.names:
                    qualified = f"{node.module}.{alias.name}"
                    target = qualified if qualified in names else str(node.module)
                    if target in names and target != name and names[target].name != "__init__.py":
                        imports[name].add(target)
    return imports


def _module(root: Path, path: Path) -> str:
    return ".".join(path.relative_to(root / "src").with_suffix("").parts).removesuffix(".__init__")


def _at_run_time(tree: ast.Module) -> Iterator[ast.AST]:
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        waiting.extend(ast.iter_child_nodes(node))


def _circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """Sets of modules that all reach each other, by the modules that each can reach."""
    reached: dict[str, set[str]] = {}
    for name in imports:
        waiting, seen = list(imports[name]), set[str]()
        while waiting:
            module = waiting.pop()
            if module not in seen:
                seen.add(module)
                waiting.extend(imports[module])
        reached[name] = seen
    circles = [frozenset({b for b in reached[a] if a in reached[b]}) for a in imports if a in reached[a]]
    return [set(circle) for circle in dict.fromkeys(circles)]


def _entered(root: Path) -> dict[str, int]:
    """Modules whose code one call of attend runs, and how many of their frames lie over each other."""
    script = root / ".house_call.py"
    script.write_text(CALL)
    try:
        environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"}
        done = subprocess.run([sys.executable, str(script)], env=environment, cwd=root, capture_output=True, check=True)
    finally:
        script.unlink()
    (first, depth), (again, _) = json.loads(done.stdout.splitlines()[-1])
    return {"modules entered by attend": first, "modules entered, known shard": again, "frames deep": depth}


def _files_naming(key: str, files: dict[Path, ast.Module]) -> int:
    """Files of train/ and cli/ that name a configuration key."""
    rooms = {"train", "cli"}
    word = re.compile(rf"\b(eval_)?{key}\b")
    return sum(bool(word.search(p.read_text())) for p in files if rooms & set(p.parts[-4:]))


def _tables(measures: list[dict[str, Any]]) -> Iterator[str]:
    names = ["before", "now"][-len(measures) :]
    yield f"| figure | {' | '.join(names)} |"
    yield "| --- |" + " --- |" * len(names)
    for figure in measures[-1]["figures"]:
        yield f"| {figure} | {' | '.join(str(m['figures'][figure]) for m in measures)} |"
    yield ""
    yield f"| room: files, lines, code lines | {' | '.join(names)} |"
    yield "| --- |" + " --- |" * len(names)
    for room in sorted({room for m in measures for room in m["rooms"]}):
        cells = [", ".join(map(str, m["rooms"][room])) if room in m["rooms"] else "" for m in measures]
        yield f"| {room} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
