"""The plan of a save: which rank writes which chunk of which tensor, agreed on once for saves of the same tensors.

torch's planner gathers every rank's list on one rank, drops what several of them have, and sends each rank its part. Of
its classes `DefaultSavePlanner` can keep that plan (torch 2.11 to 2.15, `enable_plan_caching`): ranks whose list is as
it was send nothing. Here the list itself is not made again either, and values that recur, such as the settings of an
optimizer for each of its parameters, are pickled once. Settings and counts are the same on many ranks, and several
times as many as tensors: one rank of those with the same names lists them, or torch drops those of all others.
"""

import hashlib
import io
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from math import prod
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

_keys = count()
_SMALL = 1 << 10  # numbers
_PLAIN = (int, float, bool, str, type(None))


class PlanCache:
    """What planners of one series of saves keep; the same on all ranks, as they save the same times.

    >>> cache = PlanCache()
    >>> dcp.save(tensors, storage_writer=writer, planner=CachedPlanner(cache), process_group=group)
    """

    def __init__(self) -> None:
        self.key = f"longspan {next(_keys)}"  # by which torch keeps the plans of this series
        self.signature: Any = None  # of what the last save listed: equal ones have the same plan; None before a save
        self.values = dict[Any, bytes]()  # the pickles of plain values, by `repr`
        self.planned = 0  # saves whose plan was made and not taken from here

    def forget(self) -> None:
        """Plan the next save anew, as after one that failed; on all ranks."""
        self.signature = None
        self.values.clear()
        for plans in _plans_of_torch():
            plans.pop(self.key, None)


class CachedPlanner(DefaultSavePlanner):
    """torch's planner of one save, with the plans of the last ones."""

    def __init__(self, cache: PlanCache, *, lists_values: bool = True) -> None:
        super().__init__(enable_plan_caching=True)
        self._cached_plans_key, self._cache, self._lists_values = cache.key, cache, lists_values

    def create_local_plan(self) -> SavePlan:
        """Return this rank's list of what it saves.

        A list that is the same as at the last save is returned empty and not `usable`: torch takes the kept one then.
        Without `lists_values` the list has no small values, for another rank lists them (see the module).
        """
        signature = [self._lists_values, *((name, _plan_key(value)) for name, value in self.state_dict.items())]
        if signature == self._cache.signature and self._cached_plans_key in SavePlanner._cached_save_plan:
            return SavePlan([], usable=False)
        SavePlanner._cached_save_plan.pop(self._cached_plans_key, None)
        self._cache.signature = signature
        self._cache.planned += 1
        plan = super().create_local_plan()
        if self._lists_values:
            return plan
        # planner_data are the names, which the rank that lists the values sends for all.
        self.plan = replace(plan, items=[item for item in plan.items if not is_small_value(item)], planner_data={})
        return self.plan

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Pickle a value that is no tensor, as torch does; the bytes of a plain value are kept, for it recurs."""
        if write_item.type != WriteItemType.BYTE_IO or not _is_plain(object):
            return super().transform_object(write_item, object)
        key = repr(object)
        if key not in self._cache.values:
            self._cache.values[key] = super().transform_object(write_item, object).getvalue()
        stored = io.BytesIO(self._cache.values[key])
        stored.seek(0, io.SEEK_END)  # as torch.save leaves it
        return stored


def names_digest(tensors: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a hash of the names of all tensors and values, by which ranks find the ranks that have the same names."""
    names = [f"{group}.{name}" for group, values in tensors.items() for name in values]
    return hashlib.blake2b("\n".join(names).encode(), digest_size=16).hexdigest()


def is_small_value(item: WriteItem) -> bool:
    """Return whether an item is the same on all ranks that have it and takes few bytes.

    That is so of settings and counts (all values that are no tensors) and of small buffers. A shard is another one on
    every rank, whatever its size.
    """
    if item.type == WriteItemType.BYTE_IO:
        return True
    if item.type == WriteItemType.SHARD or item.tensor_data is None:
        return False
    return prod(item.tensor_data.size) <= _SMALL


def _plan_key(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.shape, value.dtype, value.placements, value.device_mesh
    return (value.shape, value.dtype) if isinstance(value, Tensor) else None


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _plans_of_torch() -> tuple[dict[str, Any], ...]:
    """Return the dicts in which torch keeps plans by the planner's key, for all planners of a process."""
    return (
        SavePlanner._cached_save_plan,
        SavePlanner._cached_final_save_plan,
        SavePlanner._cached_all_plans,
        SavePlanner._cached_global_plan,
        SavePlanner._cached_metadata,
    )
