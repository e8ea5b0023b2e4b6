"""The tapes of decoder layers: which tensors attention, MLPs, experts and state-space layers make of a slot's rows.

Sizes follow from a configuration; order and what is saved follow transformers' code as `prepare` runs it, with norms in
one pass (`MemorySettings.fused_norms`) and attention by `attend`. tests/plan/memory/ counts the same on real models.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from longspan.plan.cost.config_reader import ConfigReader
from longspan.plan.cost.layers import (
    LayerKind,
    attention_weights,
    feed_forward_weights,
    key_value_heads,
    widths_of,
)
from longspan.plan.cost.mixer_shape import MixerShape, mixer_of
from longspan.plan.memory.loads import SlotLoad
from longspan.plan.memory.settings import MemorySettings
from longspan.plan.memory.tape import Tape

HEAD_NORMS = ("qwen3", "gemma3", "olmo2", "olmo3")  # families with a norm of each query and key
POST_NORMS = ("gemma2", "gemma3", "glm4")  # families with a norm after attention and after the MLP too
_ROTARY_WORK = 3  # tensors of queries while they are turned


@dataclass(frozen=True)
class LayerTapes:
    """Makes the tape of a layer from its kind and a slot's rows.

    >>> tapes = LayerTapes.of(ConfigReader.of(config), MemorySettings())  # doctest: +SKIP
    >>> tapes.tape(kind, SlotLoad(rows=16384)).saved_bytes()  # doctest: +SKIP
    """

    read: ConfigReader
    settings: MemorySettings
    tp: int = 1
    ep: int = 1

    def tape(self, kind: LayerKind, load: SlotLoad) -> Tape:
        """The layer's operations on a slot's rows."""
        return _LayerTape(self, load).build(kind)


class _LayerTape:
    """A tape while it is built."""

    def __init__(self, tapes: LayerTapes, load: SlotLoad) -> None:
        self.read, self.settings, self.tp, self.ep, self.load = (
            tapes.read,
            tapes.settings,
            tapes.tp,
            tapes.ep,
            load,
        )
        self.number = tapes.settings.compute_bytes
        self.hidden = tapes.read.count("hidden_size")
        self.residual = self.hidden // tapes.tp if tapes.settings.sequence_parallel else self.hidden
        self.tape = Tape({"x": self._rows(self.residual)})

    def _rows(self, width: float, bytes_per_number: int = 0) -> float:
        """Bytes of the local rows of a tensor so wide."""
        return self.load.rows * width * (bytes_per_number or self.number)

    def build(self, kind: LayerKind) -> Tape:
        x = "x"
        mixer = mixer_of(self.read) if kind.mixes else None
        if kind.attention or kind.mixes:
            normed = self._norm("n1", x, self.hidden)
            parts: list[str] = []
            if kind.attention:
                parts.append(self._attention(normed))
            if mixer is not None:
                parts.append(self._mixer(normed, mixer))
            out = parts[0] if len(parts) == 1 else self.tape.run("both", parts, self._rows(self.hidden), through=True)
            x = self._residual("h", x, self._post_norm("n1_post", out))
        if kind.feeds:
            normed = self._norm("n2", x, self.hidden)
            out = self._experts(normed) if kind.feeds == "experts" else self._mlp("", normed, self._dense_width())
            x = self._residual("y", x, self._post_norm("n2_post", out))
        return self.tape

    def _dense_width(self) -> int:
        return feed_forward_weights(self.read, "dense").last // self.hidden

    def _residual(self, name: str, x: str, out: str) -> str:
        return self.tape.run(name, (x, out), self._rows(self.residual), through=True)

    def _post_norm(self, name: str, out: str) -> str:
        has = self.read.family.startswith(POST_NORMS)
        return self._norm(name, out, self.hidden) if has else out

    def _norm(self, name: str, x: str, width: float, groups: int = 1) -> str:
        """A norm of `groups` parts of a row; in one pass it keeps its input, else its input in float32 and the quotient."""
        roots = {f"{name}.root": self._rows(groups, 4)}
        if self.settings.fused_norms:
            return self.tape.run(name, (x,), self._rows(width), saves=(x,), also=roots, weights=width / groups)
        wide = self.tape.run(f"{name}.wide", (x,), self._rows(width, 4))
        even = self.tape.run(f"{name}.even", (wide,), self._rows(width), saves=(wide,), also=roots)
        return self.tape.run(name, (even,), self._rows(width), saves=(even,))

    def _linear(self, name: str, target: str, x: str, width_in: float, width_out: float) -> str:
        """A product with a weight, with its adapter if it is a target."""
        settings, size = self.settings, self._rows(width_out)
        if settings.trains_all:
            weights = width_in * width_out * self.number
            return self.tape.run(name, (x,), size, saves=(x,), weights=weights)
        if settings.lora_targets and target not in settings.lora_targets:
            return self.tape.run(name, (x,), size)
        rank = settings.lora_rank
        base = self.tape.run(f"{name}.base", (x,), size)
        narrow = self.tape.run(f"{name}.a", (x,), self._rows(rank), saves=(x,), weights=rank * width_in * self.number)
        wide = self.tape.run(
            f"{name}.b", (narrow,), size, saves=(narrow,), weights=rank * width_out * self.number, forward_work=size
        )
        return self.tape.run(name, (base, wide), size, through=True)

    def _attention(self, x: str) -> str:
        read, tape = self.read, self.tape
        widths, heads = widths_of(read), read.count("num_attention_heads")
        query, key = widths.query / self.tp, widths.key / min(self.tp, key_value_heads(read))
        heads, kv_heads = heads / self.tp, max(1.0, key_value_heads(read) / self.tp)
        every = attention_weights(read)
        gate = max(0.0, every.all / self.hidden / self.tp - 2 * query - 2 * key)
        q = self._linear("q", "q_proj", x, self.hidden, query + gate)
        k = self._linear("k", "k_proj", x, self.hidden, key)
        v = self._linear("v", "v_proj", x, self.hidden, key)
        if read.family.startswith(HEAD_NORMS):
            q = self._norm("q_norm", q, query, groups=int(heads))
            k = self._norm("k_norm", k, key, groups=int(kv_heads))
        turned = _ROTARY_WORK * self._rows(query)
        q = tape.run("q_turned", (q,), self._rows(query), forward_work=turned, backward_work=turned)
        k = tape.run("k_turned", (k,), self._rows(key))
        out = self._attend(q, k, v, query, key, heads)
        if gate:
            factor = tape.run("gate", (q,), self._rows(gate), saves=(q,))
            out = tape.run("gated", (out, factor), self._rows(query), saves=(out, factor))
        return self._linear("o", "o_proj", out, query, self.hidden)

    def _attend(self, q: str, k: str, v: str, query: float, key: float, heads: float) -> str:
        """Attention of local rows; under types that exchange heads these are exchanged before and after."""
        load, tape, number = self.load, self.tape, self.number
        lse = {"lse": self._rows(heads, 4)}
        blocks = 4 * key * number * load.ring_rows + 2 * key * number * load.gathered_rows
        sums = 2 * key * 4 * (2 * load.ring_rows + load.gathered_rows)
        accumulated = 4 * query * load.rows
        merged = accumulated if load.ring_rows else 0.0
        if not load.exchanged_rows:
            return tape.run(
                "out",
                (q, k, v),
                self._rows(query),
                saves=(q, k, v, "out"),
                also=lse,
                forward_work=blocks + merged,
                backward_work=blocks + sums + accumulated,
            )
        rows, keys = load.exchanged_rows, load.exchanged_key_rows
        others = load.rows - rows
        q = tape.run("q_moved", (q,), (query * rows + query * others) * number)
        k = tape.run("k_moved", (k,), (key * keys + key * others) * number)
        v = tape.run("v_moved", (v,), (key * keys + key * others) * number)
        out = tape.run(
            "out_moved",
            (q, k, v),
            self._rows(query),
            saves=(q, k, v, "out_moved"),
            also=lse,
            forward_work=blocks + merged,
            backward_work=blocks + sums + accumulated,
        )
        return tape.run("out", (out,), self._rows(query))

    def _mlp(self, name: str, x: str, width: float, *, gated: bool | None = None) -> str:
        tape, width = self.tape, width / self.tp
        if gated is None:
            gated = self.read.value("mlp_hidden_act") is None
        size = self._rows(width)
        if not gated:
            up = self._linear(f"{name}up", "up_proj", x, self.hidden, width)
            product = tape.run(f"{name}act", (up,), size, saves=(up,))
        else:
            gate = self._linear(f"{name}gate_proj", "gate_proj", x, self.hidden, width)
            act = tape.run(f"{name}act", (gate,), size, saves=(gate,))
            up = self._linear(f"{name}up", "up_proj", x, self.hidden, width)
            product = tape.run(f"{name}product", (act, up), size, saves=(act, up))
        return self._linear(f"{name}down", "down_proj", product, width, self.hidden)

    def _experts(self, x: str) -> str:
        """A router, the rows of each visited expert side by side, and the shared expert."""
        read, tape = self.read, self.tape
        count, visited = read.experts()[1], read.count("num_experts_per_tok", "num_experts_per_token")
        one = (read.count("moe_intermediate_size") or read.count("intermediate_size")) / self.tp
        weights = feed_forward_weights(read, "experts")
        gates = 2 if read.value("mlp_hidden_act") is None else 1
        trained = self.settings.trains_all
        experts_numbers = (weights.of_experts + weights.unvisited) / self.ep * self.number * trained
        probabilities = {"probabilities": self._rows(count, 4), "visits": self._rows(visited, 8)}
        share = tape.run(
            "router", (x,), self._rows(count), saves=(x,) if trained else (), also=probabilities, weights=0.0
        )
        rows = self._rows(visited * self.hidden)
        going = tape.run("going", (x,), rows)
        if self.ep > 1:
            going = tape.run("arrived", (going,), rows)
            going = tape.run("sorted", (going,), rows)
        inner = tape.run(
            "inner",
            (going,),
            self._rows(gates * visited * one),
            saves=(going,) if trained else (),
            weights=experts_numbers * gates / (gates + 1),
        )
        product = tape.run("expert_product", (inner,), self._rows(visited * one), saves=(inner,))
        coming = tape.run(
            "coming",
            (product,),
            rows,
            saves=(product,) if trained else (),
            weights=experts_numbers / (gates + 1),
        )
        if self.ep > 1:
            coming = tape.run("sent_back", (tape.run("unsorted", (coming,), rows),), rows)
        out = tape.run("mixed", (coming, share), self._rows(self.hidden), saves=(coming, share))
        shared = weights.all - weights.of_experts - self.hidden * count
        if width := shared // ((gates + 1) * self.hidden):
            out_shared = self._mlp("shared_", x, width, gated=gates == 2)
            out = tape.run("experts_out", (out, out_shared), self._rows(self.hidden), through=True)
        return out

    def _mixer(self, x: str, mixer: MixerShape) -> str:
        """A state-space layer: projections, a convolution, the scan of rows, a gated norm, and a projection back."""
        tape, tp = self.tape, self.tp
        inner = (mixer.last // self.hidden) / tp
        channels, heads = mixer.channels / tp, mixer.heads / tp
        if mixer.kind == "short convolution":
            parts = self._linear("mixer_in", "in_proj", x, self.hidden, 3 * inner)
            gated = tape.run("mixer_gated", (parts,), self._rows(inner), saves=(parts,))
            rolled = tape.run("mixer_rolled", (gated,), self._rows(inner), saves=(gated,))
            out = tape.run("mixer_out", (rolled, parts), self._rows(inner), saves=(rolled,))
            return self._linear("mixer_back", "out_proj", out, inner, self.hidden)
        wide = self._linear("mixer_in", "in_proj", x, self.hidden, channels)
        gate = self._linear("mixer_gate", "in_proj", x, self.hidden, inner)
        rates = self._linear("mixer_rates", "in_proj", x, self.hidden, 2 * heads if mixer.delta else heads)
        rolled = tape.run("mixer_rolled", (wide,), self._rows(channels), saves=(wide,))
        state = {"mixer_state": self.load.rows / 64 * mixer.state / tp * 4}
        out = tape.run("mixer_scanned", (rolled, rates), self._rows(inner), saves=(rolled, rates), also=state)
        normed = tape.run("mixer_normed", (out, gate), self._rows(inner), saves=(out, gate))
        return self._linear("mixer_back", "out_proj", normed, inner, self.hidden)


def names_of_targets(targets: Sequence[str]) -> tuple[str, ...]:
    """The last part of each name."""
    return tuple(target.rpartition(".")[2] for target in targets)
