"""How rows come by their keys in layers that do not attend to all earlier rows by themselves: keys that an indexer
chooses, pools and blocks of keys, and entries made of windows of rows. What it costs a row, and a pair of rows.
"""

from dataclasses import dataclass
from typing import Literal

from longspan.plan.shape.config_reader import ConfigReader

# Rows choose keys, by the names of transformers since 5.20 and before.
INDEXED = ("indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention")
BLOCKS = "minimax_m3_sparse"
CHOSEN_ENTRIES = "compressed_sparse_attention"
ENTRIES = (CHOSEN_ENTRIES, "heavily_compressed_attention")
CHOOSING = (*INDEXED, BLOCKS, *ENTRIES)


@dataclass(frozen=True, kw_only=True)
class KeyChoice:
    """What rows of one kind of layers attend to: at most `most` keys, pools or blocks of `stride` keys, or entries made
    of `stride` rows beside a `window` of rows (`most` 0: all entries).

    An indexer has `heads` heads of `size` numbers, and scores one key for each `scored` rows (`heads` 0: none). It has
    `linears` numbers of matrices and `vectors` of others, none of which is trained. Kernels multiply queries of `width`
    numbers, the mean of those for keys and for values; of a row `key_width` numbers travel as a key and as many as a
    value. `gathers`: each row gathers its keys in long documents; `latents`: these are latents, of one head.

    >>> KeyChoice(form="pools", most=2, stride=4).pairs(16), KeyChoice(form="keys", most=4).pairs(16)
    (112, 58)
    """

    form: Literal["keys", "pools", "blocks", "entries"]
    most: int
    stride: int = 1
    window: int = 0
    heads: int = 0
    size: int = 0
    scored: int = 1
    linears: int = 0
    vectors: int = 0
    width: int = 0
    key_width: float = 0.0
    gathers: bool = True
    latents: bool = False

    @property
    def columns(self) -> int:
        """Numbers of a row's choice: of keys, blocks or entries, and of pools, to which that of the row's own is added;
        where latents are gathered, of the keys of these pools.
        """
        if self.form != "pools":
            return self.most * (self.heads if self.form == "blocks" else 1)
        return (self.most + 1) * (self.stride if self.latents else 1)

    @property
    def row_pairs(self) -> int:
        """Keys that a row of a long document attends to, all entries left out."""
        if self.form == "pools":
            return (self.most + 1) * self.stride - 1
        return self.window + self.most * (self.stride if self.form == "blocks" else 1)

    @property
    def messages(self) -> tuple[int, int]:
        """Exchanges of a layer beyond those of one call of attention, in its forward and in its backward pass: of index
        keys, and for pools of the rows before a run; of entries, of the rows that they are made of and of those in the
        window, and for an indexer the same of its own.
        """
        if self.form == "entries":
            return (4 if self.heads else 2), 2
        return (2 if self.form == "pools" else 1), 0

    def is_made(self, longest: int) -> bool:
        """Return whether rows choose where the longest document of a micro-batch has so many rows."""
        return 0 < self.most < (-(-longest // self.stride) if self.form == "blocks" else longest // self.stride)

    def pairs(self, length: int) -> int:
        """Return how many pairs of a row and a key, or entry, a document has in one layer."""
        if self.form == "entries":
            return _capped_sum(length, 1, self.window) + _capped_sum(length, self.stride, self.most or length)
        if self.form == "blocks":  # a row's own block, up to itself, is always one of those that it chooses
            before = _capped_sum(length - 1, self.stride, self.most - 1)
            return self.stride * before + _remainder_sum(length - 1, self.stride) + length
        return self.stride * _capped_sum(length, self.stride, self.most) + _remainder_sum(length, self.stride)

    def scored_pairs(self, length: int) -> int:
        """Return how many pairs of a row and what an indexer scores a document has in one layer."""
        return _capped_sum(length, self.scored, length) if self.heads else 0


def _capped_sum(length: int, stride: int, most: int) -> int:
    """Σ min(n // stride, most) of n from 1 to length."""
    whole = min(length // stride, most)
    return stride * whole * (whole - 1) // 2 + whole * (length - whole * stride + 1)


def _remainder_sum(length: int, stride: int) -> int:
    """Σ n % stride of n from 1 to length."""
    whole, rest = divmod(length, stride)
    return whole * stride * (stride - 1) // 2 + rest * (rest + 1) // 2


def read_key_choice(read: ConfigReader, attention: str) -> KeyChoice | None:
    """Return how rows of layers of this type come by their keys; None for a type that attends to all it may see."""
    if attention in ENTRIES:
        return _read_entries(read, attention)
    if attention == BLOCKS:
        return _read_blocks(read)
    if attention not in INDEXED:
        return None
    return _read_mean_pools(read) if read.count("indexer_budget") else _read_keys(read)


def _read_keys(read: ConfigReader) -> KeyChoice:
    """Of latent attention: single keys, or pools whose rows are weighted by gates."""
    read.check_counts("num_attention_heads", "kv_lora_rank", "index_topk", "index_n_heads", "index_head_dim")
    hidden = read.count("hidden_size")
    heads = read.count("index_n_heads")
    size = read.count("index_head_dim")
    pool = read.count("index_kpool") or 1
    rank = read.count("kv_lora_rank")
    rotary = read.count("qk_rope_head_dim")
    return KeyChoice(
        form="pools" if pool > 1 else "keys",
        most=read.count("index_topk") // pool,
        stride=pool,
        heads=heads,
        size=size,
        scored=pool,
        linears=read.count("q_lora_rank") * heads * size + hidden * (size + heads + size * (pool > 1)),
        vectors=2 * size + pool * size * (pool > 1),
        width=read.count("num_attention_heads") * (2 * rank + rotary) // 2,
        # A latent is a value and most of a key, and travels once.
        key_width=(rank + rotary) / 2,
        latents=True,
    )


def _read_mean_pools(read: ConfigReader) -> KeyChoice:
    names = ("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
    read.check_counts("num_attention_heads", *names)
    heads, key_heads, size, budget, pool = map(read.count, names)
    return KeyChoice(
        form="pools",
        most=budget // pool,
        stride=pool,
        heads=heads,
        size=size,
        scored=pool,
        linears=read.count("hidden_size") * (heads + key_heads) * size,
        vectors=2 * size,
        width=_full_width(read, "num_attention_heads"),
        key_width=_full_width(read, "num_key_value_heads", "num_attention_heads"),
    )


def _read_blocks(read: ConfigReader) -> KeyChoice:
    names = ("index_n_heads", "index_head_dim", "index_block_size", "index_topk_blocks")
    older = ("sparse_num_index_heads", "sparse_index_dim", "sparse_block_size", "sparse_topk_blocks")
    table = read.section("sparse_attention_config")
    # The table of published files counts before the class's names, as in the class.
    heads, size, block, most = (
        table.count(old) or read.require_count(name) for name, old in zip(names, older, strict=True)
    )
    return KeyChoice(
        form="blocks",
        most=most,
        stride=block,
        heads=heads,
        size=size,
        linears=read.count("hidden_size") * (heads + 1) * size,
        vectors=2 * size,
        width=_full_width(read, "num_attention_heads"),
        key_width=_full_width(read, "num_key_value_heads", "num_attention_heads"),
    )


def compress_rate(read: ConfigReader, attention: str) -> int:
    """Return of how many rows an entry is made in layers of this type."""
    older = {ENTRIES[0]: "compress_rate_csa", ENTRIES[1]: "compress_rate_hca"}
    default = {ENTRIES[0]: 4, ENTRIES[1]: 128}
    rates = read.section("compress_rates")
    return read.count(older[attention]) or rates.count(attention) or default[attention]


def _read_entries(read: ConfigReader, attention: str) -> KeyChoice:
    read.check_counts("num_attention_heads", "head_dim", "sliding_window")
    rate = compress_rate(read, attention)
    size = read.count("head_dim")
    chosen = attention == CHOSEN_ENTRIES
    index_heads = index_size = linears = vectors = 0
    if chosen:
        read.check_counts("q_lora_rank", "index_n_heads", "index_head_dim", "index_topk")
        index_heads = read.count("index_n_heads")
        index_size = read.count("index_head_dim")
        # keys and gates of two windows each, queries, weights of heads
        linears = read.count("hidden_size") * (4 * index_size + index_heads)
        linears += read.count("q_lora_rank") * index_heads * index_size
        vectors = 2 * rate * index_size + index_size
    return KeyChoice(
        form="entries",
        most=read.count("index_topk") if chosen else 0,
        stride=rate,
        window=read.count("sliding_window"),
        heads=index_heads,
        size=index_size,
        scored=rate,
        linears=linears,
        vectors=vectors,
        width=read.count("num_attention_heads") * size,
        # An entry is a key and a value: gathered ones travel once, and dense ones as either.
        key_width=size / rate * (0.5 if chosen else 1),
        gathers=chosen,
    )


def _full_width(read: ConfigReader, *heads: str) -> int:
    return read.count(*heads) * (
        read.count("head_dim") or read.count("hidden_size") // read.count("num_attention_heads")
    )
