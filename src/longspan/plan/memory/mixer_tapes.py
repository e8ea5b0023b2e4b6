"""The tapes of state-space layers: projections, a convolution, the scan of rows with its states, a gated norm.

Scans take rows in the compute dtype where kernels of GPUs run them, else in float32 (`ssm/state_pass.py`). States of
runs of rows are float32; kernels also make those of every chunk, forward and once more backward.
"""

from longspan.plan.memory.layer_builder import WIDE, LayerBuilder
from longspan.plan.memory.tape import Work
from longspan.plan.shape.mixer_shape import CHUNK, MixerShape

# Tensors of all rows and values in float32 that torch's operations hold in a scan, forward and backward, without a
# delta rule and with one (counted on a CPU, and of peaks in bench/records/memory-measured-H200.json).
_TORCH_SCANS = {False: (8, 18), True: (10, 26)}


def add_mixer(builder: LayerBuilder, x: str, mixer: MixerShape) -> str:
    """Add a state-space layer, whose heads are divided over tensor-parallel ranks; return its output."""
    if mixer.kind == "short convolution":
        return _add_short_convolution(builder, x, mixer)
    return _add_delta_net(builder, x, mixer) if mixer.delta else _add_mamba(builder, x, mixer)


def _add_short_convolution(builder: LayerBuilder, x: str, mixer: MixerShape) -> str:
    """Add a projection to rows and two gates, a gate, the convolution, the other gate, and a projection back."""
    tape, inner = builder.tape, mixer.channels / builder.tp
    size = builder.rows(inner)
    projected = builder.add_linear("mixer_in", "in_proj", x, builder.hidden, 3 * inner)
    gated = tape.add("mixer_gated", (projected,), size, saves=(projected,))
    convolved = tape.add("mixer_convolved", (gated,), size, saves=(gated,))
    out = tape.add("mixer_out", (convolved, projected), size, saves=(convolved, projected))
    return builder.add_linear("mixer_back", "out_proj", out, inner, builder.hidden)


def _add_mamba(builder: LayerBuilder, x: str, mixer: MixerShape) -> str:
    """Add a Mamba 2 mixer and return its output: projection, convolution, scan with its states, gated norm, projection.

    One projection gives the gate, the `channels` that are convolved (values, keys and queries) and a step for each
    head, all parts of one tensor. Autograd saves four float32 tensors between a step as projected and its decay.
    """
    tape, tp = builder.tape, builder.tp
    inner, channels, heads = mixer.last / builder.hidden / tp, mixer.channels / tp, mixer.heads / tp
    projected = builder.add_linear("mixer_in", "in_proj", x, builder.hidden, inner + channels + heads)
    steps = {f"mixer_step.{i}": builder.rows(heads, WIDE) for i in range(4)}
    step = tape.add("mixer_steps", (projected,), builder.rows(heads, WIDE), also=steps)
    convolved = tape.add("mixer_convolved", (projected,), builder.rows(channels), saves=(projected,))
    key_width = (channels - inner) / 2  # channels are values (`inner`), keys and queries
    values = tape.add("mixer_values", (convolved, step), _scan_row_bytes(builder, inner), saves=(convolved,))
    keys = {name: _scan_row_bytes(builder, key_width) for name in ("mixer_keys", "mixer_queries")}
    out = tape.add(
        "mixer_scanned",
        (values, convolved),
        builder.rows(inner),
        saves=(values,),
        also=keys | {"mixer_states": _run_state_bytes(builder, mixer)},
        work=_scan_work(builder, mixer, inner),
    )
    normed = builder.add_gated_norm("mixer_normed", out, projected, inner, 1, gate_first=True)
    return builder.add_linear("mixer_back", "out_proj", normed, inner, builder.hidden)


