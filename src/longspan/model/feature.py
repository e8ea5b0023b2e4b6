"""`Feature`: one thing that `prepare` may do to a model. The table of those that exist is in `features.py`.

Files of features import this one, and nothing of the table, which has their names.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from longspan.comm import World, raise_first_error
from longspan.errors import ModelError
from longspan.model.execution import Execution
from longspan.model.options import PrepareOptions


@dataclass(frozen=True)
class Call:
    """A call of `prepare` for a language model, of which features are made.

    `given` is what the caller passed, the model or the PeftModel around it; `model` is the model inside.
    """

    given: nn.Module
    model: nn.Module
    world: World
    options: PrepareOptions


class Feature:
    """One thing that `prepare` may do to a model; each method is neutral, and a feature overrides those that it needs.

    All ranks have the same features. `prepare` calls the methods in the order in which they stand here, one method of
    all features, in the order of `FEATURES`, and then the next. Until `cut` the model is whole; `place` is called for
    each part of it. A feature may keep for later methods what it learnt in the constructor and made in `convert`.
    """

    def __init__(self, call: Call) -> None:
        """Take the call. A feature that has options of its own checks them here, and raises for wrong ones."""
        self.world: World = call.world
        self.options: PrepareOptions = call.options
        # What the Execution of the model says of the feature, by label, and other fields of it.
        self.words: dict[str, str] = {}
        self.description: dict[str, Any] = {}

    def checks_context(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context around all checks, which changes what they must find, and takes it back if one raises."""
        return nullcontext()

    def refuse(self, model: PreTrainedModel) -> None:
        """Raise ModelError, with the reasons, for a model that cannot have the feature exactly; on the host alone."""

    def rank_error(self, model: PreTrainedModel) -> ModelError | None:
        """Return why this rank's device cannot have the feature, which may differ between ranks; None if it can."""

    def check_same_on_all_ranks(self, model: PreTrainedModel) -> None:
        """Raise ModelError, on every rank, for what ranks may not differ in; entered by all ranks.

        A feature with a `rank_error` raises that of the first rank that has one.
        """
        if type(self).rank_error is not Feature.rank_error:
            raise_first_error(self.world, self.rank_error(model))

    def connect(self, model: PreTrainedModel) -> None:
        """Let modules call longspan; a pass on the meta device tries the model that all features have connected."""

    def convert(self, model: PreTrainedModel, execution: Execution) -> None:
        """Change what the pass on the meta device could not have run, fill `description`, and make what `place` needs.

        The pass is over. Entered by all ranks.
        """

    def cut(self, model: PreTrainedModel) -> Sequence[tuple[nn.Module, PreTrainedModel]]:
        """Return the parts of the model on this rank, each as (what is called, the model in it); () if not cut."""
        return ()

    def place(self, model: PreTrainedModel, root: nn.Module) -> None:
        """Bring a part of the model, or all of it, under the home, in place; entered by all ranks.

        `root` is the module that will be called: the model itself, or a pipeline stage around it.
        """

    def join(self, prepared: nn.Module, roots: Sequence[nn.Module]) -> nn.Module:
        """Return the module that stands for a model that was cut into `roots`; else `prepared` as it is."""
        return prepared

    def finish(self, prepared: Any, models: Sequence[PreTrainedModel]) -> None:
        """Do what comes last, when all weights are there: `prepared` is what `join` gave, `models` its parts."""
