"""Flags of `longspan bench step`."""

from dataclasses import dataclass
from typing import Literal

from longspan.bench.flags import BenchFlags
from longspan.cli.flags import Switch
from longspan.cli.lengths import SourceFlags

PLANNERS = ("padded", "fixed", "dynamic")


@dataclass(frozen=True, kw_only=True)
class StepFlags(BenchFlags, SourceFlags):
    """Time whole training steps (forward, backward, optimizer) of a model with random weights, on the same documents.

    Runs one process for each GPU of this machine, or torchrun's, or --world local processes. The learning
    rate is 0, so that all planners see the same weights and report the same loss. The documents come from --lengths
    (numbers with commas between, or a JSON file), --data, --distribution or --same; one sequence over all GPUs is
    --lengths 65536 --planners fixed --cp 4.
    """

    planners: str = ",".join(PLANNERS)
    """Planners, with commas between; empty: none, for example to time --peers only."""
    shape: str = ""
    """Sizes of the model: qwen3-8b, qwen3-30b-a3b or small; empty: qwen3-8b on GPUs, small on CPUs."""
    layers: int = 0
    """Number of layers; 0: as in --shape."""
    hidden: int = 0
    """Width of hidden states; 0: as in --shape."""
    heads: int = 0
    """Number of query heads; 0: as in --shape."""
    key_value_heads: int = 0
    """Number of key/value heads; 0: as in --shape."""
    head_size: int = 0
    """Size of a head; 0: as in --shape."""
    ffn: int = 0
    """Width of the MLP; 0: as in --shape."""
    vocabulary: int = 0
    """Size of the vocabulary; 0: as in --shape."""
    experts: int = 0
    """Number of experts of a layer; 0: as in --shape."""
    experts_per_token: int = 0
    """Number of experts that a token visits; 0: as in --shape."""
    expert_ffn: int = 0
    """Width of an expert; 0: as in --shape."""
    sequences: str = ""
    """Lengths with commas between, in place of --lengths; each is timed as one sequence, in turn."""
    cp: int = 0
    """Context-parallel degree of fixed and padded plans; 0: the smallest that holds the longest document."""
    max_tokens_per_slot: int = 0
    """Rows of a slot in a micro-batch; 0: no limit if --lengths lists numbers, else 8192 on GPUs and 256 on CPUs."""
    cp_comm_type: str = "auto"
    """How groups communicate: p2p, all_gather, a2a, a2a+p2p or auto."""
    partition: Literal["zigzag", "contiguous"] = "zigzag"
    """Which rows a slot holds: zigzag: equal causal work; contiguous: one run of rows, fewer copies under a2a."""
    hierarchical: str = ""
    """Sizes of a2a+p2p, as in 2,2."""
    mode: Literal["lockstep", "free"] = "lockstep"
    """lockstep: all slots wait for each other in every micro-batch; free: only those that share a document."""
    node_size: int = 8
    """Slots of one host."""
    tp: int = 1
    """Tensor-parallel degree."""
    ep: int = 1
    """Expert-parallel degree."""
    dp_replicate: int = 1
    """Copies of the sharded weights (HSDP), each over slots / copies."""
    recompute: Literal["none", "full", "selective"] = "selective"
    """What is recomputed in the backward pass."""
    recompute_layers: int = 0
    """Recompute only this many of the layers, counted from the first; 0: all."""
    offload: Switch = False
    """Keep the inputs of checkpointed layers in the host's memory."""
    parameters: Literal["float32", "bfloat16"] = "float32"
    """Dtype of parameters, gradients and moments."""
    compute: Literal["", "bfloat16", "float32"] = ""
    """Dtype of the arithmetic; empty: bfloat16 on GPUs, that of the parameters on CPUs."""
    keep_gathered: Switch = False
    """Keep a layer's gathered parameters between its forward and its backward pass."""
    fused_norms: Literal["auto", "on", "off"] = "auto"
    """Run each RMS norm as one torch kernel forward and one backward: auto (on GPUs), on, or off."""
    compiled: Switch = False
    """Compile norms and MLPs with torch.compile; warm up with 3 steps or more."""
    optimizer: Literal["adamw", "sgd", ""] = "adamw"
    """Optimizer; empty: steps without an optimizer."""
    loss_chunk_rows: int = 0
    """How many rows' logits are computed at a time; 0: as many as fit a budget of bytes."""
    cost: str = ""
    """File of `longspan bench calibrate`; empty: the cost of the model with its recomputation, on GPUs at 450 TFLOP/s,
    600 in attention and 300 µs for a ring step, on CPUs at 0.05 TFLOP/s."""
    peak_tflops: float = 0.0
    """Peak TFLOP/s of a device, for the model FLOPs utilisation; 0: the vendor's figure for a known GPU."""
    profile: Switch = False
    """Profile one more step. The result shows the seconds of attention, other layers, exposed communication, optimizer
    and idle time; the record also lists the longest kernels."""
    peers: Switch = False
    """Also time Hugging Face with FSDP2 and torch's context_parallel, which needs a single sequence."""
    warmup: int = 2
    """Steps before the timed ones."""
    repeats: int = 3
    """Timed steps; their median counts."""
    timeout_seconds: float = 600.0
    """How long a rank waits for the others."""
