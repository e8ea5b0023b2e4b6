"""Log-probabilities of answers by the reference model of a loss of preferences: computed once, kept beside the tokens.

The reference is the model that a run begins with: under an adapter the base, at any time; else its weights before the
first step, which a run that goes on reads again only where some are missing.
"""

import hashlib
import json
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np

from longspan.checkpoint.base import weights_fingerprint
from longspan.comm import World
from longspan.comm.all_ranks import LogLine, run_on_first_rank
from longspan.config.dtypes import compute_dtype_name
from longspan.config.sections import RunConfig
from longspan.data.corpus_documents import CorpusDocuments
from longspan.errors import DataError, ModelError, plural
from longspan.evaluation.live import evaluate
from longspan.evaluation.metrics import EvaluationOptions
from longspan.files import name_file_in_errors
from longspan.layout import Floats
from longspan.model import disable_adapter
from longspan.plain_text import seconds_text
from longspan.resolve.choice import PlannerConfig
from longspan.train.run_model.prepare import AnyModel

_STEPS = 16  # whose tokens are evaluated at a time
_NEWS_SECONDS = 30.0


def read_reference_log_probs(documents: Sequence[CorpusDocuments], config: RunConfig, world: World) -> bool:
    """Read the reference's log-probabilities of each corpus from its file; return whether all of `documents` have one.

    Sets `corpus.reference` (documents of the corpus,), NaN where the file has none, the same on every rank, which all
    enter. Nothing is computed. Raises DataError, on every rank, where the disk refuses a file.
    """
    key = run_on_first_rank(world, partial(_reference_digest, config, world.device.type), ModelError)

    def read_files() -> list[Floats]:
        """Return the values of each corpus, by the first rank."""
        files = [(_reference_file(selection, key), len(selection.corpus)) for selection in documents]
        return [np.load(file) if file.is_file() else np.full(count, np.nan) for file, count in files]

    # Read by one rank alone: another run may write a file meanwhile.
    for selection, values in zip(documents, run_on_first_rank(world, read_files, DataError), strict=True):
        selection.corpus.reference = values
    return not any(_ids_without_reference(selection) for selection in documents)


def compute_references(
    model: AnyModel,
    documents: Sequence[CorpusDocuments],
    config: RunConfig,
    choice: PlannerConfig,
    world: World,
    log: LogLine,
    stopped: Callable[[], str] | None,
) -> None:
    """Compute what the documents lack with the reference's weights, into `corpus.reference`, and write it to files.

    All ranks call it together, after `read_reference_log_probs`. Raises EvaluationStopped for a signal; what was
    computed before is kept.
    """
    key = run_on_first_rank(world, partial(_reference_digest, config, world.device.type), ModelError)
    options = EvaluationOptions(name="the reference model", stopped=stopped)
    with disable_adapter(model) if config.lora.rank else nullcontext():
        for selection in documents:
            corpus = selection.corpus
            missing = _ids_without_reference(selection)
            ends = np.cumsum(corpus.lengths[missing], dtype=np.int64)
            done = 0
            started = last_news = time.monotonic()
            while done < len(missing):
                tokens_done = ends[done - 1] if done else 0
                most_tokens = tokens_done + _STEPS * config.train.tokens_per_step
                stop = max(int(np.searchsorted(ends, most_tokens, side="right")), done + 1)
                result = evaluate(model, corpus.select(missing[done:stop]), choice, world, options)
                assert corpus.reference is not None
                corpus.reference[missing[done:stop]] = [-loss.sum for loss in result.document_losses]
                done = stop
                save = partial(_save_array, _reference_file(selection, key), corpus.reference)
                run_on_first_rank(world, save, DataError)
                now = time.monotonic()
                if done == len(missing) or now - last_news > _NEWS_SECONDS:
                    last_news = now
                    seconds_left = (now - started) * (int(ends[-1]) / int(ends[done - 1]) - 1)
                    outlook = f"{seconds_text(seconds_left)} left"
                    if done == len(missing):
                        outlook = f"kept in {corpus.documents_folder}"
                    log(
                        f"reference model: log-probabilities of {done:,} of {plural(len(missing), 'document')} in "
                        f"{now - started:.1f} s, {outlook}"
                    )


def _ids_without_reference(documents: CorpusDocuments) -> list[int]:
    """Return the ids, ascending, of documents whose log-probability is not there."""
    assert documents.corpus.reference is not None
    ids = np.unique(np.array(documents.ids, dtype=np.int64))
    return ids[np.isnan(documents.corpus.reference[ids])].tolist()


def _reference_digest(config: RunConfig, device: str) -> str:
    """Return a digest of all that decides the log-probabilities of a corpus beside its tokens: weights
    and arithmetic.
    """
    model = config.model
    weights = (
        weights_fingerprint(Path(model.path))
        if model.path
        else [model.preset_name, model.config, config.train.seed]
    )
    values = [weights, model.dtype, compute_dtype_name(model, device), model.frozen]
    values += [*model.rope, config.train.float8]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def _reference_file(documents: CorpusDocuments, key: str) -> Path:
    """Return the file of a corpus' log-probabilities by the reference of this digest."""
    return documents.corpus.documents_folder / f"reference-{key}.npy"


def _save_array(file: Path, values: Floats) -> None:
    """Write the values of documents, so that the file is whole at any time.

    Where a value is NaN, the one that the file has already stays.
    """
    partial_file = file.with_name(f"{file.stem}.partial-{uuid.uuid4().hex[:8]}.npy")
    with name_file_in_errors(file):
        if file.is_file():  # of another run, or set, over the same documents
            values = np.where(np.isnan(values), np.load(file), values)
        np.save(partial_file, values)
        partial_file.replace(file)
