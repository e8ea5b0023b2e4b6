"""The two questions about GPUs: `longspan plan --gpu …` and `longspan train … --dry-run`. No GPU is needed for either.

`plan --gpu` chooses what its flags leave open. `--dry-run` takes a configuration and its data as they are, and the
bytes of the GPUs here, else of those that run.machine names, else of H200s. No weights and no world are needed.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

from longspan.cli.machine import find_first_gpu
from longspan.cli.plans.answer import Answer, answer_longest, answer_run, answer_step, repeat_words, show_answer
from longspan.cli.plans.fit import Choices
from longspan.cli.plans.gpu_run import RunOnGpus
from longspan.cli.plans.lengths import read_lengths
from longspan.cli.plans.planning import find_machine
from longspan.cli.plans.question import HOST_BYTES, GpuFlags, Gpus, Question, find_source, read_gpus
from longspan.cli.plans.run_documents import open_documents
from longspan.cli.processes import count_host_ranks, has_torchrun, is_reporting
from longspan.config.defaults import resolve_defaults
from longspan.config.keys import AUTO, NOT_GIVEN
from longspan.config.sections import RunConfig
from longspan.host_memory import free_host_bytes
from longspan.plan import Machine
from longspan.plan.cost.machine import find_device
from longspan.run.checks import check_config, check_files

HOST_SHARE = 0.85  # of the host's free memory, as a run takes it


def answer_gpu_question(flags: GpuFlags, question: Question) -> int:
    """Answer a question about GPUs; returns the exit code. Raises LongspanError for one that cannot be answered."""
    source = find_source(flags, question)
    config = question.config
    gpus = read_gpus(flags, config.run.machine)
    if not question.gives_any("context.cp_comm_type"):  # then the fastest type
        config = replace(config, context=replace(config.context, cp_comm_type=AUTO))
    config = resolve_defaults(config, gpus.count)
    if source == "data" and not question.gives_any("train.epochs", "train.steps"):
        config = replace(config, train=replace(config.train, epochs=1.0))
    run, choices = RunOnGpus.of(config, gpus), _open_choices(question)
    if source == "data":
        answer = _answer_data(run, question.given_keys, choices, estimate=True)
    elif source == "longest":
        answer = answer_longest(run, question.given_keys, choices)
    else:
        lengths, lengths_source = read_lengths(flags, run.home.slots)
        answer = answer_step(run, lengths, lengths_source, question.given_keys, choices)
    return show_answer(answer, _command_words(config, question), as_json=flags.json, write=flags.write)


def dry_run(config: RunConfig, words: Sequence[str], file: str, *, ranks: int, on_gpus: bool, as_json: bool) -> int:
    """Print what a run of this configuration would hold and take; returns the exit code.

    `words` are those behind `longspan train`, and `file` is the configuration among them. `on_gpus` False leaves the
    GPUs here aside. Raises ConfigError for keys and files that the run refuses, and PlanError where it does not fit;
    with `as_json` the answer says that it does not fit, and 0 is returned.
    """
    check_config(config, ranks)
    if not is_reporting():  # of torchrun's ranks the first answers for all
        return 0
    check_files(config)
    run = RunOnGpus.of(config, _choose_gpus(config, ranks, on_gpus=on_gpus))
    choices = Choices(planner=False, degree=False, rows=config.context.max_tokens_per_slot == AUTO)
    # No key counts as given by a question: the printed command repeats the words and the file, with their keys.
    answer = _answer_data(run, frozenset(), choices, estimate=False)
    return show_answer(answer, repeat_words(words, file, answer.keys), as_json=as_json)


def _answer_data(run: RunOnGpus, given_keys: frozenset[str], choices: Choices, *, estimate: bool) -> Answer:
    """Answer a question about a run, whose documents are opened or estimated."""

    def log(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    with open_documents(run.config, log, estimate=estimate) as documents:
        share, rows = documents.target_share, documents.image_rows
        run = replace(run, config=documents.config, target_share=share, image_rows=rows)
        return answer_run(run, documents, given_keys, choices)


def _command_words(config: RunConfig, question: Question) -> list[str]:
    """Write the command of the run, with words in capitals for what the question does not say."""
    model, data = config.model, config.data
    name = f"--model.path {model.path}" if model.path else f"--model.preset {model.preset}"
    words = [f"longspan train {name} --data.path {data.path if question.gives_any('data.path') else 'DATA'}"]
    words += [f"--data.tokenizer {data.tokenizer}"] * bool(data.tokenizer)
    words += ["--train.lr LR"] * (config.train.lr == NOT_GIVEN)
    return words


def _open_choices(question: Question) -> Choices:
    """Find what the keys of a question leave open."""
    degrees = ("min_dynamic_context_parallel_size", "max_dynamic_context_parallel_size", "context_parallel_size")
    is_auto = question.config.context.max_tokens_per_slot == AUTO
    return Choices(
        planner=not question.gives_any("context.planner"),
        degree=not question.gives_any(*(f"context.{key}" for key in degrees)),
        rows=is_auto or not question.gives_any("context.max_tokens_per_slot"),
        ep=not question.gives_any("parallel.ep"),
    )


def _choose_gpus(config: RunConfig, ranks: int, *, on_gpus: bool) -> Gpus:
    """Choose the GPUs of a run: with `on_gpus` those here, if there are any, else those of run.machine, else H200s.

    Those here are as fast as run.machine or, without it, the machine of their name says; with neither, as H200s. What
    is taken from elsewhere than this machine is listed as assumed.
    """
    first_gpu = find_first_gpu() if on_gpus else None
    named = find_machine(config.run.machine, "run.machine") if config.run.machine else None
    if first_gpu is None:
        machine = named or Machine.known("H200")
        size = machine.memory_bytes or Machine().memory_bytes
        assumed = () if named else ("H200s, for there is no GPU here and run.machine is empty",)
        assumed += ("their speed and bytes by data sheet",) if machine.assumed else ()
        kind, assumed = machine.device, (*assumed, "the host")
        return Gpus(machine=machine, count=ranks, bytes=size, host_bytes=HOST_BYTES, name=kind, assumed=assumed)
    name, size = first_gpu
    known = named or find_device(name)
    host_ranks = count_host_ranks() if has_torchrun() else ranks
    host = int(HOST_SHARE * (free_host_bytes() or 0) / max(1, host_ranks)) or HOST_BYTES
    assumed = () if known else ("the speed of H200s",)
    machine = known or Machine.known("H200")
    return Gpus(machine=machine, count=ranks, bytes=size, host_bytes=host, name=name, assumed=assumed)
