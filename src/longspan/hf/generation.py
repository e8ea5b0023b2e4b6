"""GRPO and RLOO: answers and rewards come from the first rank, and inference engines get whole weights by name.

Rewards, rollouts, tools and environments run there only. The other ranks get their results, what they logged, and the
random states after them, so that all ranks go on alike.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import set_seed

import longspan
from longspan.comm.all_ranks import is_first_rank
from longspan.comm.first_rank import FirstRank
from longspan.data.document import Document
from longspan.errors import ConfigError, ModelError
from longspan.hf.one_process import StockTrainer

ANSWERS = ("_generate_single_turn", "_generate", "_generate_and_score_completions")
# Functions of the first rank log these.
LOGGED = ("_metrics", "_pending_extra_logs", "_pending_metrics")


def refuse_generation(kind: type[Any], args: Any, *, rollout: bool) -> None:
    """Raise ConfigError for a way to make answers that longspan does not run, if trainers of this class make any.

    `rollout`: whether `rollout_func=` is given.
    """
    if not hasattr(kind, ANSWERS[0]):
        return
    if getattr(args, "use_adaptive_entropy", False):
        raise ConfigError(
            "args.use_adaptive_entropy is True: longspan does not compute the gradient of the entropy; leave it out"
        )
    owners = (base.__module__ for base in kind.__mro__ if any(name in vars(base) for name in ANSWERS))
    has_own_answers = any(not module.startswith(("trl.", "longspan.hf.generation")) for module in owners)
    if getattr(args, "use_transformers_continuous_batching", False) or not (
        args.use_vllm or rollout or has_own_answers
    ):
        raise ConfigError(
            f"{kind.__name__} would make its answers by generate of the model, which longspan shards: a forward pass "
            "there needs a plan. Use use_vllm=True (vllm_mode 'server' or 'colocate'), rollout_func= of GRPO, or a "
            "subclass that overrides _generate_single_turn"
        )
    size = getattr(args, "vllm_tensor_parallel_size", 1)
    if rollout and args.use_vllm and args.vllm_mode == "colocate" and size > 1:
        raise ConfigError(
            f"vllm_tensor_parallel_size is {size} with rollout_func= and vllm_mode 'colocate': longspan calls the "
            f"rollout on the first rank only, whose engine would wait for {size - 1} more; use 1, or a server"
        )


class GenerationPart(StockTrainer):
    """What a Trainer does to get answers and rewards."""

    @cached_property
    def _first_rank(self) -> FirstRank:
        calls: dict[str, Callable[..., Any]] = {
            # iterated to the end, as all ranks gather each weight
            "weights": lambda merge_adapter: deque(self.weights_by_name(merge_adapter=merge_adapter), maxlen=0),
            "vllm": lambda method, *arguments: getattr(self.vllm_generation, method)(*arguments),
        }
        return FirstRank(self.world, calls)

    def weights_by_name(self, *, merge_adapter: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights by the names of transformers, one at a time, for an inference engine of your own.

        >>> engine.load_weights(trainer.weights_by_name())

        All ranks iterate; inside rollout_func, a reward or `_generate_single_turn`, which run on the first rank, the
        first does and the others follow. Adapters are merged, unless `merge_adapter` is False.
        """
        with self._first_rank.call_on_others("weights", merge_adapter):
            weights = iter(longspan.weights_by_name(self.model, self.world, merge_adapter=merge_adapter))
            try:
                for name_and_weight in weights:  # noqa: UP028 (a consumer that stops early must not close it)
                    yield name_and_weight
            finally:
                deque(weights, maxlen=0)  # the other ranks gather to the end

    def _generate(self, *args: Any, **keywords: Any) -> Any:
        return self._result_of_first_rank(
            lambda: super(GenerationPart, self)._generate(*args, **keywords), "answers"
        )

    def _calculate_rewards(self, *args: Any, **keywords: Any) -> Tensor:
        rewards = super()._calculate_rewards
        return self._result_of_first_rank(lambda: rewards(*args, **keywords), "rewards").to(self.accelerator.device)

    def _result_of_first_rank(self, work: Callable[[], Any], work_name: str) -> Any:
        """The other ranks also take over what the work logged, and the random states of the host after it."""

        def work_and_note_state() -> Any:
            """Return what the work gave, on the host; what it logged; the number of tokens that were read; and the
            states of the host's random generators after it.
            """
            result = tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, work())
            logged = {name: getattr(self, name) for name in LOGGED if hasattr(self, name)}
            random_states = random.getstate(), np.random.get_state(), torch.get_rng_state()
            return result, logged, self.state.num_input_tokens_seen, random_states

        result, logged, tokens_seen, (python_state, numpy_state, torch_state) = self._first_rank.run_on_first(
            work_and_note_state, work_name
        )
        if not is_first_rank(self.world):
            self.__dict__.update(logged)
            self.state.num_input_tokens_seen = tokens_seen
            random.setstate(python_state)
            np.random.set_state(numpy_state)
            torch.set_rng_state(torch_state)
        return result

    def _token_values(self, facade: Any, documents: list[Document]) -> Any:
        if self._first_rank.is_working:
            raise ModelError(
                "the model is called inside a reward, a rollout or _generate_single_turn, which longspan runs on the "
                "first rank only, and a forward pass needs all ranks; give rewards a model of their own, or score the "
                "answers in compute_loss"
            )
        return super()._token_values(facade, documents)

    @contextmanager
    def _replace_generation(self) -> Iterator[None]:
        """At the end all ranks take the seed of the arguments, and ranks other than the first move reward models to the
        host and drop environments, as they call none."""
        if not hasattr(self, ANSWERS[0]):  # a trainer that makes no answers
            yield
            return
        from longspan.hf.vllm import replace_vllm

        with replace_vllm(self):
            yield
        set_seed(self.args.seed)  # TRL seeds each rank apart, and shuffles with it
        if is_first_rank(self.world):
            return
        # This rank calls none of them.
        for reward in self.reward_funcs:
            if isinstance(reward, nn.Module):
                reward.to("cpu")
        if getattr(self, "environment_factories", None) is not None:
            self.environment_factories: dict[Any, Any] = dict.fromkeys(self.environment_factories, NoEnvironment)
            self._environment_pool = {name: [] for name in self.environment_factories}


class NoEnvironment:
    """The environment of a rank whose answers come from the first."""

    def reset(self, **_: Any) -> None: ...
