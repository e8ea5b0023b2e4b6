"""Steps over documents that begin alike: their prefix computed once, and the same documents as separate ones.

    python bench/training/families.py --families 8x32768+1024 --loss policy --model.preset qwen3-4b --out grpo.json

`8x32768+1024` are eight documents of a prompt of 32,768 tokens and 1,024 tokens to predict. Other flags are those of
`longspan bench step`; --context.max_tokens_per_slot is raised to hold the family. Each way has a plan of memory of its
own. `--separate 2` times two of the separate documents, where all take too long; seconds are then in proportion, and
the family's loss of these two stands beside theirs. Tokens per second and FLOPs are those of separate documents, except
`executed_tflops_per_device`. Learning rate 0.
"""

import argparse
import gc
import sys
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from longspan import Document, DocumentLoss, share_prefixes, token_log_probs
from longspan.bench.step import Cases, StepSettings, main, make_training, measure_steps
from longspan.comm import World
from longspan.plain_text import bytes_text
from longspan.plan.shape.model_shape import ModelShape, model_flops
from longspan.train import SharedDocuments, run_step

EXPECTED = -12.0  # about the log-probability of a token under random weights


@dataclass(frozen=True)
class Families:
    """So many documents of one prompt, the tokens of both parts, the loss, and how many are timed as separate ones."""

    count: int
    prompt: int
    answer: int
    loss: str
    separate: int

    @property
    def rows(self) -> int:
        return self.prompt - 1 + self.count * (self.answer + 1)

    def make_documents(self, vocabulary: int, count: int) -> list[Document]:
        draw = np.random.default_rng(0)
        prompt = draw.integers(0, vocabulary, self.prompt)
        answers = draw.integers(0, vocabulary, (self.count, self.answer))[:count]
        labels = np.full(self.prompt, -100)
        return [
            Document(
                np.append(prompt, answer),
                labels=np.append(labels, answer),
                weights=1 / self.answer,
                advantage=(-1.0) ** number,
            )
            for number, answer in enumerate(answers)
        ]

    def loss_options(self, documents: int) -> dict[str, Any]:
        """The arguments of `run_step` by which the documents are trained on."""
        if self.loss == "pairs":
            return {"loss": DocumentLoss(dpo, [(i, i + 1) for i in range(0, documents, 2)])}
        if self.loss == "policy":
            return {"loss": policy, "divisor": float(documents)}
        return {"divisor": float(documents)}


def dpo(sums: Tensor, documents: tuple[int, ...]) -> Tensor:
    """Of a preferred document and another one, as if a reference model gave both the same probability."""
    return -F.logsigmoid(0.1 * (sums[0] - sums[1]))


def policy(log_probs: Tensor, at: Any) -> Tensor:
    """GRPO's clipped ratio, averaged over the tokens of a document."""
    ratio = (log_probs - EXPECTED).exp()
    advantage = at["advantage"]
    return -at["weights"] * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


def family_cases(families: Families, settings: StepSettings, world: World) -> Cases:
    vocabulary = settings.configuration.get_text_config().vocab_size
    separate = families.make_documents(vocabulary, families.separate)
    shared = share_prefixes(families.make_documents(vocabulary, families.count), least_rows=1)
    row = dict[str, Any]()
    yield "families", partial(_measure, settings, world, families, shared, row)
    yield "separate", partial(_measure, settings, world, families, separate, row)


def _measure(settings: StepSettings, world: World, *arguments: Any) -> dict[str, Any]:
    """A way's model is gone before the next one is made."""
    row = _measure_way(settings, world, *arguments)
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    return row


