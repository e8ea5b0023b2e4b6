"""A new LoRA adapter in a model, drawn from a seed: the same under every layout, even before weights are loaded.

peft makes the layers and their configuration. Matrices A are uniform and B zero, as peft draws them by default, but
each from a seed of its own, `seed` and its name, so that no rank needs another's numbers.
"""

import copy
import math
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.errors import ModelError
from longspan.model.adapted_modules import is_adapted, is_expert_adapter, name_without_adapter, peft_modules
from longspan.model.adapters import Adapter, adapter_parameters
from longspan.model.kinds import SCORE_HEADS, expert_modules, find_indexers
from longspan.model.layers import MTP, architecture_name, decoder_layers, is_tied, towers_beside_text_model
from longspan.model.marks import adapter_of_prepared_model
from longspan.model.mtp import select_mtp_weights, unwrap_trained_mtp
from longspan.model.seams.call_rules import SAVES, refuse_call
from longspan.model.weights.fill import JoinedWeights, find_deferred_weights, has_meta_parameters
from longspan.model.weights.local_tensors import LocalPart


def _linears_outside_towers(model: PreTrainedModel) -> tuple[list[str], str | None]:
    """Return the linears outside towers and indexers, and the pattern of all modules of towers, which have linears of
    like names.
    """
    towers = {id(tower) for tower in towers_beside_text_model(model)}
    names = [name for name, module in model.named_modules() if id(module) in towers]
    pattern = f"({'|'.join(map(re.escape, names))})(\\..*)?" if names else None
    untrained = tuple(f"{name}." for name in find_indexers(model))
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    linears = [name for name in linears if not name.startswith(untrained)]
    return [name for name in linears if not (pattern and re.fullmatch(pattern, name))], pattern


