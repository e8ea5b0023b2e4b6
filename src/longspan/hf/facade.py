"""What a Trainer calls as its model: a batch of all ranks in, log-probabilities of its tokens out, on every rank alike.

These are a leaf of the Trainer's graph: what its loss leaves in the leaf's gradient are the coefficients of one
`run_step` over the batch's documents (`steps.py`).
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from longspan.data.batch_documents import BatchDocuments
from longspan.data.document import NO_TARGET, Document
from longspan.errors import ConfigError, ModelError
from longspan.hf.ahead import AheadBatch, OffsetValues
from longspan.hf.batch_entries import IGNORED, read_documents_of_batch
from longspan.hf.refusals import NAMES_TO_READ, refuse_hooks
from longspan.hf.scores import CalledScores, read_scored_batch, stock_loss
from longspan.layout import Floats
from longspan.model.adapted_modules import unwrap_peft_model
from longspan.model.kinds import SCORE_HEADS, score_columns
from longspan.model.layers import architecture_name
from longspan.train import TokenLogProbs
from longspan.train.log_probs import DISTRIBUTION_VALUES


@dataclass(frozen=True)
class FusedHead:
    """How TRL wants the values of tokens: what `add_fused_lm_head` was given."""

    temperature: float = 1.0
    outputs: tuple[str, ...] = ("log_probs",)

    @property
    def values(self) -> tuple[str, ...]:
        """The values of tokens that the head was asked for besides log-probabilities, by longspan's names."""
        names = {"is_top1": "top1"}
        return tuple(v for v in (names.get(name, name) for name in self.outputs) if v in DISTRIBUTION_VALUES)


def take_fused_head(model: Any) -> FusedHead:
    """Read what TRL's `add_fused_lm_head` put on a model, and take it off again.

    Another forward on the instance stays, for `prepare` to refuse. Raises ConfigError for a head in float32.
    """
    forward = vars(model).get("forward")
    code = getattr(getattr(forward, "__func__", None), "__code__", None)
    if code is None or code.co_name != "_fused_forward":  # the function that TRL's add_fused_lm_head binds
        return FusedHead()
    settings = inspect.getclosurevars(forward.__func__).nonlocals
    if settings["cast_lm_head_to_fp32"] and model.dtype not in (torch.float32, torch.float64):
        raise ConfigError(
            f"cast_lm_head_to_fp32 is set for a model in {model.dtype}: longspan multiplies the output embedding in "
            "the model's own precision; load the model in float32 with bf16=True, or leave cast_lm_head_to_fp32 out"
        )
    del model.forward
    return FusedHead(float(settings["temperature"]), tuple(settings["outputs"]))


class CalledBatch(NamedTuple):
    """One batch that the Trainer called the model with: its documents, and the leaf of log-probabilities (B, L - 1).

    The backward pass of the Trainer's loss leaves a gradient in the leaf.
    """

    rows: BatchDocuments
    leaf: Tensor

    def is_finite(self) -> bool:
        """Return whether the coefficients of all documents with targets are finite."""
        if self.leaf.grad is None or bool(self.leaf.grad.isfinite().all()):
            return True
        pairs = zip(self.rows.documents, self.coefficients(), strict=True)
        return all(np.isfinite(coefficients).all() for document, coefficients in pairs if document.targets)

    def coefficients(self) -> list[Floats]:
        """Return the derivative of the loss by the log-probability of each token, document by document.

        The leaf (B, L - 1) begins at column 1, so a column of zeros goes before it.
        """
        gradient = torch.zeros_like(self.leaf) if self.leaf.grad is None else self.leaf.grad
        return self.rows.from_batch(torch.nn.functional.pad(gradient, (1, 0)))

    def documents_with_coefficients(self) -> list[Document]:
        """Return the documents with targets, each with the derivative of the loss by its log-probabilities."""
        return [
            document.with_values(coefficient=np.asarray(coefficients))
            for document, coefficients in zip(self.rows.documents, self.coefficients(), strict=True)
            if document.targets
        ]


class TokenOutput(dict[str, Any]):
    """What the model answers: `loss`, and the values of tokens as attributes; of (B, L - 1), as labels are shifted."""

    def __getattr__(self, name: str) -> Any:
        """Return an entry by its name. Raises ModelError, which says what a loss may read, for one that
        is not there.
        """
        if name in self:
            return self[name]
        raise ModelError(
            f"a loss reads {name!r} of the model's output; under longspan it may read {NAMES_TO_READ}: rows of logits "
            "and hidden states are never whole on a rank. Write the loss with log_probs: model(**inputs, "
            "fused_lm_head=True).log_probs (docs/trainer.md)"
        )

    def __missing__(self, name: Any) -> Any:
        return self.__getattr__(name)  # not getattr: a dict has attributes of its own, such as `items`


