"""States and convolutions of documents that share prefixes equal those of the separate documents."""

from functools import cache

import pytest
import torch

from longspan import Group, Layout, MicroBatch, World, bind
from longspan.ssm import causal_conv, linear_scan
from longspan.testing import backend, run_ranks
from tests.attention.families import FORESTS, paths_of
from tests.mutation import mutated
from tests.reference import relative_error
from tests.ssm.parity import HEADS, KINDS, SIZE, WIDTH, by_rows, convolved, inputs

WIDTHS = (2, 4, 9)


def by_paths(function, tensors, forest):
    """The outputs of every document's own rows, behind those of all that it continues."""
    outs = []
    for path, length in zip(paths_of(*forest), forest[0], strict=True):
        rows = [None if x is None else x[path] for x in tensors]
        outs.append(function(*rows, [len(path)])[-length:])
    return torch.cat(outs)


DAILY = ("tree", "chain", "one row", "fewer rows than members")


@cache
def separate(names=DAILY):
    """Of each forest, kind of scan and width of convolution: inputs, what the output owes, output and gradients."""
    answers = {}
    for name in names:
        forest = FORESTS[name]
        rows = sum(forest[0])
        for kind in KINDS:
            answers[name, kind] = answer(by_rows, inputs(kind, rows, HEADS, SIZE, WIDTH), forest)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(rows, 5, generator=generator, dtype=torch.float64).requires_grad_()
        for width in WIDTHS:
            weight = weight_of(width)
            answers[name, width] = answer(lambda x, n, weight=weight: convolved(x, weight, None, n), [x], forest)
    return answers


def weight_of(width):
    return torch.randn(5, width, generator=torch.Generator().manual_seed(width), dtype=torch.float64)


def answer(function, given, forest):
    exact = by_paths(function, given, forest)
    dout = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad(exact, [x for x in given if x is not None], dout)
    return [None if x is None else x.detach() for x in given], dout, (exact.detach(), *gradients)


def errors_of(rank, slots, answers, changes=(None,)):
    worst = []
    for change in changes:
        with mutated(change), World(Layout(slots), backend=backend()) as world:
            try:
                worst.append(max(_errors(world, slots, answers)))
            except Exception as error:
                if change is None:
                    raise
                worst.append(repr(error))
    return worst


def _errors(world, slots, answers):
    errors = []
    for name in dict.fromkeys(name for name, _ in answers):
        lengths, parents = FORESTS[name]
        for partition in ("zigzag", "contiguous")[:slots]:  # one rank has all rows under both
            ids = tuple(range(len(lengths)))
            group = Group(tuple(range(slots)), ids, lengths, "p2p", None, partition, None, parents)
            shard = bind(MicroBatch((group,)), world).with_padding()
            for kind in KINDS:
                errors += compare(linear_scan, answers[name, kind], shard)
            for width in WIDTHS:
                weight = weight_of(width)
                function = lambda x, shard, weight=weight: causal_conv(x, weight, None, shard)  # noqa: E731
                errors += compare(function, answers[name, width], shard)
    return errors


def compare(function, exact, shard):
    given, dout, wanted = exact
    local = [None if x is None else shard.scatter(x).requires_grad_() for x in given]
    out = function(*local, shard)
    out.backward(shard.scatter(dout))
    results = [out.detach(), *(x.grad for x in local if x is not None)]
    return [relative_error(shard.gather(a), b) for a, b in zip(results, wanted, strict=True)]


@pytest.mark.parametrize(
    "slots, names", [(2, DAILY), *(pytest.param(n, tuple(FORESTS), marks=pytest.mark.whole) for n in (1, 2, 3))]
)
def test_states_of_a_prefix_enter_each_of_its_branches(slots, names):
    for (worst,) in run_ranks(errors_of, slots, slots, separate(names)):
        assert worst <= 1e-12


MUTATIONS = (
    ("ssm.chains", "before[first_runs[index]] = last_runs[parent]", "before[first_runs[index]] = -1"),
    ("ssm.state_pass", "final.index_add_(0, index_on", "final.index_copy_(0, index_on"),
    ("layout.rows_before", "segments.start + prefixes.bases", "segments.start + 0 * prefixes.bases"),
)


def test_one_rank_and_mutations_of_it():
    ((right, *errors),) = run_ranks(errors_of, 1, 1, separate(), (None, *MUTATIONS))
    assert right <= 1e-12
    assert all(isinstance(error, str) or error > 1e-3 for error in errors), errors
