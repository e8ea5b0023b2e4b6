"""`longspan examples`: the list, what is copied, and what is refused."""

import json
from pathlib import Path

import pytest

from longspan.cli import examples
from longspan.cli.examples import examples_folder, first_sentence
from longspan.cli.main import main

ROOT = Path(__file__).parents[2]


def test_every_example_is_listed_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["examples"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = {path.relative_to(ROOT / "examples").as_posix() for path in (ROOT / "examples").rglob("*.*")}
    assert {line.split()[0] for line in lines} >= {name for name in names if name.endswith((".toml", ".py", ".sh"))}
    assert all(len(line) <= 170 for line in lines) and not any("__pycache__" in line for line in lines)
    assert "dpo.py  " in lines[0] and lines[0].endswith("Preferences: DPO over documents of any length, under any plan")
    assert not [line for line in lines if line.endswith(":")]
    assert main(["examples", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["gpu/slurm.sh"].startswith("Train on several nodes of a Slurm cluster")
    assert all(text for name, text in listed.items() if not name.endswith(".json"))


def test_a_file_a_folder_and_all_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["examples", "first.toml"]) == 0
    assert capsys.readouterr().out == "examples/first.toml\n"
    assert (tmp_path / "examples/first.toml").read_bytes() == (ROOT / "examples/first.toml").read_bytes()
    assert main(["examples", "examples/vlm/", "mine", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"written": ["mine/vlm/data.py", "mine/vlm/vlm_accuracy.py"]}
    (tmp_path / "examples/first.toml").write_text("changed")
    assert main(["examples", "all"]) == 2
    error = "examples/first.toml is there; name another folder, or replace files with --overwrite"
    assert error in capsys.readouterr().err and not (tmp_path / "examples/dpo.py").exists()
    assert main(["examples", "all", "--overwrite"]) == 0
    copied = {path.relative_to(tmp_path / "examples") for path in (tmp_path / "examples").rglob("*") if path.is_file()}
    shipped = {path.relative_to(ROOT / "examples") for path in (ROOT / "examples").rglob("*") if path.is_file()}
    assert copied == {path for path in shipped if "__pycache__" not in path.parts}
    assert (tmp_path / "examples/first.toml").read_text() != "changed"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["frist.toml"], "longspan has no example 'frist.toml': did you mean 'first.toml'?"),
        (["../Makefile"], "longspan has no example '../Makefile': "),
        (["."], "longspan has no example '.': "),
        (["nope"], "longspan has no example 'nope': the nearest are "),
        (["first.toml", "file"], "cannot copy examples to file: "),
        (
            ["first.toml", "a", "b"],
            "longspan examples does not know what 'b' is for: it takes [NAME] and [FOLDER], and flags",
        ),
    ],
)
def test_what_is_refused(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert main(["examples", *words]) == 2
    assert f"error: {message}" in capsys.readouterr().err


def test_an_installed_wheel_has_them_in_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert examples_folder() == ROOT / "examples"
    package = tmp_path / "longspan"
    (package / "_examples").mkdir(parents=True)
    monkeypatch.setattr(examples.longspan, "__file__", str(package / "__init__.py"))
    with pytest.raises(examples.ConfigError, match="there are no examples with the longspan in"):
        examples_folder()
    (package / "_examples" / "first.toml").write_text("# One. Two.\n")
    assert examples_folder() == package / "_examples" and first_sentence(package / "_examples/first.toml") == "One"
