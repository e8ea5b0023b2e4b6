"""GRPO and RLOO through `with_longspan`: stock's figures, who makes answers and rewards, what a vLLM gets, errors."""

import os
import random
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import trl
import trl.generation.vllm_generation as vllm
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForSequenceClassification
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from longspan.train import PlannerConfig
from tests.hf.stock import (
    CP2,
    Placed,
    Ran,
    Run,
    check_each,
    compare_each,
    log_errors,
    name_of,
    ours_each,
    stock_each,
    train_with_shared_prompts,
)
from tests.hf.tiny import SIZES, VOCABULARY, WORDS, model_of, tokenizer

EXACT: dict[str, Any] = {"loss": 1e-9, "metric": 1e-9}
# Stock pads prompts on the left, which shifts their positions, and rotary angles are in float32.
PADDED: dict[str, Any] = {"loss": 1e-5, "metric": 1e-5, "weights": 1e-4}
GENERATIONS: dict[str, Any] = {"num_generations": 2, "max_completion_length": 16}
DYNAMIC = {"context_parallel_size": 1, "planner": "dynamic", "max_tokens_per_slot": 64}


def prompts(count: int = 12, *, even: bool = True, chat: bool = False) -> Dataset:
    draw = np.random.default_rng(0)
    words = [" ".join(draw.choice(WORDS, 7 if even else draw.integers(2, 12))) for _ in range(count)]
    rows = [[{"role": "user", "content": text}] if chat else text for text in words]
    return Dataset.from_list([{"prompt": row, "number": i} for i, row in enumerate(rows)])


def answers_to(prompt_ids: list[list[int]], rank: int | None = None) -> list[list[int]]:
    draw = np.random.default_rng([int(os.environ.get("RANK", "0")) if rank is None else rank, *prompt_ids[0]])
    answers = [draw.integers(5, VOCABULARY, draw.integers(3, 12)).tolist() for _ in prompt_ids]
    return [answer + [1] * (i % 3 != 0) for i, answer in enumerate(answers)]


class RuledGRPO(GRPOTrainer):
    def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
        return answers_to(prompt_ids), None


class RuledRLOO(RLOOTrainer):
    def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
        return answers_to(prompt_ids)


def luck(completions: list[Any], log_metric: Any, log_extra: Any, **_: Any) -> list[float]:
    log_metric("luck_of_five", random.random())
    log_extra("words", [len(c) for c in completions])
    rank = int(os.environ.get("RANK", "0"))
    return [rank + float(torch.rand(())) + np.random.random() + len(c) / 10 for c in completions]


async def some(completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float | None]:
    return [len(set(ids)) / 10 if n % 2 == 0 else None for ids, n in zip(completion_ids, number, strict=True)]


def grpo(
    run: Run,
    rows: int = 4,
    steps: int = 2,
    config: Any = GRPOConfig,
    kind: Any = RuledGRPO,
    *,
    path: str = "",
    lora: bool = False,
    judge: bool = False,
    even: bool = True,
    chat: bool = False,
    questions: int = 6,
    parts: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    args = config(**run.arguments(rows=rows, steps=steps), **GENERATIONS | settings)
    keywords: dict[str, Any] = {
        "model": saved_model(path) if path else model_of(num_hidden_layers=1),
        "reward_funcs": [luck, some],
        "train_dataset": prompts(even=even, chat=chat),
        "eval_dataset": prompts(questions) if args.eval_strategy != "no" else None,
        "processing_class": tokenizer(),
        "peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]) if lora else None,
    }
    if judge:
        keywords |= {"reward_funcs": [luck, judging_model()], "reward_processing_classes": [None, tokenizer()]}
    trainer = run.trainer(kind, args=args, **keywords | (parts or {}))
    trainer.train()
    return trainer


def rloo(run: Run, **settings: Any) -> Any:
    return grpo(run, **{"config": RLOOConfig, "kind": RuledRLOO} | settings)


def saved_model(path: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.get_default_dtype())


def judging_model() -> Qwen3ForSequenceClassification:
    torch.manual_seed(3)
    return Qwen3ForSequenceClassification(Qwen3Config(**SIZES, num_labels=1)).to(torch.get_default_dtype())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("model"))
    model_of().save_pretrained(folder)
    return folder


TWICE = {"num_iterations": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 1, "steps": 4}
EVALUATION = {"eval_strategy": "steps", "eval_steps": 2}


