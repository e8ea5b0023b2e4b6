"""Names that users rely on, and what importing them costs."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import longspan
from longspan import errors

NAMES = [
    *("Layout", "World", "Plan", "MicroBatch", "Group", "Cost", "PlanOptions", "AsyncPlanner", "PlannerConfig"),
    *("plan_fixed", "plan_padded", "plan_dynamic", "bind", "SequenceShard", "attend"),
    *("load_model", "prepare", "save_model", "run_step", "evaluate", "token_log_probs", "weights_by_name"),
    *("gather_documents", "share_prefixes"),
    *("Document", "DocumentLoss", "LongspanError"),
    *("Bridge", "Exchange", "MultimodalModel", "Packing", "Partition", "add_mtp"),
]
# Names that have a namespace of their own.
MOVED = {
    "longspan.layout": ("Packing", "Partition", "Exchange"),
    "longspan.bridge": ("Bridge",),
    "longspan.mtp": ("add_mtp", "MtpLoss"),
    "longspan.train": ("disable_adapter",),
    "longspan.multimodal": (
        *("Encoder", "EncoderHome", "ImageInput", "MediaItem", "MediaDocuments", "MultimodalModel", "Video"),
        *("image_tokens", "prepare_encoder", "video_tokens"),
    ),
}
# Where pages and examples import from. Beside those of MOVED: planning, ranks for tests, and the rooms of single pages.
PUBLIC = (
    *(
        "longspan",
        *MOVED,
        "longspan.checkpoint",
        "longspan.evaluation",
        "longspan.hf",
        "longspan.plan",
        "longspan.testing",
    ),
    *("longspan.attention", "longspan.corpus", "longspan.doctor", "longspan.lm_eval", "longspan.model", "longspan.ssm"),
)


def test_names_have_one_home():
    for namespace, name in [(space, name) for space, names in MOVED.items() for name in names]:
        module = importlib.import_module(namespace)
        assert name in module.__all__ and (name in longspan.__all__) == hasattr(longspan, name) == (name in NAMES)


IMPORT = re.compile(
    r"^[ >.]*(?:from (longspan[\w.]*) import (\([^)]*\)|[^#\n]*)|import (longspan[\w.]*))", re.MULTILINE
)
ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.py"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_and_examples_import_public_names_alone(page):
    for module, names, whole in IMPORT.findall(page.read_text(encoding="utf-8")):
        assert (module or whole) in PUBLIC, (
            f"{page.name} imports from {module or whole}; public are {', '.join(PUBLIC)}"
        )
        listed = importlib.import_module(module or whole).__all__
        for name in re.findall(r"\w+", re.sub(r"\bas \w+", "", names)):
            assert name in listed or f"{module}.{name}" in PUBLIC, f"{page.name}: {module} has no public name {name}"


def test_public_names():
    assert len(NAMES) == len(set(NAMES)) == 33 == len(set(longspan.__all__) - {"__version__"})
    for name in NAMES:
        value = getattr(longspan, name)
        assert value.__name__ == name and value.__module__.startswith("longspan.")
        assert inspect.getdoc(value), f"{name} has no docstring"
        assert name in longspan.__all__ and name in dir(longspan)
        assert longspan.__dict__[name] is value  # found once, then kept
    with pytest.raises(AttributeError, match=r"no attribute 'plan_best'; it has .*plan_fixed"):
        _ = longspan.plan_best


def test_values_are_frozen():
    """Every dataclass that compares by value is immutable, but for what extends verl's; others are what they are."""
    root, loose, seen = Path(longspan.__file__).parent, set(), 0
    for path in root.rglob("*.py"):
        made = re.findall(
            r"^ *@(?:dataclasses\.)?dataclass(\([^)]*\))?\n(?: *@.*\n)* *class (\w+)", path.read_text(), re.M
        )
        seen += len(made)
        values = [name for keys, name in made if not re.search("frozen=True|eq=False", keys)]
        loose |= {f"{path.relative_to(root).as_posix()}: {name}" for name in values}
    assert seen > 100 and loose == {"verl/settings.py: LongspanEngineConfig"}


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(inspect.getfile(longspan)).read_text(encoding="utf-8"))
    seen = {alias.asname for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert {*NAMES} == seen - {None}


LAZY = ("", ".checkpoint", ".comm", ".evaluation", ".hf", ".model", ".mtp", ".multimodal", ".plan", ".report", ".train")


def test_lazy_names_are_there_and_are_no_modules():
    for package in LAZY:
        module = importlib.import_module(f"longspan{package}")
        modules = {path.stem for path in Path(inspect.getfile(module)).parent.iterdir()}
        assert module.__all__ and not modules & set(module.__all__)
        assert all(getattr(module, name) is not None and name in dir(module) for name in module.__all__)


def test_geometry_and_planning_import_nothing_heavy():
    code = "from longspan import Layout, Packing, Partition, Exchange, plan_fixed; plan_fixed([9, 5], Layout(2), cp=2)"
    code = f"import sys, longspan.errors, longspan.layout, longspan.plan; {code}"
    code += "; print(*sorted({'torch', 'transformers', 'tokenizers', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


def test_errors_are_one_family_that_its_module_draws():
    members = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    family = [kind for kind in members if kind.__module__ == errors.__name__]
    assert len(family) == 15
    for kind in family:
        assert issubclass(kind, longspan.LongspanError) and kind.__name__ in (errors.__doc__ or "")
        assert str(kind("cp 3 does not divide 4 slots")) == "cp 3 does not divide 4 slots"
