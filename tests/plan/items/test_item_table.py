"""Items of documents: spans, targets, and where rows are among the rows of members, against brute force."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from longspan.errors import DataError, PlanError
from longspan.layout import Layout, Partition
from longspan.plan import MicroBatch, plan_dynamic
from longspan.plan.items.encoding_plan import EncoderPlanning, NeededBy, plan_items
from longspan.plan.items.item_table import ItemTable, MediaItem


@st.composite
def tables(draw: st.DrawFn) -> ItemTable:
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=6))
    items: list[MediaItem] = []
    for document, length in enumerate(lengths):
        cuts = sorted(draw(st.sets(st.integers(0, length), max_size=8)))
        spans = list(zip(cuts[::2], cuts[1::2], strict=False))
        while spans:
            size = draw(st.integers(1, len(spans)))
            items.append(MediaItem(document, tuple(spans[:size]), draw(st.sampled_from(["image", "audio"]))))
            spans = spans[size:]
    return ItemTable(lengths, draw(st.permutations(items)))


def row_ids(table: ItemTable, modality: str) -> dict[tuple[int, int], int]:
    places = [
        (item.document, position)
        for item in table.items
        if item.modality == modality
        for start, stop in item.spans
        for position in range(start, stop)
    ]
    return {place: row for row, place in enumerate(places)}


def runs_of(positions: Iterable[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for position in sorted(positions):
        touches = bool(runs) and runs[-1][1] == position
        start, _ = runs.pop() if touches else (position, position)
        runs.append((start, position + 1))
    return runs


@settings(deadline=None, max_examples=25)
@given(tables())
def test_places_and_targets(table: ItemTable) -> None:
    placeholders = {place for modality in table.modalities for place in row_ids(table, modality)}
    for document, length in enumerate(table.lengths):
        mask = [(document, p) in placeholders for p in range(length)]
        assert table.placeholder_mask(document, 0, length).tolist() == mask
        assert table.placeholders(document).tolist() == [p for p in range(length) if (document, p) in placeholders]
        assert table.runs(document, ("image",)) == runs_of(p for d, p in row_ids(table, "image") if d == document)
        assert table.runs(document, ("audio", "image")) == runs_of(p for d, p in placeholders if d == document)
        assert table.targets[document] == sum((document, p) not in placeholders for p in range(1, length))


@settings(deadline=None, max_examples=25)
@given(tables(), st.integers(1, 4), st.booleans(), st.sampled_from([None, 0, 1, 9]))
def test_rows_among_those_of_members(table: ItemTable, degree: int, zigzag: bool, padding: int | None) -> None:
    documents = list(range(len(table.lengths)))[::-1]
    lengths = [table.lengths[document] if padding is None else max(table.lengths) + padding for document in documents]
    shares = (Partition.zigzag if zigzag else Partition.contiguous)(lengths, degree)
    for modality in table.modalities:
        rows, ids = table.rows_of_modality(modality), row_ids(table, modality)
        assert sum(rows.counts) == len(ids)
        for member in range(degree):
            among = rows.find_rows(documents, shares.segments(member))
            places = [
                (documents[segment.document], position)
                for segment in shares.segments(member)
                for position in range(segment.start, segment.stop)
            ]
            expected = [(local, ids[place]) for local, place in enumerate(places) if place in ids]
            assert list(zip(among.local.tolist(), among.row.tolist(), strict=True)) == expected


@settings(deadline=None, max_examples=16)
@given(tables(), st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]), st.booleans(), st.integers(1, 2))
def test_every_row_is_encoded_once_and_needed_where_its_position_is(
    table: ItemTable, degrees: tuple[int, int], parts: bool, max_cp: int
) -> None:
    tp, encoder_tp = degrees
    home, encoder_home = Layout(4, tp=tp), Layout([3, 1, 2, 0] if encoder_tp == 1 else 4, tp=encoder_tp)
    limits = {"max_tokens_per_slot": 30, "row_multiple": tp, "effort": "fast"}
    plan = plan_dynamic(table.lengths, home, targets=sum(table.targets), **limits)
    needed_by = NeededBy(micro_batches=plan.micro_batches, home=home, row_multiple=tp, split_over_tp=parts and tp > 1)
    planning = EncoderPlanning(home=encoder_home, max_rows_per_slot=30, max_cp=max_cp)
    for modality, waves in plan_items(table, needed_by, dict.fromkeys(table.modalities, planning)).items():
        count, slots = sum(table.rows_of_modality(modality).counts), len(home.ranks) // encoder_tp
        have, need = np.zeros(count, dtype=int), np.zeros(count, dtype=int)
        for wave in waves.waves:
            here = np.zeros(count, dtype=int)
            for member in range(4):
                here[wave.have.rows(member)] += 1
                np.add.at(need, wave.need.rows(member), 1)
                assert set(wave.need.rows(member)) <= {r for m in range(4) for r in wave.have.rows(m).tolist()}
            have += here
        assert (have == encoder_tp).all(), slots
        assert (need == (1 if parts or tp == 1 else tp)).all()


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([MediaItem(2, ((0, 1),))], r"item 0 \(image\) is of document 2; there are 2 documents"),
        ([MediaItem(0, ((3, 7),))], r"item 0 \(image of document 0\) has the spans .* positions 0 to 5"),
        ([MediaItem(0, ((3, 3),))], "not empty"),
        ([MediaItem(0, ((3, 4), (2, 3)))], "ascending"),
        ([MediaItem(0, ())], "takes no position"),
        (
            [MediaItem(0, ((3, 5),)), MediaItem(1, ((0, 1),)), MediaItem(0, ((4, 6),), "audio")],
            r"item 0 \(image of document 0\) and item 2 \(audio of document 0\) both take position 4",
        ),
        ([(0, ((1, 4),))], r"item 0 is .*; give MediaItem\(document"),
        *(
            ([item], "item 0 is .*; its document is an integer and its spans pairs")
            for item in (MediaItem(0, (1, 4)), MediaItem(0, ((1.0, 4),)), MediaItem(True, ((1, 4),)), MediaItem(0, 3))
        ),
    ],
)
def test_what_does_not_fit_is_refused(items: list[Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        ItemTable([6, 4], items)


def test_items_that_no_encoder_takes_are_refused() -> None:
    table, home = ItemTable([6], [MediaItem(0, ((0, 4),), "audio")]), Layout(1)
    needed_by = NeededBy(micro_batches=(MicroBatch(),), home=home)
    with pytest.raises(PlanError, match=r"1 of 1 items are of modality 'audio', for which .* encoders for 'image'"):
        plan_items(table, needed_by, {"image": EncoderPlanning(home=home)})
    with pytest.raises(PlanError, match=r"item 0 \(audio of document 0\) has 4 rows, more than the 3 .* raise one"):
        plan_items(table, needed_by, {"audio": EncoderPlanning(home=home, max_rows_per_slot=3)})
