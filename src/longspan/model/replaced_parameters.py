"""Parameters that `prepare` replaces: their names from before, and optimizers that still hold them."""

from weakref import WeakKeyDictionary, ref

from torch import nn
from torch.optim import Optimizer

from longspan.errors import ModelError, plural
from longspan.model.layers import architecture_name
from longspan.model.marks import is_pipeline

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
    idle_stage = is_pipeline(model) and not updated_parameters
    if former_names or (trained and not updated and not idle_stage):
        raise ModelError(
            f"the optimizer, {type(optimizer).__name__}, holds {updated} of the {trained} parameters that "
            f"{architecture_name(model)} trains, and {plural(len(foreign), 'other')}, of which {len(former_names)} "
            f"were its own before prepare replaced them {former_names[:1]}; make the optimizer after prepare, "
            "of model.parameters(), or in a Trainer by trainer.create_optimizer()"
        )
    _CHECKED[optimizer] = ref(model)
