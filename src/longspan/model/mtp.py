"""Multi-token prediction (DeepSeek-V3, https://arxiv.org/abs/2412.19437, §2.2): depths behind a causal model.

x = eh_proj [enorm(embedding of token t + d) ; hnorm(hidden of depth d − 1)]
hidden of depth d = post_norm(block(x)); predicts token t + d + 1 at row t
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig, PreTrainedModel

from longspan.bridge.item_rows import embedding_arguments
from longspan.errors import ModelError
from longspan.model.adapted_modules import belongs_to_adapter, has_trained_copy, is_adapted
from longspan.model.features import Feature
from longspan.model.layers import MTP, architecture_name, mtp_depths, named_layer_list
from longspan.model.weights.folder import open_tensors
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
        inside = inside if inside != match[2] else f"mtp_block.{block}.{inside}"
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
    """Select, of names in files of a model of so many layers, those of depths: of a layer with a depth's projection.

    >>> sorted(select_published_mtp_names(["model.layers.2.eh_proj.weight", "model.layers.3.x"], layers=2))
    ['model.layers.2.eh_proj.weight']
    """
    names = {key: translate_published_name(key, layers) for key in keys}
    depths = tuple(
        name.removesuffix("eh_proj.weight") for name in names.values() if name.endswith("eh_proj.weight")
    )
    return {key for key, name in names.items() if name.startswith(depths) or re.match(r"(model\.)?mtp", key)}


def _depth_name(depth: int, inside: str) -> str:
    return f"{MTP}.layers.{depth}.{'' if inside.startswith(_OURS) else 'mtp_block.'}{inside}"


def _replace_prefix(name: str, begins: dict[str, str]) -> str:
    return next(
        (ours + name.removeprefix(theirs) for theirs, ours in begins.items() if name.startswith(theirs)), name
    )


def _trailing_layer_name(name: str, layers: int, last_norm: str) -> str:
    match = re.fullmatch(rf"{MTP}\.layers\.(\d+)\.(.*)", name)
    if match is None:
        return name
    inside = match[2].removeprefix("mtp_block.").replace("post_norm.", last_norm, 1)
    return f"model.layers.{layers + int(match[1])}.{inside}"


def _qwen_name(name: str) -> str:
    inside = name.removeprefix(f"{MTP}.layers.0.")
    if inside == name:
        return name
    without_number = _replace_prefix(inside, {our_prefix: qwen_prefix for qwen_prefix, our_prefix in _QWEN.items()})
    if without_number != inside:
        return f"{MTP}.{without_number}"
    return f"{MTP}.layers.0.{inside.removeprefix('mtp_block.')}"


def _nemotron_name(name: str, blocks: int) -> str:
    if match := re.fullmatch(rf"{MTP}\.layers\.0\.mtp_block\.(\d+)\.(.*)", name):
        return f"{MTP}.layers.{match[1]}.{match[2]}"
    return name.replace(f"{MTP}.layers.0.post_norm.", f"{MTP}.layers.{blocks - 1}.final_layernorm.")


LayerCall = tuple[tuple[Any, ...], Mapping[str, Any]]  # what a layer is called with, without hidden states
_NOT_FOR_DEPTHS = ("hidden_states", "router")  # some rows of a depth have no token: its routers are not counted


@dataclass(eq=False)
class LayerInputs:
    """What the last decoder layer was called with, recorded by a hook while a pass of the model runs."""

    _model: PreTrainedModel
    call: LayerCall | None = None

    def record_call(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Record the arguments of a call: a forward pre-hook."""
        self.call = args, kwargs

    def make_call(self) -> LayerCall:
        """Return the inputs of a depth's layer beside hidden states. ModelError if they depend on parameters."""
        args, kwargs = self.call or ((), {})
        call = args[1:], {name: value for name, value in kwargs.items() if name not in _NOT_FOR_DEPTHS}
        if any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(call)):
            raise ModelError(
                f"{architecture_name(self._model)} gives its last decoder layer, beside hidden states, tensors that "
                "depend on its parameters, as embeddings of the rows' own tokens or keys of earlier layers; a depth "
                "has none of later tokens: train it without multi-token prediction (no mtp=, mtp.num_layers = 0)"
            )
        return call

    def compute_mtp_states(self, hidden: Tensor, future_ids: Tensor, shard: Any) -> tuple[Tensor, ...]:
        """Compute the hidden states (T, D) of each depth, of the model's (1, T, D) and ids (depths, T) of later tokens.

        A placeholder of images has the image's row, which the `shard` holds, as its embedding.
        """
        embedding: Any = self._model.get_input_embeddings()
        states = list[Tensor]()
        args, kwargs = self.make_call()
        for number, (depth, ids) in enumerate(zip(mtp_depths(self._model), future_ids, strict=True), 1):
            embedded = embedding(ids[None], **embedding_arguments(shard, number))
            hidden = depth(embedded, hidden, *args, **kwargs)
            states.append(hidden.squeeze(0))
        return tuple(states)


