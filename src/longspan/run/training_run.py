"""A run as one rank has it, once it is set up."""

from dataclasses import dataclass
from pathlib import Path

from longspan.data.documents import Corpus, CorpusDocuments
from longspan.data.step_order import PackOrder, StepOrder
from longspan.evaluation.sets import EvaluationSet
from longspan.train.training import Training


@dataclass(frozen=True)
class TrainingRun(Training):
    """A run as one rank has it: the model under training, its data, and the number of steps that are done."""

    corpus: Corpus
    order: StepOrder | PackOrder
    done: int
    sets: tuple[EvaluationSet, ...] = ()  # what is evaluated: the held-out documents first, if there are any
    why_degrees: tuple[str, ...] = ()  # of evaluations whose degree was chosen by its cost
    why_partition: str = ""  # of a hybrid, where its cost chose

    @property
    def dir(self) -> Path:
        """The run's folder."""
        return Path(self.config.run.dir)

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        return self.dir / "checkpoints"

    @property
    def held_out(self) -> CorpusDocuments:
        """The documents that are only evaluated; there may be none."""
        return self.corpus.select(self.order.evaluation)
