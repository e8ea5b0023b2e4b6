"""What images take of a rank's memory, and that the rows of a slot leave room for it."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from longspan import EncoderHome, Layout, World, prepare
from longspan.errors import ConfigError
from longspan.testing import run_ranks
from longspan.train.memory import images_held
from longspan.train.memory.images_held import ImageBytes, measure_images
from tests.model.vision.models import tiny

WAYS: dict[str, dict[str, Any]] = {"kept": {}, "again": {"recompute": True, "max_rows_per_slot": 50}}


def _held(rank: int, shard: bool) -> dict[str, ImageBytes]:
    """Of 320 rows of images a step on two slots: 200 of each at most."""
    found = dict[str, ImageBytes]()
    for name, settings in WAYS.items():
        with World(Layout(2), backend="gloo") as world:
            home = EncoderHome(home=Layout(2), shard_parameters=shard, **settings)
            model = prepare(tiny("qwen3-vl"), world, encoder=home, shard_parameters=shard, probe=False)
            found[name] = measure_images(model, 320.0, world)
    return found


@pytest.mark.whole
@pytest.mark.parametrize("shard", [False, True])
def test_activations_and_rows_are_measured(shard: bool) -> None:
    for found in run_ranks(_held, 2, shard):
        kept, again = found["kept"], found["again"]
        rows = 2 * 32 * 3 * 8 * 200  # and their gradients, of three parts, in float64
        assert again.held_bytes == rows and kept.held_bytes == pytest.approx(rows + 200 * kept.row_bytes, abs=1)
        assert (kept.wave_rows, again.wave_rows) == (200, 50) and again.wave_bytes == pytest.approx(
            50 * again.row_bytes, abs=1
        )
        assert kept.row_bytes > 4 * 3 * 16 * 8  # four patches of a row, the input of every layer


@pytest.mark.parametrize("order", [("wide", "narrow"), ("narrow", "wide")])
def test_a_wave_is_that_of_the_encoder_that_needs_most(order: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Advice of how many rows fit divides by the bytes of a row of that encoder, on the rank that needs most."""
    world: Any = SimpleNamespace(home=Layout(2), control=SimpleNamespace(largest_of=lambda values, _: values))
    module, rows = nn.Linear(2, 2), {"wide": 50, "narrow": 0}
    settings = {"world": world, "deep_layers": 0, "module": module, "recompute": False, "frozen": True}
    encoders = {name: SimpleNamespace(name=name, max_rows_per_slot=rows[name], **settings) for name in order}
    text = SimpleNamespace(hidden_size=8)
    model: Any = SimpleNamespace(encoder_settings=encoders, config=SimpleNamespace(get_text_config=lambda: text))
    sizes = {"wide": 1000.0, "narrow": 100.0}
    monkeypatch.setattr(images_held, "image_tokens", lambda _: None)
    monkeypatch.setattr(images_held, "_measure_row_bytes", lambda encoder, _: sizes[encoder.name])
    assert measure_images(model, 160.0, world) == ImageBytes(2 * 2 * 8 * 4 * 100, 50_000, 50, 1000.0)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"100 rows of a slot takes 5,000 bytes, .* encoder.max_rows to at most 40"):
        ImageBytes(held_bytes=10, wave_bytes=5000, wave_rows=100, row_bytes=50.0).check_budget(2000)
    with pytest.raises(ConfigError, match=r"hold 3,000 bytes of a rank .* set encoder.recompute = true"):
        ImageBytes(held_bytes=3000, wave_bytes=1000, wave_rows=20, row_bytes=50.0).check_budget(2000)
    ImageBytes(held_bytes=1000, wave_bytes=1000, wave_rows=20, row_bytes=50.0).check_budget(2000)
