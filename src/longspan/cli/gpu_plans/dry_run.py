"""`longspan train … --dry-run`: the plan of memory of a configuration and its data, its steps and hours, and no run.

It needs no GPU: bytes are those of the GPUs here, else of those that run.machine names, else of H200s. Without weights
and without a world, only documents are read.
"""

from collections.abc import Sequence
from dataclasses import replace

from longspan.cli.gpu_plans.answer_text import repeat_words
from longspan.cli.gpu_plans.ask_gpus import log_line, show_answer
from longspan.cli.gpu_plans.fit import Choices
from longspan.cli.gpu_plans.gpus import HOST_BYTES, Gpus
from longspan.cli.gpu_plans.questions import answer_run
from longspan.cli.gpu_plans.run_documents import open_documents
from longspan.cli.gpu_plans.run_on_gpus import RunOnGpus
from longspan.cli.machine import find_first_gpu
from longspan.cli.plans.planning import find_machine
from longspan.cli.processes import count_host_ranks, has_torchrun, is_reporting
from longspan.config.keys import AUTO
from longspan.config.sections import RunConfig
from longspan.host_memory import free_host_bytes
from longspan.plan import Machine
from longspan.plan.cost.machine import find_device
from longspan.run.checks import check_config, check_files

HOST_SHARE = 0.85  # of the host's free memory, as a run takes it


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
    gpus = _choose_gpus(config, ranks, on_gpus=on_gpus)
    run = RunOnGpus.of(config, gpus)
    choices = Choices(planner=False, degree=False, rows=config.context.max_tokens_per_slot == AUTO)
    with open_documents(config, log_line, estimate=False) as documents:
        run = replace(
            run, config=documents.config, target_share=documents.target_share, image_rows=documents.image_rows
        )
        # No key counts as given by a question: the printed command repeats the words and the file, with their keys.
        answer = answer_run(run, documents, given_keys=frozenset(), choices=choices)
    return show_answer(answer, repeat_words(words, file, answer.keys), as_json=as_json)


def _choose_gpus(config: RunConfig, ranks: int, *, on_gpus: bool) -> Gpus:
    """Choose the GPUs of a run: with `on_gpus` those here, if there are any, else those of run.machine, else H200s.

    Those here are as fast as run.machine or, without it, the machine of their name says; with neither, as H200s. What
    is taken from elsewhere than this machine is listed as assumed.
    """
    first_gpu = find_first_gpu() if on_gpus else None
    named_machine = find_machine(config.run.machine, "run.machine") if config.run.machine else None
    if first_gpu is None:
        machine = named_machine or Machine.known("H200")
        size = machine.memory_bytes or Machine().memory_bytes
        assumed = () if named_machine else ("H200s, for there is no GPU here and run.machine is empty",)
        assumed += ("their speed and bytes by data sheet",) if machine.assumed else ()
        name = machine.device
        return Gpus(
            machine=machine, count=ranks, bytes=size, host_bytes=HOST_BYTES, name=name, assumed=(*assumed, "the host")
        )
    name, size = first_gpu
    known_machine = named_machine or find_device(name)
    machine = known_machine or Machine.known("H200")
    assumed = () if known_machine else ("the speed of H200s",)
    host_ranks = count_host_ranks() if has_torchrun() else ranks
    host = int(HOST_SHARE * (free_host_bytes() or 0) / max(1, host_ranks)) or HOST_BYTES
    return Gpus(machine=machine, count=ranks, bytes=size, host_bytes=host, name=name, assumed=assumed)
