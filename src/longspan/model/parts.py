"""The parts of a causal language model that stages and sequence parallelism rely on: which are called, and how.

Found by running a copy of the model whose parts are stand-ins, made as pipeline stages are.
"""

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from longspan.errors import ModelError
from longspan.model.layers import (
    MTP,
    Absent,
    copy_shallow_module,
    decoder_model,
    is_tied,
    mtp_depths,
    text_model_name,
    towers_beside_text_model,
)


@dataclass(frozen=True)
class ModelParts:
    """Names of a model's parts in its base model, in the order in which they run: before the layers, layers, after.

    `layers` names the list of layers; each returns a tuple of `outputs` values, with 0 a tensor.
    """

    before: tuple[str, ...]
    layers: str
    after: tuple[str, ...]
    outputs: int = 0


# Names by which the three usual parts are told; `final_norm` of `layers.py` finds a norm under any name, by its class.
_FINAL_NORMS = ("norm", "norm_f", "final_layernorm", "embedding_norm")
_USUAL = f"an embedding, a list of layers and a norm after them ({', '.join(_FINAL_NORMS)})"


def usual_part_names(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the names of the base model's embedding, list of layers and norm after them, in this order.

    One that the model lacks is left out, so that fewer than three names say that a part is missing.
    """
    base = decoder_model(model)
    embedding = [name for name, module in base.named_children() if module is model.get_input_embeddings()]
    layers = [name for name, module in base.named_children() if isinstance(module, nn.ModuleList)]
    norms = [name for name in _FINAL_NORMS if isinstance(getattr(base, name, None), nn.Module)]
    return (*embedding[:1], *layers[:1], *norms[:1])


def find_parts(model: PreTrainedModel) -> ModelParts:
    """Find the parts that the model's own pipeline plan names, or else the usual three.

    Raises ModelError if they are not there, if the plan leaves parameters out, and for towers beside the text model.
    """
    base = decoder_model(model)
    name = type(model).__name__
    plan = getattr(model.config.get_text_config(), "base_model_pp_plan", None)
    order: list[str] = [*(plan or usual_part_names(model))]
    lists = [part for part in order if isinstance(getattr(base, part, None), nn.ModuleList)]
    are_here = all(isinstance(getattr(base, part, None), nn.Module) for part in order)
    is_complete = bool(plan) or len(order) == 3
    if base is model or len(lists) != 1 or not (are_here and is_complete):
        expected = f"its pipeline plan names {', '.join(order)}" if plan else f"stages need {_USUAL}"
        raise ModelError(
            f"{name} cannot be cut into pipeline stages: {expected}, its base model "
            f"has {', '.join(n for n, _ in base.named_children())}; use pp 1"
        )
    index = order.index(lists[0])
    parts = parts_with_outputs(model, ModelParts(tuple(order[:index]), lists[0], tuple(order[index + 1 :])))
    if towers := towers_beside_text_model(model):
        raise ModelError(
            f"{name} has encoders of other modalities ({', '.join(type(tower).__name__ for tower in towers[:4])}), "
            "which pipeline stages have no place for; use longspan.prepare(model, world, encoder=Layout(...)), which "
            "gives them a home of their own, or pp 1"
        )
    if unplaced := [n for n, _ in base.named_parameters() if n.partition(".")[0] not in order]:
        raise ModelError(
            f"{name} has parameters that its pipeline plan does not place ({', '.join(unplaced[:4])}); use pp 1"
        )
    return parts


def parts_with_outputs(model: PreTrainedModel, parts: ModelParts) -> ModelParts:
    """Return the parts with the first `outputs`, of 0, 1 and 2, with which the base model's forward runs.

    They are returned unchanged if it runs with none of these.
    """
    for outputs in (0, 1, 2):
        candidate = replace(parts, outputs=outputs)
        with suppress(Exception):  # whatever a forward raises of layers that return something else
            _, out, returned = _run_with_stand_ins(model, candidate)
            # a forward that indexes a tensor as if it were a tuple returns other shapes
            if out.shape == returned[0].shape:
                return candidate
    return parts


class PartCall(NamedTuple):
    """One call of a part in a forward pass, and which hidden states it got beside those that the part before returned.

    `reads_more`: it got earlier ones. `first_again`: if these were the model's first hidden states, unchanged, and
    nothing else, the position or keyword of that argument; else None. `keywords` are names of arguments.
    """

    part: str
    reads_more: bool
    first_again: int | str | None
    keywords: frozenset[str]


def trace_parts(model: PreTrainedModel, parts: ModelParts, **more: Any) -> tuple[list[PartCall], bool]:
    """Run a base model's own forward on two rows, with a stand-in for each part and `more` keywords.

    Returns the calls of parts, in order, and whether the output is exactly what the last part returned; on the meta
    device only shapes are compared.
    """
    calls, out, returned = _run_with_stand_ins(model, parts, **more)
    # All stand-ins hand on the values of the first hidden states.
    first = returned[0]
    equal = out.shape == first.shape and (first.is_meta or torch.equal(out, first))
    return calls, equal and not _depends_on([out], returned[:-1])


def _run_with_stand_ins(
    model: PreTrainedModel, parts: ModelParts, **more: Any
) -> tuple[list[PartCall], Tensor, list[Tensor]]:
    """Returns the calls of stand-ins in order, the copy's output (1, 2, D), and the hidden states: those that it
    got, then what each call returned."""
    bare = decoder_model(copy_for_stage(model, parts, range(0), first=False, last=False))
    size = model.config.get_text_config().hidden_size
    # The rotary frequencies are on this device.
    device = next((buffer.device for buffer in bare.buffers()), torch.device("cpu"))
    x = torch.linspace(-1, 1, 2 * size, device=device).view(1, 2, size).requires_grad_()
    returned = [x]
    calls = list[PartCall]()

    def record_call(part: str, _: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        """Note a part's call, and make what it returns a leaf, to which `_depends_on` traces later calls back."""
        reads_earlier = _depends_on([args, kwargs], returned[:-1])
        first_again = _argument_with_first_states(args, kwargs, returned)
        calls.append(PartCall(part, reads_earlier, first_again, frozenset(kwargs)))
        hidden = out[0] if isinstance(out, tuple) else out
        returned.append(hidden.detach().requires_grad_())
        return (returned[-1], *out[1:]) if isinstance(out, tuple) else returned[-1]

    for name, module in bare.named_modules():
        if isinstance(module, Absent):
            module.register_forward_hook(partial(record_call, name), with_kwargs=True)
    with torch.enable_grad():
        positions = torch.arange(2, device=device)[None]
        return calls, bare(inputs_embeds=x, position_ids=positions, use_cache=False, **more)[0], returned


def _argument_with_first_states(
    args: Sequence[Any], kwargs: Mapping[str, Any], returned: Sequence[Tensor]
) -> int | str | None:
    """None if that argument depends on other states too, or several arguments on states before the last ones."""
    arguments: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
    keys = [key for key, value in arguments.items() if _depends_on(value, returned[:-1])]
    if len(keys) != 1 or keys[0] == 0:  # the argument at 0 is what a part runs on
        return None
    value = arguments[keys[0]]
    first = returned[0]
    is_first = (
        isinstance(value, Tensor) and value.shape == first.shape and (first.is_meta or torch.equal(value, first))
    )
    return keys[0] if is_first and not _depends_on(value, returned[1:]) else None


def _depends_on(values: Any, tensors: Sequence[Tensor]) -> bool:
    sums = [leaf.sum() for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not sums or not tensors:
        return False
    gradients = torch.autograd.grad(sums, tensors, retain_graph=True, allow_unused=True)
    return any(gradient is not None for gradient in gradients)


class _StageEntry(Absent):
    """Stands on a later stage for the first part, and returns the states with which the base model was called.

    Its own input is not handed on: Granite's forward, say, scales what it takes for embeddings before the first layer.
    """

    rows: Tensor | None = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(x if self.rows is None else self.rows)

    def take_rows(self, base: nn.Module, args: Any, kwargs: Any) -> None:
        """Keep the hidden states with which the base model is called; a hook before its forward."""
        self.rows = kwargs.get("inputs_embeds")

    def forget_rows(self, base: nn.Module, args: object, out: object) -> None:
        """Drop those hidden states; a hook after the base model's forward, also after an error in it."""
        self.rows = None


def copy_for_stage(
    model: PreTrainedModel, parts: ModelParts, layers: range, *, first: bool, last: bool
) -> PreTrainedModel:
    """Copy the model for one stage, with stand-ins for what other stages hold; `layers` are the indices of its layers.

    The model is not changed, and shares its parameters with the copy. Parts before the layers are on the first stage,
    and on the last if it needs the embedding; a tied head on both. A later stage begins with an `_StageEntry`.
    """
    tied = is_tied(model)
    # What comes after the layers needs the embedding.
    embeds = tied or bool(mtp_depths(model))
    stage = base = copy_shallow_module(model)
    # a wrapper's modules around its text model are copied too
    for name in filter(None, text_model_name(model).split(".")):
        base._modules[name] = copy_shallow_module(base._modules[name])
        base = base._modules[name]
    parts_here = dict.fromkeys(parts.before, first or (embeds and last)) | dict.fromkeys(parts.after, last)
    embeddings = [name for name, module in base.named_children() if module is model.get_input_embeddings()]
    for name, module in base.named_children():
        if name == parts.layers:
            base._modules[name] = stage_layers = copy_shallow_module(module)
            for i, (number, layer) in enumerate(module._modules.items()):
                if i not in layers:
                    stage_layers._modules[number] = Absent(layer, parts.outputs)
        elif name in parts_here:
            base._modules[name] = module if parts_here[name] else Absent()
        else:
            base._modules[name] = copy.deepcopy(module)  # rotary embeddings: only buffers
    entry = next((part for part in parts.before if part not in embeddings), f"{parts.layers}.0")
    # a stage that runs that part or layer itself has no stand-in there to replace
    if not first and isinstance(base.get_submodule(entry), Absent):
        parent, _, last_name = entry.rpartition(".")  # a part with a dot in its name is a layer
        stand_in = _StageEntry(base.get_submodule(entry), parts.outputs if parent else 0)
        base.get_submodule(parent)._modules[last_name] = stand_in
        base.register_forward_pre_hook(stand_in.take_rows, with_kwargs=True)
        base.register_forward_hook(stand_in.forget_rows, always_call=True)
    text_child = text_model_name(model).partition(".")[0]
    # The children beside the text model are the head, and depths of multi-token prediction (MTP).
    for name, _ in list(model.named_children()):
        is_needed = last or (tied and first and name != MTP)
        if name != text_child and not is_needed:
            stage._modules[name] = Absent()
    return stage
