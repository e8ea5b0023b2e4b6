"""Depths of multi-token prediction beside an adapter of peft, which may train them whole, adapt them, or leave them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from longspan.model.adapted_modules import belongs_to_adapter, has_trained_copy, is_adapted
from longspan.model.features import Feature
from longspan.model.layers import MTP


def unwrap_trained_mtp(model: nn.Module) -> nn.Module | None:
    """Replace peft's wrapper of the depths by the one copy that it trains; returns the wrapper, or None without."""
    wrapper: Any = model._modules.get(MTP)
    if wrapper is None or not has_trained_copy(wrapper):
        return None
    copies = [*wrapper.modules_to_save.values()]
    if len(copies) != 1:
        return None
    # the copy has configurations of its own; layers must share the model's, which names the attention function
    for name, original in wrapper.original_module.named_modules():
        if isinstance(config := vars(original).get("config"), PreTrainedConfig):
            copies[0].get_submodule(name).config = config
    model._modules[MTP] = copies[0]
    return wrapper


class MtpFeature(Feature):
    """Depths of multi-token prediction: peft's wrapper gives way to the copy that it trains. Others act on layers."""

    @contextmanager
    def checks_context(self, model: nn.Module) -> Iterator[None]:
        """Call `unwrap_trained_mtp`; after an error inside, the wrapper is put back."""
        original = unwrap_trained_mtp(model)
        try:
            yield
        except BaseException:
            if original is not None:
                model._modules[MTP] = original
            raise


def select_mtp_weights(names: Iterable[str]) -> list[str]:
    """Select the depths' own weights, in their order, from the names of what a run with an adapter trains.

    >>> select_mtp_weights(["mtp.layers.0.eh_proj.weight", "mtp.layers.0.eh_proj.lora_A.default.weight"])
    ['mtp.layers.0.eh_proj.weight']
    """
    return [name for name in names if name.startswith(f"{MTP}.") and not belongs_to_adapter(name)]


def reasons_against_mtp(model: nn.Module) -> Iterator[str]:
    """Yield why depths cannot be trained with an adapter: trained only in part, or trained whole and adapted too."""
    mtp = model._modules.get(MTP)
    if mtp is None:
        return
    parameters = {f"{MTP}.{name}": parameter for name, parameter in mtp.named_parameters()}
    depth_weights = select_mtp_weights(parameters)
    trained = [name for name in depth_weights if parameters[name].requires_grad]
    if not trained:
        return
    if len(trained) < len(depth_weights):
        yield (
            f"{len(trained)} of {len(depth_weights)} weights of its depths of multi-token prediction require "
            "gradients, and depths are trained whole or through adapters alone; use "
            "model.mtp.requires_grad_(True), or False"
        )
    if adapted := [f"{MTP}.{name}" for name, module in mtp.named_modules() if is_adapted(module)]:
        yield (
            f"its depths of multi-token prediction are trained whole and have adapters ({', '.join(adapted[:2])}); "
            'give LoraConfig(modules_to_save=["mtp"]), which leaves them without'
        )
