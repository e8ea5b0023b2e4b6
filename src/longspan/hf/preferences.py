"""What DPO and KTO do with a reference model before training: its log-probabilities as columns of the dataset."""

import copy
import tempfile
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from longspan.errors import ConfigError, ModelError
from longspan.hf.one_process import StockTrainer


def load_on_one_device(args: Any) -> None:
    """Let TRL load models without a device_map: to it one process has all GPUs, over which it would spread them.

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
        """A dataset with the columns that TRL computes, on every rank.

        The first rank reads and writes TRL's cache of them; other ranks, which may see another disk, take its content.
        """
        self._refuse_reference()
        self._prepare_once()
        reference = self.ref_model or self._facade
        training = reference.inner_model.training
        dataset = copy.copy(dataset)
        path_of = dataset._get_cache_file_path
        dataset._get_cache_file_path = lambda fingerprint: self._cache_of_first_rank(path_of(fingerprint))
        self.accelerator.every_rank_writes = True
        reference.inner_model.eval()
        try:
            return super()._precompute_ref_logps(dataset, name, batch_size)
        finally:
            reference.inner_model.train(training)
            self.accelerator.every_rank_writes = False

    def _refuse_reference(self) -> None:
        """Raise ModelError or ConfigError for a reference that longspan does not prepare."""
        if len(getattr(self.model, "peft_config", ())) > 1:
            raise ModelError(
                f"the model has {len(self.model.peft_config)} adapters ({', '.join(self.model.peft_config)}), as TRL "
                "keeps a copy of a trained adapter for the reference; a longspan trainer runs one: merge it into the "
                "model first (model.merge_and_unload()) and give a new one as peft_config="
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
        """The file of a cache on this rank: it is there on all ranks, with the same content, or on none."""
        first, cache = self.world.rank == 0, Path(path)
        content = cache.read_bytes() if first and cache.exists() else None
        content = self.world.control.broadcast_object(content)
        if first:
            return path
        if not hasattr(self, "_caches"):  # a dataset maps its file as long as it lives
            self._caches = tempfile.TemporaryDirectory(prefix="longspan-reference-")
        mine = Path(self._caches.name) / cache.name
        if content is not None:
            mine.write_bytes(content)
        return str(mine)
