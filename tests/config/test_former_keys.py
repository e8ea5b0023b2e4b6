"""Former names of keys and flags: read as the present ones, from files, overrides and words; both are an error."""

from pathlib import Path

import pytest

from longspan.bench.step.flags import parse_step
from longspan.cli.evaluation.flags import parse_eval
from longspan.cli.flags import parse_flags, parse_train
from longspan.cli.main import main
from longspan.cli.plan import PlanFlags
from longspan.config.file import load_config, read_file, to_toml
from longspan.config.sections import RunConfig
from longspan.errors import ConfigError

BOTH = r"context\.cost and run\.machine are both given in .*: context\.cost is the former name of run\.machine; leave"


@pytest.mark.parametrize("former", ["x.json", ""])
def test_a_file_with_the_former_key_is_read(tmp_path: Path, former: str) -> None:
    old = to_toml(RunConfig()).replace('machine = ""\n', "").replace("[context]\n", f'[context]\ncost = "{former}"\n')
    (tmp_path / "old.toml").write_text(old)
    config = read_file(tmp_path / "old.toml")
    assert config.run.machine == former and "cost =" not in to_toml(config)
    assert load_config(tmp_path / "old.toml", {"run.machine": "y.json"}).run.machine == "y.json"
    assert load_config(None, {"context.cost": former}).run.machine == former


def test_both_names_are_an_error_that_names_them(tmp_path: Path) -> None:
    file = tmp_path / "both.toml"
    file.write_text('[run]\nmachine = "a"\n[context]\ncost = "b"\n')
    with pytest.raises(ConfigError, match=rf"^{BOTH}"):
        read_file(file)
    with pytest.raises(ConfigError, match=rf"^{BOTH}"):
        load_config(None, {"context.cost": "b", "run.machine": "a"})
    file.write_text('[run]\nmachine = "a"\n[context]\ncost = ""\n')  # as older runs wrote it
    assert read_file(file).run.machine == "a"
    file.write_text("run = 3\n[context]\ncost = 'b'\n")
    with pytest.raises(ConfigError, match=r"^run is 3"):
        read_file(file)
    file.write_text("[context]\ncost = 3\n")
    with pytest.raises(ConfigError, match=r"^run\.machine is 3 in .*; it must be a string"):
        read_file(file)


@pytest.mark.parametrize("flag", ["--context.cost", "--run.machine"])
@pytest.mark.parametrize("form", ["{} a.json", "{}=a.json"])
def test_flags_of_both_names(flag: str, form: str, tmp_path: Path) -> None:
    words = form.format(flag).split()
    (tmp_path / "run.toml").write_text('[context]\ncost = "file.json"\n[run]\ndir = "x"\n')
    for argv in (words, [str(tmp_path / "run.toml"), *words]):
        assert parse_train(argv)[1].run.machine == parse_step(argv)[1].run.machine == "a.json"
    assert parse_step([str(tmp_path / "run.toml")])[1].run.machine == "file.json"
    assert parse_step([str(tmp_path / "run.toml"), *words])[1].run.dir == "x"
    assert parse_eval(["runs/x", *words], load_config(tmp_path / "run.toml")).run.machine == "a.json"
    assert parse_eval(["runs/x"], load_config(tmp_path / "run.toml")).run.machine == "file.json"


def test_plan_takes_both_names(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--cost", "--machine"):
        assert parse_flags(PlanFlags, ["--slots", "2", flag, "a.json"], "longspan plan").machine == "a.json"
    assert main(["plan", "--slots", "2", "--cost", "a", "--machine=b"]) == 2
    line = "error: --cost and --machine are both given: --cost is the former name of --machine; leave --cost out\n"
    assert capsys.readouterr().err == line
    assert main(["train", "--context.cost", "a", "--run.machine", "b"]) == 2
    assert "error: --context.cost and --run.machine are both given" in capsys.readouterr().err
