"""The site of docs/: its reference, its messages, its configurations and its pictures are those of the source.

`make docs` checks the links, in an environment of its own.
"""

import ast
import dataclasses
import json
import re
import runpy
from importlib import import_module
from itertools import product
from pathlib import Path

import pytest

from longspan.bench.benches import BENCHES
from longspan.cli.eval import refuse_training_keys
from longspan.cli.main import VERBS, main
from longspan.errors import ConfigError
from tests.test_surface import PUBLIC

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
COVERED = ("architecture", "bridge", "concepts", "laptop", "migration", "planning", "resume", "several-nodes")
NEW = [DOCS / f"{name}.md" for name in (*COVERED, "troubleshooting", "watch")]


def test_the_reference_is_made_from_the_public_names() -> None:
    pages = runpy.run_path(str(DOCS / "site/reference.py"))["pages"]()
    written = {path.stem: path.read_text() for path in (DOCS / "reference").glob("*.md")}
    assert written == pages, "make them again: python docs/site/reference.py"
    text = "\n".join(written.values())
    for namespace in PUBLIC:
        (section,) = re.findall(rf"^## {re.escape(namespace)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
        shown = set(re.findall(rf"^::: {re.escape(namespace)}\.(\w+)$", section, re.MULTILINE))
        linked = set(re.findall(r"\[`(\w+)`\]", section))
        assert shown | linked == set(import_module(namespace).__all__), namespace


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "bench"] + [f"bench {name}" for name in BENCHES])
def test_every_flag_of_help_is_on_the_page_of_the_verbs(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*verb.split(), "--help-all"])
    flags = set(re.findall(r"^  (--[a-z][\w.-]+)", capsys.readouterr().out, re.MULTILINE))
    flags -= {"--data"} if verb == "train" else set()  # the key data.path
    page = (DOCS / "reference/verbs.md").read_text()
    (section,) = re.findall(rf"^## longspan {verb}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    rows = {flag.replace("_", "-") for flag in re.findall(r"`(--[\w.-]+)`", section)} | {"--help"}
    sections = tuple(f"--{name}." for name in re.findall(r"all of `\[(\w+)\]`", section))
    missing = {flag for flag in flags if flag.replace("_", "-") not in rows and not flag.startswith(sections)}
    if verb in ("train", "plan"):
        assert "ll [keys](../configuration.md) are flags too" in section
        missing = {flag for flag in missing if "." not in flag}
    for flag in sorted(missing):  # keys of training, which eval has and refuses
        with pytest.raises(ConfigError, match="is a key of training"):
            refuse_training_keys(frozenset({flag[2:].replace("-", "_")}))
    assert flags and (verb == "eval" or not missing)


# between two strings that Python joins: the quotes, and what stands between
JOINT = re.compile(r"[\"']\n\s*[rf]*[\"']")


def test_messages_of_troubleshooting_are_in_the_source() -> None:
    page = (DOCS / "troubleshooting.md").read_text()
    messages = [row.replace("\\|", "|") for row in re.findall(r"^\| `(.*?)` \|", page, re.MULTILINE)]
    source = JOINT.sub("", "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py")))
    assert len(messages) > 50
    parts = {message: [re.escape(part.strip()) for part in message.split("…")] for message in messages}
    gone = [message for message in messages if not re.search(".{1,200}".join(parts[message]), source)]
    assert not gone, "what stands for … is on the line of its message"


@pytest.mark.parametrize("page", NEW, ids=lambda page: page.name)
def test_a_page_begins_with_what_it_covers(page: Path) -> None:
    title, _, first = page.read_text().split("\n", 3)[:3]
    assert title.startswith("# ") and first.startswith("This page ")


def test_scripts_before_and_after_have_names_that_there_are() -> None:
    transformers, trl, hf = (pytest.importorskip(name) for name in ("transformers", "trl", "longspan.hf"))
    known = {
        "TrainingArguments": transformers.TrainingArguments,
        "SFTConfig": trl.SFTConfig,
        "LongspanArguments": hf.LongspanArguments,
    }
    of_trainer, of_trl = re.findall(r"```diff\n(.*?)```", (DOCS / "migration.md").read_text(), re.DOTALL)
    for diff, left_out in product((of_trainer, of_trl), "+-"):
        program = "\n".join(line[2:] for line in diff.splitlines() if not line.startswith(left_out))
        for call in (node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Name) and call.func.id in known:
                names = {field.name for field in dataclasses.fields(known[call.func.id])}
                assert {word.arg for word in call.keywords} <= names, ast.unparse(call)


def test_numbers_beside_the_first_picture_are_those_of_the_picture(capsys: pytest.CaptureFixture[str]) -> None:
    picture, readme = (DOCS / "pictures/plan.svg").read_text(), " ".join((ROOT / "README.md").read_text().split())
    *degrees, widest = re.search(r"degrees ([\d, ]+)", picture)[1].split(", ")  # pyright: ignore[reportOptionalSubscript]
    assert f"on {', '.join(degrees)} or {widest} GPUs each](docs/pictures/plan.svg)" in readme
    words = runpy.run_path(str(DOCS / "site/pictures.py"))["PLAN"].split()
    predicted = list[float]()
    for more in ([], ["--cp", "16"], ["--cp", "32"]):  # the longest document needs 16 slots
        assert main([*words, *more, "--json"]) == 0
        predicted.append(json.loads(capsys.readouterr().out)["predicted_seconds"])
    dynamic, fixed = predicted[0], min(predicted[1:])
    assert f"predicted {dynamic:.2f} s" in picture
    assert f"Predicted {dynamic:.2f} s; the best plan of one degree {fixed:.2f} s" in readme
    longer = f"takes {fixed / dynamic - 1:.0%} longer".replace("%", " %")
    assert longer in (DOCS / "concepts.md").read_text()


def test_pictures_are_drawn_by_their_script(tmp_path: Path) -> None:
    runpy.run_path(str(DOCS / "site/pictures.py"))["draw"](tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_text() == (DOCS / "pictures" / path.name).read_text(), f"{path.name}: docs/site/pictures.py"
