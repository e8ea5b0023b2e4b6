"""What `prepare` promises beyond equal numbers: refused calls, the shard in FSDP2, saved folders, shared blocks."""

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import FalconConfig, FalconForCausalLM, GPT2Config, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from longspan import Layout, LongspanError, SequenceShard, World, bind, plan_fixed, run_step
from longspan.errors import AttentionError, ModelError
from longspan.model import load_model, prepare, prepared, save_model
from longspan.model.exactness.small_copies import make_tiny_model, shrink_configuration
from longspan.model.fsdp_params import fsdp_modules
from longspan.model.layers import decoder_layers
from longspan.model.prepared import PrepareOptions
from longspan.model.seams.attention_calls import number_layers
from longspan.model.seams.call_rules import is_prepared
from longspan.model.sharding import shared_blocks
from longspan.testing import backend, run_ranks
from tests.model.stock import (
    SIZES,
    at_random,
    dense_answer,
    gradients_of,
    prepare_untried,
    texts,
    tiny,
    weights_of,
    worst,
)

LENGTHS = (9, 4)


def _local(world: World, cp: int = 1) -> tuple[SequenceShard, dict[str, Any]]:
    shard = bind(plan_fixed(LENGTHS, world.home, cp=cp).micro_batches[0], world).with_padding()
    ids = torch.from_numpy(np.concatenate(texts(LENGTHS))).to(world.device)
    return shard, {"input_ids": shard.scatter(ids)[None], "position_ids": shard.position_ids[None], "shard": shard}


CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "no shard": ({"shard": None}, r"got no shard; call .*shard = bind\(micro_batch, world\); .*hf\.with_longspan"),
    "a wrong shard": ({"shard": 3}, "got shard=int"),
    "labels": ({"labels": torch.zeros(1, 13, dtype=torch.long)}, "labels would be shifted .* use longspan.run_step"),
    "a mask": ({"attention_mask": torch.ones(1, 1, 13, 13)}, "leave attention_mask out"),
    "a cache": ({"use_cache": True}, "use_cache must be False"),
    "states": ({"cache_params": object()}, "Qwen3ForCausalLM got cache_params=: there is no cache of states"),
    "bounds of documents": ({"seq_idx": torch.zeros(1, 13)}, "the shard says where documents begin; leave seq_idx out"),
    "weights": ({"output_attentions": True}, "attention weights are never formed"),
    "no positions": ({"position_ids": None}, "got no position_ids"),
    "too few rows": ({"input_ids": torch.zeros(1, 5, dtype=torch.long)}, "input_ids has 5 rows, the shard holds 13"),
    "two sequences": ({"input_ids": torch.zeros(2, 13, dtype=torch.long)}, r"shape \(2, 13\); a shard is one packed"),
}


def test_wrong_calls_are_refused(world: World) -> None:
    model = prepare(tiny("qwen3"), world)
    _, arguments = _local(world)
    logits = model(**arguments).logits
    for change, says in CALLS.values():
        with pytest.raises(ModelError, match=says):
            model(**(arguments | change))
    plain = model(arguments["input_ids"][0], position_ids=arguments["position_ids"][0], shard=arguments["shard"])
    assert torch.equal(plain.logits, logits) and plain.past_key_values is None and model.config.use_cache is False
    with pytest.raises(ModelError, match="prepared already"):
        prepare(model, world)
    with pytest.raises(ModelError, match=r"Qwen3ForCausalLM.generate would need caches.*save_model"):
        model.generate(arguments["input_ids"])
    with pytest.raises(ModelError, match=r"Qwen3Attention got a mask of shape \(1, 1, 13, 13\)"):
        model.model(**arguments, attention_mask=torch.zeros(1, 1, 13, 13, device=world.device))
    # an error inside a layer leaves no shard behind
    with pytest.raises(ModelError, match=r"Qwen3Attention got no shard; .*model\(..., shard=shard\)"):
        model.model(input_ids=arguments["input_ids"], position_ids=arguments["position_ids"])


def _sharded(rank: int) -> None:
    def unsharded() -> list[str]:
        return [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]

    seen = list[Any]()
    with World(Layout(ranks=2), backend=backend()) as world:
        model = prepare_untried(tiny("qwen3"), world, compute_dtype=torch.bfloat16, activation_checkpointing=True)
        assert not unsharded() and all(isinstance(layer, FSDPModule) for layer in model.model.layers)
        shard, arguments = _local(world, cp=2)
        model.get_submodule("model.layers.1.self_attn").register_forward_pre_hook(
            lambda _, args, kwargs: seen.append((kwargs["shard"], kwargs["hidden_states"].dtype)), with_kwargs=True
        )
        model(**arguments).logits.float().sum().backward()
        assert len(seen) >= 2, "recomputed"
        assert all(of_layer is shard and of_layer.position_ids is shard.position_ids for of_layer, _ in seen)
        before = weights_of(model)
        loss = run_step(model, plan_fixed(LENGTHS, world.home, cp=2), texts(LENGTHS), world, backward=False).loss
        assert 0 < loss < 10 and worst(weights_of(model), before) == 0
        assert {dtype for _, dtype in seen} == {torch.bfloat16} and not unsharded()


