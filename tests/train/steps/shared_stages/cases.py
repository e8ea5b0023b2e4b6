"""A Zamba 2 of two shared blocks, pipelines that it goes through, and what one process makes of it."""

from dataclasses import dataclass
from functools import cache

from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from longspan.comm import World
from longspan.doctor.stock import whole_float64
from longspan.layout import Layout
from longspan.model.exactness.small_copies import shrink_configuration
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.plan import Plan, plan_dynamic, plan_fixed
from tests.model.deep import Answer, answer
from tests.model.stock import at_random, prepare_untried, texts

LENGTHS = (13, 1, 30, 7, 2, 18)


def zamba2() -> PreTrainedModel:
    """A layer of Mamba 2, and seven that call two blocks in turn, each with adapters of its own.

    Of four stages the first has neither block; where a rank has two of the others it has two copies of a block.
    """
    config = shrink_configuration(CONFIG_MAPPING["zamba2"](use_shared_attention_adapter=True, use_mem_rope=True))
    config.num_hidden_layers, config.num_mem_blocks = 8, 2
    config.layers_block_type, config.hybrid_layer_ids = ["linear_attention"] + ["hybrid"] * 7, [*range(1, 8)]
    return at_random(config)


@dataclass(frozen=True)
class Case:
    """A pipeline of two or four ranks; `kind` is copies, sharded (FSDP2), or recomputed (both)."""

    schedule: str
    pp: int
    vpp: int = 1
    kind: str = "sharded"
    planner: str = "fixed"
    tp: int = 1
    sequence_parallel: bool = False
    ranks: int = 4

    @property
    def home(self) -> Layout:
        return Layout(ranks=self.ranks, pp=self.pp, tp=self.tp)

    def prepared(self, world: World) -> PipelineModel:
        model = prepare_untried(
            zamba2(),
            world,
            shard_parameters=self.kind != "copies",
            activation_checkpointing=self.kind == "recomputed",
            virtual_stages=self.vpp,
            pipeline_schedule=self.schedule,
            sequence_parallel=self.sequence_parallel,
        )
        assert isinstance(model, PipelineModel)
        return model

    def plan(self) -> Plan:
        rows = {"row_multiple": self.row_multiple, "max_tokens_per_slot": 40 // self.home.slots}
        if self.planner == "dynamic":
            return plan_dynamic(LENGTHS, self.home, **rows)
        return plan_fixed(LENGTHS, self.home, cp=self.home.slots, **rows)

    def evaluation_plan(self) -> Plan:
        """At another degree, where there is more than one slot."""
        return plan_fixed(LENGTHS, self.home, cp=1, row_multiple=self.row_multiple, max_tokens_per_slot=40)

    @property
    def row_multiple(self) -> int:
        return self.tp if self.sequence_parallel else 1


@cache
def wanted() -> Answer:
    with whole_float64():
        return answer(zamba2(), texts(LENGTHS), "cpu")
