"""Hugging Face models under a home: `prepare`, presets, loading and saving. The only room that knows transformers.

Names are imported on first use (PEP 562): the presets' names need neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longspan.model.load import full_state_dict as full_state_dict
    from longspan.model.load import load_model as load_model
    from longspan.model.load import save_model as save_model
    from longspan.model.prepared import is_prepared as is_prepared
    from longspan.model.prepared import prepare as prepare
    from longspan.model.presets import PRESETS as PRESETS
    from longspan.model.presets import preset_config as preset_config

_HOME_OF = {
    **dict.fromkeys(("prepare", "is_prepared"), "longspan.model.prepared"),
    **dict.fromkeys(("load_model", "save_model", "full_state_dict"), "longspan.model.load"),
    **dict.fromkeys(("PRESETS", "preset_config"), "longspan.model.presets"),
}

__all__ = list(_HOME_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'longspan.model' has no attribute {name!r}; it has {', '.join(_HOME_OF)}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value
