"""Which weights are packed, and their bytes: of dense models, experts, hybrids and folders that are quantised."""

from typing import Any

import pytest

from longspan.errors import PlanError
from longspan.model.presets import PRESETS
from longspan.plan.form import FrozenWeights
from longspan.plan.shape.packed import find_packed_form, packed_weights_of_model
from longspan.plan.shape.quantization import INT4, NF4, NF4_FORM

LLAMA_70B: dict[str, Any] = {"model_type": "llama", **PRESETS["llama-3.3-70b-instruct"].values}
QWEN3_32B: dict[str, Any] = {"model_type": "qwen3", **PRESETS["qwen3-32b"].values}
SMALL: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
DENSE = SMALL | {"hidden_size": 128, "head_dim": 64, "intermediate_size": 320}
MOE = DENSE | {"model_type": "qwen2_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 192}
MOE |= {"shared_expert_intermediate_size": 256, "num_key_value_heads": 4}
HYBRID = DENSE | {"model_type": "qwen3_next", "linear_num_value_heads": 4, "linear_num_key_heads": 2}
HYBRID |= {"linear_key_head_dim": 32, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4}
HYBRID |= {"layer_types": ["linear_attention", "full_attention"], "num_key_value_heads": 4, "num_experts": 0}
GPT_OSS = DENSE | {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 96}

ATTENTION = 128 * 256 * 4  # q, k, v, o of one layer
SHARED_EXPERT = 3 * 128 * 256 + 128  # with the row of its gate
EXPERTS = 8 * 3 * 128 * 192
# Into a delta net of 2 key heads of 32 and 4 value heads of 64: q, k, v, gate, beta, decay; and out of it.
MIXER = 128 * (2 * 64 + 2 * 256 + 2 * 4) + 256 * 128
MLP = 3 * 128 * 320


@pytest.mark.parametrize(
    ("config", "numbers", "experts"),
    [
        (LLAMA_70B, 80 * (8192 * (2 * 8192 + 2 * 1024) + 3 * 8192 * 28672), 0),
        (QWEN3_32B, 64 * (5120 * (2 * 8192 + 2 * 1024) + 3 * 5120 * 25600), 0),
        (DENSE, 2 * (ATTENTION + MLP), 0),
        (MOE, 2 * (ATTENTION + SHARED_EXPERT), 2 * EXPERTS),
        (HYBRID, MIXER + ATTENTION + 128 * 256 + 2 * MLP, 0),  # with a gate of each query
    ],
)
def test_linears_of_decoder_layers_in_nf4(config: dict[str, Any], numbers: int, experts: int) -> None:
    packed = packed_weights_of_model(config, "nf4")
    assert (packed.numbers, packed.experts) == (numbers, experts)
    assert (packed.bytes, packed.experts_bytes) == (numbers * 0.5625, experts * 0.5625)


def test_rows_that_blocks_do_not_divide_are_refused() -> None:
    with pytest.raises(
        PlanError,
        match=r"dict cannot be frozen as 'nf4': of its down_proj its rows have 100 numbers, which blocks of 64 "
        "do not divide;",
    ):
        packed_weights_of_model(DENSE | {"intermediate_size": 100}, "nf4")
    with pytest.raises(PlanError, match="of its attention its rows have 100 numbers"):
        packed_weights_of_model(DENSE | {"hidden_size": 100}, "nf4")
    assert NF4.reason_against(192) == INT4.reason_against(90) == INT4.reason_against(192, 2) == ""
    assert INT4.reason_against(90, 2).startswith(
        "its rows have 45 numbers, which blocks of 2 do not divide on each of 2"
    )
    cut = NF4.reason_against(192, 2)
    assert cut.endswith(
        "have 96 numbers, which blocks of 64 do not divide on each of 2 tensor-parallel ranks; use tp 1"
    )


def quantized(config: dict[str, Any], method: str, **settings: Any) -> dict[str, Any]:
    return config | {"quantization_config": {"quant_method": method, **settings}}


FLOAT8 = {"num_bits": 8, "type": "float"}
BLOCKS = {"weights": FLOAT8 | {"strategy": "block", "block_structure": [128, 128]}}
ROWS = {"weights": FLOAT8 | {"strategy": "channel"}}
IN_GROUPS, INT4_BY_ROWS = (
    {"format": "pack-quantized", "config_groups": {"": {"weights": {"num_bits": 4, "type": "int", "group_size": size}}}}
    for size in (64, -1)
)
ATTENTION_IN_BLOCKS = {"targets": [r"re:.*\.self_attn\..*_proj"], **BLOCKS}
# Bytes of rows of 128, 256 and 320 columns: of attention's products in and out, and of the MLP's.
IN_BLOCKS = 768 * 132 + 128 * 264 + 640 * 132 + 128 * 332
BY_ROWS = 768 * 132 + 128 * 260 + 640 * 132 + 128 * 324


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (quantized(DENSE, "fp8", weight_block_size=[128, 128]), IN_BLOCKS),
        (quantized(DENSE, "fp8", weight_block_size=None), BY_ROWS),
        (quantized(DENSE, "compressed-tensors", config_groups={"group_0": BLOCKS}), IN_BLOCKS),
        (quantized(DENSE, "compressed-tensors", config_groups={"group_0": {"weights": FLOAT8}}), BY_ROWS),
        (quantized(DENSE, "compressed-tensors", **IN_GROUPS), (ATTENTION + MLP) * (0.5 + 4 / 64)),
        (quantized(DENSE, "compressed-tensors", **INT4_BY_ROWS), 768 * 68 + 128 * 132 + 640 * 68 + 128 * 164),
        (quantized(DENSE, "bitsandbytes", load_in_8bit=True), BY_ROWS),
        (quantized(DENSE, "bitsandbytes", load_in_4bit=True), (ATTENTION + MLP) * 0.5625),
        (quantized(GPT_OSS, "mxfp4"), 8 * 3 * 128 * 96 * (0.5 + 1 / 32)),
        # a part of which one linear is left as it is counts as whole
        *(
            (quantized(DENSE, "fp8", modules_to_not_convert=["lm_head", name]), 640 * 132 + 128 * 324)
            for name in ("model.layers.0.self_attn.q_proj", "layers.0.self_attn.q_proj")
        ),
        (
            quantized(DENSE, "compressed-tensors", ignore=["re:.*mlp.*"], config_groups={"": BLOCKS}),
            768 * 132 + 128 * 264,
        ),
        # groups that name modules go before one of all linears; what no group names is whole
        *(
            (
                quantized(DENSE, "compressed-tensors", config_groups={"0": {"targets": [every], **ROWS}, "1": group}),
                size,
            )
            for every, group, size in (
                ("Linear", ATTENTION_IN_BLOCKS, 768 * 132 + 128 * 264 + 640 * 132 + 128 * 324),
                ("re:.*(gate|up|down)_proj$", ATTENTION_IN_BLOCKS, 768 * 132 + 128 * 264 + 640 * 132 + 128 * 324),
                ("lm_head", ATTENTION_IN_BLOCKS, 768 * 132 + 128 * 264),
            )
        ),
    ],
)
def test_bytes_of_a_quantised_folder(config: dict[str, Any], size: float) -> None:
    stored, auto = (packed_weights_of_model(config, word) for word in ("stored", "auto"))
    assert stored == auto and (stored.bytes + stored.experts_bytes) == 2 * size
    of_text = {"quantization_config": config["quantization_config"], "text_config": config}
    assert packed_weights_of_model(of_text, "stored") == stored
    assert packed_weights_of_model({"text_config": config}, "stored") == stored


