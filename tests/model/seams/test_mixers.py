"""Families with state-space layers equal the stock model: loss and every gradient at several degrees, in every home."""

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.qwen3_next import modeling_qwen3_next

from longspan import Group, Layout, MicroBatch, Plan, World, bind, prepare, run_step
from longspan.comm import run_local
from longspan.doctor.cases import Case
from longspan.doctor.proof import Outcome, Ranks, prove, run_proof
from longspan.doctor.stock import (
    Answer,
    collect_gradients,
    compute_stock_answer,
    draw_documents,
    gradient_errors,
    loss_error,
    missing_errors,
    whole_float64,
)
from longspan.errors import ModelError
from longspan.model.exactness.check_model import refuse_unsupported
from longspan.model.exactness.small_copies import make_tiny_model, shrink_configuration
from longspan.model.seams.mixers import find_mixers, is_mixer
from tests.mutation import mutated

FAMILIES = {
    "qwen3_next": "gated delta nets, attention and experts",
    "qwen3_5_text": "the same, of another class",
    "qwen3_5_moe_text": "with experts",
    "olmo_hybrid": "betas up to 2",
    "kimi_linear": "a decay for each number of a key, MLA",
    "bamba": "Mamba 2 and attention",
    "mamba2": "Mamba 2 alone; its language model hands no keywords down",
    "granitemoehybrid": "Mamba 2, attention, experts",
    "nemotron_h": "Mamba 2, attention, experts and MLPs, each a layer",
    "falcon_h1": "Mamba 2 and attention side by side",
    "lfm2": "short convolutions",
    "lfm2_moe": "and experts",
    "lfm3": "with gates after attention",
    "bailing_hybrid": "Kimi's delta attention with gates of full rank",
    "zamba2": "Mamba 2, and attention of one block in two layers, with adapters",
}
KINDS: dict[str, dict[str, Any]] = {  # what a class's defaults lack of its released models
    "bamba": {"num_hidden_layers": 2, "attn_layer_indices": [1]},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "zamba2": {"use_shared_attention_adapter": True, "use_mem_rope": True},
}
CASES = (
    Case(cp=3, plan="several", recompute="full"),
    Case(cp=3, cp_comm_type="all_gather", partition="contiguous"),
    Case(plan="dynamic"),
)
IN_CI = {  # every family of those with every case is in make test-all
    "qwen3_next": CASES[:1],
    "mamba2": CASES[:1],
    "nemotron_h": CASES[1:2],
    "lfm2": CASES[2:],
}
HOMES = (
    Case(tp=2, cp=2),
    Case(tp=2, cp=2, sequence_parallel=True),
    Case(tp=2, cp=2, plan="several", recompute="full"),
    Case(pp=2, cp=2, plan="several"),
    Case(cp=4, cp_comm_type="a2a", partition="contiguous"),
    Case(tp=2, cp=2, partition="contiguous", plan="several"),
    Case(ep=2, cp=2),
    Case(cp=4, evaluation=True),
)


def small_config(family: str) -> PreTrainedConfig:
    return shrink_configuration(CONFIG_MAPPING[family](**KINDS.get(family, {})))


def here(families: Sequence[str]) -> list[str]:
    """Those that this transformers has."""
    return [family for family in families if family in CONFIG_MAPPING]


def _prove_here(rank: int, families: Sequence[str]) -> dict[str, tuple[Outcome, ...]]:
    found = {}
    for family in families:
        ranks = Ranks(3, launch=lambda run, task, count, seconds: run(rank, task))
        found[family] = run_proof(small_config(family), IN_CI[family], ranks).outcomes
    return found


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[str, tuple[Outcome, ...]]]:
    yield run_local(_prove_here, 3, (here(tuple(IN_CI)),), timeout=280)[0]


@pytest.mark.parametrize("family", IN_CI)
def test_a_family_is_exact(family: str, outcomes: dict[str, tuple[Outcome, ...]]) -> None:
    if family not in outcomes:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    for outcome in outcomes[family]:
        assert outcome.status == "exact", (outcome.case.name, outcome)


@pytest.mark.whole
@pytest.mark.parametrize("family", here(tuple(FAMILIES)))
def test_every_family_in_every_home(family: str) -> None:
    """pp and ep where the class has them, what it has not is refused."""
    for outcome in prove(small_config(family), [*CASES, *HOMES], 4):
        exact = outcome.status == "exact" or outcome.case.tp == 1
        assert outcome.good and exact, (outcome.case.name, outcome)


