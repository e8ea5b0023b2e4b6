"""The configuration of a run: sections of frozen values. What keys mean that were not given is in `defaults.py`.

A RunConfig comes from a TOML file and flags (`file.py`, `cli/flags.py`) and is checked against the number of
ranks before any process group exists (`config_check.py`). The text under each key is also its `--help`.
This module decides nothing and imports no torch.
"""

from dataclasses import dataclass, field, is_dataclass
from typing import Annotated, Any, Literal, get_type_hints

from longspan.train.config.bounds import (
    NOT_GIVEN,
    Above,
    AtLeast,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    bounds_of,
)
from longspan.train.config.encoder_section import EncoderSection
from longspan.train.config.eval_set import EvalConfig
from longspan.train.config.mtp_section import MtpSection


@dataclass(frozen=True)
class ModelConfig:
    """The model: a local Hugging Face folder, or random weights of a configuration or a preset."""

    preset: str = ""
    """Random weights: qwen3-tiny, llama-tiny, qwen3-deep-tiny (4 layers), qwen3-moe-tiny, gpt-oss-tiny (8 experts),
    qwen3-next-tiny, bamba-tiny, granite-hybrid-tiny (hybrids), or published sizes: qwen3-0.6b, qwen3-4b, qwen3-8b,
    qwen3-30b-a3b; empty: qwen3-tiny, unless path or config is set."""
    path: str = ""
    """A local Hugging Face folder with config.json and safetensors: its weights are trained on."""
    config: str = ""
    """A local Hugging Face folder, or its config.json: random weights of that configuration."""
    rope_scaling: str = ""
    """yarn or linear: scale rotary positions for documents beyond the model's max_position_embeddings; empty: never."""
    rope_factor: NonNegativeFloat = 0.0
    """How many times as long documents may be under rope_scaling; 0: what the longest needs, in quarters."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Parameters and optimizer states: float32, float64 or bfloat16."""
    compute_dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Arithmetic of forward and backward passes: auto (bfloat16 on GPUs, as dtype on CPUs and under float64), float32,
    bfloat16 or float64; gradients are summed in float32, or float64."""

    @property
    def source(self) -> str:
        """The folder, or config.json, that names the model; empty where a preset does."""
        return self.path or self.config

    @property
    def preset_name(self) -> str:
        """The preset whose weights are drawn; empty where a folder or a configuration is named."""
        return "" if self.source else self.preset or "qwen3-tiny"


@dataclass(frozen=True)
class SourceConfig:
    """One of several sources of training data, in place of data.path; flags do not reach these tables."""

    path: str = ""
    """As data.path."""
    weight: PositiveFloat = 1.0
    """How often its documents are trained on beside those of the other sources."""


@dataclass(frozen=True)
class DataConfig:
    """The rows of data, how they become documents, and which of them are only evaluated."""

    path: str = ""
    """A file or folder of .txt .md .py (one text each), .jsonl (also .gz and .zst), .parquet or .arrow rows, as a data
    set of the package datasets has them (docs/fine-tuning.md), or stdlib (sources of this Python's standard library).
    Default: stdlib, unless there are tables [[data.sources]]."""
    sources: tuple[SourceConfig, ...] = ()
    """Several sources with weights, in place of path: tables [[data.sources]]."""
    on_bad: Literal["error", "skip"] = "error"
    """A row that gives no document is an error that names file and line, or is counted and skipped."""
    cache: str = ""
    """Folder where tokens are kept for all runs that ask for the same; none: they are not kept, and rows are tokenized
    when they are read; empty: longspan/corpora in the user's cache."""
    workers: NonNegativeInt = 0
    """Processes that tokenize; 0: one for each core."""
    turns: Literal["together", "split"] = "together"
    """A conversation is one document, or split: one for each assistant turn, with what stood before it."""
    date_string: str = "26 Jul 2024"
    """The date for chat templates that ask for one, so that a conversation has the same tokens on every day."""
    tokenizer: str = ""
    """A folder with tokenizer.json; empty: the model folder's, else one trained on the corpus."""
    vocab_size: Annotated[int, AtLeast(257)] = 2048  # 256 bytes and the end of text at the least
    """Entries of the byte-pair tokenizer that is trained when no other is given, and of the preset's embedding."""
    parse_special_tokens: bool = False
    """Read the names of special tokens in texts (<|im_start|>, say) as these tokens; false: as plain text."""
    max_document_tokens: NonNegativeInt = NOT_GIVEN
    """Longer texts are cut into documents of at most this many tokens; 0: none is cut, and one that fits no group of
    slots is an error that names it. Default: 0; tiny presets: 2048."""
    eval_documents: NonNegativeInt = 32
    """Documents held out for evaluation, chosen by the seed; 0: no evaluation."""
    pack_to: NonNegativeInt = 0
    """Training documents stand end to end and are cut every so many tokens, and a step takes whole packs; 0: documents
    stay whole. Held-out documents are never packed."""
    pack_attention: Literal["document", "across"] = "document"
    """In a pack, document: each piece of a document is one of its own, with positions from 0; across: attention and
    positions go on over the documents of a pack."""


@dataclass(frozen=True)
class ParallelConfig:
    """Where the weights live. Context parallelism is not here: it moves no weight."""

    tp: PositiveInt = 1
    """Tensor-parallel degree: neighbouring ranks that share out heads, widths and vocabulary."""
    pp: PositiveInt = 1
    """Pipeline stages: ranks that each hold a part of the layers."""
    vpp: PositiveInt = 1
    """Virtual pipeline stages a rank, each a part of the layers of its own; more than 1 interleaves them."""
    pipeline_schedule: Literal["1f1b", "gpipe", "zero_bubble", "zbv"] = "1f1b"
    """Order of forward and backward passes: 1f1b, gpipe, zero_bubble, or zbv (vpp = 2, folded like a V)."""
    ep: PositiveInt = 1
    """Expert-parallel degree: neighbouring slots that share out the experts of every layer."""
    dp_replicate: PositiveInt = 1
    """Copies of the sharded weights (HSDP): each copy is sharded over slots / copies."""
    sequence_parallel: bool = False
    """Split the rows of norms and residuals over the tensor-parallel ranks; needs tp above 1."""
    reshard_after_forward: bool = True
    """Free gathered weights after the forward pass: less memory, one more gather; never with pp above 1."""


@dataclass(frozen=True)
class ContextConfig:
    """Who shares which documents, in training and in evaluation."""

    planner: Literal["fixed", "padded", "dynamic"] = "fixed"
    """fixed: packed documents at one degree; padded: one document a row; dynamic: a degree for each document."""
    context_parallel_size: PositiveInt = NOT_GIVEN
    """Slots that share a document in training (fixed and padded). Default: 1; tiny presets: 2."""
    cp_comm_type: str | tuple[str, ...] = ""
    """How they share it: p2p, all_gather, a2a, a2a+p2p or auto (docs/attention.md); one, or one for each layer.
    Default: p2p; of hybrids what partition is chosen with; tiny presets: the same."""
    partition: Literal["", "auto", "zigzag", "contiguous"] = ""
    """How rows of a document are split: zigzag (equal causal work), contiguous (one run a slot, faster under a2a), or
    auto: of hybrids what the cost says (docs/hybrid.md), otherwise zigzag. Default: auto; tiny presets: the same."""
    attention_kernel: str = ""
    """Attention kernel (longspan doctor --kernels); empty: the first that can."""
    hierarchical_context_parallel_sizes: int | tuple[int, ...] = (2, 2)
    """Sizes (a2a, p2p) of a2a+p2p; read with that type only."""
    min_dynamic_context_parallel_size: PositiveInt = 1
    """Smallest degree that the dynamic planner may choose."""
    max_dynamic_context_parallel_size: NonNegativeInt = 0
    """Largest degree that the dynamic planner may choose; 0: no limit."""
    max_tokens_per_slot: Annotated[int | str, AtLeast(0)] = NOT_GIVEN
    """Rows of one micro-batch on one slot, at most; 0: no limit; auto: as many as its memory holds, measured first.
    Default: auto; tiny presets: 1024."""
    node_size: PositiveInt = 8
    """Slots of one host: what the plan's cost model takes as near."""
    cost: str = ""
    """File of longspan bench calibrate: what steps cost here; empty: on GPUs the model on H200s (docs/planning.md)."""
    mode: Literal["lockstep", "free"] = "lockstep"
    """In training, who waits: lockstep: all slots for the slowest of a micro-batch; free: those that share a group."""
    plan_ahead: NonNegativeInt = 2
    """Coming steps whose dynamic plans another process makes meanwhile; 0: each when its step begins."""
    eval_planner: Literal["", "fixed", "padded", "dynamic"] = ""
    """Planner of evaluation. Default: as in training, or fixed where eval_context_parallel_size is given; tiny presets:
    fixed."""
    eval_context_parallel_size: Annotated[int | str, AtLeast(0)] = NOT_GIVEN
    """Slots that share a document in evaluation; this key alone changes the degree. 0: as in training; auto: the degree
    at which the cost says that evaluation is fastest. Default: 0; tiny presets: 4."""
    eval_cp_comm_type: str | tuple[str, ...] = ""
    """As cp_comm_type, in evaluation. Default: as in training; the fastest, where eval_context_parallel_size is auto;
    tiny presets: p2p, of hybrids as in training."""
    eval_partition: Literal["", "auto", "zigzag", "contiguous"] = ""
    """As partition, in evaluation; auto: what training has. Default: as in training; tiny presets: zigzag, of hybrids
    auto."""
    eval_max_tokens_per_slot: Annotated[int | str, AtLeast(0)] = NOT_GIVEN
    """As max_tokens_per_slot, in evaluation; auto: what training has. Default: as in training; tiny presets: 2048."""
    eval_hierarchical_context_parallel_sizes: int | tuple[int, ...] = NOT_GIVEN
    """As hierarchical_context_parallel_sizes, in evaluation. Default: as in training, fitted to the degree; tiny
    presets: 2 2."""
    eval_attention_kernel: str = ""
    """Attention kernel in evaluation; empty: as in training."""


@dataclass(frozen=True)
class TrainConfig:
    """Steps, optimizer, and when to evaluate and save."""

    steps: PositiveInt = 300
    """Optimizer steps of the whole run."""
    epochs: NonNegativeFloat = 0.0
    """How often every training document is trained on, in place of steps; 0: as steps says."""
    tokens_per_step: Annotated[int, AtLeast(2)] = NOT_GIVEN
    """Whole documents are taken up to this many tokens, at least one document a step. Default: 65536; tiny presets:
    4096."""
    lr: PositiveFloat = NOT_GIVEN
    """Peak learning rate, reached after the warm-up. Default: none, it must be given; tiny presets: 6e-3; of adapters
    (lora.rank): 2e-4."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """From the warm-up to the last step: cosine, linear, constant, or wsd (constant, then decay_steps along a line)."""
    decay_steps: NonNegativeInt = 0
    """Steps of wsd's decay, the last ones; 0: a tenth of all steps."""
    min_lr_ratio: NonNegativeFloat = 0.1
    """Learning rate of the last step, as a share of lr."""
    warmup_steps: NonNegativeInt = NOT_GIVEN
    """Steps of linear warm-up. Default: a twentieth of the steps, at most 100; tiny presets: 100."""
    optimizer: str = "adamw"
    """adamw (fused), sgd, or the dotted name of a class, such as torch.optim.NAdam."""
    optimizer_arguments: tuple[str, ...] = ()
    """Further arguments of the optimizer's class, such as "momentum=0.9"; values as in JSON."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of adamw's two moments at each step."""
    eps: NonNegativeFloat = 1e-8
    """What adamw adds to the root of its second moment."""
    stochastic_rounding: bool = False
    """Round updates of bfloat16 parameters (model.dtype) and their moments by chance, so that they are right in the
    mean."""
    weight_decay: NonNegativeFloat = 0.01
    """Weight decay of matrices (adamw: decoupled)."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Gradients are scaled down to this norm; 0: never."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Recompute layers in the backward pass: none, full, or selective (all but attention); true is full."""
    recompute_layers: NonNegativeInt = 0
    """Recompute this many of a stage's layers, the first ones, and keep the others' activations; 0: each."""
    memory_fraction: float = 0.8
    """Of a GPU's free memory, what max_tokens_per_slot = "auto" may fill."""
    memory_bytes: NonNegativeInt = 0
    """The same in bytes, on any device; 0: memory_fraction of a GPU, 1 GiB on a CPU."""
    offload_activations: bool = False
    """Keep what checkpointed layers start from in the host's memory meanwhile."""
    loss_chunk_rows: NonNegativeInt = 0
    """Rows whose logits are formed at a time; 0: as many as 2 GiB hold on a GPU, 64 MiB on a CPU."""
    fused_norms: Literal["auto", "on", "off"] = "auto"
    """Run each RMS norm as one torch kernel forward and one backward, rounded once: auto (on GPUs, where a norm allows
    it), on, or off."""
    compiled: bool = False
    """Compile norms and MLPs with torch.compile: some 2 % faster on GPUs, after a longer warm-up."""
    router_balance_loss: Annotated[float, AtLeast(-1)] = -1.0
    """Weight of the load-balancing loss of experts' routers; -1: what the model's configuration says, 0: none."""
    router_z_loss: NonNegativeFloat = 0.0
    """Weight of the z-loss of experts' routers: the mean square of the logsumexp of their logits."""
    seed: NonNegativeInt = 0
    """Of weights, document order and held-out documents."""
    eval_every: NonNegativeInt = 100
    """Steps between evaluations; 0: only after the last step."""
    eval_seconds: NonNegativeFloat = 0.0
    """An evaluation that takes longer is broken off, which is said, and training goes on; 0: no limit."""
    eval_metrics: tuple[str, ...] = ()
    """Metrics of your own beside the loss and those built in: functions by their dotted names (docs/evaluation.md)."""
    eval_document_losses: bool = False
    """Write the loss of each document of an evaluation to RUN/evaluations, as JSON lines."""
    save_every: NonNegativeInt = 0
    """Steps between checkpoints; 0: only those of save_minutes, after the last step and when the run ends early."""
    save_minutes: NonNegativeFloat = 30.0
    """Minutes between checkpoints, beside save_every; 0: never by the clock."""


@dataclass(frozen=True)
class LoraSection:
    """LoRA: adapters are trained and saved, and the model's own weights stay as they are (docs/fine-tuning.md)."""

    rank: NonNegativeInt = 0
    """Rank of the adapters, which alone are trained and saved; 0: none, and all weights are trained."""
    alpha: NonNegativeFloat = 0.0
    """An adapter's output is multiplied by alpha / rank; 0: twice the rank."""
    dropout: NonNegativeFloat = 0.0
    """Share of an adapter's inputs that are dropped in training; each rank draws for its own rows, so not under tp."""
    targets: tuple[str, ...] = ()
    """Names of the linears that get one, such as q_proj or lm_head; empty: every linear of the decoder layers."""


@dataclass(frozen=True)
class RunSection:
    """The run's folder and how it behaves."""

    dir: str = "runs/first"
    """Folder of the run: config, corpus, metrics, plans, checkpoints, report."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: go on from the newest good checkpoint; never: refuse a folder that holds one; must: refuse one without."""
    keep_checkpoints: NonNegativeInt = 2
    """Newest good checkpoints that are kept; 0: all."""
    compile_cache: str = ""
    """Folder where kernels compiled for GPUs are kept for later runs; empty: longspan/kernels in the user's cache."""
    loggers: tuple[str, ...] = ()
    """Where rows of metrics go too: tensorboard, wandb (extras), or a class of your own by its dotted name."""
    timeout_seconds: PositiveFloat = 600.0
    """How long a rank waits for the others before it says which one is missing."""
    stopped_status: NonNegativeInt = 0
    """Exit status of longspan train when a signal stopped it before its last step, such as 75 for a scheduler that then
    starts it again; the launcher torchrun ends with 1 where any process ends with another status than 0."""


@dataclass(frozen=True)
class RunConfig:
    """The whole configuration of a run.

    >>> from dataclasses import replace
    >>> config = replace(RunConfig(), train=TrainConfig(steps=10))
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    context: ContextConfig = field(default_factory=ContextConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    lora: LoraSection = field(default_factory=LoraSection)
    mtp: MtpSection = field(default_factory=MtpSection)
    encoder: EncoderSection = field(default_factory=EncoderSection)
    run: RunSection = field(default_factory=RunSection)
    eval: tuple[EvalConfig, ...] = ()


def section_kinds() -> dict[str, type[Any]]:
    """The dataclass of every section; the tables [[eval]] are none."""
    kinds: dict[str, Any] = get_type_hints(RunConfig)
    return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and is_dataclass(kind)}


def bounds_of_keys() -> dict[str, AtLeast | Above]:
    """The bound of every "section.key" that has one."""
    return {
        f"{section}.{key}": bound for section, kind in section_kinds().items() for key, bound in bounds_of(kind).items()
    }
