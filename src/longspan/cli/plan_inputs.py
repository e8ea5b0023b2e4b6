"""What `plan` and `simulate` plan for: document lengths, a model and a machine. Nothing here imports torch.

Lengths come from a JSON file, text files (estimated as bytes / 4 unless a tokenizer is given), or a named distribution;
seconds from `--cost`, `--model`, `--heads` and `--weights`. In free mode over sharded parameters a step gathers them
before its first micro-batch and sums gradients after its last one, in a micro-batch that all slots enter. Its seconds
depend on the model's parameters (`--weights`).
"""

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Unpack

from longspan.errors import ConfigError, DataError
from longspan.layout import Layout, check_lengths
from longspan.plan import Cost, Plan, PlanOptions
from longspan.plan.cost.cost import DEFAULT_COST
from longspan.plan.cost.cost_file import read_cost
from longspan.plan.cost.model_cost import cost_on_h200
from longspan.plan.cost.model_shape import read_query_heads
from longspan.plan.micro_batch import PartitionKind
from longspan.plan.planners.options import PlanKeywords
from longspan.plan.simulate.distributions import DISTRIBUTIONS, sample_lengths
from longspan.plan.simulate.which_partition import which_partition
from longspan.train.data.files import find_files
from longspan.train.data.first_rows import kind_of_files, text_sizes
from longspan.train.data.formats.row_file import row_file
from longspan.train.data.store.sources import CorpusFile

BYTES_PER_TOKEN = 4  # of English text and code under the usual byte-pair vocabularies


@dataclass(frozen=True, kw_only=True)
class SourceFlags:
    """Where the documents come from: exactly one of --lengths, --data, --distribution and --same."""

    lengths: str = ""
    """JSON file with a list of document lengths in tokens, or a plan; - reads standard input."""
    data: str = ""
    """Rows of data instead, as data.path has them: stdlib, or a folder or file; tokens are estimated as bytes / 4."""
    tokenizer: str = ""
    """With --data: a folder with tokenizer.json, to count tokens instead of estimating them."""
    max_document_tokens: int = 0
    """With --data: cut longer documents into pieces of at most this many tokens; 0: leave them whole."""
    distribution: str = ""
    """Lengths drawn at random instead: lognorm, bimodal, uniform, expo or files."""
    tokens: int = 0
    """With --distribution: draw documents of so many tokens together; 0: 32768 for each slot."""
    longest: int = 131072
    """With --distribution: no document is longer."""
    seed: int = 0
    """With --distribution: seed of the draw."""
    same: str = ""
    """Documents of one length instead, such as 1024x8192: 1024 documents of 8192 tokens."""


def read_lengths(flags: SourceFlags, slots: int) -> tuple[tuple[int, ...], str]:
    """The lengths that the flags name, and where they came from. Raises ConfigError, DataError or LayoutError."""
    sources = [name for name in ("lengths", "data", "distribution", "same") if getattr(flags, name)]
    if len(sources) != 1:
        drawn = " and ".join(f"--{name}" for name in sources) or "none of them"
        known = "--lengths FILE.json, --data PATH, --distribution NAME and --same COUNTxLENGTH"
        raise ConfigError(f"give one of {known}; got {drawn}")
    if flags.same:
        return _same(flags.same), f"--same {flags.same}"
    if flags.lengths:
        return lengths_from_json(flags.lengths), flags.lengths
    if flags.data:
        return _from_text(flags)
    if flags.distribution not in DISTRIBUTIONS:
        raise ConfigError(f"--distribution {flags.distribution!r} is unknown; use one of {', '.join(DISTRIBUTIONS)}")
    total = flags.tokens or 32768 * slots
    drawn = sample_lengths(flags.distribution, total, seed=flags.seed, longest=flags.longest)
    return tuple(drawn.tolist()), f"{flags.distribution} lengths, seed {flags.seed}"


