"""Which documents saved weights are evaluated on: texts of --data, or what their run holds out, by the set's name.

Texts are tokenized into a temporary folder of each host, whose files are removed as soon as all its ranks have them
open: nothing is left behind, and neither a run's nor a model's folder changes.
"""

import hashlib
import socket
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from longspan.comm import World
from longspan.comm.all_ranks import LogLine, run_on_every_rank
from longspan.config.keys import NOT_GIVEN
from longspan.config.sections import DataConfig
from longspan.corpus.build import corpus_line
from longspan.corpus.corpus_settings import CorpusSettings, describe_left_out, describe_rows, make_recipe
from longspan.corpus.files import FileSums
from longspan.corpus.rows.lines import special_line
from longspan.corpus.store.builder import build_documents
from longspan.corpus.tokenizer import TextTokenizer
from longspan.data.documents import Corpus, CorpusDocuments
from longspan.data.step_order import sample_documents
from longspan.errors import ConfigError, DataError
from longspan.evaluation.saved.request import EvalRequest, Subject
from longspan.train.plans.order import make_step_order

Sets = dict[str, CorpusDocuments]  # by name; "" is the name of the documents that a run holds out


def choose_sets(
    request: EvalRequest, subjects: Sequence[tuple[Subject, TextTokenizer]], world: World, log: LogLine
) -> list[Sets]:
    """Choose the sets of each subject, in the same order and of the same documents; entered by all ranks.

    Two subjects with the same tokenizer read the same tokens; otherwise both read the same whole texts, and only bits
    per byte can be compared. Raises DataError or ConfigError, on every rank, for documents that are missing, or cannot
    be compared.
    """
    (first, tokenizer), *_ = subjects
    if all(tokenizer_digest(other) == tokenizer_digest(tokenizer) for _, other in subjects):
        return [_find_sets(request, first, tokenizer, world, log)] * len(subjects)
    if not request.paths:
        raise ConfigError(
            f"the tokenizers of {first.folder} and {subjects[1][0].folder} differ, and the documents of a run are kept "
            "as tokens: only texts can be compared; give --data"
        )
    chosen = [_find_sets(request, *subject, world, log) for subject in subjects]
    for name, documents in chosen[0].items():
        _check_same_texts(name, documents.corpus, chosen[1][name].corpus)
    return chosen


def tokenizer_digest(tokenizer: TextTokenizer) -> str:
    """Return a text that is equal for tokenizers that give equal ids, before and behind texts too."""
    return " ".join((tokenizer.digest, *tokenizer.opening, "…", *tokenizer.closing))


