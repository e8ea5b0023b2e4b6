"""Heads of scores under any plan and home equal transformers' classifiers in one process: scores, loss, gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification

from longspan import Layout, World, evaluate, gather_documents, plan_dynamic, plan_fixed, prepare, run_step, save_model
from longspan.config.file import load_config
from longspan.errors import DataError, LossError, ModelError
from longspan.layout.partition import NO_TARGET
from longspan.model import add_score_head, load_model, score_class
from longspan.plan import Plan
from longspan.testing import backend, run_ranks
from longspan.train import (
    DocumentLoss,
    PlannerConfig,
    ScoredDocument,
    reward_loss,
    token_log_probs,
    token_scores,
)
from longspan.train.run_model.load import load_run_model, read_model_configuration
from tests.model.stock import SIZES, VOCABULARY, config_of, error, gradients_of, prepare_untried, random_model

PAD = 3
LENGTHS = (13, 1, 30, 7, 2, 18, 5, 9)
PAIRS, MARGINS = [(0, 4), (1, 5), (2, 6), (3, 7)], [0.1, 0.3, 0.0, 0.2]


def token_ids() -> list[np.ndarray]:
    """Documents that end in the token of padding, as an end token may be it, with such tokens inside, and of them."""
    random = np.random.default_rng(0)
    ids = [random.integers(4, VOCABULARY, n) for n in LENGTHS]
    for document in (0, 2, 5):
        ids[document][-1] = PAD
    ids[2][[4, 9]], ids[5][-3:], ids[4][:] = PAD, PAD, PAD
    return ids


IDS = token_ids()
RANDOM = np.random.default_rng(1)
NUMBERS, CLASSES = RANDOM.normal(size=8), RANDOM.integers(0, 3, 8)
SEVERAL = RANDOM.integers(0, 2, (8, 3)).astype(float)
WORDS = [np.where(RANDOM.random(n) < 0.6, RANDOM.integers(0, 3, n), NO_TARGET) for n in LENGTHS]
OLD_VALUES = [RANDOM.normal(size=n) for n in LENGTHS]

Reference = Callable[[Tensor, Tensor], Tensor]  # the loss of scores (B, W, L) or (B, L) of the padded batch


@dataclass(frozen=True)
class Task:
    """A loss of scores: what a stock class makes of labels, or for `loss` what `reference` makes of its scores."""

    labels: int
    documents: Callable[[], list[ScoredDocument]]
    stock: Any = None
    reference: Reference | None = None
    loss: Any = None
    tokens: bool = False


def by_pairs(scores: Tensor, *_: Any) -> Tensor:
    chosen, rejected = scores[:, 0].chunk(2)
    return (-F.logsigmoid(chosen - rejected - torch.tensor(MARGINS, dtype=torch.float64))).mean() + 0.05 * (
        (chosen + rejected) ** 2
    ).mean()


def of_columns(sums: Tensor, documents: tuple[int, ...]) -> Tensor:
    """Of a set's scores (k, 2): every number of it has another slope."""
    return (sums[0] * sums[1]).sum() + (sums[:, 0] * sums[:, 1].sin()).sum() * (documents[0] + 1)


def by_columns(scores: Tensor, *_: Any) -> Tensor:
    return torch.stack([of_columns(scores[list(pair)], pair) for pair in PAIRS]).mean()


def values_of_rows(scores: Tensor, at: Any) -> Tensor:
    """A critic's clipped loss."""
    clipped = at["old"] + (scores - at["old"]).clamp(-0.2, 0.2)
    return torch.maximum((scores - at["aim"]) ** 2, (clipped - at["aim"]) ** 2) / (at.position + 1)


def by_values(scores: Tensor, *_: Any) -> Tensor:
    losses = []
    for d, (row, old) in enumerate(zip(scores[..., 0], OLD_VALUES, strict=True)):
        old = torch.from_numpy(old)
        row = row[: len(old)]
        clipped = old + (row - old).clamp(-0.2, 0.2)
        losses.append(torch.maximum((row - d) ** 2, (clipped - d) ** 2) / torch.arange(1, len(old) + 1))
    return torch.cat(losses).sum() / sum(LENGTHS)


def by_words(scores: Tensor, *_: Any) -> Tensor:
    """As transformers' loss of tokens, which is in float32."""
    return F.cross_entropy(scores.flatten(0, 1), padded(WORDS, NO_TARGET).flatten())


def documents(**keywords: Any) -> list[ScoredDocument]:
    return [ScoredDocument(x, **{k: v[d] for k, v in keywords.items()}, pad=PAD) for d, x in enumerate(IDS)]


