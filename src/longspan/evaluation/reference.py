"""Log-probabilities of answers by the reference model of a loss of preferences: computed once, kept beside the tokens.

The reference is the model that a run begins with: under an adapter the base, at any time; else its weights before the
first step, which a run that goes on reads again only where some are missing.
"""

import hashlib
import io
import json
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
from transformers import PreTrainedConfig

from longspan.checkpoint.base import weight_sums
from longspan.comm import World
from longspan.comm.all_ranks import LogLine, run_on_first_rank
from longspan.config.dtypes import compute_dtype_name
from longspan.config.keys import AUTO
from longspan.config.memory_keys import form_of_config
from longspan.config.sections import RunConfig
from longspan.data.corpus_documents import CorpusDocuments
from longspan.errors import DataError, ModelError, plural
from longspan.evaluation.live import evaluate
from longspan.evaluation.metrics import EvaluationOptions
from longspan.files import name_file_in_errors
from longspan.layout import Floats
from longspan.model import disable_adapter
from longspan.model.weights.configuration_values import configuration_values, decides_numbers
from longspan.plain_text import seconds_text
from longspan.resolve.planner_config import PlannerConfig
from longspan.train.run_model.prepare import AnyModel

# The tokens of this many steps are evaluated at a time.
_STEPS = 16
_NEWS_SECONDS = 30.0
# The digest stands behind the array in a file.
_DIGEST_BYTES = 32


def read_reference_log_probs(documents: Sequence[CorpusDocuments], digest: str, world: World, log: LogLine) -> bool:
    """Read the log-probabilities of each corpus by the reference of this digest (`reference_digest`) from its file;
    return whether all of `documents` have one.

    Sets `corpus.reference` (documents of the corpus,), NaN where the file has none, the same on every rank, which all
    enter. A damaged file counts as missing, which is logged. Nothing is computed. Raises DataError, on every rank,
    where the disk refuses a file.
    """
    files = [_reference_file(selection, digest) for selection in documents]
    counts = [len(selection.corpus) for selection in documents]
    # Read by one rank alone: another run may write a file meanwhile.
    tables = run_on_first_rank(world, lambda: list(map(_read_values, files, counts)), DataError)
    for selection, file, count, values in zip(documents, files, counts, tables, strict=True):
        if values is None:
            log(f"{file} is damaged: its log-probabilities by the reference model count as missing")
        selection.corpus.reference = np.full(count, np.nan) if values is None else values
    return not any(_ids_without_reference(selection) for selection in documents)


def compute_references(
    model: AnyModel,
    documents: Sequence[CorpusDocuments],
    digest: str,
    config: RunConfig,
    choice: PlannerConfig,
    world: World,
    log: LogLine,
    stopped: Callable[[], str] | None,
) -> None:
    """Compute what the documents lack with the reference's weights, into `corpus.reference`, and write it to files.

    All ranks call it together, after `read_reference_log_probs` of the same `digest`. Raises EvaluationStopped for a
    signal; what was computed before is kept.
    """
    share_prefixes = config.data.share_prefixes == AUTO
    options = EvaluationOptions(name="the reference model", share_prefixes=share_prefixes, stopped=stopped)
    with disable_adapter(model) if config.lora.rank else nullcontext():
        for selection in documents:
            corpus = selection.corpus
            missing = _ids_without_reference(selection)
            # Documents of an evaluation of saved weights are in a folder that is gone once all ranks have mapped it.
            is_kept = run_on_first_rank(world, corpus.documents_folder.is_dir, DataError)
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
                if is_kept:
                    save = partial(_write_values, _reference_file(selection, digest), corpus.reference)
                    run_on_first_rank(world, save, DataError)
                now = time.monotonic()
                if done == len(missing) or now - last_news > _NEWS_SECONDS:
                    last_news = now
                    seconds_left = (now - started) * (int(ends[-1]) / int(ends[done - 1]) - 1)
                    outlook = f"{seconds_text(seconds_left)} left"
                    if done == len(missing):
                        outlook = f"kept in {corpus.documents_folder}" if is_kept else "for this evaluation"
                    log(
                        f"reference model: log-probabilities of {done:,} of {plural(len(missing), 'document')} in "
                        f"{now - started:.1f} s, {outlook}"
                    )


def _ids_without_reference(documents: CorpusDocuments) -> list[int]:
    """Ids ascend; a value that is not there is NaN."""
    assert documents.corpus.reference is not None
    ids = np.unique(np.array(documents.ids, dtype=np.int64))
    return ids[np.isnan(documents.corpus.reference[ids])].tolist()


def reference_digest(config: RunConfig, configuration: PreTrainedConfig, world: World) -> str:
    """Return a digest of all that decides the log-probabilities of a corpus beside its tokens: the `configuration` with
    which the model is built, its weights and its arithmetic. It is the same on every rank, and all enter.
    """
    return run_on_first_rank(world, partial(_digest, config, configuration, world.device.type), ModelError)


def _digest(config: RunConfig, configuration: PreTrainedConfig, device: str) -> str:
    model = config.model
    built = configuration_values(configuration)
    built = {name: value for name, value in sorted(built.items()) if decides_numbers(name)}
    # Random weights of one configuration are others on another kind of device, and of a tiny preset.
    weights = weight_sums(Path(model.path)) if model.path else [model.preset_name, config.train.seed, device]
    arithmetic = form_of_config(config).arithmetic
    values = [built, weights, model.dtype, compute_dtype_name(model, device), *arithmetic]
    values.append(config.data.share_prefixes)  # shared or not, float32 and bfloat16 round differently
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def _reference_file(documents: CorpusDocuments, digest: str) -> Path:
    return documents.corpus.documents_folder / f"reference-{digest}.npy"


def _read_values(file: Path, count: int) -> Floats | None:
    """NaN where the file is not there; None if it is not as `_write_values` wrote it."""
    if not file.is_file():
        return np.full(count, np.nan)
    content = file.read_bytes()
    array = content[:-_DIGEST_BYTES]
    if hashlib.sha256(array).digest() != content[-_DIGEST_BYTES:]:
        return None
    try:
        values = np.load(io.BytesIO(array))
    except (ValueError, EOFError):  # somebody else's file
        return None
    return values if values.dtype == np.float64 and values.shape == (count,) else None


def _write_values(file: Path, values: Floats) -> None:
    """The SHA-256 of the bytes stands behind them, so that the file is whole at any time. Where a value is NaN, the one
    that the file has already, of another run or set over the same documents, stays."""
    partial_file = file.with_name(f"{file.stem}.partial-{uuid.uuid4().hex[:8]}.npy")
    with name_file_in_errors(file):
        earlier = _read_values(file, len(values))
        if earlier is not None:
            values = np.where(np.isnan(values), earlier, values)
        array = io.BytesIO()
        np.save(array, values)
        partial_file.write_bytes(array.getvalue() + hashlib.sha256(array.getvalue()).digest())
        partial_file.replace(file)
