"""Rules of a prepared model's calls, and refusals that several files share: set forwards, shared parameters, saving.

A forward set on one module runs like any other when the module is called. Where longspan makes a forward of the class's
code it would be dropped: such a module is refused by name, and so is a wrapper that is not transformers' own.
"""

import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple, NoReturn

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from longspan.comm import SequenceShard
from longspan.errors import ModelError, plural
from longspan.model.kinds import score_columns
from longspan.model.layers import architecture_name, decoder_layers, text_model_name
from longspan.model.marks import adapter_of_prepared_model
from longspan.plan import MicroBatch
from longspan.plan.shape.families import find_family
from longspan.plan.shape.positions import LengthLimit, length_class

DOCTOR = "; longspan doctor --model"
SAVES = "longspan.save_model(model, folder, world)"  # on all ranks; a Trainer has its own


def doctor_hint(model: Any) -> str:
    """Return the end of a message: the command that tries a small copy of this model, by its folder, family or class.

    "" for a class of one's own with a configuration of transformers, which names a model of transformers.
    """
    config = getattr(model, "config", None)
    kind = next(kind for kind in type(model).__mro__ if kind.__name__ == architecture_name(model))
    if kind.__module__.startswith(("transformers.", "longspan.")):
        folder = str(getattr(config, "_name_or_path", "") or "")
        name = folder if folder and Path(folder).is_dir() else getattr(config, "model_type", "") or kind.__name__
    elif type(config).__module__.startswith("transformers."):
        return ""
    else:  # a script's own module is imported by the name of its file
        file = getattr(sys.modules[kind.__module__], "__file__", None) or "MODULE.py"
        name = f"{Path(file).stem if 'main__' in kind.__module__ else kind.__module__}.{kind.__qualname__}"
    return f"{DOCTOR} {name} tries a small copy of it"


def has_forward_of_others(module: nn.Module) -> bool:
    """Return whether somebody else than longspan gave a module a forward in place of its class's.

    longspan's are functions of its modules, alone or in a `partial`, and copies of the class's code (`mixers.py`).
    """
    forward = vars(module).get("forward")
    in_class = type(module).forward
    function = forward.func if isinstance(forward, partial) else getattr(forward, "__func__", forward)
    if function is None or function is in_class or _defining_module(function).startswith("longspan."):
        return False
    return getattr(function, "__code__", None) is not getattr(inspect.unwrap(in_class), "__code__", None)


def is_wrapped_by_others(module: nn.Module) -> bool:
    """Return whether the forward of a module's class has a wrapper that is not transformers' own."""
    function: Any = type(module).forward
    while hasattr(function, "__wrapped__"):
        if not _defining_module(function).startswith("transformers."):
            return True
        function = function.__wrapped__
    return False


