"""The configuration of a run: all of its sections, frozen values that decide nothing. Imports no torch.

A RunConfig comes from a TOML file and flags (`file.py`, `cli/flags.py`). What keys mean that are not given is in
`defaults.py`; `run/checks/config_check.py` checks the values against the number of ranks before any process group
exists. The text under each key is also its `--help`. Here are the sections [train] and [run]; the others are in
`model_sections`, `data_sections` and `plan_section`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Annotated, Any, Literal, get_type_hints

from longspan.config.data_sections import DataConfig, SourceConfig
from longspan.config.keys import (
    AUTO,
    NOT_GIVEN,
    Above,
    AtLeast,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    key_values,
)
from longspan.config.model_sections import EncoderSection, LoraSection, ModelConfig, MtpSection, ParallelConfig
from longspan.config.plan_section import ContextConfig, EvalConfig

__all__ = [
    "ContextConfig",
    "DataConfig",
    "EncoderSection",
    "LoraSection",
    "MachineSection",
    "ModelConfig",
    "MtpSection",
    "ParallelConfig",
    "RunConfig",
    "RunSection",
    "SourceConfig",
    "TrainConfig",
    "held_out_set",
    "section_kinds",
    "set_evaluations",
]


@dataclass(frozen=True)
class TrainConfig:
    """Steps, optimizer, and when to evaluate and save."""

    steps: PositiveInt = 300
    """Optimizer steps of the whole run."""
    tokens_per_step: Annotated[int, AtLeast(2)] = NOT_GIVEN
    """Whole documents are taken up to this many tokens, at least one document a step. Default: 65536; tiny presets:
    4096."""
    lr: PositiveFloat = NOT_GIVEN
    """Peak learning rate, reached after the warm-up. Default: none, it must be given; tiny presets: 6e-3; of adapters
    (lora.rank): 2e-4."""
    warmup_steps: NonNegativeInt = NOT_GIVEN
    """Steps of linear warm-up. Default: a twentieth of the steps, at most 100; tiny presets: 100."""
    activation_checkpointing: Literal["auto", "none", "full", "selective"] = "auto"
    """Recompute layers in the backward pass: none, full (true), selective (all but attention), or auto: train.memory
    chooses for each layer; where it chooses nothing, auto is none."""
    eval_every: NonNegativeInt = 100
    """Steps between evaluations; 0: only after the last step."""
    epochs: NonNegativeFloat = 0.0
    """How often each training document is trained on, exactly, in place of steps: a step ends where an epoch does; 0:
    steps counts. Not with several data.sources, whose weights say how often."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """From the warm-up to the last step: cosine, linear, constant, or wsd (constant, then decay_steps along a line)."""
    decay_steps: NonNegativeInt = 0
    """Steps of wsd's decay, the last ones; 0: a tenth of all steps."""
    min_lr_ratio: NonNegativeFloat = 0.1
    """Learning rate of the last step, as a share of lr."""
    optimizer: str = "adamw"
    """adamw (in one pass), sgd, or the dotted name of a class, such as torch.optim.NAdam."""
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
    memory: Literal["auto", "none"] = "auto"
    """auto: choose what each layer keeps, recomputes or moves to the host, how often parameters are gathered and where
    the optimizer's states are, the fastest that fits; on GPUs, and on CPUs where memory_bytes is given. Keys that are
    given win. none: the keys as they are (docs/memory.md)."""
    recompute_layers: NonNegativeInt = 0
    """Recompute this many of a stage's layers, the first ones, and keep the others' activations; 0: each."""
    mlp_tile_rows: NonNegativeInt = 0
    """Run MLPs and experts over tiles of at most this many rows, backward too, so that what they make in between is of
    one tile; some percent slower. 0: whole, or as train.memory chooses."""
    segment_layers: NonNegativeInt = 0
    """Of this many layers in a row that recompute, keep the first one's input only; the others' are made again in
    backward, which runs those layers forward once more. 0: each layer's."""
    memory_fraction: float = 0.92
    """Of a GPU's free memory, what a run may fill, where train.memory or max_tokens_per_slot = "auto" decide."""
    memory_bytes: NonNegativeInt = 0
    """The same in bytes, on any device, weights included; 0: memory_fraction of a GPU, on a CPU the host's free memory
    for max_tokens_per_slot = "auto"."""
    offload_activations: bool = False
    """Keep what checkpointed layers start from in the host's memory meanwhile; false: as train.memory chooses."""
    offload_states: bool = False
    """Keep the optimizer's moments in the host's memory; an update copies them to the device a part at a time. false:
    as train.memory chooses."""
    loss_chunk_rows: NonNegativeInt = 0
    """Rows whose logits are formed at a time; 0: as many as 2 GiB hold on a GPU, 64 MiB on a CPU."""
    fused_norms: Literal["auto", "on", "off"] = "auto"
    """Run each RMS norm as one kernel forward and one backward, rounded once: auto (on GPUs, where a norm allows
    it), on, or off."""
    float8: Literal["", "rows"] = ""
    """rows: multiply in float8 in the linears and experts of decoder layers, with one scale a row; gradients of
    weights, head, norms, routers and adapters in bfloat16. For GPUs of compute capability 8.9 or more
    (docs/precision.md)."""
    compiled: Literal["auto", "layers", "modules", "none"] = "auto"
    """Compile with torch.compile: layers (each in two halves around attention), modules (true: norms and MLPs), none
    (false), or auto: layers on GPUs at tp 1, of models whose hidden states have 2048 features or more."""
    router_balance_loss: Annotated[float, AtLeast(-1)] = -1.0
    """Weight of the load-balancing loss of experts' routers; -1: that of the model's configuration, 0: none."""
    router_z_loss: NonNegativeFloat = 0.0
    """Weight of the z-loss of experts' routers: the mean square of the logsumexp of their logits."""
    seed: NonNegativeInt = 0
    """Of weights, document order and held-out texts."""
    eval_seconds: NonNegativeFloat = 0.0
    """An evaluation that takes longer is broken off with a line of output, and training goes on; 0: no limit."""
    eval_metrics: tuple[str, ...] = ()
    """Metrics of your own, with the loss and those built in: functions by their dotted names (docs/evaluation.md)."""
    eval_document_losses: bool = False
    """Write the loss of each document of an evaluation to RUN/evaluations, as JSON lines."""
    profile_steps: tuple[int, ...] = ()
    """Steps that torch's profiler records, counted from 1: RUN/profiles has a trace of each rank and a table of what
    took the time (docs/gpu.md). Such a step is slower."""
    save_every: NonNegativeInt = 0
    """Steps between checkpoints; 0: only those of save_minutes, after the last step and when the run ends early."""
    save_minutes: NonNegativeFloat = 30.0
    """Minutes between checkpoints, as well as save_every; 0: never by the clock."""
    save_async: Literal["auto", "off"] = "auto"
    """Write checkpoints while training goes on, from copies on the host: auto (where every host has room for them), or
    off (docs/checkpoints.md)."""
    keep_best: str = ""
    """Keep the checkpoint with the best figure of an evaluation too, such as eval_loss, or code/eval_loss of a set; the
    lowest, or with :higher, as in eval_token_accuracy:higher, the highest. Empty: only the newest are kept."""


