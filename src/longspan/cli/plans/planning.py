"""What `longspan plan` and its comparisons share: flags, document lengths, the price of a plan and planners' options.

Lengths come from a JSON file, text files (bytes / 4 unless a tokenizer is given), or a distribution. No torch.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from longspan.cli.flags import check_least
from longspan.config.keys import AUTO
from longspan.config.plan_section import PLANNERS
from longspan.corpus.files import CorpusFile, find_files, kind_of_files, text_sizes
from longspan.corpus.row_files import row_file
from longspan.errors import ConfigError, DataError, PlanError
from longspan.files import parse_json
from longspan.hub import hub_name
from longspan.layout import Layout, check_lengths
from longspan.plan import Cost, Plan, PlanOptions
from longspan.plan.check import check_comm_types, heads_allow
from longspan.plan.cost.cost import DEFAULT_COST
from longspan.plan.cost.machine import CostSettings, Machine, is_known, read_machine
from longspan.plan.distributions import DISTRIBUTIONS, sample_lengths
from longspan.plan.shape.model_shape import QWEN3_8B, read_query_heads
from longspan.train.plans.run_cost import call_planner, check_planner

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
    longest_document: int = 131072
    """With --distribution: no document is longer."""
    seed: int = 0
    """With --distribution: seed of the draw."""
    same: str = ""
    """Documents of one length instead, such as 1024x8192: 1024 documents of 8192 tokens."""


def read_lengths(flags: SourceFlags, slots: int) -> tuple[tuple[int, ...], str]:
    """Read the lengths of the one source that the flags name, and return them with a text that names it. A distribution
    is drawn for `slots` where --tokens is not given. Raises ConfigError, DataError or LayoutError.
    """
    sources = [name for name in ("lengths", "data", "distribution", "same") if getattr(flags, name)]
    if len(sources) != 1:
        several = " and ".join(f"--{name}" for name in sources) or "none of them, and it needs documents"
        names = "--lengths FILE.json, --data PATH, --distribution NAME and --same COUNTxLENGTH (such as --same 8x8192)"
        raise ConfigError(f"give one of {names}; got {several}")
    if flags.same:
        count, _, length = flags.same.lower().partition("x")
        if not count.isdecimal() or not length.isdecimal() or not int(count):
            raise ConfigError(f"--same {flags.same!r} is not COUNTxLENGTH, such as 1024x8192")
        return check_lengths([int(length)] * int(count)), "equal lengths"
    if flags.lengths:
        return read_json_lengths(flags.lengths), flags.lengths
    if flags.data:
        return _read_text_lengths(flags)
    if flags.distribution not in DISTRIBUTIONS:
        raise ConfigError(f"--distribution {flags.distribution!r} is unknown; use one of {', '.join(DISTRIBUTIONS)}")
    total = flags.tokens or 32768 * slots
    sample = sample_lengths(flags.distribution, total, seed=flags.seed, longest=flags.longest_document)
    return tuple(sample.tolist()), f"{flags.distribution} lengths, seed {flags.seed}"


def read_json_lengths(path: str) -> tuple[int, ...]:
    """Read lengths from a JSON list, or the "lengths" of an object such as a plan; "-" is standard input."""
    try:
        value = parse_json(sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read lengths from {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"cannot read lengths from {path}: it is not JSON ({error})") from error
    if isinstance(value, dict):
        value = value.get("lengths")
    if not isinstance(value, list):
        raise ConfigError(f'{path} holds no lengths; give a JSON list such as [300, 20], or an object with "lengths"')
    if not value:
        raise ConfigError(f"{path} holds no documents: its list of lengths is empty; give at least one length")
    return check_lengths(value)


def _read_text_lengths(flags: SourceFlags) -> tuple[tuple[int, ...], str]:
    files = tuple(CorpusFile(0, name, file) for name, file in find_files(flags.data, key="--data").items())
    if flags.tokenizer:
        counts = _count_tokens(files, flags.tokenizer)
    else:
        counts = [n for size in text_sizes(files) if (n := size // BYTES_PER_TOKEN)]
    if not counts:
        raise DataError(f"--data {flags.data!r} holds no text")
    method = f"counted with {flags.tokenizer}" if flags.tokenizer else f"estimated as bytes / {BYTES_PER_TOKEN}"
    return tuple(cut_lengths(counts, flags.max_document_tokens)), f"{flags.data}, tokens {method}"


def _count_tokens(files: Sequence[CorpusFile], tokenizer: str) -> list[int]:
    # A limit of 0 means none, for the bytes of a row as for the tokens of a document.
    from longspan.corpus.document_encoder import DocumentEncoder, FileChunk
    from longspan.corpus.rows.encoding import RowEncoding
    from longspan.corpus.tokenizer import load_tokenizer

    encoding = RowEncoding(kind_of_files(files, skip_bad=False, most_bytes=0), load_tokenizer(tokenizer))
    encoder, lengths = DocumentEncoder((encoding,), 0, "<u4"), list[int]()
    for number, file in enumerate(files):
        for chunk in row_file(file.name, file.path, 0).chunks():
            lengths += encoder.encode_chunks([FileChunk(0, number, chunk)]).lengths.tolist()
    return lengths


def cut_lengths(counts: list[int], limit: int) -> list[int]:
    if limit <= 0:
        return counts
    return [n for count in counts for n in (*[limit] * (count // limit), count % limit) if n]


USUAL_ROWS = 8192  # of a slot
DEFAULT_HEADS = 32  # of Qwen3-8B, which the default cost is of

UNPRICED = (
    "free mode: gathering sharded parameters and summing their gradients, once a step, is not in these seconds;\n"
    "--gpu NAME --gpus N --model FOLDER prices it by the model's weights"
)


@dataclass(frozen=True, kw_only=True)
class PlanningFlags(SourceFlags):
    """Documents, slots and a price: flags that one plan and a comparison both have."""

    planner: str = "auto"
    """fixed: packed, one degree; padded: one document a row, padded; dynamic: a degree for each document; auto: fixed
    where --cp is given, else dynamic. A function of your own by its dotted name, as in train; with --compare, a row
    beside these."""
    slots: int = 0
    """Slots of the home: ranks / (tensor-parallel degree x pipeline stages)."""
    node_size: int = 8
    """Slots of one host, with --compare its ranks; groups inside a host talk over its fast links."""
    mode: Literal["lockstep", "free"] = "lockstep"
    """lockstep: all slots end a micro-batch together (FSDP, EP, pipelines); free: only members of a group wait."""
    machine: str = ""
    """JSON file of longspan bench calibrate, or a known GPU: a100-40, a100-80, h100, h200, b200. Prices --model or,
    without it, Qwen3-8B; empty: --model on H200s or, without it, Qwen3-8B on GPUs of 400 TFLOP/s."""
    model: str = ""
    """Folder or config.json of a transformers model, whose sizes price the plan; its query heads limit the degrees of
    a2a."""
    tflops: float = 0.0
    """What a device sustains, in 1e12 FLOP/s: prices the sizes of --model, or of Qwen3-8B, on such devices, whose links
    carry 350 GB/s inside a host and 40 elsewhere; 0: those of --machine and --model. With --gpu-bytes: of them."""
    heads: int = 0
    """Query heads of the model, where there is no --model; 0: the 32 of Qwen3-8B."""
    mtp_depths: int = 0
    """With --model: depths of multi-token prediction behind it, which run in training steps; evaluations leave them
    out."""
    cp_comm_type: Literal["auto", "p2p", "all_gather", "a2a", "a2a+p2p"] = "auto"
    """How the slots of a group share attention; auto: the fastest way of each group."""
    hierarchical_context_parallel_sizes: int | tuple[int, ...] = 0
    """With a2a+p2p: the a2a and the p2p size, or the a2a size of groups of any degree (2 2, or 2); 0: the best
    ones of each group."""
    cp: int = 0
    """Degree of fixed and padded plans; 0: the smallest that divides the slots and holds the longest document, with
    --compare up to five such degrees."""
    min_cp: int = 1
    """Smallest degree that a dynamic plan may choose."""
    max_cp: int = 0
    """Largest degree that a dynamic plan may choose; 0: no limit."""
    micro_batch_multiple: int = 1
    """Round the number of micro-batches up to a multiple of this (pipelines with several chunks a stage)."""
    max_tokens_per_slot: int | str = AUTO
    """Rows that a slot holds in one micro-batch, at most; auto: 8192, or what the longest document needs if that is
    more; 0: no limit, as if memory had none."""
    json: bool = False
    """Print the result as JSON, and nothing else, on standard output."""


def check_degrees(flags: PlanningFlags) -> None:
    """Raise ConfigError for degrees that are out of bounds, or that leave a dynamic plan no choice."""
    check_least(flags, cp=0, min_cp=1, max_cp=0, micro_batch_multiple=1)
    if 0 < flags.max_cp < flags.min_cp:
        raise ConfigError(f"--min-cp is {flags.min_cp} and --max-cp {flags.max_cp}; give a --max-cp that is not less")


def find_machine(name: str, key: str) -> Machine:
    """Find the machine of a GPU by name, or of a file; `key` is the flag or key of the name, for errors."""
    if not (is_known(name) or Path(name).suffix or Path(name).exists()):
        try:  # raises, with the names that are known
            return Machine.known(name)
        except PlanError as error:
            raise ConfigError(f"{key} {name}: {error}; other GPUs are --gpu-bytes N --tflops N") from error
    return read_machine(name, key)


def read_price(flags: PlanningFlags, *, slots: int, tp: int = 1, mode: str = "lockstep", training: bool = True) -> Cost:
    """Read the cost of one device; if not `training` (an evaluation), without depths of multi-token prediction. In
    lockstep the price of a model on a machine includes FSDP2's gathers and sums over `slots` slots, in which a rank
    moves its 1 / `tp` of the weights. Without --machine a model is priced on H200s, and without --model either, the
    price is DEFAULT_COST.
    """
    if flags.mtp_depths < 0 or (flags.mtp_depths and not flags.model):
        raise ConfigError(
            f"--mtp-depths {flags.mtp_depths} with no --model; give --model FOLDER, whose last layer depths are like, "
            "and a number from 0"
        )
    depths, model = flags.mtp_depths if training else 0, flags.model or QWEN3_8B
    path = Path(flags.model).resolve()
    folder = path.parent if path.is_file() else path
    name = (hub_name(folder) or folder.name) if flags.model else "Qwen3-8B"
    if flags.tflops:
        if flags.machine or not 0 < flags.tflops < math.inf:
            reason = f"--machine {flags.machine}, which has its own speed" if flags.machine else "a speed is above 0"
            raise ConfigError(f"--tflops {flags.tflops:g}: {reason}; give --tflops N, such as 400, or --machine")
        cost = Cost.for_model(model, tflops=flags.tflops, depths=depths)
        return replace(cost, source=f"{name} on GPUs of {flags.tflops:g} TFLOP/s")
    if not flags.machine and not flags.model:
        return DEFAULT_COST
    machine = find_machine(flags.machine or "h200", "--machine")
    settings = CostSettings(depths=depths, shards=slots, free=mode == "free", weight_ranks=tp)
    cost = machine.cost(model, settings)
    return replace(cost, source=(cost.source or "").replace("the model", name, 1))


def check_slots(flags: PlanningFlags) -> None:
    """Raise ConfigError for a plan without slots, which asks for documents where none are named."""
    if flags.slots < 1:
        sources = {name: getattr(flags, name) for name in ("lengths", "data", "distribution", "same")}
        documents = next((f"--{name} {value}" for name, value in sources.items() if value), "")
        needs, documents = "slots" if documents else "documents and slots", documents or "--same 8x8192"
        raise ConfigError(
            f"longspan plan needs {needs} (GPUs / (tp x pp)): longspan plan {documents} --slots 4; or ask what fits "
            f"GPUs: longspan plan --model FOLDER --gpu h100 --gpus 4 {documents}"
        )


def own_planners(flags: PlanningFlags) -> dict[str, Callable[..., Plan]]:
    """Return the planner of one's own that --planner names, by that name; none for "auto" and our own planners."""
    if flags.planner in ("auto", *PLANNERS):
        return {}
    check_planner(flags.planner, "--planner")
    return {flags.planner: partial(call_planner, flags.planner, "--planner")}


