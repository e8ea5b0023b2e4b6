"""Who made the device wait: gaps of a device's timeline by what the host was doing, on timelines that are made up."""

import pytest

from longspan.bench.timing import MARK, mean_gaps
from longspan.run.gaps import MOST_GAPS, SHORT, SHORTEST, gap_cells, gaps_by_cause, merge_intervals

GEMM = "gemm"


def test_a_gap_belongs_to_the_shortest_call_that_covers_most_of_it() -> None:
    device = [(GEMM, 0.0, 1.0), (GEMM, 3.0, 4.0), ("adam", 6.0, 7.0), (GEMM, 7.5, 8.0)]
    host = [
        ("FSDP::post_backward_reduce", 0.8, 3.0),
        ("aten::empty", 0.9, 2.95),
        ("cudaFree", 1.1, 2.9),
        ("cudaLaunchKernel", 2.95, 2.99),
        ("aten::item", 3.5, 6.0),
        ("cudaStreamSynchronize", 3.6, 5.9),
        ("aten::mm", 7.4, 7.5),
    ]
    rows = gaps_by_cause(device, host, (0.0, 8.0))
    assert [(row["host"], row["gaps"], row["then"]) for row in rows] == [
        ("cudaFree", 1, GEMM),
        ("cudaStreamSynchronize", 1, "adam"),
        ("Python before aten::mm", 1, GEMM),
    ]
    assert [row["seconds"] for row in rows] == pytest.approx([2.0, 2.0, 0.5])
    assert gap_cells(rows)[2] == ("Python before aten::mm", "1", "500.0", "500.00", GEMM)


def test_equal_gaps_are_one_row_and_the_mean_of_the_steps() -> None:
    device = [(GEMM, 10.0 * i + start, 10.0 * i + start + 1.0) for i in range(4) for start in (0.0, 3.0, 5.0)]
    host = [("cudaFree", 10.0 * i + 1.0, 10.0 * i + 3.0) for i in range(4)]
    rows = gaps_by_cause(device, host, (0.0, 36.0), repeats=4)
    of_free = next(row for row in rows if row["host"] == "cudaFree")
    assert (of_free["gaps"], of_free["seconds"], of_free["longest"]) == (1, 2.0, 2.0)
    busy = sum(end - start for start, end in merge_intervals([(start, end) for _, start, end in device]))
    assert sum(row["seconds"] for row in rows) * 4 == pytest.approx(36.0 - busy)


def test_streams_that_overlap_leave_no_gap_and_the_ends_count() -> None:
    device = [("nccl", 1.0, 3.0), (GEMM, 2.0, 4.0)]
    (row,) = gaps_by_cause(device, [], (0.0, 5.0))
    assert (row["host"], row["gaps"], row["seconds"], row["then"]) == ("Python", 2, 2.0, "nccl")


def test_short_gaps_are_left_out_and_many_are_added_up() -> None:
    assert gaps_by_cause([(GEMM, 0.0, 1.0), (GEMM, 1.0 + SHORTEST / 2, 2.0)], [], (0.0, 2.0)) == []
    device = [(GEMM, float(i), i + 0.5) for i in range(MOST_GAPS + 10)]
    rows = gaps_by_cause(device, [("aten::mm", 0.0, 1e6)], (0.0, float(MOST_GAPS + 10)))
    assert [(row["host"], row["gaps"], row["seconds"]) for row in rows] == [
        ("aten::mm", MOST_GAPS, MOST_GAPS / 2),
        (SHORT, 10, 5.0),
    ]


def test_a_bench_counts_between_its_marks() -> None:
    events = [
        (MARK, 1.0, 1.1),
        (GEMM, 1.5, 2.0),
        (MARK, 2.1, 2.2),
        (GEMM, 2.6, 3.1),
        (MARK, 3.1, 3.2),
        (GEMM, 9.0, 9.1),
    ]
    (row,) = mean_gaps(events, [("cudaFree", 1.1, 1.5), ("cudaFree", 2.0, 2.6), ("cudaFree", 3.1, 3.2)])
    assert (row["host"], row["gaps"]) == ("cudaFree", 2) and row["seconds"] == pytest.approx((0.4 + 0.6 + 0.1) / 2)
