"""A proof that longspan runs a model exactly, on this machine: a small copy of it against the stock model.

>>> from longspan.doctor import Case, prove, shrink_configuration
"""

from typing import TYPE_CHECKING

from longspan.lazy import lazy_exports

if TYPE_CHECKING:
    from longspan.doctor.cases import Case as Case
    from longspan.doctor.proof import prove as prove
    from longspan.model.exactness.small_copies import shrink_configuration as shrink_configuration

__getattr__, __dir__, __all__ = lazy_exports(__name__)
