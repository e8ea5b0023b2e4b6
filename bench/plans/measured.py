"""Measured steps and single layers of bench/records, each with what a run plans it by.

A `Measured` row predicts itself by the public path: the cost of the model on a machine (`Machine.cost`), the planner of
the record, `plan.predicted_seconds`. No constant of a row is fitted to it.
"""

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from longspan import Group, Layout, plan_dynamic, plan_fixed, plan_padded
from longspan.model.presets import preset_config
from longspan.plan import AttentionCall, Cost, CostSettings, EncoderLoad, EncoderShape, Machine, PlanOptions
from longspan.plan.cost.machine import Recomputation
from longspan.plan.shape.model_shape import ModelShape
from longspan.plan.ways import plan_evaluation

HERE = Path(__file__).resolve().parents[1]
RECORDS = HERE / "records"

QWEN3_8B = {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8}
QWEN3_8B |= {"head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936}
QWEN3_4B = QWEN3_8B | {"hidden_size": 2560, "intermediate_size": 9728, "vocab_size": 10240}

# Dense steps of eager layers, of 20 to 23 November.
EAGER = ("step-4xH200-64k", "step-4xH200-128k", "step-4xH200-files", "step-4xH200-tail", "step-H200-norms")
EAGER += ("step-train-4xH200", "steps-2xH200")
REPLICATED = "the bench's own stand-in for images on every rank, in which no run encodes"
UNLIMITED = (
    "over a loopback whose speed varies by 10 % in the mean and up to 60 %; measured again over links of 10 Gbit/s "
    "(two-nodes-attention-10g-2xH100)"
)
OLDER = {  # what has changed in the code since a record was made, by record or by (record, part of the row's name)
    "step-4xH200-moe": "experts ran grouped_mm: 18.1 ms a layer of 16K rows, now 8.2 (experts-H200)",
    "eval-4xH200": "waited for the host, which makes 44 % fewer calls since FSDP2's modules are listed once",
    "hybrid-step-4xH200": "made before the kernels of delta nets and of experts",
    ("mixture-2xH200", "padded"): "experts without rows were multiplied one by one (mixture-2xH100)",
    **dict.fromkeys(EAGER, "eager layers took some 10 % longer then; made again as price-dense-eager-H200"),
    ("price-images-H200", "replicated"): REPLICATED,
    ("vision-step-4xH200", "replicated"): REPLICATED,
    ("two-commits-4xH200", "fixed"): "eager layers took some 10 % longer then; made again as price-dense-eager-H200",
    ("steps-compiled-2xH200", "of 6 layers"): "2.444 s since sums of gradients use freed memory (step-32k-2xH200)",
    "two-nodes-attention-2xH100": UNLIMITED,
    "two-nodes-step-2xH200": UNLIMITED,
    "two-nodes-step-16k-2xH100": UNLIMITED,
    "two-hosts": UNLIMITED,
}
# Layers that were timed before the bench loaded GPUs for a second first. Thirteen passes of so many seconds end within
# a quarter of a second, in which clocks are those of a GPU that has rested.
BURST_RECORDS = ("attention-4xH200", "attention-packed-4xH200", "attention-window-types-4xH200", "attention-2xH200")
BURST_RECORDS += ("attention-window-2xH200", "two-commits-4xH200")
BURST_SECONDS = 0.25 / 13


@dataclass(frozen=True)
class Measured:
    """One measured time, and how the same is predicted."""

    record: str
    name: str
    model: str
    slots: int
    rows: str
    kind: str
    settings: str
    seconds: float
    predict: Callable[[Machine], float]
    older: str = ""

    @property
    def device(self) -> str:
        """The name of the GPUs that were measured."""
        return "H100" if self.record.endswith("H100") else "H200"

    @property
    def is_layer(self) -> bool:
        """Whether it is one layer's attention, not a whole step."""
        return self.settings.startswith("one layer")

    @property
    def is_training_step(self) -> bool:
        """Whether it is a whole training step."""
        return not self.is_layer and not self.settings.startswith("forward")


def measured_rows() -> list[Measured]:
    """All rows, in the order of records."""
    rows = [*_steps(), *_research_steps(), *_adapters(), *_images(), *_emulated_nodes(), *_evaluations()]
    rows += [*_many_micro_batches(), *_layers()]
    return [replace(row, older=_older(row)) for row in rows]


def _older(row: Measured) -> str:
    parts = (
        reason
        for key, reason in OLDER.items()
        if isinstance(key, tuple) and key[0] == row.record and key[1] in row.name
    )
    if row.is_layer and row.kind == "a2a+p2p":
        return "heads went in one piece; in slices, messages hide behind them since"
    if row.is_layer and row.record in BURST_RECORDS and row.seconds < BURST_SECONDS:
        return "in a burst, at clocks up to 21 % above those of training (attention-pieces-H200)"
    return OLDER.get(row.record) or next(parts, "")


def _read(name: str) -> dict[str, Any]:
    return json.loads((RECORDS / f"{name}.json").read_text())


def record_command(name: str) -> str:
    """Return the command that makes a record again; empty where it names none."""
    return str(_read(name).get("command") or "")


def _rows_text(lengths: list[int]) -> str:
    if len(set(lengths)) == 1:
        return f"{len(lengths)} x {lengths[0]:,}" if len(lengths) > 1 else f"{lengths[0]:,}"
    return f"{len(lengths)} documents, {sum(lengths):,}, longest {max(lengths):,}"


def _predict_step(
    machine: Machine,
    *,
    config: Any,
    lengths: list[int],
    slots: int,
    planner: str,
    cp: int,
    settings: CostSettings,
    options: PlanOptions,
    stages: int = 1,
) -> float:
    options, home = replace(options, cost=machine.cost(config, settings)), Layout(slots * stages, pp=stages)
    if planner == "dynamic":
        return plan_dynamic(lengths, home, options=options).predicted_seconds
    plan = plan_padded if planner == "padded" else plan_fixed
    return plan(lengths, home, cp, options=options).predicted_seconds


def _config(record: dict[str, Any]) -> tuple[str, Any, int]:
    """The name, the configuration and the query heads of a record's model."""
    shape, name = record["shape"], record["shape_name"]
    if name.startswith("examples/"):
        return name.rsplit("/", 1)[-1], HERE.parent / name, 16
    if name in ("qwen3-4b", "qwen3-30b-a3b"):
        config = preset_config(name, vocab_size=151936)
        config.num_hidden_layers = shape["layers"]
        return f"{name}, {shape['layers']} layers", config, config.num_attention_heads
    config = QWEN3_8B | {"num_hidden_layers": shape["layers"], "hidden_size": shape["hidden"]}
    if shape.get("experts"):
        config |= {"num_key_value_heads": shape["key_value_heads"], "intermediate_size": shape["ffn"]}
        config |= {"num_experts": shape["experts"], "num_experts_per_tok": shape["experts_per_token"]}
        config |= {"moe_intermediate_size": shape["expert_ffn"]}
    return f"{name.lower()}, {shape['layers']} layers", config, 32


STEPS = ("step-4xH200-64k", "step-4xH200-128k", "step-4xH200-files", "step-4xH200-tail", "step-4xH200-moe")
STEPS += ("step-H200-norms", "step-train-4xH200", "hybrid-step-H200", "hybrid-step-2xH200", "hybrid-step-4xH200")
STEPS += ("hybrid-step-packed-2xH200",)
STEPS += ("step-32k-2xH200", "step-32k-a2a-2xH200", "step-32k-room-2xH200", "step-64k-2xH200")
STEPS += ("longest-none-2xH200", "step-packed-2xH200")
STEPS += ("longest-none-H200", "step-256k-2xH200", "mixture-2xH200", "memory-choice-2xH200")
STEPS += ("step-64k-selective-2xH200", "step-64k-host-2xH200", "step-packed-float8-2xH200")
STEPS += ("longest-selective-H200", "longest-selective-2xH200", "mixture-2xH100")
STEPS += ("price-dense-H200", "price-dense-packed-H200", "price-dense-recomputed-H200", "price-dense-eager-H200")
STEPS += ("price-dense-eager-packed-H200", "price-experts-single-H200", "price-experts-H200")
STEPS += ("price-pipeline-2xH100",)
STEPS += ("price-hybrid-H200", "price-hybrid-packed-H200", "price-dense-long-H200", "price-dense-lognorm-H200")
STEPS += ("price-dense-2xH100",)
# Predicted by the machine that was calibrated before them.
NODE_STEPS = ("two-nodes-step-2xH200", "two-nodes-step-16k-2xH100", "two-nodes-step-10g-2xH100")
NODE_STEPS += ("two-nodes-hsdp-10g-2xH100",)


def _steps() -> Iterator[Measured]:
    """Of `longspan bench step`."""
    for name in STEPS:
        read = _read(name)
        for record in read.get("runs", [read]):
            for row in record["rows"]:
                if "predicted_seconds" in row:
                    yield _bench_step(name, record, row["name"], row["seconds"])
    record = _read("step-4xH200-64k")
    runs = [run for run in _read("two-commits-4xH200")["runs"] if run["bench"] == "step" and run["which"] == "now"]
    for rows in zip(*(run["rows"] for run in runs), strict=True):
        seconds = statistics.median(row["seconds"] for row in rows)
        yield _bench_step("two-commits-4xH200", record, rows[0]["name"], seconds)


def _bench_step(name: str, record: dict[str, Any], row: str, seconds: float) -> Measured:
    model, config, heads = _config(record)
    planner = next((word for word in ("dynamic", "padded") if word in row), "fixed")
    sequences = record.get("sequences") or []
    lengths = (
        [int(row.split(", ")[-1].split()[0].replace(",", ""))] if sequences and "rows" in row else record["lengths"]
    )
    stages = record.get("pp", 1)
    slots = record["ranks"] // stages
    recompute, layers, settings = _kept_in_layers(record)
    kind, cap, cp = record["cp_comm_type"], record["max_tokens_per_slot"], record["cp"] or slots
    words = [planner, f"recomputation {recompute}{f' of {layers} layers' if layers else ''}"]
    words += (
        ["compiled"] * (settings.compiled == "layers")
        + ["float8"] * settings.float8
        + ["FSDP2"] * (slots > 1)
        + ["hybrid, experts"] * ("hybrid" in name)
        + ["experts"] * ("moe" in name or "mixture" in name or "experts" in name)
        + [f"pipeline of {stages}"] * (stages > 1)
    )
    words += [row] * (name == "step-H200-norms")
    return Measured(
        record=name,
        name=row,
        model=model,
        slots=slots,
        rows=_rows_text(lengths),
        kind=kind,
        settings=", ".join(words),
        seconds=seconds,
        predict=partial(
            _predict_step,
            config=config,
            lengths=lengths,
            slots=slots,
            planner=planner,
            cp=cp,
            settings=replace(settings, shards=slots),
            stages=stages,
            options=PlanOptions(
                max_tokens_per_slot=cap or None,
                cp_comm_type=kind,
                heads=heads,
                partition=record.get("partition", "zigzag"),
            ),
        ),
    )


def _kept_in_layers(record: dict[str, Any]) -> tuple[str, int, CostSettings]:
    """What layers recompute, how many of them (0: all), and the settings that price it.

    A record with a plan of memory is of compiled layers unless it says otherwise; of these some recompute nothing, and
    the others all the same.
    """
    recompute, layers = record["recompute"], record.get("recompute_layers", 0)
    if not record.get("memory"):
        return recompute, layers, CostSettings(recomputation=_kind(recompute), recomputed_layers=layers)
    words = [word.removesuffix("+host") for word in record["memory"]["measures"] if word != "none"]
    layers, recompute = len(words), words[0] if words else "none"
    settings = CostSettings(
        recomputation=recompute,
        recomputed_layers=layers,
        gathered_once=record["memory"]["gathered_once"],
        compiled="none" if record.get("compiled") == "none" else "layers",
        float8=bool(record.get("float8")),
    )
    return recompute, layers, settings


def _kind(recompute: str) -> Recomputation:
    """How a record's layers were recomputed, in today's words: "selective" kept what was exchanged in all of these."""
    kinds: dict[str, Recomputation] = {"none": "none", "selective": "exchanged", "full": "full"}
    return kinds[recompute]


def _research_steps() -> Iterator[Measured]:
    """Of bench/records/steps-2xH200.json, and with compiled layers of steps-compiled-2xH200.json."""
    records = ("steps-2xH200", "steps-compiled-2xH200")
    for name, row in [(record, row) for record in records for row in _read(record)["rows"]]:
        slots, lengths, count, compiled = (
            row["ranks"],
            row["lengths"],
            row.get("recompute_layers", 0),
            "compiled" in name,
        )
        again = row.get("gathered_once", not row.get("reshard", True))
        settings = CostSettings(
            recomputation=_kind(row["recompute"]),
            recomputed_layers=count,
            shards=slots,
            gathered_once=again,
            compiled="layers" if compiled else "none",
        )
        words = f"fixed, recomputation {row['recompute']}{f' of {count} layers' if count else ''}, FSDP2"
        words += ", gathered once" * again + ", compiled" * compiled
        cap = row.get("max_tokens_per_slot", 0)
        speed = row.get("tokens_per_second") or row["tokens_per_second_per_device"]
        yield Measured(
            record=name,
            name=words,
            model=f"qwen3-8b, {row['layers']} layers",
            slots=slots,
            rows=_rows_text(lengths),
            kind="auto",
            settings=words,
            seconds=sum(lengths) / slots / speed,
            predict=partial(
                _predict_step,
                config=QWEN3_8B | {"num_hidden_layers": row["layers"]},
                lengths=lengths,
                slots=slots,
                planner="fixed",
                cp=row["cp"],
                settings=settings,
                options=PlanOptions(max_tokens_per_slot=cap or None, cp_comm_type="auto", heads=32),
            ),
        )


def _emulated_nodes() -> Iterator[Measured]:
    """Steps of two emulated nodes, by the cost of the machine that was calibrated before them."""
    yield from (row for name in NODE_STEPS for row in _node_steps(name))


def _node_steps(name: str) -> Iterator[Measured]:
    record = _read(name)
    cost, slots = Cost.from_json(record["cost"]), record["ranks"]
    options = PlanOptions(max_tokens_per_slot=record["max_tokens_per_slot"], cp_comm_type="auto", heads=32, cost=cost)
    options = replace(options, node_size=record["node_size"], mode=record["mode"])
    sharding = "HSDP" if record.get("dp_replicate", 1) > 1 else "FSDP2"
    for row in record["rows"]:
        planner = row["name"].split()[1]

        def predict(_: Machine, planner: str = planner) -> float:
            plan = partial(plan_dynamic if planner == "dynamic" else partial(plan_fixed, cp=slots), options=options)
            return plan(record["lengths"], Layout(slots)).predicted_seconds

        yield Measured(
            record=name,
            name=row["name"],
            model=_config(record)[0],
            slots=slots,
            rows=_rows_text(record["lengths"]),
            kind="auto",
            settings=f"{planner}, {record['mode']}, hosts of 1, recomputation none, compiled, {sharding}",
            seconds=row["seconds"],
            predict=predict,
        )


def _adapters() -> Iterator[Measured]:
    """LoRA on one slot. The record has sums of rows, not lengths: squares follow from its FLOPs."""
    weights = ModelShape.of(QWEN3_8B).weights
    for row in _read("lora-sft-h200")["metrics"]:
        if "tflops" not in row:
            continue
        tokens, flops, count = row["tokens"], row["tflops"] * 1e12 * row["seconds"], row["micro_batches"]
        squares, share = 2 * (flops - 4 * weights * tokens) / (12 * 4096 * 36), row["targets"] / tokens
        yield Measured(
            record="lora-sft-h200",
            name=f"step {row['step']}",
            model="qwen3-8b, 36 layers",
            slots=1,
            rows=f"{tokens:,} in {count} micro-batches",
            kind="",
            settings="LoRA, recomputation selective",
            seconds=row["seconds"],
            predict=partial(_predict_adapters, tokens=tokens, squares=squares, count=count, target_share=share),
        )


def _predict_adapters(machine: Machine, *, tokens: int, squares: float, count: int, target_share: float) -> float:
    settings = CostSettings(recomputation="selective", frozen=True, shards=1, target_share=target_share)
    cost = machine.cost(QWEN3_8B, settings)
    work = float(cost.work_seconds(tokens, squares))
    return work + count * cost.micro_batch_seconds + cost.update_seconds


def _images() -> Iterator[Measured]:
    """Language model and tower; the documents of bench/vision are drawn again."""
    yield from (row for name in ("vision-step-4xH200", "price-images-H200") for row in _image_steps(name))


def _image_steps(name: str) -> Iterator[Measured]:
    sys.path.insert(0, str(HERE / "vision"))
    from vision_cases import Sizes, VisionDocuments  # pyright: ignore[reportMissingImports]

    record, sizes = _read(name), Sizes()
    slots = record["ranks"]
    for row in record["rows"]:
        drawn = VisionDocuments.drawn(row["documents"], sizes, slots)
        images = [[side**2 for side in sides] for sides in drawn.images]
        text = [sum(words) for words in drawn.text]
        yield Measured(
            record=name,
            name=f"{row['documents']} images a document, {row['plan']}, {row['encoder']}",
            model="qwen3-vl-8b, 8 layers, tower 27",
            slots=slots,
            rows=f"{row['documents']} images a document, {sum(text) + sum(drawn.rows):,}",
            kind="p2p",
            settings=f"{row['plan']} at degree {row['widest']}, images {row['encoder']}",
            seconds=row["seconds"],
            predict=partial(
                _predict_images, row=row, images=images, text=text, config=sizes.configuration(), slots=slots
            ),
        )


def _predict_images(
    machine: Machine, *, row: Any, images: list[list[int]], text: list[int], config: Any, slots: int
) -> float:
    """Language model and tower. Dynamic plans of the record have one degree, as fixed ones have."""
    lengths = [sum(of_document) + words for of_document, words in zip(images, text, strict=True)]
    cost = machine.cost(config, CostSettings(shards=slots, target_share=sum(text) / sum(lengths)))
    plan = plan_fixed(lengths, Layout(slots), row["widest"], max_tokens_per_slot=16384, cost=cost)
    load = EncoderLoad.of(plan, images, EncoderShape.of(config).cost(again=1), max_rows=8192)
    replicated = row["encoder"] == "replicated"
    return plan.predicted_seconds + (load.replicated_seconds if replicated else load.seconds)


def _evaluations() -> Iterator[Measured]:
    """Forward passes of four documents, with tensor parallelism or in a pipeline."""
    yield from (
        row for name, ranks in (("eval-4xH200", 4), ("evaluations-2xH100", 2)) for row in _evaluated(name, ranks)
    )


def _evaluated(name: str, ranks: int) -> Iterator[Measured]:
    record = _read(name)
    for case in [row | {"compiled": record.get("compiled", "none")} for row in record["rows"]]:
        home, lengths = Layout(ranks, tp=case["tp"], pp=case["pp"]), [case["tokens"]] * 4
        for run in case["runs"]:
            degree = run.get("degree")
            if degree is None or run["trained"] != degree:
                continue
            yield Measured(
                record=name,
                name=f"{case['name']} at {degree}",
                model=f"qwen3-4b, {case['layers']} layers",
                slots=home.slots,
                rows=_rows_text(lengths),
                kind="auto",
                settings=f"forward, degree {degree}, tp {home.tp}, pp {home.pp}",
                seconds=run["median"],
                predict=partial(_predict_evaluation, home=home, lengths=lengths, degree=degree, case=case),
            )


def _predict_evaluation(machine: Machine, *, home: Layout, lengths: list[int], degree: int, case: Any) -> float:
    layers, compiled = case["layers"], case.get("compiled", "none")
    settings = CostSettings(tp=home.tp, forward=True, shards=home.slots, compiled=compiled)
    cost = machine.cost(QWEN3_4B | {"num_hidden_layers": layers}, settings)
    cap = lengths[0] // degree
    options = PlanOptions(
        max_tokens_per_slot=cap, cost=cost, cp_comm_type="auto", heads=32, micro_batch_multiple=home.pp
    )
    plan = plan_evaluation(lambda o: plan_fixed(lengths, home, degree, options=o), lengths, home, options, degree)
    return plan.predicted_seconds


LAYERS = ("attention-4xH200", "attention-packed-4xH200", "attention-window-types-4xH200")
LAYERS += ("attention-2xH200", "attention-window-2xH200", "attention-2xH100", "attention-window-2xH100")
LAYERS += ("attention-packed-2xH100",)


HOST_TIMES = {"attention-window-2xH100": "attention-time-window-2xH100"}


def _layers() -> Iterator[Measured]:
    """One layer's attention under each type, forward and backward.

    A layer by itself takes no less than the host needs for its launches, where `HOST_TIMES` has a record of these.
    """
    for name in LAYERS:
        record = _read(name)
        host_rows = _read(HOST_TIMES[name])["rows"] if name in HOST_TIMES else []
        host = {(row["name"].split()[1], row["length"]): row["host"] for row in host_rows}
        documents = record["documents"]
        for row in record["rows"]:
            lengths, kind = [row["length"] // documents] * documents, row["name"].split()[1].strip(",")
            packed = name == "attention-packed-4xH200"
            if "seconds" in row and packed == ("graph" in row["name"]):  # short pieces wait for the host without one
                window, launches = record["window"] or None, host.get((kind, row["length"]), 0.0)
                yield _layer(name, record, lengths, kind, row["seconds"], window=window, host_seconds=launches)
    record = _read("attention-4xH200")
    runs = [run for run in _read("two-commits-4xH200")["runs"] if run["bench"] == "attention" and run["which"] == "now"]
    for rows in zip(*(run["rows"] for run in runs), strict=True):
        seconds, kind = statistics.median(row["seconds"] for row in rows), rows[0]["name"].split()[1]
        yield replace(_layer("attention", record, [rows[0]["length"]], kind, seconds), record="two-commits-4xH200")
    for name in ("two-nodes-attention-2xH100", "two-nodes-attention-10g-2xH100"):
        record = _read(name)
        hosts = {"slots": 2, "node_size": 1, "calibrated": Machine.from_json(record["calibrated"])}
        for row in record["rows"]:
            yield _layer(name, record, [row["length"]], row["name"].split()[1], row["seconds"], hosts=hosts)
    record = _read("two-hosts")
    for row in record["rows"]:
        for kind, seconds in row["seconds"].items():
            yield _layer("two-hosts", record, [row["length"]], kind, seconds, hosts=row)


def _layer(
    name: str,
    record: Any,
    lengths: list[int],
    kind: str,
    seconds: float,
    *,
    window: int | None = None,
    host_seconds: float = 0.0,
    hosts: Any = None,
) -> Measured:
    slots, node_size = (hosts["slots"], hosts["node_size"]) if hosts else (record["ranks"], 8)
    call = AttentionCall(
        heads=record["heads"], kv_heads=record["key_value_heads"], head_dim=record["head_size"], window=window
    )
    levels = (2, 2) if kind == "a2a+p2p" and not hosts else None
    group = Group(
        tuple(range(slots)), tuple(range(len(lengths))), tuple(lengths), hierarchical_context_parallel_sizes=levels
    )

    def predict(machine: Machine) -> float:
        if hosts and "calibrated" in hosts:
            machine = hosts["calibrated"]
        elif hosts:
            speed, latency = hosts["bytes_per_second"], hosts["latency"]
            machine = machine.with_link("across", bytes_per_second=speed, seconds=latency)
        return max(host_seconds, machine.attention_seconds(group, call, node_size=node_size)[kind].seconds)

    words = ["one layer"] + [f"window {window}"] * bool(window)
    return Measured(
        record=name,
        name=f"{kind}, {_rows_text(lengths)}" + (f", hosts of {node_size}" if hosts else ""),
        model="32/8 heads of 128",
        slots=slots,
        rows=_rows_text(lengths),
        kind=kind,
        settings=", ".join(words + ([f"hosts of {node_size}"] if hosts else [])),
        seconds=seconds,
        predict=predict,
    )


def _many_micro_batches() -> Iterator[Measured]:
    """Steps of many short micro-batches, whose time is the host's: in lockstep gathered once, or free."""
    record = _read("many-micro-batches-2xH100")
    lengths = json.loads((HERE / "training" / "lengths_5123.json").read_text())
    config = preset_config("qwen3-4b", vocab_size=151936)
    config.num_hidden_layers = 12
    for row in record["rows"]:
        planner, mode = row["name"].split()[-1], row["mode"]
        yield Measured(
            record="many-micro-batches-2xH100",
            name=row["name"],
            model="qwen3-4b, 12 layers",
            slots=2,
            rows=f"{_rows_text(lengths)}, {row['max_tokens_per_slot']:,} a slot",
            kind="auto",
            settings=f"{planner}, {mode}, recomputation none, compiled, FSDP2",
            seconds=row["seconds"],
            predict=partial(
                _predict_many,
                config=config,
                lengths=lengths,
                planner=planner,
                mode=mode,
                cap=row["max_tokens_per_slot"],
            ),
        )


def _predict_many(machine: Machine, *, config: Any, lengths: list[int], planner: str, mode: Any, cap: int) -> float:
    free = mode == "free"
    settings = CostSettings(shards=2, gathered_once=True, compiled="layers", free=free)
    cost = machine.cost(config, settings)
    if free:
        cost = cost.with_closing(ModelShape.of(config).stored_weights, Layout(2))
    options = PlanOptions(max_tokens_per_slot=cap, cp_comm_type="auto", heads=32, cost=cost, mode=mode)
    if planner == "dynamic":
        return plan_dynamic(lengths, Layout(2), options=options).predicted_seconds
    least = 2 if max(lengths) > cap else 1
    return min(plan_fixed(lengths, Layout(2), cp, options=options).predicted_seconds for cp in (least, 2))
