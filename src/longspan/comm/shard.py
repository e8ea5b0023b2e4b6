"""What one rank does in one micro-batch: its rows, their positions, and how its groups talk.

`bind` computes it only from integers and never communicates. A SequenceShard refers to its world by key and holds no
process group, so that it may be kept, passed through FSDP2 and bound again by activation recomputation. Rows of a slot:
group after group in plan order, document after document, in the order of the group's partition.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn, Self

import numpy as np
import torch
from torch import Tensor

from longspan.comm.autograd import apply_with_gradient
from longspan.comm.device import to_device
from longspan.comm.world import World, world_of
from longspan.errors import CommError, LayoutError, PlanError
from longspan.layout import Segments
from longspan.layout.segments import NO_SPANS, Integers, Spans, SpansOfDocuments, expand_runs
from longspan.plan import Group, MicroBatch


class Immutable:
    """Attributes are set once, by `_set`. A plain class: FSDP2's mixed precision rebuilds dataclasses in keyword
    arguments and casts their tensors (torch 2.11 to 2.15)."""

    __slots__ = ("__weakref__",)

    def _set(self, **values: object) -> None:
        """Only the constructor, or the one writer that a class names, calls it."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable: bind the micro-batch again, do not set {name}")

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise CommError(
            f"a {type(self).__name__} belongs to a world of this process and cannot be pickled; send its MicroBatch "
            "(or the plan) and call bind(micro_batch, world) where it arrives"
        )


class ShardPart(Immutable):
    """This rank's share of one group of a micro-batch.

    `group` and `index` (of the group in the micro-batch, −1 for padding rows), `member` (position in the group),
    `start:stop` (its rows among the shard's rows), `counts` (rows of every member).
    """

    __slots__ = ("counts", "group", "index", "member", "start", "stop", "world_key")

    group: Group
    index: int
    member: int
    start: int
    stop: int
    counts: tuple[int, ...]
    world_key: int

    def __init__(self, group: Group, index: int, slot: int, start: int, world_key: int) -> None:
        member = group.slots.index(slot)
        counts = group.shares.counts
        stop = start + counts[member]
        self._set(
            group=group, index=index, member=member, start=start, stop=stop, counts=counts, world_key=world_key
        )

    @property
    def degree(self) -> int:
        return self.group.degree

    def segments(self, member: int | None = None) -> Segments:
        """Return the rows of one member (default: this rank) as runs of positions inside documents."""
        return self.group.shares.segments(self.member if member is None else member)

    def __repr__(self) -> str:
        return (
            f"ShardPart(group {self.index}, member {self.member} of {self.degree}, rows {self.start}:{self.stop})"
        )


def packed_order(micro_batch: MicroBatch, starts: Sequence[int]) -> Integers:
    """Return where each packed row (S,) is in a buffer of the rows of all slots; those of slot s begin at `starts[s]`.

    A slot's rows lie group after group. Rows that pad a document out are among them, but are no packed rows.
    """
    sources = np.empty(micro_batch.tokens, dtype=np.int64)
    next_row = list(starts)
    base = 0
    for group in micro_batch.groups:
        lengths = np.asarray(group.lengths, dtype=np.int64)
        counts = group.shares.counts
        first_rows = base + np.cumsum(lengths) - lengths
        for member, slot in enumerate(group.slots):
            segments = group.shares.segments(member)
            # Padding follows the last row of a document.
            rows_to_end = lengths[segments.document] - segments.start
            sizes = np.clip(rows_to_end, 0, segments.stop - segments.start)
            begin = first_rows[segments.document] + segments.start
            local = next_row[slot] + segments.offset
            sources[expand_runs(begin, begin + sizes)] = expand_runs(local, local + sizes)
            next_row[slot] += counts[member]
        base += group.tokens
    return sources


RowsAt = tuple[tuple[Tensor, Tensor], ...]  # local rows (n,) and rows (n, D) for them, of every modality


