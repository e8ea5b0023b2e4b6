"""Where the Cost of a model comes from: a file of measured constants, H200s as measured, CPUs by orders of magnitude.

`with_recomputation` and `with_spans` change a cost for layers that run forward twice, and for rows of images that see
each other.
"""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from longspan.errors import ConfigError, LongspanError, PlanError
from longspan.plan.cost.cost import DEFAULT_COST, Cost
from longspan.plan.cost.model_flops import later_pairs
from longspan.plan.cost.model_shape import ModelShape

# What H200s sustain (bench/records/step-analysis.md): attention's kernels, and all else of a step together: layers,
# exchanges that show, optimizer and waiting.
H200_ATTENTION_TFLOPS = 600.0
H200_TFLOPS = 450.0
# Of state-space layers: scans, both passes, by flash-linear-attention (Qwen3-Next's at 67; narrower heads do less), and
# what a row and channel of the convolution takes, with norms and gates: the layer's time on one GPU less its
# scan and its projections at H200_TFLOPS (bench/records/mixers-4xH200.md, one GPU at its share of 131,072 rows).
H200_SCAN_TFLOPS = 55.0
# Of the passes that give a run's states to others, with the folds of these: what a member of a group takes beyond a
# single rank, 1 ms of a layer and 16,384 rows (bench/records/mixer-member-H200.md).
H200_SUMMARY_TFLOPS = 100.0
H200_CHANNEL_SECONDS = 40e-12
# Of a group's ring in one layer, one way: what sharded attention takes beyond its kernels, 2 ms forward and backward at
# degree 4 and 16K or 64K packed rows (bench/records/attention-time-packed-4xH200.md).
H200_RING_STEP_SECONDS = 300e-6
# Of one layer's forward pass: what the host takes to launch it, at degree 2 with a message for each layer. Four
# micro-batches of 4 layers through two stages took 85 to 89 ms (bench/records/eval-4xH200.md, 8k-pp2): some 15 of
# them are no micro-batch's, and the device was busy for 36.
H200_LAUNCH_SECONDS = 3.5e-3
H200_SOURCE = "the model on H200s"  # `Cost.source` of what follows from these

# Of a process on CPUs with gloo, as orders of magnitude: they decide how parts of a plan compare, never a time.
CPU_TFLOPS = 0.02
CPU_GBPS = 1.0
CPU_RING_STEP_SECONDS = 500e-6


def cost_on_h200(config: Any, *, depths: int = 0) -> Cost:
    """The cost of a model, as in `Cost.for_model`, by what H200s were measured to sustain.

    Forward passes without backward are short, and are also priced by what the host takes to launch them.

    >>> plan = plan_dynamic(lengths, home, cost=cost_on_h200("Qwen3-8B/config.json"))  # doctest: +SKIP
    """
    cost = Cost.for_model(
        config,
        tflops=H200_TFLOPS,
        attention_tflops=H200_ATTENTION_TFLOPS,
        scan_tflops=H200_SCAN_TFLOPS,
        summary_tflops=H200_SUMMARY_TFLOPS,
        channel_seconds=H200_CHANNEL_SECONDS,
        ring_step_latency=H200_RING_STEP_SECONDS,
        depths=depths,
    )
    launch = ModelShape.of(config, depths=depths).decoder_layers * H200_LAUNCH_SECONDS
    forward = replace(cost.forward_only(), launch_seconds=launch)
    return replace(cost, source=H200_SOURCE, forward=forward)


def cost_on_cpus(config: Any, *, depths: int = 0) -> Cost:
    """How the parts of a model's plans compare on CPUs, none of which was measured: `source` is "".

    >>> cost_on_cpus("Qwen3-8B/config.json").source  # doctest: +SKIP
    ''
    """
    cost = Cost.for_model(
        config,
        tflops=CPU_TFLOPS,
        inside_gbps=CPU_GBPS,
        across_gbps=CPU_GBPS,
        ring_step_latency=CPU_RING_STEP_SECONDS,
        depths=depths,
    )
    return replace(cost, source="")


