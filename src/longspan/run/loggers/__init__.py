"""Loggers of a run: where rows of metrics go beside metrics.jsonl; `run.loggers` names them."""

from typing import TYPE_CHECKING

from longspan.lazy import lazy_exports

if TYPE_CHECKING:
    from longspan.run.loggers.logger import Logger as Logger
    from longspan.run.loggers.logger import RunStart as RunStart
    from longspan.run.loggers.logger import scalars as scalars

__getattr__, __dir__, __all__ = lazy_exports(__name__)
