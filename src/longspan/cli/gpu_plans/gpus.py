"""The GPUs that a question about memory and time names: their speed, their bytes and the host's, and what is assumed.

Imports no torch.
"""

import math
from dataclasses import dataclass, replace

from longspan.cli.gpu_plans.gpu_flags import GpuFlags
from longspan.cli.plans.planning import find_machine
from longspan.errors import ConfigError, plural
from longspan.plan import Machine
from longspan.plan.memory.bytes import LEAST_OF_GPU, bytes_hint, gib_text

HOST_BYTES = 128 << 30  # a GPU's share of its host, where nothing else is known


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """GPUs of one kind: `count` of them, the bytes of each, and those of its host that are free for each.

    `assumed` names what was not measured.
    """

    machine: Machine
    count: int
    bytes: int
    host_bytes: int
    name: str
    assumed: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Return what they are, in a line."""
        words = (
            f"{self.count} x {self.name}, {gib_text(self.bytes)} each, {gib_text(self.host_bytes)} of the host for each"
        )
        return f"{words} (assumed: {', '.join(self.assumed)})" if self.assumed else words

    @property
    def words(self) -> str:
        """Their number and name, as in "4 H100s" or "2 GPUs of 85,899,345,920 bytes"."""
        kind, of, size = self.name.partition(" of ")
        return f"{plural(self.count, kind)}{of}{size}"


def read_gpus(flags: GpuFlags, tflops: float, run_machine: str) -> Gpus:
    """Read the GPUs that flags name; `run_machine` is the key run.machine.

    >>> read_gpus(PlanFlags(gpu="h100", gpus=4), 0.0, "").title  # doctest: +SKIP
    '4 x H100, 80.0 GiB each, 128.0 GiB of the host for each (assumed: its speed by data sheet, its bytes, the host)'

    Raises ConfigError for an unknown name, and for numbers below what is possible.
    """
    for name, lowest in (("gpus", 1), ("gpu_bytes", 0), ("host_bytes", 0)):
        if (number := getattr(flags, name)) < lowest:
            raise ConfigError(f"--{name.replace('_', '-')} is {number}; give an integer of at least {lowest}")
        if name != "gpus" and 0 < number < LEAST_OF_GPU:
            raise ConfigError(f"--{name.replace('_', '-')} is {number}: {bytes_hint(number)}")
    named = find_machine(flags.gpu, "--gpu") if flags.gpu else None
    machine, name, assumed = _choose_machine(flags, named, tflops, run_machine)
    size = flags.gpu_bytes or machine.memory_bytes
    if not size:
        raise ConfigError(
            f"--gpu {flags.gpu} does not say how many bytes a GPU has: longspan bench calibrate wrote it before it "
            "measured them; give --gpu-bytes, or measure again"
        )
    if not flags.gpu_bytes and named is not None and named.assumed:
        assumed = (*assumed, "its bytes")
    host = flags.host_bytes or HOST_BYTES
    assumed += () if flags.host_bytes else ("the host",)
    return Gpus(machine=machine, count=flags.gpus, bytes=size, host_bytes=host, name=name, assumed=assumed)


def _choose_machine(
    flags: GpuFlags, named: Machine | None, tflops: float, run_machine: str
) -> tuple[Machine, str, tuple[str, ...]]:
    """Choose the machine that prices, the name of its GPU, and what of its speed is assumed; `named` is that of --gpu.

    The speed is that of run.machine (`run_machine`) or of `tflops` (0: not given), else that of --gpu; with only
    --gpu-bytes it is Machine()'s, of an H200 as measured. The bytes of --gpu stay in any case.
    """
    if not 0 <= tflops < math.inf:
        raise ConfigError(f"--tflops {tflops:g}: a speed must be above 0, such as --tflops 400")
    if tflops and run_machine:
        raise ConfigError(
            f"--tflops {tflops:g}: run.machine {run_machine} has its own speed; give one of --tflops and --machine"
        )
    if named is not None:
        machine = named
        name = machine.device if not flags.gpu_bytes else f"{machine.device} of {flags.gpu_bytes:,} bytes"
    else:
        machine, name = Machine(), f"GPU of {flags.gpu_bytes:,} bytes"
    if run_machine:
        speed_machine = find_machine(run_machine, "run.machine")
        return (
            replace(speed_machine, memory_bytes=machine.memory_bytes),
            name,
            (("its speed by data sheet",) if speed_machine.assumed else ()),
        )
    if tflops:
        return _set_speed(machine, tflops), name, ()
    if named is None:
        return machine, name, ("the speed of an H200, --tflops N is another",)
    return machine, name, (("its speed by data sheet",) if machine.assumed else ())


def _set_speed(machine: Machine, tflops: float) -> Machine:
    """Scale a machine's rates of products, attention and scans so that products run at `tflops` * 1e12 FLOP/s."""
    scale = tflops * 1e12 / machine.product_flops_per_second
    rates = {name: value * scale for name, value in machine.rates().items() if name.endswith("flops_per_second")}
    return replace(machine, **rates, source=f"the model on GPUs of {tflops:g} TFLOP/s")
