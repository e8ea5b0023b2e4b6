"""Adapters of experts on a GPU: one product of all groups gives what one product for each expert gives."""

from typing import Any

import peft
import pytest
import torch

from longspan.model.experts import expert_products
from longspan.model.experts.expert_products import ExpertLoads, run_experts
from longspan.model.experts.moe import connect_experts
from longspan.model.kinds import expert_modules
from tests.model.experts.moe_models import moe_config
from tests.model.lora.adapted import drawn
from tests.model.stock import random_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])  # the second one's matrices are transposed
def test_grouped_products_are_those_of_each_expert(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["experts.gate_up_proj", "experts.down_proj"]
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj"], target_parameters=names)
    peft_model: Any = drawn(peft.get_peft_model(random_model(moe_config(family), torch.bfloat16), lora))
    model = peft_model.get_base_model().to("cuda", torch.bfloat16)
    connect_experts(model)
    experts = next(iter(expert_modules(model).values()))
    counts = [0, 3, 17, 1, 40, 8, 0, 11]
    rows = 0.5 * torch.randn((sum(counts), model.config.hidden_size), generator=torch.Generator().manual_seed(0))
    found = dict[bool, list[torch.Tensor]]()
    trained = [p for n, p in model.named_parameters() if ".layers.0.mlp.experts." in n and p.requires_grad]
    assert len(trained) == 4
    for grouped in (True, False):
        monkeypatch.setattr(expert_products, "can_group_products", lambda *_, grouped=grouped, **__: grouped)
        x = rows.to("cuda", torch.bfloat16).requires_grad_()
        y = run_experts(experts, x, ExpertLoads(torch.tensor(counts, device="cuda")))
        found[grouped] = [y, *torch.autograd.grad(y.float().square().sum(), [x, *trained])]
    for together, looped in zip(found[True], found[False], strict=True):
        assert looped.abs().max() > 0
        assert (together - looped).float().norm() <= 2e-2 * looped.float().norm()
