"""The corpus of a run on all ranks: the first rank builds it with the model's tokenizer, then all open it."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedConfig

from longspan.comm import World
from longspan.comm.all_ranks import LogLine, run_on_every_rank, run_on_first_rank
from longspan.config.sections import RunConfig
from longspan.corpus.build import ensure_corpus
from longspan.corpus.corpus_settings import CorpusSettings
from longspan.corpus.image_documents import show_images
from longspan.corpus.rows.kinds import display_kind
from longspan.corpus.store.streamed import open_corpus
from longspan.corpus.tokenizer import TextTokenizer, check_vocabulary, load_tokenizer
from longspan.corpus.tokenizer_folder import tokenizer_folder
from longspan.data.documents import Corpus
from longspan.errors import DataError, plural
from longspan.files import name_file_in_errors
from longspan.model import PRESETS


def build_shared_corpus(
    config: RunConfig, world: World, model: PreTrainedConfig, *, resumed: bool, log: LogLine
) -> Corpus:
    """Build the corpus in the run's folder on the first rank, if necessary, and open it on all for this model.

    Raises DataError on every rank for a tokenizer that is missing or has more ids than the model's embedding has rows,
    before anything is read, and for sources that are missing, empty or, if the run is `resumed`, changed.
    """
    directory = Path(config.run.dir)

    def build_corpus() -> None:
        """Check the tokenizer, save the model's configuration, and build the corpus or find it in the run's folder."""
        tokenizer = configured_tokenizer(config)
        preset = PRESETS.get(config.model.preset_name)
        # The embedding of a tiny preset (without `rows`) is made as large as its tokenizer.
        if tokenizer is None or preset is None or preset.rows:
            check_tokenizer(config, model, config.data.vocab_size if tokenizer is None else tokenizer.own_size)
        directory.mkdir(parents=True, exist_ok=True)
        if not (resumed and (directory / "config.json").is_file()):  # a resumed run keeps the one that it began with
            model.save_pretrained(directory)  # transformers reads the tokenizer next to it by this file
        with name_file_in_errors(directory / "corpus"):
            corpus = ensure_corpus(
                CorpusSettings(config.data), directory, tokenizer=tokenizer, resumed=resumed, log=log
            )
        log(f"corpus: {corpus_line(corpus, [path for _, path in CorpusSettings(config.data).paths()])}")

    run_on_first_rank(world, build_corpus, DataError)
    return run_on_every_rank(
        world, lambda: show_images(open_shared_corpus(directory / "corpus"), model, directory), DataError
    )


def corpus_line(corpus: Corpus, paths: Sequence[str]) -> str:
    """Describe the size of a corpus, for the console."""
    manifest = corpus.manifest
    parts = [f"{plural(len(corpus.sources), 'file')} of {', '.join(paths)}"]
    if set(manifest.kinds) != {"text"}:
        parts.append(f"{plural(manifest.rows, 'row')} of {', '.join(map(display_kind, dict.fromkeys(manifest.kinds)))}")
    parts += [plural(len(corpus), "document"), plural(int(corpus.lengths.sum()), "token")]
    if manifest.images:
        parts.append(plural(manifest.images, "image"))
    if corpus.targets is not None:
        parts.append(f"{int(corpus.targets.sum()):,} of them targets")
    return ", ".join(parts)


def check_tokenizer(config: RunConfig, model: PreTrainedConfig, size: int) -> None:
    """Raise DataError if a tokenizer has more ids (`size`) than the embedding of this configuration has rows."""
    source = config.model.source
    tokenizer = (
        config.data.tokenizer or (tokenizer_folder(config) and source) or "trained on the corpus (data.vocab_size)"
    )
    rows = model.get_text_config().vocab_size
    check_vocabulary(size, rows, tokenizer=str(tokenizer), model=source or config.model.preset_name)


def check_largest_id(corpus: Corpus, model: PreTrainedConfig, source: str) -> None:
    """Raise DataError, naming the row, if a corpus holds a token id without a row in the embedding of a model."""
    largest, rows = corpus.manifest.largest_id, model.get_text_config().vocab_size
    if largest >= rows:
        raise DataError(
            f"{corpus.manifest.largest_at} holds token id {largest}, and the embedding of {source} has {rows} rows; "
            "leave the row out, use the model's own tokenizer, or give the model rows for it (resize_token_embeddings)"
        )


def configured_tokenizer(config: RunConfig) -> TextTokenizer | None:
    """Load the tokenizer that data.tokenizer names, else the model folder's; None: one must be trained."""
    if (folder := tokenizer_folder(config)) is not None:
        return load_tokenizer(folder)
    if config.model.path:
        raise DataError(
            f"the model in {config.model.path} has no tokenizer.json, and its weights know the ids of its own "
            "tokenizer alone; put the files of its tokenizer there, or name their folder with data.tokenizer"
        )
    return None


def open_shared_corpus(folder: Path) -> Corpus:
    """Open a corpus of a run, on every rank. Raises DataError if it is missing on this host."""
    try:
        return open_corpus(folder)
    except DataError as error:
        raise DataError(f"{error}; the run's folder must be on storage that all its machines share") from error
