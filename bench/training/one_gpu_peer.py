"""Adapters and whole models on one GPU beside what people run there without longspan, in one call.

    python bench/training/one_gpu_peer.py --mode full,lora --steps 4x8192,1x32768,1x65536 --out one.json
    python bench/training/one_gpu_peer.py --mode qlora --steps 4x8192 --model qwen3-8b
    python bench/training/one_gpu_peer.py --mode lora --steps 1x16384 --model qwen3-30b-a3b \
        --targets q_proj,k_proj,v_proj,o_proj

The peer is Hugging Face with liger's kernels where they are installed, peft's LoRA (rank 16), a base in nf4 by
bitsandbytes under `qlora`, the fastest attention that works, all in bfloat16, fused AdamW; its sequences come one after
another, as many as a step has. It runs at the better of its two settings: without gradient checkpointing, and with it
where that runs out of memory. Ours is `longspan bench step` over the same lengths, with the plan of memory that a run
takes for each. Weights are random, learning rates 0. Each side of a row is a process of its own, and stands in the
record once it has run: the same command goes on where it was ended.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench.begun import missing_row, open_record, peak_bytes, seconds_now, start_peak, write_page
from transformers import AutoModelForCausalLM

from longspan.model.presets import preset_config
from longspan.plain_text import markdown_table

MODES = {
    "lora": "--model.dtype bfloat16 --lora.rank 16",
    "qlora": "--model.dtype bfloat16 --lora.rank 16 --model.frozen nf4",
    "full": "--model.dtype bfloat16 --optimizer.stochastic_rounding true",
    "float32": "",
}
COLUMNS = ("mode", "step", "peer tokens/s", "longspan tokens/s", "ratio", "peer peak", "longspan peak", "peer")
WORDS = 30_000  # of which documents are drawn


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", default="lora", help=f"what is trained, with commas: {', '.join(MODES)}")
    parser.add_argument("--model", default="qwen3-8b", help="a preset, or a folder with config.json")
    parser.add_argument("--steps", default="4x8192,1x32768,1x65536", help="documents and tokens of a step, with commas")
    parser.add_argument("--repeats", type=int, default=3, help="steps that are timed, after one that is not")
    parser.add_argument("--targets", default="", help="linears with adapters, with commas (every one)")
    made = Path(tempfile.gettempdir(), "one_gpu_peer")
    parser.add_argument("--folder", type=Path, default=made, help="under qlora, of the peer's weights")
    parser.add_argument("--out", type=Path, default=Path("one_gpu.json"), help="the record")
    # In the peer's own process: one step, and whether activations are computed again.
    parser.add_argument("--peer", default="", help=argparse.SUPPRESS)
    parser.add_argument("--checkpointing", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := {*options.mode.split(",")} - {*MODES}:
        parser.error(f"--mode has {', '.join(sorted(unknown))}; choose from {', '.join(MODES)}")
    if options.peer:
        print(json.dumps(measure_peer(options, *map(int, options.peer.split("x")))))
        return 0
    record = open_record(
        "one GPU", options.out, "nccl", Path(__file__).parent, model=options.model, targets=options.targets
    )
    rows: dict[str, Any] = record.setdefault("rows", {})
    for mode in options.mode.split(","):
        for step in options.steps.split(","):
            row = rows.setdefault(f"{mode} {step}", {"mode": mode, "step": step})
            for side, measure in (("ours", measure_ours), ("peer", measure_better_peer)):
                if side not in row:
                    row[side] = timed(measure, options, mode, step)
                    page = markdown_table(COLUMNS, [table_row(row) for row in rows.values()])
                    write_page(record, options.out, f"{options.model}, one GPU", page)
    return 0


def timed(
    measure: Callable[[argparse.Namespace, str, str], dict[str, Any]], options: argparse.Namespace, mode: str, step: str
) -> dict[str, Any]:
    started = time.monotonic()
    return measure(options, mode, step) | {"took_seconds": round(time.monotonic() - started, 1)}


def measure_better_peer(options: argparse.Namespace, mode: str, step: str) -> dict[str, Any]:
    """Without gradient checkpointing, which is the faster way, unless that runs out of memory."""
    words = [sys.executable, __file__, "--peer", step, "--mode", mode, "--model", options.model]
    words += ["--repeats", str(options.repeats), "--folder", str(options.folder), "--targets", options.targets]
    row = read_last_line(words)
    if "OutOfMemory" not in row.get("missing", ""):
        return row
    return read_last_line([*words, "--checkpointing"]) | {"without checkpointing": row["missing"]}


def read_last_line(words: list[str]) -> dict[str, Any]:
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    try:
        return json.loads(ended.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return {"missing": ended.stderr.strip()[-400:]}


def measure_ours(options: argparse.Namespace, mode: str, step: str) -> dict[str, Any]:
    source = "--model.preset" if not Path(options.model).exists() else "--model.config"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "step.json"
        words = [sys.executable, "-m", "longspan", "bench", "step", "--world", "1", source, options.model]
        words += [*MODES[mode].split(), "--planners", "fixed", "--same", step, "--out", str(out)]
        words += ["--lora.target_modules", options.targets] * bool(options.targets)
        words += ["--warmup", "1", "--repeats", str(options.repeats), "--model.rope_scaling", "yarn"]
        ended = subprocess.run(words, capture_output=True, text=True, check=False)
        if not out.exists():
            return {"missing": ended.stderr.strip()[-400:]}
        record = json.loads(out.read_text())
    (row,) = record["rows"]
    return {name: row[name] for name in ("seconds", "peak_bytes", "loss")} | {"memory": record.get("memory")}


def measure_peer(options: argparse.Namespace, count: int, tokens: int) -> dict[str, Any]:
    for attention in ("flash_attention_4", "sdpa"):
        try:
            model, liger = build_peer(options, attention)
            settings = {"attention": attention, "liger": liger, "checkpointing": options.checkpointing}
            return time_peer(model, count, tokens, options.repeats) | settings
        except torch.OutOfMemoryError as error:
            return missing_row(error) | {"attention": attention}
        except Exception as error:  # whatever it cannot do is recorded
            row = missing_row(error) | {"attention": attention}
            model = None
            gc.collect()
            torch.cuda.empty_cache()
    return row


def build_peer(options: argparse.Namespace, attention: str) -> tuple[Any, bool]:
    config = preset_config(options.model)
    try:
        import liger_kernel.transformers as kernels

        apply: Any = getattr(kernels, f"apply_liger_kernel_to_{config.model_type}", None)
        liger = apply is not None
        if liger:
            apply()
    except ImportError:
        liger = False
    config.max_position_embeddings = 1 << 21
    torch.manual_seed(0)
    if options.mode == "qlora":
        model: Any = load_in_4_bits(config, options.folder, attention)
    else:
        model = draw_model(config, attention)
    if options.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    if "lora" in options.mode:
        from peft import LoraConfig, get_peft_model

        if options.checkpointing:
            model.enable_input_require_grads()
        targets = options.targets.split(",") if options.targets else "all-linear"
        lora = LoraConfig(r=16, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
    return model, liger


def draw_model(config: Any, attention: str) -> Any:
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
    torch.set_default_dtype(torch.float32)
    return model


def load_in_4_bits(config: Any, folder: Path, attention: str) -> Any:
    """The folder of the model as people load it: `BitsAndBytesConfig`, nf4, computed in bfloat16."""
    from transformers import BitsAndBytesConfig

    if not (folder / "config.json").exists():
        draw_model(config, "sdpa").save_pretrained(folder)
        torch.cuda.empty_cache()
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=four, dtype=torch.bfloat16, attn_implementation=attention, device_map={"": 0}
    )


def time_peer(model: Any, count: int, tokens: int, repeats: int) -> dict[str, Any]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0, fused=True)
    start_peak()
    seconds = list[float]()
    for _ in range(repeats + 1):
        start = seconds_now()
        for _ in range(count):
            ids = torch.randint(0, WORDS, (1, tokens), device="cuda")
            (model(input_ids=ids, labels=ids, use_cache=False).loss / count).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(seconds_now() - start)
    return {"seconds": statistics.median(seconds[1:]), "peak_bytes": peak_bytes()}


def table_row(row: dict[str, Any]) -> list[str]:
    count, tokens = map(int, row["step"].split("x"))
    ours = row.get("ours", {})
    peer = row.get("peer", {})

    def speed(side: dict[str, Any]) -> str:
        return f"{count * tokens / side['seconds']:,.0f}" if "seconds" in side else "none"

    def peak(side: dict[str, Any]) -> str:
        return f"{side['peak_bytes'] / 2**30:.1f} GiB" if "seconds" in side else side.get("missing", "")[:80]

    both = "seconds" in peer and "seconds" in ours
    ratio = f"{peer['seconds'] / ours['seconds']:.2f}" if both else "none"
    words = [peer.get("attention", ""), "liger" * peer.get("liger", False)]
    words.append("gradient checkpointing" if peer.get("checkpointing") else "no checkpointing")
    about = ", ".join(filter(None, words)) if "seconds" in peer else ""
    return [row["mode"], f"{count} x {tokens:,}", speed(peer), speed(ours), ratio, peak(peer), peak(ours), about]


if __name__ == "__main__":
    sys.exit(main())
