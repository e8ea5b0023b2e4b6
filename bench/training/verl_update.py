"""An update of verl's actor by longspan's engine: log-probabilities of all rollouts, then the update.

    torchrun --nproc_per_node 2 bench/training/verl_update.py --folder /tmp/qwen3-4b --out verl-update-2xH200.json

Through verl's TrainingWorker (docs/verl.md), without Ray: `--samples` rollouts of lognormal lengths are one mini-batch
of PPO's loss. Each of `--ways` (planner:rows of a GPU) updates twice, the second time for the figures; then parameters
and states go to the host and come back. On CPUs, with VERL_ENGINE_DEVICE=cpu:
`--preset qwen3-tiny --vocabulary 2048 --samples 6 --longest 200 --ways dynamic:128,fixed-2:128`.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
import torch.distributed as dist
from bench.begun import open_record, peak_bytes, seconds_now, start_peak, write_page
from transformers import AutoModelForCausalLM

from longspan.model.presets import preset_config
from longspan.plain_text import markdown_table

WAYS = "dynamic:16384,fixed-2:16384,fixed-1:32768"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="qwen3-4b")
    parser.add_argument("--folder", type=Path, required=True, help="of the model; written if it is not there")
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--longest", type=int, default=32768, help="tokens of the longest rollout, prompt included")
    parser.add_argument("--ways", default=WAYS, help="planner:rows, with commas between")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    gpu = torch.cuda.is_available() and os.environ.get("VERL_ENGINE_DEVICE") != "cpu"
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
    configuration = preset_config(options.preset, vocab_size=options.vocabulary)
    write_folder(options.folder, configuration, "cuda" if gpu else "cpu")
    if not gpu:
        from tests.verl import workers  # noqa: F401  tells verl of CPUs
    record = measure(options, "cuda" if gpu else "cpu")
    if dist.get_rank() == 0:
        write_page(record, options.out, "An update of verl's actor", markdown(record))
    dist.barrier()
    dist.destroy_process_group()


def write_folder(folder: Path, configuration: Any, device: str) -> None:
    """Random bfloat16 weights, by the first rank; entered by all."""
    if dist.get_rank() == 0 and not (folder / "config.json").exists():
        torch.manual_seed(0)
        with torch.device(device):
            AutoModelForCausalLM.from_config(configuration, dtype=torch.bfloat16).save_pretrained(folder)
        torch.cuda.empty_cache()
    dist.barrier()


def rollout_lengths(samples: int, longest: int) -> list[tuple[int, int]]:
    """Draw lengths of prompts and answers: lognormal, a 20th of `longest` in the middle, the first `longest` in all."""
    drawn = np.random.default_rng(7).lognormal(np.log(longest / 20), 1.2, samples)
    answers = np.clip(drawn, 4, longest * 15 // 16).astype(int)
    prompts = np.random.default_rng(8).integers(2, longest // 32, samples)
    answers[0] = longest - prompts[0]
    return [*zip(prompts.tolist(), answers.tolist(), strict=True)]


def make_batch(lengths: list[tuple[int, int]], vocabulary: int, **entries: Any) -> Any:
    from verl.utils import tensordict_utils as tu

    g = torch.Generator().manual_seed(1)

    def nest(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    ids = [torch.randint(3, vocabulary, (p + r,), generator=g) for p, r in lengths]
    mask = nest([torch.ones(r, dtype=torch.long) for _, r in lengths])
    spread = float(np.log(vocabulary))
    tensors = {
        "input_ids": nest(ids),
        "position_ids": nest([torch.arange(len(i)) for i in ids]),
        "prompts": nest([i[:p] for i, (p, _) in zip(ids, lengths, strict=True)]),
        "responses": nest([i[p:] for i, (p, _) in zip(ids, lengths, strict=True)]),
        "response_mask": mask,
        "loss_mask": mask,
        "old_log_probs": nest([0.1 * torch.randn(r, generator=g) - spread for _, r in lengths]),
        "advantages": nest([torch.randn((), generator=g).expand(r).clone() for _, r in lengths]),
    }
    others = {"temperature": 1.0, "global_batch_size": len(ids), "global_token_num": [len(i) for i in ids]}
    return tu.get_tensordict(tensors, others | {"calculate_entropy": False} | entries)


def measure(options: argparse.Namespace, device: str) -> dict[str, Any]:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import ActorConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss

    from longspan.verl.settings import LongspanEngineConfig

    lengths = rollout_lengths(options.samples, options.longest)
    ranks = dist.get_world_size()
    tokens = sum(p + r for p, r in lengths)
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(path=str(options.folder), load_tokenizer=False),
            engine_config=LongspanEngineConfig(use_dynamic_bsz=True),
            optimizer_config=FSDPOptimizerConfig(lr=1e-6, clip_grad=1.0),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    worker.set_loss_fn(partial(ppo_loss, config=ActorConfig(strategy="longspan", rollout_n=1, use_dynamic_bsz=True)))
    batch = partial(make_batch, lengths, options.vocabulary)
    record = open_record("verl_update", None, device, Path(__file__).parent, ranks=ranks, preset=options.preset)
    record |= {"samples": len(lengths), "tokens": tokens, "longest": options.longest, "rows": []}
    for way in options.ways.split(","):
        planner, rows = way.split(":")
        planner, _, degree = planner.partition("-")
        settings = {"planner": planner, "context_parallel_size": int(degree or 1), "max_tokens_per_slot": int(rows)}
        worker.engine.engine_config = dataclasses.replace(worker.engine.engine_config, **settings)
        row: dict[str, Any] = {"way": way}
        for _ in range(2):  # the first makes graphs
            start_peak()
            row["log_prob_seconds"] = timed(lambda: worker.infer_batch(batch(compute_loss=False)))
            row["update_seconds"] = timed(lambda: worker.train_batch(batch(update_lr_scheduler=True)))
        row["tokens_per_second_per_gpu"] = tokens / row["update_seconds"] / ranks
        row["peak_bytes"] = peak_bytes()
        record["rows"].append(row)
    record["away_seconds"] = timed(lambda: worker.to("cpu"))
    record["away_bytes"] = torch.cuda.memory_allocated() if device == "cuda" else 0
    record["back_seconds"] = timed(lambda: worker.to("device"))
    worker.engine.world.close()
    return record


def timed(call: Callable[[], Any]) -> float:
    """Return the seconds of a call that all ranks enter."""
    dist.barrier()
    started = seconds_now()
    call()
    seconds_now()
    dist.barrier()
    return seconds_now() - started


def markdown(record: dict[str, Any]) -> str:
    columns = ["plan:rows of a GPU", "log-probabilities, s", "update, s", "tokens/s/GPU", "peak, GiB"]
    names = ("log_prob_seconds", "update_seconds", "tokens_per_second_per_gpu")
    rows = [
        [row["way"], *(f"{row[x]:,.2f}" for x in names), f"{row['peak_bytes'] / 2**30:.1f}"] for row in record["rows"]
    ]
    about = ", ".join(f"{name} {record[name]}" for name in ("preset", "ranks", "samples", "tokens", "longest"))
    return (
        f"{about}\n\n{markdown_table(columns, rows)}\n\nTo the host in {record['away_seconds']:.1f} s, with "
        f"{record['away_bytes'] / 2**30:.2f} GiB left on the device, and back in {record['back_seconds']:.1f} s."
    )


if __name__ == "__main__":
    main()
