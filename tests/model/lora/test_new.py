"""New adapters: which linears they adapt, what they are drawn from, and which other adapters `prepare` leaves alone."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from longspan.comm import World
from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.model import load_model, prepare
from longspan.model.lora import NewAdapter, add_lora
from longspan.testing import backend, run_ranks
from tests.model.experts.moe_models import moe_model
from tests.model.lora.adapted import adapted
from tests.model.stock import gradients_of, tiny


def test_targets_are_names_of_linears() -> None:
    with pytest.raises(ModelError, match="'q_prj', which is no linear of LlamaForCausalLM; did you mean 'q_proj'"):
        add_lora(tiny("llama"), NewAdapter(rank=2, targets=("q_prj",)))
    names = [
        name
        for name, p in add_lora(tiny("llama"), NewAdapter(rank=2, targets=("lm_head",))).named_parameters()
        if p.requires_grad
    ]
    assert len(names) == 2 and all("lm_head" in name for name in names)


def test_a_new_adapter_is_drawn_from_its_seed_alone() -> None:
    first, again, other = (
        {
            name: p
            for name, p in add_lora(tiny("llama"), NewAdapter(rank=2, seed=seed)).named_parameters()
            if p.requires_grad
        }
        for seed in (0, 0, 1)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(p.any() and not torch.equal(p, other[name]) for name, p in first.items() if "lora_A" in name)
    assert not any(p.any() for name, p in first.items() if "lora_B" in name)


@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek-v3"])  # a dense layer; shared experts too
def test_names_that_peft_takes_for_experts_have_no_adapter(family: str) -> None:
    with pytest.warns(UserWarning, match="the adapter leaves out down_proj, gate_proj, up_proj, which peft takes for"):
        config = add_lora(moe_model(family, torch.float32), NewAdapter(rank=2)).peft_config["default"]
    assert not config.target_parameters and "o_proj" in config.target_modules
    with pytest.raises(ModelError, match=r"lora\.targets has down_proj, which peft takes for the experts"):
        add_lora(moe_model(family, torch.float32), NewAdapter(rank=2, targets=("o_proj", "down_proj")))


def _refused(rank: int, folder: Path) -> list[str]:
    """What `prepare` says of adapters over a base model that it would read, and of one that has no memory."""
    told = list[str]()
    with World(Layout(ranks=1), backend=backend(), timeout=60) as world:
        ways: list[dict[str, Any]] = [{}, {"low_cpu_mem_usage": True}]
        for more in ways:
            base: Any = load_model(folder / "base", sharded=True)
            model = peft.PeftModel.from_pretrained(base, str(folder / "adapter"), is_trainable=True, **more)
            with pytest.raises(ModelError) as error:
                prepare(model, world)
            told.append(str(error.value))
        config = peft.LoraConfig(r=2, target_modules=["q_proj"])
        with pytest.raises(ModelError) as error:
            prepare(peft.get_peft_model(tiny("llama"), config, low_cpu_mem_usage=True), world)
        told.append(str(error.value))
    return told


@pytest.mark.filterwarnings("ignore")  # peft's own, of parameters on the meta device
def test_a_trained_adapter_is_not_drawn_again(tmp_path: Path) -> None:
    model = adapted("llama", "every linear", torch.float32)
    model.save_pretrained(tmp_path / "adapter")
    tiny("llama", vocabulary=62).save_pretrained(tmp_path / "base")
    ((read, read_without_copies, empty),) = run_ranks(_refused, 1, tmp_path, timeout=60)
    for told in (read, read_without_copies):
        assert "the adapter 'default' of LlamaForCausalLM" in told and "load the base with sharded=False" in told
    assert "have no values" in empty and "without low_cpu_mem_usage=True" in empty


def _prepared(rank: int) -> dict[str, float]:
    """The largest entry of each of a new adapter's matrices, over a base model that is drawn part by part."""
    with World(Layout(ranks=2), backend=backend(), timeout=60) as world:
        model = add_lora(load_model(config=tiny("llama").config, sharded=True), NewAdapter(rank=2))
        prepared = prepare(model, world)
        for parameter in prepared.parameters():
            parameter.grad = parameter.detach()
        return {name: float(x.abs().max()) for name, x in gradients_of(prepared).items()}


def test_a_new_adapter_over_weights_to_come_is_drawn() -> None:
    for largest in run_ranks(_prepared, 2, timeout=60):
        assert all(value > 0 for name, value in largest.items() if ".lora_B." not in name)
        assert not any(value for name, value in largest.items() if ".lora_B." in name)
