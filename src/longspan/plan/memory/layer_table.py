"""The rows that a slot works on, and the table of bytes that a decoder layer holds for them, by its parts.

A part has numbers a row that autograd saves, and numbers that its backward pass makes besides. Sizes follow from a
configuration; tests/plan/memory counts the same on real models by what their operators save.
"""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from operator import ge

from longspan.plan.cost.machine import Machine, resolve_compiled_parts
from longspan.plan.cost.type_prices import AttentionCall
from longspan.plan.memory.settings import MemorySettings
from longspan.plan.messages import count_exchange_slices, count_head_groups, head_split
from longspan.plan.micro_batch import MicroBatch, most_common_type
from longspan.plan.plan import Plan
from longspan.plan.shape.config_reader import ConfigReader
from longspan.plan.shape.key_choices import CHOOSING, ENTRIES, KeyChoice, read_key_choice
from longspan.plan.shape.layers import (
    CHUNK,
    LatentWidths,
    LayerKind,
    MixerShape,
    attention_weights,
    attention_widths,
    experts_per_token,
    feed_forward_weights,
    has_latent_attention,
    key_value_heads,
    latent_widths,
    layer_types,
    read_mixer_shape,
)
from longspan.plan.shape.streams import Streams, read_streams

WIDE = 4  # bytes of a number of float32
# These are the bytes of a number of int64.
INDEX = 8
# Float32 tensors of values that torch's operations hold in a scan, without a delta rule and with one (counted on a CPU,
# and of peaks in bench/records/measured.json). With a decay of each channel a row also has five tensors of the 16 rows
# of its chunk.
TORCH_SCANS = {False: 18, True: 26}
BY_CHANNEL_SCANS = 5 * 16
# Scores of an indexer, and of attention in plain tensor operations, are held for as many rows as fit so many bytes.
SCORE_BYTES = 256 << 20
# So many rows of an indexer's queries are made at a time.
INDEXED_ROWS = 4096
# Pools and blocks are gathered where a document has so many times the keys that a row may choose
# (attention/kernels/triton_blocks.py); bits mask them in shorter ones.
GATHERED_FROM = 8


@dataclass(frozen=True, order=True)
class SlotLoad:
    """The rows of one slot in one micro-batch.

    `exchanged_rows` of them are in groups that exchange heads, of which the longest has so many `members` (1: none). A
    ring's blocks have at most `ring_rows`; `gathered_rows` are all rows of a group whose keys and values are gathered.
    `runs` counts the runs of documents on the slot. A `later` micro-batch is not the first of its step: gradients of
    earlier ones are there. Where rows choose keys or see entries, the largest group has `group_rows`, and the longest
    document of the micro-batch so many rows.
    """

    rows: int
    exchanged_rows: int = 0
    members: int = 1
    ring_rows: int = 0
    gathered_rows: int = 0
    runs: int = 1
    later: bool = False
    group_rows: int = 0
    longest: int = 0


