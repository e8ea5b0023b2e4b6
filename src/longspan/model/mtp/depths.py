"""Multi-token prediction (DeepSeek-V3, https://arxiv.org/abs/2412.19437, §2.2): depths behind a causal model.

x = eh_proj [enorm(embedding of token t + d) ; hnorm(hidden of depth d − 1)]
hidden of depth d = post_norm(block(x)); predicts token t + d + 1 at row t
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from longspan.errors import ModelError
from longspan.model.layers import MTP, mtp_depths


class MtpBlocks(nn.ModuleList):
    """The decoder layers of one depth, one after another, in models whose layers are only attention, mixer or MLP."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run hidden states (1, T, D) through all blocks, each called with the same arguments."""
        for block in self:
            hidden = take_hidden_states(block(hidden, *args, **kwargs))
        return hidden


class MtpDepth(nn.Module):
    """One depth: norms, a projection of twice the hidden size, and a decoder layer (or `MtpBlocks`) of the model's.

    `norms` are those of embeddings, of hidden states, and behind the layer.
    """

    def __init__(self, block: nn.Module, norms: tuple[nn.Module, nn.Module, nn.Module], eh_proj: nn.Linear) -> None:
        """Take norms of embeddings, of hidden states and behind the layer, the projection, and the decoder layer."""
        super().__init__()
        self.enorm, self.hnorm, self.post_norm = norms
        self.eh_proj = eh_proj
        self.mtp_block = block

    def forward(self, embedded: Tensor, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Project embeddings of later tokens and hidden states of the depth before, (1, T, D), and run the layer."""
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        return self.post_norm(take_hidden_states(self.mtp_block(x, *args, **kwargs)))


def take_hidden_states(output: Any) -> Tensor:
    """Return the hidden states in what a decoder layer returns: a tensor, or the first of a tuple."""
    return output if isinstance(output, Tensor) else output[0]


class MtpDepths(nn.Module):
    """All depths of a model, its attribute `mtp`; the block of each, or its last layer, is like the model's last."""

    holds_depths = True  # by which `mtp_depths` knows it

    def __init__(self, depths: list[MtpDepth]) -> None:
        super().__init__()
        self.layers: nn.ModuleList = nn.ModuleList(depths)


def refuse_bypassing_mtp(model: nn.Module, reached: Sequence[nn.Module]) -> None:
    """Raise ModelError for a depth without any of the modules `reached`, which call our attention or are mixers."""
    for i, depth in enumerate(mtp_depths(model)):
        if not any(module is inner for inner in depth.mtp_block.modules() for module in reached):
            raise ModelError(
                f"{type(model).__name__}: {MTP}.layers.{i}.mtp_block ({type(depth.mtp_block).__name__}) reaches no "
                "attention over the sharded sequence; train the model without add_mtp"
            )
