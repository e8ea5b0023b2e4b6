"""What an adapter may not be, how a new one is drawn, what is saved, and its errors over a base model in bfloat16."""

import copy
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from longspan.comm import World
from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.model import disable_adapter, load_model, prepare, save_model
from longspan.model.adapted_modules import unwrap_peft_model
from longspan.model.adapters.adapter import find_adapter
from longspan.model.adapters.adapter_rules import check_adapter
from longspan.model.adapters.new_adapter import NewAdapter, adapter_notes, add_lora
from longspan.model.feature import Call
from longspan.model.frozen.frozen_weights import weights_to_pack
from longspan.model.kinds import is_linear
from longspan.model.options import PrepareOptions
from longspan.model.tensor_parallel.module_styles import StyledModule, sizes_divided_by_tp
from longspan.model.tensor_parallel.split_model import TensorParallelFeature
from longspan.plan import plan_fixed
from longspan.plan.shape.packed import LEAST_ROWS
from longspan.testing import backend, run_ranks
from longspan.train import run_step
from tests.model.experts.moe_models import moe_model
from tests.model.lora.adapted import LENGTHS, adapted, dense
from tests.model.seams.families import here, tiny as indexed
from tests.model.stock import gradients_of, prepare_untried, texts, tiny

CP, TP, PP = Layout(ranks=2), Layout(ranks=2, tp=2), Layout(ranks=2, pp=2)


def said_by(call: Callable[[], object]) -> str:
    with pytest.raises(ModelError) as error:
        call()
    return str(error.value)


# ---- what is refused


def lora(family: str = "llama", **more: Any) -> Any:
    model = indexed(family) if family in ("deepseek-v3.2", "longcat") else tiny(family)
    return peft.get_peft_model(model, peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **more}))


def ia3() -> Any:
    config = peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    return peft.get_peft_model(tiny("llama"), config)


def changed(change: Callable[[Any], object]) -> Any:
    model = lora()
    change(model)
    return model


def in_two_types(model: Any) -> None:
    first = next(p for p in model.parameters() if p.requires_grad)
    first.data = first.data.double()


SECOND = peft.LoraConfig(r=2, target_modules=["q_proj"])
CASES: dict[str, tuple[Callable[[], Any], Layout, str]] = {
    "another method": (ia3, CP, "of peft's method IA3.*merge_and_unload"),
    "two adapters": (lambda: changed(lambda m: m.add_adapter("second", SECOND)), CP, "2 adapters .default, second."),
    "merged": (lambda: changed(lambda m: m.merge_adapter()), CP, "is merged into its weight"),
    "frozen": (lambda: changed(lambda m: m.requires_grad_(False)), CP, "none of its parameters requires a gradient"),
    "two types": (lambda: changed(in_two_types), CP, "of float32 and float64"),
    "biases": (lambda: lora(bias="all"), CP, "bias is 'all'"),
    "rows": (lambda: lora(trainable_token_indices=[1]), CP, "trl.clone_chat_template, and train modules_to_save="),
    "dropout under tp": (lambda: lora(lora_dropout=0.1), TP, "lora_dropout is 0.1.*use tp 1"),
    "dora under tp": (lambda: lora(use_dora=True), TP, "use_dora is set"),
    "copies under tp": (lambda: lora(modules_to_save=["lm_head"]), TP, "modules_to_save .lm_head."),
    "an indexer": (
        lambda: lora("deepseek-v3.2", target_modules=["o_proj", "wq_b"]),
        CP,
        "self_attn.indexer.wq_b belongs to an indexer, which gets no gradient; name target_modules without it",
    ),
    "a router that is not called": (
        lambda: lora("longcat", target_modules=["o_proj", "classifier"]),
        CP,
        "classifier has an adapter that nothing computes with.* LongcatFlashTopkRouter reads",
    ),
    "a tied head in stages": (lambda: lora("qwen3", target_modules=["lm_head"]), PP, "tied to the head.*use pp 1"),
}


