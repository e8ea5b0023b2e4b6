"""Trainers of transformers and TRL in one process, and ours on several ranks: the same case, and how far they differ.

A case is a function at the top of a module that makes a trainer and may train it:

    def chats(run: Run) -> Any:
        args = SFTConfig(**run.arguments(rows=4, steps=3), assistant_only_loss=True)
        trainer = run.trainer(SFTTrainer, model=model_of("qwen3"), args=args, train_dataset=conversations(12), …)
        trainer.train()
        return trainer

    compare(chats, {"context_parallel_size": 2}, ranks=2)

Models are in float64, and stock's sums are too: its loss and TRL's fused head, which sum in float32, are replaced in
the stock process only, unless `exact=False`.
"""

import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from longspan.launch import local_ranks as fork_server
from longspan.testing import run_ranks

TRAINERS = tuple(f"trl.trainer.{name}_trainer" for name in ("sft", "dpo", "kto", "grpo", "rloo"))
fork_server.PRELOAD = (*fork_server.PRELOAD, *(m for m in (*TRAINERS, "peft") if m not in fork_server.PRELOAD))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

TIMES = ("runtime", "per_second", "step_time", "total_flos")
LOSS, METRIC = 1e-6, 1e-5
VOCABULARY = 64
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 24,
}
FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "qwen3": (Qwen3Config, {}),
    "qwen3-moe": (Qwen3MoeConfig, EXPERTS | {"router_aux_loss_coef": 0.0}),
    "gemma3": (Gemma3TextConfig, {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}),
    "gpt-oss": (
        GptOssConfig,
        {"sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0},
    ),
    "qwen3-next": (Qwen3NextConfig, EXPERTS | DELTA_NET | {"router_aux_loss_coef": 0.0}),
}


