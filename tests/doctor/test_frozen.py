"""A proof of adapters over weights in 4 bits: exact at several homes, wrong where weights are, refused by its rows."""

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from longspan.cli.main import main
from longspan.doctor.cases import Case
from longspan.doctor.frozen import widen_rows
from longspan.doctor.proof import Outcome, ProofRanks, run_proof
from longspan.errors import ModelError
from longspan.model.exactness.small_copies import shrink_configuration

DAILY = (Case(cp=2), Case(tp=2))
CASES = (*DAILY, Case(pp=2, plan="several"), Case(plan="dynamic"), Case(dtype="float32", cp=2), Case(ep=2, cp=2))


def _prove(name: str, cases: tuple[Case, ...], ranks: int = 2) -> tuple[Outcome, ...]:
    config = widen_rows(shrink_configuration(CONFIG_MAPPING[name]()), "nf4")
    return run_proof(config, cases, ProofRanks(ranks), "nf4").outcomes


@pytest.mark.parametrize(
    ("name", "cases"),
    [
        ("qwen3", DAILY),
        *(pytest.param(*row, marks=pytest.mark.whole) for row in (("qwen3", CASES[:-1]), ("qwen3_moe", CASES))),
    ],
)
def test_adapters_over_packed_weights_are_those_of_stock_peft(name: str, cases: tuple[Case, ...]) -> None:
    outcomes = _prove(name, cases)
    assert [outcome.status for outcome in outcomes] == ["exact"] * len(cases), outcomes


def test_rows_that_blocks_do_not_divide() -> None:
    config = shrink_configuration(CONFIG_MAPPING["qwen3"]())
    config.num_attention_heads = 3
    with pytest.raises(ModelError, match=r"frozen as 'nf4': .*o_proj.weight: its rows have 96 numbers"):
        widen_rows(config, "nf4")


def test_the_flag_is_of_a_model(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--frozen", "nf4"]) == 2
    assert "--frozen nf4 is of --model, which is not given" in capfd.readouterr().err
