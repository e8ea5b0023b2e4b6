"""An embedding that is the head too, on the first and on the last stage of a pipeline: two copies kept bit-equal.

Their gradients are summed once a step, before the norm and the optimizer, which then do the same to both. Where one
rank holds both stages (a V schedule), the optimizer knows the first stage's copy alone, and the other is made equal
before every step.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.comm import World
from longspan.model.pipeline.stages import Stage


class TiedEmbedding:
    """This rank's copies of a tied embedding, on its first and its last stage; neither on other ranks."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._first = next((stage for stage in stages if stage.first and stage.tied), None)
        self._last = next((stage for stage in stages if stage.last and stage.tied), None)

    @property
    def first(self) -> nn.Parameter | None:
        """The first stage's copy, as it is now: FSDP2 replaces parameters."""
        return None if self._first is None else _weight(self._first.model.get_input_embeddings())

    @property
    def last(self) -> nn.Parameter | None:
        """The last stage's copy."""
        return None if self._last is None else _weight(self._last.model.get_output_embeddings())

    @property
    def counted_elsewhere(self) -> nn.Parameter | None:
        """The copy that another rank's stage counts in the gradient norm."""
        return self.last if self.first is None else None

    @torch.no_grad()
    def make_equal(self) -> None:
        """The last stage's copy as the first's, where this rank holds both."""
        first, last = self.first, self.last
        if first is not None and last is not None:
            _local(last).copy_(_local(first))

    @contextmanager
    def gradients_summed(self, world: World) -> Iterator[None]:
        """What backward passes inside add to either copy's gradient is the sum of both at the end."""
        mine = [p for p in (self.first, self.last) if p is not None and p.requires_grad]
        earlier = [parameter.grad for parameter in mine]
        for parameter in mine:
            parameter.grad = None
        yield
        if len(mine) == 2:
            _add(mine[0], mine[1].grad)
            mine[1].grad = None
        elif mine:
            _exchange(mine[0], world)
        for parameter, gradient in zip(mine[:1], earlier[:1], strict=True):
            _add(parameter, gradient)


@torch.no_grad()
def _exchange(parameter: nn.Parameter, world: World) -> None:
    """Add the gradient of the other end of the pipeline; the order of two addends does not matter."""
    pipeline = world.channels.pipeline
    other = pipeline.degree - 1 - pipeline.index
    assert parameter.grad is not None and other != pipeline.index
    own = _local(parameter.grad).contiguous()
    arriving = torch.empty_like(own)
    pipeline.exchange([(other, own)], [(other, arriving)], "sum of the tied embedding's gradients").wait()
    _local(parameter.grad).copy_(own + arriving)


def _add(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    if gradient is not None:
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def _weight(module: nn.Module | None) -> nn.Parameter:
    assert module is not None and isinstance(module.weight, nn.Parameter)
    return module.weight


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x
