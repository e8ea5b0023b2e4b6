"""Who makes answers and rewards, what a vLLM gets, and what ends a run: GRPO and RLOO through `with_longspan`."""

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import trl
import trl.generation.vllm_generation as vllm
from trl import GRPOTrainer, RLOOConfig, RLOOTrainer

from longspan.errors import CommError
from longspan.hf.generation import FirstRank
from longspan.testing import run_ranks
from tests.hf.stock import VOCABULARY, Ran, Run, log_errors, ours, stock, tokenizer
from tests.hf.test_grpo import CP, EVALUATION, answers_to, grpo


class FakeEngine:
    """What vLLM does for TRL, in both modes: takes weights, and answers by a rule that differs by rank and weights."""

    def __init__(self, **_: Any) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.serves, self.asleep, self.prompts, self.syncs = False, False, 0, 0
        self.llm_engine = self.model_executor = self.driver_worker = self.model_runner = self.model = self

    # a server's client

    def init_communicator(self, device: Any) -> None:
        """Join the group of weights."""
        self.serves = True

    def get_server_info(self) -> dict[str, Any]:
        """Log-probabilities are those of the sampler."""
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, metadata: list[Any], named_params: Any) -> None:
        """Take weights, which were announced by name, type and shape."""
        for (name, kind, shape), (sent, weight) in zip(metadata, named_params, strict=True):
            assert (name, kind, shape) == (sent, str(weight.dtype).removeprefix("torch."), list(weight.shape))
            self.load_weights([(name, weight)])

    def reset_prefix_cache(self) -> None:
        """The weights are complete."""
        self.syncs += 1

    def generate(self, prompts: list[Any], sampling_params: Any = None, n: int = 1, **_: Any) -> Any:
        """Answers and their log-probabilities, as a client (`n` a prompt) or an engine (one) returns them."""
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
        """Take weights by name."""
        self.weights |= {name: weight.detach().clone() for name, weight in weights}

    def sleep(self, level: int) -> None:
        """Forget the weights."""
        self.asleep = True

    def wake_up(self, tags: list[str]) -> None:
        """Make room."""
        self.asleep = self.asleep and "weights" not in tags


def _ranked(answer: list[int], log_probs: list[list[float]]) -> list[dict[int, Any]]:
    return [{t: SimpleNamespace(logprob=lp[0], rank=1)} for t, lp in zip(answer, log_probs, strict=True)]


def with_vllm(run: Run, mode: str, steps: int = 3, **settings: Any) -> Any:
    """A run whose answers come from a vLLM; what it got last is kept."""
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


def compare_received(case: Any) -> tuple[Ran, Ran]:
    """Assert that a vLLM got from ours what it got from stock, and that both log the same."""
    expected, found = stock(case), ours(case, CP, 2)
    assert max(log_errors(expected.logs, found.logs).values()) < 1e-9
    received = found.kept["weights"]
    assert received.keys() == expected.kept["weights"].keys()
    for name, weight in expected.kept["weights"].items():
        assert weight.dtype == received[name].dtype
        assert np.linalg.norm(received[name] - weight) <= 1e-10 * np.linalg.norm(weight), name
    return expected, found


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.whole)])
def test_a_server_gets_whole_weights_and_answers_once(lora: bool) -> None:
    """GRPO with a vLLM server: weights by name, adapters merged; log-probabilities of the sampler correct the loss."""
    expected, found = compare_received(partial(with_vllm, mode="server", lora=lora))
    assert found.kept["asked"] == expected.kept["asked"]


@pytest.mark.parametrize("lora", [True, pytest.param(False, marks=pytest.mark.whole)])
def test_engines_of_all_ranks_share_the_prompts(lora: bool, saved: str) -> None:
    """RLOO with engines on the ranks, which sleep in between: each gets the weights, and makes half of the answers."""
    settings = EVALUATION | {"num_generations_eval": 1, "questions": 5, "vllm_enable_sleep_mode": lora}
    case = partial(with_vllm, mode="colocate", steps=2, lora=lora, config=RLOOConfig, path=saved, **settings)
    expected, found = compare_received(case)
    asked, syncs = expected.kept["asked"]  # 4, 4 and, in the evaluation, 4 and 1
    assert found.kept["asked"] == ((asked + 1) / 2, syncs)


