"""The command line is pinned: verbs, flags, their help, and what is said of those that do not exist."""

import re
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin

import pytest

from longspan import __version__
from longspan.bench.step import StepFlags, parse_step_flags
from longspan.cli.eval import EvalFlags, parse_eval
from longspan.cli.flags import WHOLE_WORDS, check_flag_names, flag_types, parse_flags
from longspan.cli.generate import GenerateFlags
from longspan.cli.main import VERBS, main
from longspan.cli.plan import PlanFlags
from longspan.cli.train_flags import TrainFlags, parse_train
from longspan.config.defaults import resolve_defaults
from longspan.config.file import config_keys, load_config
from longspan.config.other_names import NAMES
from longspan.config.sections import ContextConfig, RunConfig
from longspan.errors import ConfigError
from tests.train.small import value_of

PINNED = Path(__file__).with_name("flags.txt")


def test_flags_and_verbs_are_those_that_are_pinned() -> None:
    """A flag that is new, renamed or gone is a decision: write it into flags.txt, and into the changelog."""
    keys = [f"train {flag}" for flag in flag_types(TrainFlags)] + [f"eval {flag}" for flag in flag_types(EvalFlags)]
    keys += [f"plan --{field.name}" for field in fields(PlanFlags)]
    assert keys == PINNED.read_text().splitlines()
    assert [f"--{key}" for key in config_keys()] == [flag for flag in flag_types(TrainFlags) if "." in flag]
    assert list(VERBS) == [
        "train",
        "eval",
        "generate",
        "export",
        "plan",
        "bench",
        "report",
        "examples",
        "doctor",
    ]


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(("verb", "kind"), [("train", TrainFlags), ("eval", EvalFlags), ("plan", PlanFlags)])
def test_help_all_names_and_explains_every_flag(
    verb: str, kind: type, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = help_of(capsys, verb, "--help-all")
    names = [flag if "." in flag else flag.replace("_", "-") for flag in flag_types(kind)]
    shown = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
    assert sorted(shown) == sorted({"--data.path": "--data"}.get(name, name) for name in names)
    assert verb == "plan" or "Slots that share a document in evaluation" in text
    assert not {"(default: -1", "(default: ''", "(default: )"} & {*" ".join(text.split()).split(")")}


def test_help_shows_the_keys_that_most_runs_set_their_defaults_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, "train", "--help")
    assert len(text.splitlines()) < 90 and text.count("  longspan train ") == 3
    assert "Default: 300;" in text and "Default: 65536" in " ".join(text.split())
    assert "--optimizer.weight_decay" not in text and "longspan train --help-all shows all" in text
    plan = help_of(capsys, "plan", "--help")
    assert all(title in plan for title in ("what shall fit:", "where:", "what is shown:"))
    assert "--seed" not in plan and "--which-eval-degree" in plan
    assert "_" not in plan.split("longspan plan")[1].split()[0]


def test_data_and_data_path_are_one_name(tmp_path: Path) -> None:
    words = [str(tmp_path), "--world", "2"]
    for flag in ("--data", "--data.path", f"--data={words[0]}", f"--data.path={words[0]}"):
        words = [flag] if "=" in flag else [flag, str(tmp_path)]
        assert parse_train(words)[1].data.path == str(tmp_path)
        assert parse_eval(["runs/x", *words]).data == (str(tmp_path),)
        assert parse_flags(PlanFlags, words, "longspan plan").data == str(tmp_path)


