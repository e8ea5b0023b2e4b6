"""Parameters of a model divided into groups of one learning rate and weight decay."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.config.sections import NamedGroup
from longspan.errors import ConfigError
from longspan.plan.shape.name_patterns import meets_any
from longspan.train.optim.muon import is_layer_matrix
from longspan.train.optim.optimizer_classes import accepts_argument, optimizer_class

_BIAS_OR_NORM = re.compile(r"bias$|(norm\d*|ln_\w+)\.[^.]+$")  # the parameter itself, or the module that it is in


def parameter_groups(
    model: nn.Module,
    name: str,
    weight_decay: float,
    rates: Mapping[str, float] | None = None,
    named_groups: Sequence[NamedGroup] = (),
) -> list[dict[str, Any]]:
    """Divide trainable parameters into groups of one rate and decay; DTensors apart, as kernels take no mixture.

    `rates` are learning rates by the names of modules (None: the optimizer's own); before them and `weight_decay` come
    those of `named_groups`, which need `rates`. Raises ConfigError for weight decay that the class does not know, for
    rates that do not fit, and for muon without matrices in layers, which are groups with `is_matrix`. Without
    parameters there is one empty group.
    """
    knows_decay = accepts_argument(optimizer_class(name), "weight_decay")
    if (weight_decay or any(group.weight_decay for group in named_groups)) and not knows_decay:
        raise ConfigError(f"optimizer.class {name!r} knows no weight decay; set optimizer.weight_decay to 0")
    if rates is not None:
        _check_rates(model, rates)
    groups = defaultdict[tuple[bool, bool, float, bool, float], list[nn.Parameter]](list)
    for parameter, names in names_of_parameters(model).items():
        if parameter.requires_grad:
            parameter_name = names[0]
            without_decay = knows_decay and not has_weight_decay(parameter_name, parameter)
            rate = 0.0 if rates is None else rates[_innermost_module(rates, parameter_name)]
            is_matrix = name == "muon" and not without_decay and is_layer_matrix(parameter_name, parameter)
            decay = 0.0 if without_decay else weight_decay
            if (named := find_named_group(named_groups, names)) is not None:
                rate = rate if named.lr is None else named.lr
                decay = decay if without_decay or named.weight_decay is None else named.weight_decay
            groups[without_decay, not isinstance(parameter, DTensor), rate, is_matrix, decay].append(parameter)
    if name == "muon" and groups and not any(is_matrix for *_, is_matrix, _ in groups):
        raise ConfigError(
            f"optimizer.class 'muon' found none of the {sum(map(len, groups.values()))} trained parameters to be a "
            "matrix inside a layer, which it is for; use adamw"
        )
    settings = [
        {"params": parameters}
        | ({} if rates is None else {"lr": rate})
        | ({"weight_decay": decay} if knows_decay else {})
        | ({"is_matrix": True} if is_matrix else {})
        for (_, _, rate, is_matrix, decay), parameters in sorted(groups.items(), key=itemgetter(0))
    ]
    return settings or [{"params": []}]


def names_of_parameters(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return all names of each parameter, of tied ones several, in the order of the first ones."""
    names = defaultdict[nn.Parameter, list[str]](list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    return names


def find_named_group(groups: Sequence[NamedGroup], names: Iterable[str]) -> NamedGroup | None:
    """Return the last group that meets one of a parameter's names."""
    return next((group for group in reversed(groups) if any(meets_any([group.pattern], x) for x in names)), None)


def _check_rates(model: nn.Module, rates: Mapping[str, float]) -> None:
    """Raise ConfigError for a rate of a name that is no module of the model."""
    modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
    if unknown := [name for name in rates if name not in modules]:
        raise ConfigError(
            f"lr has a rate for {unknown[0]!r}, which is no module of this {type(model).__name__}; it has "
            f"{', '.join(name for name, _ in model.named_children())}, and modules inside these"
        )


def _innermost_module(modules: Iterable[str], parameter_name: str) -> str:
    """Return the name of the innermost of these modules that holds a parameter. Raises ConfigError if none does."""
    around = [name for name in modules if not name or parameter_name.startswith(f"{name}.")]
    if not around:
        raise ConfigError(
            f"lr has rates for {', '.join(modules) or 'no module'}, but {parameter_name} is in none of them; name its "
            'module too, freeze it, or give a rate for "", which stands for all other modules'
        )
    return max(around, key=len)


def has_weight_decay(name: str, parameter: Tensor) -> bool:
    """Return whether weight decay applies: to matrices, one for each expert too, and to kernels of convolutions.

    Shapes do not decide it: the biases of experts (E, D) and norms of single heads (N, H) have two dims as well.

    >>> has_weight_decay("layers.0.mlp.experts.down_proj_bias", torch.zeros(8, 64))
    False
    """
    return parameter.ndim >= 2 and not _BIAS_OR_NORM.search(name.lower())
