"""States and convolutions of documents that share prefixes equal those of the separate documents."""

import pytest
import torch

from longspan import Group, Layout, MicroBatch, World, bind
from longspan.ssm import causal_conv, linear_scan
from longspan.testing import backend, run_ranks
from tests.attention.families import FORESTS, paths_of
from tests.mutation import mutated
from tests.reference import relative_error
from tests.ssm.parity import HEADS, KINDS, SIZE, WIDTH, by_rows, convolved, inputs


def by_paths(function, tensors, forest):
    """The outputs of every document's own rows, behind those of all that it continues."""
    outs = []
    for path, length in zip(paths_of(*forest), forest[0], strict=True):
        rows = [None if x is None else x[path] for x in tensors]
        outs.append(function(*rows, [len(path)])[-length:])
    return torch.cat(outs)


def errors_of(rank, slots, changes=(None,)):
    worst = []
    for change in changes:
        with mutated(change), World(Layout(slots), backend=backend()) as world:
            try:
                worst.append(max(_errors(world, slots)))
            except Exception as error:
                if change is None:
                    raise
                worst.append(repr(error))
    return worst


def _errors(world, slots):
    errors = []
    for forest in FORESTS.values():
        lengths, parents = forest
        for partition in ("zigzag", "contiguous"):
            ids = tuple(range(len(lengths)))
            group = Group(tuple(range(slots)), ids, lengths, "p2p", None, partition, None, parents)
            shard = bind(MicroBatch((group,)), world).with_padding()
            for kind in KINDS:
                given = inputs(kind, sum(lengths), HEADS, SIZE, WIDTH)
                errors += compare(linear_scan, by_rows, given, forest, shard)
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(sum(lengths), 5, generator=generator, dtype=torch.float64).requires_grad_()
            for width in (2, 4, 9):
                weight = torch.randn(5, width, generator=generator, dtype=torch.float64)
                errors += compare(
                    lambda x, shard, weight=weight: causal_conv(x, weight, None, shard),
                    lambda x, lengths, weight=weight: convolved(x, weight, None, lengths),
                    [x],
                    forest,
                    shard,
                )
    return errors


def compare(function, exact_function, given, forest, shard):
    given = [None if x is None else x.detach().clone().requires_grad_() for x in given]
    exact = by_paths(exact_function, given, forest)
    dout = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad(exact, [x for x in given if x is not None], dout)
    local = [None if x is None else shard.scatter(x.detach()).requires_grad_() for x in given]
    out = function(*local, shard)
    out.backward(shard.scatter(dout))
    results = [out.detach(), *(x.grad for x in local if x is not None)]
    return [relative_error(shard.gather(a), b) for a, b in zip(results, (exact, *gradients), strict=True)]


@pytest.mark.parametrize("slots", [1, 2, pytest.param(3, marks=pytest.mark.whole)])
def test_states_of_a_prefix_enter_each_of_its_branches(slots):
    for (worst,) in run_ranks(errors_of, slots, slots):
        assert worst <= 1e-12


MUTATIONS = (
    ("ssm.chains", "before[first_runs[index]] = last_runs[parent]", "before[first_runs[index]] = -1"),
    ("ssm.state_pass", "final.index_add_(0, index_on", "final.index_copy_(0, index_on"),
    ("ssm.conv", "self._bases = np.asarray(self._group.bases", "self._bases = 0 * np.asarray(self._group.bases"),
)


def test_mutations_are_noticed():
    (errors,) = run_ranks(errors_of, 1, 1, MUTATIONS)
    assert all(isinstance(error, str) or error > 1e-3 for error in errors), errors
