"""Depths of multi-token prediction that are trained whole together with a LoRA adapter of the model.

peft names them in `modules_to_save`, and trains a copy of them next to the original ones. Here the copy takes their
place, so that the depths have their own names under every home, in checkpoints and in files.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from longspan.model.lora.adapters import belongs_to_adapter, is_adapted, is_copied
from longspan.model.mtp.names import PREFIX


def take_copied_depths(model: nn.Module) -> nn.Module | None:
    """Put the copy of the depths that an adapter trains in their place; returns what was there, None without a copy.

    Copies of several adapters are left as they are.
    """
    wrapper: Any = model._modules.get(PREFIX)
    if wrapper is None or not is_copied(wrapper):
        return None
    copies = [*wrapper.modules_to_save.values()]
    if len(copies) != 1:
        return None
    for name, original in wrapper.original_module.named_modules():  # the configuration names the attention function
        if isinstance(config := vars(original).get("config"), PreTrainedConfig):
            copies[0].get_submodule(name).config = config
    model._modules[PREFIX] = copies[0]
    return wrapper


@contextmanager
def put_copied_depths_in_place(model: nn.Module) -> Iterator[None]:
    """Take copied depths as `take_copied_depths` does; an error inside undoes it."""
    before = take_copied_depths(model)
    try:
        yield
    except BaseException:
        if before is not None:
            model._modules[PREFIX] = before
        raise


def select_depth_weights(names: Iterable[str]) -> list[str]:
    """Select the depths' own weights from the names of what a run with an adapter trains.

    >>> select_depth_weights(["mtp.layers.0.eh_proj.weight", "mtp.layers.0.eh_proj.lora_A.default.weight"])
    ['mtp.layers.0.eh_proj.weight']
    """
    return [name for name in names if name.startswith(f"{PREFIX}.") and not belongs_to_adapter(name)]


def depth_reasons(model: nn.Module) -> Iterator[str]:
    """Why depths cannot be trained with an adapter: only in part, or having adapters too."""
    mtp = model._modules.get(PREFIX)
    weights = dict(mtp.named_parameters()) if mtp is not None else {}
    depth_weights = select_depth_weights(f"{PREFIX}.{name}" for name in weights)
    trained = [name for name in depth_weights if weights[name.removeprefix(f"{PREFIX}.")].requires_grad]
    if mtp is None or not trained:
        return
    if len(trained) < len(depth_weights):
        yield (
            f"{len(trained)} of {len(depth_weights)} weights of its depths of multi-token prediction require "
            "gradients, and depths are trained whole or through adapters alone; use "
            "model.mtp.requires_grad_(True), or False"
        )
    if adapted := [f"{PREFIX}.{name}" for name, module in mtp.named_modules() if is_adapted(module)]:
        yield (
            f"its depths of multi-token prediction are trained whole and have adapters ({', '.join(adapted[:2])}); "
            'give LoraConfig(modules_to_save=["mtp"]), which leaves them without'
        )
