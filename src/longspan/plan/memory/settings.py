"""What of a run decides its bytes besides model, home and plan; what layers may keep; bytes by what they are for."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from typing import Any, Literal

from longspan.plan.check import check_count
from longspan.plan.form import Form

# A run may fill this share of a GPU's free memory.
GPU_SHARE = 0.92
# A run may fill this share of the host's free memory: the rest is for reading documents, and for saving.
HOST_SHARE = 0.85
LEAST_OF_GPU = 1 << 30  # a CUDA context takes more: fewer bytes are GiB or MiB, written as bytes


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes of one rank at the moment at which it needs most.

    >>> Bytes(weights=3, kept=4).total
    7

    `weights`, `gradients` and `states` are this rank's shards (of states on the host the buckets that an update has on
    the device), and `packed` its shards of frozen weights in four or eight bits; `gathered` are weights of layers that
    are whole, gradients of layers before they are summed, and what travels between host and device; `kept` is what
    layers hold for their backward passes, `work` what the layer that runs holds besides; `logits` are those of a chunk
    and what is computed from them; `communicators` what torch's allocator does not show as used: the CUDA context, the
    buffers of NCCL, and memory that it keeps for gradients which are summed in another dtype.
    """

    weights: int = 0
    packed: int = 0
    gradients: int = 0
    states: int = 0
    gathered: int = 0
    kept: int = 0
    work: int = 0
    logits: int = 0
    communicators: int = 0

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    def to_json(self) -> dict[str, int]:
        return vars(self) | {"total": self.total}


def bytes_hint(size: int) -> str:
    """The hint for too small a number of bytes; one from 1 to 4096 was probably meant in GiB."""
    meant = size if 0 < size <= 4096 else 80
    return f"it is a number of bytes, and fewer than a CUDA context takes; {meant} GiB are {meant << 30}"


STATE_BUCKET_BYTES = 256 << 20
"""States in a bucket that an update copies from the host, of which two are on the device: 5 ms of a bus of 55 GB/s, a
thousand times what it takes to start a copy."""
# numbers of state that an optimizer has for each weight, muon of a layer's matrices
MOMENTS = {"adamw": 2.0, "sgd": 0.0, "muon": 1.0}
EIGHT_BIT_MOMENTS = 2 + 12 / 256  # bytes of a weight's two moments in eight bits, with their blocks' scales
BUNDLE_NUMBERS = 1 << 26
"""Numbers of matrices that a rank gathers and orthogonalizes at a time under muon; of larger matrices one."""


# optimizer.class of those that update each number of a parameter by itself
_CLASSES = ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
UPDATES_PARTS = ("adamw", "sgd", *(f"torch.optim.{name}" for name in _CLASSES))


def _names_experts(target: str) -> bool:
    """A dotted target, as "experts.down_proj"."""
    return target.split(".")[-2:-1] == ["experts"]


def known_state_numbers(optimizer: str, moments: str, weight_bytes: int) -> float | None:
    """Return how many numbers, each of `weight_bytes`, an optimizer of this name keeps for a weight; None for names
    that are not in MOMENTS. Any `moments` (optimizer.moments) are those in eight bits, under each name.
    """
    return EIGHT_BIT_MOMENTS / weight_bytes if moments else MOMENTS.get(optimizer)


@cache
def _keys_are_repeated() -> bool:
    """Before transformers 5.23 a scan gets a key and a query per value head."""
    return tuple(map(int, version("transformers").split(".")[:2])) < (5, 23)


@dataclass(frozen=True, kw_only=True)
class MemorySettings(Form):
    """What of a run decides its bytes; the defaults are float32 masters under AdamW, computed in bfloat16 on GPUs.

    >>> MemorySettings(parameter_bytes=2, lora_rank=16).trains_all
    False

    A form, and besides: a weight has `parameter_bytes`, and so have its gradient and each of its `state_numbers` in the
    optimizer (embedding and head have one more with `muon`). Layers of which patterns of `frozen_names` (train.freeze)
    meet all names have neither; nor have embedding and head where both are met (one, if they are tied). Numbers of
    activations and gathered weights have `compute_bytes`. Adapters of `lora_rank` (0: none) on the linears
    `lora_targets` (none named: every linear of decoder layers) have `adapter_bytes` a number. In `free` mode weights
    and gradients are whole through a step, whatever the form says. On a `gpu` there are a context and communicators;
    state-space layers scan by its `scan_kernels`, else in float32, and take keys and queries once a value head where
    `keys_are_repeated`, as by the transformers that is installed. Of images a slot encodes `encoder_rows` rows in a
    step, or, `encoder_recomputed`, in a wave (0: no encoder). A `teacher` (PlannedTeacher) runs over each micro-batch
    first. The others are as in `prepare`, [train] and [parallel].
    """

    parameter_bytes: int = 4
    compute_bytes: int = 2
    state_numbers: float = 2.0
    muon: bool = False
    frozen_names: tuple[str, ...] = ()
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    adapter_bytes: int = 4
    shard_parameters: bool = True
    loss_chunk_rows: int = 0
    vpp: int = 1
    free: bool = False
    gpu: bool = True
    scan_kernels: bool = True
    keys_are_repeated: bool = field(default_factory=_keys_are_repeated)
    encoder_rows: int = 0
    encoder_recomputed: bool = False
    encoder_trained: Literal["all", "projector", "none"] = "all"
    teacher: Any = None

    def __post_init__(self) -> None:
        for name in ("parameter_bytes", "compute_bytes", "adapter_bytes", "vpp"):
            check_count(f"{name} of memory settings", getattr(self, name))
        for name in ("lora_rank", "loss_chunk_rows", "encoder_rows"):
            check_count(f"{name} of memory settings", getattr(self, name), least=0)
        self.check_counts("memory settings")

    @property
    def trains_all(self) -> bool:
        return not self.lora_rank

    def has_adapter(self, linear: str) -> bool:
        """Return whether a linear of this name has an adapter; of dotted targets the last part counts."""
        named = {target.rpartition(".")[2] for target in self.lora_targets if not _names_experts(target)}
        return bool(self.lora_rank) and (not self.lora_targets or linear in named)

    def adapts_experts(self, matrix: str) -> bool:
        """Return whether the experts' matrices of this name have adapters: a target is experts.down_proj, say."""
        named = {target.rpartition(".")[2] for target in self.lora_targets if _names_experts(target)}
        return bool(self.lora_rank) and matrix in named

    @property
    def weight_bytes(self) -> int:
        return self.parameter_bytes if self.trains_all else self.adapter_bytes

    @property
    def reduce_bytes(self) -> int:
        """Bytes of a number of a gradient while it is summed over slots: float32 at least."""
        return max(4, self.weight_bytes)


@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """The bytes that a rank may fill, of its GPU (the context included) and of its host.

    >>> MemoryBudget(device=80 * 2**30, host=128 * 2**30).device
    85899345920
    """

    device: int
    host: int = 0


def places_in_layer_segments(words: Sequence[str], size: int) -> list[int]:
    """Return each layer's number within its segment, from 0: at most `size` neighbouring layers that recompute (0 or 1:
    each its own). A layer that keeps all ("none") is in no segment and has 0.
    """
    places = list[int]()
    for i, word in enumerate(words):
        follows = i > 0 and word != "none" and words[i - 1] != "none"
        places.append((places[-1] + 1) % max(1, size) if follows else 0)
    return places
