"""Forests of documents, and attention of each branch as in the separate document: dense, in float64."""

import numpy as np
import torch
from hypothesis import strategies as st

from tests.reference import dense_attention

# rows of documents and their parents: families among ordinary documents, chains, branches of one row, equal ones
FORESTS = {
    "answers": ((37, 11, 1, 23, 8, 29, 5), (-1, 0, 0, 0, 0, -1, -1)),
    "two families": ((20, 9, 14, 31, 6, 6, 17), (-1, 0, 0, -1, 3, 3, 3)),
    "tree": ((25, 13, 7, 9, 10, 3, 12, 8), (-1, 0, 1, 1, 0, 4, 4, -1)),
    "chain": ((9, 17, 5, 21), (-1, 0, 1, 2)),
    "one row": ((1, 1, 1, 3, 1, 1), (-1, 0, 0, 0, 3, -1)),
    "fewer rows than members": ((1, 1), (-1, 0)),
}


@st.composite
def forests(draw, most_rows=24):
    lengths = draw(st.lists(st.integers(1, most_rows), min_size=1, max_size=7))
    parents, path = [], []
    for index in range(len(lengths)):
        depth = draw(st.integers(0, len(path)))
        path = path[:depth]
        parents.append(path[-1] if path else -1)
        path.append(index)
    return tuple(lengths), tuple(parents)


def paths_of(lengths, parents):
    """Packed rows of every document's path, its own last."""
    starts = np.cumsum(lengths) - lengths
    paths = []
    for index, parent in enumerate(parents):
        own = np.arange(starts[index], starts[index] + lengths[index])
        paths.append(np.concatenate([paths[parent], own]) if parent >= 0 else own)
    return paths


def visible_rows(lengths, parents, window=None):
    """Which packed row sees which: (S, S) bool."""
    visible = np.zeros((sum(lengths),) * 2, dtype=bool)
    for path, length in zip(paths_of(lengths, parents), lengths, strict=True):
        position = np.arange(len(path))
        ago = position[-length:, None] - position
        visible[np.ix_(path[-length:], path)] = (ago >= 0) & (ago < (window or len(path)))
    return visible


def separate_attention(q, k, v, sinks, dout, lengths, parents, **mask):
    """Out (S, N, Hv) and gradients, where every document's rows stand in a document of their own that is its path."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
    outs = []
    for path, length in zip(paths_of(lengths, parents), lengths, strict=True):
        rows = [x[path] for x in leaves[:3]]
        outs.append(dense_attention(*rows, [len(path)], sinks=leaves[3], **mask)[-length:])
    out = torch.cat(outs)
    out.backward(dout)
    return [out.detach(), *(x.grad for x in leaves)]
