"""Bytes that a real model's step holds, counted layer by layer by what operators make, on a CPU."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from bench.training.live_bytes import LiveBytes
from torch import Tensor
from torch.nn.functional import silu
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BambaConfig,
    DeepseekV3Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from longspan import Document, add_mtp
from longspan.comm import World
from longspan.model.adapters.new_adapter import NewAdapter, add_lora
from longspan.model.experts import expert_products
from longspan.model.layers import decoder_layers
from longspan.model.seams import norms
from longspan.mtp import MtpLoss
from longspan.plan import Plan, plan_fixed
from longspan.plan.memory import stage_bytes
from longspan.train import run_step
from tests.model.stock import prepare_untried

_DENSE: dict[str, Any] = {"vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8}
_DENSE |= {"num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 768, "max_position_embeddings": 8192}
_DENSE |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
_HYBRID: dict[str, Any] = _DENSE | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "num_experts": 8, "moe_intermediate_size": 192}
_GPT_OSS: dict[str, Any] = {"num_experts_per_tok": 2, "num_local_experts": 8, "intermediate_size": 192}
_DELTA_NET: dict[str, Any] = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32}
_DELTA_NET |= {"linear_value_head_dim": 32, "shared_expert_intermediate_size": 192}
_DELTA_NET |= {"layer_types": ["linear_attention", "full_attention"]}
_MAMBA2: dict[str, Any] = {"mamba_n_heads": 16, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 1}
_MAMBA2 |= {"mamba_expand": 2, "attn_layer_indices": [1]}
_LATENT: dict[str, Any] = {"q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16}
_LATENT |= {"head_dim": 16, "v_head_dim": 24, "num_key_value_heads": 8, "n_routed_experts": 8, "n_group": 2}
_LATENT |= {"topk_group": 1, "moe_intermediate_size": 192, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
_CHOOSING: dict[str, Any] = _LATENT | {"num_key_value_heads": 8, "index_topk": 16, "index_n_heads": 16}
_CHOOSING |= {"index_head_dim": 16, "mlp_layer_types": ["dense", "sparse"]}
_BLOCKS: dict[str, Any] = {"index_n_heads": 2, "index_head_dim": 16, "index_block_size": 8, "index_topk_blocks": 3}
_BLOCKS |= {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 192, "rotary_dim": 16}
_BLOCKS |= {"dense_intermediate_size": 768, "shared_intermediate_size": 192, "mlp_layer_types": ["dense", "sparse"]}
_BLOCKS |= {"layer_types": ["full_attention", "minimax_m3_sparse"]}
_POOLS: dict[str, Any] = _DELTA_NET | {"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 32}
_POOLS |= {"indexer_budget": 16, "indexer_compress_ratio": 4, "hc_lowrank": 32}
_POOLS |= {"layer_types": ["linear_attention", "indexed_attention"]}
_GATED_POOLS: dict[str, Any] = _CHOOSING | {"index_kpool": 4, "qk_rope_head_dim": 0, "linear_num_heads": 8}
_GATED_POOLS |= {"linear_head_dim": 32, "layer_types": ["linear_attention", "indexed_attention"]}
_VISION: dict[str, Any] = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
_ENTRIES: dict[str, Any] = {"head_dim": 64, "q_lora_rank": 96, "o_groups": 2, "o_lora_rank": 48, "sliding_window": 16}
_ENTRIES |= {"index_topk": 8, "index_n_heads": 16, "index_head_dim": 16, "n_routed_experts": 8}
_ENTRIES |= {"moe_intermediate_size": 192, "num_experts_per_tok": 2, "mlp_layer_types": ["moe"] * 2}
_ENTRIES |= {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}}
_ENTRIES |= {"layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"], "num_key_value_heads": 1}
# By the type of a model, which not every transformers has.
_LATER: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v3.2": ("deepseek_v32", _DENSE | _CHOOSING),
    "glm-5": ("glm_moe_dsa", _DENSE | _CHOOSING | {"indexer_types": ["full", "shared"]}),
    "minimax-m3": ("minimax_m3_vl_text", _DENSE | _BLOCKS),
    "qwen4-exp": ("qwen4_exp_text", _HYBRID | _EXPERTS | _POOLS),
    "glm-5-next": (
        "glm5_next",
        {"text_config": _DENSE | _GATED_POOLS, "vision_config": _VISION | {"out_hidden_size": 256}},
    ),
    "deepseek-v4": ("deepseek_v4", _DENSE | _ENTRIES),
    "hrm": ("hrm_text", _DENSE | {"num_key_value_heads": 8, "H_cycles": 2, "L_cycles": 3, "prefix_lm": False}),
}
_KINDS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "qwen3": (Qwen3Config, _DENSE),
    "llama": (LlamaConfig, _DENSE),
    "gemma3": (Gemma3TextConfig, _DENSE | {"sliding_window": 64}),
    "qwen3-moe": (Qwen3MoeConfig, _DENSE | _EXPERTS),
    "gpt-oss": (GptOssConfig, _HYBRID | _GPT_OSS | {"sliding_window": 64}),
    "deepseek-v3": (DeepseekV3Config, _DENSE | _LATENT),
    "bamba": (BambaConfig, _HYBRID | _MAMBA2),
    "qwen3-next": (Qwen3NextConfig, _HYBRID | _EXPERTS | _DELTA_NET),
}
DENSE, EXPERTS, HYBRIDS = ("qwen3", "llama", "gemma3"), ("qwen3-moe", "gpt-oss", "deepseek-v3"), ("bamba", "qwen3-next")


def config_of(family: str) -> PreTrainedConfig:
    if family not in _LATER:
        kind, sizes = _KINDS[family]
        return kind(**sizes)
    model_type, sizes = _LATER[family]
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    later: Any = CONFIG_MAPPING[model_type]
    return later(**sizes)


@dataclass
class Counted:
    """Bytes alive in one step: before each layer's forward pass and after the last; the most of layers' backward passes
    (-1: before the first of them), and the most of all.
    """

    alive: list[int] = field(default_factory=list[int])
    backward: dict[int, int] = field(default_factory=dict[int, int])
    most: int = 0

    @property
    def kept(self) -> list[int]:
        return [after - before for before, after in zip(self.alive, self.alive[1:], strict=False)]


class _Bytes(LiveBytes):
    """Products in float32, which some CPUs compute sixty times as fast: below the counter, which sees results alone."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.mm.default:
            return super().__torch_dispatch__(func, types, args, kwargs)
        return super().__torch_dispatch__(lambda a, b: func(a.float(), b.float()).to(a.dtype), types, args)


