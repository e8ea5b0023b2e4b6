"""DPOTrainer and KTOTrainer on ranks that share documents: losses, rewards and weights are stock's."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import trl.trainer.utils
from accelerate.state import PartialState
from peft import LoraConfig, get_peft_model
from transformers import training_args
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTTrainer

from longspan.errors import ConfigError, ModelError
from tests.hf.stock import Run, compare, compare_each, ours, stock
from tests.hf.tiny import judged, model_of, preferences, texts, tokenizer

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
    """A reference model is given."""
    return dpo(run, ref_model=model_of(seed=1), gradient_accumulation_steps=2, **EVALUATED)


def saved_model(run: Run) -> str:
    """The folder of a model, one for each rank."""
    folder = f"{run.folder}-model-{run.rank}"
    model_of().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


class OnGpu(PartialState):
    """Accelerate's state as it is on a GPU."""

    device = property(lambda _: torch.device("cuda"))


def dpo_without_reference(run: Run) -> Any:
    """The model comes by its path, and TRL loads a reference from there; on a GPU it would spread both over all."""
    if run.longspan:
        trl.trainer.utils.PartialState = OnGpu
    return dpo(run, model=saved_model(run), model_init_kwargs={"dtype": "auto"})


def dpo_of_adapters(run: Run) -> Any:
    """The reference is the model with its adapter off."""
    return dpo(run, peft_config=lora(), **EVALUATED)


def dpo_of_a_trained_adapter(run: Run) -> Any:
    """The reference is the adapter as it was, in an evaluation too, which TRL keeps as a second one."""
    return dpo(run, model=trained_adapter(), gradient_accumulation_steps=2, **EVALUATED)


def trained_adapter() -> Any:
    """A model with an adapter that is trained further; TRL turns its dropout off, and its configuration keeps it."""
    adapted = lora()
    adapted.lora_dropout = 0.1
    torch.manual_seed(3)
    return get_peft_model(model_of(), adapted).to(torch.float64)


def dpo_precomputed_of_a_trained_adapter(run: Run) -> Any:
    """Asked once, before training."""
    return dpo(run, model=trained_adapter(), precompute_ref_log_probs=True)


def kto_of_a_trained_adapter(run: Run) -> Any:
    """The reference is the adapter as it was."""
    return kto(run, model=trained_adapter())


def dpo_weighted(run: Run) -> Any:
    """WPO: weights of pairs, without a gradient."""
    return dpo(run, ref_model=model_of(seed=1), use_weighting=True)


def dpo_mixed(run: Run) -> Any:
    """Three losses with weights, and long answers discounted."""
    losses = {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}
    return dpo(run, ref_model=model_of(seed=1), ld_alpha=0.5, **losses)


def dpo_precomputed(run: Run) -> Any:
    """The reference is asked once, before training."""
    return dpo(run, ref_model=model_of(seed=1), precompute_ref_log_probs=True, **EVALUATED)


def dpo_precomputed_without_reference(run: Run) -> Any:
    """The reference is the model before training."""
    return dpo(run, precompute_ref_log_probs=True, **EVALUATED)


def dpo_precomputed_of_adapters(run: Run) -> Any:
    """The reference is the model with its adapter off."""
    return dpo(run, peft_config=lora(), precompute_ref_log_probs=True)


def dpo_synced(run: Run) -> Any:
    """The reference follows the model."""
    return dpo(run, ref_model=model_of(seed=1), sync_ref_model=True, ref_model_sync_steps=1)


def kto_with_reference(run: Run) -> Any:
    """With mismatched pairs, for the divergence from the reference."""
    return kto(run, ref_model=model_of(seed=1), gradient_accumulation_steps=2, **EVALUATED)


def kto_of_adapters(run: Run) -> Any:
    """The reference is the model with its adapter off."""
    return kto(run, peft_config=lora())


def kto_precomputed(run: Run) -> Any:
    """Two columns, of which one is of mismatched pairs."""
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


def cached(run: Run) -> Any:
    """A second trainer of the same data takes the log-probabilities that the first one wrote."""
    data = preferences(8)
    data.save_to_disk(f"{run.folder}-data-{run.rank}")
    parts: dict[str, Any] = {"train_dataset": data.load_from_disk(f"{run.folder}-data-{run.rank}")}
    args = DPOConfig(**run.arguments(precompute_ref_log_probs=True, beta=0.5))
    first = run.trainer(DPOTrainer, model=model_of(), args=args, processing_class=tokenizer(), **parts)

    class Second(DPOTrainer):
        def compute_ref_log_probs(self, *_: Any) -> Any:
            """They are there."""
            raise AssertionError("computed again")

    trainer = run.trainer(Second, model=model_of(), args=args, processing_class=tokenizer(), **parts)
    assert trainer.train_dataset["ref_chosen_logps"] == first.train_dataset["ref_chosen_logps"]
    if run.longspan:
        first.end()
    trainer.train()
    return trainer


def default_arguments(run: Run) -> Any:
    """Without arguments, a trainer makes its own; here SFT, DPO and KTO."""
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


def refused(run: Run) -> Any:
    """References that are not prepared, and a device_map; the trainer that is returned is none of them."""
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
    return dpo(run, ref_model=model_of(seed=1), steps=1)


def in_float32(run: Run) -> Any:
    """TRL's own head and sums."""
    return dpo(run, model=model_of(dtype=torch.float32), ref_model=model_of(seed=1, dtype=torch.float32))


def test_equals_stock() -> None:
    cases = (dpo_with_reference, dpo_of_a_trained_adapter, dpo_precomputed, kto_with_reference)
    compare_each(cases, CP2)


def test_what_is_refused() -> None:
    messages = ours(refused, CP2, 2).kept
    assert "the model has 2 adapters (default, other), and a longspan trainer runs one" in messages["adapters"]
    assert "ref_model is PeftModel: a longspan trainer prepares models of" in messages["reference"]
    assert "args.model_init_kwargs has device_map 'auto'" in messages["device_map"]
    assert "args.router_aux_loss_coef to 0.0" in messages["aux"]


@pytest.mark.whole
def test_default_arguments() -> None:
    assert ours(default_arguments, CP2, 2).kept == stock(default_arguments).kept


@pytest.mark.whole
def test_more_that_equals_stock() -> None:
    cases = (dpo_mixed, dpo_precomputed_without_reference, dpo_precomputed_of_adapters, dpo_synced, cached)
    compare_each((*cases, kto_of_adapters, kto_precomputed), CP2)
    compare_each((dpo_weighted, dpo_of_adapters, dpo_precomputed_of_a_trained_adapter, kto_of_a_trained_adapter), CP2)
    compare_each((dpo_without_reference,), CP2)
    compare_each((dpo_with_reference, dpo_of_adapters, dpo_precomputed, kto_with_reference), DYNAMIC, ranks=4)


@pytest.mark.whole
def test_every_loss_of_dpo() -> None:
    compare(every_loss, CP2)


@pytest.mark.whole
def test_equals_trls_own_head_in_float32() -> None:
    compare(in_float32, CP2, exact=False, weights=None)
