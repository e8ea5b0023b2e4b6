"""The GPUs that an answer is about: those that flags name, or those of a run, with their bytes and their speed."""

import math
from dataclasses import dataclass, replace

from longspan.cli.flags import check_flags_at_least
from longspan.cli.machine import NO_GPUS, find_gpus
from longspan.cli.plans.question import GpuFlags
from longspan.cli.processes import count_host_ranks, has_torchrun
from longspan.config.sections import RunConfig
from longspan.errors import ConfigError, plural
from longspan.host import free_host_bytes
from longspan.plain_text import gib_text
from longspan.plan import Machine
from longspan.plan.cost.machine import find_machine_of_device, read_machine, scale_product_speeds
from longspan.plan.memory.settings import LEAST_OF_GPU, bytes_hint

HOST_BYTES = 128 << 30  # a GPU's share of its host, where nothing else is known


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """GPUs of one kind: `count` of them, the bytes of each (None: not known), and those of its host that are free for
    each.
    """

    machine: Machine
    count: int
    bytes: int | None
    host_bytes: int
    name: str

    @property
    def title(self) -> str:
        """Their number, name and bytes, those of the host for each, and where their speed is from."""
        speed_source = self.machine.source.removeprefix("the model on ")
        source = "by data sheet" if self.machine.assumed else f"priced as {speed_source}"
        host = f"{gib_text(self.host_bytes)} of host memory for each"
        size = "" if self.bytes is None else f", {gib_text(self.bytes)} each"
        return f"{self.count} x {self.name}{size}, {host} ({source})"

    @property
    def count_and_name(self) -> str:
        """Their number and name, as in "4 H100s" or "2 GPUs of 85,899,345,920 bytes"."""
        # behind " of " a name has the bytes that --gpu-bytes gave, which stay behind the plural
        kind, of, size = self.name.partition(" of ")
        return f"{plural(self.count, kind)}{of}{size}"


def read_gpus(flags: GpuFlags, run_machine: str) -> Gpus:
    """Read the GPUs that flags name; `run_machine` is the key run.machine. Where they name none, these are those of
    run.machine, whose bytes need not be known, or H200s. The speed is that of run.machine or of --tflops, else that of
    --gpu; with only --gpu-bytes that of an H200. Raises ConfigError for a number of bytes or a speed that is
    impossible, and for a --gpu without bytes.
    """
    check_flags_at_least(flags, gpus=1, gpu_bytes=0, host_bytes=0)
    for name, size in (("gpu-bytes", flags.gpu_bytes), ("host-bytes", flags.host_bytes)):
        if 0 < size < LEAST_OF_GPU:
            raise ConfigError(f"--{name} is {size}: {bytes_hint(size)}")
    if not 0 <= flags.tflops < math.inf or (flags.tflops and run_machine):
        reason = f"run.machine {run_machine} has its own speed" if run_machine else "a speed is above 0"
        raise ConfigError(f"--tflops {flags.tflops:g}: {reason}; give --tflops N, such as 400, or --machine")
    gpu = flags.gpu if flags.names_gpus else run_machine or "h200"
    named = read_machine(gpu, "--gpu" if flags.names_gpus else "--machine") if gpu else None
    if not 0 <= flags.host_speed < math.inf:
        raise ConfigError(
            f"--host-speed {flags.host_speed:g}: a speed is above 0; give GB/s each way, such as 13.75"
        )
    machine = named or Machine()
    size_text = f" of {flags.gpu_bytes:,} bytes" if flags.gpu_bytes else ""
    size = flags.gpu_bytes or machine.memory_bytes or None
    speed = machine
    if run_machine:
        speed = read_machine(run_machine, "run.machine")
    elif flags.tflops:
        speed = scale_product_speeds(machine, flags.tflops * 1e12 / machine.product_flops_per_second)
        speed = replace(speed, assumed=False, source=f"the model on GPUs of {flags.tflops:g} TFLOP/s")
    if flags.host_speed:
        speed = replace(speed, host_copy_bytes_per_second=flags.host_speed * 1e9)
    if size is None and flags.names_gpus:
        raise ConfigError(bytes_unknown_text(f"--gpu {gpu}", machine))
    return Gpus(
        machine=replace(speed, memory_bytes=machine.memory_bytes),
        count=flags.gpus,
        bytes=size,
        host_bytes=flags.host_bytes or HOST_BYTES,
        name=f"{machine.device if named else 'GPU'}{size_text}",
    )


def bytes_unknown_text(name: str, machine: Machine) -> str:
    """Say that a machine, which a flag names so, has no bytes of a GPU, and what to do."""
    if machine.device == "cpu":
        return f"{name} was measured on CPUs, and bytes of a GPU are not known; give --gpu-bytes, or a GPU as --gpu"
    return (
        f"{name} does not say how many bytes a GPU has: longspan bench calibrate wrote it before it measured them; "
        "give --gpu-bytes, or measure again"
    )


def choose_gpus(config: RunConfig, ranks: int, *, on_gpus: bool) -> Gpus:
    """Choose the GPUs of a run: with `on_gpus` those here, if there are any, else those of run.machine, else H200s.
    Those here are as fast as run.machine or, without it, the machine of their name says; with neither, as H200s.
    """
    here = find_gpus() if on_gpus else NO_GPUS
    name = here.name
    named = read_machine(config.run.machine, "run.machine") if config.run.machine else find_machine_of_device(name)
    machine = named or Machine.known("H200")
    host = 0
    if name:
        host_ranks = count_host_ranks() if has_torchrun() else ranks
        host = (free_host_bytes() or 0) // max(1, host_ranks)
    size = here.bytes or machine.memory_bytes or Machine().memory_bytes
    return Gpus(
        machine=machine, count=ranks, bytes=size, host_bytes=host or HOST_BYTES, name=name or machine.device
    )
