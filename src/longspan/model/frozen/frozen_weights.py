"""Which frozen weights of a model lie in 4 or 8 bits: linears and experts of decoder layers that adapters leave, or of
a model of which nothing is trained.

Embeddings, head, norms, routers, indexers, depths of multi-token prediction, encoders and biases stay whole.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from longspan.errors import ModelError, plural
from longspan.model.adapted_modules import belongs_to_adapter, has_trained_copy, name_without_adapter, peft_modules
from longspan.model.adapters.adapter import find_adapter
from longspan.model.execution import Execution
from longspan.model.feature import Call, Feature
from longspan.model.frozen.formats.loaded_linears import OWN_CODES, take_over_codes
from longspan.model.frozen.packed_format import NF4, PackedFormat
from longspan.model.frozen.packed_weight import PackedWeight, copy_codes, pack_parameter, unpack_when_gathered
from longspan.model.fsdp_params import accept_integer_shards, check_fsdp_names
from longspan.model.kinds import expert_modules, find_choosing_modules, find_mixers, is_linear, router_modules
from longspan.model.layers import architecture_name, decoder_layers
from longspan.model.tensor_parallel.mixer_parts import mixer_parts
from longspan.model.tensor_parallel.module_styles import SPLIT_INPUT, list_styles
from longspan.model.weights.fill import stored_formats
from longspan.plain_text import bytes_text
from longspan.plan.shape.families import ROWWISE
from longspan.plan.shape.packed import LEAST_ROWS, may_pack_linear


def weights_to_pack(model: PreTrainedModel) -> dict[str, tuple[nn.Module, str]]:
    """Return the weights that may be packed, by qualified name: a module, and the parameter's name there."""
    layers = tuple(f"{name}." for name in decoder_layers(model))
    left_out = tuple(f"{name}." for name in (*router_modules(model), *find_choosing_modules(model)))
    experts = expert_modules(model)
    places = dict[str, tuple[nn.Module, str]]()
    for path, module in model.named_modules():
        inside = f"{path}."
        if not inside.startswith(layers) or inside.startswith(left_out) or belongs_to_adapter(inside):
            continue
        if path in experts:
            matrices = [name for name, p in module.named_parameters(recurse=False) if p.ndim == 3]
            places |= {f"{path}.{name}": (module, name) for name in matrices}
        elif is_linear(module):
            linear_name = name_without_adapter(path).rpartition(".")[2]
            if may_pack_linear(linear_name, module.out_features):
                places[f"{path}.weight"] = module, "weight"
    return places


class PackedSizes(NamedTuple):
    """How many numbers of a model are packed, their bytes whole and packed, and the share of the model's numbers."""

    numbers: int
    whole_bytes: int
    packed_bytes: int
    share: float


def packed_sizes(model: PreTrainedModel, formats: Mapping[str, PackedFormat]) -> PackedSizes:
    """Count the weights of a model that is not prepared which are packed in these formats, by name."""
    numbers = whole_bytes = packed_bytes = 0
    for name, packed in formats.items():
        weight = model.get_parameter(name)
        numbers += weight.numel()
        whole_bytes += weight.nbytes
        columns = weight.shape[-2 if packed.transposed else -1]
        packed_bytes += weight.numel() // columns * packed.rows.row_bytes(columns)
    model_numbers = sum(p.numel() for name, p in model.named_parameters() if not belongs_to_adapter(name))
    return PackedSizes(numbers, whole_bytes, packed_bytes, numbers / model_numbers)


def choose_formats(model: PreTrainedModel, frozen: str) -> dict[str, PackedFormat]:
    """Return the formats of the weights that this value of `frozen` packs, by name, for a model not yet prepared.

    Raises ModelError for an unknown value.
    """
    places = weights_to_pack(model)
    if frozen == "nf4":
        return dict.fromkeys(places, NF4)
    if frozen != "stored":
        raise ModelError(f"frozen is {frozen!r}; use nf4, stored or whole")
    stored = stored_formats(model)
    formats = dict[str, PackedFormat]()
    for name, (module, _) in places.items():
        codes = vars(module).get(OWN_CODES)
        packed = stored.get(name_without_adapter(name)) if codes is None else codes.format
        if packed is not None:
            formats[name] = packed
    return formats


