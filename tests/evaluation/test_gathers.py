"""Parameters are gathered once for all micro-batches of an evaluation where they have room, and freed at its end."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp
from torch.distributed.tensor import DTensor

from longspan import Layout, World, bind, evaluate, prepare
from longspan.evaluation import evaluate as module
from longspan.evaluation.evaluate import _bytes_per_element, gather_once, gathered_bytes
from longspan.model.exactness.row_trial import try_rows
from longspan.plan import plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import EvaluationOptions, PlanChoice
from tests.model.deep import deep
from tests.model.stock import texts

LAYERS, MICRO_BATCHES = 2, 3
DOCUMENTS = texts((20, 16, 11, 20, 7, 18))  # two slots, one document at a time


def gathers_of_evaluations(rank: int) -> dict[str, tuple[int, int, tuple[Any, ...]]]:
    """How often FSDP2 gathers and runs its hooks, and the losses: with room, on one rank without, where it may stop."""
    inner, of_evaluations = fsdp.foreach_all_gather, dict[str, tuple[int, int, tuple[Any, ...]]]()
    counted, before, pre_forward = 0, 0, fsdp.FSDPParamGroup.pre_forward

    def gather(*args: Any, **kwargs: Any) -> Any:
        nonlocal counted
        counted += 1
        return inner(*args, **kwargs)

    def run_hook(*args: Any, **kwargs: Any) -> Any:
        nonlocal before
        before += 1
        return pre_forward(*args, **kwargs)

    def stopped() -> str:
        return ""

    with World(Layout(ranks=2), backend=backend(), timeout=60) as world, pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp, "foreach_all_gather", gather)
        patch.setattr(fsdp.FSDPParamGroup, "pre_forward", run_hook)
        model = prepare(deep("qwen3", torch.float32, LAYERS), world)
        weights = sum(parameter.numel() for parameter in model.parameters())
        assert weights * 4 <= gathered_bytes(model) <= weights * 4 * 1.1  # shards are padded
        try_rows(model, world, backward=False)  # whose passes gather too
        for name in ("room", "room on one", "stopped"):
            times = 7 if name == "room on one" and rank else 9  # an eighth of what is unused may be taken
            patch.setattr(module, "unused_bytes", lambda *_, times=times: times * gathered_bytes(model))
            options = EvaluationOptions(stopped=stopped if name == "stopped" else None)
            counted, before, hooks = 0, 0, _hooks(model)
            result = evaluate(model, DOCUMENTS, PlanChoice.fixed(1, max_tokens_per_slot=20), world, options)
            of_evaluations[name] = counted, before, result.document_losses
            assert len(result.plan.micro_batches) == MICRO_BATCHES
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters()), name  # freed
            assert _hooks(model) == hooks
    return of_evaluations


def _hooks(model: nn.Module) -> list[tuple[int, Any]]:
    return [
        hook
        for module in model.modules()
        for hook in (*module._forward_pre_hooks.items(), *module._forward_hooks.items())
    ]


def test_parameters_are_gathered_once_where_all_ranks_have_room() -> None:
    for of_evaluations in run_ranks(gathers_of_evaluations, 2):
        gathers = {name: count for name, (count, _, _) in of_evaluations.items()}
        root_stays = LAYERS * MICRO_BATCHES + 1  # as FSDP2 itself leaves a root
        assert gathers == {"room": LAYERS + 1, "room on one": root_stays, "stopped": LAYERS + 1}
        hooks = {name: count for name, (_, count, _) in of_evaluations.items()}
        of_root = MICRO_BATCHES
        assert hooks == {name: LAYERS * (3 if name == "room on one" else 1) + of_root for name in hooks}
        assert len({losses for _, _, losses in of_evaluations.values()}) == 1


def hooks_after_an_error(rank: int) -> list[str]:
    """Dtypes that a layer sees of inputs in another one than FSDP2 computes in; hooks are back after an error."""
    dtypes = list[str]()
    with World(Layout(ranks=2), backend=backend(), timeout=60) as world:
        model = prepare(deep("qwen3", torch.float32, LAYERS), world, compute_dtype=torch.bfloat16)
        layer, hooks = model.get_submodule("model.layers.1"), _hooks(model)
        evaluate(model, DOCUMENTS, PlanChoice.fixed(1, max_tokens_per_slot=20), world)

        def note(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            dtypes.append(str(args[0].dtype))
            if len(dtypes) == 3:
                raise ValueError("the third call")

        inner = model.get_submodule("model.layers.0").register_forward_hook(lambda _, args, out: out.float())
        noting = layer.register_forward_pre_hook(note)
        with pytest.raises(ValueError, match="the third call"), gather_once(model), torch.no_grad():
            for micro_batch in plan_fixed((20,) * 6, world.home, cp=1, max_tokens_per_slot=20).micro_batches:
                shard = bind(micro_batch, world)
                model(input_ids=shard.position_ids[None], position_ids=shard.position_ids[None], shard=shard)
        inner.remove()
        noting.remove()
        assert _hooks(model) == hooks
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return dtypes


def test_inputs_are_cast_without_hooks_and_hooks_are_back_after_an_error() -> None:
    for dtypes in run_ranks(hooks_after_an_error, 2):
        assert dtypes == ["torch.bfloat16"] * 3


@pytest.mark.parametrize("owner", ["group", "parameter"])  # the second since torch 2.15
def test_bytes_are_those_of_the_dtype_that_passes_compute_in(owner: str) -> None:
    policy = {"mp_policy": SimpleNamespace(param_dtype=torch.bfloat16)}
    info = SimpleNamespace(module=nn.Linear(1, 1), param_name="weight")
    parameter = SimpleNamespace(_module_info=info, _sharded_param_data=torch.empty(1))
    vars(parameter).update(policy if owner == "parameter" else {})
    assert _bytes_per_element(SimpleNamespace(**(policy if owner == "group" else {})), parameter) == 2
