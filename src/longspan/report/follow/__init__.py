"""The page of a run that is followed while it trains: `longspan report RUN --follow`.

A server of the standard library on 127.0.0.1 reads what the run writes and sends the parts of the page that changed.
Nothing here writes to the run's folder, or talks to its ranks.

>>> with Follower(Path("runs/first")) as follower:
...     print(follower.address)
...     print(follower.wait())
"""

from typing import TYPE_CHECKING

from longspan.lazy import lazy_exports

if TYPE_CHECKING:
    from longspan.report.follow.server import Follower as Follower

__getattr__, __dir__, __all__ = lazy_exports(__name__)
