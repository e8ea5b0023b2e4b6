"""Folders in 4 and 8 bits give the numbers of the package that wrote them, bit for bit; damaged ones are refused."""

from pathlib import Path

import pytest
import torch

from longspan import load_model
from longspan.model.frozen.formats.stored import stored_weights
from longspan.model.weights.hf_folder import quantization_settings
from tests.model.frozen.formats.folders import CASES


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("folders")


def _folder(folders: Path, case: str) -> Path:
    folder = folders / case
    if not folder.is_dir():
        folder.mkdir()
        CASES[case][0](folder)
    return folder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_folder_gives_the_weights_that_its_package_reads(folders: Path, case: str, dtype: torch.dtype) -> None:
    folder = _folder(folders, case)
    _, read, text = CASES[case]
    stored = stored_weights(quantization_settings(folder))
    assert stored is not None and stored.describe() == text
    exact = read(folder, dtype)
    model = load_model(folder, dtype=dtype, quantized=True)
    weights = model.state_dict()
    assert weights.keys() == exact.keys() and not model.training
    different = {name for name, x in weights.items() if not torch.equal(x, exact[name].to(x.dtype))}
    assert not different, different
