"""`longspan plan`: what goes in and comes out; with --compare, planners and degrees next to each other."""

import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from longspan.cli.main import main
from longspan.config.file import load_config
from longspan.plan import Machine, Plan
from longspan.plan.shape.model_shape import QWEN3_8B
from longspan.resolve.run_cost import find_run_cost
from tests.plan.items.test_encoder_shape import QWEN3_VL_8B


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    path = tmp_path / "lengths.json"
    path.write_text("[300, 20, 40, 900]")
    return str(path)


def planned(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[Plan, dict[str, Any]]:
    assert main(["plan", *words, "--json"]) == 0
    out, err = capsys.readouterr()
    assert not err
    return Plan.from_json(out), json.loads(out)


FLAGS: dict[str, dict[str, Any]] = {
    "--max-cp 4": {"planner": "dynamic"},
    "--cp 2": {"planner": "fixed"},
    "--planner auto --cp 2": {"planner": "fixed"},
    "--planner auto --max-cp 4": {"planner": "dynamic"},
    "--planner fixed": {"planner": "fixed"},
    "--planner padded": {"planner": "padded"},
    "--mode free --cp 2": {"mode": "free"},
    "--node-size 2": {"node_size": 2},
    "--node_size=4 --cp=2": {"node_size": 4},
}


def test_flags_reach_the_plan(lengths: str, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--lengths", lengths, "--slots", "4", "--max-tokens-per-slot", "512"]
    for words, expected in FLAGS.items():
        plan, answer = planned([*base, *words.split()], capsys)
        assert expected.items() <= answer.items() and plan.max_tokens_per_slot == 512, words
        assert answer["slots"] == 4 and answer["tokens"] == 1260
        assert {"lengths", "micro_batches", "targets", "predicted_seconds", "lower_bound_seconds"} <= answer.keys()


def test_a_plan_takes_the_fastest_of_what_is_not_given(lengths: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the degrees that hold the longest document; dynamic plans must gain a hundredth, as in a run."""
    base = ["--lengths", lengths, "--slots", "6"]
    for cap, least in ((450, 2), (299, 6)):
        words = [*base, "--max-tokens-per-slot", str(cap)]
        plan, _ = planned([*words, "--planner", "fixed"], capsys)
        seconds = dict[int, float]()
        for cp in (cp for cp in (1, 2, 4, 6) if cp >= least and 6 % cp == 0):
            seconds[cp] = planned([*words, "--cp", str(cp)], capsys)[0].predicted_seconds
        assert plan.predicted_seconds == pytest.approx(min(seconds.values())), cap
    words = ["--cp-comm-type", "a2a+p2p", "--hierarchical-context-parallel-sizes", "2", "3", "--cp", "6"]
    plan, _ = planned([*base, "--planner", "fixed", *words, "--partition", "contiguous"], capsys)
    (group,) = plan.micro_batches[0].groups
    assert (group.hierarchical_context_parallel_sizes, group.partition) == ((2, 3), "contiguous")


def test_lengths_from_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    base = ["--slots", "2", "--cp", "1"]
    assert planned([*base, "--same", "3x50"], capsys)[0].lengths == (50, 50, 50)
    drawn = planned([*base, "--distribution", "uniform", "--tokens", "9000", "--longest-document", "4000"], capsys)[0]
    assert drawn.tokens >= 9000 and max(drawn.lengths) <= 4000
    plan = tmp_path / "plan.json"
    plan.write_text(drawn.to_json())
    assert planned([*base, "--lengths", str(plan)], capsys)[0].lengths == drawn.lengths
    monkeypatch.setattr(sys, "stdin", io.StringIO("[5, 6]"))
    assert planned([*base, "--lengths", "-"], capsys)[0].lengths == (5, 6)


def test_table_and_files(lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = ("html", "svg", "png") if find_spec("matplotlib") else ("html", "svg")
    files = {kind: tmp_path / f"plan.{kind}" for kind in kinds}
    words = ["--plot", *map(str, files.values())]
    assert main(["plan", "--lengths", lengths, "--slots", "4", "--cp", "2", "--show", *words]) == 0
    out, err = capsys.readouterr()
    assert "on 4 x H200" in out and "fixed plan, lockstep: 4 slots" in out and 'preset = "qwen3-8b"' in out
    assert "x the lower bound" in out and "micro-batch  groups" in out
    assert all(f"wrote {path}" in err for path in files.values())
    assert files["html"].read_text().startswith("<!doctype html>")
    assert "png" not in files or files["png"].stat().st_size > 1000
    drawn = "".join(ElementTree.fromstring(files["svg"].read_text()).itertext())
    assert "a step of 4 documents" in drawn and "nothing to do" in drawn and "predicted seconds" in drawn


def write_uncounted_model(folder: Path) -> str:
    """Blocks that layers of a Zamba 2 share are priced, and their bytes are not counted."""
    transformers = pytest.importorskip("transformers")
    transformers.Zamba2Config().save_pretrained(folder)
    return f"--model {folder}"


def write_machine_of_cpus(folder: Path) -> str:
    file = folder / "machine.json"
    file.write_text(json.dumps(replace(Machine.cpus(), assumed=False, world=4, node_size=4).to_json()))
    return f"--machine {file}"


NO_BYTES: dict[str, tuple[Callable[[Path], str], str]] = {
    "of a model": (write_uncounted_model, "has shared blocks, whose memory no configuration tells"),
    "of a GPU": (write_machine_of_cpus, "was measured on CPUs, and bytes of a GPU are not known; give --gpu-bytes"),
}


@pytest.mark.parametrize("name", NO_BYTES)
def test_a_step_is_planned_without_bytes(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write, reason = NO_BYTES[name]
    words = ["plan", "--slots", "4", *write(tmp_path).split()]
    step = ["--same", "4x512"]
    for more in ([], ["--show"]):
        assert main([*words, *step, *more]) == 0
        out, err = capsys.readouterr()
        assert "micro-batch  groups" in out and reason in out.splitlines()[-1] and not err
        assert out.splitlines()[-1].startswith("memory: not planned")
    assert main([*words, *step, "--json"]) == 0
    out, err = capsys.readouterr()
    assert Plan.from_json(out).tokens == 2048 and reason in err
    assert main([*words, *step, "--which-eval-degree"]) == 0
    capsys.readouterr()
    for question in ([*step, "--compare"], ["--longest"], [*step, "--write", "keys.toml"]):
        assert main([*words, *question]) == 2
        assert reason in capsys.readouterr().err


OF_SLOTS = "--slots 4 --same 2x5"
BAD = [
    ("--slots 4", "what shall fit? give --longest, documents of a step"),
    (f"{OF_SLOTS} --lengths x", "--lengths and --same are both given; give one of them"),
    ("--slots 4 --same 5", "--same '5' is not COUNTxLENGTH"),
    ("--slots 4 --same 2x0", "0"),
    ("--slots 4 --distribution normal", "--distribution 'normal' is unknown; use one of lognorm"),
    ("--slots 4 --lengths nowhere.json", "cannot read lengths from nowhere.json: No such file"),
    ("--slots 4 --data nowhere", "data.path 'nowhere' does not exist"),
    (
        f"{OF_SLOTS} --planner dynamic --cp 2",
        "--cp 2 is the degree of fixed and padded plans",
    ),
    (f"{OF_SLOTS} --json --write x.toml", "--write x.toml writes the keys of an answer, and --json prints the plan"),
    (f"{OF_SLOTS} --cp 3", "context.context_parallel_size 3 does not divide 4 slots"),
    (f"{OF_SLOTS} --plot /nowhere/x.html", "cannot write /nowhere/x.html: there is no folder"),
    (f"{OF_SLOTS} --plot x.jpg", "--plot x.jpg: a plan is drawn as .html, .svg or .png"),
    ("--slots 4 --same 4x262144 --max-tokens-per-slot 8192", "that cp 4 x max_tokens_per_slot 8192"),
    (f"{OF_SLOTS} --min-cp 5", "size 5 is above the 4 slots; use at most 4"),
    (f"--compare {OF_SLOTS} --gpus 8", "--gpus N, --world N and --slots N each say how many GPUs there are"),
    ("--compare --same 2x5 --world 9 --tp 2", "9 ranks are not divisible by tp 2 x pp 1"),
    (f"--which-eval-degree {OF_SLOTS} --cp 2", "--which-eval-degree does not take --cp; leave it out"),
    (
        f"--which-eval-degree {OF_SLOTS} --min-cp 4 --max-cp 2",
        "size 4 is above context.max_dynamic_context_parallel_size 2",
    ),
    ("--which-eval-degree --slots 4 --same 1x90 --max-tokens-per-slot 9", "to 23 or more"),
    (f"--gpu all --model.preset qwen3-8b {OF_SLOTS} --plot a.svg", "does not take --plot"),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=[words for words, _ in BAD])
def test_bad_input_is_one_line(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and message in err and len(err.splitlines()) == 1


def test_bad_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {"[1, 2.5]": "2.5", "[1, true]": "True", "[1, 0]": "0", "[]": "no documents", "[1": "it is not JSON"}
    for text, message in (texts | {'{"documents": []}': "holds no lengths"}).items():
        (tmp_path / "l.json").write_text(text)
        assert main(["plan", "--slots", "2", "--lengths", str(tmp_path / "l.json")]) == 2
        assert message in capsys.readouterr().err


def model_folder(tmp_path: Path, **values: int) -> str:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"vocab_size": 1000} | values))
    return str(tmp_path)


def test_degrees_of_a2a_divide_the_query_heads_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = "--distribution lognorm --slots 24 --max-tokens-per-slot 8192 --longest-document 60000 --cp-comm-type a2a"
    words = base.split()
    model = model_folder(tmp_path)
    for more, heads in (([], 32), (["--model", model, "--max-tokens-per-slot", "12000"], 6)):
        plan, _ = planned([*words, *more], capsys)
        degrees = {group.degree for batch in plan.micro_batches for group in batch.groups}
        assert degrees != {1} and all(heads % degree == 0 for degree in degrees)


def test_a_model_without_attention_is_planned_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"model_type": "mamba2", "num_hidden_layers": 2, "hidden_size": 48, "vocab_size": 256}
    sizes |= {"num_heads": 6, "head_dim": 16, "state_size": 16, "n_groups": 2}
    words = ["plan", "--same", "1x900", "--slots", "6", "--planner", "fixed", "--cp", "3", "--model", str(tmp_path)]
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"conv_kernel": None}))
    assert main(words) == 2 and "has no mamba_d_conv or conv_kernel" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"conv_kernel": 4}))
    for kind in ("a2a", "p2p"):
        assert main([*words, "--cp-comm-type", kind]) == 0


def test_a_model_prices_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_folder(tmp_path)
    words = ["--same", "4x900", "--slots", "2", "--model", model, "--cp", "1", "--train.plan_memory", "false"]
    for mode in ("lockstep", "free"):
        plan, _ = planned([*words, "--mode", mode], capsys)
        config = load_config(None, {"model.path": model, "context.mode": mode})
        expected = find_run_cost(config, model, print, gpu=True, slots=2)  # as training prices it, FSDP2 included
        assert plan.cost == expected and plan.mode == mode and plan.cost.source == "the model on H200s"


def test_a_planner_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    own, words = "tests.resolve.own_things.one_by_one", list[str]()
    for kind in ("p2p", "a2a+p2p"):
        words = ["--slots", "4", "--same", "6x900", "--max-tokens-per-slot", "1024", "--cp-comm-type", kind]
        words += ["--planner", own]
        plan, _ = planned(words, capsys)
        assert plan.planner == own
        groups = [group for batch in plan.micro_batches for group in batch.groups]
        assert [group.slots for group in groups] == [(0, 1, 2, 3)] * 6
        assert all((group.hierarchical_context_parallel_sizes is None) == (kind == "p2p") for group in groups)
    assert main(["plan", "--compare", *words, "--json"]) == 0
    rows = {(row["planner"], row["degree"]): row for row in json.loads(capsys.readouterr().out)["alternatives"]}
    assert {(own, None), ("dynamic", None), ("fixed", 1)} < rows.keys()
    assert rows[own, None]["seconds"] > rows["dynamic", None]["seconds"]


def test_a_tower_that_is_not_priced_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_VL_8B | {"text_config": QWEN3_8B}))
    assert main(["plan", "--same", "8x32768", "--slots", "8", "--cp", "4", "--model", str(tmp_path)]) == 0
    assert "the model has a tower for images, which is not in these seconds" in capsys.readouterr().out


# ---- --compare, and degrees of an evaluation


COMPARE = ("plan", "--compare")
DEGREES = ("plan", "--which-eval-degree")


@pytest.mark.parametrize(
    "words", ["--world 8 --tp 2", "--slots 2 --pp 2 --machine h100", "--world 8 --tp 2 --max-cp 2"]
)
def test_planners_side_by_side(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    base = f"--same 4x3000 --max-tokens-per-slot 8192 {words}"
    assert main([*COMPARE, *base.split(), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    ways = {(way["planner"], way["degree"]): way for way in answer["alternatives"]}
    degrees = (1, 2, 4) if "--pp" not in words else (1, 2)
    assert {*ways} == {("dynamic", None), *((planner, cp) for planner in ("fixed", "padded") for cp in degrees)}
    assert answer["gpus"] == (8 if "--tp" in words else 4) and answer["gpu"] == ("H100" if "h100" in words else "H200")
    assert {way["rows"] for way in ways.values()} <= set(range(8193)) and answer["fits"]


def test_degrees_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--slots", "8", "--pp", "2", "--same", "8x64"]
    assert main([*DEGREES, *words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [*answer["seconds"]] == ["1", "2", "4", "8"] and answer["dynamic"] > 0
    best = min(answer["seconds"], key=lambda cp: answer["seconds"][cp])
    assert best == str(answer["best_cp"]) and answer["reason"].startswith(f"evaluation at cp {best}")
    assert main([*DEGREES, *words]) == 0
    assert capsys.readouterr().out.startswith(answer["reason"])


def test_degrees_that_the_query_heads_do_not_allow_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--slots 16 --tp 2 --same 8x64 --model {model_folder(tmp_path, num_attention_heads=8)} --cp-comm-type a2a"
    assert main([*DEGREES, *words.split(), "--json"]) == 0
    assert [*json.loads(capsys.readouterr().out)["seconds"]] == ["1", "2", "4"]
