"""Imported first by the fork server, of whose imports nothing is garbage: looking for some takes an eighth of its time.

Ranks collect (`rank_process.py`), and pass over what was imported here.
"""

import gc

gc.disable()
