"""What images could get wrong without an error, put into the code: the comparison with the stock model shows it."""

import pytest

from longspan.layout import Layout
from longspan.testing import run_ranks
from tests.model.vision.documents import answer_of
from tests.model.vision.joined import BOUND, Case, step
from tests.mutation import mutate, restore

CASE = Case("qwen3-vl", Layout(2), Layout(2), cp=2, documents="even")
PASS, POSITIONS = "train.encoding.modality_pass", "train.reading.read_positions"
MUTATIONS: dict[str, tuple[str, str, str]] = {
    "a part for a deeper layer is dropped": (PASS, "enumerate(deeper)", "enumerate(deeper[:-1])"),
    "parts for deeper layers are swapped": (PASS, "enumerate(deeper)", "enumerate(deeper[::-1])"),
    "a part replaces hidden states": ("bridge.splice", ".index_add(1", ".index_copy(1"),
    "positions by local index": (POSITIONS, "given[:, rows[here]]", "given[:, : len(here)]"),
    "positions of the text": ("train.passes", "if batch.positions is None:", "if True:"),
    "an image's rows on another document": (
        "model.vision.image_encoder",
        "torch.cat(pixels)",
        "torch.cat(pixels[::-1])",
    ),
}


def _errors(rank: int) -> dict[str, float]:
    """The largest error by what is wrong; of a change that raises, infinity."""
    errors, answer = dict[str, float](), answer_of(CASE.name, CASE.documents)
    for name, mutation in {"nothing": None, **MUTATIONS}.items():
        undo = mutate(*mutation) if mutation else []
        try:
            errors[name] = max(step(CASE, answer).values())
        finally:
            restore(undo)
    return errors


@pytest.mark.whole
def test_every_mutation_is_seen() -> None:
    for errors in run_ranks(_errors, 2):
        assert errors.pop("nothing") < BOUND
        assert min(errors.values()) > 1e-3, errors