# ---- what is dropped is noticed

MUTANTS = {
    "a scan's step": ("(v * step.unsqueeze(-1))", "(1.0 * v)"),
    "D": ("out if D is None else out + D.unsqueeze(-1) * v", "out"),
    "a convolution's activation": ("convolve(x, weight, bias, silu)", "convolve(x, weight, bias, False)"),
}


def _mutants(rank: int, names: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in names:
        with mutated(("model.seams.mixers", *MUTANTS[name])):
            ranks = Ranks(2, launch=lambda run, task, count, seconds: run(rank, task))
            (outcome,) = run_proof(small_config("bamba"), [Case(cp=2)], ranks).outcomes
            found[name] = outcome.status
    return found


@pytest.mark.whole
def test_what_is_dropped_is_noticed() -> None:
    found = run_local(_mutants, 2, (tuple(MUTANTS),), timeout=120)[0]
    assert found == dict.fromkeys(MUTANTS, "wrong")


# ---- what is not known is refused


def _stock(family: str) -> PreTrainedModel:
    return make_tiny_model(small_config(family), torch.float32)


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "jamba", "zamba"])
def test_mamba_1_is_refused_by_name(family: str) -> None:
    with pytest.raises(
        ModelError, match=r"conv1d \(Conv1d of \w*MambaMixer\) mixes neighbouring rows outside attention"
    ):
        refuse_unsupported(_stock(family))


def test_keys_and_classes_stay() -> None:
    model = _stock("qwen3_5_text")
    assert list(find_mixers(model)) == [f"model.layers.{i}.linear_attn" for i in _linear_layers(model)]
    assert not any(is_mixer(module) for module in _stock("llama").modules())


def _linear_layers(model: PreTrainedModel) -> list[int]:
    return [i for i, kind in enumerate(model.config.layer_types) if kind == "linear_attention"]


