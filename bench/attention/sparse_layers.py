"""Attention of layers whose rows choose pools or blocks, or see entries, of published widths, beside dense attention.

    python bench/attention/sparse_layers.py --out bench/records/sparse-layers.json
    python bench/attention/sparse_layers.py --tiny       # small widths and lengths, on a CPU too

From hidden states to the output projection, choice and compression in it, forward and backward, on one GPU. `dense` is
the same module whose rows see all rows before, by the first kernel that can; `masked` has the layer's choice by bits. A
short length is compared with float64 under the same choice before anything is timed. Rows that the record has are left
out.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench.begun import missing_row, open_record, peak_bytes, seconds_now, start_peak, write_page
from torch import Tensor, nn

from longspan.cli.machine import set_gpu_environment
from longspan.comm import SequenceShard, World, bind
from longspan.layout import Layout
from longspan.model.exactness.trials import compute_in_float64
from longspan.model.seams import entries
from longspan.model.seams.attention_calls import IMPLEMENTATION
from longspan.model.seams.chosen_keys import blocks, index_scores, pools
from longspan.model.seams.chosen_keys.indexers import shard_indexers
from longspan.model.seams.entries import shard_entry_modules
from longspan.model.seams.running_layer import forward_with_running_layer
from longspan.plain_text import bytes_text, markdown_table
from longspan.plan import plan_fixed

ALLOWED = 2e-2  # relative error of bfloat16
OTHERWISE = 0.01  # share of rows that may choose otherwise by our sums of scores than by the class's own
HEADS = "num_attention_heads"
KV_HEADS = "num_key_value_heads"
ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
TINY_ROPE = ROPE | {"mrope_section": [2, 1, 1]}
QSA = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 2048}
QSA |= {"indexer_compress_ratio": 4, HEADS: 24, KV_HEADS: 2, "head_dim": 256, "rope_parameters": ROPE}
SMALL = {"hidden_size": 64, HEADS: 4, "head_dim": 32}
SMALL_INDEX = {"index_n_heads": 16, "index_head_dim": 16}
V4 = {HEADS: 64, "head_dim": 512, "index_topk": 512}
SMALL_V4 = SMALL | SMALL_INDEX | {"index_topk": 8, "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 16}
SMALL_V4 |= {"sliding_window": 16}
M3 = {"layer_types": ["minimax_m3_sparse"]}


class Kind(NamedTuple):
    """A kind of layer: the module of its class, how it begins there, its values, those of `--tiny`, and what is aimed
    at: rows, the most of dense attention's time, and the most milliseconds.
    """

    module: str
    prefix: str
    values: dict[str, Any]
    tiny: dict[str, Any]
    rows: int
    ratio: float
    ms: float | None = None

    def make_config(self, *, tiny: bool, layers: int = 1, **changes: Any) -> Any:
        """Make the configuration of so many layers of this kind, with changes."""
        name = self.module.replace("modeling", "configuration")
        configurations = vars(import_module(f"transformers.models.{self.module.split('.')[0]}.{name.split('.')[1]}"))
        kind = configurations.get(f"{self.prefix}TextConfig") or configurations[f"{self.prefix}Config"]
        values = self.values | (self.tiny if tiny else {}) | changes
        return kind(**values | {"num_hidden_layers": layers, "layer_types": values["layer_types"] * layers})


KINDS = {
    "QSA": Kind(
        "qwen4_exp.modeling_qwen4_exp",
        "Qwen4ExpText",
        {"layer_types": ["full_attention"], **QSA},
        {**SMALL, "indexer_head_dim": 16, "indexer_n_heads": 16, "indexer_budget": 32, "rope_parameters": TINY_ROPE},
        rows=131072,
        ratio=0.5,
    ),
    "CSA": Kind(
        "deepseek_v4.modeling_deepseek_v4",
        "DeepseekV4",
        {"layer_types": ["compressed_sparse_attention"], **V4},
        SMALL_V4,
        rows=65536,
        ratio=0.12,
        ms=350,
    ),
    "HCA": Kind(
        "deepseek_v4.modeling_deepseek_v4",
        "DeepseekV4",
        {"layer_types": ["heavily_compressed_attention"], **V4},
        SMALL_V4,
        rows=65536,
        ratio=0.06,
        ms=200,
    ),
    "MiniMax-M3": Kind(
        "minimax_m3_vl.modeling_minimax_m3_vl",
        "MiniMaxM3VL",
        M3,
        {**SMALL, KV_HEADS: 2, "index_n_heads": 2, "index_head_dim": 16, "index_topk_blocks": 3, "rotary_dim": 16}
        | {"index_block_size": 8},
        rows=131072,
        ratio=0.45,
    ),
}


class Layer:
    """The attention module of one kind on this rank, its inputs, and what its rows chose last."""

    def __init__(self, kind: Kind, shard: SequenceShard, *, tiny: bool) -> None:
        module = import_module(f"transformers.models.{kind.module}")
        config = kind.make_config(tiny=tiny)
        config._attn_implementation = IMPLEMENTATION
        self.shard = shard
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        torch.manual_seed(0)
        try:
            with shard.device:
                self.module: Any = vars(module)[f"{kind.prefix}Attention"](config, 0)
        finally:
            torch.set_default_dtype(default)
        with torch.no_grad():
            for name, weight in self.module.named_parameters():
                if weight.ndim > 1 or name == "sinks":
                    weight.normal_(std=weight.shape[-1] ** -0.5)
        rotary = vars(module)[f"{kind.prefix}RotaryEmbedding"](config).to(shard.device)
        self.hidden = torch.randn(1, shard.tokens, config.hidden_size, device=shard.device, dtype=torch.bfloat16)
        self.dout = torch.randn_like(self.hidden)
        positions = shard.position_ids[None]
        self.arguments: dict[str, Any] = {"attention_mask": None}
        if kind.prefix == "DeepseekV4":
            angles = {x: rotary(self.hidden, position_ids=positions, layer_type=x) for x in ("main", "compress")}
            self.arguments |= {"position_embeddings": angles, "position_ids": positions}
        else:
            self.arguments["position_embeddings"] = rotary(self.hidden, positions)
        if kind.prefix == "MiniMaxM3VL":
            self.arguments["position_ids"] = positions
        self.dense_module: Any = deepcopy(self.module)
        self.dense_module.sliding_window = None
        for name in ("indexer", "compressor"):
            part = getattr(self.dense_module, name, None)
            if name == "compressor" or kind.prefix == "MiniMaxM3VL":
                setattr(self.dense_module, name, None)
            elif part is not None:
                nothing = torch.empty((1, shard.tokens, 0), dtype=torch.int32, device=shard.device)
                part.forward = lambda *_, nothing=nothing, **__: pools.ChosenKeys.carry(nothing)
        shard_entry_modules(self.module)
        shard_indexers(self.module)
        if kind.prefix == "Qwen4ExpText":
            mask = torch.empty((1, 1, shard.tokens, 0), dtype=torch.bool, device=shard.device)
            self.arguments["attention_mask"] = mask

    @property
    def indexer(self) -> nn.Module | None:
        return getattr(self.module, "indexer", None) or getattr(self.module.compressor, "indexer", None)

    def forward(self, module: nn.Module, hidden: Tensor, kernel: str | None) -> Tensor:
        def run(hidden: Tensor, *, shard: Any, attention_kernel: str | None) -> Tensor:
            return module(hidden, **self.arguments)[0]

        call = partial(run, shard=self.shard, attention_kernel=kernel)
        return forward_with_running_layer(call)(hidden)

    @contextmanager
    def choosing(self, chosen: Any = None) -> Iterator[list[Any]]:
        """Inside, what rows choose is kept in the list, or where it is given, `chosen` is what they chose."""
        kept: list[Any] = []

        def choose(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            kept.append(function(*args, **kwargs) if chosen is None else chosen)
            return kept[-1]

        indexer = self.indexer
        with ExitStack() as patched:
            if indexer is None:
                kept.append(None)
            elif indexer is getattr(self.module, "indexer", None):
                patched.enter_context(patch.object(indexer, "forward", partial(choose, indexer.forward)))
            else:
                function = partial(choose, entries.choose_entries)
                patched.enter_context(patch.object(entries, "choose_entries", function))
            yield kept

    def gradients(self, module: nn.Module, kernel: str | None, dtype: torch.dtype) -> list[Tensor]:
        """The output, and the gradients of hidden states and of every weight that has one."""
        hidden = self.hidden.to(dtype).requires_grad_()
        out = self.forward(module, hidden, kernel)
        weights = list(module.parameters())
        found = torch.autograd.grad(out, [hidden, *weights], self.dout.to(out.dtype), allow_unused=True)
        return [out.detach(), *(x for x in found if x is not None)]


def bound(length: int, world: World) -> SequenceShard:
    return bind(plan_fixed([length], world.home, cp=1).micro_batches[0], world)


def check(layer: Layer, kernels: list[str | None]) -> dict[str, float]:
    """Rows that choose otherwise than by the class's own scores, and each kernel's largest errors beside float64 with
    the same choice."""
    with layer.choosing() as kept:
        found = {str(kernel): layer.gradients(layer.module, kernel, torch.bfloat16) for kernel in kernels}
    chosen = kept[0]
    with ExitStack() as by_product, layer.choosing() as by_class, torch.no_grad():
        for module in (blocks, index_scores, pools):
            by_product.enter_context(patch.object(module, "can_score", lambda q: False))
        layer.forward(layer.module, layer.hidden, None)
    layer.module.double()
    arguments = layer.arguments
    layer.arguments = _widened(arguments)
    with compute_in_float64(), layer.choosing(chosen):
        exact = layer.gradients(layer.module, "reference", torch.float64)
    layer.arguments = arguments
    worst = {"rows that choose otherwise": _other_rows(chosen, by_class[0])}
    for kernel, results in found.items():
        errors = [((x.double() - y).norm() / y.norm()).item() for x, y in zip(results, exact, strict=True)]
        worst |= {f"{kernel}, output": errors[0], f"{kernel}, gradients": max(errors[1:])}
    assert worst["rows that choose otherwise"] < OTHERWISE, worst
    assert all(error <= ALLOWED for name, error in worst.items() if "," in name), worst
    return worst


def _widened(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.double() if x.is_floating_point() else x
    if isinstance(x, dict):
        return {name: _widened(value) for name, value in x.items()}
    return tuple(map(_widened, x)) if isinstance(x, tuple) else x


def _other_rows(chosen: Any, other: Any) -> float:
    if chosen is None:
        return 0.0
    tensors = [getattr(x, "chosen", x).sort(-1).values for x in (chosen, other)]
    return (tensors[0] != tensors[1]).any(-1).double().mean().item()


def measure(layer: Layer, ways: dict[str, tuple[nn.Module, str | None]]) -> dict[str, Any]:
    """Milliseconds of the choice, and of forward and backward of each way, with its peak bytes without the inputs."""
    row: dict[str, Any] = {}
    indexer = getattr(layer.module, "indexer", None)
    if indexer is not None:
        row["choice"] = _time_choice(layer)
    for way, (module, kernel) in ways.items():

        def both(module: nn.Module = module, kernel: str | None = kernel) -> float:
            hidden = layer.hidden.detach().requires_grad_()
            out = layer.forward(module, hidden, kernel)
            middle = seconds_now()
            out.backward(layer.dout)
            module.zero_grad(set_to_none=True)
            return middle

        try:
            (row[f"{way} forward"], row[f"{way} backward"]), row[f"{way} bytes"] = timed(both)
        except torch.OutOfMemoryError as error:
            row[f"{way} missing"] = missing_row(error)["missing"]
    return row


def _time_choice(layer: Layer) -> float:
    """The indexer's forward alone, of the layer's own inputs."""
    indexer = layer.module.indexer
    inputs: list[Any] = []

    def note(*args: Any, **kwargs: Any) -> Any:
        inputs[:] = [args, kwargs]
        raise StopIteration

    with patch.object(indexer, "forward", note), torch.no_grad(), suppress(StopIteration):
        layer.forward(layer.module, layer.hidden, None)
    args, kwargs = inputs

    def choose(hidden: Tensor, *, shard: Any, attention_kernel: None) -> None:
        indexer(*args, **kwargs)

    def run() -> float:
        forward_with_running_layer(partial(choose, shard=layer.shard, attention_kernel=None))(layer.hidden)
        return 0.0

    return timed(run)[0][0]


def timed(run: Callable[[], float]) -> tuple[list[float], int]:
    """Median milliseconds of one to three runs after one, before and after what `run` returns (0: all), and bytes."""
    times = list[list[float]]()
    before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    while len(times) < 4 and (len(times) < 2 or sum(times[-1]) < 1000):
        start_peak()
        marks = [x for x in (seconds_now(), run(), seconds_now()) if x]
        times.append([1e3 * (after - before) for before, after in itertools.pairwise(marks)])
    return [statistics.median(x) for x in zip(*times[1:], strict=True)], peak_bytes() - before


def ways_of(name: str, layer: Layer) -> dict[str, tuple[nn.Module, str | None]]:
    sparse: dict[str, tuple[nn.Module, str | None]] = {"sparse": (layer.module, None)}
    on_gpu = layer.shard.device.type == "cuda"
    if name in ("QSA", "MiniMax-M3") and on_gpu:
        sparse = {"sparse": (layer.module, "triton_blocks"), "masked": (layer.module, "triton_flash")}
    return sparse | {"dense": (layer.dense_module, None)}


def markdown(record: dict[str, Any]) -> str:
    lines = [(name, *_cells(name.split(",")[0], row)) for name, row in record["rows"].items()]
    names = ("layer, rows", "choice, ms", "sparse, ms", "masked, ms", "dense, ms", "sparse / dense", "aim", "bytes")
    checks = "".join(f"\n- {name}: {errors}" for name, errors in record["checks"].items())
    return f"{markdown_table((*names, 'bytes, dense'), lines)}\n\nErrors beside float64 of a short length:\n{checks}\n"


def _cells(kind: str, row: dict[str, Any]) -> Iterator[str]:
    def total(way: str) -> float | None:
        return row[f"{way} forward"] + row[f"{way} backward"] if f"{way} forward" in row else None

    yield f"{row['choice']:.1f}" if "choice" in row else "–"
    for way in ("sparse", "masked", "dense"):
        parts = f" ({row[f'{way} forward']:.1f} + {row[f'{way} backward']:.1f})" if total(way) else ""
        yield f"{total(way):.1f}{parts}" if total(way) else row.get(f"{way} missing", "–")
    sparse, dense = total("sparse"), total("dense")
    yield f"{sparse / dense:.3f}" if sparse and dense else "–"
    aim = KINDS[kind]
    limit = "" if aim.ms is None else f", {aim.ms:g} ms"
    yield f"≤ {aim.ratio:g}{limit} at {aim.rows:,} rows"
    yield bytes_text(row.get("sparse bytes", 0))
    yield bytes_text(row.get("dense bytes", 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--lengths", default="", help="rows, with commas between (default: those of the aim)")
    parser.add_argument("--tiny", action="store_true", help="small widths, 256 rows")
    parser.add_argument("--checked", type=int, default=0, help="rows that are compared with float64")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if torch.cuda.is_available():
        set_gpu_environment()
    with World(Layout(ranks=1)) as world:
        record = open_record("sparse layers", options.out, world.backend, Path(__file__).parent, tiny=options.tiny)
        checks = record.setdefault("checks", {})
        rows = record.setdefault("rows", {})
        for name in options.kinds.split(","):
            kind = KINDS[name]
            lengths = [int(x) for x in options.lengths.split(",") if x] or [256 if options.tiny else kind.rows]
            if name not in checks:
                # As many rows as choose: a few more than the keys that each may.
                checked = options.checked or (192 if options.tiny else 4096)
                layer = Layer(kind, bound(checked, world), tiny=options.tiny)
                kernels = dict.fromkeys(
                    kernel for module, kernel in ways_of(name, layer).values() if module is layer.module
                )
                checks[name] = check(layer, list(kernels))
                del layer
            for length in lengths:
                if (key := f"{name}, {length:,}") in rows:
                    continue
                layer = Layer(kind, bound(length, world), tiny=options.tiny)
                rows[key] = measure(layer, ways_of(name, layer))
                del layer
                print(key, rows[key], flush=True)
                if options.out is not None:
                    options.out.write_text(json.dumps(record, indent=1))
        write_page(record, options.out, "Attention of layers that choose", markdown(record))


if __name__ == "__main__":
    main()
