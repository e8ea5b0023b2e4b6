"""Runs of `longspan train` with a teacher: losses, figures and gradients are those of a loop with TRL's divergence."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config

from longspan.config.sections import RunConfig
from longspan.data.corpus_documents import Corpus
from longspan.data.run_order import make_step_order
from longspan.errors import ConfigError, DataError, LongspanError
from longspan.model import load_model
from longspan.run.checks import check_config
from longspan.run.metrics import read_metrics
from longspan.train.optim.schedule import Schedule
from tests.run.runs.homes import gone_on_from_the_first_checkpoint, refusals, train_rows
from tests.run.runs.test_lora_run import write_base
from tests.run.runs.test_scores_run import config_of, words

ROWS = [{"prompt": words(3 + i % 7), "completion": words(2 + 11 * i % 60)} for i in range(14)]
SETTINGS: dict[str, Any] = {
    "distillation__beta": 0.3,
    "distillation__temperature": 1.5,
    "distillation__cross_entropy_weight": 0.25,
}


def write_teacher(folder: Path, **sizes: Any) -> Path:
    """Of another family and size, and with a larger head."""
    sizes = {"vocab_size": 264, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2} | sizes
    return write_base(folder, Qwen3Config, **sizes)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("distillation")
    return write_base(folder / "student"), write_teacher(folder / "teacher")


def run_of(folder: Path, models: tuple[Path, Path], **changes: Any) -> RunConfig:
    keys = {"teacher__path": str(models[1]), "data__max_document_tokens": 0, **SETTINGS, **changes}
    return config_of(folder, models[0], ROWS, **keys)


class Loop:
    """One process in float64 over the run's documents, one by one, with TRL's divergence."""

    def __init__(self, config: RunConfig, models: tuple[Path, Path]) -> None:
        self.config = config
        self.student, self.teacher = (load_model(path, dtype="float64") for path in models)
        self.corpus = Corpus(Path(config.run.dir) / "corpus")
        self.order = make_step_order(config, self.corpus)
        self.optimizer = torch.optim.AdamW(self.student.parameters(), betas=(0.9, 0.95), weight_decay=0.0)

    def rows(self, number: int) -> tuple[Tensor, Tensor]:
        """Of each target of a document (divergence, cross entropy, whether both have one likeliest); positions."""
        gkd: Any = pytest.importorskip("trl.experimental.gkd")
        keys = self.config.distillation
        document = self.corpus[number]
        positions = torch.arange(len(document)).numpy()
        ids, labels = torch.from_numpy(document[positions]), torch.from_numpy(document.labels(positions))
        rows = torch.nonzero(labels[1:] != -100).squeeze(1)
        p, q = (m(input_ids=ids[None], use_cache=False).logits[0][rows] for m in (self.student, self.teacher))
        q = q[:, : p.shape[1]].detach()
        divergence = gkd.GKDTrainer.generalized_jsd_loss(
            p[None], q[None], beta=keys.beta, temperature=keys.temperature, reduction="none"
        )[0].sum(-1)
        ce = torch.nn.functional.cross_entropy(p, labels[rows + 1], reduction="none")
        return torch.stack([divergence, ce, p.argmax(-1) == q.argmax(-1)]), rows

    def sums(self, documents: Any) -> tuple[Tensor, int]:
        parts = [self.rows(number)[0] for number in documents]
        return torch.stack([part.sum(-1) for part in parts]).sum(0), sum(part.shape[1] for part in parts)

    def step(self, step: int) -> dict[str, float]:
        self.optimizer.param_groups[0]["lr"] = Schedule.of(self.config.optimizer, self.config.train.steps).lr_at(step)
        sums, targets = self.sums(self.order.documents_of_step(step))
        kl, ce, _ = sums / targets
        loss = kl + self.config.distillation.cross_entropy_weight * ce
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.student.parameters(), self.config.optimizer.max_grad_norm)
        self.optimizer.step()
        return {"loss": loss.item(), "kl": kl.item(), "ce": ce.item(), "grad_norm": norm.item()}


def compare(rows: list[dict[str, Any]], loop: Loop) -> None:
    for step, row in enumerate(rows):
        for name, value in loop.step(step).items():
            assert abs(row[name] / value - 1) < 1e-9, (step, name, row[name], value)


PLANS: dict[str, dict[str, Any]] = {
    "cp 2": {},
    "dynamic": {"context__planner": "dynamic", "context__context_parallel_size": 0, "optimizer__lr": 1e-4},
}


@pytest.mark.parametrize("plans", PLANS)
def test_a_run_is_a_loop_with_trls_divergence(plans: str, tmp_path: Path, models: tuple[Path, Path]) -> None:
    if plans == "dynamic":  # a teacher that is near, with which the student mostly agrees
        near = load_model(models[0], dtype="float64")
        with torch.no_grad():
            for number, parameter in enumerate(near.parameters()):
                torch.manual_seed(number)
                parameter += 0.01 * torch.randn_like(parameter)
        models = models[0], shutil.copytree(models[0], tmp_path / "near")
        near.save_pretrained(models[1])
    config = run_of(tmp_path, models, **PLANS[plans])
    rows = train_rows(config, 2)
    assert len(rows) == 3 and all(row["teacher_mass"] == 1 and row["entropy"] > 0 for row in rows)
    loop = Loop(config, models)
    compare(rows, loop)
    evaluations = [row for row in read_metrics(tmp_path / "run/metrics.jsonl") if "eval_kl" in row]
    assert len(evaluations) == 2  # at degrees 1 and 2
    (kl, ce, same), targets = loop.sums(loop.order.evaluation)
    assert plans != "dynamic" or 0 < same < targets
    by_position = Counter[int]()
    for number in loop.order.evaluation:
        (values, _, _), positions = loop.rows(number)
        for position, value in zip(positions.tolist(), values.tolist(), strict=True):
            by_position[0 if position < 128 else 128] += value
    for row in evaluations:
        wanted = {"loss": ce, "kl": kl, "agreement": same}
        assert all(abs(row[f"eval_{name}"] - x.item() / targets) < 1e-9 for name, x in wanted.items())
        found = {first: mean * count for first, _, mean, count, _ in row["kl_by_position"]}
        assert found == pytest.approx(by_position, rel=1e-9)
        assert sum(mean * count for _, _, mean, count, _ in row["kl_by_length"]) == pytest.approx(kl.item(), rel=1e-9)
    assert "teacher" not in json.dumps([str(p) for p in (tmp_path / "run/checkpoints").rglob("*")])


def test_a_run_goes_on_with_its_teacher_alone(tmp_path: Path, models: tuple[Path, Path]) -> None:
    teacher = shutil.copytree(models[1], tmp_path / "teacher")
    config = run_of(tmp_path, (models[0], teacher))
    losses = [row["loss"] for row in train_rows(config, 2)]
    rest = gone_on_from_the_first_checkpoint(config, tmp_path / "rest")
    assert [row["loss"] for row in train_rows(rest, 2)][2:] == losses[2:]
    moved = gone_on_from_the_first_checkpoint(config, tmp_path / "moved")
    moved = moved.with_keys("teacher", path=str(shutil.move(teacher, tmp_path / "elsewhere")))
    assert [row["loss"] for row in train_rows(moved, 2)][2:] == losses[2:]
    gone = gone_on_from_the_first_checkpoint(config, tmp_path / "gone")
    drawn = write_teacher(tmp_path / "drawn", num_hidden_layers=2)
    other = gone_on_from_the_first_checkpoint(config, tmp_path / "other").with_keys("teacher", path=str(drawn))
    errors = refusals([gone, other, moved.with_keys("teacher", rope_scaling="yarn")])
    wanted = ["the teacher of", "began over the weights of", "teacher.rope_scaling was ''"]
    assert all(text in str(error) for text, error in zip(wanted, errors, strict=True)), errors


def test_teachers_that_cannot_be_are_refused(tmp_path: Path, models: tuple[Path, Path]) -> None:
    other = write_teacher(tmp_path / "other words")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words["A"], words["B"] = words["B"], words["A"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    short = write_teacher(tmp_path / "short", max_position_embeddings=32)
    small = write_teacher(tmp_path / "small", vocab_size=200)
    run = run_of(tmp_path, models)
    configs = [run.with_keys("teacher", path=str(path)) for path in (other, short, small, tmp_path)]
    errors = refusals(configs)
    wanted = [
        "has another tokenizer: 2 ids are of other tokens, the first of them",
        "the teacher knows 32 positions",
        "holds token id",
        "has no config.json",
    ]
    assert all(text in str(error) for text, error in zip(wanted, errors, strict=True)), errors
    assert isinstance(errors[0], DataError) and isinstance(errors[1], ConfigError)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no teacher": ({"teacher__path": ""}, "distillation.beta is 0.3, and there is no teacher; give teacher.path"),
    "preferences": ({"train__loss": "dpo"}, "train.loss is 'dpo', a loss of preferences; leave one of both out"),
    "a pipeline": ({"parallel__pp": 2}, "parallel.pp is 2, and no pipeline has a teacher"),
    "depths": ({"mtp__num_layers": 1}, "mtp.num_layers is 1, and depths have no teacher"),
    "scores": ({"model__num_labels": 1}, "model.num_labels is 1, and scores have no teacher"),
    "tail": ({"distillation__add_tail": False}, "distillation.add_tail is False, which needs distillation.top_k"),
    "beta": ({"distillation__beta": 1.5}, "distillation.beta is 1.5; it must be at least 0, at most 1"),
    "temperature": ({"distillation__temperature": 0}, "distillation.temperature is 0.0; it must be above 0"),
    "rope": ({"teacher__rope_scaling": "yarn:0.5"}, "teacher.rope_scaling"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_keys_that_no_distillation_has_are_refused(name: str, tmp_path: Path, models: tuple[Path, Path]) -> None:
    changes, text = REFUSED[name]
    with pytest.raises(LongspanError) as caught:
        check_config(run_of(tmp_path, models, **changes), 2)
    assert text in str(caught.value), caught.value
    itself = run_of(tmp_path, (models[0], models[0]))
    with pytest.raises(ConfigError, match="a model that begins as its own teacher learns nothing"):
        check_config(itself, 2)
