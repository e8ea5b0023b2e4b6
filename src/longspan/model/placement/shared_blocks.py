"""Blocks that decoder layers have together, each as a module of its own with the same parameters, as in Zamba 2.

FSDP2 gathers the modules of such a block together, from the first that runs to the last, and sums its gradients once.
"""

from collections.abc import Mapping

from torch import nn


def shared_blocks(layers: Mapping[str, nn.Module]) -> list[list[nn.Module]]:
    """Modules of different layers with the same parameters, all of them shared: one list for each set of parameters.

    The outermost such modules that are called; one that two layers both hold, itself, is left out.
    """
    users: dict[int, set[str]] = {}
    for name, layer in layers.items():
        for parameter in layer.parameters():
            users.setdefault(id(parameter), set()).add(name)
    groups: dict[tuple[int, ...], dict[int, nn.Module]] = {}
    for layer in layers.values():
        for module in _shared_inside(layer, users):
            groups.setdefault(_parameters(module), {})[id(module)] = module
    return [list(group.values()) for key, group in groups.items() if len(group) == len(users[key[0]])]


def _shared_inside(module: nn.Module, users: Mapping[int, set[str]]) -> list[nn.Module]:
    modules: list[nn.Module] = []
    for child in module.children():
        layers = {frozenset(users[parameter]) for parameter in _parameters(child)}
        runs = not isinstance(child, (nn.ModuleList, nn.ModuleDict))
        if runs and len(layers) == 1 and len(next(iter(layers))) > 1:
            modules.append(child)
        else:
            modules += _shared_inside(child, users)
    return modules


def _parameters(module: nn.Module) -> tuple[int, ...]:
    return tuple(id(parameter) for parameter in module.parameters())
