"""SFTTrainer, DPOTrainer and KTOTrainer on ranks that share documents: losses, rewards and weights are stock's."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import trl.trainer.utils
from accelerate.state import PartialState
from peft import LoraConfig, get_peft_model
from transformers import training_args
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

from longspan.errors import ConfigError, ModelError
from tests.hf.stock import AUTO, CP2, Ran, Run, check_each, compare_each, ours_each, stock_each
from tests.hf.tiny import completions, conversations, judged, model_of, preferences, texts, tokenizer

DYNAMIC = {"planner": "dynamic", "max_tokens_per_slot": "64"}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}


def lora() -> LoraConfig:
    """Adapters that are not zero at first."""
    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)


def train(
    run: Run, dataset: Any, family: str = "qwen3", peft_config: Any = None, dtype: Any = torch.float64, **changes: Any
) -> Any:
    args = SFTConfig(**run.arguments(**changes))
    trainer = run.trainer(
        SFTTrainer,
        model=model_of(family, dtype=dtype),
        args=args,
        train_dataset=dataset,
        eval_dataset=dataset.select(range(6)) if "eval_strategy" in changes else None,
        processing_class=tokenizer(),
        peft_config=peft_config,
    )
    trainer.train()
    return trainer


def chats(run: Run) -> Any:
    more = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "eval_strategy": "steps", "eval_steps": 2}
    return train(run, conversations(16), assistant_only_loss=True, **more)


def packed(run: Run) -> Any:
    return train(run, texts(24), packing=True, max_length=64, rows=2, learning_rate=1e-3)


def wrapped(run: Run) -> Any:
    return train(run, texts(24), packing=True, packing_strategy="wrapped", max_length=48, rows=2)


def padding_free(run: Run) -> Any:
    return train(run, texts(12), padding_free=True, max_length=None)


def prompts(run: Run) -> Any:
    return train(run, completions(12), completion_only_loss=True)


def dft(run: Run) -> Any:
    return train(run, completions(12), loss_type="dft", gradient_accumulation_steps=2)


def adapters(run: Run) -> Any:
    return train(run, conversations(12), peft_config=lora(), assistant_only_loss=True)


def moe(run: Run) -> Any:
    return train(run, completions(12), "qwen3-moe")


def gemma3(run: Run) -> Any:
    return train(run, texts(12), "gemma3", packing=True, max_length=64, rows=2, adam_epsilon=1e-2)


def gpt_oss(run: Run) -> Any:
    return train(run, completions(12), "gpt-oss")


def qwen3_next(run: Run) -> Any:
    """Stock's linear attention is in float32: no update may hang on the sign of a gradient near 0."""
    return train(run, completions(12), "qwen3-next", adam_epsilon=1e-2)


def qwen3_next_packed(run: Run) -> Any:
    more = {"padding_free": True, "max_length": None} if run.longspan else {}
    return train(run, completions(12), "qwen3-next", adam_epsilon=1e-2, **more)


def streamed(run: Run) -> Any:
    return train(run, texts(16).to_iterable_dataset())


def sft_in_float32(run: Run) -> Any:
    return train(run, completions(12), dtype=torch.float32)


# Losses of pairs, and mixed ones; exo_pair and robust want label smoothing.
LOSSES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
)  # fmt: skip


def preferred(
    run: Run, kind: Any, config: Any, data: Any, *, model: Any = None, steps: int = 3, **keywords: Any
) -> Any:
    """A trained trainer of preferences."""
    parts = {name: keywords.pop(name, None) for name in ("ref_model", "peft_config")}
    trainer = run.trainer(
        kind,
        model=model or model_of(),
        args=config(**run.arguments(steps=steps, beta=0.5, **keywords)),
        train_dataset=data,
        eval_dataset=data.select(range(6)) if "eval_strategy" in keywords else None,
        processing_class=tokenizer(),
        **parts,
    )
    trainer.train()
    return trainer


def dpo(run: Run, **keywords: Any) -> Any:
    return preferred(run, DPOTrainer, DPOConfig, preferences(16), **keywords)


def kto(run: Run, **keywords: Any) -> Any:
    return preferred(run, KTOTrainer, KTOConfig, judged(16), **keywords)


