"""Imported by the fork server before what may use CUDA, which nothing forked from a process that used it can use: there
an import that would use it fails, and ranks begin anew. In ranks everything is as elsewhere.

transformers imports torchao wherever it is installed, as vllm installs it, for quantized weights, which longspan does
not read, and torchao asks for the kind of GPU. In the server it is not there, and transformers in ranks does without.
"""

import os
import sys
from typing import Any, NoReturn

import torch

_c: Any = torch._C
_INIT = getattr(_c, "_cuda_init", None)  # None: of a build for CPUs
_HIDDEN = [name for name in ("torchao",) if name not in sys.modules]


def _refuse_cuda() -> NoReturn:
    """Fail in place of torch's initialization of CUDA, in the fork server."""
    torch.cuda._is_in_bad_fork = lambda: True  # ranks begin anew, for what was imported may be there in part
    raise ImportError("CUDA is not used in the process that ranks are forked from")


def _allow_cuda() -> None:
    """Take back in a forked rank what this module has set, so that CUDA and hidden packages are as elsewhere."""
    _c._cuda_init = _INIT
    for name in _HIDDEN:
        sys.modules.pop(name, None)


_c._cuda_init = _refuse_cuda
for _name in _HIDDEN:
    sys.modules[_name] = None  # pyright: ignore[reportArgumentType]  (as if it were not installed)
os.register_at_fork(after_in_child=_allow_cuda)
