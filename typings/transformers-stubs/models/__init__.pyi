# Without the star imports of every model, which pyright would read: a quarter of its time.
from .auto import *  # noqa: F403
