"""A new LoRA adapter in a model, drawn from a seed: the same under every layout, even before weights are loaded.

peft makes the layers and their configuration. Matrices A are uniform and B zero, as peft draws them by default, but
each from a seed of its own, `seed` and its name, so that no rank needs another's numbers.
"""

import math
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.errors import ModelError
from longspan.model.adapted_modules import is_adapted
from longspan.model.adapters.adapted_weights import adapted_weights
from longspan.model.adapters.adapter import adapter_parameters
from longspan.model.adapters.target_names import (
    _checked_target_names,
    _default_target_names,
    _linears_outside_towers,
)
from longspan.model.kinds import SCORE_HEADS, name_without_adapter
from longspan.model.layers import architecture_name, decoder_layers
from longspan.model.mtp.depths import unwrap_trained_mtp
from longspan.model.parts import is_tied
from longspan.model.weights.empty_model import has_meta_parameters
from longspan.model.weights.fill import JoinedWeights, find_deferred_weights
from longspan.model.weights.local_tensors import LocalPart


def lines_about_adapter(model: PreTrainedModel) -> Iterator[str]:
    """Yield lines about what has no adapter in the decoder layers of an adapted model, and where none can be merged."""
    adapted = adapted_weights(model)
    sizes = Counter[str]()
    total = 0
    for path, layer in decoder_layers(model).items():
        for name, parameter in layer.named_parameters():
            if parameter.ndim > 1 and ".lora_" not in name:
                total += parameter.numel()
                owner = [part for part in name_without_adapter(name).split(".")[:-1] if not part.isdigit()][-1]
                sizes[owner] += 0 if f"{path}.{name}" in adapted else parameter.numel()
    if large := [name for name, size in sizes.most_common() if size >= total / 100]:
        share = 100 * sum(sizes[name] for name in large) / total
        yield f"lora: {', '.join(large)} ({share:.1f} % of the weights of decoder layers) have no adapter"
    ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    if is_tied(model) and any(map(is_adapted, ends)):
        yield (
            "caution: lora.target_modules has the head, which shares its weight with the embedding "
            "(tie_word_embeddings): "
            "longspan export --merge will refuse this adapter, which stock peft reads over its base model; leave the "
            "head out of lora.target_modules if it is to be merged"
        )


# ---- drawing


@dataclass(frozen=True, kw_only=True)
class NewAdapter:
    """What a new LoRA adapter is to be; `alpha` 0 is twice the rank.

    Without `targets`, every linear of the decoder layers has an adapter. `whole` modules are trained whole; `base`
    names the base model in the configuration, and `revision` its commit on the hub.
    """

    rank: int
    alpha: float = 0.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    seed: int = 0
    base: str = ""
    revision: str = ""


def add_lora(model: PreTrainedModel, new: NewAdapter) -> Any:
    """Return the model with a new adapter in it as a PeftModel; `prepare` fills one on the meta device.

    Towers have none. Adapters are float32, or float64 in a float64 model. ModelError without peft, for wrong targets.
    """
    try:
        import peft
    except ImportError as error:
        raise ModelError(
            f"adapters are made by peft, which cannot be imported ({error}); pip install 'longspan[lora]'"
        ) from error
    linears, towers = _linears_outside_towers(model)
    if new.targets:
        names, of_experts = _checked_target_names(model, new.targets, linears)
    else:
        names, of_experts = _default_target_names(model, linears), []
    if of_experts and new.dropout:
        raise ModelError(
            f"lora.dropout is {new.dropout:g}, and lora.target_modules has experts ({', '.join(of_experts)}), whose "
            "adapters have none in peft; set it to 0"
        )
    config = peft.LoraConfig(
        r=new.rank,
        lora_alpha=new.alpha or 2 * new.rank,  # pyright: ignore[reportArgumentType]
        lora_dropout=new.dropout,
        target_modules=names,
        target_parameters=of_experts or None,
        exclude_modules=towers,
        task_type="SEQ_CLS" if architecture_name(model).endswith(SCORE_HEADS) else "CAUSAL_LM",
        modules_to_save=[*new.whole] or None,
    )
    empty = has_meta_parameters(model)
    # of names in transformers that peft reads
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        peft_model: Any = peft.get_peft_model(model, config, low_cpu_mem_usage=empty)
    config.base_model_name_or_path = new.base or None
    config.revision = new.revision or None
    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
    unwrap_trained_mtp(model)  # depths among `new.whole`: peft has put copies beside them
    for name in new.whole:
        model.get_submodule(name).to(dtype)
    for name, parameter in adapter_parameters(model):
        parameter.data = (
            parameter.data.to(dtype)
            if empty or ".lora_" not in name  # of a module that is trained whole
            else draw_adapter_values(name, parameter.shape, new.seed).to(dtype)
        )
    if empty and (weights := find_deferred_weights(model)) is not None:
        shapes = {name: tuple(parameter.shape) for name, parameter in adapter_parameters(model)}
        weights.source = JoinedWeights(weights.source, DrawnAdapter(shapes, new.seed))
    return peft_model


def draw_adapter_values(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """Draw an adapter's initial values, float32, on the CPU, as peft does: A uniform in ±1 / √inputs, B zero."""
    if ".lora_A." not in name:
        return torch.zeros(tuple(shape))
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))  # on CPUs seeds have 32 bits
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(tuple(shape)).uniform_(-bound, bound, generator=generator)


@dataclass(eq=False)
class DrawnAdapter:
    """A source of an adapter's weights, given by name and shape, drawn from a seed."""

    _shapes: Mapping[str, Sequence[int]]
    _seed: int

    def read(self, parts: Mapping[str, LocalPart], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        for name, shape in self._shapes.items():
            if part := parts.get(name):
                yield name, draw_adapter_values(name, shape, self._seed)[part.block].to(part.dtype)


def adapter_is_drawn_by_prepare(model: nn.Module) -> bool:
    """Return whether `prepare` draws the adapter in a model: `add_lora` made it on the meta device."""
    weights = find_deferred_weights(model)
    return weights is not None and isinstance(getattr(weights.source, "added", None), DrawnAdapter)
