"""Our Triton kernels of norms, experts and losses on a CPU that has Triton, by its interpreter, in float32.

    python -m tests.kernels.interpreted

Prints relative errors beside float64.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from longspan.model.experts import experts
from longspan.model.seams import norms
from longspan.train import loss
from longspan.train.terms import token_loss
from tests.kernels import cases
from tests.kernels.test_on_gpus import EVERY
from tests.ssm.interpreted import on_a_cpu


def _take_cpus() -> None:
    """Let kernels be launched with tensors of a CPU."""
    experts.find_kernels = lambda *tensors: experts.kernel_module()  # pyright: ignore
    norms.are_on_gpus = lambda tensors: True
    loss.uses_kernels = token_loss.uses_kernels = lambda dtype, device: dtype != torch.float64


if __name__ == "__main__":
    on_a_cpu()
    _take_cpus()
    for errors, case in EVERY:
        if case not in cases.LOGITS[:1]:  # minutes in the interpreter
            found = errors(case, "cpu", torch.float32)
            print(errors.__name__, case, {name: f"{error:.1e}" for name, error in found.items()}, flush=True)
