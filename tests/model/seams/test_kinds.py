"""Models of late 2026 under everything that a model may run with: exact, or refused by name, as docs/features.md says.

Each cell is a test on two ranks, of the stock class on each document alone, in float64; frozen weights in 4 bits are
beside the weights that they stand for, bit for bit. Names of kinds are those of the page.
"""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from longspan import Document, Layout, World, plan_fixed, run_step, save_model
from longspan.doctor.stock import compute_in_float64
from longspan.errors import LongspanError
from longspan.model.adapters.new_adapter import NewAdapter, add_lora
from longspan.model.exactness.small_copies import shrink_configuration
from longspan.model.frozen.frozen_weights import weights_to_pack
from longspan.model.marks import packed_weights, waits_on_host
from longspan.model.saving.stock_folders import load_weights
from longspan.model.seams.chosen_keys.indexers import order_equal_scores
from longspan.model.stock_copy import StockCopy
from longspan.mtp import MtpLoss
from longspan.testing import backend, run_ranks
from longspan.train import share_prefixes
from tests import parity
from tests.model.frozen.packed_models import through_nf4
from tests.model.frozen.test_loaded_models import Linear4bit
from tests.model.lora.adapted import drawn
from tests.model.mtp import dense
from tests.model.seams.families import FAMILIES, gradient_error, here, tiny
from tests.model.stock import Answer, answer, gradients_of, prepare_untried, random_model, texts, weights_of

LENGTHS = (19, 3, 40, 8, 1, 7)
EXACT = "exact"
# Small copies, their classes, and widths that 64 divides, where weights lie in 4 bits.
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "longcat": ("", {"hidden_size": 64, "q_lora_rank": 64, "kv_lora_rank": 64, "v_head_dim": 16}),
    "hrm": ("", {"hidden_size": 64, "head_dim": 16, "intermediate_size": 64}),
    "qwen4_exp_text": (
        "Qwen4ExpForCausalLM",
        {"hidden_size": 64, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "hc_lowrank": 64},
    ),
    "glm5_next": (
        "Glm5NextForConditionalGeneration",
        {"q_lora_rank": 64, "kv_lora_rank": 64, "v_head_dim": 16, "moe_intermediate_size": 64, "linear_head_dim": 64},
    ),
    "minimax_m3_vl_text": (
        "MiniMaxM3VLForCausalLM",
        {"hidden_size": 64, "intermediate_size": 64, "shared_intermediate_size": 64},
    ),
    "deepseek-v4": (
        "",
        {"hidden_size": 64, "intermediate_size": 64, "q_lora_rank": 64, "head_dim": 32, "o_lora_rank": 32},
    ),
}
SMALL["longcat"][1].update({"ffn_hidden_size": 64, "expert_ffn_hidden_size": 64})
SMALL["qwen4_exp_text"][1]["linear_value_head_dim"] = 16
SMALL["glm5_next"][1]["intermediate_size"] = 64
SMALL["minimax_m3_vl_text"][1]["dense_intermediate_size"] = 64
SMALL["deepseek-v4"][1]["moe_intermediate_size"] = 64


def model_of(family: str, **changes: Any) -> Any:
    if family in FAMILIES:
        return tiny(family, **changes)
    config = shrink_configuration(CONFIG_MAPPING[family]())
    config.get_text_config().update(changes)
    settings: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return random_model(config, make=getattr(transformers, SMALL[family][0])._from_config, **settings)


def _answer(model: Any) -> Answer:
    order_equal_scores(model)
    return answer(model.train(), texts(LENGTHS))


@cache
def _exact(family: str) -> Answer:
    with compute_in_float64():
        return _answer(model_of(family))


def _worded(error: Any, *, right: bool) -> str:
    return EXACT if right else f"not exact: {error}"


# ---- cells, each run on two ranks


