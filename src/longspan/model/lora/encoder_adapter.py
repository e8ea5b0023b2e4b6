"""What an adapter may not be in the tower and projector of a vision-language model; refused before any change."""

from collections.abc import Iterator

from torch import nn

from longspan.errors import ModelError
from longspan.model.adapters import Adapter, base_module, is_adapted, is_copied, peft_modules
from longspan.model.lora.refusals import reasons_of_configuration, reasons_of_layers


def check_encoder_adapter(encoder: nn.Module, adapter: Adapter, tp: int) -> None:
    """Raise ModelError, with every reason, for an adapter that is not shown to be exact in an encoder under this tp.

    Every rank has the same adapter, which `prepare_encoder` checks with all other weights.
    """
    if not peft_modules(encoder):
        return
    if reasons := [*reasons_of_configuration(adapter), *reasons_of_layers(encoder), *_of_encoder(encoder, adapter, tp)]:
        raise ModelError(
            f"the adapter {adapter.name!r} of a tower or projector cannot be trained: {'; '.join(reasons)}"
        )


def _of_encoder(encoder: nn.Module, adapter: Adapter, tp: int) -> Iterator[str]:
    modules = peft_modules(encoder)
    if copied := [name for name, module in modules.items() if is_copied(module)]:
        yield (
            f"modules_to_save has {', '.join(copied[:2])}; leave it out and call requires_grad_(True) of that module: "
            "it is saved as one of modules_to_save"
        )
    adapted = {name: base_module(module) for name, module in modules.items() if is_adapted(module)}
    if trained := [name for name, linear in adapted.items() if any(p.requires_grad for p in linear.parameters())]:
        yield f"{', '.join(trained[:2])} have adapters, and weights that are trained too; train one of them"
    for key in ("use_dora", "lora_bias"):
        if tp > 1 and getattr(adapter.config, key, False):
            yield f"{key} is set, which is not shown to be exact under the encoder's tp {tp}; use tp 1"
    if tp > 1 and adapter.dropout:
        yield (
            f"lora_dropout is {adapter.dropout:g}, and the encoder's {tp} tensor-parallel ranks would drop different "
            "inputs; use tp 1"
        )