@pytest.mark.filterwarnings("ignore")  # peft's own, of merged weights
@pytest.mark.parametrize("case", CASES)
def test_what_is_not_exact_is_refused(case: str) -> None:
    make, layout, message = CASES[case]
    model: Any = unwrap_peft_model(make())
    world: Any = SimpleNamespace(home=layout)
    with pytest.raises(ModelError, match=message):
        adapter = find_adapter(model)
        assert adapter is not None
        check_adapter(model, adapter, world)
        TensorParallelFeature(Call(model, model, world, PrepareOptions())).refuse(model)


def test_targets_are_names_of_linears() -> None:
    with pytest.raises(ModelError, match=r"'q_prj', which is no linear of LlamaForCausalLM .* did you mean 'q_proj'"):
        add_lora(tiny("llama"), NewAdapter(rank=2, targets=("q_prj",)))
    model = add_lora(tiny("llama"), NewAdapter(rank=2, targets=("lm_head",)))
    with pytest.warns(UserWarning, match="the adapter leaves out down_proj"):
        targets = add_lora(indexed("deepseek-v3.2"), NewAdapter(rank=2)).peft_config["default"].target_modules
    assert "q_b_proj" in targets and not {"wk", "wq_b", "weights_proj"} & {*targets}
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(names) == 2 and all("lm_head" in name for name in names)


def test_default_adapters_are_of_linears_that_layers_call() -> None:
    """LongCat's router reads its linear's weight in float32, past any adapter."""
    with warnings.catch_warnings(action="ignore"):
        model = add_lora(indexed("longcat"), NewAdapter(rank=2))
    assert "classifier" not in model.peft_config["default"].target_modules
    assert not [name for name, _ in model.named_parameters() if "classifier" in name and "lora" in name]
    says = "'classifier', which is no linear of LongcatFlashForCausalLM .* which its layers call"
    with pytest.raises(ModelError, match=says):
        add_lora(indexed("longcat"), NewAdapter(rank=2, targets=("classifier",)))


@pytest.mark.skipif(not here(["deepseek-v4"]), reason="this transformers has no such class")
def test_a_linear_with_a_forward_of_its_own_is_whole_for_adapters_packing_and_tp(world: World) -> None:
    """DeepSeek-V4 projects attention's output in groups, by a class that is an nn.Linear by its type alone."""
    model = indexed("deepseek-v4", o_lora_rank=64).float()
    grouped = model.model.layers[0].self_attn.o_a_proj
    assert isinstance(grouped, torch.nn.Linear) and grouped.out_features >= LEAST_ROWS and not is_linear(grouped)
    assert not [name for name in weights_to_pack(model) if "o_a_proj" in name]
    styled = [StyledModule("model.layers.0.self_attn.o_a_proj", grouped, "colwise")]
    with pytest.raises(ModelError, match=r"o_a_proj \(DeepseekV4GroupedLinear\) has style 'colwise', which is for nn"):
        sizes_divided_by_tp(model, styled)
    adapted_model = add_lora(model, NewAdapter(rank=2))
    targets = adapted_model.peft_config["default"].target_modules
    assert {"o_b_proj", "q_a_proj"} <= {*targets} and "o_a_proj" not in targets
    adapter = find_adapter(adapted_model)
    assert adapter is not None
    check_adapter(adapted_model.get_base_model(), adapter, world)
    with pytest.raises(ModelError, match="'o_a_proj', which is no linear of DeepseekV4ForCausalLM"):
        add_lora(indexed("deepseek-v4"), NewAdapter(rank=2, targets=("o_a_proj",)))


@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek-v3"])  # a dense layer; shared experts too
def test_names_that_peft_takes_for_experts_have_no_adapter(family: str) -> None:
    with pytest.warns(UserWarning, match="the adapter leaves out down_proj, gate_proj, up_proj, which peft refuses"):
        config = add_lora(moe_model(family, torch.float32), NewAdapter(rank=2)).peft_config["default"]
    assert not config.target_parameters and "o_proj" in config.target_modules
    with pytest.raises(ModelError, match=r"lora\.target_modules has down_proj, which peft .* or takes for its experts"):
        add_lora(moe_model(family, torch.float32), NewAdapter(rank=2, targets=("o_proj", "down_proj")))


