"""The cases of `worth.py`: lengths, models, networks, and the selection of their product that its table shows."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from longspan.plan import Cost, CostSettings, Machine
from longspan.plan.distributions import sample_lengths
from longspan.plan.shape.model_shape import QWEN3_8B

LONGEST = 131072
TOKENS_PER_SLOT = 32768
NETWORKS = (50.0, 25.0, 12.5, 2.65)  # GB/s a GPU between hosts
SLOTS = (16, 64, 256, 1024)
NAMES = ("lognorm", "bimodal", "files")
QWEN3_30B_A3B: dict[str, Any] = QWEN3_8B | {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
MODELS = {"32/8": ("Qwen3-8B", QWEN3_8B), "32/4": ("Qwen3-30B-A3B", QWEN3_30B_A3B)}
# Published figures of long fine-tuning sets. Of no set a whole histogram was found, so the shape between the published
# figures is assumed: exponential around each mean, and log-uniform between two ends or quantiles.
MATH_QUANTILES = {0.0: 350, 0.5: 12432, 0.9: 43089, 0.95: 57582, 0.99: 84679, 1.0: 140459}
PUBLISHED = {
    "llama3-sft": "99.89 % of examples short, 1K tokens on average, and 0.11 % long, 37K on average (of Llama 3, as "
    "cited for arXiv 2505.19609 at en.papernotes.org); each part exponential",
    "longalign": "10,000 examples of 8K to 64K tokens (LongAlign, arXiv 2401.18058); log-uniform in between",
    "nemotron-math": "quantiles of nvidia/Nemotron-Cascade-2-SFT-Data, math (Megatron-Bridge pull request 3316): 350 "
    "tokens at least, median 12,432, 43,089 at 90 %, 57,582 and 84,679 (taken as 95 % and 99 %), 140,459 at most (cut "
    "to 128K); log-uniform in between",
}


# How weights are held: FSDP2 over all slots, the default; with reshard_after_forward = false, and with
# sync_each_batch = false too; sharded inside hosts and copied between them; in free mode; experts shared by 8 slots.
WEIGHTS = ("FSDP2", "gathered once", "summed once", "HSDP", "free", "not counted")
WEIGHTS_OF_EXPERTS = (
    "FSDP2",
    "gathered once",
    "summed once",
    "ep 8",
    "ep 8, gathered once",
    "ep 8, summed once",
    "HSDP",
    "free",
    "not counted",
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table: `gbps` across hosts, heads as query/key-value heads of a model of `MODELS`."""

    lengths: str = "lognorm"
    slots: int = 64
    cap: int = 8192
    gbps: float = 50.0
    heads: str = "32/8"
    node_size: int = 8
    seed: int = 7
    weights: str = "FSDP2"

    @property
    def key(self) -> str:
        values = self.lengths, self.slots, self.cap, f"{self.gbps:g}", self.heads, self.node_size, self.seed
        return " ".join(map(str, (*values, self.weights)))

    @property
    def query_heads(self) -> int:
        return int(self.heads.partition("/")[0])

    def documents(self) -> list[int]:
        """32K tokens a slot, none longer than 128K or than all slots hold."""
        longest = min(LONGEST, self.slots * self.cap)
        tokens = self.slots * TOKENS_PER_SLOT
        if self.lengths not in PUBLISHED:
            return sample_lengths(self.lengths, tokens, seed=self.seed, longest=longest).tolist()
        random = np.random.default_rng(self.seed)
        lengths = np.clip(_draw_published(self.lengths, random, tokens // 256), 16, longest).astype(np.int64)
        return lengths[: int(np.searchsorted(np.cumsum(lengths), tokens)) + 1].tolist()

    def cost(self) -> Cost:
        return cost_of(self.heads, self.gbps, self.weights, self.slots, self.node_size)


@cache
def cost_of(heads: str, gbps: float, weights: str, slots: int, node_size: int = 8) -> Cost:
    """The price of a model on H200s with so many GB/s a GPU across hosts, and weights of `WEIGHTS` over the slots."""
    machine = Machine.known("H200").with_link("across", bytes_per_second=gbps * 1e9)
    model = MODELS[heads][1]
    if weights == "not counted":
        return machine.cost(model)
    copies = max(1, slots // node_size) if weights == "HSDP" else 1
    settings = CostSettings(
        shards=slots // copies,
        dp_replicate=copies,
        ep=8 if "ep" in weights else 1,
        gathered_once="once" in weights,
        summed_once="summed" in weights,
        free=weights == "free",
    )
    return machine.cost(model, settings)


def _draw_published(name: str, random: np.random.Generator, count: int) -> np.ndarray:
    if name == "nemotron-math":
        shares = [*MATH_QUANTILES]
        lengths = [*MATH_QUANTILES.values()]
        return np.exp(np.interp(random.random(count), shares, np.log(lengths)))
    if name == "longalign":
        return np.exp(random.uniform(np.log(8192), np.log(65536), count))
    return random.exponential(np.where(random.random(count) < 0.0011, 37000.0, 1000.0))


def cases() -> Iterator[Case]:
    """The selection, by what it varies: networks and slots, published sets, weights, one host, emulated ones."""
    for gbps in NETWORKS:
        yield from (Case(lengths=name, slots=slots, gbps=gbps) for name in NAMES for slots in SLOTS)
        yield from (Case(lengths=name, gbps=gbps) for name in PUBLISHED)
        yield from (Case(gbps=gbps, weights=weights) for weights in WEIGHTS[1:])
    yield from (Case(lengths=name, slots=8, cap=cap) for name in NAMES for cap in (8192, 16384, 32768))
    emulated = (Case(lengths=name, slots=8, cap=cap, gbps=2.65, node_size=4) for name in NAMES for cap in (8192, 16384))
    yield from emulated
