"""The files of a Hugging Face folder that a run keeps for the folders of its models, those that are saved or exported.

Beside its tokenizer's files these are config.json, as the run trains the model (rope scaling included) and in the dtype
that saved folders have, and generation_config.json.
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from longspan.comm.all_ranks import LogLine
from longspan.config.sections import ModelConfig
from longspan.corpus.tokenizer_files import keep_generation
from longspan.model.hf_folder import no_progress_bars
from longspan.model.load import torch_dtype


def keep_model_files(
    directory: Path, settings: ModelConfig, configuration: PreTrainedConfig, architecture: str, log: LogLine
) -> None:
    """Write what saved folders of a run say of its model, which has this configuration and class."""
    source = Path(settings.source)
    config: Any = deepcopy(configuration)
    config.architectures = [architecture]
    config.dtype = dtype = _saved_dtype(settings, configuration)
    with no_progress_bars():
        config.save_pretrained(directory)
    keep_generation((source.parent if source.is_file() else source) if settings.source else None, directory)
    if dtype != torch_dtype(settings.dtype):
        log(
            f"model/ will be saved in {str(dtype).removeprefix('torch.')}, the dtype of {source}; parameters and "
            f"checkpoints are {settings.dtype}, which longspan export --dtype {settings.dtype} keeps"
        )


def _saved_dtype(settings: ModelConfig, configuration: Any) -> torch.dtype:
    """The dtype of a run's saved folders: the source's, where a folder or configuration names one, or else its own."""
    named = configuration.dtype if settings.source else None
    return named if isinstance(named, torch.dtype) and named.is_floating_point else torch_dtype(settings.dtype)
