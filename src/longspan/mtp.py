"""Multi-token prediction: add its depths to a model, and weigh their losses in `run_step`.

>>> from longspan.mtp import MtpLoss, add_mtp
>>> model = add_mtp(load_model(folder), depths=1)
>>> result = run_step(prepare(model, world), plan, documents, world, mtp=MtpLoss(weight=0.1))

`docs/mtp.md` has the whole example. Names are imported on first use (PEP 562).
"""

from typing import TYPE_CHECKING

from longspan.lazy import lazy_exports

if TYPE_CHECKING:
    from longspan.model import add_mtp as add_mtp
    from longspan.train import MtpLoss as MtpLoss

__getattr__, __dir__, __all__ = lazy_exports(__name__)
