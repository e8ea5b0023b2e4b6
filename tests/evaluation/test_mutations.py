"""What an evaluation could get wrong without an error, put into the code on purpose: the tests would show it."""

from collections.abc import Sequence

import pytest

from longspan.comm import World
from longspan.errors import PlanError
from longspan.evaluation.live import evaluate
from longspan.evaluation.metrics import EvaluationOptions
from longspan.layout import Layout
from longspan.model import prepare
from longspan.plan import plan_fixed
from longspan.resolve.planner_config import PlannerConfig
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer, run_step
from tests.evaluation.state import differences, state_of
from tests.evaluation.test_matrix import loss_of, model_of
from tests.model.stock import texts
from tests.mutation import mutated

TRAINING, HELD_OUT = texts((13, 7, 18)), texts((31, 2, 40, 9), 5)
SUMS = "evaluation.row_sums"
MUTATIONS = {  # what is wrong -> the module, what stands there, and in its place; and how it is noticed
    "nothing": (None, ""),
    "a document dropped": ((SUMS, "self._losses, measured.documents, losses)",
                            "self._losses, measured.documents, losses * (measured.documents > 0))"), "document"),
    "rows of a document dropped": (("train.terms.loss_tokens", "rows = target_rows(batch)\n",
                                    "rows = target_rows(batch)[1:]\n"), "PlanError"),
    "stale rotary positions": (("comm.shard", "position_ids=to_device(positions, device)",
                                "position_ids=to_device(positions // 2, device)"), "document"),
    "losses multiplied by cp": ((SUMS, "            self._losses,\n", "            self._losses * world.home.slots,\n"),
                                "document"),
    "losses counted by every tp rank": (
        (SUMS, "counts_here = world.coordinates.tp == 0", "counts_here = True"), "PlanError"),
    "losses not reduced": ((SUMS, 'flat = world.control.sum_array_over_ranks(flat, "sums of an evaluation")', "pass"),
                           "PlanError"),
    "modes not restored": (("model.layers", "vars(module)[\"training\"] = training", "pass"), "/modes"),
    "reshard skipped": (("evaluation.portions", "recurse=False)\n        reshard(model)", "recurse=False)"),
                        "/gathered"),
    "the world's step changed": (("evaluation.live", "    portions = Portions(inputs, options, started)",
                                  "    world.step = options.step; portions = Portions(inputs, options, started)"),
                                 "/step"),
}  # fmt: skip
DAILY = ("nothing", "stale rotary positions", "losses not reduced", "modes not restored")


MODEL = ("qwen3 with YaRN", "float64", 2)


def notice(rank: int, layout: Layout, exact: Sequence[float], names: Sequence[str]) -> dict[str, set[str]]:
    noticed = dict[str, set[str]]()
    with World(layout, backend=backend(), timeout=60) as world:
        world.step = 3
        prepared = prepare(model_of(*MODEL), world)
        optimizer = build_optimizer(prepared, "sgd", lr=0.1)
        run_step(prepared, plan_fixed([len(d) for d in TRAINING], layout, cp=1), TRAINING, world)
        for name in names:
            change, _ = MUTATIONS[name]
            prepared.train()
            world.step, before = 3, state_of(prepared, optimizer, world)
            try:
                with mutated(change):
                    choice = PlannerConfig.fixed(2, max_tokens_per_slot=24)
                    found = evaluate(prepared, HELD_OUT, choice, world, EvaluationOptions(step=77)).document_losses
                    errors = [abs(loss.sum / wanted - 1) for loss, wanted in zip(found, exact, strict=True)]
                    noticed[name] = {"document"} if max(errors) > 1e-9 else set()
                    assert change or max(errors) < 1e-12
            except PlanError:
                noticed[name] = {"PlanError"}
            changed = differences(before, state_of(prepared, optimizer, world))
            noticed[name] |= {"/".join(path.split("/")[:2]) for path in changed}
            for module in prepared.modules():
                if callable(reshard := getattr(module, "reshard", None)):
                    reshard()
    return noticed


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        pytest.param(Layout(ranks=2), DAILY, id="daily"),
        pytest.param(Layout(ranks=4, tp=2), tuple(MUTATIONS), id="all", marks=pytest.mark.whole),
    ],
)
def test_every_mutation_is_noticed(layout: Layout, names: Sequence[str]) -> None:
    stock = model_of(*MODEL)
    exact = [loss_of(stock, document).item() for document in HELD_OUT]
    for noticed in run_ranks(notice, len(layout.ranks), layout, exact, names):
        assert noticed["nothing"] == set()
        missed = {name: noticed[name] for name in names if MUTATIONS[name][1] not in ("", *noticed[name])}
        assert not missed