def _add_delta_net(builder: LayerBuilder, x: str, mixer: MixerShape) -> str:
    """Add projections, a convolution, unit vectors, the scan of a gated delta net, a gated norm, and a projection back.

    One projection gives the gate and the `channels` that are convolved (queries, keys and values), another two rates
    for each head: how much a row decays the state, and how much of its values it writes (beta). Autograd saves beta in
    both dtypes, and three float32 tensors between a projected rate and its decay. Kernels of the scan also save a
    matrix of each chunk's pairs of rows.
    """
    tape, tp = builder.tape, builder.tp
    values, heads = mixer.heads * mixer.value_size / tp, mixer.heads / tp
    channels = mixer.channels / tp
    keys = (channels - values) / 2
    projected = builder.add_linear("mixer_in", "in_proj_qkvz", x, builder.hidden, channels + values)
    rates = builder.add_linear("mixer_rates", "in_proj_ba", x, builder.hidden, 2 * heads)
    # Queries, keys, values and gates lie head by head in the projection, so that both parts are copies.
    mixed = tape.add("mixer_mixed", (projected,), builder.rows(channels))
    gate = tape.add("mixer_gate", (projected,), builder.rows(values))
    convolved = tape.add("mixer_convolved", (mixed,), builder.rows(channels), saves=(mixed,))
    decays = {"mixer_beta": builder.rows(heads), "mixer_wide_beta": builder.rows(heads, WIDE)}
    decays |= {f"mixer_decay.{i}": builder.rows(heads, WIDE) for i in range(3)}
    decay = tape.add("mixer_decays", (rates,), builder.rows(heads, WIDE), also=decays)
    units = _add_unit_vectors(builder, convolved, keys)
    scan_values = tape.add("mixer_wide_values", (convolved,), _scan_row_bytes(builder, values))
    chunks = {"mixer_chunks": builder.rows(heads * CHUNK)} if builder.scans_by_kernels else {}
    out = tape.add(
        "mixer_scanned",
        (*units, scan_values, decay),
        builder.rows(values),
        saves=(*units, scan_values),
        also=chunks | {"mixer_states": _run_state_bytes(builder, mixer)},
        work=_scan_work(builder, mixer, values),
    )
    normed = builder.add_gated_norm("mixer_normed", out, gate, values, heads, gate_first=False)
    return builder.add_linear("mixer_back", "out_proj", normed, values, builder.hidden)


def _add_unit_vectors(builder: LayerBuilder, convolved: str, keys: float) -> tuple[str, str]:
    """Add queries and keys of length 1, of `keys` numbers a row each; return their names.

    Kernels of scans keep them with one root for each head, taken to have 128 numbers. On CPUs torch keeps the float32
    input as well (`wide`).
    """
    tape, size, units = builder.tape, _scan_row_bytes(builder, keys), list[str]()
    for name in ("queries", "keys"):
        parts = {f"mixer_{name}.root": builder.rows(keys / 128 if builder.scans_by_kernels else 0, WIDE)}
        if not builder.settings.gpu:
            parts |= {f"mixer_{name}.wide": size}
        units.append(tape.add(f"mixer_{name}", (convolved,), size, saves=(f"mixer_{name}",), also=parts))
    return units[0], units[1]


def _scan_row_bytes(builder: LayerBuilder, width: float) -> float:
    """Return the bytes of all local rows of `width` numbers in a scan: the compute dtype for kernels, else float32."""
    return builder.rows(width, builder.number if builder.scans_by_kernels else WIDE)


def _run_state_bytes(builder: LayerBuilder, mixer: MixerShape) -> float:
    """Return the bytes of the float32 states with which the runs of documents on a slot begin."""
    return builder.load.runs * mixer.state / builder.tp * WIDE


def _scan_work(builder: LayerBuilder, mixer: MixerShape, values: float) -> Work:
    """Return what a scan holds while it runs, forward and backward, for rows of `values` numbers.

    Kernels hold the states before all chunks and some tensors of rows: of Mamba values in float32, of a delta rule
    values and keys in the compute dtype. Their numbers were counted in the kernels; those of
    torch's operations were measured (`_TORCH_SCANS`).
    """
    wide = builder.rows(values, WIDE)
    if not builder.scans_by_kernels:
        forward, backward = _TORCH_SCANS[mixer.delta]
        return Work(forward * wide, backward * wide)
    states = builder.rows(mixer.state / builder.tp / CHUNK)
    if not mixer.delta:
        return Work(states + 2 * wide, 3 * states + 3 * wide)
    rows = builder.rows(values + mixer.heads * mixer.key_size / builder.tp)
    return Work(states + 2 * rows, 2 * states + 4 * rows)
