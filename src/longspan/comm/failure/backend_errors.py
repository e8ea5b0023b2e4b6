"""Which errors come from a collective's backend, and which from memory that is short."""

import torch
import torch.distributed as dist

from longspan.errors import LongspanError


def is_backend_error(error: BaseException) -> bool:
    """Whether a collective's backend raised this error, of which gloo's are plain RuntimeErrors."""
    if not isinstance(error, RuntimeError) or isinstance(error, LongspanError) or is_out_of_memory(error):
        return False
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this error says that no memory was left, on a device or on the host."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def one_line(error: BaseException) -> str:
    """The type of an error and the beginning of its text."""
    text = " ".join(str(error).split()).partition(" This is typically caused by")[0]
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
