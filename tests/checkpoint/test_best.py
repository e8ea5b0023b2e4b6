"""Which checkpoint of a run its weights are taken from, and what is said of it."""

import json
from pathlib import Path

import pytest

from longspan.checkpoint.best import RunCheckpoints
from longspan.checkpoint.files import checkpoint_path, create_partial_folder, partial_path, step_of
from longspan.config.file import load_config, to_toml
from longspan.errors import CheckpointError

BEST = {"set": "", "column": "eval_loss", "higher": False}
BESTS = [{"step": 2, "value": 3.5}, {"step": 4, "value": 2.25}]
STEP_4 = "step 4 is the best by eval_loss 2.25"
# keys, the value of "bests" in best.json (None: no file), steps that are saved, those that are damaged, the step
# that is taken, and what is said
CASES: list[tuple[dict[str, object], object, list[int], list[int], int, str]] = [
    ({}, BESTS, [2, 4, 6], [], 6, ""),
    ({"checkpoint.keep_best": "eval_loss"}, BESTS, [2, 4, 6], [], 6, f"{STEP_4}; step 6, the newest, is taken, and to"),
    ({"checkpoint.keep_best": "eval_loss"}, BESTS, [2, 4, 6], [6], 4, ""),
    ({"checkpoint.keep_best": "eval_loss"}, BESTS, [2, 4], [], 4, ""),
    ({"checkpoint.keep_best": "eval_loss"}, None, [4], [], 4, ""),
    ({"checkpoint.keep_best": "code/eval_loss"}, BESTS, [4, 6], [], 6, "best.json is of another figure than"),
    ({"evaluation.patience": 2}, BESTS, [2, 4, 6], [], 4, f"{STEP_4} and is taken; the newest is ROOT/step-000006"),
    ({"evaluation.patience": 2}, BESTS, [2, 4], [], 4, f"{STEP_4} and is taken"),
    ({"evaluation.patience": 2}, BESTS, [2, 4, 6], [4], 2, f"{STEP_4}, and has no good checkpoint; step 2 is taken"),
    (
        {"evaluation.patience": 2},
        BESTS,
        [2, 6],
        [2],
        6,
        f"{STEP_4}, and has no good checkpoint; step 6, the newest, is",
    ),
    (
        {"evaluation.patience": 2},
        None,
        [2, 6],
        [],
        6,
        "no best step by eval_loss is known; step 6, the newest, is taken",
    ),
    ({"evaluation.patience": 2}, "folder", [6], [], 6, "best.json is damaged: no best step is known from it"),
    ({"evaluation.patience": 2}, 7, [6], [], 6, "best.json is damaged: no best step is known from it"),
    (
        {"evaluation.patience": 2},
        [{"step": 6, "value": None}],
        [6],
        [],
        6,
        "best.json is damaged: no best step is known",
    ),
]


@pytest.mark.parametrize(("keys", "bests", "saved", "damaged", "taken", "says"), CASES, ids=range(len(CASES)))
def test_a_run_with_patience_hands_out_its_best_step_and_another_names_it(
    keys: dict[str, object],
    bests: object,
    saved: list[int],
    damaged: list[int],
    taken: int,
    says: str,
    tmp_path: Path,
) -> None:
    lines = list[str]()

    def check(path: Path) -> None:
        if step_of(path) in damaged:
            raise CheckpointError(f"{path} is damaged")

    root = tmp_path / "checkpoints"
    create_partial_folder(partial_path(checkpoint_path(root, 8)))
    for step in saved:
        checkpoint_path(root, step).mkdir(parents=True)
    if bests == "folder":
        (tmp_path / "best.json").mkdir()
    elif bests is not None:
        (tmp_path / "best.json").write_text(json.dumps({**BEST, "bests": bests}))
    (tmp_path / "config.toml").write_text(to_toml(load_config(None, keys)))
    assert RunCheckpoints.find(tmp_path, lines.append).take(check, lines.append) == checkpoint_path(root, taken)
    said = [line for line in lines if "its save was interrupted" not in line and "skipping a damaged" not in line]
    text = "\n".join(said)
    assert bool(said) == bool(says) and says.replace("ROOT", str(root)) in text, said
    with pytest.raises(CheckpointError, match="no good checkpoint is left in"):
        damaged += saved
        RunCheckpoints.find(tmp_path, lines.append).take(check, lines.append)
