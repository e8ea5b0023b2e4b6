"""How a model is brought under a home: the keywords of `prepare`, and what FSDP2 does with its parameters."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from longspan.comm import World
from longspan.errors import ModelError
from longspan.plan.form import Form


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Whether parameters are sharded over the slots, and how FSDP2 then treats them; otherwise every rank has a copy.

    Without `reshard_after_forward` they stay gathered through a step, and without `sync_each_batch` gradients are
    summed once as well, by its last backward pass (with both ZeRO's stage 3, then 2 and 1: Rajbhandari et al. 2020).
    `compute_dtype` is what FSDP2 computes in. Raises ModelError for a `compute_dtype` without `shard_parameters`, and
    for `reshard_after_forward` without `sync_each_batch`.
    """

    shard_parameters: bool = True
    reshard_after_forward: bool = True
    sync_each_batch: bool = True
    compute_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        """Raise ModelError for settings that exclude each other."""
        if self.compute_dtype is not None and not self.shard_parameters:
            raise ModelError("compute_dtype is FSDP2's mixed precision; it needs shard_parameters=True")
        if self.reshard_after_forward and not self.sync_each_batch:
            raise ModelError(
                "sync_each_batch=False keeps whole gradients through a step, and weights beside them; give "
                "reshard_after_forward=False too"
            )

    def compute_dtype_of(self, model: nn.Module) -> torch.dtype:
        """Return the dtype in which the model computes: `compute_dtype`, or that of its parameters."""
        return self.compute_dtype or model.dtype  # pyright: ignore[reportReturnType]

    def check_compute_dtype(self, dtype: torch.dtype) -> None:
        """Raise ModelError for a compute dtype that is wider than the parameters' own."""
        compute = self.compute_dtype
        if compute is not None and _dtype_bits(compute) > _dtype_bits(dtype):
            raise ModelError(
                f"compute_dtype is {compute} ({_dtype_bits(compute)} significant bits) over parameters of {dtype} "
                f"({_dtype_bits(dtype)}), to which it adds none; load the model in {compute}, or leave "
                "compute_dtype out"
            )

    def mixed_precision_policy(self, model: nn.Module) -> MixedPrecisionPolicy:
        """Return how FSDP2 casts: it computes in `compute_dtype`, and sums gradients in float32 if any type is half."""
        dtypes = {parameter.dtype for parameter in model.parameters()} | {self.compute_dtype}
        low = self.shard_parameters and any(dtype in (torch.bfloat16, torch.float16) for dtype in dtypes)
        return MixedPrecisionPolicy(param_dtype=self.compute_dtype, reduce_dtype=torch.float32 if low else None)

    def added_dtype(self, model: nn.Module, replicas: int) -> torch.dtype | None:
        """Return the dtype in which sums over slots are added over micro-batches; None: that of the sums themselves.

        They are added to `.grad`, in the parameters' type, unless they are summed once a step, or over replicas then.
        """
        if self.shard_parameters and not (self.sync_each_batch and replicas == 1):
            return None
        return next((parameter.dtype for parameter in model.parameters() if parameter.requires_grad), None)


def _dtype_bits(dtype: torch.dtype) -> int:
    """The implicit leading bit is included: 8 of bfloat16, 24 of float32."""
    return 1 - round(math.log2(torch.finfo(dtype).eps))


@dataclass(frozen=True, kw_only=True)
class PrepareOptions(Form):
    """How a model is brought under a home, a form and more; `prepare` takes each as a keyword and explains it."""

    shard_parameters: bool = True
    activation_checkpointing: bool | str = False
    offload_activations: bool = False
    offload_bytes: int = 0
    compute_dtype: torch.dtype | None = None
    attention_kernel: str | None = None
    fused_norms: Literal["auto", "on", "off"] = "auto"
    virtual_stages: int = 1
    pipeline_schedule: str = "1f1b"

    def sharding(self, world: World) -> Sharding:
        """Decide how FSDP2 treats parameters under the world's home; ModelError for options that exclude each other."""
        # Passes of a stage's micro-batches alternate: layers that free parameters would gather them again for each.
        frees_parameters = self.reshard_after_forward and world.home.pp == 1
        return Sharding(
            shard_parameters=self.shard_parameters,
            reshard_after_forward=frees_parameters,
            sync_each_batch=self.sync_each_batch,
            compute_dtype=self.compute_dtype,
        )

    def changes_any(self, *names: str) -> bool:
        """Return whether one of these options is not its default."""
        return any(getattr(self, name) != getattr(PrepareOptions, name) for name in names)
