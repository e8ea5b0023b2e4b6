"""Flags of `longspan plan` that ask whether a run fits GPUs and how long it takes, and the words that are keys of runs.

With `--gpu` or `--gpu-bytes` every key of `longspan train` stands on the command line by its own name. Flags of plans
that mean the same as a key are read as that key. Imports no torch.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from longspan.cli.flags import Switch, TrainFlags, check_flag_names, flag_types, parse_flags
from longspan.cli.plans.planning import PlanningFlags
from longspan.config.sections import RunConfig, section_kinds
from longspan.errors import ConfigError

AnyFlags = TypeVar("AnyFlags", bound="GpuFlags")
PROG = "longspan plan"
ASKING = ("--gpu", "--gpu_bytes")  # one of them makes a question of memory and time
# Flags of plans, and the keys of training that they stand for here.
KEYS = {
    "--data": "--data.path",
    "--tokenizer": "--data.tokenizer",
    "--max_document_tokens": "--data.max_document_tokens",
    "--tokens_per_step": "--train.tokens_per_step",
    "--epochs": "--train.epochs",
    "--machine": "--run.machine",
    "--mtp_depths": "--mtp.depths",
    "--dp_replicate": "--parallel.dp_replicate",
    "--tp": "--parallel.tp",
    "--pp": "--parallel.pp",
    "--vpp": "--parallel.vpp",
    "--planner": "--context.planner",
    "--cp": "--context.context_parallel_size",
    "--min_cp": "--context.min_dynamic_context_parallel_size",
    "--max_cp": "--context.max_dynamic_context_parallel_size",
    "--max_tokens_per_slot": "--context.max_tokens_per_slot",
    "--cp_comm_type": "--context.cp_comm_type",
    "--hierarchical_context_parallel_sizes": "--context.hierarchical_context_parallel_sizes",
    "--partition": "--context.partition",
    "--mode": "--context.mode",
    "--node_size": "--context.node_size",
}
OF_QUESTIONS = ("gpu", "gpus", "gpu_bytes", "host_bytes", "tflops", "longest", "model", "json", "help")
OF_DOCUMENTS = ("lengths", "same", "distribution", "tokens", "longest_document", "seed")


@dataclass(frozen=True, kw_only=True)
class GpuFlags(PlanningFlags):
    """Whether a run fits GPUs, with which keys, and how long it takes: flags that only such a question has."""

    gpu: str = ""
    """GPUs to plan memory and time for: a100-40, a100-80, h100, h200, b200, or a file of longspan bench calibrate.
    Every key of longspan train may stand behind it, as --lora.rank 16."""
    gpus: int = 1
    """With --gpu or --gpu-bytes: how many of them."""
    gpu_bytes: int = 0
    """Bytes of a GPU, in place of those of --gpu; of another GPU with --tflops. 0: those of --gpu."""
    host_bytes: int = 0
    """With --gpu or --gpu-bytes: bytes of the host's memory that are free for each GPU; 0: 128 GiB, an assumption."""
    longest: Switch = False
    """With --gpu or --gpu-bytes: the most tokens of one document over all of them, and what takes which bytes."""
    tokens_per_step: int = 0
    """With --gpu and --data: as train.tokens_per_step; 0: its default."""
    epochs: float = 0.0
    """With --gpu and --data: as train.epochs; 0: one, unless train.steps is given."""


@dataclass(frozen=True)
class Question:
    """What a command line asks of GPUs: the configuration of its keys without defaults, and the keys that it gives."""

    config: RunConfig
    given_keys: frozenset[str]

    def gives_any(self, *keys: str) -> bool:
        """Return whether one of these keys is given."""
        return not self.given_keys.isdisjoint(keys)


def asks_for_gpus(argv: Sequence[str]) -> bool:
    """Return whether the words of a command name GPUs, and so ask whether a run fits them.

    Raises ConfigError for --longest with a number, which was another flag once, and, if no GPUs are named, for flags
    and keys that only such a question has.
    """
    clauses = [*_split_words(argv)]
    names = {name for name, _ in clauses}
    for name, values in clauses:
        if name == "--longest" and values:
            raise ConfigError(
                f"--longest {' '.join(values)}: --longest takes no number, it asks for the longest document that fits "
                f"GPUs (--gpu); the longest document of --distribution is --longest-document {values[0]}"
            )
    if not names.isdisjoint(ASKING):
        return True
    question_flags = {"--gpus", "--host_bytes", "--longest", "--tokens_per_step", "--epochs"}
    if stray_flags := [name for name, _ in clauses if name in question_flags or _is_key(name)]:
        flag = stray_flags[0] if "." in stray_flags[0] else stray_flags[0].replace("_", "-")
        raise ConfigError(f"{flag} is of a question about GPUs; name them with --gpu, such as --gpu h100 --gpus 4")
    return False


