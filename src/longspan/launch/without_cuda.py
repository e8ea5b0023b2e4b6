"""Importing this makes CUDA fail and torchao look absent in the fork server, until a rank is forked. A process that
used CUDA forks none that can use it: where an import of the server would use it, that import fails, and ranks begin
anew. transformers imports torchao wherever it is installed, and torchao asks for the kind of GPU; longspan does not
need it, and transformers does without it in ranks.
"""

import os
import sys
from typing import Any, NoReturn

import torch

_c: Any = torch._C
_INIT = getattr(_c, "_cuda_init", None)  # None: of a build for CPUs
_HIDDEN = [name for name in ("torchao",) if name not in sys.modules]


def _refuse_cuda() -> NoReturn:
    torch.cuda._is_in_bad_fork = lambda: True  # ranks begin anew, for what was imported may be there in part
    raise ImportError("CUDA is not used in the process that ranks are forked from")


def _undo_in_forked_rank() -> None:
    """`_is_in_bad_fork` stays as `_refuse_cuda` set it."""
    _c._cuda_init = _INIT
    for name in _HIDDEN:
        sys.modules.pop(name, None)


_c._cuda_init = _refuse_cuda
for _name in _HIDDEN:
    sys.modules[_name] = None  # pyright: ignore[reportArgumentType]  (as if it were not installed)
os.register_at_fork(after_in_child=_undo_in_forked_rank)