def modules_with_instance_forward(modules: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """Return the modules, by name and class, to which somebody gave a forward in place of their class's."""
    return [f"{name} ({type(module).__name__})" for name, module in modules if has_forward_of_others(module)]


def _defining_module(function: Any) -> str:
    return function.__globals__["__name__"] if isinstance(function, FunctionType) else ""


def refuse_shared_layers(
    model: PreTrainedModel, layers: Iterable[str], blocks: Sequence[Sequence[nn.Module]] = ()
) -> None:
    """Raise ModelError if a decoder layer shares parameters with another, or with what is around it.

    FSDP2 and sequence parallelism take each layer's as its own; layers may share those of `blocks`.
    """
    shared_in_blocks = {id(parameter) for modules in blocks for parameter in modules[0].parameters()}
    owner: dict[int, tuple[str, str]] = {}  # of a parameter: its first name, and its layer, "" around the layers
    prefixes = [f"{layer}." for layer in layers]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        layer = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        first, owner_layer = owner.setdefault(id(parameter), (name, layer))
        # parameters of a block may be in two layers, but not in a layer and around the layers
        may_share = "" not in (layer, owner_layer) and id(parameter) in shared_in_blocks
        if owner_layer != layer and not may_share:
            raise ModelError(
                f"{type(model).__name__}: {name} is {first}, and layers that share parameters are not sharded or split "
                "over rows; use shard_parameters=False and sequence_parallel=False, or give each layer its own"
            )


def guard_prepared_model(prepared: nn.Module, name: str, saves: str = SAVES) -> None:
    """Have a prepared model, and its base model, refuse to be saved, wrapped or generated from; `saves` saves it."""
    reasons = {
        method: f"{name}.{method} would write what this rank holds of a prepared model; call {saves} on all ranks, "
        "which writes a folder that transformers loads"
        for method in ("save_pretrained", "push_to_hub")
    }
    reasons["generate"] = (
        f"{name}.generate would need caches, which a prepared model has none of; {saves} on all ranks writes a folder "
        "that transformers loads and generates from"
    )
    modules = [module for module in prepared.modules() if isinstance(module, PreTrainedModel)]
    for module in (prepared, *modules):
        target: Any = module
        for method, reason in reasons.items():
            if method != "generate" or hasattr(target, method):
                setattr(target, method, partial(refuse_call, reason))
        # DistributedDataParallel fails as it reads this
        target._ddp_params_and_buffers_to_ignore = _RefusesDDP(name)


def refuse_call(message: str, *args: object, **kwargs: object) -> NoReturn:
    """Raise ModelError with this message, in place of a method that is refused."""
    raise ModelError(message)


@dataclass(eq=False)
class _RefusesDDP:
    """DistributedDataParallel reads this list of names first of all (torch 2.11 to 2.15)."""

    _name: str

    def __iter__(self) -> Iterator[str]:
        raise ModelError(
            f"{self._name} was prepared: its gradients are summed over the slots by run_step; do not wrap it in "
            "DistributedDataParallel, nor give it to accelerator.prepare or a Trainer, which do that; "
            "longspan.hf.with_longspan(Trainer) takes the model before prepare, and what takes their place in a loop "
            'is in docs/own-loop.md, "From a Trainer script"'
        )


_SAMPLE = ("exponential_", "multinomial", "gumbel_softmax")  # draw one of several, as some routers choose experts
# keys of dropout in attention, or in heads of other tasks
_NOT_HERE = ("att", "summary", "classifier", "layerdrop")


class PositionTable(NamedTuple):
    """A table of positions: the class of its model, its qualified name there, and how many positions it has."""

    model: str
    name: str
    positions: int


def position_table(model: PreTrainedModel) -> PositionTable | None:
    """Find the table around the decoder layers with `max_position_embeddings` rows (`offset` ones are none)."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(positions, int):
        return None
    layer_prefixes = tuple(f"{layer}." for layer in decoder_layers(model))
    for name, module in model.get_submodule(text_model_name(model)).named_modules():
        full_name = f"{text_model_name(model)}.{name}".strip(".")
        if full_name.startswith(layer_prefixes) or module is model.get_input_embeddings():
            continue
        if isinstance(module, nn.Embedding) and module.num_embeddings - getattr(module, "offset", 0) == positions:
            return PositionTable(type(model).__name__, full_name, positions)
        for buffer, table in module.named_buffers(recurse=False):
            if table.ndim == 2 and table.is_floating_point() and len(table) == positions:
                return PositionTable(type(model).__name__, f"{full_name}.{buffer}", positions)
    return None


def refuse_documents_beyond_positions(
    table: PositionTable, micro_batches: Iterable[MicroBatch], padding_rows: int = 0
) -> None:
    """Raise ModelError if a document, or rows of padding, go beyond a model's table of positions."""
    rows_of_documents = [
        (f"document {document} takes {rows} rows" + ("" if rows == length else f" ({length} tokens, padded)"), rows)
        for micro_batch in micro_batches
        for group in micro_batch.groups
        for document, length, rows in zip(
            group.documents,
            group.path_lengths,
            group.laid_out if group.parents is None else group.path_lengths,
            strict=True,
        )
    ]
    for subject, rows in (*rows_of_documents, (f"the shard has {padding_rows} rows of padding", padding_rows)):
        if rows > table.positions:
            raise ModelError(
                f"{subject}, {table.model} knows {table.positions} positions ({table.name}); use documents of at most "
                f"{table.positions} tokens, padding included, or a model with a larger table"
            )


@dataclass(frozen=True)
class CallRules:
    """The kernel of a model's layers, and conditions on its rows.

    Without a kernel each call takes the first that can. Draws are in words, outside attention. Rows see each other in
    items of modalities `in_spans`, or in a `prefix` of at most `prefix_window` rows; the shard must say where. What is
    `separate`, or so in training, is exact for separate documents alone, not for those that share prefixes. Rotary
    frequencies of a document's rows depend on its length by `length_limits`.
    """

    architecture: str
    attention_kernel: str | None = None
    position_table: PositionTable | None = None
    random_draws: tuple[str, ...] = ()
    draws_in_evaluation: tuple[str, ...] = ()
    row_multiple: int = 1
    in_spans: tuple[str, ...] = ()
    prefix: bool = False
    prefix_window: int | None = None
    separate: tuple[str, ...] = ()
    separate_in_training: tuple[str, ...] = ()
    length_limits: tuple[LengthLimit, ...] = ()

    def add_kernel_argument(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Put the model's kernel into the keyword arguments of a call, unless the caller chose one."""
        kernel = {} if self.attention_kernel is None else {"attention_kernel": self.attention_kernel}
        return {**kernel, **arguments}

    def check_rows(self, shard: SequenceShard) -> None:
        """Raise ModelError for a number of rows that sequence parallelism cannot split evenly."""
        if shard.local_rows % self.row_multiple:
            raise ModelError(
                f"the shard holds {shard.local_rows} rows, which sequence parallelism cannot split over tp "
                f"{self.row_multiple}; use shard.with_padding(multiple={self.row_multiple}), and plans with "
                f"row_multiple={self.row_multiple}"
            )

    def separate_features(self, *, training: bool) -> tuple[str, ...]:
        """Return what the model computes that is not exact where documents share prefixes.

        Documents that do must have the same frequencies by `length_limits`.
        """
        spans = ["a bidirectional prefix"] if self.prefix else [f"spans of {name}" for name in self.in_spans]
        return (*self.separate, *spans, *(self.separate_in_training if training else ()))

    def check_families(self, micro_batches: Iterable[MicroBatch], *, training: bool) -> None:
        """Raise ModelError if the model computes something that is not exact where documents share prefixes."""
        if features := self.separate_features(training=training):
            raise ModelError(
                f"{self.architecture} has {', '.join(features)}, exact for separate documents alone, and documents of "
                "the plan share prefixes; plan the documents before share_prefixes"
            )
        for group in (group for batch in micro_batches for group in batch.groups):
            for index, parent in enumerate(group.parents or ()):
                rows = [group.longest_paths[i] for i in (index, max(parent, 0))]
                if parent >= 0 and len({length_class(self.length_limits, n) for n in rows}) > 1:
                    raise ModelError(
                        f"document {group.documents[index]} of {plural(rows[0], 'row')} continues one that others of "
                        f"up to {rows[1]} continue, and {self.architecture} has other rotary frequencies for these; "
                        "call share_prefixes(documents, length_limits=model.call_rules.length_limits), or plan the "
                        "documents before it"
                    )

    def check_spans(self, shard: SequenceShard) -> None:
        """Raise ModelError for a shard without spans, if rows of this model may see each other."""
        documents = len(shard.micro_batch.documents)
        span_names = ["a prefix"] if self.prefix else self.in_spans
        if span_names and shard.spans is None and documents:
            raise ModelError(
                f"{self.architecture}: rows of {' and '.join(span_names)} see each other, and the shard of "
                f"{documents} documents says nothing of them; use shard.with_spans(...), with {{}} for text alone"
            )


def is_prepared(model: nn.Module) -> bool:
    """Return whether `prepare` has brought this model under a home."""
    return hasattr(model, "call_rules")


def refuse_unprepared_model(model: nn.Module) -> None:
    """Raise ModelError for a transformers model whose attention would take the local rows for the whole sequence."""
    if isinstance(model, PreTrainedModel) and not is_prepared(model):
        raise ModelError(
            f"{type(model).__name__} was not prepared; call model = longspan.prepare(model, world) before it runs"
        )


def call_rules(model: nn.Module) -> CallRules:
    """Return the rules of a prepared model; for a model that is not prepared, rules that refuse nothing."""
    return getattr(model, "call_rules", None) or CallRules(type(model).__name__)


def has_bidirectional_prefix(config: PreTrainedConfig) -> bool:
    """Return whether rows at the start of a document see each other in both directions (PaliGemma's prompts)."""
    return find_family(config.model_type).prefix_rows


def make_layers_causal(model: nn.Module) -> None:
    """Set `is_causal`, which transformers sets False in models with prefixes; the shard has their spans."""
    config: Any = model.config
    for module in model.modules():
        if getattr(module, "config", None) is config.get_text_config() and hasattr(module, "is_causal"):
            module.is_causal = True  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]


def refuse_randomness(model: nn.Module, *, training: bool = True) -> None:
    """Raise ModelError if training, or evaluating, this prepared model would draw numbers that depend on the layout."""
    rules = call_rules(model)
    evaluation_draws = rules.draws_in_evaluation
    if draws := ", ".join(rules.random_draws if training else evaluation_draws):
        config = getattr(model, "config", None)
        when, allowed_text = (
            (" and in evaluation", "") if evaluation_draws else ("", ", and evaluation draws nothing")
        )
        remedy = _remedy_text(config, draws, in_evaluation=bool(evaluation_draws))
        if score_columns(model) and "set " not in remedy:  # transformers' 0.1 of a token classifier
            remedy = "before the model is built, set classifier_dropout to 0.0 in its configuration (config.json)"
        raise ModelError(
            f"{rules.architecture} draws at random outside attention in training{when}: {draws}. Each rank would draw "
            f"for its own rows, so that the loss would depend on the layout; {remedy}. Attention "
            f"dropout may stay{allowed_text}"
        )


def _remedy_text(config: Any, draws: str, *, in_evaluation: bool) -> str:
    """No key ends a draw of one of several (`_SAMPLE`), as of experts by a router."""
    is_sampled = any(f"{function} " in draws for function in _SAMPLE)
    values = {} if config is None else config.get_text_config().to_dict()
    words = ("drop", "jitter", "noise")
    names = [key for key in values if any(w in key for w in words) and not any(w in key for w in _NOT_HERE)]
    # Every key of "layerdrop", last, even one that names attention, since whole layers are left out by it.
    names += [key for key in values if "layerdrop" in key and key not in names]
    keys = ", ".join(f"{key} ({values[key]:g})" for key in names if _is_positive(values[key]))
    if is_sampled or not keys:
        allowed_text = "" if in_evaluation else ": it can be evaluated alone"
        return f"it does so by its code, and no key of its configuration is known to end that{allowed_text}"
    return f"before the model is built, set {keys} to 0.0 in its configuration (config.json)"


def refuse_two_pass_dropout(model: nn.Module, losses: str) -> None:
    """Raise ModelError if training drops attention weights, or inputs of an adapter; `losses` need two equal passes."""
    config = getattr(model, "config", None)
    adapter = adapter_of_prepared_model(model)
    values = {} if config is None else config.get_text_config().to_dict()
    if adapter is not None:
        values["lora_dropout"] = adapter.dropout
    drops = {key: x for key, x in values.items() if key == "lora_dropout" or ("att" in key and "drop" in key)}
    if keys := [f"{key} ({rate:g})" for key, rate in drops.items() if _is_positive(rate)]:
        raise ModelError(
            f"{losses}: their loss takes two forward passes, which dropout would make differ; set {', '.join(keys)} to "
            "0.0 in the configuration before the model is built, or plan so that one micro-batch in lockstep holds "
            "all documents of a set"
        )


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
