"""Frozen weights in 4 bits on a GPU: bytes that are made there, and the kernel's values, are those of the CPU."""

from importlib.util import find_spec

import pytest
import torch

from longspan.model.frozen.packed_format import NF4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or find_spec("triton") is None, reason="needs a CUDA device"),
]
SHAPES = ((1, 64), (37, 192), (130, 2048), (3, 12288), (700, 9216))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_and_values_are_those_of_the_host(shape: tuple[int, int], dtype: torch.dtype) -> None:
    nf4 = NF4
    weight = 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight[0, :64] = 0.0
    packed = nf4.pack(weight)
    assert torch.equal(nf4.pack(weight.cuda()).cpu(), packed)
    values, on_gpu = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype, device="cuda")
    nf4.unpack(packed, values)
    nf4.unpack(packed.cuda(), on_gpu)
    assert torch.equal(on_gpu.cpu(), values)