def _check_target_names(
    model: PreTrainedModel, targets: Sequence[str], linears: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the targets, each once, if each ends some linear's name, and those that end the name of experts' matrices
    alone.
    """
    matrices = [
        f"{path}.{name}"
        for path, experts in expert_modules(model).items()
        for name, parameter in experts.named_parameters(recurse=False)
        if parameter.ndim == 3
    ]
    of_experts = list[str]()
    for target in dict.fromkeys(targets):
        if any(f".{name}".endswith(f".{target}") for name in linears):
            continue
        if "." in target and any(name.endswith(f".{target}") for name in matrices):
            of_experts.append(target)
            continue
        endings = sorted({name.rpartition(".")[2] for name in linears})
        endings += sorted({".".join(name.split(".")[-2:]) for name in matrices})
        matches = get_close_matches(target.rpartition(".")[2], endings, n=1, cutoff=0.4)
        hint = f"did you mean {matches[0]!r}? It has" if matches else "it has"
        raise ModelError(
            f"lora.target_modules has {target!r}, which is no linear of {type(model).__name__} outside its towers and "
            f"indexers; {hint} {', '.join(endings)}"
        )
    modules = [target for target in dict.fromkeys(targets) if target not in of_experts]
    if refused := _names_refused_by_peft(model, modules):
        instead = "leave them out"
        if matrices:
            instead += (
                f", or name its experts' matrices, {matrices[0].partition('.layers.')[2].partition('.')[2]} say"
            )
        raise ModelError(
            f"lora.target_modules has {', '.join(refused)}, which peft refuses in a {type(model).__name__}, or takes "
            f"for its experts; {instead}"
        )
    return modules, of_experts


def _default_target_names(model: PreTrainedModel, linears: Sequence[str]) -> list[str]:
    """Names that peft takes for experts, or refuses, are left out with a warning."""
    layers = tuple(f"{name}." for name in decoder_layers(model))
    inside = [name for name in linears if name.startswith(layers)]
    names = sorted({name if (last := name.rpartition(".")[2]).isdigit() else last for name in inside})
    if refused := _names_refused_by_peft(model, names):
        warnings.warn(
            f"the adapter leaves out {', '.join(refused)}, which peft refuses in a {type(model).__name__}, or takes "
            "for its experts: dense layers and shared experts of these names have no adapter there",
            stacklevel=3,
        )
    if targets := [name for name in names if name not in refused]:
        return targets
    raise ModelError(
        f"{type(model).__name__} has no nn.Linear in its decoder layers for an adapter; name lora.target_modules"
    )


def _names_refused_by_peft(model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """Those of `names` that peft takes for fused experts, which in transformers 4 were linears of single experts, or
    refuses: linears of mixers whose weights kernels read directly, past an adapter.
    """
    import peft
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba  # pyright: ignore[reportPrivateUsage]

    # not in peft 0.18, which takes none for experts
    name_of_conversion = "peft.utils.transformers_weight_conversion"
    conversion: Any = import_module(name_of_conversion) if find_spec(name_of_conversion) else None
    refused = list[str]()
    for name in names:
        config = peft.LoraConfig(target_modules=[name])
        try:
            _check_lora_target_modules_mamba(peft.LoraConfig(), model, name)
            if conversion is not None:
                conversion.convert_peft_config_for_transformers(config, model, None)
        except ValueError:  # peft fuses it with another name, which is missing here, or refuses it
            refused.append(name)
        else:
            refused += [name] if name not in (config.target_modules or ()) else []
    return refused


def adapter_lines(model: PreTrainedModel) -> Iterator[str]:
    """Yield lines about what has no adapter in the decoder layers of an adapted model, and where none can be merged."""
    adapted = adapted_weights(model)
    sizes = Counter[str]()
    total = 0
    for path, layer in decoder_layers(model).items():
        for name, parameter in layer.named_parameters():
            if parameter.ndim > 1 and ".lora_" not in name:
                total += parameter.numel()
                owner = [part for part in name_without_adapter(name).split(".")[:-1] if not part.isdigit()][-1]
                sizes[owner] += 0 if f"{path}.{name}" in adapted else parameter.numel()
    if large := [name for name, size in sizes.most_common() if size >= total / 100]:
        share = 100 * sum(sizes[name] for name in large) / total
        yield f"lora: {', '.join(large)} ({share:.1f} % of the weights of decoder layers) have no adapter"
    ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    if is_tied(model) and any(map(is_adapted, ends)):
        yield (
            "caution: lora.target_modules has the head, which shares its weight with the embedding "
            "(tie_word_embeddings): "
            "longspan export --merge will refuse this adapter, which stock peft reads over its base model; leave the "
            "head out of lora.target_modules if it is to be merged"
        )


# ---- drawing


@dataclass(frozen=True, kw_only=True)
class NewAdapter:
    """What a new LoRA adapter is to be; `alpha` 0 is twice the rank.

    Without `targets`, every linear of the decoder layers has an adapter. `whole` modules are trained whole; `base`
    names the base model in the configuration, and `revision` its commit on the hub.
    """

    rank: int
    alpha: float = 0.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    seed: int = 0
    base: str = ""
    revision: str = ""


def add_lora(model: PreTrainedModel, new: NewAdapter) -> Any:
    """Return the model with a new adapter in it as a PeftModel; `prepare` fills one on the meta device.

    Towers have none. Adapters are float32, or float64 in a float64 model. ModelError without peft, for wrong targets.
    """
    try:
        import peft
    except ImportError as error:
        raise ModelError(
            f"adapters are made by peft, which cannot be imported ({error}); pip install 'longspan[lora]'"
        ) from error
    linears, towers = _linears_outside_towers(model)
    if new.targets:
        names, of_experts = _check_target_names(model, new.targets, linears)
    else:
        names, of_experts = _default_target_names(model, linears), []
    if of_experts and new.dropout:
        raise ModelError(
            f"lora.dropout is {new.dropout:g}, and lora.target_modules has experts ({', '.join(of_experts)}), whose "
            "adapters have none in peft; set it to 0"
        )
    config = peft.LoraConfig(
        r=new.rank,
        lora_alpha=new.alpha or 2 * new.rank,  # pyright: ignore[reportArgumentType]
        lora_dropout=new.dropout,
        target_modules=names,
        target_parameters=of_experts or None,
        exclude_modules=towers,
        task_type="SEQ_CLS" if architecture_name(model).endswith(SCORE_HEADS) else "CAUSAL_LM",
        modules_to_save=[*new.whole] or None,
    )
    empty = has_meta_parameters(model)
    # of names in transformers that peft reads
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        peft_model: Any = peft.get_peft_model(model, config, low_cpu_mem_usage=empty)
    config.base_model_name_or_path = new.base or None
    config.revision = new.revision or None
    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
    unwrap_trained_mtp(model)  # depths among `new.whole`: peft has put copies beside them
    for name in new.whole:
        model.get_submodule(name).to(dtype)
    for name, parameter in adapter_parameters(model):
        parameter.data = (
            parameter.data.to(dtype)
            if empty or ".lora_" not in name  # of a module that is trained whole
            else draw_adapter_values(name, parameter.shape, new.seed).to(dtype)
        )
    if empty and (weights := find_deferred_weights(model)) is not None:
        shapes = {name: tuple(parameter.shape) for name, parameter in adapter_parameters(model)}
        weights.source = JoinedWeights(weights.source, DrawnAdapter(shapes, new.seed))
    return peft_model


def draw_adapter_values(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """Draw an adapter's initial values, float32, on the CPU, as peft does: A uniform in ±1 / √inputs, B zero."""
    if ".lora_A." not in name:
        return torch.zeros(tuple(shape))
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))  # on CPUs seeds have 32 bits
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(tuple(shape)).uniform_(-bound, bound, generator=generator)


