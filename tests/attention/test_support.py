"""One table for documentation, errors and choices."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.attention import KERNELS, PATTERNS, AttendCall, Kernel, Mask, choose_kernel
from longspan.attention.kernels.table import FEATURES, find_kernel
from longspan.plan.check import COMM_TYPES

PAGE = Path(__file__).parents[2] / "docs" / "attention.md"


def page_rows(title: str) -> list[str]:
    lines = PAGE.read_text(encoding="utf-8").split(f"{title}\n")[1].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("| --- |"))
    return [line for line in lines[first + 1 : first + 20] if line.startswith("|")]


def test_the_page_holds_the_table_of_this_version() -> None:
    answers = {True: "yes", False: "no"}
    for kernel, row in zip(KERNELS, page_rows("## Kernels"), strict=True):
        name, tensors, sizes, *features, deterministic = row.strip("| ").split(" | ")[: 4 + len(FEATURES)]
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in kernel.dtypes)
        assert (name, tensors) == (f"`{kernel.name}`", f"{' and '.join(kernel.devices)}: {dtypes}")
        assert sizes == str(kernel.head_sizes) and features == [answers[x in kernel.features] for x in FEATURES]
        assert deterministic == ("in deterministic mode" if kernel.deterministic else "no")


def test_the_table_knows_every_type_and_no_other() -> None:
    named = tuple(row.split("`")[1] for row in page_rows("## Communication types"))
    assert (*named, "auto") == COMM_TYPES and set(named) == set(PATTERNS)


def test_a_feature_names_the_kernels_that_have_it() -> None:
    every = {k.name for k in KERNELS}
    having = {name: {k.name for k in KERNELS if name in k.features} for name in FEATURES}
    having["deterministic mode"] = {k.name for k in KERNELS if k.deterministic}
    # The gradient of a log-sum-exp is one of dout · out.
    without_deltas = {field.name: field.default for field in fields(Kernel)}["takes_deltas"]
    having["log-sum-exp"] = {k.name for k in KERNELS if k.takes_deltas is not without_deltas}
    name_of = {"sliding window": "window", "spans": "window", "chosen keys": "indices"}
    rows = [row.strip("| ").split(" | ") for row in page_rows("## Features")]
    # Only entries, which no caller of `attend` gives, have strides.
    assert having.keys() - {name_of.get(feature, feature) for feature, _, _ in rows} == {"stride"}
    for feature, _, kernels in rows:
        wanted = having.get(name_of.get(feature, feature), every)
        assert (every if kernels == "all" else set(kernels.replace("`", "").split(", "))) == wanted, feature


CUDA = torch.device("cuda")


def needing(dtype: torch.dtype, head_dim: int, value_dim: int | None = None, **options: Any) -> AttendCall:
    return AttendCall(1, 1, head_dim, value_dim or head_dim, dtype, CUDA, **options)


HALF = torch.bfloat16
LACKING = [
    ("cudnn", needing(torch.float32, 64), "bfloat16 or float16, got float32"),
    ("cudnn", needing(HALF, 192), "a head size of at most 128, or 192 with values of 128, got 192"),
    ("cudnn", needing(HALF, 8, 136), "a head size of at most 128, or 192 with values of 128, got 8 with values of 136"),
    ("reference", needing(HALF, 512, 1024), ""),
    ("fa4", needing(HALF, 264, 128), "a head size of at most 256, got 264 with values of 128"),
    ("torch_flash", needing(HALF, 264), "a head size of at most 256, got 264"),
    ("cudnn", needing(HALF, 64, mask=Mask(window=5), one_document=True), "a call without window, got window"),
    ("cudnn", needing(HALF, 64, one_document=True, spans=True), "a call without spans, got spans"),
    ("fa4", needing(HALF, 64, indexed=True), "a call without indices, got indices"),
    ("triton_gathered", needing(HALF, 64, indexed=True, block_size=4), "a call without blocks, got blocks"),
    ("triton_blocks", needing(HALF, 64, indexed=True), "a call with blocks and indices, got none of blocks"),
    ("triton_gathered", needing(HALF, 64, indexed=True), "a call with indices and latents, got none of latents"),
    (
        "cudnn",
        needing(HALF, 64, deterministic=True),
        "torch.use_deterministic_algorithms(False), got deterministic mode",
    ),
]


@pytest.mark.parametrize("name, call, message", LACKING, ids=str)
def test_what_a_kernel_lacks_comes_from_its_row(name: str, call: AttendCall, message: str) -> None:
    assert find_kernel(name).unsupported_call_reason(call) == (message and f"needs {message}")


def test_one_that_runs_documents_one_by_one_is_chosen_of_itself_for_dense_calls_alone(monkeypatch) -> None:
    cudnn = find_kernel("cudnn")
    monkeypatch.setitem(cudnn.__dict__, "unsupported_reason", lambda device: "")
    assert cudnn.suits(needing(torch.bfloat16, 192, 128, one_document=True))
    assert cudnn.suits(needing(torch.bfloat16, 64, one_document=True))
    assert not cudnn.suits(needing(torch.bfloat16, 64)) and not cudnn.unsupported_call_reason(
        needing(torch.bfloat16, 64)
    )


def test_blocks_are_gathered_of_themselves_in_long_documents_alone(monkeypatch) -> None:
    for name in ("triton_blocks", "triton_flash"):
        monkeypatch.setitem(find_kernel(name).__dict__, "unsupported_reason", lambda device: "")
    call = needing(HALF, 64, indexed=True, block_size=128, chosen_keys=2048)
    names = [choose_kernel(replace(call, longest=longest)).name for longest in (16383, 16384)]
    assert names == ["triton_flash", "triton_blocks"]
    assert choose_kernel(replace(call, longest=4096), "triton_blocks").name == "triton_blocks"


def test_deterministic_mode_is_asked_of_torch() -> None:
    assert choose_kernel(AttendCall(1, 1, 8, 8, torch.float32, softcap=2.0)).name == "reference"
    assert not AttendCall(1, 1, 8, 8, torch.float32).deterministic
    torch.use_deterministic_algorithms(True)
    try:
        assert AttendCall(1, 1, 8, 8, torch.float32).deterministic
        assert choose_kernel(AttendCall(1, 1, 8, 8, torch.float32)).name == "cpu_flash"
    finally:
        torch.use_deterministic_algorithms(False)
