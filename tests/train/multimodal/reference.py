"""Encoders and a language model in one process without any parallelism: what every layout is compared with.

Documents go one by one through the stock model's `inputs_embeds`, items one by one through their encoders.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel

from longspan import Document
from longspan.model.kinds import router_modules
from longspan.multimodal import MediaDocuments
from tests.model.deep import deep_config
from tests.model.experts.moe_models import router_losses
from tests.model.stock import _norms_in_float64, gradients_of, random_model
from tests.train.multimodal.documents import VOCABULARY, placeholders
from tests.train.multimodal.encoders import encoder_of

MODALITIES = ("image", "video")
HIDDEN = 24
RATE = 0.5
ROUTER = (0.5, 0.1)  # weights of the balance and the z loss of a model with experts


def config_of(family: str) -> PreTrainedConfig:
    """Qwen3 with a tied and with an untied head, and Qwen3-MoE whose second layer is dense; 1, 2 and 3 ranks share
    their heads."""
    heads = {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 4}
    config = deep_config(family.removesuffix("-untied"), 2, VOCABULARY, hidden_size=HIDDEN, **heads)
    config.tie_word_embeddings = family != "qwen3-untied"
    return config


def language_model_of(family: str, dtype: torch.dtype) -> PreTrainedModel:
    """A tiny model whose weights depend on its family alone; in float64, its norms compute in float64."""
    settings: dict[str, Any] = {"attn_implementation": "eager" if dtype == torch.float32 else "sdpa"}
    if family == "qwen3-moe":
        settings["experts_implementation"] = "eager"
    model = random_model(config_of(family), dtype, **settings)
    if dtype == torch.float64:
        _norms_in_float64(model)
    return model


class Dense(nn.Module):
    def __init__(self, family: str, dtype: torch.dtype, frozen: str = "nothing") -> None:
        super().__init__()
        self.encoders = nn.ModuleDict({name: encoder_of(name, HIDDEN, dtype) for name in MODALITIES})
        self.language_model = language_model_of(family, dtype)
        for name in MODALITIES:
            freeze(self.encoders[name], "encoder", frozen)
        freeze(self.language_model, "language model", frozen)

    def losses(self, documents: MediaDocuments) -> list[Tensor]:
        predictions = [self.predictions(documents, d) for d in range(len(documents.lengths))]
        return [F.cross_entropy(*of, reduction="none").sum(dtype=torch.float64) for of in predictions]

    def predictions(self, documents: MediaDocuments, d: int) -> tuple[Tensor, Tensor]:
        """The logits of a document's rows but the last, and the labels that they predict: in no place of an item."""
        length, device = documents.lengths[d], self.language_model.device
        tokens, positions = documents[d], np.arange(length)
        ids = torch.from_numpy(tokens[positions]).to(device)
        labels = torch.from_numpy(tokens.labels(positions)).to(device) if isinstance(tokens, Document) else ids
        mine = [i for i, item in enumerate(documents.items) if item.document == d]
        covered = placeholders(length, [documents.items[i] for i in mine])
        embeddings = self.language_model.get_input_embeddings()(ids)
        for i in mine:
            rows = self.encoders[documents.items[i].modality]([documents.read(i)])
            where = np.concatenate([np.arange(*span) for span in documents.items[i].spans])
            embeddings = embeddings.index_put((torch.from_numpy(where).to(device),), rows)
        logits = self.language_model(inputs_embeds=embeddings[None], use_cache=False).logits[0]
        return logits[:-1], labels[1:].masked_fill(torch.from_numpy(covered[1:]).to(device), -100)


def freeze(module: nn.Module, part: str, frozen: str) -> None:
    """What is not trained under `frozen`: "encoders" (their projectors are), "language model", "all but the head"."""
    for name, parameter in module.named_parameters():
        off = {
            "encoders": part == "encoder" and not name.startswith("projector"),
            "language model": part == "language model",
            "all but the head": not name.startswith("lm_head"),
        }
        parameter.requires_grad_(not off.get(frozen, False))


@dataclass(frozen=True)
class Answer:
    """The mean loss, every gradient, their norm, and each document's loss after a step of SGD."""

    loss: float
    gradients: Mapping[str, Tensor]
    norm: float
    losses_after: Sequence[float]


def answer(family: str, dtype: torch.dtype, frozen: str, documents: MediaDocuments, device: str = "cpu") -> Answer:
    model = Dense(family, dtype, frozen).to(device)
    routed = list[list[Tensor]]()
    routers = router_modules(model.language_model)
    for router in routers.values():
        router.register_forward_hook(lambda _, __, out: routed[-1].append(out[0]))
    model.language_model.model.register_forward_pre_hook(lambda *_: routed.append([]))
    loss = torch.stack(model.losses(documents)).sum() / max(documents.targets, 1)
    mean = loss.item()
    if routers:
        layers = [torch.cat(layer) for layer in zip(*routed, strict=True)]
        balance, z = router_losses(layers, model.language_model.config.num_experts_per_tok)
        loss = loss + ROUTER[0] * balance + ROUTER[1] * z
    if loss.requires_grad:  # text alone does not train an encoder before a frozen language model
        loss.backward()
    gradients = gradients_of(model)
    norm = torch.cat([torch.zeros(1), *(g.flatten().double() for g in gradients.values())]).norm().item()
    torch.optim.SGD(model.parameters(), lr=RATE).step()
    with torch.no_grad():
        after = [loss.item() for loss in model.losses(documents)]
    return Answer(mean, gradients, norm, after)
