"""Which rows of a parameter a tensor-parallel rank has, and how the parameters of a mixer divide, by kind of mixer.

A rank has consecutive heads of a mixer, and of each thing that its parameters hold, as [gate | x | B | C | dt], the
rows of these heads. Heads share B and C in groups. Each group that a rank holds must serve equally many heads: where
its three heads are of groups 0, 0 and 1, it holds group 0 twice.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from longspan.errors import ModelError


@dataclass(frozen=True)
class EvenRows:
    """Rows that are divided into equal slices, one per rank; tp divides `size`."""

    size: int

    def runs(self, tp: int, rank: int) -> tuple[range, ...]:
        """Return this rank's rows, a single run."""
        part = self.size // tp
        return (range(rank * part, (rank + 1) * part),)


@dataclass(frozen=True)
class GroupRows:
    """Rows of groups of heads, `width` for each group: a rank has the rows of its heads' groups, in their order.

    `heads` is the number of all heads, of which each of the `groups` serves equally many; tp divides it. A group whose
    heads are on several ranks is on each of these.
    """

    groups: int
    width: int
    heads: int

    @property
    def size(self) -> int:
        """All rows."""
        return self.groups * self.width

    def heads_together(self, tp: int) -> int:
        """Return the largest n for which every n neighbouring heads of a rank, from its first on, share a group."""
        return math.gcd(self.heads // tp, self.heads // self.groups)

    def runs(self, tp: int, rank: int) -> tuple[range, ...]:
        """Return the ranges of the whole parameter's rows that tp rank `rank` holds: for every `heads_together(tp)`
        neighbouring heads of the rank the `width` rows of their group, so that a group may come several times.
        """
        first = rank * (self.heads // tp)
        together = self.heads_together(tp)
        heads = range(first, first + self.heads // tp, together)
        groups = [head // (self.heads // self.groups) for head in heads]
        return tuple(range(group * self.width, (group + 1) * self.width) for group in groups)


@dataclass(frozen=True)
class FusedRows:
    """Rows of several things, one after another in one dim of a parameter."""

    parts: tuple[EvenRows | GroupRows, ...]

    @property
    def size(self) -> int:
        """All rows."""
        return sum(part.size for part in self.parts)

    def runs(self, tp: int, rank: int) -> tuple[range, ...]:
        """Return this rank's rows, part after part, counted from the first row of the first part."""
        runs = list[range]()
        start = 0
        for rows_part in self.parts:
            runs += [range(start + run.start, start + run.stop) for run in rows_part.runs(tp, rank)]
            start += rows_part.size
        return tuple(runs)

    def cut_pieces(self, tp: int, rank: int) -> tuple[list[int], list[int]]:
        """Cut all rows wherever a run of this rank begins or ends, for `torch.split`.

        Returns the sizes of all pieces, and the indices of those that the rank has, in its order.
        """
        runs = self.runs(tp, rank)
        cuts = sorted({0, self.size, *(run.start for run in runs), *(run.stop for run in runs)})
        order = [i for run in runs for i in range(cuts.index(run.start), cuts.index(run.stop))]
        return [end - start for start, end in pairwise(cuts)], order


# ---- mixers


@dataclass(frozen=True)
class MixerParts:
    """How a mixer divides over tensor-parallel ranks; names are of children, or tensors, of the mixer.

    `heads` are the numbers that tp must divide, by what they count; `rows` say how the rows of a child's tensors, or of
    a tensor, divide; `attributes` are what numbers of the mixer are on a rank. `whole` names what every rank applies
    undivided, `output` the projection back to hidden states.
    """

    heads: Mapping[str, int]
    rows: Mapping[str, EvenRows | FusedRows]
    attributes: Mapping[str, int]
    output: str = "out_proj"
    whole: tuple[str, ...] = ()


def mixer_parts(name: str, mixer: nn.Module, tp: int) -> MixerParts:
    """Return the parts of a mixer called `name`, whose kind is recognised by its attributes; it is not split yet.

    ModelError for another kind, and for parameters that no part covers.
    """
    kind = next((kind for attributes, kind in _KINDS if all(hasattr(mixer, a) for a in attributes)), None)
    if kind is None:
        raise ModelError(
            f"{name} ({type(mixer).__name__}) is none of the mixers whose heads are split over tensor-parallel ranks "
            "(gated delta nets, Kimi's delta attention, Mamba 2, short convolutions); use tp 1"
        )
    parts = kind(mixer, tp)
    part_names = (*parts.rows, *parts.whole, parts.output)
    for parameter, tensor in mixer.named_parameters():
        part = next((p for p in part_names if parameter == p or parameter.startswith(f"{p}.")), "")
        rows = parts.rows.get(part)
        # an adapter's first matrix stays whole, whatever its number of rows
        fits = rows is None or rows.size in tensor.shape or is_first_adapter_matrix(parameter)
        if not part or not fits:
            raise ModelError(
                f"{name}.{parameter} {tuple(tensor.shape)} of {type(mixer).__name__} is not known, so that it is not "
                "known how it divides over tensor-parallel ranks; use tp 1"
            )
    return parts


def _delta_net_parts(mixer: Any, tp: int) -> MixerParts:
    """Qwen3-Next fuses projections by key head: a rank's rows are one run. Qwen3.5 fuses queries, keys and values
    one after another, and OLMo Hybrid has a linear for each."""
    keys = EvenRows(mixer.key_dim)
    values = EvenRows(mixer.value_dim)
    heads = EvenRows(mixer.num_v_heads)
    queries_keys_values = FusedRows((keys, keys, values))
    rows = {
        "in_proj_qkvz": EvenRows(2 * keys.size + 2 * values.size),
        "in_proj_ba": EvenRows(2 * heads.size),
        "in_proj_qkv": queries_keys_values,
        "conv1d": queries_keys_values,
        **dict.fromkeys(("in_proj_z", "v_proj", "g_proj"), values),
        **dict.fromkeys(("q_proj", "k_proj"), keys),
        **dict.fromkeys(("in_proj_a", "in_proj_b", "a_proj", "b_proj", "A_log", "dt_bias"), heads),
    }
    numbers = ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim")
    return MixerParts(
        heads={"key heads": mixer.num_k_heads, "value heads": mixer.num_v_heads},
        rows=rows,
        attributes={number: getattr(mixer, number) // tp for number in numbers},
        output="out_proj" if hasattr(mixer, "out_proj") else "o_proj",
        whole=("norm", "o_norm"),
    )


def _kimi_parts(mixer: Any, tp: int) -> MixerParts:
    """Queries, keys and values have heads of one size each."""
    width = EvenRows(mixer.qkv_dim)
    heads = EvenRows(mixer.num_heads)
    feature_parts = ("q_proj", "k_proj", "v_proj", "g_proj", "g_b_proj")  # a row for each feature of each head
    feature_parts += ("forget_gate.f_proj", "forget_gate.f_b_proj", "forget_gate.dt_bias")
    rows = {
        **dict.fromkeys(feature_parts, width),
        **dict.fromkeys(("b_proj", "forget_gate.A_log"), heads),
        "conv1d": FusedRows((width,) * 3),
    }
    attributes = {number: getattr(mixer, number) // tp for number in ("num_heads", "qkv_dim", "conv_dim")}
    attributes |= {f"forget_gate.{number}": attributes[number] for number in ("num_heads", "qkv_dim")}
    whole = ("g_a_proj", "forget_gate.f_a_proj", "o_norm")
    return MixerParts({"heads": heads.size}, rows, attributes, output="o_proj", whole=whole)


def _mamba2_parts(mixer: Any, tp: int) -> MixerParts:
    """A Mamba 2 projects to [gate | x | B | C | dt] and convolves [x | B | C]."""
    inner = EvenRows(mixer.intermediate_size)
    heads = EvenRows(mixer.num_heads)
    # B has these rows, and C as many.
    states = GroupRows(mixer.n_groups, mixer.ssm_state_size, mixer.num_heads)
    projected = FusedRows((inner, inner, states, states, heads))
    # The groups are those of a rank, repeated ones included.
    groups = heads.size // tp // states.heads_together(tp)
    width = groups * states.width
    attributes = {
        "num_heads": heads.size // tp,
        "intermediate_size": inner.size // tp,
        "n_groups": groups,
        "conv_dim": inner.size // tp + 2 * width,
        # Falcon-H1 has this attribute.
        "groups_time_state_size": width,
    }
    rows = {
        "in_proj": projected,
        "mup_vector": projected,
        "conv1d": FusedRows((inner, states, states)),
        **dict.fromkeys(("A_log", "D", "dt_bias"), heads),
        "norm": inner,
    }
    return MixerParts({"heads": heads.size}, rows, attributes)


def _short_convolution_parts(mixer: Any, tp: int) -> MixerParts:
    """The channels of a gated short convolution (LFM2) do not meet; three projections are fused."""
    channels = EvenRows(mixer.conv.in_channels)
    rows = {"in_proj": FusedRows((channels,) * 3), "conv": channels}
    return MixerParts({"channels": channels.size}, rows, attributes={})


# attributes that a kind of mixer has, and the function that divides it
_KINDS: Sequence[tuple[tuple[str, ...], Callable[[Any, int], MixerParts]]] = (
    (("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv1d"), _delta_net_parts),
    (("qkv_dim", "forget_gate", "conv1d"), _kimi_parts),
    (("ssm_state_size", "n_groups", "num_heads", "intermediate_size", "in_proj", "conv1d"), _mamba2_parts),
    (("conv", "in_proj", "out_proj"), _short_convolution_parts),
)


def tensors_of_part(mixer: nn.Module, part_name: str) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (name in the mixer, owner, name there) of the tensors of a child, or the one tensor, `part_name`."""
    for name, _ in (*mixer.named_parameters(), *mixer.named_buffers()):
        if name == part_name or name.startswith(f"{part_name}."):
            owner, _, attribute = name.rpartition(".")
            yield name, mixer.get_submodule(owner), attribute


def is_first_adapter_matrix(name: str) -> bool:
    """Return whether a parameter is the first matrix of a LoRA adapter: its rows are the adapter's rank, not outputs.

    >>> is_first_adapter_matrix("in_proj.lora_A.default.weight")
    True
    """
    return ".lora_A." in name
