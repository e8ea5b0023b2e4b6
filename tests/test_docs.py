"""The programs and commands in documentation, README and examples/ run as they stand; their figures are recorded."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from longspan import __version__
from longspan.cli.main import main
from longspan.cli.plan import PlanFlags
from longspan.cli.plans.gpu_run import GpuRun
from longspan.cli.plans.gpus import read_gpus
from longspan.cli.plans.planning import read_lengths
from longspan.cli.plans.question import parse_question
from longspan.cli.train_flags import parse_train
from longspan.config.defaults import resolve_defaults
from longspan.corpus.tokenizer import train_tokenizer
from longspan.model import load_model
from longspan.plan import read_plans
from longspan.resolve.planner_config import PlannerConfig
from longspan.resolve.ways import Way, fit_way
from longspan.run.checks import check_config
from tests.train.small import write_texts

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
# Programs that make their own data, and a reference model or a sampler, take more lines than the 80 of others; their
# learning is tested in the whole suite, here their first steps.
LONG = ("two_modules.py", "eval_wider.py", "grpo.py")
LONGER = {"dpo.py": (105, "--steps", "1"), "grpo.py": (105, "--steps", "2")}
# Homes of "parallelism", depths of "mtp" and the proof of "doctor" are in daily tables of their rooms.
NIGHTLY = ("parallelism", "mtp", "doctor")
RunProgram = Callable[..., str]


def run(script: Path, *words: str) -> str:
    command = [sys.executable, str(script), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_script(patch: pytest.MonkeyPatch, script: str, *words: str) -> None:
    patch.setattr(sys, "argv", [script, *words])
    patch.syspath_prepend((ROOT / script).parent)
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    except SystemExit as ended:
        assert not ended.code, ended.code


def blocks_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


@pytest.fixture
def run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> RunProgram:
    def run_program(name: str, program: str, *words: str) -> str:
        program = program.replace('if __name__ == "__main__":', "def program() -> None:")
        (tmp_path / f"{name}.py").write_text(program)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *words])
        capfd.readouterr()
        module = import_module(name)
        getattr(module, "program", lambda: None)()
        return capfd.readouterr().out

    return run_program


@pytest.fixture
def run_page(run_here: RunProgram) -> RunProgram:
    def run_blocks(name: str, *changes: tuple[str, str]) -> str:
        program = "\n\n".join(blocks_of(f"docs/{name}.md"))
        for old, new in changes:
            assert old in program
            program = program.replace(old, new)
        return run_here(f"page_{name}".replace("-", "_"), program)

    return run_blocks


def same_losses(printed: str) -> bool:
    losses = [float(loss) for loss in re.findall(r"(?:after it|: loss) (\d+\.\d+)", printed)]
    return len(losses) == 3 and max(losses) - min(losses) <= 2e-6


def two_modules_learn(printed: str) -> bool:
    words = r"loss (\S+), after 8 steps (\S+); evaluated at degree 2 (\S+), at degree 1 (\S+)"
    first, last, wide, narrow = map(float, re.findall(words, printed)[0])
    return last < first - 0.5 and abs(wide - narrow) <= 2e-6


def the_fastest_type_is_chosen(printed: str) -> bool:
    found = re.findall(r"^(\S+).* takes (\S+) ms", printed, re.MULTILINE)
    milliseconds = {name: float(number) for name, number in found}
    chosen = re.findall(r"^auto: (\S+)", printed, re.MULTILINE)
    fastest = min(milliseconds, key=lambda name: milliseconds[name])
    return milliseconds.keys() == {"p2p", "all_gather", "a2a", "a2a+p2p"} and chosen == [fastest]


def figures_are_those_of_the_page(printed: str) -> bool:
    expected = re.findall(r"print\(.*\)  # ([^,\n]+)", (ROOT / "docs/figures.md").read_text())
    return len(expected) == 4 and not [words for words in expected if words not in printed]


def rows_are_written(printed: str) -> bool:
    return printed.strip() == "4 images" and len(Path("shapes/rows.jsonl").read_text().splitlines()) == 4


def depths_learn(printed: str) -> bool:
    losses = [float(x) for x in re.findall(r"\d+\.\d+", printed)]
    return len(losses) == 3 and max(losses) < 3.0


# what a page prints; of the homes of "parallelism" those with split rows and with stages, on two ranks: others are in
# tables of rooms
PAGES: dict[str, Callable[[str], Any]] = {
    "tour": same_losses,
    "evaluation": same_losses,
    "doctor": lambda printed: "float64, cp 2, p2p, full recomputation exact" in printed,
    "hybrid": lambda printed: printed == "",  # its assertions hold
    "planning": lambda printed: "x the lower bound" in printed,
    "figures": figures_are_those_of_the_page,
    "fine-tuning": lambda printed: "targets: Light.<|endoftext|>" in printed,
    "attention": the_fastest_type_is_chosen,
    "parallelism": lambda printed: [line[:4] for line in printed.splitlines()] == ["tp 2", "pp 2"],
    "bridge": two_modules_learn,
    "vision-models": re.compile(r"loss .*, after 4 steps .*; evaluated at .*\n").fullmatch,
    "multimodal": rows_are_written,
    "losses": re.compile(r"loss -?0\.0\d+; of pairs 0\.6931, \d micro-batches twice\n").fullmatch,
    "shared-prefixes": lambda printed: printed == "4 documents, 1 shared prefix: 520 rows in place of 1,717\n",
    "mtp": depths_learn,
}
CHANGES = {
    "parallelism": (
        ("in HOMES:", "in HOMES[3::2]:"),
        *((f'"{name}", Layout(ranks=4', f'"{name}", Layout(ranks=2') for name in ("tp 2", "pp 2")),
        ("(main, 4)", "(main, 2)"),
    ),
    # steps of training, and ranks
    "evaluation": (("range(1, 4)", "range(1, 2)"), ("fixed(4", "fixed(2"), ("(main, 4)", "(main, 2)")),
    "vision-models": (("range(4)", "range(2)"),),
    "bridge": (("range(8)", "range(5)"),),
}
ALONE = {"README", "memory", "own-loop", "gpu", "laptop"}  # below; tests/hf runs "trainer"


@pytest.mark.filterwarnings("ignore:.*are no part of the.*itself")  # the depths of mtp.md, which are added then
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.whole] * (n in NIGHTLY)) for n in PAGES])
def test_a_page_is_one_program(name: str, run_page: RunProgram) -> None:
    printed = run_page(name, *CHANGES.get(name, ()))
    assert PAGES[name](printed), printed


def test_no_page_has_a_program_that_is_not_run() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    assert {page.stem for page in pages if "```python" in page.read_text()} == {*PAGES, *ALONE, "trainer"}


DRAWN = [  # a picture of docs/, and the script that draws it
    ("convergence", "bench/training/convergence.py", "--draw", f"{ROOT}/bench/records/convergence.json"),
    ("precision", "bench/training/precision.py", "--draw", f"{ROOT}/bench/records/precision.json"),
    ("bridge", "bench/plans/bridge_picture.py"),
]  # fmt: skip


@pytest.mark.parametrize("command", DRAWN, ids=lambda command: command[0])
def test_pictures_are_drawn_by_their_commands(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, script, *words = command
    run_script(monkeypatch, script, *words, "--plot", str(tmp_path / "drawn.svg"))
    assert (tmp_path / "drawn.svg").read_text() == (ROOT / f"docs/{name}.svg").read_text()


def test_gains_of_dynamic_plans_are_those_of_their_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = ROOT / "bench/records/dynamic-worth.json"
    words = ["--draw", str(record), "--tables", "--plot", str(tmp_path / "a.svg")]
    run_script(monkeypatch, "bench/plans/worth.py", *words)
    gains, *tables = capsys.readouterr().out.strip().split("\n\n")
    page = (ROOT / "docs/planning.md").read_text()
    assert len(tables) == 5 and all(table in page for table in (gains, *tables))
    assert (tmp_path / "a.svg").read_text() == (ROOT / "docs/dynamic-worth.svg").read_text()
    values = json.loads(record.read_text())
    rows = values["gains"].values()
    equal = sum(row["gain"] < 1.03 for row in rows)
    assert len(rows) == 95 and f"in {equal} of 95 rows" in page
    fast, slow = ([row["gain"] for row in rows if (row["gbps"] > 3) == is_fast] for is_fast in (True, False))
    words = (
        rf"up to {max(fast):.2f} times as fast with 12.5 to 50 GB/s .*, and up to {max(slow):.2f} times with 2.65 GB/s"
    )
    assert re.search(words, page)
    worst = {n: max(part, key=lambda row: row["regret"])["constant"] for n, part in values["sensitivity"].items()}
    most = worst["256"], worst["8192"]  # what the page says of many GPUs
    assert worst["256"] == worst["1024"] and re.search(
        "1,024 GPUs the {} matters most, on 8,192 the {}".format(*most), page
    )
    assert min(row["gain"] for row in rows) >= 1 - 1e-9, "a dynamic plan is not slower than the best plan of one degree"


def test_tables_of_the_page_on_planning_are_those_of_their_records_and_commands() -> None:
    page, predictions = ((ROOT / path).read_text() for path in ("docs/planning.md", "bench/records/predictions.md"))
    figures = re.findall(r"^\| (?:chosen over|seconds|planned bytes).*? \| (\d+ % \|.*)$", predictions, re.MULTILINE)
    (table,) = re.findall(r"^\| what \| limit .*\n(?:\|.*\n)+", page, re.MULTILINE)
    assert [row.partition("% |")[2] for row in re.findall(r"\d+ % \|.*", table)] == [
        x.partition("% |")[2] for x in figures
    ]
    current = predictions.partition("Older code")[0].partition("## Seconds")[2]
    assert current.count("| forward, ") == 8 and "Of evaluations it has eight" in page
    # plan --compare of 202 documents: the planned rows of the page's first table, without the search for their limit
    (command,) = re.findall(r"^longspan (plan --compare --distribution lognorm .*?) +#", page, re.MULTILINE)
    flags, question = parse_question(PlanFlags, command.split()[1:])
    config = resolve_defaults(question.config, flags.gpus)
    run = GpuRun.with_model(config, read_gpus(flags, ""))
    lengths, _ = read_lengths(flags, run.home.slots)
    way = Way(config, run.facts_of_step(lengths))
    shown = re.findall(r"^(dynamic|fixed|padded)(?:, cp (\d+))? .* ([\d,]+) +\d+ +([\d.]+) s ", page, re.MULTILINE)
    assert len(shown) == 5
    for planner, degree, rows, seconds in shown:
        keys = {"planner": planner, "context_parallel_size": int(degree or 1), "cp_comm_type": "auto"}
        ways = (way.with_context(**keys, mode=mode) for mode in ("lockstep", "free"))
        fit = min((fit_way(way, way.plan_steps([0])) for way in ways), key=lambda fit: fit.rank)
        assert f"{max(plan.most_rows for plan in fit.plans):,}" == rows
        assert fit.seconds == pytest.approx(float(seconds), rel=0.01), planner


@pytest.mark.whole
def test_a_few_rows_of_what_dynamic_plans_are_worth(tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "bench/plans/worth.py"), "--quick", "--out", str(tmp_path / "worth.json")]
    subprocess.run(words, check=True, timeout=240)
    record = json.loads((tmp_path / "worth.json").read_text())
    assert len(record["gains"]) == 2 and all(row["gain"] > 0.97 for row in record["gains"].values())
    assert record["published"] and record["emulated"] and max(row["regret"] for row in record["sensitivity"]["16"]) < 1
    done = subprocess.run(words, check=True, timeout=60, capture_output=True, text=True)
    assert not done.stdout, "a run goes on with what its record lacks"


def test_the_planner_of_the_page_on_planning_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs/planning.md").read_text()
    (command,) = re.findall(r"^PYTHONPATH=examples longspan (train (?:.*\\\n)*.*)$", page, re.M)
    words = command.replace("\\\n", " ").replace("examples/", f"{ROOT}/examples/").replace("--world 4", "").split()
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}/examples:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(ROOT / "examples")
    small = ["--data.path", str(write_texts(tmp_path / "texts")), "--data.vocab_size", "300", "--train.steps", "1"]
    small += ["--optimizer.warmup_steps", "0", "--run.dir", str(tmp_path / "run"), "--train.tokens_per_step", "256"]
    small += ["--data.max_document_tokens", "128", "--evaluation.context_parallel_size", "2", "--world", "2"]
    assert main([*words, *small]) == 0, capfd.readouterr()
    plans = [plan for _, plan in read_plans(tmp_path / "run" / "plans.jsonl")]
    assert [plan.planner for plan in plans] == ["own_planner.two_degrees"]


@pytest.mark.whole
def test_examples_of_losses_learn() -> None:
    margin, won = re.findall(r"after: reward margin (\S+), preferred in (\d+)%", run(ROOT / "examples/dpo.py"))[0]
    assert float(margin) > 1 and int(won) > 90
    rewards = re.findall(r"mean reward before (\S+), after (\S+)", run(ROOT / "examples/grpo.py"))[0]
    assert float(rewards[0]) < 0.15 and float(rewards[1]) > 0.5


def test_the_page_on_own_loops_shows_the_lines_of_its_program() -> None:
    program = "".join((ROOT / f"examples/{name}.py").read_text() for name in ("own_loop", "own_rows"))
    blocks = blocks_of("docs/own-loop.md")
    assert len(blocks) == 6 and all(block in program for block in blocks)


def test_the_program_of_the_readme_runs(run_here: RunProgram) -> None:
    (block,) = blocks_of("README.md")
    training, evaluation = map(float, run_here("readme", block).strip("()\n").split(", "))
    assert 0 < evaluation < training and len(README.splitlines()) <= 120


MEMORY = """
from longspan.testing import run_ranks