def model_of(family: str = "qwen3", seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A tiny model whose weights depend on the seed; its norms, biases and sinks are random too."""
    kind, values = FAMILIES[family]
    config = kind(**SIZES | values | changes)
    attention = "eager" if family == "gpt-oss" else "sdpa"
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, experts_implementation="eager"
    )
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model.to(dtype)


TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ 'a: ' }}{% generation %}{{ m['content'] + ' </s>' }}"
    "{% endgeneration %}{{ ' ' }}{% else %}{{ 'u: ' + m['content'] + ' ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a: ' }}{% endif %}"
)
WORDS = tuple(f"w{i}" for i in range(VOCABULARY - 5))


def tokenizer() -> PreTrainedTokenizerFast:
    """A word is a token; 0 is padding, 1 the end of a text, and its chat template marks the assistant's words."""
    words = {word: i for i, word in enumerate(("<pad>", "</s>", "<unk>", "u:", "a:", *WORDS))}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = TEMPLATE
    return fast


def _texts(seed: int) -> Callable[[int, int], str]:
    generator = np.random.default_rng(seed)
    return lambda low, high: " ".join(generator.choice(WORDS, generator.integers(low, high)))


def texts(count: int, seed: int = 0) -> Dataset:
    """Plain texts of 5 to 40 words."""
    text = _texts(seed)
    return Dataset.from_list([{"text": text(5, 40)} for _ in range(count)])


def conversations(count: int, seed: int = 0) -> Dataset:
    """Chats of one or two turns."""
    text = _texts(seed)

    def turn() -> list[dict[str, str]]:
        return [{"role": "user", "content": text(2, 12)}, {"role": "assistant", "content": text(2, 20)}]

    return Dataset.from_list([{"messages": [m for _ in range(1 + i % 2) for m in turn()]} for i in range(count)])


def completions(count: int, seed: int = 0) -> Dataset:
    """Prompts, and a completion of each."""
    text = _texts(seed)
    return Dataset.from_list([{"prompt": text(2, 12) + " ", "completion": text(2, 20)} for _ in range(count)])


def preferences(count: int, seed: int = 0) -> Dataset:
    """Prompts, each with a chosen and a rejected answer."""
    text = _texts(seed)
    return Dataset.from_list(
        [{"prompt": text(2, 12) + " ", "chosen": text(2, 20), "rejected": text(2, 20)} for _ in range(count)]
    )


def judged(count: int, seed: int = 0) -> Dataset:
    """Prompts, a completion of each, and whether it is wanted."""
    text = _texts(seed)
    return Dataset.from_list(
        [{"prompt": text(2, 12) + " ", "completion": text(2, 20), "label": i % 3 != 0} for i in range(count)]
    )


@dataclass
class Run:
    """What a case is run with: stock in one process (`longspan` None), or ours on this rank of several."""

    folder: str
    ranks: int = 1
    longspan: dict[str, Any] | None = None
    rank: int = 0
    kept: dict[str, Any] = field(default_factory=dict)  # what a case wants compared too, by name

    def trainer(self, kind: type[Any], **keywords: Any) -> Any:
        """A trainer of this class, or of ours over it."""
        if self.longspan is None:
            return kind(**keywords)
        from longspan.hf import LongspanArguments, with_longspan

        return with_longspan(kind)(**keywords, longspan=LongspanArguments(**self.longspan))

    def arguments(self, *, rows: int = 4, steps: int = 3, **changes: Any) -> dict[str, Any]:
        """Keywords of TrainingArguments: so many rows a micro-batch on all ranks together, every step logged."""
        plain = {
            "output_dir": self.folder,
            "per_device_train_batch_size": rows // self.ranks,
            "per_device_eval_batch_size": rows // self.ranks,
            "max_steps": steps,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            "activation_checkpointing": False,
            "disable_tqdm": True,
            "seed": 1,
        }
        return plain | changes


@dataclass(frozen=True)
class Ran:
    """What a case left: the Trainer's log, without times; weights by name; what the case kept."""

    logs: list[dict[str, float]]
    weights: dict[str, np.ndarray]
    kept: dict[str, Any]


def run_case(
    rank: int, case: Callable[[Run], Any], folder: str, ranks: int, longspan: dict[str, Any] | None, exact: bool
) -> Ran:
    """Run a case on this rank."""
    os.environ["CI"] = "1"  # TRL sends nothing about its use
    disable_progress_bars()
    torch.set_default_dtype(torch.float64 if exact else torch.float32)
    if exact and longspan is None:
        sum_in_float64()
    run = Run(folder, ranks, longspan, rank)
    trainer = case(run)
    weights = {
        name.replace("base_model.model.", "", 1): (p.full_tensor() if isinstance(p, DTensor) else p).detach().numpy()
        for name, p in trainer.model.named_parameters()
        if p.requires_grad
    }
    logs = [{k: v for k, v in log.items() if not any(time in k for time in TIMES)} for log in trainer.state.log_history]
    if longspan is not None:
        trainer.end()
    return Ran(logs, weights if rank == 0 else {}, run.kept)


def stock(case: Callable[[Run], Any], exact: bool = True) -> Ran:
    """The case by the stock trainer in one process."""
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(run_case, 1, case, folder, 1, None, exact)[0]


def ours(case: Callable[[Run], Any], longspan: dict[str, Any], ranks: int, exact: bool = True) -> Ran:
    """The case by ours: the first rank's, after all ranks were seen to log the same."""
    with tempfile.TemporaryDirectory() as folder:
        ran = run_ranks(run_case, ranks, case, folder, ranks, longspan, exact)
    assert all(other.logs == ran[0].logs for other in ran)
    return ran[0]


def compare(
    case: Callable[[Run], Any],
    longspan: dict[str, Any],
    *,
    ranks: int = 2,
    loss: float = LOSS,
    metric: float = METRIC,
    weights: float | None = 1e-8,
    exact: bool = True,
    reference: Ran | None = None,
) -> dict[str, float]:
    """Assert that ours logs what stock does, and ends with the same weights; return the largest error by name.

    Losses and metrics differ by at most these bounds, relative to a figure or, of one under 1, absolutely; `weights`
    relative to the norm of a weight. `reference` is stock's, where several runs of ours are compared with it.
    """
    expected, found = reference or stock(case, exact), ours(case, longspan, ranks, exact)
    errors = log_errors(expected.logs, found.logs)
    if weights is not None:
        assert expected.weights.keys() == found.weights.keys(), expected.weights.keys() ^ found.weights.keys()
        errors["weights"] = max(
            float(np.linalg.norm(found.weights[n] - w) / max(np.linalg.norm(w), 1e-3))
            for n, w in expected.weights.items()
        )
    for name, error in errors.items():
        bound = weights if name == "weights" else loss if name.endswith("loss") else metric
        assert bound is not None and error <= bound, (name, error, bound, errors)
    return errors


def log_errors(expected: list[dict[str, float]], found: list[dict[str, float]]) -> dict[str, float]:
    """The largest error of each figure in two logs, which must have the same figures in the same order."""
    found = [{k: v for k, v in log.items() if not k.endswith("_token_loss")} for log in found]
    assert [log.keys() for log in expected] == [log.keys() for log in found], (expected, found)
    errors: dict[str, float] = {}
    for one, other in zip(expected, found, strict=True):
        for name, value in one.items():
            error = abs(other[name] - value) / max(1.0, abs(value))
            errors[name] = max(errors.get(name, 0.0), error if math.isfinite(error) else math.inf)
    return errors


def sum_in_float64() -> None:
    """Let stock's loss of causal models, and TRL's fused head, keep the precision of float64 models."""
    import trl.trainer.utils as head
    from transformers import trainer
    from transformers.loss import loss_utils

    def causal_loss(
        logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **_: Any
    ) -> Tensor:
        scores, ids = logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1)
        if num_items_in_batch is None:
            return F.cross_entropy(scores, ids)
        return F.cross_entropy(scores, ids, reduction="sum") / num_items_in_batch

    loss_utils.LOSS_MAPPING["ForCausalLM"] = trainer.ForCausalLMLoss = causal_loss  # compared by identity
    head._ChunkedLogProbFunction = DenseHead


class DenseHead:
    """TRL's fused head by rows of whole logits, in their own precision."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        _chunk: int,
        softcap: float | None,
        scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[Tensor | None, ...]:
        """Values (N,) of rows of hidden states (N, D), those of `outputs`."""
        logits = F.linear(hidden, weight, bias) * scale
        logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
        log_probs = logits.log_softmax(-1)
        more = {
            "entropy": -(log_probs.exp() * log_probs).sum(-1),
            "log_sum_sq_probs": (2 * log_probs.detach()).logsumexp(-1),
            "mean_logits": logits.detach().mean(-1),
            "is_top1": logits.argmax(-1) == targets,
        }
        chosen = log_probs.gather(-1, targets[:, None])[:, 0]
        return chosen, *(value if name in outputs else None for name, value in more.items())
