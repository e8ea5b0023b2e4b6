"""A student under a teacher equals one process in float64 under any plan: loss, every gradient, figures."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from longspan import Layout, World, plan_dynamic, plan_fixed, run_step
from longspan.errors import LongspanError
from longspan.model.adapted_modules import unwrap_peft_model
from longspan.model.frozen.frozen_weights import weights_to_pack
from longspan.plan import Plan
from longspan.testing import backend, run_ranks
from longspan.train import Distillation, Document, share_prefixes
from longspan.train.divergence import Divergence
from tests.model.deep import deep
from tests.model.frozen.packed_models import WIDE, through_nf4
from tests.model.lora.adapted import adapted
from tests.model.stock import SIZES, error, gradients_of, prepare_untried, random_model
from tests.mutation import mutated
from tests.train.own_loss import test_families as families
from tests.train.own_loss.dense import LENGTHS, Answer, documents_of, targets_of
from tests.train.own_loss.test_scores import SMALL_LINEAR
from tests.train.steps.test_divergence import reference, reference_of_tables

TARGETS, VOCABULARY = targets_of(documents_of()), 62
TEACHER_VOCABULARY = 70
WHOLE = {"beta": 0.3, "temperature": 1.5, "cross_entropy_weight": 0.25}
LIKELIEST = {"beta": 0.0, "temperature": 0.7, "top_k": 5}
REVERSE = {"top_k": 5, "add_tail": False, "cross_entropy_weight": 1.0}


def fixed(cp: int, rows: int, **options: Any) -> Callable[[Layout], Plan]:
    return lambda home: plan_fixed(LENGTHS, home, cp=cp, max_tokens_per_slot=rows, targets=TARGETS, **options)


def dynamic(rows: int, mode: Any = "lockstep") -> Callable[[Layout], Plan]:
    return lambda home: plan_dynamic(LENGTHS, home, max_tokens_per_slot=rows, targets=TARGETS, mode=mode)


@dataclass(frozen=True)
class Case:
    name: str
    home: Layout
    plan: Callable[..., Plan] = field(compare=False)
    student: str = "qwen3"
    teacher: str = "llama"
    chunk: int = 0
    options: tuple[tuple[str, Any], ...] = ()
    teacher_options: tuple[tuple[str, Any], ...] = ()
    settings: dict[str, Any] = field(default_factory=lambda: WHOLE, compare=False)
    whole: bool = False  # of the whole table
    shares: bool = False  # whether documents share prefixes

    def documents(self) -> list[Document]:
        return families.documents_of(VOCABULARY - 1) if self.shares else documents_of()

    def casts(self) -> AbstractContextManager[None]:
        """Models are made inside: theirs are tables of rotary positions. Delta nets cast to float32 as well."""
        if not self.shares and self.student != "hybrid":
            return nullcontext()
        model_of(self.student), teacher_of(self.teacher)  # imports their modules, which are patched
        return families.casts_in_float64()

    def planned(self, documents: Sequence[Any]) -> tuple[Sequence[Any], Plan]:
        """The documents as the plan has them, and the plan."""
        if not self.shares:
            return documents, self.plan(self.home)
        shared = share_prefixes(documents, least_rows=3)
        assert max(shared.parents) >= 0
        return shared, self.plan(self.home, shared)


CAPPED = Case("experts, a capped teacher", Layout(2), fixed(2, 24), "qwen3-moe", "gemma3", chunk=4, whole=True)
CASES = [
    Case("one rank", Layout(1), fixed(1, 60), chunk=3),
    Case("cp 2", Layout(2), fixed(2, 24), chunk=4),
    Case("cp 2, all-to-all", Layout(2), fixed(2, 50, cp_comm_type="a2a"), settings=REVERSE, whole=True),
    Case("cp 2, all-gather", Layout(2), fixed(2, 50, cp_comm_type="all_gather"), settings=LIKELIEST, whole=True),
    Case("dynamic, an adapter, recomputed", Layout(2), dynamic(24), "adapter", settings=LIKELIEST,
         options=(("activation_checkpointing", True),)),
    Case("free", Layout(2), dynamic(24, "free"), settings=REVERSE),
    Case("free, copies", Layout(2), dynamic(24, "free"), options=(("shard_parameters", False),), whole=True),
    Case("tp 2", Layout(2, tp=2), fixed(1, 40), whole=True),
    CAPPED,
    Case("shared prefixes", Layout(2), families.fixed(2, 60), shares=True),
    Case("shared prefixes, dynamic", Layout(2), families.dynamic(55), settings=LIKELIEST, shares=True, whole=True),
    Case("a packed teacher on the host", Layout(2), dynamic(24), teacher="nf4",
         teacher_options=(("frozen", "nf4"), ("offload_weights", True))),
    Case("a packed teacher, tp 2", Layout(4, tp=2), dynamic(24), "qwen3-moe", "nf4", whole=True,
         teacher_options=(("frozen", "nf4"), ("mlp_tile_tokens", 8))),
    Case("a hybrid student, sharded by rows", Layout(2), fixed(2, 24), "hybrid", "hybrid", whole=True),
    Case("cp 3", Layout(3), fixed(3, 24), whole=True),
    Case("cp 4, all-to-all around a ring", Layout(4), fixed(
        4, 24, cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=2), settings=REVERSE, whole=True),
    Case("cp 4", Layout(4), fixed(4, 16), chunk=2, whole=True),
    Case("dynamic, replicas", Layout(4, dp_replicate=2), dynamic(16), settings=LIKELIEST, whole=True),
    Case("experts, ep 2, tp 2", Layout(4, tp=2, ep=2), dynamic(24), "qwen3-moe", "qwen3-moe", whole=True),
]  # fmt: skip


def hybrid(vocabulary: int) -> Any:
    sizes = SIZES | SMALL_LINEAR | {"vocab_size": vocabulary}
    return random_model(transformers.Qwen3NextConfig(**sizes, num_experts=0), attn_implementation="sdpa")


def model_of(family: str) -> Any:
    if family == "hybrid":
        return hybrid(VOCABULARY)
    return adapted("llama", "every linear") if family == "adapter" else deep(family, torch.float64, 2, VOCABULARY)


def teacher_of(family: str) -> Any:
    """Of other weights than any student's, and of a larger head."""
    if family == "nf4":
        model = random_model(transformers.LlamaConfig(**WIDE | {"vocab_size": TEACHER_VOCABULARY}))
    elif family == "hybrid":
        model = hybrid(TEACHER_VOCABULARY)
    elif family == "gemma3":
        sizes = {**SIZES, "sliding_window": 5, "query_pre_attn_scalar": 8}
        config = transformers.Gemma3TextConfig(**sizes, final_logit_softcapping=1.5)
        model = random_model(config, attn_implementation="sdpa")
    else:
        model = deep(family, torch.float64, 3, TEACHER_VOCABULARY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    return model.requires_grad_(False)


def dense(case: Case, documents: Sequence[Document], tables: Sequence[Any] = ()) -> tuple[Answer, dict[str, float]]:
    """Documents one by one, in one graph; the teacher's distributions are those of its tables, if there are some."""
    with case.casts():
        return _dense(case, documents, tables)


def _dense(case: Case, documents: Sequence[Document], tables: Sequence[Any]) -> tuple[Answer, dict[str, float]]:
    student, teacher = model_of(case.student), teacher_of(case.teacher)
    if case.teacher == "nf4":
        for module, name in weights_to_pack(teacher).values():
            weight = getattr(module, name).data
            weight.copy_(through_nf4(weight, weight.dtype))
    settings = dict(case.settings)
    weight = settings.pop("cross_entropy_weight", 0.0)
    divergence = Divergence(**settings)
    parts = list[Tensor]()
    for number, document in enumerate(documents):
        positions = np.arange(len(document))
        ids, labels = (torch.from_numpy(x) for x in (document[positions], document.labels(positions)))
        rows = torch.nonzero(labels[1:] != -100).squeeze(1)
        p, q = (model(input_ids=ids[None], use_cache=False).logits[0][rows] for model in (student, teacher))
        weights = torch.from_numpy(np.asarray(document.token_values(positions)["weights"]))[rows + 1]
        ce = -p.log_softmax(-1).gather(1, labels[rows + 1][:, None]).squeeze(1)
        columns = min(p.shape[1], q.shape[1])
        log_p, of_q = ((x[:, :columns] / divergence.temperature).log_softmax(-1) for x in (p, q))
        entropies = -(log_p.exp() * log_p).sum(-1)
        mass = of_q.exp().topk(divergence.top_k or columns).values.sum(-1)
        kl = reference(p, q, divergence)
        if tables:
            table = tables[number][(rows + 1).numpy()]
            kl = reference_of_tables(p, table, columns, divergence)
            mass = torch.from_numpy(np.exp(table["log_prob"][:, :-1].astype("float64")).sum(-1))
        parts.append(torch.stack([(weights * kl).sum(), (weights * ce).sum(), entropies.sum(), mass.sum()]))
    values = torch.stack(parts).sum(0) / sum(document.targets for document in documents)
    student.zero_grad()
    loss = values[0] + weight * values[1]
    loss.backward()
    gradients = {name: g.clone() for name, g in gradients_of(unwrap_peft_model(student)).items()}
    return Answer(loss.item(), gradients), dict(
        zip(("kl", "ce", "entropy", "teacher_mass"), values.tolist(), strict=True)
    )


def errors_of(case: Case, world: World, wanted: tuple[Answer, dict[str, float]]) -> dict[str, float]:
    student = prepare_untried(model_of(case.student), world, **dict(case.options))
    teacher = prepare_untried(teacher_of(case.teacher), world, **dict(case.teacher_options))
    answer, figures = wanted
    loss, (documents, plan) = Distillation(teacher, **case.settings), case.planned(case.documents())
    found = dict[str, float]()
    for backward in (True, False):
        result = run_step(student, plan, documents, world, loss=loss, loss_chunk_rows=case.chunk, backward=backward)
        found[f"loss, backward {backward}"] = abs(result.loss / answer.loss - 1)
        found |= {f"{n}, backward {backward}": abs(result.figures[n] / x - 1) for n, x in figures.items()}
    gradients = gradients_of(student)
    assert gradients.keys() == {name for name, p in student.named_parameters() if p.requires_grad}
    assert not any(p.grad is not None for p in teacher.parameters())
    return found | {name: error(gradients[name], answer.gradients[name]) for name in gradients}


def cases_of(ranks: int, whole: bool) -> list[Case]:
    return [case for case in CASES if (len(case.home.ranks), case.whole) == (ranks, whole)]


def compare(rank: int, ranks: int, whole: bool, wanted: list[Any]) -> dict[str, dict[str, float]]:
    found = dict[str, dict[str, float]]()
    for case, of_case in zip(cases_of(ranks, whole), wanted, strict=True):
        with World(case.home, backend=backend(), timeout=60) as world, case.casts():
            found[case.name] = errors_of(case, world, of_case)
    return found


@cache
def results(ranks: int, whole: bool) -> list[dict[str, dict[str, float]]]:
    return run_ranks(
        compare, ranks, ranks, whole, [dense(case, case.documents()) for case in cases_of(ranks, whole)], timeout=240
    )


ROWS = [pytest.param(case, id=case.name, marks=[pytest.mark.whole] * case.whole) for case in CASES]


@pytest.mark.parametrize("case", ROWS)
def test_equals_one_process(case: Case) -> None:
    for found in results(len(case.home.ranks), case.whole):
        assert max(found[case.name].values()) < 1e-12, found[case.name]


MUTATIONS = {
    "weights forgotten": ("train.terms.distillation", "(row_weights * rows.losses)", "rows.losses"),
    "weights forgotten in the gradient": (
        "train.terms.distillation", "row_weights if wants_gradient", "torch.ones_like(row_weights) if wants_gradient"),
    "no gradient of the cross entropy": (
        "train.terms.distillation", "slopes = -self._loss", "slopes = 0 * -self._loss"),
    "the teacher's rows of another chunk": (
        "train.terms.distillation", "head(hidden[part])", "head(hidden.roll(1, 0)[part])"),
    "temperature before a soft cap": (
        "train.terms.distillation", "head(hidden[part])", "1.5 * head(hidden[part] / 1.5)"),
    "the teacher's first rows, not those of targets": (
        "train.terms.distillation", "hidden.index_select(0, rows)", "hidden[: len(rows)]"),
}  # fmt: skip


def notice(rank: int) -> dict[str, bool]:
    case, noticed = CAPPED, dict[str, bool]()
    wanted = dense(case, case.documents())
    with World(case.home, backend=backend(), timeout=60) as world:
        noticed["nothing"] = max(errors_of(case, world, wanted).values()) > 1e-9
        for name, change in MUTATIONS.items():
            with mutated(change):
                try:
                    noticed[name] = max(errors_of(case, world, wanted).values()) > 1e-9
                except LongspanError:
                    noticed[name] = True
    return noticed


@pytest.mark.whole
def test_mutations_are_noticed() -> None:
    for noticed in run_ranks(notice, 2, timeout=240):
        assert not noticed.pop("nothing")
        assert all(noticed.values()), noticed


def messages(rank: int) -> dict[str, str]:
    found = dict[str, str]()
    with World(Layout(1), backend=backend(), timeout=60) as world:
        student = prepare_untried(model_of("qwen3"), world)
        teacher = prepare_untried(teacher_of("llama"), world)
        trained = prepare_untried(teacher_of("llama").requires_grad_(True), world)
        small = prepare_untried(deep("llama", torch.float64, 1, 20).requires_grad_(False), world)
        plan = fixed(1, 60)(world.home)
        calls: dict[str, tuple[Any, dict[str, Any]]] = {
            "itself": (Distillation(student), {}),
            "trained": (Distillation(trained), {}),
            "unprepared": (Distillation(teacher_of("llama")), {}),
            "beta": (Distillation(teacher, beta=2), {}),
            "weight": (Distillation(teacher, cross_entropy_weight=-1), {}),
            "temperature": (Distillation(teacher), {"temperature": 0.5}),
            "vocabulary": (Distillation(small), {}),
        }
        for name, (loss, arguments) in calls.items():
            with pytest.raises(LongspanError) as caught:
                run_step(student, plan, documents_of(), world, loss=loss, **arguments)
            found[name] = str(caught.value)
    return found


def test_what_is_no_distillation_is_refused() -> None:
    (found,) = run_ranks(messages, 1)
    wanted = {
        "itself": "teacher and student share",
        "trained": "of the teacher would be trained (",
        "unprepared": "are models that longspan.prepare returns",
        "beta": "beta is 2; give a number",
        "weight": "cross_entropy_weight is -1; give 0",
        "temperature": "temperature is 0.5 beside a Distillation",
        "vocabulary": "and the teacher's vocabulary has 20",
    }
    assert found.keys() == wanted.keys()
    assert not [found[name] for name, text in wanted.items() if text not in found[name]]
