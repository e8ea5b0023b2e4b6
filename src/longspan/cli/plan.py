"""`longspan plan`: what fits GPUs and how long it takes (`plans/answer.py`); the degree of an evaluation. No torch."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from longspan.cli.flags import KEY_OF_PLAN_FLAG, Groups, flag_text
from longspan.cli.plans.answer import answer_gpu_question, make_run, print_preset, read_step
from longspan.cli.plans.gpus import read_gpus
from longspan.cli.plans.question import GpuFlags, Question, find_document_source, parse_question
from longspan.cli.plans.which_gpu import ALL_GPUS, answer_which_gpu
from longspan.config.keys import AUTO
from longspan.errors import ConfigError
from longspan.resolve.evaluation import compare_degrees
from longspan.resolve.partition import set_default_partition
from longspan.resolve.planner_config import PlannerConfig, default_rows
from longspan.resolve.ways import Way, with_node_size_of_machine

# Flags and keys of which --which-eval-degree reads none.
TRAINING_FLAGS = ("gpu", "gpu_bytes", "longest", "compare", "write", "show", "plot")
KEYS_OF_TRAINING = ("context.planner", "context.mode", "context.context_parallel_size", "data.path")


@dataclass(frozen=True, kw_only=True)
class PlanFlags(GpuFlags):
    """Say whether a model and its documents fit so many GPUs, with which keys, and how long it takes: the longest
    document (--longest), a step (--same 1x262144) or a run (--data).

    A config.json is enough; every key of longspan train may stand behind it. Planner, degree, rows of a slot and
    memory are chosen where they are not given. Without --gpu the GPUs are H200s, and the model is Qwen3-8B.

    With --show, the plan of the step stands below: which slots work together on which documents, micro-batch by
    micro-batch. With --compare, every planner and degree is a row of the table; --which-eval-degree says at which
    degree an evaluation is fastest.

    longspan plan --same 8x8192 --slots 4 --show

    longspan plan --model Qwen3-8B --gpu h100 --gpus 4 --same 1x262144

    longspan plan --compare --lengths lengths.json --slots 16 --machine h100
    """

    SHOWN: ClassVar[Groups] = {
        "what shall fit": ("--longest", "--lengths", "--distribution", "--same", "--data", "--epochs"),
        "where": ("--gpu", "--gpus", "--slots", "--machine", "--model", "--tp", "--pp"),
        "how": ("--cp", "--max_tokens_per_slot", "--cp_comm_type", "--tokens_per_step"),
        "what is shown": ("--show", "--plot", "--compare", "--which_eval_degree", "--write", "--json"),
    }
    partition: Literal["auto", "zigzag", "contiguous"] = "auto"
    """How a group's rows are dealt out: zigzag: equal causal work; contiguous: one run a slot, fewer copies under a2a,
    and slower than predicted under the other types; auto: of hybrids the faster, otherwise zigzag."""
    which_eval_degree: bool = False
    """Price an evaluation of the documents (forward passes) at each degree, and by a dynamic plan."""


def main(argv: Sequence[str]) -> int:
    """Run the verb; a .toml file among the words is refused, unless it is a flag's value."""
    # Each word stands behind the word before it.
    pairs = zip(["", *argv], argv, strict=False)
    files = [word for previous, word in pairs if word.endswith(".toml") and not previous.startswith("-")]
    if files:
        raise ConfigError(
            f"longspan plan reads no configuration; longspan train {files[0]} --dry-run --run.machine h100 --world 4 "
            "answers for one"
        )
    flags, question = parse_question(PlanFlags, argv)
    answer = _answer_eval_degree if flags.which_eval_degree else answer_gpu_question
    if flags.gpu.lower() == ALL_GPUS and not flags.which_eval_degree:
        answer = answer_which_gpu
    return answer(flags, question)


def _answer_eval_degree(flags: PlanFlags, question: Question) -> int:
    """Returns the exit code."""
    unread = [f"--{name}" for name in TRAINING_FLAGS if getattr(flags, name)]
    flag_of_key = {key[2:]: flag for flag, key in KEY_OF_PLAN_FLAG.items()}
    unread += [flag_of_key[key] for key in KEYS_OF_TRAINING if question.gives_any(key)]
    if unread:
        raise ConfigError(f"--which-eval-degree does not take {flag_text(unread[0])}; leave it out")
    run = make_run(
        flags, question, read_gpus(flags, question.config.run.machine), find_document_source(flags, question)
    )
    print_preset(run)
    lengths, title = read_step(flags, run)
    facts = run.facts_of_step(lengths)
    config = with_node_size_of_machine(run.config, facts)
    # A hybrid has one run a slot, so that fewest states are sent.
    config = set_default_partition(config)
    # Without a model and a machine, prices are those of forward passes alone, without FSDP2's messages.
    is_priced = flags.model or question.gives_any(
        "run.machine", *(f"model.{key}" for key in ("path", "preset", "config"))
    )
    cost = Way(config, facts).cost() if is_priced else None
    choice = PlannerConfig.evaluation(config, cost=cost, heads=facts.heads)
    options = choice.home_options(run.home)
    if run.config.context.max_tokens_per_slot == AUTO:
        widest = choice.widest_even_degree(run.home)
        options = replace(options, max_tokens_per_slot=default_rows(-(-max(lengths) // widest)))
    degrees = choice.min_degree, choice.max_degree
    comparison = compare_degrees(lengths, run.home, options=options, dynamic_degrees=degrees)
    seconds = {choice.cp: choice.planned.predicted_seconds for choice in comparison.choices}
    dynamic_seconds = comparison.dynamic and comparison.dynamic.predicted_seconds  # None without a dynamic plan
    answer = {"best_cp": comparison.best.cp, "reason": comparison.reason(), "seconds": seconds}
    answer["dynamic"] = dynamic_seconds
    print(json.dumps(answer) if flags.json else f"{comparison.reason()}; {title}")
    return 0
