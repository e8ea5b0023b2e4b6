"""Which attention kernel runs a model at its true head sizes: on this machine, and on GPUs where it has none."""

from dataclasses import dataclass, replace

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from longspan.attention import KERNELS, AttendCall, Mask, choose_kernel
from longspan.attention.kernels import Kernel
from longspan.errors import AttentionError
from longspan.model.exactness.small_copies import reads_images_alone
from longspan.model.experts.moe import use_experts
from longspan.model.seams.attention_calls import IMPLEMENTATION, RecordedCall, number_layers
from longspan.model.seams.meta_pass import record_model

GPU = torch.device("cuda")


@dataclass(frozen=True)
class KernelLine:
    """One kind of attention of a model's layers, the kernel that runs it here, and what runs it on a GPU."""

    attention: str
    layers: int
    here: str
    on_gpus: str

    def __str__(self) -> str:
        gpu = f"; on a GPU {self.on_gpus}" if self.on_gpus else ""
        return f"{self.attention} ({self.layers} layers): {self.here}{gpu}"


def kernel_lines(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> tuple[KernelLine, ...]:
    """Describe each kind of attention of a model at its true sizes, and its kernels, those of GPUs best first.

    The model is made on the meta device, without memory for weights. Raises what the model's own code
    raises if it cannot be made or run there, ModelError if it is refused.
    """
    with torch.device("meta"):
        automatic = AutoModelForImageTextToText if reads_images_alone(config) else AutoModelForCausalLM
        model = automatic.from_config(
            type(config).from_dict(config.to_dict()), dtype=torch.bfloat16, trust_remote_code=False
        )
    model.set_attn_implementation(IMPLEMENTATION)
    number_layers(model)
    use_experts(model)
    kinds: dict[tuple[int, int, int | None, float | None], list[RecordedCall]] = {}
    for call in record_model(model).calls:
        kinds.setdefault((call.head_size, call.value_size, call.window, call.softcap), []).append(call)
    lines: list[KernelLine] = []
    for (size, value_size, window, softcap), calls_of_kind in kinds.items():
        # One head of each: the choice of a kernel depends neither on how many there are, nor on chunks of keys.
        call = AttendCall(1, 1, size, value_size, dtype, device, Mask(window=window), softcap=softcap)
        sizes = f"heads of {size}" + ("" if value_size == size else f" with values of {value_size}")
        features = {
            "a window": window is not None,
            "a soft cap": softcap is not None,
            "sinks": calls_of_kind[0].sinks,
        }
        here = f"({device.type}, {str(dtype).removeprefix('torch.')})"
        try:
            local = f"{choose_kernel(call).name} {here}"
        except AttentionError as error:
            local = f"none {here}: {error}"
        on_gpus = ""
        if device.type != "cuda":
            words = [k.name + (f" (needs {k.needs})" if k.needs != "nothing" else "") for k in list_gpu_kernels(call)]
            on_gpus = ", else ".join(words) or "none"
        text = ", ".join([sizes, *(feature for feature, is_asked in features.items() if is_asked)])
        lines.append(KernelLine(text, len(calls_of_kind), local, on_gpus))
    return tuple(lines)


def list_gpu_kernels(call: AttendCall) -> list[Kernel]:
    """List the kernels that can do a call of these sizes on a GPU, in bfloat16 and for several documents at once.

    The table alone decides: this machine need not have a GPU.
    """
    on_gpu = replace(call, device=GPU, dtype=torch.bfloat16)
    return [
        k for k in KERNELS if not replace(k, device_lack=lambda device: "").lack_for(on_gpu) and not k.one_document_only
    ]
