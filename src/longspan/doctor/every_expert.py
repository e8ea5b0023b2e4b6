"""Mixtures of experts without a choice, for proofs in half precision.

Rounding there sends a row that is near two experts to another one than in float32: gradients of that row differ
altogether, and twice the stock model's own error would allow far more than rounding. Where every expert takes every
row only rounding is left. Which experts a row gets is proven in wider types.
"""

import copy

from transformers import PreTrainedConfig

from longspan.model.exactness.small_values import EXPERT_GROUPS, PICKED
from longspan.plan.cost.model_shape import read_experts


def with_every_expert(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of a configuration in which every row gets every expert; the same object where there is none to choose.

    >>> with_every_expert(MixtralConfig()).num_experts_per_tok
    8
    """
    count = read_experts(config.get_text_config()).of_layer
    changed = copy.deepcopy(config)
    text = changed.get_text_config()
    picked = [name for name in PICKED if isinstance(getattr(text, name, None), int)]
    if count < 2 or not picked:
        return config
    for name in picked:
        setattr(text, name, count)
    groups = [getattr(text, name) for name in EXPERT_GROUPS if isinstance(getattr(text, name, None), int)]
    if groups and isinstance(getattr(text, "topk_group", None), int):
        text.topk_group = groups[0]
    return changed