def test_the_command_alone_shows_its_verbs_and_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"], ["-h"], ["help"]):
        assert main(words) == 0
        text = capsys.readouterr().out
        assert all(f"  {verb} " in text for verb in VERBS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"longspan {__version__}\n"


LEVELS = "hierarchical_context_parallel_sizes"
NO_STEPS = "longspan train has no flag --train.stpes: did you mean '--train.steps'"
WRONG = [
    ("trian", "longspan has no verb 'trian': did you mean 'train'?"),
    ("train --steps=5", "longspan train has no flag --steps: did you mean '--train.steps'?"),
    ("plan --formt json", "longspan plan has no flag --formt: longspan plan --help-all lists those"),
    ("plan x.toml --gpu h100", "longspan plan reads no configuration; longspan train x.toml --dry-run"),
    ("train --train.lr 1e-5", "longspan train has no flag --train.lr: did you mean '--optimizer.lr'?"),
    ("train --train.float8 rows", "--train.float8 is 'rows'; it must be one of '', 'rowwise'"),
    (
        "train --dynamic-context-parallel --min-dynamic-context-parallel-size 2 --max-seqlen-per-dp-cp-rank=4096",
        "longspan train has no flag --dynamic-context-parallel: here it is --context.planner dynamic; no flag "
        "--min-dynamic-context-parallel-size: did you mean '--context.min_dynamic_context_parallel_size'?; no flag "
        "--max-seqlen-per-dp-cp-rank: here it is --context.max_tokens_per_slot\n",
    ),
    (
        "train --sequence-packing-scheduler default_dynamic_cp",
        "longspan train has no flag --sequence-packing-scheduler: here it is --context.planner (dynamic for "
        "default_dynamic_cp, fixed for dp_balanced)\n",
    ),
    (
        "plan --hybrid-context-parallel --context-parallel-size 4 --max-dynamic-context-parallel-size 4",
        "longspan plan has no flag --hybrid-context-parallel: here it is --context.planner dynamic; no flag "
        "--context-parallel-size: did you mean '--context.context_parallel_size'?; no flag "
        "--max-dynamic-context-parallel-size: did you mean '--context.max_dynamic_con",
    ),
    (
        "eval x --eval-context-parallel-size 2",
        "longspan eval has no flag --eval-context-parallel-size: here it is --evaluation.context_parallel_size",
    ),
    ("eval x --sample_packing", "longspan eval has no flag --sample-packing: leave it out, for plans pack whole docum"),
    (
        "train --parallelism.context_parallel_degree 4",
        "longspan train has no flag --parallelism.context_parallel_degree: here it is --context.context_parallel_size",
    ),
    ("doctor --learning-rate 1e-5", "longspan doctor has no flag --learning-rate: "),
    ("plan --slts 4", "longspan plan has no flag --slts: did you mean '--slots'?"),
    ("plan --compare --slots 4 --tp 0 --same 2x5", "parallel.tp is 0; it must be at least 1"),
    ("eval x --train.steps 5", "longspan eval has no flag --train.steps"),
    ("train --world -1", "--world is -1"),
    ("train --parallel.tp two", "--parallel.tp is 'two'; it must be an integer"),
    ("train --optimizer.lr=", "--optimizer.lr is ''; it must be a number"),
    ("train --parallel.tp --json", "--parallel.tp has no value; it must be an integer"),
    ("train --train.offload_optimizer_states=maybe", "--train.offload_optimizer_states is 'maybe'; it must be true or"),
    ("train --parallel.pipeline_schedule 1f1", "--parallel.pipeline_schedule is '1f1'; it must be one of '1f1b', "),
    (
        "plan --same 2x5 --planner dynamc",
        "context.planner is 'dynamc'; did you mean 'dynamic'?, or a function of your own",
    ),
    ("train --train.fused_norms off", "longspan train has no flag --train.fused_norms: "),
    (
        "train --optimizer.betas 0.9",
        "longspan train has no flag --optimizer.betas: here it is --optimizer.arguments (betas",
    ),
    (f"train --context.{LEVELS} 2 x", f"--context.{LEVELS} is '2 x'; it must be an integer or a list of integers\n"),
    ("plan --hierarchical-context-parallel-sizes 2,x", "--context.hierarchical_context_parallel_sizes is '2,x'; it"),
    ("plan --hierarchical-context-parallel-sizes=[]", "--context.hierarchical_context_parallel_sizes has no value"),
    ("train --lora.target_modules --json", "--lora.target_modules has no value; it must be a list of strings"),
    ("train a.toml b.toml", "longspan train does not know what 'b.toml' is for: it takes [CONFIG.toml], and fl"),
    ("doctor a", "longspan doctor does not know what 'a' is for: its flags begin with --"),
    ("export a", "longspan export needs a folder to write the model to: longspan export runs/first my-model"),
    ("export", "longspan export needs a run's folder or a checkpoint and a folder to write the model to: longspan ex"),
    ("report --json", "longspan report needs a run's folder, or the JSON file of a plan: longspan report runs/first"),
    ("eval", "longspan eval needs a run's folder, a checkpoint or a Hugging Face folder: longspan eval runs/first"),
    ("plan", "what shall fit? give --longest, documents of a step (--same 1x262144, --lengths FILE.json, "),
    ("train --data a b c", "--data takes one path, and got a b c; name several in CONFIG.toml, each as"),
    ("train --data a none.toml", "cannot read the configuration none.toml: No such file or directory"),
    ("train --train.stpes 5 --wrld=2", f"{NO_STEPS}?; no flag --wrld: did you mean '--world'?"),
    ("eval nowhere", "there is no run nowhere"),
    ("eval runs/x/checkpoints/step-000007", "there is no checkpoint runs/x/checkpoints/step-000007"),
]


NOT_NEEDED = "nothing|leave|always|the same|is learnt, by default"


def other_keys() -> dict[str, str]:
    """Keys of other libraries in the tables of docs/migration.md, with what the page answers."""
    page = (Path(__file__).parents[2] / "docs/migration.md").read_text("utf-8").partition("## ring-flash")[0]
    answers = dict[str, str]()
    lines = page.splitlines()
    for line, below in pairwise(lines):
        if not line.startswith("| ") or below.startswith("|---"):
            continue
        *others, answer = line.strip().strip("|").split("|")
        for text in others:
            # values in brackets, classes and commands are no keys
            for code in re.findall("`([^`]*)`", re.sub(r"\((`[^`]*`(, )?)+\)", "", text)):
                if (
                    match := re.fullmatch(r"(?:--)?([a-z][\w.-]*)(?:[:=].*| \d+)?", code)
                ) and "distributed." not in code:
                    key = match[1].replace("-", "_")
                    answers[key] = answers.get(key, "") + answer
    return answers


def is_named(key: str, text: str) -> bool:
    section, _, name = key.partition(".")
    return bool(re.search(rf"`(--)?({section}\.)?{name}\b", text))


def test_every_key_of_migration_md_is_hinted() -> None:
    types = flag_types(TrainFlags)
    wrong = list[str]()
    for key, answer in other_keys().items():
        own = [name for name in config_keys() if is_named(name, answer)]
        section, _, last = key.rpartition(".")
        hints = list[str]()
        with pytest.raises(ConfigError) as error:
            load_config(None, {section or last: {last: 1} if section else 1})
        hints.append(str(error.value))
        if f"--{key}" not in types:
            with pytest.raises(ConfigError) as error:
                check_flag_names([f"--{key}", "1"], types, "longspan train")
            hints.append(str(error.value))
        for hint in hints:
            names_ours = any(re.search(rf"(it is|mean) '?(--)?{re.escape(name)}\b", hint) for name in own)
            if not names_ours and not (re.search(NOT_NEEDED, answer) and "leave it out, for " in hint):
                wrong.append(f"{hint}: docs/migration.md has {answer}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("words", "tables"),
    [
        (["--context.cost_model", "1"], {"dist": {"x": 1}}),
        (["--optimizer.cost", "1"], {"nccl": {"x": 1}}),
        (["--dist.backend", "1"], {"zero_optimization": {"stage3": 1}}),
    ],
)
def test_no_name_is_suggested_that_is_nothing_like_it(words: list[str], tables: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--help-all lists those") as error:
        check_flag_names(words, flag_types(TrainFlags), "longspan train")
    assert "did you mean" not in str(error.value)
    with pytest.raises(ConfigError, match=r"unknown section .*: known: model, data") as error:
        load_config(None, tables)
    assert "did you mean" not in str(error.value)


def test_names_of_other_libraries_are_those_of_the_tables_of_migration_md() -> None:
    page = (Path(__file__).parents[2] / "docs/migration.md").read_text()
    rows = [row.strip("| \n").replace("-", "_").split(" | ") for row in page.splitlines() if row.startswith("| ")]
    codes = [" ".join(re.findall("`(.*?)`", " ".join(row[:-1]))) for row in rows]
    others = [{*re.findall(r"[a-zA-Z]\w*", code), *re.findall(r"[a-z_]+\.[a-z_]+", code)} for code in codes]
    for own, names in NAMES.items():
        key = own.partition(" ")[0]
        assert key in config_keys() or own.startswith("leave it out, for ")
        for name in names.split():
            answers = [row[-1] for row, in_row in zip(rows, others, strict=True) if name in in_row]
            expected = rf"\b{key.rpartition('.')[2]}\b" if "." in key else NOT_NEEDED
            assert any(re.search(expected, answer) for answer in answers), f"docs/migration.md: {name}, {own}"


@pytest.mark.parametrize(("words", "message"), WRONG, ids=[words for words, _ in WRONG])
def test_an_error_is_one_line_and_exit_code_2(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith(f"error: {message}") and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "sizes"),
    [(["2", "4"], (2, 4)), (["2,4"], (2, 4)), (["[2,4]"], (2, 4)), (["[2,", "4]"], (2, 4)), (["2"], 2), (["[2]"], 2)],
)
def test_sizes_of_levels_in_every_spelling(words: list[str], sizes: object) -> None:
    for key in (f"--context.{LEVELS}", f"--evaluation.{LEVELS.replace('_', '-')}"):
        spelled = [[key, *words], [f"{key}={words[0]}", *words[1:]]]
        for flags in spelled if len(words) == 1 or words[0] == "[2," else spelled[:1]:
            config = parse_train([*flags, "--world", "4"])[1]
            assert value_of(config, key[2:].replace("-", "_")) == sizes
            assert parse_eval(["runs/x", *flags]).context == parse_train(flags)[0].context
            if not key.startswith("--context"):
                continue
            assert parse_step_flags(flags)[0].context == replace(parse_train(flags)[0].context, cp_comm_type="auto")
    plan = parse_flags(PlanFlags, [f"--{LEVELS}", *words, "--slots", "8"], "longspan plan")
    assert plan.hierarchical_context_parallel_sizes == sizes


def list_flags() -> list[tuple[Any, str, Any]]:
    """Every flag of every verb that takes a list, with its flags dataclass and the type of an entry."""
    kinds = (TrainFlags, EvalFlags, GenerateFlags, PlanFlags, StepFlags)
    options = [
        (kind, flag, option)
        for kind in kinds
        for flag, hint in flag_types(kind).items()
        for option in (get_args(hint) if isinstance(hint, UnionType) else (hint,))
    ]
    repeated = {"--data", "--prompt"}  # once for each value, which may hold anything
    lists = [(kind, flag, get_args(option)[0]) for kind, flag, option in options if get_origin(option) is tuple]
    return [entry for entry in lists if entry[1] not in repeated]


def test_lists_take_commas_and_spaces_alike() -> None:
    seen = set[str]()

    def read(kind: Any, words: Sequence[str]) -> Any:
        flags = parse_flags(kind, words, "longspan x")
        return value_of(flags, flag[2:]) if "." in flag else getattr(flags, flag[2:])

    for kind, flag, item in list_flags():
        seen.add(flag)
        values = ["SIGUSR1", "SIGHUP"] if get_origin(item) is Literal else ["3", "2"] if item is int else ["a.b", "c.d"]
        expected = (3, 2) if item is int else tuple(values)
        start = ["runs/x"] if kind is EvalFlags or kind is GenerateFlags else []
        spellings = [
            [flag, *values],
            [flag, ",".join(values)],
            [f"{flag}={','.join(values)}"],
            [flag, ", ".join(values)],
        ]
        spellings += [[flag, f"[{','.join(values)}]"]]
        if flag in WHOLE_WORDS:
            values = ["a* lr=1e-5", "b lr=2"] if flag.endswith("groups") else ["a=[1, 2]", "b=3,4"]
            assert read(kind, [*start, flag, *values]) == tuple(values)
            continue
        for words in spellings:
            assert read(kind, [*start, *words]) == expected, words
    assert seen > WHOLE_WORDS and "--lora.target_modules" in seen
    page = " ".join((Path(__file__).parents[2] / "docs" / "reference" / "verbs.md").read_text("utf-8").split())
    assert all(f"`{flag}`" in page.partition("| verb |")[0] for flag in WHOLE_WORDS)


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--world", "3", "--context.context_parallel_size", "2", "--debug"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err and err.splitlines()[-1].startswith("error: ")


def test_torchrun_lines_name_the_rank(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert main(["train", "--evaluation.context_parallel_size", "4"]) == 2
    assert capsys.readouterr().err.startswith("error (rank 3): evaluation.context_parallel_size 4 does not divide 6")
    assert main(["train", "--world", "4"]) == 2
    assert "torchrun has started 6; leave it out" in capsys.readouterr().err


def test_every_true_or_false_of_a_run_is_read() -> None:
    keys = [name for name, kind in flag_types(TrainFlags).items() if "." in name and kind is bool]
    assert "--mtp.train_whole" in keys and "--data.parse_special_tokens" in keys
    for value in ("true", "false"):
        flags, config = parse_train([word for key in keys for word in (key, value)])
        assert {value_of(config, key[2:]) for key in keys} == {value == "true"} and not flags.config
    assert {value_of(parse_train(keys)[1], key[2:]) for key in keys} == {True}


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        "[train]\nsteps = 7\n[optimizer]\nlr = 1\n[parallel]\nreshard_after_forward = false\n"
    )
    words = [str(tmp_path / "a.toml"), "--train.steps", "9", "--context.cp_comm_type", "p2p", "all_gather", "--world=4"]
    flags, config = parse_train([*words, "--train.activation-checkpointing", "true"])
    expected: dict[str, object] = {"train.steps": 9, "optimizer.lr": 1.0, "train.activation_checkpointing": "full"}
    expected |= {"parallel.reshard_after_forward": False, "context.cp_comm_type": ("p2p", "all_gather")}
    assert config == load_config(None, expected) and flags.world == 4 and not flags.json


def test_without_file_or_flags_there_are_the_defaults_and_eval_takes_the_section_of_its_run() -> None:
    flags, config = parse_train(["--device", "cpu"])
    assert config == resolve_defaults(RunConfig(), 1) and (flags.config, flags.world) == ("", 0)
    of_run = replace(RunConfig(), context=ContextConfig(node_size=3))
    given = parse_eval(["runs/x", "--json", "--evaluation.context_parallel_size", "1"], of_run)
    assert (given.target, given.json) == ("runs/x", True)
    assert given.context == ContextConfig(node_size=3) and given.evaluation.context_parallel_size == 1