def test_weights_without_an_adapter_are_named_with_their_share() -> None:
    def lines(model: Any, *targets: str) -> list[str]:
        return [*adapter_notes(add_lora(model, NewAdapter(rank=2, targets=targets)).get_base_model())]

    moe = moe_model("qwen3-moe", torch.float32)
    sizes = {name: p.numel() for name, p in moe.named_parameters() if ".layers." in name and p.ndim > 1}
    bare = sum(size for name, size in sizes.items() if ".self_attn." not in name)  # experts, and a dense layer
    with warnings.catch_warnings(action="ignore"):  # that names of linears in the dense layer are left out
        (line,) = lines(moe)
    assert line.startswith("lora: experts, ")
    assert line.endswith(
        f" ({100 * bare / sum(sizes.values()):.1f} % of the weights of decoder layers) have no adapter"
    )
    assert lines(tiny("llama")) == []  # every linear has one
    (line,) = lines(tiny("llama"), "q_proj", "k_proj", "v_proj", "o_proj")
    assert re.match(r"lora: (gate|up|down)_proj, (gate|up|down)_proj, (gate|up|down)_proj \(", line)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")  # peft's own
def test_an_adapter_of_a_tied_head_is_told_that_it_is_not_merged() -> None:
    for family, told in (("qwen3", True), ("llama", False)):
        lines = adapter_notes(add_lora(tiny(family), NewAdapter(rank=2, targets=("lm_head",))).get_base_model())
        words = (
            "caution: lora.target_modules has the head, which shares its weight with the embedding "
            "(tie_word_embeddings): lo"
        )
        assert any(line.startswith(words) for line in lines) == told, family


# ---- new adapters


def test_a_new_adapter_is_drawn_from_its_seed_alone() -> None:
    models = [add_lora(tiny("llama"), NewAdapter(rank=2, seed=seed)) for seed in (0, 0, 1)]
    first, again, other = ({n: p for n, p in m.named_parameters() if p.requires_grad} for m in models)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(p.any() and not torch.equal(p, other[name]) for name, p in first.items() if "lora_A" in name)
    assert not any(p.any() for name, p in first.items() if "lora_B" in name)


@pytest.mark.filterwarnings("ignore")  # peft's own, of parameters on the meta device
def test_a_trained_adapter_is_not_drawn_again(tmp_path: Path, world: World) -> None:
    adapted("llama", "every linear", torch.float32).save_pretrained(tmp_path / "adapter")
    tiny("llama", vocabulary=62).save_pretrained(tmp_path / "base")
    ways: list[dict[str, Any]] = [{}, {"low_cpu_mem_usage": True}]
    for more in ways:
        base: Any = load_model(tmp_path / "base", sharded=True)
        model = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"), is_trainable=True, **more)
        said = said_by(lambda model=model: prepare(model, world))
        assert "the adapter 'default' of LlamaForCausalLM" in said and "load the base with sharded=False" in said
    said = said_by(lambda: prepare(peft.get_peft_model(tiny("llama"), SECOND, low_cpu_mem_usage=True), world))
    assert "have no values" in said and "without low_cpu_mem_usage=True" in said


# ---- prepared models, on two ranks


