"""`longspan doctor`: checks whether this machine can run longspan, and whether longspan is exact on it."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from longspan.cli.flags import parse_flags
from longspan.cli.machine import machine_facts, machine_text
from longspan.cli.processes import prints_results
from longspan.errors import ConfigError, LongspanError, plural
from longspan.plain_text import bytes_text, seconds_text, text_table
from longspan.plan.form import Form
from longspan.versions import versions

if TYPE_CHECKING:
    from longspan.doctor.proof import Proof

SUPPORTED: dict[str, tuple[tuple[int, int], tuple[int, int] | None]] = {
    "python": ((3, 11), None),
    "torch": ((2, 11), (2, 16)),
    "transformers": ((5, 17), (6, 0)),
}


@dataclass(frozen=True)
class DoctorFlags:
    """Check versions, devices, backends, kernels and process groups, and compare a small model with the stock one.

    The comparison runs a Qwen3 of two layers at context-parallel degrees 1, 2 and 4 with every communication type. It
    uses four local processes, one process for each GPU where there are several, or the ranks of torchrun. The result
    names the process groups that were made.

    longspan doctor                              this machine, with a small model

    longspan doctor --model Qwen3-8B             is this model exact here?
    """

    model: str = ""
    """Prove that longspan runs this model exactly here, and nothing else: a small copy of it with random weights
    against the stock model, loss and every gradient, at every degree, type, tp, pp and ep that the ranks allow. A
    folder in Hugging Face format (its config.json is enough), a class (Qwen3ForCausalLM), a model_type (qwen3) or the
    dotted name of a class of your own. The exit code is 1 where a case is wrong or ends a rank, or the model is
    refused."""
    cases: Literal["basic", "whole"] = "whole"
    """Of --model. basic: degrees 2 and 3, all_gather, full recomputation and several micro-batches only."""
    frozen: Literal["", "nf4"] = ""
    """Of --model: its small copy has an adapter over weights in 4 bits (model.frozen), and is compared with the stock
    one over the values that they stand for."""

    world: int = 0
    """Local processes of the comparison; 0: one for each GPU up to 4 where there are several, else 4 on the CPU."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """gloo: on the CPU; nccl: on GPUs; auto: on GPUs if there are any, except a single one without --world."""
    timeout_seconds: float = 120.0
    """Seconds that a rank waits for the others."""
    json: bool = False
    """Print the result as JSON, and nothing else, on standard output."""


@dataclass(frozen=True)
class Check:
    """One line of the result. `good` is None where the line only informs."""

    area: str
    name: str
    found: str
    good: bool | None = True


def main(argv: Sequence[str]) -> int:
    """Run the verb: the one report that a flag names, or all checks. Returns 0 if every check is good, otherwise 1."""
    flags = parse_flags(DoctorFlags, argv, "longspan doctor")
    if flags.frozen and not flags.model:
        raise ConfigError(
            f"--frozen {flags.frozen} is of --model, which is not given; add --model, or leave it out"
        )
    if flags.model:
        from longspan.cli.doctor_model import prove_model

        return prove_model(
            flags.model,
            flags.cases,
            form=Form(frozen=flags.frozen) if flags.frozen else None,
            world=flags.world,
            backend=flags.backend,
            timeout=flags.timeout_seconds,
            as_json=flags.json,
        )
    if prints_results():
        print("comparing a small model with the stock one: a minute or more", file=sys.stderr, flush=True)
    began = time.perf_counter()
    checks = [*version_checks(versions()), *device_checks(), *kernel_checks()]
    world_facts: dict[str, Any] = {}
    from longspan.cli.doctor_model import compare_preset

    try:
        proof = compare_preset(flags.world, flags.backend, flags.timeout_seconds)
        world_facts = asdict(proof.worlds[0])
        checks += proof_checks(proof)
    except LongspanError as error:
        checks.append(Check("parity", "comparison", str(error), False))
    good = all(check.good is not False for check in checks)
    if prints_results():
        seconds = time.perf_counter() - began
        if flags.json:
            rows = [asdict(check) for check in checks]
            print(json.dumps({"good": good, "seconds": seconds, "checks": rows, "ranks": world_facts}, indent=1))
        else:
            marks = {True: "✓", False: "✗", None: "·"}
            rows = [(marks[check.good], check.area, check.name, check.found) for check in checks]
            failed = plural(sum(check.good is False for check in checks), "check")
            verdict = "all checks are good" if good else f"{failed} failed"
            print(f"{text_table(('', 'area', 'check', 'found'), rows, left=4)}\n\n{verdict} ({seconds:.0f} s)")
    return 0 if good else 1


def version_checks(installed: dict[str, str]) -> Iterator[Check]:
    """Yield a check for each version, by package, and for each package that is missing.

    A version is good between the bounds of `SUPPORTED`: the least that longspan is tested with, and the first that
    it is not (None: no bound). Only the first two numbers are compared. A package without bounds has no verdict; one
    that longspan cannot run without, and that is not installed, fails.
    """
    for name, text in installed.items():
        least_version, first_unsupported = SUPPORTED.get(name, (None, None))
        if least_version is None:
            yield Check("version", name, text, None)
            continue
        # The build stands behind "+".
        number = tuple(int(part) for part in text.split("+")[0].split(".")[:2])
        needed_text = f"{'.'.join(map(str, least_version))} or later" + (
            f", below {'.'.join(map(str, first_unsupported))}" if first_unsupported else ""
        )
        good = number >= least_version and (first_unsupported is None or number < first_unsupported)
        yield Check("version", name, text if good else f"{text}; needs {needed_text}", good)
    missing = [name for name in ("torch", "transformers", "numpy") if name not in installed]
    yield from (Check("version", name, "not installed", False) for name in missing)


def device_checks() -> Iterator[Check]:
    """Yield checks of the host, its GPUs and both backends. A lack of NCCL fails only where there are several GPUs."""
    import torch
    import torch.distributed as dist

    facts = machine_facts()
    yield Check("device", "host", machine_text({k: v for k, v in facts.items() if k != "gpus"}), None)
    for index, name in enumerate(facts.get("gpus", ())):
        memory = bytes_text(torch.cuda.get_device_properties(index).total_memory)
        yield Check("device", f"cuda:{index}", f"{name}, {memory}", None)
    yield Check("backend", "gloo", "available" if dist.is_gloo_available() else "missing", dist.is_gloo_available())
    gpus = torch.cuda.device_count()
    nccl = dist.is_nccl_available()
    lack = "built in, no GPU that torch can use" if nccl else "not in this torch build"
    nccl_state = f"available, {facts['nccl']}" if "nccl" in facts else lack
    yield Check("backend", "nccl", nccl_state, nccl if gpus > 1 else None)


def kernel_checks() -> Iterator[Check]:
    """Yield the kernels that run a call of one head of size 128 over one packed document, for each device and dtype,
    the chosen one first; and for each kernel that runs nothing here, why.
    """
    import torch

    from longspan.attention import KERNELS, AttendCall

    devices = ["cpu", *(["cuda:0"] if torch.cuda.is_available() else [])]
    for device in devices:
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            call = AttendCall(1, 1, 128, 128, dtype, torch.device(device), one_document=True)
            suitable = [kernel.name for kernel in KERNELS if kernel.suits(call)]
            name = f"{device.split(':')[0]} {str(dtype).removeprefix('torch.')}"
            alternatives = f" (also {', '.join(suitable[1:])})" if len(suitable) > 1 else ""
            yield Check("kernel", name, suitable[0] + alternatives if suitable else "none", bool(suitable))
    for kernel in KERNELS:
        # a call that any machine with the right device and package can run; the words are those for the last device
        dtype = kernel.dtypes[0]
        calls = [AttendCall(1, 1, 64, 64, dtype, torch.device(name), deterministic=False) for name in devices]
        lacks = [kernel.unsupported_call_reason(call) for call in calls]
        if "" not in lacks:
            yield Check("kernel", kernel.name, f"not here: {lacks[-1]}", None)


def proof_checks(proof: "Proof") -> Iterator[Check]:
    """Yield a check for each process group that was made, and for each comparison with the stock model.

    The groups are those of the first world: `proof` has one, as all its cases share a home.
    """
    from longspan.doctor.outcomes import outcome_text

    world = proof.worlds[0]
    ranks_text = f"{plural(world.ranks, 'rank')} on {world.device.split(':')[0]}, {world.backend}"
    for record in world.groups:
        name = f"{record['kind']} of {len(record['ranks'])}"
        yield Check("group", name, f"made in {seconds_text(record['seconds'])} ({ranks_text})", None)
    for outcome in proof.outcomes:
        yield Check("parity", outcome.case.name, outcome_text(outcome), outcome.good)
