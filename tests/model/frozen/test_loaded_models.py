"""Models that transformers loaded in 4 or 8 bits are trained over their own codes, under an adapter of peft."""

import gc
import json
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

from longspan.comm import World
from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.model import prepare, save_model, weights_by_name
from longspan.model.adapted_modules import unwrap_peft_model
from longspan.model.execution import model_execution
from longspan.model.frozen import frozen_weights
from longspan.model.frozen.formats.loaded_linears import OWN_CODES
from longspan.model.frozen.frozen_weights import weights_to_pack
from longspan.model.frozen.packed_format import NF4
from longspan.plan import plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import run_step
from tests.model.frozen.packed_models import LENGTHS, MOE, WIDE, adapted, are_equal, through_nf4, two_steps
from tests.model.lora.adapted import drawn
from tests.model.stock import gradients_of, prepare_untried, random_model, texts
from tests.mutation import Change, mutated

MUTATIONS: dict[str, Change] = {  # noticed in losses and gradients
    "columns of the first rank": ("model.frozen.packed_weight", "columns_here.start, packed", "0, packed"),
    "scales of other rows": (
        "model.frozen.formats.four_bit",
        "view(rows, -1)[part]",
        "view(rows, -1).flip(0)[part]",
    ),
}
HOMES: Mapping[str, tuple[str, Layout]] = {
    "one rank": ("llama", Layout(ranks=1)),
    "cp 2": ("llama", Layout(ranks=2)),
    "tp 2": ("llama", Layout(ranks=2, tp=2)),
    "pp 2": ("llama", Layout(ranks=2, pp=2)),
    "experts, ep 2": ("moe", Layout(ranks=2, ep=2)),
}


class Linear4bit(nn.Linear):
    """A linear with the state of bitsandbytes' one, which is not installed where this is tested."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.packed = NF4.pack(linear.weight.detach())
        codes = self.packed[:, : self.in_features // 2].reshape(-1, 1)
        self.weight = nn.Parameter(codes, requires_grad=False)

    def state_dict(self, *_: Any, **__: Any) -> Any:
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [*self._size()]}
        return {
            "weight": self.weight.data,
            "weight.absmax": self.packed[:, self.in_features // 2 :].contiguous().view(torch.float32).flatten(),
            "weight.quant_state.bitsandbytes__nf4": torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8),
        }

    def _size(self) -> tuple[int, int]:
        return self.out_features, self.in_features


def quantise(model: Any) -> Any:
    """Put linears in 4 bits, the head's among them, into a model that may have an adapter."""
    places = [(m, name, child) for m in model.modules() for name, child in m.named_children()]
    for module, name, child in places:
        if type(child) is nn.Linear and not name.startswith("default"):
            setattr(module, name, Linear4bit(child))
            if name == "base_layer":
                module.__class__ = type("Linear4bit", (type(module),), {})  # as peft calls its own, too
    model.is_quantized = True
    return model


def load_stand_ins(family: str) -> Any:
    peft_model = adapted(family)
    quantise(peft_model.get_base_model())
    return peft_model


def _dequantised(family: str) -> Any:
    model = adapted(family, dequantised=torch.bfloat16)
    inside = model.get_base_model()
    if family == "moe":  # bitsandbytes leaves experts whole
        whole = adapted(family).get_base_model()
        for name in weights_to_pack(inside):
            if "experts" in name:
                inside.get_parameter(name).data.copy_(whole.get_parameter(name))
    head = inside.lm_head.weight.data
    head.copy_(through_nf4(head, torch.bfloat16))
    return model


def _compare(rank: int, homes: Mapping[str, tuple[str, Layout]], change: Change | None = None) -> dict[str, bool]:
    equal = dict[str, bool]()
    for name, (family, layout) in homes.items():
        with World(layout, backend=backend(), timeout=60) as world:
            with mutated(change):
                steps = two_steps(load_stand_ins(family), world, "stored")
            expected = two_steps(_dequantised(family), world, "whole")
        assert all(x.abs().max() > 0 for x in expected[1].values())
        equal[name] = are_equal(steps, expected)
    return equal


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, ("tp 2", "experts, ep 2")),
        *(pytest.param(n, names, marks=pytest.mark.whole) for n, names in ((1, ("one rank",)), (2, ("cp 2", "pp 2")))),
    ],
)
def test_losses_and_gradients_are_those_over_dequantised_weights(ranks: int, names: tuple[str, ...]) -> None:
    homes = {name: HOMES[name] for name in names}
    for equal in run_ranks(_compare, ranks, homes, timeout=200):
        assert equal == dict.fromkeys(homes, True)


@pytest.mark.whole
@pytest.mark.parametrize("name", MUTATIONS)
def test_other_codes_are_noticed(name: str) -> None:
    assert not all(run_ranks(_compare, 2, {"tp 2": HOMES["tp 2"]}, MUTATIONS[name])[0].values())


def _refused(rank: int) -> dict[str, str]:
    messages = dict[str, str]()
    with World(Layout(ranks=1)) as world:
        for name, options in {"whole": {}, "nf4": {"frozen": "nf4"}, "copies": {"shard_parameters": False}}.items():
            peft_model = load_stand_ins("llama")
            model: Any = unwrap_peft_model(peft_model)
            before = [type(module) for module in model.modules()]
            with pytest.raises(ModelError) as error:
                prepare(peft_model, world, **{"frozen": "stored", **options} if options else {})
            messages[name] = str(error.value)
            assert [type(module) for module in model.modules()] == before
            assert model.is_quantized
    return messages


