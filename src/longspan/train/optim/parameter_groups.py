"""Parameters of a model in groups of one learning rate and weight decay, and which are frozen or grouped by name."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.config.sections import NamedGroup
from longspan.errors import ConfigError, plural
from longspan.model.layers import towers_beside_text_model
from longspan.plan.shape.name_patterns import meets_any
from longspan.train.optim.muon import is_layer_matrix
from longspan.train.optim.optimizer_classes import accepts_argument, optimizer_class

_SHOWN = 16  # kinds of names that an error lists
_BIAS_OR_NORM = re.compile(r"bias$|(norm\d*|ln_\w+)\.[^.]+$")  # the parameter itself, or the module that it is in


class _GroupKey(NamedTuple):
    """What the parameters of one group have in common; groups come in the order of their keys."""

    without_decay: bool
    is_plain: bool  # no DTensor
    rate: float
    is_matrix: bool
    decay: float


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
    modules = {module for module, _ in model.named_modules(remove_duplicate=False)}
    if unknown := [module for module in rates or () if module not in modules]:
        raise ConfigError(
            f"lr has a rate for {unknown[0]!r}, which is no module of this {type(model).__name__}; it has "
            f"{', '.join(child for child, _ in model.named_children())}, and modules inside these"
        )
    groups = defaultdict[_GroupKey, list[nn.Parameter]](list)
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
            key = _GroupKey(without_decay, not isinstance(parameter, DTensor), rate, is_matrix, decay)
            groups[key].append(parameter)
    if name == "muon" and groups and not any(key.is_matrix for key in groups):
        raise ConfigError(
            f"optimizer.class 'muon' found none of the {sum(map(len, groups.values()))} trained parameters to be a "
            "matrix inside a layer, which it is for; use adamw"
        )
    settings = [
        {"params": groups[key]}
        | ({} if rates is None else {"lr": key.rate})
        | ({"weight_decay": key.decay} if knows_decay else {})
        | ({"is_matrix": True} if key.is_matrix else {})
        for key in sorted(groups)
    ]
    return settings or [{"params": []}]


def names_of_parameters(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return all names of each parameter, of tied ones several, in the order of the first ones."""
    names = defaultdict[nn.Parameter, list[str]](list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    return names


def find_named_group(groups: Sequence[NamedGroup], names: Iterable[str]) -> NamedGroup | None:
    """Return the last group that meets one of a parameter's names; None if none does."""
    return next((group for group in reversed(groups) if any(meets_any([group.pattern], x) for x in names)), None)


def _innermost_module(modules: Iterable[str], parameter_name: str) -> str:
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


# ---- parameters that a run freezes or groups by patterns of names, in the whole model, before it is prepared


def freeze_by_name(model: Any, patterns: Sequence[str]) -> None:
    """Freeze the parameters that patterns meet, in place, outside towers of images.

    Raises ConfigError for a pattern that meets none, and where nothing is left to train.
    """
    tower_parameters = {parameter for tower in towers_beside_text_model(model) for parameter in tower.parameters()}
    names = {p: own_names for p, own_names in names_of_parameters(model).items() if p not in tower_parameters}
    _check_patterns_meet("train.freeze", patterns, names.values())
    for parameter, own_names in names.items():
        if any(meets_any(patterns, name) for name in own_names):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"train.freeze has {', '.join(patterns)}, which leaves nothing to train; freeze less")


def check_named_groups(model: nn.Module, texts: Sequence[str], *, stages: int) -> None:
    """Raise ConfigError for groups that name parameters wrongly, by the names of a whole model.

    A group (one of `texts`) must meet a parameter that is trained, and one with weight decay must meet a parameter that
    has decay. With several pipeline `stages` all names of a tied weight must get the same settings, for the first and
    the last stage have a copy of it each.
    """
    groups = [*map(NamedGroup.from_text, texts)]
    names = {p: own_names for p, own_names in names_of_parameters(model).items() if p.requires_grad}
    _check_patterns_meet("optimizer.groups", [group.pattern for group in groups], names.values())
    for text, group in zip(texts, groups, strict=True):
        met_parameters = {
            name: parameter
            for parameter, own_names in names.items()
            for name in own_names
            if meets_any([group.pattern], name)
        }
        if group.weight_decay and not any(
            has_weight_decay(name, parameter) for name, parameter in met_parameters.items()
        ):
            raise ConfigError(
                f"optimizer.groups has {text!r}, which meets {plural(len(met_parameters), 'parameter')}, norms and "
                "biases alone: these have no weight decay; leave weight_decay out of it, or name matrices"
            )
    for own_names in names.values():
        groups_of_names = (find_named_group(groups, [name]) for name in own_names)
        if stages > 1 and len({group and (group.lr, group.weight_decay) for group in groups_of_names}) > 1:
            raise ConfigError(
                f"optimizer.groups gives {' and '.join(own_names)}, which are one tied weight, different settings, and "
                f"parallel.pp is {stages}: stages have a copy each; give one entry for each name, with equal settings"
            )


def _check_patterns_meet(key: str, patterns: Sequence[str], names: Iterable[Sequence[str]]) -> None:
    all_names = [*chain.from_iterable(names)]
    for pattern in patterns:
        if not any(meets_any([pattern], name) for name in all_names):
            kinds = dict.fromkeys(re.sub(r"\d+", "N", name) for name in all_names)
            shown = ", ".join([*kinds][:_SHOWN]) + (" …" if len(kinds) > _SHOWN else "")
            raise ConfigError(
                f"{key} has {pattern!r}, which meets none of {plural(len(all_names), 'name')} of trained parameters of "
                f"the language model; these are {shown or 'none'}, with N for numbers"
            )