def lengths_from_json(path: str) -> tuple[int, ...]:
    """Lengths from a JSON list, or from the "lengths" of a JSON object such as a plan."""
    value = _read_json(path)
    if isinstance(value, dict):
        value = value.get("lengths")
    if not isinstance(value, list):
        raise ConfigError(f'{path} holds no lengths; give a JSON list such as [300, 20], or an object with "lengths"')
    if not value:
        raise ConfigError(f"{path} holds no documents: its list of lengths is empty; give at least one length")
    return check_lengths(value)


def _same(text: str) -> tuple[int, ...]:
    count, _, length = text.lower().partition("x")
    if not count.isdecimal() or not length.isdecimal() or not int(count):
        raise ConfigError(f"--same {text!r} is not COUNTxLENGTH, such as 1024x8192")
    return check_lengths([int(length)] * int(count))


def _read_json(path: str) -> Any:
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
        return json.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read lengths from {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"cannot read lengths from {path}: it is not JSON ({error})") from error


def _from_text(flags: SourceFlags) -> tuple[tuple[int, ...], str]:
    files = tuple(CorpusFile(0, name, file) for name, file in find_files(flags.data, key="--data").items())
    if flags.tokenizer:
        counts = _encoded_lengths(files, flags.tokenizer)
    else:
        counts = [n for size in text_sizes(files) if (n := size // BYTES_PER_TOKEN)]
    if not counts:
        raise DataError(f"--data {flags.data!r} holds no text")
    how = f"counted with {flags.tokenizer}" if flags.tokenizer else f"estimated as bytes / {BYTES_PER_TOKEN}"
    return tuple(_cut(counts, flags.max_document_tokens)), f"{flags.data}, tokens {how}"


def _encoded_lengths(files: Sequence[CorpusFile], tokenizer: str) -> list[int]:
    """The tokens of each document that training would make, uncut."""
    from longspan.train.data.rows.encoding import RowEncoding
    from longspan.train.data.store.encoder import Encoder, Piece
    from longspan.train.data.tokenizer import load_tokenizer

    encoding = RowEncoding(kind_of_files(files, skip_bad=False), load_tokenizer(tokenizer))
    encoder, lengths = Encoder((encoding,), 0, "<u4"), list[int]()
    for number, file in enumerate(files):
        for chunk in row_file(file.name, file.path).chunks():
            lengths += encoder.encode([Piece(0, number, chunk)]).lengths.tolist()
    return lengths


def _cut(counts: list[int], limit: int) -> list[int]:
    if limit <= 0:
        return counts
    return [n for count in counts for n in (*[limit] * (count // limit), count % limit) if n]


DEFAULT_HEADS = 32  # of Qwen3-8B, which the default cost is of

NO_HEADS = (
    "a2a: the model's query heads are not known, and a degree that does not divide them cannot be trained;\n"
    "--model FOLDER or --heads N keeps to degrees that do"
)
UNPRICED = (
    "free mode: gathering sharded parameters and summing their gradients, once a step, is not in these seconds;\n"
    "--weights N adds it for a model of N parameters (8.19e9 for Qwen3-8B)"
)


@dataclass(frozen=True, kw_only=True)
class PricingFlags:
    """What the seconds of a plan are made of, and which degrees its model allows."""

    cost: str = ""
    """JSON file with the constants of a machine and model; empty: what --model says, else Qwen3-8B on GPUs of 400
    TFLOP/s."""
    model: str = ""
    """Folder or config.json of a transformers model: without --cost its sizes price the plan, on H200s; its query heads
    limit the degrees of a2a."""
    heads: int = 0
    """Query heads of the model, where there is no --model; 0: the 32 of Qwen3-8B, and not known with --cost."""
    cp_comm_type: Literal["", "p2p", "all_gather", "a2a", "a2a+p2p", "auto"] = ""
    """How the slots of a group share attention; auto: chosen for each group, and by simulate --which-eval-degree for
    each degree; empty: p2p, of hybrids the fastest."""
    hierarchical_context_parallel_sizes: tuple[int, ...] = ()
    """With a2a+p2p: the a2a and the p2p size."""


def read_price(flags: PricingFlags) -> Cost:
    """The cost of one device. Raises ConfigError for a file that holds none, PlanError for a model without a price."""
    if flags.model and not flags.cost:
        return cost_on_h200(flags.model)
    return read_cost(flags.cost, "--cost")


def heads_of(flags: PricingFlags) -> int | None:
    """The query heads of the model that is planned for; None where nothing tells them."""
    if flags.heads < 0:
        raise ConfigError(f"--heads is {flags.heads}; give the model's number of query heads, such as 32")
    if flags.heads and flags.model:
        raise ConfigError(f"--heads {flags.heads} and --model {flags.model}, which says its own; give one of them")
    if flags.model:
        return read_query_heads(flags.model)
    return flags.heads or (None if flags.cost else DEFAULT_HEADS)


def plan_options(flags: PricingFlags, **keywords: Unpack[PlanKeywords]) -> PlanOptions:
    """The planners' options that these flags say, and those of a verb."""
    sizes = flags.hierarchical_context_parallel_sizes or None
    hybrid = (keywords.get("cost") or DEFAULT_COST).states is not None
    said = PlanKeywords(
        cp_comm_type=flags.cp_comm_type or ("auto" if hybrid else "p2p"),
        hierarchical_context_parallel_sizes=sizes,
        heads=heads_of(flags),
    )
    return PlanOptions(**keywords | said)


def planned(
    make: Callable[[PlanOptions], Plan], options: PlanOptions, partition: Literal["auto"] | PartitionKind = "auto"
) -> tuple[Plan, str]:
    """The plan of these options and, of a hybrid, why its rows are dealt out as they are; "" otherwise.

    A `partition` "auto" of another model is zigzag.
    """
    if options.cost.states is None:
        return make(replace(options, partition="zigzag" if partition == "auto" else partition)), ""
    choice = which_partition(lambda way: make(way).predicted_seconds, options, partition)
    return make(choice.options), f"rows {choice.reason}"


def notes_on(flags: PricingFlags) -> Sequence[str]:
    """What a reader of the plan has to know."""
    return [NO_HEADS] if "a2a" in flags.cp_comm_type and heads_of(flags) is None else []


@dataclass(frozen=True, kw_only=True)
class ClosingFlags:
    """What the closing micro-batch of free mode is priced by."""

    weights: float = 0.0
    """With free mode: parameters that are sharded over the slots (8.19e9 for Qwen3-8B); their gathering before a step
    and the sum of their gradients after it are added to its seconds. 0: what the cost file says, else nothing."""
    dp_replicate: int = 1
    """With --weights: copies of them (HSDP), each sharded over slots / copies."""


def check_weights(flags: ClosingFlags, *, free: bool) -> None:
    """Raise ConfigError for a number that counts nothing, and in lockstep, where layers are gathered as they come."""
    if not 0 <= flags.weights < math.inf:
        raise ConfigError(f"--weights is {flags.weights:g}; give a model's number of parameters, such as 8.19e9")
    if flags.weights and not free:
        raise ConfigError(
            f"--weights {flags.weights:g} prices the closing micro-batch of free mode, and --mode is lockstep; add "
            "--mode free, or leave --weights out"
        )
    if flags.dp_replicate != 1 and not flags.weights:
        raise ConfigError(
            f"--dp-replicate {flags.dp_replicate} is how the weights of --weights are copied, and there are none; add "
            "--weights, or leave it out"
        )


def with_weights(cost: Cost, flags: ClosingFlags, *, slots: int, node_size: int, tp: int = 1) -> Cost:
    """The cost with the closing micro-batch of these weights, of which each of `tp` ranks of a slot holds a part."""
    if not flags.weights:
        return cost
    home = Layout(slots, dp_replicate=flags.dp_replicate)
    return cost.with_closing(flags.weights / tp, home, node_size=node_size)
