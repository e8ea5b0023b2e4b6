"""`triton_flash`: blocks that fit the device, and its kernels in Triton's interpreter where Triton is installed.

Kernels that are compiled are compared in test_kernels.py, on GPUs.
"""

import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec

import pytest
import torch
from packaging.version import Version

from longspan.attention import AttendCall
from longspan.attention.call import Saved
from longspan.attention.kernels import reference, triton_flash
from longspan.attention.kernels.triton_flash import Blocks
from longspan.attention.rows import fused_deltas
from longspan.attention.tiles import Launch, Tile, Tiling

CPU = torch.device("cpu")
TILES = {
    "causal": [Tile(0, 37, 0, 37, right=0), Tile(37, 40, 37, 57, right=0)],
    "full": [Tile(0, 37, 0, 21), Tile(37, 40, 21, 57)],
    "window": [Tile(0, 37, 0, 37, 5, 0), Tile(37, 40, 37, 57, 5, 0)],
    "band before the diagonal": [Tile(0, 20, 0, 25, 7, -3)],
    "no limit on the right": [Tile(0, 30, 0, 10, 4, None)],
}
SIZES = ((16, 16), (24, 40), (300, 280))


class TooSmallError(Exception):
    """Stands for Triton's error of a device with too little shared memory."""


class Recorder:
    """Stands for the module of kernels, on a device that has room for blocks of so many rows and keys together."""

    OutOfResources = TooSmallError

    def __init__(self, room):
        self.room, self.name, self.launches = room, "", []

    def __getattr__(self, name):
        self.name = name
        return self

    def __getitem__(self, grid):
        self.grid = grid
        return self

    def __call__(self, *arguments, **constants):
        if constants.get("ROWS", 0) + constants.get("KEYS", 0) > self.room:
            raise TooSmallError
        wants = tuple(constants[key] for key in ("WANTS_K", "WANTS_V") if key in constants)
        self.launches.append((self.name, constants.get("ROWS"), constants.get("KEYS"), *wants))


def tensors(launch, size, v_size, dtype=torch.float32):
    rows, keys = launch.tiles[-1].q_stop, launch.tiles[-1].k_stop
    shapes = ((rows, 4, size), (keys, 2, size), (keys, 2, v_size), (rows, 4, v_size))
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def run(recorder, monkeypatch, size):
    monkeypatch.setattr(triton_flash, "_flash_kernels", lambda: recorder)
    launch, call = Launch(Tiling.from_tiles(TILES["causal"]), CPU), AttendCall(4, 2, size, size)
    q, k, v, dout = tensors(launch, size, size, torch.bfloat16)
    out, lse = triton_flash.forward(q, k, v, launch, call)
    triton_flash.backward(dout, Saved(q, k, v, out, lse), launch, call)


def test_a_device_with_little_shared_memory_gets_smaller_blocks_and_keeps_them(monkeypatch):
    monkeypatch.setattr(triton_flash, "_fitting", {})
    recorder = Recorder(room=64)
    run(recorder, monkeypatch, 512)
    run(recorder, monkeypatch, 512)
    launched = [entry[:3] for entry in recorder.launches]
    once = [
        ("forward", 32, 32),
        ("query_gradients", 32, 16),
        ("key_gradients", 16, 32),
        ("key_gradients", 16, 32),
    ]
    assert launched == once * 2
    assert set(triton_flash._fitting.values()) == {1}


def test_a_device_with_no_room_at_all_is_an_error(monkeypatch):
    monkeypatch.setattr(triton_flash, "_fitting", {})
    with pytest.raises(TooSmallError):
        run(Recorder(room=8), monkeypatch, 512)


@pytest.mark.parametrize("size, passes", [(256, [(True, True)]), (512, [(True, False), (False, True)])])
def test_the_sums_of_wide_heads_are_made_one_after_the_other(monkeypatch, size, passes):
    monkeypatch.setattr(triton_flash, "_fitting", {})
    recorder = Recorder(room=1024)
    run(recorder, monkeypatch, size)
    assert [entry[3:] for entry in recorder.launches if entry[0] == "key_gradients"] == passes


def test_kernels_in_the_interpreter():
    if find_spec("triton") is None or Version(version("triton")) < Version("3.7"):
        pytest.skip("needs triton 3.7 or later: the interpreter of 3.6 takes no bounds of loops from tensors")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.attention.test_triton_flash"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def interpreted():
    """Every mask, head size and soft cap in float32, beside the reference."""
    for table in (triton_flash.FORWARD, triton_flash.QUERY_GRADIENTS, triton_flash.KEY_GRADIENTS):
        for width in table:
            table[width] = (Blocks(16, 16, 4, 1),)
    for name, tiles in TILES.items():
        for size, v_size in SIZES:
            for softcap in (None, 2.0):
                launch = Launch(Tiling.from_tiles(tiles), CPU)
                call = AttendCall(4, 2, size, v_size, torch.float32, scale=size**-0.5, softcap=softcap)
                q, k, v, dout = tensors(launch, size, v_size)
                wanted, lse = reference.forward(q, k, v, launch, call)
                found = triton_flash.forward(q, k, v, launch, call)
                saved = Saved(q, k, v, wanted, lse)
                gradients = [kernel.backward(dout, saved, launch, call) for kernel in (triton_flash, reference)]
                sums = fused_deltas(dout, wanted)
                assert torch.allclose(sums, (dout * wanted).sum(-1), rtol=1e-5, atol=1e-5), (name, size, v_size)
                pairs = zip((*found, *gradients[0]), (wanted, lse, *gradients[1]), strict=True)
                errors = [((a - b).norm() / b.norm()).item() for a, b in pairs]
                print(name, size, v_size, softcap, errors)
                assert max(errors) <= 2e-6, (name, size, v_size, softcap, errors)


if __name__ == "__main__":
    interpreted()