def _step(rank: int, family: str, exact: Answer, axes: dict[str, int], evaluated: bool, options: dict[str, Any]) -> str:
    home = Layout(ranks=2, **axes)
    case = parity.Case(
        partial(model_of, family),
        home,
        {},
        texts(LENGTHS),
        exact,
        options=options,
        in_float64=True,
        compare=gradient_error,
        evaluation=plan_fixed(LENGTHS, home, cp=1) if evaluated else None,
    )
    with World(home, backend=backend(), timeout=60) as world, compute_in_float64():
        model: Any = case.prepared(world)
        assert not options.get("offload_weights") or all(map(waits_on_host, model.parameters()))
        plan = plan_fixed(LENGTHS, home, cp=home.slots, max_tokens_per_slot=40 if home.pp > 1 else None)
        errors, names = parity.step_errors(case, model, plan, world)
    return _worded(errors, right=errors.within(parity.WIDE) and (home.pp > 1 or names == exact.gradients.keys()))


def _adapted(family: str, **changes: Any) -> Any:
    return drawn(add_lora(model_of(family, **changes), NewAdapter(rank=2)))


def _lora(rank: int, family: str) -> str:
    with World(Layout(ranks=2), backend=backend(), timeout=60) as world, compute_in_float64():
        expected = _answer(_adapted(family).get_base_model())
        assert all("lora" in name for name in expected.gradients)
        model = prepare_untried(_adapted(family), world)
        result = run_step(model, plan_fixed(LENGTHS, world.home, cp=2), texts(LENGTHS), world)
        errors = parity.errors_of(result, gradients_of(model), expected, compare=gradient_error)
    return _worded(errors, right=errors.within(parity.WIDE))


def _load_in_4_bits(peft_model: Any) -> None:
    """Put modules in 4 bits in place of linears, as a quantised folder is read."""
    model = peft_model.get_base_model()
    names = {module: name for name, module in model.named_modules()}
    for module, _ in weights_to_pack(model).values():
        if isinstance(module, nn.Linear):
            parent, _, child = names[module].rpartition(".")
            around = model.get_submodule(parent)
            setattr(around, child, Linear4bit(module))
            if child == "base_layer":
                # Peft names its own so, too.
                around.__class__ = type("Linear4bit", (type(around),), {})
    model.is_quantized = True


def _dequantise(peft_model: Any, *, experts: bool) -> None:
    """Give weights the values that their 4 bits stand for."""
    for module, name in weights_to_pack(peft_model.get_base_model()).values():
        if experts or isinstance(module, nn.Linear):
            weight = getattr(module, name).data
            weight.copy_(through_nf4(weight, torch.bfloat16))


def _frozen(rank: int, family: str, frozen: str) -> str:
    packed, whole = (_adapted(family, **SMALL[family][1]).float() for _ in range(2))
    if frozen == "stored":
        _load_in_4_bits(packed)
    _dequantise(whole, experts=frozen == "nf4")
    steps = list[tuple[float, dict[str, Tensor]]]()
    with World(Layout(ranks=2), backend=backend(), timeout=60) as world:
        for peft_model, how in ((packed, frozen), (whole, "whole")):
            model = prepare_untried(peft_model, world, frozen=how, compute_dtype=torch.bfloat16)
            assert bool(packed_weights(model)) == (how != "whole")
            result = run_step(model, plan_fixed(LENGTHS, world.home, cp=2), texts(LENGTHS), world)
            steps.append((result.loss, gradients_of(model)))
    (loss, gradients), (expected_loss, expected) = steps
    differ = [name for name in expected if not torch.equal(gradients[name], expected[name])]
    return _worded((loss, expected_loss, differ), right=loss == expected_loss and not differ)


