"""Keys that do not fit each other are refused before a process starts."""

from typing import Any

import pytest

from longspan.config.file import load_config
from longspan.config.sections import BestFigure, RunConfig
from longspan.errors import ConfigError
from longspan.run.checks import check_config, check_image_keys

PIPELINE = {"parallel.pp": 4, "context.context_parallel_size": 1, "context.eval_context_parallel_size": 2}
ROUNDED = {"lora.rank": 4, "model.dtype": "bfloat16", "train.stochastic_rounding": True}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"parallel.vpp": 2}, r"parallel.vpp is 2 and parallel.pp is 1: virtual stages need a pipeline; use pp = 2"),
    ({"parallel.pp": 2, "parallel.pipeline_schedule": "zbv"}, r'"zbv", which folds .* parallel.vpp is 1; use vpp = 2'),
    (PIPELINE, r"2 does not divide 1 slot \(4 ranks / tp 1 / pp 4"),
    ({"lora.alpha": 8.0}, "lora.rank is 0"),
    ({"lora.rank": 4, "lora.dropout": 0.1, "parallel.tp": 2}, "lora.dropout is 0.1"),
    ({"lora.rank": 4, "lora.dropout": 1.0}, "below 1"),
    (ROUNDED, "adapters .* are float32"),
    ({"mtp.loss_weight": 0.1}, r"loss_weight 0.1, .* mtp.depths is 0"),
    ({"mtp.depths": -1}, "mtp.depths is -1"),
    ({"mtp.depths": 1, "mtp.loss_weight": -0.5}, "mtp.loss_weight is -0.5"),
    ({"mtp.depths": 1, "mtp.train_whole": True}, "mtp.train_whole is true: .* lora.rank is 0"),
    ({"mtp.depths": 1, "mtp.weights": "nowhere"}, "'nowhere', which is no folder"),
    ({"encoder.tp": 3}, r"encoder\.tp is 3, and there are 4 ranks; use 1, 2, 4"),
    ({"encoder.lr": 0.1, "encoder.train": "none"}, r'encoder.lr is 0.1 and encoder.train is "none"'),
    ({"train.profile_steps": (10, 0)}, r"train.profile_steps has 0; steps are counted from 1"),
    (
        {"train.keep_best": "loss"},
        "is 'loss'; give a figure of an evaluation as metrics.jsonl has it, such as eval_loss",
    ),
    ({"train.keep_best": "eval_loss:best"}, "is 'eval_loss:best'; give a figure"),
    ({"train.keep_best": "code/eval_loss"}, "names eval_loss of the set 'code', which the run has not; its sets: none"),
]


@pytest.mark.parametrize(("keys", "message"), REFUSED)
def test_keys_that_do_not_fit(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(load_config(None, keys), 4)


def test_sections_and_figures_of_what_a_run_has_not() -> None:
    with pytest.raises(ConfigError, match=r"\[encoder\] is given, and no row of the data has images"):
        check_image_keys(load_config(None, {"encoder.tp": 2}), 0)
    check_image_keys(RunConfig(), 0)
    with pytest.raises(ConfigError, match=r"held out \(data.eval_documents\), which the run has not"):
        BestFigure.of("eval_loss").check_sets([])
