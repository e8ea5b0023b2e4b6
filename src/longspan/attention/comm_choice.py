"""How each group of a micro-batch communicates: as arguments or the plan say, or, under "auto", as `auto.py` finds.

A rank chooses for the groups that it is in and for the others as well, so that every rank can fail alike.
"""

from collections.abc import Sequence
from numbers import Integral
from typing import NamedTuple

from longspan.attention.arguments import Arguments, is_count
from longspan.attention.auto import TYPES, choose_type
from longspan.attention.call import AttentionCall, cache_of
from longspan.comm import SequenceShard, world_of
from longspan.errors import AttentionError
from longspan.plan import Group

Sizes = tuple[int, int]


class CommChoice(NamedTuple):
    """How a group communicates, and how many neighbours exchange heads for rows (1: none)."""

    cp_comm_type: str
    inner: int = 1


def comm_choices(shard: SequenceShard, arguments: Arguments, call: AttentionCall) -> list[CommChoice]:
    """How each group of the micro-batch communicates.

    Raises AttentionError, naming the group, for a type that is unknown, levels that do not make the degree, or heads
    that members cannot exchange.
    """
    kinds, sizes = arguments.cp_comm_type, arguments.sizes
    if not isinstance(kinds, str | tuple | None):
        raise AttentionError(f"cp_comm_type is {kinds!r}; use one of {', '.join(TYPES)}, or one per layer")
    if sizes is not None:
        if not isinstance(sizes, tuple) or len(sizes) != 2 or not all(map(is_count, sizes)):
            raise AttentionError(f"hierarchical_context_parallel_sizes is {sizes!r}; give (a2a, p2p), two sizes")
        arguments = arguments._replace(sizes=(int(sizes[0]), int(sizes[1])))
    if kinds is not None:
        _check_type(_of_layer(kinds, arguments.layer, "cp_comm_type"), "")
    return [_comm_choice(shard, index, arguments, call) for index in range(len(shard.micro_batch.groups))]


def _comm_choice(shard: SequenceShard, index: int, arguments: Arguments, call: AttentionCall) -> CommChoice:
    group, where = shard.micro_batch.groups[index], f" of group {index}"
    if arguments.cp_comm_type is None:
        kind = _of_layer(group.cp_comm_type, arguments.layer, f"cp_comm_type{where}")
        _check_type(kind, where)
    else:
        kind = _of_layer(arguments.cp_comm_type, arguments.layer, "cp_comm_type")
    if group.degree == 1:
        return CommChoice("p2p")
    if kind == "auto":
        return _automatic(shard, index, call)
    sizes = arguments.sizes or group.hierarchical_context_parallel_sizes
    if kind == "a2a+p2p":
        _check_levels(sizes, group.degree, where)
    choice = _with_inner(kind, group, sizes)
    if call.heads % choice.inner:
        raise AttentionError(_heads_error(choice, group, call.heads, where))
    return choice


def _with_inner(kind: str, group: Group, sizes: Sizes | None) -> CommChoice:
    if kind == "a2a+p2p":
        assert sizes is not None
        return CommChoice(kind, sizes[0])
    return CommChoice(kind, group.degree if kind == "a2a" else 1)


def _automatic(shard: SequenceShard, index: int, call: AttentionCall) -> CommChoice:
    automatic, key = cache_of(shard).automatic, (index, call)
    if key not in automatic:
        group, node_size = shard.micro_batch.groups[index], world_of(shard.world_key).node_size
        choice = choose_type(group, call, node_size=node_size)
        automatic[key] = _with_inner(choice.cp_comm_type, group, choice.hierarchical_context_parallel_sizes)
    return CommChoice(*automatic[key])


def _of_layer(kinds: str | Sequence[str], layer: int | None, name: str) -> str:
    if isinstance(kinds, str):
        return kinds
    if not isinstance(layer, Integral) or not 0 <= layer < len(kinds):
        raise AttentionError(
            f"{name} has {len(kinds)} entries, one per layer; got layer={layer!r}: "
            f"pass the global layer index, 0 to {len(kinds) - 1}"
        )
    return kinds[layer]


def _check_type(kind: str, where: str) -> None:
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


def _heads_error(choice: CommChoice, group: Group, heads: int, where: str) -> str:
    fit = [size for size in range(1, group.degree + 1) if heads % size == 0 and group.degree % size == 0]
    level = ", ".join(f"({size}, {group.degree // size})" for size in fit)
    return (
        f"{heads} query heads cannot be dealt to the {choice.inner} members that cp_comm_type "
        f"{choice.cp_comm_type!r}{where} exchanges heads between; sizes that divide both the heads and cp "
        f"{group.degree}: {', '.join(map(str, fit))} (a2a+p2p with hierarchical_context_parallel_sizes {level}), or "
        f"use p2p or all_gather"
    )