def test_parameters_are_sharded_and_freed_after_evaluation_and_the_shard_passes_through_fsdp2() -> None:
    run_ranks(_sharded, 2)


def test_a_padding_id_changes_nothing(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    """transformers would look for it in the ids of every call without a mask, and warn of padding: there is none."""
    warned = list[object]()
    monkeypatch.setattr(PreTrainedModel, "warn_if_padding_and_no_attention_mask", lambda *args: warned.append(args))
    drops = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    config = GPT2Config(
        vocab_size=SIZES["vocab_size"], n_embd=32, n_layer=2, n_head=4, eos_token_id=3, pad_token_id=3, **drops
    )
    model = at_random(config)
    loss, gradients = dense_answer(model, texts(LENGTHS))
    assert warned
    warned.clear()
    prepared: Any = prepare(at_random(config), world)
    ours = run_step(prepared, plan_fixed(LENGTHS, world.home, cp=1), texts(LENGTHS), world).loss
    assert ours == pytest.approx(loss, rel=1e-12) and worst(gradients_of(prepared), gradients) < 1e-12
    assert not warned


def _zamba2(hybrids: int, blocks: int) -> PreTrainedModel:
    """One layer of Mamba 2 and then hybrids, whose shared blocks take turns."""
    config = shrink_configuration(CONFIG_MAPPING["zamba2"]())
    config.num_hidden_layers, config.num_mem_blocks = hybrids + 1, blocks
    config.layers_block_type = ["linear_attention"] + ["hybrid"] * hybrids
    config.hybrid_layer_ids = list(range(1, hybrids + 1))
    return make_tiny_model(config, torch.float32)


def test_shared_blocks_are_sharded_once_and_saved_under_each_of_their_names(tmp_path: Path, world: World) -> None:
    model = prepare_untried(_zamba2(2, blocks=1), world)
    assert len({id(module._get_fsdp_state()) for module in fsdp_modules(model)}) == 5  # the root is one too
    save_model(model, tmp_path, world)
    saved, stock = (m.state_dict() for m in (load_model(tmp_path), _zamba2(2, blocks=1)))
    assert saved.keys() == stock.keys() and all(torch.equal(saved[name], stock[name]) for name in stock)


SAVES = r"Qwen3ForCausalLM\..*call longspan\.save_model\("
WRAPS = (
    r"in DistributedDataParallel, nor give it to acc.*longspan\.hf\.with_longspan\(Trainer\) takes the model before "
    r'prepare.*docs/own-loop\.md, "From a Trainer script"$'
)
MIXED = r"layers.1.self_attn.q_proj.weight is torch.float32, model.layers.1.mlp.down_proj.weight torch.bf"


def _others(rank: int, folder: Path) -> None:
    for home in (Layout(ranks=2), Layout(ranks=2, pp=2)):
        with World(home, backend=backend()) as world:
            for sharded in (True, False):
                model: Any = prepare_untried(tiny("qwen3"), world, shard_parameters=sharded)
                calls = [partial(model.save_pretrained, folder / "saved"), partial(model.push_to_hub, "me/model")]
                if home.pp == 1:
                    calls.append(partial(model.model.save_pretrained, folder / "saved", safe_serialization=True))
                for call in calls:
                    with pytest.raises(LongspanError, match=SAVES):
                        call()
                with pytest.raises(LongspanError, match=WRAPS):
                    torch.nn.parallel.DistributedDataParallel(model)
    assert not (folder / "saved").exists()
    falcon = FalconConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=SIZES["vocab_size"])
    in_copies = {"shard_parameters": False, "compute_dtype": torch.bfloat16}
    mixed = tiny("qwen3")
    mixed.model.layers[1].mlp.down_proj.bfloat16()
    with World(Layout(ranks=2), backend=backend()) as world:
        with pytest.raises(LongspanError, match=r"could not be saved to .*file/model: NotADirectoryError"):
            save_model(prepare_untried(tiny("qwen3"), world), folder / "file" / "model", world)
        for model, options, message in (
            (FalconForCausalLM(falcon), {}, r"transformer.h.0.self_attention, .*\(FalconAttention\) bypasses"),
            (tiny("qwen3"), in_copies, "needs shard_parameters=True"),
            (mixed, {}, MIXED),
            (tiny("qwen3"), {"mtp_layers": 1}, "mtp_layers is no option of prepare; use longspan.add_mtp"),
        ):
            with pytest.raises(ModelError, match=message):
                prepare(model, world, **options)
            assert not is_prepared(model)


