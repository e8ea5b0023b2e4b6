"""Measures of the source: lines and files by room, long functions, names, circles, and the modules that a call enters.

python bench/source/house.py                                  this checkout
python bench/source/house.py --against PATH_OF_ANOTHER        two checkouts in one table, as bench/records/house-2.md
python bench/source/house.py --check                          the names of functions and locals, as in `make check`
python bench/source/house.py --draw 20261124                  30 functions at random, to read and judge

Code lines are those without blank lines, comments and docstrings. `attend` is called forward and backward once on two
processes (p2p), and once more, with the geometry of its shard cached. A text step is the second `run_step` of a tiny
Qwen3 on two processes; modules of `attention/` do not count.
"""

import argparse
import ast
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ELLIPTIC = {"found", "own", "held", "given", "each", "kept", "told", "asked"}
KEYS = ("context_parallel_size", "cp_comm_type", "max_tokens_per_slot", "max_document_tokens", "lr", "encoder.tp")
# Words that are no names: a local is named after the thing, a function after its action (verb, object) or its result.
BANNED_LOCALS = frozenset("found own held given kept told asked said wanted what".split())  # noqa: SIM905
PARTICIPLES = frozenset(
    [
        "found",
        "held",
        "kept",
        "made",
        "taken",
        "given",
        "built",
        "chosen",
        "drawn",
        "written",
        "known",
        "seen",
        "said",
        "told",
        "sent",
        "shown",
        "left",
        "lost",
        "done",
        "begun",
        "broken",
        "brought",
        "bound",
        "caught",
        "dealt",
        "gone",
        "got",
        "grown",
        "heard",
        "hidden",
        "led",
        "meant",
        "met",
        "paid",
        "spent",
        "taught",
        "thrown",
        "understood",
        "won",
    ]
)
# Words of the field that only look like participles, and adjectives that are part of a term.
TERMS = frozenset(
    [
        "need",
        "seed",
        "feed",
        "speed",
        "embed",
        "shared",
        "gated",
        "chunked",
        "packed",
        "sharded",
        "fixed",
        "padded",
        "masked",
        "fused",
        "ragged",
        "batched",
        "tied",
        "quantized",
    ]
)
PREPOSITIONS = frozenset(
    "of for by in at before after above under over without along between behind beyond into".split()  # noqa: SIM905
)
VARIANTS = ("for_", "at_")  # methods that return a variant of their object: cost.for_partition(…), choice.at_degree(2)
ALLOWED = frozenset(
    [
        # names that users rely on
        *(
            "received_rows",
            "sent_rows",
            "predicted_seconds",
            "summed_cross_entropy",
            "under",
            "known",
            "without_adapter",
            "added_seconds",
        ),
        # a field of files that runs write
        "measured_for",
        # torch's own names, which ours replace
        "named_modules",
        # values: the adjective of a noun
        *("arrived_gradients", "arrived_gradients_kernel", "cached_plan", "called_functions", "counted_parameters"),
        *("gathered_bytes", "gathered_numbers", "held_out", "held_out_documents", "held_out_set", "left_out_lines"),
        *("marked_spans", "named_paths", "needed_bytes", "received_signal", "saved_dtype", "saved_weights"),
        *("shuffled_sample", "shuffled_sources", "unused_bytes", "wasted_steps", "configured_tokenizer"),
    ]
)
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


TEXT_STEP = """
import json, sys
import torch
from longspan import Layout, World, plan_fixed, prepare, run_step
from longspan.model import preset_config
from longspan.testing import run_ranks

def rank(_):
    from transformers import AutoModelForCausalLM
    torch.manual_seed(0)
    home = Layout(ranks=2)
    with World(home) as world:
        model = prepare(AutoModelForCausalLM.from_config(preset_config("qwen3-tiny", vocab_size=64)), world)
        optimizer = torch.optim.AdamW(model.parameters())
        documents = [torch.arange(1, 65) % 50, torch.arange(1, 33) % 50]
        plan = plan_fixed([64, 32], home, cp=2)
        run_step(model, plan, documents, world, optimizer)
        modules = set()
        def see(frame, event, _):
            name = frame.f_globals.get("__name__", "")
            if event == "call" and name.startswith("longspan.") and not name.startswith("longspan.attention"):
                modules.add(name)
        sys.setprofile(see)
        run_step(model, plan, documents, world, optimizer)
        sys.setprofile(None)
        return sorted(modules)

if __name__ == "__main__":
    print(json.dumps(run_ranks(rank, 2)[0]))
"""


@dataclass(frozen=True)
class Function:
    """One function of the source."""

    name: str
    lines: int
    arguments: int
    locals: frozenset[str]


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--against", type=Path, help="another checkout of longspan, measured before this one")
    flags.add_argument("--json", action="store_true")
    flags.add_argument("--check", action="store_true", help="print names that are not allowed, and exit 1")
    flags.add_argument("--draw", type=int, metavar="SEED", help="print 30 functions of more than 4 lines, at random")
    options = flags.parse_args()
    if options.draw is not None:
        print(*draw_functions(Path(__file__).parents[2], options.draw), sep="\n")
        return
    if options.check:
        sys.exit(check_names(Path(__file__).parents[2]))
    here = Path(__file__).parents[2]
    roots = [root for root in (options.against, here) if root is not None]
    measures = [measure(root.resolve()) for root in roots]
    print(json.dumps(measures, indent=2) if options.json else "\n".join(_tables(measures)))


