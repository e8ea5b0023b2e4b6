"""Runs of `longspan train` on preferences: losses, gradients, figures and weights are those of TRL's trainers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from longspan.config.sections import RunConfig
from longspan.data.documents import Corpus
from longspan.data.run_order import make_step_order
from longspan.model import load_model
from longspan.run.metrics import read_metrics
from longspan.train.optim.schedule import Schedule
from longspan.train.training import add_configured_adapter
from tests.hf.stock import DenseHead
from tests.run.runs.homes import ALONE, refusals
from tests.run.runs.test_lora_run import write_base
from tests.run.runs.test_scores_run import config_of, words

pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL
Row = dict[str, Any]
PAIRS: list[Row] = [
    {"prompt": words(5 + i % 4), "chosen": words(4 + 7 * i % 50), "rejected": words(3 + 11 * i % 40)} for i in range(11)
]
ANSWERS = [{"prompt": row["prompt"], "completion": row["chosen"], "label": i % 3 > 0} for i, row in enumerate(PAIRS)]
NOT_TOLD = {"entropy", "num_tokens", "mean_token_accuracy"}
LORA = {"lora__rank": 4, "optimizer__lr": 0.05}


class Loss(NamedTuple):
    """A loss of longspan, its arguments, and the trainer and arguments of TRL that it is."""

    trainer: Any
    config: Any
    arguments: dict[str, Any]
    loss_type: str = ""
    rows: Sequence[Row] = tuple(PAIRS)


LOSSES = {
    "dpo": Loss(DPOTrainer, DPOConfig, {"beta": 0.3, "label_smoothing": 0.2}, "robust"),
    "ipo": Loss(DPOTrainer, DPOConfig, {"beta": 0.2}, "ipo"),
    "apo_zero": Loss(DPOTrainer, DPOConfig, {}, "apo_zero"),
    "simpo": Loss(CPOTrainer, CPOConfig, {"beta": 2.0, "cpo_alpha": 0.3, "label_smoothing": 0.1}, "simpo"),
    "orpo": Loss(ORPOTrainer, ORPOConfig, {"beta": 0.4}),
    "kto": Loss(KTOTrainer, KTOConfig, {"desirable_weight": 1.3, "undesirable_weight": 0.7}, rows=tuple(ANSWERS)),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("preferences") / "base")


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL computes in float64: its head of chunks and its odds would be in float32."""
    monkeypatch.setattr("trl.trainer.utils._ChunkedLogProbFunction", DenseHead)
    odds_ratio_loss = ORPOTrainer.odds_ratio_loss

    def in_float64(self: Any, *log_probs: torch.Tensor) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            return odds_ratio_loss(self, *log_probs)

    monkeypatch.setattr(ORPOTrainer, "odds_ratio_loss", in_float64)
    monkeypatch.setenv("CI", "1")


def run_of(folder: Path, base: Path, name: str, **changes: Any) -> RunConfig:
    loss = LOSSES[name]
    keys = {"train__loss": name, "train__loss_arguments": tuple(f"{k}={v}" for k, v in loss.arguments.items())}
    return config_of(folder, base, loss.rows, **keys | changes)


