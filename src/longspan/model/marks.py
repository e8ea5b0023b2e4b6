"""What `prepare` has made of a model, told by the attributes that features leave on models, modules and parameters.

So the file of a feature that is off is not imported to learn that it is off.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn
from torch.optim import Optimizer

from longspan.comm import World
from longspan.errors import ModelError, plural
from longspan.model.layers import architecture_name


def adapter_of_prepared_model(model: nn.Module) -> Any:
    """Return the Adapter of a prepared model; None if it has none."""
    return getattr(model, "adapter", None)


def is_pipeline(model: nn.Module) -> bool:
    """Return whether a model is a PipelineModel: this rank's stages of one."""
    return getattr(type(model), "holds_stages", False)


def is_multimodal(model: nn.Module) -> bool:
    """Return whether a model is a MultimodalModel: a language model with encoders."""
    return getattr(type(model), "holds_encoders", False)


def find_language_model(model: Any) -> nn.Module:
    """Find the language model of a MultimodalModel; any other model is its own."""
    return model.language_model if is_multimodal(model) else model


def modules_and_worlds(model: Any, world: World) -> list[tuple[nn.Module, World]]:
    """List (module, its world) of each part of a model with a layout of its own: the language model, then encoders.

    `world` is the language model's.
    """
    if not is_multimodal(model):
        return [(model, world)]
    encoders = [(encoder.module, encoder.world) for encoder in model.encoder_settings.values()]
    return [(model.language_model, world), *encoders]


IS_COMPILED = "is_compiled_layer"  # an attribute of decoder layers

FLOAT8_WEIGHTS = "float8_weights"  # an attribute of modules: Float8Weight by name of a parameter


def find_float8_weight(module: nn.Module, name: str) -> Any:
    """Return the Float8Weight of a module's weight; None if the module does not compute with it in float8."""
    return vars(module).get(FLOAT8_WEIGHTS, {}).get(name)


def keep_float8_weights(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context that makes a model's weights in float8 once for all passes inside; they must not change there.

    A null context for a model without any.
    """
    weights = (weight for module in model.modules() for weight in vars(module).get(FLOAT8_WEIGHTS, {}).values())
    first = next(weights, None)
    return nullcontext() if first is None else first.keep_all(model)


PACKED_WEIGHTS = "packed_weights"  # an attribute of modules: PackedWeight by name of a parameter


def find_packed_weight(module: nn.Module, name: str) -> Any:
    """Return the PackedWeight of a module's frozen weight in 4 or 8 bits; None if the weight is whole."""
    return vars(module).get(PACKED_WEIGHTS, {}).get(name)


def packed_weights(model: nn.Module) -> dict[str, Any]:
    """Return the PackedWeights inside a model, by the qualified names of their parameters."""
    return {
        f"{path}.{name}": record
        for path, module in model.named_modules()
        for name, record in vars(module).get(PACKED_WEIGHTS, {}).items()
    }


HOST_STORE = "host_store"  # an attribute of parameters, and of prepared models
_NORM = "norm_on_device"  # an attribute of gradients


def waits_on_host(parameter: nn.Parameter) -> bool:
    """Return whether this rank's part of a parameter, and its gradient's, lie in the host's memory between steps."""
    return HOST_STORE in vars(parameter)


def has_weights_on_host(model: nn.Module) -> bool:
    """Return whether weights of a prepared model wait on the host."""
    return HOST_STORE in vars(model)


def record_norm_on_device(gradient: Any, norm: Tensor) -> None:
    """Leave on a gradient (DTensor) in the host's memory the 2-norm of this rank's part, a tensor on the device.

    `norm_on_device` returns it as long as nothing has written to the gradient since.
    """
    vars(gradient)[_NORM] = norm, (gradient._version, gradient._local_tensor._version)


def norm_on_device(gradient: Any) -> Tensor | None:
    """Return the norm of `record_norm_on_device`; None without one, or if the gradient or its part here was changed."""
    norm, versions = vars(gradient).get(_NORM, (None, None))
    if norm is not None and versions == (gradient._version, gradient._local_tensor._version):
        return norm
    return None


# ---- parameters that `prepare` replaces: their names from before, and optimizers that still hold them

FORMER = "name_before_prepare"  # an attribute of parameters


def name_parameters(model: nn.Module) -> None:
    """Leave each parameter's name on it (FORMER), by which an optimizer of replaced parameters is told later.

    Raises ModelError as `refuse_gradient_hooks`.
    """
    refuse_gradient_hooks(model)
    for name, parameter in model.named_parameters():
        setattr(parameter, FORMER, name)


def refuse_gradient_hooks(model: nn.Module) -> None:
    """Raise ModelError for a parameter with a hook on its gradient."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ModelError(
                f"{name} has a hook on its gradient, which FSDP2 does not run for a gradient that it sums; change "
                "gradients after the backward pass (in a Trainer on_pre_optimizer_step, or training_step)"
            )


_CHECKED = WeakKeyDictionary[Optimizer, ref[nn.Module]]()  # optimizers, and the model that each updates


def refuse_other_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise ModelError for an optimizer of parameters that `prepare` replaced, or of none that the model trains.

    Parameters beside the model's, such as those of a loss, are the user's. An optimizer is looked at once for a model.
    """
    if (checked := _CHECKED.get(optimizer)) is not None and checked() is model:
        return
    updated_parameters = {
        id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]
    }
    trains = {id(parameter): parameter.requires_grad for parameter in model.parameters()}
    foreign = [parameter for key, parameter in updated_parameters.items() if key not in trains]
    former_names = [getattr(parameter, FORMER) for parameter in foreign if hasattr(parameter, FORMER)]
    trained = sum(trains.values())
    updated = sum(trains.get(key, False) for key in updated_parameters)
    # The optimizer of an idle stage has nothing to update.
    idle_stage = is_pipeline(model) and not updated_parameters
    if former_names or (trained and not updated and not idle_stage):
        raise ModelError(
            f"the optimizer, {type(optimizer).__name__}, holds {updated} of the {trained} parameters that "
            f"{architecture_name(model)} trains, and {plural(len(foreign), 'other')}, of which {len(former_names)} "
            f"were its own before prepare replaced them {former_names[:1]}; make the optimizer after prepare, "
            "of model.parameters(), or in a Trainer by trainer.create_optimizer()"
        )
    _CHECKED[optimizer] = ref(model)
