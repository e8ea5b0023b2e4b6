"""A call of `longspan eval` and its results: values that travel to ranks and back."""

from dataclasses import dataclass
from pathlib import Path

from longspan.config.keys import NOT_GIVEN
from longspan.config.sections import RunConfig
from longspan.evaluation.result import Evaluation
from longspan.evaluation.saved.fit import Change
from longspan.evaluation.saved.targets import SavedWeights


@dataclass(frozen=True)
class Subject:
    """Weights that are evaluated, and the configuration under which: that of their run, or one for a folder."""

    weights: SavedWeights
    config: RunConfig

    @property
    def folder(self) -> Path:
        """Where the configuration and the tokenizer of the model are."""
        return self.weights.run_dir or self.weights.path


@dataclass(frozen=True, kw_only=True)
class EvalRequest:
    """One call of `longspan eval`: the `subjects`, one or two that are compared, and the documents.

    `flag_keys` are the keys that flags set ("parallel.tp"); `home_changes` are the keys of the first subject that were
    changed to fit the ranks.
    """

    subjects: tuple[Subject, ...]
    paths: tuple[tuple[str, str], ...] = ()  # name and path of each set of texts; none: what the run holds out
    sets: tuple[str, ...] = ()  # names of evaluation sets of the run
    max_documents: int = 0
    max_document_tokens: int = NOT_GIVEN
    tokenizer: str = ""
    degrees: tuple[int, ...] = ()  # to be compared; none: the configuration's
    metrics: tuple[str, ...] = ()
    seconds: float = 0.0
    flag_keys: frozenset[str] = frozenset()
    home_changes: tuple[Change, ...] = ()


@dataclass(frozen=True)
class SetResult:
    """The evaluation of one set at one degree, and where its documents came from.

    `text_bytes` are the UTF-8 bytes of each document's predicted tokens.
    """

    evaluation: Evaluation
    sources: tuple[str, ...]
    text_bytes: tuple[int, ...]


@dataclass(frozen=True)
class SubjectResult:
    """The evaluations of one subject's weights, set by set and within a set degree by degree."""

    weights: SavedWeights
    config: RunConfig  # under which they were evaluated
    tokenizer: str  # digest of it, and of what it puts around texts
    sets: tuple[SetResult, ...]
    changes: tuple[Change, ...]
