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
    found = dict[str, list[torch.Tensor]]()
    trained = [p for n, p in model.named_parameters() if ".layers.0.mlp.experts." in n and p.requires_grad]
    assert len(trained) == 4
    for kind in ("grouped_mm", "loop"):
        monkeypatch.setattr(expert_products, "expert_product_kind", lambda *_, kind=kind, **__: kind)
        x = rows.to("cuda", torch.bfloat16).requires_grad_()
        y = run_experts(experts, x, ExpertLoads(torch.tensor(counts, device="cuda")))
        found[kind] = [y, *torch.autograd.grad(y.float().square().sum(), [x, *trained])]
    for grouped, looped in zip(found["grouped_mm"], found["loop"], strict=True):
        assert looped.abs().max() > 0
        assert (grouped - looped).float().norm() <= 2e-2 * looped.float().norm()
