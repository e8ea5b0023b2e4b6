"""What a refusal names as showing more: the proof of the model on this machine."""

from pathlib import Path
from typing import Any

DOCTOR = "; longspan doctor --model"


def doctor_hint(model: Any) -> str:
    """The end of a refusal's message: the command that tries a small copy of this model, by its folder or family.

    >>> doctor_hint(Qwen3ForCausalLM(config))
    '; longspan doctor --model qwen3 tries a small copy of it and says which kernels it takes'
    """
    config = getattr(model, "config", None)
    folder = str(getattr(config, "_name_or_path", "") or "")
    name = folder if folder and Path(folder).is_dir() else getattr(config, "model_type", "") or type(model).__name__
    return f"{DOCTOR} {name} tries a small copy of it and says which kernels it takes"