def plan_options(flags: PlanningFlags, lengths: Sequence[int], home: Layout, **options: Any) -> PlanOptions:
    """Make the planners' options from flags and further `options`. The limit of rows "auto" is USUAL_ROWS, or what the
    longest document needs at the widest degree that divides the slots. Without --heads and --model Qwen3-8B is planned
    for.
    """
    if flags.heads < 0:
        raise ConfigError(f"--heads is {flags.heads}; give the model's number of query heads, such as 32")
    if flags.heads and flags.model:
        raise ConfigError(f"--heads {flags.heads} and --model {flags.model}, which says its own; give one of them")
    heads = read_query_heads(flags.model) if flags.model else flags.heads or DEFAULT_HEADS
    sizes, rows = flags.hierarchical_context_parallel_sizes or None, flags.max_tokens_per_slot
    options |= {"cp_comm_type": flags.cp_comm_type, "hierarchical_context_parallel_sizes": sizes, "heads": heads}
    result = PlanOptions(**options)
    if isinstance(rows, int):
        check_least(flags, max_tokens_per_slot=0)
        return replace(result, max_tokens_per_slot=rows or None)
    if rows != AUTO:
        raise ConfigError(f"--max-tokens-per-slot is {rows!r}; give an integer, or {AUTO}")
    types, widest = check_comm_types(result.cp_comm_type), min(flags.max_cp or home.slots, home.slots)
    degrees = [d for d in range(1, widest + 1) if home.slots % d == 0 and heads_allow(d, heads, types, home.tp)]
    share = -(-max(lengths, default=0) // (flags.cp or degrees[-1]))
    return replace(result, max_tokens_per_slot=max(USUAL_ROWS, -(-share // result.row_multiple) * result.row_multiple))
