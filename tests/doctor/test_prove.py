"""Proofs: exact models are, changed ones are not, and no error of a model leaves `prove`."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from longspan.cli.main import main
from longspan.comm import World
from longspan.doctor import proof as proving, stock
from longspan.doctor.cases import LENGTHS, Case, list_cases, list_contiguous_cases, plan_case
from longspan.doctor.documents import draw_documents, make_image_documents, make_item_documents, no_video_reason
from longspan.doctor.frozen import widen_rows
from longspan.doctor.outcomes import Outcome, outcome_text
from longspan.doctor.proof import CaseRun, ProofRanks, Task, prove, run_proof
from longspan.doctor.stock import (
    EXACT,
    ExpectedAnswer,
    ModelAnswer,
    compute_expected_answers,
    compute_in_float64,
    compute_stock_answer,
    gradient_errors,
)
from longspan.doctor.which_model import find_configuration
from longspan.errors import ConfigError, LayoutError, ModelError
from longspan.layout import Layout
from longspan.model.exactness.small_copies import make_tiny_model, shrink_configuration
from longspan.model.exactness.trials import run_trial_once
from longspan.model.seams import attention_calls
from longspan.plan import Form
from longspan.testing import run_ranks

CASE = Case(cp=2)


def small(family: str) -> PreTrainedConfig:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    return shrink_configuration(CONFIG_MAPPING[family]())


@pytest.mark.parametrize("family", ["mixtral", pytest.param("granitemoe", marks=pytest.mark.whole)])
def test_half_precision_of_a_mixture_allows_rounding_alone(family: str) -> None:
    """A row that rounding sends to another expert would be allowed, and anything beside it."""
    for outcome in prove(small(family), [Case(dtype="bfloat16", cp=2, router_losses=family == "mixtral")], 2):
        assert outcome.status == "exact" and outcome.tolerance is not None and outcome.tolerance < 0.1, outcome


def _bounds(config: PreTrainedConfig) -> list[ExpectedAnswer]:
    cases = [Case(dtype="float64"), Case(dtype="float32")]
    expected = compute_expected_answers(config, cases, draw_documents(config, LENGTHS)).values()
    assert all(isinstance(answer, ExpectedAnswer) for answer in expected), expected
    return cast(list[ExpectedAnswer], [*expected])


def test_an_ill_conditioned_model_is_allowed_what_rounding_does_and_no_more() -> None:
    config = small("granite")
    config.attention_multiplier = 2000.0  # of scores, whose softmax is then saturated
    documents = draw_documents(config, LENGTHS)
    changed = [*documents[:-1], np.roll(documents[-1], 1)]
    for dtype, expected in zip((torch.float64, torch.float32), _bounds(config), strict=True):
        with compute_in_float64() if dtype == torch.float64 else nullcontext():
            rounded = compute_stock_answer(config, documents, dtype, attention="sdpa")
            wrong = compute_stock_answer(config, changed, dtype)
        errors = [max(gradient_errors(answer.gradients, expected.answer).values()) for answer in (rounded, wrong)]
        assert EXACT[dtype] < errors[0] < expected.tolerance and 100 * expected.tolerance < errors[1], errors


def test_no_other_model_is_allowed_more() -> None:
    """Neither one in which float32 gives rows another expert."""
    assert [expected.tolerance for expected in _bounds(small("deepseek_v3"))] == [*EXACT.values()]


def test_the_stock_model_forgets_a_document_before_the_next() -> None:
    """Rotary frequencies of type "dynamic" grow with the longest document that a stock model saw."""
    config = small("llama")
    config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    config.max_position_embeddings = 16
    assert [outcome.status for outcome in prove(config, [CASE], 2)] == ["exact"]


@contextmanager
def _changed(owner: Any, name: str, change: Callable[..., Any]) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, change(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def _argument(name: str, change: Callable[[Any], Any]) -> Callable[..., Any]:
    def changed(attend: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *tensors, **more: attend(*tensors, **{**more, name: change(more[name])})

    return _changed(attention_calls, "attend", changed)  # pyright: ignore[reportReturnType]


def _sampled_experts() -> Any:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter

    def sampled(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda router, hidden: forward(router, hidden + 0.1 * torch.randn_like(hidden))

    return _changed(GptOssTopKRouter, "forward", sampled)


MUTANTS: dict[str, Callable[[], Any]] = {
    "sinks dropped": lambda: _argument("sinks", lambda sinks: None),
    "a window one row wider": lambda: _argument("window", lambda window: window and window + 1),
    "scale": lambda: _argument("scale", lambda scale: scale * 1.0001),
    "sampled experts": _sampled_experts,
}


def _of_mutants(rank: int, task: Task) -> dict[str, Outcome]:
    with World(Layout(ranks=2), backend="gloo") as world:
        run = CaseRun(task, world, CASE)
        outcomes = {"as it is": run.run_case(CASE)}
        for name, mutant in MUTANTS.items():
            with mutant():
                run = CaseRun(task, world, CASE) if mutant is _sampled_experts else run
                outcomes[name] = run.run_case(CASE)
    return outcomes


def _task(config: PreTrainedConfig) -> Task:
    documents = draw_documents(config, LENGTHS)
    expected = compute_expected_answers(config, [CASE], documents)
    answers = {key: answer for key, answer in expected.items() if isinstance(answer, ExpectedAnswer)}
    return Task(config, Layout(ranks=2), ((0, CASE),), answers, documents, "gloo", 60.0)


def test_mutants_are_caught() -> None:
    outcomes = run_ranks(_of_mutants, 2, _task(small("gpt_oss")))[0]
    as_is = outcomes.pop("as it is")
    assert as_is.status == "exact" and 0 < (as_is.gradient_error or 0) < 1e-13, as_is
    assert len(outcomes) == len(MUTANTS)
    for name, mutant in outcomes.items():
        assert not mutant.good and mutant.status in ("wrong", "refused"), (name, mutant)
        assert mutant.status == "refused" or max(mutant.loss_error or 0, mutant.gradient_error or 0) > 1e-7, mutant


def test_trials_of_float64_models_run_in_their_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class may cast rows to float32, and multiply them by a weight of its own: the trial of the class, that of rows
    and that of images cast to float64, as the proof does."""
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    forward = MixtralTopKRouter.forward
    monkeypatch.setattr(MixtralTopKRouter, "forward", lambda router, rows: forward(router, rows.float()))
    config = small("mixtral")
    case = Case()
    expected = compute_expected_answers(config, [case], documents := draw_documents(config, LENGTHS))
    answers = {key: answer for key, answer in expected.items() if isinstance(answer, ExpectedAnswer)}
    with World(Layout(ranks=1), backend="gloo") as world:
        task = Task(config, world.home, ((0, case),), answers, documents, "gloo", 60.0)
        outcome = CaseRun(task, world, case).run_case(case)
    assert outcome.status == "exact" and (outcome.gradient_error or 0) < 1e-13, outcome
    with torch.no_grad(), pytest.raises(RuntimeError, match="dtype"):
        make_tiny_model(config, torch.float64)(input_ids=torch.arange(4)[None])
    assert run_trial_once("of images", lambda: torch.ones(1, dtype=torch.float64).float().dtype) == torch.float64


