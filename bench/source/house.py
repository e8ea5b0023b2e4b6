"""Measures of the source: tokens of code, text, circles, what surrounds it, functions that a call enters.

Tokens are what a reader reads: names, numbers, texts and signs, without docstrings, comments and layout. Totals
(tokens, lines, files, functions) are printed and not limited, since what is saved in them comes back as density.
Limited is what a reader or a change pays for: lines of docstrings of private functions, comments at a line's end that
begin in the middle of a sentence, and the files outside config/ in which each of eight keys of memory is named.

python bench/source/house.py                    how much there is, as `make size`
python bench/source/house.py --entered          beside it how many functions four calls go through
python bench/source/house.py --check --entered  names and measures that are not allowed, as in `make check`
"""

import argparse
import ast
import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/longspan"
# A function is named after its action (verb, object) or its result.
PREPOSITIONS = frozenset(
    {"of", "for", "by", "in", "at", "before", "after", "above", "under", "over", "without", "along", "between"}
)
VARIANTS = ("for_", "at_")  # methods that return a variant of their object: cost.for_partition(…), choice.at_degree(2)
ALLOWED = frozenset({"of", "under", "disable_adapter"})  # names that users rely on
SMALL = 6  # lines of a body: a function that is smaller and named once stands in its caller
ROOM = 1.01  # a measure may pass the figure of pyproject.toml by one percent, before somebody raises it with a reason
# Words with which a comment at the end of a line goes on with the code's own sentence.
MIDDLE = re.compile(
    r"#[\s(]*("
    "of|to|in|on|at|by|for|from|with|without|into|onto|over|under|above|below|before|after|between|among|"
    "within|beyond|past|around|about|across|against|along|as|like|than|per|until|till|since|during|through|"
    "via|beside|besides|behind|beneath|near|off|out|up|down|except|instead|towards|toward|it|its|they|them|"
    "their|theirs|these|those|this|that|he|she|his|her|we|us|our|you|your|which|who|whom|whose|what|one|ones|"
    "each|both|either|neither|none|all|any|some|such|another|other|others|and"
    r")\b"
)
MEMORY_KEYS = frozenset(
    {
        "offload_weights",
        "reshard_after_forward",
        "sync_each_batch",
        "offload_optimizer_states",
        "float8",
        "mlp_tile_tokens",
        "frozen",
        "segment_layers",
    }
)
CODE = (tokenize.NAME, tokenize.NUMBER, tokenize.OP, tokenize.STRING)
# Prints how many functions of longspan a call enters. A lambda, a body of a module or what dataclasses make is none.
TRACE = """
import json, os, sys, tempfile, threading
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK="0")
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", OMP_NUM_THREADS="1")
entered, answers, last = set(), {}, None
def see(frame, event, _):
    code = frame.f_code
    if event != "call" or not code.co_flags & 1 or code.co_name.startswith("<") or code.co_filename.startswith("<"):
        return
    name = frame.f_globals.get("__name__") or ""
    if name.startswith("longspan"):
        entered.add((name, code.co_qualname))
    if last == (name, code.co_name):
        print(json.dumps({"train to attend": len(entered)}), flush=True)
        os._exit(0)
def take(call):
    sys.setprofile(None)
    answers[call] = len(entered)
    entered.clear()
import torch
torch.set_num_threads(1)
if sys.argv[1:]:
    last = ("longspan.attention.attend", "attend")
    from longspan.cli.main import main
    sys.setprofile(see)
    threading.setprofile(see)
    main(sys.argv[1:])
import transformers
from longspan import Layout, World, plan_dynamic, prepare, run_step
from longspan.model import load_model, preset_config
folder = tempfile.mkdtemp()
transformers.AutoModelForCausalLM.from_config(preset_config("qwen3-tiny", vocab_size=64)).save_pretrained(folder)
sys.setprofile(see)
plan_dynamic([64, 32, 200, 7, 9, 500], Layout(ranks=8), max_tokens_per_slot=256)
take("plan_dynamic")
with World(Layout(ranks=1)) as world:
    plan = plan_dynamic([64, 32], world.home, max_tokens_per_slot=128)
    world.prepare(plan)
    model = load_model(folder)
    sys.setprofile(see)
    model = prepare(model, world)
    take("prepare")
    optimizer = torch.optim.AdamW(model.parameters())
    documents = [torch.arange(64) % 50, torch.arange(32) % 50]
    run_step(model, plan, documents, world, optimizer)
    sys.setprofile(see)
    run_step(model, plan, documents, world, optimizer)
    take("a second run_step")
print(json.dumps(answers), flush=True)
os._exit(0)
"""


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--entered", action="store_true", help="count the functions that calls go through (a minute)")
    flags.add_argument("--check", action="store_true", help="print what is not allowed, and exit 1 if there is any")
    options = flags.parse_args()
    counts = source_counts() | token_counts() | {"key spread": count_key_spread()}
    counts |= {"circles": count_circles()} | surroundings()
    entered = functions_entered() if options.entered else {}
    if options.check:
        complaints = [*name_faults(), *size_faults(counts | entered)]
        print(*complaints, f"{len(complaints)} faults of names and size", sep="\n")
        sys.exit(bool(complaints))
    for room, (files, lines, tokens) in sorted(rooms().items()):
        print(f"{tokens:8,} tokens, {lines:7,} lines, {files:3} files  {room}")
    if entered:
        print("functions entered:", ", ".join(f"{call} {count}" for call, count in entered.items()))
    print("; ".join(f"{name} {number:,}" for name, number in counts.items()))


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