def slot_loads(
    plans: Sequence[Plan], read: ConfigReader, settings: MemorySettings, machine: Machine, tp: int = 1
) -> tuple[SlotLoad, ...]:
    """Return the loads of all slots in all micro-batches of these plans, without loads that another load covers; plans
    without micro-batches have one load of one row. "auto" is the type that the machine expects to be fastest, and
    all_gather in a model whose rows choose keys.
    """
    heads = read.count("num_attention_heads")
    head_dim = max(1, attention_widths(read).query // heads) if heads else 1
    call = AttentionCall(
        heads=max(1, heads // tp),
        kv_heads=max(1, key_value_heads(read) // tp),
        head_dim=head_dim,
        bytes_per_number=settings.compute_bytes,
    )

    types = {*layer_types(read)}
    chooses = bool(types & {*CHOOSING})
    gathers = bool(types & ({*CHOOSING} - {*ENTRIES}))

    def load(plan: Plan, batch: MicroBatch, groups: Iterable[int], *, later: bool) -> SlotLoad:
        """Return the load of a slot that is in these groups of a micro-batch: at least one row, and one run. Zigzag
        gives a slot two runs of each document.
        """
        rows = exchanged = ring = gathered = runs = longest = group_size = 0
        members = 1
        for group in map(batch.groups.__getitem__, groups):
            group_rows = group.rows_per_slot
            rows += group_rows
            group_size = max(group_size, group_rows * group.degree)
            runs += len(group.lengths) * (2 if group.degree > 1 and group.partition == "zigzag" else 1)
            if group.degree == 1 or not heads:
                continue
            kind = most_common_type(group.cp_comm_type)
            sizes = group.hierarchical_context_parallel_sizes
            if kind == "auto" and gathers:
                kind = "all_gather"
            if kind == "auto":
                price = machine.fastest_type_price(group, call, node_size=plan.node_size)
                kind = price.cp_comm_type
                sizes = price.sizes
            # members that exchange heads (1: none do)
            exchanging = {"a2a": group.degree, "a2a+p2p": sizes[0] if sizes else 2}.get(kind, 1)
            if exchanging > 1:
                exchanged += group_rows
                # Members are those of the longest group.
                longest, members = max((longest, members), (group_rows, exchanging))
            if kind == "all_gather":
                gathered = max(gathered, group_rows * group.degree)
            elif group.degree > exchanging:  # a block of the ring has the rows of all members that exchange
                ring = max(ring, group_rows * exchanging)
        whole_rows = -(-max(rows, 1) // plan.row_multiple) * plan.row_multiple
        one = SlotLoad(whole_rows, exchanged, members, ring, gathered, max(1, runs), later)
        if not chooses:
            return one
        return replace(one, group_rows=max(group_size, whole_rows), longest=max(batch.lengths, default=0))

    loads = {
        load(plan, batch, groups, later=index > 0)
        for plan in plans
        for index, batch in enumerate(plan.micro_batches)
        # Slots of the same groups have the same load.
        for groups in {tuple(i for i, _ in batch.groups_of(slot)) for slot in range(plan.slots)}
    }
    largest: list[SlotLoad] = []
    for one in sorted(loads, reverse=True):  # a load that covers another, with no smaller number, comes before it
        if not any(all(map(ge, astuple(larger), astuple(one))) for larger in largest):
            largest.append(one)
    return tuple(largest) or (SlotLoad(1),)


@dataclass(frozen=True)
class LayerPart:
    """Bytes of a part of a layer for all rows of a slot. Backward needs what is `saved`, of which `attention` (output
    and log-sum-exp) stays under "selective", `exchanged` too under "exchanged", and `lasting` wherever the layer runs
    again. The backward pass holds `work` besides.
    """

    saved: float = 0.0
    work: float = 0.0
    attention: float = 0.0
    exchanged: float = 0.0
    lasting: float = 0.0

    def __add__(self, other: "LayerPart") -> "LayerPart":
        """Return both parts together: what they save adds up, and as they run one after another, the larger work
        counts.
        """
        attention = self.attention + other.attention
        exchanged = self.exchanged + other.exchanged
        work = max(self.work, other.work)
        return LayerPart(self.saved + other.saved, work, attention, exchanged, self.lasting + other.lasting)


@dataclass(frozen=True)
class LayerTable:
    """The bytes of layers of a configuration for one load, on one of `tp` ranks, and of `ep` that share experts. `lean`
    attention, that of "selective", saves local rows, which backward exchanges again; other attention saves what was
    exchanged.
    """

    read: ConfigReader
    settings: MemorySettings
    load: SlotLoad
    tp: int = 1
    ep: int = 1
    lean: bool = False

    def bytes_of_rows(self, width: float, number: float = 0) -> float:
        """Return the bytes of all local rows of `width` numbers, each of `number` bytes (0: those of the compute
        dtype).
        """
        return self.load.rows * width * (number or self.settings.compute_bytes)

    @cached_property
    def hidden_size(self) -> int:
        return self.read.count("hidden_size")

    @cached_property
    def compiled_parts(self) -> str:
        """What of a layer is compiled, "layers" or "none", with "auto" resolved: nothing is on CPUs."""
        if self.settings.compiled == "auto" and not self.settings.gpu:
            return "none"
        return resolve_compiled_parts(self.settings.compiled, hidden=self.hidden_size, tp=self.tp)

    @property
    def input_bytes(self) -> float:
        """Bytes of a layer's input, of which a rank has 1 / tp under sequence parallelism."""
        width = self.streams.width if self.streams else self.hidden_size
        return self.bytes_of_rows(width // self.tp if self.settings.sequence_parallel else width)

    @cached_property
    def streams(self) -> Streams | None:
        return read_streams(self.read)

    def mixing_and_mlp_parts(self, kind: LayerKind) -> tuple[LayerPart, LayerPart]:
        """Return two parts of a layer: attention and mixer, and MLP or experts, each with its norms. A norm's input is
        counted with it, but for the first norm's, which is the layer's own (`input_bytes`).
        """
        post_norms = self.read.family.post_norms
        mixing = LayerPart()
        feed = LayerPart()
        post_norm = self.norm_part(self.hidden_size) if post_norms else LayerPart()
        if kind.mixes and (mixer := read_mixer_shape(self.read)):
            mixing += self.mixer_part(mixer)
        width = feed_forward_weights(self.read, "dense").last // self.hidden_size
        if kind.attention:
            mixing += self.attention_part(kind)
        if kind.double:
            norm = self.norm_part(self.hidden_size)
            feed = (self.mlp_part(width) + norm) + (self.mlp_part(width) + norm) + self.experts_part()
            first_norm = self.norm_part(self.hidden_size, saves_input=False)
            return mixing + mixing + first_norm + norm, feed
        if self.streams:
            feed = self.experts_part() if kind.feeds == "experts" else self.mlp_part(width)
            norm = LayerPart() if self.streams.rank else self.norm_part(self.hidden_size)
            connections = [self.connection_part(self.streams, first=first) for first in (True, False)]
            return mixing + connections[0] + norm, feed + connections[1] + norm
        if kind.mixes or kind.attention:
            mixing += self.norm_part(self.hidden_size, saves_input=False) + post_norm
        if kind.feeds:
            feed = self.experts_part() if kind.feeds == "experts" else self.mlp_part(width)
            # The norm before the MLP reads the sum of the layer's input and what attention made: without attention it
            # is the input itself, and in compiled layers with norms after attention it is made again.
            made_again = post_norms and self.compiled_parts == "layers"
            saves_sum = bool(mixing.saved) and not made_again
            feed += self.norm_part(self.hidden_size, saves_input=saves_sum) + post_norm
        return mixing, feed

    def connection_part(self, streams: Streams, *, first: bool, behind: bool = False) -> LayerPart:
        """Return the part of a connection of several streams: of the `first` of a layer the streams are the layer's
        input. The one `behind` the last layer hands no result to streams. Streams are weighed in float32, which graphs
        make again from the streams.
        """
        trained = self.settings.trains_all
        count = streams.count
        compiled = self.compiled_parts == "layers" and not behind
        row = self.bytes_of_rows(streams.width)
        wide = self.bytes_of_rows(streams.width, WIDE)
        # its result, and the weights by which streams take it
        saved = self.bytes_of_rows(self.hidden_size + count) * (not behind)
        if not compiled:
            saved += wide * (1 + trained)
        work = 0.0 if compiled else 3 * wide
        if streams.rank:
            down = self.linears_part(streams.width, "input_mix_weight_down")
            up = self.linears_part(streams.rank, "input_mix_weight_up")
            saved += down.saved + up.saved + self.bytes_of_rows(streams.rank)
            saved += self.bytes_of_rows(count, WIDE) + self.bytes_of_rows(count) * (not behind)
            # What weighs the numbers. The streams themselves torch keeps in float32 alone, a layer's input too, with
            # those that were weighed, which are the linears' input.
            saved += row + row * ((not first) if compiled else (not down.saved) - first)
            return LayerPart(saved, work + 2 * row)
        matrix = self.bytes_of_rows(count * count, WIDE) * (not behind)
        saved += row * (not first)
        # roots and outputs, weights before and behind
        saved += self.bytes_of_rows(1 + streams.outputs + 3 * count, WIDE) + matrix
        # the matrix at each division, with what divides it, and in the compute type
        saved += streams.divisions * (matrix + self.bytes_of_rows(count, WIDE)) * (not behind)
        saved += self.bytes_of_rows(count * count) * (not behind)
        saved += streams.products * WIDE * (not compiled) * (self.settings.compute_bytes != WIDE)
        return LayerPart(saved, work)

    @property
    def _norms_by_kernels(self) -> bool:
        return self.compiled_parts == "layers" or self.settings.gpu

    def norm_part(self, width: float, groups: float = 1, *, saves_input: bool = True) -> LayerPart:
        """Return the part of an RMS norm of rows of `width` numbers, with a root for each of its `groups`; its output
        is not counted. Kernels and graphs save the input, which with `saves_input` false is counted elsewhere. torch's
        operations save rows in float32, and those divided by their root mean square for the gradient of a trained
        weight.
        """
        roots = self.bytes_of_rows(groups, WIDE)
        wide = self.bytes_of_rows(width, WIDE)
        if not self.read.family.norm_weights and self.compiled_parts == "none":
            # No kernel runs them. A layer's input is kept in float32 alone.
            return LayerPart(roots + wide - self.bytes_of_rows(width) * (not saves_input), 3 * wide)
        if self._norms_by_kernels:
            return LayerPart(roots + self.bytes_of_rows(width) * saves_input)
        saved_rows = 2 if self.settings.trains_all else 1
        return LayerPart(roots + wide * saved_rows, 3 * wide)

    def linears_part(self, width: float, *targets: str) -> LayerPart:
        """Return the part of linears that share one input of this width. `targets` are their names. The input is saved
        if they are trained or one has an adapter, and so are the narrow rows of each adapter.
        """
        adapters = sum(map(self.settings.has_adapter, targets))
        saves = bool(self.settings.trains_all or adapters)
        return LayerPart(self.bytes_of_rows(width) * saves + self.bytes_of_rows(self.settings.lora_rank * adapters))

    def attention_part(self, kind: LayerKind) -> LayerPart:
        """Return the part of attention: projections, norms of heads, attention's call, and in some families a gate.
        With more tensor-parallel ranks than key/value heads each rank has a copy of one head. A configuration does not
        name the gate: its width follows from the weights counted beyond the four projections.
        """
        read = self.read
        choice = read_key_choice(read, kind.attention)
        if choice and choice.form == "entries":
            return self._entry_attention_part(kind, choice)
        made = choice if choice and choice.is_made(self.load.longest) else None
        chosen = self._choice_part(made, kind) if made else LayerPart()
        if has_latent_attention(read):
            if made and self._gathers_latents(made):
                return chosen + self._gathered_latents_part()
            return chosen + self._latent_attention_part()
        tp = self.tp
        widths = attention_widths(read)
        query = widths.query / tp
        key = widths.key / min(tp, key_value_heads(read))
        heads = read.count("num_attention_heads") / tp
        kv_heads = max(1.0, key_value_heads(read) / tp)
        gate = max(0.0, attention_weights(read).all / self.hidden_size / tp - 2 * query - 2 * widths.key / tp)
        projected = self.linears_part(query, "o_proj")
        part = self.linears_part(self.hidden_size, "q_proj", "k_proj", "v_proj") + projected
        if read.family.head_norms:
            part += self.norm_part(query + key, heads + kv_heads)
        # The gate is kept as projected beside the queries, and as attention's output is multiplied.
        if gate:
            part += LayerPart(self.bytes_of_rows(2 * gate if self._norms_by_kernels else gate))
        call = self.attention_call_part(query, key, heads, kv_heads)
        # The projection saves attention's output, which attention saves too unless it was exchanged.
        is_shared = (
            projected.saved >= self.bytes_of_rows(query)
            and not gate
            and (self.lean or not self.load.exchanged_rows)
        )
        return part + chosen + replace(call, saved=call.saved - self.bytes_of_rows(query) * is_shared)

    def _choice_part(self, choice: KeyChoice, kind: LayerKind) -> LayerPart:
        """Choices are numbers in int32, saved by the layer that chooses, also where it runs again if the next layer
        takes them, with a checksum of each row under "selective". While rows choose, index keys or pools of the group
        are there as they arrive and in order, and scores of some rows: on GPUs summed over heads, in transformers'
        classes of all heads and twice. Bits mask tiles of rows and keys where keys are not gathered, and torch's
        operations hold four numbers for each score of attention."""
        load = self.load
        number = self.settings.compute_bytes
        indices = self.bytes_of_rows(choice.columns, 4)
        scored = load.longest / choice.scored
        keys = 2 * load.group_rows * choice.size / choice.scored * number
        queries = min(load.rows, INDEXED_ROWS) * choice.heads * choice.size * (number + WIDE)
        scores = WIDE * load.rows * scored * (1 if self.settings.gpu else choice.heads)
        choosing = keys + queries + min(SCORE_BYTES, scores) * (1 if self.settings.gpu else 2)
        others = load.ring_rows or load.exchanged_rows * load.members or load.gathered_rows or load.rows
        masked = self.load.rows * min(load.longest, others) / 8
        gathered = (
            self._gathers_latents(choice) if choice.latents else load.longest >= GATHERED_FROM * choice.row_pairs
        )
        attending = 0.0 if choice.form == "entries" or gathered else masked
        if not self.settings.gpu:
            heads = self.read.count("num_attention_heads") / self.tp
            attending = min(SCORE_BYTES, 4 * WIDE * heads * load.rows * load.longest)
        checksums = self.bytes_of_rows(1, INDEX)
        work = max(choosing * kind.chooses, attending)
        return LayerPart(indices * kind.chooses, work, checksums, lasting=indices * kind.hands_on)

    def _gathers_latents(self, choice: KeyChoice) -> bool:
        """Of layers that choose for this load: whether latents are gathered, which pays for long documents, and which a
        weight under an adapter does not allow (model/seams/chosen_keys/latents.py)."""
        if not choice.latents or self.settings.has_adapter("kv_b_proj"):
            return False
        widths = latent_widths(self.read)
        heads = self.read.count("num_attention_heads")
        keys = self.read.count("index_topk")
        shortest = int(2 * keys * (2 * widths.rank + widths.rotary) * heads / (widths.query + widths.value))
        return self.load.longest >= max(keys + 1, shortest)

    def _gathered_latents_part(self) -> LayerPart:
        """Queries as projected, and folded to latents; outputs as of latents, and unfolded. Keys are the narrow rows as
        normed, and their rotated part, or, if they have none, an empty view of the narrow rows as projected."""
        widths = latent_widths(self.read)
        heads = self.read.count("num_attention_heads") / self.tp
        mean = widths.rank + widths.rotary / 2
        part = self._latent_projections_part(widths)
        view = self.bytes_of_rows(widths.rank * (not widths.rotary))
        part += LayerPart(self.bytes_of_rows(widths.query / self.tp) + view, attention=view)
        call = self.attention_call_part(heads * mean, (widths.rank + widths.rotary) / 2, heads, 1)
        # the mean of queries and outputs is counted as either
        attention = call.attention - self.bytes_of_rows(heads * widths.rotary / 2)
        return part + self.linears_part(widths.value / self.tp, "o_proj") + replace(call, attention=attention)

    def _latent_projections_part(self, widths: LatentWidths) -> LayerPart:
        names = ("q_a_proj" if widths.query_rank else "q_proj", "kv_a_proj_with_mqa")
        part = self.linears_part(self.hidden_size, *names) + self.norm_part(widths.rank)
        if widths.query_rank:
            part += self.norm_part(widths.query_rank) + self.linears_part(widths.query_rank, "q_b_proj")
        return part

    def _entry_attention_part(self, kind: LayerKind, choice: KeyChoice) -> LayerPart:
        """Queries come from a narrow row, and each head's have a norm without a weight, which torch's operations take
        in float32 and as projected. Entries are sums over windows of rows, of two windows where they are chosen, by
        softmaxes in float32 for each channel; that and its cast are saved beside the summed rows. One tensor holds rows
        and entries. Outputs are rotated back, and projected by groups. In backward the window and the entries each
        have their gradients of queries; of entries keys and gradients of all members are there."""
        read = self.read
        number = self.settings.compute_bytes
        heads = read.count("num_attention_heads") / self.tp
        query, size = attention_widths(read)
        query /= self.tp
        rank = read.count("q_lora_rank")
        compiled = self.compiled_parts == "layers"
        part = self.linears_part(self.hidden_size, "q_a_proj", "kv_proj", "gate_proj")
        part += self.norm_part(rank) + self.linears_part(rank, "q_b_proj") + self.norm_part(size)
        wide = 0.0 if compiled else self.bytes_of_rows(query, WIDE) + self.bytes_of_rows(heads)
        part += LayerPart(self.bytes_of_rows(query) + self.bytes_of_rows(heads, WIDE) + wide, wide)
        width = (2 if choice.most else 1) * size
        windows = (
            self.bytes_of_rows(width, WIDE + number) + self.bytes_of_rows(2 * size) + self.bytes_of_rows(1, INDEX)
        )
        # The window before a run's first entry is laid out too.
        windows *= 1 + choice.stride * self.load.runs / self.load.rows * bool(choice.most)
        entry_norm = self.norm_part(size / choice.stride, 1 / choice.stride)
        part += LayerPart(windows, 2 * windows) + entry_norm
        keys = self.bytes_of_rows(size * (1 + 1 / choice.stride))
        lse = self.bytes_of_rows(heads, WIDE)
        out = self.bytes_of_rows(query)
        entries = self.load.group_rows / choice.stride * size
        work = 3 * out + self.bytes_of_rows(query, WIDE) + entries * (3 * number + 2 * WIDE)
        part += LayerPart(2 * out + keys + lse, work, out + lse)
        if choice.is_made(self.load.longest):
            part += self._choice_part(choice, kind)
        output = read.count("o_groups") * read.count("o_lora_rank")
        return part + self.linears_part(query, "o_a_proj") + self.linears_part(output, "o_b_proj")

    def _latent_attention_part(self) -> LayerPart:
        """Narrow rows and their norms are whole on every tensor-parallel rank. Heads' values lie beside the keys from
        which they are projected, which stay with them."""
        widths = latent_widths(self.read)
        heads = self.read.count("num_attention_heads") / self.tp
        mean = attention_widths(self.read).query / self.tp  # of queries, keys, values and output
        part = self._latent_projections_part(widths) + self.linears_part(widths.rank, "kv_b_proj")
        part += LayerPart(self.bytes_of_rows((widths.expanded - widths.value) / self.tp))
        projected = self.linears_part(widths.value / self.tp, "o_proj")
        call = self.attention_call_part(mean, mean, heads, heads)
        out = self.bytes_of_rows(widths.value / self.tp)
        is_shared = projected.saved >= out and (self.lean or not self.load.exchanged_rows)
        attention = call.attention - self.bytes_of_rows(mean) + out
        return part + projected + replace(call, saved=call.saved - out * is_shared, attention=attention)

    def head_exchange_slices(self) -> tuple[int, int, int]:
        """Return in how many slices queries are exchanged, in how many keys and values, and how often each key/value
        head is sent.
        """
        heads = self.read.count("num_attention_heads") // self.tp
        members = self.load.members
        kv_heads = max(1, key_value_heads(self.read) // self.tp)
        if members == 1 or heads % members or heads % kv_heads:
            return 1, 1, 1  # members cannot share the heads out
        split = head_split(heads, kv_heads, members)
        numbers = self.load.exchanged_rows * attention_widths(self.read).query // self.tp
        slices = count_exchange_slices(split, numbers, self.settings.compute_bytes)
        return slices, slices // split.slices_per_kv_head(slices), split.kv_copies

    def attention_call_part(self, query: float, key: float, heads: float, kv_heads: float) -> LayerPart:
        """Return the part of attention's call for local rows: queries, keys, values, output and log-sum-exp, which are
        exchanged where types exchange heads. `query` and `key` are widths on this rank. A ring holds four blocks of
        keys and values (two that travel and two that are read), a gather two; their gradients are summed in float32.
        Backward computes groups of heads one after another, and holds the buffers of one group. Of exchanged heads a
        message is held as it is sent and as it is received: of the output's gradient, of a `lean` layer's queries, keys
        and values too, and of their gradients, three slices at a time.
        """
        load = self.load
        number = self.settings.compute_bytes
        slices, key_slices, copies = self.head_exchange_slices()
        out = self.bytes_of_rows(query)
        keys = self.bytes_of_rows(2 * key)
        lse = self.bytes_of_rows(heads, WIDE)
        blocks = (4 * load.ring_rows + 2 * load.gathered_rows) * key * number
        blocks += 2 * key * WIDE * (2 * load.ring_rows + load.gathered_rows) + self.bytes_of_rows(query, WIDE)
        groups = count_head_groups(
            self.bytes_of_rows(query, WIDE), slices if load.exchanged_rows else max(1, int(kv_heads))
        )
        if not load.exchanged_rows:
            return LayerPart(2 * out + keys + lse, 2 * out + keys + blocks / groups, out + lse)
        local = LayerPart(2 * out + keys + lse, 0.0, out + lse)
        sent_keys = keys + 2 * (copies - 1) * load.exchanged_rows * key * number
        # gradients of copies of heads are summed in float32
        key_gradients = sent_keys * (WIDE / number if copies > 1 else 1)
        in_flight = 3 / (slices + 2) * out * (4 if self.lean else 3)
        in_flight += 3 / (key_slices + 2) * (sent_keys * self.lean + 2 * key_gradients)
        # Slices that share keys and values each have a sum of the gradients of these.
        sums_of_keys = sent_keys * WIDE / number * slices / key_slices**2
        work = out * (1 + self.lean) + key_gradients + in_flight + sums_of_keys
        work += blocks / (slices if groups > 1 else 1)
        if self.lean:
            return replace(local, work=work)
        return LayerPart(2 * out + sent_keys + lse, work, out + lse, 2 * out + sent_keys)

    @property
    def _mlp_has_gate(self) -> bool:
        return self.read.value("mlp_hidden_act") is None

    @property
    def _clamped_tensors(self) -> int:
        """What of a clamped gate is saved besides: both halves as clamped, and in another form of the gate a sum."""
        if not self.read.value("swiglu_limit"):
            return 0
        return 3 if self.read.value("swiglu_alpha") else 2

    def mlp_part(self, width: float) -> LayerPart:
        """Return the part of an MLP with its input, whose `width` tensor-parallel ranks split. In a compiled backward
        pass each adapter has a gradient of that width of its own, scaled, beside that of its linear
        (bench/records/frozen-H200.md).
        """
        inside = width / self.tp
        linears = ("gate_proj", "up_proj") if self._mlp_has_gate else ("up_proj",)
        part = self.linears_part(self.hidden_size, *linears) + self.linears_part(inside, "down_proj")
        # So many saved tensors are as wide as the MLP.
        tensors = 3 + self._clamped_tensors if self._mlp_has_gate else 1
        gradients = len(linears)
        if self.compiled_parts != "none":
            gradients += sum(map(self.settings.has_adapter, (*linears, "down_proj")))
            if self._mlp_has_gate:
                tensors = 2  # the gate's activation is made again
        part += LayerPart(tensors * self.bytes_of_rows(inside), gradients * self.bytes_of_rows(inside))
        weights = (len(linears) + 1) * self.hidden_size * inside
        return self._tiled_part(part, self.bytes_of_rows(self.hidden_size), weights)

    def _tiled_part(self, part: LayerPart, saved: float, weights: float) -> LayerPart:
        """Only `saved` bytes are kept, of all rows. Work is one tile's saved and work bytes, the output (or its
        gradient) of all rows, and sums over tiles of the gradients of `weights` trained weights, in float32 at
        least."""
        tile_rows = self.settings.mlp_tile_tokens
        if not 0 < tile_rows < self.load.rows:
            return part
        work = (part.saved + part.work) * tile_rows / self.load.rows + self.bytes_of_rows(self.hidden_size)
        return LayerPart(saved, work + weights * max(WIDE, self.settings.compute_bytes) * self.settings.trains_all)

    def experts_part(self) -> LayerPart:
        """Return the part of experts: a router, the experts that rows visit with their weighted sums, and the experts
        that every row visits. A router makes the weights and the number of each visited expert, and in most families
        the probabilities of all experts. The order of visits by expert, with its inverse, is kept even where the layer
        is recomputed; a tile makes its own again. A row is copied for each visit; with `ep` copies travel to other
        ranks and back.
        """
        read = self.read
        trained = self.settings.trains_all
        # One kernel does the gate on GPUs, and keeps nothing but what the first product made.
        in_steps = not self.settings.gpu
        own_gate = read.family.own_expert_gate
        weights = feed_forward_weights(read, "experts")
        latent = read.count("moe_latent_size")
        visits = experts_per_token(read)
        experts = read.experts_attribute_and_count()[1]
        width = read.count("moe_intermediate_size") or read.count("intermediate_size")
        probabilities = self.bytes_of_rows(0 if own_gate else experts + read.count("zero_expert_num"), WIDE)
        router = LayerPart(
            self.bytes_of_rows(self.hidden_size) * trained
            + self.bytes_of_rows(self.hidden_size, WIDE) * (trained and read.family.wide_router)
            + self.bytes_of_rows(visits)
            + self.bytes_of_rows(visits, INDEX)
            + probabilities
        )
        if identities := read.count("zero_expert_num"):
            return router + self._looped_experts_part(visits, experts, identities)
        copies = self.bytes_of_rows(visits * (latent or self.hidden_size))
        product = self.bytes_of_rows(visits * width)
        # results, what the first product made, and its gate; for trained weights the copies and the product too
        gates = (4 if own_gate else 1 + self._clamped_tensors) * self._mlp_has_gate * in_steps
        order = self.bytes_of_rows(2 * visits, INDEX)
        first_adapted = self.settings.adapts_experts("gate_up_proj") or self.settings.adapts_experts("up_proj")
        last_adapted = self.settings.adapts_experts("down_proj")
        saved = copies + (1 + self._mlp_has_gate + gates) * product + order
        saved += copies * (trained or first_adapted) + product * (trained or last_adapted)
        # rows of rank numbers, and the second matrices of adapters, which products of groups want in another order
        rank = self.settings.lora_rank
        saved += self.bytes_of_rows(visits * rank) * (first_adapted + last_adapted)
        outputs = (1 + self._mlp_has_gate) * width * first_adapted + (latent or self.hidden_size) * last_adapted
        saved += rank * outputs * experts / self.ep * self.settings.compute_bytes
        work = copies * (2 if self.ep > 1 else 1) + product * (3 if own_gate and in_steps else 1)
        visited = LayerPart(saved, work, lasting=order)
        part = router + self._tiled_part(visited, 0.0, (weights.of_experts + weights.unvisited) / self.ep)
        # The width of the experts that every row visits follows from the weights that are left. A vector of the hidden
        # size that is left then makes a weight for each row. Their input is the router's.
        rows_left = (weights.all - weights.of_experts) // self.hidden_size - experts - 2 * latent
        shared_width, vectors_left = divmod(rows_left, 2 + self._mlp_has_gate)
        if not shared_width:
            return part
        weighted = self.bytes_of_rows(1 + self.hidden_size) if vectors_left else 0.0
        counted_input = self.bytes_of_rows(self.hidden_size) * trained
        return part + (self.mlp_part(shared_width) + LayerPart(weighted - counted_input))

    def _looped_experts_part(self, visits: int, experts: int, identities: int) -> LayerPart:
        """Return the part of experts that a class runs one after another. Those that are the identity hand a copy of a
        row on. Each has a gradient as large as the weights of all."""
        trained = self.settings.trains_all
        width = self.read.count("moe_intermediate_size")
        weights = feed_forward_weights(self.read, "experts")
        computed = visits * experts / (experts + identities)
        # of a visit the result, before and after its weight; what the first product made, and its activated gate; for
        # trained weights the copy and the last product's input too
        saved = self.bytes_of_rows(visits * 2 * self.hidden_size + computed * 3 * width)
        saved += trained * self.bytes_of_rows(computed * (self.hidden_size + width))
        indices = self.bytes_of_rows(visits, 2 * INDEX + WIDE)
        gradients = trained * (weights.of_experts + weights.unvisited) * self.settings.compute_bytes
        return LayerPart(saved + indices, 2 * self.bytes_of_rows(self.hidden_size) + gradients)

    def mixer_part(self, mixer: MixerShape) -> LayerPart:
        """Return the part of a state-space layer, whose heads are divided over tensor-parallel ranks. A short
        convolution saves what the projection made, gated, convolved, gated again. Mamba 2 saves convolved rows, values,
        keys, queries, steps and states; a gated delta net unit keys and queries, values, rates and decays. Both have a
        gated norm, and four float32 tensors between a step as projected and its decay. Kernels of a delta rule also
        save a matrix of each chunk's pairs of rows; torch keeps the float32 input of unit vectors. In backward kernels
        hold the states before all chunks, and some tensors of rows.
        """
        settings = self.settings
        tp = self.tp
        inner = mixer.last / self.hidden_size / tp
        channels = mixer.channels / tp
        heads = mixer.heads / tp
        part = self.linears_part(
            self.hidden_size, *(("in_proj_qkvz", "in_proj_ba") if mixer.delta else ("in_proj",))
        )
        part += self.linears_part(inner, "out_proj")
        if not heads:
            return part + LayerPart(self.bytes_of_rows(5 * inner), self.bytes_of_rows(4 * inner))
        kernels = settings.gpu and settings.scan_kernels
        number = settings.compute_bytes if kernels else WIDE
        wide = self.bytes_of_rows(inner, WIDE)
        chunks = self.bytes_of_rows(mixer.state / tp / CHUNK)  # states before all chunks
        saved = (
            self.bytes_of_rows(channels + heads)
            + self.bytes_of_rows(channels, number)
            + self.bytes_of_rows(4 * heads, WIDE)
        )
        saved += self.load.runs * mixer.state / tp * WIDE
        scans = TORCH_SCANS[mixer.delta]
        if mixer.kind == "Kimi delta attention":
            # Decays of each channel and what they are made of, by a sigmoid, or by a softplus that has a case of its
            # own for large numbers; and the narrow rows of the two gates.
            made = 2 * wide if self.read.value("linear_lower_bound") else 3 * wide + self.bytes_of_rows(inner, 1)
            saved += wide + made + self.bytes_of_rows(2 * mixer.value_size)
            scans += BY_CHANNEL_SCANS
        if mixer.delta:
            # Keys are saved as the layer computes them, and as unit vectors.
            if settings.keys_are_repeated:
                saved += 2 * self.bytes_of_rows(2 * heads * mixer.key_size - (channels - inner), number)
            saved += self.bytes_of_rows(heads * CHUNK) if kernels else self.bytes_of_rows(channels - inner, WIDE)
            saved += self.bytes_of_rows(2 * inner) if settings.gpu else 3 * wide + 2 * self.bytes_of_rows(inner)
            work = 2 * chunks + 4 * self.bytes_of_rows(inner + mixer.heads * mixer.key_size / tp)
        else:
            saved += self.bytes_of_rows(channels)
            saved += self.bytes_of_rows(2 * inner) if settings.gpu else 4 * wide + 2 * self.bytes_of_rows(inner)
            work = 3 * chunks + 3 * wide
        return part + LayerPart(saved, work if kernels else scans * wide)