def test_what_is_not_prepared_or_saved_is_told_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    run_ranks(_others, 2, tmp_path)
    page = Path(__file__).parents[2] / "docs/own-loop.md"
    assert "\n## From a Trainer script\n" in page.read_text(encoding="utf-8")


def test_options_are_one_value_and_keywords_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "prepare_language_model", lambda model, world, options: options)
    model: Any = object()
    options: Any = prepare(model, model, options=PrepareOptions(virtual_stages=2), virtual_stages=1)
    assert options == PrepareOptions(virtual_stages=1)
    with pytest.raises(TypeError, match="virtual_stage"):
        prepare(model, model, virtual_stage=1)


def test_blocks_are_found_and_numbered() -> None:
    model = _zamba2(5, blocks=2)
    blocks = [layer.shared_transformer for layer in model.model.layers[1:]]
    found = shared_blocks(decoder_layers(model))
    assert [[blocks.index(module) for module in modules] for modules in found] == [[0, 2, 4], [1, 3]]
    number_layers(model)
    assert [block.self_attn.layer_idx for block in blocks] == [1, 2, 3, 4, 5]
    llama = tiny("llama")
    assert shared_blocks(decoder_layers(llama)) == []
    llama.model.layers[1].mlp = llama.model.layers[0].mlp  # one module, which FSDP2 would gather twice
    assert shared_blocks(decoder_layers(llama)) == []


# ---- a kernel is named where a model is prepared; one that is missing is an error before the first step

MISSING = "torch_flash" if backend() == "gloo" else "cpu_flash"
SAID = "needs cuda tensors, got cpu" if backend() == "gloo" else "needs cpu tensors, got cuda"


def test_the_named_kernel_is_what_every_layer_runs(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    """By default, by name, and by name in recomputed layers."""
    packing: Any = import_module("longspan.attention.attend")
    chosen, choose, logits = set[str](), packing.choose_kernel, list[torch.Tensor]()

    def noted(call: Any, name: str | None = None) -> Any:
        kernel = choose(call, name)
        chosen.add(kernel.name)
        return kernel

    monkeypatch.setattr(packing, "choose_kernel", noted)
    batch = plan_fixed((9, 4), world.home, cp=1).micro_batches[0]
    inputs: dict[str, Any] = {"input_ids": torch.arange(13, device=world.device)[None]}
    for name, recompute in ((None, False), ("reference", False), ("reference", True)):
        model = prepare(tiny("mistral"), world, attention_kernel=name, activation_checkpointing=recompute)
        chosen.clear()
        shard = bind(batch, world)  # a choice is kept with the shard
        out = model(**inputs, position_ids=shard.position_ids[None], shard=shard).logits
        out.sum().backward()
        assert chosen == {name or "cpu_flash"} or (name is None and backend() == "nccl")
        logits.append(out.detach())
        chosen.clear()
        shard = bind(batch, world)
        with torch.no_grad():
            model(**inputs, position_ids=shard.position_ids[None], shard=shard, attention_kernel="reference")
        assert chosen == {"reference"}, "the argument of a call wins"
        assert "attention_kernel" not in model.config.to_dict()
    default, named, recomputed = logits
    assert (named - default).abs().max() <= 1e-4 and torch.equal(named, recomputed)


WITH_WINDOW = f"MistralForCausalLM attends with heads of 8 with values of 8, window: kernel {MISSING} {SAID}"
KERNELS = [
    (
        "mistral",
        "fa5",
        "kernel 'fa5' is unknown; use one of fa4, cudnn, torch_flash, triton_blocks, triton_flash",
    ),
    ("mistral", MISSING, WITH_WINDOW),
    ("deepseek-v3", MISSING, "attends with heads of 12 with values of 6"),
    *([("gemma2", "cpu_flash", "a call without softcap")] if backend() == "gloo" else []),
]


@pytest.mark.parametrize(("family", "name", "message"), KERNELS)
def test_a_kernel_that_is_missing_is_an_error_when_the_model_is_prepared(
    family: str, name: str, message: str, world: World
) -> None:
    with pytest.raises(AttentionError, match=message):
        prepare(tiny(family, attention="eager"), world, attention_kernel=name)
