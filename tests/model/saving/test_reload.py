"""A saved folder back into a prepared model, bit for bit under another layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.distributed.tensor import DTensor

from longspan import Layout, World
from longspan.errors import ModelError
from longspan.model import load_model, prepare, save_model
from longspan.model.saving import load_weights
from longspan.testing import backend, run_ranks

CASES = [
    ("qwen3-tiny", {}, {"tp": 2}),  # tied embeddings
    ("qwen3-moe-tiny", {"ep": 2}, {}),  # experts that a folder has one by one
    ("qwen3-tiny", {"pp": 2}, {}),
    ("qwen3-tiny", {}, {"pp": 2}),
]


def model_of(preset: str, seed: int, lora: bool = False) -> Any:
    model = load_model(None, preset, dtype="float32", seed=seed, vocab_size=64)
    if lora:
        torch.manual_seed(seed)
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False))
    return model


def whole(model: Any) -> dict[str, Tensor]:
    return {n: x.full_tensor() if isinstance(x, DTensor) else x for n, x in model.state_dict().items()}


def reload_rank(rank: int, folder: Path) -> str:
    for number, (preset, saved, loaded) in enumerate(CASES):
        path = folder / str(number)
        with World(Layout(2, **saved), backend=backend(), timeout=60) as world:
            first = prepare(model_of(preset, 0), world, probe=False)
            save_model(first, path, world)
            expected = whole(first)
        with World(Layout(2, **loaded), backend=backend(), timeout=60) as world:
            second = prepare(model_of(preset, 1), world, probe=False)
            load_weights(second, path, world)
            found = whole(second)
            shared = expected.keys() & found.keys()
            assert len(shared) > 5 and all(torch.equal(expected[n].cpu(), found[n].cpu()) for n in shared), number
            assert "pp" in saved or "pp" in loaded or expected.keys() == found.keys()
    with World(Layout(2), backend=backend(), timeout=60) as world:
        first = prepare(model_of("qwen3-tiny", 0, lora=True), world, probe=False)
        save_model(first, folder / "adapter", world)
        second = prepare(model_of("qwen3-tiny", 1, lora=True), world, probe=False)
        load_weights(second, folder / "adapter", world)
        one, two = whole(first), whole(second)
        assert all(torch.equal(one[n], two[n]) == ("lora" in n) for n in one if "proj" in n)
        with pytest.raises(ModelError) as refused:
            load_weights(second, folder / "0", world)
        plain = prepare(model_of("qwen3-moe-tiny", 1), world, probe=False)
        with pytest.raises(ModelError, match=r"lacks .* weights"):
            load_weights(plain, folder / "0", world)
        return str(refused.value)


def test_a_folder_comes_back_bit_for_bit_under_another_layout(tmp_path: Path) -> None:
    texts = run_ranks(reload_rank, 2, tmp_path)
    assert texts[0] == texts[1] and "has no adapter_model.safetensors, and the model has an adapter" in texts[0]
