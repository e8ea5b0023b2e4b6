"""What two modules in homes of their own could get wrong without an error, put into the code: the oracle shows it."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest

from longspan.errors import LongspanError
from longspan.plan.items import encoding_plan
from longspan.testing import run_ranks
from tests.mutation import mutated
from tests.train.multimodal.cases import Case
from tests.train.multimodal.oracle import LIMITS, Answers, Errors, answers_of, run

PASS, OWNERS = "train.terms.encoding", "plan.items.encoding_plan"
FAN_IN = Case("2·2→2·2·1", documents="even")
FAN_OUT = Case("2·2→1·2·2", documents="packed", waves="several")
SHARED = Case("1·4→1·4·1", encoder="cp 2", owners="random")
LABELLED = Case("2·2→2·2·1", documents="labelled")
COPIES = Case("1·4→2·1·2", encoder="copies")


class Mutation(NamedTuple):
    """What stands in a module and what takes its place; the case that shows it, and in which of its errors."""

    module: str
    old: str
    new: str
    case: Case
    shows: str = "gradients"


MUTATIONS = {
    "each of a slot's copies is summed": Mutation(
        PASS, 'gradient = "partial_over_slots"', 'gradient = "partial"', FAN_IN
    ),
    "the sum over the encoder's slots is left out": Mutation(
        PASS, "stack.enter_context(sum_gradients_over_slots(module, self.encoder.world))", "pass", COPIES
    ),
    "gradients are averaged over the encoder's slots": Mutation(
        PASS, "wave.bridge.carry_back(_row_gradient(wave, output))",
        "wave.bridge.carry_back(_row_gradient(wave, output)) / self.encoder.world.home.slots", FAN_OUT,
    ),
    "the loss is divided by slots": Mutation(
        "train.passes", "return loss_sum / self.divisor",
        "return loss_sum / self.divisor / self.world.home.slots", FAN_IN,
    ),
    "two slots of the encoder are swapped": Mutation(
        OWNERS, "encoded[home.rank_at(slot, ", "encoded[home.rank_at(slot ^ 1, ", FAN_IN
    ),
    "two slots of the language model are swapped": Mutation(
        OWNERS, "needed[home.rank_at(slot, tp=tp, pp=pp)]", "needed[home.rank_at(slot ^ 1, tp=tp, pp=pp)]", FAN_IN
    ),
    "the axes of a mesh are permuted": Mutation(
        OWNERS, "needed[home.rank_at(slot, tp=tp, pp=pp)]", "needed[home.ranks[tp * home.slots + slot]]", FAN_IN
    ),
    "a slice of what arrived is taken twice": Mutation(
        PASS, "starts += np.bincount(wave_of_row, minlength=len(self.waves))", "pass", FAN_OUT
    ),
    "rows of an item are reversed": Mutation(
        "bridge.item_rows", "rows.to(embeddings.dtype)[None]", "rows.to(embeddings.dtype).flip(0)[None]", FAN_IN
    ),
    "rows are added to the embeddings": Mutation("bridge.item_rows", ".index_copy(1", ".index_add(1", FAN_IN),
    "owners of a shared item begin at its first row": Mutation(
        OWNERS, "parts.append(expand_runs(first + segments.start, first + segments.stop))",
        "parts.append(expand_runs(first, first + segments.stop - segments.start))", SHARED, "DataError",
    ),
    "labels in the places of items count": Mutation(
        "train.rows.read_rows",
        "np.where(is_placeholder[1:], NO_TARGET, labels.astype(np.int64))",
        "labels",
        FAN_IN,
        "PlanError",
    ),
    "documents' labels are not read": Mutation(
        "train.rows.read_rows", "isinstance(source, Labelled)", "False", LABELLED, "PlanError"
    ),
    "documents' labels in the places of items are counted": Mutation(
        "data.item_documents", "document.targets - int((labels != NO_TARGET).sum())", "document.targets",
        LABELLED, "PlanError",
    ),
    "the norm leaves the encoders out": Mutation(
        "train.gradient_norm", "modules_and_worlds(model, world)",
        "modules_and_worlds(model, world)[:1]", FAN_IN, "loss",
    ),
}  # fmt: skip


def _mutated(rank: int, names: Sequence[str], answers: Answers) -> dict[str, Errors | str]:
    seen = dict[str, Errors | str]()
    for name in names:
        encoding_plan._plan_modality.cache_clear()  # pyright: ignore[reportPrivateUsage]
        try:
            with mutated(MUTATIONS[name][:3]):
                (seen[name],) = run(rank, [MUTATIONS[name].case], answers)
        except LongspanError as error:
            seen[name] = type(error).__name__
    encoding_plan._plan_modality.cache_clear()  # pyright: ignore[reportPrivateUsage]
    return seen


@pytest.mark.whole
@pytest.mark.parametrize("names", [tuple(MUTATIONS)[::2], tuple(MUTATIONS)[1::2]], ids=["even", "odd"])
def test_every_mutation_turns_the_oracle_red(names: Sequence[str]) -> None:
    mutations = {name: MUTATIONS[name] for name in names}
    of_ranks = run_ranks(_mutated, 4, names, answers_of(mutation.case for mutation in mutations.values()))
    for name, mutation in mutations.items():
        noticed = [_noticed(seen[name], mutation) for seen in of_ranks]
        assert any(noticed), (name, [seen[name] for seen in of_ranks])


def _noticed(seen: Errors | str, mutation: Mutation) -> bool:
    if isinstance(seen, str):
        return seen == mutation.shows
    return mutation.shows in Errors._fields and getattr(seen, mutation.shows) > 1e6 * LIMITS[mutation.case.dtype]
