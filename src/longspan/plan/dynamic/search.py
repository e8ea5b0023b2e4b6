"""How long each micro-batch should be: the search over wanted durations in lockstep.

Long documents want long micro-batches: their ring hides its traffic there, and the cap limits rows, not seconds. Short
documents want short ones. So the search starts from durations between two extremes, all equal, and those of the sorted
documents cut into equal parts, and then changes the best a little at a time. On many slots it looks for durations on a
sample of the documents first. It counts drafts, not seconds, so that every host ends with the same plan.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from longspan.plan.dynamic.degrees import Anchoring, DegreeTable
from longspan.plan.dynamic.draft import Anchor, Draft
from longspan.plan.dynamic.lockstep import make_draft
from longspan.plan.dynamic.problem import MORE_MICRO_BATCHES, Floats, Problem

ANCHORINGS = (Anchoring(0.15, 0.8), Anchoring(0.5, 0.4))
ANCHORINGS_OF_FEW = (Anchoring(0.0, 0.0), Anchoring(0.15, 0.4))
REACHES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
SHARES = (0.0, 0.05, 0.1, 0.15, 0.25, 0.5, 0.8)
STEEPNESS = (0.0, 0.4, 0.7, 1.0)
SLACK = (1.005, 1.03)
SLACK_OF_FEW = (1.07, 1.15, 1.3, 1.6)  # besides, where there are few documents for each block


@dataclass(frozen=True, eq=False)
class Settings:
    """What a draft is made of: wanted durations in units of the mean work of a slot, and what makes an anchor."""

    durations: Floats
    anchoring: Anchoring


@dataclass(frozen=True)
class Effort:
    """How many drafts the search makes, besides those that it always begins with."""

    drafts: int  # of the settings that were best on a sample, where there is one
    steps: int  # from the best draft
    sample_steps: int  # from the best draft of the sample


class Search:
    """The best draft so far of one problem, and the settings that made it."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.degrees = DegreeTable.of(problem)
        self.tried: list[float] = []
        self.best: Draft | None = None

    def attempt(self, settings: Settings) -> None:
        """Make a draft by these settings, and keep the best so far."""
        durations = settings.durations * self.problem.mean_seconds
        draft = make_draft(self.problem, self.degrees, durations, settings.anchoring)
        self.tried.append(draft.seconds)
        if self.best is None or draft.seconds < self.best.seconds:
            self.best, self.settings = draft, settings

    def climb(self, steps: int, seed: int = 0) -> None:
        """Change the best settings a little, so many times, and keep what is better."""
        random = Random(seed)
        for _ in range(steps):
            assert self.best is not None
            self.attempt(_changed(self.best, self.settings, random))

    def ranked(self) -> list[int]:
        """Numbers of the settings tried, best first."""
        return sorted(range(len(self.tried)), key=lambda i: (self.tried[i], i))


def search(problem: Problem, effort: Effort, warm: Sequence[Settings] = ()) -> Draft:
    """The best draft found with so much effort, beginning with `warm` settings if there are any."""
    full, candidates = Search(problem), list(warm)
    if problem.sampled == 1:
        candidates.extend(list(starts(problem, full.degrees))[:: problem.stride])
    elif not candidates:
        candidates = _sampled(problem, full.degrees, effort)
    for settings in candidates:
        full.attempt(settings)
    full.climb(effort.steps)
    assert full.best is not None
    return full.best


def _sampled(problem: Problem, degrees: DegreeTable, effort: Effort) -> list[Settings]:
    """Settings that give good drafts of a sample: one improved; and of those to begin with, as the whole has them."""
    sample, settings_of_problem = Search(problem.sample()), list(starts(problem, degrees))
    for settings in starts(sample.problem, sample.degrees):
        sample.attempt(settings)
    ranked = sample.ranked()
    sample.climb(effort.sample_steps)
    return [sample.settings, *[settings_of_problem[i] for i in ranked[: effort.drafts]]]


def starts(problem: Problem, degrees: DegreeTable) -> Iterator[Settings]:
    """The settings to begin with."""
    few = problem.few
    for count in _counts(problem):
        steep = _steep(problem, count)
        for steepness in STEEPNESS:
            shape = (1.0 - steepness) / count + steepness * steep
            shape[0] = max(shape[0], degrees.least_seconds() / problem.mean_seconds)
            for slack in (*SLACK, *SLACK_OF_FEW) if few else SLACK:
                for anchoring in ANCHORINGS_OF_FEW if few else ANCHORINGS:
                    yield Settings(slack * shape, anchoring)


def _counts(problem: Problem) -> list[int]:
    """Numbers of micro-batches: the fewest and some more, and as many as are launched anyway."""
    least, multiple = problem.least_micro_batches, problem.request.micro_batch_multiple
    counts = range(least, least + MORE_MICRO_BATCHES + 1)
    return sorted({*counts, *(-(-count // multiple) * multiple for count in counts)})


def warm_starts(durations: Sequence[float], mean_seconds: float) -> list[Settings]:
    """Settings that give a plan like one whose micro-batches took so long, for another mean work of a slot."""
    shape = np.array([seconds for seconds in durations if seconds > 0.0]) / mean_seconds
    return [Settings(slack * shape, anchoring) for slack in (0.995, 1.01) for anchoring in ANCHORINGS]


def _steep(problem: Problem, count: int) -> Floats:
    """Shares of the work in so many equal parts of the rows, longest documents first."""
    middle = np.cumsum(problem.tokens) - problem.tokens // 2
    part = np.minimum(middle * count // int(problem.tokens.sum()), count - 1)
    share = np.bincount(part, weights=problem.work, minlength=count)
    return share / (problem.mean_seconds * problem.request.slots)


def _changed(best: Draft, settings: Settings, random: Random) -> Settings:
    """Nearby settings: one duration longer or shorter, two exchanged in part, one that just holds an anchor at another
    degree, all as they came out, or other documents as anchors."""
    durations, anchoring, mean = settings.durations.copy(), settings.anchoring, best.problem.mean_seconds
    kind, micro_batch = int(5 * random.random()), int(len(durations) * random.random())
    if kind == 0:
        durations = best.durations / mean * (0.985 + 0.02 * random.random())
    elif kind == 1:
        durations[micro_batch] *= 0.9 + 0.2 * random.random()
    elif kind == 2:
        part = (0.1 * random.random() - 0.05) * durations[micro_batch]
        durations[micro_batch] -= part
        durations[int(len(durations) * random.random())] += part
    elif kind == 3:
        anchors = [anchor for anchor in best.anchors if anchor.micro_batch == micro_batch]
        if anchors:
            durations[micro_batch] = 1.0005 * _seconds_at_other_degree(best.problem, anchors, random) / mean
    else:
        share, reach = (values[int(len(values) * random.random())] for values in (SHARES, REACHES))
        anchoring = Anchoring(share, reach)
        durations *= 0.98 + 0.04 * random.random()
    return Settings(np.maximum(durations, 1e-6), anchoring)


def _seconds_at_other_degree(problem: Problem, anchors: list[Anchor], random: Random) -> float:
    """Seconds that one of these anchors takes at a degree close to the one that it has."""
    anchor = anchors[int(len(anchors) * random.random())]
    degree = sum(count for _, count in anchor.parts)
    degree += int((5 + degree // 2) * random.random()) - 2 - degree // 4
    degree = problem.widest(max(degree, problem.min_cp))
    tokens = int(problem.tokens[anchor.item])
    inside_node = degree <= problem.widest_in_node
    return float(problem.request.cost.group_seconds(tokens, tokens * tokens, degree, inside_node))
