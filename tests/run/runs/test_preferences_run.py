"""Runs of `longspan train` on preferences: losses, gradients, figures and weights are those of TRL's trainers."""

import hashlib
import io
import json
import math
import shutil
from collections.abc import Sequence
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from longspan import World, plan_fixed, run_step
from longspan.checkpoint.base import check_base_unchanged, record_base_weights
from longspan.cli.eval import main as eval_main
from longspan.cli.export import main as export_main
from longspan.config import preference_losses
from longspan.config.file import load_config
from longspan.config.sections import RunConfig
from longspan.corpus.recipe import CorpusSettings
from longspan.corpus.run_corpus import open_or_build_corpus
from longspan.corpus.tokenizer import load_tokenizer
from longspan.data.corpus_documents import Corpus
from longspan.data.run_order import make_step_order
from longspan.errors import ConfigError, DataError, ModelError
from longspan.evaluation.reference import read_reference_log_probs
from longspan.evaluation.saved_results import Difference, SetResult, differences_by_set
from longspan.layout import Layout
from longspan.model import load_model
from longspan.run.checks import check_config
from longspan.run.metrics import read_metrics
from longspan.train.optim.schedule import Schedule
from longspan.train.run_model.load import add_configured_adapter
from longspan.train.terms.preferences import preference_loss
from tests.corpus.rows.conversations import says
from tests.evaluation.saved.evaluating import evaluate_here
from tests.hf.stock import DenseHead
from tests.model.stock import prepare_untried
from tests.run.runs.homes import ALONE, gone_on_from_the_first_checkpoint, lines_of, refusals, train_rows
from tests.run.runs.test_images_run import model_folder, rows_with_images, settings
from tests.run.runs.test_lora_run import edit_configuration, write_base
from tests.run.runs.test_scores_run import END, config_of, words
from tests.train.small import small_config, without_times

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
    "cpo": Loss(CPOTrainer, CPOConfig, {"label_smoothing": 0.2}, "sigmoid"),
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
    compares = loss.trainer not in (CPOTrainer, ORPOTrainer) and not config.lora.rank
    reference = {"ref_model": load_model(base, dtype="float64")} if compares else {}
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


def check_run(config: RunConfig, base: Path, name: str, folder: Path) -> Any:
    """Steps, evaluations and weights are those of a loop over the same rows with TRL's trainer, which is returned."""
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
    return trainer


def compare_saved(config: RunConfig, trainer: Any, *words: str) -> tuple[SetResult, list[Difference]]:
    """The evaluation of saved weights on all rows as new ones, after a comparison with TRL, and how others differ."""
    (own, other), lines = evaluate_here(config.run.dir, "--data", config.data.path, *words)
    assert "22 of 22 documents" in "\n".join(lines)  # whose log-probabilities by the reference are computed
    (result,) = own.sets
    loss, figures = loss_and_figures(trainer, range(11))
    row = {k.removeprefix("eval_"): v for k, v in result.evaluation.row().items()}
    compare(row, figures | {"loss": loss.item()})
    assert own.record()["loss"].startswith(config.train.loss) and "perplexity" not in row
    return result, differences_by_set(own, other)


def check_difference(difference: Difference, first: np.ndarray, other: np.ndarray) -> None:
    assert abs(difference.first - first.mean()) < 1e-9 and abs(difference.other - other.mean()) < 1e-9
    error = (other - first).std(ddof=1) / math.sqrt(len(first))
    assert difference.standard_error == pytest.approx(error, rel=1e-7)
    assert (difference.count, difference.lower) == (len(first), int((other < first).sum()))


def check_pairs_beside_the_base(config: RunConfig, trainer: Any) -> None:
    result, (losses, margins) = compare_saved(config, trainer, "--compare", "base")
    each = [loss_and_figures(trainer, [i]) for i in range(11)]
    by_pair = np.array([[loss.item(), figures["rewards/margins"]] for loss, figures in each])
    assert (losses.unit, losses.figure, margins.figure) == ("pair", "loss", "rewards/margins")
    check_difference(losses, by_pair[:, 0], np.full(11, math.log(2)))
    check_difference(margins, by_pair[:, 1], np.zeros(11))
    rows = result.evaluation.document_rows(result.sources)
    for row, (pair, side) in zip(rows, product(range(11), ("chosen", "rejected")), strict=True):
        assert (row["pair"], row["side"]) == (pair, side) and abs(row["loss"] - by_pair[pair, 0]) < 1e-9
        entropy = -each[pair][1][f"logps/{side}"] / row["targets"]
        assert abs(row["cross_entropy"] - entropy) < 1e-9 and "perplexity" not in row


