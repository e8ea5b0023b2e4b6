"""Builds the tape of a layer from parts that all layers have: products with adapters or without, norms, sums.

What norms keep is as they run: on GPUs by kernels that keep their input and a root a row, and so inside compiled
layers, else by torch's or transformers' operations in float32.
"""

from collections.abc import Sequence
from dataclasses import replace

from longspan.plan.cost.cost_changes import resolve_compiled_parts
from longspan.plan.memory.loads import SlotLoad
from longspan.plan.memory.settings import MemorySettings
from longspan.plan.memory.tape import Tape, Work
from longspan.plan.shape.config_reader import ConfigReader

WIDE = 4  # bytes of a number of float32


class LayerBuilder:
    """A tape while it is built: for the rows of a load, on one of `tp` ranks, and of `ep` that share experts.

    `lean` attention saves local rows under types that exchange heads, not the exchanged ones.

    >>> builder = LayerBuilder(read, MemorySettings(), SlotLoad(rows=1024))  # doctest: +SKIP
    >>> builder.add_norm("normed", "x", builder.hidden)  # doctest: +SKIP
    'normed'
    """

    def __init__(
        self,
        read: ConfigReader,
        settings: MemorySettings,
        load: SlotLoad,
        *,
        tp: int = 1,
        ep: int = 1,
        lean: bool = False,
    ) -> None:
        """Begin a tape with the layer's input "x", of which a rank has 1 / tp under sequence parallelism."""
        self.lean = lean
        self.in_mixer: bool = False  # what is added is of a state-space layer, which no graph holds
        self.in_tile: bool = False  # what is added is of one tile of several, for which weights in float8 stay
        self.float8_weights: float = 0.0  # numbers of the weights that are multiplied in float8
        self.read: ConfigReader = read
        self.settings: MemorySettings = settings
        self.load: SlotLoad = load
        self.tp: int = tp
        self.ep: int = ep
        self.number: int = settings.compute_bytes  # bytes of a number in the compute dtype
        self.hidden: int = read.count("hidden_size")
        # Numbers a row between layers. Sequence parallelism splits rows over tp, which counts here as narrower rows.
        self.residual: int = self.hidden // tp if settings.sequence_parallel else self.hidden
        self.tape: Tape = self._begin_tape({"x": self.rows(self.residual)})

    def rows(self, width: float, bytes_per_number: int = 0) -> float:
        """Return the bytes of all local rows of `width` numbers each (`bytes_per_number` 0: of the compute dtype)."""
        return self.load.rows * width * (bytes_per_number or self.number)

    @property
    def tile_rows(self) -> int:
        """The rows of a tile of MLPs and experts; 0 where they run whole."""
        tile_rows = self.settings.mlp_tile_rows
        return tile_rows if tile_rows < self.load.rows else 0

    def make_tile(self, rows: Sequence[str]) -> "LayerBuilder":
        """Make the builder of one tile of the tensors `rows`; on its tape the first is "x", others keep their names."""
        share = self.tile_rows / self.load.rows
        settings = replace(self.settings, mlp_tile_rows=0)  # a tile is not divided again
        load = replace(self.load, rows=self.tile_rows)
        tile = LayerBuilder(self.read, settings, load, tp=self.tp, ep=self.ep, lean=self.lean)
        tile.in_tile = True
        names = {"x": rows[0]} | {name: name for name in rows[1:]}
        tile.tape = self._begin_tape({name: self.tape.sizes[source] * share for name, source in names.items()})
        return tile

    def _begin_tape(self, sizes: dict[str, float]) -> Tape:
        """Begin a tape with inputs of these bytes; in a compiled layer one kernel adds all gradients of a tensor."""
        return Tape(sizes, added_in_place=self.compile_kind != "layers")

    @property
    def runs_kernels(self) -> bool:
        """Whether norms and gates run as one kernel each."""
        return self.lies_in_graph or (self.settings.gpu and self.settings.fused_norms)

    @property
    def compile_kind(self) -> str:
        """Return what of layers is compiled, "auto" resolved as for a run."""
        if self.settings.compiled == "auto" and not self.settings.gpu:
            return "none"
        return resolve_compiled_parts(self.settings.compiled, hidden=self.hidden, tp=self.tp)

    @property
    def lies_in_graph(self) -> bool:
        """Whether what is added lies in a compiled half of a layer, of which elementwise operations are one kernel."""
        return self.compile_kind == "layers" and not self.in_mixer

    @property
    def scans_by_kernels(self) -> bool:
        """Whether state-space layers scan by kernels of GPUs, in the compute dtype."""
        return self.settings.gpu and self.settings.scan_kernels

    def add_sum(self, name: str, x: str, out: str) -> str:
        """Add a residual's sum; return its output."""
        return self.tape.add(name, (x, out), self.rows(self.residual), through=True)

    def add_norm(self, name: str, x: str, width: float, groups: float = 1, *, made_again: bool = False) -> str:
        """Add an RMS norm of rows of `width` numbers, in `groups` equal parts with a root each; return its output.

        `made_again` says that a compiled layer can make the input again from what else is kept, and so does not save
        it. Without kernels rows become float32 (`wide`), are divided by their root mean square (`even`), and multiplied
        by the weight. transformers' modules, except Gemma's, round to the compute dtype before that product; torch's
        own norm (`fused_norms`) does not.
        """
        tape, roots = self.tape, {f"{name}.root": self.rows(groups, WIDE)}
        if self.runs_kernels:
            saves = () if made_again and self.lies_in_graph else (x,)
            return tape.add(name, (x,), self.rows(width), saves=saves, also=roots)
        rounds = not self.settings.fused_norms and not self.read.family.startswith("gemma")
        wide = tape.add(f"{name}.wide", (x,), self.rows(width, WIDE))
        even_size = self.rows(width, self.number if rounds else WIDE)
        even = tape.add(
            f"{name}.even",
            (wide,),
            even_size,
            saves=(wide,),
            also=roots,
            # Forward the squares of the rows are there too, backward two more gradients as wide.
            work=Work(self.rows(width, WIDE), 2 * self.rows(width, WIDE)),
        )
        saves = (even,) if self.settings.trains_all else ()  # for the gradient of its weight
        return tape.add(name, (even,), self.rows(width), saves=saves, work=Work(0.0, even_size))

    def add_gated_norm(self, name: str, x: str, gate: str, width: float, groups: float, *, gate_first: bool) -> str:
        """Add a norm of `x` with a gate before it (Mamba 2) or after it (gated delta nets); return its output.

        A kernel keeps its two inputs and a root for each of the `groups` of a row. torch's operations keep what they
        make in float32: rows, gate and the gate's SiLU, with the gate first their product too. Their backward
        passes hold two more such tensors.
        """
        tape, roots = self.tape, {f"{name}.root": self.rows(groups, WIDE)}
        if self.runs_kernels:
            return tape.add(name, (x, gate), self.rows(width), saves=(x, gate), also=roots)
        wide, size = self.rows(width, WIDE), self.rows(width)
        if gate_first:
            parts = {f"{name}.{name_of_part}": wide for name_of_part in ("x", "gate", "silu", "product")}
            even = tape.add(f"{name}.even", (x, gate), size, also=parts | roots, work=Work(0.0, 2 * wide))
            return tape.add(name, (even,), size, saves=(even,))
        parts = {f"{name}.{name_of_part}": wide for name_of_part in ("x", "gate", "silu")} | {f"{name}.even": size}
        return tape.add(name, (x, gate), size, also=parts | {f"{name}.scaled": size} | roots, work=Work(0.0, 2 * wide))

    def count_float8_work(self, rows_in: float, rows_out: float, weights: float) -> Work:
        """Return what a product holds in float8 while it runs, and add its weights to `float8_weights`.

        It holds `rows_in` bytes of rows forward, `rows_out` bytes of gradients backward, and `weights` bytes. Inside a
        tile the weights are not part of the work: they stay for all tiles, and the caller counts `float8_weights` once.
        """
        if not self.settings.float8:
            return Work()
        self.float8_weights += weights
        weights = 0.0 if self.in_tile else weights
        return Work(rows_in + weights, rows_out + weights)

    def add_linear(self, name: str, target: str, x: str, width_in: float, width_out: float) -> str:
        """Add a product of rows with a weight, and the adapter of the linear `target` if it has one; return the output.

        A trained weight saves the input for its gradient, a frozen one saves nothing. An adapter multiplies twice, down
        to its rank (`a`) and up (`b`); the result is scaled and added to the product of the frozen weight (`base`).
        """
        settings, size, weights = self.settings, self.rows(width_out), width_in * width_out
        work = self.count_float8_work(self.rows(width_in, 1), self.rows(width_out, 1), weights)
        if settings.trains_all:
            return self.tape.add(name, (x,), size, saves=(x,), weights=weights * self.number, work=work)
        if not settings.has_adapter(target):
            return self.tape.add(name, (x,), size, work=work)
        rank, rank_bytes = settings.lora_rank, settings.lora_rank * self.number
        base = self.tape.add(f"{name}.base", (x,), size, work=work)
        narrow = self.tape.add(f"{name}.a", (x,), self.rows(rank), saves=(x,), weights=rank_bytes * width_in)
        wide = self.tape.add(f"{name}.b", (narrow,), size, saves=(narrow,), weights=rank_bytes * width_out)
        scaled = self.tape.add(f"{name}.scaled", (wide,), size)
        return self.tape.add(name, (base, scaled), size, through=True)