TASKS = {
    "regression": Task(1, lambda: documents(label=NUMBERS), NUMBERS),
    "one of three": Task(3, lambda: documents(label=CLASSES), CLASSES),
    "several of three": Task(3, lambda: documents(label=SEVERAL), SEVERAL),
    "pairs": Task(1, documents, None, by_pairs, reward_loss(PAIRS, margins=MARGINS, center_rewards_coefficient=0.05)),
    "sets of two columns": Task(2, documents, None, by_columns, DocumentLoss(of_columns, PAIRS)),
    "words": Task(
        3, lambda: [ScoredDocument(x, labels=w) for x, w in zip(IDS, WORDS, strict=True)], None, by_words, tokens=True
    ),
    "values": Task(
        1,
        lambda: [ScoredDocument(x, rows="all", old=OLD_VALUES[d], aim=d) for d, x in enumerate(IDS)],
        None,
        by_values,
        values_of_rows,
        tokens=True,
    ),
}


def padded(values: Any, fill: int) -> Tensor:
    return torch.from_numpy(np.stack([np.pad(x, (0, max(LENGTHS) - len(x)), constant_values=fill) for x in values]))


def stock_model(family: str, labels: int, *, tokens: bool) -> Any:
    config = FAMILIES[family]() if family in FAMILIES else config_of(family)
    config.pad_token_id = config.get_text_config().pad_token_id = PAD
    config.num_labels, config.classifier_dropout = labels, 0.0
    kind = score_class(config, "ForTokenClassification" if tokens else "ForSequenceClassification")
    attention = "eager" if family in ("gpt-oss", "gemma2") else "sdpa"  # with sinks or soft caps
    settings = {"attn_implementation": attention, "experts_implementation": "eager"}
    return random_model(config, torch.float64, make=kind._from_config, **settings)


SMALL_LINEAR = {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4} | dict.fromkeys(
    ("linear_key_head_dim", "linear_value_head_dim"), 8
)
FAMILIES: dict[str, Any] = {
    "qwen3-next": lambda: transformers.Qwen3NextConfig(**SIZES | SMALL_LINEAR, num_experts=0),
    "qwen3.5": lambda: transformers.Qwen3_5TextConfig(**SIZES | SMALL_LINEAR),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, sliding_window=5),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64,
        **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
    ),
    "helium": lambda: transformers.HeliumConfig(**SIZES),
    "glm4-moe": lambda: transformers.Glm4MoeConfig(**SIZES, first_k_dense_replace=2),  # without a class of its own
    "lfm2": lambda: transformers.Lfm2Config(**SIZES | {"num_hidden_layers": 3}, full_attn_idxs=[1]),
}  # fmt: skip


def dense(family: str, task: Task) -> tuple[float, Tensor, dict[str, Tensor]]:
    model = stock_model(family, task.labels, tokens=task.tokens).train()
    ids = padded(IDS, PAD)
    mask = padded([np.ones(n, dtype=np.int64) for n in LENGTHS], 0)
    labels = None if task.stock is None else torch.from_numpy(np.asarray(task.stock))
    out = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False)
    loss = out.loss if task.reference is None else task.reference(out.logits)
    loss.backward()
    return loss.item(), out.logits.detach(), gradients_of(model)


def plans(home: Layout, targets: int, *, every: bool) -> dict[str, Plan]:
    options = {"targets": targets}
    if home.slots == 1:
        return {"cp 1": plan_fixed(LENGTHS, home, cp=1, max_tokens_per_slot=40, **options)}
    many = {
        "cp 1": plan_fixed(LENGTHS, home, cp=1, max_tokens_per_slot=40, **options),
        "cp 2": plan_fixed(LENGTHS, home, cp=2, max_tokens_per_slot=24, **options),
        "dynamic": plan_dynamic(LENGTHS, home, max_tokens_per_slot=24, **options),
    }
    if not every:
        return {name: many[name] for name in ("cp 2", "dynamic")}
    if home.pp == 1:
        many["free"] = plan_dynamic(LENGTHS, home, max_tokens_per_slot=60, mode="free", **options)
    return many


