"""The tapes of MLPs and of experts.

Experts (`model/experts/`) get a copy of a row for each of its visits, expert after expert. On GPUs a plain gate keeps
its input only; elsewhere, and of other gates, what torch's operations save.
"""

from collections.abc import Callable
from functools import partial

from longspan.plan.memory.layer_builder import WIDE, LayerBuilder
from longspan.plan.memory.tape import Work
from longspan.plan.shape.config_reader import ConfigReader
from longspan.plan.shape.layers import Weights, feed_forward_weights

_INDEX = 8  # bytes of an index (int64)
_OWN_GATES = {"gpt_oss": 4}  # families with a gate of their own, and how many tensors it saves besides its input


def dense_width(read: ConfigReader) -> int:
    """Return how many numbers a row has inside an MLP: its last product's weights over the hidden size."""
    return feed_forward_weights(read, "dense").last // read.count("hidden_size")


def has_gate(read: ConfigReader) -> bool:
    """Return whether MLPs and experts have three products, of which one is a gate.

    Families without a gate are those whose configuration has `mlp_hidden_act`.
    """
    return read.value("mlp_hidden_act") is None


def add_mlp(builder: LayerBuilder, prefix: str, x: str, width: float) -> str:
    """Add an MLP, on all rows at once or in tiles of rows; return its output.

    Tensor-parallel ranks split `width`, the numbers that a row has inside the MLP. `prefix` begins the names of the
    MLP's tensors on the tape.
    """
    if builder.tile_rows:
        return _add_tiles(builder, f"{prefix}mlp", (x,), lambda tile: _add_whole_mlp(tile, prefix, "x", width))
    return _add_whole_mlp(builder, prefix, x, width)


def _add_tiles(builder: LayerBuilder, name: str, rows: tuple[str, ...], add: Callable[[LayerBuilder], str]) -> str:
    """Add operations that run on one tile of rows after another (`model/activations/tiles.py`); return their result.

    `rows` are the tensors that are cut into tiles. `add` puts the operations on the tape of one tile, where the first
    of `rows` is named "x" and the others keep their names. `rows` are saved, and everything else is held of one tile at
    a time. A pass also holds as many bytes as `rows` have: forward for the result, backward for gradients of `rows`.
    Backward sums the gradients of weights over tiles, in float32 at least. Weights in float8 stay for all tiles of a
    pass, in backward twice: by rows and by columns.
    """
    tape, tile = builder.tape, builder.make_tile(rows)
    add(tile)
    inputs_of_tile = ("x", *rows[1:])  # not counted in the tile's peaks: they are parts of `rows`, which are saved
    peaks, weight_gradients = tile.tape.peaks(held=inputs_of_tile), tile.tape.weight_bytes()
    gradient_sums = weight_gradients / builder.number * max(WIDE, builder.number)
    row_bytes = sum(tape.sizes[x] for x in rows)
    saved = tape.add(f"{name}_rows", rows, 0.0, saves=rows)  # no bytes of its own: it stands for saving `rows`
    float8 = tile.float8_weights
    work = Work(row_bytes + peaks.forward + float8, row_bytes + peaks.backward + gradient_sums + 2 * float8)
    return tape.add(name, (saved,), builder.rows(builder.hidden), weights=weight_gradients, work=work)


def _add_whole_mlp(builder: LayerBuilder, prefix: str, x: str, width: float) -> str:
    """Add an MLP that runs on all rows at once, with a gate or without; return its output.

    Compiled layers do not save the activation of the gate, but make it again in backward.
    """
    tape, width, hidden = builder.tape, width / builder.tp, builder.hidden
    size = builder.rows(width)
    if not has_gate(builder.read):
        up = builder.add_linear(f"{prefix}up", "up_proj", x, hidden, width)
        product = tape.add(f"{prefix}act", (up,), size, saves=(up,))
    else:
        gate = builder.add_linear(f"{prefix}gate_of", "gate_proj", x, hidden, width)
        makes_again = builder.compile_kind != "none"
        act = gate if makes_again else tape.add(f"{prefix}act", (gate,), size, saves=(gate,))
        up = builder.add_linear(f"{prefix}up", "up_proj", x, hidden, width)
        # The compiled kernel that makes the gradients of gate and values also makes them scaled, for each adapter.
        scaled = size * makes_again * sum(map(builder.settings.has_adapter, ("gate_proj", "up_proj")))
        product = tape.add(f"{prefix}product", (act, up), size, saves=(act, up), work=Work(0.0, scaled))
    return builder.add_linear(f"{prefix}down", "down_proj", product, width, hidden)


def add_experts(builder: LayerBuilder, x: str) -> str:
    """Add a router, the experts that rows visit, their weighted sums, and the experts that every row visits.

    Returns the output. In tiles the router runs on all rows, and its weights are divided into tiles with the rows.
    """
    read = builder.read
    weights, visits = feed_forward_weights(read, "experts"), read.count("num_experts_per_tok", "num_experts_per_token")
    width = expert_width(read)
    weights_here = (weights.of_experts + weights.unvisited) / builder.ep
    share = _add_router(builder, x, visits)
    if builder.tile_rows:
        out = _add_tiles(
            builder, "experts", (x, share), lambda tile: _add_visits(tile, "x", share, visits, width, weights_here)
        )
    else:
        out = _add_visits(builder, x, share, visits, width, weights_here)
    return _add_shared_experts(builder, x, out, weights)


