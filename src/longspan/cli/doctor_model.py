"""The comparisons of `longspan doctor`: of a model that is named (`--model`), and of a small Qwen3."""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from transformers import PreTrainedConfig

from longspan.cli.processes import (
    Processes,
    choose_processes,
    has_torchrun,
    prints_results,
    run_on_ranks,
    usable_gpus,
)
from longspan.doctor.cases import (
    Case,
    CaseSet,
    DTypeName,
    list_cases,
    list_contiguous_cases,
    list_image_cases,
    list_type_cases,
)
from longspan.doctor.documents import no_video_reason
from longspan.doctor.proof import Proof, ProofRanks, WorldOutcomes, proof_json, proof_text, run_proof
from longspan.doctor.which_model import find_configuration, reads_images
from longspan.errors import CommError, plural
from longspan.model.exactness.small_copies import has_only_image_text_class, shrink_configuration
from longspan.model.presets import preset_config
from longspan.plan.form import Form
from longspan.plan.shape.model_shape import has_mixers

LOCAL_RANKS = 4
Backend = Literal["auto", "gloo", "nccl"]
VOCABULARY = 97
DEGREES = (1, 2, 4)
# One of so many cases has a line of progress where no terminal shows it.
SHOWN_IN_FILES = 5
# By backend: the dtype of which results agree almost exactly, and one whose rounding shows in them.
_EXACT: dict[str, DTypeName] = {"gloo": "float64", "nccl": "float32"}
_ROUNDED: dict[str, DTypeName] = {"gloo": "float32", "nccl": "bfloat16"}


def prove_model(
    name: str,
    case_set: CaseSet,
    *,
    form: Form | None = None,
    world: int,
    backend: Backend,
    timeout: float,
    as_json: bool,
) -> int:
    """Prove that a model is exact here, and print the outcomes; returns 0 if it is proven, otherwise 1. All processes
    of torchrun call it, and the first prints.

    `world` and `backend` choose the processes, `timeout` is in seconds. Raises ConfigError for an unknown name,
    ModelError where no small copy of the model can be made.
    """
    began = time.perf_counter()
    from longspan.doctor.frozen import adapter_text, widen_rows

    config = find_configuration(name)
    if prints_results():
        print(f"comparing a small copy of {name} with the stock one: a minute or more", file=sys.stderr, flush=True)
    proofs = list[Proof]()
    # Each choice of processes has one record.
    models = list[dict[str, Any]]()
    for processes in _list_proof_processes(world, backend):
        # Kernels of GPUs depend on the sizes of heads.
        true_heads = processes.backend == "nccl"
        small_config = shrink_configuration(config, true_heads=true_heads, images=reads_images(config))
        cases = _choose_cases(case_set, processes, config)
        if form:
            small_config = widen_rows(small_config, form)
            cases = [case for case in cases if not case.encoder]
        models.append(_proof_facts(config, small_config, processes))
        proofs.append(_prove_cases(small_config, cases, processes, timeout, form))
    outcomes = tuple(outcome for part in proofs for outcome in part.outcomes)
    worlds = tuple(world_facts for part in proofs for world_facts in part.worlds)
    proof = Proof(outcomes, worlds, text_suffices=not has_only_image_text_class(config))
    seconds = time.perf_counter() - began
    if prints_results():
        if as_json:
            model = {"name": name, "copies": models}
            print(json.dumps(proof_json(proof, model, seconds), indent=1, ensure_ascii=False))
        else:
            copies = (
                f"{copy['model_type']}, a small copy ({copy['layers']} layers, hidden size {copy['hidden_size']}) on "
                f"{plural(copy['ranks'], 'rank')} ({copy['backend']})"
                f"{adapter_text(form)}"
                for copy in models
            )
            print(proof_text(proof, [*copies, *filter(None, [models[-1]["videos"]])], seconds))
    return 0 if proof.good else 1


def compare_preset(world: int, backend: Backend, timeout: float) -> Proof:
    """Compare a Qwen3 of two layers with the stock one at every degree and type, in two dtypes. Raises CommError where
    no world of ranks came up.
    """
    processes = next(_list_proof_processes(world, backend))
    config = preset_config("qwen3-tiny", vocab_size=VOCABULARY)
    cases = [case for cp in DEGREES if processes.ranks % cp == 0 for case in list_type_cases(cp)]
    dtypes = (_EXACT[processes.backend], _ROUNDED[processes.backend])
    proof = _prove_cases(
        config, [replace(case, dtype=dtype) for dtype in dtypes for case in cases], processes, timeout
    )
    if not proof.worlds:  # no ranks came up, and every outcome says why
        raise CommError(proof.outcomes[0].message)
    return proof


def _list_proof_processes(world: int, backend: Backend) -> Iterator[Processes]:
    """One GPU has no degrees to compare, so that CPUs are asked too where nobody says on what."""
    gpus = usable_gpus()
    cpus_too = gpus == 1 and backend == "auto" and not world and not has_torchrun()
    if gpus == 0 or cpus_too or backend == "gloo":
        # without a GPU, --backend nccl still asks for one, so that `choose_processes` refuses it
        device = "cuda" if backend == "nccl" else "cpu"
        yield choose_processes(world, device, on_cpus=LOCAL_RANKS)
    if gpus and backend != "gloo":
        yield choose_processes(world, "cuda", on_gpus=min(gpus, LOCAL_RANKS), for_cpus="--backend gloo")


def _choose_cases(case_set: CaseSet, processes: Processes, config: PreTrainedConfig) -> list[Case]:
    """The first dtype is the exact one on CPUs, and on GPUs bfloat16, in which models are trained there. Of a model
    whose only class takes images, texts alone are compared by the basic set."""
    first = _EXACT[processes.backend]
    second = _ROUNDED[processes.backend]
    if processes.backend == "nccl":  # bfloat16 first
        first, second = second, first
    ranks = processes.ranks
    text_set: CaseSet = "basic" if has_only_image_text_class(config) else case_set
    cases = [*list_cases(text_set, ranks, first), *list_cases("basic", ranks, second)]
    if has_mixers(config):
        cases += list_contiguous_cases(text_set, ranks, first)
    if reads_images(config):
        cases += [*list_image_cases(case_set, ranks, first), *list_image_cases("basic", ranks, second)]
    return cases


def _prove_cases(
    config: PreTrainedConfig, cases: list[Case], processes: Processes, timeout: float, form: Form | None = None
) -> Proof:
    """Processes are torchrun's, or local ones that are started for each home. The first rank prints a line for each
    case, or for one in SHOWN_IN_FILES where stderr is no terminal."""
    show = 1 if sys.stderr.isatty() else SHOWN_IN_FILES
    if not prints_results():
        show = 0

    def launch(fn: Any, task: Any, count: int, seconds: float) -> WorldOutcomes:
        return run_on_ranks(fn, (task,), count, seconds)

    ranks = ProofRanks(processes.ranks, processes.backend, timeout, show, launch if has_torchrun() else None)
    return run_proof(config, cases, ranks, form)


def _proof_facts(config: PreTrainedConfig, small: PreTrainedConfig, processes: Processes) -> dict[str, Any]:
    text = small.get_text_config()
    videos = ""
    if reads_images(small) and isinstance(getattr(small, "video_token_id", None), int):
        reason = no_video_reason(small)
        videos = f"no videos: {reason}" if reason else "one of the documents with images has videos too"
    return {
        "model_type": config.model_type,
        "layers": text.num_hidden_layers,
        "hidden_size": text.hidden_size,
        "ranks": processes.ranks,
        "backend": processes.backend,
        "videos": videos,
    }
