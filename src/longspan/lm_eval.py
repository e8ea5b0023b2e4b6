"""A model under a longspan home in lm-eval (EleutherAI's lm-evaluation-harness), at any context-parallel degree."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import nn

from longspan.comm import World
from longspan.data.document import Document
from longspan.errors import ConfigError, EvaluationError
from longspan.evaluation.live import evaluate
from longspan.evaluation.metrics import EvaluationOptions
from longspan.resolve.planner_config import PlannerConfig

__all__ = ["LongspanLM"]

try:
    TemplateLM: Any = import_module("lm_eval.api.model").TemplateLM
except ImportError:
    TemplateLM = object


class LongspanLM(TemplateLM):
    """A prepared model as lm-eval's tasks call it: log-likelihoods of texts of any length, under any plan.

    >>> lm = LongspanLM(model, tokenizer, world, PlannerConfig.fixed(4))
    >>> results = lm_eval.simple_evaluate(lm, tasks=["lambada_openai", "wikitext"])     # every rank calls it

    Every rank gets all requests and all results. Texts are tokenized as by lm-eval's own `hf` models: `add_bos_token`
    (None: as the tokenizer does by itself) puts the beginning of text in front. A text is neither cut nor divided into
    windows: a rolling log-likelihood sees the whole document. Raises ConfigError where lm-eval is not installed,
    EvaluationError for tasks that generate, and what `evaluate` raises.
    """

    # These stand in place of properties of TemplateLM.
    eot_token_id: int | None = None
    prefix_token_id: int | None = None

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        world: World,
        choice: PlannerConfig,
        *,
        add_bos_token: bool | None = None,
    ) -> None:
        """Take a model of `prepare`, its transformers tokenizer, the world, and how requests are planned."""
        if TemplateLM is object:
            raise ConfigError("LongspanLM needs lm-eval, which is not installed: pip install 'longspan[lm-eval]'")
        super().__init__()
        self.tokenizer: Any = tokenizer
        self._model = model
        self._world = world
        self._choice = choice
        self._add_bos_token = add_bos_token
        beginning = tokenizer.bos_token_id
        self.eot_token_id = tokenizer.eos_token_id
        self.prefix_token_id = self.eot_token_id if beginning is None else beginning
        if self.prefix_token_id is None:
            raise ConfigError(
                "the tokenizer names neither a bos_token nor an eos_token, one of which stands before a text without "
                "context; set tokenizer.eos_token"
            )

    @property
    def tokenizer_name(self) -> str:
        """The name of the tokenizer, for lm-eval's caches of requests."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Tokenize a text; one that begins with the beginning of text already gets no second one.

        `add_special_tokens` (None: as the constructor's `add_bos_token` says) decides about it where it is given.
        """
        if add_special_tokens is None:
            add_special_tokens = self._add_bos_token
            if string.startswith(self.tokenizer.decode(self.prefix_token_id)):
                add_special_tokens = False
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer.encode(string, **options)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Write a conversation by the tokenizer's template."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text, behind the token that begins one."""
        token_requests = [(None, [self.prefix_token_id], self.tok_encode(request.args[0])) for request in requests]
        return [value for value, _ in self._loglikelihood_tokens(token_requests)]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Refuse tasks that generate."""
        raise EvaluationError(
            f"the task {requests[0].task_name} has its answers generated (generate_until), and longspan gives "
            "log-likelihoods alone; leave it out, or export the model and take lm-eval's model hf or vllm for it"
        )

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, Any, list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """A request is lm-eval's: its texts, which are not read here, ids of the context and ids of the
        continuation."""
        documents = [
            Document(context + continuation, loss_mask=[False] * len(context) + [True] * len(continuation))
            for _, context, continuation in requests
        ]
        options = EvaluationOptions(
            name="lm-eval",
            document_metrics={
                "likeliest": lambda x: (x.logits.argmax(-1) == x.targets, torch.ones_like(x.targets))
            },
        )
        evaluation = evaluate(self._model, documents, self._choice, self._world, options)
        pairs = zip(evaluation.document_losses, evaluation.document_metrics["likeliest"], strict=True)
        return [(-loss.sum, likeliest.sum == loss.count) for loss, likeliest in pairs]