def _leave(rank: int, task: Task) -> Any:
    def dies(outcome: Callable[..., Any]) -> Callable[..., Any]:
        def of_case(run: CaseRun, case: Case) -> Outcome:
            if case == Case(cp=2) and rank == 1:
                os._exit(7)
            return outcome(run, case)

        return of_case

    with _changed(CaseRun, "run_case", dies):
        return _run_cases(rank, task)


_run_cases = proving.run_cases_on_rank


def test_a_rank_that_dies_costs_its_case_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proving, "run_cases_on_rank", _leave)
    cases = (Case(cp=2), Case())
    proof = run_proof(small("llama"), cases, ProofRanks(2))
    assert [o.status for o in proof.outcomes] == ["crashed", "exact"] and not proof.good
    assert "rank 1 of 2 left with exit code 7" in proof.outcomes[0].message


def test_a_stock_model_that_cannot_run_is_not_built() -> None:
    config = small("llama")
    config.hidden_act = "none of these"
    outcome = prove(config, (CASE,), 2)[0]
    assert outcome.status == "not built" and "none of these" in outcome.message


@pytest.mark.parametrize(("family", "unjudged"), [("deepseek_v32", True), ("llama", False)])
def test_a_choice_of_keys_that_rounding_changes_is_not_judged(family: str, unjudged: bool) -> None:
    def answer_of(_: Any, *, compute: torch.dtype | None = None, **__: Any) -> ModelAnswer:
        return ModelAnswer(1.0, {"weight": torch.ones(2, dtype=torch.float64) * (1 if compute else 1.001)})

    expected = stock._compute_expected_answer(small(family), answer_of, torch.float32, None)
    assert expected.near_ties == unjudged and expected.tolerance == EXACT[torch.float32]
    outcome = Outcome(CASE, "not judged", 0.1, 0.2, "weight", 1e-5)
    assert outcome.good and outcome_text(outcome).endswith("its own choice of keys changes by rounding")


