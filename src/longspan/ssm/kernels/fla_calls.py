"""Tensors as the kernels of flash-linear-attention take them and give them back."""

from torch import Tensor

from longspan.ssm.kernels import fla
from longspan.ssm.kernels.call import Inputs
from longspan.ssm.kernels.runs import CHUNK, LocalRuns


def batch_of_one(inputs: Inputs) -> tuple[Tensor, ...]:
    """All of them (1, T, ·, ·)."""
    return tuple(x.unsqueeze(0) for x in inputs if x is not None)


def of_inputs(found: tuple[Tensor, ...], inputs: Inputs) -> tuple[Tensor, ...]:
    """Gradients (1, T, ·, ·) as those of the inputs, in their dtypes."""
    given = (x for x in inputs if x is not None)
    return tuple(gradient.squeeze(0).to(x.dtype) for gradient, x in zip(found, given, strict=True))


def cumulative(g: Tensor, runs: LocalRuns, *, reverse: bool = False) -> Tensor:
    """(1, T, H, …) of (T, H, …): sums inside chunks, in base 2; `reverse`: gradients of such sums."""
    sums = fla.function("ops.utils", "chunk_local_cumsum")
    base = {"reverse": True} if reverse else {"scale": fla.function("ops.utils.constant", "RCP_LN2")}
    return sums(g.unsqueeze(0).contiguous(), chunk_size=CHUNK, **base, **indices(runs))


def indices(runs: LocalRuns) -> dict[str, Tensor]:
    """Where runs and their chunks lie, as the kernels' arguments."""
    return {"cu_seqlens": runs.ends, "chunk_indices": runs.chunk_indices}
