"""An attention kernel is named where a model is prepared; one that is missing is an error before the first step."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan import Layout, World, bind, plan_fixed, prepare
from longspan.errors import AttentionError
from longspan.testing import backend, run_ranks
from tests.model.stock import tiny
from tests.train.small import small_config, train_rank

MISSING = "torch_flash" if backend() == "gloo" else "cpu_flash"
SAID = "needs cuda tensors, got cpu" if backend() == "gloo" else "needs cpu tensors, got cuda"


def _used(rank: int) -> list[tuple[set[str], Any]]:
    """The kernels that layers chose, and the logits, by default, by name, and by name in recomputed layers."""
    packing: Any = import_module("longspan.attention.attend")
    chosen, choose, used = set[str](), packing.choose_kernel, list[tuple[set[str], Any]]()

    def noted(call: Any, name: str | None = None) -> Any:
        kernel = choose(call, name)
        chosen.add(kernel.name)
        return kernel

    packing.choose_kernel = noted  # in this process only
    with World(Layout(ranks=1), backend=backend()) as world:
        batch = plan_fixed((9, 4), world.home, cp=1).micro_batches[0]
        ids = torch.arange(13, device=world.device)[None]
        for name, recompute in ((None, False), ("reference", False), ("reference", True)):
            model = prepare(tiny("mistral"), world, attention_kernel=name, activation_checkpointing=recompute)
            chosen.clear()
            shard = bind(batch, world)  # a choice is kept with the shard
            logits = model(input_ids=ids, position_ids=shard.position_ids[None], shard=shard).logits
            logits.sum().backward()
            used.append((set(chosen), logits.detach().cpu()))
            chosen.clear()
            shard = bind(batch, world)
            with torch.no_grad():
                model(input_ids=ids, position_ids=shard.position_ids[None], shard=shard, attention_kernel="reference")
            assert chosen == {"reference"}, "the argument of a call wins"
            assert "attention_kernel" not in model.config.to_dict()
    return used


def test_the_named_kernel_is_what_every_layer_runs() -> None:
    (first, default), (named, logits), (again, recomputed) = run_ranks(_used, 1)[0]
    assert named == again == {"reference"}
    assert backend() == "nccl" or first == {"cpu_flash"}
    assert (logits - default).abs().max() <= 1e-4 and torch.equal(logits, recomputed)


WITH_WINDOW = f"MistralForCausalLM attends with heads of 8 with values of 8, window: kernel {MISSING} {SAID}"
REFUSED = [
    ("mistral", "fa5", "kernel 'fa5' is unknown; use one of fa4, cudnn, torch_flash, triton_flash, cpu_flash, ref"),
    ("mistral", MISSING, WITH_WINDOW),
    ("deepseek-v3", MISSING, "attends with heads of 12 with values of 6"),
    *([("gemma2", "cpu_flash", "a call without softcap")] if backend() == "gloo" else []),
]


@pytest.mark.parametrize(("family", "name", "message"), REFUSED)
def test_a_kernel_that_is_missing_is_an_error_when_the_model_is_prepared(family: str, name: str, message: str) -> None:
    with World(Layout(ranks=1), backend=backend()) as world, pytest.raises(AttentionError, match=message):
        prepare(tiny(family, attention="eager"), world, attention_kernel=name)


def test_a_run_with_a_missing_kernel_makes_no_step(tmp_path: Path) -> None:
    one = {"context__context_parallel_size": 1, "context__eval_context_parallel_size": 1}
    config = small_config(tmp_path, context__attention_kernel=MISSING, **one)
    with pytest.raises(AttentionError, match=f"kernel {MISSING} {SAID}; available here: "):
        run_ranks(train_rank, 1, config, 1)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