def test_a_refused_model_is_left_as_it_was() -> None:
    (messages,) = run_ranks(_refused, 1)
    advice = 'for an adapter over linears of bitsandbytes call prepare(…, frozen="stored")'
    assert "is quantized (transformers)" in messages["whole"] and advice in messages["whole"]
    assert advice in messages["nf4"]
    assert "shard_parameters=False" in messages["copies"]


# ---- loaded by transformers with bitsandbytes


def _load(folder: str, kind: str) -> Any:
    settings: dict[str, Any] = {"load_in_8bit": True}
    if kind != "int8":
        settings = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": kind == "double",
            "bnb_4bit_compute_dtype": torch.bfloat16,
        }
    quantization = transformers.BitsAndBytesConfig(**settings)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantization, dtype=torch.bfloat16
    )


def _adapt(model: Any) -> Any:
    linears = ["q_proj", "k_proj", "v_proj", "o_proj"] + ["gate_proj", "up_proj", "down_proj"] * hasattr(
        model.model.layers[0].mlp, "up_proj"
    )
    return drawn(peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=linears)))


def _compare_loaded(rank: int, folder: str, kind: str, layout: Layout, saved: str) -> None:
    with World(layout, backend=backend(), timeout=60) as world:
        losses = list[float]()
        gradients = list[dict[str, torch.Tensor]]()
        for packed in (True, False):
            model = _load(folder, kind)
            if not packed:
                values = model.dequantize().state_dict()
                model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
                model.load_state_dict(values)
            prepared: Any = prepare_untried(_adapt(model), world, **{"frozen": "stored"} if packed else {})
            plan = plan_fixed(LENGTHS, layout, cp=layout.slots)
            losses += [run_step(prepared, plan, texts(LENGTHS), world).loss for _ in range(2)]
            gradients.append(gradients_of(prepared))
            if packed:
                assert ("int8" if kind == "int8" else "bitsandbytes nf4") in model_execution(prepared).words["frozen"]
                save_model(prepared, Path(saved), world)
                weights = dict(weights_by_name(prepared, world))
            else:
                exact = dict(weights_by_name(prepared, world))
                assert all(torch.equal(x, exact[name]) for name, x in weights.items())  # pyright: ignore
        assert losses[:2] == losses[2:]
        assert gradients[0].keys() == gradients[1].keys()
        assert all(torch.equal(x, gradients[1][name]) for name, x in gradients[0].items())


@pytest.mark.parametrize("layout", [Layout(ranks=1), Layout(ranks=2)], ids=["1", "2"])
@pytest.mark.parametrize(("family", "kind"), [("llama", "nf4"), ("llama", "double"), ("llama", "int8"), ("moe", "nf4")])
def test_codes_of_bitsandbytes(family: str, kind: str, layout: Layout, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    config = transformers.Qwen3MoeConfig(**WIDE | MOE) if family == "moe" else transformers.LlamaConfig(**WIDE)
    random_model(config, torch.float32).save_pretrained(tmp_path / "model")
    run_ranks(
        _compare_loaded, len(layout.ranks), str(tmp_path / "model"), kind, layout, str(tmp_path / "saved"), timeout=100
    )
    stock = peft.PeftModel.from_pretrained(_load(str(tmp_path / "model"), kind), str(tmp_path / "saved"))
    trained = _adapt(_load(str(tmp_path / "model"), kind)).state_dict()
    saved = {name: x for name, x in stock.state_dict().items() if ".lora_" in name}
    assert saved and all(torch.equal(x, trained[name].to(x.dtype)) for name, x in saved.items())


# ---- weights that wait on the host


def _on_host(rank: int, homes: Mapping[str, tuple[str, Layout]]) -> list[str]:
    """Names of homes where bits are not those of codes on the device, or codes are left."""
    wrong = list[str]()
    for name, (family, layout) in homes.items():
        with World(layout, backend=backend(), timeout=60) as world:
            peft_model = load_stand_ins(family)
            steps = two_steps(peft_model, world, "stored", offload_weights=True)
            expected = two_steps(load_stand_ins(family), world, "stored")
            left = [key for key, module in peft_model.named_modules() if OWN_CODES in vars(module)]
        if left or not are_equal(steps, expected):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize(
    ("ranks", "names"),
    [(2, ("tp 2",)), *(pytest.param(n, x, marks=pytest.mark.whole) for n, x in ((1, ("one rank",)), (2, ("cp 2",))))],
)
def test_codes_move_to_the_host_weight_by_weight(ranks: int, names: tuple[str, ...]) -> None:
    homes = {name: HOMES[name] for name in names}
    assert run_ranks(_on_host, ranks, homes, timeout=200) == [[]] * ranks


def test_each_weight_is_freed_before_the_next_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    freed = list[Any]()
    copy = frozen_weights.copy_codes

    def copy_and_look(*arguments: Any) -> None:
        gc.collect()
        assert all(reference() is None for reference in freed), "codes of an earlier weight are there"
        freed.append(weakref.ref(arguments[2]))
        copy(*arguments)

    monkeypatch.setattr(frozen_weights, "copy_codes", copy_and_look)
    with World(Layout(1), backend=backend()) as world:
        two_steps(load_stand_ins("llama"), world, "stored", offload_weights=True)
    assert len(freed) == 14


def test_codes_on_a_device_do_not_go_to_the_host() -> None:
    peft_model = load_stand_ins("llama")
    for module in peft_model.modules():
        if isinstance(module, Linear4bit):
            module.packed = module.packed.to("meta")
            module.weight = nn.Parameter(module.weight.to("meta"), requires_grad=False)
    told = "loaded 15 weights of .* on meta; load the model with device_map=.*, or leave offload_weights out"
    with World(Layout(1), backend=backend()) as world, pytest.raises(ModelError, match=told):
        prepare(peft_model, world, frozen="stored", offload_weights=True)
