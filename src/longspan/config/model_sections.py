"""The sections of a configuration that describe the model: [model], [parallel], [lora], [mtp], [encoder]. No torch."""

from dataclasses import dataclass
from typing import Literal

from longspan.config.keys import AUTO, NonNegativeFloat, NonNegativeInt, PositiveInt

RANDOM = "random"  # as mtp.weights
LANGUAGE_MODEL, PROJECTOR, TOWER = PARTS = ("language_model", "projector", "tower")  # as in model/lora/targets.py


@dataclass(frozen=True)
class ModelConfig:
    """The model: a local Hugging Face folder, or random weights of a configuration or a preset."""

    path: str = ""
    """A local Hugging Face folder with config.json and safetensors: its weights are trained on."""
    preset: str = ""
    """Random weights: qwen3-tiny, llama-tiny, qwen3-deep-tiny (4 layers), qwen3-moe-tiny, gpt-oss-tiny (8 experts),
    qwen3-next-tiny, bamba-tiny, granite-hybrid-tiny (hybrids), or published sizes: qwen3-0.6b, qwen3-4b, qwen3-8b,
    qwen3-30b-a3b; empty: qwen3-tiny, unless path or config is set."""
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
        """The folder, or config.json, that names the model; empty if a preset does."""
        return self.path or self.config

    @property
    def preset_name(self) -> str:
        """The preset whose weights are drawn; empty if a folder or a configuration is named."""
        return "" if self.source else self.preset or "qwen3-tiny"


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
    """Free gathered weights after the forward pass: less memory, one more gather; never with pp above 1. true: unless
    train.memory gathers them once, where there is room."""


@dataclass(frozen=True)
class LoraSection:
    """LoRA: adapters are trained and saved, and the model's own weights stay as they are (docs/fine-tuning.md)."""

    rank: NonNegativeInt = 0
    """Rank of the adapters, which only are trained and saved; 0: none, and all weights are trained."""
    alpha: NonNegativeFloat = 0.0
    """An adapter's output is multiplied by alpha / rank; 0: twice the rank."""
    dropout: NonNegativeFloat = 0.0
    """Share of an adapter's inputs that are dropped in training; each rank draws for its own rows, so not under tp."""
    targets: tuple[str, ...] = ()
    """Names of the linears that get one, such as q_proj or lm_head; empty: every linear of the decoder layers, and of
    the other parts that are named."""
    parts: tuple[str, ...] = (LANGUAGE_MODEL,)
    """Where: language_model, and of a model from images and text to text projector and tower."""


@dataclass(frozen=True)
class MtpSection:
    """Multi-token prediction: layers behind the model's last one, which learn tokens further ahead (docs/mtp.md)."""

    depths: NonNegativeInt = 0
    """Tokens beyond the next one that each position predicts too, each by a layer of its own; 0: none."""
    loss_weight: NonNegativeFloat = 0.3
    """Weight of the mean of their losses in the gradient; the loss of the next token has weight 1."""
    weights: str = AUTO
    """A folder whose weights of these layers are read, random, or auto: those of model.path where it has any, else
    random."""
    train_whole: bool = False
    """With adapters (lora.rank): train all weights of these layers, which then have no adapters of their own."""


@dataclass(frozen=True)
class EncoderLayout:
    """How the tower and projector of a vision-language model encode the images of documents."""

    tp: PositiveInt = 1
    """Tensor-parallel degree of its home, which is over all ranks of the run."""
    max_rows: NonNegativeInt = 0
    """Rows of images that a slot encodes at once, which bounds memory; 0: all images of a step at once."""


@dataclass(frozen=True)
class EncoderSection(EncoderLayout):
    """The tower and projector of a model from images and text to text, where data has images (docs/multimodal.md)."""

    train: Literal["", "all", "projector", "none"] = ""
    """What of it is trained: all (tower and projector), projector, or none. Default: all; with adapters (lora.rank):
    none."""
    lr: NonNegativeFloat = 0.0
    """Its peak learning rate, scheduled as train.lr; 0: train.lr."""
    recompute: bool = False
    """Encode images again before their backward pass, so that activations of one wave are kept at a time."""
