"""The rule by which evaluation inherits from training, and an evaluation set from evaluation: its properties."""

from dataclasses import fields, replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from longspan.config.defaults import resolve_defaults
from longspan.config.keys import AUTO, NOT_GIVEN
from longspan.config.plan_section import ContextConfig, EvalConfig, PlanSection, inherit_keys
from longspan.config.sections import ModelConfig, RunConfig, held_out_set
from longspan.plan.micro_batch import level_sizes

OWN = ModelConfig(path="folder-of-no-model")
KEYS = tuple(key.name for key in fields(PlanSection))
SIZES = st.sampled_from([0, 2, 4, (1, 1), (2, 1), (2, 2), (4, 2)])
VALUES: dict[str, Any] = {
    "planner": st.sampled_from(["fixed", "padded", "dynamic"]),
    "max_tokens_per_slot": st.sampled_from([0, 64, 600, AUTO]),
    "cp_comm_type": st.sampled_from(["p2p", "a2a", "a2a+p2p", ("p2p", "a2a")]),
    "hierarchical_context_parallel_sizes": SIZES,
}
DEGREES = st.sampled_from([1, 2, 4, 8])
TRAINING = st.builds(ContextConfig, context_parallel_size=DEGREES, **VALUES)
SOME = st.fixed_dictionaries({}, optional={"context_parallel_size": DEGREES | st.just(0) | st.just(AUTO), **VALUES})


@given(TRAINING, SOME)
def test_what_is_given_stays_and_nothing_is_left_open(training: ContextConfig, keys: dict[str, Any]) -> None:
    evaluation = inherit_keys(PlanSection(**keys), training, training)
    for key, value in keys.items():
        stands_for = {("context_parallel_size", 0), ("max_tokens_per_slot", AUTO)}
        expected = getattr(training, key) if (key, value) in stands_for else value
        assert getattr(evaluation, key) == expected
    assert not {key for key in KEYS if getattr(evaluation, key) in (NOT_GIVEN, "")}
    assert inherit_keys(evaluation, training, training) == evaluation


@given(TRAINING, st.sampled_from(KEYS))
def test_evaluation_without_keys_is_as_training(training: ContextConfig, _: str) -> None:
    evaluation = inherit_keys(PlanSection(), training, training)
    assert evaluation.plan_keys == training.plan_keys


@given(TRAINING, SOME, SOME)
def test_a_set_is_as_evaluation_but_for_its_keys(
    training: ContextConfig, of_all: dict[str, Any], of_set: dict[str, Any]
) -> None:
    evaluation = inherit_keys(PlanSection(**of_all), training, training)
    assert inherit_keys(EvalConfig(), evaluation, training).plan_keys == evaluation.plan_keys
    entry = inherit_keys(EvalConfig(name="books", **of_set), evaluation, training)
    assert entry.name == "books" and inherit_keys(entry, evaluation, training) == entry
    follows = {"planner", "cp_comm_type", "hierarchical_context_parallel_sizes"}  # a degree
    for key in set(KEYS) - follows - of_set.keys():
        assert getattr(entry, key) == getattr(evaluation, key)


@given(TRAINING, SOME, DEGREES | st.just(AUTO))
def test_a_degree_that_is_given_makes_plans_of_one_degree(
    training: ContextConfig, of_all: dict[str, Any], degree: int | str
) -> None:
    evaluation = inherit_keys(PlanSection(**of_all), training, training)
    for parent in (training, evaluation):
        section = inherit_keys(PlanSection(context_parallel_size=degree), parent, training)
        assert section.planner != "dynamic" and section.context_parallel_size == degree
        assert section.cp_comm_type == (AUTO if degree == AUTO else parent.cp_comm_type)
        if isinstance(degree, int) and degree != parent.context_parallel_size:
            sizes = parent.hierarchical_context_parallel_sizes
            assert section.hierarchical_context_parallel_sizes == (level_sizes(sizes, degree) if sizes else 0)


@given(TRAINING, SOME, SOME)
def test_a_configuration_is_resolved_by_the_rule(
    training: ContextConfig, of_all: dict[str, Any], of_set: dict[str, Any]
) -> None:
    context = replace(training, evaluation=PlanSection(**of_all))
    config = RunConfig(model=OWN, context=context, eval=(EvalConfig(name="books", path="x", **of_set),))
    complete = resolve_defaults(config)
    assert resolve_defaults(complete) == complete
    assert complete.context.evaluation == inherit_keys(PlanSection(**of_all), context, context)
    (entry,) = complete.eval
    planned = inherit_keys(PlanSection(**of_set), complete.context.evaluation, complete.context)
    assert entry.plan_keys == planned.plan_keys
    assert held_out_set(complete).plan_keys == complete.context.evaluation.plan_keys
