"""Multi-token prediction beside images: losses and every gradient are those of one process, document by document."""

from collections.abc import Sequence
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn

from longspan import Group, Layout, MicroBatch, SequenceShard, World, plan_fixed, prepare, run_step
from longspan.bridge.item_rows import AHEAD, embedding_arguments
from longspan.doctor.stock import compute_in_float64
from longspan.errors import ModelError
from longspan.model.multimodal.multimodal_model import _SpliceHook  # pyright: ignore[reportPrivateUsage]
from longspan.model.seams.running_layer import forward_with_running_layer
from longspan.model.vision.image_tokens import image_tokens
from longspan.mtp import MtpLoss
from longspan.plan.items.encoding_plan import _plan_modality  # pyright: ignore[reportPrivateUsage]
from longspan.testing import run_ranks
from tests.model.mtp.dense import WEIGHT, add_drawn_depths, dense
from tests.model.stock import gradients_of
from tests.model.vision.documents import Answer, Raw, documents_of, raw
from tests.model.vision.joined import Case, own_names
from tests.model.vision.models import IMAGE, config_of, here, tiny
from tests.mutation import each_mutated

EXACT, DEPTHS = 1e-11, 2
FAMILIES = [name for name in ("llava-clip", "qwen2.5-vl", "qwen3-vl", "qwen3.5") if name in here()]


@cache
def wanted(name: str) -> tuple[Answer, tuple[float, ...]]:
    with compute_in_float64():
        model = add_drawn_depths(tiny(name), DEPTHS).train()
        documents = raw(image_tokens(model.config))
        ids = [document.ids for document in documents]
        exact = dense(model, ids, [x != IMAGE for x in ids], images=[_images(document) for document in documents])
    return Answer(exact.loss, {key: g for key, g in exact.gradients.items() if g.abs().max() > 0}), exact.mtp_losses


def _images(document: Raw) -> dict[str, Tensor]:
    if not document.images:
        return {}
    images = {"pixel_values": torch.cat([image.pixels for image in document.images])}
    if document.images[0].grid is not None:
        images["image_grid_thw"] = torch.tensor([image.grid for image in document.images])
        images["mm_token_type_ids"] = torch.from_numpy(document.ids == IMAGE)[None].int()
    return images


def all_of(ranks: int) -> list[Case]:
    one, parts = Layout(ranks), (("sequence_parallel", True),)
    cases = [Case(name, one, one, cp) for name in FAMILIES for cp in (0, ranks)]
    if ranks == 2:
        for name in FAMILIES:
            cases.append(Case(name, Layout(2, tp=2), one, 1, options=parts))
            cases.append(Case(name, Layout(2, pp=2), Layout(2, tp=2), 1))
        split = (("pipeline_schedule", "zero_bubble"), ("virtual_stages", 2))
        cases.append(Case("llava-clip", Layout(2, pp=2), one, 1, options=split))
        how = (("activation_checkpointing", True), ("shard_parameters", False))
        cases.append(Case("qwen2.5-vl", one, one, 2, options=how))
    if ranks == 4:
        cases.append(Case("qwen3-vl", Layout(4, tp=2), Layout(4), 2, options=parts))
        cases.append(Case("qwen2.5-vl", Layout(4, pp=2, tp=2), Layout(4), 1))
    return cases


def _error(case: Case) -> float:
    answer, of_depths = wanted(case.name)
    with compute_in_float64(), World(case.home) as world:
        model = prepare(add_drawn_depths(tiny(case.name), DEPTHS), world, encoder=case.encoder, **dict(case.options))
        documents = documents_of(image_tokens(config_of(case.name)))
        plan = case.plan(documents.lengths, documents.targets)
        result = run_step(model, plan, documents, world, mtp=MtpLoss(weight=WEIGHT))
        losses = [abs(loss / there - 1) for loss, there in zip(result.mtp_losses, of_depths, strict=True)]
        return max(*losses, *answer.errors(result.loss, own_names(model, gradients_of(model), world)).values())


def _errors(rank: int, cases: Sequence[Case]) -> dict[str, float]:
    return {case.label: _error(case) for case in cases}


@pytest.mark.whole
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_steps_are_those_of_one_process(ranks: int) -> None:
    for errors in run_ranks(_errors, ranks, all_of(ranks), timeout=300):
        assert errors and max(errors.values()) < EXACT, errors


class _EmbedsTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)

    def forward(self, ids: Tensor, shard: SequenceShard) -> tuple[Tensor, Tensor]:
        return self.embedding(ids, **embedding_arguments(shard, 2)), self.embedding(ids)


def test_embeddings_are_of_the_rows_themselves_after_a_depth() -> None:
    shard = SequenceShard(MicroBatch((Group((0,), (0,), (8,)),)), 0, -1, torch.device("cpu"))
    assert embedding_arguments(shard, 2) == {} == embedding_arguments(None, 2)
    model, ids = _EmbedsTwice(), torch.zeros(1, 8, dtype=torch.int64)
    plain = model.embedding(ids).detach()
    _SpliceHook(model.embedding, ())
    rows = torch.full((1, 3), 7.0)
    shard.derived.add_items(rows, {2: ((torch.tensor([5]), rows),)}, {})
    assert embedding_arguments(shard, 2) == {AHEAD: 2}
    ahead, plain_again = forward_with_running_layer(partial(model, shard=shard))(ids)
    assert torch.equal(plain_again, plain)
    assert torch.equal(ahead[:, 5], torch.full((1, 3), 7.0)) and torch.equal(ahead[:, :5], plain[:, :5])


MUTATIONS = {
    "embeddings of placeholders in place of images": (
        "model.mtp.depths",
        "embedding_arguments(shard, number)",
        "embedding_arguments(shard, number + 9)",
    ),
    "the row's own image": ("model.multimodal.multimodal_model", "kwargs.get(AHEAD, 0)", "0"),
    "rows of the tokens one less further on": (
        "plan.items.encoding_plan",
        "start=segments.start + depth, stop=segments.stop + depth",
        "start=segments.start + max(depth - 1, 0), stop=segments.stop + max(depth - 1, 0)",
    ),
    "one use's gradient of a row": (
        "train.terms.encoding",
        '"partial" if self.trains else "none"',
        '"identical"',
    ),
}


def _mutated(rank: int) -> dict[str, float]:
    errors, case = dict[str, float](), Case("qwen2.5-vl", Layout(2), Layout(2), 2)
    for name in each_mutated(MUTATIONS):
        _plan_modality.cache_clear()
        errors[name] = _error(case)
    return errors


@pytest.mark.whole
def test_mutations_are_noticed() -> None:
    for errors in run_ranks(_mutated, 2, timeout=120):
        assert errors.pop("nothing") < EXACT
        assert all(error > 1e-6 for error in errors.values()), errors


@pytest.mark.whole
@pytest.mark.parametrize(("name", "rows"), [("gemma3", "an image"), ("paligemma", "a prefix")])
def test_rows_that_see_later_ones_are_refused(name: str, rows: str, world: World) -> None:
    documents = documents_of(image_tokens(config_of(name)))
    model = prepare(add_drawn_depths(tiny(name), DEPTHS), world, encoder=Layout(1))
    plan = plan_fixed(documents.lengths, world.home, 1, targets=documents.targets)
    with pytest.raises(ModelError, match=f"rows of {rows} see each other.*leave mtp= out"):
        run_step(model, plan, documents, world, mtp=MtpLoss())
