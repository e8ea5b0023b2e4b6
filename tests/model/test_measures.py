"""Words for what layers keep that are refused, and ranks that compute alike (tests/model/activations has the steps)."""

import re
from collections.abc import Sequence

import pytest
import torch

from longspan import Layout, World, prepare
from longspan.attention.kernels import find_kernel
from longspan.errors import ModelError
from longspan.model import execution
from longspan.testing import backend, run_ranks
from tests.model.mtp.dense import with_depths
from tests.model.stock import tiny


def test_other_words_and_numbers_of_words_are_refused() -> None:
    with World(Layout(ranks=1), backend="gloo") as world:
        with pytest.raises(
            ModelError, match="checkpoint_policies has 'some'; use none, exchanged, selective, full, selective"
        ):
            prepare(tiny("qwen3"), world, checkpoint_policies="some")
        with pytest.raises(
            ModelError, match="checkpoint_policies has 3 words; Qwen3ForCausalLM has 2 decoder layers: give one"
        ):
            prepare(tiny("qwen3"), world, checkpoint_policies=("none", "full", "full"))
        with pytest.raises(ModelError, match="has 2 decoder layers and 2 depths of multi-token prediction"):
            prepare(with_depths("qwen3", 2), world, checkpoint_policies=("none", "full"))
        with pytest.raises(ModelError, match="what each layer keeps, and offload_activations is True; use one"):
            prepare(tiny("qwen3"), world, checkpoint_policies="full", offload_activations=True)
        with pytest.raises(
            ModelError, match=r"activations on the host take .* bytes .* for 1 rank of host .* are free"
        ):
            prepare(tiny("qwen3"), world, checkpoint_policies="full+host", offload_bytes=1 << 60)


def _prepare_with_kernels(rank: int, measures: Sequence[str]) -> list[str]:
    errors = list[str]()
    with World(Layout(ranks=2), backend=backend()) as world, pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            patched.setattr(execution, "choose_kernel", lambda call, name: find_kernel("reference"))
        for words in measures:
            try:
                prepare(tiny("qwen3", torch.float64), world, checkpoint_policies=words)
                errors.append("")
            except ModelError as error:
                errors.append(str(error))
    return errors


def test_ranks_compute_with_the_same_kernel() -> None:
    first, second = run_ranks(_prepare_with_kernels, 2, ("selective", "selective+host", "exchanged", "full"))
    assert first == second and first[2:] == ["", ""]
    for error in first[:2]:
        assert re.search(r"found \w+ on rank 0, reference on rank 1; name one", error), error