def draw_functions(root: Path, seed: int) -> list[str]:
    """Path, line and name of 30 functions and methods of more than 4 lines, drawn from all in that order."""
    functions = [
        (str(path.relative_to(root)), node.lineno, node.name)
        for path in (root / "src/longspan").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno + 1 > 4
    ]
    return [f"{path}:{line} {name}" for path, line, name in random.Random(seed).sample(sorted(functions), 30)]


def check_names(root: Path) -> int:
    """Print each function and local with a banned name; returns 1 if there are any."""
    complaints = list[str]()
    for path in sorted((root / "src/longspan").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            place = f"{path.relative_to(root)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if kind := _fault(node.name):
                    complaints.append(f"{place}: function {node.name} {kind}")
                for name in ast.walk(node):
                    if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store) and name.id in BANNED_LOCALS:
                        complaints.append(f"{path.relative_to(root)}:{name.lineno}: local {name.id}; name the thing")
    print(*complaints, f"{len(complaints)} names to better (verb and object, or the noun of the result)", sep="\n")
    return int(bool(complaints))


def _fault(name: str) -> str:
    """The fault of a function's name; "" if it has none."""
    first = name.strip("_").split("_")[0]
    if name.startswith(("__", *VARIANTS)) or name == "of" or name.strip("_") in ALLOWED:
        return ""
    if first in PARTICIPLES or (len(first) > 3 and first.endswith("ed") and first not in TERMS):
        return "begins with a participle"
    return "begins with a preposition" if first in PREPOSITIONS else ""


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
    imports = _imports(root, files)
    importers = Counter(module for modules in imports.values() for module in modules)
    sizes = {path: len(path.read_text().splitlines()) for path in files if path.name != "__init__.py"}
    single = [path for path in sizes if importers[_module(root, path)] == 1]
    banned = sum(
        isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store) and x.id in BANNED_LOCALS
        for tree in files.values()
        for x in ast.walk(tree)
    )
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
            "files over 330 lines": sum(lines > 330 for lines in sizes.values()),
            "files under 40 lines": sum(lines < 40 for lines in sizes.values()),
            "files with one importer": len(single),
            "files with one importer, under 70 lines": sum(sizes[path] < 70 for path in single),
            "import circles": len(_circles(imports)),
            "functions": len(functions),
            "lines of a function, median": lengths[len(lengths) // 2],
            "functions over 30 lines": sum(length > 30 for length in lengths),
            "functions over 6 arguments": sum(function.arguments > 6 for function in functions),
            "functions with an elliptic local, %": _elliptic_share(functions),
            "the same in tests and benches, %": _elliptic_share(of_tests),
            "functions that begin with a participle": sum("participle" in _fault(f.name) for f in functions),
            "functions that begin with a preposition": sum("preposition" in _fault(f.name) for f in functions),
            "functions that end in _of": sum(function.name.endswith("_of") for function in functions),
            "banned words as locals": banned,
            **_entered(root),
            **{f"files that name {key}": _files_naming(key, files) for key in KEYS},
        },
    }


def _elliptic_share(functions: list[Function]) -> float:
    return round(100 * sum(bool(f.locals & ELLIPTIC) for f in functions) / len(functions), 1)


def _functions(tree: ast.Module) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            stored = {x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
            names = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            start = _body_start(node)
            yield Function(node.name, (node.end_lineno or start) - start + 1, len(names), frozenset(stored))


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
    """Modules that one call of attend and one text step enter, and how many frames lie over each other in attend."""
    (first, depth), (again, _) = _run_script(root, CALL)
    return {
        "modules entered by attend": first,
        "modules entered, cached shard": again,
        "frames deep": depth,
        "modules entered by a text step outside attention": len(_run_script(root, TEXT_STEP)),
    }


def _run_script(root: Path, text: str) -> Any:
    """The last line that a script prints under the package of a checkout, as JSON."""
    script = root / ".house_call.py"
    script.write_text(text)
    try:
        environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"}
        done = subprocess.run([sys.executable, str(script)], env=environment, cwd=root, capture_output=True, check=True)
    finally:
        script.unlink()
    return json.loads(done.stdout.splitlines()[-1])


def _files_naming(key: str, files: dict[Path, ast.Module]) -> int:
    """Files outside plan/ and bench/ that name a configuration key or its twin for evaluation."""
    word = re.compile(rf"\b(eval_)?{re.escape(key)}\b")
    return sum(bool(word.search(p.read_text())) for p in files if not {"plan", "bench"} & set(p.parts))


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