def _measure_way(
    settings: StepSettings, world: World, families: Families, documents: Any, family_row: dict[str, Any]
) -> dict[str, Any]:
    is_shared = isinstance(documents, SharedDocuments)
    count = families.count if is_shared else len(documents)
    planner = settings.config.context.planner or ("fixed" if settings.ranks == 1 else "dynamic")
    settings = replace(settings, planners=(planner,), lengths=(families.prompt + families.answer,) * count)
    # layers keep the rows of a family as they keep those of one document
    planned = replace(settings, lengths=(families.rows,)) if is_shared else settings
    training = make_training(planned, world)
    lengths = documents.lengths if is_shared else settings.lengths
    parents = documents.parents if is_shared else None
    targets = count * families.answer
    plan = training.training_choice.plan(lengths, settings.home, targets=targets, parents=parents)
    losses = list[float]()

    def take_step() -> None:
        options = families.loss_options(count)
        result = run_step(
            training.model,
            plan,
            documents,
            world,
            training.optimizer,
            max_grad_norm=1.0,
            time_slots=training.time_slots,
            **options,
        )
        losses.append(result.loss)

    for group in training.optimizer.param_groups:
        group["lr"] = 0.0
    world.prepare(plan)
    row = measure_steps(settings, take_step, world)
    training.finish_update()
    flops = model_flops(
        ModelShape.of(settings.configuration), plan.lengths, trains_all=not settings.config.lora.rank, bases=plan.bases
    )
    row |= {
        "loss": losses[0],
        "rows": plan.tokens,
        "predicted_seconds": plan.predicted_seconds,
        "prediction_ratio": plan.predicted_seconds / row["seconds"],
        "executed_tflops_per_device": flops / row["seconds"] / settings.ranks / 1e12,
        "packing": plan.efficiency,
        "micro_batches": len(plan.micro_batches),
        "widest": max(group.degree for group in plan.groups),
        "cost": plan.cost.to_json(),
    }
    if training.memory is not None:
        memory = training.memory.to_json()
        row |= {"checkpoint_policies": memory["checkpoint_policies"], "planned_bytes": memory["device"]["total"]}
    if is_shared:
        if families.separate < families.count:
            sums = token_log_probs(training.model, plan, documents, world).sums[: families.separate]
            row["loss_of_timed"] = -float(sum(sums)) / families.separate
        family_row |= row
    else:
        row["seconds_of_all"] = row["seconds"] * families.count / count
        row["times"] = row["seconds_of_all"] / family_row["seconds"]
        row["loss_difference"] = row["loss"] - family_row.get("loss_of_timed", family_row["loss"])
    row["name"] = _row_name(families, count, row)
    return row


def _row_name(families: Families, count: int, row: dict[str, Any]) -> str:
    planned = f"; {bytes_text(row['planned_bytes'])} planned" if "planned_bytes" in row else ""
    where = f"{row['rows']:,} rows in {row['micro_batches']} micro-batches, widest cp {row['widest']}{planned}"
    if "times" not in row:
        return f"families: {where}"
    seconds = f"{row['seconds_of_all']:.3f} s for all {families.count}, " if count < families.count else ""
    return f"separate: {count} documents, {where}; {seconds}{row['times']:.2f} times the families' seconds"


def read_arguments(argv: list[str]) -> tuple[Families, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--families", required=True, help="documents x prompt + tokens to predict: 8x32768+1024")
    parser.add_argument("--loss", default="", choices=("", "policy", "pairs"), help="default: cross entropy")
    parser.add_argument("--separate", type=int, default=0, help="separate documents that are timed; 0: all")
    flags, others = parser.parse_known_args(argv)
    count, _, lengths = flags.families.partition("x")
    prompt, _, answer = lengths.partition("+")
    families = Families(int(count), int(prompt), int(answer), flags.loss, flags.separate or int(count))
    cap = "--context.max_tokens_per_slot"
    rows = [families.rows, *(int(after) for word, after in pairwise(others) if word == cap)]
    same = ["--planners", "none", "--same", f"{families.separate}x{families.prompt + families.answer}"]
    return families, [*others, *same, cap, str(max(rows))]


if __name__ == "__main__":
    families, step_flags = read_arguments(sys.argv[1:])
    sys.exit(main(step_flags, peers=partial(family_cases, families)))