@pytest.mark.parametrize(("name", "videos"), [("qwen2_5_vl", 2), ("llava", 0)])
def test_documents_with_images_have_videos_where_the_model_takes_them(name: str, videos: int) -> None:
    config = shrink_configuration(find_configuration(name), images=True)
    documents = make_image_documents(config)
    assert sum(len(document.videos) for document in documents) == videos
    assert bool(no_video_reason(config)) == (not videos)
    assert len(make_item_documents(config, documents).items) == sum(len(document.rows) for document in documents)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("name", ["basic", "whole"])
def test_every_case_has_a_sound_plan_over_its_home(name: str, ranks: int) -> None:
    cases = [*list_cases(name, ranks), *list_contiguous_cases(name, ranks)]  # pyright: ignore[reportArgumentType]
    assert len({case.name for case in cases}) == len(cases) or ranks == 1
    for case in cases:
        home = case.home(ranks)
        plan = plan_case(case, home)
        assert len(home.ranks) == ranks and plan.tokens == sum(LENGTHS)
        widest = max(group.degree for batch in plan.micro_batches for group in batch.groups)
        partitions = {group.partition for batch in plan.micro_batches for group in batch.groups if group.degree > 1}
        assert partitions <= {case.partition}
        assert widest >= case.cp and (case.plan != "several" or len(plan.micro_batches) == 4)


def test_a_model_is_refused_as_such_in_plain_cases_alone() -> None:
    assert Case(cp=3, recompute="full").is_basic and Case(cp_comm_type="all_gather").is_basic
    others = (Case(tp=2), Case(pp=2), Case(ep=2), Case(cp=2, cp_comm_type="a2a"), Case(router_losses=True))
    assert not any(case.is_basic for case in others)


def test_what_ranks_do_not_allow() -> None:
    with pytest.raises(LayoutError, match="tp 2 x pp 2 x ep 1 need 4 ranks, and there are 2; use --world 4"):
        Case(tp=2, pp=2).home(2)
    with pytest.raises(LayoutError, match="cp 3 needs as many slots, and the home has 2"):
        plan_case(Case(cp=3), Case().home(2))
    with pytest.raises(ConfigError, match="no set of cases 'all'; use one of basic, whole"):
        list_cases("all", 2)  # pyright: ignore[reportArgumentType]


# ---- adapters over weights in 4 bits: exact at several homes, refused by their rows


NF4 = Form(frozen="nf4")
FROZEN = (Case(cp=2), Case(tp=2), Case(pp=2, plan="several"), Case(plan="dynamic"), Case(dtype="float32", cp=2))
WHOLE = {"qwen3": FROZEN, "qwen3_moe": (*FROZEN, Case(ep=2, cp=2))}


@pytest.mark.parametrize(
    ("name", "cases"),
    [("qwen3", FROZEN[:3]), *(pytest.param(*row, marks=pytest.mark.whole) for row in WHOLE.items())],
)
def test_adapters_over_packed_weights_are_those_of_stock_peft(name: str, cases: tuple[Case, ...]) -> None:
    outcomes = run_proof(widen_rows(small(name), NF4), cases, ProofRanks(2), NF4).outcomes
    assert [outcome.status for outcome in outcomes] == ["exact"] * len(cases), outcomes


def test_rows_that_blocks_do_not_divide() -> None:
    config = small("qwen3")
    config.num_attention_heads = 3
    with pytest.raises(ModelError, match=r"frozen as 'nf4': .*o_proj.weight: its rows have 96 numbers"):
        widen_rows(config, NF4)


def test_the_flag_is_of_a_model(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--frozen", "nf4"]) == 2
    assert "--frozen nf4 is of --model, which is not given" in capfd.readouterr().err