def _shared_prefixes(rank: int, family: str) -> str:
    prompt, *answers = texts((9, 4, 6, 17))
    documents = [Document(np.append(prompt, a), loss_mask=[0] * 9 + [1] * len(a)) for a in answers]
    shared = share_prefixes(documents, least_rows=4)
    found = list[tuple[float, dict[str, Tensor]]]()
    with World(Layout(ranks=2), backend=backend(), timeout=60) as world, compute_in_float64():
        model = prepare_untried(model_of(family), world)
        lengths = [len(document.ids) for document in documents]
        separate = plan_fixed(lengths, world.home, 2, targets=shared.targets)
        together = plan_fixed(shared.lengths, world.home, 2, targets=shared.targets, parents=shared.parents)
        for rows, plan in ((documents, separate), (shared.documents, together)):
            found.append((run_step(model, plan, rows, world).loss, gradients_of(model)))
            model.zero_grad()
    errors = abs(found[1][0] / found[0][0] - 1), gradient_error(found[1][1], found[0][1])
    return _worded(errors, right=max(errors) < 1e-12)


def _depth(rank: int, family: str) -> str:
    with World(Layout(ranks=2), backend=backend(), timeout=60) as world, compute_in_float64():
        expected = dense.dense(dense.add_drawn_depths(model_of(family), 1).train(), texts(LENGTHS))
        model = prepare_untried(dense.add_drawn_depths(model_of(family), 1), world)
        plan = plan_fixed(LENGTHS, world.home, cp=2)
        result = run_step(model, plan, texts(LENGTHS), world, mtp=MtpLoss(weight=dense.WEIGHT))
        error = expected.error(result, gradients_of(model))
    return _worded(error, right=error < 1e-11)


def _generate(rank: int, family: str) -> str:
    prompt = torch.arange(5, 24)[None]
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    with World(Layout(ranks=2), backend=backend(), timeout=60) as world, torch.no_grad():
        expected = model_of(family).eval().generate(prompt, **settings)
        copy = StockCopy(prepare_untried(model_of(family), world), world)
        tokens = copy.run(lambda stock: stock.generate(prompt, **settings), "tokens")
    return _worded(tokens, right=tokens.shape[1] > prompt.shape[1] and torch.equal(tokens, expected))


def _export(rank: int, family: str, folder: Path) -> str:
    with World(Layout(ranks=2), backend=backend(), timeout=60) as world:
        stock = model_of(family)
        model = prepare_untried(model_of(family), world)
        save_model(model, folder, world)
        read = type(stock).from_pretrained(folder, dtype=torch.float64).state_dict()
        other = model_of(family)
        for parameter in other.parameters():
            parameter.data.zero_()
        other = prepare_untried(other, world)
        load_weights(other, folder, world)
        pairs = [(read, stock.state_dict()), (weights_of(other), weights_of(model))]
    differ = [
        n for a, b in pairs for n in a.keys() | b.keys() if n not in a or n not in b or not torch.equal(a[n], b[n])
    ]
    return _worded(differ, right=not differ)


def _steps(
    *, evaluated: bool = False, options: dict[str, Any] | None = None, **axes: int
) -> Callable[[str, Path], str]:
    return lambda family, _: _on_two_ranks(_step, family, _exact(family), axes, evaluated, options or {})


def _on_two_ranks(cell: Callable[..., str], *arguments: Any) -> str:
    """What a cell says on both ranks; of a refusal its words."""
    one, other = run_ranks(_refusal_or, 2, cell, *arguments, timeout=240)
    assert one == other
    return one


def _refusal_or(rank: int, cell: Callable[..., str], *arguments: Any) -> str:
    torch.set_num_threads(1)
    try:
        return cell(rank, *arguments)
    except LongspanError as error:
        return f"refused: {error}"


