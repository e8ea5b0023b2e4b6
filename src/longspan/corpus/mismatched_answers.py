"""The documents that KTO compares with: each prompt with an answer to another one."""

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from longspan.corpus.document_encoder import EncodedDocuments
from longspan.data.array_files import NOTHING, OWN_TOKEN


class MismatchedAnswers:
    """Puts behind each document its prompt with the answer of another row, by which KTO estimates a divergence.

    That is the answer of the row before; for the first of all, of the last row in its batch. Of pairs, as TRL rotates
    them, chosen answers are exchanged among themselves, and rejected ones. A document has at most `longest` tokens
    (0: any).
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest or None
        self._answers = list[npt.NDArray[Any]]()  # of the last documents of the batch before

    def add_mismatched_documents(self, encoded: EncodedDocuments) -> EncodedDocuments:
        """Return a batch with twice as many documents: each, and behind it its prompt with another answer.

        The last answers of the batch are kept for the next one.
        """
        if not len(encoded.lengths):
            return encoded
        of_tokens = np.zeros(len(encoded.ids), np.uint8) if encoded.codes is None else encoded.codes
        bounds = [*pairwise((0, *np.cumsum(encoded.lengths).tolist()))]
        firsts = [a + 1 + int(np.argmax(of_tokens[a + 1 : b] != NOTHING)) for a, b in bounds]
        answers = [encoded.ids[first:b] for first, (_, b) in zip(firsts, bounds, strict=True)]
        rows = [*zip(encoded.files.tolist(), encoded.positions.tolist(), strict=True)]
        shift = 2 if rows[::2] == rows[1::2] else 1  # both answers of a pair have one prompt
        before = self._answers if len(self._answers) >= shift else answers
        others = [*before[-shift:], *answers[:-shift]]
        self._answers = answers[-2:]
        ids = list[npt.NDArray[Any]]()
        codes = list[npt.NDArray[Any]]()
        counts = list[tuple[int, int]]()  # tokens and targets
        for (a, b), first, other in zip(bounds, firsts, others, strict=True):
            mixed = np.concatenate([encoded.ids[a:first], other])[: self._longest]
            ids += [encoded.ids[a:b], mixed]
            answer_codes = np.full(len(mixed) - (first - a), OWN_TOKEN, of_tokens.dtype)
            codes += [of_tokens[a:b], np.append(of_tokens[a:first], answer_codes)]
            counts += [(b - a, b - first), (len(mixed), len(answer_codes))]
        lengths, targets = np.array(counts).T
        images = [image._replace(document=2 * image.document + i) for image in encoded.images for i in (0, 1)]
        names = ("files", "positions", "hashes", "numbers")
        columns: dict[str, Any] = {name: np.repeat(getattr(encoded, name), 2) for name in names}
        return encoded._replace(
            ids=np.concatenate(ids),
            codes=np.concatenate(codes),
            lengths=lengths,
            targets=targets,
            images=sorted(images, key=lambda image: image.document),
            **columns,
        )
