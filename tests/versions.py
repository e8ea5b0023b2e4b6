"""Which tests an older transformers cannot pass, since its own models differ."""

import transformers
from packaging.version import Version


def transformers_before(version: str) -> bool:
    """Whether the installed transformers is older."""
    return Version(transformers.__version__) < Version(version)
