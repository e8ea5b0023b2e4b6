"""The images of a corpus beside a model: where each stands among its tokens, and the positions of these."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from longspan.corpus.corpus_images.image_reader import ImageReader
from longspan.data.documents import Corpus
from longspan.data.store.images import ImageTable, PlacedImage
from longspan.layout import Partition
from longspan.model.vision.image_tokens import ImageTokens
from longspan.model.vision.video_tokens import Video, VideoTokens


@dataclass(frozen=True)
class ShownImages:
    """The images of a corpus, what reads them, and what the model's ids and positions say of them.

    Groups of frames of videos are images too; `videos` says what ids and positions say of them, None where none are.
    """

    corpus: Corpus
    table: ImageTable
    reader: ImageReader
    tokens: ImageTokens
    videos: VideoTokens | None = None

    def spans(self, number: int, shift: int = 0) -> tuple[tuple[int, int], ...]:
        """The runs of placeholders of an image, so much further on than in its document.

        They are one, but where its processor puts other tokens between rows.
        """
        document, image, _ = self.table[number]
        if image.stop - image.start == image.rows:
            return ((image.start + shift, image.stop + shift),)
        ids = self.corpus.read(document, np.arange(image.start, image.stop))
        places = image.start + shift + np.flatnonzero(ids == self.tokens.placeholder)
        return tuple((int(a), int(b)) for a, b in Partition.from_rows([places]).runs(0).tolist())

    def positions(self, ids: npt.NDArray[np.int64], numbers: Sequence[int]) -> npt.NDArray[np.int64] | None:
        """The positions (n, T) of these tokens (T,), in which these images stand; None where they are plain."""
        placed = [self.table[number] for number in numbers]
        grids = np.array([p.image.grid for p in placed if p.image.frame < 0], dtype=np.int64)
        if self.videos is None:
            return self.tokens.positions(ids, grids)
        return self.videos.positions(ids, grids, list(_videos(p for p in placed if p.image.frame >= 0)))


def _videos(groups: Iterable[PlacedImage]) -> Iterator[Video]:
    """The videos that groups of frames make, in order; of one that is cut what is there."""
    for _, several in groupby(groups, key=lambda placed: (placed.document, placed.image.number)):
        first, *others = (placed.image for placed in several)
        yield Video((1 + len(others), *first.grid[1:]), first.seconds)
