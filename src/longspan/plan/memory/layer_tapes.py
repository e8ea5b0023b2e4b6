"""The tapes of decoder layers: which tensors a layer makes of a slot's rows, by its kind.

Sizes follow from a configuration; order and what is saved follow transformers' code as `prepare` runs it.
tests/plan/memory/ counts the same on real models. MLPs and experts are in `feed_tapes.py`, state-space layers in
`mixer_tapes.py`.
"""

from dataclasses import dataclass

from longspan.plan.memory.bytes import count_head_groups
from longspan.plan.memory.feed_tapes import add_experts, add_mlp, dense_width
from longspan.plan.memory.layer_builder import WIDE, LayerBuilder
from longspan.plan.memory.loads import SlotLoad
from longspan.plan.memory.mixer_tapes import add_mixer
from longspan.plan.memory.settings import MemorySettings
from longspan.plan.memory.tape import Tape, Work
from longspan.plan.shape.config_reader import ConfigReader
from longspan.plan.shape.layers import LayerKind, attention_weights, attention_widths, key_value_heads
from longspan.plan.shape.mixer_shape import read_mixer_shape

HEAD_NORMS = ("qwen3", "gemma3", "olmo2", "olmo3")  # families with a norm of each query and key
POST_NORMS = ("gemma2", "gemma3", "glm4")  # families with a norm after attention and after the MLP too
KEPT_OF_ATTENTION = ("out", "lse")  # tensors that a layer under "selective" keeps besides its input
EXCHANGED = ("q_moved", "k_moved", "v_moved", "out_moved")  # and further ones under "exchanged"
_ROTARY_WORK = 3  # tensors as large as the queries that are alive while rotary angles are applied


@dataclass(frozen=True)
class LayerTapes:
    """Makes the tape of a layer from its kind and a slot's rows.

    >>> tapes = LayerTapes(ConfigReader.of(config), MemorySettings())  # doctest: +SKIP
    >>> tapes.make_tape(kind, SlotLoad(rows=16384)).bytes_saved()  # doctest: +SKIP
    """

    read: ConfigReader
    settings: MemorySettings
    tp: int = 1
    ep: int = 1

    def make_tape(self, kind: LayerKind, load: SlotLoad, *, lean: bool = False) -> Tape:
        """Make the tape of a layer's operations on a slot's rows: attention or a mixer, then an MLP or experts.

        `lean` attention saves local rows, which backward exchanges again. A kind without a mixing part, or without an
        MLP, has one sum only.
        """
        builder = LayerBuilder(self.read, self.settings, load, tp=self.tp, ep=self.ep, lean=lean)
        x = "x"
        if kind.attention or kind.mixes:
            x = builder.add_sum("h", x, _add_post_norm(builder, "n1_post", self._add_mixing(builder, kind)))
        if kind.feeds:
            # Compiled, the sum is made again from the layer's input and the input of the norm behind attention.
            made_again = x == "h" and _has_post_norms(self.read)
            normed = builder.add_norm("n2", x, builder.hidden, made_again=made_again)
            experts = kind.feeds == "experts"
            out = add_experts(builder, normed) if experts else add_mlp(builder, "", normed, dense_width(self.read))
            builder.add_sum("y", x, _add_post_norm(builder, "n2_post", out))
        return builder.tape

    def _add_mixing(self, builder: LayerBuilder, kind: LayerKind) -> str:
        """Add a norm, and on its rows attention, a state-space layer, or the sum of these two; return the output."""
        normed, parts = builder.add_norm("n1", "x", builder.hidden), list[str]()
        if kind.mixes:
            mixer = read_mixer_shape(self.read)
            assert mixer is not None  # ModelShape refuses a configuration with state-space layers that are not priced
            builder.in_mixer = True
            parts.append(add_mixer(builder, normed, mixer))
            builder.in_mixer = False
        if kind.attention:
            parts.append(_add_attention(builder, normed))
        if len(parts) == 1:
            return parts[0]
        return builder.tape.add("both", parts, builder.rows(builder.hidden), through=True)


