"""What stock processors make of images beyond pixels and grids reaches the model: ids, fields, loss and gradients.

Each is compared with the stock processor's own call on whole conversations, whose images it processes together.
"""

from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from longspan import Layout, World, plan_fixed, prepare, run_step
from longspan.corpus.image_documents import ImageDocuments, attach_images
from longspan.corpus.images.processor import load_processor
from longspan.doctor.stock import compute_in_float64
from longspan.errors import DataError
from longspan.model.exactness.small_copies import make_tiny_model
from longspan.model.layers import base_model
from longspan.model.vision.image_encoder import encode_images
from longspan.model.vision.image_inputs import image_feature_parameters
from longspan.model.vision.image_tokens import image_tokens
from longspan.testing import run_ranks
from tests.corpus.images.families import FAMILIES, family_config, family_folder, image_processor
from tests.corpus.images.folders import TURNS, saved, write_images
from tests.corpus.images.test_images import asks, corpus_of, ids_of
from tests.model.stock import gradients_of
from tests.model.vision.documents import Answer
from tests.model.vision.joined import BOUND, own_names

SIZES = [(20, 33), (16, 16), (8, 24), (64, 40)]
IN_CI = ("mistral3", "idefics3", "llava_onevision", "video_llama_3")  # of which mutations are seen
NAMES = [pytest.param(name, marks=() if name in IN_CI else pytest.mark.whole) for name in FAMILIES]
_TEXT = ("input_ids", "attention_mask", "token_type_ids")
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of GLM's processors


def part(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def conversations(folder: Path) -> list[list[dict[str, Any]]]:
    images = [{"type": "image", "path": str(folder / name)} for name in write_images(folder, SIZES)]
    first, second, third, fourth = images
    content = ([first, part("what?")], [second, third, part(" and "), fourth, part("which?")], [part("hi, you?")])
    return [asks(*parts, part("")) if len(parts) == 1 else asks(*parts) for parts in content]


def family_documents(name: str, folder: Path) -> tuple[ImageDocuments, Any, list[Mapping[str, Tensor]]]:
    model = family_folder(folder / "model", name)
    processor, messages = load_processor(model.absolute()), conversations(folder)
    config = family_config(name, processor.placeholder, len(processor.stock.tokenizer))
    corpus = attach_images(corpus_of(folder, [{"messages": m} for m in messages], model), config, model)
    made = [stock_call(processor.stock, m) for m in messages]
    documents = corpus.select(range(len(corpus)))
    assert isinstance(documents, ImageDocuments)
    return documents, config, made


def stock_call(stock: Any, messages: list[dict[str, Any]]) -> Mapping[str, Tensor]:
    opened = [{**m, "content": _opened(m["content"])} for m in messages]
    if "SmolVLM" not in type(stock).__name__:
        return stock.apply_chat_template([opened], tokenize=True, return_dict=True, return_tensors="pt")
    text = stock.tokenizer.apply_chat_template(opened, tokenize=False)  # without a processor of videos
    images = [
        part["image"] for m in opened if isinstance(m["content"], list) for part in m["content"] if "image" in part
    ]
    return stock(text=[text], images=[images] if images else None, return_tensors="pt")


def _opened(content: Any) -> Any:
    if isinstance(content, str):
        return content
    return [{"type": "image", "image": Image.open(p["path"])} if p["type"] == "image" else p for p in content]


def stock_answer(documents: ImageDocuments, config: Any, made: list[Mapping[str, Tensor]]) -> Answer:
    with compute_in_float64():
        model = make_tiny_model(config, torch.float64, images=True).train()
        losses = list[Tensor]()
        for document, inputs in zip(documents, made, strict=True):
            known = signature(model.forward).parameters
            of_images = {k: _wide(x) for k, x in inputs.items() if k in known and k not in _TEXT}
            if "mm_token_type_ids" in known:
                of_images["mm_token_type_ids"] = (inputs["input_ids"] == image_tokens(config).placeholder).int()
            logits = model(input_ids=inputs["input_ids"], use_cache=False, **of_images).logits[0]
            labels = torch.from_numpy(document.labels(np.arange(1, len(document))).astype(np.int64))
            losses.append(F.cross_entropy(logits[:-1], labels, ignore_index=-100, reduction="sum"))
        loss = torch.stack(losses).sum() / documents.targets
        loss.backward()
    return Answer(loss.item(), {n: g for n, g in gradients_of(model).items() if g.abs().max() > 0})


def _wide(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def errors_of(rank: int, name: str, folder: Path) -> dict[str, float]:
    with compute_in_float64():  # processors on torchvision compute in torch's default type
        documents, config, made = family_documents(name, folder / str(rank))
    answer, errors = stock_answer(documents, config, made), dict[str, float]()
    with compute_in_float64(), World(Layout(2), timeout=60) as world:
        for cp in (1, 2):
            model = prepare(make_tiny_model(config, torch.float64, images=True), world, encoder=Layout(2))
            longest = -(-max(documents.lengths) // cp)
            sizes: dict[str, Any] = {"targets": documents.targets, "max_tokens_per_slot": longest}
            plan = plan_fixed(documents.lengths, world.home, cp=cp, **sizes)
            loss = run_step(model, plan, documents, world).loss
            found = answer.errors(loss, own_names(model, gradients_of(model), world))
            errors[f"cp {cp}"] = max(found.values())
    return errors


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_rows_are_those_of_the_stock_processor(name: str, tmp_path: Path) -> None:
    documents, config, made = family_documents(name, tmp_path)
    with compute_in_float64():
        base: Any = base_model(make_tiny_model(config, torch.float64, images=True))
    for number, (document, inputs) in enumerate(zip(documents, made, strict=True)):
        assert ids_of(document) == inputs["input_ids"][0].tolist()
        images = [documents.read(i) for i, item in enumerate(documents.items) if item.document == number]
        if images:
            taken = {k: _wide(x) for k, x in inputs.items() if k in image_feature_parameters(base)}
            with torch.no_grad():
                rows = base.get_image_features(**taken, return_dict=True).pooler_output
                rows = rows if isinstance(rows, Tensor) else torch.cat([*rows])
                torch.testing.assert_close(encode_images(base, images)[0], rows.flatten(0, -2), rtol=0, atol=BOUND)


@pytest.mark.whole
@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_those_of_the_stock_model(name: str, tmp_path: Path) -> None:
    family_folder(tmp_path / "asked", name)  # skips here, not in a rank
    for errors in run_ranks(errors_of, 2, name, tmp_path, timeout=200):
        assert max(errors.values()) < BOUND, errors


def test_the_page_names_every_family() -> None:
    page = (Path(__file__).parents[3] / "docs" / "multimodal.md").read_text(encoding="utf-8")
    assert [name for name in FAMILIES if f"`{name}`" not in page] == []


@pytest.mark.parametrize("settings", [{}, {"do_image_splitting": True}])
def test_processors_that_do_not_say_what_they_write_are_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    image = image_processor("idefics2.Idefics2")(**settings)
    tokens = ("<|im_start|>", "<fake_token_around_image>", "<image>", "<end_of_utterance>")
    saved(tmp_path, image, tokens, TURNS.replace("PARTS", "<image>"), {"processor_class": "Idefics2Processor"})
    with pytest.raises(DataError, match="Idefics2Processor does not say what it writes for an image by itself"):
        load_processor(tmp_path).image_text((16, 16))
