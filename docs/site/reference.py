"""The pages of docs/reference/, made from the public names and from the flags of verbs: python docs/site/reference.py

Each public name is shown once, on the page of its subject; a namespace that has it too names it and links there. What a
page says of a name is its docstring, which mkdocstrings reads from the source. The page of the verbs has the texts of
`--help`, from the same dataclasses. tests/test_site.py compares the pages.
"""

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

from longspan.bench.benches import BENCHES
from longspan.bench.calibrate import CalibrateFlags
from longspan.bench.step import StepFlags
from longspan.cli.doctor import DoctorFlags
from longspan.cli.eval import EvalFlags, refuse_training_keys
from longspan.cli.examples import ExamplesFlags
from longspan.cli.export import ExportFlags
from longspan.cli.flags import flag_types, word_fields
from longspan.cli.generate import GenerateFlags
from longspan.cli.main import VERBS
from longspan.cli.plan import PlanFlags
from longspan.cli.report import ReportFlags
from longspan.cli.train_flags import TrainFlags
from longspan.config.keys import read_own_texts, section_keys, section_texts
from longspan.config.sections import section_kinds
from longspan.config.values import annotation_text
from longspan.errors import ConfigError

PAGES = {
    "plan": (
        "Layouts and plans",
        "the home of a run, plans, the planners, and what plans cost. None of it imports torch",
        ("longspan.layout", "longspan.plan"),
    ),
    "train": (
        "Steps, losses and evaluation",
        "what runs a plan: steps, losses of your own, evaluation, optimizers and checkpoints",
        ("longspan.train", "longspan.evaluation", "longspan.checkpoint", "longspan.mtp", "longspan.lm_eval"),
    ),
    "model": (
        "Models, encoders and layers",
        "how a Hugging Face model comes under a home, models of several modules, and exact attention and scans for "
        "models of your own",
        ("longspan.model", "longspan.multimodal", "longspan.bridge", "longspan.attention", "longspan.ssm"),
    ),
    "package": (
        "The package, Trainers, tools and errors",
        "the names that can be imported from `longspan` itself, of Trainers, corpora, the doctor and tests, and of "
        "errors. Messages are in [what is refused](../limits.md) and in [troubleshooting](../troubleshooting.md)",
        ("longspan", "longspan.hf", "longspan.corpus", "longspan.doctor", "longspan.testing", "longspan.errors"),
    ),
}
FOLDER = Path(__file__).resolve().parents[1] / "reference"
FLAGS: dict[str, Any] = {
    "train": TrainFlags,
    "eval": EvalFlags,
    "generate": GenerateFlags,
    "export": ExportFlags,
    "plan": PlanFlags,
    "report": ReportFlags,
    "doctor": DoctorFlags,
    "examples": ExamplesFlags,
    "bench step": StepFlags,
    "bench calibrate": CalibrateFlags,
}


def public_names(namespace: str) -> list[str]:
    """What a namespace offers: its `__all__`, or every error class."""
    module = import_module(namespace)
    if namespace == "longspan.errors":
        return [
            name
            for name, value in vars(module).items()
            if getattr(value, "__module__", "") == namespace and isinstance(value, type)
        ]
    return sorted(module.__all__, key=str.lower)


def pages() -> dict[str, str]:
    """The text of each page by its name."""
    shown: dict[int, tuple[str, str]] = {}  # a value, and the page and the path that show it
    texts = {}
    for page, (title, covers, namespaces) in PAGES.items():
        parts = [f"# {title}\n\nThis page is the reference of {covers}.\n"]
        for namespace in namespaces:
            parts.append(f"## {namespace}\n")
            entries, elsewhere = [], []
            for name in public_names(namespace):
                value = getattr(import_module(namespace), name)
                if id(value) in shown and not isinstance(value, (str, int, float, tuple)):
                    owner, path = shown[id(value)]
                    link = f"#{path}" if owner == page else f"{owner}.md#{path}"
                    elsewhere.append(f"- [`{name}`]({link}): {(inspect.getdoc(value) or '').partition(chr(10))[0]}")
                else:
                    shown[id(value)] = (page, f"{namespace}.{name}")
                    entries.append(f"::: {namespace}.{name}\n")
            if elsewhere:
                parts.append("\n".join([f"`{namespace}` also has:\n", *elsewhere, ""]))
            parts += entries
        texts[page] = "\n".join(parts)
    return texts | {"verbs": verbs_page()}


VERBS_HEAD = """\
# Verbs and flags

This page is the reference of the command `longspan`: each verb with all its flags, their defaults and what they say.
`longspan VERB --help-all` prints the same texts. A flag may be written with dashes or underscores, and with `=` or a
space before its value. A list has spaces or commas between its values: `--lora.target_modules q_proj k_proj`,
`q_proj,k_proj` and `[q_proj, k_proj]` are one. Only spaces part the values of lists that may hold a comma, so that
quotes keep a value with spaces together: `--plot`, `--data.rename_columns`, `--train.loss_arguments`,
`--optimizer.arguments`, `--optimizer.groups`. A flag whose text says *again for more*, such as `--prompt`, is given
once for each value, as it stands. `--data` and `--data.path` are one flag, in every verb. Every verb takes `--debug`,
which shows the traceback of an error.

| verb | what it does |
|---|---|
"""
ENDS = """
The exit code is 0 where all went well, 1 where a check of `doctor` fails, 2 for an error that the caller can mend, such
as a run that does not fit its GPUs, 3 for a lost rank, and 128 plus the number of a signal that ended the command. A
run that was told to stop, and has saved, ends with `checkpoint.preempted_exit_code`.
"""
KEYS = "[keys](../configuration.md)"