def _has_post_norms(read: ConfigReader) -> bool:
    """Return whether the family has a norm after attention and after the MLP too."""
    return read.family.startswith(POST_NORMS)


def _add_post_norm(builder: LayerBuilder, name: str, out: str) -> str:
    """Add the norm behind attention or an MLP if the family has one; return its output, else `out`."""
    return builder.add_norm(name, out, builder.hidden) if _has_post_norms(builder.read) else out


def _add_attention(builder: LayerBuilder, x: str) -> str:
    """Add projections, norms of heads, rotary angles, attention, and for some families a gate; return the output.

    `query`, `key` and `gate` are widths of this rank's rows. With more tensor-parallel ranks than key/value heads each
    rank has a copy of one head. A configuration does not name the gate: its width follows from the weights counted
    beyond the four projections. The gate comes out of the same product as the queries.
    """
    read, tape, tp, hidden = builder.read, builder.tape, builder.tp, builder.hidden
    widths, all_kv_heads = attention_widths(read), key_value_heads(read)
    query, key = widths.query / tp, widths.key / min(tp, all_kv_heads)
    heads, kv_heads = read.count("num_attention_heads") / tp, max(1.0, all_kv_heads / tp)
    gate = max(0.0, attention_weights(read).all / hidden / tp - 2 * query - 2 * widths.key / tp)
    q = builder.add_linear("q", "q_proj", x, hidden, query + gate)
    k = builder.add_linear("k", "k_proj", x, hidden, key)
    v = builder.add_linear("v", "v_proj", x, hidden, key)
    queries_and_gate = q
    if read.family.startswith(HEAD_NORMS):
        q = builder.add_norm("q_norm", q, query, heads)
        k = builder.add_norm("k_norm", k, key, kv_heads)
    rotary_bytes = 0.0 if builder.lies_in_graph else _ROTARY_WORK * builder.rows(query)  # in a graph: one kernel
    q = tape.add("q_rotated", (q,), builder.rows(query), work=Work(rotary_bytes, rotary_bytes))
    k = tape.add("k_rotated", (k,), builder.rows(key))
    out = _add_attention_call(builder, (q, k, v), query, key, (heads, kv_heads))
    if gate:
        factor = tape.add("gate", (queries_and_gate,), builder.rows(gate), saves=("gate",))
        out = tape.add("gated", (out, factor), builder.rows(query), saves=(out, factor))
    return builder.add_linear("o", "o_proj", out, query, hidden)


def _add_attention_call(
    builder: LayerBuilder, qkv: tuple[str, str, str], query: float, key: float, counts: tuple[float, float]
) -> str:
    """Add attention of local rows, between two exchanges where types exchange heads; return its output.

    `query` and `key` are the widths of this rank's rows, `counts` its numbers of query heads and key/value heads. A
    ring holds four blocks of keys and values (two that travel and two that are read), a gather two; their gradients are
    summed in float32. Backward computes groups of heads one after another, so that it holds the buffers of one group.
    A `lean` layer saves tensors from before the exchange, and backward exchanges them again: the exchanged tensors are
    then part of the operation's work. Any other layer saves the exchanged tensors.
    """
    heads, kv_heads = counts
    load, tape, number, (q, k, v) = builder.load, builder.tape, builder.number, qkv
    blocks = (4 * load.ring_rows + 2 * load.gathered_rows) * key * number
    gradient_sums = 2 * key * WIDE * (2 * load.ring_rows + load.gathered_rows)
    wide_queries = builder.rows(query, WIDE)  # gradients of queries, or a ring's outputs while they are merged
    # Exchanges move heads in slices, which are then the groups of backward.
    most_groups = load.exchange_slices if load.exchanged_rows else max(1, int(kv_heads))
    groups = count_head_groups(wide_queries, most_groups)
    if load.exchanged_rows and groups > 1:
        groups = load.exchange_slices
    work = Work(blocks + wide_queries * bool(load.ring_rows), (blocks + gradient_sums + wide_queries) / groups)
    lse, size = {"lse": builder.rows(heads, WIDE)}, builder.rows(query)
    # Bytes of keys, or of values, after the exchange, with the copies of heads that it makes.
    keys = (load.rows - load.exchanged_rows + load.exchanged_key_rows) * key * number
    if load.exchanged_rows:
        work = Work(work.forward, _exchange_work(builder, query, key, groups, work.backward))
    if not load.exchanged_rows or builder.lean:
        moved_bytes = 2 * (size + keys) * bool(load.exchanged_rows)  # q, k, v, and the output
        work = Work(work.forward + moved_bytes, work.backward)
        return tape.add("out", (q, k, v), size, saves=(q, k, v, "out"), also=lse, work=work)
    q, k, v = (
        tape.add(f"{name}_moved", (x,), size if name == "q" else keys) for name, x in zip("qkv", (q, k, v), strict=True)
    )
    out_moved = tape.add("out_moved", (q, k, v), size, saves=(q, k, v, "out_moved"), also=lse, work=work)
    return tape.add("out", (out_moved,), size)


