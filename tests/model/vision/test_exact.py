"""Vision-language models under any plan: loss and every gradient are those of the stock model, document by document."""

from collections.abc import Sequence
from typing import Any

import pytest

from longspan.layout import Layout
from longspan.testing import run_ranks
from tests.model.vision.documents import answer_of
from tests.model.vision.joined import BOUND, Case, errors_of, step
from tests.model.vision.models import here
from tests.mutation import Change, each_mutated

FEW = [
    Case("gemma3", Layout(2), Layout(2), cp=2),
    Case("qwen3-vl", Layout(2, pp=2), Layout(2), cp=1, options=(("activation_checkpointing", True),)),
]


NO_STAGES = ("gemma4", "gemma4-spans")


def all_of(ranks: int) -> list[Case]:
    """Every model under fixed and dynamic plans; those that have videos with videos, images and text mixed."""
    one, names = Layout(ranks), here()
    with_videos = [name for name in names if name.startswith("qwen")]
    sets = [(name, "mixed") for name in names] + [(name, "videos") for name in with_videos]
    cases = [Case(name, one, one, cp, documents) for name, documents in sets for cp in (0, ranks)]
    if ranks == 2:
        cases += [Case(name, one, one, 1, "text", options=(("shard_parameters", False),)) for name in names]
        # Gemma 4 unified has nothing to split before its language model. Layers of later stages may take keys of
        # earlier ones, or inputs made of ids.
        tps = {name: 1 if name == "gemma4-unified" else 2 for name in names}
        cases += [Case(name, Layout(2, tp=2), Layout(2, tp=tps[name]), 1, documents) for name, documents in sets]
        cases += [Case(name, Layout(2, pp=2), one, 1, kind) for name, kind in sets if name not in NO_STAGES]
        cases.append(Case("qwen3-vl", one, one, 0, options=(("offload_weights", True),)))
    if ranks == 4:
        cases += [
            Case("qwen3-vl", Layout(4, tp=2), Layout(4, tp=2), 2, options=(("sequence_parallel", True),)),
            Case("qwen3-vl-untied", Layout(4, pp=2, tp=2), Layout(4), 1),
            Case("qwen2.5-vl", Layout(4, pp=2), Layout(4, tp=2), 2, options=(("virtual_stages", 2),)),
        ]
    return cases


def of_spans() -> list[Case]:
    """Images whose tokens see each other, cut everywhere: every type and partition, and both homes split."""
    one, rows = Layout(4), (("partition", "contiguous"),)
    names = [name for name in ("gemma3", "paligemma2", "gemma4-spans", "gemma4-unified") if name in here()]
    ways: list[tuple[tuple[str, Any], ...]]
    ways = [rows, (("cp_comm_type", "a2a+p2p"), ("hierarchical_context_parallel_sizes", (2, 2)))]
    ways += [(("cp_comm_type", kind), ("heads", 4), *way) for kind in ("all_gather", "a2a") for way in ((), rows)]
    cases = [Case(name, one, one, cp, planning=way) for name in names for way in ways for cp in (0, 4)]
    cases.append(Case("gemma3", Layout(4, tp=2), Layout(4, tp=2), 2, options=(("sequence_parallel", True),)))
    cases.append(Case("gemma3", Layout(4, pp=2), Layout(4), 2, options=(("activation_checkpointing", True),)))
    return cases


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        pytest.param(2, FEW, id="few"),
        *(pytest.param(n, all_of(n), id=f"all {n}", marks=pytest.mark.whole) for n in (1, 2, 3, 4)),
        pytest.param(4, of_spans(), id="spans", marks=pytest.mark.whole),
    ],
)
def test_a_step_is_that_of_the_stock_model(ranks: int, cases: Sequence[Case]) -> None:
    answers = {key: answer_of(*key) for key in {(case.name, case.documents) for case in cases}}
    for errors in run_ranks(errors_of, ranks, cases, answers, timeout=280):
        assert len(errors) == len(cases) and max(errors.values()) < BOUND, errors


# ---- what images could get wrong without an error

