"""Scans and convolutions at every degree equal the recurrences row by row; each document is its own."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch

from longspan import Group, Layout, MicroBatch, World, bind
from longspan.comm import ShardPart
from longspan.comm.channel import Channel
from longspan.comm.row_fetch import RowFetch
from longspan.errors import LayoutError
from longspan.ssm import causal_conv, conv, linear_scan
from longspan.ssm.chains import Chains
from longspan.ssm.kernels import TORCH, describe_kernels, scan_kernel
from longspan.ssm.kernels.convolutions import TORCH_CONVOLUTION, choose_convolution
from longspan.ssm.kernels.scan import scan
from longspan.testing import backend, run_ranks
from tests.interpreter import run_interpreted
from tests.mutation import mutated
from tests.reference import relative_error
from tests.ssm.parity import KINDS, LENGTHS, SIZE, WIDTH, batches, by_rows, inputs, measure, scan_error


def _three(rank: int) -> tuple[dict[tuple[str, ...], float], tuple[bool, bool]]:
    return measure(rank, 3, ("ragged", "shorter than the convolution")), _changed(rank)


def test_outputs_gradients_and_the_bits_of_other_documents() -> None:
    errors, kept = zip(*run_ranks(_three, 3), strict=True)
    for worst in (*errors, *run_ranks(_one, 1)):
        assert len(worst) >= 15 and max(worst.values()) <= 1e-11, max(worst.items(), key=lambda item: item[1])
    assert all(all(same) for same in kept)


@pytest.mark.whole
@pytest.mark.parametrize("seed", [0, 7, 11])
@pytest.mark.parametrize("slots", [1, 2, 3, 4, 8])
def test_the_whole_table(slots: int, seed: int) -> None:
    for worst in run_ranks(measure, slots, slots, tuple(LENGTHS), seed):
        assert len(worst) >= 100 and max(worst.values()) <= 1e-11, max(worst.items(), key=lambda item: item[1])


def _in_float32(rank: int) -> list[float]:
    errors = list[float]()
    with World(Layout(ranks=4), backend=backend()) as world:
        for lengths in LENGTHS.values():
            for partition in ("zigzag", "contiguous"):
                shard = bind(batches(lengths, 4, partition)["one group"], world).with_padding()
                errors += [scan_error(kind, lengths, shard, dtype=torch.float32) for kind in KINDS]
    return errors


@pytest.mark.whole
def test_scans_in_float32_are_as_near_as_float32_is() -> None:
    for errors in run_ranks(_in_float32, 4):
        assert len(errors) == 2 * len(LENGTHS) * len(KINDS) and 1e-9 < max(errors) <= 2e-5, errors


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_strong_decays_keep_their_digits(kind: str) -> None:
    """Of A_log, which sums what the rows' decays get, each times its decay: Mamba 2 draws decays up to e⁻⁴⁰ a row."""
    lengths, heads = (70, 1, 2, 19), 6
    given = [None if x is None else x.detach() for x in inputs(kind, sum(lengths), heads, SIZE, WIDTH)]
    *_, g, _ = given
    assert g is not None
    g *= torch.logspace(-1, 2.5, heads, dtype=torch.float64)[:, None]
    dout = torch.randn(sum(lengths), heads, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def of_decays(dtype: torch.dtype) -> torch.Tensor:
        leaves = [None if x is None else x.to(dtype, copy=True).requires_grad_() for x in given]
        if dtype == torch.float64:
            out = by_rows(*leaves, lengths)  # pyright: ignore[reportArgumentType]
        else:
            initial = torch.zeros(len(lengths), heads, SIZE, WIDTH)
            out, _ = scan(*leaves, initial, np.array(lengths))  # pyright: ignore[reportArgumentType]
        (out * dout.to(dtype)).sum().backward()
        gradient = leaves[3].grad  # pyright: ignore[reportOptionalMemberAccess]
        assert gradient is not None
        return (gradient.double() * g).sum((0, 2))

    assert relative_error(of_decays(torch.float32), of_decays(torch.float64)) <= 1e-6


# ---- each document is its own


def _changed(rank: int) -> tuple[bool, bool]:
    lengths, changed = (19, 40, 2, 23), 1
    with World(Layout(ranks=3), backend=backend()) as world:
        batch = MicroBatch((Group((0, 1, 2), (0, 1, 2, 3), lengths, partition="contiguous"),))
        shard = bind(batch, world)
        others = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)) != changed
        others = others.to(world.device)
        activations = shard.scatter(others)
        outs = []
        for seed in (0, 1):
            given = [x.detach().to(world.device) for x in inputs("delta", sum(lengths), 2, 4, 3) if x is not None]
            if seed:
                given = [torch.where(others.view(-1, *[1] * (x.ndim - 1)), x, 0.5 * x) for x in given]
            local = [shard.scatter(x) for x in given]
            conv = causal_conv(local[2].flatten(1), local[2].new_ones(6, 4), None, shard)
            outs.append((linear_scan(*local, shard), conv))  # pyright: ignore[reportCallIssue]
        same = [
            torch.equal(a[activations], b[activations]) and not torch.equal(a, b) for a, b in zip(*outs, strict=True)
        ]
        return same[0] or not (~activations).any().item(), same[1] or not (~activations).any().item()


