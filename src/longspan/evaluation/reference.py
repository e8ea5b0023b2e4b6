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
from longspan.comm.all_ranks import LogLine, run_on_every_rank, run_on_first_rank
from longspan.config.defaults import compute_dtype_name
from longspan.config.sections import RunConfig
from longspan.data.documents import CorpusDocuments
from longspan.errors import DataError, ModelError, plural
from longspan.evaluation.live import evaluate
from longspan.evaluation.metrics import EvaluationOptions
from longspan.files import name_file_in_errors
from longspan.layout import Floats
from longspan.model import disable_adapter
from longspan.plain_text import seconds_text
from longspan.resolve.choice import PlannerConfig
from longspan.train.training import AnyModel

_STEPS = 16  # whose tokens are evaluated at a time
_NEWS_SECONDS = 30.0


def open_references(documents: Sequence[CorpusDocuments], config: RunConfig, world: World) -> bool:
    """Give each corpus what is kept of its documents, NaN elsewhere; returns whether all of `documents` have it."""
    key = run_on_first_rank(world, partial(_model_key, config, world.device.type), ModelError)

    def read_files() -> bool:
        for some in documents:
            corpus = some.corpus
            file = _reference_file(some, key)
            corpus.reference = np.load(file) if file.is_file() else np.full(len(corpus), np.nan)
        return not any(_list_missing(some) for some in documents)

    return run_on_every_rank(world, read_files, DataError)


def compute_references(
    model: AnyModel,
    documents: Sequence[CorpusDocuments],
    config: RunConfig,
    choice: PlannerConfig,
    world: World,
    log: LogLine,
    stopped: Callable[[], str] | None,
) -> None:
    """Compute what the documents lack, and keep it; all ranks call it together, with the weights of the reference.

    Raises EvaluationStopped for a signal, after keeping what is computed.
    """
    key = run_on_first_rank(world, partial(_model_key, config, world.device.type), ModelError)
    without_adapter = disable_adapter(model) if config.lora.rank else nullcontext()
    with without_adapter:
        for some in documents:
            if missing := _list_missing(some):
                _compute_missing(
                    model, some, missing, config, choice, world, log, stopped, _reference_file(some, key)
                )


def _compute_missing(
    model: AnyModel,
    documents: CorpusDocuments,
    missing: list[int],
    config: RunConfig,
    choice: PlannerConfig,
    world: World,
    log: LogLine,
    stopped: Callable[[], str] | None,
    file: Path,
) -> None:
    corpus = documents.corpus
    assert corpus.reference is not None
    ends = np.cumsum(corpus.lengths[missing], dtype=np.int64)
    log(
        f"reference model: log-probabilities of {plural(len(missing), 'document')}, {plural(int(ends[-1]), 'token')}"
    )
    started = last_news = time.monotonic()
    start = 0
    save = partial(_save_array, file)
    options = EvaluationOptions(name="the reference model", stopped=stopped)
    while start < len(missing):
        done = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, done + _STEPS * config.train.tokens_per_step, side="right"))
        part = missing[start : max(stop, start + 1)]
        result = evaluate(model, corpus.select(part), choice, world, options)
        corpus.reference[part] = [-loss.sum for loss in result.document_losses]
        start += len(part)
        now = time.monotonic()
        if is_late := world.control.broadcast_object(now - last_news > _NEWS_SECONDS):
            last_news = now
            left = (now - started) * (int(ends[-1]) / int(ends[start - 1]) - 1)
            log(f"reference model: {start:,} of {plural(len(missing), 'document')}, {seconds_text(left)} left")
        if is_late or start == len(missing):
            run_on_first_rank(world, partial(save, corpus.reference), DataError)
    log(f"reference model: done in {time.monotonic() - started:.1f} s, kept in {file}")


def _list_missing(documents: CorpusDocuments) -> list[int]:
    assert documents.corpus.reference is not None
    ids = np.unique(documents.ids)
    return ids[np.isnan(documents.corpus.reference[ids])].tolist()


def _model_key(config: RunConfig, device: str) -> str:
    """Sum what decides the log-probabilities of a corpus beside its tokens."""
    model = config.model
    weights = (
        weights_fingerprint(Path(model.path))
        if model.path
        else [model.preset_name, model.config, config.train.seed]
    )
    values = [weights, model.dtype, compute_dtype_name(model, device), model.frozen]
    values += [model.rope_scaling, model.rope_factor, config.train.float8]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def _reference_file(documents: CorpusDocuments, key: str) -> Path:
    return documents.corpus.folder / f"reference-{key}.npy"


def _save_array(file: Path, values: Floats) -> None:
    partial_file = file.with_name(f"{file.stem}.partial-{uuid.uuid4().hex[:8]}.npy")
    with name_file_in_errors(file):
        if file.is_file():  # of another run, or set, over the same documents
            values = np.where(np.isnan(values), np.load(file), values)
        np.save(partial_file, values)
        partial_file.replace(file)
