"""Do the tests notice a wrong line? A seeded sample of mutants of src/longspan, each run against tests chosen for it.

    python bench/source/mutation.py --count 150 --out bench/records/mutants.json  # draws, runs, resumes
    python bench/source/mutation.py --only plan/cost/cost.py:Cost.with_closing:arithmetic:2  # one, on today's tree
    python bench/source/mutation.py --again bench/records/mutants.json --out after.json  # those that lived, today
    python bench/source/mutation.py --caught bench/records/mutants.json --out after.json  # those that were killed

A mutant is one change of one expression or statement; texts, annotations, `raise`, `assert`, `del`, imports and files
that only a GPU runs are left alone. Its name says file, function, operator and ordinal in that function. The working
tree (or a commit, `--base`) is copied to a temporary folder and changed there. The tests of a mutant come from its
room: files named after the module, that name it or what it defines, and the usual ones, the quick tests first, as long
as they take `--seconds` together. A run that takes far longer than without the mutant counts as killed.
`unshare --pid --fork --mount-proc` before the command keeps a mutant's signals from other processes of the machine.
"""

import argparse
import ast
import contextlib
import copy
import hashlib
import importlib.util
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).parents[2]
WEIGHTS = {"cli": 2.0, "report": 2.0, "comm": 1.5, "plan": 1.5}  # rooms with fewer lines of tests are drawn from more
ONLY_GPU = ("row_kernels.py", "kernels/cudnn.py", "kernels/fa4.py", "kernels/torch_flash.py", "profile_parts.py")
TESTED_IN = {"bench": "cli", "testing": "launch"}  # rooms whose tests stand in another one's folder
PER_FUNCTION = 2
NOT_NOTICED = ("lived", "no tests")  # "no tests": no test of its room passes here without the mutant
MOST_MEMORY = 16 << 30  # of one process: a loop that never ends fails early
USUAL = {
    "attention": ["attention/test_attend.py", "attention/test_behaviour.py"],
    "cli": ["cli/test_flags.py", "cli/test_plan.py", "cli/test_doctor.py"],
    "comm": ["comm/test_groups.py", "comm/test_shard.py", "comm/test_world.py"],
    "launch": ["launch/test_launch.py", "launch/test_rank_pool.py"],
    "layout": ["layout/test_layout.py", "layout/test_partition.py"],
    "model": ["model/test_prepare.py", "model/weights/test_folders.py", "model/pipeline/test_pipeline.py"],
    "plan": ["plan/test_plan.py", "plan/test_dynamic.py", "plan/test_fixed.py"],
    "report": ["report/test_run_page.py", "cli/test_verbs.py"],
    "train": ["train/steps/test_step.py", "run/test_run.py", "corpus/test_data.py", "cli/test_train.py"],
}
COMPARE = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
COMPARE |= {ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult}
ARITHMETIC |= {ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.BitAnd: ast.BitOr}
LEFT_ALONE = (ast.JoinedStr, ast.Raise, ast.Assert, ast.Delete, ast.Import, ast.ImportFrom, ast.Global)
LOGS = re.compile(
    r"\b(log|logger|logging|warnings)\.\w+\(|kill\("
)  # log texts; and signals to a process of another number


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What one node can be replaced by, with the operator's name."""
    match node:
        case ast.Compare():
            for i, kind in enumerate(map(type, node.ops)):
                if kind in COMPARE:
                    yield "compare", changed(node, ops=[*node.ops[:i], COMPARE[kind](), *node.ops[i + 1 :]])
        case ast.BinOp() if type(node.op) in ARITHMETIC and not any(map(text_or_type, (node.left, node.right))):
            yield "arithmetic", changed(node, op=ARITHMETIC[type(node.op)]())
        case ast.Constant(value=bool()):
            yield "constant", changed(node, value=not node.value)
        case ast.Constant(value=int() as number):
            yield "constant", changed(node, value=number + 1)
        case ast.BoolOp():
            yield "and_or", changed(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not()):
            yield "drop_not", node.operand
        case ast.UnaryOp(op=ast.USub()) if not isinstance(node.operand, ast.Constant):
            yield "arithmetic", node.operand
        case ast.Call() if not isinstance(node.func, ast.Name) or node.func.id != "field":
            for i, keyword in enumerate(node.keywords):
                if keyword.arg not in (None, "encoding"):
                    yield "drop_keyword", changed(node, keywords=[*node.keywords[:i], *node.keywords[i + 1 :]])
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) not in ("None", "False"):
            yield "return_none", ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            yield "drop_statement", ast.Pass()
        case _:
            pass
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Compare | ast.UnaryOp):
        yield "negate", changed(node, test=ast.UnaryOp(ast.Not(), node.test))