def _exchange_work(builder: LayerBuilder, query: float, key: float, groups: int, kernel_bytes: float) -> float:
    """Return the bytes of backward of attention that exchanges heads, besides the gradients of the moved q, k and v.

    `query` and `key` are widths of this rank's rows; `kernel_bytes` are the float32 gradients of queries, and what a
    ring holds, of one of the `groups`. What arrives of a slice is the output's gradient, in a `lean` layer q, k and v
    too. A message is held as it is sent and as it is received. The tape counts the gradients of moved q, k and v
    (`counted`), which are those of the local ones here: they are made when the first slice has come back.

    Groups that are computed one after another are slices: beside one slice's arrivals, sums and gradients lie the
    arrivals of the next slice and the gradients of the slice before. Of two slices none has both. Otherwise all slices
    are in flight at once: most is held when the gradients of the first slice leave, or those of the last.
    """
    load, number = builder.load, builder.number
    slices, kv_slices = load.exchange_slices, load.exchange_kv_slices
    queries, keys = load.exchanged_rows * query * number, 2 * load.exchanged_key_rows * key * number
    has_copies = load.exchanged_key_rows > load.exchanged_rows
    wide_keys = keys * WIDE / number
    key_gradients = wide_keys if has_copies else keys  # those of copies are still to be summed
    counted, gradients = queries + keys, queries + key_gradients
    slice_gradients = queries / slices + key_gradients / kv_slices
    # Kernels of GPUs take the products of the output with its gradient in place of the output.
    query_arrivals = queries * (1 + builder.lean * (1 if builder.settings.gpu else 2))
    arrivals, slice_arrivals = query_arrivals + keys * builder.lean, query_arrivals / slices
    slice_arrivals += keys * builder.lean / kv_slices
    copies = keys * (has_copies and builder.lean)
    if load.ring_rows and groups == 1:
        return copies + max(arrivals + kernel_bytes, 3 * gradients - counted)
    # Slices that share keys and values each have a sum of the gradients of these.
    of_slice = slice_arrivals + slice_gradients + wide_keys * slices / kv_slices**2
    if groups == 1:
        of_slice += kernel_bytes / slices
        first = of_slice + 2 * (arrivals - slice_arrivals) + 2 * slice_gradients - counted
        last = of_slice + 2 * gradients - counted
        return copies + max(first, last, 3 * gradients - counted, arrivals + kernel_bytes)
    of_slice += kernel_bytes + 2 * slice_gradients
    last, others = of_slice + gradients - counted, of_slice + 2 * slice_arrivals - counted
    return copies + max(last, others + gradients * (slices > 2), (arrivals + kernel_bytes) * builder.lean)
