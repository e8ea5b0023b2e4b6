"""The configuration of a run: sections of frozen values. What keys mean that were not given is in `defaults.py`.

A RunConfig comes from a TOML file and flags (`file.py`, `cli/flags.py`) and is checked against the number of
ranks before any process group exists (`config_check.py`). The text under each key is also its `--help`.
A section is a file; none decides anything, and none imports torch.
"""

from longspan.config.sections.context import ContextConfig
from longspan.config.sections.data import DataConfig, SourceConfig
from longspan.config.sections.encoder import EncoderSection
from longspan.config.sections.lora import LoraSection
from longspan.config.sections.model import ModelConfig
from longspan.config.sections.mtp import MtpSection
from longspan.config.sections.parallel import ParallelConfig
from longspan.config.sections.run import RunSection
from longspan.config.sections.run_config import RunConfig, bounds_of_keys, section_kinds
from longspan.config.sections.train import TrainConfig

__all__ = [
    "ContextConfig",
    "DataConfig",
    "EncoderSection",
    "LoraSection",
    "ModelConfig",
    "MtpSection",
    "ParallelConfig",
    "RunConfig",
    "RunSection",
    "SourceConfig",
    "TrainConfig",
    "bounds_of_keys",
    "section_kinds",
]