def _of_a_package(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def wrapped(*args: object, **kwargs: object) -> None:
        raise RuntimeError("0 active drivers ([]). There should only be one.")

    return wrapped


def test_a_small_copy_runs_in_torch_whatever_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"):
        plain = getattr(modeling_qwen3_next, name)
        monkeypatch.setattr(modeling_qwen3_next, name, _of_a_package(getattr(plain, "__wrapped__", plain)))
    assert _stock("qwen3_next")(input_ids=torch.arange(9)[None]).logits.isfinite().all()


DRAWS = 4  # for each family and number of ranks
TYPES = ("p2p", "all_gather", "auto", "a2a")
EXACT = 1e-11


@dataclass(frozen=True)
class Draw:
    """A plan over some ranks, how its model is recomputed, and how many copies of its weights there are."""

    plan: Plan
    recompute: str
    copies: int


def draw(seed: int, ranks: int) -> Draw:
    """Documents of 1 to 90 tokens, many of them shorter than a convolution, and a plan of one to four micro-batches."""
    random_ = random.Random(seed)
    sizes = (1, 1, 2, 3, random_.randint(1, 9), random_.randint(5, 40), random_.randint(30, 90))
    lengths = (*(random_.choice(sizes) for _ in range(random_.randint(1, 6))), random_.randint(2, 60))
    left, batches = random_.sample(range(len(lengths)), len(lengths)), list[MicroBatch]()
    while left:
        groups = list[Group]()
        for _ in range(random_.randint(1, 3)):
            count = min(len(left), random_.randint(1, 3))
            if count:
                groups.append(_group(random_, ranks, left[:count], lengths))
                left = left[count:]
        batches.append(MicroBatch(tuple(groups)))
    if random_.random() < 0.2:
        batches.append(MicroBatch())
    plan = Plan(ranks, lengths, tuple(batches), targets=sum(lengths) - len(lengths)).check()
    copies = 2 if ranks % 2 == 0 and random_.random() < 0.3 else 1
    return Draw(plan, random_.choice(("none", "none", "full", "selective")), copies)


def _group(random_: random.Random, ranks: int, documents: list[int], lengths: tuple[int, ...]) -> Group:
    degree = random_.choice((1, 2, ranks, random_.randint(1, ranks)))
    kind = random_.choice(TYPES if 4 % degree == 0 else TYPES[:3])  # small copies have four query heads
    of = tuple(lengths[document] for document in documents)
    padded = random_.choice((None, None, max(of) + random_.randint(0, 4)))
    slots = tuple(random_.sample(range(ranks), degree))
    partition: Any = random_.choice(("zigzag", "contiguous"))
    return Group(slots, tuple(documents), of, kind, partition=partition, pad_to=padded)


def _errors(rank: int, ranks: int, config: Any, cases: list[tuple[Draw, list[np.ndarray], Answer]]) -> list[Any]:
    """The largest error of each draw, and the parameter that has it."""
    found = list[Any]()
    for case, documents, answer in cases:
        with World(Layout(ranks, dp_replicate=case.copies)) as world, whole_float64():
            recompute: Any = case.recompute
            model = prepare(make_tiny_model(config, torch.float64), world, activation_checkpointing=recompute)
            world.prepare(case.plan)
            result = run_step(model, case.plan, documents, world)
            errors = gradient_errors(collect_gradients(model), answer)
            errors |= missing_errors(set(errors), answer) | {"loss": loss_error(result.loss, answer.loss)}
            found.append(max((error, name) for name, error in errors.items()))
    return found


@pytest.mark.whole
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("family", here(tuple(FAMILIES)))
def test_random_documents_and_plans_are_exact(family: str, ranks: int) -> None:
    config, cases = small_config(family), list[tuple[Draw, list[np.ndarray], Answer]]()
    first = 1000 * list(FAMILIES).index(family) + 100 * ranks
    for seed in range(first, first + DRAWS):
        drawn = draw(seed, ranks)
        documents = draw_documents(config, drawn.plan.lengths, seed)
        with whole_float64():
            cases.append((drawn, documents, compute_stock_answer(config, documents, torch.float64)))
        print(f"seed {seed}: {drawn}")
    for errors in run_local(_errors, ranks, (ranks, config, cases), timeout=60 * DRAWS):
        assert all(error <= EXACT for error, _ in errors), dict(enumerate(errors, first))


# ---- each document is its own


def _logits(rank: int, config: Any, plan: Plan, texts: list[list[np.ndarray]]) -> bool:
    """Whether logits of other documents keep their bits where document 1 changes, and those of its rows do not."""
    with World(Layout(plan.slots)) as world, whole_float64(), torch.no_grad():
        model: Any = prepare(make_tiny_model(config, torch.float64), world)
        same = True
        for batch in plan.micro_batches:
            shard = bind(batch, world).with_padding()
            order = [document for group in batch.groups for document in group.documents]
            made = list[Tensor]()
            for documents in texts:
                ids = shard.scatter(torch.from_numpy(np.concatenate([documents[d] for d in order])))
                made.append(model(input_ids=ids, position_ids=shard.position_ids, shard=shard).logits[0])
            changed = torch.repeat_interleave(
                torch.tensor([d == 1 for d in order]), torch.tensor([plan.lengths[d] for d in order])
            )
            rows = shard.rows >= 0
            others = rows & ~shard.scatter(changed)
            same &= torch.equal(made[0][others], made[1][others])
            same &= others.equal(rows) or not torch.equal(made[0][rows], made[1][rows])
        return same


@pytest.mark.whole
@pytest.mark.parametrize(
    "family", here(("qwen3_5_text", "olmo_hybrid", "bamba", "mamba2", "falcon_h1", "lfm2", "zamba2"))
)
@pytest.mark.parametrize("partition", ["zigzag", "contiguous"])
def test_logits_of_other_documents_keep_their_bits(family: str, partition: Any) -> None:
    """Of families without experts, whose products have as many rows as chose them."""
    lengths, everyone = (19, 40, 2, 1, 23), (0, 1, 2)
    groups = (Group(everyone, (0, 1, 2), lengths[:3], partition=partition), Group((2, 0), (3, 4), lengths[3:]))
    plan = Plan(3, lengths, (MicroBatch(groups),), targets=80)
    config = small_config(family)
    texts = draw_documents(config, lengths)
    others = [*texts]
    others[1] = draw_documents(config, lengths, seed=1)[1]
    assert all(run_local(_logits, 3, (config, plan, [texts, others]), timeout=120))
