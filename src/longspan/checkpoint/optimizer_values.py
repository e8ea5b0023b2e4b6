"""What of an optimizer a checkpoint keeps in `optimizer.json`, as it is no tensor: counts, and names of settings.

torch names an entry of an optimizer `state.PARAMETER.MOMENT` or `param_groups.PARAMETER.SETTING`.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from longspan.checkpoint.files import (
    OPTIMIZER,
    read_checkpoint_json,
)
from longspan.errors import CheckpointError

# what names under "optimizer." begin with
MOMENTS = "state."
SETTINGS = "param_groups."


class OptimizerValues(NamedTuple):
    """What of an optimizer is no tensor: `optimizer.json` of a checkpoint.

    `numbers` are counts of its state by name, of optimizers that keep them as numbers. `settings` are the names of the
    settings of each parameter that has no state yet: of the others the names of moments say that they were updated.
    """

    numbers: dict[str, int | float]
    settings: dict[str, list[str]]

    @classmethod
    def from_entries(cls, entries: Mapping[str, Any]) -> "OptimizerValues":
        """Return the numbers and settings among the entries of an optimizer that torch gives, by their names."""
        updated = names_with_moments(entries)
        return cls(
            {n: x for n, x in entries.items() if isinstance(x, int | float) and not n.startswith(SETTINGS)},
            {name: keys for name, keys in setting_names_by_parameter(entries).items() if name not in updated},
        )


def read_optimizer_values(path: Path) -> OptimizerValues:
    """Read `optimizer.json` of a checkpoint. Raises CheckpointError if it is missing or damaged."""
    values = read_checkpoint_json(path / OPTIMIZER)
    try:
        numbers = values["numbers"]
        settings = values["settings"]
        whole = all(isinstance(x, int | float) for x in numbers.values())
        if not whole or not all(isinstance(key, str) for keys in settings.values() for key in keys):
            raise ValueError("a value that is no number, or a setting without a name")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {path}: {OPTIMIZER} is damaged ({error})") from error
    return OptimizerValues(numbers, settings)


def names_with_moments(names: Iterable[str]) -> set[str]:
    """Return a set in which every parameter with moments is, from names "state.PARAMETER.MOMENT".

    It has the names cut at each dot, as nothing marks where a parameter's name ends.
    """
    moments = (name.removeprefix(MOMENTS).split(".") for name in names if name.startswith(MOMENTS))
    return {".".join(parts[:count]) for parts in moments for count in range(1, len(parts))}


def setting_names_by_parameter(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of each parameter's settings, without what schedulers add."""
    settings = dict[str, list[str]]()
    for name in sorted(name.removeprefix(SETTINGS) for name in names if name.startswith(SETTINGS)):
        parameter, _, key = name.rpartition(".")
        settings.setdefault(parameter, []).extend({key} - {"initial_lr"})
    return settings