def rolled_out(run: Run) -> Any:
    """GRPO with a rollout_func that counts its calls, reads some of the weights, and returns a field for rewards."""
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

    trainer = grpo(run, kind=GRPOTrainer, rollout_func=rollout, reward_funcs=rewards, gradient_accumulation_steps=2)
    run.kept["calls"] = calls
    if run.longspan:
        run.kept["of all"] = trainer.world.control.gather_objects(calls)
    return trainer


def test_a_rollout_runs_on_the_first_rank() -> None:
    """Its answers, masks and fields are those of all; it may read weights, which the other ranks gather with it."""
    expected, found = stock(rolled_out), ours(rolled_out, CP, 2)
    assert max(log_errors(expected.logs, found.logs).values()) < 1e-9
    assert found.kept["of all"] == [expected.kept["calls"], []]
    assert found.kept["first weights"][0] == ("model.embed_tokens.weight", (VOCABULARY, 32))


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
    """GRPO whose prompts and rewards come from environments with a tool."""
    reader = tokenizer()
    reader.chat_template = Path(trl.__file__).with_name("chat_templates").joinpath("qwen3.jinja").read_text()
    trainer = grpo(run, chat=True, environment_factory=Garden, reward_funcs=None, processing_class=reader)
    run.kept["resets"] = [garden.resets for garden in Garden.made]
    if run.longspan:
        run.kept["of all"] = trainer.world.control.gather_objects(run.kept["resets"])
    return trainer


@pytest.mark.whole
def test_environments_run_on_the_first_rank() -> None:
    """Those of the other ranks are made once, for the tools that they have, and not used."""
    expected, found = stock(in_a_garden), ours(in_a_garden, CP, 2)
    assert max(log_errors(expected.logs, found.logs).values()) < 1e-9
    assert found.kept["of all"] == [expected.kept["resets"], [0]]


def failing(rank: int, folder: str) -> list[str]:
    """The errors of runs that end early, as this rank sees them."""
    os.environ["CI"] = "1"

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

    errors = []
    run = Run(folder, 2, CP, rank)
    for changes in ({"kind": GRPOTrainer}, {"reward_funcs": calls_model, "kind": Noted}, {"reward_funcs": no_judge}):
        try:
            grpo(run, **changes)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def test_errors_reach_all_ranks(tmp_path: Any) -> None:
    """`generate` is refused; a model called inside a reward, and a reward that fails, end all ranks."""
    first, second = run_ranks(failing, 2, str(tmp_path))
    for refused, in_reward, _ in (first, second):
        assert refused.startswith("ConfigError: LongspanGRPOTrainer would make its answers by generate")
        assert "vllm_mode 'server' or 'colocate'" in refused
        assert "rollout_func" in refused
        assert in_reward.startswith("ModelError: the model is called inside a reward")
    assert first[2] == "ValueError: no judge is here"
    assert (
        second[2] == "CommError: the first rank, which makes rewards for all, failed with ValueError: no judge is here"
    )


def answers_stay(run: Run, what: str) -> Any:
    """A run in which answers (or rewards) of the first rank are not sent to all."""
    send = FirstRank.run
    FirstRank.run = lambda first, work, kind: work() if kind == what else send(first, work, kind)
    return grpo(run)


@pytest.mark.whole
def test_answers_must_be_sent() -> None:
    """Ranks with answers of their own are noticed before their first pass."""
    with pytest.raises(CommError, match="different batches of a Trainer"):
        ours(partial(answers_stay, what="answers"), CP, 2)


@pytest.mark.whole
def test_rewards_must_be_sent() -> None:
    """Ranks with rewards of their own log other figures."""
    with pytest.raises((CommError, AssertionError)):
        ours(partial(answers_stay, what="rewards"), CP, 2)
