"""The depths of multi-token prediction (DeepSeek-V3, https://arxiv.org/abs/2412.19437, §2.2) behind a causal model.

Depth d predicts token t + d + 1 at row t, of the hidden states of depth d − 1 and the token t + d:

    x = eh_proj [enorm(embedding of token t + d) ; hnorm(hidden of depth d − 1)]
    hidden of depth d = post_norm(block(x))

Depth 0 is the model itself, its hidden states those after its last norm. Embedding and head are the model's own. Names
and formulas are those of transformers' `MtpLayer`, which serves generation and cannot train (5.17 to 5.23).

The embedding of a placeholder is the row of the image in its place, as in the passes that draft tokens of published
models (vLLM shifts the rows of images with the ids of a draft, SGLang's `qwen3_5_mtp` the embeddings of the model).
Rows (tokens) keep their positions at every depth, so that a block is called with the arguments that the model gives the
layer of which it is a copy: shard, rotary embeddings, kernel (`layer_inputs.py`). Which token ids a depth reads and
predicts at each row is in `train/reading`.

Depths may be trained whole together with a LoRA adapter of the model. peft names them in `modules_to_save`, and trains
a copy of them next to the original ones. Here the copy takes their place, so that the depths have their own names under
every home, in checkpoints and in files.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from longspan.bridge.bridge import embedding_arguments
from longspan.errors import ModelError
from longspan.model.adapters import belongs_to_adapter, is_adapted, is_copied
from longspan.model.mtp.layer_inputs import CopiedLayer, LayerInputs
from longspan.model.mtp.names import PREFIX


class MtpBlocks(nn.ModuleList):
    """The decoder layers of one depth, one after another, in models whose layers are only attention, mixer or MLP."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run hidden states (1, T, D) through all blocks, each called with the same arguments."""
        for block in self:
            hidden = take_hidden_states(block(hidden, *args, **kwargs))
        return hidden


class MtpDepth(nn.Module):
    """One depth: norms, a projection of twice the hidden size, and a decoder layer (or `MtpBlocks`) of the model's.

    If the model has no norm after its layers, `post_norm` is `nn.Identity()`.
    """

    def __init__(self, block: nn.Module, norms: tuple[nn.Module, nn.Module, nn.Module], eh_proj: nn.Linear) -> None:
        super().__init__()
        self.enorm: nn.Module
        self.hnorm: nn.Module
        self.post_norm: nn.Module
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
    """All depths of a model, its attribute `mtp`; the block of each, or its last layer, copies the layer `copied`."""

    def __init__(self, depths: list[MtpDepth], copied: CopiedLayer) -> None:
        super().__init__()
        self.layers: nn.ModuleList = nn.ModuleList(depths)
        self.copied: CopiedLayer = copied


def model_depths(model: nn.Module) -> tuple[MtpDepth, ...]:
    """Return the depths that `add_mtp` gave a model, in order; none for another model."""
    mtp = model._modules.get(PREFIX)
    return tuple(depth for depth in mtp.layers if isinstance(depth, MtpDepth)) if isinstance(mtp, MtpDepths) else ()


def find_copied_layer(model: nn.Module) -> CopiedLayer:
    """Find the layer of a model that its depths copy."""
    mtp = model._modules[PREFIX]
    assert isinstance(mtp, MtpDepths)
    return mtp.copied


def mtp_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the decoder layers of a model's depths, by qualified name."""
    blocks = dict[str, nn.Module]()
    for i, depth in enumerate(model_depths(model)):
        name, block = f"{PREFIX}.layers.{i}.mtp_block", depth.mtp_block
        several = isinstance(block, MtpBlocks)
        blocks |= {f"{name}.{j}": layer for j, layer in enumerate(block)} if several else {name: block}
    return blocks