@dataclass(frozen=True)
class MachineSection:
    """The machine that plans are priced for."""

    machine: str = ""
    """File of longspan bench calibrate, or a known GPU such as h200; empty: on GPUs an H200 (docs/planning.md)."""


@dataclass(frozen=True)
class RunSection(MachineSection):
    """The run's folder, the machine that its plans are priced for, and how it behaves."""

    dir: str = "runs/first"
    """Folder of the run: config, corpus, metrics, plans, checkpoints, report."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: go on from the newest good checkpoint; never: refuse a folder that holds one; must: refuse one without."""
    keep_checkpoints: NonNegativeInt = 2
    """Newest good checkpoints that are kept; 0: all."""
    checkpoints: str = ""
    """Where checkpoints are written and read: a folder, or a store that fsspec knows, such as s3://bucket/run (extra
    stores); empty: the folder checkpoints of run.dir."""
    save_timeout_seconds: PositiveFloat = 1800.0
    """How long the writing of one checkpoint may take while training goes on, before the run ends with an error."""
    compile_cache: str = ""
    """Folder where kernels compiled for GPUs are kept for later runs; empty: longspan/kernels in the user's cache."""
    loggers: tuple[str, ...] = ()
    """Where rows of metrics go too: tensorboard, wandb (extras), or a class of your own by its dotted name."""
    log_every: PositiveInt = 10
    """Where the output is no terminal, a line of progress every so many steps; one comes every 30 seconds in any
    case."""
    timeout_seconds: Annotated[float | str, Above(0)] = AUTO
    """How long a rank waits for the others before it names the one that is missing; auto: 10 times the predicted
    seconds of a step or an evaluation, at least 60 (docs/gpu.md: What a hang prints)."""
    stopped_status: NonNegativeInt = 0
    """Exit status of longspan train when a signal stopped it before its last step, such as 75 for a scheduler that then
    starts it again; the launcher torchrun ends with 1 where any process ends with another status than 0."""
    save_on: tuple[str, ...] = ()
    """Signals on which a run saves after its current step and goes on: SIGHUP, SIGUSR1, SIGUSR2; without it they stop
    the run after a save, as SIGINT and SIGTERM do."""


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

    @property
    def evaluations(self) -> tuple[EvalConfig, ...]:
        """The documents that are held out, as the set without a name, and the sets [[eval]]."""
        return (held_out_set(self), *self.eval)

    def tables(self) -> dict[str, Any]:
        """Return the values of all keys by section, as TOML and JSON keep them; of `eval` a list of tables."""
        sections = {name: key_values(getattr(self, name)) for name in section_kinds()}
        return sections | {"eval": tuple(key_values(entry) for entry in self.eval)}


def section_kinds() -> dict[str, type[Any]]:
    """Return the dataclass of every section; the tables [[eval]] are none."""
    kinds: dict[str, Any] = get_type_hints(RunConfig)
    return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and is_dataclass(kind)}


def held_out_set(config: RunConfig) -> EvalConfig:
    """Return the documents that `data.eval_documents` holds out, as the evaluation set without a name."""
    train = config.train
    return EvalConfig(
        max_document_tokens=config.data.max_document_tokens,
        every=train.eval_every,
        metrics=train.eval_metrics,
        max_seconds=train.eval_seconds,
        **config.context.evaluation.plan_keys,
    )


def set_evaluations(config: RunConfig, entries: Iterable[EvalConfig]) -> RunConfig:
    """Set other plans of evaluation: the first entry has those of the held-out documents, the others are the sets."""
    held_out, *sets = entries
    return replace(config, context=config.context.set_evaluation(**held_out.plan_keys), eval=tuple(sets))
