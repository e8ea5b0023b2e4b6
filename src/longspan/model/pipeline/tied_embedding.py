"""An embedding that both ends of a pipeline need: the first and the last stage hold a copy each, kept bit-equal.

The last one needs it for a head that is tied to it, or for multi-token prediction.

The gradients of both copies are summed once a step, before the gradient norm and the optimizer, which then do the same
to both. Where one rank holds both stages (a V schedule), the optimizer knows the first stage's copy alone, and the
other one is made equal before every step.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from longspan.comm import World
from longspan.model.local_tensors import add_gradient, local_tensor, without_earlier_gradients
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
        return None if self._last is None else _weight(self._last.model.get_input_embeddings())

    @property
    def counted_elsewhere(self) -> nn.Parameter | None:
        """The copy that another rank's stage counts in the gradient norm."""
        return self.last if self.first is None else None

    @torch.no_grad()
    def make_equal(self) -> None:
        """The last stage's copy as the first's, where this rank holds both."""
        first, last = self.first, self.last
        if first is not None and last is not None:
            local_tensor(last).copy_(local_tensor(first))

    @contextmanager
    def gradients_summed(self, world: World) -> Iterator[None]:
        """What backward passes inside add to either copy's gradient is the sum of both at the end."""
        copies = [copy for copy in (self.first, self.last) if copy is not None and copy.requires_grad]
        with without_earlier_gradients(copies):
            yield
            if len(copies) == 2:
                add_gradient(copies[0], copies[1].grad)
                copies[1].grad = None
            elif copies:
                _add_other_copy(copies[0], world)


@torch.no_grad()
def _add_other_copy(parameter: nn.Parameter, world: World) -> None:
    """Add the gradient of the other end of the pipeline; the order of two addends does not matter."""
    pipeline = world.channels.pipeline
    other = pipeline.degree - 1 - pipeline.index
    assert other != pipeline.index
    if parameter.grad is None:  # of a last stage that made no use of it in this step
        parameter.grad = torch.zeros_like(parameter)
    gradient = local_tensor(parameter.grad).contiguous()
    arriving = torch.empty_like(gradient)
    pipeline.exchange([(other, gradient)], [(other, arriving)], "sum of the tied embedding's gradients").wait()
    local_tensor(parameter.grad).copy_(gradient + arriving)


def _weight(module: nn.Module | None) -> nn.Parameter:
    assert module is not None and isinstance(module.weight, nn.Parameter)
    return module.weight
