"""What images could get wrong without an error, put into the code: the comparison with the stock model shows it."""

import pytest

from longspan.layout import Layout
from longspan.testing import run_ranks
from tests.model.vision.documents import answer_of
from tests.model.vision.joined import BOUND, Case, step
from tests.mutation import each_mutated

CASE = Case("qwen3-vl", Layout(2), Layout(2), cp=2, documents="even")
PASS, POSITIONS = "train.terms.encoders", "train.read_rows"
MUTATIONS: dict[str, tuple[str, str, str]] = {
    "a part for a deeper layer is dropped": (PASS, "enumerate(layer_rows)", "enumerate(layer_rows[:-1])"),
    "parts for deeper layers are swapped": (PASS, "enumerate(layer_rows)", "enumerate(layer_rows[::-1])"),
    "a part replaces hidden states": ("bridge.bridge", ".index_add(1", ".index_copy(1"),
    "positions by local index": (POSITIONS, "parts_of_one[:, position_of_row[rows]]", "parts_of_one[:, : len(rows)]"),
    "positions of the text": ("train.passes", "if batch.positions is None:", "if True:"),
    "an image's rows on another document": (
        "model.vision.image_tokens",
        "torch.cat([*parts])",
        "torch.cat([*parts][::-1])",
    ),
}
VIDEOS_CASE, TOKENS = (
    Case("qwen2.5-vl", Layout(2), Layout(2), cp=2, documents="even videos"),
    "model.vision.image_tokens",
)
VIDEOS: dict[str, tuple[str, str, str]] = {
    "times of groups of frames are dropped": (TOKENS, "video.seconds for", "1.0 for"),
    "all groups of frames at one time": (TOKENS, "video.seconds for", "0 * video.seconds for"),
    "groups of frames of a video are swapped": (TOKENS, "in pixels.chunk(groups)", "in pixels.chunk(groups)[::-1]"),
    "frames of other videos": MUTATIONS["an image's rows on another document"],
}
SPANS_CASE = Case("gemma3", Layout(2), Layout(2), cp=2)
READ, MEMBERS = "train.read_rows", "attention.call"
SPANS: dict[str, tuple[str, str, str]] = {
    "spans are dropped": (MEMBERS, "+ span_tiles(queries, keys, self.spans)", ""),
    "spans of documents without their items": (READ, "items.runs(d, rules.in_spans)", "[]"),
    "spans on local rows alone": (
        MEMBERS,
        "span_tiles(queries, keys, self.spans)",
        "(span_tiles(queries, keys, self.spans) if [*queries.start] == [*keys.start] else ())",
    ),
    "spans end with a member's rows under a window": (MEMBERS, "self.spans.run_ends(runs)", "runs.stop"),
    "rows of an image are scaled": ("bridge.bridge", "rows.to(embeddings.dtype)", "2 * rows.to(embeddings.dtype)"),
}
PREFIX_CASE = Case("paligemma2", Layout(2), Layout(2), cp=2)
PREFIX: dict[str, tuple[str, str, str]] = {
    "prefixes are dropped": (READ, "[(0, prefix)] if prefix else []", "[]"),
    "a prefix takes its first target in": (READ, "[(0, prefix)] if prefix", "[(0, min(prefix + 1, length))] if prefix"),
    "a prefix ends with its images": (READ, "if isinstance(document, Labelled):", "if False:"),
}


def _errors(rank: int, case: Case, mutations: dict[str, tuple[str, str, str]]) -> dict[str, float]:
    """The largest error by what is wrong; of a change that raises, infinity."""
    errors, answer = dict[str, float](), answer_of(case.name, case.documents)
    for name in each_mutated(mutations):
        errors[name] = max(step(case, answer).values())
    return errors


@pytest.mark.whole
@pytest.mark.parametrize(
    ("case", "mutations"),
    [(CASE, MUTATIONS), (VIDEOS_CASE, VIDEOS), (SPANS_CASE, SPANS), (PREFIX_CASE, PREFIX)],
    ids=["rows", "videos", "spans", "prefix"],
)
def test_every_mutation_is_seen(case: Case, mutations: dict[str, tuple[str, str, str]]) -> None:
    for errors in run_ranks(_errors, 2, case, mutations):
        assert errors.pop("nothing") < BOUND
        assert min(errors.values()) > 1e-3, errors