class Derived(Immutable):
    """What belongs to a shard for as long as it lives, but is no part of its value. Each attribute has one writer.

    `packed_order`, `real_rows` and `row_counts` are computed on first use, by the shard. The others are of items,
    written by `train/terms` with `add_items`: `spliced` are rows that replace token embeddings, by how many tokens
    ahead of its row a token is embedded (0 but for multi-token prediction); `added` are rows that are added to a
    decoder layer's output, by layer; `leaves` are the tensors that collect the gradients of both.

    A module that derives something else from a shard keeps it in a `WeakKeyDictionary` of its own, by shard.
    """

    __slots__ = ("added", "leaves", "packed_order", "real_rows", "row_counts", "spliced")

    # The order is for these starts of the slots' rows.
    packed_order: tuple[tuple[int, ...], Tensor] | None
    # The keys are the local rows that the index is for.
    real_rows: Mapping[tuple[int, int | None], Tensor]
    row_counts: Tensor | None
    spliced: Mapping[int, RowsAt]
    added: Mapping[int, RowsAt]
    leaves: tuple[Tensor, ...]

    def __init__(self) -> None:
        nothing = MappingProxyType[int, RowsAt]({})
        self._set(
            packed_order=None,
            real_rows=MappingProxyType({}),
            row_counts=None,
            spliced=nothing,
            added=nothing,
            leaves=(),
        )

    def add_items(self, leaf: Tensor, spliced: Mapping[int, RowsAt], added: Mapping[int, RowsAt]) -> None:
        """Add the rows of items of one modality, and the leaf that collects their gradients; called by `train/terms`
        alone.
        """
        self._set(
            leaves=(*self.leaves, leaf),
            spliced=_join_rows(self.spliced, spliced),
            added=_join_rows(self.added, added),
        )


def _join_rows(first: Mapping[int, RowsAt], second: Mapping[int, RowsAt]) -> Mapping[int, RowsAt]:
    """Where both have a key, its tuples are joined, that of `first` first."""
    keys = {**first, **second}
    return MappingProxyType({key: (*first.get(key, ()), *second.get(key, ())) for key in keys})


