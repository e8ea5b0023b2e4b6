"""The recurrence in torch's own operations (`longspan.ssm.scan`), on any device, in float32 or float64."""

import torch
from torch import Tensor

from longspan.layout.segments import Rows
from longspan.ssm.kernels.call import Inputs, Saved, state_dtype
from longspan.ssm.kernels.runs import LocalRuns, taken
from longspan.ssm.scan import scan, summaries


class TorchForward:
    """A forward pass; see `Forward`."""

    def __init__(self, inputs: Inputs, runs: LocalRuns, scale: float) -> None:
        self._inputs, self._runs = _spread(inputs, scale), runs
        self.kept = ()

    def summaries(self, leaving: Rows, carrying: Rows) -> tuple[Tensor, Tensor]:
        """See `Forward`."""
        _, k, v, g, beta = self._inputs
        return summaries(k, v, g, beta, self._runs.lengths, leaving, carrying)

    def outputs(self, states: Tensor) -> Tensor:
        """See `Forward`."""
        return scan(*self._inputs, states, self._runs.lengths)[0]


class TorchBackward:
    """The scan once more, with gradients; see `Backward`."""

    def __init__(self, inputs: Inputs, runs: LocalRuns, scale: float, saved: Saved) -> None:
        self._dout = saved.dout
        with torch.enable_grad():
            self._leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
            self._start = saved.states.detach().requires_grad_()
            wide = _spread(Inputs(*self._leaves), scale)  # pyright: ignore[reportArgumentType]
            self._out, self._final = scan(*wide, self._start, runs.lengths)

    def owed(self, runs: Rows) -> Tensor:
        """See `Backward`."""
        (owed,) = torch.autograd.grad(self._out, self._start, self._dout, retain_graph=True, allow_unused=True)
        owed = torch.zeros_like(self._start) if owed is None else owed
        return taken(owed, runs)

    def prepare(self) -> None:
        """Nothing: the scan has run."""

    def gradients(self, leaving: Tensor) -> tuple[Tensor, ...]:
        """See `Backward`."""
        leaves = [x for x in self._leaves if x is not None]
        if not len(self._dout):
            return tuple(torch.zeros_like(x) for x in leaves)
        return torch.autograd.grad((self._out, self._final), leaves, (self._dout, leaving))


def _spread(inputs: Inputs, scale: float) -> Inputs:
    """With as many heads of q and k as v has, and q scaled; in the dtype of states."""
    q, k, v, g, beta = (None if x is None else x.to(state_dtype(x.dtype)) for x in inputs)
    assert q is not None and k is not None and v is not None and g is not None
    groups = v.shape[1] // k.shape[1]
    q, k = (x if groups == 1 else x.repeat_interleave(groups, 1) for x in (q * scale, k))
    return Inputs(q, k, v, g, beta)
