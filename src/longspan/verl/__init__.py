"""longspan as a training engine of verl: `model_engine=longspan`, for actor, reference and critic (docs/verl.md).

verl imports this module by its entry point in the group `verl.plugins`, by VERL_USE_EXTERNAL_MODULES=longspan.verl, or
by `model.external_lib`. It drops an error of an entry point, so the engines are imported when one is made.
"""

from importlib import import_module
from typing import Any

from verl.workers.engine.base import BaseEngine, EngineRegistry  # pyright: ignore[reportMissingImports]

for _model_type, _name in (("language_model", "LongspanEngine"), ("value_model", "LongspanValueEngine")):

    @EngineRegistry.register(model_type=_model_type, backend="longspan", device=["cuda", "cpu"])
    class _EngineWhenMade(BaseEngine):
        def __new__(cls, *arguments: Any, engine_class: str = _name, **keywords: Any) -> Any:
            return getattr(import_module("longspan.verl.engine"), engine_class)(*arguments, **keywords)