def check_answers_beside_the_base(config: RunConfig, trainer: Any, base: Path) -> None:
    flags = "--compare", str(base), "--model.dtype", "float64"
    result, (losses,) = compare_saved(config, trainer, *flags)
    _, figures = loss_and_figures(trainer, range(11))
    encode = AutoTokenizer.from_pretrained(base)
    texts = [([*encode(row["prompt"] + row["completion"]).input_ids, END], len(row["prompt"])) for row in ANSWERS]
    models = trainer.model, load_model(base, dtype="float64")
    sums = [np.array([log_prob(m, *text) for text in texts]) for m in models]
    signs, weights = np.array([(1.0, 1.3) if row["label"] else (-1.0, 0.7) for row in ANSWERS]).T
    by_answer = weights * (1 - 1 / (1 + np.exp(-0.1 * signs * (sums[0] - sums[1] - figures["kl"]))))
    assert (losses.unit, losses.figure) == ("answer", "loss")
    check_difference(losses, by_answer, weights / 2)
    rows = result.evaluation.document_rows(result.sources)
    assert [row.get("answer") for row in rows] == [i // 2 if i % 2 == 0 else None for i in range(22)]
    assert all("loss" not in row for row in rows[1::2])  # of a prompt with another row's answer
    assert result.evaluation.row()["eval_answers"] == 11


def log_prob(model: Any, ids: Sequence[int], start: int) -> float:
    """Of the tokens from `start` on, by a stock model."""
    row = torch.tensor([ids])
    with torch.no_grad():
        log_probs = model(input_ids=row).logits[0, :-1].log_softmax(-1)
    return log_probs.gather(1, row[0, 1:, None])[start - 1 :].sum().item()


def compare(row: dict[str, Any], wanted: dict[str, float]) -> None:
    told = {key for key in row if "/" in key or key in ("kl", "nll_loss", "log_odds_ratio", "log_odds_chosen")}
    assert told == wanted.keys() - {"loss", "grad_norm"}
    # where the model is its reference, rounding decides which of two rewards of 0 is larger
    is_reference = all(abs(wanted.get(f"rewards/{x}", 1.0)) < 1e-12 for x in ("chosen", "rejected", "margins"))
    for key, value in wanted.items():
        if is_reference and key == "rewards/accuracies":
            assert 0 <= row[key] <= 1
            continue
        bound = 1e-7 if key == "rewards/accuracies" else 1e-9  # TRL's means of 0 and 1 are in float32
        assert abs(row[key] - value) < bound * max(1.0, abs(value)), (key, row[key], value)


def test_dpo_and_kto_are_those_of_trl(base: Path, tmp_path: Path, exact: None) -> None:
    dpo = run_of(tmp_path / "dpo", base, "dpo", **LORA)
    kto = run_of(tmp_path / "kto", base, "kto", context__max_tokens_per_slot=40)
    assert refusals([dpo, kto]) == [None, None]
    check_pairs_beside_the_base(dpo, check_run(dpo, base, "dpo", tmp_path / "trl"))
    check_answers_beside_the_base(kto, check_run(kto, base, "kto", tmp_path / "trl"), base)


@pytest.fixture(scope="module")
def policy(base: Path) -> Any:
    """The base model some steps later."""
    model: Any = load_model(base, dtype="float64")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_a_step_is_that_of_trl(base: Path, policy: Any, tmp_path: Path, exact: None, name: str) -> None:
    config = run_of(tmp_path, base, name)
    trainer = trainer_of(config, base, LOSSES[name], tmp_path / "trl")
    trainer.model.load_state_dict(policy.state_dict())
    trainer.model.train()
    expected, figures = loss_and_figures(trainer, range(3))
    expected.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in trainer.model.parameters() if p.grad is not None])

    corpus = open_or_build_corpus(
        CorpusSettings.for_run(config), tmp_path, tokenizer=load_tokenizer(base), resumed=False, log=print
    )
    if config.train.needs_reference:
        starts = [corpus.count_rows_before_targets(d) + 1 for d in range(6)]
        sums = [log_prob(trainer.ref_model, corpus.tokens_of(d).tolist(), start) for d, start in enumerate(starts)]
        corpus.reference = np.array(sums)
    documents = corpus.select(range(6))
    with World(Layout(1), backend="gloo", device="cpu") as world:
        plan = plan_fixed(documents.lengths, world.home, cp=1, targets=documents.targets)
        model = prepare_untried(deepcopy(policy), world)
        result = run_step(model, plan, documents, world, loss=preference_loss(documents, config.train))
    row = {**result.figures, "loss": result.loss, "grad_norm": result.grad_norm}
    compare(row, figures | {"loss": expected.item(), "grad_norm": norm.item()})


