"""How each group of a micro-batch communicates in one call: its type and levels, checked for every group on every rank.

A rank checks the groups that it is in and the others alike, so that a call that cannot run fails everywhere, before any
communication. Why `auto` takes which type is in `auto.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import NamedTuple

from longspan.attention.auto import TYPES, Call, choose_type
from longspan.attention.checks import is_count
from longspan.comm import SequenceShard, world_of
from longspan.errors import AttentionError
from longspan.plan import Group

Sizes = tuple[int, int]


class Route(NamedTuple):
    """What a group does: its communication type, and how many neighbours exchange heads for rows (1: none)."""

    kind: str
    inner: int = 1


@dataclass(frozen=True)
class Asked:
    """What the caller of `attend` says of communication; it wins over what the groups of the plan say."""

    cp_comm_type: str | tuple[str, ...] | None
    sizes: Sizes | None
    layer: int | None

    @classmethod
    def of(
        cls, cp_comm_type: str | tuple[str, ...] | None, sizes: tuple[int, ...] | None, layer: int | None
    ) -> "Asked":
        """The arguments of `attend`, checked for what they are."""
        if not isinstance(cp_comm_type, str | tuple | None):
            raise AttentionError(f"cp_comm_type is {cp_comm_type!r}; use one of {', '.join(TYPES)}, or one per layer")
        if sizes is None:
            return cls(cp_comm_type, None, layer)
        if not isinstance(sizes, tuple) or len(sizes) != 2 or not all(map(is_count, sizes)):
            raise AttentionError(f"hierarchical_context_parallel_sizes is {sizes!r}; give (a2a, p2p), two sizes")
        return cls(cp_comm_type, (int(sizes[0]), int(sizes[1])), layer)


def routes_of(shard: SequenceShard, asked: Asked, call: Call) -> dict[int, Route]:
    """The route of each group by its index in the micro-batch (−1: padding rows of the shard).

    Raises AttentionError, naming the group, for a type that is unknown, levels that do not make the degree, or heads
    that cannot be dealt out.
    """
    key = ("routes", asked, call)
    if key not in shard.memo:
        if asked.cp_comm_type is not None:
            _known(_of_layer(asked.cp_comm_type, asked.layer, "cp_comm_type"), "")
        found = {i: _route(shard, i, asked, call) for i in range(len(shard.micro_batch.groups))}
        shard.memo[key] = found | {-1: Route("p2p")}
    return shard.memo[key]


def _route(shard: SequenceShard, index: int, asked: Asked, call: Call) -> Route:
    group, where = shard.micro_batch.groups[index], f" of group {index}"
    if asked.cp_comm_type is None:
        kind = _of_layer(group.cp_comm_type, asked.layer, f"cp_comm_type{where}")
        _known(kind, where)
    else:
        kind = _of_layer(asked.cp_comm_type, asked.layer, "cp_comm_type")
    if group.degree == 1:
        return Route("p2p")
    if kind == "auto":
        return _chosen(shard, index, call)
    sizes = asked.sizes or group.hierarchical_context_parallel_sizes
    if kind == "a2a+p2p":
        _check_levels(sizes, group.degree, where)
    route = _of(kind, group, sizes)
    if call.heads % route.inner:
        raise AttentionError(_undealt(kind, route.inner, group, call.heads, where))
    return route


def _of(kind: str, group: Group, sizes: Sizes | None) -> Route:
    if kind == "a2a+p2p":
        assert sizes is not None
        return Route(kind, sizes[0])
    return Route(kind, group.degree if kind == "a2a" else 1)


def _chosen(shard: SequenceShard, index: int, call: Call) -> Route:
    key = ("chosen", index, call)
    if key not in shard.memo:
        group, node_size = shard.micro_batch.groups[index], world_of(shard.world_key).node_size
        choice = choose_type(group, call, node_size=node_size)
        shard.memo[key] = _of(choice.cp_comm_type, group, choice.hierarchical_context_parallel_sizes)
    return shard.memo[key]


def _of_layer(kinds: str | Sequence[str], layer: int | None, name: str) -> str:
    if isinstance(kinds, str):
        return kinds
    if not isinstance(layer, Integral) or not 0 <= layer < len(kinds):
        raise AttentionError(
            f"{name} has {len(kinds)} entries, one per layer; got layer={layer!r}: "
            f"pass the global layer index, 0 to {len(kinds) - 1}"
        )
    return kinds[layer]


def _known(kind: str, where: str) -> None:
    if kind not in TYPES:
        raise AttentionError(f"cp_comm_type {kind!r}{where} is unknown; use one of {', '.join(TYPES)}")


def _check_levels(sizes: Sizes | None, degree: int, where: str) -> None:
    if sizes is not None and sizes[0] * sizes[1] == degree:
        return
    fit = ", ".join(f"({a}, {degree // a})" for a in range(1, degree + 1) if degree % a == 0)
    if sizes is None:
        raise AttentionError(
            f"cp_comm_type 'a2a+p2p'{where} needs hierarchical_context_parallel_sizes=(a2a, p2p) with product "
            f"{degree}: one of {fit}"
        )
    raise AttentionError(
        f"hierarchical_context_parallel_sizes {sizes}{where} multiply to {sizes[0] * sizes[1]}, but the group has cp "
        f"{degree}; use one of {fit}"
    )


def _undealt(kind: str, inner: int, group: Group, heads: int, where: str) -> str:
    fit = [size for size in range(1, group.degree + 1) if heads % size == 0 and group.degree % size == 0]
    level = ", ".join(f"({size}, {group.degree // size})" for size in fit)
    return (
        f"{heads} query heads cannot be dealt to the {inner} members that cp_comm_type {kind!r}{where} exchanges heads "
        f"between; sizes that divide both the heads and cp {group.degree}: {', '.join(map(str, fit))} (a2a+p2p with "
        f"hierarchical_context_parallel_sizes {level}), or use p2p or all_gather"
    )