def parse_question(kind: type[AnyFlags], argv: Sequence[str]) -> tuple[AnyFlags, Question]:
    """Parse the flags and the keys of a command line that names GPUs; some keys also have a short flag (KEYS).

    Raises ConfigError for an unknown flag, for a key that is given by both of its names, and for a flag of plans that
    such a question does not read.
    """
    types = flag_types(kind) | {name: hint for name, hint in flag_types(TrainFlags).items() if "." in name}
    check_flag_names(argv, types, PROG)
    words, keys, flag_of = list[str](), list[str](), dict[str, str]()
    for name, values in _split_words(argv):
        key = name if _is_key(name) else KEYS.get(name, "")
        if not key:
            _check_flag(name)
            words += [name, *values]
            continue
        if (other_flag := flag_of.get(key, name)) != name:
            flags_of_key = (flag if _is_key(flag) else flag.replace("_", "-") for flag in (other_flag, name))
            raise ConfigError(f"{' and '.join(flags_of_key)} are the same key, and both are given; leave one out")
        flag_of[key] = name
        keys += [key, *values]
    flags = parse_flags(kind, words, PROG)
    key_flags = parse_flags(TrainFlags, keys, PROG, TrainFlags())
    sections: dict[str, Any] = {name: getattr(key_flags, name) for name in section_kinds()}
    config = RunConfig(**sections)
    return flags, Question(config, frozenset(key[2:] for key in flag_of))


def set_model(question: Question, folder: str) -> Question:
    """Set the model of --model in the question. Raises ConfigError where no model is named, or more than one."""
    model = question.config.model
    model_keys = [key for key in ("path", "config", "preset") if getattr(model, key)]
    if folder and model_keys:
        raise ConfigError(
            f"--model {folder} and model.{model_keys[0]} {getattr(model, model_keys[0])!r} both name a model"
        )
    if not folder and not model_keys:
        raise ConfigError(
            "which model? give --model FOLDER (its config.json is enough), or --model.preset NAME, such as qwen3-8b"
        )
    model = replace(model, path=folder) if folder else model
    return Question(replace(question.config, model=model), question.given_keys)


def _split_words(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag with underscores, and the words behind it; first "" and the words before any flag."""
    name, values = "", list[str]()
    for word in argv:
        if not word.startswith("--"):
            values.append(word)
            continue
        if name or values:
            yield name, values
        flag, equals, value = word.partition("=")
        name, values = "--" + flag[2:].replace("-", "_"), [value] * bool(equals)
    if name or values:
        yield name, values


def _is_key(name: str) -> bool:
    """Return whether a flag is a key of the configuration, --section.key."""
    return "." in name


def _check_flag(name: str) -> None:
    """Raise ConfigError for a flag that a question about GPUs does not read; tyro refuses words without a flag."""
    if not name or name[2:] in (*OF_QUESTIONS, *OF_DOCUMENTS):
        return
    instead = {"--slots": "; --gpus N is how many GPUs there are", "--world": "; --gpus N is how many GPUs there are"}
    flag = name.replace("_", "-")
    raise ConfigError(
        f"{flag} is of plans without memory, and --gpu asks what fits GPUs; leave it out{instead.get(name, '')}"
    )


def find_source(flags: Any, question: Question) -> str:
    """Find which documents are asked about: "longest", "data", or the flag of their lengths.

    >>> find_source(PlanFlags(same="1x262144"), question)  # doctest: +SKIP
    'same'
    """
    sources = [name for name in ("lengths", "same", "distribution") if getattr(flags, name)]
    sources += ["data"] * question.gives_any("data.path")
    if flags.longest and sources:
        raise ConfigError(
            f"--longest asks for the longest document, and --{sources[0]} names documents; leave one of them out"
        )
    if len(sources) > 1:
        raise ConfigError(f"--{' and --'.join(sources)} are both given; give one of them")
    if not sources and not flags.longest:
        raise ConfigError(
            "what shall fit? give --longest, documents of a step (--same 1x262144, --lengths FILE.json, "
            "--distribution NAME), or a run's --data PATH"
        )
    _check_data_flags(question, sources)
    return sources[0] if sources else "longest"


def _check_data_flags(question: Question, sources: Collection[str]) -> None:
    """Raise ConfigError for keys that only a run's data has, if the question's sources of documents lack "data"."""
    for key in ("data.tokenizer", "train.epochs", "train.tokens_per_step"):
        if question.gives_any(key) and "data" not in sources:
            raise ConfigError(f"{key} is of a run, whose documents --data names; add --data PATH, or leave it out")