def check_home(rank: int, home: Layout, cases: list[tuple[str, str]], make: Any = prepare_untried) -> dict[str, Any]:
    errors: dict[str, Any] = {}
    for family, name in cases:
        task = TASKS[name]
        loss, logits, gradients = dense(family, task)
        with World(home, backend=backend()) as world:
            model = make(stock_model(family, task.labels, tokens=task.tokens), world)
            given = task.documents()
            for text, plan in plans(home, sum(d.targets for d in given), every=make is prepare).items():
                model.zero_grad()
                if task.tokens:
                    found = token_scores(model, plan, given, world)
                    pairs = [
                        (found.of(d)[w := g.labels() != NO_TARGET], logits[d, : len(g)][torch.from_numpy(w)].numpy())
                        for d, g in enumerate(given)
                    ]
                    worst = max(abs(a - b).max(initial=0) for a, b in pairs)
                else:
                    worst = abs(token_scores(model, plan, given, world).sums - logits.numpy()).max()
                result = run_step(model, plan, given, world, loss=task.loss)
                here = gradients_of(model)
                worst_gradient = max(error(here[n], gradients[n]) for n in here)
                errors[f"{family}, {name}, {text}"] = worst, abs(result.loss - loss) / abs(loss), worst_gradient
    return errors


QWEN = [("qwen3", name) for name in TASKS]
HOMES = {
    "cp": (Layout(2), [("qwen3", "several of three"), ("qwen3", "pairs"), ("qwen3", "values")]),
    "pp 2": (Layout(2, pp=2), [("llama", "pairs")]),
}
FAMILY_CASES = [(f, n) for f in ("gpt-oss", "gemma2", *FAMILIES) for n in ("pairs", "words")]
WHOLE = {
    "cp": (Layout(2), QWEN),
    "families": (Layout(2), FAMILY_CASES),
    "tp 2": (Layout(2, tp=2), [*QWEN, ("lfm2", "pairs"), ("gpt-oss", "words")]),
    "pp 2": (Layout(2, pp=2), [*QWEN, ("lfm2", "pairs"), ("gpt-oss", "words")]),
    "cp 2, pp 2": (Layout(4, pp=2), [("qwen3", "pairs"), ("llama", "values")]),
}
FLOAT32_PARTS = {"qwen3-next": 3e-4, "qwen3.5": 3e-4} | dict.fromkeys(
    ("gemma2", "gemma3", "helium"), 1e-6
)  # also in the stock classes


@pytest.mark.parametrize("home, cases", HOMES.values(), ids=HOMES)
def test_scores_loss_and_gradients_are_those_of_the_stock_class(home: Layout, cases: Any) -> None:
    check_errors(run_ranks(check_home, len(home.ranks), home, cases)[0])


@pytest.mark.whole
@pytest.mark.parametrize("home, cases", WHOLE.values(), ids=WHOLE)
def test_whole_table(home: Layout, cases: Any) -> None:
    check_errors(run_ranks(check_home, len(home.ranks), home, cases, prepare, timeout=400)[0])


def check_errors(errors: dict[str, Any]) -> None:
    for case, found in errors.items():
        print(case, *(f"{x:.1e}" for x in found))
    assert not {c: x for c, x in errors.items() if max(x) > FLOAT32_PARTS.get(c.split(",")[0], 1e-12)}