class FrozenFeature(Feature):
    """Frozen weights in 4 or 8 bits, whole in a layer that is gathered."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        check_fsdp_names("frozen weights in 4 or 8 bits take", "whole weights")
        self._formats: dict[str, PackedFormat] | None = None

    @contextmanager
    def checks_context(self, model: nn.Module) -> Iterator[None]:
        """Take over the codes of linears that transformers loaded in 4 or 8 bits; after an error they are as before."""
        stored = isinstance(model, PreTrainedModel) and self.options.frozen == "stored"
        with take_over_codes(model) if stored else nullcontext():  # pyright: ignore[reportArgumentType]
            yield

    def refuse(self, model: PreTrainedModel) -> None:
        """Raise ModelError with the reasons against packed weights, or against their formats."""
        if reasons := [*self._reasons(model)]:
            raise ModelError(
                f"the weights of {architecture_name(model)} cannot be frozen as {self.options.frozen!r}: "
                f'{"; ".join(reasons)}; or use frozen="whole" (model.frozen)'
            )

    @torch.no_grad()
    def convert(self, model: PreTrainedModel, execution: Execution) -> None:
        """Make weights whole whose codes are not kept, and describe those that will be packed."""
        formats = self._chosen_formats(model)
        for name, module in model.named_modules():
            if OWN_CODES in vars(module) and f"{name}.weight" not in formats:  # a router, say, or the head
                values = vars(module).pop(OWN_CODES)[...].to(model.dtype)
                module.weight = nn.Parameter(values, requires_grad=False)
        sizes = packed_sizes(model, formats)
        names = " and ".join(sorted({packed.name for packed in formats.values()}))
        self.words["frozen"] = (
            f"{names}: {plural(len(formats), 'weight')} of decoder layers, {100 * sizes.share:.1f} % of the "
            f"model's numbers, {bytes_text(sizes.packed_bytes)} in place of {bytes_text(sizes.whole_bytes)} in "
            f"{str(model.dtype).removeprefix('torch.')}"
        )

    def place(self, model: PreTrainedModel, root: nn.Module) -> None:
        """Pack the weights: behind tensor parallelism, whose slices are packed, and before anything is sharded."""
        accept_integer_shards()
        formats = self._chosen_formats(model)
        dtype = self.options.sharding(self.world).compute_dtype_of(model)
        sharing = defaultdict[int, list[tuple[str, nn.Module, str]]](list)  # modules that share a weight
        for name, (module, attribute) in weights_to_pack(model).items():
            if name in formats:
                sharing[id(getattr(module, attribute))].append((name, module, attribute))
        for entries in sharing.values():
            name, module, attribute = entries[0]
            parameter: Any = getattr(module, attribute)
            column_dim = -2 if formats[name].transposed else -1
            columns = getattr(parameter, "_local_tensor", parameter).shape[column_dim]
            read_dtype = None if self.options.frozen == "stored" else parameter.dtype
            record = PackedWeight(formats[name], columns, parameter.shape[column_dim], dtype, read_dtype)
            # On the host codes are copied to their places in `finish`, one weight after another.
            codes = None if self.options.offload_weights else vars(module).pop(OWN_CODES, None)
            pack_parameter([entry[1] for entry in entries], attribute, record, self.world.device, codes)

    @torch.no_grad()
    def finish(self, prepared: Any, models: Sequence[PreTrainedModel]) -> None:
        """Have FSDP2 unpack the weights of all parts, now that it has sharded them; codes that wait take their places
        on the host, and each is freed then.
        """
        for model in models:
            unpack_when_gathered(model)
            for module in model.modules():
                if (codes := vars(module).pop(OWN_CODES, None)) is not None:
                    copy_codes(module, "weight", codes, self.world.device)

    def _chosen_formats(self, model: PreTrainedModel) -> dict[str, PackedFormat]:
        """The first call, in `refuse`, chooses: later the model's weights do not tell how they are stored."""
        if self._formats is None:
            self._formats = choose_formats(model, self.options.frozen)
        return self._formats

    def _reasons(self, model: PreTrainedModel) -> Iterator[str]:
        formats = self._chosen_formats(model)
        if not self.options.shard_parameters:
            yield "a copy of all weights on every rank (shard_parameters=False) is not packed; shard them"
        if self.options.frozen == "stored" and not formats:
            yield (
                "it is read from no folder in 4 or 8 bits (as longspan train does with lora.rank), and was not loaded "
                "in them by transformers (BitsAndBytesConfig); under an adapter of peft load the folder with "
                'load_model(folder, quantized=True), which dequantises it, and use frozen="nf4"'
            )
        elif not formats:
            layers = tuple(f"{name}." for name in decoder_layers(model))
            modules = ((name, m) for name, m in model.named_modules() if is_linear(m))
            linears = [m for name, m in modules if name.startswith(layers) and not belongs_to_adapter(f"{name}.")]
            yield (
                f"its decoder layers have no experts, and none of their {plural(len(linears), 'linear')} has the "
                f"{LEAST_ROWS} outputs from which on weights are packed (the most have "
                f"{max((m.out_features for m in linears), default=0)})"
            )
        if self.options.offload_weights:
            yield from _reasons_against_places(model)
        has_adapter = any("lora_" in name for name, _ in model.named_parameters())
        if not has_adapter and any(parameter.requires_grad for parameter in model.parameters()):
            yield (
                "it has no LoRA adapter, and packed weights are not trained; set lora.rank, use peft, or freeze all of "
                "a model that is not trained (requires_grad_(False))"
            )
            return
        adapter = find_adapter(model)
        if adapter is not None and getattr(adapter.config, "use_dora", False):
            yield "DoRA (use_dora) needs norms of the weights, which layers have only while they are gathered"
        copied = [name for name, m in peft_modules(model).items() if has_trained_copy(m)]
        inside = tuple(f"{name}.original_module." for name in copied)
        if trained := [name for name in formats if name.startswith(inside)] if inside else []:
            yield f"modules_to_save trains {trained[0].partition('.original_module')[0]}, which would be packed"
        if trained := [name for name in formats if model.get_parameter(name).requires_grad]:
            yield f"{plural(len(trained), 'weight')} of them ({trained[0]}) are trained; freeze them"
        yield from self._shape_reasons(model, formats)

    def _shape_reasons(self, model: PreTrainedModel, formats: Mapping[str, PackedFormat]) -> Iterator[str]:
        """Of weights that do not fit their formats the first one's reason is told.

        Row-wise styles cut the columns of a weight: a rank's part of its rows is packed by itself, and must fit.
        """
        tp = self.world.home.tp
        cut = set[str]()
        if tp > 1:
            cut = {f"{entry.name}.weight" for entry in list_styles(model) if entry.style in (ROWWISE, SPLIT_INPUT)}
            cut |= {f"{name}.{mixer_parts(name, m, tp).output}.weight" for name, m in find_mixers(model).items()}
        reasons = dict[str, str]()
        for name, packed in formats.items():
            columns = model.get_parameter(name).shape[-2 if packed.transposed else -1]
            parts = tp if name_without_adapter(name) in cut else 1
            if tp > 1 and packed.transposed:
                reasons[name] = f"tp {tp} would cut matrices that the folder holds transposed; use ep, or tp 1"
            elif reason := packed.rows.reason_against(columns, parts):
                reasons[name] = reason
        if reasons:
            name, reason = next(iter(reasons.items()))
            others = f", as {len(reasons) - 1} more" if len(reasons) > 1 else ""
            yield f"{name_without_adapter(name)}: {reason}{others}"


def _reasons_against_places(model: PreTrainedModel) -> Iterator[str]:
    """Codes go to the host's arena from the host's memory, not from a device."""
    all_codes = [vars(module)[OWN_CODES] for module in model.modules() if OWN_CODES in vars(module)]
    elsewhere = [codes for codes in all_codes if codes.device.type != "cpu"]
    if elsewhere:
        packed_bytes = sum(codes.packed_bytes for codes in elsewhere)
        yield (
            f"weights on the host (offload_weights) are moved from the host's memory, and transformers has loaded "
            f"{plural(len(elsewhere), 'weight')} of {bytes_text(packed_bytes)} on {elsewhere[0].device}; load the "
            'model with device_map={"": "cpu"}, or leave offload_weights out'
        )
