"""Adapters and whole models on one GPU beside what people run there without longspan, in one call.

    python bench/training/one_gpu_peer.py --mode lora --steps 4x8192,1x32768,1x65536 --out one.json
    python bench/training/one_gpu_peer.py --mode qlora --steps 4x8192 --model qwen3-8b

The peer is Hugging Face with liger's kernels where they are installed, peft's LoRA (rank 16, every linear), a base in
nf4 by bitsandbytes under `qlora`, gradient checkpointing, the fastest attention that works, all in bfloat16, fused
AdamW; its sequences come one after another, as many as a step has. Ours is `longspan bench step` over the same lengths,
with the plan of memory that a run takes. Weights are random, learning rates 0. Each row is a process of its own.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
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
COLUMNS = ("step", "peer tokens/s", "longspan tokens/s", "ratio", "peer peak", "longspan peak", "peer")
WORDS = 30_000  # of which documents are drawn


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=sorted(MODES), default="lora", help="what is trained")
    parser.add_argument("--model", default="qwen3-8b", help="a preset, or a folder with config.json")
    parser.add_argument("--steps", default="4x8192,1x32768,1x65536", help="documents and tokens of a step, with commas")
    parser.add_argument("--repeats", type=int, default=3, help="steps that are timed, after one that is not")
    made = Path(tempfile.gettempdir(), "one_gpu_peer")
    parser.add_argument("--folder", type=Path, default=made, help="under qlora, of the peer's weights")
    parser.add_argument("--out", type=Path, default=Path("one_gpu.json"), help="the record")
    parser.add_argument("--peer", default="", help=argparse.SUPPRESS)  # in the peer's own process: one step
    options = parser.parse_args()
    if options.peer:
        print(json.dumps(measure_peer(options, *map(int, options.peer.split("x")))))
        return 0
    record = open_record("one GPU", None, "nccl", Path(__file__).parent, rows=[])
    for step in options.steps.split(","):
        words = [sys.executable, __file__, "--peer", step, "--mode", options.mode, "--model", options.model]
        words += ["--repeats", str(options.repeats), "--folder", str(options.folder)]
        row = {"step": step, "peer": read_last_line(words)}
        row["ours"] = measure_ours(options, step)
        record["rows"].append(row)
        page = markdown_table(COLUMNS, [table_row(row) for row in record["rows"]])
        write_page(record, options.out, f"{options.model}, {options.mode}, one GPU", page)
    return 0


def read_last_line(words: list[str]) -> dict[str, Any]:
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    try:
        return json.loads(ended.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return {"missing": ended.stderr.strip()[-400:]}


def measure_ours(options: argparse.Namespace, step: str) -> dict[str, Any]:
    source = "--model.preset" if not Path(options.model).exists() else "--model.config"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "step.json"
        words = [sys.executable, "-m", "longspan", "bench", "step", "--world", "1", source, options.model]
        words += [*MODES[options.mode].split(), "--planners", "fixed", "--same", step, "--out", str(out)]
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
            return time_peer(model, count, tokens, options.repeats) | {"attention": attention, "liger": liger}
        except Exception as error:  # whatever it cannot do is recorded
            row = missing_row(error) | {"attention": attention}
            model = None
            gc.collect()
            torch.cuda.empty_cache()
    return row


def build_peer(options: argparse.Namespace, attention: str) -> tuple[Any, bool]:
    try:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

        apply_liger_kernel_to_qwen3()
        liger = True
    except ImportError:
        liger = False
    config = preset_config(options.model)
    config.max_position_embeddings = 1 << 21
    torch.manual_seed(0)
    if options.mode == "qlora":
        model: Any = load_in_4_bits(config, options.folder, attention)
    else:
        model = draw_model(config, attention)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    if "lora" in options.mode:
        from peft import LoraConfig, get_peft_model

        model.enable_input_require_grads()
        lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
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
    peer = row["peer"]
    ours = row["ours"]

    def speed(side: dict[str, Any]) -> str:
        return f"{count * tokens / side['seconds']:,.0f}" if "seconds" in side else "none"

    def peak(side: dict[str, Any]) -> str:
        return f"{side['peak_bytes'] / 2**30:.1f} GiB" if "seconds" in side else side["missing"][:80]

    both = "seconds" in peer and "seconds" in ours
    ratio = f"{peer['seconds'] / ours['seconds']:.2f}" if both else "none"
    about = f"{peer.get('attention', '')}{', liger' if peer.get('liger') else ''}"
    return [f"{count} x {tokens:,}", speed(peer), speed(ours), ratio, peak(peer), peak(ours), about]


if __name__ == "__main__":
    sys.exit(main())
