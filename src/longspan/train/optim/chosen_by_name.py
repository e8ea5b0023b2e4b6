"""What a run decides by patterns of names: parameters that it freezes (`train.freeze`), or that have a learning rate or
weight decay of their own (`optimizer.groups`). Both are chosen in the whole model, before it is prepared.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import chain

from torch import nn
from transformers import PreTrainedModel

from longspan.config.text_values import NamedGroup
from longspan.errors import ConfigError, plural
from longspan.model.layers import towers_beside_text_model
from longspan.plan.shape.name_patterns import meets_any
from longspan.train.optim.parameter_groups import find_named_group, has_weight_decay, names_of_parameters

_SHOWN = 16  # kinds of names that an error lists


def freeze_by_name(model: PreTrainedModel, patterns: Sequence[str]) -> None:
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
    """Raise ConfigError for a group that meets no parameter that is trained, for weight decay of parameters that have
    none, and for a group that meets one end of tied weights alone, of which first and last of several `stages` have a
    copy each.
    """
    groups = [*map(NamedGroup.from_text, texts)]
    names = {p: own_names for p, own_names in names_of_parameters(model).items() if p.requires_grad}
    _check_patterns_meet("optimizer.groups", [group.pattern for group in groups], names.values())
    for text, group in zip(texts, groups, strict=True):
        met_parameters = {
            x: p for p, own_names in names.items() for x in own_names if meets_any([group.pattern], x)
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
    """Raise ConfigError for a pattern of this key that meets none of the parameters' names, and list kinds of names."""
    all_names = [*chain.from_iterable(names)]
    for pattern in patterns:
        if not any(meets_any([pattern], name) for name in all_names):
            kinds = dict.fromkeys(re.sub(r"\d+", "N", name) for name in all_names)
            shown = ", ".join([*kinds][:_SHOWN]) + (" …" if len(kinds) > _SHOWN else "")
            raise ConfigError(
                f"{key} has {pattern!r}, which meets none of {plural(len(all_names), 'name')} of trained parameters of "
                f"the language model; these are {shown or 'none'}, with N for numbers"
            )
