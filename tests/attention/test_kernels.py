"""Every kernel, block by block with global out and lse, against the dense float64 reference."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.attention import KERNELS, AttendCall, choose_kernel
from longspan.attention.call import Members, Saved
from longspan.attention.kernels import cpu_flash, cudnn, reference, torch_flash
from longspan.attention.tiles import Launch, Mask, Tile, Tiling, visible_keys
from longspan.comm import ShardPart
from longspan.errors import AttentionError
from longspan.plan import Group
from longspan.testing import backend
from tests.attention.simulate import simulate
from tests.reference import dense_attention, relative_error

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if backend() == "nccl" else "cpu")
MANY = 32  # members
LIMIT = {torch.float64: 1e-12, torch.float32: 1e-5}
HEADS = {"mha": (4, 4, 8, 8), "gqa": (8, 2, 16, 16), "mqa": (3, 1, 8, 8), "mla": (4, 2, 24, 16), "wide": (2, 2, 8, 24)}
LENGTHS = [(37,), (1,), (5, 1, 40, 3), (2, 2, 2, 2)]
MASKS = [{"causal": True}, {"causal": False}, {"causal": True, "window": 1}, {"causal": True, "window": 6}]


def usable(dtype, window=None, softcap=None):
    call = AttendCall(1, 1, 16, 16, dtype, DEVICE, Mask(window=window), softcap=softcap)
    return [kernel for kernel in KERNELS if not kernel.lack_for(call)]


def errors(kernel, dtype, heads, lengths, degree, seed=0, device=DEVICE, with_deltas=False, **options):
    """Relative errors of out, dq, dk, dv."""
    generator = torch.Generator().manual_seed(seed)
    n, kv, size, v_size = heads
    rows = sum(lengths)
    q, k, v, dout = (
        torch.randn(rows, h, d, generator=generator, dtype=torch.float64).to(device, dtype)
        for h, d in ((n, size), (kv, size), (kv, v_size), (n, v_size))
    )
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    expected = dense_attention(*leaves, lengths, **options)
    expected.backward(dout.double())
    numbers = {"scale": options.get("scale", size**-0.5), "softcap": options.get("softcap")}
    mask = Mask(options.get("causal", True), options.get("window"))
    call = AttendCall(n, kv, size, v_size, dtype, device, mask, **numbers, kernel=kernel)
    results = simulate(q, k, v, dout, lengths, degree, call, with_deltas=with_deltas)
    return [relative_error(f, w) for f, w in zip(results, [expected, *(x.grad for x in leaves)], strict=True)]


@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_kernels_match_the_reference(dtype, options):
    for kernel in usable(dtype, **{"window": 1} if "window" in options else {}):
        for seed, (heads, shape) in enumerate(HEADS.items()):
            for lengths in LENGTHS:
                for degree in (1, 2, 3) if dtype == torch.float64 else (3,):
                    worst = max(errors(kernel, dtype, shape, lengths, degree, seed, **options))
                    assert worst <= LIMIT[dtype], (kernel.name, heads, lengths, degree, seed, worst)


@pytest.mark.parametrize("options", [*MASKS, {"softcap": 2.0}], ids=str)
def test_kernels_that_take_the_products_of_dout_and_the_output(options):
    call = AttendCall(1, 1, 16, 16, torch.float64, DEVICE)
    kernels = [k for k in usable(torch.float64, options.get("window"), options.get("softcap")) if k.takes_deltas(call)]
    assert [kernel.name for kernel in kernels] == ["reference"]
    for heads in HEADS.values():
        for degree in (1, 3):
            worst = max(errors(kernels[0], torch.float64, heads, (5, 1, 40, 3), degree, with_deltas=True, **options))
            assert worst <= 1e-12, (heads, degree, worst)


@pytest.mark.parametrize("options", [{"scale": 0.3}, {"softcap": 2.0}, {"softcap": 1.5, "window": 4}], ids=str)
def test_scale_and_softcap(options):
    features = {name: value for name, value in options.items() if name != "scale"}
    for kernel in usable(torch.float64, **features):
        worst = max(errors(kernel, torch.float64, HEADS["gqa"], (9, 30), 2, **options))
        assert worst <= 1e-12, (kernel.name, worst)


def test_pieces_of_long_tiles(monkeypatch):
    monkeypatch.setattr(reference, "_BYTES_AT_ONCE", 3200)
    monkeypatch.setattr(cpu_flash, "_BAND_ROWS", 5)
    for options in MASKS:
        for kernel in usable(torch.float64, window=1):
            worst = max(errors(kernel, torch.float64, HEADS["gqa"], (33, 20), 2, **options))
            assert worst <= 1e-12, (kernel.name, options, worst)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.whole)], ids=str)
def test_half_precision_error_does_not_grow_with_the_degree(dtype):
    for kernel in usable(dtype):
        alone = errors(kernel, dtype, HEADS["gqa"], (128,), 1)
        for degree in (8, MANY):
            split = errors(kernel, dtype, HEADS["gqa"], (128,), degree)
            for name, one, many in zip(("out", "dq", "dk", "dv"), alone, split, strict=True):
                assert many <= 2 * one, (kernel.name, degree, name, one, many)


@pytest.mark.parametrize("options", [*MASKS, {"softcap": 2.0}, {"softcap": 5.0, "window": 6}], ids=str)
@pytest.mark.parametrize("dtype, limit", [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)], ids=str)
def test_half_precision_masks_and_head_shapes(dtype, limit, options):
    for kernel in usable(dtype, **{name: value for name, value in options.items() if name != "causal"}):
        for seed, (heads, shape) in enumerate(HEADS.items()):
            for lengths in ((37,), (5, 1, 40, 3)):
                relative = errors(kernel, dtype, shape, lengths, 3, seed, **options)
                assert max(relative) <= limit, (kernel.name, heads, lengths, seed, relative)


FULL_SIZES = {
    "gqa 32/8": (32, 8, 128, 128),
    "mla 192/128": (16, 16, 192, 128),
    "64/8 of 64": (64, 8, 64, 64),
    "gemma 256": (8, 4, 256, 256),
    "gemma 512": (8, 2, 512, 512),
}


@pytest.mark.gpu
@pytest.mark.parametrize("options", [*MASKS[:2], {"window": 70}, {"softcap": 30.0}], ids=str)
@pytest.mark.parametrize("name", FULL_SIZES)
def test_kernels_at_the_head_sizes_of_models(name, options):
    """At each degree within the error that dense attention makes in bfloat16 itself, on a GPU."""
    shape, cuda, lengths = FULL_SIZES[name], torch.device("cuda"), (700, 1, 323)
    bound = dense_errors(torch.bfloat16, shape, lengths, cuda, **options)
    features = {"softcap": options.get("softcap"), "mask": Mask(options.get("causal", True), options.get("window"))}
    call = AttendCall(*shape, torch.bfloat16, cuda, **features)
    kernels = [kernel for kernel in KERNELS if not kernel.lack_for(call)]
    assert kernels[0].name != "reference", f"no kernel of GPUs for {name} with {options}"
    for kernel in kernels:
        for degree, deltas in itertools.product((1, 2, 4), (False, True)[: 1 + kernel.takes_deltas(call)]):
            relative = errors(kernel, torch.bfloat16, shape, lengths, degree, 0, cuda, deltas, **options)
            case = kernel.name, degree, deltas, relative, bound
            assert all(e <= b for e, b in zip(relative, bound, strict=True)), case


def dense_errors(dtype, heads, lengths, device, **options):
    """Relative errors of out, dq, dk and dv of dense attention in this dtype, over the tensors of `errors`."""
    generator = torch.Generator().manual_seed(0)
    n, kv, size, v_size = heads
    *qkv, dout = (
        torch.randn(sum(lengths), h, d, generator=generator, dtype=torch.float64).to(device, dtype)
        for h, d in ((n, size), (kv, size), (kv, v_size), (n, v_size))
    )
    results = []
    for kind in (dtype, torch.float64):
        leaves = [x.detach().to(kind, copy=True).requires_grad_() for x in qkv]
        out = dense_attention(*leaves, lengths, dtype=kind, **options)
        out.backward(dout.to(kind))
        results.append([out.detach(), *(x.grad for x in leaves)])
    return [relative_error(rounded, exact) for rounded, exact in zip(*results, strict=True)]


def torch_kernel(name):
    return next(kernel for kernel in KERNELS if kernel.name == name)


def scaled(scale):
    return AttendCall(4, 2, 8, 8, torch.float64, scale=scale)


def cudnn_on_the_cpu(monkeypatch):
    """Dense calls as cuDNN takes them, computed by the reference: what `cudnn` does around them is all its own."""

    def one(causal, rows, keys):
        assert min(rows, keys) > 1 and (rows == keys or not causal), (causal, rows, keys)
        return Launch(Tiling.from_tiles((Tile(0, rows, 0, keys, right=0 if causal else None),)), CPU)

    def forward(q, k, v, causal, scale):
        return reference.forward(q, k, v, one(causal, len(q), len(k)), scaled(scale))

    def backward(dout, saved, causal, scale):
        return reference.backward(dout, saved, one(causal, len(saved.q), len(saved.k)), scaled(scale))

    monkeypatch.setattr(cudnn, "_call_forward", forward)
    monkeypatch.setattr(cudnn, "_call_backward", backward)


@pytest.mark.parametrize("options", MASKS[:2], ids=str)
def test_cudnn_splits_launches_into_dense_calls(monkeypatch, options):
    cudnn_on_the_cpu(monkeypatch)
    for heads in HEADS.values():
        for lengths in LENGTHS:
            for degree in (1, 2, 3):
                worst = max(errors(torch_kernel("cudnn"), torch.float64, heads, lengths, degree, device=CPU, **options))
                assert worst <= 1e-12, (heads, lengths, degree, worst)


def test_cudnn_splits_a_causal_tile_with_more_keys_than_rows(monkeypatch):
    """As all_gather has them, and two tiles beside each other; a row alone and a key alone among them."""
    cudnn_on_the_cpu(monkeypatch)
    tiles = (
        Tile(0, 5, 0, 9, right=0),
        Tile(5, 6, 9, 12, right=0),
        Tile(6, 8, 12, 14, right=0),
        Tile(8, 12, 14, 19, right=0),
    )
    for launch in (
        Launch(Tiling.from_tiles(tiles), CPU),
        Launch(Tiling.from_tiles((Tile(0, 3, 0, 1), Tile(3, 8, 1, 5))), CPU),
    ):
        rows, keys = launch.tiles[-1].q_stop, launch.tiles[-1].k_stop
        generator = torch.Generator().manual_seed(0)
        q, k, v, dout = (
            torch.randn(n, h, d, generator=generator, dtype=torch.float64)
            for n, h, d in ((rows, 4, 8), (keys, 2, 8), (keys, 2, 6), (rows, 4, 6))
        )
        call = scaled(0.4)
        of_reference, of_cudnn = (kernel.forward(q, k, v, launch, call) for kernel in (reference, cudnn))
        saved = Saved(q, k, v, *of_reference)
        gradients = [kernel.backward(dout, saved, launch, call) for kernel in (reference, cudnn)]
        for a, b in zip((*of_cudnn, *gradients[1]), (*of_reference, *gradients[0]), strict=True):
            assert relative_error(a, b) <= 1e-12


def test_torch_flash_sums_gradients_of_some_heads_at_a_time(monkeypatch):
    """Of whole groups of heads, as many as its 32 bits count: rows, and a block more for each tile, of 64 columns."""
    launch = Launch(Tiling.from_tiles([Tile(0, 5, 0, 7, right=0)]), torch.device("meta"))
    q, k, v = (torch.randn(shape) for shape in ((5, 6, 20), (7, 3, 20), (7, 3, 12)))
    saved, counts = Saved(q, k, v, torch.randn(5, 6, 12), torch.randn(5, 6)), []

    def gradients(some, *_):
        dout, q, k, v, out, lse = some
        assert dout.shape[1] == q.shape[1] == out.shape[1] == lse.shape[1] == 2 * k.shape[1] == 2 * v.shape[1]
        counts.append(q.shape[1] * (len(q) + 128) * 64)
        return q, k, v

    monkeypatch.setattr(torch_flash, "_call_backward", gradients)
    for most, calls in ((2**31 - 1, 1), (4 * 133 * 64, 2), (3 * 133 * 64, 3)):
        monkeypatch.setattr(torch_flash, "MAX_SUM_ELEMENTS", most)
        counts.clear()
        joined = torch_flash.backward(torch.randn(5, 6, 12), saved, launch, AttendCall(6, 3, 20, 12))
        assert len(counts) == calls and max(counts) <= most
        assert all(torch.equal(x, y) for x, y in zip(joined, (q, k, v), strict=True))


def test_torch_flash_and_cudnn_take_these_arguments():
    """Shapes through torch's own meta functions, where there is no GPU to run on."""
    for kernel in (torch_flash, cudnn):
        takes_these_arguments(kernel)


