"""The table of bytes that a decoder layer holds, by its parts: attention, state-space mixers, MLPs and experts.

A part has numbers a row that autograd saves, and numbers that its backward pass makes besides. Sizes follow from a
configuration; tests/plan/memory counts the same on real models by what their operators save.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from longspan.plan.cost.cost_changes import resolve_compiled_parts
from longspan.plan.memory.bytes import count_head_groups
from longspan.plan.memory.loads import SlotLoad
from longspan.plan.memory.settings import MemorySettings
from longspan.plan.shape.config_reader import ConfigReader
from longspan.plan.shape.layers import (
    LayerKind,
    attention_weights,
    attention_widths,
    feed_forward_weights,
    key_value_heads,
)
from longspan.plan.shape.mixer_shape import CHUNK, MixerShape, read_mixer_shape

HEAD_NORMS = ("qwen3", "gemma3", "olmo2", "olmo3")  # families with a norm of each query and key
POST_NORMS = ("gemma2", "gemma3", "glm4")  # families with a norm after attention and after the MLP too
OWN_GATES = {"gpt_oss": 4}  # families with a gate of experts of their own, and how many tensors it saves besides
WIDE, INDEX = 4, 8  # bytes of a number of float32, and of int64
# Float32 tensors of values that torch's operations hold in a scan, without a delta rule and with one (counted on a CPU,
# and of peaks in bench/records/memory-measured-H200.json).
TORCH_SCANS = {False: 18, True: 26}


@dataclass(frozen=True)
class Part:
    """Bytes of a part of a layer for all rows of a slot.

    Backward needs what is `saved`, of which `attention` (output and log-sum-exp) stays under "selective", `exchanged`
    too under "exchanged", and `lasting` wherever the layer runs again. The backward pass holds `work` besides.
    """

    saved: float = 0.0
    work: float = 0.0
    attention: float = 0.0
    exchanged: float = 0.0
    lasting: float = 0.0

    def __add__(self, other: "Part") -> "Part":
        """Add what two parts save; they run one after another, so that the larger work counts."""
        attention, exchanged = self.attention + other.attention, self.exchanged + other.exchanged
        work = max(self.work, other.work)
        return Part(self.saved + other.saved, work, attention, exchanged, self.lasting + other.lasting)


@dataclass(frozen=True)
class LayerTable:
    """The bytes of layers of a configuration for one load, on one of `tp` ranks, and of `ep` that share experts.

    >>> LayerTable(ConfigReader.of(config), MemorySettings(), SlotLoad(rows=16384)).mlp(12288).saved  # doctest: +SKIP

    Of `lean` attention, under "selective", local rows are saved, which backward exchanges again.
    """

    read: ConfigReader
    settings: MemorySettings
    load: SlotLoad
    tp: int = 1
    ep: int = 1
    lean: bool = False

    def rows(self, width: float, number: float = 0) -> float:
        """Return the bytes of all local rows of `width` numbers each (`number` 0: of the compute dtype)."""
        return self.load.rows * width * (number or self.settings.compute_bytes)

    @cached_property
    def hidden(self) -> int:
        """The width of a row between layers."""
        return self.read.count("hidden_size")

    @property
    def input(self) -> float:
        """Bytes of a layer's input, of which a rank has 1 / tp under sequence parallelism."""
        return self.rows(self.hidden // self.tp if self.settings.sequence_parallel else self.hidden)

    @cached_property
    def compile_kind(self) -> str:
        """What of layers is compiled, "auto" resolved as for a run."""
        if self.settings.compiled == "auto" and not self.settings.gpu:
            return "none"
        return resolve_compiled_parts(self.settings.compiled, hidden=self.hidden, tp=self.tp)

    @property
    def scan_number(self) -> int:
        """Bytes of a number of rows in a scan: the compute dtype for kernels of GPUs, else float32."""
        kernels = self.settings.gpu and self.settings.scan_kernels
        return self.settings.compute_bytes if kernels else WIDE

    def split(self, kind: LayerKind) -> tuple[Part, Part]:
        """Return the part of a layer that mixes rows, and its MLP or experts, each with its norms and its input."""
        post_norms, mixing = self.read.family.startswith(POST_NORMS), Part()
        post_norm = self.norm(self.hidden) if post_norms else Part()
        if kind.mixes:
            mixer = read_mixer_shape(self.read)
            assert mixer is not None  # ModelShape refuses a configuration with state-space layers that are not priced
            mixing += self.mixer(mixer)
        if kind.attention:
            mixing += self.attention()
        if kind.mixes or kind.attention:
            mixing += self.norm(self.hidden, saves_input=False) + post_norm
        feed = Part()
        if kind.feeds:
            feed = self.experts() if kind.feeds == "experts" else self.mlp(self.dense_width)
            # Compiled, the sum before the MLP is made again from the layer's input where a norm lies between them.
            made_again = post_norms and self.compile_kind == "layers"
            feed += self.norm(self.hidden, saves_input=not made_again and bool(mixing.saved))
            feed += post_norm
        return mixing, feed

    # ---- what all parts are made of

    @property
    def norms_by_kernels(self) -> bool:
        """Whether a norm outside of state-space layers runs as one kernel."""
        return self.compile_kind == "layers" or (self.settings.gpu and self.settings.fused_norms)

    def norm(self, width: float, groups: float = 1, *, saves_input: bool = True) -> Part:
        """An RMS norm of rows of `width` numbers, with a root for each of its `groups`; its output is not counted.

        Kernels and graphs save the input. torch's operations save rows in float32, and those divided by their root mean
        square for the gradient of a trained weight: in the compute dtype, but for Gemma's and `fused_norms`.
        """
        roots = self.rows(groups, WIDE)
        if self.norms_by_kernels:
            return Part(roots + self.rows(width) * saves_input)
        rounds = not self.settings.fused_norms and not self.read.family.startswith("gemma")
        even = self.rows(width, self.settings.compute_bytes if rounds else WIDE) * self.settings.trains_all
        return Part(roots + self.rows(width, WIDE) + even, 3 * self.rows(width, WIDE))

    def gated_norm(self, width: float, groups: float, *, gate_first: bool) -> Part:
        """A norm with a gate before it (Mamba 2) or after it (gated delta nets), with what is saved of its output."""
        roots = self.rows(groups, WIDE)
        if self.settings.gpu and self.settings.fused_norms:
            return Part(roots + self.rows(2 * width))
        wide_tensors, tensors = (4, 1) if gate_first else (3, 2)
        return Part(
            roots + wide_tensors * self.rows(width, WIDE) + tensors * self.rows(width), 2 * self.rows(width, WIDE)
        )

    def linears(self, width: float, *targets: str) -> Part:
        """Linears of one input of this width: it is saved if one of them is trained or has an adapter.

        An adapter also saves the rows of its rank.
        """
        adapters = sum(map(self.settings.has_adapter, targets))
        saves = self.settings.trains_all or adapters
        return Part(self.rows(width) * bool(saves) + self.rows(self.settings.lora_rank * adapters))

    # ---- attention

    def attention(self) -> Part:
        """Projections, norms of heads, rotary angles, attention, and for some families a gate as wide as the queries.

        With more tensor-parallel ranks than key/value heads each rank has a copy of one head. A configuration does not
        name the gate: its width follows from the weights counted beyond the four projections.
        """
        read, tp, widths = self.read, self.tp, attention_widths(self.read)
        query, key = widths.query / tp, widths.key / min(tp, key_value_heads(read))
        heads, kv_heads = read.count("num_attention_heads") / tp, max(1.0, key_value_heads(read) / tp)
        gate = max(0.0, attention_weights(read).all / self.hidden / tp - 2 * query - 2 * widths.key / tp)
        part = self.linears(self.hidden, "q_proj", "k_proj", "v_proj") + self.linears(query, "o_proj")
        if read.family.startswith(HEAD_NORMS):
            part += self.norm(query + key, heads + kv_heads)
        if gate:  # as projected beside the queries, and as attention's output is multiplied
            part += Part(self.rows(2 * gate if self.norms_by_kernels else gate))
        call = self.attention_call(query, key, heads, kv_heads)
        out_is_saved = self.linears(query, "o_proj").saved >= self.rows(query) and not gate
        shared = self.rows(query) if out_is_saved and not (self.load.exchanged_rows and not self.lean) else 0.0
        return part + replace(call, saved=call.saved - shared)

    def attention_call(self, query: float, key: float, heads: float, kv_heads: float) -> Part:
        """Attention of local rows: queries, keys, values, output and log-sum-exp, exchanged where types exchange heads.

        A ring holds four blocks of keys and values (two that travel and two that are read), a gather two; their
        gradients are summed in float32. Backward computes groups of heads one after another, and holds the buffers of
        one group. Of exchanged heads a message is held as it is sent and as it is received: of the output's gradient,
        of a `lean` layer's queries, keys and values too, and of their gradients, three slices at a time.
        """
        load, number = self.load, self.settings.compute_bytes
        blocks = (4 * load.ring_rows + 2 * load.gathered_rows) * key * number
        sums = 2 * key * WIDE * (2 * load.ring_rows + load.gathered_rows)
        wide_queries, lse, out = self.rows(query, WIDE), self.rows(heads, WIDE), self.rows(query)
        groups = count_head_groups(wide_queries, load.exchange_slices if load.exchanged_rows else max(1, int(kv_heads)))
        if load.exchanged_rows and groups > 1:
            groups = load.exchange_slices
        buffers = (blocks + sums + wide_queries) / groups
        if not load.exchanged_rows:
            local_gradients = 2 * out + self.rows(2 * key)  # of the output, queries, keys and values
            return Part(2 * out + self.rows(2 * key) + lse, local_gradients + buffers, out + lse)
        keys = 2 * (load.rows - load.exchanged_rows + load.exchanged_key_rows) * key * number  # and values
        copies = load.exchanged_key_rows > load.exchanged_rows  # of heads, whose gradients are summed in float32
        key_gradients, slices, key_slices = (
            keys * (WIDE / number) ** copies,
            load.exchange_slices,
            load.exchange_kv_slices,
        )
        arrivals = out * (2 + (not self.settings.gpu) if self.lean else 1)
        in_flight = 3 / (slices + 2) * (arrivals + 2 * out) + 3 / (key_slices + 2) * (
            keys * self.lean + 2 * key_gradients
        )
        # Slices that share keys and values each have a sum of the gradients of these.
        sums_of_keys = keys * WIDE / number * slices / key_slices**2
        work = out * (1 + self.lean) + key_gradients + in_flight + sums_of_keys + buffers
        if self.lean:
            return Part(2 * out + self.rows(2 * key) + lse, work, out + lse)
        return Part(2 * out + keys + lse, work, out + lse, 2 * out + keys)

    # ---- MLPs and experts

    @property
    def has_gate(self) -> bool:
        """Whether MLPs and experts have three products; families without a gate have `mlp_hidden_act`."""
        return self.read.value("mlp_hidden_act") is None

    @property
    def dense_width(self) -> int:
        """How many numbers a row has inside an MLP: its last product's weights over the hidden size."""
        return feed_forward_weights(self.read, "dense").last // self.hidden

    def tile_part(self, part: "Part", rows: float, weights: float) -> Part:
        """Return a part that runs on one tile of rows after another: `rows` are saved, the rest is of one tile.

        A pass also holds as many bytes as `rows` for its result or their gradients, and sums the gradients of `weights`
        over tiles, in float32 at least.
        """
        number, tile_rows = self.settings.compute_bytes, self.settings.mlp_tile_rows
        work = (part.saved + part.work) * tile_rows / self.load.rows
        return Part(rows, rows + work + weights * max(WIDE, number) * self.settings.trains_all)

    @property
    def is_tiled(self) -> bool:
        """Whether MLPs and experts run in tiles of rows."""
        return 0 < self.settings.mlp_tile_rows < self.load.rows

    def mlp(self, width: float) -> Part:
        """An MLP with its input, whose `width` tensor-parallel ranks split.

        Compiled layers do not save the activation of the gate, but make it again in backward.
        """
        inside, size = width / self.tp, self.rows(width / self.tp)
        part = self.linears(self.hidden, *(("gate_proj", "up_proj") if self.has_gate else ("up_proj",)))
        part += self.linears(inside, "down_proj")
        tensors = (2 if self.compile_kind != "none" else 3) if self.has_gate else 1
        part += Part(tensors * size, (2 if self.has_gate else 1) * size)
        if not self.is_tiled:
            return part
        return self.tile_part(part, self.rows(self.hidden), (2 + self.has_gate) * self.hidden * inside)

    def experts(self) -> Part:
        """A router, the experts that rows visit with their weighted sums, and the experts that every row visits.

        A router makes the weights and the number of each visited expert, and in most families the probabilities of all
        experts. The order of visits by expert, with its inverse, is kept even where the layer is recomputed; a tile
        makes its own again. A row is copied for each visit; with `ep` copies travel to other ranks and back.
        """
        read, trained = self.read, self.settings.trains_all
        weights, visits = (
            feed_forward_weights(read, "experts"),
            read.count("num_experts_per_tok", "num_experts_per_token"),
        )
        width = read.count("moe_intermediate_size") or read.count("intermediate_size")
        narrow = read.count("moe_latent_size") or self.hidden
        probabilities = self.rows(0 if read.family in OWN_GATES else read.experts()[1], WIDE)
        router = Part(self.rows(self.hidden) * trained + self.rows(visits) + self.rows(visits, INDEX) + probabilities)
        extra = OWN_GATES.get(read.family, 0 if self.settings.gpu else 1) if self.has_gate else 0
        inner = (1 + self.has_gate) * width
        copies, product = self.rows(visits * narrow), self.rows(visits * width)
        # results, what the first product made, and its gate; for trained weights the copies and the product too
        saved = copies + self.rows(visits * inner) + extra * product + (copies + product) * trained
        work = copies * (2 if self.ep > 1 else 1) + product * (3 if extra > 1 else 1)
        visited, order = Part(saved, work), self.rows(2 * visits, INDEX)
        if self.is_tiled:
            numbers = (weights.of_experts + weights.unvisited) / self.ep
            visited = self.tile_part(visited + Part(order), self.rows(0.0), numbers)
            visited = replace(visited, work=visited.work + self.rows(self.hidden))
        else:
            visited += Part(order, lasting=order)
        return router + visited + self._shared_experts()

    def _shared_experts(self) -> Part:
        """The experts that every row visits as one MLP, for some families with a weight for each row.

        Their width follows from the counted weights: of all, those left without the router, the visited experts, and
        the projections to and from a latent size. A vector of the hidden size that is left makes the weight.
        """
        weights, narrow = feed_forward_weights(self.read, "experts"), self.read.count("moe_latent_size")
        shared = weights.all - weights.of_experts - self.hidden * self.read.experts()[1] - 2 * self.hidden * narrow
        products = 2 + self.has_gate
        if not (width := shared // (products * self.hidden)):
            return Part()
        part = self.mlp(width)
        part = replace(part, saved=part.saved - self.rows(self.hidden) * self.settings.trains_all)  # the router's input
        return part + Part(self.rows(1 + self.hidden) * bool(shared // self.hidden % products))

    # ---- state-space layers

    def mixer(self, mixer: MixerShape) -> Part:
        """A state-space layer, whose heads are divided over tensor-parallel ranks."""
        if mixer.kind == "short convolution":  # what the projection made, gated, convolved, gated again
            inner = mixer.channels / self.tp
            part = self.linears(self.hidden, "in_proj") + self.linears(inner, "out_proj")
            return part + Part(self.rows(5 * inner), self.rows(4 * inner))
        return self._delta_net(mixer) if mixer.delta else self._mamba(mixer)

    def _mamba(self, mixer: MixerShape) -> Part:
        """A Mamba 2 mixer: what a projection made, convolved rows, values, keys, queries, steps, states, a gated norm.

        Autograd saves four float32 tensors between a step as projected and its decay.
        """
        inner, channels, heads = mixer.last / self.hidden / self.tp, mixer.channels / self.tp, mixer.heads / self.tp
        part = self.linears(self.hidden, "in_proj") + self.linears(inner, "out_proj")
        part += self.gated_norm(inner, 1, gate_first=True)
        gate_is_projected = self.settings.gpu and self.settings.fused_norms  # kernels save the gate where it lies
        projected = inner * (not gate_is_projected) + channels + heads
        saved = self.rows(projected + channels) + self.rows(4 * heads, WIDE) + self.rows(channels, self.scan_number)
        return part + Part(saved + self._run_states(mixer), self._scan_work(mixer, inner))

    def _delta_net(self, mixer: MixerShape) -> Part:
        """A gated delta net: rows before the convolution, unit keys and queries, values, decays, states, a gated norm.

        Autograd saves a row's rates (beta) in both dtypes, and three float32 tensors between a projected rate and its
        decay. Kernels of the scan also save a matrix of each chunk's pairs of rows, and a root for each head of 128
        numbers; on CPUs torch keeps the float32 input of unit vectors.
        """
        values, heads, channels = (
            mixer.heads * mixer.value_size / self.tp,
            mixer.heads / self.tp,
            mixer.channels / self.tp,
        )
        keys = (channels - values) / 2
        part = self.linears(self.hidden, "in_proj_qkvz", "in_proj_ba") + self.linears(values, "out_proj")
        part += self.gated_norm(values, heads, gate_first=False)
        kernels = self.scan_number == self.settings.compute_bytes and self.settings.gpu
        saved = (
            self.rows(channels + heads) + self.rows(4 * heads, WIDE) + self.rows(2 * keys + values, self.scan_number)
        )
        saved += self.rows(heads * CHUNK) + self.rows(2 * keys / 128, WIDE) if kernels else 0.0
        saved += 0.0 if self.settings.gpu else self.rows(2 * keys, self.scan_number)
        return part + Part(saved + self._run_states(mixer), self._scan_work(mixer, values))

    def _run_states(self, mixer: MixerShape) -> float:
        """Return the bytes of the float32 states with which the runs of documents on a slot begin."""
        return self.load.runs * mixer.state / self.tp * WIDE

    def _scan_work(self, mixer: MixerShape, values: float) -> float:
        """Return what a scan holds in its backward pass, for rows of `values` numbers.

        Kernels hold the states before all chunks, and some tensors of rows: of Mamba values in float32, of a delta rule
        values and keys in the compute dtype.
        """
        if not (self.settings.gpu and self.settings.scan_kernels):
            return TORCH_SCANS[mixer.delta] * self.rows(values, WIDE)
        states = self.rows(mixer.state / self.tp / CHUNK)
        if not mixer.delta:
            return 3 * states + 3 * self.rows(values, WIDE)
        return 2 * states + 4 * self.rows(values + mixer.heads * mixer.key_size / self.tp)
