"""What a user of a two-module model may get wrong is an error on every rank, after which a step runs as before."""

import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD

from longspan import Layout, World, evaluate, run_step, save_model
from longspan.errors import CommError, DataError, LongspanError, ModelError, NonFiniteError, PlanError
from longspan.model.multimodal.multimodal_model import Encoder, MultimodalModel
from longspan.model.vision.image_inputs import ImageInput
from longspan.multimodal import MediaDocuments, MediaItem
from longspan.testing import backend, run_ranks
from longspan.train import clip_grad_norm, grad_norm
from longspan.train.terms.encoding import find_tensors
from tests.model.stock import gradients_of, worst
from tests.train.multimodal.cases import Case
from tests.train.multimodal.documents import documents_of
from tests.train.multimodal.oracle import model_of
from tests.train.multimodal.reference import MODALITIES, language_model_of

CASE = Case("1·4→2·1·2", documents="packed", waves="several")
DOCUMENTS = documents_of(CASE.documents)


class AnyDocuments(SimpleNamespace):
    def __getitem__(self, document: int) -> Any:
        return DOCUMENTS[document]

    def __len__(self) -> int:
        return len(DOCUMENTS)


def documents(items: list[MediaItem] | None = None, read: Callable[[int], Any] = DOCUMENTS.read) -> Any:
    chosen = DOCUMENTS.items if items is None else tuple(items)
    return AnyDocuments(items=chosen, read=read, lengths=DOCUMENTS.lengths)


def _fails_on_rank_2(rank: int) -> Callable[[int], Any]:
    def read(item: int) -> Any:
        if rank == 2:
            raise OSError("no such image")
        return DOCUMENTS.read(item)

    return read


def _not_finite(item: int) -> Any:
    read = DOCUMENTS.read(item)
    return read * torch.nan if item == 2 else read


def _raises(module: nn.Module, inputs: Any, out: Tensor) -> Tensor:
    raise ModelError("no such size")


def _too_many(module: nn.Module, inputs: Any, out: Tensor) -> Tensor:
    """A row more where any item has four rows."""
    return torch.cat([out, out[:1]]) if any(len(item) == 4 for item in inputs[0]) else out


def _too_wide(module: nn.Module, inputs: Any, out: Tensor) -> Tensor:
    return torch.cat([out, out[:, :1]], 1)


def _hooked(model: MultimodalModel, hook: Callable[..., Tensor], call: Callable[[], Any]) -> None:
    """A call of which the encoder of images makes other rows."""
    handle = model.encoders["image"].register_forward_hook(hook)
    try:
        call()
    finally:
        handle.remove()


Call = Callable[[MultimodalModel, World], Any]
Mistake = tuple[type[LongspanError], str, Call]  # what all ranks raise, and what they say, of a call


