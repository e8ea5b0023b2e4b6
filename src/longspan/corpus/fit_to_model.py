"""Fits a corpus to the model that reads it: its images, the token of padding, and ids that the embedding has."""

from pathlib import Path
from typing import TypeVar, cast

from transformers import PreTrainedConfig

from longspan.data.corpus_documents import Corpus, CorpusDocuments
from longspan.errors import DataError

# The documents of a corpus become ImageDocuments.
AnyDocuments = TypeVar("AnyDocuments")


def fit_to_model(corpus: Corpus, model: PreTrainedConfig, folder: Path) -> Corpus:
    """Prepare a corpus in place for this model, whose processor is in `folder`, and return it.

    A corpus with labels, whose documents are scored, gets the id of padding as `corpus.pad`: the model's, or else its
    tokenizer's. Any other corpus gets its images (`attach_images`) if the model takes images or the documents have any.
    Raises DataError for labels without an id of padding, and as `attach_images` does.
    """
    if corpus.labels is not None:
        corpus.pad = corpus.manifest.pad_id if model.pad_token_id is None else model.pad_token_id
        if corpus.pad < 0:
            raise DataError(
                "the model's config.json has no pad_token_id and its tokenizer neither pad_token nor eos_token, and a "
                "document's score is that of its last token that is not padding; write pad_token_id into config.json"
            )
        return corpus
    if getattr(model, "vision_config", None) is None and not corpus.images:
        return corpus
    from longspan.corpus.image_documents import attach_images

    return attach_images(corpus, model, folder)


def fit_documents_to_model(documents: AnyDocuments, model: PreTrainedConfig, folder: Path) -> AnyDocuments:
    """Return documents of a corpus after `fit_to_model`, in their order, and any other documents as they are."""
    if not isinstance(documents, CorpusDocuments):
        return documents
    return cast(AnyDocuments, fit_to_model(documents.corpus, model, folder).select(documents.ids))


def check_ids_in_vocabulary(corpus: Corpus, model: PreTrainedConfig, source: str) -> None:
    """Raise DataError, naming the row, if a corpus holds a token id without a row in the embedding of a model."""
    largest = corpus.manifest.largest_id
    rows = model.get_text_config().vocab_size
    if largest >= rows:
        raise DataError(
            f"{corpus.manifest.largest_at} holds token id {largest}, and the embedding of {source} has {rows} rows; "
            "leave the row out, use the model's own tokenizer, or give the model rows for it (resize_token_embeddings)"
        )
