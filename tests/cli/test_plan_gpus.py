"""`longspan plan --gpu` and `train --dry-run`: what fits, the longest document, the keys to write, steps and hours."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longspan.cli import machine, processes
from longspan.cli.main import main
from longspan.cli.plans import answer as plans_answer, gpus as gpus_module, which_gpu
from longspan.cli.plans.gpu_run import GpuRun
from longspan.cli.plans.gpus import Gpus, read_gpus
from longspan.cli.plans.question import GpuFlags, preset_line
from longspan.config.file import load_config
from longspan.config.keys import read_own_texts
from longspan.config.sections import RunConfig
from longspan.data.run_order import order_lengths
from longspan.errors import PlanError
from longspan.layout import Layout
from longspan.model.presets import find_published_preset
from longspan.model.seams import rope
from longspan.plan import Bytes, Machine, Plan, PlanOptions, plan_fixed
from longspan.plan.cost.machine import KNOWN, find_known_name
from longspan.plan.memory import memory_choice
from longspan.plan.shape.positions import can_scale_positions, position_limit
from longspan.resolve.facts import Facts
from longspan.resolve.resolved import resolve
from longspan.resolve.run_cost import find_run_cost
from longspan.resolve.ways import UNIT, Ranking, Way, fit_way, rank_ways, set_default_mode
from longspan.run.checks import check_config
from tests.plan.shape.test_packed import LLAMA_70B, QWEN3_32B
from tests.run.runs.test_images_run import model_folder, rows_with_images

NAMES = [*Bytes().to_json()]
MODEL: dict[str, Any] = {"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 4, "head_dim": 128}
MODEL |= {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 3072, "vocab_size": 8192}
MODEL |= {"max_position_embeddings": 16384, "tie_word_embeddings": True}
GPUS = ["--gpu-bytes", str(5 << 30), "--host-bytes", str(2 << 30), "--gpus", "4"]
TWO = [*GPUS[:-1], "2"]
DRAWN = ["--distribution", "uniform", "--tokens", "30000", "--longest-document", "9000", "--cp-comm-type", "a2a"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return str(tmp_path)


@pytest.fixture
def one_search(monkeypatch: pytest.MonkeyPatch) -> None:
    known = dict[str, Any]()

    def find(config: RunConfig, facts: Facts, given: Any) -> Any:
        text = repr((config, replace(facts, lengths_of_step=list, targets_of_step=None), given))
        known[text] = known.get(text) or rank_ways(config, facts, given)
        return known[text]

    found = plans_answer.find_longest

    def find_longest(config: RunConfig, facts: Facts) -> Any:
        text = repr(("longest", config, replace(facts, lengths_of_step=list, targets_of_step=None)))
        known[text] = known.get(text) or found(config, facts)
        return known[text]

    monkeypatch.setattr("longspan.resolve.resolved.rank_ways", find)
    monkeypatch.setattr(plans_answer, "find_longest", find_longest)


def ask(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def check_keys(answer: dict[str, Any], model: str, ranks: int) -> None:
    keys: dict[str, Any] = answer["keys"]
    config = load_config(None, {"model.path": model, "optimizer.lr": 1e-5, **keys})
    check_config(config, ranks)
    assert isinstance(keys["context.max_tokens_per_slot"], int)
    degree = "max_dynamic_context_parallel_size" if config.context.planner == "dynamic" else "context_parallel_size"
    assert isinstance(keys[f"context.{degree}"], int)


def test_the_longest_document_is_the_longest_that_fits(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer = ask(["--model", model, *TWO, "--longest"], capsys)
    names = [
        "device",
        "host",
        "checkpoint_policies",
        "longest",
        "fits",
        "keys",
        "largest",
        "steps",
        "step_seconds",
        "hours",
    ]
    assert [*answer][: len(names)] == names
    for place in ("device", "host"):
        assert [*answer[place]] == NAMES and all(isinstance(size, int) for size in answer[place].values())
        assert answer[place]["total"] == sum(answer[place][name] for name in NAMES[:-1])
    assert all(answer["largest"][name] >= answer["device"][name] for name in NAMES[:-1])
    assert answer["host"]["gradients"] == answer["host"]["weights"]
    assert (answer["largest"]["gradients"] == 0) is (answer["host"]["gradients"] > 0)
    assert (
        len(answer["checkpoint_policies"]) == 4
        and answer["fits"]
        and answer["steps"] is None
        and answer["step_seconds"] > 0
    )
    assert answer["tokens_per_second_per_gpu"] > 0
    check_keys(answer, model, 2)
    assert answer["keys"]["model.rope_scaling"] == "yarn" and answer["longest"] > 16384
    factor = -(-answer["longest"] * 4 // 16384) / 4  # the smallest multiple of a quarter, as a run takes
    assert any(f"model.rope_scaling = 'yarn' stretches them {factor:g} times" in note for note in answer["notes"])
    for tokens, fits in ((answer["longest"], True), (answer["longest"] + 2 * UNIT, False)):
        assert ask(["--model", model, *TWO, "--cp", "2", "--same", f"1x{tokens}"], capsys)["fits"] is fits


@pytest.mark.usefixtures("one_search")
def test_what_does_not_fit_says_how_many_bytes_are_missing(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", model, *GPUS[:-1], "1", "--same", "1x131072"]
    answer = ask(words, capsys)
    assert answer["fits"] is False and answer["device"]["total"] > 0.92 * (5 << 30) and answer["step_seconds"] is None
    files = ["--plot", str(tmp_path / "plan.svg"), "--write", str(tmp_path / "run.toml")]
    assert main(["plan", *words, *files]) == 2
    unwritten, line = capsys.readouterr().err.splitlines()
    assert unwritten == f"nothing fits, and no file is written: {files[1]}, {files[3]}"
    assert not any(Path(file).exists() for file in files)
    assert "1 document (131,072 tokens)" in line and f"({answer['device']['total']:,} bytes) are needed" in line
    assert "leave" not in line and line.endswith(f"the longest document that fits has {answer['longest']:,} tokens")
    # the number of GPUs that fits, with keys: no half of it does, and the keys are those of its own answer
    (more, keys) = re.findall(r"; it fits (\d+) GPUs of [\d,]+ bytes, with (--context.*?); the longest", line)[0]
    assert not ask([*words, "--gpus", str(int(more) // 2)], capsys)["fits"]
    larger = ask([*words, "--gpus", more], capsys)
    assert larger["fits"] and keys == " ".join(
        f"--{key} {str(value).lower() if isinstance(value, bool) else value}" for key, value in larger["keys"].items()
    )
    check_keys(larger, model, int(more))
    assert main(["plan", *words, "--train.device_memory_limit", str(3 << 30), "--train.offload_optimizer_states"]) == 2
    words = (
        r"--train.offload_optimizer_states true --train.plan_memory true, or leave train.device_memory_limit and "
        r"train.offload_optimizer_states out; the longest"
    )
    assert re.search(words, capsys.readouterr().err)


def test_keys_by_hand_win(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", model, *TWO, "--same", "1x32768", "--cp", "2"]
    host = ask([*words, "--train.offload_optimizer_states", "--train.activation_checkpointing", "full"], capsys)
    assert {word.partition("+")[0] for word in host["checkpoint_policies"]} == {"full"}
    assert host["host"]["states"] >= host["device"]["states"] > 0  # of which an update has two buckets
    assert host["keys"]["train.offload_optimizer_states"] is True
    assert host["keys"]["train.activation_checkpointing"] == "full"
    check_keys(host, model, 2)
    refused = ask([*words, "--train.activation_checkpointing", "none", "--host-bytes", str(1 << 30)], capsys)
    assert refused["fits"] is False and refused["keys"]["train.activation_checkpointing"] == "none"
    half = ask([*words, "--model.dtype", "bfloat16"], capsys)
    assert half["device"]["weights"] * 2 == ask(words, capsys)["device"]["weights"]


PADDED = ["--same", "8x4096", "--context.planner", "padded", "--cp", "2"]
KEYS: list[Any] = [
    (["--same", "8x4096", "--parallel.tp", "2"], {"parallel.tp": 2}),
    (["--same", "8x4096", "--pp", "2"], {"parallel.pp": 2}),
    pytest.param(PADDED, {"context.context_parallel_size": 2}, marks=pytest.mark.whole),
    (DRAWN, {}),
    (
        [*DRAWN, "--planner", "dynamic", "--max-cp", "2", "--max-tokens-per-slot", "6000"],
        {"context.max_tokens_per_slot": 6000},
    ),
    (["--same", "8x4096", "--planner", "auto", "--cp", "2"], {"context.context_parallel_size": 2}),
    (["--same", "3x5000", "--optimizer.class", "sgd", "--parallel.dp_replicate", "2"], {}),
]


@pytest.mark.parametrize(("words", "keys"), KEYS)
def test_training_takes_the_keys(
    words: list[str], keys: dict[str, int], model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = ask(["--model", model, *GPUS, *words], capsys)
    assert answer["fits"] and keys.items() <= answer["keys"].items()
    check_keys(answer, model, 4)


def test_a_run_has_steps_and_hours(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longspan.resolve.facts.TIMED_STEPS", 2)
    sizes = [800 * (1 + i % 7) for i in range(30)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": "x" * 4 * n}) + "\n" for n in sizes))
    words = ["--model", model, *TWO, "--data", str(tmp_path / "texts.jsonl"), "--tokens-per-step", "8000"]
    words += ["--cp-comm-type", "p2p"]
    answer = ask([*words, "--epochs", "0.3"], capsys)
    config = load_config(None, {"model.path": model, "train.tokens_per_step": 8000, "train.epochs": 0.3})
    assert answer["steps"] == order_lengths(config, sizes).count_steps()
    assert answer["hours"] == pytest.approx(answer["steps"] * answer["step_seconds"] / 3600)
    assert answer["gpu_hours"] == pytest.approx(2 * answer["hours"])
    assert sum(degree["share"] for degree in answer["degrees"]) == pytest.approx(1.0)
    assert answer["keys"]["train.epochs"] == 0.3 and answer["keys"]["train.tokens_per_step"] == 8000
    check_keys(answer, model, 2)
    ways = answer["alternatives"]  # of the same steps: fewer seconds are more tokens/s, and the answer is the first
    tokens = {round(way["seconds"] * way["tokens_per_second_per_gpu"] * 2, 6) for way in ways}
    assert len(ways) == 3 and len(tokens) == 1 and next(iter(tokens)) < 8000
    ranks = [way["seconds"] * (1.01 if way["planner"] == "dynamic" else 1) for way in ways]  # as training chooses
    assert ranks == sorted(ranks) and answer["tokens_per_second_per_gpu"] == ways[0]["tokens_per_second_per_gpu"]
    assert answer["longest"] > max(sizes)
    assert main(["plan", *words, "--train.steps", "100", "--cp", "1", "--data.max_document_tokens", "1000"]) == 0
    printed = capsys.readouterr()
    assert re.search(r"documents of 27 texts to train on.*; 3 texts of \d+ documents held out", printed.out)
    assert "tokens are estimated as bytes / 4" in printed.err and "100 steps of " in printed.out
    assert ", the mean of 64 of them: " in printed.out and "\nsteps = 100\n" in printed.out


EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}


@pytest.mark.usefixtures("one_search")
def test_layouts_are_compared_and_the_fastest_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL | EXPERTS))
    file = tmp_path / "run.toml"
    drawn = ["--distribution", "expo", "--tokens", "8000", "--longest-document", "6000"]
    words = ["--model", str(tmp_path), *TWO, *drawn, "--optimizer.lr", "1e-5", "--write", str(file)]
    answer = ask(words, capsys)
    ways = answer["alternatives"]
    assert {(way["planner"], way["degree"]) for way in ways} >= {("dynamic", None), ("fixed", 2)}
    assert {way["ep"] for way in ways} == {1, 2}
    ranks = [way["seconds"] * (1.01 if way["planner"] == "dynamic" else 1) for way in ways if way["seconds"]]
    assert ranks == sorted(ranks) and answer["step_seconds"] == ways[0]["seconds"]
    assert ways[0].items() <= answer.items()
    config = load_config(file)
    check_config(config, 2)
    assert (config.model.path, config.optimizer.lr) == (str(tmp_path), 1e-5)
    assert config.context.planner == ways[0]["planner"] and config.parallel.ep == ways[0]["ep"]
    assert main(["plan", *words]) == 0
    text = capsys.readouterr().out
    assert "tokens/s per GPU" in text and "\nfixed, cp 2 " in text and "\ndynamic " in text
    assert text.endswith(file.read_text().partition("\n")[2]) and "priced as H200s" in text


@pytest.mark.parametrize(
    "lengths", [pytest.param([700, 900, 300, 40] * 2, marks=pytest.mark.whole), [16000, 3000, 200, 100]]
)
def test_the_planner_is_the_one_that_training_chooses(
    lengths: list[int], model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lengths.json").write_text(json.dumps(lengths))
    answer = ask(["--model", model, *TWO, "--lengths", str(tmp_path / "lengths.json")], capsys)
    config = load_config(None, {"model.path": model, "optimizer.lr": 1e-5, "run.machine": "h200"})
    gpus = Gpus(machine=Machine.known("H200"), count=2, bytes=5 << 30, host_bytes=2 << 30, name="H200")
    resolved = resolve(config, GpuRun(config, gpus, model).facts_of_step(lengths))
    context, keys = resolved.config.context, answer["keys"]
    assert context.planner == keys["context.planner"], resolved.reasons.planner
    assert context.max_tokens_per_slot == keys["context.max_tokens_per_slot"] and context.mode == keys["context.mode"]
    ways = {(way["planner"], way["degree"]): way["seconds"] for way in answer["alternatives"]}
    dynamic, fixed = ways.pop(("dynamic", None)), min(ways.values())
    assert dynamic <= fixed * 1.001, "both are cases of a dynamic plan that is as fast, or faster"
    assert (answer["keys"]["context.planner"] == "fixed") == (fixed < 1.01 * dynamic)
    reasons = answer["reasons"]
    assert reasons == json.loads(json.dumps(resolved.reasons.to_json()))
    assert reasons["planner"] == resolved.reasons.planner and reasons["ways"][0] == {
        "planner": keys["context.planner"],
        "degree": keys.get("context.context_parallel_size", 0),
        "rows": keys["context.max_tokens_per_slot"],
        "seconds": answer["step_seconds"],
        "priced": True,
    }
    known = {(way["planner"], way["degree"] or None): way["seconds"] for way in reasons["ways"]}
    assert known == {("dynamic", None): dynamic} | ways


def test_every_planner_is_compared_at_rows_that_memory_holds(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also those that an answer leaves out: padded plans, and dynamic ones of equal lengths."""
    words = ["--model", model, *TWO, "--same", "2x20000", "--compare"]
    answer = ask([*words, "--planner", f"{__name__}.whole_slots"], capsys)
    ways = {(way["planner"], way["degree"]): way for way in answer["alternatives"]}
    own = {("dynamic", None), (f"{__name__}.whole_slots", None)}
    assert {*ways} == own | {(planner, cp) for planner in ("fixed", "padded") for cp in (1, 2)}
    assert all(way["device_bytes"] <= 0.92 * (5 << 30) for way in ways.values() if way["seconds"])
    assert max(way["rows"] for way in ways.values()) == 20000  # documents need 10,000 at degree 2
    assert answer["step_seconds"] == min(way["seconds"] for way in ways.values())
    given = ask([*words, "--cp", "2", "--planner", f"{__name__}.no_plan"], capsys)
    expected = {("dynamic", None), ("fixed", 2), ("padded", 2)}
    assert {(way["planner"], way["degree"]) for way in given["alternatives"]} == expected
    assert given["notes"][0].startswith(f"{__name__}.no_plan: not possible: ")


