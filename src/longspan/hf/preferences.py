"""What DPO and KTO do with a reference model before training: its log-probabilities as columns of the dataset."""

import copy
import tempfile
from pathlib import Path
from typing import Any


class PreferencesPart:
    """Precomputing of a reference's log-probabilities, under the plan of evaluation."""

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        """A dataset with the columns that TRL computes, on every rank.

        The first rank reads and writes TRL's cache of them; other ranks, which may see another disk, take its content.
        """
        self._prepare_once()
        reference = self.ref_model or self._facade
        training = reference.prepared.training
        dataset = copy.copy(dataset)
        path_of = dataset._get_cache_file_path
        dataset._get_cache_file_path = lambda fingerprint: self._cache_of_first_rank(path_of(fingerprint))
        self.accelerator.every_rank_writes = True
        reference.prepared.eval()
        try:
            return super()._precompute_ref_logps(dataset, name, batch_size)
        finally:
            reference.prepared.train(training)
            self.accelerator.every_rank_writes = False

    def _cache_of_first_rank(self, path: str) -> str:
        """The file of a cache on this rank: it is there on all ranks, with the same content, or on none."""
        first, found = self.world.rank == 0, Path(path)
        content = found.read_bytes() if first and found.exists() else None
        content = self.world.control.broadcast_object(content)
        if first:
            return path
        if not hasattr(self, "_caches"):  # a dataset maps its file as long as it lives
            self._caches = tempfile.TemporaryDirectory(prefix="longspan-reference-")
        mine = Path(self._caches.name) / found.name
        if content is not None:
            mine.write_bytes(content)
        return str(mine)
