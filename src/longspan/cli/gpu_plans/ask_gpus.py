"""`longspan plan --gpu …`: does it fit, how long, with which keys. Reads a question, answers it, prints the answer."""

import sys
from collections.abc import Sequence
from dataclasses import replace

from longspan.cli.gpu_plans.answer import Answer
from longspan.cli.gpu_plans.answer_text import answer_json, answer_lines, refusal_line
from longspan.cli.gpu_plans.fit import Choices
from longspan.cli.gpu_plans.gpu_flags import GpuFlags, Question, find_source, set_model
from longspan.cli.gpu_plans.gpus import Gpus, read_gpus
from longspan.cli.gpu_plans.questions import answer_longest, answer_run, answer_step
from longspan.cli.gpu_plans.run_documents import open_documents, set_one_epoch
from longspan.cli.gpu_plans.run_on_gpus import RunOnGpus
from longspan.cli.plans.lengths import read_lengths
from longspan.config.defaults import resolve_defaults
from longspan.config.keys import AUTO, NOT_GIVEN
from longspan.config.sections import RunConfig
from longspan.errors import PlanError


def answer_gpu_question(flags: GpuFlags, question: Question) -> int:
    """Answer a question about GPUs; returns the exit code. Raises LongspanError for one that cannot be answered."""
    source = find_source(flags, question)
    question = set_model(question, flags.model)
    gpus = read_gpus(flags, flags.tflops, question.config.run.machine)
    config = resolve_defaults(_set_fastest_types(question), gpus.count)
    if source == "data":
        if not question.gives_any("train.epochs", "train.steps"):
            config = set_one_epoch(config)
        answer = _answer_run_question(config, gpus, question)
    else:
        run = RunOnGpus.of(config, gpus)
        choices = find_open_choices(question)
        if source == "longest":
            answer = answer_longest(run, question.given_keys, choices)
        else:
            lengths, lengths_source = read_lengths(flags, run.home.slots)
            answer = answer_step(run, lengths, lengths_source, question.given_keys, choices)
    return show_answer(answer, _command_words(config, question), as_json=flags.json)


def _command_words(config: RunConfig, question: Question) -> list[str]:
    """Write the command of the run, with words in capitals for what the question does not say."""
    model, data = config.model, config.data
    name = f"--model.path {model.path}" if model.path else f"--model.preset {model.preset}"
    words = [f"longspan train {name} --data.path {data.path if question.gives_any('data.path') else 'DATA'}"]
    words += [f"--data.tokenizer {data.tokenizer}"] * bool(data.tokenizer)
    words += ["--train.lr LR"] * (config.train.lr == NOT_GIVEN)
    return words


def _answer_run_question(config: RunConfig, gpus: Gpus, question: Question) -> Answer:
    """Answer a question about a run, whose documents are opened or estimated."""
    run = RunOnGpus.of(config, gpus)
    with open_documents(config, log_line, estimate=True) as documents:
        run = replace(
            run, config=documents.config, target_share=documents.target_share, image_rows=documents.image_rows
        )
        return answer_run(run, documents, question.given_keys, find_open_choices(question))


def log_line(line: str) -> None:
    """Print a line about data that is read on standard error."""
    print(line, file=sys.stderr, flush=True)


def _set_fastest_types(question: Question) -> RunConfig:
    """Let groups share attention by the fastest type, unless the keys say how."""
    config = question.config
    if question.gives_any("context.cp_comm_type"):
        return config
    return replace(config, context=replace(config.context, cp_comm_type=AUTO))


def find_open_choices(question: Question) -> Choices:
    """Find what the keys of a question leave open."""
    degrees = ("min_dynamic_context_parallel_size", "max_dynamic_context_parallel_size", "context_parallel_size")
    return Choices(
        planner=not question.gives_any("context.planner"),
        degree=not question.gives_any(*(f"context.{key}" for key in degrees)),
        rows=not question.gives_any("context.max_tokens_per_slot")
        or question.config.context.max_tokens_per_slot == AUTO,
    )


def show_answer(answer: Answer, command: Sequence[str], *, as_json: bool) -> int:
    """Print an answer; returns the exit code. Raises PlanError where nothing fits, without JSON.

    `command` is that of a run, behind which the keys stand.
    """
    if as_json:
        print(answer_json(answer))
        return 0
    if not answer.fits:
        raise PlanError(refusal_line(answer))
    print("\n".join(answer_lines(answer, command)))
    return 0
