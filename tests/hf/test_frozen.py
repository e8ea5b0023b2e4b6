"""Trainers over frozen weights in 4 and 8 bits: made of whole ones, or loaded with BitsAndBytesConfig."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
from trl import SFTConfig, SFTTrainer

from longspan.comm import World
from longspan.hf import LongspanArguments
from longspan.hf.resolve_trainer import options_of_prepare, resolve_trainer
from longspan.layout import Layout
from longspan.model import load_model
from longspan.model.adapters.new_adapter import NewAdapter, add_lora
from longspan.model.execution import model_execution
from longspan.model.frozen.frozen_weights import weights_to_pack
from longspan.model.frozen.packed_format import NF4
from longspan.plan.shape.packed import packed_weights_of_model
from longspan.testing import backend
from tests.hf.stock import CP2, Run, ours_each
from tests.hf.tiny import completions, model_of, tokenizer
from tests.model.frozen.formats.folders import quantise_float8
from tests.model.frozen.test_loaded_models import quantise
from tests.model.lora.adapted import drawn
from tests.run.runs.test_lora_run import write_base

SIZES = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
FOLDER = "LONGSPAN_TEST_QUANTISED"


def _model() -> Any:
    return model_of(dtype=torch.bfloat16, tie_word_embeddings=False, **SIZES)


def _train(run: Run, model: Any, frozen: str, **changes: Any) -> Any:
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj", "up_proj", "down_proj"])
    if not isinstance(model, str):
        model = drawn(peft.get_peft_model(model, lora))
    trainer = run.trainer(
        SFTTrainer,
        model=model,
        args=SFTConfig(**run.arguments(bf16=True, steps=3) | changes),
        train_dataset=completions(12),
        processing_class=tokenizer(),
        peft_config=lora if isinstance(model, str) else None,
    )
    trainer.train()
    if run.longspan is not None:
        run.kept["frozen"] = model_execution(trainer._facade.inner_model).words.get("frozen", "")
        assert run.kept["frozen"].startswith(frozen) and bool(frozen) == bool(run.kept["frozen"])
    return trainer


def packed(run: Run) -> Any:
    return _train(run, _model(), "nf4")


def loaded(run: Run) -> Any:
    model = quantise(_model())
    model.hf_quantizer = SimpleNamespace(is_trainable=True)  # for transformers' Trainer
    return _train(run, model, "bitsandbytes nf4")


def dequantised(run: Run) -> Any:
    model, nf4 = _model(), NF4
    for name in (*weights_to_pack(model), *(["lm_head.weight"] if run.kept.get("head") else [])):
        weight = model.get_parameter(name).data
        nf4.unpack(nf4.pack(weight), weight)
    return _train(run, model, "")


def dequantised_with_head(run: Run) -> Any:
    run.kept["head"] = True
    return dequantised(run)


def test_losses_and_adapters_are_those_over_dequantised_weights() -> None:
    cases = ((packed, {"frozen": "nf4"}), dequantised, loaded, dequantised_with_head)
    ran = ours_each(cases, CP2, 2, exact=False)
    for one, other in ((packed, dequantised), (loaded, dequantised_with_head)):
        found, expected = ran[one.__name__], ran[other.__name__]
        assert found.logs == expected.logs
        assert expected.weights and found.weights.keys() == expected.weights.keys()
        assert all((x == found.weights[name]).all() for name, x in expected.weights.items())
    assert ran["dequantised"].logs != ran["dequantised_with_head"].logs


@pytest.mark.parametrize("frozen", ["", "stored", "whole"])
def test_a_folder_in_8_bits_is_planned_as_it_is_kept(frozen: str, tmp_path: Path) -> None:
    """Its weights come when the model is prepared, and the model's own configuration does not say how they lie."""
    base = str(write_base(tmp_path, hidden_size=64, intermediate_size=96))
    quantise_float8(tmp_path, weight_block_size=None, activation_scheme="static")
    args = transformers.TrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True)
    with World(Layout(1), backend=backend()) as world:
        trainer = SimpleNamespace(
            model=add_lora(load_model(base, sharded=True, quantized=True), NewAdapter(rank=4)),
            longspan=LongspanArguments(device_memory_limit=10**9, frozen=frozen),
            args=args,
            _stock_arguments=args,
            world=world,
            train_dataset=[{"input_ids": [*range(50)]}] * 8,
        )
        memory = resolve_trainer(trainer).memory
        options = options_of_prepare(trainer, trainer.model, memory, training=True)
    assert memory is not None
    keeps = frozen != "whole"
    assert options.frozen == ("stored" if keeps else "whole")
    assert memory.device.packed == keeps * packed_weights_of_model(base, "stored").bytes


def test_frozen_is_a_word_of_the_key() -> None:
    from longspan.errors import ConfigError

    with pytest.raises(ConfigError, match="frozen is 'int3'"):
        LongspanArguments(frozen="int3")


# ---- with bitsandbytes


def _quantisation(bits: int) -> Any:
    if bits == 8:
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)


def _load(bits: int) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        os.environ[FOLDER], quantization_config=_quantisation(bits), dtype=torch.bfloat16
    )


def four_bits(run: Run) -> Any:
    return _save(run, _train(run, _load(4), "bitsandbytes nf4"))


def four_bits_prepared(run: Run) -> Any:
    return _train(run, peft.prepare_model_for_kbit_training(_load(4)), "bitsandbytes nf4")


def eight_bits(run: Run) -> Any:
    return _train(run, _load(8), "int8")


def by_name(run: Run) -> Any:
    keywords = {"quantization_config": _quantisation(4), "dtype": "bfloat16"}
    return _train(run, os.environ[FOLDER], "bitsandbytes nf4", model_init_kwargs=keywords)


def _save(run: Run, trainer: Any) -> Any:
    if run.longspan is not None:
        trainer.save_model(os.environ[FOLDER] + "/adapter")
    return trainer


@pytest.mark.timeout(300)
def test_trainers_take_models_that_bitsandbytes_quantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bitsandbytes")
    monkeypatch.setenv(FOLDER, str(tmp_path))
    _model().save_pretrained(tmp_path)
    cases = (four_bits, four_bits_prepared, eight_bits, by_name)
    ran = ours_each(cases, CP2, 2, exact=False)
    saved = peft.PeftModel.from_pretrained(_load(4), str(tmp_path / "adapter")).state_dict()
    trained = ran["four_bits"].weights
    assert trained and all((saved[f"base_model.model.{n}"].float().numpy() == x).all() for n, x in trained.items())