class _Marks:
    """Reads a counter as layers run: one model, one step of one micro-batch."""

    def __init__(self, model: Any) -> None:
        self.live, self.counted, self.now = _Bytes(), Counted(), -1
        for tensor in (*model.parameters(), *model.buffers()):  # views of them are none of a step's bytes
            self.live._live[tensor.untyped_storage()._cdata] = 0
        self.layers = list(decoder_layers(model).values())
        for layer in self.layers:
            layer.register_forward_pre_hook(self._before)
            layer.register_forward_hook(self._after)

    def _read_peak(self) -> int:
        peak = self.live.peak
        self.counted.most, self.live.peak = max(self.counted.most, peak), self.live.now
        return peak

    def _before(self, *_: Any) -> None:
        if self.now < 0:
            self.counted.alive.append(self.live.now)
            self._read_peak()

    def _after(self, layer: Any, _: Any, output: Any) -> None:
        if self.now >= 0:
            return
        self._read_peak()
        index = self.layers.index(layer)
        if index == len(self.layers) - 1:
            self.counted.alive.append(self.live.now)
        y = output[0] if isinstance(output, tuple) else output
        if y.requires_grad:
            y.register_hook(lambda _: self._turn(index))

    def _turn(self, index: int) -> None:
        self.end()
        self.now = index

    def end(self) -> None:
        self.counted.backward[self.now] = self._read_peak()