def main(rank):
    import numpy as np
    import torch

    from longspan import Layout, World
    from longspan.model import load_model, prepare
    from longspan.plan import plan_fixed

    with World(Layout(2)) as world:
        model = load_model(preset="qwen3-tiny", vocab_size=64)
        plan = plan_fixed([30, 8], world.home, cp=2)
        names = vars() | {"documents": [np.arange(30), np.arange(8)], "folder": "runs/mine"}
        exec(BLOCK, names)
        assert names["memory"].checkpoint_policies == ("none", "none")
        moments = sum(x.nbytes for state in names["optimizer"].state.values() for x in state.values() if x.ndim)
        assert 0 < moments // 2 <= names["optimizer"].host_bytes

if __name__ == "__main__":
    run_ranks(main, 2)
"""


def test_the_program_of_the_page_on_memory_runs(run_here: RunProgram) -> None:
    block = "\n".join(blocks_of("docs/memory.md"))
    printed = run_here("memory", f"BLOCK = {block!r}\n{MEMORY}")
    assert "memory: 2 of 2 layers keep all" in printed and "bytes of the host, at most" in printed


def test_the_architecture_names_the_rooms_and_files_that_there_are() -> None:
    page, source = (ROOT / "docs/architecture.md").read_text(), ROOT / "src/longspan"
    rows = re.findall(r"^\| `(\w+)/` \| [^|]+ \|(.*)\|$", page, flags=re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = " | ".join(project["tool"]["importlinter"]["contracts"][0]["layers"]).split(" | ")
    assert [room for room, _ in rows] == [name for name in layers if (source / name).is_dir()]
    assert {room for room, _ in rows} == {path.parent.name for path in source.glob("*/__init__.py")}
    named = [source / room / name for room, words in rows for name in re.findall(r"`([a-z_/]+(?:\.py)?)`", words)]
    assert len(named) > 10 and all(path.exists() for path in named), named
    below = page.split("Below all are")[1]
    alone = {path.stem for path in source.glob("*.py") if not path.stem.startswith("__")}
    assert alone <= set(re.findall(r"`(?:longspan\.)?(\w+)`", below))


@pytest.mark.parametrize(
    ("page", "place", "prompt"), [("gpu", "runs/mine/model", "def main("), ("laptop", "exported", "The first")]
)
def test_a_page_generates_with_stock_transformers(
    page: str, place: str, prompt: str, tmp_path: Path, run_page: RunProgram
) -> None:
    folder = tmp_path / place
    train_tokenizer(["def main():"], 300).save_pretrained(folder)
    load_model(preset="qwen3-tiny", vocab_size=300).save_pretrained(folder)
    printed = run_page(page)
    assert printed.startswith(prompt) and len(printed) > len(f"{prompt}\n")


def test_the_example_of_an_adapter_trains_one_and_stock_peft_loads_it(run_here: RunProgram) -> None:
    printed = run_here("example_lora", (ROOT / "examples/lora.py").read_text())
    first, last, alone = map(float, re.findall(r"\d+\.\d+", printed))
    assert first == alone and last < first - 0.3 and "stock peft loads it: 8 ranks in adapter/" in printed


SHORTEST = ("first.toml",)
OWN_DATA = ("vlm.toml",)  # tests/corpus/images/test_run.py has such runs
CONFIGURATIONS = [
    pytest.param(path, id=path.name, marks=[pytest.mark.whole] * (path.name not in SHORTEST))
    for path in sorted((ROOT / "examples").glob("*.toml"))
    if path.name not in OWN_DATA
]


@pytest.mark.parametrize("path", CONFIGURATIONS)
def test_configurations_of_examples_train(path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = path.with_suffix(".py")  # what makes its texts and their tokenizer
    if made.is_file():
        subprocess.run([sys.executable, str(made)], check=True, timeout=60, cwd=tmp_path)
    else:
        write_texts(tmp_path / "texts")
    settings = {
        "data.path": tmp_path / ("runs/passkey-text/texts" if made.is_file() else "texts"),
        "data.tokenizer": tmp_path / "runs/passkey-text" if made.is_file() else "",
        "data.vocab_size": 300,
        "data.max_document_tokens": 128,
        "evaluation.documents": 3,
        "train.tokens_per_step": 256,
        "train.steps": 1,
        "optimizer.warmup_steps": 0,
        "run.dir": tmp_path / "run",
    }
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    capfd.readouterr()
    assert main(["train", str(path), "--world", "4", "--device", "cpu", "--json", *words]) == 0
    losses = [row["eval_loss"] for row in json.loads(capfd.readouterr().out)["eval_at_degrees"]]
    assert len(losses) > 1 and max(losses) / min(losses) - 1 <= 1e-6


# a page runs what two_modules.py does, tests of their own a step of grpo.py, lora.py, own_loop.py and own_rows.py
TESTED = (*LONG, "lora.py", "own_loop.py", "own_rows.py")
TESTED_ELSEWHERE = ("grpo_trl.py", "loggers.py", "sft_trl.py", "trainer.py")  # by tests/hf and tests/run/loggers
EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.name not in TESTED_ELSEWHERE]
PROGRAMS = [pytest.param(path, id=path.name, marks=[pytest.mark.whole] * (path.name in TESTED)) for path in EXAMPLES]


def test_examples_stay_short() -> None:
    for path in EXAMPLES:
        most, *_ = LONGER.get(path.name, (80,))
        assert len(path.read_text().splitlines()) <= most, path.name


@pytest.mark.parametrize("script", PROGRAMS)
def test_examples_run(script: Path, run_here: RunProgram) -> None:
    _, *words = LONGER.get(script.name, (80,))
    assert run_here(f"example_{script.stem}", script.read_text(), *words)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    shown = set(re.findall(r"^::: (\S+)$", page.read_text(), flags=re.MULTILINE))
    return shown | {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "bench/README.md"], ids=lambda p: p.name
)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
        found = (page.parent / target) if target else page
        assert found.exists(), f"{page.name} links to {target}, which is not there"
        assert not anchor or anchor in anchors(found), f"{page.name} links to {target}#{anchor}, which is no heading"


# ---- commands


CONFIGURED = sorted((ROOT / "examples").rglob("*.toml"))


def commands(path: Path) -> list[tuple[int, list[str]]]:
    found = []
    for line in re.findall(r"^#   (.*longspan train .*)$", path.read_text(), flags=re.MULTILINE):
        words = shlex.split(line)
        flag = next(flag for flag in ("--world", "--nproc-per-node", "--ranks") if flag in words)
        nodes = 2 if words[0].endswith("two_nodes.sh") else 1
        found.append((nodes * int(words[words.index(flag) + 1]), words[words.index("train") + 1 :]))
    return found


COMMANDS = [
    pytest.param(ranks, words, id=f"{path.stem}-{ranks}")
    for path in CONFIGURED
    if "-lora-" not in path.stem  # recipes with the lengths of those of whole models
    for ranks, words in commands(path)
]


@pytest.mark.parametrize(("ranks", "words"), COMMANDS)
def test_a_configuration_fits_the_ranks_of_its_command(
    ranks: int, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(
        "longspan.cli.train_flags.with_local_folders", lambda config, **_: config
    )  # data that nobody has made yet
    _, config = parse_train(words)
    home = check_config(config, ranks)
    choice = PlannerConfig.training(config)
    longest = config.data.max_document_tokens
    choice.check_longest_document(longest, home, f"a document of {longest} tokens")
    PlannerConfig.evaluation(config).check_longest_document(longest, home, f"a document of {longest} tokens")
    assert longest <= config.train.tokens_per_step


def test_every_configuration_states_its_command() -> None:
    assert all(commands(path) for path in CONFIGURED) and len(CONFIGURED) >= 8
    eight = [path for path in CONFIGURED if any(ranks == 8 for ranks, _ in commands(path))]
    assert len(eight) >= 3


def test_the_commands_for_gpus_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = [
        shlex.split(line, comments=True)
        for line in re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)[1].splitlines()
    ]
    assert [words[:2] for words in commands[:2]] == [["pip", "install"], ["hf", "download"]]
    name = commands[1][-1]
    cached = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
    folder = cached / "snapshots/1"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    lengths = ["--chats", "6", "--shortest", "64", "--longest", "300", "--vocabulary", "400"]
    with monkeypatch.context() as patch:  # chats of a part of the library
        patch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(Path(json.__file__).parents[1] / "asyncio")})
        run_script(patch, "bench/data/made_chats.py", ".", *lengths)
    tokenizer = AutoTokenizer.from_pretrained("tokenizer")
    tokenizer.save_pretrained(folder)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 16,
    }
    config = Qwen3Config(**sizes, num_key_value_heads=2, vocab_size=len(tokenizer), max_position_embeddings=1 << 18)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("1")
    plan = re.search(r"`longspan (plan .*?)`", README)
    assert plan is not None and main(shlex.split(plan[1])) == 0
    for words in commands[2:]:
        assert words.pop(0) == "longspan"
        ranks = ["--world", "2", "--device", "cpu"] if words[0] == "train" else []
        assert main([*words, *ranks]) == 0, capsys.readouterr()
    assert (tmp_path / "exported/model.safetensors").is_file()


def test_figures_of_speed_are_recorded() -> None:
    cells = r" \| ([\d,]*) ?\| ([\d,]*) ?\| ([\d,]+) \| ([\d,]+) \|$"
    rows = re.findall(rf"^\| ([14]), [\d× ]+K{cells}", README, re.M)
    assert [gpus for gpus, *_ in rows] == ["1"] * 3 + ["4"] * 3
    for gpus, lora, their_lora, ours, theirs in rows:
        record = "one-gpu-full-H200.md" if gpus == "1" else "step-4xH200.md"
        lines = (ROOT / "bench/records" / record).read_text().splitlines()
        if gpus == "1":
            peers = (ROOT / "bench/records/one-gpu-peer-H200.md").read_text()
            assert f"| {their_lora} | {lora} |" in peers
            assert any(f"| {ours} | {theirs} |" in line for line in lines)
            continue
        assert not lora + their_lora
        assert any(f"| {ours} |" in line and "longspan" in line for line in lines)
        assert any(f"| {theirs} |" in line and "Hugging Face" in line for line in lines)
    text = " ".join(README.split())
    better = re.search(
        r"\(4 × 8K, (\d+) and (\d+) GiB\) it has ([\d,]+) and ([\d,]+), longspan ([\d,]+) and ([\d,]+) "
        r"\((\d+) and (\d+) GiB\): ([\d.]+) and ([\d.]+) ×",
        text,
    )
    assert better is not None
    numbers = r"\| ([\d,]+) \| ([\d,]+) \| ([\d.]+) GiB \| ([\d.]+) GiB \| ([\d.]+) \|"
    full, lora = re.findall(rf"\| Qwen3-8B, (?:full|LoRA) \| 4 x 8,192 {numbers}", peers)
    said = [x for pair in zip(lora, full, strict=True) for x in pair]
    order = (2, 3, 4, 5, 0, 1, 6, 7, 8, 9)  # of peer, longspan, both peaks and the ratio, LoRA before full
    assert [better.groups()[i] for i in order] == [f"{float(x):.0f}" if 3 < i < 8 else x for i, x in enumerate(said)]
    # and the price in memory on one GPU, from the least to the most
    spans = re.findall(r"(\d+) to (\d+)(?: GiB)?", re.findall(r"on one GPU (\d+ to .*?\))\.", text)[0])
    peaks = list[list[float]]()
    for record, table, columns in (
        ("one-gpu-peer-H200.md", "qlora", (5, 4)),
        ("one-gpu-full-H200.md", "--mode full", (6, 9)),
    ):
        part = (ROOT / "bench/records" / record).read_text().split(table, 1)[1].split("\n\n", 2)[1]
        cells = [line.split(" | ") for line in part.splitlines()[2:]]
        peaks += [[float(re.findall(r"[\d.]+", row[column])[0]) for row in cells] for column in columns]
    assert spans == [(f"{min(column):.0f}", f"{max(column):.0f}") for column in peaks]


def test_the_readme_claims_figures_of_the_last_two_versions_alone() -> None:
    """And the page of measurements says of each record which version it is of: the oldest that its page names."""
    records = {path.stem: path for path in sorted((ROOT / "bench/records").glob("*.json"))}
    records |= {path.stem: path for path in sorted((ROOT / "bench/records").glob("*.md"))}
    rows = re.findall(r"^\| (0\.\d+) \| (.*) \|$", (ROOT / "bench/README.md").read_text(), re.M)
    versions = {name: version for version, names in rows for name in names.split(", ")}
    assert sum(len(names.split(", ")) for _, names in rows) == len(versions)
    assert set(versions) == set(records)
    for name, path in records.items():
        named = re.findall(r"longspan (0\.\d+)\b", path.read_text()) if path.suffix == ".md" else []
        assert not named or versions[name] == min(named), name
    *_, previous, newest = sorted(re.findall(r"^## (0\.\d+)\.0 ", (ROOT / "CHANGELOG.md").read_text(), re.M))
    assert __version__.startswith(newest)
    linked = re.findall(r"\]\(bench/records/([^)]*)\.\w+\)", README)
    assert linked and all(versions[name] in (previous, newest) for name in linked), linked


def test_combinations_of_the_matrix_are_recorded() -> None:
    """Each row of the record is half of its combinations: those of one dtype."""
    record = (ROOT / "bench/records/training-matrix.md").read_text()
    cells = r"\| \d+ \| (\d+) of (\d+) \| \d+ \| (\d+) \| (float\d+) \| (\S+) \| (\S+) \| (\S+) \|"
    rows = re.findall(cells, record)
    assert all(done == every for done, every, *_ in rows)
    exact, single = ([row for row in rows if row[3] == dtype] for dtype in ("float64", "float32"))
    assert all(float(error) <= 1e-12 for *_, loss, gradients, weights in exact for error in (loss, gradients, weights))
    count = sum(int(row[0]) for row in exact) // 2
    kept = count - sum(int(row[2]) for row in single)
    text = " ".join(README.split())
    assert f"[{count} combinations](bench/records/training-matrix.md) equal" in text
    assert f"in float32 {kept} keep" in text
