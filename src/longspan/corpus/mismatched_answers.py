"""The documents that KTO compares with: each prompt with an answer to another one."""

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from longspan.corpus.document_encoder import EncodedDocuments
from longspan.data.array_files import NOTHING


class MismatchedAnswers:
    """Puts behind each document its prompt with the answer of another row, by which KTO estimates a divergence.

    The other answer is that of the row before; the first row of all gets that of the last row in its batch. A chosen
    answer of a pair is replaced by the chosen one of another pair, and a rejected one by a rejected one, as TRL does.
    A document has at most `longest` tokens (0: any).
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest or None
        # ids and codes, of the last documents of the batch before
        self._answers = list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]()

    def add_mismatched_documents(self, encoded: EncodedDocuments) -> EncodedDocuments:
        """Return a batch with twice as many documents: each, and behind it its prompt with another answer.

        The last answers of the batch are kept for the next one.
        """
        if not len(encoded.lengths):
            return encoded
        token_codes = np.zeros(len(encoded.ids), np.uint8) if encoded.codes is None else encoded.codes
        bounds = [*pairwise((0, *np.cumsum(encoded.lengths).tolist()))]
        # where each answer begins: at the first target after the document's first token
        firsts = [start + 1 + int(np.argmax(token_codes[start + 1 : stop] != NOTHING)) for start, stop in bounds]
        answers = [
            (encoded.ids[first:stop], token_codes[first:stop])
            for first, (_, stop) in zip(firsts, bounds, strict=True)
        ]
        rows = [*zip(encoded.files.tolist(), encoded.positions.tolist(), strict=True)]
        # Both answers of a pair have one prompt.
        shift = 2 if rows[::2] == rows[1::2] else 1
        earlier_answers = self._answers if len(self._answers) >= shift else answers
        other_answers = [*earlier_answers[-shift:], *answers[:-shift]]
        self._answers = answers[-2:]
        ids = list[npt.NDArray[Any]]()
        codes = list[npt.NDArray[Any]]()
        counts = list[tuple[int, int]]()  # tokens and targets
        for (start, stop), first, (other_ids, other_codes) in zip(bounds, firsts, other_answers, strict=True):
            ids += [encoded.ids[start:stop], np.append(encoded.ids[start:first], other_ids)[: self._longest]]
            codes += [token_codes[start:stop], np.append(token_codes[start:first], other_codes)[: self._longest]]
            counts += [(len(document), int((document[1:] != NOTHING).sum())) for document in codes[-2:]]
        lengths, targets = np.array(counts).T
        # both documents have the images of their prompt
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
