"""verl's TrainingWorker over longspan's engine on CPUs, batches for it, and one dense float64 model beside it.

Imported by ranks alone: verl warns of engines that it cannot import.
"""

import os
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ["VERL_ENGINE_DEVICE"] = "cpu"
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForTokenClassification
from verl.plugin.platform import platform_manager
from verl.plugin.platform.platform_cuda import PlatformCUDA

LENGTHS = [(40, 150), (7, 30), (20, 64), (3, 11), (33, 90), (5, 9)]  # of prompts and answers
VOCABULARY, TEMPERATURE, CAP, IMAGE = 64, 0.7, 160, 60


class PlatformCPU(PlatformCUDA):
    """verl has none for CPUs."""

    device_name = property(lambda self: "cpu")
    device_module = property(
        lambda self: types.SimpleNamespace(
            get_device_name=lambda: "CPU",
            max_memory_allocated=lambda: 0,
            max_memory_reserved=lambda: 0,
            synchronize=lambda: None,
            empty_cache=lambda: None,
        )
    )

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def communication_backend_name(self) -> str:
        return "gloo"

    def manual_seed(self, seed: int) -> None: ...

    def manual_seed_all(self, seed: int) -> None: ...


platform_manager.set_platform(PlatformCPU())
from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.utils.torch_functional import entropy_from_logits  # noqa: E402
from verl.workers.config import (  # noqa: E402
    ActorConfig,
    CriticConfig,
    EngineRouterReplayConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.config.actor import PolicyLossConfig  # noqa: E402
from verl.workers.engine_workers import TrainingWorker  # noqa: E402
from verl.workers.utils.losses import ppo_loss, sft_loss, value_loss  # noqa: E402

import longspan.verl  # noqa: E402, F401
from longspan.verl.settings import LongspanEngineConfig  # noqa: E402


def start_rank() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def write_model(folder: Path, kind: str = "qwen3", *, head: bool = False, **changes: Any) -> str:
    start_rank()
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False}
        ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        config = AutoConfig.for_model(kind, **sizes | heads | ids | changes)
        if head:
            config.num_labels, config.classifier_dropout = 1, 0.0
        automatic: Any = AutoModelForTokenClassification if head else AutoModelForCausalLM
        if "vision_config" in changes:
            config = AutoConfig.for_model(
                kind, **ids | changes | {"text_config": sizes | heads | changes["text_config"]}
            )
            automatic = AutoModelForImageTextToText
        automatic.from_config(config).double().save_pretrained(folder)
    dist.barrier()
    return str(folder)


def make_worker(
    folder: str,
    model_type: str = "language_model",
    *,
    model: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    checkpoint: list[str] | None = None,
    **engine: Any,
) -> Any:
    start_rank()
    settings = {
        "use_dynamic_bsz": True, "max_token_len_per_gpu": CAP, "infer_max_token_len_per_gpu": CAP,
        "model_dtype": "float64", "dtype": "float64",
    }  # fmt: skip
    contents = checkpoint or ["model", "optimizer", "extra"]
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type=model_type,
            model_config=HFModelConfig(path=folder, load_tokenizer=False, **model or {}),
            engine_config=LongspanEngineConfig(**settings | engine),
            optimizer_config=FSDPOptimizerConfig(**{"lr": 1e-3, "clip_grad": 1e9} | (optimizer or {})),
            checkpoint_config=CheckpointConfig(save_contents=contents, load_contents=contents),
        )
    )
    worker.reset()
    return worker


