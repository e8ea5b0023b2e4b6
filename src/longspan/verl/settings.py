"""What verl's configuration holds for this engine: `actor_rollout_ref.actor.engine` and the like."""

from dataclasses import dataclass, field
from typing import Any

from verl.workers.config import EngineConfig  # pyright: ignore[reportMissingImports]

from longspan.config.keys import AUTO
from longspan.errors import ConfigError
from longspan.plan import PlanOptions
from longspan.resolve.planner_config import PlannerConfig

PLANNERS = (AUTO, "dynamic", "fixed")


@dataclass
class LongspanEngineConfig(EngineConfig):
    """`engine` of an actor, a reference or a critic; keys that are not here are those of verl's EngineConfig.

    Parameters are in `model_dtype`, arithmetic in `dtype` (bfloat16). `planner` "dynamic" gives each sample a degree of
    its own, "fixed" all of them `context_parallel_size`; "auto" and a degree 0 are chosen for each mini-batch.
    `max_tokens_per_slot` stands in place of verl's max_token_len_per_gpu. `plan` holds further keywords of the planner,
    `prepare` those of `longspan.prepare`.
    """

    strategy: str = "longspan"
    planner: str = "dynamic"
    context_parallel_size: int = 0
    max_tokens_per_slot: int | None = None
    tp: int = 1
    ep: int = 1
    model_dtype: str = "float32"
    plan: dict[str, Any] = field(default_factory=dict)
    prepare: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ConfigError for keys that do not go together, or that the engine would not follow."""
        super().__post_init__()
        if self.strategy != "longspan":
            raise ConfigError(f"engine.strategy is {self.strategy!r} of a LongspanEngineConfig; use 'longspan'")
        if self.planner not in PLANNERS:
            raise ConfigError(f"engine.planner is {self.planner!r}; use {' or '.join(PLANNERS)}")
        if self.planner == "dynamic" and self.context_parallel_size not in (0, 1):
            raise ConfigError(
                f"engine.context_parallel_size is {self.context_parallel_size}, and dynamic plans choose degrees; set "
                "engine.planner=fixed, or bound degrees by engine.plan.min_cp and engine.plan.max_cp"
            )
        if self.router_replay.mode != "disabled":
            raise ConfigError(
                f"engine.router_replay.mode is {self.router_replay.mode!r}, and longspan's routers choose experts "
                "anew in each pass; set it to disabled"
            )

    def planner_choice(self, **keywords: Any) -> PlannerConfig:
        """Return how mini-batches are planned; `keywords` are options of plans, and those of the key `plan` win.

        A degree that is given makes planner "auto" a fixed one, as in a run's keys.
        """
        options = {**keywords, **self.plan}
        smallest = options.pop("min_cp", 1)
        largest = options.pop("max_cp", None)
        degree = self.context_parallel_size or None
        planner = "fixed" if self.planner == AUTO and degree else self.planner
        return PlannerConfig(planner, degree, smallest, largest, PlanOptions(**options), prefix="engine.")
