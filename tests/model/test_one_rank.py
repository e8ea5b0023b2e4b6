"""One rank: passes read the shards themselves, and gradients are the messages of their sums, with FSDP2's own bits."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from longspan import Layout, World, plan_fixed, run_step
from longspan.model import sharding
from longspan.model.execution import model_execution
from longspan.model.fsdp_params import HookedParam, SumIsMessage, fsdp_modules, fsdp_param_groups
from longspan.model.weights.local_tensors import local_tensor
from longspan.plan.micro_batch import Mode
from longspan.testing import backend, run_ranks
from tests.model.experts.moe_models import moe_model
from tests.model.frozen.packed_models import adapted
from tests.model.stock import gradients_of, prepare_untried, texts, tiny

DOCUMENTS = texts([9, 14, 6, 11])

Case = tuple[torch.dtype, torch.dtype | None, Mode, dict[str, Any]]
CASES: list[Case] = [
    (torch.bfloat16, None, "lockstep", {}),
    (torch.bfloat16, None, "lockstep", {"sync_each_batch": False, "reshard_after_forward": False}),
    (torch.bfloat16, None, "free", {}),
    (torch.float32, torch.bfloat16, "lockstep", {}),
    (torch.float32, torch.bfloat16, "free", {}),
    (torch.float32, None, "lockstep", {"activation_checkpointing": "full"}),
]


def trained(case: Case, steps: int = 2, family: str = "qwen3") -> tuple[Any, list[dict[str, Tensor]]]:
    dtype, compute, mode, options = case
    gradients = list[dict[str, Tensor]]()
    with World(Layout(1)) as world:
        model = prepare_untried(tiny(family, dtype), world, compute_dtype=compute, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        plan = plan_fixed([len(x) for x in DOCUMENTS], world.home, cp=1, max_tokens_per_slot=16, mode=mode)
        assert len(plan.micro_batches) > 2
        for _ in range(steps):
            optimizer.zero_grad()
            run_step(model, plan, DOCUMENTS, world)
            gradients.append({name: gradient.clone() for name, gradient in gradients_of(model).items()})
            optimizer.step()
    return model, gradients


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """FSDP2 as it is."""
    with monkeypatch.context() as patch:
        patch.setattr(sharding, "leave_out_copies_of_one_rank", lambda root: None)
        yield patch


@pytest.mark.parametrize("case", CASES)
def test_gradients_have_the_bits_of_fsdp2s_copies(case: Case, without: pytest.MonkeyPatch) -> None:
    _, copied = trained(case)
    without.undo()
    model, own = trained(case)
    assert all(isinstance(group._reduce_scatter_comm, SumIsMessage) for group in fsdp_param_groups(fsdp_modules(model)))
    for expected, found in zip(copied, own, strict=True):
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert any(not torch.equal(a[name], b[name]) for a, b in pairwise(own) for name in a)


def places(model: Any) -> tuple[set[int], set[int]]:
    """The memory of parameters as passes find them, and of shards."""
    shards = {local_tensor(p.detach()).untyped_storage().data_ptr() for p in model.parameters()}
    for module in fsdp_modules(model):
        module.unshard()
    whole = {p.untyped_storage().data_ptr() for p in model.parameters()}
    for module in fsdp_modules(model):
        module.reshard()
    return whole, shards


def test_passes_read_the_shards_also_after_these_have_moved() -> None:
    # Assigning would undo a tie.
    model, _ = trained(CASES[0], steps=1, family="llama")
    whole, shards = places(model)
    assert whole == shards
    before = {name: local_tensor(p.detach()).clone() for name, p in model.named_parameters()}
    model.load_state_dict({name: p.detach().clone() for name, p in model.state_dict().items()}, assign=True)
    moved, shards_now = places(model)
    assert moved == shards_now and not moved & whole
    after = {name: local_tensor(p.detach()) for name, p in model.named_parameters()}
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_shards_that_lie_in_memory_with_others_are_copied() -> None:
    """FSDP2 sets the size of the memory of what it gathers: a buffer of all weights would lose all but the first."""
    model, _ = trained(CASES[0], steps=1, family="llama")
    state = model.state_dict()
    flat = torch.cat([local_tensor(p.detach()).flatten() for p in state.values()])
    expected = flat.clone()
    for part, parameter in zip(flat.split([p.numel() for p in state.values()]), state.values(), strict=True):
        state_parameter: Any = parameter
        state_parameter._local_tensor = part.view(parameter.shape)
    model.load_state_dict(state, assign=True)
    whole, shards = places(model)
    assert len(shards) == 1 and not whole & shards
    assert torch.equal(flat, expected)
    # They are read again once they have memory of their own.
    model.load_state_dict({name: p.detach().clone() for name, p in model.state_dict().items()}, assign=True)
    whole, shards = places(model)
    assert whole == shards and len(shards) > 1
    found = torch.cat([local_tensor(p.detach()).flatten() for p in model.state_dict().values()])
    assert torch.equal(found, expected)


def test_parameters_that_are_cast_have_memory_of_their_own() -> None:
    model, _ = trained(CASES[3], steps=1)
    whole, shards = places(model)
    assert not whole & shards
    assert {local_tensor(p.detach()).dtype for p in model.parameters()} == {torch.float32}


def test_a_cast_is_one_copy() -> None:
    model, _ = trained(CASES[3], steps=1)
    for group in fsdp_param_groups(fsdp_modules(model)):
        for parameter in group.fsdp_params:
            assert parameter.all_gather_inputs[0] is parameter.shard
            assert [output.dtype for output in parameter.all_gather_outputs] == [torch.bfloat16]


def test_packed_weights_are_unpacked_from_the_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked = list[bool]()
    original = HookedParam.init_unsharded_param

    def note(parameter: HookedParam) -> None:
        if parameter.unpacking is not None:
            unpacked.append(parameter.all_gather_outputs[0] is parameter.shard)
        original(parameter)
        if parameter.unpacking is not None:
            assert not parameter.all_gather_outputs and parameter.shard.untyped_storage().nbytes()

    monkeypatch.setattr(HookedParam, "init_unsharded_param", note)
    with World(Layout(1)) as world:
        model = prepare_untried(adapted("mixture"), world, frozen="nf4")
        plan = plan_fixed([len(x) for x in DOCUMENTS], world.home, cp=1)
        run_step(model, plan, DOCUMENTS, world)
    assert unpacked and all(unpacked)


def _alone_in_a_group(rank: int) -> list[tuple[bool, int, int]]:
    """Of a home, whether gradients have FSDP2's bits; how many groups have one rank, and how many hooked parameters."""
    found = list[tuple[bool, int, int]]()
    for home in (Layout(2, ep=2), Layout(2, dp_replicate=2)):
        gradients = list[dict[str, Tensor]]()
        groups = parameters = 0
        with World(home, backend=backend()) as world:
            plan = plan_fixed([len(x) for x in DOCUMENTS], home, cp=1, max_tokens_per_slot=16)
            for leave_out in (lambda root: None, sharding.leave_out_copies_of_one_rank):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(sharding, "leave_out_copies_of_one_rank", leave_out)
                    model = prepare_untried(moe_model("qwen3-moe", torch.bfloat16), world)
                optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
                for _ in range(2):
                    optimizer.zero_grad()
                    run_step(model, plan, DOCUMENTS, world)
                    optimizer.step()
                gradients.append({name: x.clone() for name, x in gradients_of(model).items()})
            every = [*fsdp_param_groups(fsdp_modules(model))]
            groups = sum(isinstance(group._reduce_scatter_comm, SumIsMessage) for group in every)
            parameters = sum(getattr(x, "_reads_shard", False) for group in every for x in group.fsdp_params)
        equal = all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
        found.append((equal, groups, parameters))
    return found


