"""The stock model from which a model was prepared: its class, its configuration, and its names without values."""

from copy import deepcopy

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig, PreTrainedModel

from longspan.model.add_depths import add_mtp
from longspan.model.layers import mtp_depths
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.weights.empty_model import empty_model
from longspan.model.weights.hf_folder import remove_code_and_quantization


def empty_stock_model(model: PreTrainedModel | PipelineModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Make the whole stock model from which a model was prepared, with its depths, on the meta device."""
    dtype = dtype or next(model.parameters()).dtype
    empty = empty_model(stock_configuration(model.config), dtype, stock_class(model))
    if depths := model.depths if isinstance(model, PipelineModel) else len(mtp_depths(model)):
        add_mtp(empty, depths)
    return empty


def stock_class(model: PreTrainedModel | PipelineModel) -> type[PreTrainedModel]:
    """Return the class of transformers of which a prepared model is."""
    architecture = model.architecture if isinstance(model, PipelineModel) else type(model)
    return next(kind for kind in architecture.__mro__ if not issubclass(kind, FSDPModule))


def stock_configuration(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of a prepared model's configuration with transformers' own attention and cache, to be saved."""
    config = remove_code_and_quantization(deepcopy(config))
    config._attn_implementation = "eager"
    config.use_cache = True
    return config
