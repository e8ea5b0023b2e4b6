"""One step and one evaluation through an encoder and a language model, against each document alone in one process."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from longspan import Document, Layout, World, evaluate, plan_dynamic, prepare, run_step
from longspan.bridge import Item, ItemDocuments
from longspan.model.multimodal.multimodal_model import Encoder, MultimodalModel
from longspan.model.multimodal.prepare_encoder import prepare_encoder
from longspan.plan import Plan
from longspan.testing import backend, run_ranks
from longspan.train import PlanChoice
from longspan.train.terms.encoders import plan_waves_ahead
from tests.reference import relative_error

WIDTH, PIXELS, VOCABULARY = 32, 6, 50


class Tower(nn.Module):
    """Each patch by itself, then mixed with the mean of its item: rows depend on the whole item."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.mix, self.projector = nn.Linear(PIXELS, 16), nn.Linear(16, 16), nn.Linear(16, WIDTH)

    def forward(self, inputs: list[Tensor]) -> Tensor:
        rows = []
        for pixels in inputs:
            hidden = torch.tanh(self.patch(pixels.to(self.patch.weight)))
            rows.append(self.projector(hidden + torch.tanh(self.mix(hidden.mean(0, keepdim=True)))))
        return torch.cat(rows)


def language_model() -> Qwen3ForCausalLM:
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).double()


def tower() -> Tower:
    torch.manual_seed(2)
    return Tower().double()


def documents() -> ItemDocuments:
    random = np.random.default_rng(3)
    lengths, spans = (
        [40, 17, 9, 60, 25, 5],
        {0: [((3, 10),), ((12, 20), (22, 25))], 1: [((0, 6),)], 3: [((50, 60),)], 4: [((1, 5),), ((5, 9),)]},
    )
    tokens = [random.integers(0, VOCABULARY, length) for length in lengths]
    items = [Item(document, span) for document, of in spans.items() for span in of]
    for item in items:
        for start, stop in item.spans:
            tokens[item.document][start:stop] = 10**6  # placeholders need no place in the vocabulary
    pixels = [torch.from_numpy(random.standard_normal((item.rows, PIXELS))) for item in items]
    return ItemDocuments(tokens, items, pixels)


def labelled() -> ItemDocuments:
    """The same with labels: a mask that placeholders are in too, labels of other tokens, none, and two without."""
    random, docs = np.random.default_rng(4), documents()
    tokens = list[Any](docs.tokens)
    for document in (0, 3):
        tokens[document] = Document(tokens[document], loss_mask=random.random(docs.lengths[document]) < 0.6)
    tokens[1] = Document(tokens[1], labels=np.where(random.random(17) < 0.5, random.integers(0, VOCABULARY, 17), -100))
    tokens[2] = Document(tokens[2], loss_mask=np.zeros(9))
    return ItemDocuments(tokens, docs.items, docs.read)


def dense(documents: ItemDocuments, encoder: nn.Module | None = None) -> tuple[Tensor, list[float], dict[str, Tensor]]:
    """The mean loss, the sums of each document, and every gradient, one document at a time in one process."""
    model, encoder = language_model(), encoder or tower()
    total, sums, targets = torch.zeros((), dtype=torch.float64), list[float](), 0
    for document, length in enumerate(documents.lengths):
        table = documents.item_table
        hidden = table.placeholder_mask(document, 0, length).astype(bool)
        positions, tokens = np.arange(length), documents[document]
        wanted = tokens.labels(positions) if isinstance(tokens, Document) else tokens
        ids = torch.from_numpy(np.where(hidden, 0, tokens[positions]))
        embeddings = model.get_input_embeddings()(ids)
        for index, item in enumerate(documents.items):
            if item.document == document:
                places = torch.tensor([p for start, stop in item.spans for p in range(start, stop)])
                embeddings = embeddings.index_copy(0, places, encoder([documents.read(index)]))
        logits = model(inputs_embeds=embeddings[None]).logits[0, :-1]
        labels = torch.from_numpy(np.where(hidden, -100, wanted))[1:]
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
        sums.append(loss.item())
        total, targets = total + loss, targets + int((labels != -100).sum())
    total = total / targets
    total.backward()
    named = {f"language_model.{n}": p for n, p in model.named_parameters()}
    named |= {f"encoders.image.{n}": p for n, p in encoder.named_parameters()}
    return total.detach(), sums, {name: p.grad for name, p in named.items() if p.grad is not None}


