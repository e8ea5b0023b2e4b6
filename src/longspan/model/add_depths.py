"""`add_mtp`: give a causal language model depths of multi-token prediction before it is prepared.

An adapter is added after depths: it then adapts their linears as it adapts those of other layers. Depths themselves are
in `mtp/`, which `seams/` imports, and this file runs models through `seams/`.
"""

from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from longspan.errors import ModelError
from longspan.model.adapted_modules import peft_modules
from longspan.model.kinds import chooses_blocks
from longspan.model.layers import MTP, decoder_layers, final_norm, mtp_blocks, mtp_depths
from longspan.model.mtp.depths import MtpBlocks, MtpDepth, MtpDepths, record_layer_inputs
from longspan.model.mtp.published_names import translate_published_name
from longspan.model.seams.call_rules import is_prepared
from longspan.model.seams.meta_pass import run_on_meta
from longspan.model.seams.row_loss import find_output_embedding
from longspan.model.seams.set_forwards import modules_with_instance_forward
from longspan.model.weights.drawn_weights import DrawnWeights
from longspan.model.weights.empty_model import empty_model, has_meta_parameters, persistent_buffers
from longspan.model.weights.fill import JoinedWeights, WeightSource, find_deferred_weights
from longspan.model.weights.folder_weights import FolderWeights
from longspan.model.weights.local_tensors import LocalPart
from longspan.plain_text import items_text
from longspan.plan.shape.layers import depth_types


@torch.no_grad()
def _fill_depth_weights(model: PreTrainedModel, mtp: MtpDepths, source: WeightSource) -> None:
    if (weights := find_deferred_weights(model)) is not None:
        weights.source = JoinedWeights(weights.source, source)
        return
    if has_meta_parameters(mtp):
        return
    tensors: dict[str, Tensor] = {f"{MTP}.{name}": x for name, x in mtp.state_dict(keep_vars=True).items()}
    device = next(mtp.parameters()).device
    for name, values in source.read({name: LocalPart.from_parameter(x) for name, x in tensors.items()}, device):
        tensors[name].copy_(values)


def add_mtp(
    model: PreTrainedModel, depths: int = 1, *, weights: str | Path | None = None, seed: int = 0
) -> PreTrainedModel:
    """Give a Hugging Face causal language model depths of multi-token prediction; returns the same model.

    >>> model = prepare(add_mtp(load_model("Qwen3-8B"), depths=1), world)
    >>> result = run_step(model, plan, documents, world, optimizer, mtp=MtpLoss(weight=0.3))

    A depth has a copy of the model's last decoder layer, or one of each type that the configuration names
    (`mtp_layers_block_type`). Weights are drawn by `seed`, or read from the folder `weights`, which `save_model` wrote
    or which is published with depths. They are parameters under `mtp.`; embedding and head are the model's own. Raises
    ModelError for a model that cannot have them, such as one whose last layer takes embeddings of the rows' own tokens
    or keys of earlier layers, and for a folder that lacks their weights.
    """
    _check_depths_can_be_added(model, depths)
    _check_layer_inputs(model)
    layers = _find_layers_to_copy(model)
    mtp = MtpDepths([_make_depth(model, layers) for _ in range(depths)])
    model.add_module(MTP, mtp)
    mtp.train(model.training)
    try:
        if weights is None:
            _reset_buffers(model, mtp)
            # a depth is drawn whole, since modules may initialise those inside
            depths_to_draw = [
                (f"{MTP}.layers.{i}", deepcopy(depth).to("meta"), model._init_weights)
                for i, depth in enumerate(mtp.layers)
            ]
            buffers = {f"{MTP}.{name}": buffer.clone() for name, buffer in persistent_buffers(mtp)}
            source = DrawnWeights(buffers, depths_to_draw, seed)
        else:
            source = _read_depth_headers(Path(weights), model, mtp)
        _fill_depth_weights(model, mtp, source)
    except ModelError:
        del model.mtp  # the model is again as it was
        raise
    return model


def _read_depth_headers(folder: Path, model: PreTrainedModel, mtp: MtpDepths) -> FolderWeights:
    depths = len(mtp.layers)
    model_layers = model.config.get_text_config().num_hidden_layers
    blocks = len(mtp_blocks(model)) // depths  # layers of one depth
    rename = partial(translate_published_name, layers=model_layers, blocks=blocks)
    source = FolderWeights(folder, model, rename=rename)  # publishers have names of their own
    names = [f"{MTP}.{name}" for name in mtp.state_dict()]
    available = source.names()
    if missing := [name for name in names if name not in available]:
        raise ModelError(
            f"{folder} lacks {len(missing)} of {len(names)} weights of multi-token prediction of depth "
            f"{depths}: {', '.join(missing[:4])} (or model.layers.{model_layers}.…, mtp.fc.… and so on "
            "for them); use a folder that has them, fewer depths, or leave weights= out for random ones"
        )
    return source


