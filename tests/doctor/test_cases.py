"""Cases of a proof: their names, homes and plans."""

import pytest

from longspan.doctor.cases import LENGTHS, Case, list_cases, list_contiguous_cases, plan_case
from longspan.errors import ConfigError, LayoutError


def test_names_say_what_is_not_as_usual() -> None:
    assert Case(cp=2).name == "float64, cp 2, p2p"
    case = Case(cp=2, tp=2, ep=2, plan="several", router_losses=True, recompute="full", sequence_parallel=True)
    of_plan, more = "several micro-batches, cp 1 to 2, p2p", "sequence parallel, full recomputation, router losses"
    assert case.name == f"float64, tp 2, ep 2, {of_plan}, {more}"


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
