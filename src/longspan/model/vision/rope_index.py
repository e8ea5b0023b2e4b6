"""Positions in three parts (M-RoPE) of a whole document, by a model's own `get_rope_index`: integers alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import MODEL_MAPPING, PreTrainedConfig

from longspan.errors import DataError, counted

IMAGE, VIDEO = 1, 2  # of mm_token_type_ids, where text is 0
Ids = npt.NDArray[np.int64]


def model_class(config: PreTrainedConfig | None) -> Any:
    """The class of the model below the head; None where transformers has none."""
    mapping: Any = MODEL_MAPPING
    return mapping.get(type(config), None)


def rope_index(model: Any, config: PreTrainedConfig | None, ids: Ids, kinds: Ids, **media: Tensor) -> Ids:
    """The positions (3, T) of a document, ids and kinds (T,), whose images and videos have these grids and seconds.

    `model` is the class below the head. Whatever the model's own code raises.
    """
    bare = model.__new__(model)  # the method reads the configuration and nothing else of the model
    object.__setattr__(bare, "config", config)
    asked = {"mm_token_type_ids": torch.from_numpy(kinds)[None].int(), **media}
    made: Any = bare.get_rope_index(torch.from_numpy(ids)[None], **asked)
    return made[0][:, 0].numpy()


def placeholders_in_runs(ids: Ids, placeholder: int, rows: Sequence[int], what: str) -> Ids:
    """1 where a token (T,) is this placeholder, else 0.

    Positions are counted by runs of placeholders. Raises DataError where these are not runs of so many `rows`, which
    `what` ("2 images") make.
    """
    kinds = (ids == placeholder).astype(np.int64)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], kinds, [0]])))
    runs = (edges[1::2] - edges[::2]).tolist()
    if runs != list(rows):
        raise DataError(
            f"the document has {counted(len(runs), 'run')} of placeholders (token id {placeholder}) of {runs[:8]} "
            f"tokens, its {what} make {list(rows)[:8]} rows; positions are counted by run: put the placeholders of "
            "each between tokens of text, as the model's processor does"
        )
    return kinds