def test_every_loss_has_a_row_here_and_on_its_page() -> None:
    """`sigmoid` is dpo."""
    page = (Path(__file__).parents[3] / "docs/preferences.md").read_text(encoding="utf-8")
    assert LOSSES.keys() == preference_losses.LOSSES.keys() - {"sigmoid"}
    for name, loss in preference_losses.LOSSES.items():
        (row,) = (line for line in page.splitlines() if line.startswith("| `") and f"`{name}`" in line.split("|")[1])
        arguments = ", ".join(f"`{key}={value:g}`" for key, value in loss.arguments.items())
        assert row.split("|")[3].strip() == arguments


# whose prompts are one token each: then every token but a document's first is a target, and none are stored
SHORT: list[Row] = [{"prompt": "a", "chosen": words(4 + i % 3), "rejected": words(9 + i % 5)} for i in range(6)]


@pytest.mark.parametrize("name", ["dpo", *(pytest.param(x, marks=pytest.mark.whole) for x in ("simpo", "orpo", "kto"))])
def test_prompts_of_one_token(base: Path, tmp_path: Path, exact: None, name: str) -> None:
    """Of the run's documents, and of a set of its own."""
    answers = [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": i % 2 > 0} for i, row in enumerate(SHORT)
    ]
    rows = answers if name == "kto" else SHORT
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(LOSSES, name, LOSSES[name]._replace(rows=tuple(rows)))
        (tmp_path / "set.jsonl").write_text("\n".join(map(json.dumps, rows)))
        sets = [{"name": "set", "path": str(tmp_path / "set.jsonl")}]
        config = run_of(tmp_path / "run", base, name, **ALONE, evaluation__sets=sets, train__steps=1)
        train_rows(config, 1)
        corpus = Corpus(Path(config.run.dir) / "corpus")
        assert (corpus.targets is None) == (name in ("dpo", "simpo"))
        (*_, told) = (row for row in read_metrics(Path(config.run.dir) / "metrics.jsonl") if "loss" in row)
        order = make_step_order(config, corpus)
        trainer = trainer_of(config, base, LOSSES[name], tmp_path / "trl")
        trainer.model.train()
        loss, figures = loss_and_figures(trainer, [d // 2 for d in order.documents_of_step(0)[::2]])
        compare(told, figures | {"loss": loss.item()})


def references_of(config: RunConfig) -> list[Path]:
    return [*Corpus(Path(config.run.dir) / "corpus").documents_folder.glob("reference-*.npy")]


@pytest.mark.usefixtures("token_cache")
@pytest.mark.parametrize("keys", [{}, pytest.param(LORA, marks=pytest.mark.whole)], ids=["full", "lora"])
def test_a_run_that_goes_on_compares_with_the_model_it_began_with(base: Path, tmp_path: Path, keys: Row) -> None:
    """By what is kept; where that is gone, by the base model, which is read again before the checkpoint."""
    config = run_of(tmp_path / "run", base, "dpo", **ALONE | keys)
    lines = lines_of(0, config, 1)
    (kept,) = references_of(config)
    assert lines.count("reference model: log-probabilities") == 2
    assert "loss       dpo, beta 0.3, label_smoothing 0.2; 11 pairs" in lines
    whole = without_seconds(config)
    values = np.load(kept)
    assert np.nanmax(values) < 0 and np.isnan(values).sum() % 2 == 0  # of pairs that no step reads nothing is known
    for gone in (False, True):
        again = gone_on_from_the_first_checkpoint(config, tmp_path / f"again {gone}")
        if gone:
            kept.write_bytes(bytes(kept.stat().st_size))  # as of an array of zeros that nobody computed
        lines = lines_of(0, again, 1)
        assert ("reference model: log" in lines) == (f"{kept} is damaged: its log-probabilities" in lines) == gone
        assert without_seconds(again) == whole
        found = np.load(kept)
        known = np.isfinite(found)
        assert known.any() and np.array_equal(found[known], values[known])
    check_damaged_references(config, kept)


def check_damaged_references(config: RunConfig, file: Path) -> None:
    """Each counts as missing, with a line, and is written anew."""
    whole = file.read_bytes()
    corpus = Corpus(Path(config.run.dir) / "corpus")
    values, documents = np.load(file), corpus.select(np.flatnonzero(np.isfinite(np.load(file))).tolist())
    digest = file.stem.removeprefix("reference-")
    damaged = [whole[:-9], b"", whole[:40], whole + b"x", whole[:200] + b"x" + whole[201:]]
    damaged += map(sealed, (values[:-1], np.append(values, 0.0), values.astype(np.float32), values.astype(object)))
    lines = list[str]()
    with World(Layout(1), backend="gloo", device="cpu") as world:
        for content in damaged:
            file.write_bytes(content)
            assert not read_reference_log_probs([documents], digest, world, lines.append)
            assert corpus.reference is not None and np.isnan(corpus.reference).all()
        file.write_bytes(sealed(values))
        assert sealed(values) == whole and read_reference_log_probs([documents], digest, world, lines.append)
    assert lines == [f"{file} is damaged: its log-probabilities by the reference model count as missing"] * len(damaged)


def sealed(values: Any) -> bytes:
    array = io.BytesIO()
    np.save(array, values)
    return array.getvalue() + hashlib.sha256(array.getvalue()).digest()


@pytest.mark.usefixtures("token_cache")
def test_a_reference_is_that_of_its_configuration(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one cache, two configurations over the same weights: at step 1 the policy is the reference, and the loss ln 2.

    Without shared prefixes no pass has any.
    """
    folder = Path(shutil.copytree(base, tmp_path / "base"))
    rope = {"rope_type": "default", "rope_theta": 50.0}
    edits: list[Row] = [{}, {"rms_norm_eps": 0.5, "rope_parameters": rope}]
    keys = {"train__steps": 1, "evaluation__every": 0, "data__share_prefixes": "none"}
    configs = list[RunConfig]()
    for number, edit in enumerate(edits):
        edit_configuration(folder, **edit)
        config = run_of(tmp_path / f"run {number}", folder, "dpo", **ALONE | keys)
        configs.append(config)
        with monkeypatch.context() as patch:
            patch.setattr("longspan.evaluation.live.share_prefixes_where_faster", None)
            (row,) = train_rows(config, 1)
        assert abs(row["loss"] - math.log(2)) < 1e-12 and row["rewards/margins"] == 0
    first = configs[0].with_keys("train", steps=2)
    saved = (Path(first.run.dir) / "config.json").read_text()
    named = r"base has another now: rms_norm_eps was 1e-06 and is 0.5 now, rope_\S+theta was 10000 and is 50 now; set"
    with pytest.raises(ModelError, match=named):
        train_rows(first, 1)
    assert (Path(first.run.dir) / "config.json").read_text() == saved
    # what evaluates the run has its config.json, but scales the positions of the folder's
    with pytest.raises(ModelError, match=f"{named} that back, or leave the flag out"):
        eval_main([first.run.dir, "--world", "1", "--device", "cpu", "--model.rope_scaling", "yarn:2"])


def without_seconds(config: RunConfig) -> list[dict[str, Any]]:
    return [without_times(row) for row in read_metrics(Path(config.run.dir) / "metrics.jsonl")]


@pytest.mark.whole
def test_saved_weights_are_evaluated_by_their_loss(
    base: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The card says the loss. Of other rows the log-probabilities of the reference are computed anew."""
    config = run_of(tmp_path / "run", base, "dpo", **ALONE)
    train_rows(config, 1)
    (*_, trained) = read_metrics(Path(config.run.dir) / "metrics.jsonl")
    assert eval_main([config.run.dir, "--json"]) == 0
    (found,) = json.loads(capfd.readouterr().out)["evaluations"]
    assert abs(found["eval_loss"] - trained["eval_loss"]) < 1e-12
    assert abs(found["eval_rewards/margins"] - trained["eval_rewards/margins"]) < 1e-12
    (tmp_path / "other.jsonl").write_text(json.dumps(PAIRS[0]))
    told = ["--data", str(tmp_path / "other.jsonl"), "--out", str(tmp_path / "out")]
    assert eval_main([config.run.dir, *told]) == 0
    assert "; loss: dpo, beta 0.3, label_smoothing 0.2" in capfd.readouterr().out
    (other,) = json.loads((tmp_path / "out/results.json").read_text())["evaluations"]
    assert "eval_perplexity" not in other and other["eval_pairs"] == 1
    rows = [json.loads(line) for line in (tmp_path / "out/documents.jsonl").read_text().splitlines()]
    assert [(row["pair"], row["side"]) for row in rows] == [(0, "chosen"), (0, "rejected")]
    assert all(row["loss"] == other["eval_loss"] for row in rows)
    assert other["by_length"] == [[0, 127, other["eval_loss"], 2, 2]] and other["by_position"] == []
    assert export_main([config.run.dir, str(tmp_path / "model"), "--json"]) == 0
    assert "| trained by | dpo, beta 0.3, label_smoothing 0.2 |" in (tmp_path / "model/README.md").read_text()


def test_what_a_loss_does_not_take(base: Path, tmp_path: Path) -> None:
    """Of a set that has no pairs it is known before any row becomes tokens."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"text": words(9)}))
    of_sets = {"train__loss": "dpo", "evaluation__sets": [{"name": "texts", "path": str(texts)}]}
    long, equal = {**PAIRS[3], "chosen": "a" * 70}, {**PAIRS[3], "rejected": PAIRS[3]["chosen"]}
    cases: list[tuple[list[Row], dict[str, Any], str]] = [
        (ANSWERS, {"train__loss": "dpo"}, "hold prompt and completion, and train.loss needs chosen and rejected"),
        (PAIRS, {"train__loss": ""}, 'are pairs .* or train.loss = "dpo" to train a language model on preferences'),
        ([*PAIRS[:3], long], {"train__loss": "ipo"}, "line 4: a document has .* is not cut"),
        ([PAIRS[0], equal], {"train__loss": "orpo"}, "line 2: chosen and rejected"),
        (PAIRS, of_sets, r"rows of .*texts.jsonl hold text, and train.loss needs chosen and rejected"),
    ]
    configs = [config_of(tmp_path / str(i), base, rows, **ALONE | keys) for i, (rows, keys, _) in enumerate(cases)]
    for config, (*_, message) in zip(configs, cases, strict=True):
        with pytest.raises(DataError, match=message):
            lines_of(0, config, 1)
    assert not (Path(configs[-1].run.dir) / "corpus").exists()
    for arguments, message in (
        (("gamma=1",), "has gamma, and train.loss 'dpo' takes beta, label_smoothing"),
        (("beta=0",), "has beta=0; it must be a number above 0"),
        (("label_smoothing=0.5",), "must be a number at least 0, below 0.5"),
        (("beta",), "write name=value"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_config(small_config(tmp_path, train__loss="dpo", train__loss_arguments=arguments), 1)
    keys = {"train__loss": "orpo", "data__on_bad_row": "skip", **ALONE}
    skipping = config_of(tmp_path / "skip", base, [*PAIRS, equal], **keys)
    assert "1 bad row" in lines_of(0, skipping, 1)
    assert Corpus(Path(skipping.run.dir) / "corpus").manifest.left_out.bad_rows == 1


@pytest.mark.whole
@pytest.mark.parametrize("loss", ["dpo", "orpo", "kto"])
def test_prompts_with_images(tmp_path: Path, loss: str) -> None:
    """Over two slots, with an encoder of tp 2, losses, norms and figures are those of one rank."""
    model = model_folder(tmp_path / "model")
    rows = [json.loads(line) for line in rows_with_images(tmp_path / "rows").read_text().splitlines()]
    answers = [{"chosen": row["messages"], "rejected": [row["messages"][0], says("no")]} for row in rows]
    pairs = [{"images": row.get("images", []), **pair} for row, pair in zip(rows, answers, strict=True)]
    (tmp_path / "rows/rows.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    keys = {"train__loss": loss, "train__steps": 2, "train__tokens_per_step": 800}
    alone = settings(tmp_path / "one", tmp_path / "rows/rows.jsonl", model, context__max_tokens_per_slot=512, **keys)
    keys |= {"context__context_parallel_size": 2, "context__max_tokens_per_slot": 128, "encoder__tp": 2}
    two = settings(tmp_path / "two", tmp_path / "rows/rows.jsonl", model, **keys)
    wanted, found = (train_rows(config, ranks) for config, ranks in ((alone, 1), (two, 2)))
    for row, other in zip(wanted, found, strict=True):
        for name in ("loss", "grad_norm", *(name for name in row if "/" in name)):
            assert other[name] == pytest.approx(row[name], rel=1e-6, abs=1e-6), name  # norms are in float32


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "cp 1": (1, ALONE),
    "cp 2": (2, {"context__max_tokens_per_slot": 80}),
    "cp 4": (4, {"context__context_parallel_size": 4, "evaluation__context_parallel_size": 4}),
    "dynamic": (4, {"context__planner": "dynamic", "context__context_parallel_size": 0}),
    "tp 2": (2, ALONE | {"parallel__tp": 2}),
    "pp 2": (2, ALONE | {"parallel__pp": 2}),
}


@pytest.mark.whole
@pytest.mark.parametrize("adapter", [{}, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_loss_in_every_layout(base: Path, tmp_path: Path, exact: None, layout: str, adapter: Row) -> None:
    ranks, keys = LAYOUTS[layout]
    configs = [run_of(tmp_path / name, base, name, **keys | adapter) for name in LOSSES]
    assert refusals(configs, ranks) == [None] * len(configs)
    for config, name in zip(configs, LOSSES, strict=True):
        check_run(config, base, name, tmp_path / "trl")


def test_the_weights_of_a_reference_model_are_those_that_a_run_began_with(base: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(base, tmp_path / "base"))
    config = load_config(None, {"model.path": str(folder), "train.loss": "dpo", "optimizer.lr": 1e-6})
    record_base_weights(tmp_path, config)
    check_base_unchanged(tmp_path, config, "cpu", goes_on=True)
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    check_base_unchanged(tmp_path, config, "cpu")  # what evaluates or exports the run has its own weights
    with pytest.raises(ModelError, match=r"the reference model of .* others now"):
        check_base_unchanged(tmp_path, config, "cpu", goes_on=True)


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_without_its_reference_the_cross_entropy_of_answers_is_named(base: Path, tmp_path: Path, name: str) -> None:
    """The weights that a run of all weights began with are gone: neither rejected nor mismatched answers count."""
    folder = Path(shutil.copytree(base, tmp_path / "base"))
    config = run_of(tmp_path / name, folder, name, **ALONE | {"train__steps": 1})
    train_rows(config, 1)
    shutil.rmtree(folder)
    (own,), lines = evaluate_here(config.run.dir, "--data", config.data.path)
    text = f"cross entropy of {'answers' if name == 'kto' else 'chosen answers'}"
    assert f"the loss {name} cannot be computed: the reference model of {config.run.dir} needs" in "\n".join(lines)
    assert own.record()["loss"] == text
    stock = load_model(Path(config.run.dir) / "model", dtype="float64")
    encode = AutoTokenizer.from_pretrained(base)
    texts = [(row["prompt"], row["completion" if name == "kto" else "chosen"]) for row in LOSSES[name].rows]
    sums = [log_prob(stock, [*encode(a + b).input_ids, END], len(a)) for a, b in texts]
    (result,) = own.sets
    targets = sum(len(answer) + 1 for _, answer in texts)
    assert (result.evaluation.documents, result.evaluation.targets) == (11, targets)
    assert result.evaluation.loss == pytest.approx(-sum(sums) / targets, rel=1e-9)
