"""Depths of multi-token prediction that are trained whole beside a LoRA adapter of the model.

peft names them in `modules_to_save`, and trains a copy of them beside the ones that were there. Here the copy takes
their place, so that the depths have their own names under every home, in checkpoints and in files.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from longspan.model.adapters import belongs_to_adapter, is_adapted, is_copied
from longspan.model.mtp.names import PREFIX


def take_copied_depths(model: nn.Module) -> nn.Module | None:
    """Put the copy of the depths that an adapter trains in their place; returns what stood there, None without one.

    Of several adapters' copies none is taken.
    """
    wrapper: Any = model._modules.get(PREFIX)
    if wrapper is None or not is_copied(wrapper):
        return None
    copies = [*wrapper.modules_to_save.values()]
    if len(copies) != 1:
        return None
    for name, original in wrapper.original_module.named_modules():  # the configuration says which attention is called
        if isinstance(config := vars(original).get("config"), PreTrainedConfig):
            copies[0].get_submodule(name).config = config
    model._modules[PREFIX] = copies[0]
    return wrapper


@contextmanager
def copied_depths_taken(model: nn.Module) -> Iterator[None]:
    """The same, undone after an error inside."""
    before = take_copied_depths(model)
    try:
        yield
    except BaseException:
        if before is not None:
            model._modules[PREFIX] = before
        raise


def of_whole_depths(names: Iterable[str]) -> list[str]:
    """Of names of what an adapter's run trains those of depths' own weights.

    >>> of_whole_depths(["mtp.layers.0.eh_proj.weight", "mtp.layers.0.eh_proj.lora_A.default.weight"])
    ['mtp.layers.0.eh_proj.weight']
    """
    return [name for name in names if name.startswith(f"{PREFIX}.") and not belongs_to_adapter(name)]


def depth_reasons(model: nn.Module) -> Iterator[str]:
    """Why depths beside an adapter cannot be trained: they would be in part, or have adapters too."""
    mtp = model._modules.get(PREFIX)
    weights = dict(mtp.named_parameters()) if mtp is not None else {}
    own = of_whole_depths(f"{PREFIX}.{name}" for name in weights)
    trained = [name for name in own if weights[name.removeprefix(f"{PREFIX}.")].requires_grad]
    if mtp is None or not trained:
        return
    if len(trained) < len(own):
        yield (
            f"{len(trained)} of {len(own)} weights of its depths of multi-token prediction require gradients, and "
            "depths are trained whole or through adapters alone; use model.mtp.requires_grad_(True), or False"
        )
    if adapted := [f"{PREFIX}.{name}" for name, module in mtp.named_modules() if is_adapted(module)]:
        yield (
            f"its depths of multi-token prediction are trained whole and have adapters ({', '.join(adapted[:2])}); "
            'give LoraConfig(modules_to_save=["mtp"]), which leaves them without'
        )
