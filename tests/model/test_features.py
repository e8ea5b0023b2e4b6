"""Features of `prepare`: those that are off are not imported, and one of a test's own takes a class and a row."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from longspan.comm import World
from longspan.errors import ModelError
from longspan.model import features, load_model, prepare
from longspan.model.execution import model_execution
from longspan.model.feature import Feature
from longspan.plan import plan_fixed
from longspan.testing import run_ranks
from longspan.train import run_step

OFF = (
    *("activations.recompute", "activations.tiles", "adapters", "add_depths", "compiled_layers", "experts", "float8"),
    *("float8_layers", "frozen", "host_weights", "mtp", "multimodal", "pipeline", "score_heads", "seams.chosen_keys"),
    *("seams.mixers", "seams.norms", "tensor_parallel", "vision"),
)
TEXT_ONLY = """
from longspan.comm import World
from longspan.layout import Layout
from longspan.model import load_model, prepare
import longspan.train.passes, longspan.train.step_end  # and what they import: read_rows, step_inputs
with World(Layout(ranks=1)) as world:
    off = {"compiled": "auto", "activation_checkpointing": "none"}  # of a run on CPUs
    prepare(load_model(preset="qwen3-tiny", vocab_size=64, sharded=True), world, **off)
"""


def text_only(rank: int) -> list[str]:
    """Import longspan anew in this process, which has torch and transformers already."""
    imported = {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == "longspan"}
    exec(TEXT_ONLY, {})
    loaded = [name for name in sys.modules if name.startswith("longspan.")]
    sys.modules.update(imported)  # by which the answer is sent
    return loaded


def test_a_dense_text_model_imports_no_feature_that_is_off() -> None:
    (loaded,) = run_ranks(text_only, 1)
    assert "longspan.model.sharding" in loaded
    assert [name for name in loaded if name.removeprefix("longspan.model.").startswith(OFF)] == []
    assert [name for name in loaded if name.startswith(("longspan.ssm", "longspan.bridge"))] == []


def test_one_file_names_private_objects_of_fsdp2() -> None:
    files = [*Path(features.__file__).parents[1].rglob("*.py")]
    for name in ("_fully_shard", "_get_fsdp_state", "_sharded_param_data", "_training_state ="):
        assert [file.name for file in files if name in file.read_text()] == ["fsdp_params.py"], name


class FrozenNorms(Feature):
    """A toy: the norms of Qwen3 are not trained."""

    def refuse(self, model: PreTrainedModel) -> None:
        self._names = [name for name, _ in model.named_parameters() if name.endswith("norm.weight")]
        self.words["latents"] = f"{len(self._names)} norms are frozen"
        if "qwen3" not in model.config.model_type:
            raise ModelError(f"{type(model).__name__} has norms of another name; leave them trained")

    def place(self, model: PreTrainedModel, root: nn.Module) -> None:
        for name in self._names:
            model.get_parameter(name).requires_grad_(False)


METHODS = (
    *("checks_context", "refuse", "check_same_on_all_ranks", "connect", "convert"),
    *("cut", "place", "join", "finish"),
)
CALLED: list[str] = []


def note(name: str) -> Any:
    method = getattr(FrozenNorms, name)

    def call(self: Feature, *args: Any) -> Any:
        CALLED.append(name)
        return method(self, *args)

    return call


Noted = type("Noted", (FrozenNorms,), {name: note(name) for name in METHODS})


def test_a_feature_is_a_class_and_a_row(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    rows = features.FEATURES
    fsdp = next(place for place, (_, name) in enumerate(rows) if name.endswith("ShardingFeature"))
    row = (lambda call: call.options.segment_layers == 0, f"{__name__}:Noted")
    monkeypatch.setattr(features, "FEATURES", [*rows[:fsdp], row, *rows[fsdp:]])
    with pytest.raises(ModelError, match=r"^LlamaForCausalLM has norms of another name; leave them trained$"):
        prepare(load_model(preset="llama-tiny", vocab_size=64), world)
    assert [*METHODS[:2]] == CALLED
    CALLED.clear()
    model = prepare(load_model(preset="qwen3-tiny", vocab_size=64), world)
    run_step(model, plan_fixed([9], world.home, cp=1), [torch.arange(9) % 60], world)
    assert [*METHODS] == CALLED and model_execution(model).words["latents"] == "9 norms are frozen"
    assert {name for name, p in model.named_parameters() if p.grad is None} == {
        name for name, _ in model.named_parameters() if name.endswith("norm.weight")
    }
