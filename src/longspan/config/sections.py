"""The configuration of a run: all of its sections, frozen values that check themselves and decide nothing. No torch.

A RunConfig comes from a TOML file and flags (`file.py`, `cli/flags.py`). What keys mean that are not given is in
`defaults.py`; `run/checks.py` checks the values against the number of ranks before any process group
exists. The text under each key is also its `--help`. Keys of plans, in [context] and [[evaluation.sets]], are in
`plan_section`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

from longspan.config.keys import (
    AUTO,
    NOT_GIVEN,
    Above,
    AtLeast,
    Needs,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    key_values,
)
from longspan.config.plan_section import ContextConfig, EvalConfig, EvaluationSection
from longspan.config.preference_losses import LOSSES, LossName, RowForm
from longspan.config.text_values import (
    NamedGroup,
    read_word_and_number,
)
from longspan.errors import ConfigError
from longspan.plan.form import FrozenWeights

# A value of mtp.weights.
RANDOM = "random"


@dataclass(frozen=True)
class ModelConfig(Section):
    """The model: a local Hugging Face folder, or random weights of a configuration or a preset."""

    SECTION: ClassVar[str] = "model"

    path: str = ""
    """A local Hugging Face folder with config.json and safetensors, or the name of one on the hub that is in the local
    cache (ORG/NAME): its weights are trained on."""
    download: bool = False
    """Download what path, config, data.tokenizer or teacher.path name on the hub into the local cache, if it is not
    there."""
    preset: str = ""
    """Random weights: qwen3-tiny, llama-tiny, qwen3-deep-tiny (4 layers), qwen3-moe-tiny, gpt-oss-tiny (8 experts),
    qwen3-next-tiny, bamba-tiny, granite-hybrid-tiny (hybrids), deepseek-v32-tiny (chosen keys), or published sizes:
    qwen3-0.6b, qwen3-4b, qwen3-8b, qwen3-32b, qwen3-30b-a3b, qwen2.5-7b, qwen2.5-32b (also -instruct), llama-3.1-8b,
    llama-3.3-70b-instruct, gpt-oss-20b, gpt-oss-120b, and the language models of gemma-3-12b, gemma-3-27b, qwen3.5-9b;
    empty: qwen3-tiny, unless path or config is set."""
    config: str = ""
    """A local Hugging Face folder, or its config.json, or a name as in path: random weights of that configuration."""
    num_labels: Annotated[NonNegativeInt, Needs("mtp.num_layers", (0,))] = 0
    """Scores of each document, by a head in place of the vocabulary's: 1 for rows with chosen and rejected, or with a
    number as label; as many as there are classes. A language model gets a new head. 0: a language model
    (docs/losses.md#reward-models-and-classifiers-by-a-command)."""
    rope_scaling: str = ""
    """yarn or linear: scale rotary positions for documents beyond the model's max_position_embeddings, by the factor
    that the longest document needs, rounded up to 0.25, or by one of your own, as in yarn:4; empty: never."""
    dtype: Literal["auto", "float32", "float64", "bfloat16"] = "auto"
    """Parameters and optimizer states: float32, float64 or bfloat16. With lora.rank it is of the weights that stay as
    they are, as adapters and their states are float32 at least. auto: with lora.rank the dtype that the model's
    config.json names (bfloat16 of published presets), if it is one of these, compute_dtype is no other, and no encoder
    is trained; else float32."""
    compute_dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Arithmetic of forward and backward passes: auto (bfloat16 on GPUs, as dtype on CPUs and under float64), float32,
    bfloat16 or float64; gradients are summed in float32, or float64."""
    frozen: Annotated[FrozenWeights, Needs("lora.rank", AtLeast(1))] = "auto"
    """How the weights that an adapter leaves as they are lie in memory: nf4 (linears of decoder layers in 4 bits, made
    as they are read), stored (in 4 or 8 bits, as the folder holds them), whole (in dtype), or auto: stored where the
    folder is quantised, else whole (docs/fine-tuning.md)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.rope

    @property
    def rope(self) -> tuple[str, float]:
        """How rotary positions are scaled, and by which factor; 0: by the one that the longest document needs."""
        return read_word_and_number(
            f"{self.prefix}rope_scaling", self.rope_scaling, {"": None, "yarn": Above(1), "linear": Above(1)}
        )

    @property
    def source(self) -> str:
        """The folder, or config.json, that names the model; empty if a preset does."""
        return self.path or self.config

    @property
    def preset_name(self) -> str:
        """The preset whose weights are drawn; empty if a folder or a configuration is named."""
        return "" if self.source else self.preset or "qwen3-tiny"


@dataclass(frozen=True)
class ParallelConfig(Section):
    """Where the weights live. Context parallelism is not here: it moves no weight."""

    SECTION: ClassVar[str] = "parallel"

    tp: PositiveInt = 1
    """Tensor-parallel degree: neighbouring ranks that share out heads, widths and vocabulary."""
    pp: PositiveInt = 1
    """Pipeline stages: ranks that each hold a part of the layers."""
    vpp: Annotated[int, AtLeast(1), Needs("parallel.pp", AtLeast(2))] = 1
    """Virtual pipeline stages a rank, each a part of the layers of its own; more than 1 interleaves them."""
    pipeline_schedule: Annotated[Literal["1f1b", "zero_bubble"], Needs("parallel.pp", AtLeast(2))] = "1f1b"
    """Order of forward and backward passes: 1f1b, interleaved with vpp above 1, or zero_bubble."""
    ep: PositiveInt = 1
    """Expert-parallel degree: neighbouring slots that share out the experts of every layer."""
    dp_replicate: PositiveInt = 1
    """Copies of the sharded weights (HSDP): each copy is sharded over slots / copies."""
    sequence_parallel: Annotated[bool, Needs("parallel.tp", AtLeast(2))] = False
    """Split the rows of norms and residuals over the tensor-parallel ranks; needs tp above 1."""
    reshard_after_forward: bool = True
    """Free gathered weights after each pass: less memory, two gathers a micro-batch in place of one a step; never with
    pp above 1. true, but train.plan_memory may keep them gathered if memory allows."""
    sync_each_batch: Annotated[bool, Needs("parallel.reshard_after_forward", (False,))] = True
    """Sum gradients over the slots in every micro-batch; false: once a step, until when they are whole on every rank.
    true, but train.plan_memory may sum them once if memory allows."""


@dataclass(frozen=True)
class LoraSection(Section):
    """LoRA: adapters are trained and saved, and the model's own weights stay as they are (docs/fine-tuning.md)."""

    SECTION: ClassVar[str] = "lora"

    rank: NonNegativeInt = 0
    """Rank of the adapters, which only are trained and saved; 0: none, and all weights are trained."""
    alpha: Annotated[float, AtLeast(0), Needs("lora.rank", AtLeast(1))] = 0.0
    """An adapter's output is multiplied by alpha / rank; 0: twice the rank."""
    dropout: Annotated[float, AtLeast(0, below=1), Needs("lora.rank", AtLeast(1))] = 0.0
    """Share of an adapter's inputs that are dropped in training; each rank draws for its own rows, so not under tp."""
    target_modules: Annotated[tuple[str, ...], Needs("lora.rank", AtLeast(1))] = ()
    """Names of the linears that get one, such as q_proj or lm_head, and of experts' matrices, such as
    experts.gate_up_proj; empty: every linear of the decoder layers, and no experts."""


@dataclass(frozen=True)
class TeacherSection(Section):
    """A teacher: a second model, of which nothing is trained, and whose distributions the model learns
    (docs/distillation.md)."""

    SECTION: ClassVar[str] = "teacher"

    path: str = ""
    """The teacher, a causal language model with the model's tokenizer: its folder, or its name on the hub, as
    model.path. Empty: there is none."""
    frozen: FrozenWeights = "auto"
    """How its weights lie in memory: nf4 (linears of decoder layers in 4 bits, made as they are read), stored (in 4 or
    8 bits, as the folder holds them), whole (in teacher.dtype), or auto: stored where the folder is quantised, else
    whole."""
    dtype: Literal["auto", "float32", "float64", "bfloat16"] = "auto"
    """Its weights and arithmetic; auto: the arithmetic of the model's own passes (model.compute_dtype)."""
    rope_scaling: str = ""
    """Scale its rotary positions, as model.rope_scaling does the model's: a document beyond them is an error."""
    offload_weights: Annotated[bool, Needs("context.mode", ("auto", "lockstep"))] = False
    """Keep its weights in the host's memory: a layer's are copied to the device before it runs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.as_model().rope

    def as_model(self, dtype: str = AUTO) -> "TeacherModel":
        """Return the teacher as keys of a model, with this dtype in place of "auto"."""
        chosen: Any = dtype if self.dtype == AUTO else self.dtype
        return TeacherModel(
            path=self.path, rope_scaling=self.rope_scaling, dtype=chosen, compute_dtype=chosen, frozen=self.frozen
        )


@dataclass(frozen=True)
class TeacherModel(ModelConfig):
    """The keys of a model that a teacher has, which messages name by their section."""

    SECTION: ClassVar[str] = "teacher"


@dataclass(frozen=True)
class DistillationSection(Section):
    """The loss under a teacher: how far the model's distributions are from the teacher's, by the names and defaults of
    TRL's DistillationConfig (docs/distillation.md)."""

    SECTION: ClassVar[str] = "distillation"

    beta: Annotated[float, AtLeast(0, most=1)] = 1.0
    """The divergence of model p and teacher q: 0: KL(q‖p), 1: KL(p‖q), between: the generalized Jensen-Shannon
    divergence, which is small near both ends."""
    temperature: PositiveFloat = 1.0
    """Divides the logits of both models before the softmax."""
    top_k: NonNegativeInt = 0
    """Compare the teacher's so many likeliest tokens; 0: all."""
    add_tail: Annotated[bool, Needs("distillation.top_k", AtLeast(1))] = True
    """With top_k: all other tokens together are one more; false: the k are renormalised."""
    cross_entropy_weight: NonNegativeFloat = 0.0
    """Weight of the cross entropy of the targets, at temperature 1, beside the divergence."""


@dataclass(frozen=True)
class MtpSection(Section):
    """Multi-token prediction: layers behind the model's last one, which learn tokens further ahead (docs/mtp.md)."""

    SECTION: ClassVar[str] = "mtp"

    num_layers: NonNegativeInt = 0
    """Tokens beyond the next one that each position predicts too, each by a layer of its own; 0: none."""
    loss_scaling_factor: Annotated[float, AtLeast(0), Needs("mtp.num_layers", AtLeast(1))] = 0.3
    """Weight of the mean of their losses in the gradient; the loss of the next token has weight 1."""
    weights: Annotated[str, Needs("mtp.num_layers", AtLeast(1))] = AUTO
    """A folder whose weights of these layers are read, random, or auto: those of model.path where it has any, else
    random."""
    train_whole: Annotated[bool, Needs("mtp.num_layers", AtLeast(1)), Needs("lora.rank", AtLeast(1))] = False
    """With adapters (lora.rank): train all weights of these layers, which then have no adapters of their own."""


@dataclass(frozen=True)
class EncoderLayout(Section):
    """How the tower and projector of a vision-language model encode the images of documents."""

    SECTION: ClassVar[str] = "encoder"

    tp: PositiveInt = 1
    """Tensor-parallel degree of its home, which is over all ranks of the run."""
    max_tokens: NonNegativeInt = 0
    """Rows of images that a slot encodes at once, and, where it is trained, encodes again before their backward pass,
    so that activations of so many are kept at a time; 0: all images of a step, once."""


@dataclass(frozen=True)
class EncoderSection(EncoderLayout):
    """The tower and projector of a model from images and text to text, where data has images (docs/multimodal.md)."""

    trainable: Literal["all", "projector", "none"] = NOT_GIVEN
    """What of it is trained: all (tower and projector), projector, or none. Default: all; with adapters (lora.rank):
    none."""
    lr: Annotated[NonNegativeFloat, Needs("encoder.trainable", ("all", "projector"))] = 0.0
    """Its peak learning rate, scheduled as optimizer.lr; 0: optimizer.lr."""


MAX_TEXT_BYTES = 1 << 26


@dataclass(frozen=True)
class SourceConfig(Section):
    """One of several sources of training data, in place of data.path; flags do not reach these tables."""

    SECTION: ClassVar[str] = "data.sources"

    path: str = ""
    """As data.path."""
    weight: PositiveFloat = 1.0
    """How often its documents are trained on, relative to those of the other sources."""
    split: str = ""
    """As data.split."""


@dataclass(frozen=True)
class DataConfig(Section):
    """The rows of data, how they become documents, and which of them are only evaluated."""

    SECTION: ClassVar[str] = "data"

    path: str = ""
    """A file or folder of .txt .md .py (one text each), .jsonl (also .gz, .zst), .json, .csv, .parquet or .arrow rows,
    as a data set of the package datasets has them (docs/fine-tuning.md), the name of a data set on the hub that is in
    the local cache (ORG/NAME, or ORG/NAME/FILE), or stdlib (sources of this Python's standard library). Default:
    stdlib, unless there are tables [[data.sources]]."""
    split: str = ""
    """Which split of a data set is read, and which of its rows, as the package datasets writes it: train,
    train[:100], train[10%:90%], train[-50:], train+validation; empty: all rows, and several splits are refused."""
    sources: tuple[SourceConfig, ...] = ()
    """Several sources with weights, in place of path: tables [[data.sources]]."""
    rename_columns: tuple[str, ...] = ()
    """Names of columns that are other ones in the files, as entries OURS=THEIRS (or a table: ours = "theirs"), such as
    prompt=question completion=answer; OURS= leaves a column out."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A row that gives no document is an error that names file and line, or is counted and skipped."""
    max_text_bytes: NonNegativeInt = MAX_TEXT_BYTES
    """A text file or a row (of a table without its images) of more bytes is a bad row, and is not parsed; 0: any."""
    split_turns: Annotated[bool, Needs("model.num_labels", (0,))] = False
    """true: a conversation is one document for each assistant turn, with what stood before it; false: one document."""
    tokenizer: str = ""
    """A folder with tokenizer.json; empty: the model folder's, else one trained on the corpus."""
    chat_template: str = ""
    """A Jinja file that writes conversations, in place of the template in the tokenizer's folder; models that the run
    saves have it too."""
    end_of_chat_token: Annotated[str, Needs("model.num_labels", (0,))] = ""
    """The token that a model stops at, put behind the answer that ends a conversation, as a target, where the chat
    template writes none there (GLM's, whose token is <|user|>)."""
    vocab_size: Annotated[int, AtLeast(257)] = 2048  # 256 bytes and the end of text at the least
    """Entries of the byte-pair tokenizer that is trained when no other is given, and of the preset's embedding."""
    parse_special_tokens: bool = False
    """Read the names of special tokens in texts (<|im_start|>, say) as these tokens; false: as plain text."""
    share_prefixes: Literal["auto", "none"] = AUTO
    """auto: tokens with which several documents of a step begin, none of them a target, are computed once where that is
    faster (docs/shared-prefixes.md); none: each document is computed whole."""
    group_prefixes: bool = False
    """Documents with a common prompt come in one step, as far as train.tokens_per_step allows, so that it is computed
    once (data.share_prefixes): the order of documents is another one. Not for pairs."""
    max_document_tokens: NonNegativeInt = NOT_GIVEN
    """Longer texts are cut into documents of at most this many tokens; 0: none is cut, and one that fits no group of
    slots is an error that names it. Default: 0; tiny presets: 2048."""


@dataclass(frozen=True)
class OptimizerSection(Section):
    """The optimizer, its learning rate, and how gradients and updates are kept in bounds."""

    SECTION: ClassVar[str] = "optimizer"

    class_: str = "adamw"
    """adamw (in one pass), muon (matrices of layers by Muon, the rest by adamw), sgd, or the dotted name of a class,
    such as torch.optim.NAdam."""
    arguments: tuple[str, ...] = ()
    """Further arguments of the optimizer's class, such as "momentum=0.9"; values as in JSON."""
    lr: NonNegativeFloat = NOT_GIVEN
    """Peak learning rate, reached after the warm-up. Default: none, it must be given; tiny presets: 6e-3; of adapters
    (lora.rank): 2e-4, and 5e-6 under train.loss."""
    warmup_steps: NonNegativeInt = NOT_GIVEN
    """Steps of linear warm-up. Default: a twentieth of the steps, at most 100; tiny presets: 100."""
    lr_schedule: str = "cosine"
    """From the warm-up to the last step: cosine, linear, constant, or wsd (constant, then along a line in the last
    tenth of all steps, or in as many steps as you say: wsd:200)."""
    min_lr_ratio: Annotated[float, AtLeast(0, most=1)] = 0.1
    """Learning rate of the last step, as a share of lr."""
    weight_decay: NonNegativeFloat = 0.01
    """Weight decay of matrices (adamw: decoupled)."""
    groups: tuple[str, ...] = ()
    """Parameters by name with an lr or weight_decay of their own, as "embed* lr=1e-5" or "layers.0-7.* lr=2e-5
    weight_decay=0"; of several patterns that meet one the last counts (docs/fine-tuning.md)."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Gradients are scaled down to this norm; 0: never."""
    moments: Annotated[
        Literal["", "8bit"],
        Needs("optimizer.class", ("adamw",)),
        Needs("model.dtype", ("float32", "bfloat16")),
        Needs("train.offload_optimizer_states", (False,)),
    ] = ""
    """adamw's moments: "" (in the dtype of its parameters), or 8bit (two take 2.05 bytes a weight; checkpoints have
    them in bfloat16)."""
    stochastic_rounding: Annotated[bool, Needs("model.dtype", ("bfloat16",)), Needs("lora.rank", (0,))] = False
    """Round updates of bfloat16 parameters (model.dtype) and their moments by chance, so that they are right in the
    mean."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.schedule
        for text in self.groups:
            NamedGroup.from_text(text)

    @property
    def schedule(self) -> tuple[str, int]:
        """The curve of the learning rate, and the steps of wsd's decay; 0: a tenth of all steps.

        Raises ConfigError for steps that are not whole.
        """
        words = {"cosine": None, "linear": None, "constant": None, "wsd": AtLeast(1)}
        word, steps = read_word_and_number("optimizer.lr_schedule", self.lr_schedule, words)
        if not steps.is_integer():
            raise ConfigError(f"optimizer.lr_schedule is {self.lr_schedule!r}; give whole steps, as in 'wsd:200'")
        return word, int(steps)


@dataclass(frozen=True)
class TrainConfig(Section):
    """How long a run trains, how it fits into memory, and how it computes."""

    SECTION: ClassVar[str] = "train"

    steps: PositiveInt = NOT_GIVEN
    """Optimizer steps of the whole run. Default: 300; with model.path and one source of data those of one epoch."""
    tokens_per_step: Annotated[int, AtLeast(2)] = NOT_GIVEN
    """Whole documents are taken up to this many tokens, at least one document a step. Default: 65536; tiny presets:
    4096."""
    epochs: NonNegativeFloat = 0.0
    """How often each training document is trained on, exactly, in place of steps: a step ends where an epoch does; 0:
    steps counts. Default: 1 with model.path and one source of data, where no steps are given."""
    epochs_of: Annotated[str, Needs("train.epochs", Above(0))] = ""
    """Of several data.sources the path of the one that epochs counts: the run ends with the step in which each of its
    documents was trained on so often; the weights say how often those of the others are."""
    seed: NonNegativeInt = 0
    """Of weights, document order and held-out texts."""
    freeze: Annotated[tuple[str, ...], Needs("lora.rank", (0,))] = ()
    """Parameters that stay as they are, by patterns of their names, as "embed*" or "layers.0-7.*"; of towers of images
    encoder.trainable decides (docs/fine-tuning.md)."""
    plan_memory: bool = True
    """true: choose what each layer keeps, recomputes or moves to the host, how often parameters are gathered and where
    the optimizer's states are, the fastest that fits; on GPUs, and on CPUs where device_memory_limit is given. Keys
    that are given win. false: the keys as they are (docs/memory.md)."""
    device_memory_limit: NonNegativeInt = 0
    """Bytes that a rank may fill of its device, weights included, where plan_memory or max_tokens_per_slot = "auto"
    decide; 0: 92 % of a GPU's free memory, on a CPU the host's free memory for max_tokens_per_slot = "auto"."""
    activation_checkpointing: Literal["auto", "none", "full", "full+host", "selective", "selective+host"] = "auto"
    """Recompute layers in the backward pass: none, full (true), selective (all but attention), or auto: plan_memory
    chooses for each layer; where it chooses nothing, auto is none. With +host what such layers start from waits in the
    host's memory; without it as plan_memory chooses."""
    offload_optimizer_states: bool = False
    """Keep the optimizer's moments in the host's memory; an update copies them to the device a part at a time. false:
    as plan_memory chooses."""
    offload_weights: Annotated[
        bool,
        Needs("parallel.pp", (1,)),
        Needs("parallel.dp_replicate", (1,)),
        Needs("parallel.reshard_after_forward", (True,)),
        Needs("context.mode", ("auto", "lockstep")),
    ] = False
    """Keep weights and their gradients in the host's memory, with the optimizer's moments: a layer's weights are copied
    to the device before it runs, and its gradients back. false: as plan_memory chooses (docs/memory.md)."""
    mlp_tile_tokens: NonNegativeInt = 0
    """Run MLPs and experts over tiles of at most this many tokens, backward too, so that what they make in between is
    of one tile; some percent slower. 0: whole, or as plan_memory chooses."""
    compile: Literal["auto", "layers", "none"] = "auto"
    """Compile with torch.compile: layers (true: each in two halves around attention), none (false), or auto: layers on
    GPUs at tp 1, of models whose hidden states have 2048 features or more."""
    float8: Literal["", "rowwise"] = ""
    """rowwise: multiply in float8 in the linears and experts of decoder layers, with one scale a row; gradients of
    weights, head, norms, routers and adapters in bfloat16. For GPUs of compute capability 8.9 or more
    (docs/precision.md)."""
    loss: Annotated[
        LossName,
        Needs("model.num_labels", (0,)),
        Needs("mtp.num_layers", (0,)),
        Needs("data.split_turns", (False,)),
    ] = ""
    """A loss of preferences as TRL has it, over rows with chosen and rejected, kto over answers with a label
    (docs/preferences.md); sigmoid is dpo. Empty: the cross entropy of tokens, or what a model has that scores."""
    loss_arguments: tuple[str, ...] = ()
    """Arguments of the loss by TRL's names, such as "beta=0.05" or "desirable_weight=1.33"; of a model with one score
    (model.num_labels) "center_rewards_coefficient=0.01", the weight of (chosen + rejected)², which keeps scores around
    0."""
    router_aux_loss_coef: Annotated[float | str, AtLeast(0)] = AUTO
    """Weight of the load-balancing loss of experts' routers; 0: none; auto: that of the model's configuration."""
    router_z_loss_coef: NonNegativeFloat = 0.0
    """Weight of the z-loss of experts' routers: the mean square of the logsumexp of their logits."""
    profile_steps: Annotated[tuple[int, ...], AtLeast(1)] = ()
    """Steps that torch's profiler records, counted from 1: RUN/profiles has a trace of each rank and a table of what
    took the time (docs/gpu.md). Such a step is slower."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares log-probabilities with those of a reference model."""
        return bool(self.loss) and LOSSES[self.loss].needs_reference

    @property
    def row_form(self) -> RowForm:
        """What rows become for the loss; "" for a loss without preferences."""
        return LOSSES[self.loss].row_form if self.loss else ""


@dataclass(frozen=True)
class CheckpointSection(Section):
    """When a run saves, where, what it keeps, and how it goes on."""

    SECTION: ClassVar[str] = "checkpoint"

    every: NonNegativeInt = 0
    """Steps between checkpoints; 0: only those of minutes, after the last step and when the run ends early."""
    minutes: NonNegativeFloat = 30.0
    """Minutes between checkpoints, as well as every; 0: never by the clock."""
    save_total_limit: NonNegativeInt = 2
    """Newest good checkpoints that are kept; 0: all."""
    keep_best: str = ""
    """Keep the checkpoint with the best figure of an evaluation too, such as eval_loss, or code/eval_loss of a set; the
    lowest, or with :higher, as in eval_token_accuracy:higher, the highest. Empty: only the newest are kept. Default:
    empty; with evaluation.patience: eval_loss."""
    dir: str = ""
    """The folder in which checkpoints are written and read; empty: the folder checkpoints of run.dir."""
    allow_little_disk: bool = False
    """Train even where the disk of dir has no room for the checkpoints that it is to hold at once."""
    async_mode: Literal["auto", "off"] = "auto"
    """Write checkpoints while training goes on, from copies on the host: auto (where every host has room for them), or
    off (docs/checkpoints.md)."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: go on from the newest good checkpoint; never: refuse a folder that holds one; must: refuse one without."""
    save_signals: tuple[Literal["SIGHUP", "SIGUSR1", "SIGUSR2"], ...] = ()
    """Signals on which a run saves after its current step and goes on: SIGHUP, SIGUSR1, SIGUSR2; without it they stop
    the run after a save, as SIGINT and SIGTERM do."""
    preempted_exit_code: Annotated[int, AtLeast(0, most=255)] = 0
    """Exit status of longspan train when a signal stopped it before its last step, such as 75 for a scheduler that then
    starts it again; the launcher torchrun ends with 1 where any process ends with another status than 0."""


@dataclass(frozen=True)
class MachineSection(Section):
    """The machine that plans are priced for."""

    SECTION: ClassVar[str] = "run"

    machine: str = ""
    """File of longspan bench calibrate, or a known GPU such as h200; empty: on GPUs an H200 (docs/planning.md)."""


@dataclass(frozen=True)
class RunSection(MachineSection):
    """The run's folder, the machine that its plans are priced for, and how it behaves."""

    dir: str = "runs/first"
    """Folder of the run: config, corpus, metrics, plans, checkpoints, report."""
    loggers: tuple[str, ...] = ()
    """Where rows of metrics go too: tensorboard, wandb (extras), or a class of your own by its dotted name."""
    log_every: PositiveInt = 10
    """A line of progress every so many steps; one comes every 30 seconds in any case."""
    timeout_seconds: PositiveFloat = 600.0
    """How long a rank waits for the others before it names the one that is missing (docs/troubleshooting.md: A run
    hangs)."""


@dataclass(frozen=True)
class RunConfig:
    """The whole configuration of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    context: ContextConfig = field(default_factory=ContextConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    lora: LoraSection = field(default_factory=LoraSection)
    teacher: TeacherSection = field(default_factory=TeacherSection)
    distillation: DistillationSection = field(default_factory=DistillationSection)
    mtp: MtpSection = field(default_factory=MtpSection)
    encoder: EncoderSection = field(default_factory=EncoderSection)
    run: RunSection = field(default_factory=RunSection)

    @property
    def distils(self) -> bool:
        """Whether the model learns a teacher's distributions."""
        return bool(self.teacher.path)

    @property
    def evaluations(self) -> tuple[EvalConfig, ...]:
        """The documents that are held out, as the set without a name, and the sets [[evaluation.sets]]."""
        return (held_out_set(self), *self.evaluation.sets)

    def with_keys(self, section: str, **values: Any) -> "RunConfig":
        """Return this configuration with other values of fields of a section."""
        return replace(self, **{section: replace(getattr(self, section), **values)})

    def with_sets(self, sets: Iterable[EvalConfig]) -> "RunConfig":
        """Return this configuration with other evaluation sets."""
        return self.with_keys("evaluation", sets=tuple(sets))

    def tables(self) -> dict[str, Any]:
        """Return the values of all keys by section, as TOML and JSON keep them; of tables a list."""
        return {name: key_values(getattr(self, name)) for name in section_kinds()}


def section_kinds() -> dict[str, type[Any]]:
    """Return the dataclass of every section."""
    return get_type_hints(RunConfig)


def held_out_set(config: RunConfig) -> EvalConfig:
    """Return the documents that `evaluation.documents` holds out, as the evaluation set without a name."""
    return EvalConfig(
        max_document_tokens=config.data.max_document_tokens,
        every=config.evaluation.every,
        **config.evaluation.plan_keys,
    )


def with_evaluations(config: RunConfig, entries: Iterable[EvalConfig]) -> RunConfig:
    """Return the configuration with other plans of evaluation: the first entry has those of the held-out documents, the
    others are the sets.
    """
    held_out, *sets = entries
    return config.with_keys("evaluation", **held_out.plan_keys, sets=tuple(sets))
