"""Arrays on the host, made of the lists, arrays and tensors that a caller gives, and checked."""

from typing import Any

import numpy as np
import numpy.typing as npt

from longspan.errors import DataError
from longspan.layout import Integers
from longspan.plain_text import short_text


def host_array(name: str, values: Any, advice: str = "one number, or one for each token") -> npt.NDArray[Any]:
    """Return values as an array on the host, which may share their memory; tensors of floating point come in float64,
    as numpy has no bfloat16.

    Raises DataError for what is no array: it calls the values `name`, "ids of a document" say, and says to give
    `advice`.
    """
    if hasattr(values, "detach"):  # a tensor; torch is not imported here, so that help texts are printed without it
        values = values.detach()
        return (values.double() if values.is_floating_point() else values).cpu().numpy()
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{name} is {short_text(values)}, which is no array: {error}; give {advice}") from error


def integer_array(name: str, values: Any) -> Integers:
    """Return integers (n,) of a document, a copy. Raises DataError, which calls them `name`, for anything else."""
    array = host_array(f"{name} of a document", values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):  # numpy takes an empty list for floats
        raise DataError(f"{name} of a document are {array.dtype} of shape {array.shape}; give integers (n,)")
    return array.astype(np.int64)


def mask_array(values: Any, length: int) -> npt.NDArray[np.bool_]:
    """Return a document's loss_mask (length,) of 0 and 1 as booleans. Raises DataError for anything else."""
    array = host_array("loss_mask of a document", values)
    if array.ndim == 1 and len(array) != length:
        raise DataError(f"a loss_mask has {len(array)} values for {length} token ids; give one each")
    if array.ndim != 1 or not np.isin(array, (0, 1)).all():
        raise DataError(
            f"a loss_mask is {array.dtype} of shape {array.shape}; give a 0 or a 1 for each token: what counts by "
            "parts is weights="
        )
    return array.astype(bool)


def number_array(name: str, value: Any, length: int) -> npt.NDArray[np.float64]:
    """Return one finite number () of a document, or one for each of its `length` tokens (length,), a copy.

    Raises DataError, which calls it `name`, for anything else.
    """
    try:
        array = host_array(f"{name!r} of a document", value).astype(np.float64)
    except (TypeError, ValueError) as error:
        if isinstance(error, DataError):  # which is a ValueError too, and says more
            raise
        raise DataError(
            f"{name!r} of a document is {short_text(value)}; give a number, or one for each token"
        ) from error
    if array.ndim > 1 or (array.ndim == 1 and len(array) != length):
        raise DataError(
            f"{name!r} of a document has shape {array.shape}, the document {length} tokens; give one number, or one "
            "for each token"
        )
    if not np.isfinite(array).all():
        raise DataError(f"{name!r} of a document has values that are not finite; give finite numbers")
    return array