def changed(node: ast.AST, **fields: Any) -> ast.AST:
    result = copy.copy(node)
    for name, value in fields.items():
        setattr(result, name, value)
    return result


def text_or_type(node: ast.AST) -> bool:
    """Operands for which an operator does not mean arithmetic."""
    text = isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and not isinstance(node.value, int | float)
    )
    return (
        text
        or isinstance(node, ast.List)
        or (isinstance(node, ast.Name) and node.id[:1].isupper() and len(node.id) > 2)
    )


def nodes(node: ast.AST, scope: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Every node that may change, in the order of the source, with the function that it is in."""
    skipped: list[Any] = [getattr(node, "annotation", None), getattr(node, "returns", None)]
    if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) + "TYPE_CHECKING":
        return
    for child in ast.iter_child_nodes(node):
        if child in skipped or isinstance(child, LEFT_ALONE):
            continue
        if isinstance(child, ast.Expr) and (isinstance(child.value, ast.Constant) or LOGS.search(ast.unparse(child))):
            continue
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        inner = f"{scope}.{child.name}".lstrip(".") if named else scope
        yield inner, child
        yield from nodes(child, inner)


def mutants(root: Path) -> dict[str, dict[str, Any]]:
    """Every mutant by its name, with its source before and after and where it is in the file."""
    result: dict[str, dict[str, Any]] = {}
    for path in sorted((root / "src/longspan").rglob("*.py")):
        name = path.relative_to(root / "src/longspan").as_posix()
        if path.name.startswith("__") or name.endswith(ONLY_GPU) or "/" not in name:
            continue
        source = path.read_text().encode()
        count = dict[str, int]()
        starts = [0]
        for line in source.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        for scope, node in nodes(ast.parse(source)):
            for operator, after in changes(node):
                key = f"{name}:{scope or 'module'}:{operator}"
                count[key] = count.get(key, 0) + 1
                place = node
                target = after
                if operator == "negate":  # the condition alone, not what depends on it
                    place = cast(ast.If, node).test
                    target = cast(ast.If, after).test
                at = cast(ast.expr, place)
                span = (
                    starts[at.lineno - 1] + at.col_offset,
                    starts[cast(int, at.end_lineno) - 1] + cast(int, at.end_col_offset),
                )
                text = ast.unparse(ast.fix_missing_locations(target))
                text = f"({text})" if isinstance(target, ast.expr) else text
                before = source[slice(*span)].decode()
                result[f"{key}:{count[key]}"] = {
                    "file": name,
                    "line": at.lineno,
                    "operator": operator,
                    "before": before,
                    "after": text,
                    "span": span,
                }
    return result


def draw(every: dict[str, dict[str, Any]], seed: int, count: int) -> list[str]:
    """A sample by room, in an order that stays when other functions change."""
    order = sorted(every, key=lambda name: hashlib.sha256(f"{seed}:{name}".encode()).hexdigest())
    rooms: dict[str, list[str]] = {}
    functions: dict[str, int] = {}
    for name in order:
        function = name.rsplit(":", 2)[0]
        functions[function] = functions.get(function, 0) + 1
        if functions[function] <= PER_FUNCTION:
            rooms.setdefault(name.split("/")[0], []).append(name)
    weights = {room: WEIGHTS.get(room, 1.0) * len(names) for room, names in rooms.items()}
    shares = {room: count * weight / sum(weights.values()) for room, weight in weights.items()}
    ranked = [((i + 0.5) / shares[room], name) for room, names in rooms.items() for i, name in enumerate(names)]
    return [name for _, name in sorted(ranked)[:count]]


class Tests:
    """The tests of one copy of the tree: which ones a module has, and how long they take when nothing is changed."""

    def __init__(self, copy_of: Path, seconds: float, known: dict[str, dict[str, float]]) -> None:
        self.root = copy_of
        self.seconds = seconds
        self.known = known
        names = sorted((copy_of / "tests").rglob("test_*.py"))
        texts = {path.relative_to(copy_of / "tests").as_posix(): path.read_text() for path in names}
        self.texts = {name: text for name, text in texts.items() if not name.endswith("test_mutations.py")}

    def of(self, file: str) -> dict[str, float]:
        """Test ids with their seconds, in the order to run them."""
        room = file.split("/")[0]
        stem = Path(file).stem
        room = TESTED_IN.get(room, room)
        inside = [name for name in self.texts if name.startswith(f"{room}/")]
        tree = ast.parse((self.root / "src/longspan" / file).read_text())
        public = [x.name for x in tree.body if isinstance(x, ast.FunctionDef | ast.ClassDef) and x.name[0] != "_"]
        path = file[:-3].replace("/", ".")
        defined = "|".join({*public} - {"main"}) or "no public name"
        same = [name for name in inside if f"{stem}_".startswith(Path(name).stem[5:] + "_")]
        named = [name for name in inside if re.search(rf"\b(import {stem}|{path})\b", self.texts[name])]
        using = [name for name in inside if re.search(rf"\b({defined})\b", self.texts[name])]
        same.sort(key=len, reverse=True)
        for group in (named, using):
            group.sort(key=lambda name: len(self.texts[name]))
        chosen: dict[str, float] = {}
        for name in dict.fromkeys([*same, *named, *using, *USUAL.get(room, [])]):
            if sum(chosen.values()) > 0.8 * self.seconds:
                break
            for test, x in sorted(self.timed(name).items(), key=lambda item: item[1]):
                if sum(chosen.values()) + x <= self.seconds:
                    chosen[test] = x
        return chosen

    def timed(self, name: str) -> dict[str, float]:
        """Tests of a file that pass unchanged, with their seconds; run once and kept in the record."""
        if name not in self.known:
            options = ["-m", "not whole and not slow and not gpu", f"--timeout={self.seconds}"]
            options += [f"--session-timeout={3 * self.seconds}"]
            _, text = run_tests(self.root, [*options, "-vvv", "--durations=0", f"tests/{name}"], 400)
            seconds: dict[str, float] = {}
            for x, test in re.findall(r"^([\d.]+)s (?:call|setup|teardown) +(tests/.*)$", text, re.M):
                seconds[test] = round(seconds.get(test, 0.0) + float(x), 2)
            bad = set(re.findall(r"^(?:FAILED|ERROR) (tests/.*?)(?: - |$)", text, re.M))
            calls = set(re.findall(r"^[\d.]+s call +(tests/.*)$", text, re.M))
            passed = {test: x for test, x in seconds.items() if test in calls and test not in bad}
            changing = changing_tests(self.texts[name])
            self.known[name] = {x: passed[x] for x in passed if x.split("::")[1].split("[")[0] not in changing}
            last = "" if passed else f"; pytest ended with {text.strip().splitlines()[-1:]}"
            print(f"         {name}: {len(passed)} tests, {sum(passed.values()):.1f} s{last}", flush=True)
        return self.known[name]


def changing_tests(text: str) -> set[str]:
    """The functions of a test file that change source texts, by themselves or by others that do."""
    sources = {x.name: ast.unparse(x) for x in ast.parse(text).body if isinstance(x, ast.FunctionDef)}
    names = {"mutate", "mutated", "each_mutated"}
    before = 0
    while before < len(names):
        before = len(names)
        mentions = re.compile(rf"\b({'|'.join(names)})\b")
        names |= {name for name, source in sources.items() if mentions.search(source)}
    return names


def run_tests(root: Path, arguments: list[str], limit: float) -> tuple[int | None, str]:
    """Exit status (None: too long) and output of pytest in a copy of the tree."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", *arguments]
    environment = os.environ | {"PYTHONPATH": str(root / "src"), "TMPDIR": str(root / "tmp"), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=root, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it left; its ranks end with it
        process.wait()
        output.seek(0)
        return status, output.read()


def judge(root: Path, mutant: dict[str, Any], tests: Tests, test_ids: list[str] | None = None) -> dict[str, Any]:
    """Whether its tests, or those that were asked for, notice one mutant, with the first that does."""
    chosen = tests.of(mutant["file"]) if test_ids is None else dict.fromkeys(test_ids, 60.0)
    if not chosen:
        return {"verdict": "no tests", "tests": 0, "seconds": 0.0}
    path = root / "src/longspan" / mutant["file"]
    source = path.read_bytes()
    start, stop = mutant["span"]
    compiled = Path(importlib.util.cache_from_source(str(path)))
    begun = time.monotonic()
    try:
        compiled.unlink(missing_ok=True)
        path.write_bytes(source[:start] + mutant["after"].encode() + source[stop:])
        status, text = run_tests(root, ["-x", *chosen], 60 + 4 * sum(chosen.values()))
    finally:
        path.write_bytes(source)
        compiled.unlink(missing_ok=True)
    verdict = "too long" if status is None else "killed" if status else "lived"
    noticed = re.search(r"^(?:FAILED|ERROR) (.*)", text, re.M)
    by = noticed[1].split(" - ")[0] if noticed and status else ""
    return {"verdict": verdict, "by": by, "tests": len(chosen), "seconds": round(time.monotonic() - begun, 1)}


def copied(base: str | None, folder: Path) -> str:
    """Copy a commit, or the working tree as it is, to a folder; returns the commit's name."""
    git = ["git", "-C", str(ROOT)]
    if base:
        archive = subprocess.run([*git, "archive", base], check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    else:
        listed = [*git, "ls-files", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split("\n"):
            if name and (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)
    (folder / "tmp").mkdir()
    commit = subprocess.run([*git, "rev-parse", "--short", base or "HEAD"], check=True, capture_output=True, text=True)
    return commit.stdout.strip()


def wanted(flags: argparse.Namespace, every: dict[str, dict[str, Any]]) -> list[str]:
    if flags.only:
        return [name for pattern in flags.only for name in every if name == pattern]
    if not (file := flags.again or flags.caught):
        return draw(every, flags.seed, flags.count)
    names: list[str] = []
    for name, before in json.loads(file.read_text())["mutants"].items():
        if (before["verdict"] in NOT_NOTICED) == bool(flags.again):
            # the same change, although functions around it may have moved
            function = name.rsplit(":", 1)[0] + ":"
            same = [x for x in every if x.startswith(function) and every[x]["before"] == before["before"]]
            same = [x for x in same if every[x]["after"] == before["after"]]
            same.sort(key=lambda x: abs(every[x]["line"] - before["line"]))
            names += [name] if name in same else same[:1] or [f"{name} (gone)"]
    return names


def summary(mutants_run: dict[str, dict[str, Any]]) -> str:
    lines: list[str] = []
    for room in [*sorted({name.split("/")[0] for name in mutants_run}), ""]:
        verdicts = [x["verdict"] for name, x in mutants_run.items() if name.startswith(room)]
        killed = sum(x not in NOT_NOTICED for x in verdicts)
        lines.append(f"{room or 'all':10} {killed:4} of {len(verdicts):4}  {killed / max(1, len(verdicts)):.0%}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seconds", type=float, default=40, help="what the tests of one mutant may take, unchanged")
    parser.add_argument("--base", help="a commit instead of the working tree")
    parser.add_argument("--only", nargs="*", help="names of mutants")
    parser.add_argument("--tests", nargs="*", help="files or names of tests that pass, instead of those chosen")
    parser.add_argument("--again", type=Path, help="a record: its mutants that lived")
    parser.add_argument("--caught", type=Path, help="a record: its mutants that were killed")
    parser.add_argument("--out", type=Path, help="a .json file; what it holds already is not run again")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    flags = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    record: dict[str, Any] = {"mutants": {}, "tests": {}}
    if flags.out and flags.out.exists():
        record = json.loads(flags.out.read_text())
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        record |= {
            "bench": "mutation",
            "seed": flags.seed,
            "seconds": flags.seconds,
            "commit": copied(flags.base, root),
        }
        every = mutants(root)
        tests = Tests(root, flags.seconds, record.setdefault("tests", {}))
        for name in wanted(flags, every):
            if flags.list or name not in every:
                print(name, every.get(name, {}), flush=True)
            elif name not in record["mutants"]:
                result = every[name] | judge(root, every[name], tests, flags.tests)
                record["mutants"][name] = result
                print(f"{result['verdict']:8} {result['seconds']:6.1f} s  {name}  {result.get('by', '')}", flush=True)
                if flags.out:
                    flags.out.write_text(json.dumps(record, indent=1) + "\n")
    print(summary(record["mutants"]))


if __name__ == "__main__":
    main()
