"""The end of messages about a model that is refused: the command that tries a small copy of it."""

import sys
from pathlib import Path
from typing import Any

from longspan.model.layers import architecture_name

DOCTOR = "; longspan doctor --model"


def doctor_hint(model: Any) -> str:
    """Return the end of a message: the command that tries a small copy of this model, by its folder, family or class.

    "" for a class of one's own with a configuration of transformers: the command would try transformers' model of it.
    """
    config = getattr(model, "config", None)
    kind = next(kind for kind in type(model).__mro__ if kind.__name__ == architecture_name(model))
    if kind.__module__.startswith(("transformers.", "longspan.")):
        folder = str(getattr(config, "_name_or_path", "") or "")
        name = folder if folder and Path(folder).is_dir() else getattr(config, "model_type", "") or kind.__name__
    elif type(config).__module__.startswith("transformers."):
        return ""
    else:  # the script that runs is `__main__` (`__mp_main__` in its processes): it is imported by its file's name
        file = getattr(sys.modules[kind.__module__], "__file__", None) or "MODULE.py"
        name = f"{Path(file).stem if 'main__' in kind.__module__ else kind.__module__}.{kind.__qualname__}"
    return f"{DOCTOR} {name} tries a small copy of it"