class SequenceShard(Immutable):
    """One rank's view of one micro-batch, as `bind` returns it. T local rows of S packed rows.

    `rows` (T,) int64: packed row of each local row, −1 for padding; `position_ids` (T,) int64: position inside the
    document, behind the rows of those that it continues (`Group.parents`). Per local segment, which is one document's
    rows of one group: `documents` (ids; −1 for padding) and `cu_seqlens` (n + 1,) int32, boundaries among the local
    rows. `parts`: one per group that this slot is in, and a last one of padding rows, if any. `seed` is the world's
    seed and step when it was bound, from which masks of dropout are hashed. `spans`, one value a group, are the runs of
    rows that see each other (`with_spans`); None where it was not said whether there are any.

    >>> shard = bind(plan.micro_batches[0], world)
    >>> x_local = shard.scatter(x)                  # (S, …) to (T, …)
    >>> torch.equal(shard.gather(x_local), x)
    True
    """

    __slots__ = (
        "cu_seqlens",
        "derived",
        "device",
        "documents",
        "host_rows",
        "micro_batch",
        "parts",
        "position_ids",
        "rows",
        "seed",
        "slot",
        "spans",
        "world_key",
    )

    micro_batch: MicroBatch
    slot: int
    world_key: int
    seed: tuple[int, int]
    parts: tuple[ShardPart, ...]
    rows: Tensor
    host_rows: Integers  # the same, on the host
    position_ids: Tensor
    documents: Integers
    cu_seqlens: Tensor
    device: torch.device
    derived: Derived
    spans: tuple[Spans, ...] | None

    def __init__(
        self,
        micro_batch: MicroBatch,
        slot: int,
        world_key: int,
        device: torch.device,
        padding: int = 0,
        seed: tuple[int, int] = (0, 0),
    ) -> None:
        groups = [*micro_batch.groups_of(slot)]
        if padding:
            groups.append((-1, Group(slots=(slot,), documents=(-1,), lengths=(padding,))))
        parts: list[ShardPart] = []
        # the first packed row of each group
        bases = np.cumsum([0, *(group.tokens for group in micro_batch.groups)])
        # Each part has the packed row and position of each row, and the id and number of rows of each document that has
        # one.
        columns: list[tuple[Integers, ...]] = [(np.zeros(0, dtype=np.int64),) * 4]
        for index, group in groups:
            part = ShardPart(group, index, slot, parts[-1].stop if parts else 0, world_key)
            parts.append(part)
            segments = part.segments()
            counts = segments.stop - segments.start
            # within a segment, place − local row is the same for all rows: start − offset
            place = np.arange(int(counts.sum())) + np.repeat(segments.start - segments.offset, counts)
            lengths = np.asarray(group.lengths, dtype=np.int64)
            starts = np.cumsum(lengths) - lengths
            document = np.repeat(segments.document, counts)
            real = (place < lengths[document]) & (index >= 0)  # not of padding
            row = np.where(real, bases[index] + starts[document] + place, -1)
            # The position is counted in the document, and also behind the rows of the documents that it continues.
            position = place
            if group.parents is not None:
                position = place + np.asarray(group.bases, dtype=np.int64)[document]
            rows_of_document = np.bincount(document, minlength=len(lengths))
            present = np.flatnonzero(rows_of_document)
            ids = np.asarray(group.documents, dtype=np.int64)[present]
            columns.append((row, position, ids, rows_of_document[present]))
        rows, positions, documents, sizes = map(np.concatenate, zip(*columns, strict=True))
        cu_seqlens = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        self._set(
            micro_batch=micro_batch,
            slot=slot,
            world_key=world_key,
            seed=seed,
            parts=tuple(parts),
            rows=to_device(rows, device),
            host_rows=rows,
            position_ids=to_device(positions, device),
            documents=documents,
            cu_seqlens=to_device(cu_seqlens, device),
            device=device,
            derived=Derived(),
            spans=None,
        )

    @property
    def tokens(self) -> int:
        """S, the number of packed rows of the whole micro-batch."""
        return self.micro_batch.tokens

    @property
    def local_rows(self) -> int:
        """T, the number of rows that this rank holds, padding included."""
        return self.parts[-1].stop if self.parts else 0

    @property
    def padding_rows(self) -> int:
        """How many rows `with_padding` appended, at the end of the local rows."""
        return sum(part.stop - part.start for part in self.parts if part.index < 0)

    def find_real_rows(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return which of the local rows from `start` to before `stop` are not padding, on the device.

        It is an index (R,) that counts from `start`. The host computes it, once: a GPU, asked how many there are, would
        let the host wait for all queued work.
        """
        if (index := self.derived.real_rows.get((start, stop))) is None:
            index = to_device(np.flatnonzero(self.host_rows[start:stop] >= 0), self.device)
            self.derived._set(real_rows=MappingProxyType({**self.derived.real_rows, (start, stop): index}))
        return index

    @property
    def row_counts(self) -> Tensor | None:
        """In how many documents each real row (R,) is, as prefixes are in several; None without prefixes."""
        if all(group.parents is None for group in self.micro_batch.groups):
            return None
        if self.derived.row_counts is None:
            counts = list[Integers]()
            for part in self.parts:
                segments = part.segments()
                document_counts = np.asarray(part.group.leaf_counts)[segments.document]
                counts.append(np.repeat(document_counts, segments.stop - segments.start))
            self.derived._set(row_counts=to_device(np.concatenate(counts)[self.host_rows >= 0], self.device))
        return self.derived.row_counts

    def with_padding(self, *, minimum: int = 1, multiple: int = 1) -> "SequenceShard":
        """Return the same shard with padding rows appended, so that T ≥ `minimum` and T is a multiple of `multiple`.

        The padding is a document of its own (id −1, positions from 0) that no other slot sees.
        """
        real = self.local_rows - self.padding_rows
        padded_rows = -(-max(real, minimum) // multiple) * multiple
        if padded_rows == self.local_rows:
            return self
        padding = padded_rows - real
        return SequenceShard(
            self.micro_batch, self.slot, self.world_key, self.device, padding, self.seed
        )._copy_with_spans(self.spans)

    def with_spans(self, spans: SpansOfDocuments) -> "SequenceShard":
        """Return the same shard with runs of rows that see each other in both directions, as tokens of an image may.

        `spans[d]` are the half-open runs of positions of document d, ascending; documents of other micro-batches, and
        documents left out, may be among them or not. All members of a group pass the same spans. Under a causal mask,
        within a window too, a row of a run then sees the later rows of its run as well.

        >>> shard = bind(plan.micro_batches[0], world).with_spans({3: [(5, 261)]})

        Raises LayoutError, naming the document, for runs that are empty, overlap or lie outside the document.
        """
        groups = self.micro_batch.groups
        return self._copy_with_spans(
            tuple(Spans.from_documents(spans, group.documents, group.lengths) for group in groups)
        )

    def _copy_with_spans(self, spans: tuple[Spans, ...] | None) -> "SequenceShard":
        """Nothing is derived yet from the copy's spans, one value a group."""
        shard = object.__new__(SequenceShard)
        values = {name: getattr(self, name) for name in self.__slots__}
        shard._set(**{**values, "spans": spans, "derived": Derived()})
        return shard

    @property
    def has_spans(self) -> bool:
        """Whether a row of some document of the micro-batch sees later ones."""
        return any(map(len, self.spans or ()))

    def spans_of(self, part: ShardPart) -> Spans:
        """Return the runs of a part's documents that see each other; none in padding."""
        return NO_SPANS if self.spans is None or part.index < 0 else self.spans[part.index]

    def scatter(self, x: Tensor, fill: float = 0) -> Tensor:
        """Take this rank's rows (T, …) of packed rows (S, …) that every rank has; padding rows hold `fill`. Local.

        Padding rows are those of `with_padding`, and those of a group with `pad_to`. Labels want `fill=-100`, which
        torch's cross entropy leaves out: with the 0 that suits token ids, padding would be trained to predict token 0.

        >>> shard = bind(plan.micro_batches[0], world).with_padding()
        >>> ids, labels = shard.scatter(ids), shard.scatter(labels, fill=-100)     # labels shifted in each document
        >>> logits = model(input_ids=ids[None], position_ids=shard.position_ids[None], shard=shard).logits[0]
        >>> loss = F.cross_entropy(logits.float(), labels, reduction="sum") / plan.targets
        >>> loss.backward()                                     # gradients are sums over slots

        Raises LayoutError where x does not have S rows, or its dtype cannot hold `fill`.
        """
        if x.shape[0] != self.tokens:
            raise LayoutError(f"scatter got {x.shape[0]} rows, the micro-batch has {self.tokens} packed rows")
        if not (x.dtype.is_floating_point or x.dtype.is_complex):
            lowest, highest = (
                (0, 1) if x.dtype == torch.bool else (torch.iinfo(x.dtype).min, torch.iinfo(x.dtype).max)
            )
            if not (lowest <= fill <= highest and fill == int(fill)):
                limits = f"give a whole number from {lowest} to {highest}"
                raise LayoutError(f"scatter cannot fill {x.dtype} with {fill}; {limits}")
        local = (
            x[self.rows.clamp(min=0).to(x.device)] if self.tokens else x.new_zeros((self.local_rows, *x.shape[1:]))
        )
        if not any(part.index < 0 or part.group.pad_to is not None for part in self.parts):
            return local
        is_padding = (self.rows < 0).to(x.device).view(-1, *[1] * (x.ndim - 1))
        return local.masked_fill(is_padding, fill)

    def gather(self, x_local: Tensor) -> Tensor:
        """Gather all packed rows (S, …) from every rank's rows (T, …); entered by every slot.

        Differentiable. The gradient is taken to be *identical* on all slots, as where every rank computes the same from
        the gathered rows: backward keeps this rank's own rows. Raises LayoutError where x_local does not have T rows.
        """
        if x_local.shape[0] != self.local_rows:
            raise LayoutError(f"gather got {x_local.shape[0]} rows, the shard holds {self.local_rows}")
        return apply_with_gradient(x_local, lambda x: _gather_packed_rows(x, self), self.scatter)

    def __repr__(self) -> str:
        return f"SequenceShard(slot {self.slot}, {self.local_rows} of {self.tokens} rows, {len(self.parts)} parts)"


def bind(micro_batch: MicroBatch, world: World) -> SequenceShard:
    """Bind a micro-batch to this rank: which of its rows the rank has, and with whom. Never communicates.

    Raises PlanError where the micro-batch names slots that the home does not have, CommError where the world is not
    open.
    """
    world.check_open()
    outside = sorted({s for group in micro_batch.groups for s in group.slots if not 0 <= s < world.home.slots})
    if outside:
        raise PlanError(
            f"the micro-batch uses slot {outside[-1]}, the home has {world.home.slots} slots "
            f"(0 to {world.home.slots - 1}); plan for this home, or start more processes"
        )
    return SequenceShard(micro_batch, world.slot, world.key, world.device, seed=(world.seed, world.step))


def check_is_shard(caller: str, shard: object) -> None:
    """Raise LayoutError, naming the calling function, unless it got a shard."""
    if not isinstance(shard, SequenceShard):
        raise LayoutError(f"{caller} got {type(shard).__name__} for a shard; give bind(micro_batch, world)")


def _gather_packed_rows(x_local: Tensor, shard: SequenceShard) -> Tensor:
    world = world_of(shard.world_key)
    channel = world.channels.find_channel(range(world.home.slots))
    counts = [0] * world.home.slots
    for group in shard.micro_batch.groups:
        for slot, group_rows in zip(group.slots, group.shares.counts, strict=True):
            counts[slot] += group_rows
    local = x_local.detach()[: counts[shard.slot]].contiguous()
    rows = channel.all_gather_rows(local, counts, "gather of rows").wait()
    starts = channel.row_starts(counts)
    starts_and_order = shard.derived.packed_order
    if starts_and_order is None or starts_and_order[0] != starts:
        starts_and_order = starts, to_device(packed_order(shard.micro_batch, starts), shard.device)
        shard.derived._set(packed_order=starts_and_order)
    return rows.index_select(0, starts_and_order[1])