class _Norm(torch.autograd.Function):
    """A norm as kernels of GPUs run it: of what is made, the input and a root for each group of a row are kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gate: Tensor | None, offset: float) -> Tensor:
        wide = x.detach().float()
        root = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, root, weight, gate)
        ctx.offset = offset
        out = wide * root * (weight + offset)
        return (out if gate is None else out * silu(gate.float())).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, root, weight, gate = ctx.saved_tensors
        dx = gradients[0] * (weight + ctx.offset) * root.to(x.dtype)
        return dx, torch.zeros_like(weight), None if gate is None else dx.clone(), None


def use_kernel_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have norms keep on a CPU what they keep on GPUs; their gradients are not those of the norm."""

    def run(norm: Any, formula: Any, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return _Norm.apply(x, norm.weight, gate, formula.offset)  # pyright: ignore[reportReturnType]

    for name in ("_run_torch_kernel", "_run_triton_kernel"):
        monkeypatch.setattr(norms, name, run)
    monkeypatch.setattr(stage_bytes, "REPLAYED_TENSORS", 0)


def use_kernel_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have gates of experts keep on a CPU what they keep on GPUs; their results are zeros."""

    def launch(name: str, formula: Any, x: Tensor, bias: Any, ends: Any, *others: Tensor | None, **flags: bool) -> None:
        for result in others[name == "gate_backward_kernel" :]:
            if result is not None:
                result.zero_()

    monkeypatch.setattr(expert_products, "find_row_kernels", lambda *_: launch)
    monkeypatch.setattr(expert_products, "_launch_gate_kernel", launch)


def prepared_model(
    config: PreTrainedConfig, plan: Plan, world: World, lora: Any, depths: int, how: dict[str, Any]
) -> tuple[Any, list[Any]]:
    torch.manual_seed(0)
    alone = type(config) in AutoModelForCausalLM._model_mapping
    model: Any = (AutoModelForCausalLM if alone else AutoModelForImageTextToText).from_config(config)
    model = model.to(torch.bfloat16)
    if lora is not None:
        model = add_lora(model, NewAdapter(**lora)).to(torch.bfloat16)
    if depths:
        added: Any = add_mtp(model, depths=depths)
        model = added.to(torch.bfloat16)
    options: dict[str, Any] = {"shard_parameters": False, "fused_norms": "on"} | how
    generator, vocabulary = np.random.default_rng(0), config.get_text_config().vocab_size
    documents: list[Any] = [generator.integers(0, vocabulary, size=length) for length in plan.lengths]
    if plan.parents is not None:  # of which none continue another that predicts something
        labels = [np.full(n, -100) if d in plan.parents else documents[d] for d, n in enumerate(plan.lengths)]
        columns = zip(documents, labels, plan.parents, strict=True)
        documents = [Document(ids, labels=row, parent=parent) for ids, row, parent in columns]
    return prepare_untried(model, world, **options), documents


class SavedBytes:
    """Bytes of what autograd saves in some modules, each memory once, without parameters and buffers of the model."""

    def __init__(self, model: Any, modules: list[Any]) -> None:
        self._known = {x.untyped_storage()._cdata for x in (*model.parameters(), *model.buffers())}
        self._running: Any = None
        self._saved = {module: dict[int, Tensor]() for module in modules}
        for module in modules:
            module.register_forward_pre_hook(lambda m, *_: setattr(self, "_running", m))
            module.register_forward_hook(lambda *_: setattr(self, "_running", None))

    def _keep(self, x: Tensor) -> Tensor:
        memory = x.untyped_storage()._cdata
        if self._running is not None and memory not in self._known:
            self._saved[self._running].setdefault(memory, x)
        return x

    def count(self, step: Callable[[], Any]) -> list[int]:
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda x: x):
            step()
        return [sum(x.untyped_storage().nbytes() for x in saved.values()) for saved in self._saved.values()]


def count_step(
    config: PreTrainedConfig, plan: Plan, world: World, *, lora: Any = None, depths: int = 0, **how: Any
) -> Counted:
    """One step of a model of this configuration, with an adapter or depths of multi-token prediction, prepared so."""
    return count_prepared(*prepared_model(config, plan, world, lora, depths, how), plan, world, depths)


def count_prepared(prepared: Any, documents: list[Any], plan: Plan, world: World, depths: int = 0) -> Counted:
    (group,) = plan.micro_batches[0].groups
    short = plan_fixed([8 * group.degree], world.home, group.degree, cp_comm_type=group.cp_comm_type)
    run_step(prepared, short, [documents[0][: 8 * group.degree]], world, mtp=MtpLoss() if depths else None)
    prepared.zero_grad(set_to_none=True)  # what a first step makes once is made
    marks = _Marks(prepared)
    with marks.live:
        run_step(prepared, plan, documents, world, mtp=MtpLoss() if depths else None)
        marks.end()
    return marks.counted