def refuse_bypass(model: nn.Module, reached: Sequence[nn.Module]) -> None:
    """Raise ModelError for a depth without any of the modules `reached`, which call our attention or are mixers."""
    for i, depth in enumerate(model_depths(model)):
        if not any(module is inner for inner in depth.mtp_block.modules() for module in reached):
            raise ModelError(
                f"{type(model).__name__}: {PREFIX}.layers.{i}.mtp_block ({type(depth.mtp_block).__name__}) reaches no "
                "attention over the sharded sequence; train the model without add_mtp"
            )


def deeper_states(
    model: PreTrainedModel, hidden: Tensor, future_ids: Tensor, inputs: LayerInputs, shard: Any = None
) -> tuple[Tensor, ...]:
    """Compute the hidden states (T, D) of each depth, from the model's (1, T, D) and ids (depths, T) of later tokens.

    A later token that is an image's placeholder has the image's row, which the `shard` holds, as its embedding. Raises
    ModelError if the layer that depths copy gets tensors made of the rows' tokens in a way that could not be observed.
    """
    embedding: Any = model.get_input_embeddings()
    states = list[Tensor]()
    for number, (depth, ids) in enumerate(zip(model_depths(model), future_ids, strict=True), 1):
        embedded = embedding(ids[None], **embedding_arguments(shard, number))
        args, kwargs = inputs.make_call(ids, embedded)
        hidden = depth(embedded, hidden, *args, **kwargs)
        states.append(hidden.squeeze(0))
    return tuple(states)


def take_copied_depths(model: nn.Module) -> nn.Module | None:
    """Replace peft's wrapper of the depths by the copy that it trains; returns the wrapper, or None without one.

    A wrapper with copies of several adapters is left as it is: `find_adapter` refuses such a model.
    """
    wrapper: Any = model._modules.get(PREFIX)
    if wrapper is None or not is_copied(wrapper):
        return None
    copies = [*wrapper.modules_to_save.values()]
    if len(copies) != 1:
        return None
    # the copy has configurations of its own; layers must share the model's, which names the attention function
    for name, original in wrapper.original_module.named_modules():
        if isinstance(config := vars(original).get("config"), PreTrainedConfig):
            copies[0].get_submodule(name).config = config
    model._modules[PREFIX] = copies[0]
    return wrapper


@contextmanager
def replace_copied_depths(model: nn.Module) -> Iterator[None]:
    """Call `take_copied_depths`; after an error inside, the wrapper is put back."""
    original = take_copied_depths(model)
    try:
        yield
    except BaseException:
        if original is not None:
            model._modules[PREFIX] = original
        raise


def select_depth_weights(names: Iterable[str]) -> list[str]:
    """Select the depths' own weights from the names of what a run with an adapter trains.

    >>> select_depth_weights(["mtp.layers.0.eh_proj.weight", "mtp.layers.0.eh_proj.lora_A.default.weight"])
    ['mtp.layers.0.eh_proj.weight']
    """
    return [name for name in names if name.startswith(f"{PREFIX}.") and not belongs_to_adapter(name)]


def depth_reasons(model: nn.Module) -> Iterator[str]:
    """Yield why depths cannot be trained with an adapter: trained only in part, or trained whole and adapted too."""
    mtp = model._modules.get(PREFIX)
    if mtp is None:
        return
    parameters = {f"{PREFIX}.{name}": parameter for name, parameter in mtp.named_parameters()}
    depth_weights = select_depth_weights(parameters)
    trained = [name for name in depth_weights if parameters[name].requires_grad]
    if not trained:
        return
    if len(trained) < len(depth_weights):
        yield (
            f"{len(trained)} of {len(depth_weights)} weights of its depths of multi-token prediction require "
            "gradients, and depths are trained whole or through adapters alone; use "
            "model.mtp.requires_grad_(True), or False"
        )
    if adapted := [f"{PREFIX}.{name}" for name, module in mtp.named_modules() if is_adapted(module)]:
        yield (
            f"its depths of multi-token prediction are trained whole and have adapters ({', '.join(adapted[:2])}); "
            'give LoraConfig(modules_to_save=["mtp"]), which leaves them without'
        )
