"""Multi-token prediction (DeepSeek-V3, https://arxiv.org/abs/2412.19437, §2.2): depths behind a causal model.

x = eh_proj [enorm(embedding of token t + d) ; hnorm(hidden of depth d − 1)]
hidden of depth d = post_norm(block(x)); predicts token t + d + 1 at row t
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig, PreTrainedModel

from longspan.bridge.item_rows import embedding_arguments
from longspan.errors import ModelError
from longspan.model.adapted_modules import belongs_to_adapter, has_trained_copy, is_adapted
from longspan.model.feature import Feature
from longspan.model.layers import MTP, architecture_name, layers_of_all_stages, mtp_depths


class MtpBlocks(nn.ModuleList):
    """The decoder layers of one depth, one after another, in models whose layers are only attention, mixer or MLP."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run hidden states (1, T, D) through all blocks, each called with the same arguments."""
        for block in self:
            hidden = take_hidden_states(block(hidden, *args, **kwargs))
        return hidden


class MtpDepth(nn.Module):
    """One depth: norms, a projection of twice the hidden size, and a decoder layer (or `MtpBlocks`) of the model's.

    `norms` are those of embeddings, of hidden states, and behind the layer.
    """

    def __init__(self, block: nn.Module, norms: tuple[nn.Module, nn.Module, nn.Module], eh_proj: nn.Linear) -> None:
        """Take norms of embeddings, of hidden states and behind the layer, the projection, and the decoder layer."""
        super().__init__()
        enorm, hnorm, post_norm = norms
        self.enorm: nn.Module = enorm
        self.hnorm: nn.Module = hnorm
        self.post_norm: nn.Module = post_norm
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
    """All depths of a model, in `layers`; the attribute `mtp` of the model."""

    # `mtp_depths` knows it by this attribute.
    holds_depths = True

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


# ---- what the last decoder layer is called with in a pass: depths, which copy it, are called with the same

# A layer is called with these arguments and the hidden states.
LayerCall = tuple[tuple[Any, ...], Mapping[str, Any]]
# Some rows of a depth have no token: its routers are not counted.
_NOT_FOR_DEPTHS = ("hidden_states", "router")


@dataclass(eq=False)
class LayerInputs:
    """What the last decoder layer was called with, recorded by a hook while a pass of the model runs."""

    _model: PreTrainedModel
    call: LayerCall | None = None

    def record_call(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Record the arguments of a call: a forward pre-hook."""
        self.call = args, kwargs

    def layer_arguments(self) -> LayerCall:
        """Return the arguments of a depth's layer beside hidden states. ModelError if they depend on parameters."""
        args, kwargs = self.call or ((), {})
        # Hidden states, which are first or a keyword, are left out.
        call = args[1:], {name: value for name, value in kwargs.items() if name not in _NOT_FOR_DEPTHS}
        if any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(call)):
            raise ModelError(
                f"{architecture_name(self._model)} gives its last decoder layer, beside hidden states, tensors that "
                "depend on its parameters, as embeddings of the rows' own tokens or keys of earlier layers; a depth "
                "has none of later tokens: train it without multi-token prediction (no mtp=, mtp.num_layers = 0)"
            )
        return call

    def compute_mtp_states(self, hidden: Tensor, future_ids: Tensor, shard: Any) -> tuple[Tensor, ...]:
        """Compute each depth's hidden states (T, D), from the model's (1, T, D) and ids (depths, T) of later tokens.

        Each depth gets those of the one before. The embedding of an image's placeholder is the image's row, which the
        `shard` holds.
        """
        embedding: Any = self._model.get_input_embeddings()
        states = list[Tensor]()
        args, kwargs = self.layer_arguments()
        for number, (depth, ids) in enumerate(zip(mtp_depths(self._model), future_ids, strict=True), 1):
            embedded = embedding(ids[None], **embedding_arguments(shard, number))
            hidden = depth(embedded, hidden, *args, **kwargs)
            states.append(hidden.squeeze(0))
        return tuple(states)


@contextmanager
def record_layer_inputs(model: PreTrainedModel) -> Iterator[LayerInputs]:
    """Record with what arguments a pass inside calls the last decoder layer; depths are called with the same."""
    inputs = LayerInputs(model)
    last_layer = [*layers_of_all_stages(model).values()][-1]
    handle = last_layer.register_forward_pre_hook(inputs.record_call, with_kwargs=True, prepend=True)
    try:
        yield inputs
    finally:
        handle.remove()


# ---- beside an adapter of peft, which may train depths whole, adapt them, or leave them


def unwrap_trained_mtp(model: nn.Module) -> nn.Module | None:
    """Replace peft's wrapper of the depths by the one copy that it trains, and return the wrapper.

    Without a wrapper, or with several copies, nothing changes, and None is returned.
    """
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
    """Depths of multi-token prediction: peft's wrapper gives way to the copy that it trains.

    What else depths need other features do, which act on their layers as on the model's.
    """

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
    """Select the depths' own weights, in their order, from the names of what a run with an adapter trains.

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
