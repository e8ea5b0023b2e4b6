"""The axes of the gradient oracle of two-module models: layouts, owners, plans, documents, and ways to train."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from longspan.layout import Layout
from longspan.plan import Plan, plan_dynamic, plan_fixed
from longspan.resolve.planner_config import PlannerConfig
from tests.pairs import every_pair
from tests.train.multimodal.documents import documents_of

ACROSS = (0, 4, 1, 5, 2, 6, 3, 7)  # neighbours of the encoder are far apart in the language model


@dataclass(frozen=True)
class Homes:
    """The homes of the encoders and of the language model, and the language model's degree in fixed plans."""

    encoder: Layout
    language_model: Layout
    cp: int


# Encoder → language model, each as TP·DP → TP·CP·DP (of a pipeline stage).
HOMES = {
    "2·4→2·2·2": Homes(Layout(8, tp=2), Layout(8, tp=2), 2),
    "4·2→1·2·4": Homes(Layout(8, tp=4), Layout(8), 2),
    "4·2→2·2·2": Homes(Layout(8, tp=4), Layout(8, tp=2), 2),
    "1·8→2·4·1": Homes(Layout(8), Layout(8, tp=2), 4),
    "1·8→1·8·1": Homes(Layout(8), Layout(8), 8),
    "8·1→1·8·1": Homes(Layout(8, tp=8), Layout(8), 8),
    "2·4→2·2·1, pp 2": Homes(Layout(8, tp=2), Layout(8, tp=2, pp=2), 2),
    "4·2→1·2·2, pp 2": Homes(Layout(8, tp=4), Layout(8, pp=2), 2),
    "2·4→2·2·2, other ranks": Homes(Layout(ACROSS, tp=2), Layout(8, tp=2), 2),
    "2·3→3·1·2": Homes(Layout(6, tp=2), Layout(6, tp=3), 1),
    # on 4 ranks or GPUs, and on 2
    "2·2→2·2·1": Homes(Layout(4, tp=2), Layout(4, tp=2), 2),
    "2·2→2·1·2": Homes(Layout(4, tp=2), Layout(4, tp=2), 1),
    "2·2→1·2·2": Homes(Layout(4, tp=2), Layout(4), 2),
    "1·4→2·1·2": Homes(Layout(4), Layout(4, tp=2), 1),
    "1·4→1·4·1": Homes(Layout(4), Layout(4), 4),
    "2·1→1·2·1": Homes(Layout(2, tp=2), Layout(2), 2),
    "1·2→2·1·1": Homes(Layout(2), Layout(2, tp=2), 1),
    "1·2→1·2·1": Homes(Layout(2), Layout(2), 2),
    "1·4→1·2·1, pp 2": Homes(Layout(4), Layout(4, pp=2), 2),
    "1·2→1·1·1, pp 2": Homes(Layout(2), Layout(2, pp=2), 1),
}
OWNERS = ("zigzag", "contiguous", "random")
PLANNERS = ("fixed", "dynamic", "free")
DOCUMENTS = ("mixed", "packed", "few", "text")
FROZEN = ("nothing", "encoders", "language model", "all but the head")
FAMILIES = ("qwen3", "qwen3-untied", "qwen3-moe")
DTYPES = ("float64", "float32")
WAVES = ("one", "several", "recomputed")
ENCODER = ("sharded", "copies", "cp 2")  # cp 2: an item may be shared by two slots; sharded
MODEL = ("sharded", "copies", "recomputed", "sequence parallel")  # all but the second are sharded


