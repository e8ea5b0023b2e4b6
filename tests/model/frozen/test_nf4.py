"""NF4 beside bitsandbytes: codes, scales and values, bit for bit; and what cannot be packed."""

import pytest
import torch

from longspan.model.frozen.packed_format import NF4, VALUES
from tests.mutation import Change, mutated

PATH = "model.frozen.packed_format"
MUTATIONS: dict[str, Change] = {  # noticed beside bitsandbytes
    "the lower half first": (PATH, "codes[:, ::2] << 4 | codes[:, 1::2]", "codes[:, 1::2] << 4 | codes[:, ::2]"),
    "halves swapped": (PATH, "(codes >> 4, codes & 15)", "(codes & 15, codes >> 4)"),
    "a scale of the largest number": (PATH, "blocks.abs().amax(-1)", "blocks.amax(-1)"),
    "other limits": (PATH, "(values[:-1] + values[1:]) / 2", "(values[:-1] + values[1:]) / 2 + 1e-6"),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _weight(dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    weight = 0.02 * torch.randn(96, 448)
    weight[3, 64:128] = 0.0  # a block of zeros
    weight[4, 5] = 30.0
    weight[5] *= 1e-30
    limits = torch.tensor(VALUES["nf4"])
    weight[6, :15], weight[6, 15] = (limits[:-1] + limits[1:]) / 2, 1.0  # between two codes
    return weight.to(dtype)


@pytest.mark.parametrize("name", MUTATIONS)
def test_other_codes_and_values_are_noticed(name: str) -> None:
    pytest.importorskip("bitsandbytes")
    with mutated(MUTATIONS[name]), pytest.raises(AssertionError):
        test_codes_scales_and_values_are_those_of_bitsandbytes(torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_scales_and_values_are_those_of_bitsandbytes(dtype: torch.dtype) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = _weight(dtype)
    codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=False)
    packed = NF4.pack(weight)
    assert torch.equal(packed[:, :224].reshape(-1, 1), codes)
    assert torch.equal(packed[:, 224:].contiguous().view(torch.float32).flatten(), state.absmax)
    values = torch.empty_like(weight)
    NF4.unpack(packed, values)
    assert torch.equal(values, functional.dequantize_4bit(codes, state))


def test_pieces_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = _weight(torch.float32)
    whole, values = NF4.pack(weight), torch.empty_like(weight)
    monkeypatch.setattr("longspan.model.frozen.packed_format._PIECE", 5 * 448)
    assert torch.equal(NF4.pack(weight), whole)
    NF4.unpack(whole, values)
    of_pieces = torch.empty_like(weight)
    monkeypatch.undo()
    NF4.unpack(whole, of_pieces)
    assert torch.equal(values, of_pieces)
    assert whole.shape == (96, 224 + 7 * 4)


def test_what_cannot_be_packed_is_told() -> None:
    assert NF4.rows.reason_against(128) == ""
    assert NF4.rows.reason_against(100) == "its rows have 100 numbers, which blocks of 64 do not divide"
