"""Which parameters of an optimizer have moments, here and in a checkpoint: those that never had a gradient have none.

torch (2.11 to 2.13) makes moments by a step with zero gradients where an optimizer has none, so that there is something
to load into, and where there are gradients it makes and loads none without saying so. Neither reaches training from
here: what an optimizer has after a checkpoint was loaded is what it had when it was saved.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.optim import Optimizer

from longspan.comm import World
from longspan.errors import CheckpointError, counted
from longspan.model.adapters import adapter_entries

BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)  # no list of parameters, which differs between stages
SOME_BY_NAME = replace(BY_NAME, strict=False)  # weights that are not named stay as they are
STATE, SETTINGS = "state.", "param_groups."


def tensors_to_save(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Weights and moments by name; those of an optimizer that has not taken a step are left out.

    Of a model with an adapter the adapter's alone, here and in `tensors_to_fill`: its base model is not trained.
    """
    fresh = not optimizer.state
    weights, moments = get_state_dict(model, optimizer, options=BY_NAME)
    if fresh:
        optimizer.state.clear()
        moments = {name: value for name, value in moments.items() if not name.startswith(STATE)}
    return {"model": adapter_entries(model, weights), "optimizer": moments}


def tensors_to_fill(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """Weights, and moments for every parameter, which a checkpoint is loaded into; gradients are dropped."""
    if optimizer is None:
        return {"model": adapter_entries(model, get_state_dict(model, [], options=BY_NAME)[0])}
    optimizer.zero_grad(set_to_none=True)
    optimizer.state.clear()
    weights, moments = get_state_dict(model, optimizer, options=BY_NAME)
    return {"model": adapter_entries(model, weights), "optimizer": moments}


class StoredMoments(NamedTuple):
    """Of what the optimizer of a checkpoint has moments, and with which settings it held each parameter.

    `moments` are all beginnings of their names, up to a dot: the parameters' names are among them.
    """

    moments: frozenset[str]
    settings: Mapping[str, frozenset[str]]

    @classmethod
    def of(cls, names: Iterable[str]) -> "StoredMoments":
        """From the names under "optimizer." in a checkpoint."""
        moments, settings = set[str](), dict[str, set[str]]()
        for name in names:
            if name.startswith(STATE):
                parts = name.removeprefix(STATE).split(".")
                moments.update(".".join(parts[:count]) for count in range(1, len(parts)))
            elif name.startswith(SETTINGS):
                parameter, _, key = name.removeprefix(SETTINGS).rpartition(".")
                settings.setdefault(parameter, set()).update({key} - {"initial_lr"})  # which schedulers add
        return cls(frozenset(moments), {name: frozenset(keys) for name, keys in settings.items()})


def leave_without_moments(
    path: Path, stored: StoredMoments, model: nn.Module, optimizer: Optimizer, tensors: dict[str, Any], world: World
) -> None:
    """Leave parameters without moments, as they are in the checkpoint, which had no gradient before it was saved.

    All ranks call it together. Raises CheckpointError, on every rank, for parameters that its optimizer did not have,
    and where it was of another class.
    """
    here = StoredMoments.of(tensors["optimizer"])
    updated = {name: p for name, p in model.named_parameters() if name in here.moments}
    without = [name for name in updated if name not in stored.moments]
    lacking = [name for name in without if name not in stored.settings]
    others = [n for n in without if n not in lacking and not stored.moments and stored.settings[n] != here.settings[n]]
    reports = world.control.gather_objects((lacking, others), "moments of a checkpoint")
    if lacking := sorted({name for names, _ in reports for name in names}):
        raise CheckpointError(
            f"checkpoint {path} has no moments of {counted(len(lacking), 'parameter')} that this optimizer updates "
            f"({', '.join(lacking[:2])}), which were frozen, or in no optimizer, when it was saved; freeze them here, "
            "or load the weights alone, load_checkpoint(path, model, None, world), and begin with a new optimizer"
        )
    if any(names for _, names in reports):
        raise CheckpointError(
            f"checkpoint {path} has no moments for {type(optimizer).__name__}: it was saved with another optimizer; "
            "use that one, or load the weights alone, load_checkpoint(path, model, None, world)"
        )
    for name in without:
        del optimizer.state[updated[name]]
    moments = tensors["optimizer"]
    for name in [n for n in moments if n.startswith(tuple(f"{STATE}{parameter}." for parameter in without))]:
        del moments[name]
