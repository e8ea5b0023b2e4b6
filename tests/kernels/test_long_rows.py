"""Operators and kernels of a step past 2^32 elements, on a GPU of 100 GiB or more; on CPUs, how norms are split."""

from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from longspan.attention.kernels import table
from longspan.comm import World, bind
from longspan.layout import Layout
from longspan.model import prepare
from longspan.model.seams import norms as fused_norms
from longspan.model.seams import norms as long_norms
from longspan.plan import plan_fixed
from tests.kernels import long_rows
from tests.model.stock import texts, tiny

BOUND = 2e-2
CASES = long_rows.cases()
MEMORY = 100 * 2**30
HAS_MEMORY = torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory >= MEMORY


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_MEMORY or find_spec("triton") is None, reason="needs a GPU of 100 GiB")
@pytest.mark.parametrize("case", CASES)
def test_rows_are_those_of_the_same_rows_alone(case: str) -> None:
    kernel = case.removeprefix("attention ")
    if kernel != case and (lack := table.find_kernel(kernel).device_lack(torch.device("cuda"))):
        pytest.skip(f"{kernel} {lack}")
    errors = CASES[case]("cuda", long_rows.PAST)
    torch.cuda.empty_cache()
    assert errors and max(errors.values()) <= BOUND, errors


def test_norms_of_long_inputs_take_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms that a model was prepared with, and torch's own; a call holds at most so many elements."""
    sizes = list[int]()

    def recorded(norm):
        def noted(x, *others, **named):
            sizes.append(x.numel())
            return norm(x, *others, **named)

        return noted

    for module, name in ((fused_norms, "rms_norm"), (F, "layer_norm"), (F, "rms_norm")):
        monkeypatch.setattr(module, name, recorded(getattr(module, name)))
    ids = torch.from_numpy(texts((40,))[0])
    x = torch.randn(3, 7, 6)
    plan = plan_fixed([40], Layout(ranks=1), cp=1, max_tokens_per_slot=40)
    with World(Layout(ranks=1)) as world:
        model = prepare(tiny("qwen3"), world, fused_norms="on")
        encoder = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.RMSNorm(5))
        long_norms.split_long_norms(encoder)
        shard, results = bind(plan.micro_batches[0], world), []
        for most in (long_norms.MOST, 100):
            monkeypatch.setattr(long_norms, "MOST", most)
            sizes.clear()
            logits = model(input_ids=ids[None], position_ids=shard.position_ids[None], shard=shard).logits
            results.append((logits, encoder(x)))
            assert max(sizes) <= most and len(sizes) > 9
    for whole, in_pieces in zip(*results, strict=True):
        assert torch.allclose(whole, in_pieces, rtol=1e-5, atol=1e-6)