def takes_these_arguments(kernel):
    windows = [] if kernel is cudnn else [[Tile(0, 5, 0, 7, 2, 1)]]
    for tiles in ([Tile(0, 5, 0, 7), Tile(6, 8, 9, 12)], [Tile(0, 5, 0, 7, right=0)], *windows):
        launch = Launch(Tiling.from_tiles(tiles), torch.device("meta"))
        rows, keys = sum(tile.queries for tile in tiles), sum(tile.keys for tile in tiles)
        q, k, v = (
            torch.empty(shape, device="meta", dtype=torch.bfloat16)
            for shape in ((rows, 4, 20), (keys, 2, 20), (keys, 2, 12))
        )
        call = AttendCall(4, 2, 20, 12, scale=0.1)
        out, lse = kernel.forward(q, k, v, launch, call)
        assert (out.shape, lse.shape, lse.dtype) == ((rows, 4, 12), (rows, 4), torch.float32)
        gradients = kernel.backward(out.to(q.dtype), Saved(q, k, v, out, lse), launch, call)
        assert [x.shape for x in gradients] == [x.shape for x in (q, k, v)]


REFUSED = [
    ("nothing", AttendCall(1, 1, 8, 8, torch.float32), "kernel 'nothing' is unknown; available here: cpu_flash"),
    ("torch_flash", AttendCall(1, 1, 8, 8, torch.bfloat16), "torch_flash needs cuda tensors, got cpu"),
    ("cpu_flash", AttendCall(1, 1, 8, 8, torch.int32), "cpu_flash needs bfloat16 or float16 or .*, got int32"),
    ("cpu_flash", AttendCall(1, 1, 8, 8, torch.float32, softcap=2.0), "a call without softcap"),
    (None, AttendCall(1, 1, 8, 8, torch.int32), "no kernel fits: fa4 needs"),
]