def _check_depths_can_be_added(model: PreTrainedModel, depths: int) -> None:
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise ModelError(f"add_mtp takes a transformers model (PreTrainedModel), got {name}")
    if isinstance(depths, bool) or not isinstance(depths, int) or depths < 1:
        raise ModelError(
            f"add_mtp got depths={depths!r}; give a number from 1: tokens that are predicted beyond the next"
        )
    if is_prepared(model):
        raise ModelError(
            f"this {name} was prepared already; call add_mtp before prepare, which places its parameters"
        )
    if hasattr(model, MTP):
        depth = len(mtp_depths(model))
        obstacle = f"multi-token prediction of depth {depth}" if depth else f"a module at {MTP!r}"
        raise ModelError(f"{name} has {obstacle} already; add depths once, to a stock model")
    find_output_embedding(model)  # raises without a head
    embedding = next(model.get_input_embeddings().parameters())
    size = model.config.get_text_config().hidden_size
    if embedding.shape[1] != size:
        raise ModelError(
            f"{name} has embeddings of {embedding.shape[1]} values and layers of {size}, with projections between, and "
            "a depth of multi-token prediction joins rows of one width; train it without depths"
        )
    if peft_modules(model):
        raise ModelError(
            f"{name} has an adapter already, and depths get copies of its last layer; call add_mtp first, then "
            "peft.get_peft_model, which adapts linears of depths as the others"
        )


def _find_layers_to_copy(model: PreTrainedModel) -> list[nn.Module]:
    """Without types for depths in the configuration it is the model's last layer."""
    layers = [*decoder_layers(model).values()]
    # Of several layers of a type the last stays.
    last_of_type = {str(vars(layer).get("block_type", "")): layer for layer in layers}
    types = depth_types(model.config.get_text_config(), [*last_of_type])
    if missing := sorted({*types} - {*last_of_type}):
        raise ModelError(
            f"{type(model).__name__}: a depth of multi-token prediction has layers of the types {', '.join(types)} "
            f"(mtp_layers_block_type of the configuration), and of {', '.join(missing)} the model has none to copy, "
            f"only of {', '.join(sorted(last_of_type))}; set mtp_layers_block_type to types of these"
        )
    return [last_of_type[kind] for kind in types] or layers[-1:]


def _make_depth(model: PreTrainedModel, layers: Sequence[nn.Module]) -> MtpDepth:
    """Without a norm after a model's layers depths have none; the last norm inside its last layer is copied for
    inputs."""
    size = model.config.get_text_config().hidden_size
    device = next(layers[-1].parameters()).device
    norm_after_layers = final_norm(model)
    norm = norm_after_layers
    if norm is None:
        layer_norms = [
            module
            for module in layers[-1].modules()
            if type(module).__name__.lower().endswith("norm") and {p.numel() for p in module.parameters()} == {size}
        ]
        if not layer_norms:
            raise ModelError(
                f"{type(model).__name__} has no norm of {size} values after its decoder layers or in the last of them "
                f"({type(layers[-1]).__name__}), and depths of multi-token prediction need its kind; train it without "
                "them"
            )
        norm = layer_norms[-1]
    eh_proj = nn.Linear(2 * size, size, bias=False, device=device, dtype=model.dtype)
    post_norm = nn.Identity() if norm_after_layers is None else _copy_module(norm)
    norms = _copy_module(norm), _copy_module(norm), post_norm
    copies = [_copy_module(layer) for layer in layers]
    return MtpDepth(copies[0] if len(copies) == 1 else MtpBlocks(copies), norms, eh_proj)


def _reset_buffers(model: PreTrainedModel, mtp: MtpDepths) -> None:
    """Gemma 4 has one such buffer per layer, its scale."""
    if not any(True for _ in persistent_buffers(mtp)):
        return
    new_model = empty_model(model.config, model.dtype, type(model))
    new_buffers = dict(persistent_buffers(_make_depth(new_model, _find_layers_to_copy(new_model))))
    for depth in mtp.layers:
        for name, buffer in persistent_buffers(depth):
            buffer.copy_(new_buffers[name])


def _copy_module(module: nn.Module) -> Any:
    """The copy shares its configurations, in which `prepare` sets the attention function of both."""
    if names := modules_with_instance_forward(
        (f"{type(module).__name__} {name}", inner) for name, inner in module.named_modules()
    ):
        raise ModelError(
            f"{', '.join(names[:4])} has a forward set on the instance (module.forward = …), and a copy in a depth of "
            "multi-token prediction would run the original's; define it in a subclass, or call add_mtp first and set "
            "it in the depths too"
        )
    configs = [
        config for inner in module.modules() if isinstance(config := vars(inner).get("config"), PreTrainedConfig)
    ]
    return deepcopy(module, {id(config): config for config in configs})


def _check_layer_inputs(model: PreTrainedModel) -> None:
    """If the pass does not reach the layer, `LayerInputs.layer_arguments` raises in the first step."""
    if blocks := [name for name, module in model.named_modules() if chooses_blocks(module)]:
        raise ModelError(
            f"{type(model).__name__} chooses blocks of keys ({items_text(blocks)}), and transformers drops the weights "
            "of its multi-token prediction: no depth of its kind is known; train it without (no add_mtp, "
            "mtp.num_layers = 0)"
        )
    with suppress(Exception), record_layer_inputs(model) as inputs:  # whatever a forward raises
        run_on_meta(model, None, gradients=True)
    if inputs.call is None:
        return
    args, kwargs = inputs.call
    states = args[0] if args else kwargs["hidden_states"]
    size = model.config.get_text_config().hidden_size
    if (shape := tuple(states.shape)) != (1, 2, size):
        raise ModelError(
            f"{type(model).__name__} gives its decoder layers hidden states of shape {shape} for two rows of size "
            f"{size}: several streams of each row, and a depth of multi-token prediction, whose projection makes one, "
            "has none; train it without (no add_mtp, mtp.num_layers = 0)"
        )
    inputs.layer_arguments()  # raises for tensors that depend on parameters
