"""Names of the depths' weights in files: ours, and those under which models are published with them.

ours            mtp.layers.0.enorm, hnorm, eh_proj, post_norm, and mtp_block.… (transformers' `MtpLayer`)
DeepSeek, GLM   model.layers.61.enorm, hnorm, eh_proj, shared_head.norm, and the layer's own names, after 61 layers
Ling            the same with final_layernorm in place of shared_head.norm
Qwen            mtp.pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm, and mtp.layers.0.… (Qwen3-Next, Qwen3.5)
MiMo            model.mtp_layers.0.token_layernorm, hidden_layernorm, input_proj, final_layernorm, and the layer's own
Nemotron-H      mtp.layers.0.enorm, hnorm, eh_proj, mtp.layers.1.final_layernorm, and the layers' own, one of attention,
                then one of experts

MiMo's projection takes the hidden states first, so that the halves of its columns are exchanged when it is read (as in
vLLM's `mimo_mtp.py`; the others are as in `qwen3_next_mtp.py`, `deepseek_mtp.py` and `nemotron_h_mtp.py`).
"""

import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longspan.model.weights.folder import open_tensors
from longspan.model.weights.hf_folder import weight_files

PREFIX = "mtp"  # of the depths' weights in a state_dict and in files
_OURS = ("enorm.", "hnorm.", "eh_proj.", "post_norm.")
_MIMO: dict[str, str] = dict(
    zip(("token_layernorm.", "hidden_layernorm.", "input_proj.", "final_layernorm."), _OURS, strict=True)
)
_QWEN: dict[str, str] = dict(zip(("pre_fc_norm_embedding.", "pre_fc_norm_hidden.", "fc.", "norm."), _OURS, strict=True))
_MIMO_PROJECTION = re.compile(r"model\.mtp_layers\.\d+\.input_proj\.weight")
_AFTER_LAYERS = frozenset({"deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "bailing_hybrid"})
_SHARED_NORM = "shared_head.norm."
_LAST_NORM = {"bailing_hybrid": "final_layernorm."}
_LAST_NORMS = dict.fromkeys((_SHARED_NORM, *_LAST_NORM.values()), "post_norm.")
_LIKE_QWEN = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "mellum"})


def translate_name(key: str, layers: int, blocks: int = 1) -> str:
    """Translate a depth's weight name in files of a model of so many layers to ours; another key stays as it is.

    A depth has `blocks` decoder layers: several in Nemotron-H, which numbers them like depths and has one depth.

    >>> translate_name("model.layers.61.mlp.up_proj.weight", layers=61)
    'mtp.layers.0.mtp_block.mlp.up_proj.weight'
    >>> translate_name("model.layers.61.shared_head.norm.weight", layers=61)
    'mtp.layers.0.post_norm.weight'
    >>> translate_name("mtp.norm.weight", layers=48)
    'mtp.layers.0.post_norm.weight'
    >>> translate_name("model.mtp_layers.0.input_proj.weight", layers=36)
    'mtp.layers.0.eh_proj.weight'
    >>> translate_name("mtp.layers.1.mixer.gate.weight", layers=88, blocks=2)
    'mtp.layers.0.mtp_block.1.mixer.gate.weight'
    """
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.*)", key):
        depth, inside = int(match[1]) - layers, _replace_prefix(match[2], _LAST_NORMS)
        return key if depth < 0 else _depth_name(depth, inside)
    if match := re.fullmatch(r"model\.mtp_layers\.(\d+)\.(.*)", key):
        return _depth_name(int(match[1]), _replace_prefix(match[2], _MIMO))
    if match := re.fullmatch(r"mtp\.layers\.(\d+)\.(.*)", key):
        if match[2].startswith(("mtp_block.", *_OURS)):
            return key
        if blocks == 1:
            return _depth_name(int(match[1]), match[2])
        depth, block = divmod(int(match[1]), blocks)
        inside = _replace_prefix(match[2], {"final_layernorm.": "post_norm."})
        inside = inside if inside != match[2] else f"mtp_block.{block}.{inside}"
        return f"{PREFIX}.layers.{depth}.{inside}"
    bare = key.removeprefix(f"{PREFIX}.")
    inside = _replace_prefix(bare, _QWEN)
    is_qwen_name = bare != key and inside != bare
    return _depth_name(0, inside) if is_qwen_name else key


