"""An adapter's files, as stock peft reads them: tensors under peft's names, and the modules that are trained whole."""

import copy
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from longspan.errors import ModelError
from longspan.model.adapters.adapter import Adapter
from longspan.model.layers import MTP
from longspan.model.mtp.depths import select_mtp_weights
from longspan.model.weights.write import save_tensors


def largest_trained_modules(model: nn.Module, trained: Collection[str], inside: str = "") -> tuple[str, ...]:
    """Return the names of the largest modules, inside the one named `inside`, all of whose parameters are `trained`.

    Lists of modules, which peft does not take, are not among them. Raises ModelError if some trained parameter is in
    none of these modules, as in a module that is trained in part.
    """
    modules = list[str]()
    for name, module in model.get_submodule(inside).named_modules(prefix=inside, remove_duplicate=False):
        parameters = {f"{name}.{parameter}" for parameter, _ in module.named_parameters()}
        is_container = name == inside or isinstance(module, nn.ModuleList | nn.ModuleDict)
        is_inside_larger = f"{name}.".startswith(tuple(f"{larger}." for larger in modules))
        if parameters and parameters <= set(trained) and not (is_container or is_inside_larger):
            modules.append(name)
    if outside := sorted(
        name for name in trained if not name.startswith(tuple(f"{module}." for module in modules))
    ):
        raise ModelError(
            f"{', '.join(outside[:3])}: peft saves whole modules beside an adapter, and not all of this one is "
            "trained; train all of it or nothing, or keep it by save_checkpoint(folder, model, …)"
        )
    return tuple(modules)


def entries_inside_modules(modules: Collection[str], entries: Any) -> dict[str, Any]:
    """Select the entries, by names of weights and buffers, that lie inside these modules; none for no modules."""
    inside = tuple(f"{module}." for module in modules)
    if inside:
        return {name: value for name, value in entries.items() if name.startswith(inside)}
    return {}


WEIGHTS = "adapter_model.safetensors"


def write_adapter(
    folder: Path,
    adapter: Adapter,
    tensors: Mapping[str, Tensor],
    tokenizer: Any = None,
    modules: Sequence[str] = (),
) -> None:
    """Write an adapter's whole tensors, named as in a prepared model, its configuration, and the tokenizer's files.

    `modules` are whole modules among the tensors, which peft loads in place of the base model's.
    """
    stock = {name_in_peft_files(name, adapter.name): tensor.contiguous() for name, tensor in tensors.items()}
    save_tensors(stock, folder / WEIGHTS)
    config = copy.copy(adapter.config)
    config.inference_mode = True
    if whole_modules := [*modules, *([MTP] if select_mtp_weights(tensors) else [])]:
        config.modules_to_save = [*dict.fromkeys((*(config.modules_to_save or ()), *whole_modules))]
    for key in ("target_modules", "target_parameters"):
        if isinstance(names := getattr(config, key, None), set):
            # One order of names gives equal adapters equal files.
            setattr(config, key, sorted(names))
    config.save_pretrained(str(folder))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def name_in_peft_files(name: str, adapter: str) -> str:
    """Return the name of an adapter's tensor in peft's files, where names lack the name `adapter`.

    DoRA's magnitudes, a module each in the model, are plain parameters in files.

    >>> name_in_peft_files("model.layers.0.mlp.up_proj.lora_A.default.weight", "default")
    'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
    """
    bare = name.replace(f".modules_to_save.{adapter}.", ".")
    bare = re.sub(rf"\.lora_magnitude_vector\.{re.escape(adapter)}\.weight$", ".lora_magnitude_vector", bare)
    return "base_model.model." + re.sub(rf"(\.lora_\w+)\.{re.escape(adapter)}(?=\.|$)", r"\1", bare)
