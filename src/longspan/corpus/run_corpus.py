"""The corpus of a run: its source files, whether it changed, and the folder of its documents. One rank calls this.

Documents are built in `build_documents.py`, once for all runs with the same files and settings.
"""

import hashlib
import json
import shutil
from contextlib import suppress
from dataclasses import asdict, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path

from transformers import PreTrainedConfig

from longspan.comm import World
from longspan.comm.all_ranks import run_on_every_rank, run_on_first_rank
from longspan.config.local_folders import absolute_path
from longspan.config.sections import DataConfig, RunConfig
from longspan.corpus.build_documents import build_documents
from longspan.corpus.cache import Cache, cache_folder
from longspan.corpus.fit_to_model import fit_to_model
from longspan.corpus.lines import corpus_line, left_out_lines, row_lines
from longspan.corpus.recipe import CorpusSettings, Recipe, make_recipe
from longspan.corpus.sources.file_sums import file_differences, hash_files
from longspan.corpus.sources.first_rows import read_texts_for_tokenizer
from longspan.corpus.tokenizer import TextTokenizer, check_vocabulary, load_tokenizer, train_tokenizer
from longspan.data.corpus_documents import Corpus
from longspan.data.image_table import ImageTable
from longspan.data.manifest import FILE, Record, read_record
from longspan.errors import DataError
from longspan.files import name_file_in_errors, write_atomically
from longspan.model import PRESETS
from longspan.model.weights.hf_folder import save_configuration
from longspan.model.weights.tokenizer_files import tokenizer_folder
from longspan.plain_text import LogLine


def open_or_build_corpus(
    settings: CorpusSettings, run_dir: Path, *, tokenizer: TextTokenizer | None, resumed: bool, log: LogLine
) -> Corpus:
    """Return the corpus of a run; documents that are not in the cache are built, and without a `tokenizer` one is
    trained.

    Raises DataError for sources that are missing, empty or unreadable and, if the run is `resumed`, for sources or
    settings that changed since it began: the order of its documents would be another one.
    """
    corpus = _CorpusOfRun(settings, run_dir, log).open_or_build(tokenizer, resumed=resumed)
    for line in left_out_lines(settings, run_dir, corpus.manifest, key=f"{settings.prefix}max_document_tokens"):
        log(line)
    return corpus


