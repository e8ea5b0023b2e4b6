"""References of TRL's trainers: log-probabilities as columns of a dataset, and the adapter that training began with."""

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from longspan.errors import ConfigError, ModelError
from longspan.hf.one_process import StockTrainer
from longspan.model.adapters import adapter_parameters
from longspan.model.weights.local_tensors import local_tensor

REFERENCE = "ref"  # TRL's name of the copy of a trained adapter that it keeps for the reference


def clear_device_map(args: Any) -> None:
    """Have TRL load models without a device_map: it sees one process, and would spread a model over all GPUs.

    Raises ConfigError for a device_map of the user's.
    """
    if not hasattr(args, "model_init_kwargs"):
        return
    keywords = dict(args.model_init_kwargs or {})
    if keywords.get("device_map") is not None:
        raise ConfigError(
            f"args.model_init_kwargs has device_map {keywords['device_map']!r}: a longspan trainer places parameters "
            "itself; leave it out"
        )
    args.model_init_kwargs = {**keywords, "device_map": None}


class PreferencesPart(StockTrainer):
    """Precomputing of a reference's log-probabilities, under the plan of evaluation."""

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        """The first rank reads and writes TRL's cache; other ranks, which may see another disk, take its content."""
        self._refuse_reference()
        self._prepare_once()
        reference = self.ref_model or self._facade
        training = reference.inner_model.training
        dataset = copy.copy(dataset)
        path_of = dataset._get_cache_file_path
        dataset._get_cache_file_path = lambda fingerprint: self._cache_of_first_rank(path_of(fingerprint))
        self.accelerator.every_rank_writes = True  # each into the file that `_cache_of_first_rank` gives it
        reference.inner_model.eval()
        try:
            return super()._precompute_ref_logps(dataset, name, batch_size)
        finally:
            reference.inner_model.train(training)
            self.accelerator.every_rank_writes = False

    def _refuse_reference(self) -> None:
        names = [name for name in getattr(self.model, "peft_config", ()) if name != REFERENCE]
        if len(names) > 1:
            raise ModelError(
                f"the model has {len(names)} adapters ({', '.join(names)}), and a longspan trainer runs one, which it "
                "trains; keep one: model.delete_adapter(name)"
            )
        reference = getattr(self, "ref_model", None)
        if reference is not None and not isinstance(getattr(reference, "inner_model", reference), PreTrainedModel):
            raise ModelError(
                f"ref_model is {type(reference).__name__}: a longspan trainer prepares models of transformers; merge "
                "an adapter into it first (ref_model.merge_and_unload())"
            )
        if getattr(reference, "hf_device_map", None):
            raise ConfigError(
                "ref_model was loaded with a device_map, and a longspan trainer places parameters itself; load it "
                "without device_map"
            )

    def _cache_of_first_rank(self, path: str) -> str:
        """Return this rank's copy of the cache that the first rank has at `path`, if there is one."""
        is_first, cache = self.world.rank == 0, Path(path)
        content = cache.read_bytes() if is_first and cache.exists() else None
        content = self.world.control.broadcast_object(content)
        if is_first:
            return path
        if not hasattr(self, "_caches"):  # kept with the trainer, as a dataset maps its file as long as it lives
            self._caches = tempfile.TemporaryDirectory(prefix="longspan-reference-")
        copy_here = Path(self._caches.name) / cache.name
        if content is not None:
            copy_here.write_bytes(content)
        return str(copy_here)


def take_reference_adapter(model: Any) -> Any:
    """Remove TRL's copy of a model's adapter, before `prepare`; return its configuration, or None without a copy.

    An only adapter of this name is no copy, but the one that is trained.
    """
    configs = getattr(model, "peft_config", {})
    if REFERENCE not in configs or len(configs) == 1:
        return None
    config = configs[REFERENCE]
    model.delete_adapter(REFERENCE)
    return config


class ReferenceAdapter:
    """The adapter that training began with, in place of TRL's copy: the trained one has its values for a while.

    TRL finds the copy's `config` in `peft_config`, and calls `set_adapter("ref")` of the PeftModel for the reference.
    """

    def __init__(self, peft_model: Any, prepared: nn.Module, config: Any) -> None:
        (self._trained,) = peft_model.peft_config
        self._active_adapter = self._trained
        self._refuse = peft_model.set_adapter  # `prepare` made it refuse all but the trained adapter
        self._parameters = [parameter for _, parameter in adapter_parameters(prepared)]
        self._other_values = [local_tensor(parameter).clone() for parameter in self._parameters]  # of the inactive one
        peft_model.base_model.peft_config = {**peft_model.peft_config, REFERENCE: config}
        peft_model.set_adapter = self.set_adapter

    @torch.no_grad()
    def set_adapter(self, name: str, *args: Any, **keywords: Any) -> None:
        """Exchange the values of the trained adapter and of the reference's; `prepare` refuses other names."""
        if name not in (self._trained, REFERENCE):
            self._refuse(name, *args, **keywords)
        if name == self._active_adapter:
            return
        self._active_adapter = name
        for parameter, other_values in zip(self._parameters, self._other_values, strict=True):
            values = local_tensor(parameter)
            earlier_values = values.clone()
            values.copy_(other_values)
            other_values.copy_(earlier_values)
