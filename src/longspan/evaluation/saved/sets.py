"""The documents that saved weights are evaluated on: texts of paths, or what a run holds out.

Texts are tokenized into a temporary folder of each host, whose files are removed as soon as all its ranks have them
open: nothing is left behind, and neither a run's nor a model's folder changes.
"""

import hashlib
import socket
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from transformers import PreTrainedConfig

from longspan.comm import World
from longspan.comm.all_ranks import LogLine, run_on_every_rank
from longspan.config.sections import DataConfig, RunConfig
from longspan.corpus.corpus_settings import CorpusSettings, describe_left_out, describe_rows, make_recipe
from longspan.corpus.files import FileSums
from longspan.corpus.image_documents import with_images
from longspan.corpus.rows.lines import special_line
from longspan.corpus.run_corpus import corpus_line
from longspan.corpus.store.builder import build_documents
from longspan.corpus.tokenizer import TextTokenizer
from longspan.data.documents import Corpus, CorpusDocuments
from longspan.data.step_order import sample_documents
from longspan.errors import DataError
from longspan.train.plans.order import make_step_order

HELD_OUT = ""  # name of the set of documents that a run holds out


@dataclass(frozen=True)
class NamedDocuments:
    """Documents and the name that their evaluations are recorded under."""

    name: str
    documents: CorpusDocuments

    @property
    def longest(self) -> int:
        """The index of the document with the most tokens."""
        return int(np.argmax(self.documents.lengths))

    def take_evenly(self, count: int) -> "NamedDocuments":
        """Take a number of the documents (0: all), at even distances, so that all files are represented."""
        ids = self.documents.ids
        if not 0 < count < len(ids):
            return self
        spread = tuple(ids[i * len(ids) // count] for i in range(count))
        return replace(self, documents=self.documents.corpus.select(spread))

    def with_images(self, model: PreTrainedConfig, folder: Path | None) -> "NamedDocuments":
        """Return the set with the images of its documents, for a model of this configuration (`image_documents.py`)."""
        return self if folder is None else replace(self, documents=with_images(self.documents, model, folder))


def held_out_documents(run_dir: Path, config: RunConfig) -> NamedDocuments:
    """Open the documents that a run holds out. Raises DataError where there are none, or no corpus."""
    corpus = Corpus(run_dir / "corpus")
    held_out = corpus.select(make_step_order(config, corpus).evaluation)
    if not held_out:
        raise DataError(
            f"{run_dir} holds out no documents (data.eval_documents is 0), so there is nothing to evaluate; give --data"
        )
    return NamedDocuments(HELD_OUT, held_out)


def open_run_set(run_dir: Path, config: RunConfig, name: str) -> NamedDocuments:
    """Open the documents of a set [[eval]] of a run, as training evaluates them.

    Raises DataError where there are none.
    """
    entry = next(entry for entry in config.eval if entry.name == name)
    folder = run_dir / "evaluation" / name
    try:
        corpus = Corpus(folder)
    except DataError as error:
        raise DataError(
            f"the evaluation set {name!r} is not in {folder}, where training keeps its documents ({error.__cause__}); "
            f"give its texts: --data {name}={entry.path}"
        ) from error
    return NamedDocuments(name, corpus.select(sample_documents(len(corpus), entry.documents, config.train.seed)))


def text_sets(
    paths: Mapping[str, str], tokenizer: TextTokenizer, data: DataConfig, world: World, log: LogLine
) -> tuple[NamedDocuments, ...]:
    """Open the documents of the texts at these paths, by the settings in `data`; entered by all ranks.

    The first rank of each host tokenizes. Raises DataError on every rank for a path that is missing, empty or
    unreadable, and where hosts have different files there.
    """
    host = socket.gethostname()
    hosts = world.control.gather_objects(host, "names of hosts")
    builder = hosts.index(host)  # the first rank on this host
    builds = builder == world.home.ranks.index(world.rank)
    with tempfile.TemporaryDirectory(prefix="longspan-eval-") if builds else nullcontext("") as folder:

        def build_corpora() -> None:
            """Tokenize the texts of each path into a folder of its own, on the first rank of each host."""
            if builds:
                for index, path in enumerate(paths.values()):
                    _build_corpus(replace(data, path=path), tokenizer, Path(folder, str(index)), log)

        run_on_every_rank(world, build_corpora, DataError)
        root = world.control.gather_objects(folder, "folders of hosts")[builder]
        corpora = run_on_every_rank(
            world, lambda: [_open_finished_corpus(Path(root, str(i))) for i in range(len(paths))], DataError
        )
    _check_same_files(world, corpora, hosts)
    return tuple(
        NamedDocuments(name, corpus.select(range(len(corpus)))) for name, corpus in zip(paths, corpora, strict=True)
    )


def _build_corpus(data: DataConfig, tokenizer: TextTokenizer, folder: Path, log: LogLine) -> None:
    """Tokenize the texts at one path into a folder, and log what they are. Errors name the flag, not the key."""
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


def _open_finished_corpus(folder: Path) -> Corpus:
    """Open a corpus that the first rank built. Raises DataError where this host does not have it."""
    try:
        return Corpus(folder / "corpus")
    except DataError as error:
        raise DataError(
            f"{folder} was made on this host ({socket.gethostname()}), and a rank cannot open it: {error}; give hosts "
            "names of their own, or set TMPDIR to a folder that they share"
        ) from error


def _check_same_files(world: World, corpora: Sequence[Corpus], hosts: Sequence[str]) -> None:
    """Raise DataError on every rank if hosts read other files than the first."""
    sources = "".join(f"{source.name} {source.sha256}\n" for corpus in corpora for source in corpus.sources)
    digests = world.control.gather_objects(hashlib.sha256(sources.encode()).hexdigest(), "digests of texts")
    if len(set(digests)) > 1:
        other = next(i for i, digest in enumerate(digests) if digest != digests[0])
        raise DataError(
            f"the files of --data differ between hosts {hosts[0]} and {hosts[other]}; give a path on storage that they "
            "share, or copy the files again"
        )
