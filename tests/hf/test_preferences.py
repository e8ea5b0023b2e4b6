"""DPOTrainer and KTOTrainer on ranks that share documents: losses, rewards and weights are stock's."""

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

from tests.hf.stock import Run, compare, judged, model_of, preferences, stock, tokenizer

CP2 = {"context_parallel_size": 2}
DYNAMIC = {"planner": "dynamic", "max_tokens_per_slot": "64"}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
# Losses of pairs, and mixed ones; exo_pair and robust want label smoothing.
LOSSES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
)  # fmt: skip


def lora() -> LoraConfig:
    """Adapters that are not zero at first."""
    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)


def dpo(run: Run, *, model: Any = None, steps: int = 3, **keywords: Any) -> Any:
    """A trained DPOTrainer."""
    names = ("ref_model", "peft_config")
    parts = {name: keywords.pop(name, None) for name in names}
    data = preferences(16)
    trainer = run.trainer(
        DPOTrainer,
        model=model or model_of(),
        args=DPOConfig(**run.arguments(steps=steps, beta=0.5, **keywords)),
        train_dataset=data,
        eval_dataset=data.select(range(6)) if "eval_strategy" in keywords else None,
        processing_class=tokenizer(),
        **parts,
    )
    trainer.train()
    return trainer


def kto(run: Run, *, model: Any = None, **keywords: Any) -> Any:
    """A trained KTOTrainer."""
    parts = {name: keywords.pop(name, None) for name in ("ref_model", "peft_config")}
    data = judged(16)
    trainer = run.trainer(
        KTOTrainer,
        model=model or model_of(),
        args=KTOConfig(**run.arguments(beta=0.5, **keywords)),
        train_dataset=data,
        eval_dataset=data.select(range(6)) if "eval_strategy" in keywords else None,
        processing_class=tokenizer(),
        **parts,
    )
    trainer.train()
    return trainer


def dpo_with_reference(run: Run) -> Any:
    return dpo(run, ref_model=model_of(seed=1), gradient_accumulation_steps=2, **EVALUATED)


def dpo_without_reference(run: Run) -> Any:
    """TRL loads a reference itself, from the model's folder; so does the model come, by its path."""
    folder = Path(run.folder).parent / f"{Path(run.folder).name}-{run.rank}"
    model_of().save_pretrained(folder)
    return dpo(run, model=str(folder), model_init_kwargs={"dtype": "auto"})


def dpo_of_adapters(run: Run) -> Any:
    return dpo(run, peft_config=lora(), **EVALUATED)


def dpo_of_a_trained_adapter(run: Run) -> Any:
    """The reference is a copy of the adapter as it came."""
    return dpo(run, model=get_peft_model(model_of(), lora()))


def dpo_weighted(run: Run) -> Any:
    return dpo(run, ref_model=model_of(seed=1), use_weighting=True)


def dpo_mixed(run: Run) -> Any:
    """Three losses with weights, and long answers discounted."""
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
    """One step of each loss of DPO; the logs one after another."""
    logs = []
    for loss in LOSSES:
        smoothing = {"label_smoothing": 0.1} if loss in ("exo_pair", "robust", "aot") else {}
        trainer = dpo(run, ref_model=model_of(seed=1), steps=1, loss_type=[loss], **smoothing)
        logs += [{f"{loss} {k}": v for k, v in trainer.state.log_history[0].items()}]
        if loss != LOSSES[-1] and run.longspan:
            trainer.end()
    trainer.state.log_history = logs
    return trainer


CASES = (
    dpo_without_reference,
    dpo_of_adapters,
    dpo_of_a_trained_adapter,
    dpo_weighted,
    dpo_mixed,
    dpo_precomputed,
    dpo_precomputed_without_reference,
    dpo_precomputed_of_adapters,
    dpo_synced,
    kto_with_reference,
    kto_of_adapters,
    kto_precomputed,
    every_loss,
)


def test_dpo_on_two_ranks_and_dynamic_on_four() -> None:
    expected = stock(dpo_with_reference)
    print(compare(dpo_with_reference, CP2, reference=expected))
    print(compare(dpo_with_reference, DYNAMIC, ranks=4, reference=expected))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_equals_stock(case: Any) -> None:
    print(case.__name__, compare(case, CP2))