@cache
def nodes(tree: ast.AST) -> list[ast.AST]:
    return list(ast.walk(tree))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in nodes(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def name_faults() -> Iterator[str]:
    """Each function that begins with a preposition."""
    for path, tree in trees().items():
        for node in functions(tree):
            name = node.name.strip("_")
            if (
                name.split("_")[0] in PREPOSITIONS
                and name not in ALLOWED
                and not node.name.startswith(("__", *VARIANTS))
            ):
                yield f"{path.relative_to(ROOT)}:{node.lineno}: function {node.name} begins with a preposition"


def size_faults(counts: dict[str, Any]) -> Iterator[str]:
    """Each measure that passes the figure of pyproject.toml and its room; what stands there alone is not limited."""
    figures = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["house"]
    for name, number in counts.items():
        figure = figures.get(name.replace(" ", "_"), math.inf)
        if number > figure * ROOM:
            yield (
                f"{name}: {number:,}, and tool.house of pyproject.toml has {figure:,} with one percent of room; remove "
                "something, or raise the figure and give the reason in the commit"
            )


def rooms() -> dict[str, list[int]]:
    """Files, lines and tokens of code of each folder."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for path, tree in trees().items():
        inside = path.relative_to(SOURCE).parts
        room = counts[inside[0] if len(inside) > 1 else "(top)"]
        room[0] += 1
        room[1] += len(path.read_text().splitlines())
        room[2] += len(code_tokens(path, tree))
    return counts


def code_tokens(path: Path, tree: ast.Module) -> list[int]:
    """The line of each token of a file's code."""
    prose = docstring_lines(tree)
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return [token.start[0] for token in tokens if token.type in CODE and token.start[0] not in prose]


def token_counts() -> dict[str, Any]:
    """Tokens of code, tokens on each line that has one, and assignments of several values to several names."""
    tokens = 0
    lines = 0
    parallel = 0
    comments = 0
    for path, tree in trees().items():
        comments += middle_comments(path)
        rows = code_tokens(path, tree)
        tokens += len(rows)
        lines += len(set(rows))
        assignments = [node for node in nodes(tree) if isinstance(node, ast.Assign)]
        parallel += sum(
            isinstance(node.value, ast.Tuple)
            and len(node.value.elts) > 1
            and any(isinstance(target, ast.Tuple) for target in node.targets)
            for node in assignments
        )
    counts = {"tokens": tokens, "tokens per line": round(tokens / lines, 2), "parallel assignments": parallel}
    return counts | {"comments at a line's end": comments}


def middle_comments(path: Path) -> int:
    """Comments behind code that that MIDDLE matches."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    comments = (token for token in tokens if token.type == tokenize.COMMENT and token.line[: token.start[1]].strip())
    return sum(MIDDLE.match(token.string) is not None for token in comments)


def count_key_spread() -> int:
    """In how many files outside config/ each of MEMORY_KEYS is named, summed; a dataclass's `frozen=True` is no key."""
    return sum(
        len(names_in(tree) & MEMORY_KEYS)
        for path, tree in trees().items()
        if path.relative_to(SOURCE).parts[0] != "config"
    )


def names_in(tree: ast.Module) -> set[str]:
    """Identifiers, attributes, keywords and functions of a file, and the last part of strings such as section.key."""
    names = set[str]()
    calls = (node for node in nodes(tree) if isinstance(node, ast.Call))
    of_dataclasses = {key for call in calls if ast.unparse(call.func).endswith("dataclass") for key in call.keywords}
    for node in nodes(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.FunctionDef(name=name):
                names.add(name)
            case ast.keyword(arg=str(name)) if node not in of_dataclasses:
                names.add(name)
            case ast.Constant(value=str(text)) if re.fullmatch(r"[\w.]+", text):
                names.add(text.rpartition(".")[2])
            case _:
                pass
    return names


@cache
def docstring_lines(tree: ast.Module) -> set[int]:
    texts = (
        node
        for node in nodes(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    )
    return {line for node in texts for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def source_counts() -> dict[str, Any]:
    """Lines (pages and scripts in the package too), files, functions, share of text, small functions named once."""
    lines = text = files = private = 0
    bodies = list[tuple[str, int]]()
    mentions = Counter[str]()
    for path, tree in trees().items():
        rows = path.read_text().splitlines()
        prose = docstring_lines(tree)
        files = files + 1
        lines = lines + len(rows)
        text += len(prose) + sum(not row.strip() and n not in prose for n, row in enumerate(rows, 1))
        mentions.update(node.id for node in nodes(tree) if isinstance(node, ast.Name))
        mentions.update(node.attr for node in nodes(tree) if isinstance(node, ast.Attribute))
        for node in functions(tree):
            body = node.body[ast.get_docstring(node, clean=False) is not None :]
            if len(body) < len(node.body) and re.match("_(?!_)", node.name):
                private += (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            bodies.append((node.name, (node.end_lineno or 0) - body[0].lineno + 1 if body else 0))
    others = (path for end in ("js", "css", "html", "json", "toml", "jinja") for path in SOURCE.rglob(f"*.{end}"))
    lines += sum(len(path.read_text(errors="replace").splitlines()) for path in others)
    small = sum(size < SMALL and mentions[name] <= 1 and not name.startswith("__") for name, size in bodies)
    counts = {"lines": lines, "files": files, "functions": len(bodies)}
    shares = {"text percent": round(100 * text / lines, 1)}
    return counts | shares | {"small and named once": small, "private docstring lines": private}


def count_circles() -> int:
    """Modules that reach themselves by imports; those for types alone do not count."""
    names = {".".join(("longspan", *p.relative_to(SOURCE).with_suffix("").parts)): p for p in trees()}
    modules = {name.removesuffix(".__init__"): path for name, path in names.items()}
    imports = {name: set(_imported(path, modules)) - {name} for name, path in modules.items()}
    circles = 0
    for name in modules:
        waiting = list(imports[name])
        reached = set[str]()
        while waiting:
            if (module := waiting.pop()) not in reached:
                reached.add(module)
                waiting.extend(imports[module])
        circles += name in reached
    return circles


def _imported(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """Modules that a file imports when it is loaded or run, also those that strings name where it imports by names."""
    by_name = re.search(r"\b(import_module|resolve_name|import_triton_kernels)\b", path.read_text())
    waiting: list[ast.AST] = [trees()[path]]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        waiting.extend(ast.iter_child_nodes(node))
        qualified_names = list[str]()
        if isinstance(node, ast.ImportFrom):
            qualified_names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif by_name and isinstance(node, ast.Constant) and isinstance(node.value, str):
            qualified_names = [node.value.replace(":", ".")]
        for name in qualified_names:
            target = name if name in modules else name.rpartition(".")[0]
            if target in modules and modules[target].name != "__init__.py":
                yield target


def surroundings() -> dict[str, int]:
    """Keys of the configuration, and how much stands around the source."""

    def lines(folder: str) -> int:
        return sum(len(path.read_text(errors="replace").splitlines()) for path in (ROOT / folder).rglob("*.py"))

    return {
        "keys": sum(
            len(re.findall(r"^\| `[\w.]+` \|", section, flags=re.MULTILINE))
            for section in re.split(r"^### ", (ROOT / "docs/configuration.md").read_text(), flags=re.MULTILINE)
            if "[" in section.splitlines()[0]
        ),
        "lines of tests": lines("tests"),
        "lines of bench": lines("bench"),
        "records": sum(path.is_file() for path in (ROOT / "bench/records").rglob("*")),
        "lines of the changelog": len((ROOT / "CHANGELOG.md").read_text().splitlines()),
        "words of the README": len((ROOT / "README.md").read_text().split()),
        "pages": sum(1 for _ in (ROOT / "docs").rglob("*.md")),
    }


def functions_entered() -> dict[str, int]:
    """Functions that `longspan train` goes through up to its first `attend`, and three calls of the Python surface."""
    with tempfile.TemporaryDirectory() as folder:
        # With a cache of its own: what an earlier run kept, as tokens, would be passed by.
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "PYTHONWARNINGS": "ignore",
            "XDG_CACHE_HOME": folder,
        }
        keys = {"run.dir": f"{folder}/run", "train.steps": "2", "evaluation.every": "0"}
        keys |= {"context.max_tokens_per_slot": "2048", "context.context_parallel_size": "1"}
        keys |= {"evaluation.context_parallel_size": "1"}
        train = [
            "train",
            "examples/first.toml",
            "--device",
            "cpu",
            *(word for k, v in keys.items() for word in (f"--{k}", v)),
        ]
        answers = dict[str, int]()
        for words in (train, []):
            command = [sys.executable, "-c", TRACE, *words]
            done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
            answers |= json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))
    return answers


if __name__ == "__main__":
    main()
