"""Checkpoints: saved by all ranks, complete or not there at all. Names are imported on first use (PEP 562).

>>> from longspan.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint

`docs/checkpoints.md` and `docs/own-loop.md` show them in use.
"""

from typing import TYPE_CHECKING

from longspan.lazy import lazy_exports

if TYPE_CHECKING:
    from longspan.checkpoint.checkpoint import (
        find_checkpoint as find_checkpoint,
        load_checkpoint as load_checkpoint,
        save_checkpoint as save_checkpoint,
    )
    from longspan.checkpoint.saver import CheckpointSaver as CheckpointSaver

__getattr__, __dir__, __all__ = lazy_exports(__name__)