def counted_plans(run: Run) -> None:
    """An update, and how many plans were made for it: a dynamic one may take a good part of a second."""
    made, plain = list[int](), PlannerConfig.plan

    def plan(choice: PlannerConfig, *values: Any, **keywords: Any) -> Any:
        made.append(len(values[0]))
        return plain(choice, *values, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlannerConfig, "plan", plan)
        grpo(run, steps=1).end()
    run.kept["plans"] = made.count(4)  # answers of an update


def referred(saved: str) -> Any:
    """grpo, old log-probabilities, clipping, the divergence from a reference, an evaluation; dynamic plans."""
    return partial(grpo, path=saved, loss_type="grpo", beta=0.1, num_iterations=2, questions=2, **EVALUATION)


def differing(saved: str) -> list[Placed]:
    return [partial(grpo, gradient_accumulation_steps=2), (referred(saved), DYNAMIC)]


def sharing(saved: str) -> list[Placed]:
    trainers = (partial(grpo, path=saved, beta=0.1, gradient_accumulation_steps=2), partial(rloo, path=saved))
    first, second = (partial(train_with_shared_prompts, train=train) for train in trainers)
    return [first, (second, DYNAMIC)]


def of_first_rank(saved: str) -> list[Placed]:
    return [rolled_out, served, partial(shared, path=saved)]


Both = tuple[dict[str, Ran], dict[str, Ran]]


@pytest.fixture(scope="module")
def ran(saved: str) -> Both:
    """Every case by stock and by ours, which start once each; those that replace vLLM are the last."""
    first, *others = (cases(saved) for cases in (differing, sharing, of_first_rank))
    cases = [*first, *chain(*others)]
    return stock_each(cases), ours_each([*first, (counted_plans, DYNAMIC), *chain(*others), failing], CP2, 2)


def both_of(cases: Sequence[Placed], ran: Both) -> Both:
    expected, found = ({name_of(case): runs[name_of(case)] for case in cases} for runs in ran)
    return expected, found


def test_answers_and_rewards_that_differ_by_rank_and_a_reference(saved: str, ran: Both) -> None:
    """dapo, answers of random length, rewards by chance, an asynchronous one that is None for odd prompts."""
    assert ran[1]["counted_plans"].kept["plans"] == 1, "the two passes of an update have one plan"
    check_each(*both_of(differing(saved), ran), **EXACT)


def test_answers_to_one_prompt_share_it(saved: str, ran: Both) -> None:
    expected, found = both_of(sharing(saved), ran)
    assert [run.kept["prefixes"] for run in found.values()] == [4, 2]
    # Norms of Qwen3 round to float32, once for a prompt and not once for each answer.
    check_each(expected, found, loss=1e-9, metric=1e-7, weights=1e-7)


