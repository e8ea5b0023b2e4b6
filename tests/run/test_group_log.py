"""A run says which groups its ranks talk in: communicators, and the levels of hierarchical groups."""

import io
import json
from pathlib import Path

from longspan import World
from longspan.config.sections import RunConfig
from longspan.run.checks import check_config
from longspan.run.loop import train
from longspan.run.progress import ProgressDisplay
from longspan.testing import backend, run_ranks
from tests.attention.test_attend import needs
from tests.train.small import small_config


def said(rank: int, config: RunConfig, ranks: int) -> str:
    stream = io.StringIO() if rank == 0 else None
    with World(check_config(config, ranks), backend=backend()) as world, ProgressDisplay(1, stream) as display:
        train(config, world, display)
    return "" if stream is None else stream.getvalue()


def test_a_hierarchical_run_records_its_communicators_and_both_levels(tmp_path: Path) -> None:
    needs(4)
    config = small_config(
        tmp_path,
        context__context_parallel_size=4,
        context__cp_comm_type="a2a+p2p",
        context__hierarchical_context_parallel_sizes=(2, 2),
        train__steps=2,
        train__warmup_steps=0,
        data__eval_documents=0,
    )
    text = run_ranks(said, 4, config, 4, timeout=90)[0]
    assert "process groups" not in text and "hierarchical group" not in text
    rows = [json.loads(line) for line in (Path(config.run.dir) / "groups.jsonl").read_text().splitlines()]
    assert [row["kind"] for row in rows][:2] == ["control", "parent"]
    assert [row["p2p"] for row in rows if row["kind"] == "levels"] == [[[0, 2], [1, 3]]]