# ---- a rank works while rows travel


def test_rows_before_runs_travel_while_own_rows_are_convolved(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group((0, 1, 2), (0, 1), (9, 9), partition="zigzag")
    chains = Chains(ShardPart(group, 1, 1, 0, world_key=-1), torch.device("cpu"))
    noted = list[str]()

    def exchange(x: torch.Tensor, sends: list[int], receives: list[int], what: str) -> Any:  # zeros arrive
        noted.append("sent")
        return SimpleNamespace(wait=lambda: (noted.append("arrived"), x.new_zeros(sum(receives), *x.shape[1:]))[1])

    monkeypatch.setattr(RowFetch, "channel", SimpleNamespace(all_to_all_rows=exchange))

    def noting(name: str) -> Any:
        return lambda *given: (noted.append(name), getattr(TORCH_CONVOLUTION, name)(*given))[1]

    passes = {name: noting(name) for name in ("forward", "write_first_outputs", "arrived_gradients", "backward")}
    kernel = dataclasses.replace(TORCH_CONVOLUTION, **passes)
    x = torch.zeros(int(chains.lengths.sum()), 2, requires_grad=True)
    out = conv._CausalConv.apply((chains,), kernel, True, x, torch.ones(2, 4), None)  # pyright: ignore
    assert noted == ["sent", "forward", "arrived", "write_first_outputs"]
    noted.clear()
    out.sum().backward()  # pyright: ignore
    assert noted == ["arrived_gradients", "sent", "backward", "arrived"]


def test_first_rows_of_runs_in_the_interpreter() -> None:
    run_interpreted("tests.ssm.parity")


# ---- what is dropped is noticed

OF_MODULES = {  # what stands in a module of ssm once, and what takes its place
    "chains": {"is_first = np.diff(runs.document, prepend=-1) != 0": "is_first = number == 0"},
    "state_pass": {
        "map_states(gathered.transitions(runs_before[:count]), state[:count], states)": "states",
        "_put_local_runs(entering, state, local_number_of_run[runs[:count]])": "pass",
        ".mT, final, entering[:continuing])": ".mT, 0 * final, entering[:continuing])",
    },
    "kernels.scan": {
        "(self._dout, leaving))": "(self._dout, 0 * leaving))",
        "leaving = fading[chunk_range] * entering": "leaving = entering",
        "new_values[chunk_range] - state_share[chunk_range] @ entering": "new_values[chunk_range]",
    },
    "conv": {
        "gradients_of_part[0].index_add_(0, part.reads.fetch.rows, handle.wait())": "handle.wait()",
        "kernel.write_first_outputs(y, x_part, arrived_rows, convolution, part_reads.first)": "pass",
        "np.minimum(chains.lengths[readers], width)": "np.minimum(chains.lengths[readers], 1)",
        "kernel.arrived_gradients(": "0 * kernel.arrived_gradients(",
    },
    "kernels.convolutions": {"rows = torch.cat([x, arrived, ": "rows = torch.cat([x, 0 * arrived, "},
}
MUTANTS = {old: (module, old, new) for module, changes in OF_MODULES.items() for old, new in changes.items()}


def _mutants(rank: int, names: tuple[str, ...]) -> dict[str, float]:
    worst = {}
    for name in names:
        module, old, new = MUTANTS[name]
        with mutated((f"ssm.{module}", old, new)):  # outside of `try`: a mutation that names no line fails the test
            try:
                worst[name] = max(measure(rank, 3, ("ragged",), quick=True).values())
            except (AssertionError, IndexError, ValueError, RuntimeError):
                worst[name] = 1.0
    return worst


@pytest.mark.whole
def test_what_is_dropped_is_noticed() -> None:
    of_ranks = run_ranks(_mutants, 3, tuple(MUTANTS))
    assert all(max(worst[name] for worst in of_ranks) > 1e-4 for name in MUTANTS), of_ranks


# ---- what travels does not depend on the rows


def _bytes(rank: int, kinds: tuple[str, ...], sizes: tuple[int, ...]) -> dict[tuple[str, int], int]:
    given = Counter[tuple[str, int]]()
    gather = Channel.all_gather_rows

    def counted(self: Channel, x: torch.Tensor, *args: Any) -> Any:
        given[kind, rows] += x.nbytes
        return gather(self, x, *args)

    with World(Layout(ranks=4), backend=backend()) as world, patch.object(Channel, "all_gather_rows", counted):
        for kind, rows in product(kinds, sizes):
            batch = MicroBatch((Group((0, 1, 2, 3), (0,), (rows,), partition="contiguous"),))
            scan_error(kind, (rows,), bind(batch, world))
    return given


def test_bytes_do_not_depend_on_the_rows() -> None:
    transitions = {"delta": 2 * 4 * 4 * 8, "one number a head": 2 * 8}
    of_ranks = run_ranks(_bytes, 4, tuple(transitions), (16, 48))
    state = 2 * 4 * 3 * 8
    for kind, transition in transitions.items():
        inner = 2 * (state + transition)
        assert [given[kind, 16] for given in of_ranks] == [state, inner, inner, state]
        assert all(given[kind, 16] == given[kind, 48] for given in of_ranks)


# ---- wrong input


def _one(rank: int) -> dict[tuple[str, ...], float]:
    """Tensors that do not fit are refused with their shapes; the errors of those that do."""
    with World(Layout(ranks=1), backend=backend()) as world:
        shard: Any = bind(next(iter(batches((5, 2), 1, "zigzag").values())), world)
        q, k, v, g, beta = (x for x in inputs("delta by channel", 7, 2, 4, 3))
        assert q is not None and k is not None and v is not None and g is not None and beta is not None
        x, weight = v.flatten(1), torch.ones(6, 4)
        none = cast(Any, None)
        table: list[tuple[str, Callable[[], object]]] = [
            (
                r"q of \(6, 2, 4\), wanted \(7, 2, 4\); the shard holds 7",
                lambda: linear_scan(q[:6], k, v, g, beta, shard),
            ),
            (
                "2 decays a head; give 1, or 4, one for each key number",
                lambda: linear_scan(q, k, v, g[..., :2], beta, shard),
            ),
            (r"g of \(7, 2, 4\), wanted \(7, 2, 1\)", lambda: linear_scan(q, k, v, g, None, shard)),
            (r"k of \(2, 4\); it has rows, heads and numbers", lambda: linear_scan(q, k[0], v, g, beta, shard)),
            (r"NoneType for a shard; give bind\(micro_batch, world\)", lambda: linear_scan(q, k, v, g, beta, none)),
            (r"x of \(7, 2, 3\); the shard holds 7 rows: \(T, C\)", lambda: causal_conv(v, weight[:3], None, shard)),
            (r"weight of \(3, 4\) for 6 channels: \(C, W\)", lambda: causal_conv(x, weight[:3], None, shard)),
            (r"weight of \(6, 0\) for 6 channels: \(C, W\)", lambda: causal_conv(x, weight[:, :0], None, shard)),
            (r"bias of \(1,\) for 6 channels: \(C,\)", lambda: causal_conv(x, weight, torch.ones(1), shard)),
            ("float64, bfloat16; torch's .* needs one dtype", lambda: causal_conv(x, weight.bfloat16(), None, shard)),
            (r"NoneType for a shard; give bind\(micro_batch, world\)", lambda: causal_conv(x, weight, None, none)),
        ]
        for index, (message, call) in enumerate(table):
            name = "linear_scan" if index < 5 else "causal_conv"
            with pytest.raises(LayoutError, match=f"^{name} got .*{message}"):
                call()
    return measure(rank, 1, ("ragged",))


def test_torch_takes_what_no_other_kernel_can() -> None:
    cpu = torch.device("cpu")
    v = torch.zeros(3, 2, 16, dtype=torch.bfloat16)
    assert all(scan_kernel(v, 16, delta=delta) is TORCH for delta in (False, True))
    assert choose_convolution(torch.zeros(3, 8, dtype=torch.bfloat16)).name == "torch"
    assert describe_kernels(torch.bfloat16, cpu) == "torch's operations"