class _CorpusOfRun:
    """The recorded corpus of a run, compared with its settings and files now."""

    def __init__(self, settings: CorpusSettings, run_dir: Path, log: LogLine) -> None:
        """Find the source files, and take and save their sums; a file is not read again if the record or the cache has
        its path, size and time.
        """
        self._settings = settings
        self._run_dir = run_dir
        self._log = log
        self._folder = run_dir / settings.folder
        self._old_record = read_record(self._folder)
        self._files = settings.find_source_files(run_dir)
        folder = cache_folder()
        try:
            self._cache = Cache(folder)
        except OSError as error:
            log(f"{folder} cannot be written ({error.strerror}): tokens are kept in {run_dir / 'cache'}")
            self._cache = Cache((run_dir / "cache").absolute())
        # None where documents are lost, which are built again
        self._old_sources = None if self._old_record is None else self._old_record.sources(self._folder)
        # All sources together have one file of sums.
        all_paths = Path(" ".join(path for _, path in settings.source_paths())).absolute()
        name = hashlib.sha256(str(all_paths).encode()).hexdigest()[:32]
        kept_sums = self._cache.folder / "files" / f"{name}.jsonl"
        self._sources = hash_files(self._files, log, kept_sums, self._old_sources or ())

    def open_or_build(self, tokenizer: TextTokenizer | None, *, resumed: bool) -> Corpus:
        """Return the corpus, built again if it changed; that of a resumed run must not change.

        Nothing is built if settings, files and key (which covers the tokenizer) are as recorded and no file is damaged.
        A resumed run whose documents are lost or damaged builds them again under the same key, so that rows become the
        same tokens. Without a `tokenizer` that of the run's folder is read, if it is there and the recorded corpus did
        not change; else one is trained. Raises DataError where a resumed run's corpus is lost or changed.
        """
        recorded = self._old_record
        if resumed and recorded is None:
            file = self._folder / FILE
            state = f"has checkpoints, and {file} is damaged" if file.is_file() else "has checkpoints but no corpus"
            raise DataError(f"{self._run_dir} {state}: restore {self._folder}, or set run.dir to a new folder")
        changes = [] if recorded is None else self._describe_changes(recorded, tokenizer)
        if resumed and changes:
            raise DataError(_changes_text(self._run_dir, changes))
        if changes:
            self._log(f"the corpus changed ({changes[0]}): building it again")
        if tokenizer is None:
            is_trained = recorded is not None and not changes and (self._run_dir / "tokenizer.json").is_file()
            tokenizer = load_tokenizer(self._run_dir) if is_trained else self._train_tokenizer()
        recipe = make_recipe(self._settings, self._files, self._sources, tokenizer)
        if recorded is not None and recorded.key == recipe.key and not changes:
            if _documents_are_whole(self._folder / recorded.documents):
                return Corpus(self._folder)
        elif resumed:
            raise DataError(_changes_text(self._run_dir, ["its rows become other tokens than they did"]))
        return self._build_corpus(recipe, tokenizer)

    def _describe_changes(self, recorded: Record, tokenizer: TextTokenizer | None) -> list[str]:
        """Settings and tokenizer come first, then files; files of images are looked at if no source file changed."""
        changes = self._changed_settings(recorded, tokenizer)
        file_changes = list[str]()
        if self._old_sources is not None:
            file_changes = file_differences(self._old_sources, self._sources)
        documents = self._folder / recorded.documents
        if documents.is_dir() and not file_changes and (images := ImageTable.open_in_folder(documents)):
            file_changes = list(islice(images.describe_changes(), 3))  # messages name no more
        return changes + file_changes

    def _train_tokenizer(self) -> TextTokenizer:
        data = self._settings.data
        paths = ", ".join(path for _, path in self._settings.source_paths())
        self._log(f"training a tokenizer of {data.vocab_size} entries on {paths}")
        trained = train_tokenizer(read_texts_for_tokenizer(self._files, data.max_text_bytes), data.vocab_size)
        # Read again as later starts read it: beside the model's config.json, by whose class it may split otherwise.
        trained.save_pretrained(self._run_dir)
        return replace(load_tokenizer(self._run_dir), folder=None)

    def _changed_settings(self, recorded: Record, tokenizer: TextTokenizer | None) -> list[str]:
        """`tokenizer` None: one is trained. A key that the record lacks, as of another version, counts with its
        default."""
        values = self._settings.deciding_values()
        changes = list[str]()
        # The record may lack keys, which have these defaults.
        defaults = {field.name: field.default for field in fields(DataConfig)}
        for key in recorded.asked.keys() | values.keys():
            old_value = absolute_path(recorded.asked.get(key, defaults.get(key)))
            new_value = values.get(key)
            if old_value != new_value:  # an evaluation set has keys of its own only for the path and the length
                prefix = self._settings.prefix if key in ("path", "split", "max_document_tokens") else "data."
                prefix = {"num_labels": "model.", "preference": "train.loss: "}.get(key, prefix)
                changes.append(f"{prefix}{key} was {old_value!r} and is {new_value!r}")
        if tokenizer is not None and tokenizer.digest != recorded.tokenizer_digest:
            changes.append("the tokenizer is another one")
        elif tokenizer is not None and recorded.around != _surrounding_tokens(tokenizer):
            changes.append(
                f"a text stood in {' '.join(recorded.around)} and stands in {' '.join(_surrounding_tokens(tokenizer))}"
            )
        # A tokenizer that is trained on few texts may have fewer entries than data.vocab_size, but not more.
        if tokenizer is None and (size := self._settings.data.vocab_size) < recorded.tokenizer_size:
            changes.append(f"data.vocab_size is {size}, the tokenizer has {recorded.tokenizer_size} entries")
        return sorted(changes)

    def _build_corpus(self, recipe: Recipe, tokenizer: TextTokenizer) -> Corpus:
        self._save_tokenizer(tokenizer, parse=recipe.encodings[0].settings.parse_special_tokens)
        for line in row_lines(recipe):
            self._log(line)
        build = partial(build_documents, recipe, log=self._log)
        try:
            documents, built = self._cache.open_or_build_documents(
                recipe.key, _documents_are_whole, build, self._log
            )
        except OSError as error:
            free = ""
            with suppress(OSError):
                free = f" ({shutil.disk_usage(self._cache.folder).free:,} bytes are free)"
            raise DataError(
                f"the corpus cannot be kept in {self._cache.folder}: {error.strerror or error}{free}; set "
                "XDG_CACHE_HOME to a folder with room for its tokens"
            ) from error
        self._log(f"its tokens are {'kept' if built else 'already'} in {documents} (XDG_CACHE_HOME)")
        record = Record(
            documents=str(documents),
            key=recipe.key,
            asked=self._settings.deciding_values(),
            tokenizer_digest=tokenizer.digest,
            tokenizer_size=tokenizer.size,
            around=_surrounding_tokens(tokenizer),
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._folder / FILE, json.dumps(asdict(record), indent=1))
        return Corpus(self._folder)

    def _save_tokenizer(self, tokenizer: TextTokenizer, *, parse: bool) -> None:
        self._run_dir.mkdir(parents=True, exist_ok=True)
        # `set_parsing` changes the tokenizer itself, so it is set before its files are written: as rows are encoded.
        tokenizer.set_parsing(parse).save_pretrained(self._run_dir)
        # Such a tokenizer was trained here, and has been read from the run's folder.
        if tokenizer.folder is None:
            return
        # Models read it from the run's folder, where transformers chooses its class by their config.json too.
        saved = load_tokenizer(self._run_dir)
        if (saved.digest, _surrounding_tokens(saved)) != (tokenizer.digest, _surrounding_tokens(tokenizer)):
            raise DataError(
                f"tokenizer {tokenizer.folder} gives other ids beside the config.json of the run's model: "
                f"transformers reads it there with the class {saved.kind}, and in its own folder with "
                f"{tokenizer.kind}; name a tokenizer of the model's kind with data.tokenizer"
            )


