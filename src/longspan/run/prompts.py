"""The prompts of `evaluation.prompts`: read before the first step, and completed after steps at which they are due."""

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from longspan.comm.all_ranks import run_on_every_rank, run_on_first_rank
from longspan.comm.received_signals import StopSignal
from longspan.corpus.prompts import Prompt, encode_prompts, read_prompt_rows
from longspan.corpus.tokenizer import TextTokenizer, load_tokenizer
from longspan.errors import DataError, ModelError, RunFolderError
from longspan.evaluation.completions import CompletionSettings, complete_prompts
from longspan.model.stock_copy import StockCopy
from longspan.plan.shape.positions import position_limit
from longspan.run.progress import ProgressDisplay
from longspan.run.records import Records
from longspan.run.run_data import TrainingRun

_SHOWN = 240  # characters of a completion in lines of the log


def read_prompts_of_run(run: TrainingRun) -> Sequence[Prompt]:
    """Read the prompts of `evaluation.prompts` on the first rank, as tokens of the run's tokenizer, and return them on
    every rank; all ranks call it, before the first step. Raises DataError for prompts that cannot be read, ModelError
    for a model of which there is no stock copy.
    """
    # For its check alone: it refuses a model that has no stock copy before the first step, and gathers no weights.
    # Completions make a copy of their own, of the weights as they are then.
    StockCopy(run.model, run.world)
    file = Path(run.config.evaluation.prompts)

    def read_prompts() -> list[Prompt]:
        return encode_prompts(read_prompt_rows(file), load_tokenizer(run.dir), position_limit(run.model.config))

    return run_on_first_rank(run.world, read_prompts, DataError)


@dataclass(frozen=True)
class PromptCompletions:
    """Completes the prompts of a run, none or more, and records what the model writes; all ranks call it together."""

    run: TrainingRun
    display: ProgressDisplay
    records: Records
    stop: StopSignal
    prompts: Sequence[Prompt] = ()

    @cached_property
    def _tokenizer(self) -> TextTokenizer:
        return load_tokenizer(self.run.dir)

    def record_completions(self, done: int) -> None:
        """Complete the prompts with the weights after `done` steps, and write and log what the model wrote, unless
        there are no prompts or that is recorded already. Nothing is recorded after a signal, or where the first rank
        has no room for the model, which is logged.
        """
        run = self.run
        completions = self.records.completions
        if not self.prompts or run.world.control.broadcast_object(done in completions.steps):
            return
        self.display.begin_work("completions of prompts")
        run.finish_update()
        settings = CompletionSettings(
            self._tokenizer,
            run.dir,
            run.config.evaluation.max_new_tokens,
            seed=run.config.train.seed,
            stopped=lambda: self.stop.received,
        )
        try:
            written = complete_prompts(run.model, self.prompts, run.world, settings)
        except ModelError as error:  # there is no room; every rank has it
            self.display.log(f"prompts are not completed: {error}")
            return
        rows = [row._asdict() for row in written.rows]
        if len(rows) < len(self.prompts):  # a signal came: it is made up for when the run goes on
            return
        run_on_every_rank(run.world, partial(completions.write_rows, done, rows), RunFolderError)
        for row in written.rows:
            rest = " …" if len(row.completion) > _SHOWN else ""
            self.display.log(f"  {reprlib.repr(row.prompt)} -> {row.completion[:_SHOWN]!r}{rest}")
        self.display.log(f"after step {done}: {written.cost}")
