"""Parameters that several modules have, as in Zamba 2's shared blocks: each module makes the same slice of them."""

from collections.abc import Sequence

from torch import nn


def places_of_shared(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Of each parameter that several modules have, these modules and its name there."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name))
    return [of_one for of_one in places.values() if len(of_one) > 1]


def share_again(places: Sequence[Sequence[tuple[nn.Module, str]]]) -> None:
    """Give modules that had a parameter together the first one's, of which each has made the same slice."""
    for (first, name), *others in places:
        for module, other in others:
            module.register_parameter(other, getattr(first, name))
