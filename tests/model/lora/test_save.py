"""`save_model` of an adapter writes what stock peft loads, given the prepared model or the PeftModel around it."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from longspan.comm import World
from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.model import prepare, save_model
from longspan.testing import backend, run_ranks
from tests.model.lora.adapted import adapted
from tests.model.stock import tiny


def _saved(rank: int, folder: Path) -> list[str]:
    told = list[str]()
    with World(Layout(ranks=2), backend=backend(), timeout=60) as world:
        peft_model = adapted("llama", "every linear")
        with pytest.raises(ModelError) as error:
            save_model(peft_model, folder / "too early", world)
        told.append(str(error.value))
        prepare(peft_model, world)
        save_model(peft_model, folder / "cp", world)
    with World(Layout(ranks=2, pp=2), backend=backend(), timeout=60) as world:
        peft_model = adapted("llama", "every linear")
        prepared = prepare(peft_model, world)
        with pytest.raises(ModelError) as error:
            save_model(peft_model, folder / "refused", world)
        told.append(str(error.value))
        save_model(prepared, folder / "pp", world)
    return told


def test_a_peft_model_is_saved_as_the_prepared_model_in_it(tmp_path: Path) -> None:
    for told in run_ranks(_saved, 2, tmp_path, timeout=100):
        assert all("got a PeftModel with no prepared model in it" in error for error in told), told
    wanted = {name: p for name, p in adapted("llama", "every linear").named_parameters() if p.requires_grad}
    for home in ("cp", "pp"):
        base: Any = tiny("llama", torch.float64, vocabulary=62)
        loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / home), is_trainable=True)
        stock = dict(loaded.named_parameters())
        assert all(torch.equal(stock[name], p) for name, p in wanted.items()), home
    assert not (tmp_path / "refused").exists() and not (tmp_path / "too early").exists()