def test_a_rank_may_be_alone_in_a_group_of_more_ranks() -> None:
    """With its experts (two matrices in each of two layers), and with replicas of all parameters, which are summed."""
    for (equal, groups, parameters), (equal_copies, summed, copies) in run_ranks(_alone_in_a_group, 2):
        assert equal and (groups, parameters) == (2, 4)
        assert equal_copies and summed == 0 and copies > 4


def test_a_message_that_was_not_sent_is_no_sum_of_the_next() -> None:
    comm = SumIsMessage()
    memory = [comm.allocate((4,), dtype=torch.float32, device=torch.device("cpu"))]
    comm.forget_message()  # an error came between
    memory += [comm.allocate((4,), dtype=torch.float32, device=torch.device("cpu")) for _ in range(2)]
    memory.append(comm.allocate((4,), dtype=torch.float32, device=torch.device("cpu")))
    assert memory[1] is memory[2]
    assert memory[0] is not memory[1] and memory[2] is not memory[3]


@pytest.mark.parametrize(
    ("dtype", "options", "added"),
    [
        (torch.bfloat16, {}, torch.bfloat16),
        (torch.bfloat16, {"sync_each_batch": False, "reshard_after_forward": False}, torch.float32),
        (torch.bfloat16, {"shard_parameters": False}, torch.bfloat16),
        (torch.float32, {"compute_dtype": torch.bfloat16}, torch.float32),
    ],
)
def test_micro_batches_are_added_in_the_type_that_a_run_names(
    dtype: torch.dtype, options: dict[str, Any], added: torch.dtype
) -> None:
    # 16 targets in each of four documents: to divide by targets is exact.
    documents = texts([17] * 4)
    with World(Layout(1)) as world:
        model = prepare_untried(tiny("llama", dtype), world, **options)
        execution = model_execution(model)
        assert (execution.added_dtype or execution.reduce_dtype) == added
        plan = plan_fixed([17] * 4, world.home, cp=1, max_tokens_per_slot=17)

        def gradients(documents: Any) -> dict[str, Tensor]:
            model.zero_grad()
            step = plan_fixed([17] * len(documents), world.home, cp=1, max_tokens_per_slot=17)
            run_step(model, step, documents, world)
            return {name: gradient.clone() for name, gradient in gradients_of(model).items()}

        order = [document for batch in plan.micro_batches for document in batch.documents]
        together, alone = gradients(documents), [gradients([documents[i]]) for i in order]
    for name, gradient in together.items():
        total = alone[0][name].to(added) / 4
        for part in alone[1:]:
            total += part[name].to(added) / 4
        assert torch.equal(total.to(dtype), gradient), name