def with_recomputation(
    cost: Cost, config: Any, kind: str, layers: int = 0, *, frozen: bool = False, depths: int = 0
) -> Cost:
    """A model's cost if so many layers (0: each) run forward again in backward: "none", "selective" or "full".

    >>> with_recomputation(cost, "Qwen3-8B/config.json", "selective").linear_seconds  # doctest: +SKIP

    Forward is a third of what a layer's weights take (2 FLOPs of 6), and of "full" 2 products in attention of 7, one of
    the ring's two passes and a third of its bytes. torch stops before the last product of a dense layer, from which
    nothing is kept. Of `frozen` weights, under adapters, gradients are not computed: 2 FLOPs of 6. An evaluation
    recomputes nothing: its `forward_only` is that of the model's cost. State-space layers run again under either kind.
    """
    if kind == "none" and not frozen:
        return cost
    shape, forward = ModelShape.of(config, depths=depths), cost.forward_only()
    share = min(layers or shape.decoder_layers, shape.decoder_layers) / shape.decoder_layers if kind != "none" else 0.0
    full = share if kind == "full" else 0.0
    scans = cost.states.scan_seconds if cost.states else 0.0
    weights = (cost.linear_seconds - scans) * (1 + (share * shape.recomputed_weights / shape.weights - frozen) * 2 / 6)
    return replace(
        cost,
        linear_seconds=weights + scans * (1 + share / 3),
        attention_seconds=cost.attention_seconds * (1 + full * 2 / 7),
        ring_step_seconds=cost.ring_step_seconds * (1 + full / 2),
        ring_bytes=cost.ring_bytes * (1 + full / 3),
        exchange_bytes=cost.exchange_bytes * (1 + full / 2),
        states=cost.states and cost.states.with_recomputation(share),
        forward=forward,
    )


def with_spans(cost: Cost, config: Any, spans: Iterable[int], tokens: int) -> Cost:
    """A model's cost for documents of `tokens` rows in all, with spans of so many rows that see each other.

    >>> cost = with_spans(cost, "gemma-3-4b-it/config.json", [256] * 64, 32768)  # doctest: +SKIP

    Pairs count at the rate of attention, in the mean over rows: 256 rows of an image take Gemma 3 (4B) 0.4% more than
    as many of text. Of models whose images do not see each other, and of those that no configuration prices, it is the
    cost itself.
    """
    try:
        shape = ModelShape.of(config)
    except PlanError:
        return cost
    full = shape.layers - shape.window_layers - shape.chunk_layers
    if not (shape.span_layers and full and tokens):
        return cost
    pair_seconds = 2 * cost.attention_seconds / full  # causal attention over L rows has L² / 2 pairs
    added = shape.span_layers * pair_seconds * later_pairs(spans) / tokens
    forward = cost.forward and with_spans(cost.forward, config, spans, tokens)
    return replace(cost, linear_seconds=cost.linear_seconds + added, forward=forward)


def read_cost(file: str, key: str) -> Cost:
    """The cost in a JSON file, or the default where `file` is empty; `key` is what names the file, for messages.

    >>> read_cost("", "--cost") == Cost()
    True

    Raises ConfigError for a file that holds none, for a folder too.
    """
    if not file:
        return DEFAULT_COST
    try:
        values = json.loads(Path(file).read_text(encoding="utf-8"))
        return replace(_fill_exchange_bytes(Cost.from_json(values), values), source=file)
    except (OSError, ValueError, TypeError, LongspanError) as error:
        raise ConfigError(
            f"{key} {file} {_fault(error)}; give the file that `longspan bench calibrate --out FILE.json` writes for "
            "this machine"
        ) from error


def _fill_exchange_bytes(cost: Cost, values: dict[str, Any]) -> Cost:
    """A file without `exchange_bytes` is taken for one of four query heads to a key/value head, as in the default."""
    if "exchange_bytes" in values or "ring_bytes" not in values:
        return cost
    return replace(cost, exchange_bytes=cost.ring_bytes / DEFAULT_COST.ring_bytes * DEFAULT_COST.exchange_bytes)


def _fault(error: Exception) -> str:
    if isinstance(error, IsADirectoryError):
        return "is a folder"
    return f"holds no cost: {error.strerror if isinstance(error, OSError) else error}"