def dpo_with_reference(run: Run) -> Any:
    return dpo(run, ref_model=model_of(seed=1), gradient_accumulation_steps=2, **EVALUATED)


def saved_model(run: Run) -> str:
    folder = f"{run.folder}-model-{run.rank}"
    model_of().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


class OnGpu(PartialState):
    device = property(lambda _: torch.device("cuda"))


def dpo_without_reference(run: Run) -> Any:
    if run.longspan:
        trl.trainer.utils.PartialState = OnGpu
    return dpo(run, model=saved_model(run), model_init_kwargs={"dtype": "auto"})


def dpo_of_adapters(run: Run) -> Any:
    return dpo(run, peft_config=lora(), **EVALUATED)


def dpo_of_a_trained_adapter(run: Run) -> Any:
    return dpo(run, model=trained_adapter(), gradient_accumulation_steps=2, **EVALUATED)


def trained_adapter() -> Any:
    adapted = lora()
    adapted.lora_dropout = 0.1
    torch.manual_seed(3)
    return get_peft_model(model_of(), adapted).to(torch.float64)


def dpo_precomputed_of_a_trained_adapter(run: Run) -> Any:
    return dpo(run, model=trained_adapter(), precompute_ref_log_probs=True)


def kto_of_a_trained_adapter(run: Run) -> Any:
    return kto(run, model=trained_adapter())


def dpo_weighted(run: Run) -> Any:
    return dpo(run, ref_model=model_of(seed=1), use_weighting=True)


def dpo_mixed(run: Run) -> Any:
    losses = {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}
    return dpo(run, ref_model=model_of(seed=1), ld_alpha=0.5, **losses)


def dpo_precomputed(run: Run) -> Any:
    return dpo(run, ref_model=model_of(seed=1), precompute_ref_log_probs=True, **EVALUATED)


def dpo_precomputed_without_reference(run: Run) -> Any:
    return dpo(run, precompute_ref_log_probs=True, **EVALUATED)


def dpo_precomputed_of_adapters(run: Run) -> Any:
    return dpo(run, peft_config=lora(), precompute_ref_log_probs=True)


def dpo_synced(run: Run) -> Any:
    return dpo(run, ref_model=model_of(seed=1), sync_ref_model=True, ref_model_sync_steps=1)


def kto_with_reference(run: Run) -> Any:
    return kto(run, ref_model=model_of(seed=1), gradient_accumulation_steps=2, **EVALUATED)


def kto_of_adapters(run: Run) -> Any:
    return kto(run, peft_config=lora())


def kto_precomputed(run: Run) -> Any:
    return kto(run, ref_model=model_of(seed=1), precompute_ref_log_probs=True, **EVALUATED)


def every_loss(run: Run) -> Any:
    logs = []
    for loss in LOSSES:
        smoothing = {"label_smoothing": 0.1} if loss in ("exo_pair", "robust", "aot") else {}
        trainer = dpo(run, ref_model=model_of(seed=1), steps=1, loss_type=[loss], **smoothing)
        logs += [{f"{loss} {k}": v for k, v in trainer.state.log_history[0].items()}]
        if loss != LOSSES[-1] and run.longspan:
            trainer.end()
    trainer.state.log_history = logs
    return trainer


def cached(run: Run) -> Any:
    data = preferences(8)
    data.save_to_disk(f"{run.folder}-data-{run.rank}")
    parts: dict[str, Any] = {"train_dataset": data.load_from_disk(f"{run.folder}-data-{run.rank}")}
    args = DPOConfig(**run.arguments(precompute_ref_log_probs=True, beta=0.5))
    first = run.trainer(DPOTrainer, model=model_of(), args=args, processing_class=tokenizer(), **parts)

    class Second(DPOTrainer):
        def compute_ref_log_probs(self, *_: Any) -> Any:
            raise AssertionError("computed again")

    trainer = run.trainer(Second, model=model_of(), args=args, processing_class=tokenizer(), **parts)
    assert trainer.train_dataset["ref_chosen_logps"] == first.train_dataset["ref_chosen_logps"]
    if run.longspan:
        first.end()
    trainer.train()
    return trainer