PASS, SPANS_READ, MEMBERS = ("train.terms.encoding", "train.rows.visible_spans", "attention.members")
INPUT_CODE, VIDEO_CODE = ("model.vision.image_inputs", "model.vision.videos")
MUTATIONS: dict[str, Change] = {
    "a part for a deeper layer is dropped": (PASS, "enumerate(layer_rows)", "enumerate(layer_rows[:-1])"),
    "parts for deeper layers are swapped": (PASS, "enumerate(layer_rows)", "enumerate(layer_rows[::-1])"),
    "a part replaces hidden states": ("bridge.item_rows", ".index_add(1", ".index_copy(1"),
    "positions by local index": (
        "train.rows.read_rows",
        "own_positions[:, position_of_row[rows]]",
        "own_positions[:, : len(rows)]",
    ),
    "positions of the text": ("train.passes", "if batch.positions is None:", "if True:"),
    "an image's rows on another document": (INPUT_CODE, "torch.cat([*parts])", "torch.cat([*parts][::-1])"),
}
VIDEOS: dict[str, Change] = {
    "times of groups of frames are dropped": (VIDEO_CODE, "video.seconds for", "1.0 for"),
    "all groups of frames at one time": (VIDEO_CODE, "video.seconds for", "0 * video.seconds for"),
    "groups of frames of a video are swapped": (VIDEO_CODE, "in pixels.chunk(groups)", "in pixels.chunk(groups)[::-1]"),
    "frames of other videos": MUTATIONS["an image's rows on another document"],
}
SPANS: dict[str, Change] = {
    "spans are dropped": (MEMBERS, "tilings += span_tiles(queries, keys, self.spans, before)", "pass"),
    "spans of documents without their items": (SPANS_READ, "items.runs(d, rules.in_spans)", "[]"),
    "spans on local rows alone": (
        MEMBERS,
        "span_tiles(queries, keys, self.spans, before)",
        "(span_tiles(queries, keys, self.spans, before) if [*queries.start] == [*keys.start] else ())",
    ),
    "spans end with a member's rows under a window": (MEMBERS, "self.spans.run_ends(runs)", "runs.stop"),
    "rows of an image are scaled": ("bridge.item_rows", "rows.to(embeddings.dtype)", "2 * rows.to(embeddings.dtype)"),
}
CALLS = "model.seams.attention_calls"
LAYERS: dict[str, Change] = {
    "spans of full layers too": (CALLS, '"spans": getattr(module, _SPANS, "later")', '"spans": "later"'),
    "spans of no layer": (CALLS, '"spans": getattr(module, _SPANS, "later")', '"spans": "none"'),
    "places of patches are (y, x)": (
        INPUT_CODE,
        "_join_images(name, parts, pads=pads)",
        "_join_images(name, [x.flip(-1) if name == POSITIONS else x for x in parts], pads=pads)",
    ),
    "rows of an image are scaled": SPANS["rows of an image are scaled"],
}
WHOLE: dict[str, Change] = {
    "a window cuts images": (MEMBERS, "self.spans, before)", "self.spans)"),
    "spans of no layer": LAYERS["spans of no layer"],
}
PREFIX: dict[str, Change] = {
    "prefixes are dropped": (SPANS_READ, "[(0, prefix)] if prefix else []", "[]"),
    "a prefix takes its first target in": (
        SPANS_READ,
        "[(0, prefix)] if prefix",
        "[(0, min(prefix + 1, length))] if prefix",
    ),
    "a prefix ends with its images": (SPANS_READ, "if isinstance(document, Labelled):", "if False:"),
}


MUTATED = {
    "rows": (Case("qwen3-vl", Layout(2), Layout(2), cp=2, documents="even"), MUTATIONS),
    "videos": (Case("qwen2.5-vl", Layout(2), Layout(2), cp=2, documents="even videos"), VIDEOS),
    "spans": (Case("gemma3", Layout(2), Layout(2), cp=2), SPANS),
    "layers": (Case("gemma4-spans", Layout(2), Layout(2), cp=2), LAYERS),
    "whole": (Case("gemma4-unified", Layout(2), Layout(2), cp=2), WHOLE),
    "prefix": (Case("paligemma2", Layout(2), Layout(2), cp=2), PREFIX),
}
DAILY = "a part for a deeper layer is dropped"
MUTATED["daily"] = (MUTATED["rows"][0], {DAILY: MUTATIONS[DAILY]})


def _errors(rank: int, kind: str) -> dict[str, float]:
    case, mutations = MUTATED[kind]
    answer = answer_of(case.name, case.documents)
    return {name: max(step(case, answer, trial=False).values()) for name in each_mutated(mutations)}


@pytest.mark.parametrize(
    "kind", [kind if kind == "daily" else pytest.param(kind, marks=pytest.mark.whole) for kind in MUTATED]
)
def test_every_mutation_is_seen(kind: str) -> None:
    for errors in run_ranks(_errors, 2, kind):
        assert errors.pop("nothing") < BOUND
        assert min(errors.values()) > 1e-3, errors
