"""TRL's GKDTrainer of answers that are there, on ranks that share documents: losses and weights are stock's."""

from typing import Any

import pytest
from trl.experimental.distillation import DistillationConfig, DistillationTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.gold import GOLDConfig, GOLDTrainer

from longspan.errors import ConfigError
from tests.hf.stock import CP2, Run, check_each, ours_each, stock_each
from tests.hf.tiny import conversations, model_of, tokenizer
from tests.train.own_loss.test_families import casts_in_float64

DYNAMIC = {"planner": "dynamic", "max_tokens_per_slot": "64"}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}


def gkd(run: Run, kind: type[Any] = GKDTrainer, **changes: Any) -> Any:
    rows = conversations(12)
    trainer = run.trainer(
        kind,
        model=model_of(),
        teacher_model=model_of(seed=1),
        args=GKDConfig(**run.arguments(**{"lmbda": 0.0, "max_length": 128} | changes)),
        train_dataset=rows,
        eval_dataset=rows.select(range(6)) if "eval_strategy" in changes else None,
        processing_class=tokenizer(),
    )
    trainer.train()
    return trainer


def exactly(run: Run, **changes: Any) -> Any:
    """Stock's rows are padded on the left, so that tables of rotary positions in float32 differ."""
    model_of()
    with casts_in_float64():
        return gkd(run, **changes)


def evaluated(run: Run) -> Any:
    return exactly(run, **EVALUATED)


def accumulated(run: Run) -> Any:
    return exactly(run, beta=1.0, rows=2, gradient_accumulation_steps=2)


def forward_at_a_temperature(run: Run) -> Any:
    """The temperature is of sampling, and stock's loss has none."""
    return exactly(run, beta=0.0, temperature=0.3)


def refused(run: Run) -> None:
    class OwnLoss(GKDTrainer):
        def compute_loss(self, *args: Any, **keywords: Any) -> Any:
            return 2 * super().compute_loss(*args, **keywords)

    def make(kind: type[Any], config: type[Any], **changes: Any) -> None:
        rows, teacher = conversations(4), {"teacher_model": model_of(seed=1)}
        arguments = config(**run.arguments(**changes))
        run.trainer(kind, model=model_of(), args=arguments, train_dataset=rows, processing_class=tokenizer(), **teacher)

    cases: dict[str, Any] = {
        "lmbda": lambda: make(GKDTrainer, GKDConfig),
        "seq_kd": lambda: make(GKDTrainer, GKDConfig, lmbda=0.0, seq_kd=True),
        "own": lambda: make(OwnLoss, GKDConfig, lmbda=0.0),
        "distillation": lambda: make(DistillationTrainer, DistillationConfig),
        "gold": lambda: make(GOLDTrainer, GOLDConfig),
    }
    for name, case in cases.items():
        with pytest.raises(ConfigError) as error:
            case()
        run.kept[name] = str(error.value)


def test_losses_and_weights_are_stocks() -> None:
    cases = [evaluated, accumulated, forward_at_a_temperature]
    stock = stock_each(cases)
    check_each(stock, ours_each([evaluated, (accumulated, DYNAMIC), (forward_at_a_temperature, DYNAMIC)], CP2, 2))


def test_what_is_refused() -> None:
    kept = ours_each([refused], CP2, 1)["refused"].kept
    wanted = {
        "lmbda": "args.lmbda is 0.5: GKDTrainer would make answers by generate",
        "seq_kd": "args.seq_kd is True",
        "own": "OwnLoss has a compute_loss of its own",
        "distillation": "DistillationTrainer is not run by a longspan trainer",
        "gold": "GOLDTrainer is not run by a longspan trainer",
    }
    assert not [kept[name] for name, text in wanted.items() if text not in kept[name]]