def _documents_are_whole(folder: Path) -> bool:
    try:
        Corpus(folder)
        if (images := ImageTable.open_in_folder(folder)) is not None:
            return next(images.describe_changes(), None) is None
    except (DataError, OSError, KeyError, TypeError, ValueError):
        return False
    return True


def _surrounding_tokens(tokenizer: TextTokenizer) -> tuple[str, ...]:
    """The text itself is "…"."""
    opening, closing = tokenizer.surrounding_tokens
    return (*opening, "…", *closing)


def _changes_text(run_dir: Path, changes: list[str]) -> str:
    more_text = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
    return (
        f"the corpus of {run_dir} changed since the run began: {'; '.join(changes[:3])}{more_text}; "
        f"restore it, or set run.dir to a new folder"
    )


def open_corpus_on_all_ranks(
    config: RunConfig, world: World, model: PreTrainedConfig, *, resumed: bool, log: LogLine
) -> Corpus:
    """Build the corpus in the run's folder on the first rank, if necessary, and open it on all for this model.

    Raises DataError on every rank, before anything is read, for a tokenizer with more ids than the embedding has rows.
    """
    directory = Path(config.run.dir)

    def check_and_build_corpus() -> None:
        """On the first rank: check the vocabulary, save the model's configuration, and build the corpus if it is
        missing or changed.
        """
        tokenizer = load_configured_tokenizer(config)
        preset = PRESETS.get(config.model.preset_name)
        # The embedding of a tiny preset (without `rows`) is made as large as its tokenizer.
        if tokenizer is None or preset is None or preset.embedding_rows:
            size = config.data.vocab_size if tokenizer is None else tokenizer.own_size
            trained = "trained on the corpus (data.vocab_size)"
            name = config.data.tokenizer or (trained if tokenizer is None else config.model.source)
            rows = model.get_text_config().vocab_size
            source = config.model.source or config.model.preset_name
            check_vocabulary(size, rows, tokenizer=name, model=source)
        directory.mkdir(parents=True, exist_ok=True)
        # a resumed run keeps the one that it began with
        if not (resumed and (directory / "config.json").is_file()):
            save_configuration(model, directory)  # transformers reads the tokenizer next to it by this file
        with name_file_in_errors(directory / "corpus"):
            settings = CorpusSettings.for_run(config)
            corpus = open_or_build_corpus(settings, directory, tokenizer=tokenizer, resumed=resumed, log=log)
        log(f"corpus: {corpus_line(corpus, [path for _, path in settings.source_paths()])}")

    run_on_first_rank(world, check_and_build_corpus, DataError)
    return run_on_every_rank(
        world, lambda: fit_to_model(open_shared_corpus(directory / "corpus"), model, directory), DataError
    )


def load_configured_tokenizer(config: RunConfig) -> TextTokenizer | None:
    """Load the tokenizer that data.tokenizer names, else the model folder's; None: one must be trained.

    Raises DataError for a model that has none, and for a chat template without a folder.
    """
    template = config.data.chat_template
    if (folder := tokenizer_folder(config.data.tokenizer, config.model.source)) is not None:
        return replace(load_tokenizer(folder), template_file=Path(template).expanduser() if template else None)
    if template:
        raise DataError(
            f"data.chat_template is {template!r}, and a tokenizer trained on the corpus has no tokens of chats; "
            "name the folder of a chat model's with data.tokenizer"
        )
    if config.model.path:
        raise DataError(
            f"the model in {config.model.path} has no tokenizer.json, and its weights know the ids of its own "
            "tokenizer alone; put the files of its tokenizer there, or name their folder with data.tokenizer"
        )
    return None


def open_shared_corpus(folder: Path) -> Corpus:
    """Open a corpus of a run, on every rank. Raises DataError if it is missing on this host."""
    try:
        return Corpus(folder)
    except DataError as error:
        raise DataError(f"{error}; the run's folder must be on storage that all its machines share") from error
