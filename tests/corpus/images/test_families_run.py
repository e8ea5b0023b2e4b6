"""`longspan train` of families whose images are more than pixels and grids: losses at any degree are those of one."""

from dataclasses import replace
from pathlib import Path

import pytest

from longspan.config.file import load_config
from longspan.config.sections import RunConfig
from longspan.corpus.images.processor import load_processor
from longspan.testing import run_ranks
from tests.corpus.images.families import FAMILIES, family_config, family_folder
from tests.corpus.images.folders import write_images, write_rows
from tests.corpus.images.test_run import COLUMNS, SETTINGS, losses_of
from tests.run.runs.homes import farthest
from tests.train.small import train_rank

SIZES = [(16, 16), (8, 24), (20, 33), (24, 8)]
LONGEST = 320  # tokens of a conversation


def config_of(name: str, folder: Path) -> RunConfig:
    """A run over conversations of none to two images."""
    model = family_folder(folder / "model", name)
    processor = load_processor(model.absolute())
    family_config(name, processor.placeholder, len(processor.stock.tokenizer)).save_pretrained(model)
    images, rows = write_images(folder / "data", SIZES), []
    for i in range(16):
        shown = [images[(i + k) % 4] for k in range(i % 3)]
        question = {"role": "user", "content": "<image> and " * len(shown) + "so?" * (1 + i % 4)}
        row = {"messages": [question, {"role": "assistant", "content": "yes"}]}
        rows.append(row | ({"images": shown} if shown else {}))
    paths = {
        "model.config": str(model),
        "data.path": str(write_rows(folder / "data" / "rows.jsonl", rows)),
        "data.cache": str(folder / "cache"),
        "run.dir": str(folder / "run"),
        "train.tokens_per_step": 2 * LONGEST,
        "context.max_tokens_per_slot": LONGEST // 2,
        "context.eval_max_tokens_per_slot": LONGEST // 2,
        "encoder.recompute": True,
        "encoder.max_rows": 100,
    }
    return load_config(None, SETTINGS | {"train.steps": 3} | paths)


@pytest.mark.whole
@pytest.mark.parametrize("name", FAMILIES)
def test_losses_are_those_of_one_rank(name: str, tmp_path: Path) -> None:
    config = config_of(name, tmp_path)
    run_ranks(train_rank, 2, config, 2, timeout=300)
    context = replace(config.context, context_parallel_size=1).set_evaluation(context_parallel_size=1)
    context = replace(context, max_tokens_per_slot=LONGEST).set_evaluation(max_tokens_per_slot=LONGEST)
    alone = replace(config, context=context, run=replace(config.run, dir=str(tmp_path / "alone")))
    run_ranks(train_rank, 1, alone, 1, timeout=300)
    wanted, found = losses_of(alone), losses_of(config)
    assert all(farthest(found[key], wanted[key]) <= 1e-6 for key in COLUMNS)
    assert len(found["loss"]) == 3 and found["loss"][-1] < found["loss"][0]
