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

    Runs one process for each GPU of this machine, or torchrun's, or --world local processes on the CPU. The learning
    rate is 0, so that all planners see the same weights and report the same loss. The documents come from --lengths
    (numbers with commas between, or a JSON file), --data, --distribution or --same; one sequence over all GPUs is
    --lengths 65536 --planners fixed --cp 4.
    """

    planners: str = ",".join(PLANNERS)
    """Planners, with commas between; empty: none, as with --peers alone."""
    shape: str = ""
    """Sizes of the model: qwen3-8b, qwen3-30b-a3b or small; empty: qwen3-8b on GPUs, small on CPUs."""
    layers: int = 0
    """Other number of layers than the shape's; so are the flags below. 0: the shape's."""
    hidden: int = 0
    """Width."""
    heads: int = 0
    """Query heads."""
    key_value_heads: int = 0
    """Key and value heads."""
    head_size: int = 0
    """Size of a head."""
    ffn: int = 0
    """Width of the MLP."""
    vocabulary: int = 0
    """Token ids."""
    experts: int = 0
    """Experts of a layer."""
    experts_per_token: int = 0
    """Experts that a token visits."""
    expert_ffn: int = 0
    """Width of an expert."""
    sequences: str = ""
    """Lengths with commas between, each one sequence of its own that is timed in turn, in place of --lengths."""
    cp: int = 0
    """Degree of fixed and padded; 0: the smallest that holds the longest document."""
    max_tokens_per_slot: int = 0
    """Rows of a slot in a micro-batch; 0: no limit where --lengths lists numbers, else 8192 on GPUs and 256 on CPUs."""
    cp_comm_type: str = "auto"
    """How groups communicate: p2p, all_gather, a2a, a2a+p2p or auto."""
    partition: Literal["zigzag", "contiguous"] = "zigzag"
    """How a group deals out its rows: zigzag: equal causal work; contiguous: one run a slot, fewer copies under a2a."""
    hierarchical: str = ""
    """Sizes of a2a+p2p, as in 2,2."""
    mode: Literal["lockstep", "free"] = "lockstep"
    """Who waits for whom."""
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
    """Recompute this many of the layers alone, the first ones; 0: each."""
    offload: Switch = False
    """Keep what checkpointed layers start from in the host's memory."""
    parameters: Literal["float32", "bfloat16"] = "float32"
    """Type of parameters, gradients and moments."""
    compute: Literal["", "bfloat16", "float32"] = ""
    """Type of the arithmetic; empty: bfloat16 on GPUs, as the parameters on CPUs."""
    keep_gathered: Switch = False
    """Keep a layer's gathered parameters between its forward and its backward pass."""
    fused_norms: Literal["auto", "on", "off"] = "auto"
    """Run each RMS norm as one torch kernel forward and one backward: auto (on GPUs), on, or off."""
    compiled: Switch = False
    """Compile norms and MLPs with torch.compile; warm up with 3 steps or more."""
    optimizer: Literal["adamw", "sgd", ""] = "adamw"
    """Optimizer; empty: none."""
    loss_chunk_rows: int = 0
    """Rows whose logits are formed at a time; 0: by a budget of bytes."""
    cost: str = ""
    """File of `longspan bench calibrate`; empty: the model with what is recomputed, on GPUs at 450 TFLOP/s, 600 in
    attention and 300 µs a ring step, on CPUs at 0.05 TFLOP/s."""
    peak_tflops: float = 0.0
    """Of a device, for the model FLOPs utilisation; 0: of a GPU that is known."""
    profile: Switch = False
    """Profile one more step: seconds of attention, other layers, exposed communication, optimizer, idle; in the record
    its longest kernels as well."""
    peers: Switch = False
    """Time Hugging Face + FSDP2 + torch's context_parallel as well, where there is one sequence."""
    warmup: int = 2
    """Steps before the timed ones."""
    repeats: int = 3
    """Timed steps; their median counts."""
    timeout_seconds: float = 600.0
    """How long a rank waits for the others."""