def test_folders_that_hold_nothing_to_read() -> None:
    words: tuple[FrozenWeights, ...] = ("whole", "auto")
    of_v4: dict[str, Any] = quantized(GPT_OSS, "fp8", weight_block_size=[128, 128])
    assert any(packed_weights_of_model(of_v4, "auto"))
    for config in (DENSE, quantized(DENSE, "gptq"), of_v4 | {"expert_dtype": "fp4"}):
        assert not any(any(packed_weights_of_model(config, word)) for word in words)
        assert find_packed_form(config, "nf4") == NF4_FORM
    with pytest.raises(PlanError, match='"stored", and dict holds its weights whole, without a quantization_config'):
        find_packed_form(DENSE, "stored")
    with pytest.raises(PlanError, match="holds its weights in fp8 with experts in fp4, which is not read; use nf4"):
        find_packed_form(of_v4 | {"expert_dtype": "fp4"}, "stored")
    int4 = {"weights": {"num_bits": 4, "type": "int"}}
    for method, settings in (
        ("gptq", {}),
        ("fp8", {"weight_block_size": [128]}),
        ("compressed-tensors", {"config_groups": {"0": BLOCKS, "1": int4}}),
        ("compressed-tensors", {"config_groups": {"0": None}}),
    ):
        with pytest.raises(PlanError, match=f"holds its weights in {method}, which is not read; use nf4 or whole"):
            find_packed_form(quantized(DENSE, method, **settings), "stored")
        assert find_packed_form(quantized(DENSE, method, **settings), "auto") is None