def nest(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def make_images() -> list[dict[str, Tensor] | None]:
    """Of each sample: two images in the first, of 24 and 16 patches, and one in the fifth."""
    g, grids = torch.Generator().manual_seed(2), {0: [[1, 4, 6], [1, 4, 4]], 4: [[1, 6, 4]]}
    patches = {i: sum(t * h * w for t, h, w in sample) for i, sample in grids.items()}
    return [
        {"pixel_values": torch.randn(patches[i], 24, generator=g), "image_grid_thw": torch.tensor(grids[i])}
        if i in grids
        else None
        for i in range(len(LENGTHS))
    ]


def make_batch(*, images: bool = False, alike: bool = False, **entries: Any) -> Any:
    """A batch as verl's trainers send it; `entries` are no tensors. A prompt has a row for four patches of an image.

    Prompts that are `alike` begin with the tokens of one another, in two families of three.
    """
    g = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, IMAGE, (p + r,), generator=g) for p, r in LENGTHS]
    if alike:
        for one, other in ((0, 2), (0, 4), (1, 3), (1, 5)):
            same = min(LENGTHS[one][0], LENGTHS[other][0])
            ids[other][:same] = ids[one][:same]
    if images:
        ids[0][2:8] = ids[0][12:16] = ids[4][5:11] = IMAGE

    def draw(spread: float, middle: float) -> Tensor:
        rows = [torch.randn(r, generator=g, dtype=torch.float64) for _, r in LENGTHS]
        return nest([middle + spread * row for row in rows])

    mask = [torch.ones(r, dtype=torch.long) for _, r in LENGTHS]
    mask[0][30:50] = 0  # an answer of a tool
    advantages = zip(LENGTHS, (1.0, -0.5, 0.3, -0.8, 0.7, -1.0), strict=True)
    tensors: dict[str, Any] = {
        "input_ids": nest(ids),
        "position_ids": nest([torch.arange(len(i)) for i in ids]),
        "prompts": nest([i[:p] for i, (p, _) in zip(ids, LENGTHS, strict=True)]),
        "responses": nest([i[p:] for i, (p, _) in zip(ids, LENGTHS, strict=True)]),
        "response_mask": nest(mask),
        "loss_mask": nest(mask),
        "old_log_probs": draw(0.3, -4),
        "ref_log_prob": draw(0.3, -4),
        "values": draw(1, 0),
        "returns": draw(1, 0),
        "advantages": nest([torch.full((r,), a, dtype=torch.float64) for (_, r), a in advantages]),
    }
    if images:
        tensors["multi_modal_inputs"] = make_images()
    others = {
        "temperature": TEMPERATURE, "global_batch_size": len(LENGTHS), "global_token_num": [len(i) for i in ids],
        "calculate_entropy": True, "calculate_sum_pi_squared": True, "update_lr_scheduler": True,
    }  # fmt: skip
    return tu.get_tensordict(tensors, others | entries)


def actor_loss(**settings: Any) -> Callable[..., Any]:
    return partial(ppo_loss, config=ActorConfig(strategy="longspan", rollout_n=1, use_dynamic_bsz=True, **settings))


def critic_loss(**settings: Any) -> Callable[..., Any]:
    return partial(value_loss, config=CriticConfig(strategy="longspan", use_dynamic_bsz=True, **settings))


def dense_output(model: Any, batch: Any, *, critic: bool = False) -> dict[str, Tensor]:
    """What verl's engines return of one model, sample by sample, in verl's convention of rows."""
    rows: dict[str, list[Tensor]] = {"values": []} if critic else {"log_probs": [], "entropy": [], "sum_pi_squared": []}
    temperature = 1.0 if critic else float(batch["temperature"])
    images = make_images() if "multi_modal_inputs" in batch.keys() else [None] * len(batch)  # noqa: SIM118
    for row, pixels in zip(batch["input_ids"].unbind(), images, strict=True):
        of_images = pixels and {**pixels, "mm_token_type_ids": (row == IMAGE)[None].int()}
        logits = model(input_ids=row[None], **of_images or {}).logits[0] / temperature
        if critic:
            rows["values"].append(logits[:, 0])
            continue
        rows["log_probs"].append(logits.log_softmax(-1).gather(1, row.roll(-1)[:, None])[:, 0])
        rows["entropy"].append(entropy_from_logits(logits))
        rows["sum_pi_squared"].append(logits.softmax(-1).square().sum(-1))
    return {
        name: torch.nested.nested_tensor_from_jagged(torch.cat(x), batch["input_ids"].offsets())
        for name, x in rows.items()
    }


def dense_update(
    model: Any, batch: Any, loss_fn: Any, optimizer: Any = None, *, critic: bool = False
) -> tuple[float, float, dict[str, Tensor]]:
    output = dense_output(model, batch, critic=critic)
    tu.assign_non_tensor(batch, dp_size=1, batch_num_tokens=int(batch["loss_mask"].values().sum()))
    model.zero_grad()
    loss, _ = loss_fn(model_output=output, data=batch)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()
    if optimizer is not None:
        optimizer.step()
    return loss.item(), norm, output


def adamw(model: Any) -> Any:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.01, betas=(0.9, 0.999))


def largest_difference(ours: dict[str, Tensor], dense: dict[str, Tensor]) -> float:
    assert ours.keys() == dense.keys(), ours.keys() ^ dense.keys()
    return max((ours[name].double() - dense[name].double()).abs().max().item() for name in dense)


def answer_difference(ours: Any, dense: Tensor) -> float:
    """Of the rows that predict answers."""
    pairs = zip(ours.unbind(), dense.detach().unbind(), LENGTHS, strict=True)
    return max((a[p - 1 : -1] - b[p - 1 : -1]).abs().max().item() for a, b, (p, _) in pairs)


def metrics_of(result: Any) -> dict[str, Any]:
    return {} if result is None else tu.get(result, "metrics")


def engine_weights(worker: Any) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in worker.engine.get_per_tensor_param()[0]}


__all__ = ["EngineRouterReplayConfig", "PolicyLossConfig", "sft_loss"]
