"""A student of a teacher's kept likeliest tokens equals one process in float64 that reads the same tables, and the live
teacher up to their rounding, under any plan."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from longspan import Layout, World, plan_fixed, run_step
from longspan.data.likeliest import ENTRY
from longspan.errors import LongspanError
from longspan.testing import backend, run_ranks
from longspan.train import Distillation, Document, TokenTables, gather_documents, likeliest_tokens
from tests.model.stock import error, gradients_of, prepare_untried
from tests.mutation import each_mutated
from tests.train.own_loss import test_families as families
from tests.train.own_loss.test_distillation import (
    LIKELIEST,
    REVERSE,
    VOCABULARY,
    Case,
    dense,
    dynamic,
    fixed,
    model_of,
    teacher_of,
)

MIXED = {"beta": 0.3, "temperature": 1.5, "top_k": 5, "cross_entropy_weight": 0.25}
CASES = [
    Case("one rank", Layout(1), fixed(1, 60), chunk=3, settings=MIXED),
    Case("cp 2, gathered", Layout(2), fixed(2, 24), chunk=4, settings=REVERSE),
    Case("dynamic, an adapter", Layout(2), dynamic(24), "adapter", settings=LIKELIEST),
    Case("shared prefixes", Layout(2), families.fixed(2, 60), settings=MIXED, shares=True),
    Case("free", Layout(2), dynamic(24, "free"), settings=MIXED, whole=True),
    Case("tp 2", Layout(2, tp=2), fixed(1, 40), settings=LIKELIEST, whole=True),
    Case("cp 3, experts", Layout(3), fixed(3, 24), "qwen3-moe", settings=MIXED, whole=True),
    Case("shared prefixes, cp 3", Layout(3), families.dynamic(40), settings=REVERSE, shares=True, whole=True),
    Case("cp 4, all-to-all around a ring", Layout(4), fixed(
        4, 24, cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=2), settings=MIXED, whole=True),
    Case("cp 4, replicas", Layout(4, dp_replicate=2), dynamic(16), settings=REVERSE, whole=True),
]  # fmt: skip


def tables_of(case: Case, teacher: Any, world: World, documents: list[Document]) -> TokenTables:
    """By a plan that is not the step's."""
    settings = {"top_k": 5, "temperature": case.settings.get("temperature", 1.0), "vocabulary": VOCABULARY}
    plan = plan_fixed([len(d) for d in documents], case.home, cp=1, targets=sum(d.targets for d in documents))
    return likeliest_tokens(teacher, plan, documents, world, **settings)


def errors_of(case: Case, world: World) -> dict[str, float]:
    """Of a step from tables beside one process with the same tables, and in millions beside the live teacher."""
    student = prepare_untried(model_of(case.student), world, **dict(case.options))
    teacher = prepare_untried(teacher_of(case.teacher), world)
    whole = case.documents()
    tables = tables_of(case, teacher, world, whole)
    answer, figures = dense(case, whole, [tables.of(d) for d in range(len(whole))])
    found, gradients = dict[str, float](), dict[bool, Any]()
    carrying = [document.with_likeliest(tables.of(d)) for d, document in enumerate(whole)]
    for kept in (True, False):
        documents, plan = case.planned(carrying if kept else whole)
        if kept and "gathered" in case.name:
            half = len(carrying) // 2
            documents = gather_documents(carrying[:half] if world.rank == 0 else carrying[half:], world)
        student.zero_grad()
        loss = Distillation(tables.teacher if kept else teacher, **case.settings)
        options = {"loss": loss, "loss_chunk_rows": case.chunk}
        for backward in (True, False):
            result = run_step(student, plan, documents, world, backward=backward, **options)
            key = f"{'tables' if kept else 'live'}, backward {backward}"
            scale = 1.0 if kept else 1e-6
            found[f"{key}: loss"] = scale * abs(result.loss / answer.loss - 1)
            found |= {f"{key}: {n}": scale * abs(result.figures[n] / x - 1) for n, x in figures.items()}
        gradients[kept] = gradients_of(student)
    assert gradients[True].keys() == {name for name, p in student.named_parameters() if p.requires_grad}
    found |= {name: error(x, answer.gradients[name]) for name, x in gradients[True].items()}
    return found | {f"live: {name}": 1e-6 * error(x, answer.gradients[name]) for name, x in gradients[False].items()}


def compare(rank: int, ranks: int, whole: bool) -> dict[str, dict[str, float]]:
    found = dict[str, dict[str, float]]()
    for case in (case for case in CASES if (len(case.home.ranks), case.whole) == (ranks, whole)):
        with World(case.home, backend=backend(), timeout=60) as world, case.casts():
            found[case.name] = errors_of(case, world)
    return found


MUTATIONS = {
    "a table one row off": ("train.rows.read_rows", "source, next_positions[:count]", "source, positions[:count]"),
    "a table one token off": ("train.terms.teacher_tables", "targets.positions + 1", "targets.positions"),
    "a rest of 0": ("train.terms.teacher_tables", "log_probs[:, -1])", "log_probs[:, -1] - 50)"),
    "tables of other chunks": ("train.terms.teacher_tables", "self._entries[part]", "self._entries.roll(1, 0)[part]"),
    "a part's table of the whole": (
        "data.document", "None if self._likeliest is None else self._likeliest[held]", "self._likeliest"),
}  # fmt: skip