@dataclass(frozen=True)
class Case:
    homes: str
    owners: str = "zigzag"
    planner: str = "fixed"
    documents: str = "mixed"
    frozen: str = "nothing"
    family: str = "qwen3"
    dtype: str = "float64"
    waves: str = "one"
    encoder: str = "sharded"
    model: str = "sharded"

    @property
    def home(self) -> Layout:
        return HOMES[self.homes].language_model

    @property
    def encoder_home(self) -> Layout:
        return HOMES[self.homes].encoder

    @property
    def fits(self) -> bool:
        tied_head = self.frozen == "all but the head" and self.family != "qwen3-untied"
        one_rank = self.model == "sequence parallel" and self.home.tp == 1
        free_pipeline = self.planner == "free" and self.home.pp > 1
        one_slot = self.encoder == "cp 2" and self.encoder_home.slots == 1
        return not (tied_head or one_rank or free_pipeline or one_slot)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def answer_key(self) -> tuple[str, str, str]:
        return self.family, self.frozen, self.documents

    @property
    def row_multiple(self) -> int:
        return self.home.tp if self.model == "sequence parallel" else 1

    def language_model_options(self) -> dict[str, Any]:
        options = {
            "copies": {"shard_parameters": False},
            "recomputed": {"activation_checkpointing": True},
            "sequence parallel": {"sequence_parallel": True},
        }
        return options.get(self.model, {})

    def encoder_options(self, modality: str) -> dict[str, Any]:
        """Keyword arguments of `Encoder`; items of "video" are not shared, and the smallest cap holds one item."""
        rows = [item.rows for item in documents_of(self.documents).items if item.modality == modality]
        shared = 2 if self.encoder == "cp 2" and modality == "image" else 1
        cap = None if self.waves == "one" or not rows else -(-max(rows) // shared)
        return {"max_rows_per_slot": cap, "max_cp": shared, "recompute": self.waves == "recomputed"}

    def plan(self) -> Plan:
        return _plan(self)

    def evaluation(self) -> PlannerConfig:
        slots, cp = self.home.slots, HOMES[self.homes].cp
        degree = cp // 2 if cp > 1 else slots
        return PlannerConfig.fixed(degree, max_tokens_per_slot=-(-32 // degree), row_multiple=self.row_multiple)


@cache
def _plan(case: Case) -> Plan:
    """Several micro-batches; random owners are a plan's groups with other slots in other order."""
    documents, cp = documents_of(case.documents), HOMES[case.homes].cp
    options: dict[str, Any] = {
        "targets": documents.targets,
        "row_multiple": case.row_multiple,
        "partition": "contiguous" if case.owners == "contiguous" else "zigzag",
    }
    if case.planner == "fixed":
        plan = plan_fixed(documents.lengths, case.home, cp=cp, max_tokens_per_slot=32 // cp, **options)
    else:
        mode = "free" if case.planner == "free" else "lockstep"
        cap = max(16, 32 // case.home.slots)
        plan = plan_dynamic(documents.lengths, case.home, max_tokens_per_slot=cap, mode=mode, effort="fast", **options)
    return plan if case.owners != "random" else _with_random_owners(plan)


def _with_random_owners(plan: Plan) -> Plan:
    draw = np.random.default_rng(0)
    batches = []
    for batch in plan.micro_batches:
        slots = draw.permutation(plan.slots).tolist()
        groups = (replace(group, slots=tuple(slots[slot] for slot in group.slots)) for group in batch.groups)
        batches.append(replace(batch, groups=tuple(groups)))
    return replace(plan, micro_batches=tuple(batches)).check()


ON = {n: tuple(name for name, homes in HOMES.items() if len(homes.encoder.ranks) == n) for n in (4, 6, 8, 2)}
AXES = (OWNERS, PLANNERS, DOCUMENTS, FROZEN, FAMILIES, DTYPES, WAVES, ENCODER, MODEL)


def fits(values: tuple[Any, ...]) -> bool:
    return Case(*values).fits


def pairs(ranks: int) -> list[Case]:
    return [Case(*values) for values in every_pair((ON[ranks], *AXES), 0, fits)]


def few_pairs() -> list[Case]:
    ways = (FROZEN[:3], FAMILIES[:1], DTYPES, WAVES[1:], ENCODER, ("sharded", "copies", "sequence parallel"))
    return [Case(*values) for values in every_pair((ON[2], OWNERS, PLANNERS, DOCUMENTS[:2], *ways), 0, fits)]
