"""The section [train] of a configuration: steps and the optimizer, evaluations and checkpoints. Imports no torch."""

from dataclasses import dataclass
from typing import Annotated, Literal

from longspan.config.bounds import (
    NOT_GIVEN,
    AtLeast,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)


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
    """Run each RMS norm as one kernel forward and one backward, rounded once: auto (on GPUs, where a norm allows
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