def order_columns(key: str, tensor: Any) -> Any:
    """Return a file's tensor, which safetensors reads in parts, with its columns in our order (see MiMo above)."""
    return _HalvesExchanged(tensor) if _MIMO_PROJECTION.fullmatch(key) else tensor


def publication_names(model_type: str, layers: int, depths: int, blocks: int = 1) -> Callable[[str], str] | None:
    """Return the function from our names to the names in a family's published models; None if they are not known.

    Some families name weights of a single depth only. A depth has `blocks` decoder layers.

    >>> publication_names("deepseek_v3", 61, 1)("mtp.layers.0.mtp_block.mlp.up_proj.weight")
    'model.layers.61.mlp.up_proj.weight'
    >>> publication_names("qwen3_next", 48, 1)("mtp.layers.0.eh_proj.weight")
    'mtp.fc.weight'
    """
    if model_type in _AFTER_LAYERS:
        return lambda name: _trailing_layer_name(name, layers, _LAST_NORM.get(model_type, _SHARED_NORM))
    if blocks > 1:
        return (lambda name: _nemotron_name(name, blocks)) if depths == 1 else None
    return _qwen_name if model_type in _LIKE_QWEN and depths == 1 else None


def count_depths(folder: Path, layers: int) -> int:
    """Count the depths 0, 1, … without a gap whose weights a folder has, for a model of so many `layers`.

    Raises ModelError for files that are missing or cannot be read.
    """
    with ExitStack() as stack:
        names = {translate_name(name, layers) for name in open_tensors(weight_files(folder), stack)}
    return next(depth for depth in count() if f"{PREFIX}.layers.{depth}.eh_proj.weight" not in names)


def names_of_depths(keys: Iterable[str], layers: int) -> set[str]:
    """Select, of names in files of a model of so many layers, those of depths: of a layer with a depth's projection.

    >>> names_of_depths(["model.layers.2.eh_proj.weight", "model.layers.2.enorm.weight", "model.layers.3.x"], layers=2)
    {...'model.layers.2.enorm.weight'...}
    """
    names = {key: translate_name(key, layers) for key in keys}
    depths = tuple(name.removesuffix("eh_proj.weight") for name in names.values() if name.endswith("eh_proj.weight"))
    return {key for key, name in names.items() if name.startswith(depths) or re.match(r"(model\.)?mtp", key)}


class _HalvesExchanged:
    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)

    def __getitem__(self, block: Any) -> Tensor:
        whole: Tensor = self._tensor[...]
        return torch.cat(whole.chunk(2, dim=1)[::-1], dim=1)[block]


def _depth_name(depth: int, inside: str) -> str:
    return f"{PREFIX}.layers.{depth}.{'' if inside.startswith(_OURS) else 'mtp_block.'}{inside}"


def _replace_prefix(name: str, begins: dict[str, str]) -> str:
    return next((ours + name.removeprefix(theirs) for theirs, ours in begins.items() if name.startswith(theirs)), name)


def _trailing_layer_name(name: str, layers: int, last_norm: str) -> str:
    match = re.fullmatch(rf"{PREFIX}\.layers\.(\d+)\.(.*)", name)
    if match is None:
        return name
    inside = match[2].removeprefix("mtp_block.").replace("post_norm.", last_norm, 1)
    return f"model.layers.{layers + int(match[1])}.{inside}"


def _qwen_name(name: str) -> str:
    inside = name.removeprefix(f"{PREFIX}.layers.0.")
    if inside == name:
        return name
    without_number = _replace_prefix(inside, {our_prefix: qwen_prefix for qwen_prefix, our_prefix in _QWEN.items()})
    if without_number != inside:
        return f"{PREFIX}.{without_number}"
    return f"{PREFIX}.layers.0.{inside.removeprefix('mtp_block.')}"


def _nemotron_name(name: str, blocks: int) -> str:
    if match := re.fullmatch(rf"{PREFIX}\.layers\.0\.mtp_block\.(\d+)\.(.*)", name):
        return f"{PREFIX}.layers.{match[1]}.{match[2]}"
    return name.replace(f"{PREFIX}.layers.0.post_norm.", f"{PREFIX}.layers.{blocks - 1}.final_layernorm.")
