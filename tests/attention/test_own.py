"""A kernel and a communication type of one's own, named from outside, against dense float64 attention."""

import pytest
import torch

from longspan import Cost, Layout, World, attend, bind, plan_fixed
from longspan.config.file import load_config
from longspan.errors import ConfigError, PlanError
from longspan.run.checks import check_plans
from longspan.testing import run_ranks
from tests.attention import own
from tests.reference import dense_attention, relative_error

KERNEL, TYPE = "tests.attention.own.KERNEL", "tests.attention.own.TYPE"
LENGTHS = (21, 8)


def compare(rank, slots):
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(sum(LENGTHS), heads, 8, dtype=torch.float64) for heads in (4, 2, 2, 4))
    expected = dense(q, k, v, dout)
    home = Layout(ranks=slots)
    with World(home, backend="gloo") as world:
        plan = plan_fixed(LENGTHS, home, cp=slots, cp_comm_type=TYPE)
        world.prepare(plan)
        shard = bind(plan.micro_batches[0], world)
        local = [shard.scatter(x).requires_grad_() for x in (q, k, v)]
        out = attend(*local, shard, kernel=KERNEL)
        out.backward(shard.scatter(dout))
        results = [out.detach(), *(x.grad for x in local)]
        errors = [relative_error(shard.gather(x), y) for x, y in zip(results, expected, strict=True)]
    return max(errors), {*own.calls}


def dense(q, k, v, dout):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = dense_attention(*leaves, LENGTHS)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def test_both_are_found_by_name_and_exact():
    for error, calls in run_ranks(compare, 2, 2):
        assert error < 1e-13 and calls == {"kernel", "type"}


def test_a_type_of_ones_own_is_priced_as_a_ring():
    prices = [Cost(cp_comm_type=kind).group_seconds(4096, 4096**2, 4, True) for kind in (TYPE, "p2p")]
    assert prices[0] == prices[1]
    with pytest.raises(PlanError, match=r"'ring'; use one of p2p, .*, or the dotted name of your own"):
        Cost(cp_comm_type="ring")


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("context.attention_kernel", KERNEL, ""),
        ("context.cp_comm_type", TYPE, ""),
        ("context.attention_kernel", "tests.attention.own.KERNELS", "which its module does not have"),
        ("context.cp_comm_type", "no_such_module.x", "no_such_module cannot be imported"),
        ("context.attention_kernel", "fa5", "did you mean 'fa4'"),
    ],
)
def test_keys_take_dotted_names(key, value, match):
    config = load_config(None, {key: value})
    if not match:
        check_plans(config, Layout(ranks=4), training=True)
        return
    with pytest.raises(ConfigError, match=match):
        check_plans(config, Layout(ranks=4), training=True)