@dataclass(eq=False)
class DrawnAdapter:
    """A source of an adapter's weights, given by name and shape, drawn from a seed."""

    _shapes: Mapping[str, Sequence[int]]
    _seed: int

    def read(self, parts: Mapping[str, LocalPart], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        for name, shape in self._shapes.items():
            if part := parts.get(name):
                yield name, draw_adapter_values(name, shape, self._seed)[part.block].to(part.dtype)


def adapter_is_drawn_by_prepare(model: nn.Module) -> bool:
    """Return whether `prepare` draws the adapter in a model: `add_lora` made it on the meta device."""
    weights = find_deferred_weights(model)
    return weights is not None and isinstance(getattr(weights.source, "added", None), DrawnAdapter)


def largest_trained_modules(model: nn.Module, trained: Collection[str], inside: str = "") -> tuple[str, ...]:
    """Return the names of the largest modules, inside the one named `inside`, all of whose parameters are `trained`.

    Lists of modules, which peft does not take, are not among them. ModelError for a module trained in part.
    """
    modules = tuple(
        _iterate_trained_modules(model.get_submodule(inside), f"{inside}." if inside else "", set(trained))
    )
    if outside := sorted(
        name for name in trained if not name.startswith(tuple(f"{module}." for module in modules))
    ):
        raise ModelError(
            f"{', '.join(outside[:3])}: peft saves whole modules beside an adapter, and not all of this one is "
            "trained; train all of it or nothing, or keep it by save_checkpoint(folder, model, …)"
        )
    return modules


def _iterate_trained_modules(module: nn.Module, prefix: str, trained: set[str]) -> Iterator[str]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        parameters = dict(child.named_parameters())
        is_trained = bool(parameters) and all(f"{path}.{p}" in trained for p in parameters)
        if is_trained and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield path
        else:
            yield from _iterate_trained_modules(child, f"{path}.", trained)


def entries_inside_modules(modules: Collection[str], entries: Any) -> dict[str, Any]:
    """Select the entries, by names of weights and buffers, that lie inside these modules; none for no modules."""
    inside = tuple(f"{module}." for module in modules)
    return {name: value for name, value in entries.items() if name.startswith(inside)} if inside else {}


class AdaptedWeight(NamedTuple):
    """What peft adds to a weight: s B A of its `module`, or to each of so many `experts`, if there are any."""

    module: str
    scaling: float
    experts: int = 0
    transposed: bool = False  # an expert's matrix is (inputs, outputs)

    def sum_of(self, matrix_a: Tensor, matrix_b: Tensor) -> Tensor:
        """Return s B A, for experts (E, …): rows of A are sorted by expert, columns of B by rank, then by expert."""
        if not self.experts:
            return self.scaling * (matrix_b @ matrix_a)
        of_experts = matrix_b.unflatten(1, (-1, self.experts)).permute(2, 0, 1)
        products = self.scaling * (of_experts @ matrix_a.unflatten(0, (self.experts, -1)))
        return products.mT if self.transposed else products


def adapted_weights(model: nn.Module) -> dict[str, AdaptedWeight]:
    """Return what peft adds to the weights of an adapted model that is not prepared or is, by qualified name."""
    found = dict[str, AdaptedWeight]()
    for name, module in peft_modules(model).items():
        if not is_adapted(module):
            continue
        wrapper: Any = module
        (scaling,) = wrapper.scaling.values()
        if not is_expert_adapter(module):
            found[f"{name}.base_layer.weight"] = AdaptedWeight(name, scaling)
            continue
        path = name
        while hasattr(model.get_submodule(path), "base_layer"):  # a matrix is adapted around another's adapter
            path += ".base_layer"
        transposed = not wrapper._did_swap_in_out_features
        found[f"{path}.{wrapper.parameter_name}"] = AdaptedWeight(name, scaling, wrapper.num_experts, transposed)
    return found


WEIGHTS = "adapter_model.safetensors"


def write_adapter(
    folder: Path,
    adapter: Adapter,
    tensors: Mapping[str, Tensor],
    tokenizer: Any = None,
    modules: Sequence[str] = (),
) -> None:
    """Write an adapter's whole tensors, named as in a prepared model, its configuration, and the tokenizer's files.

    `modules` are whole modules among the tensors, which peft loads in place of the base model's.
    """
    stock = {name_in_peft_files(name, adapter.name): tensor.contiguous() for name, tensor in tensors.items()}
    save_file(stock, folder / WEIGHTS, metadata={"format": "pt"})
    config = copy.copy(adapter.config)
    config.inference_mode = True
    if whole_modules := [*modules, *([MTP] if select_mtp_weights(tensors) else [])]:
        config.modules_to_save = [*dict.fromkeys((*(config.modules_to_save or ()), *whole_modules))]
    for key in ("target_modules", "target_parameters"):
        if isinstance(names := getattr(config, key, None), set):
            setattr(config, key, sorted(names))  # in one order, so that equal adapters have equal files
    config.save_pretrained(str(folder))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def name_in_peft_files(name: str, adapter: str) -> str:
    """Return the name of an adapter's tensor in peft's files, where names lack the name `adapter`.

    DoRA's magnitudes, a module each in the model, are plain parameters in files.

    >>> name_in_peft_files("model.layers.0.mlp.up_proj.lora_A.default.weight", "default")
    'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
    """
    bare = name.replace(f".modules_to_save.{adapter}.", ".")
    bare = re.sub(rf"\.lora_magnitude_vector\.{re.escape(adapter)}\.weight$", ".lora_magnitude_vector", bare)
    return "base_model.model." + re.sub(rf"(\.lora_\w+)\.{re.escape(adapter)}(?=\.|$)", r"\1", bare)


@contextmanager
def disable_adapter(model: nn.Module) -> Iterator[None]:
    """Let a model compute what its base model does inside; all ranks enter it together.

    >>> with disable_adapter(model):
    ...     reference = run_step(model, plan, documents, world, backward=False).loss

    `model` is what `prepare` returned, under any home. Nothing is trained inside: `run_step` with a backward pass
    raises ModelError there. `peft_model.disable_adapter()` of a PeftModel that was prepared does the same. Unlike
    peft's own it leaves unchanged which parameters require gradients: FSDP2 reads that when it first gathers them.
    Raises ModelError for a model that has no adapter.
    """
    modules: list[Any] = [*peft_modules(model).values()]
    if not modules and adapter_of_prepared_model(model) is None:
        raise ModelError(
            f"{type(model).__name__} has no adapter to leave out; call disable_adapter with the model that prepare "
            "returned"
        )
    old_flags = [module._disable_adapters for module in modules]
    for module in modules:
        module._disable_adapters = True
    try:
        yield
    finally:
        for module, disabled in zip(modules, old_flags, strict=True):
            module._disable_adapters = disabled


def refuse_adapter_left_out(model: nn.Module) -> None:
    """Raise ModelError before a model is trained while its adapter, the only part that is trained, is left out."""
    if adapter_of_prepared_model(model) is None:
        return
    modules: list[Any] = [*peft_modules(model).values()]
    if any(module._disable_adapters for module in modules):
        raise ModelError(
            "the model's adapter is left out (disable_adapter), and nothing else of it is trained; use backward=False "
            "there, or train outside of it"
        )


_CHANGES = (
    *(
        "merge_and_unload",
        "unload",
        "merge_adapter",
        "add_adapter",
        "load_adapter",
        "delete_adapter",
        "set_adapter",
    ),
    *("save_pretrained", "push_to_hub", "forward"),
)


def redirect_peft_model(peft_model: Any, prepared: nn.Module, saves: str = SAVES) -> None:
    """Have a PeftModel's `disable_adapter` leave the adapter out, and refuse methods that change its parts."""
    if peft_model is prepared or not hasattr(peft_model, "get_base_model"):
        return
    peft_model.disable_adapter = partial(disable_adapter, prepared)
    for name in _CHANGES:
        if hasattr(peft_model, name) or hasattr(peft_model.base_model, name):
            text = (
                f"PeftModel.{name}: the model inside it was prepared, and lies on several ranks; call {saves} on all "
                "ranks, whose folder stock peft loads, merges and pushes (of a run longspan export RUN FOLDER --merge "
                "merges it); choose adapters before prepare, and run the model that it returned"
            )
            setattr(peft_model, name, partial(refuse_call, text))
