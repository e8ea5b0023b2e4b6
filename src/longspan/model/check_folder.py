"""Whether the files of a folder hold what a model takes, tensor by tensor, before any weight is read."""

import re
import warnings
from pathlib import Path

import torch
from transformers import PreTrainedModel

from longspan.errors import ModelError, plural
from longspan.model.mtp.names import names_of_depths
from longspan.model.seams.refusals import items_text
from longspan.model.weights.fill import empty_model, find_images_class
from longspan.model.weights.folder import FolderWeights
from longspan.model.weights.hf_folder import read_configuration

# Tables that models of today compute: of rotary angles, of positions, and masks of causal attention.
_TABLES = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"\.masked_bias$")


def compare_weights(folder: Path, model: PreTrainedModel) -> FolderWeights:
    """Return a folder as the source of a model's weights, after its headers are compared with the model's names.

    Warns of tensors that are left out with reason: depths of multi-token prediction, towers of a text model, tables
    that the model computes, and what transformers leaves out too. Raises ModelError for tensors that nothing takes, for
    weights that are missing, of another shape, quantized or in the files twice, and for two unequal tied matrices.
    """
    source = FolderWeights(folder, model)
    source.check_complete()
    unread = source.unread
    known = _names_left_out(unread, model) | names_of_depths(unread, model.config.get_text_config().num_hidden_layers)
    if unknown := sorted(unread.keys() - known):
        known |= _names_of_towers(unknown, folder)
    if unknown := sorted(unread.keys() - known):
        raise ModelError(
            f"the files of {folder} hold {plural(len(unknown), 'tensor')} that a {type(model).__name__} of its "
            f"config.json does not take: {items_text(unknown)}; use the config.json that belongs to the weights, or "
            "take these tensors out of the files"
        )
    if unread:
        warnings.warn(
            f"{folder}: {plural(len(unread), 'tensor')} of its files are no part of the {type(model).__name__} itself, "
            f"which is read without: {items_text(sorted(unread))}",
            stacklevel=2,
        )
    return source


def _names_left_out(unread: dict[str, str], model: PreTrainedModel) -> set[str]:
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), *_TABLES]
    buffers = {name for name, _ in model.named_buffers()}
    return {key for key, name in unread.items() if name in buffers or any(re.search(p, name) for p in patterns)}


def _names_of_towers(unknown: list[str], folder: Path) -> set[str]:
    """Return the names that the class from images and text takes, where the folder's configuration names one."""
    config = read_configuration(folder)
    if (image_class := find_images_class(config)) is None:
        return set()
    whole = FolderWeights(folder, empty_model(config, torch.float32, image_class))
    return set(unknown) - whole.unread.keys()