@pytest.mark.parametrize("name, call, message", REFUSED)
def test_a_kernel_that_cannot_is_an_error(name, call, message):
    with pytest.raises(AttentionError, match=message):
        choose_kernel(call, name)


def test_softcap_falls_to_the_kernel_that_has_it():
    assert choose_kernel(AttendCall(1, 1, 8, 8, torch.float32)).name == "cpu_flash"
    assert choose_kernel(AttendCall(1, 1, 8, 8, torch.float32, softcap=2.0)).name == "reference"


def hidden_by_torch_flash(launch: Launch) -> bool:
    """Whether the kernel's own reading of window and longest keys hides what a tile shows, or shows what it hides.

    As torch 2.11 reads them (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp and mask.h): a limit
    of as many keys as the longest tile has is none, and none beside another is as many keys as that.
    """
    max_lengths = torch_flash._max_lengths(launch)[1]
    limits = [-1 if x is None or x >= max_lengths else x for x in (launch.left, launch.right)]
    left, right = (x if x >= 0 or max(limits) < 0 else max_lengths for x in limits)
    for tile in launch.tiles:
        first, keys = torch.arange(tile.queries)[:, None] + tile.keys - tile.queries, torch.arange(tile.keys)
        mask = torch.ones((tile.queries, tile.keys), dtype=torch.bool)
        if max(limits) >= 0:
            mask = (keys >= first - left) & (keys <= first + right)
        shown = visible_keys(tile, CPU)
        if not torch.equal(mask, torch.ones_like(mask) if shown is None else shown):
            return True
    return False


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    degree=st.integers(2, 6),
    window=st.integers(1, 40),
    inner=st.sampled_from((1, 2)),
)
@settings(max_examples=75, deadline=None)
def test_torch_flash_reads_masks_as_tiles_mean_them(lengths: list[int], degree: int, window: int, inner: int):
    group = Group(tuple(range(degree * inner)), tuple(range(len(lengths))), tuple(lengths))
    for member in range(group.degree):
        members = Members(ShardPart(group, 0, member, 0, 0), Mask(True, window), CPU, inner)
        launches = [launch for owner in range(members.degree) for launch in members.launches(owner)]
        for launch in (*launches, *(members.launches(None) if inner == 1 else ())):
            assert not hidden_by_torch_flash(launch), (member, launch.left, launch.right, launch.tiling)