def whole_slots(lengths: Sequence[int], home: Layout, *, options: PlanOptions) -> Plan:
    return plan_fixed(lengths, home, home.slots, options=options)


def no_plan(lengths: Sequence[int], home: Layout, *, options: PlanOptions) -> Plan:
    if len(lengths) > 1:
        raise PlanError("one document at a time")
    return whole_slots(lengths, home, options=options)


PRESET = "--model.preset qwen3-tiny"
REFUSED = [
    ("--gpu h300 --longest", "no figures of 'h300'; known are .*--gpu-bytes N --tflops N"),
    ("--gpu h100", "what shall fit?.*--longest, documents of a step"),
    ("--gpu h100 --longest --same 1x5", "--longest asks for the longest document, and --same names"),
    ("--gpu h100 --same 1x5 --data x", "--same and --data are both given"),
    ("--gpu h100 --same 1x5 --gpus 2 --slots 4", "--gpus N, --world N and --slots N each say how many GPUs"),
    ("--gpu h100 --same 1x5 --epochs 2", "train.epochs is of a run, whose documents --data names"),
    ("--gpu h100 --same 1x5 --cp 1 --context.context_parallel_size 1", "are the same key"),
    ("--gpu h100 --same 1x5 --lora.rnk 4", "no flag --lora.rnk: did you mean '--lora.rank'"),
    ("--gpu h100 --gpus 0 --longest", "--gpus is 0; give an integer of at least 1"),
    ("--gpu h100 --gpus 4 --longest --parallel.ep 2", "ep 2, but qwen3 has no experts .*use ep 1"),
    ("--gpu h100 --longest --tflops -3", "a speed is above 0"),
    (
        "--gpu h100 --gpus 4 --same 2x8192 --max-tokens-per-slot 9",
        r"max_tokens_per_slot 9 does not suit the longest document \(8192 tokens, .*2,048 rows of each of all 4 slots",
    ),
    ("--gpu-bytes 80 --longest", "--gpu-bytes is 80: it is a number of bytes.* 80 GiB are 85899345920"),
    ("--gpu h100 --gpu-bytes 81920 --longest", "--gpu-bytes is 81920: .* 80 GiB are 85899345920"),
    ("--gpu h100 --host-bytes 256 --longest", "--host-bytes is 256: .* 256 GiB are 274877906944"),
    ("--gpu h100 --longest --train.device_memory_limit 70", "train.device_memory_limit is 70: .* 70 GiB are"),
    ("--model none --gpu h100 --longest", "cannot read a model's configuration"),
    ("--gpu h100 --longest --model x --model.preset qwen3-8b", "both name a model"),
    (f"--gpu h100 --longest --parallel.ep 2 --gpus 4 {PRESET}", "has no experts to deal out; use ep 1"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_refusals(words: str, message: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    named = f"--model {model}" * ("--gpu" in words and "--model" not in words)
    assert main(["plan", *words.split(), *named.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line


def test_a_machine_of_a_file_has_its_own_bytes(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine, file = Machine(memory_bytes=9 << 30, layer_seconds=0.0), tmp_path / "machine.json"  # of a fast host
    file.write_text(json.dumps(machine.to_json()))
    words = ["--model", model, "--gpu", str(file), "--same", "1x4096"]
    assert ask(words, capsys)["gpu_bytes"] == 9 << 30
    file.write_text(json.dumps(replace(machine, memory_bytes=0).to_json()))
    assert main(["plan", *words]) == 2 and "give --gpu-bytes" in capsys.readouterr().err
    fast, slow = (ask([*words, *GPUS, "--tflops", tflops], capsys)["step_seconds"] for tflops in ("700", "70"))
    assert slow > 1.2 * fast


def test_a_model_is_named_and_has_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"hello": 1}')
    for words, message in (["--model", str(tmp_path)], "has no hidden_size"), ([], "which model? give --model FOLDER"):
        assert main(["plan", *words, "--gpu", "h100", "--longest"]) == 2
        assert message in capsys.readouterr().err


def test_the_page_shows_what_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/fit.md has the answer of its first command: other words or numbers beyond 10 % must be pasted again."""
    monkeypatch.chdir(tmp_path)  # without a folder of the model, nor one in the cache
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["plan", "--model", "Qwen/Qwen3-8B", *["--gpu", "h100", "--gpus", "4", "--longest"]]) == 0
    page = (Path(__file__).parents[2] / "docs" / "fit.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```\n(the longest document that fits .*?)```", page, flags=re.DOTALL)
    number, (printed, said) = r"\d[\d,.]*\d|\d", capsys.readouterr()
    assert said == "Qwen/Qwen3-8B is not on this machine: its sizes are those of the preset qwen3-8b\n"
    assert re.sub(rf"{number}| +", "", shown) == re.sub(rf"{number}| +", "", printed)
    found = [[float(n.replace(",", "")) for n in re.findall(number, text)] for text in (shown, printed)]
    pairs = zip(*found, strict=True)
    assert all(a == pytest.approx(b, rel=0.1, abs=1.0) for a, b in pairs), printed
    words = ["--model", "Qwen/Qwen3-8B", "--gpu", "h100", "--gpus", "4", "--same", "1x262144", "--json"]
    assert main(["plan", *words]) == 0
    answer = json.loads(capsys.readouterr().out)  # of the second command, of which the page has some names
    (shown,) = re.findall(r"```json\n(.*?)```", page, flags=re.DOTALL)
    answer["total"] = answer["device"]["total"]
    for name in ("longest", "step_seconds", "total"):
        before = '"device": .*' if name == "total" else ""
        (value,) = set(re.findall(rf'{before}"{name}": ([\d.]+)', shown))
        assert float(value) == pytest.approx(answer[name], rel=0.01), name


PAGES = [Path(__file__).parents[2] / name for name in ("docs/fit.md", "docs/planning.md", "README.md")]
COMMANDS = [
    command for page in PAGES for command in re.findall(r"longspan plan (--[^\n#`]*[^\s#`])", page.read_text("utf-8"))
]


@pytest.mark.parametrize("command", [c for c in dict.fromkeys(COMMANDS) if len(c.split()) > 3 and "FILE" not in c])
def test_commands_of_the_pages_need_no_download(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With data of one's own, on a machine without models; of a question about GPUs one layout is planned."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "none"))
    monkeypatch.syspath_prepend(PAGES[-1].parent / "examples")
    rows = "".join(json.dumps({"text": "x" * 4000 * n}) + "\n" for n in range(1, 20))
    Path("texts").mkdir()
    for name in ("chats.jsonl", "texts/rows.jsonl"):
        Path(name).write_text(rows)
    Path("lengths.json").write_text("[36000, 36000, 36000, 8000, 1200, 500]")
    Path("machine.json").write_text(json.dumps(Machine(memory_bytes=80 << 30).to_json()))
    monkeypatch.setattr(
        "longspan.resolve.resolved.rank_ways", lambda config, facts, _: Ranking((fit_largest(config, facts),))
    )
    longest = lambda config, facts: (UNIT * facts.home.slots, largest(config, facts))  # noqa: E731
    monkeypatch.setattr(plans_answer, "find_longest", longest)
    command = command.replace("1024x8192 --world 8192", "64x8192 --world 64")
    assert main(["plan", *command.split()]) == 0, capsys.readouterr().err


def largest(config: RunConfig, facts: Facts) -> Way:
    keys: dict[str, Any] = {"context_parallel_size": facts.home.slots, "max_tokens_per_slot": 65536}
    return Way(config, facts).with_context(planner="fixed", mode="lockstep", **keys)


def fit_largest(config: RunConfig, facts: Facts) -> Any:
    way = largest(config, facts)
    return fit_way(way, way.plan_steps(facts.timed_steps))


@pytest.mark.parametrize(
    "keys",
    [
        {"train.activation_checkpointing": "full", "train.plan_memory": False},
        {"train.activation_checkpointing": "none", "parallel.reshard_after_forward": False},
        {"train.activation_checkpointing": "selective", "train.plan_memory": False, "parallel.tp": 2},
        {"train.activation_checkpointing": "full", "train.offload_optimizer_states": True, "lora.rank": 2},
    ],
)
def test_seconds_are_those_that_training_predicts(keys: dict[str, Any], model: str) -> None:
    given = {"model.path": model, "context.cp_comm_type": "a2a", "context.max_tokens_per_slot": 16384}
    config = load_config(None, given | {"run.machine": "h200", "context.context_parallel_size": 2} | keys)
    gpus = Gpus(machine=Machine(), count=4, bytes=24 << 30, host_bytes=8 << 30, name="H200")
    run = GpuRun.with_model(config, gpus)
    way = Way(set_default_mode(config), run.facts([(30000, 20000), (9000,)].__getitem__, 2))
    plans = way.plan_steps([0, 1])
    memory = way.choose_memory(plans, run.known_budget())
    slots, tp = run.home.slots, run.home.tp
    machine = gpus.machine
    cost = find_run_cost(config, model, print, gpu=True, machine=machine, slots=slots, memory=memory).shared_by(tp)
    assert way.cost() == find_run_cost(config, model, print, gpu=True, machine=machine, slots=slots)
    priced = sum(plan.timeline(cost).step_seconds for plan in plans) / 2
    assert way.step_seconds(plans, memory) == pytest.approx(priced)
    assert way.step_seconds(plans[:1], memory) > way.step_seconds(plans[1:], memory)


def test_bytes_of_gpus_are_given_or_those_of_their_name() -> None:
    gpus = read_gpus(GpuFlags(gpu="h100", gpu_bytes=70 << 30), "h200")
    assert (gpus.bytes, gpus.host_bytes) == (70 << 30, 128 << 30)
    assert read_gpus(GpuFlags(gpu="h100"), "h200").bytes == Machine.known("h100").memory_bytes
    assert gpus.machine.product_flops_per_second == Machine().product_flops_per_second
    assert read_gpus(GpuFlags(gpu="h100"), "").title.endswith("(by data sheet)")
    assert read_gpus(GpuFlags(gpu="h100", host_bytes=5_000_000_000), "").host_bytes == 5_000_000_000


def test_a_hybrid_with_open_partition_and_degree_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """Its heads allow a2a at some degrees only, of which none is known before the partition is chosen."""
    words = "--model.preset bamba-tiny --same 4x256 --slots 4 --gpu h200 --planner fixed --context.partition auto"
    keys = ask(words.split(), capsys)["keys"]
    assert keys["context.planner"] == "fixed" and keys["context.context_parallel_size"] >= 1


# ---- --gpu all

FIXED = ["--planner", "fixed", "--cp-comm-type", "p2p"]


def test_every_gpu_answers_as_it_does_alone(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(which_gpu, "KNOWN", ("A10", "H200"))
    words = ["--model", model, "--same", "1x800000", "--host-bytes", str(1 << 30), "--lora.rank", "4", *FIXED]
    answer = ask([*words, "--gpu", "all"], capsys)
    names = [row["gpu"] for row in answer["gpus"]]
    assert names[0] == "H200" and [row["fits"] for row in answer["gpus"]] == [True, False]
    for row in answer["gpus"]:
        alone = ask([*words, "--gpu", row["gpu"], "--gpus", str(row["gpus"])], capsys)
        assert alone["fits"] and {name: row[name] for name in ("step_seconds", "device_bytes", "host_bytes_used")} == {
            name: alone[name] for name in ("step_seconds", "device_bytes", "host_bytes_used")
        }
        assert not row["keys"].items() - alone["keys"].items() and row["by_data_sheet"] is (row["gpu"] != "H200")
        assert "lora.rank" not in row["keys"] and row["keys"]["model.rope_scaling"] == "yarn"
    longest = ask(["--model", model, "--gpu", "all", "--longest", *FIXED], capsys)["gpus"]
    assert [row["gpu"] for row in longest] == ["H200", "A10"]  # the longest first
    assert longest[0]["longest"] == ask(["--model", model, "--gpu", "h200", "--longest", *FIXED], capsys)["longest"]


@pytest.mark.whole
def test_the_page_shows_the_table_of_all_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    page = (Path(__file__).parents[2] / "docs" / "fit.md").read_text(encoding="utf-8")
    command, shown = re.findall(
        r"```bash\nlongspan (plan [^\n]*--gpu all[^\n]*)\n```\n\n```\n(.*?)\n```", page, re.DOTALL
    )[0]
    assert main(command.split()) == 0
    assert capsys.readouterr().out.strip() == shown


def test_help_and_page_name_every_known_gpu() -> None:
    page = (Path(__file__).parents[2] / "docs" / "fit.md").read_text(encoding="utf-8")
    for text in (read_own_texts(GpuFlags)["gpu"], page.partition("- **GPUs.**")[2].partition("\n- ")[0]):
        named = {find_known_name(word) for word in re.findall(r"[\w-]+", text)}
        assert named >= {*KNOWN}, text


def test_a_language_model_alone_is_said_to_be_one() -> None:
    line = preset_line("google/gemma-3-12b-it", find_published_preset("google/gemma-3-12b-it"))
    assert line.endswith("its sizes are those of the preset gemma-3-12b, without its tower")


def test_a_question_to_all_gpus_reads_the_data_once(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(which_gpu, "KNOWN", ("L4", "H100"))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": "x" * 4000 * n}) + "\n" for n in range(1, 20)))
    words = ["--model", model, "--data", str(tmp_path / "rows.jsonl"), "--epochs", "2", *FIXED]
    rows = ask([*words, "--gpu", "all"], capsys)["gpus"]
    assert [row["gpu"] for row in rows] == ["H100", "L4"]
    alone = ask([*words, "--gpu", "l4"], capsys)
    assert (rows[1]["step_seconds"], rows[1]["hours"]) == (alone["step_seconds"], alone["hours"])
    assert main(["plan", *words, "--gpu", "all"]) == 0
    out, err = capsys.readouterr()
    assert re.search(r"\nH100 +80 +yes +1 .*\n(?s:.*)\n1 H100.*: --context", out) and "2 of 2: 1 H100\n" in err
    assert "GPU-hours" in out and err.count("tokens are estimated") == 1
    for more, flag in ((["--write", "a.toml"], "--write"), (["--run.machine", "h100"], "run.machine")):
        assert main(["plan", *words, "--gpu", "ALL", *more]) == 2
        assert f"does not take {flag}; leave it out" in capsys.readouterr().err
    assert main(["plan", "--model", model, "--same", "1x40000000", "--gpu", "all", "--cp", "1"]) == 2
    assert re.search(r"\nL4 +22 +no +none\n", capsys.readouterr().out)


# ---- train --dry-run


CONFIG = """
model.config = "{folder}"
data = {{ path = "{folder}/texts", vocab_size = 300, max_document_tokens = 4000 }}
context.context_parallel_size = 2
train = {{ tokens_per_step = 4000, epochs = 2 }}
optimizer = {{ lr = 1e-4 }}
run.dir = "{folder}/run"
"""
SMALL_MODEL = MODEL | {"hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 512, "vocab_size": 512}
SMALL_MODEL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": False}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("longspan.resolve.facts.TIMED_STEPS", 2)
    (tmp_path / "config.json").write_text(json.dumps(SMALL_MODEL))
    (tmp_path / "texts").mkdir()
    for i in range(12):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"document {i} " * (200 + 100 * i))
    (tmp_path / "run.toml").write_text(CONFIG.format(folder=tmp_path))
    return str(tmp_path / "run.toml")


@pytest.mark.usefixtures("one_search")
def test_it_tells_what_a_run_would_take(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", config, "--dry-run", "--world", "4", "--run.machine", "h100"]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["fits"] and answer["gpus"] == 4 and answer["gpu_bytes"] == 80 << 30 and answer["steps"] > 1
    assert answer["keys"]["context.context_parallel_size"] == 2 and answer["keys"]["context.max_tokens_per_slot"] > 0
    assert [degree["degree"] for degree in answer["degrees"]] == [2]
    assert answer["reasons"]["partition"] == "" and answer["reasons"]["ways"] == []  # the planner is given
    assert not (tmp_path / "run").exists()
    assert main(words) == 0
    text = capsys.readouterr().out
    assert f"\nmax_tokens_per_slot = {answer['keys']['context.max_tokens_per_slot']}\n" in text
    assert f"{answer['steps']} steps of " in text
    assert "of one GPU" in text and re.search(r"MFU 0\.\d+%", text)
    assert "longest document" not in text and "positions" not in text, "which nobody asked for"
    assert main([*words, "--lora.rank", "4", "--model.frozen", "nf4", "--json"]) == 0
    packed = json.loads(capsys.readouterr().out)
    assert packed["device"]["packed"] > 0 and {way["frozen"] for way in packed["alternatives"]} == {"nf4"}
    assert main([*words, "--lora.rank", "4", "--json"]) == 0
    *whole, nf4 = json.loads(capsys.readouterr().out)["alternatives"]
    assert {way["frozen"] for way in whole} == {"float32"} and nf4 == packed["alternatives"][0]


def test_what_the_run_refuses_is_refused(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", config, "--dry-run", "--world", "4"]
    much = " does not fit 4 H200s: at least .*; it fits no number of GPUs up to 4,096; use a higher parallel.tp or "
    much += "parallel.pp, or leave train.device_memory_limit out"
    for more, message in (
        (["--train.device_memory_limit", "1200000000"], much),
        (["--context.context_parallel_size", "3"], "context_parallel_size 3 does not divide 4 slots"),
        (["--data.path", "nowhere"], "data.path 'nowhere' does not exist"),
        (["--run.machine", "h300"], "h300"),
    ):
        assert main([*words, *more]) == 2
        assert re.search(message, capsys.readouterr().err)


def test_bytes_of_a_gpu_here(config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "usable_gpus", lambda: 2)
    gpus = machine.LocalGpus(2, (8, 0), 108, "NVIDIA A100-SXM4-40GB", 42_000_000_000)
    monkeypatch.setattr(gpus_module, "find_gpus", lambda: gpus)
    monkeypatch.setattr(gpus_module, "free_host_bytes", lambda: 100_000_000_000)
    words = ["train", config, "--dry-run", "--json", "--context.max_tokens_per_slot", "3000"]
    assert main([*words, "--train.activation_checkpointing", "full"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["gpus"], answer["gpu_bytes"], answer["gpu"]) == (2, 42_000_000_000, "NVIDIA A100-SXM4-40GB")
    assert answer["host_bytes"] == 50_000_000_000
    assert answer["keys"]["context.max_tokens_per_slot"] == 3000
    assert main([*words, "--train.activation_checkpointing", "full", "--device", "cpu", "--world", "2"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["gpu"] == "H200"
    here = machine.find_gpus()
    assert (here.bytes > 0) == (here.name != "")


KNOWN_POSITIONS: list[tuple[str, dict[str, Any]]] = [
    ("Qwen3Config", {"max_position_embeddings": 40960}),
    ("Qwen3Config", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}),
    ("LlamaConfig", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "max_position_embeddings": 4096}),
    ("LlamaConfig", {"max_position_embeddings": 131072, "rope_scaling": None}),
    ("Gemma3TextConfig", {"max_position_embeddings": 131072}),
    ("Qwen3VLConfig", {}),
    ("BambaConfig", {}),
    ("NemotronHConfig", {}),
    ("GraniteMoeHybridConfig", {}),
    ("GraniteMoeHybridConfig", {"position_embedding_type": "nope"}),
    ("Qwen3NextConfig", {}),
]


@pytest.mark.parametrize(("name", "values"), KNOWN_POSITIONS)
def test_positions_are_those_that_training_knows(name: str, values: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, name)(**values)
    config.save_pretrained(tmp_path)
    assert position_limit(str(tmp_path)) == position_limit(config)
    try:
        rope.scale_rope(config, "yarn", 2.0)
    except Exception:
        assert not can_scale_positions(str(tmp_path))
    else:
        assert can_scale_positions(str(tmp_path))


def test_images_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("PIL")
    rows, folder = rows_with_images(tmp_path), tmp_path / "model"
    folder.mkdir()
    model_folder(folder)
    words = ["plan", "--model", str(folder), "--data", str(rows), "--gpu", "h200", "--tokens-per-step", "400", "--json"]
    assert main([*words, "--epochs", "2"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert re.match(r"images: \d+ rows in a step, whose encoding is not in these seconds", answer["notes"][0])


# ---- frozen weights in 4 bits


def test_weights_of_a_configuration_are_drawn_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where its folder has them in 8 bits, which a run with model.path keeps."""
    stored = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    devices = dict[str, dict[str, int]]()
    for name, values in {"whole": MODEL, "stored": MODEL | stored}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(values))
        for key in ("path", "config"):
            words = [f"--model.{key}", str(tmp_path / name), "--lora.rank", "4", "--same", "2x2048", *TWO]
            devices[f"{key} {name}"] = ask(words, capsys)["device"]
    assert devices["config stored"] == devices["config whole"] == devices["path whole"]
    assert devices["path stored"]["packed"] > 0 == devices["config stored"]["packed"]


@pytest.mark.usefixtures("one_search")
@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "values"),
    [("Llama-3.3-70B", LLAMA_70B), ("Qwen3-32B", QWEN3_32B)],
)
def test_large_models_are_proposed_in_four_bits(
    name: str, values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    lora = ["--model", str(tmp_path), "--lora.rank", "16", "--model.dtype", "bfloat16", "--gpu", "h100"]
    nf4 = ask([*lora, "--longest", "--model.frozen", "nf4"], capsys)
    assert nf4["fits"] and nf4["longest"] > (120_000 if name == "Llama-3.3-70B" else 320_000)
    page = (Path(__file__).parents[2] / "docs" / "fit.md").read_text(encoding="utf-8")
    assert re.search(rf"\n\| {name}[^|]*\| nf4 \|[^|]*\|[^|]*\| {nf4['longest']:,} \|", page), "the page's table"
    assert nf4["step_seconds"] > 0 and nf4["keys"]["model.frozen"] == "nf4"
    assert nf4["longest_nf4"] == nf4["device"]["packed"] == 0 and nf4["host"]["packed"] > 2 * nf4["host"]["weights"]
    assert main(["plan", *lora, "--model.frozen", "nf4", "--same", "1x65536"]) == 0
    assert re.search(r"\npacked +\d+\.\d\d +\d+\.\d\d +0\.00\n", capsys.readouterr().out)
    small = ["--host-bytes", str(32 << 30)]  # where whole weights do not wait on the host
    nf4 = ask([*lora, "--longest", "--model.frozen", "nf4", *small], capsys)
    whole = ask([*lora, "--same", "1x65536", *small], capsys)
    assert not whole["fits"] and whole["longest"] < 65536 and whole["longest_nf4"] == nf4["longest"]
    assert main(["plan", *lora, "--same", "1x65536", *small]) == 2
    told = f"; the longest document that fits has {nf4['longest']:,} tokens with --model.frozen nf4, the frozen weights"
    assert told in capsys.readouterr().err


# of the page: weights, GiB of the host, and whether weights stay on the device
OTHER_ROWS = (("float32", 128, True), ("bfloat16", 256, False))
DAILY_ROWS = (("float32", 256, False), ("bfloat16", 128, True))


@pytest.mark.parametrize(
    ("dtype", "gib", "stays"), [*DAILY_ROWS, *(pytest.param(*row, marks=pytest.mark.whole) for row in OTHER_ROWS)]
)
def test_the_page_has_lengths_of_full_training(
    dtype: str, gib: int, stays: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if stays:
        monkeypatch.setattr(memory_choice, "_weight_places_to_try", lambda needs, fixed: [False])
    words = ["--model", "Qwen/Qwen3-8B", "--longest", "--host-bytes", str(gib << 30), "--model.dtype", dtype]
    words += ["--optimizer.stochastic_rounding", "true"] * (dtype == "bfloat16")
    answers = [ask([*words, "--gpu", gpu], capsys) for gpu in ("h100", "h200")]
    assert all((answer["host"]["weights"] == 0) == stays and answer["host"]["states"] > 0 for answer in answers)
    name = "bfloat16, stochastic rounding" if dtype == "bfloat16" else dtype
    place = "moments" if stays else "moments, weights, gradients"
    cells = " | ".join(f"{answer['longest']:,}" for answer in answers)
    page = (Path(__file__).parents[2] / "docs" / "fit.md").read_text(encoding="utf-8")
    assert f"\n| {name} | {gib} GiB | {place} | {cells} |\n" in page


@pytest.mark.parametrize("name", ["Qwen3-8B", pytest.param("Qwen3-32B", marks=pytest.mark.whole)])
def test_whole_frozen_weights_wait_on_the_host(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = ["--model", f"Qwen/{name}", "--longest", "--lora.rank", "16", "--model.dtype", "bfloat16", "--gpu"]
    answers = [ask([*words, gpu], capsys) for gpu in ("rtx4090", "l40s", "h100", "h200")]
    assert all(answer["host"]["weights"] > 0 == answer["host"]["gradients"] for answer in answers)
    notes = [*answers[0]["notes"], *answers[0]["reasons"]["notes"]]
    assert sum(note.startswith("memory: weights wait on the host (train.offload_weights)") for note in notes) == 2
    page = (Path(__file__).parents[2] / "docs" / "fit.md").read_text(encoding="utf-8")
    cells = " | ".join(f"{answer['longest']:,}" for answer in answers)
    assert f"\n| {name} | whole, bfloat16 | {cells} |\n" in page


CARDS = (Path(__file__).parents[2] / "docs" / "small-cards.md").read_text(encoding="utf-8")
CARD_MODELS = {  # a column's model, and the flags beside those of all
    "Qwen3-8B": ("Qwen/Qwen3-8B",),
    "Qwen3-30B-A3B": ("Qwen/Qwen3-30B-A3B", "--lora.target_modules", "q_proj,k_proj,v_proj,o_proj"),
    "Qwen3-32B": ("Qwen/Qwen3-32B",),
    "Llama-3.3-70B": ("meta-llama/Llama-3.3-70B-Instruct",),
}
CARD_QUESTIONS = [
    (tokens, host, gib, model)
    for tokens, host in ((16384, 64), (65536, 128))
    for gib in (8, 12, 16, 24, 32, 48)
    for model in CARD_MODELS
]
DAILY_CARD = (16384, 64, 24, "Llama-3.3-70B")


@pytest.mark.parametrize(
    ("tokens", "host", "gib", "model"),
    [pytest.param(*q, marks=() if q == DAILY_CARD else pytest.mark.whole) for q in CARD_QUESTIONS],
)
def test_the_page_of_small_cards_has_what_is_answered(
    tokens: int, host: int, gib: int, model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = ["--model", *CARD_MODELS[model], "--gpu", "rtx4090", "--gpu-bytes", str(gib << 30), "--same", f"1x{tokens}"]
    words += ["--host-bytes", str(host << 30), "--lora.rank", "16", "--model.dtype", "bfloat16"]
    answer = ask([*words, "--model.frozen", "nf4"], capsys)
    section = CARDS.partition(f"## A document of {tokens:,} tokens, {host} GiB of host\n")[2].partition("\n## ")[0]
    column = 1 + [*CARD_MODELS].index(model)
    cells = [line.strip("| ").split(" | ")[column] for line in section.splitlines() if line.startswith(f"| {gib} GiB")]
    longest = f"{answer['longest']:,}" if answer["longest"] else "–"
    seconds = f"{answer['step_seconds']:.0f} s, {answer['host']['total'] / 2**30:.0f} GiB" if answer["fits"] else "–"
    assert cells == ([seconds, longest] if tokens == 16384 else [seconds])


def test_half_a_bus_takes_longer_where_copies_do_not_hide(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "Qwen/Qwen3-32B", "--gpu", "rtx4090", "--gpu-bytes", str(12 << 30), "--same", "1x256"]
    words += ["--lora.rank", "16", "--model.dtype", "bfloat16", "--model.frozen", "nf4"]
    usual, half = (ask([*words, *speed], capsys)["step_seconds"] for speed in ((), ("--host-speed", "13.75")))
    assert half > 1.3 * usual
    assert main(["plan", *words, "--host-speed", "-1"]) == 2
    assert "--host-speed -1: a speed is above 0" in capsys.readouterr().err


def test_frozen_weights_are_whole_or_in_four_bits_in_one_table(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"dtype": "bfloat16"}))
    words = ["--model", model, "--gpu", "h100", "--cp", "1", "--same", "1x4096"]
    lora = [*words, "--lora.rank", "4"]
    answer, full = ask(lora, capsys), ask(words, capsys)
    layers, width, heads, kv_heads, mlp = 4, 1024, 8 * 128, 4 * 128, 3072
    attention = [(width, heads), (width, kv_heads), (width, kv_heads), (heads, width)]
    linears = [*attention, (width, mlp), (width, mlp), (mlp, width)]
    # Each layer has norms of rows, and of the heads of queries and keys.
    count = (8192 + 1) * width + layers * (sum(rows * columns for rows, columns in linears) + 2 * width + 2 * 128)
    adapters = layers * 4 * sum(rows + columns for rows, columns in linears)
    assert answer["device"]["weights"] == count * 2 + adapters * 4
    assert full["device"]["weights"] == count * 4 and {way["frozen"] for way in full["alternatives"]} == {None}
    in_float32 = ask([*lora, "--model.dtype", "float32"], capsys)
    assert in_float32["device"]["weights"] == count * 4 + adapters * 4

    (packed,) = ask([*lora, "--model.frozen", "nf4"], capsys)["alternatives"]
    whole, nf4 = answer["alternatives"]
    assert (whole["frozen"], nf4) == ("bfloat16", packed) and packed["frozen"] == "nf4"
    assert whole["seconds"] == answer["step_seconds"] and packed["device_bytes"] < whole["device_bytes"]
    assert main(["plan", *lora]) == 0
    text = capsys.readouterr().out
    assert "\nfrozen weights: bfloat16 (model.dtype); the row nf4 has them in 4 bits: --model.frozen nf4\n" in text
    assert re.search(r"\nfrozen +layout .*\nbfloat16 +fixed, cp 1 .*\nnf4 +fixed, cp 1 ", text)
    small = ["--model", model, "--gpu-bytes", str(2 << 30), "--host-bytes", str(2 << 30), "--same", "1x60000"]
    assert main(["plan", *small, "--lora.rank", "4", "--model.dtype", "float32"]) == 2
    told = capsys.readouterr().err
    assert " or leave model.dtype out" in told and "; nor does it fit with --model.frozen nf4" in told, told


def test_packed_weights_have_a_row_where_there_are_any(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", model, *GPUS, "--same", "1x8192"]
    assert main(words) == 0 and "\npacked " not in capsys.readouterr().out
    frozen = ["--model.frozen", "nf4"]
    assert main([*words, *frozen]) == 2 and "model.frozen" in capsys.readouterr().err  # without an adapter
    assert main([*words, "--lora.rank", "4", "--model.frozen", "stored"]) == 2
    assert 'model.frozen is "stored", and ' in capsys.readouterr().err
    assert main([*words, "--lora.rank", "4", *frozen]) == 0 and "\npacked " in capsys.readouterr().out