def step(
    rank: int, home: Layout, encoder_home: Layout, settings: dict[str, Any], docs: ItemDocuments, expected: Any
) -> None:
    loss, sums, gradients = expected
    with (
        World(home, backend=backend(), timeout=60) as world,
        World(encoder_home, backend=backend(), timeout=60) as beside,
    ):
        prepared = prepare(language_model(), world)
        model = MultimodalModel(
            {"image": Encoder(module=prepare_encoder(tower(), beside), world=beside, **settings)}, prepared, world
        )
        plan = plan_dynamic(docs.lengths, home, targets=docs.targets, max_tokens_per_slot=40)
        result = run_step(model, plan, docs, world)
        assert result.loss == pytest.approx(loss.item(), rel=1e-12) and result.targets == docs.targets
        for name, parameter in model.named_parameters():
            if (gradient := parameter.grad) is not None:
                gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                assert relative_error(gradient, gradients[name]) <= 1e-12, name
        norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt().item()
        assert result.grad_norm == pytest.approx(norm, rel=1e-12)
        for degree in (1, home.slots):
            evaluation = evaluate(model, docs, PlanChoice.fixed(degree, max_tokens_per_slot=90), world)
            assert [mean.sum for mean in evaluation.document_losses] == pytest.approx(sums, rel=1e-12)
            assert evaluation.targets == docs.targets


@pytest.mark.parametrize(
    ("home", "encoder_home", "settings", "docs"),
    [
        pytest.param(Layout(4), Layout(4), {}, documents, marks=pytest.mark.whole),
        pytest.param(Layout(4), Layout(4), {"max_rows_per_slot": 12}, documents, marks=pytest.mark.whole),
        (Layout(4), Layout(4), {"max_rows_per_slot": 11, "recompute": True}, documents),
        (Layout(4, pp=2), Layout(4), {}, documents),
        (Layout(4, tp=2), Layout(4), {"max_rows_per_slot": 12}, documents),
        (Layout(2), Layout(2), {"max_rows_per_slot": 12}, labelled),
        pytest.param(Layout(4, tp=2), Layout(4), {}, labelled, marks=pytest.mark.whole),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_step_equals_each_document_alone(
    home: Layout, encoder_home: Layout, settings: dict[str, Any], docs: Callable[[], ItemDocuments]
) -> None:
    run_ranks(step, len(home.ranks), home, encoder_home, settings, docs(), dense(docs()))


def ahead(rank: int) -> None:
    with World(Layout(2), backend=backend(), timeout=60) as world, World(Layout(2), backend=backend()) as beside:
        docs = documents()
        other = ItemDocuments([tokens % VOCABULARY for tokens in docs.tokens], docs.items[:2], docs.read)
        model = MultimodalModel(
            {"image": Encoder(module=prepare_encoder(tower(), beside, shard_parameters=False), world=beside)},
            prepare(language_model(), world),
            world,
        )
        plans = [plan_dynamic(d.lengths, world.home, targets=d.targets, max_tokens_per_slot=90) for d in (docs, other)]
        at_once = [run_step(model, plan, d, world).loss_sum for plan, d in zip(plans, (docs, other), strict=True)]
        for plan, d in zip(plans, (docs, other), strict=True):
            plan_waves_ahead(model, plan, d)
        planned_ahead = [run_step(model, plan, d, world).loss_sum for plan, d in zip(plans, (docs, other), strict=True)]
        assert planned_ahead == at_once
        again = Plan.from_json(plans[0].to_json())  # an equal plan, made again
        plan_waves_ahead(model, plans[0], docs)
        assert run_step(model, again, docs, world).loss_sum == at_once[0]
        plan_waves_ahead(model, plans[0], docs)
        model.encoders.requires_grad_(False).zero_grad()  # frozen before its step
        assert run_step(model, plans[0], docs, world).loss_sum == at_once[0]
        assert all(parameter.grad is None for parameter in model.encoders.parameters())
        for _ in range(9):
            plan_waves_ahead(model, plans[0], docs, backward=False)
        assert run_step(model, plans[0], docs, world, backward=False).loss_sum == at_once[0]


def test_waves_planned_ahead_are_those_of_the_step() -> None:
    run_ranks(ahead, 2)