def _find_sets(request: EvalRequest, subject: Subject, tokenizer: TextTokenizer, world: World, log: LogLine) -> Sets:
    if request.paths:
        sets = _read_texts(request, tokenizer, world, log)
    else:
        sets = run_on_every_rank(world, lambda: _open_run_sets(subject, request.sets), DataError)
    count = request.max_documents  # of each set, at even distances, so that all files are represented
    return {
        name: documents.corpus.select([documents.ids[i * len(documents) // count] for i in range(count)])
        if 0 < count < len(documents)
        else documents
        for name, documents in sets.items()
    }


def _open_run_sets(subject: Subject, names: Sequence[str]) -> Sets:
    """Open sets [[eval]] of a run as training evaluates them, or without names the documents that it holds out."""
    run_dir, config = subject.weights.run_dir, subject.config
    if run_dir is None:
        raise ConfigError(
            f"{subject.weights.path} is a Hugging Face folder, which holds out no documents; give --data PATH (a file "
            "or folder of .txt .md .py .jsonl)"
        )
    if not names:
        corpus = Corpus(run_dir / "corpus")
        held_out = corpus.select(make_step_order(config, corpus).evaluation)
        if not held_out:
            raise DataError(f"{run_dir} holds out no documents (data.eval_documents is 0); give documents with --data")
        return {"": held_out}
    sets: Sets = {}
    for name in names:
        entry, folder = next(entry for entry in config.eval if entry.name == name), run_dir / "evaluation" / name
        try:
            corpus = Corpus(folder)
        except DataError as error:
            raise DataError(
                f"the evaluation set {name!r} is not in {folder}, where training keeps its documents "
                f"({error.__cause__}); give its texts: --data {name}={entry.path}"
            ) from error
        sets[name] = corpus.select(sample_documents(len(corpus), entry.documents, config.train.seed))
    return sets


def _read_texts(request: EvalRequest, tokenizer: TextTokenizer, world: World, log: LogLine) -> Sets:
    """Open the documents of the texts of --data; the first rank of each host tokenizes.

    Texts become documents as in the first subject's run, but for flags. Raises DataError on every rank for a path that
    is missing, empty or unreadable, and where hosts have different files there.
    """
    run_data, longest = request.subjects[0].config.data, request.max_document_tokens
    data = DataConfig(
        max_document_tokens=run_data.max_document_tokens if longest == NOT_GIVEN else longest,
        parse_special_tokens=run_data.parse_special_tokens,
        columns=run_data.columns,
        end_of_chat=run_data.end_of_chat,
    )
    host = socket.gethostname()
    hosts = world.control.gather_objects(host, "names of hosts")
    builder = hosts.index(host)  # the first rank on this host
    builds = builder == world.home.ranks.index(world.rank)
    with tempfile.TemporaryDirectory(prefix="longspan-eval-") if builds else nullcontext("") as folder:

        def build_corpora() -> None:
            for index, (_, path) in enumerate(request.paths if builds else ()):
                _build_corpus(replace(data, path=path), tokenizer, Path(folder, str(index)), log)

        run_on_every_rank(world, build_corpora, DataError)
        root = world.control.gather_objects(folder, "folders of hosts")[builder]

        def open_corpora() -> list[Corpus]:
            try:
                return [Corpus(Path(root, str(index), "corpus")) for index in range(len(request.paths))]
            except DataError as error:
                raise DataError(
                    f"{root} was made on this host ({host}), and a rank cannot open it: {error}; give hosts names of "
                    "their own, or set TMPDIR to a folder that they share"
                ) from error

        corpora = run_on_every_rank(world, open_corpora, DataError)
    sources = "".join(f"{source.name} {source.sha256}\n" for corpus in corpora for source in corpus.sources)
    digests = world.control.gather_objects(hashlib.sha256(sources.encode()).hexdigest(), "digests of texts")
    if len(set(digests)) > 1:
        other = next(other for other, digest in zip(hosts, digests, strict=True) if digest != digests[0])
        raise DataError(
            f"the files of --data differ between hosts {hosts[0]} and {other}; give a path on storage that they share, "
            "or copy the files again"
        )
    return {name: corpus.select(range(len(corpus))) for (name, _), corpus in zip(request.paths, corpora, strict=True)}


def _build_corpus(data: DataConfig, tokenizer: TextTokenizer, folder: Path, log: LogLine) -> None:
    settings = CorpusSettings(data)
    try:
        folder.mkdir()
        files = settings.files(folder)
        recipe = make_recipe(settings, files, FileSums().measure_files(files, log), tokenizer)
        for line in describe_rows(settings, recipe):
            log(line)
        manifest = build_documents(recipe, folder / "corpus", log)
    except DataError as error:
        raise DataError(str(error).replace("data.path", "--data", 1)) from error
    if manifest.special:
        log(special_line(manifest.special, parsed=manifest.parse_special_tokens))
    log(f"--data: {corpus_line(Corpus(folder / 'corpus'), [data.path])}")
    for line in describe_left_out(settings, folder, manifest, key="--max-document-tokens"):
        log(line)


def _check_same_texts(name: str, first: Corpus, other: Corpus) -> None:
    """Raise DataError unless document d is the same whole text in both corpora, which two tokenizers read.

    A corpus lacks the texts that were too short for its tokenizer. Only where every file is one document do the names
    of files show that both lack the same texts.
    """
    left_out = first.manifest.left_out, other.manifest.left_out
    if any(texts.cut_texts for texts in left_out):
        raise DataError(
            f"texts of --data {name} are cut into documents, by two tokenizers at different places; give "
            "--max-document-tokens 0, which cuts none, to compare models of different tokenizers"
        )
    short = [texts.short_texts for texts in left_out]
    sources, other_sources = (corpus.select(range(len(corpus))).origins for corpus in (first, other))
    one_a_file = len(set(sources)) == len(sources)
    if sources != other_sources or (any(short) and not one_a_file):
        raise DataError(
            f"texts of --data {name} have fewer than 2 tokens ({short[0]:,} by one tokenizer, {short[1]:,} by the "
            "other), so that documents cannot be paired; leave these texts out"
        )
