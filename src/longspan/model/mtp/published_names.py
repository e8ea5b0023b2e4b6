"""Names of the weights of depths in published models, translated to ours and back."""

import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import count
from pathlib import Path

from longspan.model.layers import MTP
from longspan.model.weights.folder_weights import open_tensors
from longspan.model.weights.hf_folder import weight_files
from longspan.plan.shape.families import FAMILIES, find_family

# Published names are those of vLLM's `deepseek_mtp.py`, `qwen3_next_mtp.py` and `nemotron_h_mtp.py`.
_OURS = ("enorm.", "hnorm.", "eh_proj.", "post_norm.")
_QWEN: dict[str, str] = dict(
    zip(("pre_fc_norm_embedding.", "pre_fc_norm_hidden.", "fc.", "norm."), _OURS, strict=True)
)
_LAST_NORMS = {family.mtp_norm: "post_norm." for family in FAMILIES.values()}


def translate_published_name(key: str, layers: int, blocks: int = 1) -> str:
    """Translate a depth's weight name in files of a model of so many layers to ours; another key stays as it is.

    A depth has `blocks` decoder layers: several in Nemotron-H, which numbers them like depths and has one depth.

    >>> translate_published_name("model.layers.61.mlp.up_proj.weight", layers=61)
    'mtp.layers.0.mtp_block.mlp.up_proj.weight'
    >>> translate_published_name("model.layers.61.shared_head.norm.weight", layers=61)
    'mtp.layers.0.post_norm.weight'
    >>> translate_published_name("mtp.norm.weight", layers=48)
    'mtp.layers.0.post_norm.weight'
    >>> translate_published_name("mtp.layers.1.mixer.gate.weight", layers=88, blocks=2)
    'mtp.layers.0.mtp_block.1.mixer.gate.weight'
    """
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.*)", key):
        depth = int(match[1]) - layers
        inside = _replace_prefix(match[2], _LAST_NORMS)
        return key if depth < 0 else _depth_name(depth, inside)
    if match := re.fullmatch(r"mtp\.layers\.(\d+)\.(.*)", key):
        if match[2].startswith(("mtp_block.", *_OURS)):
            return key
        if blocks == 1:
            return _depth_name(int(match[1]), match[2])
        depth, block = divmod(int(match[1]), blocks)
        inside = _replace_prefix(match[2], {"final_layernorm.": "post_norm."})
        if inside == match[2]:  # not the norm behind the last block
            inside = f"mtp_block.{block}.{inside}"
        return f"{MTP}.layers.{depth}.{inside}"
    bare = key.removeprefix(f"{MTP}.")
    inside = _replace_prefix(bare, _QWEN)
    is_qwen_name = bare != key and inside != bare
    return _depth_name(0, inside) if is_qwen_name else key


def find_published_naming(
    model_type: str, layers: int, depths: int, blocks: int = 1
) -> Callable[[str], str] | None:
    """Return the function from our names to the names in a family's published models; None if they are not known.

    Some families name weights of a single depth only. A depth has `blocks` decoder layers.

    >>> find_published_naming("deepseek_v3", 61, 1)("mtp.layers.0.mtp_block.mlp.up_proj.weight")
    'model.layers.61.mlp.up_proj.weight'
    >>> find_published_naming("qwen3_next", 48, 1)("mtp.layers.0.eh_proj.weight")
    'mtp.fc.weight'
    """
    family = find_family(model_type)
    if family.mtp_names == "last layers":
        return lambda name: _trailing_layer_name(name, layers, family.mtp_norm)
    if blocks > 1:
        return (lambda name: _nemotron_name(name, blocks)) if depths == 1 else None
    return _qwen_name if family.mtp_names == "qwen" and depths == 1 else None


def count_depths(folder: Path, layers: int) -> int:
    """Count the depths 0, 1, … without a gap whose weights a folder has; ModelError for files that cannot be read."""
    with ExitStack() as stack:
        names = {translate_published_name(name, layers) for name in open_tensors(weight_files(folder), stack)}
    return next(depth for depth in count() if f"{MTP}.layers.{depth}.eh_proj.weight" not in names)


def select_published_mtp_names(keys: Iterable[str], layers: int) -> set[str]:
    """Select the names of depths' weights from names in files of a model of so many layers.

    They are those of each layer with a depth's projection (eh_proj), and those that begin with `mtp`.

    >>> sorted(select_published_mtp_names(["model.layers.2.eh_proj.weight", "model.layers.3.x"], layers=2))
    ['model.layers.2.eh_proj.weight']
    """
    names = {key: translate_published_name(key, layers) for key in keys}
    depth_prefixes = tuple(
        name.removesuffix("eh_proj.weight") for name in names.values() if name.endswith("eh_proj.weight")
    )
    return {
        key for key, name in names.items() if name.startswith(depth_prefixes) or re.match(r"(model\.)?mtp", key)
    }


def _depth_name(depth: int, inside: str) -> str:
    return f"{MTP}.layers.{depth}.{'' if inside.startswith(_OURS) else 'mtp_block.'}{inside}"


def _replace_prefix(name: str, begins: dict[str, str]) -> str:
    return next(
        (ours + name.removeprefix(theirs) for theirs, ours in begins.items() if name.startswith(theirs)), name
    )


def _trailing_layer_name(name: str, layers: int, last_norm: str) -> str:
    """Such files number depths as layers behind the model's."""
    match = re.fullmatch(rf"{MTP}\.layers\.(\d+)\.(.*)", name)
    if match is None:
        return name
    inside = match[2].removeprefix("mtp_block.").replace("post_norm.", last_norm, 1)
    return f"model.layers.{layers + int(match[1])}.{inside}"


def _qwen_name(name: str) -> str:
    """Qwen's files have one depth."""
    inside = name.removeprefix(f"{MTP}.layers.0.")
    if inside == name:
        return name
    without_number = _replace_prefix(inside, {our_prefix: qwen_prefix for qwen_prefix, our_prefix in _QWEN.items()})
    if without_number != inside:
        return f"{MTP}.{without_number}"
    return f"{MTP}.layers.0.{inside.removeprefix('mtp_block.')}"


def _nemotron_name(name: str, blocks: int) -> str:
    """Nemotron-H's files number the blocks of their one depth."""
    if match := re.fullmatch(rf"{MTP}\.layers\.0\.mtp_block\.(\d+)\.(.*)", name):
        return f"{MTP}.layers.{match[1]}.{match[2]}"
    return name.replace(f"{MTP}.layers.0.post_norm.", f"{MTP}.layers.{blocks - 1}.final_layernorm.")
