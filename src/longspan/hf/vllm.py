"""TRL's vLLM under longspan: whole weights by name go to it, and on every GPU it makes a share of the answers.

A server is talked to by the first rank. Engines in the ranks' own processes ("colocate") share the prompts.
"""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from trl.generation.vllm_generation import VLLMGeneration

from longspan.comm.all_ranks import result_or_first_error
from longspan.comm.watch import error_in_one_line
from longspan.errors import CommError


class LongspanVLLM(VLLMGeneration):
    """vLLM as a trainer of TRL calls it, over the weights of a prepared model. `_trainer` is the longspan trainer."""

    def __init__(self, _trainer: Any, *args: Any, **keywords: Any) -> None:
        """Make TRL's vLLM with an engine's share of the batch, which counts ranks as processes."""
        arguments = inspect.signature(super().__init__).bind(*args, **keywords).arguments
        self._trainer = _trainer
        self._world = _trainer.world
        arguments["accelerator"] = RankAccelerator(arguments["accelerator"], self._world)
        # The number is that of the batch of all ranks; an engine has a rank's share.
        if arguments.get("max_num_seqs"):
            arguments["max_num_seqs"] = -(-arguments["max_num_seqs"] // len(self._world.home.ranks))
        super().__init__(**arguments)

    def _iter_named_params(self) -> Any:
        return self._trainer.weights_by_name()

    def sync_weights(self) -> None:
        """Send whole weights to the engines, of which each rank has one, or to the server that the first rank talks to.

        With engines in the ranks' own processes the first rank calls it, which has the others call it too.
        """
        with (
            nullcontext()
            if self.mode == "server"
            else self._trainer._first_rank.call_on_others("vllm", "sync_weights")
        ):
            super().sync_weights()

    def generate(self, prompts: list[Any], images: Any, num_generations: int, profiler: Any = None) -> Any:
        """Return answers to all prompts: the first rank asks a server; without one each rank's engine makes a share.

        Engines get no `images`: models that read them are refused. `profiler` is TRL's context that takes the time.
        """
        first_rank = self._trainer._first_rank
        generate_stock = super().generate
        if self.mode == "server":
            return first_rank.run_on_first(
                lambda: generate_stock(prompts, images, num_generations, profiler), "answers"
            )
        arguments = prompts, num_generations, self._llm_weights_sleeping
        with profiler or nullcontext(), first_rank.call_on_others("vllm", "generate_in_shares", *arguments):
            return self.generate_in_shares(*arguments)

    def generate_in_shares(self, prompts: list[Any], num_generations: int, asleep: bool) -> Any:
        """Return all answers, of which each rank's engine makes an equal share; entered by all ranks.

        The last prompt is repeated until shares are equal. Engines whose weights are `asleep` get them first.
        """
        if asleep:
            self.sync_weights()
        ranks = len(self._world.home.ranks)
        # equal, as engines that share a model slice their common answers by it
        share_size = -(-len(prompts) // ranks)
        padded = [*prompts, *prompts[-1:] * (share_size * ranks - len(prompts))]
        prompts_here = padded[self._world.rank * share_size :][:share_size]
        generate_stock = super().generate
        answers = result_or_first_error(
            self._world,
            lambda: generate_stock(prompts_here, None, num_generations),
            lambda error: CommError(f"vLLM failed to make answers: {error_in_one_line(error)}"),
        )
        # vLLM gives several lists, such as ids and log-probabilities, with an entry for each answer, or None for one.
        # The shares are joined, list by list, without the answers to the repeated prompt.
        fields_of_ranks = zip(*self._world.control.gather_objects(answers, "answers of vLLM"), strict=True)
        return tuple(
            None
            if field_of_ranks[0] is None
            else [answer for share in field_of_ranks for answer in share][: len(prompts)]
            for field_of_ranks in fields_of_ranks
        )


class RankAccelerator:
    """An accelerator that counts ranks as processes, for vLLM: the engine of each rank is one of several."""

    def __init__(self, accelerator: Any, world: Any) -> None:
        self._accelerator = accelerator
        self.num_processes: int = len(world.home.ranks)
        self.process_index: int = world.rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


@contextmanager
def replace_vllm(trainer: Any) -> Iterator[None]:
    """Return a context in which the modules of a trainer's classes make longspan's vLLM in place of TRL's."""
    modules_of_bases = [
        sys.modules[name] for name in dict.fromkeys(kind.__module__ for kind in type(trainer).__mro__)
    ]
    modules = [module for module in modules_of_bases if vars(module).get("VLLMGeneration") is VLLMGeneration]

    for module in modules:
        vars(module)["VLLMGeneration"] = partial(LongspanVLLM, trainer)
    try:
        yield
    finally:
        for module in modules:
            vars(module)["VLLMGeneration"] = VLLMGeneration
