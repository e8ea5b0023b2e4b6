"""What a choice of plans depends on besides the keys: ranks, machine, bytes, the model, documents of coming steps.

Who resolves a configuration has these from a world (`longspan train`), or from words (`longspan plan --gpu h100`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from itertools import chain
from typing import Any

from longspan.config.sections import RunConfig
from longspan.data.corpus_documents import Corpus
from longspan.data.run_epochs import most_step_tokens
from longspan.data.step_order import StepOrder
from longspan.layout import Layout
from longspan.plan import Machine, MemoryBudget, MemorySettings, Plan
from longspan.plan.memory.memory_plan import MemoryModel
from longspan.plan.memory.teacher_bytes import PlannedTeacher
from longspan.plan.shape.model_shape import read_experts
from longspan.plan.shape.positions import LengthLimit
from longspan.resolve.planner_config import PlannerConfig, query_heads

# The documents of so many steps of a run are looked at.
MOST_STEPS = 1024
# The seconds of so many steps count, evenly apart.
TIMED_STEPS = 8
# Of so few steps each is planned, and must fit.
FEW_STEPS = 4
Lengths = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The ranks, GPUs, model and documents of a run.

    >>> Facts(home=Layout(8), machine=machine, model=config, lengths_of_step=order.lengths_of_step, steps=100)

    `model` names the model to planners, as a configuration, a dict like one or a folder. Of the `steps` of the run
    `done` are over, and memory is planned for the others. `longest` is the longest document of all, if it is known.
    """

    home: Layout
    machine: Machine
    model: Any
    lengths_of_step: Callable[[int], Sequence[int]]
    steps: int
    targets_of_step: Callable[[int], int | None] | None = None
    documents_to_share: Callable[[int], Sequence[Any] | None] | None = None
    """The documents of a step whose common prefixes may be computed once; None: each is computed whole."""
    length_limits: tuple[LengthLimit, ...] = ()
    """The lengths at which rotary frequencies change: documents with other ones share no prefix."""
    done: int = 0
    longest: int = 1
    budget: MemoryBudget | None = None
    """Bytes that a rank may fill; None: they are not known, and no memory is planned."""
    gpu: bool = True
    target_share: float = 1.0
    """The share of tokens that are predicted."""
    image_rows: float = 0.0
    """Rows of images in a step, of all slots together."""
    state_numbers: float | None = None
    """Numbers that the optimizer keeps for each weight; None: those of the optimizer's name."""
    teacher: PlannedTeacher | None = None
    """The teacher, if there is one."""
    scan_kernels: bool = True
    """Whether state-space layers have their kernels here."""
    evaluated: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])
    """The lengths of each evaluation set, by its name ("": held-out documents)."""

    @cached_property
    def heads(self) -> int | None:
        return query_heads(self.model, self.teacher and self.teacher.config)

    @cached_property
    def expert_count(self) -> int:
        """Experts of a layer that slots may share; 0 for a model without any."""
        experts = read_experts(self.model)
        return experts.of_layer if experts.shared else 0

    @cached_property
    def timed_steps(self) -> tuple[int, ...]:
        """The steps whose seconds are compared: of the whole run, so that a run that is resumed chooses the same."""
        return evenly_spaced_numbers(max(1, min(self.steps, MOST_STEPS)), TIMED_STEPS)

    @cached_property
    def coming_steps(self) -> range:
        return range(self.done, min(self.steps, self.done + MOST_STEPS))

    @cached_property
    def heaviest_steps(self) -> tuple[int, ...]:
        """The step with the longest document, and the one with most tokens, of the coming ones that are looked at: one
        or two steps, and none if none is to come.
        """
        lengths = {step: self.lengths(step) for step in self.coming_steps}
        if not lengths:
            return ()
        longest_step = max(lengths, key=lambda step: max(lengths[step], default=0))
        return tuple(sorted({longest_step, max(lengths, key=lambda step: sum(lengths[step]))}))

    @cached_property
    def _seen_lengths(self) -> list[Lengths]:
        return [self.lengths(step) for step in {*self.heaviest_steps, *self.timed_steps}]

    @property
    def sees_all(self) -> bool:
        """Whether so few steps are to come that all of them are planned."""
        return self.steps - self.done <= FEW_STEPS

    @cached_property
    def longest_document(self) -> int:
        """The longest document that is known: `longest`, or a longer one of the steps that are looked at."""
        return max(self.longest, 1, *chain.from_iterable(self._seen_lengths))

    @cached_property
    def most_tokens(self) -> int:
        """The most tokens of a step that is looked at."""
        return max(1, *map(sum, self._seen_lengths))

    @cached_property
    def lengths_differ(self) -> bool:
        """Whether documents of the steps that are looked at have several lengths."""
        return len(set(chain.from_iterable(self._seen_lengths))) > 1

    @cached_property
    def memory_model(self) -> Callable[[MemorySettings], MemoryModel]:
        """The model as plans of memory under given settings count it, made once for all ways that share them."""
        return cache(partial(MemoryModel, self.model, self.home, machine=self.machine))

    def lengths(self, step: int) -> Lengths:
        """Return the lengths of the documents of a step."""
        return tuple(int(n) for n in self.lengths_of_step(step))

    def targets(self, step: int) -> int | None:
        """Return how many tokens a step predicts; None: all that its lengths allow."""
        return self.targets_of_step(step) if self.targets_of_step else None

    def plan_step(self, choice: PlannerConfig, step: int) -> Plan:
        """Plan a step of the run on this home, with the prefixes that its documents may share."""
        documents = self.documents_to_share(step) if self.documents_to_share else None
        return choice.plan_documents(
            self.lengths(step),
            documents,
            self.home,
            targets=self.targets(step),
            length_limits=self.length_limits,
        )


def document_facts(
    config: RunConfig, order: StepOrder, corpus: Corpus | None, sets: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """Return the fields of Facts that the documents of a run decide, by name: for the run, and for a question about it.

    >>> Facts(home=home, machine=machine, model=model, **document_facts(config, order, corpus, {}))

    Documents that are held out count too: they are the evaluation set "", and one of them may be the longest. `corpus`
    None has lengths alone. `sets` are the lengths of the other evaluation sets, by name.
    """
    return {
        "lengths_of_step": order.lengths_of_step,
        "steps": config.train.steps,
        "targets_of_step": order.targets_of_step,
        "documents_to_share": order.documents_to_share,
        "length_limits": order.length_limits,
        "longest": int(order.lengths.max()),
        "target_share": 1.0 if corpus is None else corpus.target_share,
        "image_rows": 0.0 if corpus is None else corpus.image_share * most_step_tokens(config, order),
        "evaluated": {"": order.lengths[[*order.evaluation]].tolist(), **sets},
    }


def evenly_spaced_numbers(count: int, most: int) -> tuple[int, ...]:
    """Return at most `most` numbers below `count`, evenly apart, rising from 0."""
    most = min(count, most)
    return tuple(i * count // most for i in range(most))
