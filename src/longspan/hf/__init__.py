"""longspan in transformers' Trainer and in TRL: `with_longspan(SFTTrainer)` is the whole change to a script.

Nothing in longspan imports this room; it needs the extra `hf` (accelerate, trl, peft).
"""

from typing import TYPE_CHECKING

from longspan.lazy import lazy_exports

if TYPE_CHECKING:
    from longspan.hf.arguments import LongspanArguments as LongspanArguments
    from longspan.hf.trainer import LongspanMixin as LongspanMixin
    from longspan.hf.trainer import LongspanTrainer as LongspanTrainer
    from longspan.hf.trainer import with_longspan as with_longspan

PACKAGES = ("accelerate", "peft", "trl")  # of the extra

_load, __dir__, __all__ = lazy_exports(__name__)


def __getattr__(name: str) -> object:
    """Return a name of this room. Raises ImportError with what to install where a package of the extra is missing."""
    try:
        return _load(name)
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in PACKAGES:
            raise
        raise ImportError(f"longspan.hf needs {missing}, which is not installed: pip install 'longspan[hf]'") from error
