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
    *("Layout", "World", "Plan", "MicroBatch", "Group", "Cost", "PlanOptions", "PlanAhead", "PlanChoice"),
    *("plan_fixed", "plan_padded", "plan_dynamic", "bind", "SequenceShard", "attend"),
    *("load_model", "prepare", "save_model", "run_step", "evaluate", "token_log_probs", "weights_by_name"),
    "gather_documents",
    *("Document", "DocumentLoss", "LongspanError"),
]
# Names that have a namespace of their own; `longspan` itself still has them.
MOVED = {
    "longspan.layout": ("Packing", "Partition", "Exchange"),
    "longspan.bridge": ("Bridge",),
    "longspan.mtp": ("add_mtp", "MtpLoss"),
    "longspan.train": ("without_adapter",),
    "longspan.multimodal": (
        *("Encoder", "EncoderHome", "ImageInput", "Item", "ItemDocuments", "MultimodalModel", "Video"),
        *("image_tokens", "prepare_encoder", "video_tokens"),
    ),
}
# Where pages and examples import from. Beside those of MOVED: planning, ranks for tests, and the rooms of single pages.
PUBLIC = (
    *("longspan", *MOVED, "longspan.hf", "longspan.plan", "longspan.testing"),
    *("longspan.attention", "longspan.corpus", "longspan.doctor", "longspan.lm_eval", "longspan.model", "longspan.ssm"),
)


def run(code):
    """Run code in a fresh interpreter; what it prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_surface_is_small():
    assert len(NAMES) == len(set(NAMES)) == 26 == len(set(longspan.__all__) - {"__version__"})


@pytest.mark.parametrize(("namespace", "name"), [(space, name) for space, names in MOVED.items() for name in names])
def test_names_that_moved_stay_importable(namespace, name):
    module = importlib.import_module(namespace)
    assert getattr(longspan, name) is getattr(module, name) and name in module.__all__
    assert name not in longspan.__all__


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


@pytest.mark.parametrize("name", NAMES)
def test_public_names(name):
    value = getattr(longspan, name)
    assert value.__name__ == name and value.__module__.startswith("longspan.")
    assert inspect.getdoc(value), f"{name} has no docstring"
    assert name in longspan.__all__ and name in dir(longspan)
    assert longspan.__dict__[name] is value  # found once, then kept


def test_values_are_frozen():
    """Every dataclass is immutable, but for the columns that the dynamic planner fills."""
    root, loose = Path(longspan.__file__).parent, set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            made = [ast.unparse(x) for x in node.decorator_list] if isinstance(node, ast.ClassDef) else []
            if any("dataclass" in x and "frozen=True" not in x for x in made):
                loose.add(f"{path.relative_to(root).as_posix()}: {node.name}")
    assert loose == {"plan/dynamic/lockstep.py: Bins"}


def test_a_name_that_is_not_there_is_an_attribute_error_that_lists_what_is():
    with pytest.raises(AttributeError, match=r"no attribute 'plan_best'; it has .*plan_fixed"):
        _ = longspan.plan_best


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(inspect.getfile(longspan)).read_text(encoding="utf-8"))
    seen = {alias.asname for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert {*NAMES, *(name for names in MOVED.values() for name in names)} == seen - {None}
    assert set(NAMES) == set(longspan.__all__) - {"__version__"}


LAZY = [
    "longspan",
    "longspan.comm",
    "longspan.hf",
    "longspan.model",
    "longspan.mtp",
    "longspan.multimodal",
    "longspan.plan",
    "longspan.report",
    "longspan.train",
]


@pytest.mark.parametrize("package", LAZY)
def test_lazy_names_are_there_and_are_no_modules(package):
    module = importlib.import_module(package)
    modules = {path.stem for path in Path(inspect.getfile(module)).parent.iterdir()}
    assert module.__all__ and not modules & set(module.__all__)
    assert all(getattr(module, name) is not None and name in dir(module) for name in module.__all__)


HEAVY = ["torch", "transformers", "tokenizers", "rich"]


@pytest.mark.parametrize("what", ["longspan", "longspan.errors", "longspan.layout", "longspan.plan"])
def test_geometry_and_planning_import_nothing_heavy(what):
    assert run(f"import sys, {what}; print(*sorted(set(sys.modules) & set({HEAVY})))") == []


def test_planning_through_the_package_imports_nothing_heavy():
    code = "from longspan import Layout, Packing, Partition, Exchange, plan_fixed; plan_fixed([9, 5], Layout(2), cp=2)"
    assert run(f"import sys; {code}; print(*sorted(set(sys.modules) & set({HEAVY})))") == []


def test_errors_are_one_family_that_its_module_draws():
    members = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    family = [kind for kind in members if kind.__module__ == errors.__name__]
    assert len(family) == 15
    for kind in family:
        assert issubclass(kind, longspan.LongspanError) and kind.__name__ in (errors.__doc__ or "")
        assert str(kind("cp 3 does not divide 4 slots")) == "cp 3 does not divide 4 slots"


def test_the_package_is_typed_and_numbered():
    assert (Path(inspect.getfile(longspan)).parent / "py.typed").exists()
    assert longspan.__version__.count(".") == 2
