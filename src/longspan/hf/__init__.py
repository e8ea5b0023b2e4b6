"""longspan in transformers' Trainer and in TRL: `with_longspan(SFTTrainer)` is the whole change to a script.

Nothing in longspan imports this room; it needs the extra `hf` (accelerate, trl, peft).
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from longspan.lazy import lazy_exports

if TYPE_CHECKING:
    from longspan.hf.arguments import LongspanArguments as LongspanArguments
    from longspan.hf.trainer import (
        LongspanMixin as LongspanMixin,
        LongspanTrainer as LongspanTrainer,
        with_longspan as with_longspan,
    )

if find_spec("accelerate") is None:
    raise ImportError("longspan.hf needs accelerate, which is not installed: pip install 'longspan[hf]'")
__getattr__, __dir__, __all__ = lazy_exports(__name__)