def default_arguments(run: Run) -> Any:
    os.chdir(Path(run.folder).parent)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    training_args.is_torch_bf16_gpu_available = lambda: True  # they ask for bfloat16
    model = saved_model(Run("model", rank=run.rank))
    trainers = []
    for kind, data in ((SFTTrainer, texts(4)), (DPOTrainer, preferences(4)), (KTOTrainer, judged(4))):
        trainers.append(run.trainer(kind, model=model, train_dataset=data))
        args = trainers[-1].args.to_dict()
        changed = ("per_device", "checkpointing", "model_init_kwargs", "logging_dir")
        run.kept[kind.__name__] = {k: v for k, v in args.items() if not any(name in k for name in changed)}
    if run.longspan:
        for trainer in trainers[1:]:
            trainer.end()
    return trainers[0]


def refused(run: Run) -> None:
    """References that are not prepared, a device_map, a loss of experts."""
    adapted = get_peft_model(model_of(), lora())
    adapted.add_adapter("other", lora())
    cases: dict[str, Any] = {
        "adapters": lambda: dpo(run, model=adapted),
        "reference": lambda: dpo(run, ref_model=get_peft_model(model_of(), lora())),
        "device_map": lambda: dpo(run, model=saved_model(run), model_init_kwargs={"device_map": "auto"}),
        "aux": lambda: dpo(run, model=model_of("qwen3-moe", router_aux_loss_coef=0.1), ref_model=model_of()),
    }
    for name, make in cases.items():
        with pytest.raises((ConfigError, ModelError)) as error:
            make()
        run.kept[name] = str(error.value)


def dpo_in_float32(run: Run) -> Any:
    return dpo(run, model=model_of(dtype=torch.float32), ref_model=model_of(seed=1, dtype=torch.float32))


FLOAT32 = {"weights": 1e-5}  # where stock computes in float32
CASES = (
    (chats, AUTO | {"eval_context_parallel_size": "1"}),
    *(packed, adapters, gpt_oss, qwen3_next),
    *(dpo_with_reference, dpo_of_a_trained_adapter, dpo_precomputed, kto_with_reference),
)


@pytest.fixture(scope="module")
def expected() -> dict[str, Ran]:
    return stock_each(CASES)


def test_equals_stock(expected: dict[str, Ran]) -> None:
    found = ours_each((*CASES, refused), CP2, 2)
    messages = found.pop("refused").kept
    check_each(expected, found, qwen3_next=FLOAT32)
    assert "the model has 2 adapters (default, other), and a longspan trainer runs one" in messages["adapters"]
    assert "ref_model is PeftModel: a longspan trainer prepares models of" in messages["reference"]
    assert "args.model_init_kwargs has device_map 'auto'" in messages["device_map"]
    assert "args.router_aux_loss_coef to 0.0" in messages["aux"]


def test_dynamic_plans_on_four_ranks(expected: dict[str, Ran]) -> None:
    check_each(expected, ours_each([chats], DYNAMIC, 4))


@pytest.mark.whole
def test_more_of_sft_equals_stock() -> None:
    more = (wrapped, padding_free, prompts, streamed, dft, moe, qwen3_next_packed, gemma3)
    compare_each(more, CP2, qwen3_next_packed=FLOAT32, gemma3=FLOAT32)
    compare_each((padding_free, dft, moe), DYNAMIC, ranks=4)


@pytest.mark.whole
def test_more_of_preferences_equals_stock() -> None:
    cases = (dpo_mixed, dpo_precomputed_without_reference, dpo_precomputed_of_adapters, dpo_synced, cached)
    compare_each((*cases, kto_of_adapters, kto_precomputed), CP2)
    cases = (dpo_weighted, dpo_of_adapters, dpo_precomputed_of_a_trained_adapter, kto_of_a_trained_adapter)
    compare_each((*cases, every_loss, dpo_without_reference), CP2)
    compare_each((dpo_with_reference, dpo_of_adapters, dpo_precomputed, kto_with_reference), DYNAMIC, ranks=4)


@pytest.mark.whole
def test_default_arguments() -> None:
    expected, found = (
        run([default_arguments])["default_arguments"] for run in (stock_each, lambda c: ours_each(c, CP2, 2))
    )
    assert found.kept == expected.kept


@pytest.mark.whole
def test_equals_trls_own_head_in_float32() -> None:
    compare_each((sft_in_float32, dpo_in_float32), CP2, exact=False, weights=None)
