"""The fork server imports this first: nothing that it imports is garbage, and looking for some takes 1/8 of its time.

Ranks collect (`rank_process.py`), and pass over what was imported here.
"""

import gc

gc.disable()
