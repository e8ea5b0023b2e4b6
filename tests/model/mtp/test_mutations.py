"""What multi-token prediction could get wrong without an error, put into the code: the test would show it."""

import math
from typing import Any

import pytest

from longspan import Layout, MtpLoss, World, plan_fixed, run_step
from longspan.doctor.stock import whole_float64
from longspan.testing import run_ranks
from tests.model.mtp.dense import LENGTHS, WEIGHT, adapted, dense, with_depths
from tests.model.stock import gradients_of, prepare_untried, texts
from tests.mutation import each_mutated

ROWS, LOSS, DEPTHS = "train.read_rows", "train.terms.mtp", "model.mtp"
MUTATIONS: dict[str, tuple[str, str, str]] = {
    "ids shifted by one less": (ROWS, "tokens[ahead]", "tokens[max(depth - 1, 0) :][: stop - start]"),
    "labels shifted by one less": (ROWS, "labels[ahead]", "labels[max(depth - 1, 0) :][: stop - start]"),
    "ids of the segment alone": (ROWS, "stop + len(self._at_depth)", "stop + 1"),
    "ids over the ends of segments and documents": (
        "train.passes",
        "np.stack([rows.ids for rows in batch.deeper])",
        "np.stack([np.roll(batch.ids, -1 - depth) for depth in range(passes.depths)])",
    ),
    "labels over the ends of segments and documents": (
        LOSS,
        "self._cross_entropy(rows, states",
        "self._cross_entropy(rows._replace(labels=__import__('numpy').roll(batch.labels, -1 - depth)), states",
    ),
    "targets of every token": (LOSS, "(batch.deeper[d].labels != NO_TARGET).sum()", "len(batch.labels)"),
    "targets of this slot": (
        LOSS,
        'world.control.sum_over_stages(local, "targets of multi-token prediction")',
        "local",
    ),
    "the depths' sum in place of their mean": (LOSS, "mtp.weight / len(targets)", "mtp.weight"),
    "not multiplied by what the sum is divided by": (LOSS, "* divisor / max", "/ max"),
    "depths in the loss": (LOSS, "share * (loss - loss.detach())", "share * loss"),
    "every depth from the model's hidden states": (DEPTHS, "        hidden = depth(", "        last = depth("),
    "the hidden states first": (
        DEPTHS,
        "[self.enorm(embedded), self.hnorm(hidden)]",
        "[self.hnorm(hidden), self.enorm(embedded)]",
    ),
    "no last norm": (DEPTHS, "self.post_norm(take_hidden_states(", "(take_hidden_states("),
}

INPUTS = "model.mtp"
OF_TOKENS: dict[str, tuple[str, str, str]] = {
    "the rows' own ids": (INPUTS, "input_ids=ids[None], **other", "input_ids=arguments['input_ids'], **other"),
    "no gradient of the embedding": (INPUTS, "_Embedded(embedded)", "_Embedded(embedded.detach())"),
    "the inputs of another layer": (INPUTS, "layers[self._copied.index]", "layers[0]"),
    "a layer without keys of its own": (
        "model.add_depths",
        "(i for i in earlier",
        "(last_layer for i in earlier",
    ),
}


OF_WHOLE_DEPTHS: dict[str, tuple[str, str, str]] = {  # beside an adapter
    "the depths that were there before": (DEPTHS, "model._modules[PREFIX] = copies[0]", "pass"),
    "a configuration of their own": (DEPTHS, "copies[0].get_submodule(name).config = config", "pass"),
}


def _errors(rank: int, family: str, mutations: dict[str, tuple[str, str, str]]) -> dict[str, float]:
    """The largest error of a step by what is wrong; of a change that raises, infinity."""
    errors, documents = dict[str, float](), texts(LENGTHS)

    def make() -> Any:
        model = with_depths(family, 2)
        return adapted(model, modules_to_save=["mtp"]) if mutations.keys() == OF_WHOLE_DEPTHS.keys() else model

    with World(Layout(ranks=2)) as world, whole_float64():
        exact = dense(make().train(), documents)
        plan = plan_fixed(LENGTHS, world.home, cp=2, max_tokens_per_slot=24)
        for name in each_mutated(mutations):
            try:
                model = prepare_untried(make(), world)
                result = run_step(model, plan, documents, world, mtp=MtpLoss(weight=WEIGHT))
                errors[name] = exact.error(result, gradients_of(model))
            except Exception:  # of both ranks, before a collective
                errors[name] = math.inf
    return errors


@pytest.mark.whole
@pytest.mark.parametrize(
    ("family", "mutations"), [("qwen3", MUTATIONS), ("gemma4, keys shared", OF_TOKENS), ("qwen3", OF_WHOLE_DEPTHS)]
)
def test_mutations_are_noticed(family: str, mutations: dict[str, tuple[str, str, str]]) -> None:
    """Gemma's layers get what is made of the rows' tokens."""
    for errors in run_ranks(_errors, 2, family, mutations, timeout=280):
        assert errors.pop("nothing") < 1e-11
        assert all(error > 1e-6 for error in errors.values()), errors