class Facade:
    """A prepared model as the Trainer calls it; attributes are the model's.

    `model()` returns the Trainer's model, which may be replaced; `token_values(facade, documents)` computes values of
    the documents' tokens by a pass. The trainer reads and empties `called`, `ahead` and `evaluated`.
    """

    def __init__(
        self,
        model: Callable[[], Any],
        token_values: Callable[["Facade", list[Document]], TokenLogProbs],
        head: FusedHead | None = None,
    ) -> None:
        """`head` is what TRL asked of the values of tokens (None: log-probabilities alone)."""
        self.head: FusedHead = head or FusedHead()
        self._model = model
        self._token_values = token_values
        # These batches of this optimizer step were called with gradients.
        self.called: list[CalledBatch | CalledScores] = []
        # These batches of this optimizer step are not called with yet.
        self.ahead: list[AheadBatch] = []
        # An evaluation has the sum of losses, and of tokens.
        self.evaluated = (0.0, 0)
        self.logits_of: Callable[[Facade, list[Document]], list[Tensor]] | None = None  # where they are wanted
        # compute_loss_func= gets the labels of a batch that comes without them.
        self.labels_apart: Any = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._model(), name)

    @property
    def inner_model(self) -> Any:
        """The prepared model, without the PeftModel around it."""
        return unwrap_peft_model(self._model())

    def __call__(
        self,
        input_ids: Any = None,
        *,
        labels: Any = None,
        fused_lm_head: bool = False,
        num_items_in_batch: Any = None,
        **batch: Any,
    ) -> TokenOutput:
        """Answer a batch (B, L) of all ranks, on every rank: with its loss and, if `fused_lm_head`, values of tokens.

        With gradients the answer is noted in `called`, for the step; a batch whose step ran ahead is taken off `ahead`
        and answered by that step's values, without a pass. With `logits_of` set, and no `fused_lm_head`, the answer has
        logits instead; any other answer to a batch without labels is empty. A batch without labels gets `labels_apart`,
        if there are any, and is answered as with `fused_lm_head` unless logits are wanted. A model with a head of
        scores answers with its scores as logits.
        """
        if batch.pop("output_router_logits", False):
            raise ConfigError(
                "output_router_logits asks for the balance loss as transformers computes it, a batch at a time; under "
                "longspan leave it out: router_aux_loss_coef of the model's configuration is not applied"
            )
        refuse_hooks(self._model())
        if score_columns(self.inner_model):
            return self._answer_scores({"input_ids": input_ids, **batch}, labels)
        # compute_loss_func= reads log-probabilities, or logits
        if labels is None and self.labels_apart is not None:
            labels = self.labels_apart
            fused_lm_head = self.logits_of is None
        logits_of = None if fused_lm_head else self.logits_of
        batch = {"input_ids": input_ids, "labels": labels, **batch}
        ahead = None
        if logits_of is None and torch.is_grad_enabled() and self.ahead and self.ahead[0].matches(batch):
            ahead = self.ahead.pop(0)
        rows = ahead.rows if ahead is not None and ahead.has_same_tensors(batch) else read_documents_of_batch(batch)
        if logits_of is not None:
            return self._logits_output(rows, logits_of(self, list(rows.documents)), labels, num_items_in_batch)
        if labels is None:  # nothing is predicted, and hidden states are not answered
            return TokenOutput()
        values = None if ahead is None else ahead.values
        return self._answer_tokens(batch, rows, values, num_items_in_batch, fused=fused_lm_head)

    def _answer_tokens(
        self,
        batch: Mapping[str, Any],
        rows: BatchDocuments,
        values: OffsetValues | None,
        items: Any,
        *,
        fused: bool,
    ) -> TokenOutput:
        """`values` are those of a step that ran ahead; None: a pass computes them here, which all ranks enter."""
        labels = batch["labels"]
        scored = [d for d, document in enumerate(rows.documents) if document.targets]  # indices into the documents
        if values is None and scored:
            values = OffsetValues(self._token_values(self, [rows.documents[d] for d in scored]), 0)
        dtype = torch.promote_types(self.inner_model.dtype, torch.float32)
        device = torch.as_tensor(batch["input_ids"]).device

        def batch_values(name: str, kind: torch.dtype) -> Tensor:
            """Return this value of all tokens (B, L - 1), without column 0, which nothing predicts; 0 for no target."""
            document_values = {d: values.token_value(name, i) for i, d in enumerate(scored)} if values else {}
            return rows.to_batch(document_values, dtype=kind, device=device)[:, 1:]

        leaf = batch_values("log_probs", dtype).requires_grad_(torch.is_grad_enabled())
        out = self._loss_output(rows, leaf, labels, items)
        if not fused:
            return out
        # None for values that the head was not asked for
        tables = dict.fromkeys((*DISTRIBUTION_VALUES, "aux_loss"))
        tables |= {name: batch_values(name, torch.bool if name == "top1" else dtype) for name in self.head.values}
        tables["is_top1"] = tables.pop("top1")
        return TokenOutput({**out, **tables, "log_probs": leaf, "label_mask": _label_mask(labels)})

    def _answer_scores(self, batch: Mapping[str, Any], labels: Any) -> TokenOutput:
        """(B, L), or (B, W, L) of a head for tokens. With gradients the answer is noted in `called`, for the step."""
        model = self.inner_model
        tokens = architecture_name(model).endswith(SCORE_HEADS[1])  # whether the head scores tokens
        batch = {name: value for name, value in batch.items() if name not in IGNORED}
        rows = read_scored_batch(batch, model.config.get_text_config().pad_token_id, tokens=tokens)
        values: Any = self._token_values(self, list(rows.documents))
        # Sums of shared prefixes come behind those of the batch.
        table = values.sums[: len(rows.documents)]
        if tokens:
            table = np.zeros((*rows.shape, values.values.shape[1]))  # 0 at padding
            for d, (row, start, stop) in enumerate(rows.places):
                table[row, start:stop] = values.of(d)
        dtype = torch.promote_types(model.dtype, torch.float32)
        leaf = torch.from_numpy(table).to(torch.as_tensor(batch["input_ids"]).device, dtype)
        leaf.requires_grad_(torch.is_grad_enabled())
        if torch.is_grad_enabled():
            self.called.append(CalledScores(rows, leaf))
        if labels is None:
            return TokenOutput(logits=leaf)
        return TokenOutput(loss=stock_loss(model, leaf, labels, tokens=tokens), logits=leaf)

    def _loss_output(self, rows: BatchDocuments, leaf: Tensor, labels: Any, items: Any) -> TokenOutput:
        """Log-probabilities (B, L - 1), over `items`, or the mean of the batch (None). With gradients the leaf is noted
        in `called`, for the step; without them the sum of losses is added to `evaluated`."""
        total = -leaf.sum()
        targets = _label_mask(labels).sum()
        if torch.is_grad_enabled():
            self.called.append(CalledBatch(rows, leaf))
        else:
            self.evaluated: tuple[float, int] = (self.evaluated[0] + total.item(), self.evaluated[1] + int(targets))
        return TokenOutput(loss=total / (targets.clamp(min=1) if items is None else items))

    def _logits_output(self, rows: BatchDocuments, logits: list[Tensor], labels: Any, items: Any) -> TokenOutput:
        """(B, L, V), 0 at padding; V is the vocab_size."""
        width = self.inner_model.config.get_text_config().vocab_size
        device = next(self.inner_model.parameters()).device
        table = torch.zeros((*rows.shape, width), dtype=self.inner_model.dtype, device=device)
        log_probs = torch.zeros(rows.shape, dtype=torch.float64, device=table.device)
        for document, place, values in zip(rows.documents, rows.places, logits, strict=True):
            table[place.row, place.start : place.stop] = values[:, :width]
            wide = values[:-1].to(torch.promote_types(values.dtype, torch.float32))
            # The label of a row is its next token.
            label = torch.as_tensor(document.labels()[1:], device=values.device)
            scores = wide.log_softmax(-1).gather(1, label.clamp(min=0)[:, None])[:, 0]
            log_probs[place.row, place.start + 1 : place.stop] = torch.where(
                label != NO_TARGET, scores, 0.0
            ).double()
        if labels is None:
            return TokenOutput(logits=table)
        dtype = torch.promote_types(table.dtype, torch.float32)
        leaf = log_probs[:, 1:].to(dtype)
        out = TokenOutput(self._loss_output(rows, leaf, labels, items), logits=table)
        # Attributes, and no entries of the dict: a Trainer takes all entries but the loss for predictions.
        vars(out).update(log_probs=leaf, label_mask=_label_mask(labels))
        return out


def _label_mask(labels: Any) -> Tensor:
    """(B, L) to (B, L - 1)"""
    return torch.as_tensor(labels)[:, 1:] != NO_TARGET