def _add_visits(builder: LayerBuilder, x: str, share: str, visits: int, width: int, weights_here: float) -> str:
    """Add the experts that rows visit and the weighted sums of what they make; return the name of the sums.

    Each row of `x` visits `visits` experts of this width; the tensor `share` has the weights of the sums, and the
    experts of this rank have `weights_here` parameters. A row is copied for each visit. With `ep` the copies travel to
    other ranks, are sorted by expert, and go back the same way, so that each direction has two tensors more.
    """
    read, tape, trained = builder.read, builder.tape, builder.settings.trains_all
    # The first product makes gate and values (2 parts), or values only (1), and the second reads one such part: so the
    # weights of an expert divide over the two products.
    parts = 1 + has_gate(read)
    gradient_bytes = weights_here * builder.number * trained
    float8_rows = partial(builder.rows, bytes_per_number=1)
    narrow = read.count("moe_latent_size") or builder.hidden
    size = builder.rows(visits * narrow)
    copies = tape.add("copies", (x,), size)
    if builder.ep > 1:
        copies = tape.add("sorted", (tape.add("arrived", (copies,), size),), size)
    inner = tape.add(
        "inner",
        (copies,),
        builder.rows(parts * visits * width),
        saves=(copies,) if trained else (),
        weights=gradient_bytes * parts / (parts + 1),
        work=builder.count_float8_work(
            float8_rows(visits * narrow), float8_rows(parts * visits * width), weights_here * parts / (parts + 1)
        ),
    )
    product = _add_gate(builder, inner, visits * width)
    results = tape.add(
        "results",
        (product,),
        size,
        saves=(product,) if trained else (),
        weights=gradient_bytes / (parts + 1),
        work=builder.count_float8_work(
            float8_rows(visits * width), float8_rows(visits * narrow), weights_here / (parts + 1)
        ),
    )
    if builder.ep > 1:
        results = tape.add("sent_back", (tape.add("unsorted", (results,), size),), size)
    return tape.add("mixed", (results, share), builder.rows(builder.hidden), saves=(results, share))


def expert_width(read: ConfigReader) -> int:
    """Return how many numbers a row has inside an expert."""
    return read.count("moe_intermediate_size") or read.count("intermediate_size")


def _add_router(builder: LayerBuilder, x: str, visits: int) -> str:
    """Add a router and return its output, the weights of a row's visits to experts.

    A router also makes the number of each visited expert, and in most families the probabilities of all experts. The
    order of visits by expert, with its inverse, is kept even where the layer is recomputed; a tile makes its own again.
    """
    tape, experts = builder.tape, builder.read.experts()[1]
    parts = {"visited": builder.rows(visits, _INDEX)}
    if not builder.tile_rows:
        parts |= {"order": builder.rows(2 * visits, _INDEX)}
        tape.lasting.add("order")
    if builder.read.family not in _OWN_GATES:  # a softmax over all experts, in float32
        parts |= {"probabilities": builder.rows(experts, WIDE)}
    saves = (x,) if builder.settings.trains_all else ()
    return tape.add("share", (x,), builder.rows(visits), saves=saves, also=parts)


def _add_gate(builder: LayerBuilder, inner: str, width: float) -> str:
    """Add the gate of experts, or without one their activation; return its product, of `width` numbers a row.

    `inner`, the experts' first product, has gate and values side by side. A gate saves `inner`, and on a CPU one tensor
    more. The gates of `_OWN_GATES` save several tensors more, and hold two gradients at a time in backward.
    """
    tape, size = builder.tape, builder.rows(width)
    if not has_gate(builder.read):
        return tape.add("expert_product", (inner,), size, saves=(inner,))
    saved_tensors = _OWN_GATES.get(builder.read.family, 0 if builder.settings.gpu else 1)
    parts = {f"expert_gate.{i}": size for i in range(saved_tensors)}
    work = Work(0.0, 2 * size * (saved_tensors > 1))
    return tape.add("expert_product", (inner,), size, saves=(inner,), also=parts, work=work)


def _add_shared_experts(builder: LayerBuilder, x: str, out: str, weights: Weights) -> str:
    """Add the experts that every row visits as one MLP, for some families with a weight for each row.

    Their width follows from the counted weights: of all, those left without the router, the visited experts, and the
    projections to and from a latent size. If a vector of the hidden size remains beyond the MLP's products, it makes
    the weight for each row. Returns the sum with `out`, the result of the visited experts; `out` itself where no
    expert is shared.
    """
    read, hidden = builder.read, builder.hidden
    narrow = read.count("moe_latent_size")
    shared = weights.all - weights.of_experts - hidden * read.experts()[1] - 2 * hidden * narrow
    products = 2 + has_gate(read)
    if not (width := shared // (products * hidden)):
        return out
    shared_out = add_mlp(builder, "shared_", x, width)
    size = builder.rows(hidden)
    if shared // hidden % products:  # a weight for each row
        weight = builder.tape.add("shared_weight", (x,), builder.rows(1), saves=("shared_weight",))
        shared_out = builder.tape.add("shared_part", (shared_out, weight), size, saves=(shared_out, weight))
    return builder.tape.add("experts_out", (out, shared_out), size, through=True)