def trainer_of(config: RunConfig, base: Path, loss: Loss, folder: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token = tokenizer.eos_token
    model: Any = load_model(base, dtype="float64")
    if config.lora.rank:
        model = add_configured_adapter(config, model)
    keys = {"output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": [], "max_length": 4096}
    keys |= {"loss_type": loss.loss_type} if loss.loss_type else {}
    keys["per_device_train_batch_size"] = len(loss.rows)
    reference = (
        {}
        if loss.trainer in (CPOTrainer, ORPOTrainer) or config.lora.rank
        else {"ref_model": load_model(base, dtype="float64")}
    )
    return loss.trainer(
        model=model,
        args=loss.config(**keys | loss.arguments),
        train_dataset=Dataset.from_list([*loss.rows]),
        processing_class=tokenizer,
        **reference,
    )


def loss_and_figures(trainer: Any, rows: Sequence[int]) -> tuple[torch.Tensor, dict[str, float]]:
    """Of a batch of these rows, as TRL encodes them."""
    batch = trainer.data_collator([trainer.train_dataset[i] for i in rows])
    if hasattr(trainer, "get_batch_loss_metrics"):
        loss, figures = trainer.get_batch_loss_metrics(trainer.model, batch)
        return loss, {name: x for name, x in figures.items() if not name.startswith("logits/")}
    loss = trainer._compute_loss(trainer.model, batch, False)
    figures = {name: x for name, (x,) in trainer._metrics["train"].items() if name not in NOT_TOLD}
    trainer._metrics["train"].clear()
    return loss, figures


def check_run(config: RunConfig, base: Path, name: str, folder: Path) -> None:
    """Steps, evaluations and weights are those of a loop over the same rows with TRL's trainer."""
    trainer = trainer_of(config, base, LOSSES[name], folder)
    order = make_step_order(config, Corpus(Path(config.run.dir) / "corpus"))
    metrics = read_metrics(Path(config.run.dir) / "metrics.jsonl")
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, betas=(0.9, 0.95), weight_decay=0.0)
    trainer.model.train()
    steps = [row for row in metrics if "loss" in row]
    assert len(steps) == config.train.steps
    for step, row in enumerate(steps):
        optimizer.param_groups[0]["lr"] = Schedule.of(config.optimizer, config.train.steps).lr_at(step)
        loss, figures = loss_and_figures(trainer, [d // 2 for d in order.documents_of_step(step)[::2]])
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, config.optimizer.max_grad_norm)
        optimizer.step()
        compare(row, figures | {"loss": loss.item(), "grad_norm": norm.item()})
    loss, figures = loss_and_figures(trainer, [d // 2 for d in order.evaluation[::2]])
    evaluations = [row for row in metrics if "eval_loss" in row]
    assert evaluations
    for row in evaluations:
        compare({k.removeprefix("eval_"): v for k, v in row.items()}, figures | {"loss": loss.item()})
        assert "eval_perplexity" not in row


def compare(row: dict[str, Any], wanted: dict[str, float]) -> None:
    told = {key for key in row if "/" in key or key in ("kl", "nll_loss", "log_odds_ratio", "log_odds_chosen")}
    assert told == wanted.keys() - {"loss", "grad_norm"}
    for key, value in wanted.items():
        bound = 1e-7 if key == "rewards/accuracies" else 1e-9  # TRL's means of 0 and 1 are in float32
        assert abs(row[key] - value) < bound * max(1.0, abs(value)), (key, row[key], value)


def test_dpo_and_kto_are_those_of_trl(base: Path, tmp_path: Path, exact: None) -> None:
    dpo = run_of(tmp_path / "dpo", base, "dpo", **LORA)
    kto = run_of(tmp_path / "kto", base, "kto", context__max_tokens_per_slot=40)
    assert refusals([dpo, kto]) == [None, None]
    check_run(dpo, base, "dpo", tmp_path / "trl")
    check_run(kto, base, "kto", tmp_path / "trl")


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "cp 1": (1, ALONE),
    "cp 2": (2, {"context__max_tokens_per_slot": 80}),
    "cp 4": (4, {"context__context_parallel_size": 4, "evaluation__context_parallel_size": 4}),
    "dynamic": (4, {"context__planner": "dynamic", "context__context_parallel_size": 0}),
    "tp 2": (2, ALONE | {"parallel__tp": 2}),
    "pp 2": (2, ALONE | {"parallel__pp": 2}),
}


@pytest.mark.whole
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_loss_in_every_layout(base: Path, tmp_path: Path, exact: None, layout: str) -> None:
    ranks, keys = LAYOUTS[layout]
    cases = {f"{name} {kind}": (name, LORA if kind == "lora" else {}) for name in LOSSES for kind in ("full", "lora")}
    configs = [run_of(tmp_path / case, base, name, **keys | more) for case, (name, more) in cases.items()]
    assert refusals(configs, ranks) == [None] * len(configs)
    for config, (name, _) in zip(configs, cases.values(), strict=True):
        check_run(config, base, name, tmp_path / "trl")