TABLE: dict[str, dict[str, Any]] = {
    **{kind: TWICE | {"loss_type": kind} for kind in ("bnpo", "dr_grpo", "cispo", "sapo", "vespo", "grpo", "dapo")},
    "sequence": TWICE | {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "luspo": TWICE | {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "truncated": TWICE | {"mask_truncated_completions": True},
    "all truncated": {"mask_truncated_completions": True, "max_completion_length": 16},
    "entropy": TWICE | {"top_entropy_quantile": 0.5},
    "off policy": TWICE | {"off_policy_mask_threshold": 0.01},
    "temperature": TWICE | {"temperature": 0.7, "top_entropy_quantile": 0.6},
    "two-sided": TWICE | {"delta": 1.5, "epsilon_high": 0.3},
    "lora": TWICE | {"lora": True},
    "lora with beta": TWICE | {"lora": True, "beta": 0.1},
    "generation batch": {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "steps": 4},
    "rewards by batch": {"scale_rewards": "batch", "multi_objective_aggregation": "normalize_then_sum"},
    "reference follows": TWICE | {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1},
    "judge": {"judge": True},
    "chat": {"chat": True},
    "uneven": TWICE | {"even": False},
    "padded": {"even": False, "pad_to_multiple_of": 8},
}
LEFT_PADDED = ("uneven", "padded")


OF_RLOO = ("lora", "generation batch", "judge", "chat", "uneven")


@pytest.mark.whole
@pytest.mark.parametrize(("kind", "name"), [*((grpo, name) for name in TABLE), *((rloo, name) for name in OF_RLOO)])
def test_the_whole_table(saved: str, kind: Any, name: str) -> None:
    compare_each([partial(kind, path=saved, **TABLE[name])], CP2, **PADDED if name in LEFT_PADDED else EXACT)


class FakeEngine:
    def __init__(self, **_: Any) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.serves, self.asleep, self.prompts, self.syncs = False, False, 0, 0
        self.llm_engine = self.model_executor = self.driver_worker = self.model_runner = self.model = self

    # a server's client

    def init_communicator(self, device: Any) -> None:
        self.serves = True

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, metadata: list[Any], named_params: Any) -> None:
        for (name, kind, shape), (sent, weight) in zip(metadata, named_params, strict=True):
            assert (name, kind, shape) == (sent, str(weight.dtype).removeprefix("torch."), list(weight.shape))
            self.load_weights([(name, weight)])

    def reset_prefix_cache(self) -> None:
        self.syncs += 1

    def generate(self, prompts: list[Any], sampling_params: Any = None, n: int = 1, **_: Any) -> Any:
        assert self.weights and not self.asleep
        self.prompts += len(prompts)
        ids = [p if isinstance(p, list) else p["prompt_token_ids"] for p in prompts]
        answers = [a for i, p in enumerate(ids) for a in self._answers(p, n if n > 1 else 1 + ids[:i].count(p))[-n:]]
        log_probs = [[[-2.0 - 0.01 * token] for token in answer] for answer in answers]
        if sampling_params is None:
            return {"prompt_ids": ids, "completion_ids": answers, "logprobs": log_probs}
        return [
            SimpleNamespace(prompt_token_ids=p, outputs=[SimpleNamespace(token_ids=a, logprobs=_ranked(a, lp))])
            for p, a, lp in zip(ids, answers, log_probs, strict=True)
        ]

    def _answers(self, prompt: list[int], count: int) -> list[list[int]]:
        return answers_to([[self.syncs, *prompt]] * count, None if self.serves else 0)

    # an engine

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.weights |= {name: weight.detach().clone() for name, weight in weights}

    def sleep(self, level: int) -> None:
        self.asleep = True

    def wake_up(self, tags: list[str]) -> None:
        self.asleep = self.asleep and "weights" not in tags


def _ranked(answer: list[int], log_probs: list[list[float]]) -> list[dict[int, Any]]:
    return [{t: SimpleNamespace(logprob=lp[0], rank=1)} for t, lp in zip(answer, log_probs, strict=True)]


def with_vllm(run: Run, mode: str, steps: int = 2, **settings: Any) -> Any:
    vllm.is_vllm_available = lambda *_, **__: True
    vllm.VLLMClient = vllm.LLM = FakeEngine
    vllm.SamplingParams = SimpleNamespace
    kind = RLOOTrainer if settings.get("config") is RLOOConfig else GRPOTrainer
    trainer = grpo(run, kind=kind, steps=steps, use_vllm=True, vllm_mode=mode, **settings)
    if run.rank == 0:
        engine = getattr(trainer.vllm_generation, "vllm_client" if mode == "server" else "llm")
        run.kept["weights"] = {name: weight.numpy() for name, weight in engine.weights.items()}
        run.kept["asked"] = engine.prompts, engine.syncs
    return trainer


def check_received(expected: Ran, found: Ran) -> None:
    received = found.kept["weights"]
    assert received.keys() == expected.kept["weights"].keys()
    for name, weight in expected.kept["weights"].items():
        assert weight.dtype == received[name].dtype
        assert np.linalg.norm(received[name] - weight) <= 1e-10 * np.linalg.norm(weight), name


def served(run: Run) -> Any:
    """GRPO with a vLLM server: weights by name; log-probabilities of the sampler correct the loss."""
    return with_vllm(run, "server")


def shared(run: Run, path: str) -> Any:
    """RLOO of an adapter with engines on the ranks, which sleep in between: each gets the merged weights, and makes
    half of the answers."""
    settings = EVALUATION | {"num_generations_eval": 1, "questions": 5, "vllm_enable_sleep_mode": True}
    return with_vllm(run, "colocate", lora=True, config=RLOOConfig, path=path, **settings)


def rolled_out(run: Run) -> Any:
    calls: list[int] = []

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        calls.append(len(prompts))
        ids = trainer.processing_class(prompts)["input_ids"]
        if run.longspan:
            name, weight = next(iter(trainer.weights_by_name()))
            run.kept.setdefault("first weights", []).append((name, weight.shape))
        answers = answers_to(ids)
        mask = [[i % 3 != 1 for i in range(len(answer))] for answer in answers]
        chance = [[-float(torch.rand(())) for _ in answer] for answer in answers]
        return {
            "prompt_ids": ids,
            "completion_ids": answers,
            "logprobs": chance,
            "env_mask": mask,
            "turns": [2] * len(ids),
        }

    def rewards(completion_ids: list[list[int]], turns: list[int], **_: Any) -> list[float]:
        calls.append(-len(turns))
        return [len(set(ids)) * float(turn) for ids, turn in zip(completion_ids, turns, strict=True)]

    parts = {"rollout_func": rollout, "reward_funcs": rewards}
    trainer = grpo(run, kind=GRPOTrainer, parts=parts, gradient_accumulation_steps=2)
    run.kept["calls"] = calls
    return trainer


class Garden:
    """An environment whose observations and rewards depend on the rank, and on how often it was used."""

    made: ClassVar[list["Garden"]] = []

    def __init__(self) -> None:
        self.resets = 0
        self.made.append(self)

    def reset(self, **_: Any) -> str:
        """Begin anew."""
        self.resets += 1
        return f" w{int(os.environ.get('RANK', '0')) + self.resets}"

    def water(self, times: int) -> str:
        """Water it.

        Args:
            times: how often
        """
        return str(times)

    def get_reward(self) -> float:
        """A reward."""
        return self.resets + len(self.made) / 3


def in_a_garden(run: Run) -> Any:
    reader = tokenizer()
    reader.chat_template = Path(trl.__file__).with_name("chat_templates").joinpath("qwen3.jinja").read_text()
    parts = {"environment_factory": Garden, "reward_funcs": None, "processing_class": reader}
    trainer = grpo(run, chat=True, parts=parts)
    run.kept["resets"] = [garden.resets for garden in Garden.made]
    return trainer


def failing(run: Run) -> None:
    """Of runs that end early, the errors as each rank sees them: `generate` is refused; a model that is called inside a
    reward, and a reward that fails, end all ranks.
    """

    def no_judge(**_: Any) -> list[float]:
        raise ValueError("no judge is here")

    def calls_model(trainer_state: Any, **_: Any) -> list[float]:
        ids = torch.ones(1, 4, dtype=torch.int64)
        open_trainer[0].model(input_ids=ids, labels=ids)
        return []

    open_trainer: list[Any] = []

    class Noted(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            open_trainer.append(self)
            return answers_to(prompt_ids), None

    errors = run.kept["errors"] = list[str]()
    for kind, reward in ((GRPOTrainer, luck), (Noted, calls_model), (RuledGRPO, no_judge)):
        try:
            grpo(run, kind=kind, parts={"reward_funcs": reward})
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")


def test_answers_and_rewards_of_the_first_rank_are_those_of_all(saved: str, ran: Both) -> None:
    cases = of_first_rank(saved)
    expected, found = both_of(cases, ran)
    errors = ran[1]["failing"].kept
    for name, run in found.items():
        assert max(log_errors(expected[name].logs, run.logs).values()) < 1e-9, name
    rollout = found["rolled_out"].kept
    assert [rollout["calls"], rollout["others"][0]["calls"]] == [expected["rolled_out"].kept["calls"], []]
    assert rollout["first weights"][0] == ("model.embed_tokens.weight", (VOCABULARY, 32))
    check_received(expected["served"], found["served"])
    assert found["served"].kept["asked"] == expected["served"].kept["asked"]
    of_stock, engine = (of[name_of(cases[2])] for of in (expected, found))
    check_received(of_stock, engine)
    asked, syncs = of_stock.kept["asked"]  # 4, 4 and, in the evaluation, 4 and 1
    assert engine.kept["asked"] == ((asked + 1) / 2, syncs)
    for refused, in_reward, _ in (first := errors["errors"], second := errors["others"][0]["errors"]):
        assert refused.startswith("ConfigError: LongspanGRPOTrainer would make its answers by generate")
        assert "vllm_mode 'server' or 'colocate'" in refused and "rollout_func" in refused
        assert in_reward.startswith("ModelError: the model is called inside a reward")
    assert first[2] == "ValueError: no judge is here"
    failed = "CommError: the first rank, which makes rewards for all, failed with ValueError: no judge is here"
    assert second[2] == failed


@pytest.mark.whole
def test_environments_of_other_ranks_are_made_once_for_their_tools_and_not_used() -> None:
    expected, found = (run([in_a_garden])["in_a_garden"] for run in (stock_each, lambda c: ours_each(c, CP2, 2)))
    assert max(log_errors(expected.logs, found.logs).values()) < 1e-9
    assert [found.kept["resets"], found.kept["others"][0]["resets"]] == [expected.kept["resets"], [0]]
