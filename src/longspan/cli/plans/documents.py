"""The documents of a run whose steps are planned: read as the run reads them, or estimated from bytes. No torch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from longspan.cli.plans.gpu_run import GpuRun
from longspan.config.sections import RunConfig
from longspan.corpus.sources.find_files import STDLIB, find_rows
from longspan.corpus.sources.first_rows import read_text_sizes
from longspan.data.corpus_documents import Corpus
from longspan.data.manifest import SHORTEST
from longspan.data.run_epochs import documents_line, with_epoch_steps
from longspan.data.run_order import make_step_order, order_lengths
from longspan.data.step_order import StepOrder
from longspan.errors import ConfigError, DataError, plural
from longspan.model.weights.tokenizer_files import tokenizer_folder
from longspan.plan.shape.sharing_rules import read_sharing_rules
from longspan.resolve.facts import Facts, document_facts
from longspan.train.optim.schedule import Schedule

Log = Callable[[str], None]
# English text and code take so many bytes per token under the usual byte-pair vocabularies.
BYTES_PER_TOKEN = 4


@contextmanager
def open_planned_documents(run: GpuRun, log: Log, *, estimate: bool) -> Iterator[tuple[GpuRun, Facts, str]]:
    """Open the documents of a run; yields the run with the number of its steps, the facts of its documents, and a line
    that says what these are. The corpus is made in a temporary folder, which is there inside the context.

    With `estimate`, tokens are bytes / 4 where neither keys nor model have a tokenizer. Without it a tokenizer is
    trained, as the run does. Raises ConfigError and DataError as the run does.
    """
    config = run.config
    if estimate and tokenizer_folder(config.data.tokenizer, config.model.source) is None:
        texts = _estimate_texts(config, log)
        lengths = np.concatenate(texts)
        order = order_lengths(config, lengths, texts=np.repeat(np.arange(len(texts)), [*map(len, texts)]))
        planned, facts, line = _plan_documents(run, order, None, log)
        yield planned, facts, f"{line}; estimated"
        return
    from longspan.corpus.recipe import CorpusSettings
    from longspan.corpus.run_corpus import load_configured_tokenizer, open_or_build_corpus

    engine = load_configured_tokenizer(config)
    with TemporaryDirectory(prefix="longspan-plan-") as folder:
        settings = CorpusSettings.for_run(config)
        corpus = open_or_build_corpus(settings, Path(folder), tokenizer=engine, resumed=False, log=log)
        order = make_step_order(config, corpus, read_sharing_rules(run.model), log)
        yield _plan_documents(run, order, corpus, log)


def _estimate_texts(config: RunConfig, log: Log) -> list[list[int]]:
    """BYTES_PER_TOKEN bytes are a token. Texts are cut as in the run; pieces shorter than SHORTEST have no target
    and are left out, as is a text of such pieces alone."""
    data = config.data
    if data.sources:
        raise ConfigError("tables [[data.sources]] are read with a tokenizer; name its folder with data.tokenizer")
    files = tuple(find_rows(data.path or STDLIB, data.split))
    sizes = read_text_sizes(files, data.max_text_bytes)
    limit = data.max_document_tokens
    text_lengths = (size // BYTES_PER_TOKEN for size in sizes)
    cut_texts = ([limit] * (n // limit) + [n % limit] if limit > 0 else [n] for n in text_lengths)
    kept_pieces = ([length for length in pieces if length >= SHORTEST] for pieces in cut_texts)
    texts = [pieces for pieces in kept_pieces if pieces]
    if not texts:
        raise DataError(f"--data {data.path!r} holds no text")
    log(
        f"tokens are estimated as bytes / {BYTES_PER_TOKEN} of {plural(len(texts), 'text')}: neither data.tokenizer "
        "nor the model's folder has a tokenizer (--data.tokenizer FOLDER counts them)"
    )
    return texts


def _plan_documents(run: GpuRun, order: StepOrder, corpus: Corpus | None, log: Log) -> tuple[GpuRun, Facts, str]:
    config = with_epoch_steps(run.config, order, log)
    Schedule.of(config.optimizer, config.train.steps)  # raises where the schedule does not fit the steps
    run = replace(run, config=config)
    facts = run.facts(**document_facts(config, order, corpus, {}))
    return run, facts, documents_line(config, order)
