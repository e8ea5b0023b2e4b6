"""Blocks whose features depend on each other between column-wise and row-wise linears are found, others are not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longspan.errors import ModelError
from longspan.model.exactness.small_copies import make_tiny_model, shrink_configuration
from longspan.model.tensor_parallel.plan import COLWISE, ROWWISE, list_styles
from longspan.model.tensor_parallel.split_trial import mixes_features, refuse_mixed_features

BETWEEN: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "gated": (lambda gate, up: F.silu(gate) * up, False),
    "without a gate": (lambda gate, up: F.relu(up).square(), False),
    "threshold over all features": (lambda gate, up: F.relu(gate - gate.mean(-1, keepdim=True)) * up, True),
    "largest twentieth": (
        lambda gate, up: F.relu(gate - gate.mean(-1, True) - 1.64 * gate.std(-1, keepdim=True)) * up,
        True,
    ),
    "softmax": (lambda gate, up: gate.softmax(-1) * up, True),
    "normed": (lambda gate, up: F.rms_norm(gate, gate.shape[-1:]) * up, True),
    "halves of one linear": (lambda gate, up: gate.chunk(2, -1)[0] * gate.chunk(2, -1)[1], True),
}


class _Block(nn.Module):
    def __init__(self, between: Callable[[Tensor, Tensor], Tensor], device: str) -> None:
        super().__init__()
        self.between = between
        self.gate, self.up, self.down = (nn.Linear(a, b, device=device) for a, b in ((6, 10), (6, 10), (10, 6)))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(self.between(self.gate(hidden), self.up(hidden)))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", BETWEEN)
def test_mixed_features_are_found(name: str, device: str) -> None:
    between, mixed = BETWEEN[name]
    block = _Block(between, device)
    styles = {id(block.gate): COLWISE, id(block.up): COLWISE, id(block.down): ROWWISE}
    assert mixes_features(block, styles) is mixed
    assert "forward" not in vars(block.gate) and block.down.weight.device.type == device


def test_gemma3n_is_refused_before_anything_is_split() -> None:
    config = pytest.importorskip("transformers.models.gemma3n").Gemma3nTextConfig()
    model = make_tiny_model(shrink_configuration(config), torch.float32)
    with pytest.raises(
        ModelError, match=r"layers\.0\.mlp \(Gemma3nTextMLP\) computes from all its features .* use tp 1"
    ):
        refuse_mixed_features(model, list_styles(model))