def trained_by_lora(family: str, *, tokens: bool) -> Any:
    """As peft makes it: the head is a trained copy."""
    torch.manual_seed(0)
    kind = "TOKEN_CLS" if tokens else "SEQ_CLS"
    config = peft.LoraConfig(r=4, task_type=kind, target_modules=["q_proj", "down_proj"])
    model = peft.get_peft_model(stock_model(family, 3, tokens=tokens), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return model.double()


def check_folders(rank: int, home: Layout, folder: str) -> list[Any]:
    """Folders of a head, of an adapter and of a family without a class, and what an evaluation measures."""
    given = TASKS["one of three"].documents()
    labels = torch.from_numpy(CLASSES)
    lora = trained_by_lora("qwen3", tokens=False).train()
    mask = padded([np.ones(n, dtype=np.int64) for n in LENGTHS], 0)
    out = lora(input_ids=padded(IDS, PAD), attention_mask=mask, labels=labels, use_cache=False)
    out.loss.backward()
    stock = gradients_of(lora.get_base_model())
    with World(home, backend=backend()) as world:
        plan = plan_fixed(LENGTHS, world.home, cp=world.home.slots, targets=len(given))
        adapted = prepare_untried(trained_by_lora("qwen3", tokens=False), world)
        result = run_step(adapted, plan, given, world)
        here = gradients_of(adapted)
        errors = [abs(result.loss - out.loss.item()), *(error(here[n], stock[n]) for n in here)]
        save_model(adapted, f"{folder}/adapter", world)
        evaluation = evaluate(adapted, given, PlannerConfig.fixed(world.home.slots), world)
        errors += [abs(evaluation.loss - out.loss.item())]
        right = (out.logits.argmax(-1) == labels).double().mean().item()
        errors += [abs(evaluation.metrics["accuracy"].value - right)]
        local = given[:3] if rank == 0 else given[3:]
        gathered = gather_documents(local, world)
        errors += [abs(run_step(adapted, plan, gathered, world, backward=False).loss - out.loss.item())]
        own = prepare_untried(stock_model("lfm2", 2, tokens=True), world)
        save_model(own, f"{folder}/own", world)
        save_model(prepare_untried(stock_model("qwen3", 3, tokens=False), world), f"{folder}/head", world)
        save_model(prepare_untried(random_model(config_of("qwen3")), world), f"{folder}/causal", world)
        filled = [add_score_head(load_model(f"{folder}/causal", sharded=late), labels=3) for late in (False, True)]
        assert type(filled[0]) is transformers.Qwen3ForSequenceClassification
        now, late = (token_scores(prepare_untried(scored, world), plan, given, world).sums for scored in filled)
        assert now.shape == (8, 3) and np.array_equal(now, late)
        again = load_model(f"{folder}/own", dtype="float64", sharded=True)  # which prepare fills
        twice = prepare_untried(again, world)
        words = [ScoredDocument(x, rows="all") for x in IDS]
        all_rows = plan_fixed(LENGTHS, world.home, cp=1, targets=sum(LENGTHS))
        sums = [token_scores(m, all_rows, words, world).sums for m in (own, twice)]
        assert np.array_equal(*sums)
    return [len(here), max(errors)]


def test_folders_adapters_and_evaluations(tmp_path: Any) -> None:
    trained, worst = run_ranks(check_folders, 2, Layout(2), str(tmp_path))[0]
    assert trained == 9 and worst < 1e-12  # two adapters of two matrices in two layers, and the head
    exact, base = stock_model("qwen3", 3, tokens=False), trained_by_lora("qwen3", tokens=False)
    same_weights(AutoModelForSequenceClassification.from_pretrained(tmp_path / "head", dtype=torch.float64), exact)
    same_weights(load_model(tmp_path / "head", dtype="float64"), exact)
    config = load_config(None, {"model.path": str(tmp_path / "head"), "model.num_labels": 3, "model.dtype": "float64"})
    assert type(load_run_model(config, read_model_configuration(config, VOCABULARY))) is type(exact)
    own = stock_model("lfm2", 2, tokens=True)
    assert type(own).__name__ == "Lfm2ForTokenClassification" and not hasattr(transformers, type(own).__name__)
    same_weights(load_model(tmp_path / "own", dtype="float64"), own)
    adapter = peft.PeftModel.from_pretrained(stock_model("qwen3", 3, tokens=False), str(tmp_path / "adapter"))
    same_weights(adapter, base)


def same_weights(model: Any, exact: Any) -> None:
    names = exact.state_dict().keys()
    assert model.state_dict().keys() == names
    assert all(torch.equal(model.state_dict()[name], exact.state_dict()[name]) for name in names)


class OwnForward(transformers.Qwen3ForSequenceClassification):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def check_refusals(rank: int) -> None:
    with World(Layout(1), backend=backend()) as world:
        plan = plan_fixed(LENGTHS, world.home, cp=1, targets=len(LENGTHS))
        model = prepare_untried(stock_model("qwen3", 3, tokens=False), world)
        for given, keywords, words in (
            ([ScoredDocument(x, label=3) for x in IDS], {}, "0 to 2"),
            ([ScoredDocument(x, label=[0.5, 1.0]) for x in IDS], {}, "'label_2'"),
            (documents(), {}, "'label_0'"),
            (documents(label=CLASSES), {"temperature": 0.5}, "temperature"),
            (documents(), {"loss": reward_loss(PAIRS)}, "one score"),
            (IDS, {}, "ScoredDocument"),
        ):
            with pytest.raises((LossError, DataError), match=words):
                run_step(model, plan, given, world, **keywords)
        with pytest.raises(LossError, match="token_scores"):
            token_log_probs(model, plan, documents(), world)
        causal = prepare_untried(random_model(config_of("qwen3")), world)
        with pytest.raises(DataError, match="no head of scores"):
            run_step(causal, plan, documents(), world)
        with pytest.raises(ModelError, match="forward of its own"):
            prepare(OwnForward(config_of("qwen3")), world)
        dropping = transformers.Qwen3ForTokenClassification(config_of("qwen3"))  # 0.1 by default
        with pytest.raises(ModelError, match="classifier_dropout"):
            run_step(prepare_untried(dropping, world), plan, documents(label=CLASSES), world)


def test_refusals() -> None:
    run_ranks(check_refusals, 1)
    for keywords in (
        {"rows": [30]},
        {"rows": [1.5]},
        {"labels": [1]},
        {"label": 1, "labels": [1] * 13},
        {"pad": 1, "rows": [0]},
    ):
        with pytest.raises(DataError):
            ScoredDocument(IDS[0], **keywords)
