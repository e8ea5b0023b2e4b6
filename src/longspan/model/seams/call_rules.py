"""What the calls and steps of a prepared model are checked against: a value that `prepare` leaves on the model.

It contains how many positions a model has, if it reads them from a table: learnt, as GPT-2's, or made once, as CTRL's.
Rotary models have no table and are not limited here, whatever `max_position_embeddings` says of their training. It
contains what a model draws at random outside attention: each rank would draw for the rows that it happens to hold, and
loss and gradients would depend on the layout. (Attention's dropout is exact: its masks are hashed from global
positions.) And whether prompts are prefixes, whose rows see each other (PaliGemma); in a step the prefix of a document
is what stands before its first target (`train/read_rows.py`), as the models' own processor makes its labels.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from longspan.comm import SequenceShard
from longspan.errors import ModelError
from longspan.model.adapters import model_adapter
from longspan.model.layers import decoder_layers, text_name
from longspan.plan import MicroBatch

_WITH_PREFIX = ("paligemma",)
_SAMPLE = ("exponential_", "multinomial", "gumbel_softmax")  # draw one of several, as some routers choose experts
_NOT_HERE = ("att", "summary", "classifier", "layerdrop")  # keys of dropout in attention, or in heads of other tasks


class PositionTable(NamedTuple):
    """A table of positions: the class of its model, its qualified name there, and how many positions it has."""

    model: str
    name: str
    positions: int


def position_table(model: PreTrainedModel) -> PositionTable | None:
    """Find the table around the decoder layers with as many rows as `max_position_embeddings`; None without one.

    Rows that a module skips at the start of its table (`offset`) are no positions. Tables inside layers, and the token
    embedding, whose vocabulary may be as large by chance, are passed over.
    """
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(positions, int):
        return None
    layer_prefixes = tuple(f"{layer}." for layer in decoder_layers(model))
    for name, module in model.get_submodule(text_name(model)).named_modules():
        full_name = f"{text_name(model)}.{name}".strip(".")
        if full_name.startswith(layer_prefixes) or module is model.get_input_embeddings():
            continue
        if isinstance(module, nn.Embedding) and module.num_embeddings - getattr(module, "offset", 0) == positions:
            return PositionTable(type(model).__name__, full_name, positions)
        for buffer, table in module.named_buffers(recurse=False):
            if table.ndim == 2 and table.is_floating_point() and len(table) == positions:
                return PositionTable(type(model).__name__, f"{full_name}.{buffer}", positions)
    return None


def refuse_positions(table: PositionTable | None, micro_batches: Iterable[MicroBatch], padding_rows: int = 0) -> None:
    """Raise ModelError if a document, or rows of padding, go beyond a model's table of positions."""
    if table is None:
        return
    rows_of_documents = [
        (f"document {document} takes {rows} rows" + ("" if rows == length else f" ({length} tokens, padded)"), rows)
        for micro_batch in micro_batches
        for group in micro_batch.groups
        for document, length, rows in zip(group.documents, group.lengths, group.laid_out, strict=True)
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

    `attention_kernel` None: each call of attention takes the first kernel that can. A slot's rows must be a multiple of
    `row_multiple`, which is tp under sequence parallelism. `random_draws` are in words what training would draw outside
    attention, `draws_in_evaluation` what evaluation would. Rows see each other in both directions within an item of the
    modalities `in_spans`, or with `prefix` at the start of each document; the shard must then say where (`spans`). If
    layers have a window, a prefix has at most `prefix_window` rows.
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

    def put_kernel(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
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


def call_rules(model: nn.Module) -> CallRules:
    """Return the rules of a prepared model; for a model that is not prepared, rules that refuse nothing."""
    return getattr(model, "call_rules", None) or CallRules(type(model).__name__)


def has_prefix(config: PreTrainedConfig) -> bool:
    """Return whether rows at the start of a document see each other in both directions (PaliGemma's prompts)."""
    return config.model_type in _WITH_PREFIX


def make_layers_causal(model: nn.Module) -> None:
    """Set `is_causal` in the layers of a model with prefixes; the shard's spans let rows of a prefix see each other.

    transformers sets it False, as the model's own mask, which is not built here, says which rows see which.
    """
    config: Any = model.config
    if not has_prefix(config):
        return
    for module in model.modules():
        if getattr(module, "config", None) is config.get_text_config() and hasattr(module, "is_causal"):
            module.is_causal = True  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]


def refuse_randomness(model: nn.Module, *, training: bool = True) -> None:
    """Raise ModelError if training, or evaluating, this prepared model would draw numbers that depend on the layout."""
    rules = call_rules(model)
    evaluation_draws = rules.draws_in_evaluation
    if draws := ", ".join(rules.random_draws if training else evaluation_draws):
        config = getattr(model, "config", None)
        when, allowed_text = (" and in evaluation", "") if evaluation_draws else ("", ", and evaluation draws nothing")
        remedy = _remedy_text(config, draws, in_evaluation=bool(evaluation_draws))
        raise ModelError(
            f"{rules.architecture} draws at random outside attention in training{when}: {draws}. Each rank would draw "
            f"for its own rows, so that the loss would depend on the layout; {remedy}. Attention "
            f"dropout may stay{allowed_text}"
        )


def _remedy_text(config: Any, draws: str, *, in_evaluation: bool) -> str:
    """`draws` names the functions that draw. No key ends a draw of one of several (`_SAMPLE`), as of experts by a
    router. `in_evaluation`: they happen in evaluation too.
    """
    is_sampled = any(f"{function} " in draws for function in _SAMPLE)
    if is_sampled or not (keys := _random_keys(config)):
        allowed_text = "" if in_evaluation else ": it can be evaluated alone"
        return f"it does so by its code, and no key of its configuration is known to end that{allowed_text}"
    return f"before the model is built, set {keys} to 0.0 in its configuration (config.json)"


def _random_keys(config: Any) -> str:
    """Left out are keys in `_NOT_HERE`, of attention or of parts that do not run here. Every key of "layerdrop" is
    listed, last, even one that names attention, since whole layers are left out by it.
    """
    values = {} if config is None else config.get_text_config().to_dict()
    words = ("drop", "jitter", "noise")
    keys = [key for key in values if any(w in key for w in words) and not any(w in key for w in _NOT_HERE)]
    keys += [key for key in values if "layerdrop" in key and key not in keys]
    return ", ".join(f"{key} ({values[key]:g})" for key in keys if _is_positive(values[key]))


def refuse_two_pass_dropout(model: nn.Module, losses: str) -> None:
    """Raise ModelError if training this prepared model drops attention weights, or inputs of its adapter.

    `losses`, in words, need two forward passes that are equal.
    """
    config, adapter = getattr(model, "config", None), model_adapter(model)
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
