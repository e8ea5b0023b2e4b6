"""What images take of a rank's memory, and that the rows of a slot leave room for it."""

from typing import Any

import pytest

from longspan import EncoderHome, Layout, World, prepare
from longspan.errors import ConfigError
from longspan.testing import run_ranks
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


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"100 rows of a slot takes 5,000 bytes, .* encoder.max_rows to at most 40"):
        ImageBytes(held_bytes=10, wave_bytes=5000, wave_rows=100, row_bytes=50.0).check_budget(2000)
    with pytest.raises(ConfigError, match=r"hold 3,000 bytes of a rank .* set encoder.recompute = true"):
        ImageBytes(held_bytes=3000, wave_bytes=1000, wave_rows=20, row_bytes=50.0).check_budget(2000)
    ImageBytes(held_bytes=1000, wave_bytes=1000, wave_rows=20, row_bytes=50.0).check_budget(2000)
