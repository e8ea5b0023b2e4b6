"""The commands in the documentation: their verbs and flags exist, and so do the files and targets that they name.

Nothing is run. A word in capitals stands for what the reader puts there.
"""

import re
import shlex
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from longspan.cli import flags
from longspan.cli.main import main
from longspan.config.file import config_keys, load_config
from longspan.config.other_names import NAMES
from longspan.config.sections import section_kinds
from longspan.errors import ConfigError
from longspan.run.checks import check_data, check_keys_needed_by_keys

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "bench/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += [ROOT / "bench/peers/README.md", ROOT / "examples/recipes/README.md"]
EXAMPLES = [path for path in sorted((ROOT / "examples").rglob("*")) if path.suffix in (".toml", ".sh", ".py")]
PARTIAL = "…"  # at the end of a command in running text, which may leave required flags out
OTHERS = {"bench/two_nodes.sh", "pip", "git", "hf", "cd", "docker", "sbatch", "srun", "echo", "export", "pytest"}
OTHERS |= {"nvidia-smi", "module", "mkdir", "ssh", "python", "torchrun"}


class ParsedError(Exception):
    """Raised in place of what a verb would do once its flags are read."""


def commands_of(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
        running = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        spans = re.findall(r"(?<!`)`((?:longspan|torchrun) [^`]*)`(?!`)", running)
        whole = [command for block in blocks for command in _lines(block)]
        return whole + [f"{' '.join(span.split())} {PARTIAL}" for span in spans]
    if path.suffix == ".sh":
        lines = [line.removesuffix(" '&'") for line in _lines(text)]
        return [line for line in lines if re.match(r"(srun |torchrun |longspan )", line)]
    header = re.findall(r"^(?:#   |`)((?:longspan|torchrun|python) [^`\n]*)", text, flags=re.MULTILINE)
    return [command.strip() for command in header]


def _lines(block: str) -> Iterator[str]:
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[-1:] == ["&"]:
            words.pop()
        if words:
            yield shlex.join(words)


def longspan_words(command: str) -> list[str] | None:
    words = shlex.split(command)
    if words[0] == "docker":  # where longspan is also an image
        return None
    for start in ("-m", "longspan"):
        if start in words and "longspan" in words[words.index(start) : words.index(start) + 2]:
            return words[words.index("longspan", words.index(start)) + 1 :]
    return None


def check_flags(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    read = flags.make_flags

    def stop_after(*arguments: Any) -> None:
        if PARTIAL not in words:
            read(*arguments[:-1], {})  # without the values of a file, which is not there
        raise ParsedError

    monkeypatch.setattr(flags, "make_flags", stop_after)
    as_number = ["2" if re.fullmatch(r"[A-Z]|\$?\{?[A-Z_]+\}?", word) else word for word in words]
    with pytest.raises(SystemExit if {"--help", "--help-all"} & {*words} else ParsedError):
        main([*(as_number[:-1] if as_number[-1] == PARTIAL else as_number), "--debug"])


COMMANDS = [(path, commands_of(path)) for path in (*PAGES, *EXAMPLES)]


@pytest.mark.parametrize(("path", "commands"), COMMANDS, ids=[path.name for path, _ in COMMANDS])
def test_commands_name_what_there_is(path: Path, commands: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert sum(len(of_file) for _, of_file in COMMANDS) > 40
    for command in commands:
        for named in re.findall(r"(?<![\w./-])(?:examples|bench|docs|tests)/[\w./-]+", command):
            is_made = "--out" in command or "--plot" in command
            assert (ROOT / named.rstrip(".")).exists() or is_made, f"{named} is not there: {command}"
        words, first = longspan_words(command), shlex.split(command)[0]
        if words is not None:
            if words[1:] not in ([], [PARTIAL]) and not {"NAME", "VERB"} & {*words}:
                with monkeypatch.context() as patch:
                    check_flags(words, patch)
        elif first == "make":
            assert {word for word in command.split()[1:] if "=" not in word} <= targets, command
        else:
            assert first in OTHERS, f"nothing is known of {first!r}: {command}"


CONFIGURATIONS = [
    pytest.param(block, id=f"{page.stem} {number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL), 1)
]


@pytest.mark.parametrize("block", CONFIGURATIONS)
def test_a_configuration_on_a_page_is_one_of_a_new_run(block: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(block, encoding="utf-8")
    config = load_config(tmp_path / "run.toml")
    check_keys_needed_by_keys(config)
    check_data(config)


# flags of torchrun, Slurm, docker, hf, transformers and TRL that pages name
FOREIGN = {"shutdown_timeout", "signals_to_handle", "signal", "requeue", "build_arg", "ipc", "network", "local_dir"}
FOREIGN |= {"use_peft", "lora_dropout", "section.key", *" ".join(NAMES.values()).split()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_and_keys_in_the_text_of_a_page_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8").partition("\n## From 0.2 to 0.3")[0]  # behind it: keys that are gone
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    spans = re.findall(r"`([^`\n]+)`", text)
    ours = re.sub(r"^## Megatron-LM and NeMo\n.*?^(?=## )", "", text, flags=re.DOTALL | re.MULTILINE)  # its flags
    written = re.findall(r"(?<![\w-])--([a-z][\w.-]*)", " ".join(re.findall(r"`([^`\n]+)`", ours)))
    named = {flag.rstrip(".").replace("-", "_") for flag in written}
    assert named <= FOREIGN | known_flags() | {*config_keys()}, sorted(named)
    dotted = {span for span in spans if re.fullmatch(rf"({'|'.join(section_kinds())})\.[a-z_]+", span)}
    dotted = {
        name
        for name in dotted
        if not re.search(r"\.(jsonl?|toml|lock|py)$|^mtp\.(fc|pre_fc)|^checkpoint\.save_contents$", name)
    }
    assert dotted <= {*config_keys(), "section.key"}, sorted(dotted)


SECTION = "|".join(section_kinds())


def keys_with_values(path: Path) -> set[tuple[str, str]]:
    """`key = value` in backticks, `section.key` and its value in two cells of a table, and in comments of examples."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".toml":
        return {*re.findall(r"#.*?\b([a-z_]+) = (\".*?\"|true|false|[0-9.]+)", text)}
    if path.suffix != ".md":
        return set()
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    spans = re.findall(rf"`((?:(?:{SECTION})\.)?[a-z_]+) = ([^`\n]+)`", text)
    cells = re.findall(rf"\| `((?:{SECTION})\.[a-z_]+)` \| `([^`\n]+)`", text)
    return {*spans, *cells}


@pytest.mark.parametrize(
    "path", [path for path in (*PAGES, *EXAMPLES) if path.name != "upgrade.md"], ids=lambda p: p.name
)
def test_keys_with_a_value_are_keys_of_today_that_take_it(path: Path) -> None:
    for key, value in keys_with_values(path):
        with suppress(tomllib.TOMLDecodeError):  # Python, or a word that stands for a value
            values = tomllib.loads(f"value = {value}")
            names = [name for name in config_keys() if name == key or name.endswith(f".{key}")]
            wrong = list[str]()
            for name in names:
                try:
                    load_config(None, {name: values["value"]})
                except ConfigError as error:
                    wrong.append(str(error))
            assert len(wrong) < len(names), f"{path.name}: {key} = {value}: {wrong or 'no key'}"


@cache
def known_flags() -> frozenset[str]:
    verbs = (ROOT / "docs/reference/verbs.md").read_text(encoding="utf-8")
    paths = [path for name in ("bench", "examples", "tests") for path in (ROOT / name).rglob("*.py")]
    quoted = re.findall(r"[\"']--([a-z][\w-]*)", "\n".join(path.read_text(encoding="utf-8") for path in paths))
    flags = [*re.findall(r"`--([\w.-]+)`", verbs), *quoted, "help", "debug", "version"]
    return frozenset(flag.replace("-", "_") for flag in flags)


OWN_RUNS = [words for _, commands in COMMANDS for command in commands if (words := longspan_words(command)) is not None]
OWN_RUNS = [words for words in OWN_RUNS if words[:1] == ["train"] and "--model.path" in words and PARTIAL not in words]


@pytest.mark.parametrize("words", OWN_RUNS, ids=" ".join)
def test_a_command_on_a_model_of_ones_own_says_how_long_it_trains(words: list[str]) -> None:
    assert {"--train.epochs", "--train.steps", "--show", "--dry-run"} & {*words} or words[1].endswith(".toml")
