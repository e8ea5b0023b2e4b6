"""Parameters are gathered once for all micro-batches of an evaluation where they have room, and freed at its end."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp
from torch.distributed.tensor import DTensor

from longspan import Layout, World, bind, evaluate, prepare
from longspan.evaluation import EvaluationOptions, portions as module
from longspan.evaluation.portions import _bytes_per_element, gather_once, gathered_bytes
from longspan.model import fsdp_params
from longspan.model.exactness.row_trial import try_rows
from longspan.plan import plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import PlannerConfig
from tests.model.deep import deep
from tests.model.stock import texts

LAYERS, MICRO_BATCHES = 2, 3
DOCUMENTS = texts((20, 16, 11, 20, 7, 18))  # two slots, one document at a time


def gathers_of_evaluations(rank: int) -> dict[str, tuple[int, tuple[Any, ...]]]:
    """How often FSDP2 gathers, and the losses: with room, on one rank without, where it may stop; also freed where it
    ends with an error.
    """
    inner, of_evaluations = fsdp.foreach_all_gather, dict[str, tuple[int, tuple[Any, ...]]]()
    counted = 0

    def gather(*args: Any, **kwargs: Any) -> Any:
        nonlocal counted
        counted += 1
        return inner(*args, **kwargs)

    with World(Layout(ranks=2), backend=backend(), timeout=60) as world, pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp, "foreach_all_gather", gather)
        model = prepare(deep("qwen3", torch.float32, LAYERS), world)
        weights = sum(parameter.numel() for parameter in model.parameters())
        assert weights * 4 <= gathered_bytes(model) <= weights * 4 * 1.1  # shards are padded
        try_rows(model, world, backward=False)  # whose passes gather too
        for name in ("room", "room on one", "stopped"):
            times = 7 if name == "room on one" and rank else 9  # an eighth of what is unused may be taken
            patch.setattr(module, "unused_bytes", lambda *_, times=times: times * gathered_bytes(model))
            options = EvaluationOptions(stopped=str if name == "stopped" else None)
            counted = 0
            result = evaluate(model, DOCUMENTS, PlannerConfig.fixed(1, max_tokens_per_slot=20), world, options)
            of_evaluations[name] = counted, result.document_losses
            assert len(result.plan.micro_batches) == MICRO_BATCHES
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters()), name  # freed
        with pytest.raises(ValueError, match="in the middle"), gather_once(model), torch.no_grad():
            for micro_batch in plan_fixed((20,) * 2, world.home, cp=1, max_tokens_per_slot=20).micro_batches:
                shard = bind(micro_batch, world)
                model(input_ids=shard.position_ids[None], position_ids=shard.position_ids[None], shard=shard)
            raise ValueError("in the middle")
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters()), "after an error"
    return of_evaluations


def test_parameters_are_gathered_once_where_all_ranks_have_room() -> None:
    for of_evaluations in run_ranks(gathers_of_evaluations, 2):
        gathers = {name: count for name, (count, _) in of_evaluations.items()}
        root_stays = LAYERS * MICRO_BATCHES + 1  # as FSDP2 itself leaves a root
        assert gathers == {"room": LAYERS + 1, "room on one": root_stays, "stopped": LAYERS + 1}
        assert len({losses for _, losses in of_evaluations.values()}) == 1


@pytest.mark.parametrize("owner", ["group", "parameter"])  # the second since torch 2.15
def test_bytes_are_those_of_the_dtype_that_passes_compute_in(owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = {"mp_policy": SimpleNamespace(param_dtype=torch.bfloat16)}
    info = SimpleNamespace(module=nn.Linear(1, 1), param_name="weight")
    parameter = SimpleNamespace(_module_info=info, _sharded_param_data=torch.empty(1))
    vars(parameter).update(policy if owner == "parameter" else {})
    group = SimpleNamespace(fsdp_params=[parameter], mesh_info=SimpleNamespace(shard_mesh_size=3))
    vars(group).update(policy if owner == "group" else {})
    monkeypatch.setattr(fsdp_params, "fsdp_param_groups", lambda _: [group])
    (gathered,) = fsdp_params.gathered_parameters([])
    assert (gathered.numel, _bytes_per_element(gathered)) == (3, 2)
