"""What a PeftModel does once the model inside it is prepared: its adapter is left out as here, or it refuses."""

from functools import partial
from typing import Any, NoReturn

from torch import nn

from longspan.errors import ModelError
from longspan.model.lora.disabled import without_adapter

_CHANGES = {
    "merge_and_unload": "longspan export RUN FOLDER --merge writes a merged model, or merge what save_model saved",
    "unload": "load the base model again",
    "merge_adapter": "merge what longspan.save_model(model, folder, world) saved, in one process",
    "add_adapter": "add adapters before prepare",
    "load_adapter": "load adapters before prepare",
    "delete_adapter": "delete adapters before prepare",
    "set_adapter": "choose the adapter before prepare",
    "save_pretrained": "call longspan.save_model(model, folder, world) on all ranks, which stock peft loads",
    "push_to_hub": "call longspan.save_model(model, folder, world) on all ranks, and push that folder",
    "forward": "call the model that prepare returned, with a shard, or longspan.run_step",
}


def redirect(peft_model: Any, prepared: nn.Module) -> None:
    """Have the PeftModel around a prepared model leave the adapter out there, and refuse what changes its parts."""
    if peft_model is prepared or not hasattr(peft_model, "get_base_model"):
        return
    peft_model.disable_adapter = partial(without_adapter, prepared)
    for name, instead in _CHANGES.items():
        if hasattr(peft_model, name) or hasattr(peft_model.base_model, name):
            setattr(peft_model, name, partial(_refuse, name, instead))


def _refuse(name: str, instead: str, *args: object, **kwargs: object) -> NoReturn:
    raise ModelError(f"PeftModel.{name}: the model inside it was prepared, and lies on several ranks; {instead}")