def notice(rank: int) -> dict[str, bool]:
    noticed = dict[str, bool]()
    cases = [CASES[0], replace(CASES[3], home=Layout(1), plan=families.fixed(1, 200))]
    with World(Layout(1), backend=backend(), timeout=60) as world:
        for name in each_mutated(MUTATIONS):
            noticed[name] = False
            for case in cases:
                try:
                    with case.casts():
                        noticed[name] |= max(errors_of(case, world).values()) > 1e-11
                except (LongspanError, ValueError, IndexError):
                    noticed[name] = True
    return noticed


@pytest.mark.whole
def test_mutations_are_noticed() -> None:
    (noticed,) = run_ranks(notice, 1, timeout=240)
    assert not noticed.pop("nothing")
    assert all(noticed.values()), noticed


def messages(rank: int) -> dict[str, str]:
    found = dict[str, str]()
    case = CASES[0]
    with World(Layout(1), backend=backend(), timeout=60) as world:
        student = prepare_untried(model_of("qwen3"), world)
        teacher = prepare_untried(teacher_of("llama"), world)
        whole, plan = case.planned(case.documents())
        tables = tables_of(case, teacher, world, [*whole])
        made = tables.teacher
        carrying = [document.with_likeliest(tables.of(d)) for d, document in enumerate(whole)]
        wide = replace(made, vocabulary=70)
        other_labels = [Document(d.ids).with_likeliest(tables.of(i)) for i, d in enumerate(whole)]
        every = plan_fixed(plan.lengths, world.home, cp=1)
        calls: dict[str, Any] = {
            "k": lambda: Distillation(made, temperature=1.5, top_k=4),
            "temperature": lambda: Distillation(made, top_k=5),
            "columns": lambda: Distillation(wide, temperature=1.5, top_k=5),
            "few columns": lambda: Distillation(replace(made, vocabulary=20), temperature=1.5, top_k=5),
        }
        for name, loss in calls.items():
            with pytest.raises(LongspanError) as caught:
                run_step(student, plan, carrying, world, loss=loss())
            found[name] = str(caught.value)
        loss = Distillation(made, temperature=1.5, top_k=5)
        for name, documents in {
            "no table": whole,
            "labels": other_labels,
            "one table": [*carrying[:2], *whole[2:]],
        }.items():
            with pytest.raises(LongspanError) as caught:
                run_step(student, every if name == "labels" else plan, documents, world, loss=loss)
            found[name] = str(caught.value)
        for name, settings in {"no k": (0, 62), "too many": (5, 71)}.items():
            with pytest.raises(LongspanError) as caught:
                likeliest_tokens(teacher, plan, whole, world, settings[0], vocabulary=settings[1])
            found[name] = str(caught.value)
        with pytest.raises(LongspanError) as caught:
            gather_documents([carrying[0], whole[1]], world)
        found["gathered"] = str(caught.value)
    return found


def test_what_is_no_table_is_refused() -> None:
    (found,) = run_ranks(messages, 1)
    wanted = {
        "k": "top_k is 4, and the tables of likeliest tokens were made with 5",
        "temperature": "temperature is 1.0, and the tables of likeliest tokens were made with 1.5",
        "columns": "the tables are of 70 columns, and the student has 62",
        "few columns": "and the Distillation's tables are of 20 columns",
        "no table": "has no table of a teacher's likeliest tokens, and the loss compares 5",
        "one table": "document 2 has no table",
        "labels": "has no likeliest tokens for the target at position",
        "no k": "top_k is 0 for tables",
        "too many": "the teacher has 70 columns, and likeliest tokens of the first 71",
        "gathered": "document 1 has 0 likeliest tokens of a teacher and document 0 has 5",
    }
    assert found.keys() == wanted.keys()
    assert not [found[name] for name, text in wanted.items() if text not in found[name]]


def test_a_document_takes_tables_of_its_length() -> None:
    document, table = Document([5, 7, 9]), np.zeros((3, 4), ENTRY)
    assert document.likeliest(np.arange(3)) is None
    assert document.with_likeliest(table).part(1, 3).likeliest(np.arange(2)).shape == (2, 4)  # pyright: ignore
    for wrong, text in ((table[:2], "2 rows for 3"), (np.zeros((3, 4)), "float64 of shape"), (None, "is None")):
        with pytest.raises(LongspanError, match=text):
            document.with_likeliest(wrong)  # pyright: ignore[reportArgumentType]
    table["log_prob"][1, 2] = np.nan
    with pytest.raises(LongspanError, match="above 0 or NaN"):
        document.with_likeliest(table)


@pytest.mark.parametrize(
    ("ranks", "whole"),
    [(1, False), (2, False), *(pytest.param(n, True, marks=pytest.mark.whole) for n in (2, 3, 4))],
)
def test_equals_one_process_that_reads_the_tables(ranks: int, whole: bool) -> None:
    for found in run_ranks(compare, ranks, ranks, whole, timeout=240):
        for name, errors in found.items():
            assert max(errors.values()) < 1e-12, (name, errors)
