"""Which documents are evaluated: those of --data, or those that the weights' run holds out.

Two subjects with the same tokenizer read the same tokens. Otherwise both read the same whole texts, and only bits per
byte can be compared.
"""

from collections.abc import Sequence
from pathlib import Path

from longspan.comm import World
from longspan.comm.all_ranks import LogLine, run_on_every_rank
from longspan.config.keys import NOT_GIVEN
from longspan.config.sections import DataConfig, RunConfig
from longspan.corpus.tokenizer import TextTokenizer
from longspan.errors import ConfigError, DataError
from longspan.evaluation.saved.request import EvalRequest, Subject
from longspan.evaluation.saved.sets import NamedDocuments, held_out_documents, open_run_set, text_sets
from longspan.evaluation.saved.weights import CheckedWeights

Sets = tuple[NamedDocuments, ...]


def choose_sets(request: EvalRequest, checked: Sequence[CheckedWeights], world: World, log: LogLine) -> list[Sets]:
    """Choose the sets of each subject, in the same order and of the same documents; entered by all ranks.

    Raises DataError or ConfigError, on every rank, for documents that are missing, or cannot be compared.
    """
    tokenizers = [weights.tokenizer for weights in checked]
    if all(tokenizer_digest(tokenizer) == tokenizer_digest(tokenizers[0]) for tokenizer in tokenizers):
        sets = _limit_sets(request, _find_sets(request, checked[0], world, log))
        return [sets for _ in checked]
    if not request.paths:
        raise ConfigError(
            f"the tokenizers of {checked[0].subject.folder} and {checked[1].subject.folder} differ, and the documents "
            "of a run are kept as tokens: only texts can be compared; give --data"
        )
    subject_sets = [_find_sets(request, weights, world, log) for weights in checked]
    for first, other in zip(*subject_sets, strict=True):
        _check_same_texts(first, other)
    return [_limit_sets(request, sets) for sets in subject_sets]


def tokenizer_digest(tokenizer: TextTokenizer) -> str:
    """Return a text that is equal for tokenizers that give equal ids, before and behind texts too."""
    return " ".join((tokenizer.digest, *tokenizer.opening, "…", *tokenizer.closing))


def _find_sets(request: EvalRequest, weights: CheckedWeights, world: World, log: LogLine) -> Sets:
    """Find the sets of one subject: texts at given paths, or sets of its run."""
    subject = weights.subject
    if request.paths:
        data = _data_settings(request)
        return text_sets(dict(request.paths), weights.tokenizer, data, world, log)
    return run_on_every_rank(world, lambda: _run_sets(_run_folder(subject), subject.config, request.sets), DataError)


def _run_sets(run_dir: Path, config: RunConfig, names: Sequence[str]) -> Sets:
    """Return the sets of a run by their names, or without names the documents that it holds out."""
    if not names:
        return (held_out_documents(run_dir, config),)
    return tuple(open_run_set(run_dir, config, name) for name in names)


def _run_folder(subject: Subject) -> Path:
    """Return the run's folder of some weights. Raises ConfigError for those that are in none."""
    if subject.weights.run_dir is None:
        raise ConfigError(
            f"{subject.weights.path} is a Hugging Face folder, which holds out no documents; give --data PATH (a file "
            "or folder of .txt .md .py .jsonl)"
        )
    return subject.weights.run_dir


def _data_settings(request: EvalRequest) -> DataConfig:
    """Return how texts become documents: as in the first subject's run, except for keys that flags set."""
    data = request.subjects[0].config.data
    longest = request.max_document_tokens
    return DataConfig(
        max_document_tokens=data.max_document_tokens if longest == NOT_GIVEN else longest,
        parse_special_tokens=data.parse_special_tokens,
    )


def _limit_sets(request: EvalRequest, sets: Sets) -> Sets:
    """Take as many documents of each set as --max-documents says."""
    return tuple(named_documents.take_evenly(request.max_documents) for named_documents in sets)


def _check_same_texts(first: NamedDocuments, other: NamedDocuments) -> None:
    """Raise DataError unless document d is the same whole text in both sets, which two tokenizers read.

    A set lacks the texts that were too short for its tokenizer. Only where every file is one document do the names of
    files show that both sets lack the same texts.
    """
    corpora = [named_documents.documents.corpus for named_documents in (first, other)]
    if any(corpus.manifest.left_out.cut_texts for corpus in corpora):
        raise DataError(
            f"texts of --data {first.name} are cut into documents, by two tokenizers at different places; give "
            "--max-document-tokens 0, which cuts none, to compare models of different tokenizers"
        )
    short = [corpus.manifest.left_out.short_texts for corpus in corpora]
    sources = [named_documents.documents.origins for named_documents in (first, other)]
    one_a_file = len(set(sources[0])) == len(sources[0])
    if sources[0] != sources[1] or (any(short) and not one_a_file):
        raise DataError(
            f"texts of --data {first.name} have fewer than 2 tokens ({short[0]:,} by one tokenizer, {short[1]:,} by "
            "the other), so that documents cannot be paired; leave these texts out"
        )
