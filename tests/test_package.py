"""What is shipped and what watches over it: the wheel's files, its version, the workflows, the forms of issues."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import longspan
from longspan.cli.doctor import SUPPORTED

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def tracked(folder: str) -> set[str]:
    paths = (ROOT / folder).rglob("*")
    return {path.relative_to(ROOT).as_posix() for path in paths if path.is_file() and "__pycache__" not in path.parts}


def test_the_wheel_holds_the_package_and_the_examples_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="the wheel is built where hatchling is installed; elsewhere by make wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert not any(size.file_size > 1 << 20 for size in archive.infolist())
    assert wheel.name == f"longspan-{longspan.__version__}-py3-none-any.whl" and wheel.stat().st_size < 3 << 20
    info = f"longspan-{longspan.__version__}.dist-info"
    package = {name.removeprefix("src/") for name in tracked("src/longspan")}
    examples = {f"longspan/_{name}" for name in tracked("examples")}
    about = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    assert names == package | examples | about
    assert {"longspan/py.typed", "longspan/report/page.css", "longspan/report/page.js"} <= names
    assert {"longspan/_examples/first.toml", "longspan/_examples/recipes/README.md"} <= names


def test_there_is_one_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert PROJECT["project"]["version"] == longspan.__version__ == citation["version"]
    major_minor = longspan.__version__.rpartition(".")[0]
    assert f"| {major_minor} | yes |" in (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert f"to {major_minor}" in (ROOT / "docs/upgrade.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_what_is_there(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"} and workflow[True]  # YAML reads `on` as true
    for job in workflow["jobs"].values():
        whole_tables = "make test-all" in str(job["steps"])  # hours; a runner is taken away after 360 minutes
        assert job["timeout-minutes"] <= (350 if whole_tables else 120)
        assert job["steps"][0]["uses"].startswith("actions/checkout@")
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            for target in re.findall(r"^make ([\w-]+)", step.get("run", ""), re.MULTILINE):
                assert target in TARGETS, f"{path.name}: there is no make {target}"
            for script in re.findall(r"^(\.ci/\w+)$", step.get("run", ""), re.MULTILINE):
                assert os.access(ROOT / script, os.X_OK)


def test_every_change_and_every_night_run_what_they_should() -> None:
    jobs = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"] for path in WORKFLOWS}
    commands = [step.get("run", "") for job in jobs["ci"].values() for step in job["steps"]]
    for command in (".ci/run", "make docs", "make wheel-demo", "make types", "make recipes-check"):
        assert command in commands
    job, whole = jobs["nightly"]["tests"], jobs["nightly"]["whole"]
    matrix = job["strategy"]["matrix"]
    least, below = re.findall(r"torch>=2\.(\d+),<2\.(\d+)", " ".join(PROJECT["project"]["dependencies"]))[0]
    assert matrix["torch"] == [f"2.{minor}" for minor in range(int(least), int(below))]
    assert matrix["python"][0] == PROJECT["project"]["requires-python"].removeprefix(">=")
    assert len(matrix["python"]) == 3
    assert SUPPORTED["torch"] == ((2, int(least)), (2, int(below)))
    newest = f"2.{least} to 2.{int(below) - 1}"
    assert f"| torch | {newest} |" in (ROOT / "docs/install.md").read_text(encoding="utf-8")
    oldest = re.findall(r"transformers>=([\d.]+),", " ".join(PROJECT["project"]["dependencies"]))[0]
    assert f"transformers=={oldest}.*" in str(job["steps"])
    assert {entry["transformers"] for entry in matrix["include"]} == {"oldest"}

    # the whole tables, in parts that are all of the suite, with the newest versions
    assert whole["steps"][-1]["run"] == 'make test-all TESTS="${{ matrix.tests }}"'
    assert f"torch=={matrix['torch'][-1]}.*" in str(whole["steps"])
    assert whole["steps"][1]["with"]["python-version"] == matrix["python"][-1]
    parts = [path for part in whole["strategy"]["matrix"]["tests"] for word in part.split() for path in ROOT.glob(word)]
    found = {path for pattern in ("*/__init__.py", "test_*.py") for path in (ROOT / "tests").glob(pattern)}
    assert sorted(parts) == sorted(path.parent if path.name == "__init__.py" else path for path in found)
