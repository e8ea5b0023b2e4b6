"""An adapter as a folder that stock peft loads: adapter_config.json and adapter_model.safetensors.

Whole modules that are trained with an adapter, a tower or a projector, are named in peft's `modules_to_save`.
"""

import copy
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from longspan.errors import ModelError
from longspan.model.adapters import Adapter
from longspan.model.mtp.depths import select_depth_weights
from longspan.model.mtp.names import PREFIX


def largest_trained_modules(model: nn.Module, trained: Collection[str], inside: str = "") -> tuple[str, ...]:
    """Return the names of the largest modules whose parameters are all `trained`.

    They are modules inside the one named `inside` ("": the model), which is not itself among them; nor are lists of
    modules, which peft does not take.

    >>> largest_trained_modules(model, {"model.visual.merger.ln_q.weight"})  # doctest: +SKIP
    ('model.visual.merger.ln_q',)

    Raises ModelError for a module whose parameters are trained only in part.
    """
    modules = tuple(_largest_trained_modules(model.get_submodule(inside), f"{inside}." if inside else "", set(trained)))
    if outside := sorted(name for name in trained if not name.startswith(tuple(f"{module}." for module in modules))):
        raise ModelError(
            f"{', '.join(outside[:3])}: peft saves whole modules beside an adapter, and not all of this one is "
            "trained; train all of it or nothing, or keep it by save_checkpoint(folder, model, …)"
        )
    return modules


def _largest_trained_modules(module: nn.Module, prefix: str, trained: set[str]) -> Iterator[str]:
    for name, child in module.named_children():
        path, parameters = f"{prefix}{name}", dict(child.named_parameters())
        is_trained = bool(parameters) and all(f"{path}.{p}" in trained for p in parameters)
        if is_trained and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield path
        else:
            yield from _largest_trained_modules(child, f"{path}.", trained)


def select_entries(modules: Collection[str], entries: Any) -> dict[str, Any]:
    """Select the entries, by names of weights and buffers, that lie inside these modules; none for no modules."""
    inside = tuple(f"{module}." for module in modules)
    return {name: value for name, value in entries.items() if name.startswith(inside)} if inside else {}


WEIGHTS, CONFIGURATION = "adapter_model.safetensors", "adapter_config.json"


def write_adapter(
    folder: Path, adapter: Adapter, tensors: Mapping[str, Tensor], tokenizer: Any = None, modules: Sequence[str] = ()
) -> None:
    """Write an adapter's whole tensors, named as in a prepared model, its configuration, and the tokenizer's files.

    `tokenizer` is one of transformers, or whatever else has its `save_pretrained`. `modules` are names of whole modules
    whose weights are among the tensors: peft loads them in place of the base model's. Depths of multi-token prediction
    need not be named.

    >>> PeftModel.from_pretrained(base_model, folder)  # doctest: +SKIP
    """
    stock = {stock_name(name, adapter.name): tensor.contiguous() for name, tensor in tensors.items()}
    save_file(stock, folder / WEIGHTS, metadata={"format": "pt"})
    config = copy.copy(adapter.config)
    config.inference_mode = True
    if whole_modules := [*modules, *([PREFIX] if select_depth_weights(tensors) else [])]:
        config.modules_to_save = [*dict.fromkeys((*(config.modules_to_save or ()), *whole_modules))]
    if isinstance(config.target_modules, set):
        config.target_modules = sorted(config.target_modules)  # in one order, so that equal adapters have equal files
    config.save_pretrained(str(folder))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def stock_name(name: str, adapter: str) -> str:
    """Return the name of an adapter's tensor in peft's files, where names lack the name `adapter`.

    DoRA's magnitudes, a module each in the model, are plain parameters in files.

    >>> stock_name("model.layers.0.mlp.up_proj.lora_A.default.weight", "default")
    'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
    """
    bare = name.replace(f".modules_to_save.{adapter}.", ".")
    bare = re.sub(rf"\.lora_magnitude_vector\.{re.escape(adapter)}\.weight$", ".lora_magnitude_vector", bare)
    return "base_model.model." + re.sub(rf"(\.lora_\w+)\.{re.escape(adapter)}(?=\.|$)", r"\1", bare)