def mistakes(rank: int) -> list[Mistake]:
    plan, items = CASE.plan(), list(DOCUMENTS.items)

    def step(model: MultimodalModel, world: World, **changes: Any) -> Any:
        return run_step(model, **({"plan": plan, "documents": DOCUMENTS, "world": world} | changes))

    twice, outside = [*items, MediaItem(12, ((4, 6),))], [*items, MediaItem(1, ((5, 9),))]
    sounds, others = [items[0]._replace(modality="audio"), *items[1:]], items if rank else items[::-1]
    elsewhere, choice = Encoder(module=nn.Linear(1, 1), world=World(Layout(ranks=(0, 1)))), CASE.evaluation()
    return [
        (DataError, r"item \d+ \(image of document 12\) and item 13 \(image of document 12\) both take position 4",
         lambda m, w: step(m, w, documents=documents(twice))),
        (DataError, r"item 13 \(image of document 1\) has the spans \(\(5, 9\)\); the document has positions 0",
         lambda m, w: step(m, w, documents=documents(outside))),
        (PlanError, r"1 of 13 items are of modality 'audio', for which .* encoders for 'image', 'video'",
         lambda m, w: step(m, w, documents=documents(sounds))),
        (ModelError, r"the encoder returned \d+ rows for item .*image of document 12.*, whose placeholders take \d+",
         lambda m, w: _hooked(m, _too_many, lambda: step(m, w))),
        (ModelError, r"makes rows of width 25 for item .* embeds tokens in 24; end the encoder with a projector",
         lambda m, w: _hooked(m, _too_wide, lambda: step(m, w))),
        (ModelError, r"encoder of image is over ranks \(0, 1\), the language model over \(0, 1, 2, 3\)",
         lambda m, w: MultimodalModel({"image": elsewhere}, m.language_model, w)),
        (ModelError, r"the documents have 13 items, \w*Qwen3ForCausalLM has no encoder; run a Multimodal",
         lambda m, w: run_step(m.language_model, plan, DOCUMENTS, w)),
        (DataError, r"the documents \(list\) have no items; a MultimodalModel takes MediaDocuments",
         lambda m, w: step(m, w, documents=list(DOCUMENTS.tokens))),
        (DataError, r"rank 2 could not read its rows: OSError: no such image; reading item \d+ \(\w+ of document \d+\)",
         lambda m, w: step(m, w, documents=documents(read=_fails_on_rank_2(rank)))),
        (NonFiniteError, r"what was read for item 2 \(\w+ of document \d+\) is not: mend it or leave it out",
         lambda m, w: step(m, w, documents=documents(read=_not_finite), optimizer=SGD(m.parameters(), foreach=False))),
        (ModelError, r"no such size; encoding item \d+ \(image of document \d+\).* on rank \d",
         lambda m, w: _hooked(m, _raises, lambda: step(m, w))),
        (PlanError, r"divides the loss by \d+ targets, its 13 documents predict \d+ .* plan with targets=\d+",
         lambda m, w: step(m, w, plan=replace(plan, targets=plan.targets + 1))),
        (CommError, r"hold 2 different lists of items for step \d+: ranks \(0\) hold",
         lambda m, w: step(m, w, documents=documents(others))),
        (CommError, r"hold 2 different lists of items for step \d+: ranks \(0\) hold",
         lambda m, w: evaluate(m, documents(others), choice, w)),
        (ModelError, r"Qwen3ForCausalLM was not prepared",
         lambda m, w: MultimodalModel({}, language_model_of("qwen3", torch.float32), w)),
        (ModelError, r"run with longspan.run_step\(model, plan, documents, world\)", lambda m, w: m(input_ids=None)),
        (ModelError, r"built over a world of Layout.*tp=2.*, but given one of .*tp=1.*; pass the world of its lang",
         lambda m, w: run_step(m, plan, DOCUMENTS, m.encoder_settings["image"].world)),
        (ModelError, r"built over a world of .*, but given one of",
         lambda m, w: evaluate(m, DOCUMENTS, choice, m.encoder_settings["image"].world)),
        (ModelError, r"a MultimodalModel with an encoder of one's own", lambda m, w: save_model(m, "folder", w)),
        (ModelError,
         r"the encoder of video and the encoder of image share the parameter patches.weight; give items of one encoder",
         lambda m, w: MultimodalModel(dict.fromkeys(MODALITIES, m.encoder_settings["image"]), m.language_model, w)),
        (ModelError, r"the encoder of image is a \w+; give Encoder\(module=prepare_encoder\(",
         lambda m, w: MultimodalModel({"image": m.encoders["image"]}, m.language_model, w)),  # type: ignore[dict-item]
    ]  # fmt: skip


def _mistaken(rank: int) -> None:
    with World(CASE.home, backend=backend(), timeout=30) as world, World(CASE.encoder_home, backend=backend()) as other:
        model = model_of(CASE, world, other)
        before, gradients = run_step(model, CASE.plan(), DOCUMENTS, world), gradients_of(model)
        model.zero_grad()
        for kind, words, call in mistakes(rank):
            with pytest.raises(kind) as caught:
                call(model, world)
            said = "; ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
            assert caught.type is kind and re.search(words, said), said
            model.zero_grad()
            assert all(isinstance(p, DTensor) for p in model.encoders.parameters()), f"gathered after {words}"
        assert run_step(model, CASE.plan(), DOCUMENTS, world).loss == before.loss
        assert worst(gradients_of(model), gradients) < 1e-13
        assert before.grad_norm is not None
        assert clip_grad_norm(model, before.grad_norm / 4, world) == pytest.approx(before.grad_norm, rel=1e-12)
        # torch adds 1e-6 to the norm
        assert grad_norm(model, world) == pytest.approx(before.grad_norm / 4, rel=1e-5)


def test_every_mistake_is_an_error_on_every_rank() -> None:
    run_ranks(_mistaken, 4)


def test_documents_are_checked_where_they_are_made() -> None:
    with pytest.raises(DataError, match=r"item 1 .* both take position 3"):
        MediaDocuments([[1] * 9], [MediaItem(0, ((1, 4),)), MediaItem(0, ((3, 5),))], [None, None])


def test_what_is_looked_through_for_numbers_that_are_not_finite() -> None:
    pixels, mask = torch.ones(2, 3), torch.zeros(2)
    image = ImageInput(pixels, grid=(1, 1, 2), fields={"pixel_attention_mask": mask})
    assert [id(x) for x in find_tensors({"image": [image, "no tensor"]})] == [id(pixels), id(mask)]
