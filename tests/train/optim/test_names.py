"""Parameters that are frozen, or have a rate and decay of their own, by patterns of their names."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from longspan.comm import World
from longspan.config.file import load_config
from longspan.config.text_values import NamedGroup
from longspan.errors import ConfigError
from longspan.layout import Layout
from longspan.model import load_model
from longspan.model.saving.whole_weights import weights_by_name
from longspan.plan import plan_fixed
from longspan.plan.memory.model_numbers import ModelNumbers
from longspan.plan.memory.settings import MemorySettings
from longspan.plan.shape.name_patterns import meets_any
from longspan.run.checks import check_config, check_optimizer
from longspan.testing import backend, run_ranks
from longspan.train import run_step
from longspan.train.optim.parameter_groups import check_named_groups, freeze_by_name
from longspan.train.training import build_run_optimizer
from tests.model.deep import deep, deep_config
from tests.model.stock import prepare_untried, texts

LENGTHS = (13, 2, 30, 7)
LR = 1e-2
KEYS: dict[str, Any] = {
    "model.dtype": "float64",
    "optimizer.lr": LR,
    "optimizer.weight_decay": 0.1,
    "optimizer.groups": ("layers.1-2.* lr=3e-3", "embed* lr=5e-2 weight_decay=0", "*k_proj* weight_decay=0.5"),
    "train.freeze": ("layers.0.*", "*.3.mlp.up_proj"),
}
EMBEDDING = "model.embed_tokens.weight"


def test_what_patterns_meet() -> None:
    for pattern, name, met in (
        ("embed*", "model.embed_tokens.weight", True),
        ("embed", "model.embed_tokens.weight", False),
        ("lm_head", "lm_head.weight", True),
        ("head*", "lm_head.weight", False),
        ("layers.0-7.*", "model.layers.7.mlp.up_proj.weight", True),
        ("layers.0-7.*", "model.layers.17.mlp.up_proj.weight", False),
        ("layers.8-11", "model.language_model.layers.10.mlp.up_proj.weight", True),
        ("*.mlp.*.weight", "model.layers.3.mlp.up_proj.weight", True),
        ("norm", "model.layers.3.self_attn.q_norm.weight", False),
        ("model.norm.weight", "model.norm.weight", True),
        ("*lora_B*", "model.layers.3.mlp.up_proj.lora_B.default.weight", True),
    ):
        assert meets_any([pattern], name) == met, (pattern, name)


def _train(rank: int, home: Layout, changes: dict[str, Any]) -> dict[str, Tensor]:
    config = load_config(None, KEYS | changes)
    with World(home, backend=backend(), timeout=60) as world:
        model = deep("qwen3", torch.float64)
        freeze_by_name(model, config.train.freeze)
        check_named_groups(model, config.optimizer.groups, stages=home.pp)
        prepared: Any = prepare_untried(model, world, offload_weights=config.train.offload_weights)
        optimizer = build_run_optimizer(config, world, prepared)
        for step in (1, 2, 3):
            plan = plan_fixed(LENGTHS, world.home, cp=min(2, world.home.slots))
            run_step(prepared, plan, texts(LENGTHS, seed=step), world, optimizer=optimizer)
        if hasattr(optimizer, "finish_step"):
            optimizer.finish_step()
        return {name: x.cpu().clone() for name, x in weights_by_name(prepared, world)}


def _trained_by_torch() -> dict[str, Tensor]:
    """The stock model on one process, its groups written by hand."""
    model = deep("qwen3", torch.float64)
    groups = list[dict[str, Any]]()
    for name, parameter in model.named_parameters():
        if ".layers.0." in name or name.endswith("layers.3.mlp.up_proj.weight"):
            continue
        lr = 5e-2 if name == EMBEDDING else 3e-3 if ".layers.1." in name or ".layers.2." in name else LR
        decay = 0.5 if "k_proj" in name else 0.1
        if parameter.ndim == 1 or name == EMBEDDING:
            decay = 0.0
        lr = LR if "k_proj" in name else lr  # the last group that meets it gives no rate
        groups.append({"params": [parameter], "lr": lr, "weight_decay": decay})
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    for step in (1, 2, 3):
        documents = [torch.from_numpy(np.asarray(x)) for x in texts(LENGTHS, seed=step)]
        targets = sum(len(x) - 1 for x in documents)
        for ids in documents:
            logits: Any = model(ids[None]).logits[0, :-1]
            (nn.functional.cross_entropy(logits, ids[1:], reduction="sum") / targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


# Patterns of a head that is a stage's own, as its embedding is another's.
OF_STAGES = (*KEYS["optimizer.groups"][:2], "lm_head lr=5e-2 weight_decay=0", "*k_proj* weight_decay=0.5")


@pytest.mark.parametrize(
    ("home", "changes"),
    [
        (Layout(2), {}),
        pytest.param(Layout(2, tp=2), {}, marks=pytest.mark.whole),
        pytest.param(Layout(2, dp_replicate=2), {}, marks=pytest.mark.whole),
        pytest.param(Layout(2, pp=2), {"optimizer.groups": OF_STAGES}, marks=pytest.mark.whole),
        pytest.param(Layout(2), {"train.offload_optimizer_states": True}, marks=pytest.mark.whole),
        pytest.param(Layout(2), {"train.offload_weights": True}, marks=pytest.mark.whole),
    ],
    ids=str,
)
def test_homes_train_as_torch_with_groups_of_parameters(home: Layout, changes: dict[str, Any]) -> None:
    weights = run_ranks(_train, len(home.ranks), home, changes)[0]
    expected = _trained_by_torch()
    assert set(expected) == weights.keys() - {"lm_head.weight"}
    initial = dict(deep("qwen3", torch.float64).named_parameters())
    for name, weight in expected.items():
        frozen = ".layers.0." in name or "3.mlp.up_proj" in name
        assert torch.equal(weights[name], initial[name]) == frozen, name
        assert (weights[name] - weight).abs().max() < 1e-9, name


def test_what_is_refused() -> None:
    model = deep("qwen3", torch.float32)
    with pytest.raises(ConfigError, match=r"train.freeze has 'layers.9', which meets none .* model.layers.N.mlp"):
        freeze_by_name(model, ("layers.0", "layers.9"))
    with pytest.raises(ConfigError, match=r"train.freeze has \*, which leaves nothing to train"):
        freeze_by_name(model, ("*",))
    model = deep("qwen3", torch.float32)
    freeze_by_name(model, ("embed*",))
    with pytest.raises(ConfigError, match=r"optimizer.groups has 'lm_head', which meets none"):
        check_named_groups(model, ("lm_head lr=1e-3",), stages=1)  # tied to what is frozen
    model = deep("qwen3", torch.float32)
    check_named_groups(model, ("lm_head lr=1e-3",), stages=1)
    with pytest.raises(ConfigError, match=r"model.embed_tokens.weight and lm_head.weight, which are one tied weight"):
        check_named_groups(model, ("lm_head lr=1e-3",), stages=2)
    for text in ("*norm* weight_decay=0.1", "*norm* weight_decay=0.1 lr=1e-3"):
        with pytest.raises(
            ConfigError, match=f"has {re.escape(repr(text))}, which meets 17 parameters, norms and biases"
        ):
            check_named_groups(model, (text,), stages=1)
    check_named_groups(model, ("*norm* weight_decay=0", "*weight weight_decay=0.1"), stages=1)
    for text in ("embed*", "embed* lr=0", "embed* lr=1e-3 lr=2e-3", "embed* rate=2", "embed* lr=fast", "embed* lr=nan"):
        with pytest.raises(ConfigError, match="give a pattern of names with lr= above 0, weight_decay= or both"):
            load_config(None, {"optimizer.groups": (text,)})
    with pytest.raises(ConfigError, match="weight_decay must be at least 0"):
        NamedGroup.from_text("embed* weight_decay=-1")
    keys = {"train.freeze": ("embed*",), "lora.rank": 4}
    with pytest.raises(ConfigError, match=r"train.freeze is \('embed\*',\), which needs lora.rank 0"):
        check_config(load_config(None, keys), 2)
    keys = {"optimizer.class": "torch.optim.Rprop", "optimizer.groups": ("embed* weight_decay=1",), "train.steps": 9}
    with pytest.raises(ConfigError, match="knows no weight decay"):
        check_optimizer(load_config(None, keys | {"optimizer.weight_decay": 0.0}))


def test_muon_and_moments_in_eight_bits_have_the_groups() -> None:
    rows = run_ranks(_groups, 1)[0]
    for settings in rows.values():
        assert {lr for lr, *_ in settings} == {LR, 3e-3, 5e-2}
    assert {is_matrix for _, _, is_matrix in rows["muon"]} == {True, False}


def _groups(rank: int) -> dict[str, list[tuple[float, float, bool]]]:
    rows = {}
    with World(Layout(1), backend=backend(), timeout=60) as world:
        for name, keys in (("muon", {"optimizer.class": "muon"}), ("8bit", {"optimizer.moments": "8bit"})):
            model: Any = prepare_untried(load_model(config=deep_config("qwen3", 4), dtype="float32"), world)
            groups = build_run_optimizer(
                load_config(None, KEYS | {"model.dtype": "float32"} | keys), world, model
            ).param_groups
            rows[name] = [(g["lr"], g["weight_decay"], g.get("is_matrix", False)) for g in groups]
    return rows


def test_the_plan_of_memory_counts_what_is_frozen_whole() -> None:
    config = deep_config("llama", 4)

    def trained(*names: str) -> list[float]:
        numbers = ModelNumbers.from_configuration(config, Layout(1), MemorySettings(frozen_names=names))
        return [*(layer.trained for layer in numbers.layers), numbers.head.trained]

    layer, *_, head = trained()
    assert trained("layers.1-2.*") == [layer, 0, 0, layer, head]
    assert trained("*proj*", "lm_head") == [layer, layer, layer, layer, head]  # parts count as trained
    assert trained("embed*", "lm_head", "model.layers.0") == [0, layer, layer, layer, 0]