FULL = {"activation_checkpointing": "full"}
CELLS: dict[str, Callable[[str, Path], str]] = {
    "FSDP2": _steps(),
    "HSDP": _steps(dp_replicate=2),
    "`ep`": _steps(ep=2),
    "`tp`": _steps(tp=2),
    "`pp`": _steps(pp=2),
    "recomputation": _steps(options=FULL),
    "host copies": _steps(options=FULL | {"offload_activations": True}),
    "LoRA": lambda family, _: _on_two_ranks(_lora, family),
    "`nf4`": lambda family, _: _on_two_ranks(_frozen, family, "nf4"),
    "stored formats": lambda family, _: _on_two_ranks(_frozen, family, "stored"),
    "weights on the host": _steps(options={"offload_weights": True}),
    "evaluation at another degree": _steps(evaluated=True),
    "shared prefixes": lambda family, _: _on_two_ranks(_shared_prefixes, family),
    "multi-token prediction": lambda family, _: _on_two_ranks(_depth, family),
    "`generate`": lambda family, _: _on_two_ranks(_generate, family),
    "export and back": lambda family, folder: _on_two_ranks(_export, family, folder / "model"),
}
CHOSEN_KEYS = "has keys that an indexer chooses, exact for separate documents alone"
STREAMS = "several streams of each row, and a depth of multi-token prediction, whose projection makes one, has none"
LATENT_STYLE = "tensor-parallel style 'mla_kv_a_proj' of"
# Of each model its name on the page, and what refuses it; all else is exact.
TABLE: dict[str, tuple[str, dict[str, str]]] = {
    "longcat": ("LongCat-Flash", {"`ep`": "has no experts to deal out", "`tp`": LATENT_STYLE}),
    "hrm": ("HRM-Text", {"`ep`": "has no experts to deal out", "`pp`": "cannot be cut into pipeline stages"}),
    "qwen4_exp_text": (
        "Qwen4-Exp",
        {
            "`pp`": "cannot be cut into pipeline stages",
            "shared prefixes": CHOSEN_KEYS,
            "multi-token prediction": STREAMS,
        },
    ),
    "glm5_next": (
        "GLM-5 Next",
        {
            "`tp`": LATENT_STYLE,
            "`pp`": "has encoders of other modalities",
            "shared prefixes": CHOSEN_KEYS,
            "multi-token prediction": STREAMS,
        },
    ),
    "minimax_m3_vl_text": (
        "MiniMax-M3",
        {"shared prefixes": CHOSEN_KEYS, "multi-token prediction": "chooses blocks of keys"},
    ),
    "deepseek-v4": (
        "DeepSeek-V4",
        {
            "`tp`": "tp 2 does not divide 1 (key/value heads)",
            "`pp`": "has parameters that its pipeline plan does not place",
            "shared prefixes": "has entries made of windows of rows, exact for separate documents alone",
            "multi-token prediction": STREAMS,
        },
    ),
}
HERE = [family for family in TABLE if (here([family]) if family in FAMILIES else family in CONFIG_MAPPING)]
DAILY = [("longcat", "HSDP"), ("minimax_m3_vl_text", "shared prefixes"), ("deepseek-v4", "`tp`")]


@pytest.mark.parametrize(
    ("family", "feature"),
    [
        pytest.param(family, feature, marks=[pytest.mark.whole] * ((family, feature) not in DAILY))
        for family in HERE
        for feature in CELLS
    ],
)
def test_a_cell_is_exact_or_refused_in_its_words(family: str, feature: str, tmp_path: Path) -> None:
    words = TABLE[family][1].get(feature)
    outcome = CELLS[feature](family, tmp_path)
    assert outcome == EXACT if words is None else outcome.startswith("refused: ") and words in outcome, outcome


def test_the_page_has_the_table() -> None:
    names, refused = zip(*TABLE.values(), strict=True)
    rows = [("", *names), ("---",) * (1 + len(names))]
    rows += [(feature, *(f"refused: {x[feature]}" if feature in x else EXACT for x in refused)) for feature in CELLS]
    table = "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows)
    page = (Path(__file__).parents[3] / "docs" / "features.md").read_text("utf-8")
    assert table in page, f"docs/features.md is to have\n{table}"
