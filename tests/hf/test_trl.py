"""SFTTrainer, DPOTrainer and KTOTrainer on ranks that share documents: losses, rewards and weights are stock's.

KTO runs with make test-all: its passes and reference are DPO's.
"""

from functools import partial
from typing import Any

import pytest
import torch
import trl.trainer.utils
from accelerate.state import PartialState
from peft import LoraConfig, get_peft_model
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

from longspan.errors import ConfigError, ModelError
from tests.hf.stock import CP2, Run, check_each, compare_each, ours_each, stock_each
from tests.hf.tiny import completions, conversations, judged, model_of, preferences, texts, tokenizer

DYNAMIC = {"planner": "dynamic", "max_tokens_per_slot": "64"}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}


def lora() -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)


def train(
    run: Run,
    kind: Any,
    config: Any,
    data: Any,
    *,
    family: str = "qwen3",
    dtype: Any = torch.float64,
    model: Any = None,
    reference: Any = None,
    peft_config: Any = None,
    **changes: Any,
) -> Any:
    of_reference = model_of(seed=1, dtype=dtype) if reference is True else reference
    trainer = run.trainer(
        kind,
        model=trained_adapter() if model is trained_adapter else model or model_of(family, dtype=dtype),
        args=config(**run.arguments(**changes)),
        train_dataset=data,
        eval_dataset=data.select(range(6)) if "eval_strategy" in changes else None,
        processing_class=tokenizer(),
        peft_config=peft_config,
        **{} if reference is None else {"ref_model": of_reference},
    )
    trainer.train()
    return trainer


def sft(run: Run, data: Any = completions, count: int = 12, **changes: Any) -> Any:
    return train(run, SFTTrainer, SFTConfig, data(count), **changes)


def dpo(run: Run, **changes: Any) -> Any:
    return train(run, DPOTrainer, DPOConfig, preferences(16), **{"beta": 0.5} | changes)


def kto(run: Run, **changes: Any) -> Any:
    return train(run, KTOTrainer, KTOConfig, judged(16), **{"beta": 0.5} | changes)


def qwen3_next(run: Run) -> Any:
    """Stock's linear attention is in float32: no update may hang on the sign of a gradient near 0."""
    return sft(run, family="qwen3-next", adam_epsilon=1e-2)


def qwen3_next_packed(run: Run) -> Any:
    more = {"padding_free": True, "max_length": None} if run.longspan else {}
    return sft(run, family="qwen3-next", adam_epsilon=1e-2, **more)


def streamed(run: Run) -> Any:
    return sft(run, lambda count: texts(count).to_iterable_dataset())


# Losses of pairs, and mixed ones; exo_pair and robust want label smoothing.
LOSSES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
)  # fmt: skip


def saved_model(run: Run) -> str:
    folder = f"{run.folder}-model-{run.rank}"
    model_of().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


class OnGpu(PartialState):
    device = property(lambda _: torch.device("cuda"))


def dpo_without_reference(run: Run) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if run.longspan:
            patch.setattr(trl.trainer.utils, "PartialState", OnGpu)
        return dpo(run, model=saved_model(run), model_init_kwargs={"dtype": "auto"})


def trained_adapter() -> Any:
    adapted = lora()
    adapted.lora_dropout = 0.1
    torch.manual_seed(3)
    return get_peft_model(model_of(), adapted).to(torch.float64)


def every_loss(run: Run) -> Any:
    logs = []
    for loss in LOSSES:
        smoothing = {"label_smoothing": 0.1} if loss in ("exo_pair", "robust", "aot") else {}
        trainer = dpo(run, reference=True, steps=1, loss_type=[loss], **smoothing)
        logs += [{f"{loss} {k}": v for k, v in trainer.state.log_history[0].items()}]
        if loss != LOSSES[-1] and run.longspan:
            trainer.end()
    trainer.state.log_history = logs
    return trainer


def refused(run: Run) -> None:
    """References that are not prepared, a device_map, a loss of experts."""
    adapted = get_peft_model(model_of(), lora())
    adapted.add_adapter("other", lora())
    cases: dict[str, Any] = {
        "adapters": lambda: dpo(run, model=adapted),
        "reference": lambda: dpo(run, reference=get_peft_model(model_of(), lora())),
        "device_map": lambda: dpo(run, model=saved_model(run), model_init_kwargs={"device_map": "auto"}),
        "aux": lambda: dpo(run, model=model_of("qwen3-moe", router_aux_loss_coef=0.1), reference=True),
    }
    for name, make in cases.items():
        with pytest.raises((ConfigError, ModelError)) as error:
            make()
        run.kept[name] = str(error.value)


FLOAT32 = {"weights": 1e-5}  # where stock computes in float32
TWICE = {"gradient_accumulation_steps": 2}
chats = partial(sft, data=conversations, count=16, assistant_only_loss=True, max_grad_norm=0.5, **TWICE, **EVALUATED)
dft = partial(sft, loss_type="dft", **TWICE)
dpo_with_reference = partial(dpo, reference=True, **TWICE, **EVALUATED)
dpo_of_adapters = partial(dpo, peft_config=lora(), **EVALUATED)
kto_with_reference = partial(kto, reference=True, **TWICE)
CASES = (
    (chats, DYNAMIC | {"context_parallel_size": 1, "eval_context_parallel_size": "2"}),
    partial(sft, data=texts, count=24, packing=True, max_length=64, rows=2, learning_rate=1e-3),
    dpo_with_reference,
    partial(dpo, model=trained_adapter, **TWICE),
)
MIXED = {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0], "ld_alpha": 0.5}
MORE = (
    dpo_without_reference,  # the first: Transformers writes no model on a second rank once processes are joined
    partial(dpo, reference=True, **MIXED),
    partial(dpo, reference=True, use_weighting=True),
    partial(dpo, reference=True, sync_ref_model=True, ref_model_sync_steps=1),
    partial(dpo, model=trained_adapter),
    kto_with_reference,
    partial(kto, peft_config=lora()),
    partial(kto, model=trained_adapter),
    *(dpo_of_adapters, every_loss),
)


def test_equals_stock() -> None:
    found = ours_each((*CASES, refused), CP2, 2)
    messages = found.pop("refused").kept
    check_each(stock_each(CASES), found)
    assert "the model has 2 adapters (default, other), and a longspan trainer runs one" in messages["adapters"]
    assert "ref_model is PeftModel: a longspan trainer prepares models of" in messages["reference"]
    assert "args.model_init_kwargs has device_map 'auto'" in messages["device_map"]
    assert "args.router_aux_loss_coef to 0.0" in messages["aux"]


@pytest.mark.whole
def test_more_of_sft_equals_stock() -> None:
    compare_each((streamed, dft, qwen3_next, qwen3_next_packed), CP2, qwen3_next=FLOAT32, qwen3_next_packed=FLOAT32)
    compare_each([dft], DYNAMIC, ranks=4)


@pytest.mark.whole
def test_more_of_preferences_equals_stock() -> None:
    compare_each(MORE, CP2)
    compare_each((chats, dpo_with_reference, dpo_of_adapters, kto_with_reference), DYNAMIC, ranks=4)


@pytest.mark.whole
def test_equals_trls_own_head_in_float32() -> None:
    cases = partial(sft, dtype=torch.float32), partial(dpo, reference=True, dtype=torch.float32)
    compare_each(cases, CP2, exact=False, weights=None)
