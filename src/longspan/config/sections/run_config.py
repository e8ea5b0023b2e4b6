"""The configuration of a run: all of its sections. Imports no torch."""

from dataclasses import dataclass, field, is_dataclass
from typing import Any, get_type_hints

from longspan.config.bounds import Above, AtLeast, bounds_of
from longspan.config.eval_set import EvalConfig
from longspan.config.sections.context import ContextConfig
from longspan.config.sections.data import DataConfig
from longspan.config.sections.encoder import EncoderSection
from longspan.config.sections.lora import LoraSection
from longspan.config.sections.model import ModelConfig
from longspan.config.sections.mtp import MtpSection
from longspan.config.sections.parallel import ParallelConfig
from longspan.config.sections.run import RunSection
from longspan.config.sections.train import TrainConfig


@dataclass(frozen=True)
class RunConfig:
    """The whole configuration of a run.

    >>> from dataclasses import replace
    >>> config = replace(RunConfig(), train=TrainConfig(steps=10))
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    context: ContextConfig = field(default_factory=ContextConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    lora: LoraSection = field(default_factory=LoraSection)
    mtp: MtpSection = field(default_factory=MtpSection)
    encoder: EncoderSection = field(default_factory=EncoderSection)
    run: RunSection = field(default_factory=RunSection)
    eval: tuple[EvalConfig, ...] = ()


def section_kinds() -> dict[str, type[Any]]:
    """The dataclass of every section; the tables [[eval]] are none."""
    kinds: dict[str, Any] = get_type_hints(RunConfig)
    return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and is_dataclass(kind)}


def bounds_of_keys() -> dict[str, AtLeast | Above]:
    """The bound of every "section.key" that has one."""
    return {
        f"{section}.{key}": bound for section, kind in section_kinds().items() for key, bound in bounds_of(kind).items()
    }
