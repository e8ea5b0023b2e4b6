"""Labels as codes: one small number for each token, which says whether its own id, none or another id is predicted."""

from typing import Any

import numpy as np
import numpy.typing as npt

from longspan.data.document import NO_TARGET
from longspan.layout import Integers

OWN_TOKEN = 0  # the token's own id is predicted
NOTHING = 1
OTHER_TOKEN = 2  # the smallest code of another id, which is the code − 2


def encode_labels(ids: Integers, labels: Integers) -> Integers:
    """Return codes of tokens with these labels (n,): 0 for the token's own id, 1 for none, else the label + 2."""
    codes = np.where(labels == NO_TARGET, NOTHING, labels + OTHER_TOKEN)
    return np.where(labels == ids, OWN_TOKEN, codes)


def decode_labels(ids: Integers, codes: npt.NDArray[Any]) -> Integers:
    """Return the labels (n,) of tokens with these ids and codes: −100 for none."""
    codes = codes.astype(np.int64)
    return np.where(codes == OWN_TOKEN, ids, np.where(codes == NOTHING, NO_TARGET, codes - OTHER_TOKEN))