def _prepared(rank: int, folder: Path) -> tuple[dict[str, float], list[str], list[str]]:
    """The largest entry of each of a new adapter's matrices; what is said of saving, and of other calls."""
    with World(CP, backend=backend(), timeout=60) as world:
        new = add_lora(load_model(config=tiny("llama").config, sharded=True), NewAdapter(rank=2))
        model = prepare_untried(new, world)
        for parameter in model.parameters():
            parameter.grad = parameter.detach()
        largest = {name: float(x.abs().max()) for name, x in gradients_of(model).items()}
        torch.manual_seed(rank)
        refused = [said_by(lambda: prepare(lora(), world))]
        peft_model = adapted("llama", "every linear")
        saving = [said_by(lambda: save_model(peft_model, folder / "too early", world))]
        model, plan = prepare_untried(peft_model, world), plan_fixed([8, 9], CP, cp=2)
        save_model(peft_model, folder / "cp", world)
        with disable_adapter(model):
            refused.append(said_by(lambda: run_step(model, plan, texts((8, 9)), world)))
        refused += [said_by(lambda: peft_model.save_pretrained("x")), said_by(peft_model.merge_and_unload)]
    with World(PP, backend=backend(), timeout=60) as world:
        peft_model = adapted("llama", "every linear")
        prepared = prepare_untried(peft_model, world)
        saving.append(said_by(lambda: save_model(peft_model, folder / "refused", world)))
        save_model(prepared, folder / "pp", world)
    return largest, saving, refused


def test_a_prepared_adapter_is_drawn_and_saved_and_other_calls_are_refused(tmp_path: Path) -> None:
    for largest, saving, refused in run_ranks(_prepared, 2, tmp_path, timeout=100):
        assert all((value > 0) == (".lora_B." not in name) for name, value in largest.items()), largest
        assert len(saving) == 2 and all("was not prepared" in words for words in saving)
        assert "not the same on ranks 0 and 1" in refused[0] and "adapter is left out" in refused[1]
        assert "longspan.save_model" in refused[2] and "export RUN FOLDER --merge" in refused[3]
    wanted = {name: p for name, p in adapted("llama", "every linear").named_parameters() if p.requires_grad}
    for home in ("cp", "pp"):
        base: Any = tiny("llama", torch.float64, vocabulary=62)
        loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / home), is_trainable=True)
        stock = dict(loaded.named_parameters())
        assert all(torch.equal(stock[name], p) for name, p in wanted.items()), home
    assert not (tmp_path / "refused").exists() and not (tmp_path / "too early").exists()


# ---- a frozen base model in bfloat16, an adapter in float32

HOMES: list[tuple[Layout, dict[str, Any]]] = [(CP, {"compute_dtype": torch.bfloat16}), (TP, {})]


def _distance(gradients: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """The norm of the difference of all gradients, relative to that of the exact ones."""
    assert gradients.keys() == exact.keys()
    apart = torch.stack([(gradients[name].double() - exact[name]).norm() for name in exact]).norm()
    return float(apart / torch.stack([gradient.norm() for gradient in exact.values()]).norm())


def _half_precision_errors(rank: int, exact_loss: float, exact: dict[str, Tensor]) -> list[tuple[float, float]]:
    errors = list[tuple[float, float]]()
    for layout, options in HOMES:
        with World(layout, backend=backend(), timeout=60) as world:
            model = prepare_untried(adapted("llama", "every linear", torch.bfloat16), world, **options)
            kinds = {p.dtype for p in model.parameters() if p.requires_grad}
            assert kinds == {torch.float32} and model.dtype == torch.bfloat16
            plan = plan_fixed(LENGTHS, layout, cp=layout.slots, max_tokens_per_slot=80)
            loss = run_step(model, plan, texts(LENGTHS), world).loss
            errors.append((abs(loss - exact_loss), _distance(gradients_of(model), exact)))
    return errors


def test_errors_in_half_precision_are_those_of_stock_peft() -> None:
    stock = adapted("llama", "every linear", torch.bfloat16)
    exact = copy.deepcopy(stock).double()
    exact_loss, _ = dense(exact), dense(stock)
    gradients = gradients_of(exact.get_base_model())
    of_stock = _distance(gradients_of(stock.get_base_model()), gradients)
    assert 1e-3 < of_stock < 0.2
    for errors in run_ranks(_half_precision_errors, 2, exact_loss, gradients, timeout=100):
        assert all(loss <= 0.02 and distance <= 2 * of_stock for loss, distance in errors), (errors, of_stock)