@contextmanager
def record_layer_inputs(model: PreTrainedModel) -> Iterator[LayerInputs]:
    """Record what a pass inside gives the last decoder layer, which depths copy."""
    inputs = LayerInputs(model)
    last_layer = named_layer_list(model)[1][-1]
    handle = last_layer.register_forward_pre_hook(inputs.record_call, with_kwargs=True, prepend=True)
    try:
        yield inputs
    finally:
        handle.remove()


class MtpBlocks(nn.ModuleList):
    """The decoder layers of one depth, one after another, in models whose layers are only attention, mixer or MLP."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run hidden states (1, T, D) through all blocks, each called with the same arguments."""
        for block in self:
            hidden = take_hidden_states(block(hidden, *args, **kwargs))
        return hidden


class MtpDepth(nn.Module):
    """One depth: norms, a projection of twice the hidden size, and a decoder layer (or `MtpBlocks`) of the model's."""

    def __init__(self, block: nn.Module, norms: tuple[nn.Module, nn.Module, nn.Module], eh_proj: nn.Linear) -> None:
        super().__init__()
        self.enorm, self.hnorm, self.post_norm = norms
        self.eh_proj = eh_proj
        self.mtp_block = block

    def forward(self, embedded: Tensor, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Project embeddings of later tokens and hidden states of the depth before, (1, T, D), and run the layer."""
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        return self.post_norm(take_hidden_states(self.mtp_block(x, *args, **kwargs)))


def take_hidden_states(output: Any) -> Tensor:
    """Return the hidden states in what a decoder layer returns: a tensor, or the first of a tuple."""
    return output if isinstance(output, Tensor) else output[0]


class MtpDepths(nn.Module):
    """All depths of a model, its attribute `mtp`; the block of each, or its last layer, is like the model's last."""

    holds_depths = True  # by which `mtp_depths` knows it

    def __init__(self, depths: list[MtpDepth]) -> None:
        super().__init__()
        self.layers: nn.ModuleList = nn.ModuleList(depths)


def refuse_bypassing_mtp(model: nn.Module, reached: Sequence[nn.Module]) -> None:
    """Raise ModelError for a depth without any of the modules `reached`, which call our attention or are mixers."""
    for i, depth in enumerate(mtp_depths(model)):
        if not any(module is inner for inner in depth.mtp_block.modules() for module in reached):
            raise ModelError(
                f"{type(model).__name__}: {MTP}.layers.{i}.mtp_block ({type(depth.mtp_block).__name__}) reaches no "
                "attention over the sharded sequence; train the model without add_mtp"
            )


def unwrap_trained_mtp(model: nn.Module) -> nn.Module | None:
    """Replace peft's wrapper of the depths by the one copy that it trains; returns the wrapper, or None without."""
    wrapper: Any = model._modules.get(MTP)
    if wrapper is None or not has_trained_copy(wrapper):
        return None
    copies = [*wrapper.modules_to_save.values()]
    if len(copies) != 1:
        return None
    # the copy has configurations of its own; layers must share the model's, which names the attention function
    for name, original in wrapper.original_module.named_modules():
        if isinstance(config := vars(original).get("config"), PreTrainedConfig):
            copies[0].get_submodule(name).config = config
    model._modules[MTP] = copies[0]
    return wrapper


class MtpFeature(Feature):
    """Depths of multi-token prediction: peft's wrapper gives way to the copy that it trains. Others act on layers."""

    @contextmanager
    def checks_context(self, model: nn.Module) -> Iterator[None]:
        """Call `unwrap_trained_mtp`; after an error inside, the wrapper is put back."""
        original = unwrap_trained_mtp(model)
        try:
            yield
        except BaseException:
            if original is not None:
                model._modules[MTP] = original
            raise


def select_mtp_weights(names: Iterable[str]) -> list[str]:
    """Select the depths' own weights from the names of what a run with an adapter trains.

    >>> select_mtp_weights(["mtp.layers.0.eh_proj.weight", "mtp.layers.0.eh_proj.lora_A.default.weight"])
    ['mtp.layers.0.eh_proj.weight']
    """
    return [name for name in names if name.startswith(f"{MTP}.") and not belongs_to_adapter(name)]


def reasons_against_mtp(model: nn.Module) -> Iterator[str]:
    """Yield why depths cannot be trained with an adapter: trained only in part, or trained whole and adapted too."""
    mtp = model._modules.get(MTP)
    if mtp is None:
        return
    parameters = {f"{MTP}.{name}": parameter for name, parameter in mtp.named_parameters()}
    depth_weights = select_mtp_weights(parameters)
    trained = [name for name in depth_weights if parameters[name].requires_grad]
    if not trained:
        return
    if len(trained) < len(depth_weights):
        yield (
            f"{len(trained)} of {len(depth_weights)} weights of its depths of multi-token prediction require "
            "gradients, and depths are trained whole or through adapters alone; use "
            "model.mtp.requires_grad_(True), or False"
        )
    if adapted := [f"{MTP}.{name}" for name, module in mtp.named_modules() if is_adapted(module)]:
        yield (
            f"its depths of multi-token prediction are trained whole and have adapters ({', '.join(adapted[:2])}); "
            'give LoraConfig(modules_to_save=["mtp"]), which leaves them without'
        )