def verbs_page() -> str:
    """The page of the verbs: what each does, and a table of its flags."""
    texts = VERBS | {f"bench {name}": text for name, text in BENCHES.items()}
    rows = [f"| [{verb}](#longspan-{verb.replace(' ', '-')}) | {texts[verb]} |" for verb in FLAGS]
    return VERBS_HEAD + "\n".join(rows) + "\n" + ENDS + "\n" + "\n".join(map(verb_section, FLAGS))


def verb_section(verb: str) -> str:
    """The section of a verb: the text above its flags, its table, and the keys of runs that it takes."""
    kind = FLAGS[verb]
    rows = list(flag_rows(kind))
    table = "\n".join(["| flag | value | default | meaning |", "|---|---|---|---|", *rows])
    keys = key_sentence(verb, kind)
    return f"## longspan {verb}\n\n{verb_text(kind)}\n\n{keys}{table}\n"


def verb_text(kind: Any) -> str:
    """The docstring of a class of flags; lines that are commands become one block."""
    paragraphs = (inspect.getdoc(kind) or "").split("\n\n")
    commands = [line for line in paragraphs if line.startswith("longspan ")]
    words = [line for line in paragraphs if line not in commands]
    lines = [re.sub(r" {2,}(.*)", r"  # \1", line) for line in commands]
    block = "\n".join(["```bash", *lines, "```"])
    return "\n\n".join([*words, *([block] if lines else [])])


def flag_rows(kind: Any) -> Iterator[str]:
    """The row of each flag that is not a key of runs with the same text; the words without a flag come first."""
    texts, hints = flag_texts(kind), get_type_hints(kind)
    flags = flag_types(kind)
    yield from (
        row(f"`{word_fields(kind)[name].metavar}`", hints[name], default_of(kind, name), texts[name])
        for name in positionals(kind)
    )
    for name in hints:
        if is_dataclass(hints[name]):
            keys = [key for key in section_keys(hints[name]) if not is_key_of_runs(name, key.name, hints[name])]
            inner = section_texts(hints[name])
            yield from (row(f"`--{name}.{key.name}`", key.kind, key.default, inner[key.name]) for key in keys)
        elif f"--{name}" in flags:
            yield row(f"`--{name.replace('_', '-')}`", hints[name], default_of(kind, name), texts[name])


def flag_texts(kind: Any) -> dict[str, str]:
    """The text of each flag, which stands below it in the source; that of the class itself wins."""
    return {name: text for base in reversed(kind.__mro__[:-1]) for name, text in read_own_texts(base).items()}


def positionals(kind: Any) -> list[str]:
    """The fields that are words without a flag."""
    return list(word_fields(kind))


def default_of(kind: Any, name: str) -> Any:
    """The default of a field; inspect.Parameter.empty where it must be given."""
    return inspect.signature(kind).parameters[name].default


def row(title: str, kind: Any, default: Any, text: str) -> str:
    """A row of a table of flags."""
    value = "given or not" if kind is bool and default is False else annotation_text(kind).replace("'', ", "")
    shown = "*must be given*" if default is inspect.Parameter.empty else default_text(default, text)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in (title, value, shown, text)) + " |"


def default_text(default: Any, text: str) -> str:
    """A default as JSON writes it; nothing of what is not given, or where the text names it."""
    if "Default" in text:
        return "*see text*"
    return "" if default in ("", ()) or default is False else f"`{json.dumps(default, ensure_ascii=False)}`"


def is_key_of_runs(section: str, key: str, kind: Any) -> bool:
    """Whether a flag is a key of the page of keys, with the same text."""
    known = section_kinds().get(section)
    if known is None or key not in section_texts(known):
        return False
    return section_texts(known)[key] == section_texts(kind)[key]


def key_sentence(verb: str, kind: Any) -> str:
    """Which keys of runs a verb takes as flags; "" if none."""
    if verb in ("train", "plan"):
        return f"All {KEYS} are flags too, as `--section.key value`, except tables. The others are:\n\n"
    parts = []
    for section, names in shared_keys(verb, kind).items():
        whole = len(names) == len(section_keys(section_kinds()[section]))
        parts.append(f"all of `[{section}]`" if whole else ", ".join(f"`--{section}.{name}`" for name in names))
    return f"Of the {KEYS}, these are flags too: {'; '.join(parts)}. The others are:\n\n" if parts else ""


def shared_keys(verb: str, kind: Any) -> dict[str, list[str]]:
    """The keys of runs that a verb takes, by section: those with the same text that it does not refuse."""
    shared: dict[str, list[str]] = {}
    for section, inner in get_type_hints(kind).items():
        for key in section_keys(inner) if is_dataclass(inner) else ():
            if is_key_of_runs(section, key.name, inner) and not (verb == "eval" and is_refused(section, key.name)):
                shared.setdefault(section, []).append(key.name)
    return shared


def is_refused(section: str, key: str) -> bool:
    """Whether `eval` refuses a key, as one of training."""
    try:
        refuse_training_keys(frozenset((f"{section}.{key}",)))
    except ConfigError:
        return True
    return False


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for page, text in pages().items():
        (FOLDER / f"{page}.md").write_text(text, encoding="utf-8")
